"""Programs planned and not run: what the plan says of their values and operations."""

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape
from support import normal

import mpjax
from mpjax._src.autocast.explain import words
from mpjax._src.autocast.plan import analyse

H, W, V = normal(0, 8, 16), normal(1, 16, 16), normal(2, 16, 16)
SCALAR, VECTOR = jnp.float32(0.1), normal(3, 16)


def analysed(fun, *args, policy="mixed_bfloat16", linear=()):
    """Returns the block of a function, analysed: every op and value with what is decided of it."""
    closed = jax.make_jaxpr(fun)(*args)
    dtypes = [v.aval.dtype for v in closed.jaxpr.invars]
    policy = mpjax.get_policy(policy) if isinstance(policy, str) else policy
    return analyse(closed.jaxpr, closed.consts, policy, dtypes, linear=linear).block


def fact(fun, *args, **options):
    """Returns what is known of a function's (first) result."""
    return analysed(fun, *args, **options).outvars[0].fact


def op(block, name, place=-1):
    """Returns the last op of that name, or the one at a place among them."""
    return [op for op in block.walk() if op.name == name][place]


def said(op):
    """Returns why an op computes in what it does, in words."""
    return words(op.why)


__all__ = ["SCALAR", "VECTOR", "H", "Shape", "V", "W", "analysed", "fact", "op", "said"]
