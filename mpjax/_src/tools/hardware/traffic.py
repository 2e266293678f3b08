"""The bytes of main memory that one instruction of an HLO module reads and writes.

A kernel reads those entries of its operands from which its results are computed. So the entries
that each value inside of it needs are counted from its results back to its parameters: a slice, a
pad or a gather needs a part of its operand, whatever stands between it and the parameter.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Iterator

from mpjax._src.tools.hardware import hlo
from mpjax._src.tools.hardware.flow import KINDS, MAPPED, MOVED, SPREAD
from mpjax._src.tools.hardware.hlo import Computation, Op, bits, origin, parameters

# Instructions that do not run a kernel: the first group moves no bytes, the second runs others.
FREE = {*hlo.SOURCES, *hlo.ALIASES, "tuple", "get-tuple-element", "iota"}
STRUCTURE = {*FREE, "while", "call", "conditional", "async-start"}

SLICES = {"dynamic-slice", "slice", "gather"}
# Instructions that need a part of their first operand; those whose result has other entries than
# their operands, which are needed as a whole.
PARTLY = {*SLICES, *hlo.UPDATES, "pad"}
WHOLE = {*PARTLY, "tuple", "get-tuple-element"}
# What may stand between an array that a kernel updates in place and the kernel's parameter.
THROUGH = ("bitcast", "convert")

# The number of entries that are needed of a value, by where they are: all readers that need the
# entries of one slice need the same ones, and those of another slice are others. The name of a
# slice is that of its instruction; "" are the entries at the places of the result.
Needs = dict[str, float]


def is_kernel(op: Op) -> bool:
    """Returns whether an instruction runs a kernel, a library's call or a transfer."""
    if op.opcode in STRUCTURE or op.opcode.endswith(("-done", "-update")):
        return False
    return not (op.opcode == "custom-call" and op.target.startswith(hlo.PLACES))


def bytes_moved(op: Op) -> float:
    """Returns the bytes of main memory that one instruction reads and writes."""
    code = op.opcode
    if not is_kernel(op):
        return 0
    if code == "fusion":
        (kernel,) = op.called
        placed = _in_place(kernel)
        needs = _needs(kernel, {"": _size(kernel.root)}, placed)
        read = sum(_bytes_of(each, needs[each]) for each in parameters(kernel))
        return read + sum(_written(result, placed) for result in kernel.results)
    if hosted := sum(host_bytes(op)):
        return hosted  # read or written once on the device
    # A start returns its destination and its source, and then a handle.
    if code == "copy-start":
        return sum(shape.bytes for shape in op.shapes[:2])
    if code == "slice-start":
        piece = op.shapes[-2] if len(op.shapes) > 2 else op.shapes[-1]
        source = dataclasses.replace(piece, space=op.shapes[0].space)
        return piece.bytes + source.bytes
    placed = {op} if code in hlo.UPDATES else set()
    written = _written(op, placed)
    if code == "custom-call" and op.target.startswith("__cu") and len(op.shapes) > 1:
        written -= op.shapes[-1].bytes  # scratch
    needs = collections.defaultdict(dict)
    for operand, need in _of_operands(op, {"": _size(op)}, placed):
        _join(needs[operand], need)
    return written + sum(_bytes_of(operand, need) for operand, need in needs.items())


def host_bytes(op: Op) -> tuple[float, float]:
    """Returns the bytes that an asynchronous instruction sends to the host, and reads from there.

    Of an array on the host, a loop reads or writes a slice. The slice is what is on the device.
    """
    if not op.opcode.endswith("-start") or all(s.space != hlo.HOST for s in op.shapes):
        return 0.0, 0.0
    # The destination is the first shape of a copy, and the last before a handle of the others.
    destination = op.shapes[0 if op.opcode == "copy-start" else -2]
    moved = sum(s.bytes for s in op.shapes if s.dims)
    return (moved, 0.0) if destination.space == hlo.HOST else (0.0, moved)


# ---- what is written -----------------------------------------------------------------------------


def _in_place(kernel: Computation) -> set[Op]:
    return {update for _, update, _ in hlo.placed_in(kernel, THROUGH)}


def _written(result: Op, placed: Collection[Op]) -> float:
    """Returns the bytes of a result; for one that is updated in place, those of the update."""
    source = origin(result, THROUGH)
    if source not in placed or not result.bytes:
        return result.bytes
    if source.opcode == "scatter":  # the rows that the updates hit are also read
        return 2 * source.operands[-1].bytes
    return source.operands[1].shapes[0].size * bits(result.shapes[0].dtype) / 8


# ---- what is read --------------------------------------------------------------------------------


def _needs(kernel: Computation, root: Needs, placed: Collection[Op]) -> dict[Op, Needs]:
    """Returns the entries that a kernel's results need of each value in it."""
    needs: dict[Op, Needs] = collections.defaultdict(dict, {kernel.root: root})
    for op in reversed(kernel.ops.values()):  # each stands behind its operands
        if needs[op]:
            for operand, need in _of_operands(op, needs[op], placed):
                _join(needs[operand], need)
    return needs


def _join(needs: Needs, more: Needs) -> None:
    for place, count in more.items():
        needs[place] = max(needs.get(place, 0.0), count)


def _of_operands(op: Op, needs: Needs, placed: Collection[Op]) -> Iterator[tuple[Op, Needs]]:
    """Yields the operands of an instruction, with the entries that entries of its result need."""
    if op.opcode == "fusion":
        (inner,) = op.called
        inside = _needs(inner, needs, _in_place(inner))
        for operand, parameter in zip(op.operands, parameters(inner), strict=True):
            yield operand, inside[parameter]
        return
    for index, operand in enumerate(op.operands):
        if index or op.opcode not in PARTLY:
            yield operand, _of_operand(op, operand, needs)
        elif op not in placed:
            yield operand, _of_part(op, operand, needs)


def _of_operand(op: Op, operand: Op, needs: Needs) -> Needs:
    size, kind = _size(operand), KINDS.get(op.opcode, MAPPED)
    if kind == SPREAD:
        return {place: min(size, count) for place, count in needs.items()}
    if op.opcode not in WHOLE and (kind in (MOVED, MAPPED) or op.opcode == "reduce"):
        return {place: count * size / _size(op) for place, count in needs.items()}
    return {"": size}


def _of_part(op: Op, operand: Op, needs: Needs) -> Needs:
    """Returns the entries of the first operand of a slice, a gather, a pad or an update."""
    size, asked = _size(operand), min(sum(needs.values()), _size(op))
    if op.opcode in SLICES:
        return {op.name: asked}
    if op.opcode == "pad":
        kept = _kept(op, operand)
        return {"" if kept == size else op.name: min(kept, asked)}
    if op.opcode == "dynamic-update-slice":
        return {op.name: size - _size(op.operands[1])}
    return {"": size}


def _kept(pad: Op, operand: Op) -> int:
    """Returns the number of entries that a pad keeps: negative padding cuts off entries."""
    (dims,) = (shape.dims for shape in operand.shapes)
    edges = (each.split("_") for each in hlo.attribute(pad, "padding").split("x"))
    cut = (sum(min(0, int(edge)) for edge in each[:2]) for each in edges)
    return math.prod(max(0, dim + off) for dim, off in zip(dims, cut, strict=False))


def _bytes_of(op: Op, needs: Needs) -> float:
    """Returns the bytes of the entries that are needed of a value, each once."""
    return op.bytes * min(1.0, sum(needs.values()) / _size(op))


def _size(op: Op) -> int:
    return sum(shape.size for shape in op.shapes) or 1
