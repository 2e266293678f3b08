"""What is large and taken off again is not rounded before: sums, streams, running maxima."""

import jax
import jax.numpy as jnp
import measure
import numpy as np
import pytest
from jax import lax
from support import normal, thorough_but

import mpjax

ROWS, WIDTH = 32, 16
X, G = normal(0, ROWS, WIDTH), normal(1, ROWS, WIDTH)
A, B, C = (normal(i, WIDTH, WIDTH, scale=WIDTH**-0.5) for i in (2, 3, 4))
ONE = normal(5, WIDTH)
STACK = normal(6, 4, WIDTH, WIDTH, scale=0.3 * WIDTH**-0.5)
STD, MEAN = 1 + abs(normal(7, WIDTH, scale=0.1)), 500 + normal(8, WIDTH, scale=100)
STEPS = normal(9, 20, ROWS, WIDTH)
UNITS = 1e6 + normal(10, ROWS, WIDTH, scale=1e5)


def celsius(w, x):
    kelvin = 273.15 + 10 * jnp.tanh(x @ w[0])
    return (kelvin - 273.15) / 10 @ w[1]


def standardized(w, x, std, mean):
    y = (x @ w[0]) * std + mean
    return (y - mean) / std @ w[1]


def with_a_parameter(w, x):
    return ((x @ w[0] + w[2]) - w[2].mean()) @ w[1]


def with_a_branch(w, x, g):
    h = x @ w[0] + 30 * (g @ w[2])[:, None]
    return (h - h.mean(1, keepdims=True)) @ w[1]


def block(h, p):
    return h + 0.2 * jax.nn.gelu(h @ p) @ p.T


def change(w, x):
    h = x @ w[0]
    return (block(h, 0.3 * w[1]) - h) @ w[2]


def last_minus_first(w, x):
    first = h = x @ w[0]
    for p in w[1]:
        h = block(h, 0.5 * p)
    return (h - first) @ w[2]


def last_minus_first_of_a_scan(w, x):
    first = x @ w[0]
    h, _ = lax.scan(lambda h, p: (block(h, 0.5 * p), None), first, w[1])
    return (h - first) @ w[2]


def with_itself(w, x):
    first = x @ w[0]
    h = jax.jit(lambda h: (h - first) @ w[1])(first)
    return (300 * h - first) @ w[2]


def running_maximum(w, xs):
    def turn(carry, x):
        m, a = carry
        k = x @ w[0]
        new = jnp.maximum(m - 0.02, k)
        a = a * jnp.exp(m - 0.02 - new) + jnp.exp(k - new)
        return (new, a), a

    start = jnp.full(xs.shape[1:], -30.0), jnp.zeros(xs.shape[1:])
    return lax.scan(turn, start, xs)[1] @ w[1]


def envelope(w, xs):
    def turn(h, x):
        return jnp.maximum(0.995 * h, jnp.abs(x @ w[0])), None

    return lax.scan(turn, jnp.zeros(xs.shape[1:]), xs)[0] @ w[1]


def of_large_units(w, x, units):
    y = jnp.abs(x @ w[0] * 0.5) * (units * 1e3)
    z = jnp.maximum(y * 1e-6, x @ w[0] * 0.1)
    return jnp.mean(z @ w[1]) + jnp.mean(z)


def of_units(w, x, units):
    y = (1 + 0.1 * (x @ w[0])) * units
    return jnp.mean(y) * 1e-6 + jnp.mean((y / 1e6) @ w[1])


def centered(h):
    return h - h.mean(0)


def after_a_loop(w, x):
    h, _ = lax.scan(lambda h, p: (1 + 0.1 * jnp.tanh(h @ p), None), x @ w[0], w[1])
    return centered(h) @ w[2]


def distance_from_one(w, x):
    h, _ = lax.scan(lambda h, p: (jax.nn.sigmoid(h @ p + 4), None), x @ w[0], w[1])
    return jnp.log1p(-h) @ w[2]


def beside_a_matmul(w, x):
    h = w[2] + 0.1 * jnp.tanh(x @ w[0])
    return ((w[2] - h) @ w[1]).sum(0) + (h @ w[0]).sum(0)


def centered_beside_a_matmul(w, x):
    h = 1 + 0.1 * jnp.tanh(x @ w[0])
    return (centered(h) @ w[1]) + h @ w[0]


def after_a_bias(w, x):
    h = jnp.tanh((x @ w[0] + 3) @ w[1]) + w[2]
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5) @ w[0]


def in_parts(w, x):
    def turn(h, p):
        h = jnp.tanh(h @ p)
        return jnp.concatenate([h[:, :8] + 3, h[:, 8:] + 3], 1), None

    h = lax.scan(turn, x @ w[0], w[1])[0]
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5) @ w[2]


def in_copies(w, x):
    """Both copies of what the loop returns are near one, and normalized over their features."""
    turn = lambda h, p: (1 + 0.1 * jnp.tanh(h @ p), None)  # noqa: E731
    h = lax.scan(turn, x @ w[0], w[1])[0]
    return jax.vmap(lambda h: (h - h.mean(1, keepdims=True)) @ w[2])(
        jnp.stack([jnp.tile(h, (2, 1)), jnp.tile(h / 2, (2, 1))])
    ).sum(0)


def in_another_layout(w, x, g):
    """The branch is constant along the features of a row, which are heads and their features."""
    h = (x @ w[0] + 30 * (g @ w[2])[:, None]).reshape(len(x), 4, -1).transpose(1, 0, 2)
    return (h - h.mean((0, 2), keepdims=True)).transpose(1, 0, 2).reshape(len(x), -1) @ w[1]


def of_large_scores(w, x, scale):
    return -jax.nn.log_softmax(scale * (30 * (x @ w[0])))[:, 0] @ (x @ w[1])[:, 0]


PROGRAMS = {
    "a loop's offset": (after_a_loop, ((A, STACK, B), X)),
    "a loop's distance from one": (distance_from_one, ((A, STACK, B), X)),
    "what a matmul reads too": (beside_a_matmul, ((A, B, 0.1 * ONE + 3), X)),
    "a mean of what a matmul reads too": (centered_beside_a_matmul, ((A, B), X)),
    "a bias before a norm": (after_a_bias, ((A, B, 0.1 * ONE + 3), X)),
    "a loop's offset in parts": (in_parts, ((A, STACK, B), X)),
    "copies of a loop's offset": (in_copies, ((A, STACK, B), X)),
    "another layout": (in_another_layout, ((A, B, ONE), X, G)),
    "large scores": (of_large_scores, ((A, B), X, np.float32(1.1))),
    "constants": (celsius, ((A, B), X)),
    "arguments": (standardized, ((A, B), X, STD, MEAN)),
    "parameters": (with_a_parameter, ((A, B, ONE + 100), X)),
    "a branch": (with_a_branch, ((A, B, ONE), X, G)),
    "a change": (change, ((A, B, C), X)),
    "a stream": (last_minus_first, ((A, STACK, B), X)),
    "a scanned stream": (last_minus_first_of_a_scan, ((A, STACK, B), X)),
    "itself": (with_itself, ((A, B, C), X)),
    "a running maximum": (running_maximum, ((A, B), STEPS)),
    "an envelope": (envelope, ((A, B), STEPS)),
    "units": (of_units, ((A, B), X, UNITS)),
    "large units": (of_large_units, ((A, B), X, UNITS)),
}
# The largest of two numbers may be the other one after rounding, also by hand.
SWITCHES = ("a running maximum", "an envelope")
ONCE = {"units": "float16", "large units": "float16"}
QUICK = [(name, ONCE.get(name, "bfloat16")) for name in [*PROGRAMS][1::3]]
ALL = [(name, half) for name in PROGRAMS for half in ("bfloat16", "float16")]


@pytest.mark.parametrize(("name", "half"), thorough_but(ALL, *QUICK))
def test_differences_have_sound_values_and_gradients(name, half):
    fun, args = PROGRAMS[name]
    measure.check(fun, args, half, parts="result" if name in SWITCHES else "result gradient")


def test_a_stream_from_which_nothing_is_taken_off_is_kept_in_16_bits():
    def stream(w, x):
        h = x @ w[0]
        for p in w[1]:
            h = block(h, p)
        return jnp.mean((h @ w[2]) ** 2)

    first, *others, last = normal(11, 6, 32, 32, scale=0.15)
    found = mpjax.explain(stream, argnums=0)((first, others, last), normal(12, ROWS, 32)).kept
    assert {k.dtype for k in found} == {"bf16"}


def test_results_with_large_units_are_finite_in_float16():
    fun, args = PROGRAMS["units"]
    assert np.isfinite(mpjax.autocast(fun, "mixed_float16")(*args))
