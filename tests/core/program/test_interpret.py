"""Random programs and whole models: instruments see the same program as jit does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MODELS
from programs import NOT_REVERSED, SHAPE, STEP, build

import mpjax
from mpjax._src.core.base import _jax
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.program.interpret import Plain, interpret, operations_in
from mpjax._src.tools.instruments.programs import make_program
from mpjax._src.tools.instruments.shadows import Comparer


def run_both(program):
    """Returns what a program gives when it is interpreted, in each precision, and compiled."""
    arrays = [jnp.asarray(x) for x in (*program.arrays, np.float32(1))]
    comparer = Comparer(program.lines)
    values = interpret(program.jaxpr, [comparer.constant(x) for x in arrays], comparer)
    compiled = jax.jit(lambda *xs: _jax.eval_closed(program.jaxpr, *xs))(*arrays)
    return values, compiled


@settings(max_examples=settings.default.max_examples // 3)
@given(st.lists(STEP, min_size=1, max_size=5), st.integers(0, 99))
def test_interpret_of_random_programs_matches_jit(steps, seed):
    fun = build(steps)
    rng = np.random.default_rng(seed)
    args = tuple(jnp.asarray(rng.uniform(-1, 1, SHAPE), jnp.float32) for _ in range(2))

    def loss(x, y):
        return sum(jnp.mean(leaf) for leaf in jax.tree.leaves(fun(x, y)))

    argnums = None if any(name in NOT_REVERSED for name, *_ in steps) else (0, 1)
    program = make_program("test", loss, get_policy("mixed_bfloat16"), args, {}, argnums, False)
    values, compiled = run_both(program)
    wanted = make_program("test", loss, get_policy("float32"), args, {}, argnums, False)
    float32 = jax.jit(lambda *xs: _jax.eval_closed(wanted.jaxpr, *xs))(*args, jnp.float32(1))
    unit = 2.0**-8 * 8 * len(steps)
    # What the function itself computes in half, no float32 run of it has.
    exact = not any(name in ("half", "nested") for name, *_ in steps)
    for value, a, w in zip(values, compiled, float32, strict=True):
        bound = unit * max(1.0, float(jnp.max(jnp.abs(w))))
        assert float(jnp.max(jnp.abs(value.array - a))) <= bound
        shadow = float(jnp.max(jnp.abs(value.shadow - w)))
        assert shadow <= (1e-4 if exact else bound)
    assert not mpjax.find_nonfinite(loss, "mixed_bfloat16", argnums=argnums)(*args)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_compare_and_find_nonfinite_of_models_match_jit(name):
    loss, params = MODELS[name]()
    compared = mpjax.compare(loss, "mixed_bfloat16")(params)
    auto = mpjax.autocast(loss, "mixed_bfloat16")
    want, got = jax.jit(lambda p: [jax.value_and_grad(fun)(p) for fun in (loss, auto)])(params)
    assert compared.results["loss"] == pytest.approx(
        float(abs(got[0] - want[0]) / abs(want[0])), abs=2.0**-7
    )
    assert len(compared.results) == 1 + len(jax.tree.leaves(want[1]))
    assert any(r.backward for r in compared.rows)
    assert all(r.source for r in compared.rows)
    assert not mpjax.find_nonfinite(loss, "mixed_float16", loss_scale=8.0)(params)


def test_operations_in_counts_what_interpret_runs():
    def fun(x, n):
        x = jax.lax.cond(n > 0, jnp.sin, lambda x: jnp.cos(x) * 2, x)
        x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, 3)
        return jax.jit(jnp.exp)(x)

    class Counter(Plain):
        def __init__(self):
            self.count = 0

        def operation(self, eqn, ins, place):
            self.count += 1
            return Plain.operation(eqn, ins, place)

    jaxpr, counter = jax.make_jaxpr(fun)(1.0, 0), Counter()
    interpret(jaxpr, [jnp.float32(1), jnp.int32(0)], counter)
    assert operations_in(jaxpr) == counter.count >= 6
