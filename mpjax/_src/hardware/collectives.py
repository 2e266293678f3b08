"""What devices send each other, from the optimized HLO of one of them."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpjax._src.hardware.bundles import unbundled
from mpjax._src.hardware.carried import carried_by
from mpjax._src.hardware.hlo import (
    Computation,
    Op,
    attribute,
    bits,
    called_by,
    jax_name,
    parse,
    runs,
    source_lines,
)
from mpjax._src.hardware.targets import size
from mpjax._src.reports import short

# What one device of n sends, as a multiple of what it gives, if they form a ring: the convention
# in which NCCL's tests state bandwidths.
SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
}
# "[4,2]<=[8]" are four groups of two, "{{0,1},{2,3}}" two; "mesh['x'=4,'y'=2] {'x'}" has two of
# four, and "{'x':(1)2}" takes two of a mesh's axis.
IOTA = re.compile(r"\breplica_groups=\[\d+,(\d+)\]<=")
LISTED = re.compile(r"\breplica_groups=\{\{([\d,]+)\}")
MESH = re.compile(r"\breplica_groups=(?:@\w+ *)?mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
AXIS = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")
PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
# A TPU's compiler writes a reduce-scatter as a kernel of an all-reduce and a slice.
SCATTERS = "all-reduce-scatter"

# Of the table, and which of its columns are words.
COLUMNS = (*("carries", "collective", "dtype", "over", "arrays", "runs", "sent", "share", "line"),)
WORDS = ("carries", "collective", "dtype", "line")


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """One array that devices exchange.

    Attributes:
        carries: What it is, by where it comes from and what becomes of it: "parameters" (an
            argument that is trained, or its new value), "gradients" (sums that become results of a
            trained argument's shape), "activations" (what matmuls make and read, and cotangents of
            it), "statistics" (sums over a batch, such as BatchNorm's and the loss), "verdict" (a
            number that all results hang on: a norm, a check) or "data" (any other argument).
        kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute" ...
        dtype: Of the array, in HLO's spelling: "bf16", "f16", "f32".
        shape: What one device gives of it.
        devices: How many devices exchange it with each other.
        wire_bytes: What one device sends in one run, if the devices of a group form a ring.
        runs: How often it runs, in loops as often as the loop turns.
        name: The JAX operation that it comes from.
        source: The user's line, as "file:line", or "".
        exchange: The instruction that sends it, with all other arrays that have the same.
    """

    carries: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    devices: int
    wire_bytes: float
    runs: int
    name: str
    source: str
    exchange: str


def collectives(text: str, asked: str) -> tuple[CollectiveRow, ...]:
    """Returns what an optimized HLO module sends and receives, the most bytes first.

    Args:
        text: The module of one device.
        asked: The module before it was partitioned.
    """
    module, entry = parse(text)
    module = unbundled(module)
    line_of = source_lines(text)
    header = PARTITIONS.search(text[: text.find("\n")])
    everyone = int(header[1]) if header else 1
    callers = {
        name: (op,)
        for computation in module.values()
        for op in computation.ops.values()
        for name in called_by(op)
    }
    carried = carried_by(module, entry, asked)
    rows, channels = [], set()
    for computation, op, times, _, scope in runs(module, entry):
        kind = op.opcode.removesuffix("-start")
        devices = _group(op, everyone)
        channel = attribute(op, "channel_id")
        if kind not in SENT or devices == 1 or channel in channels:
            continue
        channels |= {channel} - {""}  # a TPU's exchange may have parts in several kernels
        if kind == "all-reduce" and computation.name.startswith(SCATTERS):
            kind = "reduce-scatter"
        for index, operand in enumerate(op.operands):
            shape = computation.ops[operand].shapes[0]
            sent = SENT[kind](devices) * math.prod(shape.dims) * bits(shape.dtype) / 8
            before = _before(module, computation, operand)
            near = itertools.chain((op,), before, callers.get(computation.name, ()))
            made = next(filter(line_of, near), op)
            rows.append(
                CollectiveRow(
                    carried(computation, op, index),
                    kind,
                    shape.dtype,
                    shape.dims,
                    devices,
                    sent,
                    times,
                    jax_name(made, scope),
                    line_of(made),
                    op.name,
                )
            )
    return tuple(sorted(rows, key=lambda row: -row.wire_bytes * row.runs))


def grouped(rows: Sequence[CollectiveRow]) -> list[tuple[str, ...]]:
    """Returns rows as cells of a table, `COLUMNS`: those that differ in shape alone share one."""
    groups: dict[tuple[Any, ...], list[CollectiveRow]] = {}
    for row in rows:
        key = row.carries, row.kind, row.dtype, row.devices, row.source
        groups.setdefault(key, []).append(row)
    total = sent_by(rows)
    cells: list[tuple[str, ...]] = []
    for (carries, kind, dtype, devices, source), group in groups.items():
        sent = sent_by(group)
        numbers = (
            f"{devices}",
            f"{len(group)}",
            f"{sum({row.exchange: row.runs for row in group}.values())}",
            size(sent),
        )
        share = f"{sent / total if total else 1:.1%}"
        cells.append((carries, kind, dtype, *numbers, share, short(source)))
    return cells


def sent_by(rows: Sequence[CollectiveRow]) -> float:
    """Returns the bytes that a device sends for some rows in one run of the program."""
    return sum(row.wire_bytes * row.runs for row in rows)


def _group(op: Op, everyone: int) -> int:
    """Returns how many devices take part in one exchange."""
    if found := IOTA.search(op.attributes):
        return int(found[1])
    if found := LISTED.search(op.attributes):
        return len(found[1].split(","))
    if found := MESH.search(op.attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in AXIS.findall(found[2]))
    return everyone


def _before(module: dict[str, Computation], computation: Computation, operand: str) -> Iterator[Op]:
    """Yields what a value comes from, the nearest first: what is merged or moved has no line."""
    seen, queue = {operand}, [operand]
    while queue:
        near = computation.ops[queue.pop(0)]
        yield near
        if near.opcode == "fusion":
            kernel = module[called_by(near)[0]]
            yield from reversed(kernel.ops.values())
        fresh = [name for name in near.operands if name not in seen]
        seen.update(fresh)
        queue += fresh
