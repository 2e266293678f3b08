"""Plans programs without running them, and returns the plan's facts and decisions."""

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape
from support import normal

import mpjax
from mpjax._src.autocast.explain import words
from mpjax._src.autocast.lattices import Analysis
from mpjax._src.autocast.plan import analyse, outline

H, W, V = normal(0, 8, 16), normal(1, 16, 16), normal(2, 16, 16)
SCALAR, VECTOR = jnp.float32(0.1), normal(3, 16)


def analysed(fun, *args, policy="mixed_bfloat16", linear=()):
    """Returns the analysed block of a function, with the decision for every operation and value."""
    closed = jax.make_jaxpr(fun)(*args)
    dtypes = [v.aval.dtype for v in closed.jaxpr.invars]
    policy = mpjax.get_policy(policy) if isinstance(policy, str) else policy
    plan = outline(closed.jaxpr, closed.consts, policy)
    analysis = analyse(plan, dtypes, linear=linear)
    KNOWN.facts.update(analysis.facts)
    KNOWN.carries.update(analysis.carries)
    KNOWN.wants.update(analysis.wants)
    return plan.block


KNOWN = Analysis()  # about the values of all blocks that were analysed


def fact_of(value):
    return KNOWN.facts[value]


def want(value):
    """Returns the demand of a value's readers."""
    return KNOWN.wants[value]


def carries(block):
    """Returns which arguments of a loop's body are stored in half."""
    return KNOWN.carries[block]


def fact(fun, *args, **options):
    """Returns the facts about a function's (first) result."""
    return fact_of(analysed(fun, *args, **options).outvars[0])


def op(block, name, place=-1):
    """Returns the last operation of that name, or the one at an index among them."""
    return [op for op in block.walk() if op.name == name][place]


def said(op):
    """Returns in words why an operation computes in its dtype."""
    return words(op.why)


__all__ = [
    "SCALAR",
    "VECTOR",
    "H",
    "Shape",
    "V",
    "W",
    "analysed",
    "carries",
    "fact",
    "fact_of",
    "op",
    "said",
    "want",
]
