"""Stretches of a program that repeat, as the layers of a network do: rewritten once.

A loop that Python unrolled leaves the same operations again and again. `fold` finds them in a
planned block: stretches of steps that agree in all that the rewrite reads of them, down to the line
of source they come from, and in how values flow between them. The rewrite makes one of them a
function of what flows into it, and evaluates and differentiates the others as that.
"""

import collections
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._src import _jax
from mpjax._src.autocast.graph import REGION, Block, Op, Value
from mpjax._src.autocast.islands import Island
from mpjax._src.autocast.steps import Step, StepFlow, flow_of, together
from mpjax._src.higher_order import Inside

# Below this many steps a stretch saves nothing.
SHORTEST = 4

Code = Callable[[Step], tuple[int, list[Value]]]


@dataclasses.dataclass(eq=False)
class Stretch:
    """Steps that run together.

    Attributes:
        steps: The steps; before them, operations from elsewhere that make what they read where it
            is read.
        key: What they compute, and how: equal for stretches that are alike.
        inputs: The values that flow in.
        outputs: The values that flow out, of this stretch or of one like it.
        stack: The names around all of them.
    """

    steps: list[Step]
    key: Any
    inputs: list[Value]
    outputs: list[Value]
    stack: Any


def fold(
    steps: Sequence[Step], results: Sequence[Value], overrides: bool
) -> "list[Step | Stretch]":
    """Returns steps, those that repeat gathered into stretches.

    Args:
        steps: The steps of a block.
        results: The values that they are run for.
        overrides: Whether the policy looks at the names of scopes.
    """
    if len(steps) < 2 * SHORTEST:
        return [*steps]
    code = _coder(overrides)
    runs = _runs([code(step)[0] for step in steps])
    if not runs:
        return [*steps]
    flow = flow_of(steps, results)
    folded: list[Step | Stretch] = []
    done = 0
    for run in runs:
        cuts = _cuts(run, flow.names)
        copies = _alike([_stretch(flow, a, b, code) for a, b in itertools.pairwise(cuts)])
        folded += steps[done : cuts[0]]
        for copy, (a, b) in zip(copies, itertools.pairwise(cuts), strict=True):
            folded += steps[a:b] if copy is None else [copy]
        done = cuts[-1]
    return [*folded, *steps[done:]]


# ---- what is alike ------------------------------------------------------------------------------

# What the rewrite reads of a value and of an op, apart from the equation and from how they hang
# together. A test holds it.
READ = {
    Value: "raw literal given moved want.returned dtype kept",
    Op: "rule half forced compute steady centred online repeats sent_half",
}

# Programs inside are grouped into islands when they are rewritten, which reads nearly all.
UNREAD = {
    Value: "aval const paths want",
    Op: "eqn ins outs subs stack scopes callers index why row attention",
    Island: "",
    Block: "steps wanted",
}
FIELDS: dict[type, list[str]] = {
    kind: [f.name for f in dataclasses.fields(kind) if f.name not in unread.split()]
    for kind, unread in UNREAD.items()
}
FIELDS[Value].append("want.returned")
_of = {
    kind: (operator.attrgetter(*read.split()), operator.attrgetter(*FIELDS[kind]))
    for kind, read in READ.items()
}


def _coder(overrides: bool) -> Code:
    """Returns what gives a step its number, the same for alike ones, and its values in order."""
    numbers: dict[Any, int] = {}

    def number(key: Any) -> int:
        return numbers.setdefault(key, len(numbers))

    @functools.cache
    def of_value(value: Value, inside: bool) -> int:
        const = value.const
        if const is not None:
            const = np.asarray(const)
            const = const.tobytes() if const.size < 64 else id(value.const)
        return number((value.aval, const, _of[Value][inside](value)))

    @functools.cache
    def code(step: Step) -> tuple[int, list[Value]]:
        order: list[Value] = []
        ops: dict[Op, int] = {}

        def key(x: Any, inside: bool = False) -> Any:
            kind = type(x)
            if kind is Value:
                order.append(x)
                return of_value(x, inside)
            if kind is Op:
                if x in ops:
                    return ops[x]
                ops[x] = len(ops)
                values = [key(v, inside) for v in (*x.ins, *x.outs)]
                subs = tuple([key(sub, True) for sub in x.subs])
                return _place(x, overrides), _of[Op][inside](x), len(x.ins), *values, subs
            if kind in FIELDS:
                return tuple([key(getattr(x, f), inside) for f in FIELDS[kind]])
            if kind in (list, tuple, range, Inside):
                return tuple([key(y, inside) for y in x])
            if kind in (set, frozenset):  # of values that stand elsewhere too
                return tuple(sorted(order.index(v) for v in x))
            return id(x) if isinstance(x, np.ndarray | jax.Array) else x

        try:
            return number(key(step)), order
        except TypeError:  # something that cannot be compared
            return number(step), order

    return code


def _place(op: Op, overrides: bool) -> Any:
    """Returns the equation of an op, and the names that the planning of a custom rule reads."""
    if op.eqn.effects:  # their order matters
        return op
    if not op.subs and not op.name.startswith("custom_"):
        return _jax.equation_key(op.eqn)
    scopes = op.scopes if overrides else tuple(n for n in op.scopes if n.startswith(REGION))
    return _jax.equation_key(op.eqn), scopes


# ---- where it repeats ---------------------------------------------------------------------------

# Where copies start, how long one is, and where the last one may end.
Run = tuple[int, int, int]


def _runs(keys: Sequence[int]) -> list[Run]:
    """Returns where equal keys follow at equal distances; what saves most comes first."""
    found: list[tuple[int, Run]] = []
    for period in _periods(keys):
        start = 0
        alike = map(operator.eq, keys, keys[period:])
        for same, group in itertools.groupby(alike):
            end = start + len([*group])
            saved = (end - start) // period * period
            if same and saved:
                found.append((saved, (start, period, end + period)))
            start = end
    taken: list[Run] = []
    for _, (start, period, end) in sorted(found, key=lambda run: run[0], reverse=True):
        for first, _, last in taken:
            if first <= start < last:
                start = last
            elif start < first < end:
                end = first
        if end - start >= 2 * period:
            taken.append((start, period, end))
    return sorted(taken)


def _periods(keys: Sequence[int]) -> list[int]:
    """Returns the distances at which most keys are found again, short ones first."""
    places: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    found: collections.Counter[int] = collections.Counter()
    for same in places.values():
        for ahead in range(1, min(8, len(same))):
            found.update(map(operator.sub, same[ahead:], same))
    likely = {period: n for period, n in found.items() if n >= period >= SHORTEST}
    return sorted(sorted(likely, key=lambda period: -likely[period])[:16])


def _cuts(run: Run, names: Sequence[Any]) -> list[int]:
    """Returns where copies begin, and where the last one ends.

    They begin where the names change that tell them apart.
    """
    start, period, end = run
    pairs = [(names[i], names[i + period]) for i in range(start, end - period)]
    depths = [len(_jax.common_stack([a, b]).stack) for a, b in pairs if a != b]
    depth = min(depths, default=-1) + 1

    def begins(i: int) -> bool:
        return i == 0 or not depth or names[i].stack[:depth] != names[i - 1].stack[:depth]

    first = next(filter(begins, range(start, start + period)), start)
    return [*range(first, end + 1, period)]


def _stretch(flow: StepFlow, a: int, b: int, code: Code) -> tuple[Stretch, list[Value], set[int]]:
    """Returns the steps from a to b, all values that they deal with, and which of them flow out."""
    steps, inputs, outputs = together(flow, a, b)
    places: dict[Value, int] = {}
    numbers = [places.setdefault(v, len(places)) for s in steps for v in code(s)[1]]
    stack = _jax.common_stack(flow.names[a:b])
    names = tuple([name.stack[len(stack.stack) :] for name in flow.names[a:b]])
    key = tuple([code(s)[0] for s in steps]), tuple(numbers), names
    return Stretch(steps, key, inputs, [], stack), [*places], {places[v] for v in outputs}


def _alike(copies: list[tuple[Stretch, list[Value], set[int]]]) -> list[Stretch | None]:
    """Returns the stretches, without those that are like no other; alike ones give the same."""
    out: dict[Any, set[int]] = {}
    count: collections.Counter[Any] = collections.Counter()
    for stretch, _, outputs in copies:
        out.setdefault(stretch.key, set()).update(outputs)
        count[stretch.key] += 1
    for stretch, values, _ in copies:
        stretch.outputs = [values[i] for i in sorted(out[stretch.key])]
    return [stretch if count[stretch.key] > 1 else None for stretch, _, _ in copies]
