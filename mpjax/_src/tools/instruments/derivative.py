"""Says which operation a derivative belongs to, and where this derivative is NaN or Inf.

JAX writes the derivative of an operation with other operations, and computes what does not depend
on the cotangent in the forward pass: for ``sqrt``, ``div 0.5 sqrt(x)``. The equations of a function
are numbered before JAX differentiates it, so each equation of a derivative has the number of the
operation that it belongs to. The function runs once more, without its backward pass, to get the
operands of this operation. Its derivative there, for a cotangent of ones, shows whether the
derivative itself is non-finite, or only its product with a cotangent.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import HALVES
from mpjax._src.core.base.rules import rule_of
from mpjax._src.core.program.interpret import Watcher, enters, interpret, run, run_in_float32, take
from mpjax._src.core.program.site import Site
from mpjax._src.tools.instruments.programs import Program
from mpjax._src.tools.instruments.ranges import Range, counts, is_number, largest_finite, range_of

# The longest expression that a report states; a longer one is shortened to the numbers inside.
LONGEST = 40


@dataclasses.dataclass(frozen=True)
class Producer:
    """An operation that ran, as it is recognized in another run: by its name and its ranges."""

    name: str
    inputs: tuple[Range, ...]  # the ranges of its operands
    result: Range  # the range of its result
    place: Site = dataclasses.field(default_factory=Site)
    lines: tuple[str, str] = ("", "")  # its line, and that of the library that it calls there

    @property
    def alone(self) -> "Producer":
        """The same operation at any place."""
        return Producer(self.name, self.inputs, self.result)


def derivative_at(
    program: Program, maker: Producer, before: Sequence[Producer | None]
) -> dict[str, Any] | None:
    """Returns what a report says of the derivative that an operation belongs to, if non-finite.

    The equations of the program are numbered. The operation produced NaN or Inf; those that did
    ``before`` it say which of the equal ones it is, with None for each bad argument. None is
    returned if it belongs to the function itself, or if the derivative is finite, and only its
    product with a cotangent overflowed.
    """
    place = maker.place
    eqn: Any = program.equations[place.numbers[-1]] if place.numbers else None
    if eqn is None or _runs_others(eqn):
        return None
    search = _Search(program, maker, eqn.primitive.name)
    named = zip(program.arrays, program.names, strict=True)
    args = [_Moving(x, name in program.parameters) for x, name in named]
    interpret(program.alone, args, search)
    # A rule may compute for the derivative what the function itself computes too.
    if search.producers.count(maker.alone) > before.count(maker):
        return _taken_inside(program, maker, search)
    term = search.operands and _unbounded(eqn, search.operands)
    if not term:
        return None
    return _derivative(_name(eqn, program, place), term, search.operands or ())


def _taken_inside(program: Program, maker: Producer, search: "_Search") -> dict[str, Any] | None:
    """Returns the derivative that an operation of the function itself belongs to.

    The function differentiates, as for a gradient penalty. The operation is on the same line, and
    its derivative is computed by the same operation.
    """
    around = (program.equations[number].source_info.name_stack for number in maker.place.numbers)
    transforms = {name for stack in around for name in _jax.transforms(stack)}
    for eqn, operands, place in search.line if "jvp" in transforms else ():
        term = _unbounded(eqn, operands)
        if term and (
            term.producer == maker.alone
            or ("transpose" in transforms and term.producer.name == maker.name)
        ):
            return _derivative(_name(eqn, program, place), term, operands)
    return None


def _derivative(name: str, term: "_Term", operands: Sequence["_Moving"]) -> dict[str, Any]:
    return {
        "derivative_of": name,
        "derivative": term.value,
        "expression": term.expression,  # how JAX computes it there
        "inputs": ranges_of(operands),
        "result": range_of(term.array),  # of the expression for all entries
        "largest": term.largest,
    }


def _name(eqn: Any, program: Program, place: Site) -> str:
    """Returns the name of an operation as the user wrote it: the plan may replace one by a call."""
    op: Any = None if place.op is None else program.ops[place.op].eqn
    planned = op is not None and _is_custom(eqn) and not _runs_others(op)
    written = op if planned else eqn
    return _jax.called(written) if _is_custom(written) else written.primitive.name


def _runs_others(eqn: Any) -> bool:
    """Returns whether an equation only runs others, which have their own derivatives."""
    return enters(eqn) and not _is_custom(eqn)


def _is_custom(eqn: Any) -> bool:
    return eqn.primitive.name.startswith("custom_")


# ---- the function alone -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Moving:
    """An array, and whether it depends on what is differentiated."""

    array: Any
    moves: bool = False


class _Search(Watcher):
    """The watcher that finds an operation of the function by its number and iteration.

    Attributes:
        operands: Its operands, or None.
        producers: It, or the operations inside of it, without their places.
        line: The operations on the line of ``maker``, in the order in which they run, with their
            operands and places.
    """

    def __init__(self, program: Program, maker: Producer, name: str):
        self._program, self._maker, self._name = program, maker, name
        self.operands: list[_Moving] | None = None
        self.producers: list[Producer] = []
        self.line: list[tuple[Any, list[_Moving], Site]] = []

    def operation(self, eqn: Any, ins: list[_Moving], place: Site) -> list[_Moving]:
        outs = run(eqn, [v.array for v in ins])
        if self._is_around(place):
            self.entered(eqn, ins, place)
            self.producers += _producers(eqn, ins, outs)
        if self._is_on_line(eqn, place) and self._maker.alone not in _producers(eqn, ins, outs):
            self.line.append((eqn, list(ins), place))
        moves = any(v.moves for v in ins)
        return [_Moving(x, moves and jnp.issubdtype(x.dtype, jnp.inexact)) for x in outs]

    def entered(self, eqn: Any, ins: list[_Moving], place: Site) -> None:
        own = self._is_around(place) and place.numbers[-1] == self._maker.place.numbers[-1]
        own &= eqn.primitive.name == self._name  # and no cast of its operand
        if own and self.operands is None:
            self.operands = list(ins)
        if _is_custom(eqn) and self._is_on_line(eqn, place):
            self.line.append((eqn, list(ins), place))

    def _is_around(self, place: Site) -> bool:
        # Differentiation moves what is the same in every iteration out of loops.
        wanted = self._maker.place
        return {*wanted.numbers} <= {*place.numbers} and {*wanted.loops} <= {*place.loops}

    def _is_on_line(self, eqn: Any, place: Site) -> bool:
        here = place.loops == self._maker.place.loops
        return here and self._program.lines(eqn, place) == self._maker.lines

    def constant(self, array: Any) -> _Moving:
        return _Moving(array)

    def slice(self, value: _Moving, index: int) -> _Moving:
        return _Moving(take(value.array, index), value.moves)

    def stack(self, values: Sequence[_Moving]) -> _Moving:
        return _Moving(jnp.stack([v.array for v in values]), any(v.moves for v in values))


def ranges_of(values: Sequence[Any]) -> tuple[Range, ...]:
    """Returns the ranges of the arrays of numbers among some values."""
    return tuple(range_of(v.array) for v in values if is_number(v.array))


def _producers(eqn: Any, ins: Sequence[Any], outs: Sequence[Any]) -> list[Producer]:
    ranges = ranges_of(ins)
    return [Producer(eqn.primitive.name, ranges, range_of(x)) for x in outs if is_number(x)]


# ---- the derivative of one operation ------------------------------------------------------------


def _unbounded(eqn: Any, operands: Sequence[_Moving]) -> "_Term | None":
    """Returns the term that makes the derivative of an operation NaN or Inf, or None."""
    rule = rule_of(eqn.primitive.name)
    if rule.linear or rule.need == rules.HALF:
        return None  # its derivative is computed from its operands; a sum of them may overflow
    active = [i for i, v in enumerate(operands) if v.moves]

    def operation(*moving):
        values = dict(zip(active, moving, strict=True))
        outs = run(eqn, [values.get(i, v.array) for i, v in enumerate(operands)])
        return [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]

    def derivative(*moving):
        outs, pull = jax.vjp(operation, *moving)
        return list(pull([jnp.ones_like(x) for x in outs]))

    moving = [operands[i].array for i in active]
    jaxpr = _jax.trace(derivative, [_jax.aval_of(x) for x in moving], "derivative")
    results = interpret(jaxpr, [_Term(x) for x in moving], _Terms())
    return next((term.origin for term in results if term.origin), None)


@dataclasses.dataclass(frozen=True, eq=False)
class _Term:
    """An array, and how it was computed."""

    array: Any
    eqn: Any = None
    terms: Sequence["_Term"] = ()

    @functools.cached_property
    def origin(self) -> "_Term | None":
        """The first term that is NaN or Inf although its terms are finite, if this one is."""
        if not any(counts(self.array)):
            return None
        earlier = (term.origin for term in self.terms)
        return next(filter(None, earlier), None if self._index is None else self)

    @functools.cached_property
    def _index(self) -> tuple[int, ...] | None:
        """The index of a non-finite entry that was computed from finite entries."""
        if self.eqn is None:
            return None
        fresh = ~np.isfinite(_wide(self.array))
        for term in self.terms:
            finite = np.isfinite(_wide(term.array))
            fresh = fresh & (finite if finite.shape == fresh.shape else finite.all())
        return tuple(map(int, np.argwhere(fresh)[0])) if fresh.any() else None

    @property
    def producer(self) -> Producer:
        """The operation that computed it."""
        return _producers(self.eqn, self.terms, [self.array])[0]

    @property
    def value(self) -> str:
        """The non-finite entry: "Inf", "-Inf" or "NaN"."""
        entry = _wide(self.array)[self._index]
        return "NaN" if np.isnan(entry) else "-Inf" if entry.real < 0 else "Inf"

    @property
    def largest(self) -> float | None:
        """Its largest magnitude in float32, if it is finite there and overflows 16 bits."""
        half = self.array.dtype in HALVES
        wide = run_in_float32(self.eqn, [term.array for term in self.terms]) if half else None
        if wide is None or len(wide) > 1 or any(counts(wide[0])):
            return None
        return largest_finite(wide[0])

    @property
    def expression(self) -> str:
        """The expression of this entry with its numbers, or "" if it has none."""
        if not _is_elementwise(self):
            return ""
        texts = (self._text(self._index, depth)[0] for depth in (4, 3, 2, 1))
        formula = next((text for text in texts if len(text) <= LONGEST), "")
        narrow = formula and self.array.dtype in HALVES
        return f"{formula} in {self.array.dtype.name}" if narrow else formula

    def _text(self, index: Any, depth: int) -> tuple[str, int]:
        """Returns the expression of an entry, and how tightly its operator binds."""
        index = index if np.ndim(self.array) else ()
        if depth == 0 or not _is_elementwise(self):
            return _number(_wide(self.array)[index])
        name = self.eqn.primitive.name
        if name in SAME:
            return self.terms[0]._text(index, depth)
        if name == "select_n":
            which = int(_wide(self.terms[0].array)[index if np.ndim(self.terms[0].array) else ()])
            return self.terms[1 + which]._text(index, depth)
        texts = [term._text(index, depth - 1) for term in self.terms]
        if name in rules.SQUARES:
            texts.append(_number(self.eqn.params.get("y", 2)))
        sign, binds = OPERATORS.get(name, ("", ATOM))
        if not sign:
            return f"{name}({', '.join(text for text, _ in texts)})", ATOM
        if len(texts) == 1:
            return f"{sign}{_within(texts[0], ATOM)}", binds
        # The right operand of ``-``, ``/`` and ``**`` needs brackets, except a negative exponent.
        left = _within(texts[0], binds + (sign == "**"))
        right = texts[1][0] if sign == "**" and texts[1][1] == SIGNED else None
        return f"{left}{sign}{right or _within(texts[1], binds + 1)}", binds


ATOM, SIGNED = 4, 0
# The signs of operations, and how tightly they bind. A power binds its base tightest.
OPERATORS = {
    **dict.fromkeys(rules.ADDITIONS, (" + ", 1)),
    "sub": (" - ", 1),
    "neg": ("-", 1),
    "mul": (" * ", 2),
    "div": (" / ", 2),
    **dict.fromkeys(rules.SQUARES | {"pow"}, ("**", 3)),
}
# Operations that pass entries on.
SAME = frozenset({"broadcast_in_dim", "convert_element_type", "copy", "stop_gradient"})
# Elementwise operations that are costly to repeat.
COSTLY = frozenset(
    {
        *("lgamma", "digamma", "polygamma", "zeta", "igamma", "igammac", "igamma_grad_a"),
        *("regularized_incomplete_beta", "bessel_i0e", "bessel_i1e"),
    }
)


def _is_elementwise(term: _Term) -> bool:
    """Returns whether each entry of a term depends on the same entries of its terms, or of one."""
    if term.eqn is None:
        return False
    name, shape = term.eqn.primitive.name, np.shape(term.array)
    rule = rule_of(name)
    by_entries = name in SAME | COSTLY or (
        rule.cost != rules.NEVER and rule.need in (rules.FOLLOW, rules.FULL)
    )
    return by_entries and all(np.shape(t.array) in (shape, ()) for t in term.terms)


def _within(text: tuple[str, int], binds: int) -> str:
    return text[0] if text[1] >= binds else f"({text[0]})"


def _number(x: Any) -> tuple[str, int]:
    text = f"{x:.3g}"
    return text, SIGNED if text.startswith("-") else ATOM


def _wide(x: Any) -> np.ndarray[Any, Any]:
    """Returns an array as NumPy computes with it."""
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype in HALVES else x


class _Terms(Watcher):
    """The watcher that remembers how everything was computed."""

    def operation(self, eqn: Any, ins: list[_Term], place: Site) -> list[_Term]:
        return [_Term(x, eqn, tuple(ins)) for x in run(eqn, [v.array for v in ins])]

    def constant(self, array: Any) -> _Term:
        return _Term(array)

    def slice(self, value: _Term, index: int) -> _Term:
        return _Term(take(value.array, index))

    def stack(self, values: Sequence[_Term]) -> _Term:
        return _Term(jnp.stack([v.array for v in values]))
