"""Parses optimized HLO: its instructions, and how often each of them runs."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator

from mpjax._src.core.base.lines import is_library

# "f32[8,128]{1,0:T(8,128)S(1)}": a dtype, dimensions, a layout that may name a memory space.
SHAPE = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^}]*\})?")
SPACE = re.compile(r"S\((\d+)\)")
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
OP_NAME = re.compile(r'op_name="([^"]*)"')
HOST = 5  # the memory space of arrays in the host's memory
CUSTOM = re.compile(r'custom_call_target="([^"]*)"')
# Custom calls that only place or rename arrays.
PLACES = (
    *("ConcatBitcast", "AllocateBuffer", "AssumeGather", "GatherScatter", "X64"),
    *("Sharding", "annotate_device_placement", "Pin", "Unpin", "AsyncCollective"),
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Instructions whose result counts as the same value as their operand.
VIEWS = {"bitcast", "copy", "convert", "reshape", "transpose"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of an array: dtype (as HLO spells it), dimensions, memory space (0 for main)."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Its bytes in main memory; 0 for an array in a TPU's vector memory."""
        return 0 if self.space else self.size * bits(self.dtype) / 8


@dataclasses.dataclass(frozen=True)
class Op:
    """One instruction; a tuple result has several shapes."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    inside: str
    attributes: str

    @property
    def bytes(self) -> float:
        return sum(shape.bytes for shape in self.shapes)


@dataclasses.dataclass(frozen=True)
class Computation:
    ops: dict[str, Op]
    root: str
    name: str


def bits(dtype: str) -> int:
    """Returns the number of bits of a dtype, spelled as in HLO."""
    if dtype in ("token", "opaque"):
        return 0
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


# ---- from text ----------------------------------------------------------------------------------


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations of an HLO module by name, and the name of its entry."""
    module: dict[str, Computation] = {}
    entry = name = root = ""
    ops: dict[str, Op] = {}
    for line in text.splitlines():
        if header := HEADER.match(line):
            name, ops = header[2], {}
            entry = name if header[1] else entry
        elif line.startswith("}"):
            module[name] = Computation(ops, root, name)
        elif name and (match := LINE.match(line)):
            op = _kernel(_op(match[2], match[3]), ops)
            ops[op.name] = op
            root = op.name if match[1] else root
    if not entry:
        raise ValueError("text is not an HLO module: it has no ENTRY computation.")
    return module, entry


def _op(name: str, text: str) -> Op:
    # The type of a tuple has brackets, and spaces inside of them.
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    kind, rest = text[:end], text[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    inside = rest[start + 1 : end - 1]
    # The brackets of a constant contain its value, and no operands.
    operands = tuple(NAME.findall(inside)) if rest[:start] != "constant" else ()
    return Op(name, rest[:start], _shapes(kind), operands, inside, rest[end:].lstrip(", "))


def _kernel(op: Op, ops: dict[str, Op]) -> Op:
    """Returns a kernel that runs next to others, as JAX 0.11 has them, as one that ends at once.

    A kernel that writes to the host or reads from there is a transfer instead.
    """
    if op.opcode == "fusion-start" and all(shape.space != HOST for shape in op.shapes):
        results = op.shapes[len(op.operands) : -1]  # between the operands and a handle
        return dataclasses.replace(op, opcode="fusion", shapes=results)
    if op.opcode == "fusion-done" and ops[op.operands[0]].opcode == "fusion":
        return dataclasses.replace(op, opcode="opt-barrier")
    return op


def _closing(text: str, start: int) -> int:
    """Returns the position after the parenthesis that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place + 1
    return len(text)


@functools.lru_cache(maxsize=4096)
def _shapes(text: str) -> tuple[Shape, ...]:
    shapes = []
    for dtype, dims, layout in SHAPE.findall(text):
        space = SPACE.search(layout)
        # A dynamic dimension is written as its bound, "<=8".
        sizes = tuple(int(d.strip("<=")) for d in dims.split(",") if d)
        shapes.append(Shape(dtype, sizes, int(space[1]) if space else 0))
    return tuple(shapes)


def _tables_of_lines(text: str) -> dict[str, dict[str, str]]:
    """Returns the rows of the tables above a module's computations, by table and number."""
    tables: dict[str, dict[str, str]] = collections.defaultdict(dict)
    table = ""
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")):
            break
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = line
        elif line.partition(" ")[0].isdecimal():
            number, _, row = line.partition(" ")
            tables[table][number] = row
    return tables


def source_lines(text: str) -> Callable[[Op], str]:
    """Returns a function from an instruction to the user's line, as "file:line", or ""."""
    tables = _tables_of_lines(text)

    def field(row: str, key: str) -> str:
        match = re.search(rf"\b{key}=(\d+)", row)
        return match[1] if match else ""

    def lines_of(frame: str) -> Iterator[str]:
        """Yields the lines of a frame and its callers, as long as the file is known."""
        row = tables["StackFrames"].get(frame, "")
        location = tables["FileLocations"].get(field(row, "file_location_id"), "")
        file = tables["FileNames"].get(field(location, "file_name_id"), "").strip('"')
        if file:
            yield f"{file}:{field(location, 'line')}"
            # The outermost frame names itself as its caller.
            caller = field(row, "parent_frame_id")
            yield from lines_of(caller) if caller != frame else ()

    def line_of(op: Op) -> str:
        lines = list(lines_of(field(op.attributes, "stack_frame_id")))
        own = (line for line in lines if not is_library(line))
        return next(own, lines[0] if lines else "")

    return line_of


def parameters(computation: Computation) -> list[Op]:
    """Returns the parameters of a computation, in order."""
    ops = (op for op in computation.ops.values() if op.opcode == "parameter")
    return sorted(ops, key=lambda op: int(op.inside))


def users_of(computation: Computation) -> dict[str, list[Op]]:
    """Returns the instructions that read each value of a computation, by its name."""
    users: dict[str, list[Op]] = collections.defaultdict(list)
    for op in computation.ops.values():
        for name in dict.fromkeys(op.operands):
            users[name].append(op)
    return users


def custom_target(op: Op) -> str:
    match = CUSTOM.search(op.attributes)
    return match[1] if match else ""


def attribute(op: Op, name: str) -> str:
    """Returns an attribute of an instruction that is a name or a number, or ""."""
    match = re.search(rf"\b{name}=%?([\w.\-]+)", op.attributes)
    return match[1] if match else ""


# ---- what runs, and how often -------------------------------------------------------------------


def runs(
    module: dict[str, Computation],
    name: str,
    times: int = 1,
    fused: bool = False,
    scope: str = "",
) -> Iterator[tuple[Computation, Op, int, bool, str]]:
    """Yields (computation, instruction, number of runs, whether in a fused kernel, scope).

    The scope is the name of the calling JAX operation. Names inside may be relative to it.
    """
    computation = module[name]
    for op in computation.ops.values():
        yield computation, op, times, fused, scope
        if op.opcode == "while":
            body = attribute(op, "body")
            trips = trip_count(module, computation, op)
            if body:
                turns = times * (1 if trips is None else trips)
                yield from runs(module, body, turns, fused, scope)
            # The condition runs once more than the body: it ends the loop.
            if (condition := attribute(op, "condition")) in module:
                tests = times * (1 if trips is None else trips + 1)
                yield from runs(module, condition, tests, fused, scope)
        elif op.opcode in ("fusion", "call", "conditional", "async-start"):
            inner = jax_name(op, scope) if op.opcode == "call" else scope
            for inside in called_by(op):
                yield from runs(module, inside, times, fused or op.opcode == "fusion", inner)


def jax_name(op: Op, scope: str) -> str:
    """Returns the name of the JAX operation that an instruction comes from."""
    match = OP_NAME.search(op.attributes)
    if not match:
        return op.name if op.opcode != "call" else scope
    outermost = scope.split("/")[0]
    relative = outermost and not match[1].startswith(outermost)
    return f"{scope}/{match[1]}" if relative else match[1]


def called_by(op: Op) -> list[str]:
    names = CALLED.findall(op.attributes)
    for group in BRANCHES.findall(op.attributes):
        names += [name.strip().lstrip("%") for name in group.split(",")]
    return names


def trip_count(module: dict[str, Computation], outside: Computation, loop: Op) -> int | None:
    """Returns how often a loop's body runs, by XLA's note or the condition; None if unknown."""
    if note := TRIPS.search(loop.attributes):
        return int(note[1])
    condition = module.get(attribute(loop, "condition"))
    if not condition:
        return None
    # JAX's counted loops count up, as long as the counter is less than a limit.
    test = condition.ops[condition.root]
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    carried = outside.ops.get(loop.operands[0])
    start, stop = (_number(condition, name, outside, carried) for name in test.operands)
    step = _step(module, condition, loop, test)
    if start is None or stop is None or step is None or step < 1:
        return None
    return max(0, math.ceil((stop - start) / step))


def _number(inside: Computation, name: str, outside: Computation, carried: Op | None) -> int | None:
    """Returns the initial integer of a value in a loop's condition, or None if it is unknown."""
    op = origin(inside, name)
    if op.opcode == "get-tuple-element" and carried is not None and carried.opcode == "tuple":
        op = origin(outside, carried.operands[int(attribute(op, "index"))])
    if op.opcode != "constant" or not re.fullmatch(r"-?\d+", op.inside):
        return None
    return int(op.inside)


def _step(module: dict[str, Computation], condition: Computation, loop: Op, test: Op) -> int | None:
    """Returns the number that a loop adds to its counter per iteration, or None if unknown."""
    counter = origin(condition, test.operands[0])
    body = module.get(attribute(loop, "body"))
    if counter.opcode != "get-tuple-element" or not body:
        return None
    step = origin(body, body.ops[body.root].operands[int(attribute(counter, "index"))])
    if step.opcode != "add":
        return None
    steps = (_number(body, name, body, None) for name in step.operands)
    return next((number for number in steps if number is not None), None)


def origin(computation: Computation, name: str, views: Collection[str] = VIEWS) -> Op:
    """Returns the instruction that computes a value, skipping views and copies."""
    op = computation.ops[name]
    while op.opcode in views:
        op = computation.ops[op.operands[0]]
    return op
