"""Random programs: autocast runs wherever the original runs, and stays within half's rounding.

The bound: a program of n operations, each of which at most passes on the error of its operands
scaled by a modest constant and adds one rounding, is off by at most a multiple of n roundings of
the largest value in it. Programs are built of operations whose derivative is at most about 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import mpjax

SHAPE = (4, 4)
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def mix(x, y):
    """A matmul whose result is no larger than its operands."""
    return x @ jnp.tanh(y) / 4


@jax.custom_jvp
def ruled(x):
    return jnp.sin(x)


ruled.defjvp(lambda primals, tangents: (ruled(*primals), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def both_ruled(x, y):
    return mix(x, y)


both_ruled.defvjp(lambda x, y: (mix(x, y), (x, y)), lambda res, g: jax.vjp(mix, *res)[1](g))

UNARY = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x) / 2,
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True),
    "mean": lambda x: x - x.mean(0),
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(2, 8)[:, ::-1].reshape(SHAPE),
    "gather": lambda x: x[jnp.array([3, 1, 1, 0])],
    "sort": lambda x: jnp.sort(x, -1),
    "pad": lambda x: jnp.pad(x, 1)[1:-1, :-2],
    "cumsum": lambda x: jnp.cumsum(x, -1) / 4,
    "masked": lambda x: jax.nn.softmax(jnp.where(jnp.tri(4) > 0, x, -1e9)),
    "integers": lambda x: x + jnp.arange(4) / 4,
    "half": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "jit": jax.jit(lambda x: jnp.tanh(mix(x, x))),
    "remat": jax.checkpoint(lambda x: jnp.tanh(mix(x, x))),
    "vmap": jax.vmap(lambda row: jnp.tanh(row) * row.mean()),
    "scan": lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0], x)[1],
    "matmul scan": lambda x: lax.scan(lambda c, _: (jnp.tanh(mix(c, x)), None), x, None, length=3)[
        0
    ],
    "fori": lambda x: lax.fori_loop(0, 3, lambda i, c: mix(c, x) + c / 2, x),
    "while": lambda x: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, mix(c[1], x)), (0, x)
    )[1],
    "cond": lambda x: lax.cond(jnp.array(True), lambda x: mix(x, x), jnp.exp, x),
    "switch": lambda x: lax.switch(1, [jnp.exp, jnp.tanh, jnp.sin], x),
    "custom_jvp": ruled,
    "region": mpjax.full_precision(lambda x: mix(x, x)),
    "nested": mpjax.autocast(lambda x: mix(x, x), "mixed_float16"),
}
BINARY = {
    "add": lambda x, y: (x + y) / 2,
    "sub": lambda x, y: (x - y) / 2,
    "mul": lambda x, y: jnp.tanh(x) * jnp.tanh(y),
    "max": jnp.maximum,
    "where": lambda x, y: jnp.where(jnp.tri(4) > 0, x, y),
    "concatenate": lambda x, y: jnp.concatenate([x, y], 1)[:, ::2],
    "matmul": mix,
    "custom_vjp": both_ruled,
    "update": lambda x, y: x.at[1:3].set(y[:2]),
}
STEP = st.tuples(
    st.sampled_from([*UNARY, *BINARY]), st.integers(0, 7), st.integers(0, 7), st.booleans()
)
NOT_REVERSED = {"while"}


def build(steps):
    """Returns a function of two arrays, from steps that each add a value to a list."""

    def fun(x, y):
        values, results = [x, y], []
        for name, i, j, returned in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            value = UNARY[name](a) if name in UNARY else BINARY[name](a, b)
            values.append(value)
            if returned:
                results.append(value)
        return {"last": values[-1], "returned": results}

    return fun


@settings(max_examples=15)
@given(
    st.lists(STEP, min_size=1, max_size=7),
    st.sampled_from(["bfloat16", "float16"]),
    st.integers(0, 99),
)
def test_random_programs(steps, half, seed):
    fun = build(steps)
    rng = np.random.default_rng(seed)
    args = [jnp.asarray(rng.uniform(-1, 1, SHAPE), jnp.float32) for _ in range(2)]
    auto = mpjax.autocast(fun, f"mixed_{half}")
    want, got = jax.jit(fun)(*args), auto(*args)
    assert jax.tree.structure(want) == jax.tree.structure(got)
    unit = max(EPSILON[half], EPSILON["bfloat16"] if any(s[0] == "half" for s in steps) else 0)
    for w, g in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert w.shape == g.shape and w.dtype == g.dtype
        bound = 8 * len(steps) * unit * max(1.0, float(jnp.max(jnp.abs(w))))
        assert float(jnp.max(jnp.abs(w - g))) <= bound
    if any(name in NOT_REVERSED for name, *_ in steps):
        return

    def loss(run):
        return lambda *args: sum(jnp.mean(leaf) for leaf in jax.tree.leaves(run(*args)))

    grads = jax.jit(jax.grad(loss(auto), (0, 1)))(*args)
    assert all(g.dtype == jnp.float32 and bool(jnp.all(jnp.isfinite(g))) for g in grads)
