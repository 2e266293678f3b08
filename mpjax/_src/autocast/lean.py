"""Storage "lean": keeps the fewest bytes, and recomputes elementwise operations.

The kept values are the smallest set, in bytes, from which all values that derivatives read can be
recomputed. The rows of `rules` say which values derivatives read, and which operations may not run
twice. The operations between kept values form groups, each under its own checkpoint, so that the
backward pass recomputes a group when it reaches it, and not before. If one group is in the middle
of another (a layer next to a residual stream that is not kept), the checkpoints are nested.

In a loop, what is kept is written to a stack. Copies and views of an iteration's parameters are
recomputed, as the parameters are in memory anyway. Those of a loop's constants are computed once.
"""

import collections
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from mpjax._src.autocast.choice import Chosen, Part, choose, copies, live, runs_again, stands_alone
from mpjax._src.autocast.schedule import (
    connected,
    flow_of,
    in_order,
    made_where_read,
    needs,
    together,
)
from mpjax._src.autocast.steps import (
    Checkpoint,
    CodedCheckpoint,
    Recomputed,
    Step,
    WholeCheckpoint,
)
from mpjax._src.autocast.tables import Analysis
from mpjax._src.base import rules
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.program.graph import Op, Value

# The most checkpoints within each other: to trace one takes some of Python's stack. Of more, such
# as those of many skip connections, each runs what several would.
DEEPEST = 16


def checkpoints(
    analysis: Analysis,
    part: Part,
    chosen: Chosen,
    kinds: Mapping[Value, str] = MappingProxyType({}),
) -> Sequence[Step]:
    """Returns the steps of a part, with those that run again in checkpoints.

    ``kinds`` has the kind of code in which values would be kept, for those that have one.
    """
    steps, copied = part.steps, copies(analysis, part)
    alone = sum(1 << i for i, step in enumerate(steps) if stands_alone(analysis, step, kinds))
    reach = _Reach(steps)
    wanted = _groups(analysis, part, chosen, copied, kinds, reach)
    spans = [span for span in _nested([*wanted], reach) if not span & alone]
    whole = sum(1 << i for i, step in enumerate(steps) if chosen.repeats(step))
    # Steps inside a group that repeats matmuls are not repeated once more, for themselves.
    spans = [s for s in spans if not any(s | o == o != s and o & whole for o in spans)]
    outer = {span: sum(span | other == other != span for other in spans) for span in spans}
    every = 1 + max(outer.values(), default=0) // DEEPEST
    spans = [span for span in spans if outer[span] % every == 0]
    depth = {span: sum(span | other == span for other in spans) for span in spans}
    now = {step: step for step in steps}  # the current checkpoint of each step
    first = [*steps]
    for _, level in itertools.groupby(sorted(spans, key=depth.__getitem__), depth.__getitem__):
        # In the current order: a gathered step may run later than before.
        when = {step: i for i, step in enumerate(steps)}
        groups = [
            sorted({now[first[i]] for i in _bits(span)}, key=when.__getitem__) for span in level
        ]
        steps = gathered(analysis, steps, part.results, groups, copied)
        around = {step: c for c in steps if isinstance(c, Checkpoint) for step in c.steps}
        now = {step: around.get(holder, holder) for step, holder in now.items()}
    if kinds:
        return [_of_codes(step, chosen.kept, kinds) for step in steps]
    return [_of_matmuls(analysis, part, chosen, step) for step in steps]


def _of_matmuls(analysis: Analysis, part: Part, chosen: Chosen, step: Step) -> Step:
    """Returns a step that repeats matmuls, if it is a checkpoint around such.

    While its backward pass runs, it keeps what lean would keep of these steps.
    """
    if not isinstance(step, Checkpoint) or not any(map(chosen.repeats, step.steps)):
        return step
    inside = Part(live(step.steps, step.outs), step.outs, part.alive, part.in_loop)
    own = choose(analysis, inside, there={*step.ins, *chosen.kept})
    again = chosen.again.intersection(v for s in step.steps for v in s.outs)
    steps = tuple(checkpoints(analysis, inside, own))
    return WholeCheckpoint(steps, step.ins, step.outs, again, own.kept - chosen.kept)


def _of_codes(step: Step, kept: Collection[Value], kinds: Collection[Value]) -> Step:
    """Returns a step whose derivative reads codes, if it is a checkpoint with values as codes."""
    if not isinstance(step, Checkpoint):
        return step
    inside = tuple(_of_codes(s, kept, kinds) for s in step.steps)
    made = [v for s in inside for v in (s.kept if isinstance(s, CodedCheckpoint) else s.outs)]
    own = tuple(v for v in dict.fromkeys(made) if v in kept)
    if not any(v in kinds and v in kept for v in (*step.ins, *own)):
        return step
    return CodedCheckpoint(inside, step.ins, step.outs, own)


def gathered(
    analysis: Analysis,
    steps: Sequence[Step],
    results: Sequence[Value],
    groups: Sequence[Sequence[Step]],
    copied: Collection[Op],
) -> Sequence[Step]:
    """Returns steps in which each group is a checkpoint, except groups that cannot be one."""
    units = in_order(steps, groups)
    if units is None:
        for group in groups if len(groups) > 1 else ():
            steps = gathered(analysis, steps, results, [group], copied)
        return steps
    flow = flow_of(analysis, [step for unit in units for step in unit], results, copied)
    regrouped: list[Step] = []
    done = 0
    for unit in units:
        start, done = done, done + len(unit)
        alone = len(unit) == 1 and unit not in groups
        regrouped += unit if alone else [Checkpoint(*map(tuple, together(flow, start, done)))]
    return regrouped


# ---- what runs together -------------------------------------------------------------------------

# Sets of steps are bit masks of their positions.


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _groups(
    analysis: Analysis,
    part: Part,
    chosen: Chosen,
    copied: set[Op],
    kinds: Mapping[Value, str],
    reach: "_Reach",
) -> Iterator[int]:
    """Yields groups of steps, as bit masks: recomputed steps and the steps that need them.

    The reductions of their operands and results belong to the group too: the cotangent of a
    reduction is a broadcast small array, best broadcast where it is used. A group does not end at a
    matmul's float32 result, or at a linear function of it, because its cotangent is rounded to 16
    bits at the matmul.
    """
    steps, (again, kept, _) = part.steps, chosen
    place = {v: i for i, step in enumerate(steps) for v in step.outs}
    there = {*_kept_as_stored(analysis, steps, again)}
    known = {*place}.union(*(step.ins for step in steps))
    there.update(v for v in known if v.is_f32 and analysis.stored[v].dtype in HALVES)
    first: dict[Value, int] = {}  # the first of the steps that share a kept value
    alone = {s for s in steps if stands_alone(analysis, s, kinds) or made_where_read(analysis, s)}
    free = [i for i, step in enumerate(steps) if step not in alone and step not in copied]
    coded = kept.intersection(kinds)
    pairs = [*_decoding(analysis, steps, free, coded, reach)] if coded else []
    pairs += _derived(analysis, part, chosen, free)
    worth = {i for _, i in pairs}
    wide: set[Value] = set()
    for i in free:
        step = steps[i]
        makes = not again.isdisjoint(step.outs)
        reduces = isinstance(step, Op) and rules.REDUCES in step.spec.traits
        wanted = {*step.ins} if makes or reduces else set()
        if makes:
            worth.add(i)
        halves = step.rounded if isinstance(step, Recomputed) else ()  # stored in 16 bits
        from_wide = [v for v in step.ins if v in wide and v not in halves]
        pairs += [(place[v], i) for v in from_wide]
        linear = isinstance(step, Op) and runs_again(analysis, step)
        if isinstance(step, Op):
            linear &= _is_linear(analysis, step) if kinds else step.spec.linear
        if _is_wide(analysis, step) or (from_wide and linear):
            wide.update(
                v
                for v in step.outs
                if analysis.stored[v].dtype == FLOAT32 and v not in analysis.small
            )
        for v in wanted.union(needs(analysis, step)) - analysis.once:
            maker = steps[place[v]] if v in place and v not in kept else None
            if maker and (runs_again(analysis, maker) or chosen.repeats(maker)):
                if maker in copied and part.in_loop:
                    pairs.append((i, i))
                    worth.add(i)  # else a view of a parameter would be written to a stack
                elif not (maker in copied or made_where_read(analysis, maker)):
                    pairs.append((place[v], i))
            elif (
                isinstance(step, Op)
                and v.is_f32
                and v in there
                and analysis.choices[step].compute not in (None, analysis.stored[v].dtype)
            ):
                widened = analysis.stored[v].dtype in HALVES and step.spec.cost != rules.NEVER
                pairs.append((first.setdefault(v, i) if widened else i, i))
                worth.add(i)  # else a copy in the other dtype would be kept
    for group in connected(pairs):
        if not worth.isdisjoint(group):
            yield sum(1 << i for i in group)


def _derived(
    analysis: Analysis, part: Part, chosen: Chosen, free: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yields steps, each with itself, whose derivatives are functions of values that are there.

    JAX would keep what it makes of them as well: 2x for x**2, cos(x) for sin(x).
    """
    used = (v for step in part.steps for v in {*_used(analysis, step, chosen.again)})
    readers = collections.Counter(used)
    there = {*part.alive, *(v for v in chosen.kept if readers[v] > 1)}
    for i in free:
        step = part.steps[i]
        read = [v for v in needs(analysis, step) if v.is_f32]
        saves = step.spec.saves if isinstance(step, Op) else rules.NOTHING
        if read and saves in (rules.OPERANDS, rules.RESULT) and there.issuperset(read):
            yield i, i


def _used(analysis: Analysis, step: Step, again: frozenset[Value]) -> Iterator[Value]:
    """Yields what the backward pass reads for a step."""
    yield from needs(analysis, step)
    yield from step.ins if not again.isdisjoint(step.outs) else ()


def _decoding(
    analysis: Analysis,
    steps: Sequence[Step],
    free: Sequence[int],
    coded: Collection[Value],
    reach: "_Reach",
) -> Iterator[tuple[int, int]]:
    """Yields pairs of steps that read codes: each with itself, and those that decode them once.

    These are a reduction of a value with a norm that reads both, whose cotangents are then added
    before they are rounded; and steps that read the same code, if nothing is between them.
    """
    place = {v: i for i, step in enumerate(steps) for v in step.outs}
    readers: dict[Value, list[int]] = {}
    for i in free:
        read = [v for v in dict.fromkeys(needs(analysis, steps[i])) if v in coded]
        if not read:
            continue
        yield i, i
        for j in (place[v] for v in steps[i].ins if v in place):
            step = steps[j]
            reduces = isinstance(step, Op) and rules.REDUCES in step.spec.traits
            if reduces and not {*step.ins}.isdisjoint(read):
                yield j, i
        for v in read:
            yield from ((j, i) for j in readers.setdefault(v, []) if reach.adjacent(j, i))
            readers[v].append(i)


def _is_linear(analysis: Analysis, step: Op) -> bool:
    """Returns whether the derivative of an op reads no float that changes."""
    return not any(v.is_f32 and v.const is None for v in needs(analysis, step))


def _kept_as_stored(
    analysis: Analysis, steps: Sequence[Step], again: frozenset[Value]
) -> Iterator[Value]:
    """Yields the values that are in memory anyway, or that the backward pass reads as stored.

    What comes into a loop, from outside or from the iteration before, is kept in 16 bits instead if
    only operations in 16 bits need it.
    """
    for step in steps:
        compute = analysis.choices[step].compute if isinstance(step, Op) else None
        used = {*_used(analysis, step, again)}
        yield from (v for v in step.ins if analysis.is_raw(v))
        yield from (v for v in used if compute in (None, analysis.stored[v].dtype))


def _is_wide(analysis: Analysis, step: Step) -> bool:
    """Returns whether a step is a matmul that returns its float32 accumulator."""
    return (
        isinstance(step, Op)
        and step.spec.need == rules.HALF
        and analysis.stored[step.outs[0]].dtype == FLOAT32
    )


class _Reach:
    """The steps before and after each step, as bit masks."""

    def __init__(self, steps: Sequence[Step]):
        place = {v: i for i, step in enumerate(steps) for v in step.outs}
        self.before = [0] * len(steps)
        self.after = [0] * len(steps)
        sources = [{place[v] for v in step.ins if v in place} for step in steps]
        for i, direct in enumerate(sources):
            for j in direct:
                self.before[i] |= self.before[j] | 1 << j
        for i in reversed(range(len(steps))):
            for j in sources[i]:
                self.after[j] |= self.after[i] | 1 << i

    def hull(self, group: int) -> int:
        """Returns a group with all steps that are between its members."""
        before = after = 0
        for i in _bits(group):
            before |= self.before[i]
            after |= self.after[i]
        return group | (before & after)

    def adjacent(self, *group: int) -> bool:
        """Returns whether no other step is between some steps."""
        mask = sum(1 << i for i in group)
        return self.hull(mask) == mask


def _nested(groups: Sequence[int], reach: _Reach) -> list[int]:
    """Returns the closed groups, merged until any two are disjoint or nested."""
    closed: list[int] = []
    todo = [reach.hull(group) for group in groups]
    while todo:
        group = todo.pop()
        crossing = next((c for c in closed if c & group not in (0, c, group)), None)
        if crossing is None:
            closed += [] if group in closed else [group]
        else:
            closed.remove(crossing)
            todo.append(reach.hull(crossing | group))
    return closed
