"""Which equations belong to the backward pass: those that depend on a cotangent.

JAX puts all that a backward pass runs under `transpose`, also what it only computes again: in
`jax.checkpoint`, in the rules of a custom_vjp, in the planner's own recomputation. These equations
read residuals, and no cotangent. A cotangent enters where the transpose of a linear equation reads
a value that is no residual: the number 1 that `jax.grad` begins with, or a value that the forward
pass neither makes nor reads. All that is computed of it under `transpose` depends on it.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import is_float
from mpjax._src.core.base.higher_order import MAP, Inside, higher_order
from mpjax._src.core.program.graph import AGAIN, walked

# What of a program an equation is, as its name stack says.
OTHER, FORWARD, BACKWARD, REPEATED = "", "forward", "backward", "repeated"

Key = tuple[int, ...]


def key_of(eqn: Any, callers: Iterable[Any]) -> Key:
    """Returns the key of an equation in a program, inside of others: JAX shares what it traced."""
    return (*map(id, callers), id(eqn))


def derived_in(jaxpr: Any, more: Callable[[Any], Any] = lambda eqn: None) -> frozenset[Key]:
    """Returns the keys of the equations of a program that depend on a cotangent, while it lives.

    Args:
        jaxpr: The program, open or closed.
        more: A function from an equation that is mapped over devices to another program of it, or
            None. Keys of that program's equations are returned too.
    """
    graph = _Graph(more)
    inner, _ = _jax.open_jaxpr(jaxpr)
    graph.enter(inner, [graph.node(v.aval) for v in inner.invars], (), OTHER)
    return graph.derived()


@dataclasses.dataclass(eq=False, slots=True)
class _Op:
    """An equation where it runs, with the numbers of its operands and results."""

    key: Key
    eqn: Any
    part: str
    ins: Sequence[int]
    outs: Sequence[int]
    hands_on: bool  # whether its results are joined to its operands one by one


class _Graph:
    """The equations of a program and of those inside, and the flow of their values."""

    def __init__(self, more: Callable[[Any], Any]):
        self.more = more
        self.ops: list[_Op] = []
        # Of each value: whether it is floating, its shape, the values that it enters a program as
        # and those that it entered as it, what reads it, and the part of what made it, or None.
        self.floats: list[bool] = []
        self.shapes: list[Any] = []
        self.ahead: list[list[int]] = []
        self.behind: list[list[int]] = []
        self.readers: list[list[_Op]] = []
        self.made: list[str | None] = []
        self.ones: list[int] = []  # literals of 1
        self.constants: set[int] = set()

    def node(self, aval: Any) -> int:
        self.floats.append(is_float(aval))
        self.shapes.append(getattr(aval, "shape", ()))
        self.ahead.append([])
        self.behind.append([])
        self.readers.append([])
        self.made.append(None)
        return len(self.floats) - 1

    def join(self, source: int, target: int) -> None:
        self.ahead[source].append(target)
        self.behind[target].append(source)

    def _constant(self, aval: Any, value: Any = None) -> int:
        number = self.node(aval)
        self.constants.add(number)
        if self.floats[number] and np.ndim(value) == 0 and value == 1:
            self.ones.append(number)
        return number

    def enter(self, jaxpr: Any, args: Sequence[int], around: Key, part: str) -> list[int]:
        """Adds an open jaxpr, and returns its results."""
        env = dict(zip(jaxpr.invars, args, strict=True))
        env |= {v: self._constant(v.aval) for v in jaxpr.constvars}

        def read(atom):
            literal = isinstance(atom, _jax.Literal)
            return self._constant(atom.aval, atom.val) if literal else env[atom]

        for eqn in jaxpr.eqns:
            ins, outs = [*map(read, eqn.invars)], [self.node(v.aval) for v in eqn.outvars]
            env |= zip(eqn.outvars, outs, strict=True)
            row = higher_order(eqn.primitive.name)
            programs, here = [*row.wire(eqn)], _part(eqn.source_info.name_stack, part)
            moved = eqn.primitive.name in rules.BARRIERS and len(ins) == len(outs)
            op = _Op((*around, id(eqn)), eqn, here, ins, outs, moved or bool(programs))
            self.ops.append(op)
            if row.kind == MAP and (other := self.more(eqn)) is not None:
                programs.append(programs[0]._replace(program=other))
            for inside in programs:
                self._inside(inside, op)
            for pair in zip(ins, outs, strict=True) if moved else ():
                self.join(*pair)
            for number in {*ins}:
                self.readers[number].append(op)
            for number in () if op.hands_on else outs:
                self.made[number] = here
        return [*map(read, jaxpr.outvars)]

    def _inside(self, inside: Inside, op: _Op) -> None:
        inner, _ = _jax.open_jaxpr(inside.program)
        args = [self.node(v.aval) for v in inner.invars]
        for place, number in zip(inside.ins, args, strict=True):
            self.join(op.ins[place], number)
        results = self.enter(inner, args, op.key, op.part)
        for number, out in zip(results, inside.outs, strict=True):
            if out is not None:
                self.join(number, op.outs[out])
        for result, argument in inside.carry:
            self.join(results[result], args[argument])

    def derived(self) -> frozenset[Key]:
        """Returns the keys of what depends on a cotangent."""
        backward = [op for op in self.ops if op.part in (BACKWARD, REPEATED)]
        if not backward:
            return frozenset()
        seeds = [op for op in backward if op.part == BACKWARD and self._reads_seed(op)]
        ends = {*walked([n for op in seeds for n in op.outs], self._computed)}
        found = {op for op in backward if not ends.isdisjoint(op.ins)} | {*seeds}
        # What leads to nothing of this has a cotangent that is not known, such as a constant.
        used = {*walked([n for op in found for n in op.ins], self._read)}
        others = (op for op in backward if op.part == BACKWARD and used.isdisjoint(op.outs))
        found |= {op for op in others if any(self.floats[n] for n in op.outs)}
        return frozenset(op.key for op in found)

    # ---- where a cotangent enters ----

    def _reads_seed(self, op: _Op) -> bool:
        """Returns whether the transpose of a linear equation reads a cotangent from outside."""
        name, operands = op.eqn.primitive.name, op.ins
        if op.hands_on or not _jax.is_transposable(op.eqn.primitive):
            return False
        if name == "div":
            operands = operands[:1]
        given = [n in self._given for n in operands]
        one = [n in self._one for n in operands]
        if name in rules.SUMS_OF_TWO:  # cotangents are added to cotangents alone
            return all(a or b for a, b in zip(given, one, strict=True))
        if any(given):
            return True
        # A rule of a custom_vjp may compute with the number 1, but does not multiply by it.
        multiplies = name == "mul" or (len(one) > 1 and self.constants.issuperset(op.ins))
        return any(one) and (multiplies or _jax.call_of(op.eqn) in self._calls_of_numbers)

    @functools.cached_property
    def _one(self) -> set[int]:
        """The values that may be the number 1."""
        return {*walked(self.ones, self.ahead.__getitem__)}

    @functools.cached_property
    def _given(self) -> set[int]:
        """The floating values from outside that the forward pass neither makes nor reads."""
        forward = (op for op in self.ops if op.part == FORWARD and not op.hands_on)
        read = {*walked([n for op in forward for n in op.ins], self.behind.__getitem__)}
        roots = [n for n, behind in enumerate(self.behind) if not behind]
        kept = {n for n in roots if n in read or self.made[n] == FORWARD}
        others = (n for n in roots if self.floats[n] and self.made[n] in (None, OTHER))
        outside = [n for n in others if n not in kept and n not in self.constants]
        ahead = self.ahead.__getitem__
        return {*walked(outside, ahead)} - {*walked(kept, ahead)}

    @functools.cached_property
    def _calls_of_numbers(self) -> set[Any]:
        """The calls that make the numbers that JAX differentiates, such as a loss.

        The equations of a custom_vjp's rule have the call of the custom_vjp.
        """
        forward = (op for op in self.ops if op.part == FORWARD and not op.hands_on)
        return {_jax.call_of(op.eqn) for op in forward if not any(self.shapes[n] for n in op.outs)}

    # ---- walks ----

    def _computed(self, number: int) -> Iterable[int]:
        """Yields what a backward pass computes of a value."""
        yield from self.ahead[number]
        for op in self.readers[number]:
            if op.part in (BACKWARD, REPEATED) and not op.hands_on:
                yield from op.outs

    @functools.cached_property
    def _makers(self) -> dict[int, _Op]:
        parts = (BACKWARD, REPEATED)
        makers = (op for op in self.ops if op.part in parts and not op.hands_on)
        return {n: op for op in makers for n in op.outs}

    def _read(self, number: int) -> Iterable[int]:
        """Yields what a backward pass computes a value of."""
        yield from self.behind[number]
        if number in self._makers:
            yield from self._makers[number].ins


def _part(stack: Any, around: str) -> str:
    """Returns the part of an equation, whose stack begins inside of one of another part."""
    transforms = _jax.transforms(stack)
    if around == REPEATED:
        return REPEATED
    if around == BACKWARD or "transpose" in transforms:
        again = AGAIN in (*_jax.scope_names(stack), *transforms)
        return REPEATED if again else BACKWARD
    return FORWARD if around == FORWARD or "jvp" in transforms else OTHER
