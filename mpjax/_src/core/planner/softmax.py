"""What of a softmax its rounded weights tell, whatever its spelling.

Weights are exponentials times factors that are constant along the axes of a sum of exponentials. So
``e = z p16 / sum(p16)``, of rounded weights and the sum ``z`` of exponentials, are *exactly* the
exponentials of scores that have moved by at most a rounding unit or two, and their sum is ``z``.
The backward part reads all multiples of the exponentials as they are computed from these. It is
then the derivative of the softmax at the moved scores: common parts of cotangents cancel, and the
difference between a confident row's weight and one has a small relative error. Rounded weights
alone have neither. Neither scores nor float32 weights are kept.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.rules import CAST, EXPONENTIALS, SELECT
from mpjax._src.core.planner import kinds, rounding
from mpjax._src.core.planner.dependence import Ahead, Order
from mpjax._src.core.planner.equations import Equation, Value, appended
from mpjax._src.core.planner.kinds import VIEWS, constant_along, kind_of
from mpjax._src.core.planner.levels import SMALL_TERM
from mpjax._src.core.planner.rounding import is_zero

# A softmax of more equations is left alone, so that planning grows with the program.
LONGEST = 80
# It and its square have inverses in float32: rows without weights have second derivatives of zero.
LEAST = 1e-18


class Way(NamedTuple):
    """How a value is computed from exponentials: by small arrays as factors, and by masks."""

    exp: Equation
    steps: list[tuple[Equation, Value | None]]  # with the factors, the last step first
    masks: set[Value]


class Affine(NamedTuple):
    """How an exponent is computed from scores: by scaling them, and adding smaller arrays.

    Attributes:
        values: The values on the way back, and the factor of each in the exponent.
        terms: The smaller arrays, and the factor of each.
    """

    values: dict[Value, float]
    terms: dict[Value, float]


class Softmax(NamedTuple):
    """Weights that are exponentials times factors.

    Attributes:
        equations: What makes multiples of the exponentials.
        exps: The exponentials of the same scores, and how their exponents are computed.
        way: How what is summed is computed from exponentials.
        sum: Their sum.
        spread: The sum in other layouts, if the weights are divided by it, and nothing else is.
    """

    equations: list[Equation]
    exps: dict[Equation, Affine]
    way: Way
    sum: Equation
    spread: list[Value]

    @property
    def values(self) -> list[Value]:
        """The multiples of the exponentials, and their sum."""
        return [*self.spread, *(v for e in self.equations for v in e.outs)]

    def again(self, rounded: Value, into: list[Equation]) -> dict[Value, Value]:
        """Appends what computes its values from the rounded weights, and returns those."""
        exp, axes = self.way.exp, tuple(self.sum.params["axes"])
        got = {exp.outs[0]: rounded}
        # The sum of the rounded weights, masked and scaled as that of the exponentials was.
        self._run([*(e for e, _ in reversed(self.way.steps)), self.sum], got, into)

        def normalized(p, total, *real):  # rows without weights stay zero
            total = jnp.expand_dims(total, axes)
            p = p / jnp.maximum(total, LEAST)
            return p * jnp.expand_dims(real[0], axes) if real else p

        z = self.sum.outs[0]
        # Where the sum cancels, the exponentials are divided by it: it is neither read nor kept.
        y = _append(normalized, [rounded, got[z], *([] if self.spread else [z])], exp, into)
        got = {v: _append(jnp.ones_like, [v], exp, into) for v in self.spread}
        got[exp.outs[0]] = y
        for e in self.equations:
            if e in self.exps and e is not exp:
                # Exponentials of the same scores with another shift are multiples of these.
                shifts = _shifts(self.exps[exp], self.exps[e])
                got[e.outs[0]] = _append(_shifted(e.name, shifts.values()), [y, *shifts], e, into)
        self._run([e for e in self.equations if e not in self.exps], got, into)
        return got

    def _run(
        self, equations: Iterable[Equation], got: dict[Value, Value], into: list[Equation]
    ) -> None:
        for e in equations:
            out, ins = e.outs[0], [got.get(v, v) for v in e.ins]
            if rounding.is_rounding(e):  # another one of the same numbers
                got[out] = ins[0]
                continue
            got[out] = Value(out.aval)
            into.append(e.on(ins, outs=[got[out]], again=True))


def _shifts(old: Affine, new: Affine) -> dict[Value, float]:
    """Returns the smaller arrays by which two exponents differ, and the factor of each."""
    both = {v: new.terms.get(v, 0.0) - old.terms.get(v, 0.0) for v in old.terms | new.terms}
    return {v: scale for v, scale in both.items() if scale}


def _shifted(exponential: str, scales: Iterable[float]) -> Callable[..., Any]:
    """Returns a function of exponentials and the smaller arrays that are added to the exponents."""
    exp = getattr(jnp, exponential)
    return lambda y, *terms: y * exp(sum(map(operator.mul, scales, terms)))


def _append(
    fun: Callable[..., Any], ins: Sequence[Value], like: Equation, into: list[Equation]
) -> Value:
    """Appends the equations of a function to the backward part."""
    (out,) = appended(lambda *args: [fun(*args)], ins, into, like, again=True)
    return out


class Finder:
    """Finds softmaxes in the equations of a forward part."""

    def __init__(self, forward: Sequence[Equation], low: set[Value]) -> None:
        self._order, self._low = Order(forward), low
        self._maker = {out: e for e in forward for out in e.outs}

    def softmax(self, weights: Value) -> Softmax | None:
        """Returns the softmax of which a value is the weights, if there is one."""
        way = self._way(weights)
        found = way and self._multiples(weights, self._affine(way.exp.ins[0]), way.exp)
        if way is None or found is None:
            return None
        equations, exps, sums = found
        own = self._way(sums[0].ins[0]) if len(sums) == 1 else None
        # A masked weight tells nothing of its exponential, so the sum must leave it out too.
        if own is None or not {way.exp, own.exp} <= exps.keys() or not way.masks <= own.masks:
            return None
        factors = [f for _, f in way.steps if f is not None and not f.literal]
        shifts = _shifts(exps[own.exp], exps[way.exp])
        axes = sums[0].params["axes"]
        # A factor that differs along a row does not cancel when rows are divided by sums.
        if any(constant_along(v, axes, self._maker) is None for v in [*factors, *shifts]):
            return None
        spread = self._spread(sums[0].outs[0], way) if len(exps) == len(factors) == 1 else []
        return Softmax(equations, exps, own, sums[0], spread)

    def _multiples(
        self, weights: Value, exponent: Affine, exp: Equation
    ) -> tuple[list[Equation], dict[Equation, Affine], list[Equation]] | None:
        """Returns what makes multiples of exponentials, the exponentials, and sums; None if others.

        It walks from the scores, at the end of ``exponent``, to what is made of them: first linear
        functions of them, then exponentials of those, then multiples of the exponentials, to sums.
        """
        first = [*exponent.values][-1]
        before, large = {first}, set[Value]()  # functions of scores; multiples of exponentials
        equations, sums = list[Equation](), list[Equation]()
        exps: dict[Equation, Affine] = {}
        ahead = Ahead(self._order, [first])
        for e in ahead:
            own = large.isdisjoint(e.ins)
            if own and e.name == exp.name:
                exps[e] = self._affine(e.ins[0])
                # ``exp(2 s)`` is no multiple of ``exp(s)``.
                if exps[e].values.get(first) != exponent.values[first]:
                    del exps[e]
                    continue
            elif own:
                if not _is_linear(e) and kind_of(e) != kinds.SAME:
                    continue  # another function of the scores
                before.update(e.outs)
            elif kind_of(e) == kinds.SUMMED:
                sums.append(e)
                continue
            # A mask needs no exact numbers, and the matmul reads the rounded weights themselves.
            elif kind_of(e) == kinds.COMPARED or (weights in e.ins and takes_half(e, self._low)):
                continue
            # What reads exponentials otherwise, or scores too, would see both forms of the scores.
            elif all(v not in large for v, *_ in self._step(e)) or not before.isdisjoint(e.ins):
                return None
            if not own or e in exps:
                large.update(e.outs)
                equations.append(e)
            ahead.add(e.outs)
            if len(ahead) > LONGEST:
                return None
        return equations, exps, sums

    def _way(self, v: Value) -> Way | None:
        steps: list[tuple[Equation, Value | None]] = []
        masks: set[Value] = set()
        while (e := self._maker.get(v)) is not None and len(steps) < LONGEST:
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
        """Yields the operands of which a result is a multiple, each with its factor or its mask."""
        if e.name == SELECT:
            left = [v for v in e.ins[1:] if not is_zero(self._origin(v))]
            if len(left) == 1:
                yield left[0], None, e.ins[0]
        elif kind_of(e) == kinds.SAME and len(e.ins) == 1:
            yield e.ins[0], None, None
        elif kind_of(e) == kinds.MULTIPLIED and e.inverts:
            if self._is_small(e.ins[1], e):
                yield e.ins[0], e.ins[1], None
        elif kind_of(e) == kinds.MULTIPLIED:
            for v, factor in (e.ins, e.ins[::-1]):
                mask = self._mask(factor)
                if mask is not None:
                    yield v, None, mask
                # Where a factor is zero, weights do not tell their exponentials.
                elif self._is_small(factor, e) and self._is_positive(factor):
                    yield v, factor, None

    def _affine(self, v: Value) -> Affine:
        exponent, scale = Affine({v: 1.0}, {}), 1.0
        while (e := self._maker.get(v)) is not None and len(exponent.values) < LONGEST:
            large = [x for x in e.ins if not self._is_small(x, e)]
            if len(large) != 1:
                break
            (v,) = large
            rest = [x for x in e.ins if x is not v]
            scales = rest and kind_of(e) == kinds.MULTIPLIED
            # ``v - t`` subtracts a term, ``t - v`` negates all that stands further back.
            if kind_of(e) == kinds.ADDED and rest:
                first = v is e.ins[0]
                sign = -scale if e.inverts and first else scale
                exponent.terms[rest[0]] = exponent.terms.get(rest[0], 0.0) + sign
                scale = -scale if e.inverts and not first else scale
            # Not ``number / v``, which is no multiple of v.
            elif scales and rest[0].literal and (not e.inverts or e.ins[0] is v):
                number = float(rest[0].const)
                scale = scale / number if e.inverts else scale * number
            elif e.name == "neg":
                scale = -scale
            elif kind_of(e) != kinds.SAME or rest:
                break
            exponent.values[v] = scale
        return exponent

    def _spread(self, total: Value, way: Way) -> list[Value]:
        """Returns a sum and its layouts, if nothing but the quotient of the weights reads it."""
        division, v = next((e, f) for e, f in way.steps if f is not None and not f.literal)
        found, above = [v], division
        while all(r is above for r in self._order.readers[v]) and division.inverts:
            if v is total:
                return found
            above = self._maker.get(v, division)
            view = kind_of(above) in VIEWS and len(above.ins) == 1
            if not view or above.name == "stop_gradient":
                break
            v = above.ins[0]
            found.append(v)
        return []

    def _is_small(self, v: Value, e: Equation) -> bool:
        """Returns whether a value is a small array, or spread, beside the result of an equation."""
        whole = e.outs[0].size
        while SMALL_TERM * v.size > whole:
            maker = self._maker.get(v)
            if maker is None or kind_of(maker) not in VIEWS:
                return False
            v = maker.ins[0]
        return True

    def _origin(self, v: Value) -> Value:
        while (e := self._maker.get(v)) is not None and kind_of(e) in VIEWS:
            if e.ins[0].aval.dtype == bool:
                break
            v = e.ins[0]
        return v

    def _mask(self, v: Value) -> Value | None:
        e = self._maker.get(self._origin(v))
        return e.ins[0] if e is not None and e.name == CAST else None

    def _is_positive(self, v: Value) -> bool:
        """Returns whether a value is a positive number, exponential, or inverse, so not zero."""
        v = self._origin(v)
        e = self._maker.get(v)
        if e is None:
            return v.literal and bool(np.all(np.asarray(v.const) > 0))
        if e.rule.multiplies:
            return all(map(self._is_positive, e.ins[: 1 if e.inverts else 2]))
        inverse = e.name == "integer_pow" and e.params["y"] < 0
        return inverse or e.name in (*EXPONENTIALS, "rsqrt")


def _is_linear(e: Equation) -> bool:
    return kind_of(e) in (kinds.ADDED, kinds.MULTIPLIED) or e.name == "neg"


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
        # Backwards: weights come before what they are made of, which is no softmax by itself.
        if e in inner or kind_of(e) in (*VIEWS, kinds.MOVED) or read.isdisjoint(e.outs):
            continue
        softmax = finder.softmax(e.outs[0])
        if softmax is not None:
            found[e.outs[0]] = softmax
            inner.update(softmax.equations)
    return found


def allowed(softmax: Softmax, late: Order, results: set[Value]) -> Softmax:
    """Returns a softmax, whose exponentials and sum may be divided by it in a backward part.

    The sum is read if it does not cancel there: it does not where the exponentials or the sum have
    cotangents of their own, as a sum that is returned has.
    """
    read = softmax.spread and not _cancels(softmax, late, results)
    return softmax._replace(spread=[]) if read else softmax


def _cancels(softmax: Softmax, late: Order, results: set[Value]) -> bool:
    """Returns whether nothing changes if exponentials and sum are multiplied by one number."""
    powers: dict[Value, int] = dict.fromkeys(softmax.spread, 1)
    for e in softmax.equations:
        power = 1 if e in softmax.exps else _power(e, powers)
        if power is None:
            return False
        powers[e.outs[0]] = power
    powers = {v: power for v, power in powers.items() if power}
    ahead = Ahead(late, powers)
    for e in ahead:
        # All that is returned must have power zero in the number: then it cancels.
        power = _power(e, powers) if len(ahead) <= LONGEST else None
        if power is None or (power and not results.isdisjoint(e.outs)):
            return False
        if power:
            powers.update(dict.fromkeys(e.outs, power))
            ahead.add(e.outs)
    return True


def _power(e: Equation, powers: dict[Value, int]) -> int | None:
    """Returns the power of a number that multiplies a result if those of operands do, or None."""
    own = [powers.get(v, 0) for v in e.ins]
    if kind_of(e) == kinds.MULTIPLIED:
        return own[0] - own[1] if e.inverts else own[0] + own[1]
    if rounding.is_half_matmul(e):
        return own[0] + own[1]
    if e.name == "integer_pow":
        return own[0] * e.params["y"]
    same = {power for v, power in zip(e.ins, own, strict=True) if v.is_float32 and not is_zero(v)}
    linear = _is_linear(e) or kind_of(e) == kinds.SUMMED or rounding.is_view(e)
    return same.pop() if linear and len(same) == 1 else None if any(own) else 0
