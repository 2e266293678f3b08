"""Programs under a `jax.checkpoint` with a policy: what it saves of their values.

Of what a policy saves JAX keeps what the rest is computed from. So do programs, of the equations
that their backward part needs.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from mpjax._src.core.base._jax import building
from mpjax._src.core.base.higher_order import SCAN
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.dependence import between
from mpjax._src.core.planner.equations import Equation, Value, appended, parts

# Says of the primitive, the operand types and the parameters of an equation where its results are
# saved: in a memory space, or None, so that it runs again.
Where = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


def places(equations: Sequence[Equation], where: Where) -> dict[Value, Any]:
    """Returns the values that a policy saves, and where."""
    found: dict[Value, Any] = {}
    for e in equations:
        place = where(e.primitive, [v.aval for v in e.ins], e.params)
        if place is not None:
            found.update(dict.fromkeys(e.outs, place))
            continue
        _, start, end = rounding.places(e)
        for _, inner, outs in rounding.bodies(e):
            inside = places(inner, where)
            pairs = [*zip(e.outs, outs, strict=True)][end - start :]  # no carries: they are many
            found.update((out, inside[v]) for out, v in pairs if v in inside)
    return found


class Split(NamedTuple):
    """A loop that saves values of its turns, and one that reads them.

    Attributes:
        first: The loop, which returns them too.
        second: The loop, which gets them.
        saved: Their stacks, and where these are saved.
    """

    first: Equation
    second: Equation
    saved: dict[Value, Any]


def split(
    e: Equation, needed: Collection[Value], where: Where, done: dict[Any, Split]
) -> Split | None:
    """Divides a loop by what a policy saves in its body; None if that is nothing.

    Args:
        e: The loop.
        needed: The values that are needed again.
        where: The policy.
        done: What was divided before.
    """
    # Of a divided loop, both parts would have its effects.
    if e.row.kind != SCAN or e.acts:
        return None
    (program,) = rounding.programs(e)
    body = ins, equations, outs = parts(program, region=e.region)
    _, start, end = rounding.places(e)
    asked = {i for i, v in enumerate(e.outs) if v in needed}
    while True:  # a turn may read what the turn before it carries
        results = [outs[i] for i in sorted(asked)]
        inside = saved(equations, results, ins, where, {})
        again = between(inside.second(equations), results, {*ins, *inside.values})
        read = {*results, *(v for a in again for v in a.ins)}
        more = {i for i, v in enumerate(ins[start:end]) if v in read} - asked
        if not more:
            break
        asked |= more
    made = [v for a in inside.first(equations) for v in a.outs]
    saved_at = ((i, inside.values[v]) for i, v in enumerate(made) if v in inside.values)
    # `parts` makes new values each time, so the key has their places.
    key = e, tuple(sorted(asked)), len(made), tuple(saved_at)
    if inside.values and key not in done:
        done[key] = _split(e, body, inside, again, sorted(asked))
    return done[key] if inside.values else None


def _split(
    e: Equation, body: Any, inside: "Saved", again: Sequence[Equation], asked: Sequence[int]
) -> Split:
    (ins, equations, outs), kept = body, inside.values
    consts, carries, slices = rounding.groups_of(e, ins)
    count, length = len(carries), e.row.turns(e)[0]
    # What the loop stacks anyway is saved as that stack.
    stacks = {v: out for v, out in zip(outs[count:], e.outs[count:], strict=True) if v in kept}
    new = [v for v in kept if v not in stacks]
    stacks |= {v: Value(building.stacked_aval(length, v.aval)) for v in new}
    groups: rounding.Groups = consts, carries, slices
    operands, params = rounding.scanned(e, groups, inside.first(equations), [*outs, *new])
    first = e.on(operands, outs=[*e.outs, *(stacks[v] for v in new)], params=params)
    # Of the results, carries and the stacks that nobody saved are made again.
    left = [i for i in asked if i < count or outs[i] not in kept]
    carried = [pair for i, pair in enumerate(carries) if i in asked]
    groups = consts, carried, [*slices, *((v, stacks[v]) for v in kept)]
    operands, params = rounding.scanned(e, groups, again, [outs[i] for i in left])
    second = e.on(operands, outs=[e.outs[i] for i in left], params=params)
    return Split(first, second, {stacks[v]: place for v, place in kept.items()})


class Saved(NamedTuple):
    """What a policy saves of a program.

    Attributes:
        values: The values, and where they are saved.
        splits: What stands for some of its loops.
    """

    values: dict[Value, Any]
    splits: dict[Equation, Split]

    def first(self, equations: Sequence[Equation]) -> list[Equation]:
        """Returns the equations that make the values."""
        return [self.splits[e].first if e in self.splits else e for e in equations]

    def second(self, equations: Sequence[Equation]) -> list[Equation]:
        """Returns the equations that are computed from the values.

        The whole loop stays for results that the program returns and the second loop leaves out.
        """
        found = []
        for e in equations:
            if e in self.splits:
                second, mine = self.splits[e].second, {*self.values, *self.splits[e].second.outs}
                found += [e.on(e.ins, outs=[Value(v.aval) if v in mine else v for v in e.outs])]
                found += [second]
            else:
                found += [e]
        return found


def saved(
    equations: Sequence[Equation],
    wanted: Sequence[Value],
    given: Sequence[Value],
    where: Where,
    done: dict[Any, Split],
) -> Saved:
    """Returns what a policy saves of what wanted values are computed from.

    Args:
        equations: The equations that make them.
        wanted: The values.
        given: The arguments.
        where: The policy.
        done: The loops that were divided before.
    """
    found = places(equations, where)
    again = between(equations, wanted, {*given, *found})
    needed = {*wanted, *(v for e in again for v in e.ins)}
    splits = {e: s for e in again if (s := split(e, needed, where, done))}
    result = Saved({}, splits)
    remade = {v for e in splits for v in e.outs}
    # The second loop reads less than the whole one does, so less is saved for it.
    rest = [splits[e].second if e in splits else e for e in again]
    read = {*wanted, *(v for e in rest for v in e.ins)}
    result.values.update((v, p) for v, p in found.items() if v in read and v not in remade)
    for s in splits.values():
        result.values.update(s.saved)
    return result


def sent(
    saved: dict[Value, Any], equations: Sequence[Equation]
) -> tuple[list[Value], list[Equation]]:
    """Returns saved values in their places, and the equations that compute them and others."""
    into = [*equations]
    return [v if _is_here(place) else _move(v, place, into)[0] for v, place in saved.items()], into


def received(saved: dict[Value, Any]) -> tuple[list[Value], list[Equation]]:
    """Returns saved values as they arrive from their places, and the equations that fetch them."""
    into: list[Equation] = []
    arrived = []
    for v, place in saved.items():
        far = v if _is_here(place) else Value(v.aval.update(memory_space=place))
        if far is not v:
            _move(far, v.aval.memory_space, into, [v])
        arrived.append(far)
    return arrived, into


def _is_here(place: Any) -> bool:
    return place is jax.memory.Space.Device


def _move(v: Value, place: Any, into: list[Equation], outs: Sequence[Value] = ()) -> list[Value]:
    return appended(lambda x: [jax.device_put(x, place)], [v], into, outs=outs)
