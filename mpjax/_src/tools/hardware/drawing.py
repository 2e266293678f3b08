"""Draws an optimized program: its memory by kind, and a map of its instructions."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from mpjax._src.core.base.lines import short
from mpjax._src.tools.document import model
from mpjax._src.tools.document.model import DTYPES, Bar, Color, Drawing, Operation, facts, size
from mpjax._src.tools.hardware import hlo
from mpjax._src.tools.hardware.hlo import Op, Shape, is_backward, op_name, parse
from mpjax._src.tools.hardware.hlo_costs import costs
from mpjax._src.tools.hardware.memory import CODES, KEPT, MemoryRow, by_kind
from mpjax._src.tools.hardware.times import KernelRow
from mpjax._src.tools.hardware.traffic import is_kernel

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


def drawing_of(text: str, rows: Sequence[MemoryRow], kernels: Sequence[KernelRow] = ()) -> Drawing:
    """Returns the drawing of an optimized program, whose memory and kernels these rows list."""
    module = parse(text)
    line_of, ops = module.line_of, {op.place: op for op in module.ops()}
    kept: dict[str, float] = collections.defaultdict(float)
    rows_of: dict[tuple[str, str], list[MemoryRow]] = collections.defaultdict(list)
    arguments = []
    for row in rows:
        if row.leaf:
            op = ops[row.leaf[:2]]
            rows_of[op.place].append(row)
            if row.kind in (KEPT, CODES):
                kept[model.box_of(row.name, line_of(op))] += row.bytes
            if op.opcode == "parameter":
                arguments.append(_argument(row, op.shapes[row.leaf[2]]))
    bars = [Bar("Memory by kind", tuple(by_kind(rows).items()), words=MEMORY_WORDS)]
    if kept:
        words = "Grouped by the scope that computed them, or by the line if there is no scope."
        bars.append(Bar("Kept activations", model.shares(kept), words=words))
    if kernels:
        times = tuple((row.kind, row.expected_ms or row.bound_ms) for row in kernels)
        bars.append(Bar("Time by kind of kernel", times, unit="ms", words=TIME_WORDS))
    return Drawing(
        bars=tuple(bars),
        operations=(*_instructions(text, line_of, rows_of), *arguments),
        colors=(DTYPE, MEMORY, dataclasses.replace(KIND, classes=tuple(by_kind(rows))), BYTES),
        things="items",
    )


def _argument(row: MemoryRow, shape: Shape) -> Operation:
    # The path state.params['w'][0] is drawn as boxes: state/params/w/0.
    path = row.name.replace("['", "/").replace("']", "").replace(".", "/").replace("[", "/")
    scope, _, label = path.replace("]", "").rpartition("/")
    return Operation(
        label=label or "argument",
        scope="/".join(part for part in ("arguments", *scope.split("/")) if part),
        facts=facts(kind=row.kind, argument=row.name, memory=size(row.bytes), array=str(shape)),
        colors={"dtype": _dtype(shape.dtype), "memory": row.bytes, "kind": row.kind},
    )


def _instructions(
    text: str, line_of: Callable[[Op], str], rows_of: Mapping[tuple[str, str], Sequence[MemoryRow]]
) -> Iterator[Operation]:
    """Yields the instructions that run as kernels, in order."""
    for each in costs(text).instructions:
        op = each.op
        if not is_kernel(op):  # the start of an asynchronous operation stands for its end too
            continue
        name, line = op_name(op), line_of(op)
        alive = rows_of.get(op.place, ())
        memory = sum(row.bytes for row in alive)
        dtypes = [matmul.operands for matmul in each.matmuls] + [s.dtype for s in op.shapes]
        yield Operation(
            label=name.rpartition("/")[2] or op.opcode,
            scope=model.box_of(hlo.scope_of(name), line),
            facts=facts(
                kind=", ".join(dict.fromkeys(row.kind for row in alive)),
                memory_at_its_peak=size(memory) if memory else "",
                bytes_moved=size(each.times * each.bytes),
                runs=f"{each.times} times" if each.times > 1 else "",
                result=str(op.shapes[0]) if op.shapes else "",
                line=short(line),
                code=model.code_at(line),
                instruction=f"{op.opcode} {op.name}",
                name_in_the_program=name,
            ),
            colors={
                "dtype": _dtype(dtypes[0] if dtypes else ""),
                "memory": memory,
                "kind": alive[0].kind if alive else None,
                "bytes": each.times * each.bytes,
            },
            backward=is_backward(name),
            large=bool(each.matmuls),
        )


def _dtype(name: str) -> str:
    return DTYPES.get(name, name if name.startswith("f8") else DTYPES["other"])
