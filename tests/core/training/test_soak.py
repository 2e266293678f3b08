"""NaN and Inf at every stage of a step, at random steps: nothing changes, and training goes on.

STEPS says how many steps are taken; `make soak` takes 10,000.
"""

import gc
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import bits, mesh
from support import thorough_but

import mpjax

STEPS = int(os.environ.get("STEPS", 250))
ROWS, MICRO_BATCHES, REPLICAS = 8, 2, 2
PARAMETERS = ("up", "bias", "down")
STAGES = ("none", "input", "loss", "model state", *PARAMETERS)
WRONG = (np.nan, np.inf, -np.inf)
# What a skipped step leaves as it was, to the bit.
KEPT = ("params", "opt_state", "model_state", "step")


@jax.custom_vjp
def spoil(w, wrong):
    """Returns ``w``; its gradient is spoiled."""
    return w


spoil.defvjp(
    lambda w, wrong: (w, wrong), lambda wrong, ct: (ct + wrong.astype(ct.dtype), 0 * wrong)
)


def loss_fn(params, batch, model_state):
    """A regression in which each row may say what goes wrong in its part of the batch."""

    def fault(stage):
        hit = batch["stage"] == STAGES.index(stage)
        return jnp.sum(jnp.where(hit, batch["wrong"], 0))

    params = {name: spoil(w, fault(name)) for name, w in params.items()}
    x = batch["x"] + fault("input")
    hidden = jax.nn.relu(x @ params["up"] + params["bias"])
    mean = 0.9 * model_state["mean"] + 0.1 * jnp.mean(hidden.astype(jnp.float32), 0)
    loss = jnp.mean((hidden @ params["down"] - batch["y"]).astype(jnp.float32) ** 2)
    return loss + fault("loss"), {"mean": mean + fault("model state")}


def initial():
    rng = np.random.default_rng(0)
    params = {
        "up": np.float32(rng.normal(size=(4, 32)) / 2),
        "bias": np.zeros(32, np.float32),
        "down": np.float32(rng.normal(size=(32, 1)) / 6),
    }
    return params, {"mean": np.zeros(32, np.float32)}


def batch_of(rng, stage="none"):
    """Returns a batch in which one row of one micro-batch of one replica is at fault, or none."""
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    stages, wrong = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.float32)
    row = rng.integers(ROWS)
    stages[row], wrong[row] = STAGES.index(stage), rng.choice(WRONG)
    return {"x": x, "y": np.tanh(x[:, :1] - x[:, 1:2]), "stage": stages, "wrong": wrong}


def trained(policy, stages, watch=None, faults=True):
    """Takes a step for each stage that goes wrong, or "none"; for these alone without faults."""
    init, step = mpjax.build_train_step(
        loss_fn,
        optax.adam(3e-3),
        policy,
        accumulate_steps=MICRO_BATCHES,
        axis_name="data",
    )
    step = jax.jit(
        jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P()),
        donate_argnums=0,
    )
    params, model_state = initial()
    state = jax.jit(init)(params, model_state)
    state = jax.device_put(state, NamedSharding(mesh(), P()))
    losses: list[float] = []
    for index, stage in enumerate(stages):
        if stage != "none" and not faults:
            continue
        batch = batch_of(np.random.default_rng(index), stage)
        before = {name: bits(getattr(state, name)) for name in KEPT} if stage != "none" else None
        state, metrics = step(state, batch)
        if before is None:
            losses.append(float(metrics["loss"]))
            assert metrics["grads_finite"] or policy.endswith("float16"), index
        else:
            assert {name: bits(getattr(state, name)) for name in KEPT} == before, (index, stage)
            told = {
                "loss": "loss_finite",
                "model state": "state_finite",
                "input": "loss_finite",
                **dict.fromkeys(PARAMETERS, "grads_finite"),
            }
            assert not metrics[told[stage]], (index, stage)
        if watch is not None:
            watch(index, step)
    return state, losses


def drawn(count):
    rng = np.random.default_rng(7)
    return [str(rng.choice(STAGES[1:])) if rng.random() < 0.2 else "none" for _ in range(count)]


class Watch:
    """Holds that there is one compilation, and that neither arrays nor memory grow."""

    def __init__(self, count):
        self.early, self.late, self.seen = count // 10, count - 1, []

    def __call__(self, index, step):
        if index in (self.early, self.late):
            gc.collect()
            memory = psutil.Process().memory_info().rss / 2**20
            self.seen.append((step._cache_size(), len(jax.live_arrays()), memory))

    def check(self):
        (programs, arrays, memory), (more, now, grown) = self.seen
        assert programs == more == 1
        # Looking at a state leaves some arrays behind; a step leaves none.
        assert now - arrays <= 50 < STEPS / 2 and grown - memory <= 32, self.seen


POLICIES = ["mixed_bfloat16", "O2:float16", "O2:bfloat16,masters=split"]


@pytest.mark.parametrize("policy", thorough_but(POLICIES, "mixed_bfloat16"))
def test_training_skips_faults_at_every_stage_and_still_learns(policy):
    stages = drawn(STEPS)
    assert {*stages} == {*STAGES}
    watch = Watch(STEPS)
    state, losses = trained(policy, stages, watch)
    watch.check()
    assert int(state.skipped_steps) >= sum(stage != "none" for stage in stages)
    if policy == "mixed_bfloat16":  # the clean run, which had the other batches alone
        assert int(state.step) == len(losses)
    assert np.mean(losses[-20:]) < 0.5 * np.mean(losses[:20])


def test_skipped_faults_leave_the_run_as_if_they_were_not_there():
    stages = drawn(STEPS // 2)
    state, losses = trained("mixed_bfloat16", stages)
    clean, good = trained("mixed_bfloat16", stages, faults=False)
    assert bits({name: getattr(state, name) for name in KEPT}) == bits(
        {name: getattr(clean, name) for name in KEPT}
    )
    assert losses == good
