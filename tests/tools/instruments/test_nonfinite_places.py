"""find_nonfinite says where what mpjax inserts overflows: its casts, loss scales and norms."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import thorough_but

import mpjax
from mpjax import find_nonfinite

W = np.ones((8, 8), np.float32)
PARAMS = {"w": W, "v": W, "stack": np.ones((3, 8, 8), np.float32)}
BATCH = {"x": np.ones((16, 8), np.float32), "y": np.zeros((16, 8), np.float32)}
F16 = "mixed_float16"


def loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["w"])
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2).astype(jnp.float32)


def scanned(params, batch):
    def body(h, w):
        return h @ w, None

    return jnp.mean(jax.lax.scan(body, batch["x"], params["stack"])[0])


def tabled(params, batch):
    return jnp.mean(params["w"][jnp.array([1, 0])] @ params["v"])


def summed(params, batch):
    return 1e30 * jnp.sum(params["w"]) * 1e9


def half_loss(params, batch):
    return loss(params, batch).astype(jnp.float16)


def line(fun, code):
    lines, first = inspect.getsourcelines(fun)
    return f"{__file__}:{first + next(i for i, each in enumerate(lines) if code in each)}"


def large(tree, name, at=(0, 0), by=1e6):
    array = tree[name].copy()
    array[at] = by
    return {**tree, name: array}


def in_step(fun, policy, params, batch, optimizer=None, scale=1.0, **settings):
    init, step = mpjax.build_train_step(fun, optimizer or optax.sgd(0.1), policy, **settings)
    state = init(params)
    if hasattr(state.loss_scale, "growth_factor"):
        state = dataclasses.replace(state, loss_scale=mpjax.DynamicLossScale(scale))
    return find_nonfinite(step, None, state, batch)


def of_loss(fun, policy, params, batch, scale=1.0):
    return find_nonfinite(fun, policy, params, batch, loss_scale=scale)


FIRST, SECOND = line(loss, 'params["w"]'), line(loss, 'params["v"]')
BIG, BIG_BATCH = large(PARAMS, "w"), large(BATCH, "x")
OFF = large(BATCH, "y", by=1e25)
UNSCALED = {**PARAMS, "w": W * 1e-12}
CAST = "The cast to float16 of "
HOW = {
    "op by op": lambda fun, *args: of_loss(fun, F16, *args),
    "lean": lambda fun, *args: of_loss(fun, f"{F16},storage=lean", *args),
    "8bit": lambda fun, *args: of_loss(fun, f"{F16},storage=8bit", *args),
    "remat": lambda fun, *args: of_loss(jax.checkpoint(fun), F16, *args),
    "autocast": lambda fun, *args: of_loss(mpjax.autocast(fun, F16), None, *args),
    "jit": lambda fun, *args: of_loss(jax.jit(mpjax.autocast(fun, F16)), None, *args),
    "step": lambda fun, *args: in_step(fun, F16, *args),
    "step of all": lambda fun, *args: in_step(fun, f"{F16},casting=boundary", *args),
    "micro-batches": lambda fun, *args: in_step(fun, F16, *args, accumulate_steps=2),
}


@pytest.mark.parametrize("how", thorough_but(HOW, "lean", "autocast"))
def test_cast_of_a_parameter_or_argument_names_it_and_what_reads_it(how):
    for params, batch, name in ((BIG, BATCH, "w"), (PARAMS, BIG_BATCH, "x")):
        report = HOW[how](loss, params, batch)
        said = f"{name}, read by dot_general, produced Inf in the forward pass, "
        assert report.headline.startswith(CAST) and said in report.headline
        assert report.source == FIRST and report.kind == "overflow"
        # It is not the user's, who can choose another policy.
        assert "The function itself casts" not in report.advice
        assert "mixed_bfloat16" in report.advice


@pytest.mark.parametrize("how", thorough_but(["op by op", "step"], "op by op"))
def test_cast_of_a_slice_or_of_rows_of_a_parameter_names_it(how):
    for fun, params, name, code in (
        (scanned, large(PARAMS, "stack", (1, 0, 0)), "stack", "h @ w"),
        (tabled, large(PARAMS, "w", (1, 0)), "w", "params["),
    ):
        report = HOW[how](fun, params, BATCH)
        assert f"{name}, read by dot_general, produced Inf" in report.headline
        assert report.source == line(fun, code)


def test_cast_of_a_result_names_the_operation_that_made_it():
    small = {**PARAMS, "w": W * 200}
    report = of_loss(loss, F16, small, {**BATCH, "x": BATCH["x"] * 200})
    assert report.headline.startswith(f"{CAST}the result of ")
    assert report.source in (FIRST, SECOND) and report.scope == ""


@pytest.mark.parametrize(
    ("find", "said", "source"),
    [
        # A gradient whose square is beyond float32, in the norm that the step computes.
        (lambda: in_step(loss, "mixed_bfloat16", PARAMS, OFF), "mul of the result of", SECOND),
        # The update makes a weight that its 16 bits cannot store.
        (
            lambda: in_step(loss, "O3:float16", PARAMS, BATCH, optax.sgd(1e5)),
            f"{CAST}the result of",
            None,
        ),
        # The loss scale is the cotangent of a float16 loss.
        (lambda: of_loss(half_loss, F16, PARAMS, BATCH, 2.0**16), CAST, None),
        # Unscaled, the gradient is beyond float32.
        (
            lambda: of_loss(summed, None, UNSCALED, BATCH, 2.0**-20),
            "div of the result of",
            line(summed, "return"),
        ),
    ],
)
def test_everything_inserted_has_a_place(find, said, source):
    report = find()
    assert report.headline.startswith(said), report.headline
    # Where no line of the user's is known, as of an update, it is the optimizer's.
    assert report.source and report.source == (source or report.source)
    assert report.about and not report.headline.endswith(", ")


def test_the_users_own_casts_and_operations_have_their_own_lines():
    def by_hand(params, batch):
        half = jax.tree.map(lambda x: x.astype(jnp.float16), (params, batch))
        return loss(*half).astype(jnp.float32)

    report = of_loss(by_hand, None, BIG, BATCH)
    assert report.about == "" and report.source == line(by_hand, "astype")
    assert report.headline.startswith("convert_element_type produced Inf in the forward pass")
    assert "The function itself casts to 16 bits here" in report.advice


def test_a_result_beyond_float32_is_no_division_of_zero_by_infinity():
    report = find_nonfinite(lambda x: x * x)(jnp.full(3, 1e30))
    assert (
        "beyond the largest number of float32" in report.advice and "0 * inf" not in report.advice
    )
    masked = find_nonfinite(lambda x, y: x * y)(jnp.zeros(3), jnp.full(3, np.inf))
    assert "0 * inf" in masked.advice


def picked(logits, labels):
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


def of_one_hot(logits, labels):
    chosen = jnp.sum(jax.nn.one_hot(labels, 8) * jax.nn.softmax(logits), axis=-1)
    return -jnp.mean(jnp.log(chosen))


@pytest.mark.parametrize("fun", thorough_but([picked, of_one_hot], picked))
def test_labels_out_of_range_are_named_where_they_make_nan(fun):
    labels = np.array([1, -100, 3])
    for policy in (None, "mixed_bfloat16"):
        report = find_nonfinite(fun, policy, W[:3], labels)
        said = "Index -100 is out of range of 8 (labels; 1 of 3 entries): "
        assert said in report.advice and "test_nonfinite_places.py:" in report.advice
        assert not find_nonfinite(fun, policy, W[:3], np.abs(labels) % 8)
    other = find_nonfinite(lambda x, labels: jnp.log(x[labels] - 1), None, W, np.array([1, 2]))
    assert other.found and "out of range" not in other.advice


def test_a_step_is_cured_by_no_loss_scale_that_it_never_uses():
    report = in_step(loss, "O3:float16", PARAMS, BATCH, optax.sgd(1e5))
    assert report.safe_loss_scale is None and "still NaN or Inf at 2^0" in report.advice
