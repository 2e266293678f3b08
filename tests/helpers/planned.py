"""Plans programs without running them, and returns the plan's facts and decisions."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape
from support import normal

import mpjax
from mpjax._src.autocast.plan import analyze, outline
from mpjax._src.autocast.tables import Analysis
from mpjax._src.instruments.tables import words

H, W, V = normal(0, 8, 16), normal(1, 16, 16), normal(2, 16, 16)
SCALAR, VECTOR = jnp.float32(0.1), normal(3, 16)


def analyzed(fun, *args, policy="mixed_bfloat16", linear=()):
    """Returns the analyzed block of a function, with the decision for every operation and value."""
    closed = jax.make_jaxpr(fun)(*args)
    dtypes = [v.aval.dtype for v in closed.jaxpr.invars]
    policy = mpjax.get_policy(policy) if isinstance(policy, str) else policy
    plan = outline(closed.jaxpr, closed.consts, policy)
    know(analyze(plan, dtypes, linear=linear))
    return plan.block


def know(analysis):
    """Records the tables of a plan, so that the functions below answer for its ops and values."""
    for field in dataclasses.fields(analysis):
        if field.name != "marks":  # which storage makes
            getattr(KNOWN, field.name).update(getattr(analysis, field.name))


KNOWN = Analysis(arguments=set())  # about all blocks that were analyzed


def ruling(op):
    return KNOWN.rulings[op]


def choice(op):
    return KNOWN.choices[op]


def stored(value):
    return KNOWN.stored[value]


def is_small(value):
    return value in KNOWN.small


def is_raw(value):
    return KNOWN.is_raw(value)


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
    return fact_of(analyzed(fun, *args, **options).outvars[0])


def op(block, name, place=-1):
    """Returns the last operation of that name, or the one at an index among them."""
    return [op for op in block.walk() if op.name == name][place]


def said(op):
    """Returns in words why an operation computes in its dtype."""
    return words(KNOWN.why(op))


__all__ = [
    "SCALAR",
    "VECTOR",
    "H",
    "Shape",
    "V",
    "W",
    "analyzed",
    "carries",
    "choice",
    "fact",
    "fact_of",
    "is_raw",
    "is_small",
    "know",
    "op",
    "ruling",
    "said",
    "stored",
    "want",
]
