"""The cost of a program, from its optimized HLO: matmuls and their dtypes, FLOPs, bytes.

XLA's own cost analysis counts the body of a loop once and a call of cuBLAS or cuDNN as -1 FLOP.
This module counts every iteration of a loop, and counts library calls as matmuls.
"""

import collections
import dataclasses
import functools
import json
import math
import re

import numpy as np

from mpjax._src.hardware.hlo import (
    HOST,
    VIEWS,
    Computation,
    Op,
    Shape,
    bits,
    called_by,
    custom_target,
    jax_name,
    origin,
    parameters,
    parse,
    runs,
    trip_count,
    users_of,
)

ALGORITHM = re.compile(r"\balgorithm=dot_([a-z0-9]+)_\w+?(?:_x(\d))?[, ]")
PRECISION = re.compile(r"\boperand_precision=\{([^}]*)\}")
# In the configuration of cuDNN's attention: the shape of the scores, and its own mask.
SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^\[]*"dimensions":\s*\[([^\]]*)\]')
CAUSAL = re.compile(r'"mask_type":\s*"(PADDING_)?CAUSAL"')
SLICES = {"dynamic-slice", "slice", "gather"}
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota"),
    *("partition-id", "replica-id", "opt-barrier", "domain", "add-dependency"),
}
# Instructions that count as one FLOP per element of the result.
ARITHMETIC = {
    *("add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs", "power"),
    *("exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "sqrt"),
    *("rsqrt", "cbrt", "sine", "cosine", "tan", "erf", "atan2", "remainder", "sign", "floor"),
    *("ceil", "compare", "select", "clamp", "round-nearest-even", "round-nearest-afz"),
}
LIBRARIES = ("__cublas", "__cudnn$conv", "__cudnn$fmha")
# Custom calls that only place or rename arrays; below also those that only sort.
PLACES = (
    *("ConcatBitcast", "AllocateBuffer", "AssumeGather", "GatherScatter", "X64"),
    *("Sharding", "annotate_device_placement", "Pin", "Unpin", "AsyncCollective"),
)
NO_FLOPS = (*PLACES, "__cub$", "__gpu$TopK", "TopK")
DILATIONS = ("stride", "lhs_dilate", "rhs_dilate")


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul or convolution of an HLO module."""

    name: str  # the name of the JAX operation that it comes from
    operands: str  # the wider dtype of its two operands, spelled as in HLO
    precision: str  # "default", "high" or "highest"
    algorithm: str  # the dtype in which an explicit algorithm multiplies, or ""
    passes: int  # the number of products in which an explicit algorithm computes one
    library: bool  # whether cuBLAS or cuDNN runs it instead of a kernel that XLA wrote
    times: int  # how often it runs
    flops: float  # of one run, of one pass


@dataclasses.dataclass(frozen=True)
class Costs:
    """The cost of one run of an HLO module."""

    matmuls: tuple[Matmul, ...]  # every matmul and convolution
    other_flops: float  # the FLOPs of everything else: one per element of an arithmetic result
    # The bytes read from and written to main memory, assuming that no cache keeps arrays between
    # two kernels.
    bytes: float
    host_bytes: tuple[float, float]  # the bytes sent to the host's memory, and those read from it
    constant_bytes: float  # the bytes of the arrays that are part of the program
    unknown_loops: int  # the number of loops with an unknown number of iterations; each counts once
    unknown_calls: tuple[str, ...]  # the names of custom calls whose FLOPs are not known


def costs(text: str) -> Costs:
    """Returns the cost of one run of an optimized HLO module."""
    module, entry = parse(text)
    matmuls: list[Matmul] = []
    flops = traffic = constants = sent = received = 0.0
    loops, calls = 0, dict[str, None]()
    for computation, op, times, fused, scope in runs(module, entry):
        product = matmul(computation, op, times, scope)
        if product:
            matmuls.append(product)
        elif op.opcode == "custom-call" and not custom_target(op).startswith(NO_FLOPS):
            calls[custom_target(op)] = None
        elif op.opcode in ARITHMETIC:
            flops += times * op.shapes[0].size
        elif op.opcode in ("reduce", "reduce-window"):
            flops += times * computation.ops[op.operands[0]].shapes[0].size
        elif op.opcode == "while":
            loops += trip_count(module, computation, op) is None
        elif op.opcode == "constant" and not fused:
            constants += op.bytes
        if not fused:
            traffic += times * bytes_moved(module, computation, op)
            sent += times * host_bytes(op, to_host=True)
            received += times * host_bytes(op, to_host=False)
    return Costs(tuple(matmuls), flops, traffic, (sent, received), constants, loops, tuple(calls))


def asked(text: str) -> dict[str, collections.Counter[str]]:
    """Counts the operand dtypes of a module's matmuls, by the names of their JAX operations."""
    module, entry = parse(text)
    dtypes: dict[str, collections.Counter[str]] = {}
    for computation, op, times, _, scope in runs(module, entry):
        product = matmul(computation, op, times, scope)
        if product:
            dtypes.setdefault(product.name, collections.Counter())[product.operands] += 1
    return dtypes


# ---- matmuls ------------------------------------------------------------------------------------


def _precision(op: Op, library: bool) -> str:
    """Returns the highest precision that an operand asks for."""
    attributes = op.attributes.replace('"', "").lower()
    match = PRECISION.search(attributes)
    if library:  # its configuration is JSON
        match = match or re.search(r"operand_precision:\[([^\]]*)\]", attributes)
    levels = match[1].split(",") if match else []
    return next((level for level in ("highest", "high") if level in levels), "default")


def matmul(computation: Computation, op: Op, times: int, scope: str) -> Matmul | None:
    library = op.opcode == "custom-call" and custom_target(op).startswith(LIBRARIES)
    if op.opcode not in ("dot", "convolution") and not library:
        return None
    left, right = (computation.ops[name].shapes[0] for name in op.operands[:2])
    algorithm = ALGORITHM.search(op.attributes + " ")  # the pattern ends with a separator
    return Matmul(
        jax_name(op, scope),
        max(left.dtype, right.dtype, key=bits),
        _precision(op, library),
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
    target = custom_target(op)
    if target.startswith("__cublas"):
        axes = _gemm_contraction(op)
        return 2.0 * result.size * math.prod(left.dims[axis] for axis in axes)
    if target.startswith("__cudnn$fmha"):
        return _attention_flops(op, left.dims[-1])
    # cuDNN's gradients are described by the forward convolution's window and dimension labels.
    roles = (left, right, result)
    if target == "__cudnn$convBackwardInput":
        roles = (result, right, left)
    elif target == "__cudnn$convBackwardFilter":
        roles = (left, result, right)
    return _convolution_flops(op.attributes, *(shape.dims for shape in roles))


def _attention_flops(op: Op, width: int) -> float:
    """Counts the entries of the scores that a mask leaves, in 2 products, or 5 of the gradients."""
    scores = SCORES.search(op.attributes)
    *heads, queries, keys = map(int, re.findall(r"\d+", scores[1])) if scores else (0, 0)
    entries = queries * keys
    if CAUSAL.search(op.attributes):
        entries = sum(min(query + 1, keys) for query in range(queries))
    return 2.0 * (5 if "Backward" in custom_target(op) else 2) * width * math.prod(heads) * entries


def _gemm_contraction(op: Op) -> list[int]:
    match = re.search(r'"dot_dimension_numbers":(\{[^}]*\})', op.attributes)
    numbers = json.loads(match[1]) if match else {}
    return [int(axis) for axis in numbers.get("lhs_contracting_dimensions", [])]


def _convolution_flops(
    attributes: str, inputs: tuple[int, ...], kernel: tuple[int, ...], outputs: tuple[int, ...]
) -> float:
    """Counts as XLA does: a multiply and an add wherever the window meets an input entry."""
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
    """Counts the pairs of window and kernel positions along an axis that meet an input entry."""
    at = np.arange(outputs)[:, None] * stride - pad + np.arange(kernel)[None, :] * dilation
    return int(((at >= 0) & (at < (size - 1) * spread + 1) & (at % spread == 0)).sum())


# ---- bytes --------------------------------------------------------------------------------------


def bytes_moved(module: dict[str, Computation], computation: Computation, op: Op) -> float:
    """Returns the bytes of main memory that one instruction reads and writes."""
    code = op.opcode
    if code in FREE or code in ("while", "call", "conditional", "async-start"):
        return 0
    if code.endswith(("-done", "-update")):
        return 0
    operands = [computation.ops[name] for name in dict.fromkeys(op.operands)]
    if code == "fusion":
        kernel = module[called_by(op)[0]]
        return _reads(module, kernel) + _writes(kernel, kernel.root)
    # Of what is only sliced or updated in place, as much is read as is written.
    if code in SLICES:
        return 2 * op.bytes + sum(o.bytes for o in operands[1:] if code == "gather")
    if code == "dynamic-update-slice":
        return 2 * computation.ops[op.operands[1]].bytes
    if code == "scatter":  # also the rows that the updates hit are read, and written
        return sum(o.bytes for o in operands[1:]) + 2 * operands[-1].bytes
    if hosted := host_bytes(op, to_host=True) + host_bytes(op, to_host=False):
        return hosted  # read or written once on the device
    # A start returns its destination and its source, and then a handle.
    if code == "copy-start":
        return sum(shape.bytes for shape in op.shapes[:2])
    if code == "slice-start":
        piece = op.shapes[-2] if len(op.shapes) > 2 else op.shapes[-1]
        source = dataclasses.replace(piece, space=op.shapes[0].space)
        return piece.bytes + source.bytes
    written = op.bytes
    if code == "custom-call" and custom_target(op).startswith("__cu") and len(op.shapes) > 1:
        written -= op.shapes[-1].bytes  # scratch
    return written + sum(o.bytes for o in operands)


def host_bytes(op: Op, to_host: bool) -> float:
    """Returns the bytes that an asynchronous instruction sends to the host, or reads from there.

    Of an array on the host, a loop reads or writes a slice. The slice is what is on the device.
    """
    if not op.opcode.endswith("-start") or all(s.space != HOST for s in op.shapes):
        return 0
    # The destination is the first shape of a copy, and the last before a handle of the others.
    destination = op.shapes[0 if op.opcode == "copy-start" else -2]
    return sum(s.bytes for s in op.shapes if s.dims) * (to_host == (destination.space == HOST))


def _reads(module: dict[str, Computation], kernel: Computation) -> float:
    """Returns the bytes that a kernel reads; for an operand that it only slices, the slices'."""
    users = users_of(kernel)
    return sum(
        min(parameter.bytes, _read(module, kernel, users, parameter.name))
        for parameter in parameters(kernel)
        if parameter.bytes
    )


def _read(
    module: dict[str, Computation], kernel: Computation, users: dict[str, list[Op]], name: str
) -> float:
    total = 0.0
    whole = kernel.ops[name].bytes
    for user in users[name]:
        if user.opcode in SLICES and user.operands[0] == name:
            total += math.prod(user.shapes[0].dims) * bits(kernel.ops[name].shapes[0].dtype) / 8
        elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
            continue  # written in place
        elif user.opcode in VIEWS and user.name != kernel.root:
            total += _read(module, kernel, users, user.name)
        elif user.opcode == "fusion":
            inner = module[called_by(user)[0]]
            parameter = parameters(inner)[user.operands.index(name)]
            total += _read(module, inner, users_of(inner), parameter.name)
        else:
            return whole
    return total


def _writes(kernel: Computation, name: str) -> float:
    """Returns the bytes that a kernel writes; for an in-place update, those of the update."""
    op = kernel.ops[name]
    if op.opcode == "tuple":
        return sum(_writes(kernel, element) for element in op.operands)
    source = origin(kernel, name, ("bitcast", "convert"))
    if not op.bytes:
        return 0
    if source.opcode == "dynamic-update-slice":
        update = kernel.ops[source.operands[1]].shapes[0]
        return update.size * bits(op.shapes[0].dtype) / 8
    if source.opcode == "scatter":
        return 2 * kernel.ops[source.operands[-1]].bytes
    return op.bytes
