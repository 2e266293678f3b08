"""Loops: residuals of recurrences near one, and running sums through loops inside of loops."""

import jax
import jax.numpy as jnp
from jax import lax
from members import Case, Members, judge
from support import normal

NEAR_ONE = Members("what is kept for the backward pass is rounded to half, which cannot hold 0.999")
NESTED = Members("a running sum goes through the carries of a loop inside of a loop, and is half")

X, W = normal(0, 32, 16), normal(1, 16, 16, scale=0.25)


# ---- residuals near one -------------------------------------------------------------------------

SEQUENCE = normal(16, 1024, 16)
GATE, MIX = normal(17, 16, 4, scale=0.3), normal(18, 4, 4, scale=0.5)
START = jnp.ones(4)


def slow_recurrence(rate):
    def fun(w, x):
        a = jnp.exp(-jax.nn.softplus(x @ w - 2) * rate)
        step = lambda h, ab: (ab[0] * h + ab[1],) * 2  # noqa: E731
        return lax.scan(step, START, (a, rate * x[:, :4]))[1] @ MIX

    return Case(fun, (GATE, SEQUENCE), (0, 1))


@NEAR_ONE()
def recurrence_at_rate_01():
    return slow_recurrence(0.01)


@NEAR_ONE()
def recurrence_at_rate_001():
    return slow_recurrence(0.001)


@NEAR_ONE()
def recurrence_with_the_gate_inside():
    def fun(w, x):
        def step(h, x):
            a = jnp.exp(-jax.nn.softplus(x @ w) * 0.001)
            h = a * h + 0.01 * x[:4]
            return h, h @ MIX

        return lax.scan(step, START, x)[1]

    return Case(fun, (GATE, SEQUENCE), (0, 1))


@NEAR_ONE(thorough=True)
def recurrence_by_associative_scan():
    def fun(w, x):
        a = jnp.exp(-jax.nn.softplus(x @ w) * 0.001)
        merge = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])  # noqa: E731
        return lax.associative_scan(merge, (a, 0.01 * x[:, :4]))[1] @ MIX

    return Case(fun, (GATE, SEQUENCE), (0, 1))


@NEAR_ONE()
def recurrence_by_short_associative_scan():
    def fun(w, x):
        a = jnp.exp(-jax.nn.softplus(x @ w) * 0.001)
        merge = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])  # noqa: E731
        return lax.associative_scan(merge, (a, 0.01 * x[:, :4]))[1] @ MIX

    return Case(fun, (GATE, SEQUENCE[:16]), (0, 1))


@NEAR_ONE()
def selective_state_space():
    def fun(w, x):
        rate = jax.nn.softplus(x @ w - 6)

        def step(h, inputs):
            rate, x = inputs
            h = jnp.exp(-rate[:, None] * jnp.arange(1.0, 5.0)) * h + rate[:, None] * x[:4]
            return h, h.sum(-1)

        return lax.scan(step, jnp.ones((4, 4)), (rate, x))[1] @ MIX

    return Case(fun, (GATE, SEQUENCE), (0, 1))


@NEAR_ONE()
def gate_of_a_gated_network():
    def fun(w, x):
        keep = jax.nn.sigmoid(x @ w + 8)

        def step(h, kx):
            keep, x = kx
            h = keep * h + (1 - keep) * jnp.tanh(x[:4])
            return h, h

        return lax.scan(step, START, (keep, x))[1] @ MIX

    return Case(fun, (GATE, SEQUENCE), (0, 1))


@NEAR_ONE()
def learned_moving_average():
    def fun(w, decay, x):
        x = jnp.tanh(x @ w)
        decay = jax.nn.sigmoid(decay)
        step = lambda h, x: (decay * h + (1 - decay) * x,) * 2  # noqa: E731
        return lax.scan(step, START, x)[1] @ MIX

    return Case(fun, (GATE, jnp.array([4.0, 5.0, 6.0, 7.0]), SEQUENCE), (0, 1))


@NEAR_ONE()
def survival_of_many_steps():
    def fun(w, x):
        alive = 1 - 0.002 * jax.nn.sigmoid(x @ w)
        step = lambda p, a: (p * a,) * 2  # noqa: E731
        return lax.scan(step, START, alive)[1] @ MIX

    return Case(fun, (GATE, SEQUENCE), (0, 1))


@NEAR_ONE()
def transmittance_of_a_ray():
    def fun(w, x):
        clear = jnp.exp(-0.01 * jax.nn.softplus(x @ w))
        left = jnp.cumprod(clear, 0) * (1 - clear)
        return left.T @ jnp.tanh(x)

    return Case(fun, (GATE, SEQUENCE[:32]), (0, 1))


# ---- nested loops -------------------------------------------------------------------------------


def rotating(turns, count, again, term=lambda x, w: jnp.abs(jnp.tanh(x @ w)) + 1):
    """A running sum that an inner loop passes once around ``count`` carries, the rest new."""

    def fun(w, x):
        def outer(total, _):
            fresh = tuple(jnp.zeros_like(x) for _ in range(count - 1))
            around = lax.fori_loop(0, count, lambda i, c: again(c), (total, *fresh))
            return around[0] + term(x, w), None

        return lax.scan(outer, jnp.zeros_like(x), None, length=turns)[0]

    return Case(fun, (W, X[:2]))


@NESTED()
def inner_loop_rotates_three_carries():
    return rotating(1500, 3, lambda c: (c[1], c[2], c[0]))


@NESTED()
def inner_loop_rotates_four_carries():
    return rotating(1500, 4, lambda c: (c[1], c[2], c[3], c[0]))


@NESTED()
def inner_loop_swaps_two_carries():
    return rotating(1500, 2, lambda c: (c[1], c[0]))


@NESTED()
def inner_loop_rotates_and_scales():
    return rotating(500, 3, lambda c: (c[1], c[2] * 0.999, c[0]))


@NESTED()
def one_loop_rotates_a_sum():
    def fun(w, x):
        def step(c, _):
            return (c[1], c[2], c[0] + jnp.abs(jnp.tanh(x @ w)) + 1), None

        return lax.scan(step, (jnp.zeros_like(x),) * 3, None, length=1500)[0]

    return Case(fun, (W, X[:2]))


@NESTED()
def two_inner_loops_rotate():
    def rotate(c):
        return lax.fori_loop(0, 3, lambda i, c: (c[1], c[2], c[3], c[0]), c)

    def fun(w, x):
        def outer(total, _):
            fresh = tuple(jnp.zeros_like(x) for _ in range(3))
            around = lax.fori_loop(0, 4, lambda i, c: rotate(c), (total, *fresh))
            return around[0] + jnp.abs(jnp.tanh(x @ w)) + 1, None

        return lax.scan(outer, jnp.zeros_like(x), None, length=1500)[0]

    return Case(fun, (W, X[:2]))


@NESTED(parts="result")
def a_while_loop_rotates():
    def fun(w, x):
        def inner(c):
            return c[0] + 1, c[2], c[3], c[1]

        def outer(total, _):
            zero = jnp.zeros_like(x)
            around = lax.while_loop(lambda c: c[0] < 3, inner, (0, total, zero, zero))
            return around[1] + jnp.abs(jnp.tanh(x @ w)) + 1, None

        return lax.scan(outer, jnp.zeros_like(x), None, length=1500)[0]

    return Case(fun, (W, X[:2]), None)


@NESTED()
def sum_inside_of_the_inner_loop():
    def fun(w, x):
        term = jnp.abs(jnp.tanh(x @ w)) + 1

        def inner(c, _):
            return (c[1], c[2], c[0] + term), None

        def outer(total, _):
            zero = jnp.zeros_like(x)
            return lax.scan(inner, (total, zero, zero), None, length=3)[0][0], None

        return lax.scan(outer, jnp.zeros_like(x), None, length=1500)[0]

    return Case(fun, (W, X[:2]))


@NEAR_ONE.test()
def test_residuals_of_recurrences_near_one_are_sound(member, half, part):
    judge(member, half, part)


@NESTED.test()
def test_nested_loops_are_sound(member, half, part):
    judge(member, half, part)
