"""storage=NUMBER: lean's gradients from fewer bytes, within a budget, and few bytes moved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P
from models import MODELS
from programs import PROGRAMS, W, X
from support import equations, normal, thorough_but

import mpjax
from mpjax._src.autocast import budget, timeline
from mpjax._src.autocast.choice import choose
from mpjax._src.autocast.lean import checkpoints
from mpjax._src.autocast.plan import AGAIN, LEAN, _pick, analyze, make_plan, outline, store
from mpjax._src.autocast.schedule import ops_of
from mpjax._src.autocast.steps import WholeCheckpoint
from mpjax._src.base.dtypes import FLOAT32

BIG = normal(2, 64, 8)


def policy(storage):
    return mpjax.get_policy("mixed_bfloat16").replace(storage=storage)


def planned(fun, storage):
    return mpjax.autocast(fun, policy(storage))


def chain(w, x, layers=16):
    """Products with what a layer made: each needs its operand again."""
    for _ in range(layers):
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def scanned(w, x):
    def layer(x, _):
        y = jnp.tanh(x @ w) @ w
        return x + jnp.tanh(jnp.tanh(y @ w) @ w), None

    return jnp.mean(jax.lax.scan(layer, x, None, length=6)[0] ** 2)


def attention(w, x, layers=2):
    for _ in range(layers):
        q, k, v = (x @ (w * i) for i in (1, 2, 3))
        x = x + jax.nn.softmax(q @ k.T) @ v @ w
    return jnp.mean(x**2)


SUITE = {
    **{name: (fun, (W, X)) for name, fun in PROGRAMS.items()},
    "chain": (chain, (W, BIG)),
    "scanned": (scanned, (W, BIG)),
    "attention": (attention, (W, BIG)),
}
QUICK = ["chain", "scanned", "attention", "switch", "custom_vjp", "shard_mapped"]


def products(fun, *args):
    """Returns how many matmuls a gradient runs."""
    gradient = jax.make_jaxpr(jax.grad(fun))(*args)
    return sum(eqn.primitive.name == "dot_general" for eqn in equations(gradient))


def kept_bytes(fun, storage, *args):
    return mpjax.explain(fun, policy(storage), argnums=0)(*args).stored_after


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", thorough_but(SUITE, *QUICK))
def test_loss_is_that_of_lean_and_gradients_are_as_exact(name):
    fun, args = SUITE[name]
    found, lean = (
        jax.jit(jax.value_and_grad(planned(fun, storage), allow_int=True))(*args)
        for storage in (0.0, "lean")
    )
    np.testing.assert_allclose(found[0], lean[0], rtol=1e-6)
    exact = jax.jit(jax.grad(fun, allow_int=True))(*args)
    if exact.dtype == FLOAT32:
        errors = [np.linalg.norm(one[1] - exact) for one in (found, lean)]
        assert errors[0] <= 1.3 * errors[1] + 2**-7 * np.linalg.norm(exact), errors


@pytest.mark.parametrize("name", thorough_but(MODELS, "mixture of experts"))
def test_gradients_of_models_are_those_of_lean(name):
    loss, params = MODELS[name]()
    found, lean = (
        jax.jit(jax.value_and_grad(planned(loss, storage)))(params) for storage in (0.0, "lean")
    )
    np.testing.assert_allclose(found[0], lean[0], rtol=1e-6)
    size = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(lean[1])))
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(lean[1]), strict=True):
        assert np.linalg.norm(a - b) < 2**-6 * size


def test_matmuls_run_again_and_less_is_kept():
    for fun in (chain, scanned, attention):
        assert products(planned(fun, 0.0), W, BIG) > products(planned(fun, "lean"), W, BIG)
        assert kept_bytes(fun, 0.0, W, BIG) < kept_bytes(fun, "lean", W, BIG) * 0.7


def test_one_is_fast():
    assert policy(1) == policy("fast")


# ---- the budget ----------------------------------------------------------------------------------


def choices(fun):
    """Returns a function from a number to the moments of what it keeps, and those of lean."""
    outlined, tables = outline_of(fun)
    picked, block = {}, outlined.block
    _pick(block, tables, AGAIN, {*block.invars}, (), picked)
    parts = {inner: one.part for inner, one in picked.items()}
    prices = {b: dict(budget._prices(tables, part.steps)) for b, part in parts.items()}

    def moments(number):
        return [*timeline.moments(tables, block, budget.orders(kept(number), prices))]

    def kept(number):
        if number is not None:
            return budget.within(tables, block, parts, number, checkpoints)
        lean = {b: choose(tables, part) for b, part in parts.items()}
        return budget.Kept(lean, {b: checkpoints(tables, p, lean[b]) for b, p in parts.items()})

    return moments, timeline.peak(moments(None))


@pytest.mark.parametrize(("fun", "ways"), [(chain, 4), (scanned, 1), (attention, 2)])
def test_more_budget_moves_less_and_stays_within_it(fun, ways):
    moments, lean = choices(fun)
    least = timeline.peak(moments(0.0))
    moved = []
    for number in np.linspace(0, 0.99, 12):
        found = moments(number)
        assert timeline.peak(found) <= least + number * (lean - least)
        moved.append(sum(m.moved for m in found))
    assert moved == sorted(moved, reverse=True) and len({*moved}) >= ways


def test_of_candidates_that_move_as_much_the_one_with_the_least_memory_wins(monkeypatch):
    outlined, tables = outline_of(chain)
    picked, made = {}, []
    _pick(outlined.block, tables, AGAIN, {*outlined.block.invars}, (), picked)
    parts = {inner: one.part for inner, one in picked.items()}
    monkeypatch.setattr(budget, "orders", lambda kept, prices: made.append(kept))
    monkeypatch.setattr(
        budget, "moments", lambda *_: [timeline.Moment(100 - len(made), moved=len(made) == 1)]
    )
    found = budget.within(tables, outlined.block, parts, 0.99, checkpoints)
    assert len(made) > 2 and found is made[-1]


def test_groups_are_split_so_that_the_backward_pass_keeps_few_at_a_time():
    # Of n equal layers, the least is kept with about the root of n groups of as many.
    size = BIG.size * 2
    for layers in (16, 64):
        moments, lean = choices(functools.partial(chain, layers=layers))
        assert lean >= layers * size
        assert timeline.peak(moments(0.0)) <= (2 * layers**0.5 + 2) * size


def test_the_last_layers_are_not_repeated():
    # When the backward pass begins, all else is kept anyway.
    steps = steps_of(chain, 0.0)
    whole = [i for i, step in enumerate(steps) if isinstance(step, WholeCheckpoint)]
    later = [op for step in steps[whole[-1] + 1 :] for op in ops_of(step)]
    assert whole and sum(op.name == "dot_general" for op in later) >= 3


def steps_of(fun, storage):
    traced = jax.make_jaxpr(fun)(W, BIG)
    plan = make_plan(traced.jaxpr, traced.consts, policy(storage), [FLOAT32] * 2)
    return plan.analysis.steps[plan.block]


def test_what_a_loop_keeps_has_the_price_of_a_stack():
    moments, _ = choices(scanned)
    (loop,) = [moment for moment in moments(None) if moment.moved]
    # Each value is read and written twice: to the stack, and back.
    assert loop.moved == 4 * loop.kept


def outline_of(fun, w=W, x=BIG):
    """Returns a program as a plan, and its tables under lean."""
    traced = jax.make_jaxpr(fun)(w, x)
    outlined = outline(traced.jaxpr, traced.consts, policy("lean"))
    return outlined, store(outlined.block, analyze(outlined, [FLOAT32] * 2), LEAN, ())


@pytest.mark.parametrize(("inner", "bound"), [(8, "bytes"), (4096, "FLOPs")])
def test_a_product_has_the_price_of_its_bytes_or_its_flops(inner, bound):
    w, x = (jax.ShapeDtypeStruct(s, FLOAT32) for s in ((inner, 4096), (4096, inner)))
    outlined, tables = outline_of(lambda w, x: x @ w, w, x)
    ((_, each),) = budget._prices(tables, outlined.block.ops)
    (price,) = each.values()
    result = 4096 * 4096
    prices = {
        "bytes": 4 * (w.size + x.size + result),  # its result is returned in float32
        "FLOPs": 2 * result * inner // 256,
    }
    assert price == prices[bound] == max(prices.values())


# ---- what may not run twice ----------------------------------------------------------------------


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

    def exchanges(storage):
        gradient = jax.make_jaxpr(jax.grad(planned(loss, storage)))(W, BIG)
        return sum("all_gather" in eqn.primitive.name for eqn in equations(gradient))

    assert exchanges(0.0) == exchanges("lean") == 3
    tables = outline_of(loss)[1]
    ops = [op for steps in tables.steps.values() for step in steps for op in ops_of(step)]
    priced = {op.name for op, _ in budget._prices(tables, ops)}
    assert {"all_gather", "dot_general"} <= {op.name for op in ops}
    assert "dot_general" in priced and "all_gather" not in priced
    assert products(planned(loss, 0.0), W, BIG) > products(planned(loss, "lean"), W, BIG)


def test_effects_happen_once(capfd):
    def loss(w, x):
        for i in range(4):
            x = jnp.tanh(jnp.tanh(x @ w) @ w)
            if i == 1:
                jax.debug.print("here {}", x[0, 0])
        return jnp.mean(x**2)

    jax.block_until_ready(jax.jit(jax.grad(planned(loss, 0.0)))(W, BIG))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("here") == 1
    assert products(planned(loss, 0.0), W, BIG) > products(planned(loss, "lean"), W, BIG)


def test_dropout_masks_are_the_same_when_values_are_computed_again():
    def loss(w, x):
        for i in range(6):
            x = jnp.tanh(x @ w)
            x = jnp.where(jax.random.bernoulli(jax.random.key(i), 0.5, x.shape), 2 * x, 0) @ w
        return jnp.mean(x**2)

    found, lean = (jax.jit(jax.grad(planned(loss, s)))(W, BIG) for s in (0.0, "lean"))
    np.testing.assert_allclose(found, lean, rtol=2**-6, atol=2**-6 * np.abs(lean).max())


def test_the_users_own_checkpoints_stay():
    def loss(w, x):
        for _ in range(3):
            x = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))(w, x)
        return jnp.mean(x**2)

    number, lean = (planned(loss, storage) for storage in (0.0, "lean"))
    assert products(number, W, BIG) == products(lean, W, BIG)


# ---- what people see -----------------------------------------------------------------------------


def test_explain_tells_which_matmuls_are_computed_again():
    rows = mpjax.explain(chain, policy(0.0), argnums=0)(W, BIG).rows
    told = [row.storage for row in rows if row.primitive == "dot_general"][:16]
    assert {"computed again", "kept in bf16"} <= {*told}
    rows = mpjax.explain(attention, policy(0.0), argnums=0)(W, BIG).rows
    assert "computed again" in {row.storage for row in rows if row.primitive == "exp"}


# ---- transformations -----------------------------------------------------------------------------


DIRECTION = normal(9, 8, 8)
TRANSFORMED = {
    "vmap": lambda f: lambda w: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w]), BIG),
    "jvp": lambda f: lambda w: jax.jvp(lambda w: f(w, BIG), (w,), (DIRECTION,))[1],
    "linearize": lambda f: lambda w: jax.linearize(lambda w: f(w, BIG), w)[1](DIRECTION),
    "remat": lambda f: lambda w: jax.grad(jax.checkpoint(f))(w, BIG),
    "scan": lambda f: jax.grad(
        lambda w: jax.lax.scan(lambda c, _: (c + f(w, BIG), None), 0.0, None, length=2)[0]
    ),
    "cond": lambda f: jax.grad(lambda w: jax.lax.cond(w[0, 0] < 9, f, lambda *_: 0.0, w, BIG)),
    "twice": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, BIG) * DIRECTION)),
    "forward over reverse": lambda f: (
        lambda w: jax.jvp(lambda w: jax.grad(f)(w, BIG), (w,), (DIRECTION,))[1]
    ),
}


@pytest.mark.parametrize("name", thorough_but(TRANSFORMED, *{*TRANSFORMED} - {"twice"}))
@pytest.mark.parametrize("fun", thorough_but([chain, scanned, attention], attention))
def test_transformations(name, fun):
    transform = TRANSFORMED[name]
    found, lean, exact = (
        jax.jit(transform(f))(W) for f in (planned(fun, 0.0), planned(fun, "lean"), fun)
    )
    errors = [np.linalg.norm(one - exact) for one in (found, lean)]
    assert errors[0] <= 1.3 * errors[1] + 2**-7 * np.linalg.norm(exact), errors


def test_taylor_mode():
    series = [BIG / 9, jnp.zeros_like(BIG)]
    _, found = jet(lambda x: planned(chain, 0.0)(W, x), (BIG,), (series,))
    _, want = jet(lambda x: planned(chain, "lean")(W, x), (BIG,), (series,))
    np.testing.assert_allclose(found, want, rtol=1e-2, atol=1e-3)
