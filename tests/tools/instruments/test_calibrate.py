"""Tests of `calibrate`: programs whose values need float32, which no static plan can know."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import mpjax
from mpjax._src.core.planner import rounding
from mpjax._src.core.program.interpret import run
from mpjax._src.tools.instruments import calibrate
from tests.helpers.support import normal, thorough_but

T, D = 64, 32
TOLERANCE = 1e-2


@pytest.fixture(autouse=True)
def small_matmuls_round(monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)


X = normal(0, T, D)


def squares(names):
    return {name: normal(1 + i, D, D, scale=D**-0.5) for i, name in enumerate(names)}


def norm(h):
    h = h - h.mean(-1, keepdims=True)
    return h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-6)


def rows_that_are_one_hot():
    def loss(p, x):
        with jax.named_scope("scores"):
            scores = 4 * (x @ p["q"]) @ (x @ p["k"]).T
        with jax.named_scope("mix"):
            return jnp.mean((x + jax.nn.softmax(scores) @ (x @ p["v"])) ** 2)

    return loss, squares("qkv"), X


def what_is_one_matmul_before_such_rows():
    def loss(p, x):
        q, k = 4 * x @ p["q"], x @ p["k"]
        with mpjax.precision("float32"):
            scores = q @ k.T
        with jax.named_scope("mix"):
            return jnp.mean((x + jax.nn.softmax(scores) @ (x @ p["v"])) ** 2)

    return loss, squares("qkv"), X


def a_parameter_whose_mean_is_taken_off():
    def loss(p, x):
        with jax.named_scope("embed"):
            h = x @ p["w"]
        with jax.named_scope("head"):
            return jnp.mean(jnp.tanh(norm(h) @ p["v"]) ** 2)

    return loss, {**squares("v"), "w": 1 + normal(5, D, D, scale=0.02)}, 3 + X


def a_parameter_much_larger_than_its_matmul():
    def loss(p, x):
        with jax.named_scope("embed"):
            h = 0.1 * (x @ p["w"]) + p["bias"]
        with jax.named_scope("phase"):
            return jnp.mean(jnp.cos(h @ p["v"])) + jnp.mean(h**2) * 1e-6

    return loss, {**squares("wv"), "bias": normal(5, T, D, scale=100.0)}, X


def the_change_of_a_stream():
    def loss(p, x):
        h = first = x @ p["a"]
        for name in "bc":
            with jax.named_scope(f"block_{name}"):
                h = h + jnp.tanh(norm(h)) @ (0.01 * p[name])
        with jax.named_scope("head"):
            return jnp.mean((h @ p["v"] - first @ p["v"]) ** 2)

    return loss, squares("abcv"), X


def units_as_arguments():
    def loss(p, batch):
        x, unit = batch
        with jax.named_scope("physics"):
            force = (x * unit) @ p["w"]
        with jax.named_scope("head"):
            return jnp.mean(jnp.tanh(force / unit @ p["v"]) ** 2)

    return loss, squares("wv"), (X, jnp.float32(1e6))


CLASSES = {  # with the kinds of cause that they may have
    rows_that_are_one_hot: ("mixed_bfloat16", {"amplified"}),
    what_is_one_matmul_before_such_rows: ("mixed_bfloat16", {"amplified"}),
    a_parameter_whose_mean_is_taken_off: ("mixed_bfloat16", {"canceled"}),
    a_parameter_much_larger_than_its_matmul: ("mixed_bfloat16", {"amplified", "rounding"}),
    the_change_of_a_stream: ("mixed_bfloat16", {"canceled"}),
    units_as_arguments: ("mixed_float16", {"range"}),
}


def errors(loss, policy, *args):
    """Returns the relative errors of the loss and of each gradient."""
    wanted = jax.jit(jax.value_and_grad(loss))(*args)
    got = jax.jit(jax.value_and_grad(mpjax.autocast(loss, policy)))(*args)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs]


@pytest.mark.parametrize("make", thorough_but(CLASSES, the_change_of_a_stream))
def test_what_no_static_plan_knows_is_found_and_mended(make):
    (loss, *args), (policy, kinds) = make(), CLASSES[make]
    assert not max(errors(loss, policy, *args)) <= TOLERANCE
    found = mpjax.debug.calibrate(loss, policy, TOLERANCE)(*args)
    assert found.met and found.error <= TOLERANCE < found.before
    assert max(errors(loss, found, *args)) <= 1.5 * TOLERANCE
    assert {part.kind for part in found.parts} <= kinds
    # The cost is stated, and is not that of float32.
    assert found.seconds > 0 and 0 <= found.flops < 1
    assert found.target in str(found) and f"{found.before:.3g}" in str(found)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_values_of_common_size_need_nothing(policy, monkeypatch):
    monkeypatch.setattr(calibrate, "_gain", None)  # no cause is looked for

    def loss(p, x):
        nothing = jnp.sum(2 * x[:0])  # an array without entries
        return jnp.mean((jnp.tanh(x @ p["a"]) @ p["b"]) ** 2) + nothing

    found = mpjax.debug.calibrate(loss, policy, 0.02)(squares("ab"), X)
    assert found.policy == mpjax.get_policy(policy)
    assert not found.parts and found.met and found.flops == found.seconds == 0
    assert "nothing needs float32" in str(found)


@pytest.mark.parametrize(
    ("size", "moves"), [(20_000.0, True), (10_000.0, False), (1e-6, True), (1e-3, False)]
)
def test_values_near_an_end_of_the_range_are_in_float32(size, moves):
    def loss(p, x):
        with jax.named_scope("scaled"):
            h = (x * size) @ p["a"]
        return jnp.mean(jnp.tanh(h / size @ p["b"]) ** 2)

    p, x = {**squares("b"), "a": jnp.eye(D)}, jnp.sign(X)
    found = mpjax.debug.calibrate(loss, "mixed_float16", 0.1)(p, x)
    assert [part.kind for part in found.parts] == ["range"] * moves
    assert not moves or found.parts[0].pattern == "scaled/*"


def test_an_array_between_two_parts_costs_once():
    def loss(p, x):
        with jax.named_scope("first"):
            h = (x * 1e6) @ p["a"]
        with jax.named_scope("second"):
            h = h @ p["b"]
        return jnp.mean(jnp.tanh(h / 1e6))

    found = mpjax.debug.calibrate(loss, "mixed_float16", 0.1)(squares("ab"), X)
    assert [part.pattern for part in found.parts] == ["first/*", "second/*"]
    each = [part.seconds for part in found.parts]
    assert max(each) < found.seconds < sum(each)


def scaled(p, batch):
    """Each input is scaled by a number of its own, so each batch may need another part."""
    (x, one), (y, other) = batch
    with jax.named_scope("first"):
        h = (x * one) @ p["a"]
    with jax.named_scope("second"):
        g = (y * other) @ p["b"]
    return jnp.mean(jnp.tanh(h / one) + jnp.tanh(g / other))


def batches():
    one, large = jnp.float32(1), jnp.float32(1e6)
    return [((X, a), (X, b)) for a, b in ((large, one), (one, large))]


@pytest.mark.parametrize("join", ["as the policy", "by |"])
def test_calibrations_over_several_batches_join(join):
    p, (first, second) = squares("ab"), batches()
    found = mpjax.debug.calibrate(scaled, "mixed_float16")(p, first)
    assert [part.pattern for part in found.parts] == ["first/*"]
    start = found if join == "as the policy" else "mixed_float16"
    other = mpjax.debug.calibrate(scaled, start)(p, second)
    both = other if join == "as the policy" else found | other
    assert [part.pattern for part in both.parts] == ["first/*", "second/*"]
    assert both.batches == 2 and both.met
    assert both.seconds == pytest.approx(sum(part.seconds for part in both.parts))
    for batch in (first, second):
        assert max(errors(scaled, both, p, batch)) <= TOLERANCE
    with pytest.raises(TypeError):
        found | "mixed_float16"


@pytest.mark.thorough
def test_a_function_in_shard_map_is_calibrated():
    mesh = Mesh(jax.devices()[:2], ("data",))

    def loss(p, batch):
        def part(p, x, unit):
            with jax.named_scope("physics"):
                force = (x * unit) @ p["w"]
            with jax.named_scope("head"):
                return jax.lax.pmean(jnp.mean(jnp.tanh(force / unit @ p["v"]) ** 2), "data")

        specs = (PartitionSpec(), PartitionSpec("data"), PartitionSpec())
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(p, *batch)

    args = squares("wv"), (X, jnp.float32(1e6))
    found = mpjax.debug.calibrate(loss, "mixed_float16")(*args)
    assert [part.pattern for part in found.parts] == ["physics/*"]
    assert max(errors(loss, found, *args)) <= TOLERANCE


def test_explain_says_what_a_calibration_changed():
    loss, *args = units_as_arguments()
    found = mpjax.debug.calibrate(loss, "mixed_float16")(*args)
    told = mpjax.explain(loss, found, argnums=0)(*args)
    (part,) = found.parts
    reasons = [row.reason for row in told.rows if part.cause in row.reason]
    assert reasons and all(part.pattern in reason for reason in reasons)
    assert found.summary() in str(told).replace("\n    ", " ")
    assert not mpjax.explain(loss, found.policy)(*args).calibrated


def test_a_calibration_is_taken_wherever_a_policy_is():
    loss, *args = units_as_arguments()
    found = mpjax.debug.calibrate(loss, "mixed_float16")(*args)
    assert mpjax.get_policy(found) == found.policy == mpjax.get_policy(str(found.policy))
    init, step = mpjax.build_train_step(loss, optax.sgd(0.1), found)
    assert step(init(args[0]), args[1])[1]["grads_finite"]
    assert mpjax.debug.tune(loss, found, TOLERANCE)(*args).met


def test_wrong_settings_are_refused_before_anything_runs():
    loss, *_ = units_as_arguments()
    for settings, name in (
        ({"tolerance": -1}, "tolerance"),
        ({"max_runs": 1}, "max_runs"),
        ({"target": "abacus"}, "target"),
        ({"policy": "mixed_float17"}, "mixed_float17"),
    ):
        with pytest.raises(ValueError, match=name):
            mpjax.debug.calibrate(loss, **{"policy": "mixed_float16", **settings})


@pytest.mark.parametrize(
    ("fun", "ins", "low", "high"),
    [
        (jnp.exp, [[-50.0, 1.0]], 50, 50),
        (jnp.exp, [[-50.0, -1e9, -1e38]], 50, 50),  # what masks give has no error
        (jnp.sin, [[-50.0, 1.0]], 40, 80),
        (jnp.log, [[1e6, 2e6]], 0, 1),
        (lambda x: x**8, [[1e3, 2e3]], 7, 8.1),
        (jax.lax.sub, [[1e30, 2e30], [1.01e30, 2.01e30]], 100, 200),
        (jax.lax.dot, [[1e-9, 2e-9], [1e-9, 3e-9]], 0, 2),  # products are small, and do not cancel
        (jax.lax.dot, [[1.0, 1.0], [1.0, -0.99]], 1, 200),
        (jax.lax.dot, normal(0, 2, 64, 64), 1, 2),  # sums of random signs, of which some are small
        (jax.lax.linalg.cholesky, [[[1.0, 0.9999], [0.9999, 1.0]]], 20, math.inf),
    ],
)
def test_the_gain_of_an_operation_is_that_of_its_values(fun, ins, low, high):
    ins = [*map(jnp.array, ins)]
    names = ("exp", "sin", "log", "integer_pow", "sub", "dot_general", "cholesky")
    (eqn,) = (e for e in jax.make_jaxpr(fun)(*ins).eqns if e.primitive.name in names)
    assert low <= calibrate._gain(eqn, ins, run(eqn, ins)) <= high
