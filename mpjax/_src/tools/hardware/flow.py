"""The data flow of an HLO module, across its loops, kernels and branches.

A computation that is called from several places is represented once, so the flow is that of all its
callers together.
"""

import collections
import dataclasses
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mpjax._src.tools.hardware.hlo import PLACES, Computation, Module, Op, Shape, parameters


class Leaf(NamedTuple):
    """One array: an instruction, and the number of its result."""

    op: Op
    number: int

    @property
    def shape(self) -> Shape:
        return self.op.shapes[self.number]


# How a value changes along an edge, from the least to the most: its entries are moved or cast; they
# are used elementwise; they are repeated; they are summed; they are multiplied as a matrix, or used
# together in another way.
MOVED, MAPPED, SPREAD, SUMMED, MIXED = range(5)
KINDS = {
    **dict.fromkeys(
        (
            *("convert", "bitcast", "bitcast-convert", "copy", "reshape", "transpose", "slice"),
            *("concatenate", "pad", "reverse", "opt-barrier", "domain", "reduce-precision"),
            *("dynamic-slice", "dynamic-update-slice", "gather", "get-tuple-element", "tuple"),
            *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
            *("collective-permute", "collective-broadcast", "add-dependency"),
        ),
        MOVED,
    ),
    **dict.fromkeys(("broadcast",), SPREAD),
    **dict.fromkeys(("reduce", "reduce-window", "select-and-scatter", "sort"), SUMMED),
    **dict.fromkeys(("dot", "convolution", "custom-call", "scatter", "triangular-solve"), MIXED),
    **dict.fromkeys(("cholesky", "fft", "rng-bit-generator", "infeed", "send", "recv"), MIXED),
}
# The number of leading operands that are values; the other operands are indices.
VALUES = {"dynamic-slice": 1, "dynamic-update-slice": 2, "gather": 1, "ragged-all-to-all": 1}
START, DONE, UPDATE = "-start", "-done", "-update"


@dataclasses.dataclass(frozen=True)
class Flow:
    """The edges between leaves, and the leaves of the module's arguments and results."""

    # For each leaf, the leaves computed from it, and the kind of change.
    after: dict[Leaf, list[tuple[Leaf, int]]]
    # For each leaf, the leaves that it is computed from, and the kind of change.
    before: dict[Leaf, list[tuple[Leaf, int]]]
    arguments: tuple[Leaf, ...]  # the leaves of the entry's parameters
    results: tuple[Leaf, ...]  # the leaves of the entry's results


_FLOWS: weakref.WeakKeyDictionary[Module, Flow] = weakref.WeakKeyDictionary()


def flow_of(module: Module) -> Flow:
    """Returns the flow of an HLO module: the same one as long as the module is used."""
    if module not in _FLOWS:
        _FLOWS[module] = _flow(module)
    return _FLOWS[module]


def _flow(module: Module) -> Flow:
    after: dict[Leaf, list[tuple[Leaf, int]]] = collections.defaultdict(list)
    before: dict[Leaf, list[tuple[Leaf, int]]] = collections.defaultdict(list)
    for op in module.ops():
        for source, target, kind in _edges(op):
            after[source].append((target, kind))
            before[target].append((source, kind))
    arguments = (leaf for op in parameters(module.entry) for leaf in leaves(op))
    return Flow(dict(after), dict(before), tuple(arguments), tuple(leaves(module.entry.root)))


def reached(
    edges: dict[Leaf, list[tuple[Leaf, int]]], start: Iterable[Leaf], most: int
) -> dict[Leaf, int]:
    """Returns the leaves reachable by changes of at most ``most``, with the largest on the path.

    If there are several paths to a leaf, the one with the smallest change counts.
    """
    largest: dict[Leaf, int] = {}
    # Dijkstra's algorithm: the length of a path is its largest change, so a queue for each of the
    # five lengths is enough, and the first visit of a leaf is along its shortest path.
    layers: list[list[Leaf]] = [list(start), *([] for _ in range(MIXED))]
    for worst in range(most + 1):
        queue = layers[worst]
        while queue:
            leaf = queue.pop()
            if leaf in largest:
                continue
            largest[leaf] = worst
            for other, kind in edges.get(leaf, ()):
                if kind <= most and other not in largest:
                    layers[max(worst, kind)].append(other)
    return largest


def leaves(op: Op) -> list[Leaf]:
    """Returns the leaves of an instruction.

    An asynchronous start has those of its operands, or of what it calls.
    """
    arrays: Sequence[object] = op.operands if op.opcode.endswith(START) else op.shapes
    arrays = op.called[0].root.shapes if op.opcode == "async-start" else arrays
    return [Leaf(op, index) for index in range(len(arrays))]


# ---- edges ---------------------------------------------------------------------------------------


def _edges(op: Op) -> Iterator[tuple[Leaf, Leaf, int]]:
    code, operands = op.opcode, op.operands
    if code in ("tuple", "opt-barrier"):
        sources = (leaf for operand in operands for leaf in leaves(operand))
        yield from _paired(sources, leaves(op))
    elif code == "get-tuple-element":
        yield Leaf(operands[0], op.index), Leaf(op, 0), MOVED
    elif code == "while":  # which is assumed to run at least one iteration
        body, *conditions = op.called
        # What the body returns enters the next iteration, its condition too, and leaves at the end.
        for inner in op.called:
            entering = leaves(parameters(inner)[0])
            yield from _paired(leaves(operands[0]), entering)
            yield from _paired(leaves(body.root), entering)
        for test in conditions:  # one number decides which iteration's results these are
            yield from ((Leaf(test.root, 0), leaf, SPREAD) for leaf in leaves(op))
        yield from _paired(leaves(body.root), leaves(op))
    elif code in ("fusion", "call", "async-start"):
        yield from _of_call(op, operands, *op.called)
    elif code == "conditional":
        predicate, *given = operands
        for operand, inner in zip(given, op.called, strict=True):
            yield from _of_call(op, [operand], inner)
        yield from ((Leaf(predicate, 0), leaf, SPREAD) for leaf in leaves(op))
    elif code.endswith((DONE, UPDATE)):
        sources = (Leaf(operands[0], index) for index in range(len(op.shapes)))
        yield from _paired(sources, leaves(op))
    elif len(operands) > 1 and len(operands) == len(leaves(op)):
        kind = _kind(op)  # a collective or a sort of several operands
        yield from ((Leaf(x, 0), Leaf(op, index), kind) for index, x in enumerate(operands))
    else:
        for index, operand in enumerate(operands[: VALUES.get(code)]):
            # Each entry of what is added to stays in its place; updates and indices meet.
            kind = MAPPED if code == "scatter" and not index else _kind(op)
            pairs = itertools.product(leaves(operand), leaves(op))
            yield from ((source, leaf, kind) for source, leaf in pairs)


def _of_call(
    op: Op, operands: Sequence[Op], inner: Computation
) -> Iterator[tuple[Leaf, Leaf, int]]:
    for operand, parameter in zip(operands, parameters(inner), strict=True):
        yield from _paired(leaves(operand), leaves(parameter))
    yield from _paired(leaves(inner.root), leaves(op))


def _kind(op: Op) -> int:
    if op.opcode == "custom-call" and op.target.startswith(PLACES):
        return MOVED
    return KINDS.get(op.kind, MAPPED)


def _paired(sources: Iterable[Leaf], targets: Iterable[Leaf]) -> Iterator[tuple[Leaf, Leaf, int]]:
    return ((source, target, MOVED) for source, target in zip(sources, targets, strict=False))
