"""The data flow of an HLO module, across its loops, kernels and branches.

A leaf is one array: (name of a computation, name of an instruction, index of the result). A
computation that is called from several places is represented once, so the flow is that of all its
callers together.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator

from mpjax._src.tools.hardware.hlo import (
    PLACES,
    Computation,
    Op,
    attribute,
    called_by,
    custom_target,
    parameters,
)

Leaf = tuple[str, str, int]

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


def flow_of(module: dict[str, Computation], entry: str) -> Flow:
    """Returns the flow of a parsed HLO module."""
    after: dict[Leaf, list[tuple[Leaf, int]]] = collections.defaultdict(list)
    before: dict[Leaf, list[tuple[Leaf, int]]] = collections.defaultdict(list)
    for name, computation in module.items():
        for op in computation.ops.values():
            for source, target, kind in _edges(module, name, op):
                after[source].append((target, kind))
                before[target].append((source, kind))
    first = module[entry]
    return Flow(
        dict(after),
        dict(before),
        tuple(leaf for op in parameters(first) for leaf in leaves(entry, op)),
        tuple(leaves(entry, first.ops[first.root])),
    )


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


def leaves(name: str, op: Op) -> Iterator[Leaf]:
    """Returns the leaves of an instruction. Asynchronous starts have those of their operands."""
    count = len(op.operands) if op.opcode.endswith(START) else len(op.shapes)
    return _numbered(name, op.name, count)


# ---- edges ---------------------------------------------------------------------------------------


def _edges(module: dict[str, Computation], name: str, op: Op) -> Iterator[tuple[Leaf, Leaf, int]]:
    ops, code = module[name].ops, op.opcode
    operands = [ops[operand] for operand in op.operands]
    if code in ("tuple", "opt-barrier"):
        sources = (leaf for operand in operands for leaf in leaves(name, operand))
        yield from _paired(sources, leaves(name, op))
    elif code == "get-tuple-element":
        yield (name, op.operands[0], int(attribute(op, "index"))), (name, op.name, 0), MOVED
    elif code == "while":
        yield from _of_loop(module, name, op)
    elif code in ("fusion", "call", "async-start"):
        (inner,) = called_by(op)
        for operand, parameter in zip(operands, parameters(module[inner]), strict=True):
            yield from _paired(leaves(name, operand), leaves(inner, parameter))
        root = module[inner].ops[module[inner].root]
        yield from _paired(leaves(inner, root), _numbered(name, op.name, len(root.shapes)))
    elif code == "conditional":
        yield from _of_branches(module, name, op)
    elif code.endswith((DONE, UPDATE)):
        yield from _paired(_numbered(name, op.operands[0], len(op.shapes)), leaves(name, op))
    elif len(operands) > 1 and len(operands) == sum(1 for _ in leaves(name, op)):
        kind = _kind(op)  # a collective or a sort of several operands
        yield from (((name, o, 0), (name, op.name, i), kind) for i, o in enumerate(op.operands))
    else:
        kind = _kind(op)
        for index, operand in enumerate(operands[: VALUES.get(code, len(operands))]):
            # Each entry of what is added to stays in its place; updates and indices meet.
            added_to = code == "scatter" and not index
            for leaf in leaves(name, op):
                for source in leaves(name, operand):
                    yield source, leaf, MAPPED if added_to else kind


def _of_loop(module: dict[str, Computation], name: str, op: Op) -> Iterator[tuple[Leaf, Leaf, int]]:
    """Yields the edges of a loop, which is assumed to run at least one iteration."""
    carried = module[name].ops[op.operands[0]]
    body, test = attribute(op, "body"), attribute(op, "condition")
    root = module[body].ops[module[body].root]
    # What the body returns enters the next iteration, its condition too, and leaves at the end.
    for inner in {body, test} & module.keys():
        entering = list(leaves(inner, parameters(module[inner])[0]))
        yield from _paired(leaves(name, carried), entering)
        yield from _paired(leaves(body, root), entering)
    if test in module:  # one number decides which iteration's results these are
        yield from (((test, module[test].root, 0), leaf, SPREAD) for leaf in leaves(name, op))
    yield from _paired(leaves(body, root), leaves(name, op))


def _of_branches(
    module: dict[str, Computation], name: str, op: Op
) -> Iterator[tuple[Leaf, Leaf, int]]:
    predicate, *operands = op.operands
    for operand, inner in zip(operands, called_by(op), strict=True):
        given = leaves(name, module[name].ops[operand])
        yield from _paired(given, leaves(inner, *parameters(module[inner])))
        root = module[inner].ops[module[inner].root]
        yield from _paired(leaves(inner, root), leaves(name, op))
    yield from (((name, predicate, 0), leaf, SPREAD) for leaf in leaves(name, op))


def _kind(op: Op) -> int:
    if op.opcode == "custom-call" and custom_target(op).startswith(PLACES):
        return MOVED
    return KINDS.get(op.opcode.removesuffix(START), MAPPED)


def _numbered(computation: str, name: str, count: int) -> Iterator[Leaf]:
    return ((computation, name, index) for index in range(count))


def _paired(sources: Iterable[Leaf], targets: Iterable[Leaf]) -> Iterator[tuple[Leaf, Leaf, int]]:
    return ((source, target, MOVED) for source, target in zip(sources, targets, strict=False))
