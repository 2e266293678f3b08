"""What a plan costs. `test_golden` and the tests of each sweep check what it decides."""

import jax
import jax.numpy as jnp
from support import calls_of, normal

from mpjax._src.autocast.plan import make_plan
from mpjax._src.policy.grammar import get_policy


def test_planning_calls_few_functions_for_each_operation():
    def layers(count):
        def run(x, w):
            for _ in range(count):
                y = x @ w
                y = y - y.mean(-1, keepdims=True)
                y = y * jax.lax.rsqrt((y**2).mean(-1, keepdims=True) + 1e-5)
                x = jnp.maximum(y, 0) + x
            return x.sum()

        jaxpr = jax.make_jaxpr(run)(normal(0, 8, 16), normal(1, 16, 16))
        dtypes = [v.aval.dtype for v in jaxpr.jaxpr.invars]
        plan = lambda: make_plan(jaxpr.jaxpr, jaxpr.consts, get_policy("mixed_bfloat16"), dtypes)  # noqa: E731
        return len(plan().block.ops), calls_of(plan)

    (few, cheap), (many, dear) = layers(4), layers(12)
    assert dear - cheap <= 400 * (many - few)
