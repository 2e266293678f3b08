"""Changes a program whose calls were inlined, and puts them back.

What changes inside of a jit stays inlined. A checkpoint is put together again: that it runs a
second time is what its author asked for. A custom rule cannot change, for its derivative would not.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building
from mpjax._src.core.base.higher_order import REMATS, higher_order
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.equations import Call, Equation, Value, closed, opened


class Opened:
    """A program as a list of equations, with all its calls inlined, and the places of the calls.

    Attributes:
        ins: Its arguments.
        equations: Its equations.
        outs: Its results.
        place: Where each value is made.
        ruled: The equations whose author wrote their backward pass.
    """

    def __init__(self, program: Any) -> None:
        self.ins = [Value(aval) for aval in _jax.in_avals(program)]
        self.equations: list[Equation] = []
        calls: list[Call] = []
        self.outs = opened(program, self.ins, self.equations, rules=True, calls=calls)
        self.place = {out: i for i, e in enumerate(self.equations) for out in e.outs}
        # `opened` lists the innermost calls first: of two with the same extent, the later is outer.
        order = sorted(range(len(calls)), key=lambda i: (calls[i].start, -calls[i].stop, -i))
        self._calls = [calls[i] for i in order]  # outer ones first
        self._starts = [c.start for c in self._calls]
        self._fixed: dict[int, Call] = {}
        for call in filter(_is_fixed, self._calls):
            # The outermost call that is fixed wins: only its results can be read around it.
            self._fixed.update((i, self._fixed.get(i, call)) for i in range(call.start, call.stop))
        rules = [c for c in calls if higher_order(c.equation.name).backward]
        self.ruled = {e for c in rules for e in self.equations[c.start : c.stop]}
        self._info = building.anonymous(program)

    def is_fixed(self, v: Value) -> bool:
        """Returns whether a value is made inside of a call that cannot change."""
        return self.place.get(v) in self._fixed

    def is_reached(self, v: Value) -> bool:
        """Returns whether the program around a call that cannot change can read a value."""
        return not self.is_fixed(v) or v in self._fixed[self.place[v]].equation.outs

    def inside(self, change: Callable[[Any], Any]) -> list[Value]:
        """Changes the programs of loops, branches and maps; returns what the changed ones make."""
        found: list[Value] = []
        for i, e in enumerate(self.equations):
            if rounding.programs(e) and e.outs and not self.is_fixed(e.outs[0]):
                params = rounding.with_programs(e, change)
                if params is not e.params:
                    self.equations[i] = dataclasses.replace(e, params=params)
                    found += e.outs[:1]
        return found

    def changed(
        self,
        values: Sequence[Value],
        alias: dict[Value, Value],
        write: Callable[[Value, Equation, list[Equation]], None],
    ) -> Any:
        """Returns the closed jaxpr of the program with more equations.

        Args:
            values: The values behind which equations are written.
            alias: What is read in the place of a value; ``write`` may add to it.
            write: Appends equations: of one of the values, and the equation that makes it.
        """
        self._touched = {self.place[v] for v in values}
        self._values, self._alias, self._write = {*values}, alias, write
        equations = self._between(0, len(self.equations), 0, len(self._calls))
        outs = [alias.get(v, v) for v in self.outs]
        return closed(self.ins, self._grouped(equations, outs), outs, self._info)

    def _between(self, start: int, stop: int, first: int, last: int) -> list[Equation]:
        """Returns the new equations in the place of old ones; these calls are among them."""
        into: list[Equation] = []
        at = start
        for c in range(first, last):
            call = self._calls[c]
            if call.start < at or call.start == call.stop:
                continue  # it stands in the one before, or holds nothing
            self._append(self.equations[at : call.start], into)
            at = call.stop
            if _is_fixed(call) or self._touched.isdisjoint(range(call.start, call.stop)):
                self._put_back(call, into)
                continue
            behind = bisect.bisect_left(self._starts, call.stop)
            inside = self._between(call.start, call.stop, c + 1, behind)
            into += [_waiting(call, inside)] if call.equation.name in REMATS else inside
        self._append(self.equations[at:stop], into)
        return into

    def _append(self, equations: Iterable[Equation], into: list[Equation]) -> None:
        for e in equations:
            into.append(e.on(self._alias.get(v, v) for v in e.ins))
            for out in e.outs:
                if out in self._values:
                    self._write(out, e, into)

    def _put_back(self, call: Call, into: list[Equation]) -> None:
        e = call.equation
        made = {out for i in range(call.start, call.stop) for out in self.equations[i].outs}
        outs: list[Value] = []
        for out in e.outs:  # an argument that is returned is read where it comes from
            outs.append(out if out in made and out not in outs else Value(out.aval))
        self._append([e.on(e.ins, outs=outs)], into)

    def _grouped(self, equations: Sequence[Equation], results: Sequence[Value]) -> list[Equation]:
        """Puts the equations of checkpoints together; leaves out what nobody reads."""
        read, found = {*results}, []
        for e in reversed(equations):
            if not e.acts and read.isdisjoint(_made(e)):
                continue
            # Backwards, since a checkpoint returns what is read behind it.
            e = self._checkpoint(e, read) if WAITING in e.params else e
            read.update(e.ins)
            found.append(e)
        return found[::-1]

    def _checkpoint(self, e: Equation, read: set[Value]) -> Equation:
        outs = [v for v in _made(e) if v in read]
        inside = self._grouped(e.params[WAITING], outs)
        made = {v for i in inside for v in i.outs}
        ins = dict.fromkeys(v for i in inside for v in i.ins if v not in made and not v.literal)
        # The jaxpr of a checkpoint stands alone: values around it become its arguments.
        names = {v: Value(v.aval) for v in ins}
        body = [i.on(names.get(v, v) for v in i.ins) for i in inside]
        program = closed([*names.values()], body, outs, self._info)
        params = {k: p for k, p in e.params.items() if k != WAITING}
        return e.on(ins, outs=outs, params={**params, "jaxpr": _jax.open_jaxpr(program)[0]})


WAITING = "waiting"  # the parameter that has the equations of a checkpoint


def _is_fixed(call: Call) -> bool:
    e = call.equation
    return e.is_custom or (e.name in REMATS and e.params["differentiated"])


def _made(e: Equation) -> list[Value]:
    return [v for i in e.params.get(WAITING, (e,)) for v in (_made(i) if i is not e else e.outs)]


def _waiting(call: Call, inside: list[Equation]) -> Equation:
    e = call.equation
    barred = e.params["prevent_cse"]  # it has other operands
    barred = any(barred) if isinstance(barred, tuple) else barred
    params = {**e.params, "prevent_cse": barred, WAITING: inside}
    # The scopes around it are those of its equations.
    return dataclasses.replace(e, params=params, stack=building.NO_SCOPES)
