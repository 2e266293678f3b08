"""What is known of the backward pass that is being traced: whether the loss was scaled."""

import functools
import inspect
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal
from jax.interpreters import ad

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base._jax.programs import open_jaxpr
from mpjax._src.core.base.errors import UnsupportedJaxError


def is_scaled() -> bool:
    """Returns whether a cotangent was multiplied by 2 or more, or by a number that is not known.

    To be called while a backward pass is traced (`on_transpose`). That pass is followed, and those
    around it, of which it is a jit, a loop or a checkpoint. In a JAX that runs it otherwise it is
    not known, and no warning is better than a wrong one.
    """
    try:
        return any(map(_is_large, _factors_so_far()))
    except (AttributeError, KeyError, UnsupportedJaxError):
        return True


def _factors_so_far() -> list[Any]:
    # A transpose rule sees its own cotangent alone. What was multiplied into it before is known to
    # the frames of JAX's loop over the linear equations, which runs them in reverse order.
    frame, factors, first = inspect.currentframe(), list[Any](), ()
    loop = internals.backward_pass3.__code__
    while frame is not None:
        if frame.f_code is loop:
            here = frame.f_locals
            until = functools.partial(operator.is_not, here["eqn"])
            done = itertools.takewhile(until, reversed(here["lin_eqns"]))
            factors += _factors(done, here["env"])
            first = here["cotangents_in"]  # in the end, those of the whole
        frame = frame.f_back
    return [*factors, *first]


def _factors(eqns: Iterable[Any], env: dict[Any, Any]) -> Iterator[Any]:
    """Yields the operands of products that are scalars."""
    for eqn in eqns:
        values = [v.val if isinstance(v, Literal) else env.get(v) for v in eqn.invars]
        # The functions of jax.numpy are jitted, also those that multiply.
        # From JAX 0.12 on, it may be a "vjp_node[jit]".
        if "jit" in eqn.primitive.name:
            jaxpr, consts = open_jaxpr(eqn.params["jaxpr"])
            inside = zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True)
            yield from _factors(jaxpr.eqns, dict(inside))
        elif eqn.primitive is jax.lax.mul_p:
            yield from (x for x, v in zip(values, eqn.invars, strict=True) if not v.aval.shape)


def _is_large(x: Any) -> bool:
    """Returns whether a number is 2 or more, or not known. What has no value is not."""
    while isinstance(x, jax.core.Tracer):
        made = getattr(x, "parent", None)
        if isinstance(getattr(x, "val", None), jax.Array):  # outside of jit
            x = x.val
        elif x.full_lower() is not x:
            x = x.full_lower()
        elif made is not None and len(made.in_tracers) == 1:  # a copy, such as one on each device
            (x,) = made.in_tracers
        else:
            return True
    if not getattr(x, "is_fully_addressable", True):
        return True
    is_number = isinstance(x, float) or hasattr(x, "dtype")
    return is_number and bool(np.max(np.abs(x), initial=0) >= 2)


def is_transposable(primitive: Any) -> bool:
    """Returns whether a primitive is linear in some of its operands."""
    return primitive in ad.primitive_transposes or primitive in internals.fancy_transposes
