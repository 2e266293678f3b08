"""Derivatives that are all but lost where a function saturates: differences of rounded parts."""

import jax
import jax.numpy as jnp
from jax import lax
from members import Case, Members, judge
from support import normal

SATURATED = Members("the derivative is computed from a result that was rounded to half")


def hidden(activation, shift, scale=0.1):
    def fun(w, v, x):
        return activation(x @ w + shift) @ v

    return Case(fun, (normal(0, 16, 16, scale=scale), normal(1, 16, 4), normal(2, 24, 16)), (0, 1))


@SATURATED()
def tanh():
    return hidden(jnp.tanh, 6)


@SATURATED()
def tanh_of_the_other_sign():
    return hidden(jnp.tanh, -5)


@SATURATED()
def logistic():
    return hidden(jax.nn.sigmoid, 8)


@SATURATED()
def logistic_by_tanh():
    return hidden(lambda x: (1 + jnp.tanh(x / 2)) / 2, 9)


@SATURATED()
def logistic_written_out():
    return hidden(lambda x: 1 / (1 + jnp.exp(-x)), 7)


@SATURATED()
def soft_sign():
    return hidden(jax.nn.soft_sign, 120, scale=3)


@SATURATED()
def share_of_two():
    def share(x):
        a, b = jnp.split(jax.nn.relu(x) + 0.1, 2, -1)
        return jnp.concatenate([a * 60 / (a * 60 + b), b], -1)

    return hidden(share, 2)


@SATURATED()
def contrast():
    return hidden(lambda x: (x * x - 1) / (x * x + 1), 12)


@SATURATED()
def angle_of_two():
    return hidden(lambda x: jnp.arctan2(x, x + 1), 40, scale=1)


@SATURATED()
def gated():
    def fun(w, v, x):
        return ((x @ v) * jax.nn.sigmoid(x @ w + 7)) @ v

    return Case(fun, (normal(3, 16, 16, scale=0.1), normal(4, 16, 16), normal(5, 8, 16)), (0, 1, 2))


@SATURATED()
def highway():
    def fun(w, v, x):
        for _ in range(3):
            gate = jax.nn.sigmoid(x @ w + 5)
            x = gate * jnp.tanh(x @ v) + (1 - gate) * x
        return x

    args = (normal(6, 16, 16, scale=0.1), normal(7, 16, 16, scale=0.2), normal(8, 8, 16))
    return Case(fun, args, (0, 1, 2))


@SATURATED()
def recurrent():
    def fun(w, v, x):
        def turn(h, _):
            h = jnp.tanh(h @ w + x @ v + 4)
            return h, h

        return lax.scan(turn, x, None, length=5)[1]

    args = (normal(9, 16, 16, scale=0.1), normal(10, 16, 16, scale=0.1), normal(11, 8, 16))
    return Case(fun, args, (0, 1, 2))


@SATURATED()
def update_gate():
    def fun(w, v, x):
        def turn(h, _):
            gate, new = jax.nn.sigmoid(h @ w + x @ v + 5), jnp.tanh(x @ w + h @ v)
            return (1 - gate) * new + gate * h, None

        return lax.scan(turn, x, None, length=16)[0]

    args = (normal(12, 16, 16, scale=0.1), normal(13, 16, 16, scale=0.1), normal(14, 8, 16))
    return Case(fun, args, (0, 1, 2))


@SATURATED.test()
def test_saturated(member, half, part):
    judge(member, half, part)
