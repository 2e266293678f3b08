"""Replaces operations of a program by functions, before it is differentiated.

What runs in their place is in the scopes of a matmul among them, as planned already: nothing else
of it is cast.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpjax._src.base import _jax
from mpjax._src.base._jax import building
from mpjax._src.base.higher_order import MAP, REMATS
from mpjax._src.base.trees import vary_like
from mpjax._src.planner.equations import CUSTOM, Equation, Value, closed, opened
from mpjax._src.program import graph
from mpjax._src.program.graph import PLANNED, Block, Op

# Returns what is replaced in a block, by the op whose results it returns. Each has ``ops``, the
# values ``ins`` that it reads, the matmul ``at`` and ``run(how, arrays)``, which runs in its place.
# Further arguments: whether the block stays as it is.
Find = Callable[[Block, bool], Mapping[Op, Any]]


def replaced(program: Any, block: Block, find: Find) -> Any:
    """Returns a closed jaxpr with replacements; itself if it has none.

    Args:
        program: The closed jaxpr, as traced.
        block: Its graph.
        find: What is replaced in it, and in the programs inside it.
    """
    return _Writer(find).program(program, block)


class _Writer:
    def __init__(self, find: Find) -> None:
        self._find = find
        self._traced: dict[Any, Any] = {}

    def program(self, program: Any, block: Block) -> Any:
        """Returns a program with replacements; itself if it has none."""
        places = self._find(block, False)
        gone = frozenset[Op]().union(*(found.ops for found in places.values()))
        inside = {op: self._inside(op) for op in block.ops if op.subs and op not in gone}
        if not places and not any(inside.values()):
            return program
        env: dict[graph.Value, Value] = {v: Value(v.aval) for v in block.invars}
        env |= {v: Value(v.aval, x) for v, x in block.consts}

        def read(v):
            return Value(v.aval, v.const, literal=True) if v.literal else env[v]

        into: list[Equation] = []
        for op in block.ops:
            if op in places:
                outs = self._spliced(places[op], [*map(read, places[op].ins)], into)
            elif op in gone:
                continue
            else:
                consts, params = inside.get(op) or ((), op.params)
                ins, outs = [*consts, *map(read, op.ins)], [Value(v.aval) for v in op.outs]
                into.append(Equation(op.eqn.primitive, params, ins, outs, op.eqn, op.stack))
            env.update(zip(op.outs, outs, strict=True))
        info = building.anonymous(program)
        return closed([env[v] for v in block.invars], into, [*map(read, block.outvars)], info)

    def _inside(self, op: Op) -> tuple[Sequence[Value], dict[str, Any]] | None:
        """Returns further operands and the parameters of an op whose programs change."""
        row = op.inside
        if PLANNED in op.scopes:
            return None
        if row.pinned or op.name in CUSTOM:
            for block in (block for sub in op.subs for block in sub.program.blocks()):
                self._find(block, True)
            return None
        mapped = row.kind == MAP
        old = [inside.program for inside in row.wire(op.eqn)]
        with building.on_each_device(op.params) if mapped else contextlib.nullcontext():
            pairs = zip(old, op.subs, strict=True)
            new = [self.program(program, sub.program) for program, sub in pairs]
        if all(one is another for one, another in zip(old, new, strict=True)):
            return None
        if not mapped and op.name not in REMATS:
            return (), {**op.params, **row.holding([*map(building.as_closed, new)])}
        ((jaxpr, consts),) = map(_jax.hoisted, new)
        params = {**op.params, **row.holding([jaxpr])}
        name = "in_specs" if mapped else "prevent_cse"
        if isinstance(params[name], tuple):  # one for each operand
            whole = building.WHOLE if mapped else True
            params[name] = (*[whole] * len(consts), *params[name])
        if mapped:
            params = {**params, **row.holding([building.as_body(params, jaxpr)])}
        return [Value(_jax.aval_of(x), x) for x in consts], params

    def _spliced(self, found: Any, ins: Sequence[Value], into: list[Equation]) -> list[Value]:
        """Appends what runs in the place of some ops, and returns its results."""
        matmul = found.at
        avals, outs = [v.aval for v in ins], [v.aval for v in found.result.outs]
        key = found.run, found.how, *avals
        if key not in self._traced:

            def run(*arrays):
                results = found.run(found.how, arrays)
                results = [functools.reduce(vary_like, arrays, x) for x in results]
                typed = zip(outs, results, strict=True)
                return [_jax.typed_as(aval, x.astype(aval.dtype)) for aval, x in typed]

            with matmul.eqn.ctx.manager:
                self._traced[key] = _jax.trace(run, avals, "replaced")
        first, stack = len(into), matmul.stack.extend(PLANNED)
        results = opened(self._traced[key], ins, into, stack=stack)
        for e in into[first:]:
            e.like = e.like.replace(source_info=matmul.eqn.source_info)
        return results
