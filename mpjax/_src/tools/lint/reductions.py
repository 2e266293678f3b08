"""Rules of sums in 16 bits: over an array, over the iterations of a loop, over devices."""

from collections.abc import Iterator

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import digits, is_half, short_name, shown, stalls_at
from mpjax._src.core.base.higher_order import SCAN, turns_of
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.averages import last_sum, share_of, stops
from mpjax._src.tools.lint.program import CASTS, MOVES, Program
from mpjax._src.tools.lint.rule import Hit

SUMS = ("reduce_sum", "cumsum", "cumlogsumexp", "reduce_window_sum", "reduce", "reduce_window")


def half_sums(program: Program) -> Iterator[Hit]:
    """Finds sums of more terms than 16 bits can count.

    A running sum of n equal terms stops growing at n = 2**digits: 256 in bfloat16, 2048 in float16.
    Sums that JAX derives for a broadcast (the gradient of a bias) are not written by the user, and
    compilers compute them in at least two levels, so their limit is the square of that.
    """
    for op in program.named(*SUMS):
        value = op.ins[0]
        if not (is_half(value) and is_half(op.outs[0]) and _adds(op)):
            continue
        terms = _terms(op)
        limit = stalls_at(value.aval.dtype)
        if terms > (limit**2 if program.is_backward(op) else limit):
            yield Hit(
                f"{op.name} adds {terms} terms of {shown(value)} in "
                f"{short_name(value.aval.dtype)}, where a running sum of equal terms stops growing "
                f"after {limit}.",
                op,
            )


def _adds(op: Op) -> bool:
    """Returns whether a reduction adds; one with its own program may compute anything."""
    program = op.params.get("jaxpr")
    if op.name not in ("reduce", "reduce_window") or program is None:
        return True
    eqns = getattr(program, "jaxpr", program).eqns
    return {eqn.primitive.name for eqn in eqns} <= {"add", "add_any"} and len(eqns) == 1


def _terms(op: Op) -> int:
    """Returns the number of entries that are summed to one."""
    if op.name.startswith("cum"):
        return int(op.ins[0].aval.shape[op.params["axis"]])
    if "window_dimensions" in op.params:
        terms = 1
        for length in op.params["window_dimensions"]:
            terms *= int(length)
        return terms
    before, after = (_jax.size_of(v.aval.shape) for v in (op.ins[0], op.outs[0]))
    return before // max(1, after)


def half_accumulators(program: Program) -> Iterator[Hit]:
    """Finds sums that a loop carries in 16 bits.

    If the added term does not depend on the sum (gradients over micro-batches, a metric), the sum
    is an accumulator. n iterations lose log2(n) of its significant bits, and the limit is half of
    them: 16 iterations in bfloat16, 46 in float16. If it depends on the sum (residual blocks, whose
    terms are as large as the sum), or JAX derived the sum, the limit is 2**digits, where such a sum
    stops growing. A sum that decays counts as many terms as it remembers.
    """
    for loop, carried, returned in _half_carries(program):
        chain = _sum_of(program, returned, carried)
        if chain is None:
            yield from _decaying(program, loop, returned, carried)
            continue
        op, others = chain
        depends = any(carried in program.back(v, lambda op: True) for v in others)
        dtype = carried.aval.dtype
        derived = program.is_backward(op)
        limit = stalls_at(dtype) if depends or derived else 2 ** (digits(dtype) / 2)
        turns = turns_of(loop.eqn)
        if turns > limit:
            yield Hit(
                f"A loop of {turns} iterations carries a sum in {shown(carried)}. Each iteration "
                f"rounds it to {digits(dtype)} binary digits, and late terms are lost.",
                op,
            )


def _half_carries(program: Program) -> Iterator[tuple[Op, Value, Value]]:
    """Yields the loops that carry a 16-bit value, the value as it comes in and as it goes out."""
    for loop in (op for op in program.ops if op.inside.kind == SCAN):
        (inside,) = loop.subs
        for result, argument in inside.carry:
            carried = inside.program.invars[argument]
            if is_half(carried):
                yield loop, carried, inside.program.outvars[result]


def _decaying(program: Program, loop: Op, out: Value, carried: Value) -> Iterator[Hit]:
    """Finds a carry ``c = d * c + x`` that sums more terms than half of the digits can count.

    With a constant d, the sum is that of the last 1 / (1 - d) terms: discounted returns and
    advantages, traces. Averages, whose weights sum to 1, have their own limit.
    """
    share = share_of(program, out, carried)
    dtype, turns = carried.aval.dtype, turns_of(loop.eqn)
    if share is None or not share.rest or not 0 < share.factor < 1 or stops(share, dtype):
        return
    step, limit = 1 - share.factor, 2 ** (digits(dtype) / 2)
    # Weights that sum to about 1 are those of an average.
    if abs(share.rest - step) > step / 2 and min(turns, 1 / step) > limit:
        yield Hit(
            f"A loop of {turns} iterations carries a sum in {shown(carried)} that decays by "
            f"{share.factor:.4g}: a sum of the last {1 / step:.0f} terms. Each iteration rounds it "
            f"to {digits(dtype)} binary digits.",
            last_sum(program, out),
        )


def _sum_of(program: Program, out: Value, carried: Value) -> tuple[Op, list[Value]] | None:
    """Returns the addition that updates a carry, and the added term, or None."""
    others: list[Value] = []
    first: Op | None = None
    value = out
    while value is not carried:
        op = program.maker(value)
        if op is None:
            return None
        if op.name in CASTS | MOVES and len(op.ins) == 1:
            value = op.ins[0]
            continue
        if op.name not in ("add", "add_any", "sub"):
            return None
        first = first or op
        ways = [v for v in op.ins if v is carried or _leads_to(program, v, carried)]
        # c - x adds to the carry; x - c does not, and neither does what reads it twice.
        if len(ways) != 1 or (op.name == "sub" and ways[0] is not op.ins[0]):
            return None
        others += [v for v in op.ins if v is not ways[0]]
        value = ways[0]
    return (first, others) if first else None


def _leads_to(program: Program, value: Value, carried: Value) -> bool:
    """Returns whether a value is the carry, with terms added at most."""
    while value is not carried:
        op = program.maker(value)
        if op is None or not op.ins:
            return False
        if op.name in CASTS | MOVES and len(op.ins) == 1:
            value = op.ins[0]
        elif op.name in ("add", "add_any"):
            return any(_leads_to(program, v, carried) for v in op.ins)
        elif op.name == "sub":
            value = op.ins[0]
        else:
            return False
    return True


COLLECTIVES = (
    *("psum", "psum_invariant", "psum2", "unreduced_psum"),
    *("reduce_scatter", "psum_scatter"),
)


def half_collectives(program: Program) -> Iterator[Hit]:
    """Finds sums over devices in 16 bits, where each device rounds its partial sum.

    The usual case is gradients: an average over replicas is small relative to its terms if they
    cancel.
    """
    for op in program.named(*COLLECTIVES):
        value = op.ins[0]
        if is_half(value):
            yield Hit(
                f"{op.name} over {_axes(op)} sums {shown(value)} over devices in "
                f"{short_name(value.aval.dtype)}.",
                op,
            )


def _axes(op: Op) -> str:
    axes = op.params.get("axes", op.params.get("axis_name", ()))
    return ", ".join(map(repr, axes if isinstance(axes, tuple) else (axes,)))
