"""Loops, branches and maps of which one part runs forward and one backward, cut inside.

JAX differentiates a scan as two scans, and what the second reads of the first is stacked. Here both
bodies are one list of equations, so the same cut that divides a program divides its loops: what is
stacked is chosen in the body, and the rest is computed again there. The same holds for the branches
of a cond and the program of a shard_map. A pair that is not recognized stays as JAX made it.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building
from mpjax._src.core.base._jax.barriers import row_major
from mpjax._src.core.base.higher_order import BRANCH, MAP, SCAN
from mpjax._src.core.base.rules import DOT
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.cotangents import rounded_once
from mpjax._src.core.planner.dependence import deduplicated, dependents, readers_of
from mpjax._src.core.planner.equations import Equation, Value, appended, closed, opened, parts
from mpjax._src.core.planner.handover import handed_over
from mpjax._src.core.planner.held_apart import held_apart
from mpjax._src.core.planner.maxima import unpooled
from mpjax._src.core.planner.partition import Parts
from mpjax._src.core.planner.rewrites import rewritten
from mpjax._src.core.planner.turns import hoisted

# The turns of a loop whose number is not known.
MANY = 16


def joined(
    equations: Sequence[Equation],
    cotangents: Iterable[Value],
    free: Collection[Value],
    results: Iterable[Value],
    half: np.dtype,
    storage: str | float,
) -> None:
    """Cuts the loops, branches and maps of a program again, in place.

    Args:
        equations: The equations of the program, forward and backward part.
        cotangents: The arguments of the backward part alone.
        free: Values that the backward part has anyway.
        results: What the program returns.
        half: The 16-bit dtype.
        storage: The policy's setting of storage.
    """
    late, results = dependents(equations, cotangents), {*results}
    readers = readers_of(equations)
    maker = {out: e for e in equations for out in e.outs}
    for back in equations:
        cut = KINDS.get(back.row.kind)
        if cut is None or late.isdisjoint(back.ins):
            continue
        # A dictionary keeps the order, so that plans are the same in every process.
        ahead = dict.fromkeys(maker[v] for v in back.ins if v in maker and v not in late)
        for fore in ahead:
            if fore.primitive is not back.primitive:
                continue
            private = {
                out: i
                for i, out in enumerate(fore.outs)
                # What others read has to be made as it is; only what the second alone reads can be
                # chosen anew.
                if readers[out] == [back] and out not in results
            }
            if private:
                read = {*back.ins}
                cut(Pair(fore, back, private, {*free}, half, storage))
                # Both equations were changed in place: a later pair finds the new values.
                maker.update((out, fore) for out in fore.outs)
                for v in dict.fromkeys(back.ins):
                    if v not in read:
                        readers[v].append(back)


@dataclasses.dataclass
class Pair:
    """An equation of the forward part, and one of the backward part that reads its results.

    Attributes:
        fore: The first.
        back: The second.
        private: The results of the first that only the second reads, with their places.
        free: Values that the backward part has anyway.
        half: The 16-bit dtype.
        storage: The policy's setting of storage.
    """

    fore: Equation
    back: Equation
    private: dict[Value, int]
    free: set[Value]
    half: np.dtype
    storage: str | float

    @property
    def public(self) -> list[int]:
        """The places of the other results of the first."""
        return [i for i, out in enumerate(self.fore.outs) if out not in self.private]


@dataclasses.dataclass
class Body:
    """Both programs of a pair as one list of equations.

    Attributes:
        ins: The arguments of the first.
        first: Its equations.
        outs: Its results.
        back_ins: The arguments of the second: those that are values of the first are these values.
        own: The places of the others.
        second: The equations of the second.
        back_outs: Its results.
        saved: What the first hands to the second.
    """

    ins: list[Value]
    first: list[Equation]
    outs: list[Value]
    back_ins: list[Value]
    own: list[int]
    second: list[Equation]
    back_outs: list[Value]
    saved: list[Value] = dataclasses.field(default_factory=list)

    @classmethod
    def of(
        cls, pair: "Pair", fore: Any, back: Any, same: Callable[..., Sequence[Value | None]]
    ) -> "Body":
        """Opens programs of a pair; ``same`` finds the arguments of the second in the first."""
        ins, first, outs = parts(fore, region=pair.fore.region)
        known = same(ins, outs)
        pairs = zip(known, _jax.in_avals(back), strict=True)
        back_ins = [Value(aval) if v is None else v for v, aval in pairs]
        second: list[Equation] = []
        back_outs = opened(back, back_ins, second, region=pair.back.region)
        own = [i for i, v in enumerate(known) if v is None]
        return cls(ins, first, outs, back_ins, own, second, back_outs)

    def read(self, values: Iterable[Value]) -> list[Value]:
        """Returns the values that the second reads."""
        read = {*self.back_outs, *(v for e in self.second for v in e.ins)}
        return [v for v in values if v in read]

    def cut(
        self,
        pair: Pair,
        priced: Sequence[Value],
        stacked: Collection[Value] = (),
        turns: int | None = None,
    ) -> None:
        """Chooses what the first hands over.

        Args:
            pair: The pair.
            priced: The arguments that have to be handed over to be read.
            stacked: The results of which all turns are returned anyway.
            turns: How often a loop turns; None for what is no loop.
        """
        new, half, storage = [self.back_ins[i] for i in self.own], pair.half, pair.storage
        free = {*self.ins} - {*priced}
        returned = [self.outs[i] for i in pair.public]
        both = [*self.first, *self.second]
        # Inner pairs first: what they hand over is what the cut of this body chooses from.
        joined(both, new, free, [*returned, *self.back_outs], half, storage)
        second, self.back_outs = deduplicated(self.second, self.back_outs)
        both_parts = hoisted(self.first), hoisted(second)
        changed = rewritten(Parts(*both_parts, returned, self.back_outs, new, half))
        late = unpooled(rounding.with_rounded(changed.late, rounded_once(changed), half))
        given: dict[str, Any] = {"priced": priced, "stacked": stacked, "turns": turns or 1}
        hand = handed_over(changed._replace(late=late), self.ins, storage, **given)
        self.saved, self.first = [*hand.values, *hand.carriers], hand.early
        rest = [*hand.again, *hand.late]
        self.second = [*hand.before, *rest]
        if turns is None and not isinstance(storage, str):  # XLA finds nothing in loops
            parts_of = self.saved, (), hand.before, rest, self.back_outs
            self.second, self.back_outs = held_apart(*parts_of, new, in_turns=True)


def _scan(pair: Pair) -> None:
    fore, back = pair.fore, pair.back
    row = fore.row
    length = row.turns(fore)[0]
    (_, start, end), (*_, back_end) = rounding.places(fore), rounding.places(back)
    # Of stacks, those that the second scan reads turn by turn: none that it reads whole.
    pair.private = {
        v: i for v, i in pair.private.items() if i >= end - start and v not in back.ins[:back_end]
    }
    if length != row.turns(back)[0] or not pair.private:
        return
    body = Body.of(pair, *_programs(pair), functools.partial(_same_turn, pair))
    groups = _, carries, slices = rounding.groups_of(fore, body.ins)
    # Both scans have the constants. A carry would be stacked for the second, and the array of a
    # slice may have to be handed over.
    priced = [*(v for v, _ in carries), *(v for v, x in slices if x not in pair.free)]
    stacked = [i for i in pair.public if i >= end - start]
    turns = length if isinstance(length, int) else MANY
    body.cut(pair, priced, {body.outs[i] for i in stacked}, turns)
    _in_order(body)
    stacks = {body.outs[i]: fore.outs[i] for i in stacked}
    # Slices come from arrays that exist: the second scan reads these, not stacks of the slices.
    known = {*stacks, *(v for v, _ in slices)}
    new = {v: Value(building.stacked_aval(length, v.aval)) for v in body.saved if v not in known}
    kept = [body.outs[i] for i in pair.public]
    fore.outs = [*(fore.outs[i] for i in pair.public), *new.values()]
    _, fore.params = rounding.scanned(fore, groups, body.first, [*kept, *new])
    _scan_back(pair, body, {**stacks, **new})


def _in_order(body: Body) -> None:
    """Stacks what a matmul reads in the order in which it reads it: batch axes, rows, summed axes.

    Else XLA:GPU may store it in another order than the second scan reads it in, and copies the
    whole stack in between.
    """
    readers, own = readers_of(body.first), {*body.ins, *body.outs}
    for i, v in enumerate(body.saved):
        dots = [e for e in readers[v] if e.name == DOT]
        if not dots or v in own:
            continue
        place = dots[0].ins.index(v)
        summed, batch = (sides[place] for sides in dots[0].params["dimension_numbers"])
        rows = [d for d in range(len(v.aval.shape)) if d not in (*summed, *batch)]
        order = (*batch, *rows, *summed)
        back = tuple(np.argsort(order).tolist())
        turned = lambda x, to=order: [row_major(jax.lax.transpose(x, to))]  # noqa: E731
        (stored,), again = appended(turned, [v], body.first), list[Equation]()
        appended(lambda x, to=back: [jax.lax.transpose(x, to)], [stored], again, outs=[v])
        if again:
            body.saved[i] = stored
            body.second[:0] = again


def _same_turn(pair: Pair, ins: Sequence[Value], outs: Sequence[Value]) -> list[Value | None]:
    """Returns the arguments of the second body that are values of the first, of the same turn."""
    (_, start, end), groups = rounding.places(pair.back), rounding.groups_of(pair.fore, ins)
    consts, _, slices = ({x: v for v, x in group} for group in groups)
    slices |= {v: outs[i] for v, i in pair.private.items()}
    return [
        # A carry of the second is none of the first: it runs from the last turn to the first.
        consts.get(v) if i < start else slices.get(v) if i >= end else None
        for i, v in enumerate(pair.back.ins)
    ]


def _scan_back(pair: Pair, body: Body, stacks: dict[Value, Value]) -> None:
    """Gives the second scan its new operands; ``stacks`` has those of values of the first body."""
    back, read = pair.back, {*body.read(body.ins)}

    def chosen(e, ins, values):
        groups = rounding.groups_of(e, ins)
        return ([pair for pair in group if pair[0] in values] for group in groups)

    consts, _, slices = chosen(pair.fore, body.ins, read)
    own, carries, theirs = chosen(back, body.back_ins, {body.back_ins[i] for i in body.own})
    inputs = {v for v, _ in slices}
    over = [(v, stacks[v]) for v in body.saved if v not in inputs]
    groups = [*consts, *own], carries, [*theirs, *over, *slices]
    back.ins, back.params = rounding.scanned(back, groups, body.second, body.back_outs)


def _cond(pair: Pair) -> None:
    fore, back = pair.fore, pair.back
    if fore.ins[0] is not back.ins[0] or back.ins[0] in pair.private:
        return
    operands, public = fore.ins[1:], pair.public

    def same(ins, outs):
        at = dict(zip(operands, ins, strict=True))
        at |= {v: outs[i] for v, i in pair.private.items()}
        return [at.get(v) for v in back.ins[1:]]

    bodies = []
    for first, second in zip(*map(rounding.programs, (fore, back)), strict=True):
        body = Body.of(pair, first, second, same)
        arguments = zip(operands, body.ins, strict=True)
        body.cut(pair, [x for v, x in arguments if v not in pair.free])
        bodies.append(body)
    # All branches return the same types, so one that hands over less fills the places with zeros.
    slots, taken = _slots([[v for v in b.saved if v not in b.ins] for b in bodies])
    read = [i for i in range(len(operands)) if any(b.read([b.ins[i]]) for b in bodies)]
    own = bodies[0].own
    fore_programs, back_programs = [], []
    for body, mine in zip(bodies, taken, strict=True):
        equations = [*body.first]
        filled = [
            mine[i] if i in mine else zeros_like(aval, equations) for i, aval in enumerate(slots)
        ]
        results = [*(body.outs[i] for i in public), *filled]
        fore_programs.append(closed(body.ins, equations, results, rounding.info_of(fore)))
        passed = [mine[i] if i in mine else Value(aval) for i, aval in enumerate(slots)]
        ins = [*(body.back_ins[i] for i in own), *passed, *(body.ins[i] for i in read)]
        back_programs.append(closed(ins, body.second, body.back_outs, rounding.info_of(back)))
    shared = [Value(aval) for aval in slots]
    fore.outs = [*(fore.outs[i] for i in public), *shared]
    row = fore.row
    fore.params = {**fore.params, **row.holding(fore_programs)}
    back.ins = [back.ins[0], *(back.ins[1 + i] for i in own), *shared, *(operands[i] for i in read)]
    back.params = {**back.params, **row.holding(back_programs)}


def _slots(each: Sequence[Sequence[Value]]) -> tuple[list[Any], list[dict[int, Value]]]:
    """Finds places for what each branch hands over, which branches share by type."""
    slots: list[Any] = []
    taken = []
    for values in each:
        mine: dict[int, Value] = {}
        for v in values:
            free = [i for i, aval in enumerate(slots) if aval == v.aval and i not in mine]
            if not free:
                slots.append(v.aval)
            mine[free[0] if free else len(slots) - 1] = v
        taken.append(mine)
    return slots, taken


def zeros_like(aval: Any, into: list[Equation]) -> Value:
    """Appends the equations of an array of zeros."""
    (out,) = appended(lambda: [_jax.zeros_of(aval)], [], into)
    return out


def _map(pair: Pair) -> None:
    fore, back, public_specs = pair.fore, pair.back, pair.fore.params["out_specs"]
    params, back_params = fore.params, back.params
    names = ("mesh", "check_vma", "newly_manual_axes", "manual_axes")
    back_specs = back_params["in_specs"]
    read = [*zip(back.ins, back_specs, strict=True)]
    pair.private = {
        v: i
        for v, i in pair.private.items()
        # With another spec, a device would read another part than it made.
        if all(spec == public_specs[i] for x, spec in read if x is v)
    }
    same = all(params.get(name) == back_params.get(name) for name in names)
    if not same or not pair.private:
        return
    public = pair.public
    # Types inside depend on the mesh and its axes, which tracing reads from here.
    with building.on_each_device(params):
        body = Body.of(pair, *_programs(pair), functools.partial(_same_part, pair))
        arguments = zip(fore.ins, body.ins, strict=True)
        body.cut(pair, [x for v, x in arguments if v not in pair.free])
        first, second = [*body.first], [*body.second]
        out, passed = _with_axes([v for v in body.saved if v not in body.ins], first, second)
        kept = [body.outs[i] for i in public]
        inner = closed(body.ins, first, [*kept, *out], rounding.info_of(fore))
        inputs, own = body.read(body.ins), body.own
        ins = [*(body.back_ins[i] for i in own), *passed, *inputs]
        back_inner = closed(ins, second, body.back_outs, rounding.info_of(back))
        specs = building.spread_specs(params, [v.aval for v in out])
    if any(_jax.open_jaxpr(program)[1] for program in (inner, back_inner)):
        return  # a constant of a shard_map's program would have no spec
    typed = zip(specs, out, strict=True)
    whole = [Value(building.whole_aval(params, spec, v.aval)) for spec, v in typed]
    fore.outs = [*(fore.outs[i] for i in public), *whole]
    out_specs = [*(public_specs[i] for i in public), *specs]
    body_of = functools.partial(building.as_body, params)
    fore.params = {**params, "jaxpr": body_of(inner), "out_specs": tuple(out_specs)}
    at = [body.ins.index(v) for v in inputs]
    in_specs = [*(back_specs[i] for i in own), *specs, *(params["in_specs"][i] for i in at)]
    back.ins = [*(back.ins[i] for i in own), *whole, *(fore.ins[i] for i in at)]
    back.params = {**back_params, "jaxpr": body_of(back_inner), "in_specs": tuple(in_specs)}


def _same_part(pair: Pair, ins: Sequence[Value], outs: Sequence[Value]) -> list[Value | None]:
    """Returns the arguments of the second program that are values of the first, on each device."""
    fore, back = pair.fore, pair.back
    # The same array with another spec is another part of it.
    at = dict(zip(zip(fore.ins, fore.params["in_specs"], strict=True), ins, strict=True))
    read = zip(back.ins, back.params["in_specs"], strict=True)
    private = {v: outs[i] for v, i in pair.private.items()}
    return [private.get(v, at.get((v, spec))) for v, spec in read]


def _with_axes(
    values: Sequence[Value], first: list[Equation], second: list[Equation]
) -> tuple[list[Value], list[Value]]:
    """Gives arrays without axes one, along which the values of the devices are put together.

    Returns:
        What the first program returns, and what the second gets.
    """
    out, passed = [], []
    again: list[Equation] = []
    for v in values:
        tall = arrived = v
        if not v.aval.shape:
            (tall,) = appended(lambda x: [jax.lax.reshape(x, (1,))], [v], first)
            arrived = Value(tall.aval)
            appended(lambda x: [jax.lax.reshape(x, ())], [arrived], again, outs=[v])
        out.append(tall)
        passed.append(arrived)
    second[:0] = again
    return out, passed


def _programs(pair: Pair) -> tuple[Any, Any]:
    """Returns the programs of a pair as closed jaxprs."""
    first, second = (building.as_closed(rounding.programs(e)[0]) for e in (pair.fore, pair.back))
    return first, second


KINDS: dict[str, Callable[[Pair], None]] = {SCAN: _scan, BRANCH: _cond, MAP: _map}
