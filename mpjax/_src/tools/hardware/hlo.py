"""Parses optimized HLO: its instructions, and how often each of them runs."""

import collections
import dataclasses
import functools
import math
import re
import weakref
from collections.abc import Collection, Iterator

from mpjax._src.core.base.lines import is_library

# "f32[8,128]{1,0:T(8,128)S(1)}": a dtype, dimensions, a layout that may name a memory space.
SHAPE = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^}]*\})?")
SPACE = re.compile(r"S\((\d+)\)")
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(r"\b(?:calls|to_apply|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)")
BRACKET = re.compile(r"[()]")
OP_NAME = re.compile(r'op_name="([^"]*)"')
# Parts that JAX adds to names: transformations around scopes, and nested programs.
WRAPPED = re.compile(r"^(?:jvp|transpose|vmap|remat|checkpoint|custom_\w+)\((.*)\)$")
ADDED = re.compile(
    r"^(?:p?jit\(.*\)|jit|while|body|cond|body_jaxpr|cond_jaxpr|branch_\d+_fun|closed_call|"
    r"rematted_computation|checkpoint|remat2?|custom_\w+_call\w*|core_call|shmap_body|"
    r"mpjax\.autocast|)$"
)
HOST = 5  # the memory space of arrays in the host's memory
CUSTOM = re.compile(r'custom_call_target="([^"]*)"')
# Custom calls that only place or rename arrays.
PLACES = (
    *("ConcatBitcast", "AllocateBuffer", "AssumeGather", "GatherScatter", "X64"),
    *("Sharding", "annotate_device_placement", "Pin", "Unpin", "AsyncCollective"),
)
TABLES = re.compile(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", re.MULTILINE)
ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")
PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
# Instructions that compute nothing: values from elsewhere, and names of the same value.
SOURCES = {"parameter", "constant", "after-all", "partition-id", "replica-id"}
ALIASES = {"bitcast", "opt-barrier", "domain", "add-dependency"}
UPDATES = {"dynamic-update-slice", "scatter"}
# Instructions whose result counts as the same value as their operand.
VIEWS = {"bitcast", "copy", "convert", "reshape", "transpose"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of an array: dtype (as HLO spells it), dimensions, memory space (0 for main)."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def trainable(self) -> bool:
        """Whether it may be that of a parameter: a floating array, and not a single number."""
        return self.size > 1 and "f" in self.dtype

    @property
    def bytes(self) -> float:
        """Its bytes in main memory; 0 for an array in a TPU's vector memory."""
        return 0 if self.space else self.size * bits(self.dtype) / 8


@dataclasses.dataclass(eq=False)
class Op:
    """One instruction; a tuple result has several shapes."""

    room: "Computation" = dataclasses.field(repr=False)  # that it stands in
    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple["Op", ...] = dataclasses.field(repr=False)
    inside: str  # the text in the brackets of its operands
    attributes: str
    # What it calls: for a loop its body, and then its condition if the module has it.
    called: tuple["Computation", ...] = dataclasses.field(default=(), repr=False)

    @property
    def bytes(self) -> float:
        return sum(shape.bytes for shape in self.shapes)

    @property
    def place(self) -> tuple[str, str]:
        """The name of its computation, and its own."""
        return self.room.name, self.name

    @property
    def kind(self) -> str:
        """What it does, also where it only starts that."""
        return self.opcode.removesuffix("-start")

    @property
    def index(self) -> int:
        """The number of the part of a tuple that a get-tuple-element returns."""
        return int(attribute(self, "index"))

    @property
    def target(self) -> str:
        """The name of what a custom call runs, or ""."""
        return found(CUSTOM, self.attributes)


@dataclasses.dataclass(eq=False)
class Computation:
    name: str
    ops: dict[str, Op] = dataclasses.field(default_factory=dict)
    root: Op = dataclasses.field(init=False)

    @property
    def results(self) -> tuple[Op, ...]:
        """What it returns; a tuple counts as its parts."""
        return self.root.operands if self.root.opcode == "tuple" else (self.root,)


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    text: str = dataclasses.field(repr=False)
    computations: dict[str, Computation]
    entry: Computation

    def ops(self) -> list[Op]:
        """Returns the instructions of all computations."""
        return [op for room in self.computations.values() for op in room.ops.values()]

    @property
    def header(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def scheduled(self) -> bool:
        """Whether it contains the order in which its instructions run."""
        return "is_scheduled=true" in self.header

    @property
    def devices(self) -> int:
        """The number of devices that run it together."""
        return int(found(PARTITIONS, self.header) or 1)

    @property
    def shared(self) -> set[int]:
        """The numbers of its results that are in the memory of arguments."""
        aliases = self.header.partition("input_output_alias=")[2].split("layout")[0]
        return {int(result or 0) for result, *_ in ALIASED.findall(aliases)}

    @functools.cached_property
    def _tables(self) -> dict[str, dict[str, str]]:
        """The rows of each table above the computations, by their numbers."""
        tables = collections.defaultdict[str, dict[str, str]](dict)
        for name, rows in TABLES.findall(self.text):
            tables[name] = dict(row.split(" ", 1) for row in rows.splitlines())
        return tables

    def line_of(self, op: Op) -> str:
        """Returns the user's line of an instruction, as "file:line", or ""."""
        lines = list(self._lines(attribute(op, "stack_frame_id")))
        own = (line for line in lines if not is_library(line))
        return next(own, lines[0] if lines else "")

    def _lines(self, frame: str) -> Iterator[str]:
        """Yields the lines of a frame and its callers, as long as the file is known."""
        row = self._tables["StackFrames"].get(frame, "")
        place = self._tables["FileLocations"].get(field(row, "file_location_id"), "")
        file = self._tables["FileNames"].get(field(place, "file_name_id"), "").strip('"')
        if file:
            yield f"{file}:{field(place, 'line')}"
            # The outermost frame names itself as its caller.
            caller = field(row, "parent_frame_id")
            yield from self._lines(caller) if caller != frame else ()


def bits(dtype: str) -> int:
    """Returns the number of bits of a dtype, spelled as in HLO."""
    if dtype in ("token", "opaque"):
        return 0
    return int(found(r"(\d+)", dtype) or 8)


def found(pattern: str | re.Pattern[str], text: str) -> str:
    """Returns what the group of a pattern matches in a text, or ""."""
    match = re.search(pattern, text)
    return match[1] if match else ""


# ---- from text ----------------------------------------------------------------------------------


_GRAPHS: weakref.WeakValueDictionary[str, Module] = weakref.WeakValueDictionary()


def parse(text: str) -> Module:
    """Returns an HLO module as a graph of instructions: the same one as long as it is used."""
    module = _GRAPHS.get(text) or parsed(text)
    _GRAPHS[text] = module
    return module


def parsed(text: str) -> Module:
    """Returns a graph that is the caller's own, and that may be changed."""
    rooms: dict[str, Computation] = {}
    room = entry = None
    for line in text.splitlines():
        if header := HEADER.match(line):
            room = rooms[header[2]] = Computation(header[2])
            entry = room if header[1] else entry
        elif room and (match := LINE.match(line)):
            op = room.ops[match[2]] = _op(room, match[2], match[3])
            if match[1]:
                room.root = op
    if not entry:
        raise ValueError("text is not an HLO module: it has no ENTRY computation.")
    module = Module(text, rooms, entry)
    for op in module.ops():
        op.called = tuple(rooms[name] for name in _called(op) if name in rooms)
    return module


def _op(room: Computation, name: str, text: str) -> Op:
    # The type of a tuple has brackets, and spaces inside of them.
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    kind, rest = text[:end], text[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    code, inside = rest[:start], rest[start + 1 : end - 1]
    # The brackets of a constant contain its value, and no operands.
    names = NAME.findall(inside) if code != "constant" else ()
    operands, shapes = tuple(room.ops[each] for each in names), _shapes(kind)
    # A kernel that runs next to others, as JAX 0.11 has them, counts as one that ends at once. One
    # that writes to the host or reads from there is a transfer instead.
    if code == "fusion-start" and all(shape.space != HOST for shape in shapes):
        code, shapes = "fusion", shapes[len(operands) : -1]  # between the operands and a handle
    elif code == "fusion-done" and operands[0].opcode == "fusion":
        code = "opt-barrier"
    return Op(room, name, code, shapes, operands, inside, rest[end:].lstrip(", "))


def _called(op: Op) -> list[str]:
    if op.opcode == "while":
        return [attribute(op, "body"), attribute(op, "condition")]
    return re.findall(r"[\w.\-]+", " ".join(CALLED.findall(op.attributes)))


def _closing(text: str, start: int) -> int:
    """Returns the position after the parenthesis that closes the one at ``start``."""
    depth = 0
    for bracket in BRACKET.finditer(text, start):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.end()
    return len(text)


@functools.lru_cache(maxsize=4096)
def _shapes(text: str) -> tuple[Shape, ...]:
    shapes = []
    for dtype, dims, layout in SHAPE.findall(text):
        # A dynamic dimension is written as its bound, "<=8".
        sizes = tuple(int(d.strip("<=")) for d in dims.split(",") if d)
        shapes.append(Shape(dtype, sizes, int(found(SPACE, layout) or 0)))
    return tuple(shapes)


def parameters(computation: Computation) -> list[Op]:
    """Returns the parameters of a computation, in order."""
    ops = (op for op in computation.ops.values() if op.opcode == "parameter")
    return sorted(ops, key=lambda op: int(op.inside))


def users_of(computation: Computation) -> dict[Op, list[Op]]:
    """Returns the instructions that read each value of a computation."""
    users: dict[Op, list[Op]] = collections.defaultdict(list)
    for op in computation.ops.values():
        for operand in dict.fromkeys(op.operands):
            users[operand].append(op)
    return users


def attribute(op: Op, name: str) -> str:
    """Returns an attribute of an instruction that is a name or a number, or ""."""
    return field(op.attributes, name)


def field(text: str, name: str) -> str:
    return found(rf"\b{name}=%?([\w.\-]+)", text)


def origin(op: Op, views: Collection[str] = VIEWS) -> Op:
    """Returns the instruction that computes a value, skipping views and copies."""
    while op.opcode in views:
        op = op.operands[0]
    return op


def placed_in(kernel: Computation, through: Collection[str]) -> Iterator[tuple[int, Op, Op]]:
    """Yields where a fused kernel changes a part of an array that it is given, in place.

    That is the number of the result, the update, and the parameter. ``through`` may stand between.
    """
    for index, result in enumerate(kernel.results):
        update = origin(result, through)
        if update.opcode in UPDATES:
            target = origin(update.operands[0], through)
            if target.opcode == "parameter":  # what the kernel makes itself is written as a whole
                yield index, update, target


# ---- names ---------------------------------------------------------------------------------------


def jax_name(op: Op, scope: str) -> str:
    """Returns the name of the JAX operation that an instruction comes from."""
    match = OP_NAME.search(op.attributes)
    if not match:
        return op.name if op.opcode != "call" else scope
    outermost = scope.split("/")[0]
    relative = outermost and not match[1].startswith(outermost)
    return f"{scope}/{match[1]}" if relative else match[1]


def op_name(op: Op) -> str:
    """Returns the name that JAX gave an instruction, or the first of several."""
    return found(OP_NAME, op.attributes).split(";")[0]


def is_backward(name: str) -> bool:
    """Returns whether an instruction's name says that it belongs to a backward pass."""
    return "transpose(" in name


def scope_of(name: str) -> str:
    """Returns the scopes in the name of an instruction, "jit(f)/jvp(Net)/Dense_0/dot_general"."""
    parts = []
    for part in name.split("/")[:-1]:
        while wrapped := WRAPPED.match(part):
            part = wrapped[1]
        if not ADDED.match(part):
            parts.append(part)
    return "/".join(parts)


# ---- what runs, and how often -------------------------------------------------------------------


def runs(
    computation: Computation, times: int = 1, fused: bool = False, scope: str = ""
) -> Iterator[tuple[Op, int, bool, str]]:
    """Yields (instruction, number of runs, whether in a fused kernel, scope).

    The scope is the name of the calling JAX operation. Names inside may be relative to it.
    """
    for op in computation.ops.values():
        yield op, times, fused, scope
        if op.opcode == "while":
            trips = trip_count(op)
            # The condition runs once more than the body: it ends the loop.
            counts = (1, 1) if trips is None else (trips, trips + 1)
            for inside, count in zip(op.called, counts, strict=False):
                yield from runs(inside, times * count, fused, scope)
        elif op.opcode in ("fusion", "call", "conditional", "async-start"):
            inner = jax_name(op, scope) if op.opcode == "call" else scope
            for inside in op.called:
                yield from runs(inside, times, fused or op.opcode == "fusion", inner)


def trip_count(loop: Op) -> int | None:
    """Returns how often a loop's body runs, by XLA's note or the condition; None if unknown."""
    if note := TRIPS.search(loop.attributes):
        return int(note[1])
    body, *conditions = loop.called
    # JAX's counted loops count up, as long as the counter is less than a limit.
    test = conditions[0].root if conditions else None
    if not test or test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    start, stop = (_number(operand, loop.operands[0]) for operand in test.operands)
    step = _step(body, test)
    if start is None or stop is None or step is None or step < 1:
        return None
    return max(0, math.ceil((stop - start) / step))


def _number(op: Op, carried: Op | None = None) -> int | None:
    """Returns an integer, which a loop may carry, or None if it is unknown."""
    op = origin(op)
    if op.opcode == "get-tuple-element" and carried and carried.opcode == "tuple":
        op = origin(carried.operands[op.index])
    known = op.opcode == "constant" and re.fullmatch(r"-?\d+", op.inside)
    return int(op.inside) if known else None


def _step(body: Computation, test: Op) -> int | None:
    """Returns the number that a loop adds to its counter per iteration, or None if unknown."""
    counter = origin(test.operands[0])
    if counter.opcode != "get-tuple-element":
        return None
    step = origin(body.root.operands[counter.index])
    numbers = map(_number, step.operands if step.opcode == "add" else ())
    return next((number for number in numbers if number is not None), None)
