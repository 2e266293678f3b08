"""Models that were not written here have no finding: in float32, cast by hand, under autocast."""

import clean_models
import jax
import pytest
from clean_models import MODELS, OPTIMIZER, VARIANTS, training_step

import mpjax

QUICK = ("eqx_mlp", "linen_gru")


def as_param(name):
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough)


def lint(loss, params, batch, variant="", **options):
    # A step through float16 needs a loss scale.
    scale = 2.0**12 if " float16" in f" {variant}" else 1.0
    state = jax.eval_shape(OPTIMIZER.init, params)
    if options.get("run"):
        state = OPTIMIZER.init(params)
    return mpjax.lint(training_step(loss, scale), **options)(params, state, batch)


@pytest.mark.parametrize("name", [*map(as_param, MODELS)])
def test_a_training_step_of_others_is_clean(name):
    loss, params, batch = MODELS[name]()
    for variant, cast in VARIANTS.items():
        report = lint(cast(loss), params, batch, variant, run=False)
        assert not report.findings and report.ran, f"{variant}\n{report}"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["eqx_mlp", "eqx_attention", "hk_lstm", "linen_encoder"])
def test_a_real_step_and_its_compiled_form_are_clean(name):
    loss, params, batch = MODELS[name]()
    for variant, cast in VARIANTS.items():
        report = lint(cast(loss), params, batch, variant, run=True, target="cpu")
        assert not report.findings, f"{variant}\n{report}"
        assert {*report.not_run} == {"widened-matmul"}, "of a CPU it says nothing"


def test_clean_models_are_twelve_and_lint_finds_a_fault_in_them():
    assert len(MODELS) >= 12
    loss, params, _ = clean_models.eqx_mlp()

    def faulty(params, batch):
        return loss(params, batch) * jax.lax.reduce_sum(batch.astype("bfloat16"), (0, 1))

    assert [f.rule for f in lint(faulty, params, jax.numpy.ones((300, 8))).findings] == ["half-sum"]
