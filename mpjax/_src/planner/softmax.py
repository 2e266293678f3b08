"""What of a softmax its rounded weights tell, whatever its spelling.

Weights are exponentials times factors that are smaller arrays: one divided by a sum of exponentials,
perhaps with a constant, or the exponential of a log-sum-exp. So rounded weights, divided by the
factors, are *exactly* the exponentials of scores that have moved by at most a rounding unit. All
that the backward part reads of the softmax is computed again from them: sums, factors, weights.
That makes it the derivative of this softmax at the moved scores. Its rows sum to one, so that common
parts of cotangents cancel, and the difference between a confident row's weight and one has a small
relative error. Rounded weights alone have neither.
"""

import heapq
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax._src.base import _jax
from mpjax._src.planner import kinds
from mpjax._src.planner.equations import Equation, Value, opened, readers_of
from mpjax._src.planner.kinds import kind_of, shape
from mpjax._src.planner.levels import SMALL_TERM

EXPONENTIALS = ("exp", "exp2")
# What keeps relative errors of sums of exponentials, and absolute ones of their logarithms.
STEADY = {kinds.SAME, kinds.LAYOUT, kinds.MULTIPLIED, kinds.SIMPLE, kinds.PICKED, kinds.ADDED}
VIEWS = {kinds.SAME, kinds.LAYOUT}
# A softmax of more equations is left alone, so that planning grows with the program.
LONGEST = 80


class Way(NamedTuple):
    """How a value is computed from exponentials: by factors, which are smaller arrays, and masks."""

    top: Equation
    steps: list[tuple[Equation, Value | None]]  # what it multiplies with or divides by, if anything
    masks: set[Value]

    def exponentials(self, v: Value, into: list[Equation]) -> Value:
        """Appends what computes the exponentials from the value."""
        for e, factor in self.steps:
            if factor is not None:
                inverse = jax.lax.mul_p if e.name == "div" else jax.lax.div_p
                v = _append(inverse, [v, factor], self.top, into, {})
        return v


class Line(NamedTuple):
    """How an exponent is computed from a value, by adding smaller arrays, and scaling.

    Attributes:
        scales: The values on the way back from the exponent, and by what it is a multiple of each.
        equations: The equations between them, the last one first.
    """

    scales: dict[Value, float]
    equations: list[Equation]


class Softmax(NamedTuple):
    """Weights that are exponentials times factors.

    Attributes:
        way: How they are computed from exponentials.
        equations: Those from the exponentials to the weights, in order.
        tops: The exponentials of the same scores, and the lines of their exponents.
        scores: A value on all lines.
    """

    way: Way
    equations: list[Equation]
    tops: dict[Equation, Line]
    scores: Value

    def again(self, rounded: Value, into: list[Equation]) -> dict[Value, Value]:
        """Appends what computes its values from the rounded weights, and returns those."""
        got: dict[Value, Value] = {}
        last, y = self.way.top, self.way.exponentials(rounded, into)
        for e in self.equations:
            if e not in self.tops:
                got[e.outs[0]] = _append(e.primitive, [got.get(v, v) for v in e.ins], e, into)
                continue
            if e is not last:  # their exponents differ by smaller arrays
                new, old = (self._shift(x, got, into) for x in (e, last))
                ratio = _append(jax.lax.sub_p, [new, old], e, into, {})
                ratio = _append(e.primitive, [ratio], e, into)
                y = _append(jax.lax.mul_p, [y, ratio], e, into, {})
            got[e.outs[0]], last = y, e
        return got

    def _shift(self, top: Equation, got: dict[Value, Value], into: list[Equation]) -> Value:
        """Appends an exponent for scores of zero."""
        zeros = _jax.trace(lambda: [_jax.zeros_of(self.scores.aval)], [], "zeros")
        env = {**got, self.scores: opened(zeros, [], into, again=True, stack=top.stack)[0]}
        line = self.tops[top]
        below = [*line.scales].index(self.scores)
        for e in reversed(line.equations[:below]):
            env[e.outs[0]] = _append(e.primitive, [env.get(v, v) for v in e.ins], e, into)
        return env[top.ins[0]]


def _append(
    primitive: Any, ins: Sequence[Value], like: Equation, into: list[Equation], params: Any = None
) -> Value:
    """Appends an equation to the backward part whose result has the type of another one's."""
    out = Value(like.outs[0].aval)
    params = like.params if params is None else params
    into.append(like.on(ins, outs=[out], primitive=primitive, params=params, again=True))
    return out


class Finder:
    """Finds softmaxes in the equations of a forward part."""

    def __init__(self, forward: Sequence[Equation]) -> None:
        self.forward = forward
        self.maker = {out: e for e in forward for out in e.outs}
        self.readers = readers_of(forward)
        self.place = {e: i for i, e in enumerate(forward)}

    def softmax(self, weights: Value) -> Softmax | None:
        """Returns the softmax of which a value is the weights, if there is one."""
        way = self._way(weights)
        if way is None:
            return None
        line = self._line(way.top.ins[0])
        tops, before, after = self._from(line, way.top)
        found = self._back(weights, way, tops, before, after) if way.top in tops else None
        if found is None:
            return None
        tops = {e: x for e, x in tops.items() if e in found}
        scores = next(v for v in line.scales if all(v in x.scales for x in tops.values()))
        return Softmax(way, found, tops, scores)

    def _way(self, v: Value) -> Way | None:
        steps, masks = [], set()
        while (e := self.maker.get(v)) is not None and len(steps) < LONGEST:
            if e.name in EXPONENTIALS:
                return Way(e, steps, masks)
            step = next(self._step(e), None)
            if step is None:
                return None
            v, factor, mask = step
            steps.append((e, factor))
            masks |= {mask} - {None}
        return None

    def _step(self, e: Equation) -> Iterator[tuple[Value, Value | None, Value | None]]:
        """Yields of what an equation gives a multiple, by which factor, or by which mask."""
        if e.name == "select_n":
            left = [v for v in e.ins[1:] if not self._is_zero(v)]
            if len(left) == 1:
                yield left[0], None, e.ins[0]
        elif kind_of(e) == kinds.SAME and len(e.ins) == 1:
            yield e.ins[0], None, None
        elif e.name == "div" and self._is_small(e.ins[1], e):
            yield e.ins[0], e.ins[1], None
        elif e.name == "mul":
            for v, factor in (e.ins, e.ins[::-1]):
                mask = self._mask(factor)
                if mask is not None:
                    yield v, None, mask
                elif self._is_small(factor, e) and self._is_positive(factor):
                    yield v, factor, None

    def _line(self, v: Value) -> Line:
        line, scale = Line({v: 1.0}, []), 1.0
        while (e := self.maker.get(v)) is not None and len(line.equations) < LONGEST:
            large = [x for x in e.ins if not self._is_small(x, e)]
            if len(large) != 1:
                break
            (v,) = large
            numbers = [float(x.const) for x in e.ins if x.literal]
            if numbers and (e.name == "mul" or (e.name == "div" and v is e.ins[0])):
                scale = scale * numbers[0] if e.name == "mul" else scale / numbers[0]
            elif e.name == "neg" or (e.name == "sub" and v is e.ins[1]):
                scale = -scale
            elif e.name not in ("add", "sub") and kind_of(e) != kinds.SAME:
                break
            line.equations.append(e)
            line.scales[v] = scale
        return line

    def _from(
        self, line: Line, top: Equation
    ) -> tuple[dict[Equation, Line], set[Value], set[Value]]:
        """Returns the exponentials of the same scores, and what is made before and after them.

        Largest scores count as other numbers: a softmax is the same for all shifts.
        """
        first = [*line.scales][-1]
        before, after, tops = {first}, set[Value](), {}
        queue = [self.place[r] for r in self.readers[first]]
        heapq.heapify(queue)
        queued = {*queue}
        while queue and len(queued) <= LONGEST:
            e = self.forward[heapq.heappop(queue)]
            if kind_of(e) in (kinds.MATMUL, kinds.EXTREME, kinds.COMPARED):
                continue
            if e.name == top.name and not before.isdisjoint(e.ins):
                own = self._line(e.ins[0])
                if own.scales.get(first) == line.scales[first]:
                    tops[e] = own
            if e in tops or not after.isdisjoint(e.ins):
                after.update(e.outs)
            if e not in tops and not before.isdisjoint(e.ins):
                before.update(e.outs)
            for place in {self.place[r] for v in e.outs for r in self.readers[v]} - queued:
                queued.add(place)
                heapq.heappush(queue, place)
        return ({}, before, after) if queue else (tops, before, after)

    def _back(
        self,
        weights: Value,
        way: Way,
        tops: dict[Equation, Line],
        before: set[Value],
        after: set[Value],
    ) -> list[Equation] | None:
        """Returns the equations from the exponentials to the weights, if each keeps errors small."""
        found, ahead = set[Equation](), [weights]
        large = {e for e, _ in way.steps}
        lines = {e for line in tops.values() for e in line.equations}
        while ahead:
            e = self.maker[ahead.pop()]
            if e in found:
                continue
            found.add(e)
            if e in tops:
                read = [v for x in tops[e].equations for v in x.ins if v not in tops[e].scales]
            elif not before.isdisjoint(e.ins):
                return None
            else:
                read = e.ins
            if e.name == "reduce_sum" and not self._is_small(e.ins[0], way.top):
                own = self._way(e.ins[0])
                if own is None or own.top not in tops or not way.masks <= own.masks:
                    return None
                large |= {x for x, _ in own.steps}
            ahead += [v for v in read if v in after]
        ordered = sorted(found, key=lambda e: self.place[e])
        inner = {v for e in found for v in e.outs} - {weights}
        others = [r for v in inner for r in self.readers[v] if r not in found and r not in lines]
        if any(kind_of(r) != kinds.COMPARED for r in others):
            return None
        return ordered if self._is_steady(ordered, tops, large, after) else None

    def _is_steady(
        self,
        equations: Sequence[Equation],
        tops: dict[Equation, Line],
        large: set[Equation],
        after: set[Value],
    ) -> bool:
        """Returns whether what is computed from sums keeps relative errors as small as theirs."""
        logs: set[Value] = set()
        for e in equations:
            kind, mine = kind_of(e), [v for v in e.ins if v in after]
            if e in tops:
                read = [v for x in tops[e].equations for v in x.ins if v in after]
                if any(v not in logs for v in read if v not in tops[e].scales):
                    return False
            elif e.name == "log" or (e.name in EXPONENTIALS and logs.issuperset(mine)):
                logs.update(e.outs if e.name == "log" else ())
            elif e in large or e.name == "reduce_sum":
                continue
            elif kind not in STEADY or not self._is_small(e.outs[0], next(iter(tops))):
                return False
            elif logs.issuperset(mine):
                logs.update(e.outs)
            elif e.name in ("sub", "neg") or (
                kind == kinds.ADDED and not all(v in after or self._is_positive(v) for v in e.ins)
            ):
                return False
        return True

    def _is_small(self, v: Value, e: Equation) -> bool:
        """Returns whether a value is a small array beside the result of an equation, or one spread."""
        whole = _jax.size_of(shape(e.outs[0]))
        while SMALL_TERM * _jax.size_of(shape(v)) > whole:
            maker = self.maker.get(v)
            if maker is None or kind_of(maker) not in VIEWS:
                return False
            v = maker.ins[0]
        return True

    def _origin(self, v: Value) -> Value:
        while (e := self.maker.get(v)) is not None and kind_of(e) in VIEWS:
            if e.ins[0].aval.dtype == bool:
                break
            v = e.ins[0]
        return v

    def _is_zero(self, v: Value) -> bool:
        v = self._origin(v)
        return v.literal and not np.any(np.asarray(v.const))

    def _mask(self, v: Value) -> Value | None:
        e = self.maker.get(self._origin(v))
        return e.ins[0] if e is not None and e.name == "convert_element_type" else None

    def _is_positive(self, v: Value) -> bool:
        """Returns whether a value is a positive number, exponential, or inverse, so not zero."""
        v = self._origin(v)
        e = self.maker.get(v)
        if e is None:
            return v.literal and bool(np.all(np.asarray(v.const) > 0))
        if e.name in ("div", "mul"):
            return all(map(self._is_positive, e.ins[: 1 if e.name == "div" else 2]))
        inverse = e.name == "integer_pow" and e.params["y"] < 0
        return inverse or e.name in (*EXPONENTIALS, "rsqrt")


def softmaxes(forward: Sequence[Equation], read: Collection[Value]) -> dict[Value, Softmax]:
    """Returns softmaxes whose weights are among the values that matmuls alone read."""
    finder, found, inner = Finder(forward), dict[Value, Softmax](), set[Equation]()
    for e in reversed(forward):
        if e in inner or kind_of(e) in (*VIEWS, kinds.MOVED) or e.outs[0] not in read:
            continue
        softmax = finder.softmax(e.outs[0])
        if softmax is not None:
            found[e.outs[0]] = softmax
            inner.update(softmax.equations)
    return found
