"""Places: the operations that the pattern of an override moves to float32, and their cost."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from mpjax._src.core.autocast.classify import Outline
from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import HALVES
from mpjax._src.core.base.patterns import matches
from mpjax._src.core.base.rules import HALF, MOVE
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.site import shown
from mpjax._src.tools.hardware.targets import Target


@dataclasses.dataclass(frozen=True)
class Place:
    """The ops that one override pattern moves to float32, by their numbers."""

    pattern: str
    ops: frozenset[int]


class Places:
    """The ops of a plan that an override can move, and the patterns that move them."""

    def __init__(self, plan: Outline, stopped: Collection[int] = ()):
        """``stopped`` are the numbers of ops whose results autocast rounds, but not in float32."""
        self._pairs = pairs = plan.numbered
        rulings, self.rows = plan.rulings, plan.rows
        self.movable = [
            op
            for op, _ in pairs
            if op.has_float32 and (rulings[op].in_force == "half" or self.rows[op] in stopped)
        ]
        self._flops = {self.rows[op]: _jax.flops_of(op.eqn) * times for op, times in pairs}
        self._arrays, self._sizes = self._arrays_of(pairs)
        self._spots = {self.rows[op]: spots(op) for op in self.movable}
        self.place = functools.cache(self._place)  # returns the place of a pattern

    def _place(self, pattern: str) -> Place:
        hit = (n for n, each in self._spots.items() if any(matches(pattern, s) for s in each))
        return Place(pattern, frozenset(hit))

    def around(self, op: Op) -> list[Place]:
        """Returns the places that contain an op, the smallest first."""
        # A cast has no place of its own. It goes away if the 16-bit ops that read it move.
        near = [op] if op in self.movable else self._readers(op)
        places = dict.fromkeys(self.place(pattern) for each in near for pattern in patterns(each))
        return sorted(places, key=lambda place: (self.flops(place.ops), len(place.ops)))

    def _readers(self, op: Op) -> list[Op]:
        """Returns the first movable ops that read what an op makes."""
        made, found = {*op.outs}, []
        for other, _ in self._pairs:
            if made.isdisjoint(other.ins):
                continue
            if other in self.movable:
                found.append(other)
            else:
                made.update(other.outs)
        return found

    def owners(self, number: int | None) -> frozenset[int]:
        """Returns the ops, by number, for one of which at least something is rounded.

        That is the op itself if it can move. What else is rounded, such as what an op stores, is so
        for the movable ops that read it, or else for any.
        """
        if number is None:
            return frozenset(self._spots)
        if number in self._spots:
            return frozenset([number])
        readers = frozenset(self.rows[op] for op in self._readers(self._pairs[number][0]))
        return readers or frozenset(self._spots)

    def is_written(self, number: int | None) -> bool:
        """Returns whether the program itself has an op, by number, in 16 bits."""
        if number is None:
            return False
        op = self._pairs[number][0]
        return any(getattr(v.aval, "dtype", None) in HALVES for v in (*op.ins, *op.outs))

    def finest(self) -> list[Place]:
        """Returns the smallest places that patterns can name; together they move everything."""
        finest: dict[frozenset[int], Place] = {}
        for op in self.movable:
            scoped = "/".join(shown(op.scopes))
            # Of patterns that move as few ops, one of the scope says more than a parameter's path.
            best = min(
                map(self.place, patterns(op)),
                key=lambda p: (len(p.ops), not p.pattern.startswith(scoped), len(p.pattern)),
            )
            finest.setdefault(best.ops, best)
        return list(finest.values())

    def flops(self, ops: Iterable[int]) -> float:
        """Returns the share of the matmul FLOPs of some ops."""
        return sum(self._flops[i] for i in ops) / (sum(self._flops.values()) or 1)

    def _arrays_of(
        self, pairs: Iterable[tuple[Op, int]]
    ) -> tuple[dict[int, set[Value]], dict[Value, int]]:
        """Returns the arrays that ops read and make in float32 if they move, and their entries.

        Views of one array are that array, as large as the largest. Parameters and constants are in
        float32 anyway, and what is no matmul computes in float32 anyway: it makes one array more.
        """
        origin: dict[Value, Value] = {}
        found: dict[int, set[Value]] = {}
        sizes: dict[Value, int] = {}
        for op, times in pairs:
            if op.spec.need == MOVE and op.ins:
                origin.update((out, origin.get(op.ins[0], op.ins[0])) for out in op.outs)
            values = (*op.ins, *op.outs) if op.spec.need == HALF else op.outs
            own = [v for v in values if v.is_f32 and not (v.given or v.constant)]
            found[self.rows[op]] = {origin.get(v, v) for v in own}
            for v in own:
                array = origin.get(v, v)
                sizes[array] = max(sizes.get(array, 0), v.size * times)
        return found, sizes

    def seconds(self, ops: Iterable[int], target: Target) -> float:
        """Returns the time that ops take longer in float32 on a target."""
        costs, _, arrays = self.prices([frozenset(ops)], target)
        return float(costs.sum() + arrays.sum())

    def prices(
        self, sets: Sequence[frozenset[int]], target: Target
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns what sets of ops cost in float32 on a target, in seconds.

        Returns:
            The time of the matmuls of each; which arrays each has in float32, ``(sets, arrays)``;
            and the time that each array takes, which neighbors share.
        """
        wide, half = _rates(target)
        slower = 1 / wide - 1 / half
        costs = np.array([slower * sum(self._flops[n] for n in ops) for ops in sets])
        each = [{v for n in ops for v in self._arrays[n]} for ops in sets]
        arrays = dict.fromkeys(v for own in each for v in own)
        has = np.array([[v in own for v in arrays] for own in each], float)
        entries = np.array([self._sizes[v] for v in arrays], float)
        return (
            costs,
            has.reshape(len(sets), -1),
            2 * entries / target.bandwidth,
        )

    def totals(self, moved: frozenset[int], target: Target) -> tuple[int, float]:
        """Returns the bytes of the arrays of all movable ops, and their time on a target.

        ``moved`` are those in float32. The time is a bound: of matmuls at the peak rates, and of
        each array moved once.
        """
        ops = self.owners(None)
        _, _, arrays = self.prices([ops], target)
        slower, _, wide = self.prices([moved], target)
        bytes_moved = round(float(arrays.sum() + wide.sum()) * target.bandwidth)
        flops = sum(self._flops[n] for n in ops)
        seconds = flops / _rates(target)[1] + slower.sum() + wide.sum() + arrays.sum()
        return bytes_moved, float(seconds)

    def merged(self, moved: frozenset[int], places: Iterable[Place]) -> list[Place]:
        """Returns the fewest places that move exactly these ops; scopes replace their parts."""
        if all(self.rows[op] in moved for op in self.movable):
            return [Place("*", moved)]
        wider = {p.ops: p for p in places}
        for op in self.movable:
            if self.rows[op] in moved:
                for place in map(self.place, patterns(op)):
                    if place.ops <= moved:
                        wider.setdefault(place.ops, place)
        chosen: list[Place] = []
        left = set(moved)
        while left:
            # A greedy cover: the place with most of what is left, and of equal ones the smallest.
            ops = max(wider, key=lambda c: (len(c & left), -len(c)))
            chosen.append(wider[ops])
            left -= ops
        return chosen


def _rates(target: Target) -> tuple[float, float]:
    """Returns the peak rates of float32 and of 16-bit matmuls."""
    wide = target.peaks.get("tf32", target.peaks["f32"])
    return wide, max(wide, *(target.peaks.get(name, wide) for name in ("bf16", "f16")))


def overridden(policy: Policy, places: Iterable[Place]) -> Policy:
    """Returns a policy with float32 overrides for places."""
    patterns = dict.fromkeys((p.pattern for p in places), "float32")
    return policy.override(patterns) if patterns else policy


def spots(op: Op) -> list[str]:
    """Returns the names of an op that the pattern of an override may match."""
    return ["/".join(op.scopes), "/".join((*op.scopes, op.name)), *_paths(op)]


def _paths(op: Op) -> list[str]:
    return [path for v in op.ins for path in v.paths if path]


def own_pattern(op: Op) -> str:
    """Returns the pattern of an op's scope and primitive."""
    return _escape("/".join((*shown(op.scopes), op.name)))


def patterns(op: Op) -> list[str]:
    """Returns patterns that move an op, exact ones first."""
    scopes = shown(op.scopes)
    exact = [*(_escape(path) for path in _paths(op)), own_pattern(op)]
    return [*exact, *(_escape("/".join(scopes[:i])) + "/*" for i in range(len(scopes), 0, -1))]


def _escape(path: str) -> str:
    # A pattern would read the brackets of a path such as ['w'] as a set of characters.
    return path.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")
