"""The plan: the compute dtype of every operation, and the storage dtype of every float32 value.

Five passes over the frozen graph of the program (`program.graph`) each return their own tables,
keyed by operations and values (`tables.Analysis`), and read those before them:

1. `classify` finds the rule of each op: from the table of primitives, the user or the program.
2. `Sweep` (forward) infers the origin of each value and whether 16 bits can represent it, and
   decides which loop carries may be 16-bit.
3. `demand` (backward) collects the demands of each value's readers.
4. `decide` (forward) picks each op's compute dtype and each value's storage dtype.
5. `store` picks the steps that run, and with them the values kept for a backward pass.

Code that runs or reports a plan does not change it.

A float32 value has one of three kinds. *half*: computed in 16 bits, or rounded to 16 bits for
storage. *full*: the result of a float32 operation. *flexible*: an argument or constant, or computed
from these alone. A flexible value is float32, but it does not force other operands to float32. An
elementwise operation computes in float32 if an operand is full, else in 16 bits if one is 16-bit;
else its result is flexible.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.autocast import budget, chains, coding, peepholes
from mpjax._src.autocast.choice import Part, choose, live
from mpjax._src.autocast.classify import arguments_of, classify
from mpjax._src.autocast.decide import decide
from mpjax._src.autocast.demand import ask, held_carries
from mpjax._src.autocast.environment import Settings
from mpjax._src.autocast.facts import Sweep, argument
from mpjax._src.autocast.flow import FAR_SMALLER, Flow, flow_of
from mpjax._src.autocast.islands import groups, islands, leave_small
from mpjax._src.autocast.lean import checkpoints
from mpjax._src.autocast.operations import run_block
from mpjax._src.autocast.repeats import fold
from mpjax._src.autocast.scans import recurrences
from mpjax._src.autocast.schedule import in_order, needs
from mpjax._src.autocast.shifts import sum_at_once
from mpjax._src.autocast.sizes import stored_bytes
from mpjax._src.autocast.steps import (
    Attention,
    ChunkedLoss,
    Elementwise,
    FusedAttention,
    Island,
    KeptAttention,
    Recomputed,
    SoftmaxIsland,
    Step,
    WholeCheckpoint,
    in_place_of,
)
from mpjax._src.autocast.tables import Analysis, Choices, Marks, Rulings, Storage
from mpjax._src.base.devices import current_facts
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.base.higher_order import NONE, SCAN, THEIRS, WHILE, Inside, turns_of
from mpjax._src.policy.fields import CHOICES
from mpjax._src.policy.policy import Policy
from mpjax._src.program.graph import Block, Op, Value, build
from mpjax._src.program.rebuild import has_barrier
from mpjax._src.program.views import VIEWS, is_view
from mpjax._src.replacements.attentions import attention, others
from mpjax._src.replacements.cross_entropies import cross_entropies
from mpjax._src.replacements.softmaxes import Softmax


@dataclasses.dataclass(frozen=True)
class Plan:
    """A planned program.

    Attributes:
        block: The graph.
        policy: The policy.
        used_patterns: The patterns of the policy's overrides that match something.
        analysis: The rules of its operations; once it is completed, all decisions.
        returned: The values that are returned in float32, once it is completed.
    """

    block: Block
    policy: Policy
    used_patterns: frozenset[str]
    analysis: Analysis
    returned: frozenset[Value] = frozenset()

    @functools.cached_property
    def as_written(self) -> bool:
        """Whether the policy, its lists and overrides, regions and kernels ask for no 16-bit dtype.

        Then the program runs as it was traced.
        """
        return self.analysis.half_of(self.block) is None

    @functools.cached_property
    def rows(self) -> dict[Op, int]:
        """The numbers of ops in reports."""
        rows = {op: row for row, (op, _) in enumerate(self.numbered)}
        stands_for = self.analysis.marks.stands_for
        return rows | {op: rows[of] for op, of in stands_for.items() if of in rows}

    @functools.cached_property
    def numbered(self) -> list[tuple[Op, int]]:
        """The ops that have rows in reports, in order, and how often each runs.

        An op that is planned as one operation, such as an activation with its own rule, is one row.
        """
        return [*_numbered(self.block, self.analysis.rulings)]


def _numbered(block: Block, rulings: Rulings, times: int = 1) -> Iterator[tuple[Op, int]]:
    for op in block.ops:
        yield op, times
        if rulings[op].rule == "program" or rulings[op].leaves_alone(op):
            for sub in op.subs:
                yield from _numbered(sub.program, rulings, times * turns_of(op.eqn))


def make_plan(
    jaxpr: Any,
    consts: Sequence[Any],
    policy: Policy,
    in_dtypes: Sequence[Any],
    out_dtypes: Sequence[Any] | None = None,
    scopes: tuple[str, ...] = (),
    linear: Sequence[int] = (),
) -> Plan:
    """Plans a program that will run. The arguments are those of `outline` and `analyze`."""
    return complete(outline(jaxpr, consts, policy, scopes=scopes), in_dtypes, out_dtypes, linear)


def outline(
    jaxpr: Any,
    consts: Sequence[Any],
    policy: Policy,
    paths: Sequence[str] = (),
    scopes: tuple[str, ...] = (),
) -> Plan:
    """Returns the plan of a program with the rules of its operations, and no other decision.

    Args:
        jaxpr: The program.
        consts: The values of its constants: arrays or tracers.
        policy: The policy.
        paths: The path of each argument, for the policy's overrides.
        scopes: The names of the scopes around the program.
    """
    block = build(jaxpr, consts, scopes, paths)
    rulings, small, used = classify(block, policy)
    return Plan(block, policy, used, Analysis(rulings, small))


def complete(
    plan: Plan,
    in_dtypes: Sequence[Any],
    out_dtypes: Sequence[Any] | None = None,
    linear: Sequence[int] = (),
) -> Plan:
    """Makes all other decisions: `analyze`, and the values kept for a backward pass."""
    analysis = analyze(plan, in_dtypes, out_dtypes, linear)
    # A rule that computes tangents is transposed as it is, so no values are marked as kept.
    by = WRITTEN if plan.as_written else LINEAR if linear else plan.policy.storage
    named = (name for name in REPLACED if getattr(plan.policy, name) and not linear)
    analysis = store(plan.block, analysis, by, frozenset(named))
    returned = frozenset(v for v, want in analysis.wants.items() if want.returned)
    return dataclasses.replace(plan, analysis=analysis, returned=returned)


def analyze(
    plan: Plan,
    in_dtypes: Sequence[Any],
    out_dtypes: Sequence[Any] | None = None,
    linear: Sequence[int] = (),
) -> Analysis:
    """Decides the dtypes of a program, without running it.

    Args:
        plan: The outline of the program.
        in_dtypes: The dtype in which each float32 argument arrives.
        out_dtypes: The dtype in which each float32 result is returned; None for float32.
        linear: Which arguments are tangents. The program will be transposed with respect to them.

    Returns:
        The tables of all passes up to the dtypes.
    """
    block, outlined = plan.block, plan.analysis
    returned = out_dtypes or [FLOAT32] * len(block.outvars)
    sweep = Sweep(outlined.rulings, outlined.small)
    for index, (value, dtype) in enumerate(zip(block.invars, in_dtypes, strict=True)):
        sweep.facts[value] = argument(sweep.bit(value), dtype in HALVES, index in linear)
    arguments = arguments_of(block, in_dtypes)
    while True:
        sweep.program_of(block)
        analysis = Analysis(sweep.rulings, outlined.small, arguments, sweep.facts, sweep.carries)
        analysis = ask(analysis, block, returned)
        if not sweep.hold(held_carries(analysis, block), analysis.rulings):
            return decide(analysis, block, in_dtypes)


# ---- storage -------------------------------------------------------------------------------------

# The goals of the choice: few bytes moved; few bytes kept; few bytes kept, in codes; a number of
# bytes kept, by computing matmuls again; the peepholes alone, inside a checkpoint of the user's;
# nothing, if there is no backward pass, or if the program runs as it was traced. A program that is
# transposed as it is keeps nothing, in loops either.
FAST, LEAN, CODED = CHOICES["storage"].values
AGAIN, PEEPHOLES, WRITTEN, LINEAR = "again", "peepholes", "written", "linear"

# The goals inside primitives with programs, where they differ from those around them.
INSIDE = {THEIRS: PEEPHOLES, NONE: WRITTEN}

# The goals inside loops. What an iteration keeps is written to a stack and read from it, so the
# fewest bytes kept are the fewest moved. Values are rounded where they are kept, not in between as
# under `LEAN`, whose results do not depend on what is kept. On a TPU, XLA writes a softmax that is
# computed again to memory before matmuls read it.
IN_LOOPS = {FAST: LEAN}

# Settings of the policy that replace what a program writes out.
REPLACED = "fused_attention", "chunked_loss"


class Picked(NamedTuple):
    """The steps of a block, before the kept values are chosen: the part, its flow, its chains."""

    part: Part
    flow: Flow
    links: Sequence[Sequence[Op]]


def store(block: Block, analysis: Analysis, by: str | float, replaced: Collection[str]) -> Analysis:
    """Picks the steps of a program, and the values that it keeps for the backward pass.

    Args:
        block: The program.
        analysis: What is known about its values.
        by: The goal, or for `AGAIN` the number.
        replaced: Which of `REPLACED` are asked for.

    Returns:
        The tables: more is computed in float32, and there are marks, steps and kept values.
    """
    planned = dataclasses.replace(
        analysis,
        rulings=Rulings(analysis.rulings),
        small={*analysis.small},
        choices=Choices(analysis.choices),
        stored=Storage(analysis.stored),
        marks=Marks(),
        once=set(),
        steps={},
        kept=set(),
        codes={},
        convolved=coding.convolved(block) if by == CODED else set(),
        passing=set(),
    )
    goal = by if isinstance(by, str) else AGAIN
    picked: dict[Block, Picked] = {}
    _pick(block, planned, goal, {*block.invars}, replaced, picked)
    parts = {inner: one.part for inner, one in picked.items()}
    if not isinstance(by, str):
        kept = budget.within(planned, block, parts, by, checkpoints)
        for inner, chosen in kept.chosen.items():
            planned.kept.update(chosen.kept)
            planned.steps[inner] = tuple(kept.steps[inner])
            for step in kept.steps[inner]:
                planned.passing.update(step.passing if isinstance(step, WholeCheckpoint) else ())
        _hold(planned, picked)
        return planned
    for inner, part in parts.items():
        kinds = coding.kinds(planned, part.steps) if by == CODED else {}
        chosen = choose(planned, part, kinds)
        planned.kept.update(chosen.kept)
        planned.codes.update({v: kinds[v] for v in chosen.kept if v in kinds})
        planned.steps[inner] = tuple(checkpoints(planned, part, chosen, kinds))
        if goal == FAST:
            chains.unround_again(planned.steps[inner], picked[inner].flow, picked[inner].links)
    _hold(planned, picked)
    return planned


def _hold(planned: Analysis, picked: dict[Block, Picked]) -> None:
    """Marks the ops whose results are kept behind a barrier, which loops have none of."""
    for one in picked.values():
        if not one.part.in_loop:
            planned.marks.held.update(_behind(planned.kept | planned.passing, one.flow))


def _pick(
    block: Block,
    analysis: Analysis,
    by: str,
    alive: Collection[Value],
    replaced: Collection[str],
    picked: dict[Block, "Picked"],
) -> None:
    """Picks the steps of every block.

    Args:
        block: The block.
        analysis: What is known about its values.
        by: The goal.
        alive: The arguments of the block that are in memory anyway.
        replaced: Which of `REPLACED` are asked for.
        picked: Gets the blocks for which the kept values are chosen afterwards.
    """
    for op in block.ops:
        if analysis.rulings[op].rule == "program":
            for sub in op.subs:
                changing = {place for _, place in sub.carry}
                inner = [
                    v
                    for i, (v, index) in enumerate(zip(sub.program.invars, sub.ins, strict=True))
                    if op.ins[index] in alive and i not in changing
                ]
                analysis.once.update(_once_inside(op, sub, analysis.once))
                goal = by if by == WRITTEN else INSIDE.get(op.inside.storage, by)
                if sub.program.in_loop and current_facts().platform != "tpu":
                    goal = IN_LOOPS.get(goal, goal)
                _pick(sub.program, analysis, goal, {*inner}, replaced, picked)
        elif analysis.once:
            reads = {v for v in op.ins if not v.constant}
            analysis.once.update(op.outs if reads and reads <= analysis.once else ())
    flow = flow_of(block, analysis)
    linked, stands_for = chains.links(flow), analysis.marks.stands_for
    chosen = FINDERS[by](flow, replaced, linked)
    chosen = [leave_small(i, flow) if isinstance(i, Recomputed) else i for i in chosen]
    if by in (LEAN, CODED, AGAIN):
        chosen = _that_keep_less(chosen, flow, alive)
    taken = {op for island in chosen for op in island.ops}
    links = [*groups(flow, taken, lambda op: stands_for.get(op, op) in linked)]
    more = chains.islands(links, flow) if by in (FAST, PEEPHOLES, LINEAR) else []
    # If islands depend on each other in a cycle, none is used.
    attempts = (_in_steps(flow.ops, together) for together in ([*chosen, *more], chosen))
    steps: Sequence[Step] = next(filter(None, attempts), flow.ops)
    used = {op for step in steps if isinstance(step, Island) for op in step.ops}
    for ops in links:
        chains.unrounded(ops, flow, by != WRITTEN and ops[0] not in used)
    for step in steps:
        if isinstance(step, Elementwise):
            chains.unrounded(step.ops, flow, differentiated=False)
    analysis.steps[block] = tuple(steps)
    read = [value for op in flow.ops if has_barrier(op.eqn) for value in op.ins]
    analysis.marks.held.update(_behind(read, flow))
    if by in (LEAN, CODED, AGAIN):
        part = Part(live(steps, block.outvars), block.outvars, alive, block.in_loop)
        picked[block] = Picked(part, flow, links)


def _behind(read: Iterable[Value], flow: Flow) -> Iterator[Op]:
    """Yields the ops, without loops, that compute values or what values are views of."""
    waiting = [*read]
    while waiting:
        op = flow.producer.get(waiting.pop())
        if op and (op.name in VIEWS or is_view(op)):
            waiting += op.ins
        elif op and op.inside.kind not in (SCAN, WHILE):
            yield op


def _once_inside(op: Op, sub: Inside, once: Collection[Value]) -> Iterator[Value]:
    """Yields the arguments of a program inside an op that are the same in all iterations."""
    for place, (value, index) in enumerate(zip(sub.program.invars, sub.ins, strict=True)):
        if place < sub.consts if op.inside.kind == SCAN else op.ins[index] in once:
            yield value


def _in_steps(ops: Sequence[Op], islands: Sequence[Island]) -> list[Step] | None:
    """Returns ops and islands in order; None without islands, or if they wait for each other."""
    units = in_order(ops, [island.ops for island in islands]) if islands else None
    around = {op: island for island in islands for op in island.ops}
    return [around.get(unit[0], unit[0]) for unit in units] if units else None


def _that_keep_less(islands: list[Island], flow: Flow, alive: Collection[Value]) -> list[Island]:
    """Returns islands without those that keep more bytes than their operations would.

    An island keeps its large inputs in half, and its results where a derivative reads them. Its
    operations keep such inputs in float32, or what they are computed from, but results may be
    computed again. An island must save an eighth: what only small values decide is a tie.
    """
    others = [i for i in islands if not isinstance(i, Recomputed)]
    if len(others) == len(islands):
        return islands
    results = flow.block.outvars
    steps = live(_in_steps(flow.ops, others) or flow.ops, results)
    apart = choose(flow.analysis, Part(steps, results, alive, flow.block.in_loop))
    producer = {v: step for step in steps for v in step.outs}
    readers: dict[Value, set[Step]] = {}
    for step in steps:
        again = () if apart.again.isdisjoint(step.outs) else step.ins
        for value in (*needs(flow.analysis, step), *again):
            readers.setdefault(value, set()).add(step)

    def size(values: Iterable[Value]) -> int:
        return sum(stored_bytes(flow.analysis, v) for v in values)

    def keeps_less(island: Recomputed) -> bool:
        read = [v for v in island.outs if readers.get(v, set()).difference(island.ops)]
        sources = dict.fromkeys([*island.rounded, *(v for op in island.ops for v in op.outs)])
        todo = [*sources]
        while todo:
            value = todo.pop()
            before = producer[value].ins if value in apart.again else ()
            todo += [v for v in before if v not in sources]
            sources |= dict.fromkeys(before)
        kept = size(island.rounded) // 2 + size(read)
        return FAR_SMALLER * kept <= (FAR_SMALLER - 1) * size(apart.kept.intersection(sources))

    return [i for i in islands if not isinstance(i, Recomputed) or keeps_less(i)]


# ---- which steps --------------------------------------------------------------------------------


def _special(flow: Flow, replaced: Collection[str], links: Collection[Op]) -> list[Island]:
    """Returns the islands whose derivative is cheaper than the one that JAX derives."""
    special: list[Island] = [*_by_blocks(flow)] if "chunked_loss" in replaced else []
    special += recurrences(flow)
    taken = {op for island in special for op in island.ops}
    special += [i for i in peepholes.softmaxes(flow) if taken.isdisjoint(i.ops)]
    if "fused_attention" in replaced:
        special = [_in_kernel(i, flow) if isinstance(i, SoftmaxIsland) else i for i in special]
        known = flow.marks.attention
        known.update({made.matmul: made.note for made in others(flow, known)})
    special = peepholes.attentions(flow, special)
    sum_at_once(flow, {op for island in special for op in island.ops})
    peepholes.repetitions(flow)
    return special


def _by_blocks(flow: Flow) -> Iterator[ChunkedLoss]:
    """Yields the losses that run without their logits, and notes why others do not."""
    for maker, note, found in cross_entropies(flow):  # type: ignore[arg-type]
        flow.marks.losses[maker] = note
        if found is not None:
            yield ChunkedLoss(in_place_of(found, flow), found.how)


def _in_kernel(island: SoftmaxIsland, flow: Flow) -> Island:
    """Returns a softmax with its matmuls in the fused kernel of the device, if that fits."""
    form, masked = island.form, any(v.aval.dtype == np.bool_ for v in island.ins)
    options = form.axes, form.rate, form.whole, masked
    softmax = Softmax(frozenset(island.ops), island.ins[0], island.outs[0], *options)
    made = attention(softmax, flow)  # type: ignore[arg-type]
    if made is not None:
        flow.marks.attention[made.matmul] = made.note
    found = made and made.found
    return FusedAttention(in_place_of(found, flow), found.how) if found else island


def _fewest_moved(flow: Flow, replaced: Collection[str], links: Collection[Op]) -> list[Island]:
    return islands(flow, _special(flow, replaced, links), links)


def _in_order(attention: Attention) -> Attention:
    return dataclasses.replace(attention, in_order=True)


def _fewest_kept(flow: Flow, replaced: Collection[str], links: Collection[Op]) -> list[Island]:
    """Returns the islands that keep fewer bytes than derivatives would, by rounding to 16 bits.

    16-bit ops are not taken in, which would move the cut to their operands. A checkpoint around an
    island would keep its wide inputs in float32.
    """
    chosen = islands(flow, _special(flow, replaced, links), links=())
    rounded = [i for i in chosen if isinstance(i, Recomputed) and i.rounded]
    now: dict[Island, Island] = {i: dataclasses.replace(i, wide=frozenset()) for i in rounded}
    now |= {i: _in_order(i) for i in chosen if isinstance(i, Attention)}
    return [now.get(i, i) for i in chosen if i in now or not isinstance(i, Elementwise)]


def _fewest_coded(flow: Flow, replaced: Collection[str], links: Collection[Op]) -> list[Island]:
    """Returns the same islands, with codes of inputs themselves, not of their rounded copies."""

    def is_coded(value: Value) -> bool:  # not what comes into a loop
        return value in flow.producer and coding.may_be_coded(flow.analysis, value)

    return [
        dataclasses.replace(i, rounded=frozenset(itertools.filterfalse(is_coded, i.rounded)))
        if isinstance(i, Recomputed)
        else i
        for i in _fewest_again(flow, replaced, links)
    ]


def _fewest_again(flow: Flow, replaced: Collection[str], links: Collection[Op]) -> list[Island]:
    """Returns the same islands, with a choice for the softmax of each attention: kept or not."""
    return [_of_choice(flow, island) for island in _fewest_kept(flow, replaced, links)]


def _of_choice(flow: Flow, island: Island) -> Island:
    if not isinstance(island, Attention):
        return island
    for value in island.body.sums:  # returned as the matmul reads them
        flow.marks.kept_as[value] = np.dtype(island.body.half)
    return KeptAttention(island.body, island.form, island.matmul, island.weights)


FINDERS: dict[str, Callable[[Flow, Collection[str], Collection[Op]], list[Island]]] = {
    FAST: _fewest_moved,
    LINEAR: _fewest_moved,
    LEAN: _fewest_kept,
    CODED: _fewest_coded,
    AGAIN: _fewest_again,
    PEEPHOLES: _special,
    WRITTEN: lambda flow, replaced, links: [],
}


# ---- running ------------------------------------------------------------------------------------


def run_plan(
    plan: Plan, args: Sequence[Any], out_dtypes: Sequence[Any], rows: bool = False
) -> list[Any]:
    """Evaluates a planned program.

    Args:
        plan: The plan.
        args: One array per argument, in the dtypes for which the program was planned.
        out_dtypes: The dtype in which each float32 result is returned.
        rows: Whether to add scopes with the row number of each op, for a report.

    Returns:
        The results.
    """
    numbers = plan.rows if rows else {}
    settings = Settings(plan.policy, plan.analysis, numbers, plan.as_written, plan.returned, fold)
    return run_block(plan.block, args, out_dtypes, settings)
