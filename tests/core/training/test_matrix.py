"""Every loss scale with every policy and every optimizer: trains, recovers, never recompiles."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import thorough_but

import mpjax

SCALES = {
    "none": lambda: mpjax.NoOpLossScale(),
    "static": lambda: mpjax.StaticLossScale(2.0**7),
    "dynamic": lambda: mpjax.DynamicLossScale(2.0**10, growth_interval=4, max_scale=2.0**10),
}
POLICIES = [
    *("float32", "mixed_bfloat16", "mixed_float16"),
    *("O2:bfloat16", "O2:float16", "O3:bfloat16", "O3:float16"),
]
# What is kept for each weight does not touch the loss scale: one of them will do.
KEPT = [
    *("O2:bfloat16,masters=split", "O2:bfloat16,masters=split8"),
    *("O3:bfloat16,rounding=stochastic", "O3:float16,rounding=kahan"),
]
COMBINED = [(scale, policy) for policy in POLICIES for scale in SCALES]
COMBINED += [("dynamic", policy) for policy in KEPT]
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "lion": lambda: optax.lion(3e-3),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-2, 3, 40)),
    ),
}
STEPS, BAD = 20, 7
# Every policy, loss scale and optimizer once. What is kept beside weights: test_split_masters.py.
QUICK = [
    ("none", "float32", "sgd"),
    ("dynamic", "mixed_bfloat16", "adamw"),
    ("dynamic", "mixed_float16", "chain"),
    ("none", "O2:bfloat16", "lion"),
    ("dynamic", "O2:float16", "adafactor"),
    ("static", "O3:bfloat16", "lamb"),
    ("dynamic", "O3:float16", "sgd"),
]
ALL = [(*combined, optimizer) for combined in COMBINED for optimizer in OPTIMIZERS]


def loss_fn(params, batch):
    x, y = batch
    hidden = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    hidden = hidden * params["norm"]["scale"]
    return jnp.mean(((hidden @ params["out"]["kernel"])[:, 0] - y).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("scale, policy, optimizer", thorough_but(ALL, *QUICK))
def test_train_step_learns_and_skips_the_bad_batch_in_each_combination(
    scale, policy, optimizer, rng
):
    draw = lambda *shape: np.float32(rng.normal(size=shape) / np.sqrt(shape[0]))  # noqa: E731
    params = {
        "hidden": {"kernel": draw(4, 16), "bias": np.zeros(16, np.float32)},
        "norm": {"scale": np.ones(16, np.float32)},
        "out": {"kernel": draw(16, 1)},
    }
    x = 2 * draw(32, 4)
    spoiled = x.copy()
    spoiled[0, 0] = np.nan
    batch, bad = (x, x[:, 0] + 1), (spoiled, x[:, 0] + 1)
    init, step = mpjax.build_train_step(
        loss_fn, OPTIMIZERS[optimizer](), policy, loss_scale=SCALES[scale]()
    )
    init, step = jax.jit(init), jax.jit(step, donate_argnums=0)

    state, expected, losses = init(params), init(params), []
    for number in range(STEPS):
        if number == BAD:
            state, metrics = step(state, bad)
            assert not metrics["loss_finite"] and int(metrics["consecutive_skips"]) == 1
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        # The same run without the bad batch: neither schedule nor moments may notice.
        expected, _ = step(expected, batch)

    assert step._cache_size() == 1
    assert losses[-1] < losses[0]
    assert int(state.step) == STEPS and int(state.skipped_steps) == 1
    assert bool(mpjax.all_finite((state.params, state.opt_state)))
    for name in ("params", "opt_state", "loss_scale", "step"):
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)),
            getattr(state, name),
            getattr(expected, name),
        )
