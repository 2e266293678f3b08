"""Which of the values that are handed over become 8-bit codes, and what makes and reads them.

The forward part computes what it computes without codes; the backward part reads the values that
codes represent. It is differentiated as if there were none: a *carrier*, zeros that nobody reads,
brings the tangent of each value (`carrier`). A value is handed over as it is where rounding would
be amplified, where it is no 16-bit array, and where it is small. So are the values and the result
of an attention: the row sums of its derivative come from them. Of rounded ones, the difference
would be as large as the rounding errors where rows are peaked, instead of small.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpjax._src.core.base import _jax
from mpjax._src.core.base.coded import KINDS, Coded, coded_bytes, decode, encode
from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.rules import AMPLIFIES, EQUALITIES, EXPONENTIALS, JUMPS, LOGARITHMS
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.dependence import Makers, made_by
from mpjax._src.core.planner.equations import Equation, Value, appended, given, parts
from mpjax._src.core.planner.integers import SMALL, of_equation
from mpjax._src.core.planner.kinds import LAYOUT, MULTIPLIED, SAME, SUMMED, kind_of
from mpjax._src.core.planner.partition import runs_again

SHARE, LEVELS = "share", "int8"
# The fewest entries of a code. XLA may write and read those of smaller arrays in kernels of their
# own, which takes more time than their bytes.
FEWEST = 2**14
# What they do to rounding errors is bounded: those of a logarithm, and of the derivative of a tanh,
# are absolute, and small.
BOUNDED = (*LOGARITHMS, "log1p", "one_minus_square")


@dataclasses.dataclass(frozen=True)
class Price(rounding.Price):
    """What it costs to hand over a value, in bytes, if some are codes.

    Attributes:
        kinds: The kinds of the codes, of `coded.KINDS`.
    """

    kinds: Mapping[Value, str]

    def __call__(self, v: Value) -> int:
        """Returns the bytes of a value as it is handed over."""
        return coded_bytes(v.aval.shape, self.kinds[v]) if v in self.kinds else super().__call__(v)


def priced(price: rounding.Price, early: Sequence[Equation], late: Sequence[Equation]) -> Price:
    """Returns the price of the values of a forward part, if those that may be are codes."""
    maker = {out: e for e in early for out in e.outs}
    whole = _sensitive(early, late, maker) | _of_attention(early, maker) | _carriers(early)
    kinds: dict[Value, str] = {}
    integers: dict[Value, int] = {}
    for e in early:
        ins = [integers.get(v, 0) for v in e.ins]
        integers.update((v, of_equation(e, v, ins)) for v in e.outs)
        for v in e.outs:
            shape = _jax.shard_shape(v.aval) if price.is_half(v) else ()
            # Blocks are cut along the last axis, so its length must be known. A region asks for a
            # dtype, and integers would lose their exactness.
            large = _jax.size_of(shape) >= FEWEST and isinstance(shape[-1], int)
            if large and v not in whole and not e.region.dtype and integers[v] < SMALL:
                kinds[v] = SHARE if _sums_to_one(v, maker) else LEVELS
    return Price(price.made, price.wanted, price.half, kinds)


# ---- what has no code ----------------------------------------------------------------------------


def _sensitive(early: Sequence[Equation], late: Sequence[Equation], maker: Makers) -> set[Value]:
    """Returns the values whose rounding a later operation enlarges, or that a loop reads.

    An exponential of a number of 100 that was rounded is wrong by half.
    """
    maker = {**maker, **{out: e for e in late for out in e.outs}}
    found: set[Value] = set()
    # What runs again in the backward part reads the codes as well.
    read = [e for e in early if runs_again(e)]
    for e in reversed([*read, *late]):
        through = not rounding.is_half_matmul(e) and not found.isdisjoint(e.outs)
        if through or _enlarges(e, maker):
            found.update(v for v in e.ins if v.is_float32)
    return found


def _enlarges(e: Equation, maker: Makers) -> bool:
    if e.is_custom:
        for _, equations, _ in rounding.bodies(e):
            inside = {out: inner for inner in equations for out in inner.outs}
            if any(_enlarges(inner, inside) for inner in equations):
                return True
        return False
    # A loop may repeat the error, and beside a jump a small one changes the result by much.
    if e.row.kind or JUMPS in e.rule.traits or e.name in EQUALITIES:
        return True
    if e.name in EXPONENTIALS:
        # The derivative of exp(-x^2) is at most 0.86: it makes no error larger.
        return not _is_bell(e.ins[0], maker)
    known = e.rule.need in (rounding.FULL, rounding.FOLLOW)
    return known and e.name not in BOUNDED and e.rule.gain_of(e.params) in AMPLIFIES


def _is_bell(v: Value, maker: Makers) -> bool:
    """Returns whether an exponent is a negated square, as in the derivative of an erf."""
    e = maker.get(v)
    square = maker.get(e.ins[0]) if e is not None and e.name == "neg" else None
    if square is None:
        return False
    same = square.rule.multiplies and square.ins[0] is square.ins[1]
    power = square.name == "integer_pow" and square.params["y"] == 2
    return square.name == "square" or same or power


def _of_attention(early: Sequence[Equation], maker: Makers) -> set[Value]:
    """Returns what a matmul with the weights of a softmax makes, and reads beside them."""
    found: set[Value] = set()
    for e in early:
        operands = e.ins[:2] if rounding.is_half_matmul(e) else ()
        weights = [any(x.name in EXPONENTIALS for x in _cheap(v, maker)) for v in operands]
        # If both operands hold exponentials, nothing tells which are the weights.
        if sum(weights) == 1:
            values = e.ins[1 - weights.index(True)]
            found.update(e.outs, [values], *(x.ins for x in _cheap(values, maker)))
    for e in early:
        found.update(e.outs if rounding.is_view(e) and not found.isdisjoint(e.ins) else ())
    return found


def _cheap(v: Value, maker: Makers) -> Iterator[Equation]:
    """Yields the equations by which a value is computed from what is made otherwise."""
    cheap = lambda e: runs_again(e) or rounding.is_view(e)  # noqa: E731
    return filter(cheap, made_by(v, maker, cheap))


def _carriers(early: Sequence[Equation]) -> set[Value]:
    """Returns the carriers that loops return."""
    found: set[Value] = set()
    for e in early:
        for program in rounding.programs(e):
            _, equations, outs = parts(program)
            # A loop's stack of carriers is a carrier: zeros, of which no code is needed.
            made = {out for inner in equations if inner.name == _jax.CARRIER for out in inner.outs}
            found.update(v for v, out in zip(e.outs, outs, strict=True) if out in made)
    return found


def _sums_to_one(v: Value, maker: Makers) -> bool:
    """Returns whether a value is exponentials over their sums."""

    def origin(v: Value, *kinds: str) -> Value:
        while v in maker and kind_of(maker[v]) in kinds:
            v = maker[v].ins[0]
        return v

    e = maker.get(origin(v, SAME))
    if e is None or kind_of(e) != MULTIPLIED or not e.inverts:
        return False
    total = maker.get(origin(e.ins[1], SAME, LAYOUT))
    if total is None or kind_of(total) != SUMMED:
        return False
    top = origin(e.ins[0], SAME)
    return origin(total.ins[0], SAME) is top and top in maker and maker[top].name in EXPONENTIALS


# ---- codes ---------------------------------------------------------------------------------------


class Codes(NamedTuple):
    """What is handed over in the place of values.

    Attributes:
        sent: The codes, their scales, and what has no code.
        carriers: The carriers.
        encoding: What makes them in the forward part.
        decoding: What makes the values of them in the backward part.
    """

    sent: list[Value]
    carriers: list[Value]
    encoding: list[Equation]
    decoding: list[Equation]


def codes(saved: Sequence[Value], price: Price, early: Sequence[Equation]) -> Codes:
    """Returns what is handed over in the place of values that have codes.

    A GPU's convolutions want the channels last in memory, whatever the order of the axes. Arrays of
    the same shape are most often what elementwise operations make of these.
    """
    found = Codes([], [], [], [])
    maker = {out: e for e in early for out in e.outs}
    dots = (e for e in early if e.name == "conv_general_dilated")
    convolved = {v.aval.shape for e in dots for v in (*e.ins, *e.outs)}
    # To trace the code of each value was half of the time that ``8bit`` adds to planning.
    traced: dict[Any, Any] = {}
    for v in saved:
        if v not in price.kinds or v not in maker:
            # An argument has no equation behind which it could be encoded.
            found.sent.append(v)
            continue
        kind, like = price.kinds[v], maker[v]
        rounded = not rounding.returns_half(like)
        how = given(_encoded, kind, rounded, v.aval.shape not in convolved)
        carrier, *sent = appended(how, [v], found.encoding, like, traced=traced)
        found.carriers.append(carrier)
        found.sent.extend(sent)
        flags: dict[str, Any] = {"again": True, "traced": traced}
        appended(given(_decoded, kind), [carrier, *sent], found.decoding, like, [v], **flags)
    return found


def _encoded(kind: str, rounded: bool, in_order: bool, x: Any) -> list[Any]:
    coded = encode(x, kind, rounded, in_order)
    return [_jax.carrier(x), coded.codes, *([coded.scales] if KINDS[kind].blocks else [])]


def _decoded(kind: str, carrier: Any, codes: Any, scales: Any = None) -> list[Any]:
    return [_jax.carried(carrier, decode(Coded(codes, scales, kind), FLOAT32))]
