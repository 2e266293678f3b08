"""Puts the row numbers of reports on the equations of a program, before it is planned."""

from collections.abc import Mapping
from typing import Any

from mpjax._src.core.base import _jax
from mpjax._src.core.program.graph import Block, Op
from mpjax._src.core.program.site import ROW


def with_rows(program: Any, block: Block, rows: Mapping[Op, int]) -> Any:
    """Returns a program whose equations are in scopes with the numbers of their ops.

    JAX leaves scopes on the equations of derivatives, so each says which row it belongs to. A
    function that is called twice has two rows for each of its equations: calls share none.

    Args:
        program: A jaxpr, open or closed.
        block: Its graph.
        rows: The numbers.
    """
    return _numbered(program, [*reversed(block.ops)], rows)


def _numbered(program: Any, ops: list[Op], rows: Mapping[Op, int]) -> Any:
    inner, _ = _jax.open_jaxpr(program)
    new = inner.replace(eqns=[_equation(eqn, ops, rows) for eqn in inner.eqns])
    return new if inner is program else program.replace(jaxpr=new)


def _equation(eqn: Any, ops: list[Op], rows: Mapping[Op, int]) -> Any:
    """Returns an equation with the number of its op; a call has that of the first op in it."""
    called, info = _jax.inlined(eqn), eqn.source_info
    # The ops are in reverse order, so that the next one is the last of the list.
    row = rows.get(ops[-1]) if ops else None
    if row is not None:
        info = info.replace(name_stack=info.name_stack.extend(f"{ROW}{row}"))
    if called is not None:
        changed = {k: _numbered(p, ops, rows) for k, p in eqn.params.items() if p is called}
        return eqn.replace(params={**eqn.params, **changed}, source_info=info)
    op = ops.pop()
    inner = op.inside
    pairs = zip(inner.wire(eqn), op.subs, strict=True)
    programs = [with_rows(old.program, new.program, rows) for old, new in pairs]
    # Programs that autocast has planned stay as they are: no parameter is listed for them.
    params = {**eqn.params, **inner.holding(programs)} if inner.params else eqn.params
    return eqn.replace(params=params, source_info=info)
