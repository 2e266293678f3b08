"""The arrays that devices exchange, read from the optimized HLO of one device."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpjax._src.core.base.lines import short
from mpjax._src.core.base.public import public
from mpjax._src.tools.document.model import Table
from mpjax._src.tools.hardware import hlo
from mpjax._src.tools.hardware.bundles import unbundle
from mpjax._src.tools.hardware.carried import carried_by
from mpjax._src.tools.hardware.flow import MOVED, VALUES, Flow, Leaf, flow_of, reached
from mpjax._src.tools.hardware.hlo import Module, Op
from mpjax._src.tools.hardware.targets import size

# The bytes that each of n devices in a ring sends, as a multiple of the bytes of its operand, which
# is the convention of NCCL's tests for bandwidths.
SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
}
# "[4,2]<=[8]" means four groups of two devices, "{{0,1},{2,3}}" two groups of two. On
# "mesh['x'=4,'y'=2]", "{'x'}" means two groups of four, and "{'x':(1)2}" groups of two along x.
IOTA = re.compile(r"\breplica_groups=\[\d+,(\d+)\]<=")
LISTED = re.compile(r"\breplica_groups=\{\{([\d,]+)\}")
MESH = re.compile(r"\breplica_groups=(?:@\w+ *)?mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
AXIS = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")
# TPU compilers write a reduce-scatter as a kernel with an all-reduce and a slice.
SCATTERS = "all-reduce-scatter"
# The calls at the roots of the TPU kernels that start and end an exchange.
STARTS, ENDS = "AsyncCollectiveStart", "AsyncCollectiveDone"

# The columns of the table; those in WORDS are aligned to the left.
COLUMNS = (*("carries", "collective", "dtype", "over", "arrays", "runs", "sent", "share", "line"),)
WORDS = ("carries", "collective", "dtype", "line")


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """One array that devices exchange.

    Attributes:
        carries: The content of the array: "parameters" (a trained argument or its new value),
            "gradients" (sums that become results of the shape of a trained argument),
            "activations" (operands and results of matmuls, and their cotangents), "statistics"
            (sums over a batch, such as those of BatchNorm and the loss), "verdict" (a number that
            all results depend on, such as whether gradients are finite; printed as "finite check")
            or "data" (any other argument).
        kind: The collective: "all-gather", "reduce-scatter", "all-reduce", "all-to-all",
            "collective-permute" and so on.
        dtype: The dtype of the array, spelled as in HLO: "bf16", "f16", "f32".
        shape: The shape of one device's operand.
        devices: The number of devices in a group that exchange it.
        wire_bytes: The bytes that one device sends in one run, if the devices of a group form a
            ring.
        runs: The number of executions; a collective in a loop counts once per iteration.
        name: The name of the JAX operation that it comes from.
        source: The user's line, as "file:line", or "".
        exchange: The HLO instruction that sends it. Arrays with the same one are sent together.
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
    """Returns the arrays that an optimized HLO module exchanges, the most bytes first.

    ``text`` is the module of one device, and ``asked`` the one before partitioning.
    """
    module = hlo.parsed(text)
    unbundle(module)
    line_of = module.line_of
    callers = {called: op for op in module.ops() for called in op.called}
    flow = flow_of(module)
    carried = carried_by(flow, asked)
    rows = []
    for op, times, scope in exchanges(module, flow):
        kind, devices = op.kind, _group(op, module.devices)
        # A group of one device sends nothing.
        if devices == 1:
            continue
        if kind == "all-reduce" and op.room.name.startswith(SCATTERS):
            kind = "reduce-scatter"
        for index, operand in enumerate(op.operands[: VALUES.get(kind)]):
            shape = operand.shapes[0]
            near = itertools.chain([op], _before(operand), [callers.get(op.room, op)])
            maker = next(filter(line_of, near), op)
            content = carried(op, index), kind, shape.dtype, shape.dims, devices
            sent = SENT[kind](devices) * shape.size * hlo.bits(shape.dtype) / 8
            name = hlo.jax_name(maker, scope)
            rows.append(CollectiveRow(*content, sent, times, name, line_of(maker), op.name))
    return tuple(sorted(rows, key=lambda row: -row.wire_bytes * row.runs))


def exchanges(module: Module, flow: Flow) -> Iterator[tuple[Op, int, str]]:
    """Yields (collective, number of runs, scope), each exchange once.

    An exchange is an instruction, and not a channel: all collectives of `jax.shard_map` have
    channel 1. A computation that is called from several places is one, with the sum of the runs.
    """
    merged: dict[Op, tuple[int, str]] = {}
    for op, times, _, scope in hlo.runs(module.entry):
        if op.kind in SENT:
            earlier, first = merged.get(op, (0, scope))
            merged[op] = earlier + times, first
    # TPU compilers start an exchange in one kernel, and name it again in each kernel during which
    # it goes on and in the one that ends it: there its operand is what the first kernel returned.
    # What it received is returned too, but a new exchange reads that from the kernel that ends it.
    before = {leaf: steps for leaf, steps in flow.before.items() if leaf.op.target != ENDS}
    for op, (times, scope) in merged.items():
        sources = reached(before, (Leaf(operand, 0) for operand in op.operands), MOVED)
        if STARTS not in (source.target for source, _ in sources):
            yield op, times, scope


def sent_table(name: str, rows: Sequence[CollectiveRow]) -> Table:
    """Returns the table of what devices send."""
    title = f"What each device of {name} sends in one run"
    return Table(title, COLUMNS, tuple(grouped(rows)), WORDS)


def grouped(rows: Sequence[CollectiveRow]) -> list[tuple[str, ...]]:
    """Returns the cells of a table with `COLUMNS`. Rows that differ only in shape are merged."""
    groups: dict[tuple[Any, ...], list[CollectiveRow]] = {}
    for row in rows:
        key = row.carries, row.kind, row.dtype, row.devices, row.source
        groups.setdefault(key, []).append(row)
    total = sent_by(rows)
    cells: list[tuple[str, ...]] = []
    for (carries, kind, dtype, devices, source), group in groups.items():
        sent, turns = sent_by(group), sum({row.exchange: row.runs for row in group}.values())
        numbers = f"{devices}", f"{len(group)}", f"{turns}", size(sent)
        share = f"{sent / total if total else 1:.1%}"
        said = "finite check" if carries == "verdict" else carries
        cells.append((said, kind, dtype, *numbers, share, short(source)))
    return cells


def sent_by(rows: Sequence[CollectiveRow]) -> float:
    """Returns the bytes that one device sends for some rows in one run of the program."""
    return sum(row.wire_bytes * row.runs for row in rows)


def _group(op: Op, everyone: int) -> int:
    """Returns how many devices take part in one exchange."""
    if match := IOTA.search(op.attributes):
        return int(match[1])
    if match := LISTED.search(op.attributes):
        return len(match[1].split(","))
    if match := MESH.search(op.attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
        return math.prod(int(part or sizes[axis]) for axis, part in AXIS.findall(match[2]))
    return everyone


def _before(operand: Op) -> Iterator[Op]:
    """Yields the instructions that a value comes from, nearest first; some of them have no line."""
    seen, queue = {operand}, [operand]
    for near in queue:  # which grows
        yield near
        if near.opcode == "fusion":
            yield from reversed(near.called[0].ops.values())
        fresh = [op for op in near.operands if op not in seen]
        seen.update(fresh)
        queue += fresh
