"""Which equations of a list depend on which: what values need, and what is made of them."""

import collections
import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax._src.core.planner.equations import Equation, Value, needed


def deduplicated(
    equations: Iterable[Equation], results: Sequence[Value]
) -> tuple[list[Equation], list[Value]]:
    """Returns equations without duplicates, and what then are the results.

    People write ``exp(x) / exp(x).sum()``; JAX traces both. What a checkpoint computes again stays.
    """
    same: dict[Value, Value] = {}
    seen: dict[Any, Equation] = {}
    left = []
    for e in equations:
        e = e.reading(same)
        try:
            twin = seen.setdefault(_key(e), e)
        except TypeError:  # a parameter that has no hash
            twin = e
        if twin is e:
            left.append(e)
        else:
            same.update(zip(e.outs, twin.outs, strict=True))
    return left, [same.get(v, v) for v in results]


def _key(e: Equation) -> Any:
    """Returns what equal equations have in common; an equation may be like no other."""
    if e.acts or e.is_barrier:
        return e
    # Each reader of a literal has a value of its own. Bytes tell 0.0 from -0.0, and a NaN equals
    # itself.
    ins = [(np.asarray(v.const).tobytes(), v.aval.dtype) if v.literal else v for v in e.ins]
    return e.primitive, *ins, e.again, e.region, tuple(e.params.items())


def between(
    equations: Sequence[Equation], wanted: Iterable[Value], known: Collection[Value]
) -> list[Equation]:
    """Returns the equations that compute wanted values from known ones."""
    missing, found = {v for v in wanted if v not in known}, []
    for e in reversed(equations):
        if not missing.isdisjoint(e.outs):
            found.append(e)
            missing.update(v for v in e.ins if v not in known)
    return found[::-1]


def recomputation(
    equations: Sequence[Equation], wanted: Iterable[Value], known: Collection[Value]
) -> list[Equation]:
    """Returns the equations that recompute wanted values, but nothing that is known."""
    return [without_known(e, known) for e in between(equations, wanted, known)]


def without_known(e: Equation, known: Collection[Value]) -> Equation:
    """Returns an equation without those of its results that are known."""
    if not any(v in known for v in e.outs):
        return e
    if not e.is_barrier:
        return e.on(e.ins, outs=[Value(v.aval) if v in known else v for v in e.outs])
    # A barrier waits for all that it holds, so it must not hold what is known.
    pairs = [(v, out) for v, out in zip(e.ins, e.outs, strict=True) if out not in known]
    return e.on([v for v, _ in pairs], outs=[out for _, out in pairs])


def dependents(equations: Iterable[Equation], values: Iterable[Value]) -> set[Value]:
    """Returns the values, and those that are computed from them."""
    found = set(values)
    for e in equations:
        if e.is_barrier:  # each result is one of the operands
            found.update(out for v, out in zip(e.ins, e.outs, strict=True) if v in found)
        elif not found.isdisjoint(e.ins):
            found.update(e.outs)
    return found


def in_order(equations: Iterable[Equation]) -> list[Equation]:
    """Returns equations in an order in which they can run, as near to the given one as there is."""
    equations = [*equations]
    # A search in depth, on a list: programs are deeper than Python's stack.
    maker = {out: e for e in equations for out in e.outs}
    found: dict[Equation, None] = {}
    begun: set[Equation] = set()
    todo = equations[::-1]
    while todo:
        e = todo[-1]
        missing = [maker[v] for v in e.ins if v in maker and maker[v] not in found]
        if e in found or not missing:
            found[todo.pop()] = None
        elif e in begun:
            # Without this, two values behind each other's barriers would be an endless loop.
            raise AssertionError(f"{e.name} waits for its own result")
        else:
            begun.add(e)
            todo += missing
    return [*found]


def deferred(
    early: Sequence[Equation], outs: Iterable[Value], values: Iterable[Value]
) -> tuple[list[Equation], list[Equation]]:
    """Moves equations of a forward part to the backward part, which alone needs them.

    They are those that make or read some values. What the results ``outs`` of the forward part
    need stays there.

    Returns:
        What is left, and what was taken out.
    """
    ahead = {*needed(early, outs)}
    # JAX prepares what the backward part reads as soon as it can, such as masks and factors.
    prepared = [e for e in early if e not in ahead]
    moved = dependents(prepared, values)
    later = [e for e in prepared if not moved.isdisjoint(e.outs)]
    gone = {*later}
    return [e for e in early if e not in gone], [e.on(e.ins, again=True) for e in later]


Makers = Mapping[Value, Equation]  # what makes each value


def readers_of(equations: Iterable[Equation]) -> dict[Value, list[Equation]]:
    """Returns the equations that read each value."""
    readers: dict[Value, list[Equation]] = collections.defaultdict(list)
    for e in equations:
        # A square reads its operand twice, and is one reader.
        for v in dict.fromkeys(e.ins):
            readers[v].append(e)
    return readers


def made_by(v: Value, maker: Makers, through: Callable[[Equation], bool]) -> Iterator[Equation]:
    """Yields what a value is computed by: what makes it, and what makes the operands of those.

    It goes ``through`` some equations alone.
    """
    todo, seen = [v], {v}
    while todo:
        e = maker.get(todo.pop())
        if e is not None:
            yield e
        if e is not None and through(e):
            todo += {*e.ins} - seen
            seen.update(e.ins)


class Order:
    """Equations in the order in which they run, for walks from values to what is made of them.

    Attributes:
        readers: The equations that read each value.
        places: The places of the equations.
    """

    def __init__(self, equations: Sequence[Equation]) -> None:
        self.readers = readers_of(equations)
        self.places = {e: i for i, e in enumerate(equations)}


class Ahead:
    """What reads some values, or values that are added on the way, in the order in which it runs.

    Attributes:
        queue: The equations that come next, after their places.
    """

    def __init__(self, order: Order, values: Iterable[Value]) -> None:
        self._order, self._found = order, set[Equation]()
        self.queue: list[tuple[int, Equation]] = []
        self.add(values)

    def add(self, values: Iterable[Value]) -> None:
        """Adds what reads values."""
        for e in (e for v in values for e in self._order.readers[v] if e not in self._found):
            self._found.add(e)
            # No two places are equal, so the heap never compares equations.
            heapq.heappush(self.queue, (self._order.places[e], e))

    def __iter__(self) -> Iterator[Equation]:
        while self.queue:
            yield heapq.heappop(self.queue)[1]

    def __len__(self) -> int:
        """Returns the number of equations that were found."""
        return len(self._found)
