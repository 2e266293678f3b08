"""Which forward values are rounded once for all their readers: rule F, for bytes moved.

A value that two kernels read is written to memory, in float32: the residual stream of a model. It
may be written in 16 bits if on every walk from it to the matmuls that read it, the error of that is
no larger than the errors that the roundings of matmuls make anyway. What is rounded is the rest of
the value, without its levels (`levels`).

An error keeps its size relative to its value in products, norms and views. These make it larger,
and so refuse the rounding:

- the value is returned, or something is that is made of it and carries no rounding of a matmul;
- a sum in which what the value is made of meets it again, or two values made of it meet, or it
  meets what no matmul has rounded: the terms may cancel, and the rounding remains;
- the mean over an axis is taken off along which it may have a level;
- exp, logarithms, sines, thresholds and orders, unless what they read carries the rounding of a
  matmul, of its own size: they make that larger as well;
- a loop, a kernel, a backward pass by its author, or anything that is not known, reads it.

A value of which each entry carries the rounding of a matmul has an error of this size already. It
is refused only where that cancels, and another one would not.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base.rules import LOOKS_UP, ORDERS, PART, SELECT, SPREAD
from mpjax._src.core.planner import kinds, rounding
from mpjax._src.core.planner.dependence import Ahead, Order
from mpjax._src.core.planner.equations import Equation, Value
from mpjax._src.core.planner.kinds import NO_AXES, Axes, axes_of_view, every, moved
from mpjax._src.core.planner.levels import Facts
from mpjax._src.core.planner.prices import of_several, read_by_several
from mpjax._src.core.planner.rounding import is_zero

NOT_ROUNDED = "a sum with what no matmul has rounded"

# A walk over more equations is given up, so that planning grows with the program.
LONGEST = 400


class State(NamedTuple):
    """A value on a walk: it is made of the first value of the walk.

    Attributes:
        places: Where the axes of the first value are.
        level: The axes along which the part that carries the new error may have a level.
        summed: The axes of the first value over which a sum was taken.
        shift: By which concatenations the entries moved; None if they moved otherwise.
        view: Whether it is the first value in another layout.
        statistic: Whether it is made of sums alone.
        plain: Whether nothing was done to the first value but adding others, and moving entries.
    """

    places: dict[int, set[int]]
    level: Axes
    summed: Axes = NO_AXES
    shift: tuple[Any, ...] | None = ()
    view: bool = False
    statistic: bool = False
    plain: bool = True

    @property
    def still(self) -> bool:
        """Whether each entry stands where it stands in values of the same shift."""
        return self.shift is not None

    def is_aligned_with(self, other: "State") -> bool:
        """Returns whether the entries of two values that meet are made of the same entries."""
        pairs = ((at, other.places[a]) for a, at in self.places.items())
        return self.shift == other.shift and all(x == y or not x or not y for x, y in pairs)


class Walks:
    """The walks over the equations of a program.

    Attributes:
        facts: What is known of its values.
        sources: What each value is made of, as bits: arguments, results of matmuls, parts of
            arrays.
        ruled: The equations whose author wrote their backward pass.
    """

    def __init__(
        self,
        equations: Sequence[Equation],
        results: Collection[Value],
        facts: Facts,
        ruled: Collection[Equation] = (),
    ) -> None:
        self.ruled = ruled
        self.facts, self.sources = facts, _sources(equations, facts)
        self._order, self._results = Order(equations), {*results}

    def refused(self, first: Value, found: Collection[Value] = ()) -> str | None:
        """Returns why a value is not rounded, or None.

        Args:
            first: The value.
            found: Values that are rounded. A walk ends there: they have as large an error.
        """
        if first in self._results:
            return "returned"
        walk, ahead = Walk(self, first), Ahead(self._order, [first])
        for e in ahead:
            step = walk.step(e) if len(ahead) <= LONGEST else "too far"
            if isinstance(step, str):
                return step
            for out in e.outs:
                if step is None or not out.is_float32 or out in found:
                    continue
                walk.states[out] = step
                # A caller sees the rounding of a view, and one that no error of its size hides.
                if out in self._results and (step.view or not walk.carries(out)):
                    return "returned"
                ahead.add([out])
        return None


def _sources(equations: Sequence[Equation], facts: Facts) -> dict[Value, int]:
    """Finds what the large parts of values are made of: terms and factors may be the same ones."""
    found: dict[Value, int] = {}
    count = 0
    for e in equations:
        # The parts of a split array share no entries, so each is a source of its own.
        own = facts.kinds[e] == kinds.MATMUL or (PART in e.rule.traits and e.outs[1:])
        bits, parts = 0, e.ins
        if facts.kinds[e] in (kinds.ADDED, kinds.MULTIPLIED):
            parts = [v for v in e.ins if not facts.constant_along(v, e.outs[0])] or e.ins
        for v in parts:
            if v.is_float32 and v.const is None and v not in found:
                found[v] = 1 << count
                count += 1
            bits |= found.get(v, 0)
        for out in e.outs:
            count += bool(own)
            found[out] = 1 << count - 1 if own else bits
    return found


class Walk:
    """A walk from a value to what reads it.

    Attributes:
        facts: What is known of values.
        sources: What values are made of.
        first: The value where it begins.
        levels: The axes along which its rest may have a level.
        states: The values that it has reached, and what is known of them.
    """

    def __init__(self, walks: Walks, first: Value) -> None:
        self.facts, self.sources, self.first = walks.facts, walks.sources, first
        self._ruled = walks.ruled
        self.levels = self.facts.level(first)
        self.states = {first: State({a: {a} for a in every(first)}, self.levels, view=True)}

    def step(self, e: Equation) -> State | str | None:
        """Returns what is known of the results of an equation, or why it refuses the rounding."""
        mine = [v for v in e.ins if v in self.states]
        if not mine:
            return None
        # Of several, the one that has all entries stands for the axes, and not a mean of it.
        largest = max(mine, key=lambda v: (v.size, -len(self.states[v].summed)))
        if e in self._ruled and not all(map(self.carries, mine)):
            return "read by a rule of its author"
        kind = self.facts.kinds[e]
        state = STEPS[kind](self, e, mine, largest) if kind in STEPS else f"read by {e.name}"
        # ``a - v`` negates it.
        adds = kind in PLAIN and not (e.inverts and e.ins[1] in mine)
        return state._replace(plain=state.plain and adds) if isinstance(state, State) else state

    def carries(self, v: Value) -> bool:
        """Returns whether a value has an error as large as the new one already."""
        still = self.facts.noise(self.first) == 2 and self.states[v].still
        return still or self.facts.noise(v) == 2

    def joined(self, mine: Sequence[Value], largest: Value) -> State:
        """Returns what is known of a value that is made of several."""
        each = [self.states[v] for v in mine]
        return self.states[largest]._replace(
            summed=NO_AXES.union(*(x.summed for x in each)),
            shift=each[0].shift if all(map(each[0].is_aligned_with, each)) else None,
            view=False,
            statistic=all(x.statistic for x in each),
            plain=all(x.plain for x in each),
        )


Step = Callable[[Walk, Equation, Sequence[Value], Value], State | str | None]


def _ends(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> None:
    """A matmul rounds what it reads itself."""


def _view(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> State | str:
    # A walk knows one thing of all results of an equation, and those of a barrier differ.
    if e.is_barrier and len(e.ins) > 1:
        return "read by a barrier"
    state, places, out = walk.states[v], axes_of_view(e), e.outs[0]
    spread = walk.facts.constant_along(out, out) if e.name == SPREAD else NO_AXES
    at = {a: {*moved(axes, places)} for a, axes in state.places.items()}
    return state._replace(places=at, level=moved(state.level, places) | spread)


def _moved(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> State:
    joined, out = walk.joined(mine, v), e.outs[0]
    # Values that were concatenated alike can still be compared entry by entry.
    place = (e.params.get("dimension"), e.ins.index(v))
    single = e.name == "concatenate" and len(mine) == 1
    shift = (*joined.shift, place) if single and joined.shift is not None else None
    joined = joined._replace(shift=shift)
    joined = joined._replace(view=all(walk.states[x].view for x in mine))
    if len(v.shape) == len(out.shape) and LOOKS_UP not in e.rule.traits:
        return joined
    anywhere = {a: {*every(out)} for a in joined.places}
    return joined._replace(places=anywhere, level=every(out) if joined.level else NO_AXES)


def _added(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> State | str:
    return _sum_of_two(walk, e, mine, v) if len(mine) == 2 else _sum_with(walk, e, v)


def _sum_of_two(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> State | str:
    """Both terms are made of the first value."""
    joined, f = walk.joined(mine, v), walk.facts
    positive = not e.inverts and all(map(f.is_positive, mine))
    # Entries of the same sign cancel where others are their negatives: not of all that vary.
    positive |= not e.inverts and joined.plain and not joined.still and f.is_varied(walk.first)
    carries = f.noise(walk.first) == 2 and (joined.still or bool(joined.summed))
    if not positive and not carries and e.ins[0] is not e.ins[1]:
        if joined.summed & walk.levels:
            return "its own mean over an axis along which it may have a level"
        if not joined.still or not any(walk.states[x].statistic for x in mine):
            return "a sum of two values made of it"
    if not joined.summed:
        return joined._replace(level=every(v))
    return joined._replace(level=joined.level - moved(joined.summed, joined.places))


def _sum_with(walk: Walk, e: Equation, v: Value) -> State | str:
    """The other term is not made of the first value."""
    f, state = walk.facts, walk.states[v]._replace(view=False)
    other = e.ins[1] if e.ins[0] is v else e.ins[0]
    constant = f.constant_along(other, e.outs[0])
    # Terms of the other one are constant where this one may have a level, and may take it off.
    cancels = [axes for axes in (constant, *f.terms(other)) if axes and axes <= state.level]
    if (not e.inverts and f.is_positive(other) and f.is_positive(v)) or is_zero(other):
        return state
    shared = walk.sources.get(other, 0) & (walk.sources[v] | walk.sources[walk.first])
    if shared and (cancels or not constant):
        return "a sum with what it is made of"
    # A norm has no units: no parameter takes its level off.
    bias = f.learned(other) and (v in f.normed or walk.first in f.normed)
    rounded = bool(constant) or f.noise(other) == 2
    if not walk.carries(v) and ((cancels and not bias) or not rounded):
        return NOT_ROUNDED
    return state if constant else state._replace(level=state.level | f.level(other))


def _multiplied(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> State:
    joined, f = walk.joined(mine, v), walk.facts
    if len(mine) == 2:
        each = [walk.states[x] for x in mine if not walk.states[x].statistic]
        return joined._replace(level=each[0].level if len(each) == 1 else every(v))
    if e.inverts and e.ins[1] is v:
        return joined._replace(level=every(v))
    (other,) = [x for x in e.ins if x is not v]
    # A level times what has none along its axis is none: it stays where the factor has one too.
    levels = f.all_levels(other) | f.constant_along(other, e.outs[0])
    return joined._replace(level=joined.level & levels) if not other.literal else joined


def _picked(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> State | str:
    joined = walk.joined(mine, v)
    others = [x for x in e.ins if x not in mine and not is_zero(x)]
    if e.name != SELECT and (others or len(mine) > 1) and not all(map(walk.carries, mine)):
        return "a threshold"
    return joined._replace(level=NO_AXES.union(*(walk.states[x].level for x in mine)))


def _simple(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> State:
    state = walk.states[v]._replace(view=False)
    return state if e.name == "neg" else state._replace(level=every(v))


def _special(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> State | str:
    if not all(map(walk.carries, mine)):
        return f"read by {e.name}"
    return walk.joined(mine, v)._replace(level=every(v))


def _ordered(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> State | str:
    if not walk.carries(v):
        return f"read by {e.name}"
    anywhere = {a: {*every(e.outs[0])} for a in walk.states[v].places}
    return walk.states[v]._replace(shift=None, view=False, places=anywhere, level=every(e.outs[0]))


def _compared(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> str | None:
    ordered = e.name in ORDERS
    # Rounding leaves signs as they are.
    if e.name in ("sign", "is_finite") or (ordered and any(map(is_zero, e.ins))):
        return None
    return None if ordered and all(map(walk.carries, mine)) else f"compared by {e.name}"


def _summed(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> State | str:
    state, axes = walk.states[v]._replace(view=False), frozenset(e.params["axes"])
    if walk.facts.kinds[e] != kinds.SUMMED and not walk.carries(v):
        return f"read by {e.name}"
    if not state.still and not walk.carries(v) and not walk.facts.is_positive(v):
        return "a sum of parts of it"
    # Over a part of an axis, as a group of channels, a value may have a mean though it has none
    # over the whole axis.
    partly = frozenset(a for a, at in state.places.items() if at & axes and not at <= axes)
    walk.levels |= partly
    summed = state.summed | {a for a, at in state.places.items() if at & axes}
    left = kinds.without_axes(v, axes)
    at = {a: {*moved(places, left)} for a, places in state.places.items()}
    level = every(e.outs[0]) if state.level & axes else moved(state.level, left)
    return state._replace(places=at, level=level, summed=frozenset(summed), statistic=True)


def _sums(walk: Walk, e: Equation, mine: Sequence[Value], v: Value) -> State | str:
    if e.name.startswith("scatter") and e.ins[0] in walk.states and not walk.carries(e.ins[0]):
        return NOT_ROUNDED
    joined, out = walk.joined(mine, v), e.outs[0]
    anywhere = {a: {*every(out)} for a in joined.places}
    return joined._replace(
        shift=None, places=anywhere, level=every(out), summed=frozenset(joined.places)
    )


PLAIN = {*kinds.VIEWS, kinds.MOVED, kinds.ADDED}
STEPS: dict[str, Step] = {
    kinds.MATMUL: _ends,
    kinds.SAME: _view,
    kinds.LAYOUT: _view,
    kinds.MOVED: _moved,
    kinds.ADDED: _added,
    kinds.MULTIPLIED: _multiplied,
    kinds.SELECTED: _picked,
    kinds.SUMMED: _summed,
    kinds.SUMS: _sums,
    kinds.EXTREME: _summed,
    kinds.ORDERED: _ordered,
    kinds.COMPARED: _compared,
    kinds.SIMPLE: _simple,
    kinds.SPECIAL: _special,
}


def streams(
    equations: Sequence[Equation],
    results: Collection[Value],
    half: np.dtype,
    ruled: Collection[Equation] = (),
) -> tuple[list[Value], Facts]:
    """Returns the values that are rounded once for all their readers, and what is known of all.

    Args:
        equations: The equations of a program, without derivatives.
        results: What the program returns.
        half: The 16-bit dtype.
        ruled: The equations whose author wrote their backward pass, of which nothing is known.
    """
    values = candidates(equations, results, half)
    # Facts take a walk over all equations: none is needed without candidates.
    facts = Facts(equations if values else ())
    values = [v for v in values if not _is_scaled(v, facts)]
    if not values:
        return [], facts
    walks = Walks(equations, results, facts, ruled)
    # bfloat16 has the range of float32.
    if half == np.float16:
        in_range = _in_float16_range(equations, walks)
        values = [v for v in values if v in in_range]
    found: set[Value] = set()
    # Backwards: the walk from a value ends at the values behind it that are rounded already.
    for v in reversed(values):
        if walks.refused(v, found) is None:
            found.add(v)
    # What its readers can compute from one 16-bit array is not written, so nothing is gained.
    return of_several(equations, found), facts


def candidates(
    equations: Sequence[Equation], results: Collection[Value], half: np.dtype
) -> list[Value]:
    """Returns the large float32 values that two kernels read, in the order of their equations."""
    made = rounding.made(equations, (), half)
    several = read_by_several(equations, results)
    return [
        out
        for e in equations
        if not (rounding.is_view(e) or rounding.is_full(e))
        for out in e.outs
        if out in several and rounding.is_large(out) and out not in made
    ]


def _is_scaled(v: Value, facts: Facts) -> bool:
    """Returns whether a value is a product with a small array.

    A norm behind it takes the factor off again. Its gradient vanishes then, if the norm reads the
    product itself.
    """
    e = facts.maker[v]
    small = [x for x in e.ins if facts.constant_along(x, v) and not facts.is_known(x)]
    return facts.kinds[e] == kinds.MULTIPLIED and bool(small)


def _in_float16_range(equations: Sequence[Equation], walks: Walks) -> set[Value]:
    """Returns the values that float16 holds as well as it holds what matmuls make and read.

    Others may be too large for it, or too small, as temperatures are. A norm has no units.
    """
    facts, sources = walks.facts, walks.sources
    found: set[Value] = set()
    # First what matmuls make or read, then what is made of that without leaving its range.
    for e in reversed(equations):
        matmul = rounding.is_half_matmul(e)
        if matmul or (rounding.is_view(e) and not found.isdisjoint(e.outs)):
            found.update(v for v in e.ins[: 2 if matmul else None] if v.is_float32)
        found.update(e.outs if matmul else ())
    for e in equations:
        floats = [v for v in e.ins if v.is_float32 and not is_zero(v)]
        if facts.kinds[e] == kinds.ADDED:  # beside its terms
            floats = [v for v in floats if not facts.constant_along(v, e.outs[0])] or floats
        keeps = facts.kinds[e] in (*PLAIN, kinds.SELECTED) or e.name in ("neg", "abs")
        own = False
        if e.outs[0] in facts.normed and facts.kinds[e] == kinds.MULTIPLIED:
            # By its own size, or scaled.
            first, last = (sources.get(v, 0) for v in e.ins)
            own = bool(first & last) or any(v in found and v in facts.normed for v in e.ins)
        if own or (floats and keeps and found.issuperset(floats)):
            found.update(e.outs)
    return found
