"""The suite "watching": the programs that it compiles are those that a loop runs."""

import json

import jax.numpy as jnp

from benchmarks import RESULTS, watching


def test_watched_step_that_is_not_sampled_is_the_step_itself():
    found = watching.steps(lambda state, batch: (state, {"loss": batch.astype(jnp.float16)}))
    plain, between, sampled = found.values()
    assert between is plain
    (_, metrics), precision = sampled(jnp.ones(3), jnp.ones(3))
    assert metrics["loss"].dtype == jnp.float16 and len(precision.rows) == 1


def test_watching_results_are_within_their_limits():
    cases = json.loads((RESULTS / "watching.json").read_text())["cases"]
    assert {*cases} == {*watching.CASES}
    for rows in cases.values():
        between, sampled = (rows[f"watched, {kind}"] for kind in ("not sampled", "sampled"))
        assert between["bytes"] <= 1.01 and between["temp"] <= 1.02
        assert 1 < sampled["bytes"] <= 2
