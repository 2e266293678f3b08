"""The arrays of a compiled program that are alive at the same time, by XLA's schedule.

The memory of arguments and results is left out, and so are values that a fused kernel keeps in
registers. The rest is the memory that the compiler calls temporary.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

from mpjax._src.tools.hardware import hlo
from mpjax._src.tools.hardware.flow import DONE, START, UPDATE, Leaf
from mpjax._src.tools.hardware.hlo import ALIASED, Computation, Op, parameters, placed_in


@dataclasses.dataclass(eq=False)
class Buffer:
    """A place in temporary memory: its arrays, its bytes, and the first and last instruction."""

    leaves: list[Leaf]
    bytes: float
    first: int
    last: int


def most_at_once(room: Computation) -> list[Buffer]:
    """Returns the arrays in temporary memory at the moment of highest use in a computation.

    Those of the computations that it calls are included.
    """
    buffers, inside = lives(room)
    at = int(np.argmax(alive_at(room, buffers, inside)))
    return [b for b in buffers if b.first <= at <= b.last] + inside.get(at, [])


def alive_at(
    room: Computation, buffers: list[Buffer], inside: dict[int, list[Buffer]]
) -> np.ndarray[Any, Any]:
    """Returns the bytes in temporary memory at each instruction of a computation."""
    change = np.zeros(len(room.ops) + 1)
    for buffer in buffers:
        change[buffer.first] += buffer.bytes
        change[buffer.last + 1] -= buffer.bytes
    now = np.cumsum(change)[:-1]
    for place, more in inside.items():
        now[place] += sum(b.bytes for b in more)
    return now


def lives(room: Computation) -> tuple[list[Buffer], dict[int, list[Buffer]]]:
    """Returns the buffers of a computation, and those of the computations it calls, by place."""
    inside: dict[int, list[Buffer]] = {}
    buffers_of: dict[Op, list[Buffer | None]] = {}
    for place, op in enumerate(room.ops.values()):
        operands = [buffers_of[operand] for operand in op.operands]
        if op.opcode not in ("tuple", "get-tuple-element", "bitcast"):  # these read no memory
            for read in filter(None, itertools.chain(*operands)):
                read.last = max(read.last, place)
        buffers_of[op] = _places(op, operands, place)
        for index, buffer in enumerate(buffers_of[op]):
            if buffer:
                buffer.leaves.append(Leaf(op, index))
        # A computation that is called has its own peak, beside what its caller keeps meanwhile.
        # Only one branch of a conditional runs: the one with the highest peak counts.
        if op.opcode in ("while", "call", "conditional"):
            called = op.called[:1] if op.opcode == "while" else op.called
            peaks = map(most_at_once, called)
            inside[place] = max(peaks, key=lambda found: sum(b.bytes for b in found), default=[])
    # What a computation returns is in memory that its caller counts.
    made = dict.fromkeys(itertools.chain(*buffers_of.values()))
    return [b for b in made if b and b not in buffers_of[room.root]], inside


def _places(op: Op, operands: list[list[Buffer | None]], place: int) -> list[Buffer | None]:
    """Returns the buffers of an instruction's results; None for memory that is not temporary."""
    code = op.opcode
    if code == "get-tuple-element":
        return [operands[0][op.index] if op.index < len(operands[0]) else None]
    if code in hlo.ALIASES or code == "while":  # it returns what it is given, in the same place
        return operands[0]
    if code in hlo.SOURCES:
        return [None] * len(op.shapes)
    # What an asynchronous start returns exists when it is done.
    if code == "tuple" or code.endswith((START, UPDATE)):
        return [*itertools.chain(*operands)]
    onto = _in_place(op)
    found: list[Buffer | None] = []
    for index, shape in enumerate(op.shapes):
        source = operands[onto[index]] if onto.get(index, len(operands)) < len(operands) else []
        if len(source) == 1:
            found += source
        else:
            found.append(Buffer([], shape.bytes, place, place) if shape.bytes else None)
    return found


def _in_place(op: Op) -> dict[int, int]:
    """Returns, for each result that overwrites an operand, the number of the operand."""
    if op.opcode in hlo.UPDATES:
        return {0: 0}
    if op.opcode == "custom-call" or op.opcode.endswith(DONE):
        aliases = ALIASED.findall(op.attributes)
        return {int(result or 0): int(operand) for result, operand, _ in aliases}
    if op.opcode != "fusion":
        return {}
    (kernel,) = op.called
    numbers = {parameter: number for number, parameter in enumerate(parameters(kernel))}
    return {index: numbers[target] for index, _, target in placed_in(kernel, ("bitcast",))}
