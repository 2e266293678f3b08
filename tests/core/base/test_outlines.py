"""States print in 80 columns and 24 lines, whatever the size of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import thorough_but

import mpjax
import mpjax.linen
from mpjax._src.core.base.outlines import outline

LEAVES = {
    f"layer_{i}": {"kernel": np.ones((9, 70), np.float32), "bias": np.ones(9, np.float32)}
    for i in range(100)
}
PARAMS = mpjax.cast(LEAVES, "bfloat16")
OPTIMIZERS = {
    "skip": mpjax.optim.skip_nonfinite,
    "masters": mpjax.optim.with_master_weights,
    "kahan": mpjax.optim.with_kahan_summation,
    "8bit": mpjax.optim.with_8bit_moments,
    "stochastic": mpjax.optim.with_stochastic_rounding,
    "mixed": lambda inner: mpjax.mixed_precision(inner, "O3:float16"),
}


def fits(text):
    lines = text.splitlines()
    return len(lines) <= 24 and max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", thorough_but(OPTIMIZERS, "masters"))
def test_optimizer_states_print_within_a_screen(name):
    params = mpjax.cast(LEAVES, "float16") if name == "mixed" else PARAMS
    state = jax.eval_shape(OPTIMIZERS[name](optax.adamw(1e-3)).init, params)
    text = repr(state)
    assert fits(text) and text.startswith(f"{type(state).__name__}(")
    assert "mu=<200 leaves: 63,900 " in text


def test_train_states_print_within_a_screen():
    init, _ = mpjax.build_train_step(lambda p, b: 0.0, optax.adamw(1e-3), "O2:float16")
    state = jax.eval_shape(init, PARAMS, {"mean": np.ones(3)}, jax.random.key(0))
    text = repr(state)
    assert fits(text) and str(state) == text
    assert "params=<200 leaves: 63,900 float16>" in text and "model_state={'mean': f" in text

    class WithStatistics(mpjax.linen.TrainState):
        batch_stats: dict

    def create():
        made = {"apply_fn": print, "params": PARAMS, "tx": optax.adamw(1e-3)}
        return WithStatistics.create(**made, batch_stats={"mean": jnp.ones(3)})

    text = repr(jax.eval_shape(create))
    assert fits(text) and "apply_fn=print" in text and "batch_stats={'mean': float32[3]}" in text


def test_repr_of_loss_scales_shows_values_of_scalars():
    text = "DynamicLossScale(loss_scale=65536.0, growth_tracker=0, hysteresis_tracker=1)"
    assert repr(mpjax.DynamicLossScale()) == text
    assert "hysteresis=4" in repr(mpjax.DynamicLossScale(hysteresis=4))
    assert repr(mpjax.StaticLossScale(8.0)) == "StaticLossScale(loss_scale=8.0)"
    several = jax.vmap(lambda s: mpjax.StaticLossScale(s))(jnp.arange(1.0, 99))
    assert repr(several) == "StaticLossScale(loss_scale=float32[98])"
    seen = []
    jax.eval_shape(lambda s: seen.append(repr(s)), mpjax.StaticLossScale(8.0))
    assert seen == ["StaticLossScale(loss_scale=float32[])"]


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (None, "None"),
        ({}, "{}"),
        ((1, None), "(1, None)"),
        (dict.fromkeys("abcdefghi", 1.0), "<9 leaves: 9 float>"),
        (dict.fromkeys("abcdefghi"), "dict()"),
        ({"key": jax.random.key(0)}, "{'key': key<fry>[]}"),
        ("x" * 99, "'" + "x" * 76 + "..."),
    ],
)
def test_outline_shows_small_trees_and_summarizes_large_ones(tree, text):
    assert outline(tree) == text


def test_outline_of_a_deep_tree_fits_a_screen():
    tree = 0
    for _ in range(30):
        tree = (tree, "x" * 70)
    assert fits(outline(tree))
