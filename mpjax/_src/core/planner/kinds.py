"""What operations do to errors of their operands, and where views put the axes of theirs."""

import math
from collections.abc import Iterable, Mapping, Sequence

from mpjax._src.core.base import rules
from mpjax._src.core.base._jax.rounded import ROUNDED
from mpjax._src.core.planner.equations import BARRIER, Equation, Value
from mpjax._src.core.planner.rounding import is_half_matmul

Axes = frozenset[int]
NO_AXES: Axes = frozenset()

# kind: what an operation does to errors of its operands.
MATMUL = "matmul"  # it rounds its operands and its result
SAME = "same"  # a view whose entries stay where they are
LAYOUT = "layout"  # a view whose axes are others
MOVED = "moved"  # a view whose entries stand elsewhere
ADDED = "added"  # a sum of two operands
MULTIPLIED = "multiplied"
SELECTED = "selected"  # one of its operands, entry by entry
SUMMED = "summed"  # over axes
SUMS = "sums"  # other sums: over windows, devices, segments
EXTREME = "extreme"  # the largest entry, or the smallest one
ORDERED = "ordered"  # by the order of entries
COMPARED = "compared"  # no floats, or a jump
SIMPLE = "simple"  # keeps relative errors, entry by entry
SPECIAL = "special"  # a function of its entries that may amplify errors, as exp and log
UNKNOWN = "unknown"  # a loop, a kernel, linear algebra

VIEWS = frozenset([SAME, LAYOUT])  # of all entries of their operand
# Only what the table of rules does not say.
KINDS = {
    **dict.fromkeys(rules.VIEWS, LAYOUT),
    **dict.fromkeys((ROUNDED, "reduce_precision", "name", "pvary", "copy", BARRIER), SAME),
    **dict.fromkeys(("stop_gradient", "sharding_constraint", rules.CAST), SAME),
    **dict.fromkeys(rules.SUMS_OF_TWO, ADDED),
    **dict.fromkeys(("max", "min", rules.SELECT, "clamp"), SELECTED),
    **dict.fromkeys(rules.EXTREMES, EXTREME),
    "scatter-add": SUMS,
    "reduce_sum": SUMMED,
    "cbrt": SIMPLE,
}


def kind_of(e: Equation) -> str:
    """Returns what an equation does to errors of its operands."""
    rule = e.rule
    # One that stays float32 rounds nothing, and is `UNKNOWN` below.
    if is_half_matmul(e):
        return MATMUL
    # The table of rules has rows of loops as well, which say nothing of what is inside.
    if e.row.kind or e.name in KINDS:
        return KINDS.get(e.name, UNKNOWN)
    moves, fused = rule.need == rules.MOVE, rule.cost == rules.FUSED
    sums = rule.need == rules.FULL and rule.gain == rules.SUM
    # The first that fits counts: what ranks, for one, is a move as well.
    kinds = {
        MULTIPLIED: rule.multiplies,
        ORDERED: rules.RANKS in rule.traits or (moves and rules.KINKED in rule.traits),
        MOVED: moves,
        COMPARED: rule.need == rules.COMPARE or (rule.gain == rules.NONE and fused),
        SUMS: sums and rules.NO_HALF_FORM not in rule.traits,
        SIMPLE: fused and rule.gain_of(e.params) == rules.ONE,
        SPECIAL: rule.cost != rules.NEVER and rules.REDUCES not in rule.traits,
    }
    return next((kind for kind, fits in kinds.items() if fits), UNKNOWN)


def every(v: Value) -> Axes:
    """Returns all axes of a value."""
    return frozenset(range(len(v.shape)))


def axes_of_view(e: Equation) -> dict[int, set[int]]:
    """Returns where the axes of the operand of a view are in its result."""
    before, after, p = e.ins[0].shape, e.outs[0].shape, e.params
    if e.name == "transpose":
        return {a: {i} for i, a in enumerate(p["permutation"])}
    if e.name == rules.SPREAD:
        return {i: {d} for i, d in enumerate(p["broadcast_dimensions"])}
    if e.name == "squeeze":
        kept = [i for i in range(len(before)) if i not in p["dimensions"]]
        return {a: {i} for i, a in enumerate(kept)}
    if e.name == "reshape":
        return _axes_of_reshape(before, after)
    return {i: {i} for i in range(len(before))}


def _axes_of_reshape(before: Sequence[int], after: Sequence[int]) -> dict[int, set[int]]:
    """Finds the groups of axes with as many entries before as after."""
    found: dict[int, set[int]] = {}
    i = j = first = second = 0
    while i < len(before) or j < len(after):
        # A group grows on the side that has fewer entries, until both have as many.
        n, m = math.prod(before[first:i]), math.prod(after[second:j])
        if n == m:  # a group ends
            first, second = i, j
            i, j = min(i + 1, len(before)), min(j + 1, len(after))
        # Beside an axis of size zero, products may differ to the end: no index runs past it.
        elif j == len(after) or (n < m and i < len(before)):
            i += 1
        else:
            j += 1
        found.update((a, {*range(second, j)}) for a in range(first, i))
    return found


def moved(axes: Iterable[int], places: dict[int, set[int]]) -> Axes:
    """Returns axes of an operand as axes of a result."""
    return frozenset[int]().union(*(places.get(a, ()) for a in axes))


def without_axes(v: Value, summed: Iterable[int]) -> dict[int, set[int]]:
    """Returns where the axes of a value are after a sum over some of them."""
    kept = [i for i in range(len(v.shape)) if i not in {*summed}]
    return {a: {i} for i, a in enumerate(kept)}


def constant_along(
    v: Value, axes: Iterable[int], maker: Mapping[Value, Equation]
) -> tuple[Value, Sequence[int]] | None:
    """Returns what a value spreads along axes, and where its own axes are; None if it differs."""
    e, dims = maker.get(v), range(len(v.aval.shape))
    if e is not None and e.name == rules.SPREAD:
        # JAX spreads an array before it is added, so what is constant is found behind that.
        (v, *_), dims = e.ins, e.params["broadcast_dimensions"]
    sizes = dict(zip(dims, v.aval.shape, strict=True))
    return (v, dims) if all(sizes.get(a, 1) == 1 for a in axes) else None
