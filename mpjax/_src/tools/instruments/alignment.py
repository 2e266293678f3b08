"""Aligns the operations of two programs that ran, and measures the error between them.

The values of each program are nodes of a graph: arguments, results of operations, slices and stacks
of loops. Nodes get the same number if an operation of the same name and parameters, dtypes aside,
made them from operands of the same numbers, so loops may be unrolled. An operation that returns its
operand (a cast, a barrier) passes its number on. A node without such a counterpart gets the number
of one that has the same entries in the reference. Where the formulas differ, later operations that
follow each other alike are aligned, if they share an operand. What is left may have another layout:
other axes, or one turn of a loop for each entry of an axis.
"""

import bisect
import dataclasses
import difflib
import functools
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import BFLOAT16, dtype_of, is_float
from mpjax._src.core.base.lines import where
from mpjax._src.core.base.public import public
from mpjax._src.core.base.rules import ADDITIONS, MOVE, rule_of
from mpjax._src.core.program.interpret import DTYPES, WIDER, handling, is_program, run_in
from mpjax._src.core.program.site import ROOT, Site, shown
from mpjax._src.tools.instruments import shadows
from mpjax._src.tools.instruments.likeness import Pool, pool_of
from mpjax._src.tools.instruments.rows import name_of, signature_of
from mpjax._src.tools.instruments.shadows import CompareRow, Shadowed

# Parameters of operations that say how they are computed, and not what.
HOW = frozenset({*DTYPES, "precision", "out_sharding", "sharding", "weak_type", "accuracy"})

# The keys of nodes that no operation made.
LEAF, TURN, STACK = "leaf", "turn", "turns"

# Values are the same if their entries differ by at most so many roundings of the reference,
# relative to their root mean square.
SAME = 168.0

# How far apart the root mean squares of values may be that are compared.
NEAR = 1e-3

# Longer rests of two programs are not searched for operations that follow each other alike.
LONGEST = 4000

# The most axes of which all orders are tried.
AXES = 5

# How many ranges of operations without a counterpart are named for each program.
RANGES = 3


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class AlignedRow(CompareRow):
    """An operation that two programs share. Its errors are those between the programs.

    The fields are those of a `CompareRow`, with the second program in the place of float32: ``new``
    is what the operation's rounding in the two programs adds, ``inherited`` what float32 would
    return for their operands.

    Attributes:
        other_source: "file:line" of the operation in the second program.
        other_library: The line of the library that it calls, or "".
        other_dtypes: Its dtypes in the second program.
    """

    other_source: str = ""
    other_library: str = ""
    other_dtypes: str = ""


@dataclasses.dataclass(eq=False)
class Node:
    """A value of a program that ran."""

    key: Any  # what made it, but for its operands
    ins: tuple[int, ...]  # its operands
    array: Any
    shadow: Any
    eqn: Any = None
    place: Site = ROOT
    line: tuple[str, str] = ("", "")
    index: int = 0  # of the operation's results
    error: float = 0.0  # from the reference
    same: int | None = None  # the operand that it equals in the reference

    @functools.cached_property
    def wanted(self) -> np.ndarray:
        return np.asarray(self.shadow)

    @functools.cached_property
    def pool(self) -> Pool:
        """The entries, in any order."""
        return pool_of([self.wanted])

    @functools.cached_property
    def tells(self) -> bool:
        """Whether its entries are unlikely to be those of another value by chance."""
        if self.same is not None or not is_float(self.array):
            return False
        x = self.pool.entries
        return bool(np.any(x != x.astype(BFLOAT16).astype(x.dtype)))  # no 0, 1, 0.5 or place


class Recorder(shadows.Comparer):
    """A `Comparer` that keeps the graph of the values that it computes."""

    def __init__(self, wide: Any) -> None:
        super().__init__(lambda eqn, place: place.lines(eqn), wide)
        self.nodes: list[Node] = []
        self.arguments: dict[str, int] = {}  # their nodes by their names

    def argument(self, name: str, array: Any) -> Shadowed:
        self.arguments[name] = len(self.nodes)
        return self.constant(array)

    def _kept(self, value: Shadowed, key: Any, ins: Iterable[Shadowed], **more: Any) -> Shadowed:
        node = Node(
            key, tuple(v.node for v in ins), value.array, value.shadow, error=value.error, **more
        )
        if node.eqn is not None and is_float(value.array):
            node.same = next((i for i in node.ins if _is_same(self.nodes[i], node)), None)
        self.nodes.append(node)
        return dataclasses.replace(value, node=len(self.nodes) - 1)

    def constant(self, array: Any) -> Shadowed:
        value = super().constant(array)
        return self._kept(value, (LEAF, np.shape(array), _content(value.shadow)), ())

    def operation(self, eqn: Any, ins: list[Shadowed], place: Site) -> list[Shadowed]:
        results = super().operation(eqn, ins, place)
        made, token = {"eqn": eqn, "place": place, "line": self.lines(eqn, place)}, _token(eqn)
        return [
            self._kept(value, (token, i, _kind(value.array)), ins, index=i, **made)
            for i, value in enumerate(results)
        ]

    def slice(self, value: Shadowed, index: int) -> Shadowed:
        return self._kept(super().slice(value, index), (TURN, index), [value])

    def stack(self, values: Sequence[Shadowed]) -> Shadowed:
        return self._kept(super().stack(values), (STACK,), values)


def _is_same(operand: Node, node: Node) -> bool:
    """Returns whether an operation returned its operand, which a cast or a barrier does."""
    x, y = operand.shadow, node.shadow
    if x is y or not is_float(operand.array) or np.shape(x) != np.shape(y):
        return x is y
    return bool(np.array_equal(operand.wanted, node.wanted, equal_nan=True))


def _content(x: Any) -> Any:
    """Returns a key of the entries of an array."""
    if jnp.issubdtype(dtype_of(x), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return hashlib.blake2b(np.asarray(x).tobytes()).digest()


def _kind(x: Any) -> str:
    return "float" if is_float(x) else name_of(x)


def _token(eqn: Any) -> Any:
    """Returns a key of what an operation computes, but for its operands and its dtypes."""
    name = eqn.primitive.name
    params = [(k, _plain(v)) for k, v in sorted(eqn.params.items()) if k not in HOW]
    return (ADDITIONS if name in ADDITIONS else name), tuple(params)


def _plain(x: Any) -> Any:
    if is_program(x):
        return tuple(map(_token, _jax.open_jaxpr(x)[0].eqns))
    if isinstance(x, tuple | list):
        return tuple(map(_plain, x))
    try:
        hash(x)
    except TypeError:
        return repr(x)
    return x


# ---- numbers ------------------------------------------------------------------------------------


class _Numbers:
    """Gives the values of two programs numbers, which are equal for values that are aligned."""

    def __init__(self, first: list[Node], second: list[Node], roundings: float):
        self.sides = (first, second)
        self.tolerance = SAME * roundings
        tell = ((i, node) for i, node in enumerate(first) if node.tells)
        self._sized = sorted((node.wanted.size, node.pool.size, i) for i, node in tell)
        self.number({})

    def number(self, forced: dict[int, int]) -> None:
        """Numbers all values, with those of some of the second program given."""
        self._known: dict[Any, int] = {}
        self._parts: dict[int, tuple[int, ...]] = {}
        first, second = self.sides
        self.of = [self._side(first, {}, lambda node: None)]
        self.of.append(self._side(second, forced, self._by_value))
        self.shared = {*self.of[0]} & {*self.of[1]}

    def _side(
        self, nodes: list[Node], forced: dict[int, int], find: Callable[[Node], int | None]
    ) -> list[int]:
        numbers: list[int] = []
        for i, node in enumerate(nodes):
            ins = tuple(numbers[j] for j in node.ins)
            if i in forced:
                numbers.append(forced[i])
            elif node.same is not None:
                numbers.append(numbers[node.same])
            elif node.key[0] == TURN and ins[0] in self._parts:
                numbers.append(self._parts[ins[0]][node.key[1]])
            else:
                key = node.key, ins
                if key not in self._known:
                    found = find(node)
                    new = len(self._known)
                    self._known[key] = new if found is None else found
                numbers.append(self._known[key])
                if node.key[0] == STACK:
                    self._parts[numbers[-1]] = ins
        return numbers

    def _by_value(self, node: Node) -> int | None:
        """Returns the number of a value of the first program with the same entries, if any."""
        if not node.tells:
            return None
        size, scale = node.wanted.size, node.pool.size
        start = bisect.bisect_left(self._sized, (size, scale * (1 - NEAR), -1))
        for _, _, i in itertools.takewhile(
            lambda known: known[:2] <= (size, scale * (1 + NEAR)), self._sized[start:]
        ):
            other = self.sides[0][i].wanted
            if other.shape == node.wanted.shape and self.close(other, node):
                return self.of[0][i]
        return None

    def close(self, x: np.ndarray, node: Node) -> bool:
        """Returns whether an array is equal to a value, up to rounding in the reference."""
        apart = np.abs(gap(x.astype(np.float64), node.wanted.astype(np.float64)))
        return bool(np.all(apart <= self.tolerance * node.pool.size))

    def lost(self, side: int) -> list[int]:
        """Returns the results of operations of a program that the other one does not have."""
        numbers, nodes = self.of[side], self.sides[side]
        return [
            i
            for i, node in enumerate(nodes)
            if node.eqn is not None and node.same is None and numbers[i] not in self.shared
        ]

    def follow(self) -> dict[int, int]:
        """Returns numbers for operations that follow each other alike in what is left of both."""
        rests = [self.lost(side) for side in (0, 1)]
        if not all(rests) or max(map(len, rests)) > LONGEST:
            return {}
        tokens = [[self._context(side, i) for i in rests[side]] for side in (0, 1)]
        blocks = difflib.SequenceMatcher(None, tokens[0], tokens[1], False).get_matching_blocks()
        pairs: dict[int, int] = {}  # from the second program to the first
        for a, b, count in blocks:
            for i, j in zip(rests[0][a : a + count], rests[1][b : b + count], strict=True):
                if self._belong(i, j, pairs):
                    pairs[j] = i
        return {j: self.of[0][i] for j, i in pairs.items()}

    def _context(self, side: int, i: int) -> Any:
        node, numbers = self.sides[side][i], self.of[side]
        ins = (numbers[j] if numbers[j] in self.shared else None for j in node.ins)
        return node.key, np.shape(node.shadow), tuple(ins)

    def _belong(self, i: int, j: int, pairs: dict[int, int]) -> bool:
        """Returns whether one of the operands of two operations is the same or aligned, and no
        operand that is aligned is so with another."""
        known = [
            (self.of[0][a], self.of[0][pairs[b]] if b in pairs else self.of[1][b])
            for a, b in zip(self.sides[0][i].ins, self.sides[1][j].ins, strict=True)
            if b in pairs or self.of[1][b] in self.shared
        ]
        return bool(known) and all(a == b for a, b in known)


# ---- layouts ------------------------------------------------------------------------------------


Change = Callable[[Any], Any]


def _layouts(numbers: _Numbers) -> Iterator[tuple[list[int], list[int], Change]]:
    """Yields values that are left, and have the same entries in another layout: those of the first
    program, those of the second, and the function that turns the one into the other."""
    left = [{*numbers.lost(side)} for side in (0, 1)]
    for side in (0, 1):
        nodes, others, lost, rest = *numbers.sides, *left
        if side:
            nodes, others, lost, rest = others, nodes, rest, lost
        sized: dict[int, list[int]] = defaultdict(list)
        for j, node in enumerate(others):
            if node.tells:
                sized[node.wanted.size].append(j)
        turns: dict[Any, list[int]] = defaultdict(list)  # of a loop, or written out
        for i, node in enumerate(nodes):
            if node.eqn is not None and node.same is None and is_float(node.array):
                turns[node.key, node.line, np.shape(node.shadow)].append(i)
        for group in turns.values():
            for part, ahead in _parts(group, sized, nodes):
                if lost.isdisjoint(part) or (side and len(part) == 1):
                    continue  # single values of the second program are found from the first
                # Turns may be a value that has a counterpart: the cache that they fill.
                known = [j for j in ahead if j not in rest and len(part) > 1]
                for j in [*(j for j in ahead if j in rest), *known]:
                    if change := _change([nodes[i] for i in part], others[j], numbers.close):
                        rest.discard(j)
                        lost.difference_update(part)
                        yield ([j], part, change) if side else (part, [j], change)
                        break


def _parts(
    group: list[int], sized: dict[int, list[int]], nodes: list[Node]
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields results of an operation that may be the turns of one loop, and values of that size."""
    turn = max(1, nodes[group[0]].wanted.size)
    for size, ahead in sized.items():
        count = size // turn
        if size % turn == 0 and count > 0 and len(group) % count == 0:
            loops = len(group) // count  # one in the other, either way
            yield from ((group[i::loops], ahead) for i in range(loops))
            if 1 < count < len(group):
                yield from ((group[i * count :][:count], ahead) for i in range(loops))


def _change(part: list[Node], node: Node, close: Callable[[Any, Node], bool]) -> Change | None:
    """Returns the function that orders the axes of stacked turns as those of a value, if it makes
    them the same."""
    count = [len(turn.pool.entries) for turn in part]
    if not sum(count) or sum(count) != len(node.pool.entries):
        return None
    size = np.sqrt(np.average([turn.pool.size**2 for turn in part], weights=count))
    axes = [d for d in (len(part), *part[0].wanted.shape) if d != 1]
    shape = [d for d in node.wanted.shape if d != 1]
    if abs(size - node.pool.size) > NEAR * size:
        return None
    orders = [[*range(len(axes))]]  # axes may also be split or joined, as devices split a batch
    if len(axes) <= AXES and sorted(axes) == sorted(shape):
        every = map(list, itertools.permutations(orders[0]))
        orders += [order for order in every if [axes[i] for i in order] == shape]
    stacked = np.stack([turn.wanted for turn in part])

    def change(order: Sequence[int], x: Any) -> Any:
        return x.reshape(axes).transpose(order).reshape(node.wanted.shape)

    fit = (functools.partial(change, order) for order in orders)
    return next((each for each in fit if close(each(stacked), node)), None)


# ---- rows ---------------------------------------------------------------------------------------


def align(first: Recorder, second: Recorder, names: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of an `Agreement` that say what two programs share."""
    runs = first, second
    numbers = _Numbers(first.nodes, second.nodes, float(jnp.finfo(first.wide).eps))
    forced = _arguments(runs, numbers)
    numbers.number(forced)
    while more := numbers.follow():
        forced |= more
        numbers.number(forced)
    maker = _Rows(runs, numbers)
    pairs: list[tuple[list[int], list[int], Any]] = [([i], [j], None) for i, j in _pairs(numbers)]
    layouts = [*_layouts(numbers)]
    # In the order of the second program, so that the errors of operands are known.
    for firsts, seconds, change in sorted([*pairs, *layouts], key=lambda pair: max(pair[1])):
        maker.add(firsts, seconds, change)
    rows = sorted(maker.rows.values(), key=shadows.badness, reverse=True)
    found = [{*itertools.chain(*(both[side] for *both, _ in layouts))} for side in (0, 1)]
    sides = [_alone(numbers, side, found[side]) for side in (0, 1)]
    alone = [
        f"{range_} of {names[side]} without a counterpart in {names[1 - side]}, from {line} on"
        for side in (0, 1)
        for range_, line in sides[side][1][:RANGES]
    ]
    return {"rows": tuple(rows), "shares": (sides[0][0], sides[1][0]), "alone": tuple(alone)}


def _arguments(runs: tuple[Recorder, Recorder], numbers: _Numbers) -> dict[int, int]:
    """Returns the numbers of arguments of the same name that differ, such as rounded weights."""
    first, second = runs
    found = {}
    for name in first.arguments.keys() & second.arguments.keys():
        i, j = first.arguments[name], second.arguments[name]
        mine, theirs = first.nodes[i], second.nodes[j]
        known = {numbers.of[0][i], numbers.of[1][j]} & numbers.shared
        if is_float(mine.array) and np.shape(mine.array) == np.shape(theirs.array) and not known:
            found[j] = numbers.of[0][i]
    return found


def _pairs(numbers: _Numbers) -> Iterator[tuple[int, int]]:
    """Yields the aligned values of two programs, in the order of the second."""
    by_number: dict[int, list[int]] = defaultdict(list)
    for i, node in enumerate(numbers.sides[0]):
        if node.same is None:
            by_number[numbers.of[0][i]].append(i)
    seen: dict[int, int] = defaultdict(int)
    for j, node in enumerate(numbers.sides[1]):
        number = numbers.of[1][j]
        if node.same is None and number in by_number:
            mine = by_number[number]
            yield mine[min(seen[number], len(mine) - 1)], j
            seen[number] += 1


def _alone(numbers: _Numbers, side: int, found: set[int]) -> tuple[float, list[tuple[str, str]]]:
    """Returns the share of a program's operations that have a counterpart, and the ranges of the
    others with the lines at which they begin."""
    lost = {*numbers.lost(side)} - found
    operations: dict[Any, tuple[bool, str]] = {}
    for i, node in enumerate(numbers.sides[side]):
        computes = node.eqn is not None and rule_of(node.eqn.primitive.name).need != MOVE
        if computes and node.same is None and is_float(node.array):
            key = id(node.eqn), node.place.scopes
            missing, line = operations.get(key, (False, ""))
            line = line or where(*node.line)
            operations[key] = missing or i in lost, line
    each = [*operations.values()]
    ranges = []
    numbered = enumerate(each, 1)
    for missing, group in itertools.groupby(numbered, key=lambda pair: pair[1][0]):
        if missing:
            several = [*group]
            start, end = several[0][0], several[-1][0]
            line = next((line for _, (_, line) in several if line), "no line")
            words = f"operations {start} to {end}" if end > start else f"operation {start}"
            ranges.append((words, line))
    share = sum(not missing for missing, _ in each) / len(each) if each else 1.0
    return share, ranges


class _Rows:
    """Makes the rows of aligned values."""

    def __init__(self, runs: tuple[Recorder, Recorder], numbers: _Numbers):
        self.runs, self.numbers, self.wide = runs, numbers, runs[0].wide
        self.rows: dict[Any, AlignedRow] = {}
        self._named = {i: name for name, i in runs[1].arguments.items()}
        self._casts = [_casts(run.nodes) for run in runs]
        self._errors: dict[int, tuple[float, bool]] = {}  # by the number in the second program

    def add(self, firsts: list[int], seconds: list[int], change: Any) -> None:
        """Adds the row of values of the two programs: one each, or the turns of a loop."""
        groups = firsts, seconds
        nodes = [[r.nodes[i] for i in each] for r, each in zip(self.runs, groups, strict=True)]
        if not is_float(nodes[0][0].array) or not np.size(nodes[0][0].array):
            return
        ends = [
            [run.nodes[end.get(i, i)] for i in each]
            for run, end, each in zip(self.runs, self._casts, groups, strict=True)
        ]
        a, b = (self._joined([x.array for x in each]) for each in ends)
        own_a, own_b = (self._joined([self._own(side, x) for x in nodes[side]]) for side in (0, 1))
        if change is not None and (len(firsts) > 1 or len(seconds) == 1):
            a, own_a = change(a), change(own_a)
        elif change is not None:
            b, own_b = change(b), change(own_b)
        if not np.array_equal(a, b, equal_nan=True):
            self._record(nodes, [each[0] for each in ends], seconds, _stats(a, b, own_a, own_b))

    def _joined(self, arrays: list[Any]) -> np.ndarray:
        """Returns an array, or those of the turns of a loop, in float64."""
        wide = [np.asarray(x).astype(np.float64) for x in arrays]
        return np.stack(wide) if len(wide) > 1 else wide[0]

    def _own(self, side: int, node: Node) -> Any:
        """Returns what the reference makes of the operands of a value."""
        if node.eqn is None:
            return node.array
        ins = [self.runs[side].nodes[i].array for i in node.ins]
        if not any(dtype_of(x) in WIDER[self.wide] for x in (*ins, node.array)):
            return node.array
        with handling(self.wide):
            outs = run_in(self.wide, node.eqn, ins)
            return node.array if outs is None else outs[node.index]

    def _record(
        self,
        nodes: list[list[Node]],
        ends: list[Node],
        seconds: list[int],
        facts: dict[str, Any],
    ) -> None:
        first, second = nodes[0][0], nodes[1][0]
        before = [*self._before(first, second)]
        noise = facts["error"] > shadows.SUSPICIOUS and (
            any(noise for _, noise in before) or self._is_noise(second)
        )
        error = shadows.capped(facts["error"])
        if first.eqn is not None and first.eqn.primitive.name in shadows.CHOOSES:
            error = max([error, *(e for e, _ in before)])  # what it chooses is as wrong as before
        self._errors |= {self.numbers.of[1][j]: (error, noise) for j in seconds}
        shown_at = [
            self._shown(run, node, end)
            for run, node, end in zip(self.runs, (first, second), ends, strict=True)
        ]
        here = shown_at[1] if _is_narrow(shown_at[1], self.wide) else shown_at[0]
        if not (facts["error"] or facts["new"]) or (here.eqn is None and first.ins):
            return
        lines = [node.line for node in shown_at]
        dtypes = [self._dtypes(side, node) for side, node in enumerate(shown_at)]
        path = self._named.get(seconds[0], "") if here.eqn is None else ""
        key = *(id(node.eqn) for node in shown_at), here.place.scopes, here.index, path
        old = self.rows.get(key)
        row = AlignedRow(
            primitive=here.eqn.primitive.name if here.eqn is not None else "argument",
            source=lines[0][0],
            scope="/".join(shown(here.place.scopes)),
            path=path,
            backward=here.place.backward,
            iteration=here.place.loops,
            times=len(nodes[1]) + (old.times if old else 0),
            dtypes=dtypes[0],
            operands=max((e for e, _ in before), default=0.0),
            noise=noise,
            library=lines[0][1],
            bytes=sum(getattr(n.array, "nbytes", 0) for n in shown_at),
            other_source=lines[1][0],
            other_library=lines[1][1],
            other_dtypes=dtypes[1],
            **facts,
        )
        if old and shadows.badness(row) <= shadows.badness(old):
            row = dataclasses.replace(old, times=row.times)
        self.rows[key] = row

    def _before(self, first: Node, second: Node) -> Iterator[tuple[float, bool]]:
        """Yields the errors of operands, and whether they are noise. That of an operand without a
        counterpart is its error from the reference."""
        for side, node in enumerate((first, second)):
            for i in node.ins:
                number = self.numbers.of[side][i]
                if side and number in self._errors:
                    yield self._errors[number]
                elif number not in self.numbers.shared:
                    yield self.runs[side].nodes[i].error, False

    def _is_noise(self, node: Node) -> bool:
        if node.eqn is None:
            return False
        ins = [self.runs[1].nodes[i] for i in node.ins]
        with handling(self.wide):
            return shadows.is_noise(node.eqn, ins, node.shadow, self.wide)

    def _shown(self, run: Recorder, node: Node, end: Node) -> Node:
        """Returns the operation that rounds a value: the first cast of it that is narrower."""
        chain = [end]
        while chain[-1] is not node and chain[-1].same is not None:
            chain.append(run.nodes[chain[-1].same])
        return next((n for n in reversed(chain) if _is_narrow(n, self.wide)), node)

    def _dtypes(self, side: int, node: Node) -> str:
        if node.eqn is None:
            return name_of(node.array)
        ins = [self.runs[side].nodes[i].array for i in node.ins]
        return signature_of(ins, [node.array])


def gap(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the difference of arrays; equal infinities differ by nothing, and so do NaN."""
    with np.errstate(invalid="ignore"):
        return np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0, x - y)


def _stats(a: np.ndarray, b: np.ndarray, own_a: np.ndarray, own_b: np.ndarray) -> dict[str, float]:
    """Returns `shadows.STATS` of values of two programs, and of the reference on their operands."""
    moved = own_a + gap(b, own_b)  # what the first program would have with the second's rounding
    size, wanted = (np.linalg.norm(x[np.isfinite(x)]) for x in (moved, b))
    gaps = [gap(x, y) for x, y in ((a, b), (a, moved), (moved, b))]
    sizes = np.abs(b[np.isfinite(b) & (b != 0)])
    values = (
        *(_ratio(np.linalg.norm(g), s) for g, s in zip(gaps, (wanted, size, wanted), strict=True)),
        *(np.mean((a == 0) & (moved != 0)), np.mean(~np.isfinite(a) & np.isfinite(moved))),
        *((np.min(sizes), np.max(sizes)) if sizes.size else (0.0, 0.0)),
    )
    return dict(zip(shadows.STATS, map(float, values), strict=True))


def _ratio(gap: Any, size: Any) -> float:
    return 0.0 if gap == 0 else float(gap / size) if np.isfinite(gap) and size else float("inf")


def _is_narrow(node: Node, wide: Any) -> bool:
    return dtype_of(node.array) in WIDER[wide]


def _casts(nodes: list[Node]) -> dict[int, int]:
    """Returns the last cast of each value that is cast."""
    ends: dict[int, int] = {}
    origin: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if node.same is not None:
            origin[i] = origin.get(node.same, node.same)
            # Of several casts the first counts, with those of its result.
            if ends.get(origin[i], origin[i]) == node.same:
                ends[origin[i]] = i
    return ends
