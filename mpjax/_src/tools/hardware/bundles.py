"""Separates arrays that XLA concatenates to reduce them over devices together.

GPU compilers concatenate small arrays before an all-reduce and slice the sum. To find out what each
array carries, it must be its own operand, as it is in the output of TPU compilers.
"""

import itertools
import re
from collections.abc import Sequence

from mpjax._src.tools.hardware.hlo import Module, Op, Shape, parameters, users_of

RANGE = re.compile(r"slice=\{\[(\d+):(\d+)\]\}")


def unbundle(module: Module) -> None:
    """Replaces all-reduces of concatenated arrays by all-reduces of several arrays.

    An all-reduce is left as it is if its sum is used as a whole, or sliced across two arrays.
    """
    for op in module.ops():
        if op.opcode in ("all-reduce", "all-reduce-start") and len(op.operands) == 1:
            _separate(op)


def _separate(op: Op) -> None:
    (joined,) = op.operands
    kernel = joined.called[0] if joined.opcode == "fusion" else None
    root = kernel.root if kernel else joined
    users = users_of(op.room)
    # XLA joins arrays that it has flattened: each is a range of the only axis. Another reader needs
    # them as one array.
    if root.opcode != "concatenate" or len(root.shapes[0].dims) != 1 or len(users[joined]) > 1:
        return
    shapes = tuple(operand.shapes[0] for operand in root.operands)
    # Readers of an asynchronous sum read what its end returns.
    whole = [op, *users[op]] if op.opcode.endswith("-start") else [op]
    total = whole[-1]
    readers: list[Op] = []
    # Each reader has to slice single arrays out of the sum, itself or within its kernel.
    for reader in users[total]:
        if reader.opcode == "fusion":
            (inner,) = reader.called
            given = parameters(inner)[reader.operands.index(total)]
            readers += users_of(inner)[given]
            whole.append(given)
        else:
            readers.append(reader)
    picked = {reader: _picked(reader, shapes) for reader in readers}
    if None in picked.values():
        return
    for reader, index in picked.items():
        reader.opcode, reader.attributes = "get-tuple-element", f"index={index}"
    op.operands = root.operands
    if kernel:  # the kernel that joined the arrays returns them as a tuple instead
        root.opcode = "tuple"
        whole += [root, joined]
        code, parts = "get-tuple-element", enumerate(shapes)
        op.operands = tuple(  # HLO's own names do not contain "#"
            Op(op.room, f"{joined.name}#{i}", code, (s,), (joined,), "", f"index={i}")
            for i, s in parts
        )
        op.room.ops |= {part.name: part for part in op.operands}
    for each in whole:
        each.shapes = shapes


def _picked(op: Op, shapes: Sequence[Shape]) -> int | None:
    """Returns the number of the array that a slice is of, or None if it spans several."""
    match = RANGE.search(op.attributes)
    if op.opcode != "slice" or not match:
        return None
    start, end = map(int, match.groups())
    ends = itertools.accumulate(shape.size for shape in shapes)
    for index, (shape, last) in enumerate(zip(shapes, ends, strict=True)):
        if last - shape.size <= start and end <= last:
            return index
    return None
