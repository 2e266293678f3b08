"""Random programs: autocast runs wherever the original runs, and stays within half's rounding.

The bound: a program of n operations, each of which at most passes on the error of its operands
scaled by a modest constant and adds one rounding, is off by at most a multiple of n roundings of
the largest value in it. Programs are built of operations whose derivative is at most about 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure import run
from programs import NOT_REVERSED, SHAPE, STEP, build

import mpjax

EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@pytest.mark.thorough
@given(
    st.lists(STEP, min_size=1, max_size=7),
    st.sampled_from(["bfloat16", "float16"]),
    st.integers(0, 99),
)
def test_random_programs_under_autocast_stay_within_half_rounding(steps, half, seed):
    fun = build(steps)
    rng = np.random.default_rng(seed)
    args = [jnp.asarray(rng.uniform(-1, 1, SHAPE), jnp.float32) for _ in range(2)]
    auto = mpjax.autocast(fun, f"mixed_{half}")
    want, got = run(lambda *args: (fun(*args), auto(*args)), *args)
    assert jax.tree.structure(want) == jax.tree.structure(got)
    unit = max(EPSILON[half], EPSILON["bfloat16"] if any(s[0] == "half" for s in steps) else 0)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert w.shape == g.shape and w.dtype == g.dtype
        bound = 8 * len(steps) * unit * max(1.0, np.max(np.abs(w)))
        assert np.max(np.abs(w - g)) <= bound
    if any(name in NOT_REVERSED for name, *_ in steps):
        return

    def loss(*args):
        return sum(jnp.mean(leaf) for leaf in jax.tree.leaves(auto(*args)))

    grads = run(jax.grad(loss, (0, 1)), *args)
    assert all(g.dtype == jnp.float32 and np.all(np.isfinite(g)) for g in grads)
