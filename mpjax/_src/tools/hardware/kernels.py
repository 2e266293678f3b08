"""The kinds of a program's kernels, found from its HLO.

The first rule that holds decides:

- *fused attention*: it calls cuDNN's attention.
- *convolutions*: it contains a convolution.
- *matmuls*: it contains a dot, of float32, of 16-bit operands *with an odd axis*, or another one. A
  free or contracted axis is odd if it is no multiple of 8, as tensor cores load their operands,
  and none of the matmul is shorter than the 16 of their tiles.
- *other calls*: any other custom call, such as a kernel that the user wrote, or an FFT.
- *updates*: it writes a result that replaces a donated argument, as an optimizer does.
- *logits and loss*: it reads or writes an array as large as the logits. These are the largest
  result of a matmul of the forward pass from which a single number, a result of the program, is
  computed without another matmul.
- *gathers and scatters*: it contains one of them.
- *norms and reductions*: it contains a reduction.
- *copies and casts*: it only moves, repeats or casts entries.
- *elementwise*: all others.
"""

from collections.abc import Callable, Iterable

from mpjax._src.tools.hardware import hlo_costs
from mpjax._src.tools.hardware.flow import (
    KINDS,
    MAPPED,
    MIXED,
    SUMMED,
    Flow,
    Leaf,
    flow_of,
    reached,
)
from mpjax._src.tools.hardware.hlo import Op, Shape, parse
from mpjax._src.tools.hardware.hlo_costs import Kernel, is_matmul
from mpjax._src.tools.hardware.lifetimes import shared_results
from mpjax._src.tools.hardware.memory import is_backward, op_name
from mpjax._src.tools.hardware.traffic import STRUCTURE

ATTENTION, CONVOLUTIONS = "fused attention", "convolutions"
ODD, FLOAT32, MATMULS = "matmuls with an odd axis", "float32 matmuls", "matmuls"
CALLS, UPDATES, LOSS = "other calls", "updates", "logits and loss"
LOOKUPS, REDUCTIONS = "gathers and scatters", "norms and reductions"
COPIES, ELEMENTWISE = "copies and casts", "elementwise"


def kinds_of(text: str) -> Callable[[Kernel], str]:
    """Returns a function that finds the kind of a kernel of an optimized HLO module."""
    module = parse(text)
    flow, shared = flow_of(module), shared_results(module)
    results = list(enumerate(zip(flow.results, module.entry.root.shapes, strict=True)))
    # A result in the memory of a donated argument is its new value: a weight or a moment.
    replaced = [leaf for index, (leaf, _) in results if index in shared]
    updates = {op.place for op in _back(flow, replaced, _is_kernel)}
    numbers = [leaf for index, (leaf, shape) in results if index not in shared and _one(shape)]
    products = _back(flow, numbers, lambda op: is_matmul(op) or _is_backward(op))
    forward = [op.shapes[0] for op in products if op.shapes[0].dims and not _is_backward(op)]
    logits = max(forward, key=lambda shape: shape.size, default=None)

    def kind(kernel: Kernel) -> str:
        op = kernel.op
        arrays = [shape for each in (op, *op.operands) for shape in each.shapes]
        changes = {KINDS.get(c, MAPPED) for c in kernel.codes if c not in (*STRUCTURE, "fusion")}
        if kernel.matmuls:
            return _of_matmuls(kernel)
        # A scatter mixes entries too, but XLA writes it: it is no call.
        if MIXED in changes and "scatter" not in kernel.codes:
            return CALLS
        if op.place in updates:
            return UPDATES
        # By the size and the longest axis, because kernels may reshape and transpose the logits.
        if logits and any(s.size == logits.size and max(logits.dims) in s.dims for s in arrays):
            return LOSS
        if {"gather", "scatter"} & kernel.codes:
            return LOOKUPS
        if SUMMED in changes:
            return REDUCTIONS
        return ELEMENTWISE if MAPPED in changes else COPIES

    return kind


def _of_matmuls(kernel: Kernel) -> str:
    kinds = {matmul.kind for matmul in kernel.matmuls}
    if hlo_costs.ATTENTION in kinds:
        return ATTENTION
    if hlo_costs.CONVOLUTION in kinds:
        return CONVOLUTIONS
    if any(matmul.odd for matmul in kernel.matmuls):
        return ODD
    wide = any(m.operands == "f32" and not m.algorithm for m in kernel.matmuls)
    return FLOAT32 if wide else MATMULS


def _back(flow: Flow, start: Iterable[Leaf], stop: Callable[[Op], bool]) -> list[Op]:
    """Returns the instructions at which a search from results to their sources stops."""
    edges = {leaf: steps for leaf, steps in flow.before.items() if not stop(leaf[0])}
    return [op for op in dict.fromkeys(op for op, _ in reached(edges, start, MIXED)) if stop(op)]


def _is_kernel(op: Op) -> bool:
    return op.opcode not in STRUCTURE


def _is_backward(op: Op) -> bool:
    """Returns whether an instruction is one of the backward pass, and not only calls some."""
    return op.opcode not in (*STRUCTURE, "fusion") and is_backward(op_name(op))


def _one(shape: Shape) -> bool:
    return shape.size == 1 and "f" in shape.dtype
