"""The cost of a program, from its optimized HLO: matmuls and their dtypes, FLOPs, bytes.

XLA's own cost analysis counts the body of a loop once and a call of cuBLAS or cuDNN as -1 FLOP.
This module counts every iteration of a loop, and counts library calls as matmuls.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

from mpjax._src.tools.hardware import hlo
from mpjax._src.tools.hardware.collectives import SENT
from mpjax._src.tools.hardware.hlo import Module, Op, Shape, bits, found, jax_name, parse, runs
from mpjax._src.tools.hardware.traffic import bytes_moved, host_bytes, is_kernel

ALGORITHM = re.compile(r"\balgorithm=dot_([a-z0-9]+)_\w+?(?:_x(\d))?[, ]")
# An hlo.attribute, or part of a library's configuration, which is JSON.
PRECISION = re.compile(r"\boperand_precision(?:=\{|:\[)([^}\]]*)")
DIMENSIONS = r'\blhs_{}_(?:dims=\{{|dimensions":\[)([^}}\]]*)'
# In the configuration of cuDNN's attention: the shape of the scores, and its own mask.
SCORES = re.compile(r'"intermediate_tensor_shape":\s*\{[^\[]*"dimensions":\s*\[([^\]]*)\]')
CAUSAL = re.compile(r'"mask_type":\s*"(PADDING_)?CAUSAL"')
# Instructions that count as one FLOP per element of the result.
ARITHMETIC = {
    *("add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs", "power"),
    *("exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "sqrt"),
    *("rsqrt", "cbrt", "sine", "cosine", "tan", "erf", "atan2", "remainder", "sign", "floor"),
    *("ceil", "compare", "select", "clamp", "round-nearest-even", "round-nearest-afz"),
}
# Custom calls that multiply nothing.
NO_FLOPS = (*hlo.PLACES, "__cub$", "__gpu$TopK", "TopK")
# What multiplies: matmuls, convolutions and cuDNN's attention. Libraries' calls begin like this.
DOT, CONVOLUTION, ATTENTION = "dot", "convolution", "attention"
LIBRARIES = {"__cublas": DOT, "__cudnn$conv": CONVOLUTION, "__cudnn$fmha": ATTENTION}
EIGHT = 8  # tensor cores load as many 16-bit operands at once
TILE = 16  # they multiply tiles of as many rows and columns; smaller matrices are bound by memory
GROUPED = ("feature", "batch")
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
    kind: str = DOT  # one of `DOT`, `CONVOLUTION` and `ATTENTION`
    # Of 16-bit operands, a free or contracted axis that is no multiple of 8; none is below `TILE`.
    odd: int = 0


@dataclasses.dataclass
class Kernel:
    """One kernel of an HLO module, or one call of a library, with what it runs."""

    op: Op
    name: str  # the name of the JAX operation that it comes from
    times: int  # how often it runs
    bytes: float  # what one run reads from and writes to main memory
    codes: set[str] = dataclasses.field(default_factory=set)  # the opcodes of what it runs
    matmuls: list[Matmul] = dataclasses.field(default_factory=list)
    other_flops: float = 0.0  # of one run


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
    instructions: tuple[Kernel, ...] = dataclasses.field(compare=False)  # those outside of kernels

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """What runs one after the other, without what devices and the host exchange."""
        beside = (
            k for k in self.instructions if k.op.kind not in SENT and not any(host_bytes(k.op))
        )
        return tuple(k for k in beside if is_kernel(k.op))


def costs(text: str) -> Costs:
    """Returns the cost of one run of an optimized HLO module."""
    groups: list[Kernel] = []  # each instruction with what it runs, if that is fused
    constants = sent = received = 0.0
    loops, calls = 0, dict[str, None]()
    for op, times, fused, scope in runs(parse(text).entry):
        if not fused:
            groups.append(Kernel(op, jax_name(op, scope), times, bytes_moved(op)))
            there, back = host_bytes(op)
            sent, received = sent + times * there, received + times * back
        # `runs` yields a kernel, and directly after it what is fused in it.
        group = groups[-1]
        group.codes.add(op.opcode)
        product = matmul(op, times, scope)
        if product:
            group.matmuls.append(product)
        elif op.opcode == "custom-call" and not op.target.startswith(NO_FLOPS):
            calls[op.target] = None
        elif op.opcode in ARITHMETIC:
            group.other_flops += op.shapes[0].size
        elif op.opcode in ("reduce", "reduce-window"):
            group.other_flops += op.operands[0].shapes[0].size
        elif op.opcode == "while":
            loops += hlo.trip_count(op) is None
        elif op.opcode == "constant" and not fused:
            constants += op.bytes
    return Costs(
        tuple(product for group in groups for product in group.matmuls),
        sum(group.times * group.other_flops for group in groups),
        sum(group.times * group.bytes for group in groups),
        (sent, received),
        constants,
        loops,
        tuple(calls),
        tuple(groups),
    )


def asked(text: str) -> dict[str, collections.Counter[str]]:
    """Counts the operand dtypes of a module's matmuls, by the names of their JAX operations."""
    dtypes: dict[str, collections.Counter[str]] = {}
    for product, _ in matmuls(parse(text)):
        dtypes.setdefault(product.name, collections.Counter())[product.operands] += 1
    return dtypes


# ---- matmuls ------------------------------------------------------------------------------------


def _precision(op: Op) -> str:
    """Returns the highest precision that an operand asks for."""
    levels = found(PRECISION, op.attributes.replace('"', "").lower()).split(",")
    return next((level for level in ("highest", "high") if level in levels), "default")


def matmuls(module: Module) -> Iterator[tuple[Matmul, Op]]:
    """Yields the matmuls that a module runs, with their instructions."""
    for op, times, _, scope in runs(module.entry):
        if product := matmul(op, times, scope):
            yield product, op


def multiplies(op: Op) -> str:
    """Returns which of `DOT`, `CONVOLUTION` and `ATTENTION` an instruction computes, or ""."""
    if op.opcode != "custom-call":
        return op.opcode if op.opcode in (DOT, CONVOLUTION) else ""
    return next((kind for name, kind in LIBRARIES.items() if op.target.startswith(name)), "")


def matmul(op: Op, times: int, scope: str) -> Matmul | None:
    kind, odd = multiplies(op), 0
    if not kind:
        return None
    left, right = (operand.shapes[0] for operand in op.operands[:2])
    algorithm = ALGORITHM.search(op.attributes + " ")  # the pattern ends with a separator
    dtype, passes = (algorithm[1], int(algorithm[2] or 1)) if algorithm else ("", 1)
    operands, library = max(left.dtype, right.dtype, key=bits), op.opcode == "custom-call"
    if kind == DOT:
        axes = _matmul_axes(op, left, right)
        flops = 2.0 * op.shapes[0].size * axes[2]
        if bits(operands) == 16 and min(axes) >= TILE:
            odd = next((axis for axis in axes if axis % EIGHT), 0)
    elif kind == ATTENTION:
        flops = _attention_flops(op, left.dims[-1])
    else:
        flops = _convolution_flops(op, left, right)
    read = jax_name(op, scope), operands, _precision(op), dtype, passes
    return Matmul(*read, library, times, flops, kind, odd)


def _matmul_axes(op: Op, left: Shape, right: Shape) -> tuple[int, int, int]:
    """Returns the sizes of a matmul: the free entries of both operands, and the contracted ones."""
    contracted = math.prod(left.dims[axis] for axis in _dimensions(op, "contracting"))
    shared = contracted * math.prod(left.dims[axis] for axis in _dimensions(op, "batch"))
    return left.size // (shared or 1), right.size // (shared or 1), contracted


def _dimensions(op: Op, which: str) -> list[int]:
    """Returns the axes of the left operand that a matmul contracts, or takes one by one."""
    return [*map(int, re.findall(r"\d+", found(DIMENSIONS.format(which), op.attributes)))]


def _attention_flops(op: Op, width: int) -> float:
    """Counts the entries of the scores that a mask leaves, in 2 products, or 5 of the gradients."""
    scores = re.findall(r"\d+", found(SCORES, op.attributes))
    *heads, queries, keys = map(int, scores or (0, 0))
    entries = queries * keys
    if CAUSAL.search(op.attributes):
        entries = sum(min(query + 1, keys) for query in range(queries))
    return 2.0 * (5 if "Backward" in op.target else 2) * width * math.prod(heads) * entries


def _convolution_flops(op: Op, left: Shape, right: Shape) -> float:
    """Counts as XLA does: a multiply and an add wherever the window meets an input entry."""
    # cuDNN's gradients are described by the forward convolution's window and dimension labels.
    roles = (left, right, op.shapes[0])
    if op.target == "__cudnn$convBackwardInput":
        roles = (op.shapes[0], right, left)
    elif op.target == "__cudnn$convBackwardFilter":
        roles = (left, op.shapes[0], right)
    inputs, kernel, outputs = (shape.dims for shape in roles)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    if not labels:
        return 0.0
    window = found(r"window=\{([^}]*)\}", op.attributes)
    parts = dict(part.split("=") for part in window.split())
    total = 2.0 * inputs[labels[1].index("b")] * inputs[labels[1].index("f")]
    total *= kernel[labels[2].index("o")]
    total /= math.prod(int(hlo.attribute(op, f"{what}_group_count") or 1) for what in GROUPED)
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
