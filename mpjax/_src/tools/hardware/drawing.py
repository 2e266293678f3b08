"""Draws an optimized program: its memory by kind, and a map of its instructions."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from mpjax._src.core.base.lines import short
from mpjax._src.tools.document.model import (
    DTYPES,
    Bar,
    Color,
    Drawing,
    Operation,
    box_of,
    code_at,
    facts,
    shares,
    size,
)
from mpjax._src.tools.hardware.hlo import (
    Computation,
    Op,
    called_by,
    custom_target,
    parse,
    runs,
    source_lines,
)
from mpjax._src.tools.hardware.hlo_costs import LIBRARIES
from mpjax._src.tools.hardware.memory import (
    CODES,
    KEPT,
    MemoryRow,
    by_kind,
    is_backward,
    op_name,
    scope_of,
)
from mpjax._src.tools.hardware.times import KernelRow
from mpjax._src.tools.hardware.traffic import STRUCTURE, bytes_moved

MEMORY = Color(
    "memory",
    "The bytes that each item holds when memory use is highest: arguments hold them all the time, "
    "instructions while their results are alive.",
    unit="bytes",
)
KIND = Color("kind", "The kind of that memory, by the values that it comes from and leads to.")
DTYPE = Color(
    "dtype",
    "The dtype of each item: for a matmul the wider of its operands, else that of its result.",
    tuple(DTYPES.values()),
)
BYTES = Color(
    "bytes",
    "The bytes that each instruction reads from and writes to the device's memory in one run, "
    "including all iterations of loops and assuming no cache.",
    unit="bytes",
)
MEMORY_WORDS = (
    "Arguments are identified by their names in the program. Temporary memory is shown at its "
    "peak, in the order that the compiler chose: the forward pass computes kept activations for "
    "the backward pass, and everything else is workspace. The parts add up to the compiler's own "
    "total."
)
TIME_WORDS = (
    "The expected times, or lower bounds if no step was timed on the device. The table has both."
)


def drawing_of(hlo: str, rows: Sequence[MemoryRow], kernels: Sequence[KernelRow] = ()) -> Drawing:
    """Returns the drawing of an optimized program, whose memory and kernels these rows list."""
    kept: dict[str, float] = collections.defaultdict(float)
    module, entry = parse(hlo)
    line_of = source_lines(hlo)
    for row in rows:
        if row.kind in (KEPT, CODES) and row.leaf:
            kept[box_of(row.name, line_of(module[row.leaf[0]].ops[row.leaf[1]]))] += row.bytes
    bars = [Bar("Memory by kind", tuple(by_kind(rows).items()), words=MEMORY_WORDS)]
    if kept:
        words = "Grouped by the scope that computed them, or by the line if there is no scope."
        bars.append(Bar("Kept activations", shares(kept), words=words))
    if kernels:
        times = tuple((row.kind, row.expected_ms or row.bound_ms) for row in kernels)
        bars.append(Bar("Time by kind of kernel", times, unit="ms", words=TIME_WORDS))
    return Drawing(
        bars=tuple(bars),
        operations=(
            *_instructions(module, entry, line_of, rows),
            *(_argument(row, module) for row in rows if _is_argument(row, module)),
        ),
        colors=(DTYPE, MEMORY, dataclasses.replace(KIND, classes=tuple(by_kind(rows))), BYTES),
        things="items",
    )


def _is_argument(row: MemoryRow, module: Mapping[str, Computation]) -> bool:
    return row.leaf is not None and module[row.leaf[0]].ops[row.leaf[1]].opcode == "parameter"


def _argument(row: MemoryRow, module: Mapping[str, Computation]) -> Operation:
    assert row.leaf is not None
    shape = module[row.leaf[0]].ops[row.leaf[1]].shapes[row.leaf[2]]
    # The path state.params['w'][0] is drawn as boxes: state/params/w/0.
    path = row.name.replace("['", "/").replace("']", "").replace(".", "/").replace("[", "/")
    scope, _, label = path.replace("]", "").rpartition("/")
    return Operation(
        label=label or "argument",
        scope="/".join(part for part in ("arguments", *scope.split("/")) if part),
        facts=facts(
            kind=row.kind,
            argument=row.name,
            memory=size(row.bytes),
            array=f"{shape.dtype}[{','.join(map(str, shape.dims))}]",
        ),
        colors={"dtype": _dtype(shape.dtype), "memory": row.bytes, "kind": row.kind},
    )


def _instructions(
    module: dict[str, Computation],
    entry: str,
    line_of: Callable[[Op], str],
    rows: Sequence[MemoryRow],
) -> Iterator[Operation]:
    """Yields the instructions that run as kernels, in order."""
    rows_of: dict[tuple[str, str], list[MemoryRow]] = collections.defaultdict(list)
    for row in rows:
        if row.leaf:
            rows_of[row.leaf[:2]].append(row)
    for computation, op, times, fused, _ in runs(module, entry):
        # The start of an asynchronous operation stands for its end too.
        if fused or op.opcode in STRUCTURE or op.opcode.endswith(("-done", "-update")):
            continue
        name, line = op_name(op), line_of(op)
        alive = rows_of[computation.name, op.name]
        memory = sum(row.bytes for row in alive)
        moved = times * bytes_moved(module, computation, op)
        matmul = _matmul(module, op)
        shape = op.shapes[0] if op.shapes else None
        yield Operation(
            label=name.rpartition("/")[2] or op.opcode,
            scope=box_of(scope_of(name), line),
            facts=facts(
                kind=", ".join(dict.fromkeys(row.kind for row in alive)),
                memory_at_its_peak=size(memory) if memory else "",
                bytes_moved=size(moved),
                runs=f"{times} times" if times > 1 else "",
                result=f"{shape.dtype}[{','.join(map(str, shape.dims))}]" if shape else "",
                line=short(line),
                code=code_at(line),
                instruction=f"{op.opcode} {op.name}",
                name_in_the_program=name,
            ),
            colors={
                "dtype": _dtype(matmul or (shape.dtype if shape else "")),
                "memory": memory,
                "kind": alive[0].kind if alive else None,
                "bytes": moved,
            },
            backward=is_backward(name),
            large=bool(matmul),
        )


def _matmul(module: Mapping[str, Computation], op: Op) -> str:
    """Returns the dtype in which an instruction multiplies matrices, or "" if it does not."""
    if op.opcode == "custom-call":
        return op.shapes[0].dtype if custom_target(op).startswith(LIBRARIES) else ""
    inside = module[called_by(op)[0]] if op.opcode == "fusion" else None
    ops = inside.ops.values() if inside else (op,)
    matmuls = [o for o in ops if o.opcode in ("dot", "convolution")]
    # The operands of a dot outside of kernels are not at hand, so its result's dtype is shown.
    if not matmuls or inside is None:
        return matmuls[0].shapes[0].dtype if matmuls else ""
    return inside.ops[matmuls[0].operands[0]].shapes[0].dtype


def _dtype(name: str) -> str:
    return DTYPES.get(name, name if name.startswith("f8") else DTYPES["other"])
