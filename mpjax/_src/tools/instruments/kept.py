"""The values that the forward pass stores for the backward pass, as reports show them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import short_name
from mpjax._src.core.base.higher_order import CALL, higher_order
from mpjax._src.core.base.public import public
from mpjax._src.core.program.interpret import is_precise
from mpjax._src.core.program.site import ROOT

# Primitives whose results are their operands.
SAME = {"name", "stop_gradient", "optimization_barrier", "gpu_barrier"}


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Kept:
    """An array that is kept from the forward to the backward pass.

    Attributes:
        dtype: The short name of its dtype, such as "bf16".
        shape: Its shape. For a value of a loop, the shape for all iterations together.
        bytes: Its size in bytes.
        row: The index of the row that computed it, or None if no row did.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    row: int | None


def kept_by(jaxpr: Any) -> list[Kept]:
    """Returns the arrays that a program keeps for a backward pass, largest first.

    Args:
        jaxpr: A program, open, whose results are the residuals of the backward pass. Residuals that
            are its arguments or constants take no additional memory and are left out.
    """
    makers = functools.cache(makers_of)
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    first: dict[Any, Any] = {}  # of the residuals that have the same array
    for v in jaxpr.outvars:
        array = _array(v, jaxpr, makers)
        if not isinstance(array, _jax.Literal) and array not in inputs:
            first.setdefault(array, v)
    arrays = []
    for v in first.values():
        if not _is_constant(v, jaxpr, makers):
            origin = origin_of(v, jaxpr, makers)
            row = origin if isinstance(origin, int) else None
            size, shape = _jax.bytes_of(v.aval), tuple(v.aval.shape)
            arrays.append(Kept(short_name(v.aval.dtype), shape, size, row))
    return sorted(arrays, key=lambda kept: -kept.bytes)


def makers_of(jaxpr: Any) -> dict[Any, Any]:
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def _array(var: Any, jaxpr: Any, makers: Callable[[Any], dict[Any, Any]]) -> Any:
    """Returns the first variable that has the array of another one, which compilers do not copy."""
    producers = makers(jaxpr)
    while not isinstance(var, _jax.Literal) and var in producers:
        eqn = producers[var]
        place = eqn.outvars.index(var)
        if eqn.primitive.name in SAME or is_precise(eqn):
            var = eqn.invars[place]
            continue
        calls = _jax.inner_jaxprs(eqn) if higher_order(eqn.primitive.name).kind == CALL else ()
        for inner in calls:
            same = len(inner.outvars) == len(eqn.outvars) and len(inner.invars) == len(eqn.invars)
            first = _array(inner.outvars[place], inner, makers) if same else None
            if first in inner.invars:
                var = eqn.invars[inner.invars.index(first)]
                break
            # With the call, because JAX shares one jaxpr among equal calls, whose arrays are
            # others.
            if same and not isinstance(first, _jax.Literal):
                return id(eqn), first
        else:
            return var
    return var


def is_cast(eqn: Any) -> bool:
    """Returns whether an equation passes on a value in another dtype, or what was cast."""
    return eqn.primitive.name == "convert_element_type" or is_precise(eqn)


def _is_constant(var: Any, jaxpr: Any, makers: Callable[[Any], dict[Any, Any]]) -> bool:
    """Returns whether a variable depends on literals alone. Such a value, as zeros, is not kept."""
    eqn = makers(jaxpr).get(var)
    if eqn is None or eqn.primitive.name == _jax.CARRIER:
        return eqn is not None
    if all(isinstance(v, _jax.Literal) for v in eqn.invars):
        return True
    place = eqn.outvars.index(var)
    inner = [j for j in _jax.inner_jaxprs(eqn) if len(j.outvars) == len(eqn.outvars)]
    return any(_is_constant(j.outvars[place], j, makers) for j in inner if not _given(j, place))


def _given(jaxpr: Any, place: int) -> bool:
    """Returns whether a result of a program is a literal, or one of its arguments."""
    var = jaxpr.outvars[place]
    return isinstance(var, _jax.Literal) or var in jaxpr.invars


def origin_of(var: Any, jaxpr: Any, makers: Callable[[Any], dict[Any, Any]]) -> Any:
    """Returns the row number of the op that produced a variable, or the argument that it is."""
    producers = makers(jaxpr)
    while not isinstance(var, _jax.Literal) and var in producers:
        eqn = producers[var]
        for inner in _jax.inner_jaxprs(eqn):
            if len(inner.outvars) != len(eqn.outvars):
                continue
            origin = origin_of(inner.outvars[eqn.outvars.index(var)], inner, makers)
            if isinstance(origin, int):
                return origin
            if origin in inner.invars and len(inner.invars) == len(eqn.invars):
                var = eqn.invars[inner.invars.index(origin)]
                break
        else:
            # A cast belongs to the row of what it casts. An equation without a row, such as a
            # broadcast that JAX adds, belongs to the row of its only operand.
            number = ROOT.at(eqn).op
            read = [v for v in eqn.invars if not isinstance(v, _jax.Literal)]
            origin = origin_of(read[0], jaxpr, makers) if is_cast(eqn) and read else None
            if isinstance(origin, int) or number is not None or len(read) != 1:
                return origin if isinstance(origin, int) else number
            (var,) = read
    return var
