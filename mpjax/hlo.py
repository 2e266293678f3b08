"""Reads optimized HLO: which matmuls run, in which dtypes, and how many bytes move.

XLA's own cost analysis counts the body of a loop once and a call of cuBLAS or cuDNN as -1; this
counts a loop's body as often as it runs, and such calls as the matmuls that they are.
"""

import collections
import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator

import numpy as np

# "f32[8,128]{1,0:T(8,128)S(1)}": a dtype, dimensions, a layout that may name a memory space.
SHAPE = re.compile(r"(\w+)\[([\d,<=]*)\](\{[^}]*\})?")
SPACE = re.compile(r"S\((\d+)\)")
HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
OP_NAME = re.compile(r'op_name="([^"]*)"')
CUSTOM = re.compile(r'custom_call_target="([^"]*)"')
ALGORITHM = re.compile(r"\balgorithm=dot_([a-z0-9]+)_\w+?(?:_x(\d))?[, ]")
PRECISION = re.compile(r"\boperand_precision=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

# Copies of nothing: what they name lies where their operand lies.
VIEWS = {"bitcast", "copy", "convert", "reshape", "transpose"}
SLICES = {"dynamic-slice", "slice", "gather"}
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
    *("partition-id", "replica-id", "opt-barrier", "domain", "add-dependency"),
}
# One FLOP for every element of the result.
ARITHMETIC = {
    *("add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs", "power"),
    *("exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "sqrt"),
    *("rsqrt", "cbrt", "sine", "cosine", "tan", "erf", "atan2", "remainder", "sign", "floor"),
    *("ceil", "compare", "select", "clamp", "round-nearest-even", "round-nearest-afz"),
}
LIBRARIES = ("__cublas", "__cudnn$conv")
# Custom calls that only sort, place or rename.
NO_FLOPS = (
    *("ConcatBitcast", "AllocateBuffer", "AssumeGather", "GatherScatter", "X64", "__cub$"),
    *("Sharding", "__gpu$TopK", "TopK", "annotate_device_placement", "Pin", "Unpin"),
)
DILATIONS = ("stride", "lhs_dilate", "rhs_dilate")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array: a dtype in HLO's spelling, dimensions, and 0 for the device's main memory."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Its bytes in main memory: none of what a TPU keeps in its vector memory."""
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


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul or convolution of an HLO module.

    Attributes:
        name: Of the JAX operation that it comes from.
        operands: The wider dtype of its two operands, in HLO's spelling.
        precision: "default", "high" or "highest".
        algorithm: The dtype that an explicit algorithm multiplies in, or "".
        passes: How many such products an explicit algorithm makes one of.
        library: Whether cuBLAS or cuDNN runs it, not a kernel that XLA wrote.
        times: How often it runs.
        flops: Of one run, of one pass.
    """

    name: str
    operands: str
    precision: str
    algorithm: str
    passes: int
    library: bool
    times: int
    flops: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """What one run of an HLO module costs.

    Attributes:
        matmuls: Every matmul and convolution.
        other_flops: FLOPs of everything else: one for every element of an arithmetic result.
        bytes: Bytes to and from main memory, as if nothing stayed in a cache between two kernels.
        constant_bytes: Bytes of the arrays that are part of the program.
        unknown_loops: Loops whose number of turns the HLO does not tell; they count once.
        unknown_calls: Custom calls whose FLOPs nobody knows, by name.
    """

    matmuls: tuple[Matmul, ...]
    other_flops: float
    bytes: float
    constant_bytes: float
    unknown_loops: int
    unknown_calls: tuple[str, ...]


def bits(dtype: str) -> int:
    """Returns how many bits a value of a dtype in HLO's spelling takes."""
    if dtype in ("token", "opaque"):
        return 0
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


def costs(text: str) -> Costs:
    """Returns what one run of an optimized HLO module costs."""
    module, entry = parse(text)
    matmuls: list[Matmul] = []
    flops = traffic = constants = 0.0
    loops, calls = 0, dict[str, None]()
    for computation, op, times, fused, scope in _runs(module, entry):
        found = _matmul(computation, op, times, scope)
        if found:
            matmuls.append(found)
        elif op.opcode == "custom-call" and not _target(op).startswith(NO_FLOPS):
            calls[_target(op)] = None
        elif op.opcode in ARITHMETIC:
            flops += times * op.shapes[0].size
        elif op.opcode in ("reduce", "reduce-window"):
            flops += times * computation.ops[op.operands[0]].shapes[0].size
        elif op.opcode == "while":
            loops += trip_count(module, computation, op) is None
        elif op.opcode == "constant" and not fused:
            constants += op.bytes
        if not fused:
            traffic += times * _traffic(module, computation, op)
    return Costs(tuple(matmuls), flops, traffic, constants, loops, tuple(calls))


def asked(text: str) -> dict[str, collections.Counter[str]]:
    """Returns the dtypes of a module's matmuls, counted, by the names of their JAX operations."""
    module, entry = parse(text)
    dtypes: dict[str, collections.Counter[str]] = {}
    for computation, op, times, _, scope in _runs(module, entry):
        found = _matmul(computation, op, times, scope)
        if found:
            dtypes.setdefault(found.name, collections.Counter())[found.operands] += 1
    return dtypes


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
            module[name] = Computation(ops, root)
        elif name and (match := LINE.match(line)):
            op = _op(match[2], match[3])
            ops[op.name] = op
            root = op.name if match[1] else root
    if not entry:
        raise ValueError("text is not an HLO module: it has no ENTRY computation.")
    return module, entry


def _op(name: str, text: str) -> Op:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    kind, rest = text[:end], text[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    inside = rest[start + 1 : end - 1]
    operands = tuple(NAME.findall(inside)) if rest[:start] != "constant" else ()
    return Op(name, rest[:start], _shapes(kind), operands, inside, rest[end:].lstrip(", "))


def _closing(text: str, start: int) -> int:
    """Returns the place after the parenthesis that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place + 1
    return len(text)


@functools.lru_cache(maxsize=4096)
def _shapes(text: str) -> tuple[Shape, ...]:
    found = []
    for dtype, dims, layout in SHAPE.findall(text):
        space = SPACE.search(layout)
        sizes = tuple(int(d.strip("<=")) for d in dims.split(",") if d)
        found.append(Shape(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


def _target(op: Op) -> str:
    found = CUSTOM.search(op.attributes)
    return found[1] if found else ""


# ---- what runs, and how often -------------------------------------------------------------------


def _runs(
    module: dict[str, Computation],
    name: str,
    times: int = 1,
    fused: bool = False,
    scope: str = "",
) -> Iterator[tuple[Computation, Op, int, bool, str]]:
    """Yields all that runs: computation, instruction, how often, whether inside a kernel, scope.

    The scope is the name of the JAX operation that calls; names inside may be relative to it.
    """
    computation = module[name]
    for op in computation.ops.values():
        yield computation, op, times, fused, scope
        if op.opcode == "while":
            body = re.search(r"\bbody=%?([\w.\-]+)", op.attributes)
            trips = trip_count(module, computation, op)
            if body:
                turns = times * (1 if trips is None else trips)
                yield from _runs(module, body[1], turns, fused, scope)
        elif op.opcode in ("fusion", "call", "conditional", "async-start"):
            inner = _name(op, scope) if op.opcode == "call" else scope
            for called in _called(op):
                yield from _runs(module, called, times, fused or op.opcode == "fusion", inner)


def _name(op: Op, scope: str) -> str:
    """Returns the name of the JAX operation that an instruction comes from."""
    found = OP_NAME.search(op.attributes)
    if not found:
        return op.name if op.opcode != "call" else scope
    outermost = scope.split("/")[0]
    relative = outermost and not found[1].startswith(outermost)
    return f"{scope}/{found[1]}" if relative else found[1]


def _called(op: Op) -> list[str]:
    names = CALLED.findall(op.attributes)
    for group in BRANCHES.findall(op.attributes):
        names += [name.strip().lstrip("%") for name in group.split(",")]
    return names


def trip_count(module: dict[str, Computation], outside: Computation, loop: Op) -> int | None:
    """Returns how often a loop's body runs: as XLA wrote, or as its condition says; else None."""
    if known := TRIPS.search(loop.attributes):
        return int(known[1])
    found = re.search(r"\bcondition=%?([\w.\-]+)", loop.attributes)
    if not found or found[1] not in module:
        return None
    condition = module[found[1]]
    test = condition.ops[condition.root]
    if test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    carried = outside.ops.get(loop.operands[0])
    start, stop = (_number(condition, name, outside, carried) for name in test.operands)
    if start is None or stop is None or not _counts_by_one(module, condition, loop, test):
        return None
    return max(0, stop - start)


def _number(inside: Computation, name: str, outside: Computation, carried: Op | None) -> int | None:
    """Returns the integer that a value of a loop's condition starts as, if it can be read."""
    op = _source(inside, name)
    if op.opcode == "get-tuple-element" and carried is not None and carried.opcode == "tuple":
        index = _index(op)
        op = _source(outside, carried.operands[index])
    if op.opcode != "constant" or not re.fullmatch(r"-?\d+", op.inside):
        return None
    return int(op.inside)


def _counts_by_one(
    module: dict[str, Computation], condition: Computation, loop: Op, test: Op
) -> bool:
    counter = _source(condition, test.operands[0])
    found = re.search(r"\bbody=%?([\w.\-]+)", loop.attributes)
    if counter.opcode != "get-tuple-element" or not found:
        return False
    body = module[found[1]]
    step = _source(body, body.ops[body.root].operands[_index(counter)])
    values = [_source(body, name) for name in step.operands]
    return step.opcode == "add" and any(v.opcode == "constant" and v.inside == "1" for v in values)


def _index(op: Op) -> int:
    found = re.search(r"\bindex=(\d+)", op.attributes)
    return int(found[1]) if found else 0


def _source(computation: Computation, name: str) -> Op:
    """Returns the instruction that a value comes from, past those that only pass it on."""
    op = computation.ops[name]
    while op.opcode in VIEWS:
        op = computation.ops[op.operands[0]]
    return op


# ---- matmuls ------------------------------------------------------------------------------------


def _matmul(computation: Computation, op: Op, times: int, scope: str) -> Matmul | None:
    library = op.opcode == "custom-call" and _target(op).startswith(LIBRARIES)
    if op.opcode not in ("dot", "convolution") and not library:
        return None
    left, right = (computation.ops[name].shapes[0] for name in op.operands[:2])
    algorithm = ALGORITHM.search(op.attributes + " ")
    precision = PRECISION.search(op.attributes.replace('"', "").lower())
    if library:
        precision = precision or re.search(
            r"operand_precision:\[([^\]]*)\]", op.attributes.replace('"', "").lower()
        )
    levels = precision[1].split(",") if precision else ["default"]
    return Matmul(
        _name(op, scope),
        max(left.dtype, right.dtype, key=bits),
        next(p for p in ("highest", "high", "default") if p in levels or p == "default"),
        algorithm[1] if algorithm else "",
        int(algorithm[2] or 1) if algorithm else 1,
        library,
        times,
        _flops(op, left, right),
    )


def _flops(op: Op, left: Shape, right: Shape) -> float:
    result = op.shapes[0]
    if op.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.attributes)
        axes = [int(d) for d in contracted[1].split(",") if d] if contracted else []
        return 2.0 * result.size * math.prod(left.dims[axis] for axis in axes)
    target = _target(op)
    if target.startswith("__cublas"):
        axes = _gemm_contraction(op)
        return 2.0 * result.size * math.prod(left.dims[axis] for axis in axes)
    # cuDNN's gradients are described by the forward convolution's window and dimension labels.
    roles = (left, right, result)
    if target == "__cudnn$convBackwardInput":
        roles = (result, right, left)
    elif target == "__cudnn$convBackwardFilter":
        roles = (left, result, right)
    return _convolution_flops(op.attributes, *(shape.dims for shape in roles))


def _gemm_contraction(op: Op) -> list[int]:
    found = re.search(r'"dot_dimension_numbers":(\{[^}]*\})', op.attributes)
    numbers = json.loads(found[1]) if found else {}
    return [int(axis) for axis in numbers.get("lhs_contracting_dimensions", [])]


def _convolution_flops(
    attributes: str, inputs: tuple[int, ...], kernel: tuple[int, ...], outputs: tuple[int, ...]
) -> float:
    """As XLA counts them: a multiply and an add wherever the window meets a true input."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if not labels:
        return 0.0
    groups = re.search(r"\bfeature_group_count=(\d+)", attributes)
    batch_groups = re.search(r"\bbatch_group_count=(\d+)", attributes)
    window = re.search(r"window=\{([^}]*)\}", attributes)
    parts = dict(part.split("=") for part in window[1].split()) if window else {}
    total = 2.0 * inputs[labels[1].index("b")] * inputs[labels[1].index("f")]
    total *= kernel[labels[2].index("o")]
    total /= (int(groups[1]) if groups else 1) * (int(batch_groups[1]) if batch_groups else 1)
    for axis in range(len(parts.get("size", "").split("x")) if parts else 0):
        label = str(axis)
        total *= _meetings(
            inputs[labels[1].index(label)],
            kernel[labels[2].index(label)],
            outputs[labels[3].index(label)],
            *(int(parts[k].split("x")[axis]) if k in parts else 1 for k in DILATIONS),
            int(parts["pad"].split("x")[axis].split("_")[0]) if "pad" in parts else 0,
        )
    return total


@functools.lru_cache(maxsize=4096)
def _meetings(
    size: int, kernel: int, outputs: int, stride: int, spread: int, dilation: int, pad: int
) -> int:
    """Counts the pairs of window and kernel positions along an axis that meet a true input."""
    at = np.arange(outputs)[:, None] * stride - pad + np.arange(kernel)[None, :] * dilation
    return int(((at >= 0) & (at < (size - 1) * spread + 1) & (at % spread == 0)).sum())


# ---- bytes --------------------------------------------------------------------------------------


def _traffic(module: dict[str, Computation], computation: Computation, op: Op) -> float:
    """Returns the bytes of main memory that one instruction reads and writes."""
    code = op.opcode
    if code in FREE or code in ("while", "call", "conditional", "async-start"):
        return 0
    if code.endswith(("-done", "-update")):
        return 0
    operands = [computation.ops[name] for name in dict.fromkeys(op.operands)]
    if code == "fusion":
        kernel = module[_called(op)[0]]
        return _reads(module, kernel, operands) + _writes(kernel, kernel.root)
    if code in SLICES:
        return 2 * op.bytes + sum(o.bytes for o in operands[1:] if code == "gather")
    if code == "dynamic-update-slice":
        return 2 * computation.ops[op.operands[1]].bytes
    if code == "scatter":
        return sum(o.bytes for o in operands[1:]) + 2 * operands[-1].bytes
    if code == "copy-start":
        return sum(shape.bytes for shape in op.shapes[:2])
    if code == "slice-start":
        piece = op.shapes[-2] if len(op.shapes) > 2 else op.shapes[-1]
        source = dataclasses.replace(piece, space=op.shapes[0].space)
        return piece.bytes + source.bytes
    written = op.bytes
    if code == "custom-call" and _target(op).startswith("__cu") and len(op.shapes) > 1:
        written -= op.shapes[-1].bytes  # scratch
    return written + sum(o.bytes for o in operands)


def _reads(module: dict[str, Computation], kernel: Computation, operands: list[Op]) -> float:
    """Returns the bytes that a kernel reads: of an operand that it only slices, the slices."""
    parameters = [op for op in kernel.ops.values() if op.opcode == "parameter"]
    users = _users(kernel)
    total = 0.0
    for parameter in parameters:
        if parameter.bytes:
            total += min(parameter.bytes, _read(module, kernel, users, parameter.name))
    return total


def _read(
    module: dict[str, Computation], kernel: Computation, users: dict[str, list[Op]], name: str
) -> float:
    total = 0.0
    whole = kernel.ops[name].bytes
    for user in users.get(name, ()):
        if user.opcode in SLICES and user.operands[0] == name:
            total += math.prod(user.shapes[0].dims) * bits(kernel.ops[name].shapes[0].dtype) / 8
        elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
            total += 0  # written in place
        elif user.opcode in VIEWS and user.name != kernel.root:
            total += _read(module, kernel, users, user.name)
        elif user.opcode == "fusion":
            inner = module[_called(user)[0]]
            place = user.operands.index(name)
            named = [
                o for o in inner.ops.values() if o.opcode == "parameter" and o.inside == str(place)
            ]
            total += _read(module, inner, _users(inner), named[0].name) if named else whole
        else:
            return whole
    return total


def _users(computation: Computation) -> dict[str, list[Op]]:
    users: dict[str, list[Op]] = {}
    for op in computation.ops.values():
        for name in dict.fromkeys(op.operands):
            users.setdefault(name, []).append(op)
    return users


def _writes(kernel: Computation, name: str) -> float:
    """Returns the bytes that a kernel writes: of an array that it updates in place, the update."""
    op = kernel.ops[name]
    if op.opcode == "tuple":
        return sum(_writes(kernel, element) for element in op.operands)
    source = op
    while source.opcode in ("bitcast", "convert"):
        source = kernel.ops[source.operands[0]]
    if not op.bytes:
        return 0
    if source.opcode == "dynamic-update-slice":
        update = kernel.ops[source.operands[1]].shapes[0]
        return update.size * bits(op.shapes[0].dtype) / 8
    if source.opcode == "scatter":
        return 2 * kernel.ops[source.operands[-1]].bytes
    return op.bytes
