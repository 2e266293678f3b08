"""What a backward pass only computes again belongs to the forward pass: no rule takes it for a
gradient. A rule finds the gradient itself there."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
import recomputed
from recomputed import BUILT, FAULTS, LOSSES, W, X
from support import thorough_but

import mpjax

# The rules that ask for the backward pass, or for what comes from it.
ASKING = ["hidden-nonfinite", "late-scale", "narrow-backward", "recomputed-dtype", "half-sum"]
ASKING += ["promoted-matmul", "rounded-gradient", "cast-undone", "mask-overflow", "mixed-matmul"]
STEPS = {
    **{name: recomputed.step_of(loss) for name, loss in LOSSES.items()},
    **{f"{name}_alone": recomputed.alone(loss) for name, loss in LOSSES.items()},
}


@pytest.mark.parametrize(
    "name", thorough_but(STEPS, *LOSSES, "softplus_alone", "scan_alone", "eqx_loop_alone")
)
def test_what_is_computed_again_is_no_gradient(name):
    assert not mpjax.lint(STEPS[name], select=ASKING, run=False)(W, X).findings


@pytest.mark.parametrize(
    "name", thorough_but(LOSSES, "logaddexp", "where", "dots", "scan", "rule_inside", "shard_map")
)
def test_nor_in_the_gradients_of_lint_itself(name):
    assert not mpjax.lint(LOSSES[name], argnums=0, select=ASKING, run=False)(W, X).findings


@pytest.mark.parametrize("name", BUILT)
def test_nor_in_a_built_step(name):
    loss, policy = BUILT[name]
    step, state = recomputed.built(loss, policy)
    assert not mpjax.lint(step, select=ASKING, run=False)(state, X).findings


@pytest.mark.parametrize("name", FAULTS)
def test_what_hides_a_gradient_is_found_at_its_line(name):
    step, args = FAULTS[name]
    found = mpjax.lint(step, select=ASKING, run=False)(*args).findings
    rule = "late-scale" if name == "scaled_late" else "hidden-nonfinite"
    assert [f.rule for f in found] == [rule]
    lines, first = inspect.getsourcelines(step)
    fault = next(n for n, line in enumerate(lines, first) if "# fault" in line)
    assert found[0].source == f"{recomputed.__file__}:{fault}"


@pytest.mark.parametrize("cast", [jnp.float32, jnp.bfloat16])
def test_a_gradient_that_is_cast_is_one(cast):
    def step(w, x):
        g = jax.grad(LOSSES["softplus"])(w, x).astype(cast)
        return w - 0.1 * jnp.nan_to_num(g).astype(w.dtype)

    found = mpjax.lint(step, select="hidden-nonfinite", run=False)(W.astype("float16"), X).findings
    assert [f.rule for f in found] == ["hidden-nonfinite"]


def made_by_a_library():
    """Returns a step whose code, but for the loss, is that of mpjax and optax, and its state."""
    optimizer = optax.chain(optax.zero_nans(), optax.sgd(0.1))
    loss = recomputed.layers(jnp.tanh, lambda f: f)
    init, step = mpjax.build_train_step(loss, optimizer, "float32")
    return step, init(W)


def test_a_step_that_a_library_made_has_the_line_of_its_call():
    step, state = made_by_a_library()
    report = mpjax.lint(step, select="hidden-nonfinite", run=False)(state, X)  # the line
    (finding,) = report.findings
    lines, first = inspect.getsourcelines(inspect.currentframe())
    assert finding.source == f"{__file__}:{first + 2}" and "# the line" in lines[2]


def test_a_librarys_function_has_the_line_of_its_call_and_says_its_own():
    half = jax.ShapeDtypeStruct((8, 8), jnp.float16)
    finding = mpjax.lint(optax.tree.norm, select="half-norm")({"w": half}).findings[0]
    assert finding.source.startswith(f"{__file__}:") and "It is at optax/" in finding.message


def test_a_librarys_function_in_a_checkpoint_has_the_line_of_the_checkpoint():
    def step(tree):
        loss = lambda tree: jax.checkpoint(optax.tree.norm)(tree) * 2.0  # noqa: E731
        return jax.grad(loss)(tree)

    half = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float16)}
    found = mpjax.lint(step, select="half-norm", run=False)(half).findings
    assert {f.source for f in found} == {f"{__file__}:{step.__code__.co_firstlineno + 1}"}


def test_a_comment_silences_it_there():
    step, state = made_by_a_library()
    linted = mpjax.lint(step, select="hidden-nonfinite", run=False)
    report = linted(state, X)  # mpjax: ignore[hidden-nonfinite]
    assert not report.findings and len(report.suppressed) == 1
