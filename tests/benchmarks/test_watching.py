"""The suite "watching": the programs that it compiles are those that a loop runs."""

import jax.numpy as jnp

from benchmarks import watching


def test_a_step_that_is_not_sampled_is_the_step_itself():
    found = watching.steps(lambda state, batch: (state, {"loss": batch.astype(jnp.float16)}))
    plain, between, sampled = found.values()
    assert between is plain
    (_, metrics), precision = sampled(jnp.ones(3), jnp.ones(3))
    assert metrics["loss"].dtype == jnp.float16 and len(precision.rows) == 1
