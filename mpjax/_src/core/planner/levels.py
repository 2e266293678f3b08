"""What is known of forward values: the roundings that they carry, and levels beside them.

A *level* of a value along an axis is what it has in common there: ``300 + x`` has one along every
axis, and its rounding is as large as if all of it were signal. Whoever takes the level off, as a
norm does, is left with the rounding of the level. So a value is rounded without it:

- *Terms* are parts of a sum that are constant along an axis, as biases, position tables and
  conditioning are. They are small arrays, and stay float32.
- Of what the planner knows nothing, as an argument or the rows of a table, the mean over the last
  axis is such a term of every sum that it enters.

What is left of the value is called its *rest*.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base import rules
from mpjax._src.core.base._jax.rounded import ROUNDED
from mpjax._src.core.base.rules import LOOKS_UP
from mpjax._src.core.planner import kinds
from mpjax._src.core.planner.equations import Equation, Value
from mpjax._src.core.planner.kinds import NO_AXES, VIEWS, Axes, axes_of_view, every, moved
from mpjax._src.core.planner.rounding import is_zero

Pieces = frozenset[Axes]
NO_TERMS: Pieces = frozenset()

# A term has at most this part of the entries of its sum.
SMALL_TERM = 4

# How numbers are computed from numbers.
FOLDED: dict[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (operator.add, operator.sub, operator.mul, max)},
    rules.CAST: np.float64,
}


# What is never negative.
POSITIVE = {*rules.EXPONENTIALS, *rules.ROOTS, "logistic", "square", "abs"}


class Found(NamedTuple):
    """What is known of a value.

    Attributes:
        noise: How large the roundings are that its rest carries already: 2 is that of each of its
            entries, 1 that of a part of it, 0 none.
        level: The axes along which its rest may have a level.
        terms: Along which axes each of its terms is constant.
    """

    noise: int
    level: Axes
    terms: Pieces = NO_TERMS


class Facts:
    """What is known of the float32 values of equations.

    Attributes:
        maker: The equation that makes a value.
        fixed: Values that are computed from constants alone.
        inverse_roots: What norms multiply by: one over the root of a value, times a small array.
        normed: The products. They have no units any more.
    """

    def __init__(self, equations: Sequence[Equation]) -> None:
        self.maker = {out: e for e in equations for out in e.outs}
        self.kinds = {e: kinds.kind_of(e) for e in equations}
        self.fixed, self.normed, self.inverse_roots = set[Value](), set[Value](), set[Value]()
        self._positive, self._learned, self._varied = set[Value](), set[Value](), set[Value]()
        self._square_roots, self._numbers = set[Value](), dict[Value, Any]()
        self._found: dict[Value, Found] = {}
        self._wholes: dict[Value, Value] = {}  # where the terms of parts come from
        for e in equations:
            kind = self.kinds[e]
            # An operation without operands, as `iota`, is known, too.
            known = all(v.const is not None or v in self.fixed for v in e.ins)
            if known and kind != kinds.UNKNOWN and not e.acts:
                self.fixed.update(e.outs)
            if known and e.name in FOLDED:
                self._fold(e)
            for out in e.outs:
                if not out.is_float32:
                    continue
                if self._is_positive(e, kind):
                    self._positive.add(out)
                # Of a kind without a finder, the worst is assumed.
                self._found[out] = FINDERS.get(kind, _unknown)(self, e, out)
                self._trace(e, kind, out)
                if self._is_varied(e, kind, out):
                    self._varied.add(out)

    def of(self, v: Value) -> Found:
        """Returns what is known of a value; of others the worst is assumed."""
        return self._found.get(v) or Found(0, every(v))

    def noise(self, v: Value) -> int:
        """Returns how large the roundings are that the rest of a value carries already."""
        return self.of(v).noise

    def whole_noise(self, v: Value) -> int:
        """Returns the same of a value with its terms, which carry none."""
        return min(self.noise(v), 1 if self.terms(v) else 2)

    def level(self, v: Value) -> Axes:
        """Returns the axes along which the rest of a value may have a level."""
        return self.of(v).level

    def terms(self, v: Value) -> Pieces:
        """Returns along which axes each term of a value is constant; none if it has no terms."""
        return self.of(v).terms

    def all_levels(self, v: Value) -> Axes:
        """Returns the axes along which a value may have a level, by its terms too."""
        return self.level(v).union(*self.terms(v))

    def learned(self, v: Value) -> bool:
        """Returns whether a value is an argument, in another layout, or all of its terms are."""
        return v in self._learned or (v not in self.maker and v.const is None)

    def is_varied(self, v: Value) -> bool:
        """Returns whether a value's large terms are rows of tables, or carry their roundings.

        The rows of a table are parameters: none is another one with the other sign.
        """
        return v in self._varied

    def is_positive(self, v: Value) -> bool:
        """Returns whether no entry is below zero."""
        if v in self._positive:
            return True
        # Numbers are literals, as an epsilon, or folded from some, as the count of a mean.
        number = v.const if v.literal else self._numbers.get(v)
        return number is not None and not np.any(np.asarray(number) < 0)

    def is_known(self, v: Value) -> bool:
        """Returns whether a value is a constant, or computed from constants."""
        return v.const is not None or v in self.fixed

    def constant_along(self, v: Value, out: Value) -> Axes:
        """Returns the axes along which an operand is constant, if it is a small array, else none.

        Args:
            v: The operand.
            out: The result of the operation that reads it.
        """
        whole = out.shape
        if not v.shape:
            return frozenset(range(len(whole)))
        e = self.maker.get(v)
        spread = e is not None and e.name == rules.SPREAD
        # An array of full size differs along all axes, unless it was spread to that size.
        if len(v.shape) != len(whole) or (v.shape == whole and not spread):
            return NO_AXES
        axes = {i for i, (a, b) in enumerate(zip(v.shape, whole, strict=True)) if a == 1 < b}
        if e is not None and spread:
            at = dict(zip(e.params["broadcast_dimensions"], e.ins[0].shape, strict=True))
            axes |= {i for i, n in enumerate(whole) if n > 1 and at.get(i, 1) == 1}
        # Spread over few entries only, it is no small array beside the sum.
        few = math.prod(whole[i] for i in axes) < SMALL_TERM
        return NO_AXES if few else frozenset(axes)

    def mean_of(self, u: Value, v: Value) -> Axes | None:
        """Returns the axes over which u is the sum, mean, maximum or minimum of v, or None."""
        e = self.maker.get(u)
        while e is not None and self.kinds[e] not in (kinds.SUMMED, kinds.EXTREME):
            scaled = self.kinds[e] == kinds.MULTIPLIED and any(x.literal for x in e.ins)
            # JAX scales a sum to a mean and spreads it. A transpose would take it to other axes.
            spread = self.kinds[e] in VIEWS and e.name != "transpose" and not e.is_barrier
            if not scaled and not spread:
                return None
            u = next((x for x in e.ins if not x.literal), e.ins[0])
            e = self.maker.get(u)
        return frozenset(e.params["axes"]) if e is not None and e.ins[0] is v else None

    def unknown_level(self, v: Value) -> bool:
        """Returns whether a term of a sum takes its mean over the last axis beside it."""
        axis = len(v.shape) - 1
        exact = axis > 0 and self.noise(v) == 0
        return exact and axis in self.level(v) and v.shape[axis] >= SMALL_TERM

    def _trace(self, e: Equation, kind: str, out: Value) -> None:
        constant = [v for v in e.ins if self.constant_along(v, out)]
        # A sum or product is made of its large operands; small ones are its terms and factors.
        large = [v for v in e.ins if v not in constant] or constant
        computed = large if kind in (kinds.ADDED, kinds.MULTIPLIED) else []
        parts = e.ins[:1] if kind in VIEWS else computed
        self._trace_norms(e, kind, out, parts, parts == constant)
        terms = [v for v in parts if self.terms(v) or kind in VIEWS]
        terms += constant if kind == kinds.ADDED else []
        if parts and all(map(self.learned, terms)):
            self._learned.add(out)

    def _trace_norms(
        self, e: Equation, kind: str, out: Value, parts: Sequence[Value], small: bool
    ) -> None:
        multiplies = kind == kinds.MULTIPLIED
        scales = multiplies and not e.inverts and any(v in self.inverse_roots for v in e.ins)
        if e.name in rules.ROOTS and not self.is_known(e.ins[0]):
            # Norms are written as ``x * rsqrt(v)``, ``x / sqrt(v)`` or ``x * (1 / sqrt(v))``.
            (self._square_roots if e.name == "sqrt" else self.inverse_roots).add(out)
        elif kind in VIEWS or scales:
            for found in (self.inverse_roots, self._square_roots):
                if any(v in found for v in e.ins) and (small or all(v in found for v in parts)):
                    found.add(out)
        elif multiplies and e.inverts and e.ins[1] in self._square_roots:
            (self.inverse_roots if small or e.ins[0].literal else self.normed).add(out)
        # What is made of a norm has no units either, in another layout or with a bias added.
        if out in self.inverse_roots or kind not in (*VIEWS, kinds.ADDED, kinds.MULTIPLIED):
            return
        if scales or any(v in self.normed for v in parts):
            self.normed.add(out)

    def _is_positive(self, e: Equation, kind: str) -> bool:
        floats = [self.is_positive(v) for v in e.ins if v.is_float32]
        even = e.name == "integer_pow" and e.params["y"] % 2 == 0
        if e.name in POSITIVE or even or (kind == kinds.MULTIPLIED and e.ins[0] is e.ins[1]):
            return True
        # The logarithm or the sine of a positive number may be negative.
        unknown = kind in (kinds.SPECIAL, kinds.UNKNOWN, kinds.MATMUL)
        negative = e.name == "neg" or (kind == kinds.ADDED and e.inverts)
        if unknown or negative or not floats:
            return False
        # A maximum is at least as large as each of its operands, as in a ReLU.
        return any(floats) if e.name == "max" else all(floats)

    def _is_varied(self, e: Equation, kind: str, out: Value) -> bool:
        if self.noise(out) == 2 or _is_lookup(self, e):
            return True
        if kind not in (*VIEWS, kinds.ADDED):
            return False
        floats, adds = self._floats(e), kind == kinds.ADDED
        # A bias is the same in all rows: they differ as before.
        large = [v for v in floats if not (adds and self.constant_along(v, out))] or floats
        return bool(floats) and self._varied.issuperset(large)

    def _fold(self, e: Equation) -> None:
        """Computes a number from numbers, such as the count of a mean."""
        numbers = [v.const if v.literal else self._numbers.get(v) for v in e.ins]
        if all(x is not None and not np.ndim(x) for x in numbers):
            self._numbers[e.outs[0]] = FOLDED[e.name](*numbers)

    def _floats(self, e: Equation) -> list[Value]:
        return [v for v in e.ins if v.is_float32 and not is_zero(v)]

    def _least(self, e: Equation) -> int:
        return min((self.noise(v) for v in self._floats(e)), default=0)

    def _most(self, e: Equation) -> int:
        return max((self.noise(v) for v in self._floats(e)), default=0)


def _view(f: Facts, e: Equation, out: Value) -> Found:
    v = e.ins[e.outs.index(out)] if e.is_barrier else e.ins[0]
    if not v.is_float32 or out in f.fixed:
        return _unknown(f, e, out)
    if e.name == ROUNDED:
        # From here on, each entry carries this rounding.
        return Found(2, f.level(v))
    places = axes_of_view(e)
    if e.name == rules.SPREAD:
        return _of_whole(f, v, moved(f.all_levels(v), places) | f.constant_along(out, out))
    # Axes that a reshape merges are one axis behind it: a term that is constant along a part of
    # them varies along that.
    groups = {a: {b for b in places if places[b] == places.get(a)} for a in places}
    terms = f.terms(v)
    if any(groups.get(a, {a}) - axes for axes in terms for a in axes):
        return _of_whole(f, v, moved(f.all_levels(v), places))
    return Found(f.noise(v), moved(f.level(v), places), frozenset(moved(t, places) for t in terms))


def _of_whole(f: Facts, v: Value, levels: Axes) -> Found:
    """Returns the facts of what is made of a whole value: its rest and its terms together."""
    return Found(f.whole_noise(v), levels)


def _moved(f: Facts, e: Equation, out: Value) -> Found:
    floats = [v for v in f._floats(e) if not f.is_known(v)]
    least = min(map(f.whole_noise, floats), default=0)
    if _is_lookup(f, e):
        return Found(0, frozenset(e.params["dimension_numbers"].offset_dims))
    # Halves that change places, as for a rotation, have the terms of the whole.
    whole = _whole_of_parts(f, e)
    if whole is not None:
        f._wholes[out] = whole
        level = NO_AXES.union(*map(f.level, floats))
        return Found(min(map(f.noise, floats)), level, f.terms(whole))
    # Where the number of axes stays, each is what it was, except for a gather.
    alike = all(len(v.shape) == len(out.shape) for v in floats) and LOOKS_UP not in e.rule.traits
    if alike and len(floats) == 1:
        return Found(least, f.all_levels(floats[0]))
    if e.name == "concatenate":
        return Found(least, NO_AXES.union(*(_of_part(f, e, v) for v in floats)))
    return Found(least, every(out) if any(map(f.all_levels, floats)) else NO_AXES)


def _whole_of_parts(f: Facts, e: Equation) -> Value | None:
    """Returns a value whose terms are those of parts of it too, put together along their axes."""
    floats = [v for v in e.ins if v.is_float32]
    wholes = {f._wholes.get(v, v) for v in floats}
    if e.name not in ("slice", "concatenate", "rev") or len(wholes) != 1:
        return None
    (whole,) = wholes
    before, after = floats[0].shape, e.outs[0].shape
    axes: set[int | None]
    axes = {i for i, (n, m) in enumerate(zip(before, after, strict=True)) if n != m}
    axes |= {e.params.get("dimension"), *e.params.get("dimensions", ())}
    terms = f.terms(whole)
    # Along the axis of the cut, each term must be the same in all parts.
    return whole if terms and all(axes - {None} <= term for term in terms) else None


def _of_part(f: Facts, e: Equation, v: Value) -> Axes:
    """Returns the levels that a part of a concatenation brings: a small one fills no axis."""
    axis = e.params["dimension"]
    few = v.shape[axis] * SMALL_TERM <= e.outs[0].shape[axis]
    return f.all_levels(v) - ({axis} if few else NO_AXES)


def _is_lookup(f: Facts, e: Equation) -> bool:
    """Returns whether rows of a table are taken that is an argument: they differ."""
    if LOOKS_UP not in e.rule.traits:
        return False
    table = e.ins[0]
    whole = tuple(e.params["slice_sizes"]) == (1, *table.shape[1:])
    return table not in f.maker and table.const is None and len(table.shape) == 2 and whole


def _added(f: Facts, e: Equation, out: Value) -> Found:
    first, second = e.ins
    own = f.mean_of(second, first) if e.inverts else None
    if own is not None:  # the terms of the result are those of the operand, less their mean
        left = frozenset(axes for axes in f.terms(first) if not own <= axes)
        return Found(f.noise(first), f.level(first) - own, left)
    floats = f._floats(e)
    constant = {v: f.constant_along(v, out) for v in floats}
    terms = NO_TERMS.union(axes for axes in constant.values() if axes)
    large = [v for v in floats if not constant[v]]
    if not large:
        return Found(f._most(e), NO_AXES, terms)
    noises = [f.noise(v) for v in large]
    level, terms = NO_AXES.union(*map(f.level, large)), terms.union(*map(f.terms, large))
    last = len(out.shape) - 1
    if any(map(f.unknown_level, large)):
        # Nothing is known of it, so its mean may be its level, and is a term from here on.
        terms |= {frozenset([last])}
        known = [v for v in large if not f.unknown_level(v)]
        level = level - {last} | NO_AXES.union(*map(f.level, known))
    # Where one large term is exact, the errors of the others are those of a part of the sum.
    return Found(2 if min(noises) == 2 else min(1, max(noises)), level, terms)


def _multiplied(f: Facts, e: Equation, out: Value) -> Found:
    if e.ins[0] is e.ins[1]:
        # A square has one sign, and so a level along every axis.
        return _of_whole(f, e.ins[0], every(out))
    constant = {v: f.constant_along(v, out) for v in e.ins}
    large = [v for v in e.ins if not constant[v]]
    if not large:
        both = constant[e.ins[0]] & constant[e.ins[1]]
        return Found(f._most(e), *((NO_AXES, frozenset([both])) if both else (every(out),)))
    if len(large) == 1 and (not e.inverts or large[0] is e.ins[0]):
        (v,), (beside,) = large, (axes for axes in constant.values() if axes)
        # A term times a factor is constant where both are. If that is nowhere, it is no term any
        # more.
        terms = frozenset(axes & beside for axes in f.terms(v))
        found = Found(f.noise(v), f.level(v), terms)
        return found if all(terms) else _of_whole(f, v, f.all_levels(v))
    # The signs of a factor without a level vary, and with them those of the product.
    levels = (f.all_levels(v) | constant[v] for v in e.ins)
    return Found(f._most(e), every(out).intersection(*levels))


def _selected(f: Facts, e: Equation, out: Value) -> Found:
    floats = [v for v in f._floats(e) if not f.is_known(v)]
    numbers = [v for v in f._floats(e) if f.is_known(v) and e.name != rules.SELECT]
    # Whatever is cut off at a number has that number in common.
    levels = every(out) if numbers else NO_AXES.union(*map(f.all_levels, floats))
    return Found(min(map(f.whole_noise, floats), default=0), levels)


def _summed(f: Facts, e: Equation, out: Value) -> Found:
    v, axes = e.ins[0], frozenset(e.params["axes"])
    few = math.prod(v.shape[axis] for axis in axes) <= SMALL_TERM
    levels, noise = f.all_levels(v), min(2 if few else 1, f.whole_noise(v))
    # A sum over entries of one sign, or of a level, is large everywhere: that is a level of its
    # own.
    if f.is_positive(v) or levels & axes:
        return Found(noise, every(out))
    return Found(noise, moved(levels, kinds.without_axes(v, axes)))


def _sums(f: Facts, e: Equation, out: Value) -> Found:
    levels = any(map(f.all_levels, f._floats(e)))
    return Found(min(1, f._least(e)), every(out) if levels else NO_AXES)


def _simple(f: Facts, e: Equation, out: Value) -> Found:
    v = e.ins[0]
    if e.name == "neg":
        return f.of(v)
    odd = e.name == "integer_pow" and e.params["y"] % 2
    return _of_whole(f, v, f.all_levels(v) if odd else every(out))


def _special(f: Facts, e: Equation, out: Value) -> Found:
    # Odd functions leave entries of both signs around zero; others, as exp, do not.
    odd = e.name in ("tanh", "erf", "sin", "atan", "asinh")
    return Found(min(1, f._least(e)), f.all_levels(e.ins[0]) if odd else every(out))


def _unknown(f: Facts, e: Equation, out: Value) -> Found:
    return Found(0, every(out))


FINDERS: dict[str, Callable[[Facts, Equation, Value], Found]] = {
    kinds.MATMUL: lambda f, e, out: Found(2, NO_AXES),
    kinds.SAME: _view,
    kinds.LAYOUT: _view,
    kinds.MOVED: _moved,
    kinds.ADDED: _added,
    kinds.MULTIPLIED: _multiplied,
    kinds.SELECTED: _selected,
    kinds.SUMMED: _summed,
    kinds.SUMS: _sums,
    kinds.EXTREME: lambda f, e, out: _of_whole(f, e.ins[0], every(out)),
    kinds.SIMPLE: _simple,
    kinds.SPECIAL: _special,
}
