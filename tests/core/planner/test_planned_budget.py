"""A number as storage: matmuls run again, in turns, within what exists at most; numbers stay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P
from joint import planned
from models import MODELS
from support import equations, normal, thorough_but

import mpjax
from mpjax._src.core.planner import budget, program

W, X = normal(0, 32, 32, scale=0.3), normal(1, 64, 32)
SIZE = 2 * X.size  # bytes of a 16-bit array


def chain(w, x, layers=16):
    for _ in range(layers):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def residual(w, x, layers=6):
    for _ in range(layers):
        x = x + jnp.tanh(jnp.tanh(x @ w) @ w) @ w
    return jnp.mean(x**2)


def scanned(w, x):
    body = lambda c, _: (c + jnp.tanh(jnp.tanh(c @ w) @ w) @ w, None)  # noqa: E731
    return jnp.mean(lax.scan(body, x, length=6)[0] ** 2)


def mapped(w, x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(chain, mesh=mesh, in_specs=(spec, spec), out_specs=spec)(w, x)


def dropped(w, x):
    for i in range(6):
        x = jnp.tanh(x @ w)
        x = jnp.where(jax.random.bernoulli(jax.random.key(i), 0.5, x.shape), 2 * x, 0) @ w
    return jnp.mean(x**2)


PROGRAMS = {
    "chain": chain,
    "residual": residual,
    "scanned": scanned,
    "mapped": mapped,
    "dropped": dropped,
    "cond": lambda w, x: lax.cond(x[0, 0] < 9, chain, lambda *_: 0.0, w, x),
}


def matmuls(fun):
    gradient = jax.make_jaxpr(jax.grad(fun))(W, X)
    return sum(eqn.primitive.name == "dot_general" for eqn in equations(gradient))


@pytest.mark.parametrize("name", thorough_but(PROGRAMS, "chain", "scanned", "dropped", "cond"))
def test_matmuls_run_again_and_no_number_changes(name):
    lean, least = (planned(PROGRAMS[name], storage=s) for s in ("lean", 0.0))
    assert matmuls(least) > matmuls(lean)
    found, want = (jax.jit(jax.grad(f))(W, X) for f in (least, lean))
    # Another fusion may round another last bit before a matmul rounds it to 16 bits.
    np.testing.assert_allclose(found, want, atol=2**-8 * np.abs(want).max())


@pytest.mark.parametrize("name", thorough_but(["chain", "residual"], "residual"))
def test_operation_by_operation_no_bit_changes(name):
    found = []
    for storage in ("lean", 0.0):
        gradient = jax.make_jaxpr(jax.grad(planned(PROGRAMS[name], storage=storage)))(W, X)
        with jax.disable_jit():
            found += jax.core.eval_jaxpr(gradient.jaxpr, gradient.consts, W, X)
    np.testing.assert_array_equal(*found)


@pytest.fixture
def plans(monkeypatch):
    """The plans that are looked at, and the last of them is `lean`'s first."""
    seen = []
    plan = budget.Budget._plan
    monkeypatch.setattr(budget.Budget, "_plan", lambda *a: seen.append(plan(*a)) or seen[-1])
    return seen


def kept(fun, storage, monkeypatch):
    """Returns what is handed over."""
    with monkeypatch.context() as patch:
        found = []
        hand = program.Derivative._hand_over
        patch.setattr(
            program.Derivative, "_hand_over", lambda self: (hand(self), found.append(self))
        )
        jax.eval_shape(jax.grad(planned(fun, storage=storage)), W, X)
    return sum(
        v.size * (2 if low else 4) for v, low in zip(found[0].saved, found[0]._low, strict=True)
    )


def test_more_budget_keeps_more_and_computes_less_again(monkeypatch):
    numbers = (0.0, 0.25, 0.5, 0.75, 0.99)
    counts = [matmuls(planned(chain, storage=n)) for n in numbers]
    assert counts == sorted(counts, reverse=True) and len({*counts}) >= 4
    sizes = [kept(chain, n, monkeypatch) for n in numbers]
    assert sizes == sorted(sizes) and sizes[-1] <= kept(chain, "lean", monkeypatch)


@pytest.mark.parametrize("layers", [16, 64])
def test_what_is_computed_again_at_once_is_split(layers, plans):
    """Of n equal layers, the least is kept with about the root of n groups of as many."""
    fun = functools.partial(chain, layers=layers)
    jax.eval_shape(jax.grad(planned(fun, storage=0.0)), W, X)
    assert plans[0].again.peak >= layers * SIZE
    assert min(p.again.peak for p in plans) <= (2 * layers**0.5 + 2) * SIZE + layers * 4 * W.size


def test_a_residual_stream_is_kept_between_groups(plans):
    """Else all that was ever added to it would be computed again for the last layer."""
    jax.eval_shape(jax.grad(planned(functools.partial(residual, layers=16), storage=0.0)), W, X)
    assert min(p.again.peak for p in plans) < 0.7 * plans[0].again.peak


def test_each_group_waits_for_a_cotangent():
    gradient = jax.make_jaxpr(jax.grad(planned(chain, storage=0.0)))(W, X)
    held = [e for e in equations(gradient) if e.primitive.name == "optimization_barrier"]
    # What matmuls read and what the rest does each have a group that is read before any cotangent.
    assert len(held) > 12 and sum(len(e.invars) == 1 for e in held) <= 2


def test_the_users_checkpoints_stay():
    def fun(w, x):
        for _ in range(3):
            x = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))(w, x)
        return jnp.mean(x**2)

    assert matmuls(planned(fun, storage=0.0)) == matmuls(planned(fun, storage="lean"))


@pytest.mark.parametrize("inner, bound", [(8, "bytes"), (4096, "flops")])
def test_a_matmul_has_the_price_of_its_bytes_or_of_its_flops(inner, bound, monkeypatch):
    prices = []
    price = budget._price
    monkeypatch.setattr(budget, "_price", lambda *a: prices.append(price(*a)) or prices[-1])
    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((inner, 4096), (4096, inner)))
    fun = planned(lambda w, x: jnp.tanh(x @ w).sum(), storage=0.5)
    jax.eval_shape(jax.grad(fun), *shapes)
    flops = 2 * 4096**2 * inner // budget.FLOPS_PER_BYTE
    assert (flops in prices) == (bound == "flops") and min(prices) >= 2 * 4096**2


# ---- under a policy -----------------------------------------------------------------------------


def policy(storage):
    return mpjax.get_policy("mixed_bfloat16").replace(storage=storage)


def auto(fun, storage):
    return mpjax.autocast(fun, policy(storage))


def attention(w, x, layers=2):
    for _ in range(layers):
        q, k, v = (x @ (w * i) for i in (1, 2, 3))
        x = x + jax.nn.softmax(q @ k.T) @ v @ w
    return jnp.mean(x**2)


@pytest.mark.parametrize("fun", thorough_but([chain, scanned, attention], 0, 1))
def test_explain_tells_that_less_is_kept_and_which_matmuls_run_again(fun):
    number, lean = (mpjax.explain(fun, policy(s), argnums=0)(W, X) for s in (0.0, "lean"))
    assert number.stored_after < 0.7 * lean.stored_after
    rows = [row for row in number.rows if row.primitive == "dot_general"]
    told = [row.storage for row in rows if not row.reason.startswith("backward")]
    assert any(text.startswith("computed again") for text in told)
    # When the backward pass begins, most else is kept anyway.
    assert fun is not chain or sum(text.startswith("kept") for text in told[-3:]) > 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_models_are_those_of_lean(name):
    loss, params = MODELS[name]()
    found, lean = (
        jax.jit(jax.value_and_grad(auto(loss, storage)))(params) for storage in (0.0, "lean")
    )
    np.testing.assert_allclose(found[0], lean[0], rtol=1e-6)
    size = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(lean[1])))
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(lean[1]), strict=True):
        assert np.linalg.norm(a - b) < 2**-6 * size


def test_devices_communicate_as_often():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x):
        def part(w, x):
            for _ in range(3):  # what was gathered is larger than what is sent
                for _ in range(3):
                    x = jnp.tanh(x @ w) @ w
                gathered = jax.lax.all_gather(x, "i", tiled=True)
                x = jnp.tanh(x + (gathered @ gathered.T)[: x.shape[0], : x.shape[1]])
            return jax.lax.pmean(jnp.mean(x**2), "i")

        return jax.shard_map(part, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())(w, x)

    counts = []
    for storage in (0.0, "lean"):
        gradient = jax.make_jaxpr(jax.grad(auto(loss, storage)))(W, jnp.ones((512, 32)))
        names = [eqn.primitive.name for eqn in equations(gradient)]
        assert sum("all_gather" in name for name in names) == 3
        counts.append(names.count("dot_general"))
    assert counts[0] > counts[1]


def test_effects_happen_once(capfd):
    def loss(w, x):
        for i in range(4):
            x = jnp.tanh(jnp.tanh(x @ w) @ w)
            if i == 1:
                jax.debug.print("here {}", x[0, 0])
        return jnp.mean(x**2)

    jax.block_until_ready(jax.jit(jax.grad(auto(loss, 0.0)))(W, X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("here") == 1
    assert matmuls(auto(loss, 0.0)) > matmuls(auto(loss, "lean"))


DIRECTION = normal(9, 32, 32)
TRANSFORMED = {
    "vmap": lambda f: lambda w: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w]), X),
    "jvp": lambda f: lambda w: jax.jvp(lambda w: f(w, X), (w,), (DIRECTION,))[1],
    "linearize": lambda f: lambda w: jax.linearize(lambda w: f(w, X), w)[1](DIRECTION),
    "remat": lambda f: lambda w: jax.grad(jax.checkpoint(f))(w, X),
    "scan": lambda f: jax.grad(
        lambda w: jax.lax.scan(lambda c, _: (c + f(w, X), None), 0.0, None, length=2)[0]
    ),
    "cond": lambda f: jax.grad(lambda w: jax.lax.cond(w[0, 0] < 9, f, lambda *_: 0.0, w, X)),
    "twice": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, X) * DIRECTION)),
    "forward over reverse": lambda f: (
        lambda w: jax.jvp(lambda w: jax.grad(f)(w, X), (w,), (DIRECTION,))[1]
    ),
}


@pytest.mark.parametrize("name", thorough_but(TRANSFORMED, "vmap", "scan"))
@pytest.mark.parametrize("fun", thorough_but([chain, scanned, attention], attention))
def test_transformations(name, fun):
    transform = TRANSFORMED[name]
    found, lean, exact = (
        jax.jit(transform(f))(W) for f in (auto(fun, 0.0), auto(fun, "lean"), fun)
    )
    errors = [np.linalg.norm(one - exact) for one in (found, lean)]
    assert errors[0] <= 1.3 * errors[1] + 2**-7 * np.linalg.norm(exact), errors


def test_taylor_mode():
    series = [X / 9, jnp.zeros_like(X)]
    _, found = jet(lambda x: auto(chain, 0.0)(W, x), (X,), (series,))
    _, want = jet(lambda x: auto(chain, "lean")(W, x), (X,), (series,))
    np.testing.assert_allclose(found, want, rtol=1e-2, atol=1e-3)
