"""Repeated parts of a program, such as the layers of a network, which are rewritten only once.

An unrolled Python loop leaves copies of the same operations. `fold` finds them in a planned block:
stretches of steps that agree in everything that the rewrite reads, including the source lines, and
in the flow of values between them. The rewrite turns one of them into a function of its inputs, and
uses that function to evaluate and differentiate the others.
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

from mpjax._src.autocast.environment import Env, Settings
from mpjax._src.autocast.operations import run_step
from mpjax._src.autocast.schedule import StepFlow, flow_of, together
from mpjax._src.autocast.steps import (
    Attention,
    Body,
    ChunkedLoss,
    FusedAttention,
    Recomputed,
    Sloped,
    SoftmaxIsland,
    Step,
    as_function,
    hand_out,
)
from mpjax._src.autocast.tables import Analysis
from mpjax._src.base import _jax
from mpjax._src.base.higher_order import Inside
from mpjax._src.program.graph import REGION, Block, Op, Value

# Shorter stretches save no time.
SHORTEST = 4

Code = Callable[[Step], tuple[int, list[Value]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Repeated steps, which are rewritten once, then evaluated and differentiated whole."""

    # The steps, after the operations from elsewhere that compute operands where they are read.
    steps: tuple[Step, ...]
    key: Any  # a key of the computation, equal for equal stretches
    ins: tuple[Value, ...]  # the values that flow in
    outs: tuple[Value, ...]  # the values that flow out of this stretch or of an equal one
    stack: Any  # the names around all of the steps

    def run(self, env: Env) -> None:
        """Runs the steps, by the function of an equal stretch if there was one."""
        arrays, tree = jax.tree.flatten([env.held(value) for value in self.ins])
        avals = tuple(map(jax.typeof, arrays))
        key = self.key, tree, avals
        if key not in env.shared:
            env.shared[key] = self._rewritten(env, avals, tree)
        call, out_tree = env.shared[key]
        with _jax.inside(self.stack):
            results = call(*arrays)
        hand_out(self.outs, jax.tree.unflatten(out_tree, results), self.steps, env)

    def _rewritten(self, env: Env, avals: Sequence[Any], tree: Any) -> Any:
        """Returns the steps as a function of flat arrays, and the tree of its results."""

        def run_steps(env):
            for step in self.steps:
                run_step(step, env)

        inner = functools.partial(env.inside, len(self.stack.stack))
        run, trees = as_function(self.ins, self.outs, tree, inner, Env.held, run_steps)
        return _jax.linearized_once(_jax.trace(run, avals, "stretch")), trees[0]


def fold(
    steps: Sequence[Step],
    results: Sequence[Value],
    settings: Settings,
) -> "list[Step | Stretch]":
    """Returns the steps of a block, in which repeated ones are gathered into stretches."""
    if len(steps) < 2 * SHORTEST:
        return [*steps]
    code = _coder(settings)
    keys = [code(step)[0] for step in steps]
    runs = _runs(keys)
    between = _between(keys, runs)
    if not (runs or between):
        return [*steps]
    flow = flow_of(settings.analysis, steps, results)
    places = [place for run in runs for place in itertools.pairwise(_cuts(run, flow.names))]
    places += between
    # All together, because equal stretches of different runs are rewritten once too.
    alike = _alike([_stretch(flow, a, b, code) for a, b in places])
    copied = dict(zip(places, alike, strict=True))
    folded: list[Step | Stretch] = []
    done = 0
    for (a, b), copy in sorted(copied.items(), key=lambda item: item[0]):
        folded += steps[done:b] if copy is None else [*steps[done:a], copy]
        done = b
    return [*folded, *steps[done:]]


# ---- what is alike ------------------------------------------------------------------------------

# What the rewrite reads, apart from equations and connections. A test checks that it is complete.


def _of_value(value: Value, analysis: Analysis, inside: bool) -> tuple[Any, ...]:
    """Returns what the rewrite reads of a value; of one in a nested program, nearly everything."""
    seen = value.literal, value.given, value.moved, analysis.is_raw(value)
    stored = analysis.stored[value]
    if inside:  # where islands are chosen
        return *seen, value.entries, value in analysis.small, stored
    return *seen, stored.dtype


def _of_op(op: Op, analysis: Analysis) -> tuple[Any, ...]:
    """Returns what the rewrite reads of an op."""
    ruling, choice = analysis.rulings[op], analysis.choices[op]
    decided = ruling.rule, ruling.half, ruling.forced, choice.compute, choice.sent_half
    marks = analysis.marks
    others = marks.centered.get(op), marks.online.get(op), marks.repeats.get(op)
    return *decided, marks.is_steady(op), *others


# The fields of steps and nested programs that make up their keys.
FIELDS = {
    kind: [field.name for field in dataclasses.fields(kind)]
    for kind in (
        *(Block, Body, Sloped, Recomputed),
        *(SoftmaxIsland, Attention, FusedAttention, ChunkedLoss),
    )
}


def _coder(settings: Settings) -> Code:
    """Returns a function from a step to its number, equal for equal steps, and its values."""
    numbers: dict[Any, int] = {}
    # The policy's overrides may match the names of scopes.
    overrides, returned = bool(settings.policy.overrides), settings.returned
    analysis, kept = settings.analysis, settings.analysis.kept

    def number(key: Any) -> int:
        return numbers.setdefault(key, len(numbers))

    @functools.cache
    def of_value(value: Value, inside: bool) -> int:
        const = value.const
        if const is not None:
            const = np.asarray(const)
            const = const.tobytes() if const.size < 64 else id(value.const)
        properties = value.aval, const, value in returned, value in kept
        return number((*properties, _of_value(value, analysis, inside)))

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
                return _place(x, overrides), _of_op(x, analysis), len(x.ins), *values, subs
            if kind in FIELDS:
                return tuple([key(getattr(x, f), inside) for f in FIELDS[kind]])
            if kind in (list, tuple, range, Inside):
                return tuple([key(y, inside) for y in x])
            if kind in (set, frozenset):  # its values are recorded elsewhere too
                return tuple(sorted(order.index(v) for v in x))
            return id(x) if isinstance(x, np.ndarray | jax.Array) else x

        try:
            return number(key(step)), order
        except TypeError:  # an object that cannot be hashed
            return number(step), order

    return code


def _place(op: Op, overrides: bool) -> Any:
    """Returns a key of an op's equation, and of the names that planning a custom rule reads."""
    if op.eqn.effects:  # their order matters
        return op
    if not op.subs and not op.name.startswith("custom_"):
        return _jax.equation_key(op.eqn)
    scopes = op.scopes if overrides else tuple(n for n in op.scopes if n.startswith(REGION))
    return _jax.equation_key(op.eqn), scopes


# ---- where it repeats ---------------------------------------------------------------------------

# The start of the copies, the length of one, and the possible end of the last one.
Run = tuple[int, int, int]


def _runs(keys: Sequence[int]) -> list[Run]:
    """Returns ranges in which equal keys repeat at equal distances, largest saving first."""
    candidates: list[tuple[int, Run]] = []
    for period in _periods(keys):
        start = 0
        alike = map(operator.eq, keys, keys[period:])
        for same, group in itertools.groupby(alike):
            end = start + len([*group])
            saved = (end - start) // period * period
            if same and saved:
                candidates.append((saved, (start, period, end + period)))
            start = end
    taken: list[Run] = []
    for _, (start, period, end) in sorted(candidates, key=lambda run: run[0], reverse=True):
        for first, _, last in taken:
            if first <= start < last:
                start = last
            elif start < first < end:
                end = first
        if end - start >= 2 * period:
            taken.append((start, period, end))
    return sorted(taken)


def _between(keys: Sequence[int], runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Returns equal ranges outside of runs, each between two steps that have no equal one.

    They are found in layers that are alike but for a few steps, such as the relu of a ResNet, which
    has its own rule in each layer.
    """
    count = collections.Counter(keys)
    inside = {i for start, _, end in runs for i in range(start, end)}
    ranges: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    start = 0
    for i, key in enumerate([*keys, None]):
        if key is None or count[key] == 1 or i in inside:
            if i - start >= SHORTEST:
                ranges.setdefault(tuple(keys[start:i]), []).append((start, i))
            start = i + 1
    return sorted(place for places in ranges.values() if len(places) > 1 for place in places)


def _periods(keys: Sequence[int]) -> list[int]:
    """Returns the distances at which the most keys repeat, shortest first."""
    places: dict[int, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    distances: collections.Counter[int] = collections.Counter()
    for same in places.values():
        for ahead in range(1, min(8, len(same))):
            distances.update(map(operator.sub, same[ahead:], same))
    likely = {period: n for period, n in distances.items() if n >= period >= SHORTEST}
    return sorted(sorted(likely, key=lambda period: -likely[period])[:16])


def _cuts(run: Run, names: Sequence[Any]) -> list[int]:
    """Returns the starts of the copies, and the end of the last one.

    A copy starts where the scope names that differ between copies change.
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
    """Returns the steps from a to b, their values, and which of the values flow out."""
    steps, inputs, outputs = together(flow, a, b)
    places: dict[Value, int] = {}
    numbers = [places.setdefault(v, len(places)) for s in steps for v in code(s)[1]]
    stack = _jax.common_stack(flow.names[a:b])
    names = tuple([name.stack[len(stack.stack) :] for name in flow.names[a:b]])
    key = tuple([code(s)[0] for s in steps]), tuple(numbers), names
    stretch = Stretch(tuple(steps), key, tuple(inputs), (), stack)
    return stretch, [*places], {places[v] for v in outputs}


def _alike(copies: list[tuple[Stretch, list[Value], set[int]]]) -> list[Stretch | None]:
    """Returns the stretches that have an equal one; equal stretches get the same outputs."""
    out: dict[Any, set[int]] = {}
    count: collections.Counter[Any] = collections.Counter()
    for stretch, _, outputs in copies:
        out.setdefault(stretch.key, set()).update(outputs)
        count[stretch.key] += 1
    return [
        dataclasses.replace(stretch, outs=tuple(values[i] for i in sorted(out[stretch.key])))
        if count[stretch.key] > 1
        else None
        for stretch, values, _ in copies
    ]
