"""Replaces operations of a program by functions, such as kernels, before it is differentiated.

What runs in their place is in the scopes of one of them. A kernel is planned already: nothing else
of it is cast.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building
from mpjax._src.core.base.higher_order import CUSTOM, MAP, REMATS
from mpjax._src.core.base.rules import UNKNOWN, rule_of
from mpjax._src.core.base.trees import vary_like
from mpjax._src.core.planner.equations import Equation, Value, closed, opened
from mpjax._src.core.program import graph
from mpjax._src.core.program.graph import PLANNED, Block, Op
from mpjax._src.core.program.site import equations as all_equations


class Find(Protocol):
    """Says what is replaced.

    ``find(block)`` returns it by the op whose results it returns. Each has ``ops``, the values
    ``ins`` that it reads, the op ``at`` and ``run(how, arrays)``, which runs in its place, as
    ``planned`` already or not. A ``fixed`` block stays as it is. ``apart()`` says the same of
    another program.
    """

    def __call__(self, block: Block, fixed: bool = False) -> Mapping[Op, Any]: ...

    def apart(self) -> "Find": ...


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
        places = self._find(block)
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
        # Another autocast, or the author of a kernel, has planned it.
        if PLANNED in op.scopes:
            return None
        # A rule is traced when JAX differentiates the function, and gets the same replacements
        # then: otherwise the derivative would be that of other equations.
        if op.name in CUSTOM:
            ((name,), (sub,)) = row.params, op.subs
            program = self.program(op.params[name], sub.program)
            if program is op.params[name]:
                return None
            return (), _jax.with_rule({**op.params, name: program}, self._in_rule(op.scopes))
        if row.pinned:
            # Nothing changes, but `find` hears of it: reports say why an attention stays.
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
        # Checkpoints and shard_map hold open jaxprs: constants of a replacement become operands,
        # which all devices get whole.
        ((jaxpr, consts),) = map(_jax.hoisted, new)
        params = {**op.params, **row.holding([jaxpr])}
        name = "in_specs" if mapped else "prevent_cse"
        if isinstance(params[name], tuple):  # one for each operand
            whole = building.WHOLE if mapped else True
            params[name] = (*[whole] * len(consts), *params[name])
        if mapped:
            params = {**params, **row.holding([building.as_body(params, jaxpr)])}
        return [Value(_jax.aval_of(x), x) for x in consts], params

    def _in_rule(self, scopes: tuple[str, ...]) -> Callable[[Any], Any]:
        """Returns what replaces the same in the rule of a function."""

        def change(program):
            block = graph.build(*_jax.open_jaxpr(program), scopes)
            return replaced(program, block, self._find.apart())

        return change

    def _spliced(self, found: Any, ins: Sequence[Value], into: list[Equation]) -> list[Value]:
        """Appends what runs in the place of some ops, and returns its results."""
        matmul = found.at
        avals, outs = [v.aval for v in ins], [v.aval for v in found.result.outs]
        key = found.run, found.how, *avals
        if key not in self._traced:

            def run(*arrays):
                results = found.run(found.how, arrays)
                # In a shard_map, a type names the mesh axes over which its values vary.
                results = [functools.reduce(vary_like, arrays, x) for x in results]
                typed = zip(outs, results, strict=True)
                return [_jax.typed_as(aval, x.astype(aval.dtype)) for aval, x in typed]

            # The user's settings at this line, as the mesh around it, hold for the replacement too.
            with matmul.eqn.ctx.manager:
                self._traced[key] = _jax.trace(run, avals, "replaced")
        first = len(into)
        stack = matmul.stack.extend(PLANNED) if found.planned else matmul.stack
        results = opened(self._traced[key], ins, into, stack=stack)
        for e in into[first:]:
            e.like = e.like.replace(source_info=matmul.eqn.source_info)
        return results


# The errors of kernels that do not support a batch of what they run.
REFUSALS = NotImplementedError, ValueError, RuntimeError, TypeError


def batch(program: Any, axis: Any, which: Sequence[bool]) -> tuple[Any, Sequence[bool]]:
    """Returns the closed jaxpr of batched arguments, and which results are batched.

    What a kernel does not run for a batch at once, it runs one by one.
    """
    try:
        return building.batched(program, axis, which)
    except REFUSALS:
        each = all_equations(_jax.open_jaxpr(program)[0])
        planned = (e.primitive.name for e, site, _ in each if PLANNED in site.scopes)
        # Without a kernel, the error is the one that JAX raises for the function itself.
        if not any(rule_of(name) is UNKNOWN for name in planned):
            raise
        return building.one_by_one(program, axis, which)
