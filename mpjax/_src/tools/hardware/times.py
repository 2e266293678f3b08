"""The kinds of a program's kernels, and their times: by the roofline, and as steps let expect.

The first rule that holds decides the kind:

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

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from mpjax._src.core.base.public import public
from mpjax._src.tools.document.model import Table
from mpjax._src.tools.hardware import flow as flows
from mpjax._src.tools.hardware import hlo_costs
from mpjax._src.tools.hardware.flow import Flow, Leaf, flow_of, reached
from mpjax._src.tools.hardware.hlo import Op, bits, is_backward, op_name, parse, scope_of
from mpjax._src.tools.hardware.hlo_costs import EIGHT, Costs, Kernel, Matmul, multiplies
from mpjax._src.tools.hardware.targets import PACES, Target
from mpjax._src.tools.hardware.traffic import STRUCTURE

ATTENTION, CONVOLUTIONS = "fused attention", "convolutions"
ODD, FLOAT32, MATMULS = "matmuls with an odd axis", "float32 matmuls", "matmuls"
CALLS, UPDATES, LOSS = "other calls", "updates", "logits and loss"
LOOKUPS, REDUCTIONS = "gathers and scatters", "norms and reductions"
COPIES, ELEMENTWISE = "copies and casts", "elementwise"

# Kernels whose bytes and FLOPs take less time than this mostly cost what it takes to start them.
SHORT = 2e-6

# An odd axis is named if its matmuls have this share of all bounds, and so many of them.
WORTH, MOST = 0.01, 3

# The field of `targets.Pace` for the kernels of a kind; of all other kinds, "bandwidth".
PACE_OF = {
    ATTENTION: "attention",
    CONVOLUTIONS: "convolutions",
    ODD: "odd",
    **dict.fromkeys((FLOAT32, MATMULS), "matmuls"),
}
COLUMNS = ("kind", "kernels", "< 2 us", "GB", "GFLOP", "at least", "expected")


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class KernelRow:
    """The kernels of a program that do the same kind of work, library calls included.

    Attributes:
        kind: ``matmuls``, ``matmuls with an odd axis`` (of 16-bit operands, an axis that is no
            multiple of 8, and none below 16), ``float32 matmuls``, ``convolutions``,
            ``fused attention``, ``norms and reductions``, ``elementwise``, ``copies and casts``,
            ``gathers and scatters``, ``logits and loss``, ``updates`` (of donated arguments) or
            ``other calls``. The guide has the rules that tell them apart.
        instructions: The number of kernels in the program.
        runs: The number of executions; a kernel in a loop counts once per iteration.
        short: The number of executions whose bytes and FLOPs take less than 2 microseconds.
        bytes: The bytes that they read from and write to the device's memory.
        flops: The FLOPs of their matmuls and convolutions.
        bound_ms: The sum over executions of the time of the bytes at the datasheet's bandwidth, or
            of the FLOPs at its peak rate if that is longer, in milliseconds.
        expected_ms: The time that measured steps let expect, with what it takes to start the
            kernels, in milliseconds; None if no constants are known for the device.
    """

    kind: str
    instructions: int
    runs: int
    short: int
    bytes: float
    flops: float
    bound_ms: float
    expected_ms: float | None


def unit(target: Target, matmul: Matmul) -> tuple[str, float]:
    """Returns the dtype that a target's matrix units multiply for a matmul, and their FLOP/s."""
    dtype, passes = matmul.operands, matmul.passes
    if matmul.algorithm:
        dtype = matmul.algorithm
    elif target.platform == "tpu" and dtype == "f32":
        dtype, passes = "bf16", {"default": 1, "high": 3, "highest": 6}[matmul.precision]
    elif dtype == "f32" and "tf32" in target.peaks and _may_round(matmul):
        dtype = "tf32"
    # All 8-bit floats have one peak rate.
    kind = "f8" if dtype.startswith("f8") else dtype
    if target.platform == "tpu" and bits(kind) < 32:
        peak = target.peaks.get(kind, target.peaks["bf16"])
    else:
        peak = target.peaks.get(kind, target.peaks["f32"])
    return f"{dtype} x{passes}" if passes > 1 else dtype, peak / passes


def _may_round(matmul: Matmul) -> bool:
    """Returns whether XLA may round float32 operands to TF32 at the matmul's precision.

    XLA's PTX for A100 and H100 uses ``mma`` on tf32 at the default precision, and ``fma`` on f32 at
    "high" and "highest". It permits cuBLAS and cuDNN to use TF32 at "high" too.
    """
    return matmul.precision == "default" or (matmul.library and matmul.precision == "high")


def compute_seconds(target: Target, costs: Costs) -> float:
    """Returns the time of the FLOPs in seconds, on the matrix or vector units, the longer one."""
    matrix = vector = 0.0
    for matmul in costs.matmuls:
        runs_as, peak = unit(target, matmul)
        seconds = matmul.times * matmul.flops / peak
        # A GPU's matrix units do not multiply float32: its vector units do, next to them.
        if target.platform == "cuda" and runs_as == "f32":
            vector += seconds
        else:
            matrix += seconds
    if target.platform == "cuda":  # the peak rate of a TPU's vector units is not published
        vector += costs.other_flops / target.peaks["f32"]
    return max(matrix, vector)


# ---- the kinds of kernels ------------------------------------------------------------------------


def kinds_of(text: str) -> Callable[[Kernel], str]:
    """Returns a function that finds the kind of a kernel of an optimized HLO module."""
    module = parse(text)
    flow, shared = flow_of(module), module.shared
    # A result in the memory of a donated argument is its new value: a weight or a moment.
    replaced = [leaf for index, leaf in enumerate(flow.results) if index in shared]
    updates = {op.place for op in _back(flow, replaced, lambda op: op.opcode not in STRUCTURE)}
    others = [leaf for index, leaf in enumerate(flow.results) if index not in shared]
    numbers = [x for x in others if x.shape.size == 1 and "f" in x.shape.dtype]
    products = _back(flow, numbers, lambda op: multiplies(op) != "" or _is_backward(op))
    forward = [op.shapes[0] for op in products if op.shapes[0].dims and not _is_backward(op)]
    logits = max(forward, key=lambda shape: shape.size, default=None)

    def kind(kernel: Kernel) -> str:
        op = kernel.op
        arrays = [shape for each in (op, *op.operands) for shape in each.shapes]
        codes = kernel.codes - STRUCTURE - {"fusion"}
        changes = {flows.KINDS.get(code, flows.MAPPED) for code in codes}
        if kernel.matmuls:
            return _of_matmuls(kernel)
        # A scatter mixes entries too, but XLA writes it: it is no call.
        if flows.MIXED in changes and "scatter" not in kernel.codes:
            return CALLS
        if op.place in updates:
            return UPDATES
        # By the size and the longest axis, because kernels may reshape and transpose the logits.
        if logits and any(s.size == logits.size and max(logits.dims) in s.dims for s in arrays):
            return LOSS
        if {"gather", "scatter"} & kernel.codes:
            return LOOKUPS
        if flows.SUMMED in changes:
            return REDUCTIONS
        return ELEMENTWISE if flows.MAPPED in changes else COPIES

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
    edges = {leaf: steps for leaf, steps in flow.before.items() if not stop(leaf.op)}
    found = dict.fromkeys(op for op, _ in reached(edges, start, flows.MIXED))
    return [op for op in found if stop(op)]


def _is_backward(op: Op) -> bool:
    """Returns whether an instruction is one of the backward pass, and not only calls some."""
    return op.opcode not in (*STRUCTURE, "fusion") and is_backward(op_name(op))


# ---- kernel by kernel ----------------------------------------------------------------------------


def kernel_rows(target: Target, text: str, costs: Costs) -> tuple[KernelRow, ...]:
    """Returns the kernels of a program on a GPU by kind, those that take the longest first.

    A TPU runs copies beside its kernels, so that a sum over kernels says nothing there.
    """
    if target.platform != "cuda":
        return ()
    kinds: dict[str, list[Kernel]] = {}
    kind_of = kinds_of(text)
    for kernel in costs.kernels:
        kinds.setdefault(kind_of(kernel), []).append(kernel)
    rows = (_row(target, kind, kernels) for kind, kernels in kinds.items())
    return tuple(sorted(rows, key=lambda row: -(row.expected_ms or row.bound_ms)))


def _row(target: Target, kind: str, kernels: Sequence[Kernel]) -> KernelRow:
    least = [(kernel.times, _least(target, kernel)) for kernel in kernels]
    runs = sum(times for times, _ in least)
    bound = sum(times * seconds for times, seconds in least)
    pace, expected = PACES.get(target.chip), None
    if pace:
        factor = getattr(pace, PACE_OF.get(kind, "bandwidth"))
        expected = 1e3 * (factor * bound + pace.start * runs)
    short = sum(times for times, seconds in least if seconds < SHORT)
    moved = sum(k.times * k.bytes for k in kernels)
    flops = sum(k.times * m.flops for k in kernels for m in k.matmuls)
    return KernelRow(kind, len(kernels), runs, short, moved, flops, 1e3 * bound, expected)


def _least(target: Target, kernel: Kernel) -> float:
    """Returns the least time of one run of a kernel in seconds."""
    matrix = sum(matmul.flops / unit(target, matmul)[1] for matmul in kernel.matmuls)
    return max(kernel.bytes / target.bandwidth, matrix, kernel.other_flops / target.peaks["f32"])


def table_of(name: str, rows: Sequence[KernelRow]) -> Table:
    """Returns the table of a target's kernels by kind."""
    columns = COLUMNS if all(row.expected_ms is not None for row in rows) else COLUMNS[:-1]
    cells = []
    for row in rows:
        numbers = (row.bytes / 1e9, row.flops / 1e9, row.bound_ms, row.expected_ms or 0.0)
        counts = (f"{row.runs:,}", f"{row.short:,}")
        cells.append((row.kind, *counts, *map(figure, numbers))[: len(columns)])
    title = f"Where the time goes on {name}, in ms"
    return Table(title, columns, tuple(cells), columns[:1])


def figure(value: float) -> str:
    """Returns a number with at least three significant digits."""
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def notes_on_kernels(target: Target, costs: Costs, rows: Sequence[KernelRow]) -> Iterator[str]:
    """Yields what the times of a target's kernels rest on, and what an odd axis costs."""
    if not rows:
        return
    pace = PACES.get(target.chip)
    untimed = f"No step was timed on {target.chip}: the times of its kernels are lower bounds only."
    yield pace.source if pace else untimed
    bound = {row.kind: row.bound_ms for row in rows}
    if bound.get(ODD, 0.0) < WORTH * sum(bound.values()):
        return
    axes: dict[int, str] = {}
    for kernel in costs.kernels:
        for matmul in (m for m in kernel.matmuls if m.odd):
            scopes = (axes.get(matmul.odd, ""), scope_of(matmul.name), scope_of(kernel.name))
            # The longest scope says the most precisely where the axis is.
            axes[matmul.odd] = max(scopes, key=len)
    largest = sorted(axes.items(), reverse=True)[:MOST]
    named = ", ".join(f"{axis} in {scope}" if scope else str(axis) for axis, scope in largest)
    gain = f", about {bound[ODD] * (pace.odd - pace.matmuls):.2f} ms here" if pace else ""
    yield (
        f"Matmuls with an odd axis ({named}) are slower than others{gain}: tensor cores load "
        f"{EIGHT} 16-bit operands at once. Make the axis a multiple of {EIGHT}, or of 64 if it is "
        "large, as mpjax.autocast does: pad the weight with zeros, and slice the result."
    )
