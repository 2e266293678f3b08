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
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax._src.base import _jax
from mpjax._src.planner import kinds, rounding
from mpjax._src.planner.equations import Equation, Value, opened, readers_of
from mpjax._src.planner.kinds import kind_of, shape
from mpjax._src.planner.levels import SMALL_TERM

EXPONENTIALS = ("exp", "exp2")
# What scales with powers of its operand, and by which; what scales logarithms.
POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2}
SIGNS = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}
STEADY = {kinds.SAME, kinds.LAYOUT, kinds.MULTIPLIED, kinds.SIMPLE, kinds.PICKED, kinds.ADDED}
OUTSIDE = {*STEADY, kinds.SUMMED, kinds.MOVED}
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
                inverse = jnp.multiply if e.name == "div" else jnp.divide
                v = _append(inverse, [v, factor], self.top, into)
        return v


class Line(NamedTuple):
    """How an exponent is computed from a value, by adding smaller arrays, and scaling.

    Attributes:
        scales: The values on the way back from the exponent, and by what it is a multiple of each.
        terms: The smaller arrays, and by what the exponent is a multiple of each.
    """

    scales: dict[Value, float]
    terms: dict[Value, float]


class Scores(NamedTuple):
    """Exponentials of the same scores.

    Attributes:
        tops: The exponentials, and how their exponents are computed.
        before: What else is computed from the scores. A maximum of them is as any other number.
        after: What is computed from the exponentials.
    """

    tops: dict[Equation, Line]
    before: set[Value]
    after: set[Value]


class Softmax(NamedTuple):
    """Weights that are exponentials times factors.

    Attributes:
        way: How they are computed from exponentials.
        equations: Those from the exponentials to the weights, in order.
        tops: The exponentials of the same scores, and how their exponents are computed.
        scaled: Whether the weights are the same for multiples of the exponentials.
        sum: The sum of exponentials, if all else is computed from one.
    """

    way: Way
    equations: list[Equation]
    tops: dict[Equation, Line]
    scaled: bool
    sum: Equation | None

    def again(self, rounded: Value, into: list[Equation]) -> dict[Value, Value]:
        """Appends what computes its values from the rounded weights, and returns those."""
        got: dict[Value, Value] = {}
        last, y = next(e for e in self.equations if e in self.tops), rounded
        if self.scaled and self.sum is not None:  # exponentials whose sum is one
            got[last.outs[0]] = y
            self._run(self.equations[: self.equations.index(self.sum) + 1], got, into)
            axes = tuple(self.sum.params["axes"])
            total = got[self.sum.outs[0]]
            y = _append(lambda y, z: y / jnp.expand_dims(z, axes), [y, total], last, into)
            ones = _append(jnp.ones_like, [total], last, into)
            got = {self.sum.outs[0]: ones}
        elif not self.scaled:
            last, y = self.way.top, self.way.exponentials(rounded, into)
        for e in self.equations:
            if e in self.tops:  # their exponents differ by smaller arrays
                y = self._moved(y, last, e, got, into) if e is not last else y
                got[e.outs[0]], last = y, e
            elif e.outs[0] not in got:
                self._run([e], got, into)
        return got

    def _run(
        self, equations: Sequence[Equation], got: dict[Value, Value], into: list[Equation]
    ) -> None:
        for e in equations:
            if e not in self.tops:
                got[e.outs[0]] = Value(e.outs[0].aval)
                into.append(e.on((got.get(v, v) for v in e.ins), outs=[got[e.outs[0]]], again=True))

    def _moved(
        self, y: Value, old: Equation, new: Equation, got: dict[Value, Value], into: list[Equation]
    ) -> Value:
        """Appends what computes exponentials from others of the same scores."""
        before, after = (self.tops[e].terms for e in (old, new))
        moves = {v: after.get(v, 0.0) - before.get(v, 0.0) for v in {**before, **after}}
        terms = [got.get(v, v) for v, scale in moves.items() if scale]
        scales = [scale for scale in moves.values() if scale]
        power = jnp.exp2 if new.name == "exp2" else jnp.exp
        if not terms:
            return y

        def moved(y, *terms):
            return y * power(sum(a * x for a, x in zip(scales, terms, strict=True)))

        return _append(moved, [y, *terms], new, into)


def _append(
    fun: Callable[..., Any], ins: Sequence[Value], like: Equation, into: list[Equation]
) -> Value:
    """Appends the equations of a function to the backward part."""
    trace = _jax.trace(lambda *args: [fun(*args)], [v.aval for v in ins], "softmax")
    (out,) = opened(trace, ins, into, again=True, stack=like.stack)
    return out


class Finder:
    """Finds softmaxes in the equations of a forward part."""

    def __init__(self, forward: Sequence[Equation], low: set[Value]) -> None:
        self.forward, self._low = forward, low
        self.maker = {out: e for e in forward for out in e.outs}
        self.readers = readers_of(forward)
        self.place = {e: i for i, e in enumerate(forward)}

    def softmax(self, weights: Value) -> Softmax | None:
        """Returns the softmax of which a value is the weights, if there is one."""
        way = self.way(weights)
        if way is None:
            return None
        line = self._line(way.top.ins[0])
        scores = self._scores(line, way.top)
        region = Region(self, way, scores)
        if way.top not in scores.tops or not region.grow(weights) or not region.is_closed(weights):
            return None
        degrees = region.degrees()
        if degrees is None:
            return None
        equations = sorted(region.found, key=lambda e: self.place[e])
        tops = {e: x for e, x in scores.tops.items() if e in region.found}
        return Softmax(way, equations, tops, *region.scaled(weights, degrees))

    def way(self, v: Value) -> Way | None:
        steps: list[tuple[Equation, Value | None]] = []
        masks: set[Value] = set()
        while (e := self.maker.get(v)) is not None and len(steps) < LONGEST:
            if e.name in EXPONENTIALS:
                return Way(e, steps, masks)
            step = next(self._step(e), None)
            if step is None:
                return None
            v, factor, mask = step
            steps.append((e, factor))
            masks |= set() if mask is None else {mask}
        return None

    def _step(self, e: Equation) -> Iterator[tuple[Value, Value | None, Value | None]]:
        """Yields of what an equation gives a multiple, by which factor, or by which mask."""
        if e.name == "select_n":
            left = [v for v in e.ins[1:] if not self.is_zero(v)]
            if len(left) == 1:
                yield left[0], None, e.ins[0]
        elif kind_of(e) == kinds.SAME and len(e.ins) == 1:
            yield e.ins[0], None, None
        elif e.name == "div" and self.is_small(e.ins[1], e):
            yield e.ins[0], e.ins[1], None
        elif e.name == "mul":
            for v, factor in (e.ins, e.ins[::-1]):
                mask = self._mask(factor)
                if mask is not None:
                    yield v, None, mask
                elif self.is_small(factor, e) and self.is_positive(factor):
                    yield v, factor, None

    def _line(self, v: Value) -> Line:
        line, scale = Line({v: 1.0}, {}), 1.0
        while (e := self.maker.get(v)) is not None and len(line.scales) < LONGEST:
            large = [x for x in e.ins if not self.is_small(x, e)]
            if len(large) != 1:
                break
            (v,) = large
            rest = [x for x in e.ins if x is not v]
            if e.name in ("add", "sub") and rest:
                sign = -scale if e.name == "sub" and v is e.ins[0] else scale
                line.terms[rest[0]] = line.terms.get(rest[0], 0.0) + sign
                scale = -scale if e.name == "sub" and v is e.ins[1] else scale
            elif rest and rest[0].literal and (e.name == "mul" or e.ins[0] is v):
                number = float(rest[0].const)
                scale = scale * number if e.name == "mul" else scale / number
            elif e.name == "neg":
                scale = -scale
            elif kind_of(e) != kinds.SAME or rest:
                break
            line.scales[v] = scale
        return line

    def _scores(self, line: Line, top: Equation) -> Scores:
        """Returns the exponentials of the same scores as a given one."""
        first = [*line.scales][-1]
        scores = Scores({}, {first}, set())
        queue = [self.place[r] for r in self.readers[first]]
        heapq.heapify(queue)
        queued = {*queue}
        while queue and len(queued) <= LONGEST:
            e = self.forward[heapq.heappop(queue)]
            if kind_of(e) in (kinds.MATMUL, kinds.EXTREME, kinds.COMPARED):
                continue
            if e.name == top.name and not scores.before.isdisjoint(e.ins):
                own = self._line(e.ins[0])
                if own.scales.get(first) == line.scales[first]:
                    scores.tops[e] = own
            if e in scores.tops or not scores.after.isdisjoint(e.ins):
                scores.after.update(e.outs)
            if e not in scores.tops and not scores.before.isdisjoint(e.ins):
                scores.before.update(e.outs)
            for place in {self.place[r] for v in e.outs for r in self.readers[v]} - queued:
                queued.add(place)
                heapq.heappush(queue, place)
        return Scores({}, set(), set()) if queue else scores

    def is_small(self, v: Value, e: Equation) -> bool:
        """Returns whether a value is a small array beside the result of an equation, or one spread."""
        whole = _jax.size_of(shape(e.outs[0]))
        while SMALL_TERM * _jax.size_of(shape(v)) > whole:
            maker = self.maker.get(v)
            if maker is None or kind_of(maker) not in VIEWS:
                return False
            v = maker.ins[0]
        return True

    def is_constant(self, v: Value, axes: Iterable[int]) -> bool:
        """Returns whether a value is the same along axes."""
        e = self.maker.get(v)
        if e is not None and e.name == "broadcast_in_dim":
            at = dict(zip(e.params["broadcast_dimensions"], shape(e.ins[0]), strict=True))
            return all(at.get(a, 1) == 1 for a in axes)
        return all(shape(v)[a] == 1 for a in axes if a < len(shape(v)))

    def takes_half(self, e: Equation) -> bool:
        """Returns whether an equation is a matmul, or a view for matmuls alone."""
        return takes_half(e, self._low)

    def _origin(self, v: Value) -> Value:
        while (e := self.maker.get(v)) is not None and kind_of(e) in VIEWS:
            if e.ins[0].aval.dtype == bool:
                break
            v = e.ins[0]
        return v

    def is_zero(self, v: Value) -> bool:
        v = self._origin(v)
        return v.literal and not np.any(np.asarray(v.const))

    def _mask(self, v: Value) -> Value | None:
        e = self.maker.get(self._origin(v))
        return e.ins[0] if e is not None and e.name == "convert_element_type" else None

    def is_positive(self, v: Value) -> bool:
        """Returns whether a value is a positive number, exponential, or inverse, so not zero."""
        v = self._origin(v)
        e = self.maker.get(v)
        if e is None:
            return v.literal and bool(np.all(np.asarray(v.const) > 0))
        if e.name in ("div", "mul"):
            return all(map(self.is_positive, e.ins[: 1 if e.name == "div" else 2]))
        inverse = e.name == "integer_pow" and e.params["y"] < 0
        return inverse or e.name in (*EXPONENTIALS, "rsqrt")


class Region:
    """What lies between exponentials and the weights, and what is made of sums of them alone.

    Attributes:
        found: Its equations.
    """

    def __init__(self, finder: Finder, way: Way, scores: Scores) -> None:
        self._finder, self._way, self._scores = finder, way, scores
        self._large = {e for e, _ in way.steps}  # what makes multiples of exponentials
        self._sums: list[Equation] = []
        self._exported = False
        self.found: set[Equation] = set()

    def grow(self, weights: Value) -> bool:
        """Adds what weights and sums are made of, and what is made of sums; False if others are."""
        finder, ahead = self._finder, [self._finder.maker[weights]]
        while ahead:
            e = ahead.pop()
            if e not in self.found:
                self.found.add(e)
                if not self._fits(e):
                    return False
                ahead += [finder.maker[v] for v in self._read(e)]
            if not ahead:
                near = (r for e in self.found for v in e.outs for r in finder.readers[v])
                ahead = [r for r in near if r not in self.found and self._is_of_sums(r)]
        return True

    def _read(self, e: Equation) -> list[Value]:
        """Returns what an equation reads that is made of exponentials."""
        line = self._scores.tops.get(e)
        return [v for v in (e.ins if line is None else line.terms) if v in self._scores.after]

    def _fits(self, e: Equation) -> bool:
        """Returns whether an equation reads multiples of exponentials, as far as weights are."""
        if e in self._scores.tops:
            return True
        large = [v for v in e.ins if v in self._scores.after and not self._is_small(v)]
        if large and e not in self._large:
            own = self._finder.way(large[0])
            if own is None or own.top not in self._scores.tops or not self._way.masks <= own.masks:
                return False
            self._large |= {x for x, _ in own.steps}
            self._sums.append(e)
        return self._scores.before.isdisjoint(e.ins)

    def _is_of_sums(self, e: Equation) -> bool:
        """Returns whether an equation sums exponentials, or reads nothing but sums of them."""
        if e.outs[0] in self._scores.before or not self._is_small(e.outs[0]):
            return False
        if any(map(self._is_logarithm, e.ins)):
            return kind_of(e) in VIEWS or e.name in (*SIGNS, *EXPONENTIALS)
        alone = all(v in self._scores.after or v.literal for v in e.ins)
        return alone and (e.name in ("log", "reduce_sum") or kind_of(e) in STEADY)

    def _is_logarithm(self, v: Value) -> bool:
        """Returns whether a value is made of logarithms of sums."""
        e = self._finder.maker.get(v)
        if e is None or v not in self._scores.after or e.name in EXPONENTIALS:
            return False
        return e.name == "log" or (
            kind_of(e) in STEADY and self._is_small(v) and any(map(self._is_logarithm, e.ins))
        )

    def _is_small(self, v: Value) -> bool:
        return self._finder.is_small(v, self._way.top)

    def is_closed(self, weights: Value) -> bool:
        """Returns whether others read only weights, in matmuls, and sums, where errors are small."""
        for v in (v for e in self.found for v in e.outs):
            for r in self._finder.readers[v]:
                inside = r in self.found or r.outs[0] in self._scores.before
                if inside or kind_of(r) == kinds.COMPARED:
                    continue
                if v is weights and self._finder.takes_half(r):
                    continue
                if kind_of(r) not in OUTSIDE or not self._is_small(v):
                    return False
                self._exported |= kind_of(r) != kinds.ADDED
        return True

    def scaled(
        self, weights: Value, degrees: Mapping[Value, float]
    ) -> tuple[bool, Equation | None]:
        """Returns whether the weights are the same for multiples of the exponentials, and the sum."""
        axes = {a for e in self._sums for a in e.params.get("axes", range(99))}
        factors = [f for _, f in self._way.steps if f is not None and not f.literal]
        same = all(self._finder.is_constant(f, axes) for f in factors)
        sums = [e for e in self.found if kind_of(e) == kinds.SUMMED]  # perhaps of sums
        if not same or degrees[weights] != 0 or self._exported or len(sums) > len(self._sums):
            return False, None
        alone = len(self._sums) == 1 and self._sums[0].name == "reduce_sum"
        return True, self._sums[0] if alone else None

    def degrees(self) -> dict[Value, float] | None:
        """Returns how values scale with the exponentials, or None if one has a large error then.

        A multiple of the exponentials multiplies a value by a power of it: its degree. A logarithm
        gets as many logarithms more. What a constant is added to has none: it is not a number.
        """
        found: dict[Value, float] = {}
        for e in sorted(self.found, key=lambda e: self._finder.place[e]):
            own = self._read(e)
            logged = any(map(self._is_logarithm, own))
            line = self._scores.tops.get(e)
            if logged and not all(map(self._is_logarithm, own)):
                return None
            if line is None:
                degree = self._degree(e, [found.get(v, 0.0) for v in e.ins], logged)
            else:
                of = sum(scale * found.get(v, 0.0) for v, scale in line.terms.items())
                degree = 1 + of if logged or not own else None
            if degree is None:
                return None
            found[e.outs[0]] = degree
        return found

    def _degree(self, e: Equation, each: Sequence[float], logged: bool) -> float | None:
        kind, name = kind_of(e), e.name
        if name in (*EXPONENTIALS, "log", "abs"):
            return each[0] if logged == (name in EXPONENTIALS) else None
        if kind in (*VIEWS, kinds.SUMMED, kinds.MOVED, kinds.PICKED):
            pairs = zip(e.ins, each, strict=True)
            floats = [(v, d) for v, d in pairs if rounding.is_float32(v)]
            return _same([d for v, d in floats if not self._finder.is_zero(v)])
        if logged and name in SIGNS:
            return sum(a * b for a, b in zip(SIGNS[name], each, strict=True))
        numbers = [float(v.const) for v in e.ins if v.literal]
        if logged and numbers and kind == kinds.MULTIPLIED:
            return sum(each) * numbers[0] if name == "mul" else each[0] / numbers[0]
        if logged:
            return None
        if kind == kinds.MULTIPLIED:
            return each[0] + each[1] if name == "mul" else each[0] - each[1]
        if name == "add" and all(
            v in self._scores.after or self._finder.is_positive(v) for v in e.ins
        ):
            return _same(each)
        power = e.params["y"] if name == "integer_pow" else POWERS.get(name)
        return None if power is None else power * each[0]


def _same(degrees: Sequence[float]) -> float:
    return degrees[0] if len({*degrees}) == 1 else math.nan


def takes_half(e: Equation, low: set[Value]) -> bool:
    """Returns whether an equation is a matmul, or a view of which all results are in ``low``."""
    return rounding.is_half_matmul(e) or (rounding.is_view(e) and low.issuperset(e.outs))


def softmaxes(
    forward: Sequence[Equation], read: set[Value], low: set[Value]
) -> dict[Value, Softmax]:
    """Returns softmaxes by their weights.

    Args:
        forward: The equations of the forward part.
        read: The large values that matmuls read.
        low: The values that matmuls alone read.
    """
    finder, found, inner = Finder(forward, low), dict[Value, Softmax](), set[Equation]()
    for e in reversed(forward):
        if e in inner or kind_of(e) in (*VIEWS, kinds.MOVED) or read.isdisjoint(e.outs):
            continue
        softmax = finder.softmax(e.outs[0])
        if softmax is not None:
            found[e.outs[0]] = softmax
            inner.update(softmax.equations)
    return found
