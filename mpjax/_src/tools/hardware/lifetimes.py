"""The arrays of a compiled program that are alive at the same time, by XLA's schedule.

The memory of arguments and results is left out, and so are values that a fused kernel keeps in
registers. The rest is the memory that the compiler calls temporary.
"""

import dataclasses
import re
from collections.abc import Iterator

from mpjax._src.tools.hardware.flow import DONE, START, UPDATE, Leaf
from mpjax._src.tools.hardware.hlo import Computation, Op, attribute, called_by, origin, parameters

Module = dict[str, Computation]

# What gives its operand on, in the same place.
SAME_PLACE = ("bitcast", "opt-barrier", "domain", "add-dependency", "while")
NO_PLACE = ("parameter", "constant", "after-all", "partition-id", "replica-id")
ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")


@dataclasses.dataclass
class Buffer:
    """A place in temporary memory: its arrays, its bytes, and the first and last instruction."""

    leaves: list[Leaf]
    bytes: float
    first: int
    last: int


def is_scheduled(text: str) -> bool:
    """Returns whether an HLO module contains the order in which its instructions run."""
    return "is_scheduled=true" in text.split("\n", 1)[0]


def shared_results(text: str) -> set[int]:
    """Returns the numbers of an HLO module's results that are in the memory of arguments."""
    header = text.split("\n", 1)[0].partition("input_output_alias=")[2]
    return {int(result or 0) for result, *_ in ALIASED.findall(header.split("layout")[0])}


def most_at_once(module: Module, name: str) -> list[Buffer]:
    """Returns the arrays in temporary memory at the moment of highest use in a computation.

    Those of the computations that it calls are included.
    """
    buffers, inside = _lives(module, module[name])
    count = len(module[name].ops)
    change = [0.0] * (count + 1)
    for buffer in buffers:
        change[buffer.first] += buffer.bytes
        change[buffer.last + 1] -= buffer.bytes
    most, at, now = -1.0, 0, 0.0
    for place in range(count):
        now += change[place]
        # A computation that is called has its own peak, beside what its caller keeps meanwhile.
        more = sum(b.bytes for b in inside.get(place, ()))
        if now + more > most:
            most, at = now + more, place
    return [b for b in buffers if b.first <= at <= b.last] + inside.get(at, [])


def _lives(
    module: Module, computation: Computation
) -> tuple[list[Buffer], dict[int, list[Buffer]]]:
    """Returns the buffers of a computation, and those of the computations it calls, by place."""
    buffers: list[Buffer] = []
    inside: dict[int, list[Buffer]] = {}
    buffers_of: dict[str, list[Buffer | None]] = {}
    for place, op in enumerate(computation.ops.values()):
        operands = [buffers_of[operand] for operand in op.operands]
        if op.opcode not in ("tuple", "get-tuple-element", "bitcast"):  # these read no memory
            for read in (b for each in operands for b in each if b is not None):
                read.last = max(read.last, place)
        buffers_of[op.name] = list(_places(module, op, operands, place, buffers))
        for index, buffer in enumerate(buffers_of[op.name]):
            if buffer is not None:
                buffer.leaves.append((computation.name, op.name, index))
        called = [attribute(op, "body")] if op.opcode == "while" else called_by(op)
        # Only one branch of a conditional runs: the one with the highest peak counts.
        if op.opcode in ("while", "call", "conditional"):
            peaks = (most_at_once(module, name) for name in called if name in module)
            inside[place] = max(peaks, key=lambda alive: sum(b.bytes for b in alive), default=[])
    # What a computation returns is in memory that its caller counts.
    escaped = {id(b) for b in buffers_of[computation.root] if b is not None}
    return [b for b in buffers if id(b) not in escaped], inside


def _places(
    module: Module,
    op: Op,
    operands: list[list[Buffer | None]],
    place: int,
    buffers: list[Buffer],
) -> Iterator[Buffer | None]:
    """Yields the buffers of an instruction's results; None for memory that is not temporary."""
    code = op.opcode
    if code == "tuple":
        yield from (buffer for each in operands for buffer in each)
        return
    if code == "get-tuple-element":
        index = int(attribute(op, "index"))
        yield operands[0][index] if index < len(operands[0]) else None
        return
    if code in SAME_PLACE:
        yield from operands[0]
        return
    if code in NO_PLACE:
        yield from (None for _ in op.shapes)
        return
    if code.endswith((START, UPDATE)):  # what it returns exists when it is done
        yield from (buffer for each in operands for buffer in each)
        return
    onto = _in_place(module, op)
    for index, shape in enumerate(op.shapes):
        source = onto.get(index)
        if source is not None and source < len(operands) and len(operands[source]) == 1:
            yield operands[source][0]
        elif shape.bytes:
            buffers.append(Buffer([], shape.bytes, place, place))
            yield buffers[-1]
        else:
            yield None


def _in_place(module: Module, op: Op) -> dict[int, int]:
    """Returns, for each result that overwrites an operand, the number of the operand."""
    if op.opcode in ("dynamic-update-slice", "scatter"):
        return {0: 0}
    if op.opcode == "custom-call" or op.opcode.endswith(DONE):
        aliases = ALIASED.findall(op.attributes)
        return {int(result or 0): int(operand) for result, operand, _ in aliases}
    if op.opcode != "fusion":
        return {}
    return _in_kernel(module[called_by(op)[0]])


def _in_kernel(kernel: Computation) -> dict[int, int]:
    """Returns, for each result of a fused kernel that overwrites a parameter, its number."""
    root = kernel.ops[kernel.root]
    results = [kernel.ops[n] for n in root.operands] if root.opcode == "tuple" else [root]
    numbers = {parameter.name: i for i, parameter in enumerate(parameters(kernel))}
    onto = {}
    for index, result in enumerate(results):
        update = origin(kernel, result.name, ("bitcast",))
        if update.opcode in ("dynamic-update-slice", "scatter"):
            target = origin(kernel, update.operands[0], ("bitcast",))
            if target.name in numbers:
                onto[index] = numbers[target.name]
    return onto
