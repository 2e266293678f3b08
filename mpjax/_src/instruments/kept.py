"""The values that the forward pass stores for the backward pass, as reports show them."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax.numpy as jnp

from mpjax._src.autocast.plan import Plan
from mpjax._src.autocast.schedule import ops_of
from mpjax._src.autocast.steps import (
    Attention,
    Checkpoint,
    ChunkedLoss,
    FusedAttention,
    Island,
    Recomputed,
    Recurrence,
    Sloped,
    WholeCheckpoint,
    unwrapped,
)
from mpjax._src.base import _jax
from mpjax._src.base.dtypes import SPELLINGS, short_name
from mpjax._src.base.higher_order import CALL, higher_order
from mpjax._src.base.public import public
from mpjax._src.program.graph import Block, Op, Value
from mpjax._src.program.site import ROOT

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
    makers = functools.cache(_makers)
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    first: dict[Any, Any] = {}  # of the residuals that have the same array
    for v in jaxpr.outvars:
        array = _array(v, jaxpr, makers)
        if not isinstance(array, _jax.Literal) and array not in inputs:
            first.setdefault(array, v)
    arrays = []
    for v in first.values():
        if not _is_constant(v, jaxpr, makers):
            origin = _origin(v, jaxpr, makers)
            row = origin if isinstance(origin, int) else None
            size, shape = _jax.bytes_of(v.aval), tuple(v.aval.shape)
            arrays.append(Kept(short_name(v.aval.dtype), shape, size, row))
    return sorted(arrays, key=lambda kept: -kept.bytes)


def _makers(jaxpr: Any) -> dict[Any, Any]:
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def _array(var: Any, jaxpr: Any, makers: Callable[[Any], dict[Any, Any]]) -> Any:
    """Returns the first variable that has the array of another one, which compilers do not copy."""
    producers = makers(jaxpr)
    while not isinstance(var, _jax.Literal) and var in producers:
        eqn = producers[var]
        place = eqn.outvars.index(var)
        if eqn.primitive.name in SAME or _is_precise(eqn):
            var = eqn.invars[place]
            continue
        calls = _jax.inner_jaxprs(eqn) if higher_order(eqn.primitive.name).kind == CALL else ()
        for inner in calls:
            same = len(inner.outvars) == len(eqn.outvars) and len(inner.invars) == len(eqn.invars)
            first = _array(inner.outvars[place], inner, makers) if same else None
            if first in inner.invars:
                var = eqn.invars[inner.invars.index(first)]
                break
        else:
            return var
    return var


def _is_precise(eqn: Any) -> bool:
    """Returns whether an equation rounds to the precision that its operand has anyway."""
    if eqn.primitive.name != "reduce_precision":
        return False
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)


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


def _origin(var: Any, jaxpr: Any, makers: Callable[[Any], dict[Any, Any]]) -> Any:
    """Returns the row number of the op that produced a variable, or the argument that it is."""
    producers = makers(jaxpr)
    while not isinstance(var, _jax.Literal) and var in producers:
        eqn = producers[var]
        for inner in _jax.inner_jaxprs(eqn):
            if len(inner.outvars) != len(eqn.outvars):
                continue
            origin = _origin(inner.outvars[eqn.outvars.index(var)], inner, makers)
            if isinstance(origin, int):
                return origin
            if origin in inner.invars and len(inner.invars) == len(eqn.invars):
                var = eqn.invars[inner.invars.index(origin)]
                break
        else:
            number = ROOT.at(eqn).op
            read = [v for v in eqn.invars if not isinstance(v, _jax.Literal)]
            if number is not None or len(read) != 1:
                return number
            (var,) = read
    return var


SIDES = "left operand", "right operand"
AGAIN = "computed again"


def storage_of(plan: Plan) -> dict[Op, str]:
    """Returns the plan's decision on storage, in words, for each op that has one."""
    rows = {v: row for op, row in plan.rows.items() for v in op.outs}
    texts: dict[Op, str] = {}
    for block in plan.block.blocks():
        if block in plan.analysis.steps:
            texts |= _storage_of(block, plan, rows)
    stands_for = plan.analysis.marks.stands_for
    return {stands_for.get(op, op): text for op, text in texts.items()}


def _of_op(op: Op, plan: Plan) -> str:
    """Says what is kept of an operation that runs alone, or ""."""
    own = [v for v in op.outs if v in plan.analysis.kept]
    parts = [f"kept in {_dtypes(own, plan)}"] if own else []
    centered = plan.analysis.marks.centered
    if op in centered:
        parts.append(f"{SIDES[centered[op][0]]} less its mean in the gradient of the other operand")
    return "; ".join(parts)


def _storage_of(block: Block, plan: Plan, rows: dict[Value, int]) -> dict[Op, str]:
    steps = plan.analysis.steps[block]
    texts: dict[Op, str] = {}
    for step in unwrapped(steps):
        if isinstance(step, Island):
            text = _of_island(step, plan, rows)
            texts |= dict.fromkeys(step.ops, text)
        elif isinstance(step, Op) and (text := _of_op(step, plan)):
            texts[step] = text
    for step in steps:
        for op in step.ops if isinstance(step, Checkpoint) else ():
            if op.spec.runs_again:
                texts.setdefault(op, AGAIN)
        for inner in unwrapped([step]) if isinstance(step, WholeCheckpoint) else ():
            if not step.again.isdisjoint(inner.outs):
                texts |= dict.fromkeys(ops_of(inner), AGAIN)
    return texts


def _of_island(island: Island, plan: Plan, rows: dict[Value, int]) -> str:
    half = island.body.half
    half = SPELLINGS[half][0] if half is not None else "f32"
    if isinstance(island, ChunkedLoss):
        return f"run {island.written.describe()}, which keeps no logits"
    if isinstance(island, FusedAttention):
        return f"run by the fused attention of {island.fusion.kernel}, which keeps no weights"
    if isinstance(island, Attention):
        return f"its weights are kept in {half}; row sums come from the attention's output"
    if isinstance(island, Recurrence):
        return "its derivative is a recurrence in the other direction, which reads its result"
    if isinstance(island, Sloped):
        return f"its slope is kept in {half}"
    if not isinstance(island, Recomputed):
        return f"its result is kept in {half}"
    sources = sorted({rows[v] for v in island.kept if v in rows})
    from_rows = f" (rows {', '.join(map(str, sources))})" if sources else ""
    tail = f"; the cotangent of its norm's result is {half}" if island.tail else ""
    dtypes = _dtypes(island.kept, plan, island.rounded, half)
    return f"computed again from {dtypes}{from_rows}{tail}"


def _dtypes(
    values: Collection[Value], plan: Plan, rounded: Collection[Value] = (), half: str = ""
) -> str:
    stored = plan.analysis.stored
    names = {half if v in rounded else short_name(stored[v].dtype or v.aval.dtype) for v in values}
    return ", ".join(sorted(names))
