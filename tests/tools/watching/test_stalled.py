"""The share of updates that rounding removed, for every way to keep weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import thorough_but

import mpjax

RATE = 2.0**-10  # of weights of 1, below half a unit of both halves, and above one of float32


def ones(size):
    return np.ones(size, np.float32)


def loss_fn(params, batch):
    return jnp.sum((params["w"] + 2 * params["norm"]).astype(jnp.float32) * batch)


def stalled(policy, params, batch, rate=RATE, steps=1, **arguments):
    init, step = mpjax.build_train_step(
        loss_fn, optax.sgd(rate), policy, report_stalled=True, **arguments
    )
    step, state = jax.jit(step, donate_argnums=0), jax.jit(init)(params)
    for _ in range(steps):
        state, metrics = step(state, batch)
    assert step._cache_size() == 1
    return metrics["stalled"]


SHARES = [
    ("O3:bfloat16", 1.0),
    ("O2:bfloat16", 0.0),
    ("O2:bfloat16,masters=split", 0.0),
    ("O2:bfloat16,masters=split8", 0.0),
    ("O3:bfloat16,rounding=kahan", 0.0),
    ("mixed_bfloat16", 0.0),
    ("float32", 0.0),
]


@pytest.mark.parametrize("policy, share", thorough_but(SHARES, 0, 2, 4, 5))
def test_stalled_reports_the_lost_share_of_each_parameter(policy, share):
    """`w` of 1 moves by less than half a unit of bfloat16; one of 2**-6 moves."""
    params = {"w": ones(8), "norm": np.float32(np.full(8, 2.0**-6))}
    found = stalled(policy, params, ones(8)).to_dict()
    assert found == {"w": share, "norm": 0.0}


def test_stalled_reports_updates_lost_in_float32_too():
    params = {"w": ones(8), "norm": ones(8)}
    assert stalled("float32", params, ones(8), 2.0**-26).to_dict() == {"w": 1, "norm": 1}


def test_stalled_does_not_count_updates_of_zero():
    params = {"w": np.float32([1.0, 1.0, 2.0**-7, 1.0]), "norm": ones(4)}
    batch = np.float32([1.0, 0.0, 1.0, 0.0])
    assert stalled("O3:bfloat16", params, batch).to_dict()["w"] == 0.5
    assert stalled("O3:bfloat16", params, np.zeros(4)).to_dict() == {"w": 0, "norm": 0}


def test_stalled_share_equals_numpy(rng):
    params = {"w": np.float32(rng.normal(size=512)), "norm": ones(512)}
    batch = np.float32(rng.normal(size=512))
    found = stalled("O3:bfloat16,casting=op", params, batch, 2.0**-7).to_dict()["w"]
    before = params["w"].astype(jnp.bfloat16)
    grad = batch.astype(jnp.bfloat16).astype(np.float32)
    after = (before.astype(np.float32) - np.float32(2.0**-7) * grad).astype(before.dtype)
    assert 0.05 < found < 0.95
    assert found == pytest.approx((after == before).mean(), abs=0.01)


def test_stalled_share_of_a_skipped_step_is_zero():
    params = {"w": ones(4), "norm": ones(4)}
    assert stalled("O3:bfloat16", params, np.full(4, np.nan)).to_dict() == {"w": 0, "norm": 0}


def test_warn_if_stalled_is_silent_on_stochastic_rounding(recwarn):
    params = {"w": ones(4096), "norm": ones(4096)}
    found = stalled("O3:bfloat16,rounding=stochastic", params, ones(4096))
    share = found.to_dict()["w"]
    assert 0.6 < share < 0.9  # of 2**-8, the distance to the next value below 1, a quarter
    mpjax.debug.warn_if_stalled({"stalled": found}, 0.1)
    assert not recwarn.list


def test_warn_if_stalled_names_norm_weights_that_stand_still():
    """The case that no tool tells: weights of exactly 1.0 after thousands of steps."""
    params = {"w": np.float32(np.full(8, 2.0**-6)), "norm": ones(8)}
    found = stalled("O3:bfloat16", params, ones(8), 2.0**-12, steps=3)
    with pytest.warns(UserWarning, match=r"not training: norm \(100%\).*masters=split"):
        mpjax.debug.warn_if_stalled({"stalled": found})
    assert "100.00%  norm" in str(found)
    # Kept in float32, it moves.
    policy = mpjax.get_policy("O3:bfloat16").override({"norm": "float32"})
    assert str(stalled(policy, params, ones(8), 2.0**-12)) == "No update was rounded away."


def test_stalled_is_logged_by_parameter(tmp_path):
    path, params = tmp_path / "run.jsonl", {"w": ones(4), "norm": ones(4)}
    with mpjax.debug.JsonLines(path) as log:
        mpjax.debug.log_metrics(log, 1, {"stalled": stalled("O3:bfloat16", params, ones(4))})
    assert json.loads(path.read_text())["stalled/w"] == 1.0


def test_stalled_works_with_micro_batches_and_replicas():
    params = {"w": ones(4), "norm": ones(4)}
    loss = lambda p, b: jnp.mean(b) * jnp.sum(p["w"] + 2 * p["norm"])  # noqa: E731
    init, step = mpjax.build_train_step(
        loss,
        optax.sgd(RATE),
        "O3:bfloat16",
        report_stalled=True,
        accumulate_steps=2,
        axis_name="data",
    )
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec(), check_vma=False
    )
    _, metrics = jax.jit(mapped)(init(params), jnp.ones((8, 4)))
    assert metrics["stalled"].to_dict() == {"w": 1, "norm": 1}


def test_stalled_refuses_bad_arguments():
    one = mpjax.reports.Stalled(jnp.zeros(1), ("w",))
    for limit in (0, 1.5, "half", None):
        with pytest.raises(ValueError, match="limit=.* must be a share"):
            mpjax.debug.warn_if_stalled({"stalled": one}, limit)
    for metrics in ({}, None, {"stalled": 1.0}):
        with pytest.raises(TypeError, match="report_stalled=True"):
            mpjax.debug.warn_if_stalled(metrics)
    with pytest.raises(ValueError, match=r"several steps or ensemble members, of shape \(2, 1\)"):
        mpjax.reports.Stalled(jnp.zeros((2, 1)), ("w",)).to_dict()
    with pytest.raises(ValueError, match="report_stalled='yes' must be True or False"):
        mpjax.build_train_step(loss_fn, optax.sgd(0.1), report_stalled="yes")
