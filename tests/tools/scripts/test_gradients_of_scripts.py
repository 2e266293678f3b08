"""What code differentiates is planned as if `mpjax.autocast` stood around it."""

import collections
import functools
import json
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import mpjax
import mpjax.scripts
from mpjax._src.core.planner import program
from mpjax._src.core.planner.program import Derivative

RNG = np.random.default_rng(0)
W, X = (jnp.asarray(RNG.standard_normal(s), jnp.float32) for s in ((8, 8), (4, 8)))
BF16 = "mixed_bfloat16"
quiet = functools.partial(mpjax.scripts.autocast_gradients, tell=False)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) @ w)


def with_aux(w, x):
    return loss(w, x), x @ w


@jax.custom_vjp
def ruled(w):
    return jnp.sum(w @ w)


def _ruled_forward(w):
    return ruled(w), jax.grad(lambda w: jnp.sum(w @ w))(w)


ruled.defvjp(_ruled_forward, lambda kept, ct: (ct * kept,))
MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharded = functools.partial(
    jax.shard_map, mesh=MESH, in_specs=(P(), P("data")), out_specs=P("data")
)


def _both_ways(forward, backward):
    out, kept = forward(W, X)
    return backward(kept, jnp.ones_like(out))


# Each takes a function that plans, which is the identity where a hook does it.
PROGRAMS = {
    "grad": lambda a: jax.grad(a(loss))(W, X),
    "argnums": lambda a: jax.value_and_grad(a(loss), argnums=(0, 1))(W, X),
    "aux": lambda a: jax.value_and_grad(a(with_aux), 1, has_aux=True)(W, X),
    "keyword": lambda a: jax.grad(fun=a(loss), argnums=0)(W, x=X),
    "partial": lambda a: functools.partial(jax.grad, argnums=1)(a(loss))(W, X),
    "vjp": lambda a: jax.vjp(a(loss), W, X)[1](1.0),
    "vjp_aux": lambda a: jax.vjp(a(with_aux), W, X, has_aux=True)[1](1.0),
    "fwd_and_bwd": lambda a: _both_ways(*jax.fwd_and_bwd(a(loss), argnums=(0, 1))),
    "linearize": lambda a: jax.linearize(a(loss), W, X)[1](W, X),
    "jacrev": lambda a: jax.jacrev(a(lambda w: jnp.tanh(X @ w).sum(0)))(W),
    "hessian": lambda a: jax.hessian(a(lambda s: loss(W * s[0], X)))(jnp.ones(2)),
    "hvp": lambda a: jax.jvp(lambda w: jax.grad(a(loss))(w, X), (W,), (W,)),
    "nested": lambda a: jax.grad(a(lambda w: jnp.sum(jax.grad(loss)(w, X) ** 2)))(W),
    "vmap_of_grad": lambda a: jax.vmap(jax.grad(a(loss)), (None, 0))(W, X[:, None]),
    "grad_of_vmap": lambda a: jax.grad(a(lambda w: jax.vmap(loss, (None, 0))(w, X[:, None]).sum()))(
        W
    ),
    "scan": lambda a: jax.lax.scan(
        lambda w, x: (w - jax.grad(a(loss))(w, x), None), W, jnp.stack([X, X])
    ),
    "checkpoint": lambda a: jax.grad(a(jax.checkpoint(loss)))(W, X),
    "custom_vjp": lambda a: jax.grad(a(ruled))(W),
    "jit_inside": lambda a: jax.grad(a(jax.jit(loss)))(W, X),
    "shard_map": lambda a: sharded(lambda w, x: jax.grad(a(loss), argnums=1)(w, x))(W, X),
    "pmap": lambda a: jax.pmap(lambda x: jax.grad(a(loss))(W, x))(jnp.stack([X, X])),
    "integers": lambda a: jax.grad(a(lambda n, w: loss(w[n], X)), argnums=1)(
        jnp.arange(1)[0], jnp.stack([W])
    ),
    "allow_int": lambda a: jax.grad(a(lambda n, w: loss(w * n, X)), argnums=(0, 1), allow_int=True)(
        2, W
    ),
    "holomorphic": lambda a: jax.grad(a(lambda z: jnp.sum(z @ z)), holomorphic=True)(W + 1j),
}


def text(run):
    return str(jax.make_jaxpr(run)())


QUICK = ("grad", "vjp_aux", "nested", "custom_vjp", "shard_map")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.thorough) for n in PROGRAMS]
)
def test_a_gradient_is_that_of_autocast_in_its_place(name):
    run = PROGRAMS[name]
    by_hand = functools.partial(run, lambda fun: mpjax.autocast(fun, BF16))
    unchanged = functools.partial(run, lambda fun: fun)
    plain, expected = text(unchanged), text(by_hand)
    with quiet() as report:
        assert text(unchanged) == expected
    assert ("bf16" in expected) == (name != "holomorphic")
    assert text(unchanged) == plain, "after the block all is as before"
    assert [row.planned for row in report.rows] == [True]
    # Other tests of this process may hold derivatives of their own.
    assert report.rows[0].calls == 1 and not [m for m in report.missed if __file__ in m]


def test_a_loop_plans_once_and_gives_the_same_bits(monkeypatch):
    made = []
    init = Derivative.__init__
    monkeypatch.setattr(
        Derivative, "__init__", lambda self, *args: made.append(self) or init(self, *args)
    )

    def loop(take):
        w, losses = W + 0, []
        for _ in range(3):
            value, gradient = take(w)
            w, losses = w - 0.1 * gradient, [*losses, value]
        return [np.asarray(x).tobytes() for x in (*losses, w)]

    def fresh(x):
        return jnp.mean(jnp.tanh(X @ x) @ jnp.sin(x))

    plain = loop(lambda w: jax.value_and_grad(fresh)(w))
    with quiet() as report:
        assert not made
        unchanged = loop(lambda w: jax.value_and_grad(fresh)(w))
        jax.make_jaxpr(jax.jit(lambda w: jax.value_and_grad(fresh)(w)))(W)
    assert len(made) == 1
    assert [row.calls for row in report.rows] == [3, 1]
    assert [row.programs for row in report.rows] == [1, 1]
    assert unchanged == loop(jax.value_and_grad(mpjax.autocast(fresh, BF16))) != plain
    with quiet("float32") as report:
        assert loop(lambda w: jax.value_and_grad(fresh)(w)) == plain
    assert report.rows[0].reason == "the policy is float32" and report.half_flops is None


@pytest.mark.thorough
def test_a_loop_is_that_of_mixed_precision_but_for_roundings_of_float32():
    adam = optax.adam(1e-2)
    gated = mpjax.mixed_precision(adam, BF16)

    def run(optimizer, gradient):
        @jax.jit
        def step(w, state):
            value, grads = gradient(state)(w, X)
            updates, state = optimizer.update(grads, state, w)
            return optax.apply_updates(w, updates), state, value

        w, state, losses = W, optimizer.init(W), []
        for _ in range(20):
            w, state, value = step(w, state)
            losses.append(float(value))
        return np.array(losses), np.asarray(w)

    by_hand = run(gated, lambda state: gated.value_and_grad(loss, state))
    with quiet():
        unchanged = run(adam, lambda state: jax.value_and_grad(loss))
    for one, other in zip(unchanged, by_hand, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_each_policy_has_its_own_trace_of_a_jit():
    traces = []

    @jax.jit
    def step(w):
        traces.append(mpjax.current_policy())
        return jax.grad(loss)(w, X)

    def half():
        return "bf16" in str(jax.make_jaxpr(step)(W))

    with quiet():
        assert half()  # before it is traced outside
    assert not half()
    for _ in range(2):
        with quiet():
            assert half()
            with quiet("float32"):
                assert not half()
        assert not half()
    with quiet(BF16 + ",storage=lean"):
        assert half()
    assert len(traces) == 4


@pytest.mark.thorough
def test_threads_plan_too():
    found = []
    step = jax.jit(jax.grad(loss))
    with quiet() as report:
        made = jax.jit(lambda w: jax.grad(loss)(w, X))
        threads = [
            threading.Thread(target=lambda: found.append(str(jax.make_jaxpr(made)(W))))
            for _ in range(2)
        ]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert all("bf16" in each for each in found) and len(found) == 2
    assert report.rows[0].planned and "derivative of loss" in " ".join(report.missed), step


def test_what_reads_values_runs_as_it_is_and_is_named(capsys):
    def branches(w):
        return loss(w, X) if w[0, 0] < 100 else jnp.sum(w)

    def prints(w, x):
        return loss(w, x) + len(f"{x[0, 0]:.3f}")  # a number, where JAX differentiates at values

    plain = [jax.grad(branches)(W)]
    early = jax.jit(jax.grad(lambda w: loss(w, X))).lower(W).compile()
    with mpjax.scripts.autocast_gradients() as report:
        late = jax.jit(jax.grad(loss)).lower(W, X).compile()
        same = [jax.grad(branches)(W) for _ in range(2)]
        with pytest.raises(jax.errors.TracerBoolConversionError):
            jax.jit(jax.grad(branches))(W)  # as without the block
        jax.grad(prints)(W, X)
        jax.jvp(loss, (W, X), (W, X))
        jax.grad(mpjax.autocast(loss))(W, X)
    assert all((plain[0] == each).all() for each in same)
    rows = {(row.transform, row.name): row for row in report.rows if not row.planned}
    assert len(rows) == 4 and all(row.calls for row in report.rows)
    said = capsys.readouterr().err
    twice = "(its first call was made twice): "
    assert f"not planned, it reads values of its arrays {twice}" in said and "branches (" in said
    assert f"not planned, it cannot be traced {twice}TypeError: unsupported format" in said
    assert "_lambda, compiled ahead of time\n" in said, (early, late)
    assert "not planned, forward mode alone is left as it is: loss (" in said
    assert "not planned, the script has mpjax compute it, under a policy of its own: loss (" in said


def test_a_function_is_called_as_often_as_without_a_plan():
    calls = []

    def reads(w):
        calls.append("reads")
        return loss(w, X) if loss(w, X) < 100 else jnp.sum(w)

    def raises(w):
        calls.append("raises")
        raise LookupError("own")

    def stops(w):
        if loss(w, X) < 100:  # its own error, which only values show
            raise StopIteration
        return loss(w, X)

    def grows(w):
        return jnp.dot(X, w.T[:3])  # an error of JAX, and the function's own

    with quiet() as report:
        for _ in range(3):
            jax.grad(reads)(W)
        for _ in range(2):
            for fun, kind in ((raises, LookupError), (stops, StopIteration), (grows, TypeError)):
                with pytest.raises(kind):
                    jax.grad(fun)(W)
        jax.jit(jax.grad(lambda w: loss(w, X)))(W)
    # The first call, which found it out, was done again; no later one.
    assert calls.count("reads") == 4 and calls.count("raises") == 2
    assert {row.name: row.calls for row in report.rows} == {"reads": 3, "stops": 2, "<lambda>": 1}


def test_an_object_that_hands_out_what_it_holds_can_be_called_again():
    class Once:  # as what Flax NNX differentiates
        def __init__(self):
            self.states = collections.deque([W])

        def __call__(self, w):
            out = loss(w, self.states.popleft())
            return out if out < 100 else jnp.sum(w)

    def in_another_way(w, held=[X]):  # noqa: B006
        x = held.pop()
        return loss(w, x) if loss(w, x) < 100 else -loss(w, x)

    with quiet():
        assert jax.grad(Once())(W).any()
        with pytest.raises(jax.errors.ConcretizationTypeError) as failed:
            jax.grad(library(in_another_way))(W)
    assert "IndexError: pop from empty list" in " ".join(failed.value.__notes__)


def library(fun):
    """Returns a function as if a library had defined it."""
    return types.FunctionType(
        fun.__code__.replace(co_filename=optax.__file__),
        fun.__globals__,
        None,
        fun.__defaults__,
        fun.__closure__,
    )


def test_what_checkify_looks_into_is_left_as_it_is():
    def small(w):
        checkify.check(jnp.all(w < 0), "large")
        return loss(w, X)

    step = jax.jit(lambda w: jax.grad(small)(w))
    nan = jax.jit(lambda w: jax.grad(lambda w: jnp.log(-jnp.sum((w @ w) ** 2)))(w))
    before = checkify.checkify  # is not found where it is called, but checks are
    with quiet() as report:
        for find in (checkify.checkify, before):
            assert find(step)(W)[0].get().startswith("large")
        assert "nan generated" in checkify.checkify(nan, checkify.float_checks)(W)[0].get()
        assert "bf16" in str(jax.make_jaxpr(nan)(W))
    left = [row for row in report.rows if not row.planned]
    reasons = {row.reason.partition(" (")[0] for row in left}
    assert reasons == {"checkify checks what it computes"} and len(left) == 3
    with pytest.raises(ValueError, match="The check at .*Apply it first"):
        jax.jit(jax.grad(mpjax.autocast(small)))(W)

    def checked(w):
        error, out = checkify.checkify(small)(w)
        return out, error

    assert jax.jit(jax.grad(mpjax.autocast(checked), has_aux=True))(W)[1].get()


@jax.custom_vjp
def scored(y, labels):
    return jnp.sum(y[jnp.arange(4), labels])


scored.defvjp(
    lambda y, labels: (scored(y, labels), (y, labels)),
    lambda kept, ct: (ct * jax.nn.one_hot(kept[1], 8), None),
)


def test_a_rule_may_branch_on_what_numpy_brings():
    @jax.custom_vjp
    def twice(y, k):
        return y * k

    twice.defvjp(lambda y, k: (y * k, k), lambda k, ct: (2 * ct if np.asarray(k) > 1 else ct, None))
    run = jax.grad(lambda w, k: twice(loss(w, X), k) * k)
    with quiet() as report:
        for k in np.linspace(0.5, 2, 4):
            gradient = jax.grad(lambda w, k: twice(loss(w, X), k) * k)(W, k)
            np.testing.assert_allclose(gradient, run(W, k), atol=0.05)
    assert report.rows[0].planned and report.rows[0].calls == 4


def test_numpy_arguments_of_a_gradient_stay_what_they_are(monkeypatch):
    seen = []

    def takes(w, x, big, labels, count):
        seen.append((type(x), type(big), labels.dtype.type, type(count)))
        factor = jnp.float32(big - 2.0**24) * x.mean() if count < 100 else 0.0
        return loss(w, x) * factor + big * scored(x @ w, labels), labels + 1

    made = []
    init = Derivative.__init__
    monkeypatch.setattr(
        Derivative, "__init__", lambda self, *args: made.append(self) or init(self, *args)
    )
    run = jax.grad(takes, has_aux=True)
    with quiet() as report:
        for i in range(4):
            x, labels, big = np.asarray(X) + i, np.arange(4) + i, np.float64(2.0**24 + 1 + i)
            gradient, aux = jax.grad(takes, has_aux=True)(W, x, big, labels, np.int32(i))
            assert aux.dtype == np.int64 and (aux == labels + 1).all()
            plain, _ = run(W, x, big, labels, np.int32(i))
            np.testing.assert_allclose(gradient / 2**24, plain / 2**24, atol=0.05)
    assert set(seen) == {(np.ndarray, np.float64, np.int64, np.int32)} and len(seen) == 8
    # One for the values of the first call, one that shows that any will do, and one for any.
    assert len(made) <= 3 and report.half_flops == 1


def test_the_report_says_what_runs_in_16_bits():
    def own_casts(w, x):
        half = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.sum(half @ w)

    def alone(w, x):
        return loss(w, 2 * x)

    def precise(w):
        return jnp.sum(jnp.dot(X, w, precision="highest"))

    with quiet() as report:
        assert "no function was differentiated" in report.summary()
        jax.grad(alone)(W, X)
        jax.grad(own_casts)(W, X)
        jax.grad(precise)(W)
        jax.grad(jnp.sin)(1.0)
    by_name = {row.name: row for row in report.rows}
    assert by_name["alone"].half_flops == 1 and by_name["alone"].half_before == 0
    # By w alone: two matmuls forward, and three backward.
    assert by_name["alone"].flops == 2 * 4 * 8 * 8 * 5
    assert by_name["own_casts"].half_before == 0.5
    assert by_name["precise"].half_flops == 0
    assert by_name["precise"].reason == "its matmuls ask for precision=HIGHEST"
    assert by_name["sin"].reason == "it has no matmul" and by_name["sin"].half_flops is None
    planned = sum(row.flops for row in report.rows)
    assert report.half_flops == pytest.approx(1 - by_name["precise"].flops / planned)
    said = report.summary()
    assert said.startswith("mpjax: 4 functions differentiated, 4 planned; ")
    assert "% of matmul FLOPs in bfloat16" in said
    assert "already in 16 bits as written (50% of matmul FLOPs): " in said
    assert json.loads(json.dumps(report.to_dict()))["rows"][0]["name"] == "alone"
    assert "own_casts" in str(report) and "GFLOPs" in str(report)


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        ("mixed_float16", "computes in float16, whose gradients need a loss scale"),
        (mpjax.get_policy(BF16).override({"head": "float16"}), "loss scale"),
        ("O2:bfloat16", "stores parameters in bfloat16.*keep their dtypes"),
        ("bf16", "stores parameters in bfloat16"),
        ("p=f32,c=bf16,o=bf16", "returns results in bfloat16"),
        ("mixed_bfloat", "Unknown policy 'mixed_bfloat'"),
    ],
)
def test_policies_that_change_more_than_gradients_are_refused(policy, match):
    with pytest.raises(ValueError, match=match):
        mpjax.scripts.autocast_gradients(policy)


def test_casts_at_the_boundary_keep_the_dtypes_of_a_script():
    with quiet("p=f32,c=bf16,o=f32") as report:
        value, gradient = jax.value_and_grad(loss)(W, X)
    assert value.dtype == gradient.dtype == jnp.float32 and report.half_flops == 1


def test_an_error_of_mpjax_is_told_from_one_of_the_script(monkeypatch):
    def wrong(w):
        raise KeyError("own")

    with pytest.raises(KeyError) as own, quiet():
        jax.grad(wrong)(W)
    assert not any("mpjax" in note for note in getattr(own.value, "__notes__", ()))
    monkeypatch.setattr(program, "joined", None)
    with pytest.raises(TypeError, match="not callable") as ours, quiet():
        jax.grad(lambda w: loss(jnp.cos(w), X))(W)
    assert "the script may run without mpjax" in " ".join(ours.value.__notes__)


def test_no_tracer_outlives_its_trace():
    w = jnp.ones((4, 4))
    with mpjax.scripts.autocast_gradients(tell=False), jax.check_tracer_leaks():
        jax.jit(jax.grad(lambda w: jnp.sum((w @ w) ** 2)))(w)
