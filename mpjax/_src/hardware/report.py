"""What a compiled program takes, as a report: memory, matmul dtypes, FLOPs, bytes, a roofline."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from mpjax._src.hardware import hlo_costs
from mpjax._src.hardware.collectives import (
    COLUMNS,
    WORDS,
    CollectiveRow,
    collectives,
    grouped,
    sent_by,
)
from mpjax._src.hardware.hlo import bits
from mpjax._src.hardware.memory import MemoryRow, Sizes, memory_rows
from mpjax._src.hardware.targets import GPU_PREALLOCATED, Target, size
from mpjax._src.reports import Report, table, wrapped

BOUND = (
    "The roofline is a bound and not a forecast: datasheet peaks, compute and memory perfectly "
    "overlapped. Only a cache that keeps arrays from one kernel to the next can beat it."
)


@dataclasses.dataclass(frozen=True)
class MatmulRow:
    """Matmuls and convolutions of one kind. Dtypes are in HLO's spelling: "bf16", "f16", "f32".

    Attributes:
        asked: The dtype of the operands in the program as JAX wrote it.
        operands: The wider dtype of the operands in the program that runs.
        runs_as: What the matrix units multiply: "tf32" where NVIDIA's may round float32 operands,
            "bf16" where a TPU's do, "bf16 x3" where several products make one.
        instructions: How many the program holds.
        runs: How many run, those in loops as often as the loop turns.
        flops: Of all runs, one pass counted.
        share: Of the FLOPs of all matmuls.
    """

    asked: str
    operands: str
    runs_as: str
    instructions: int
    runs: int
    flops: float
    share: float


@dataclasses.dataclass(frozen=True)
class CompileReport(Report):
    """What one run of a program takes on a device that need not be there. ``print`` it.

    Of several devices it says what each of them takes: all figures but `devices` are of one.

    Attributes:
        target: The name of the target.
        device: What the device calls itself.
        devices: How many there are.
        jax_version: Whose compilers were asked.
        argument_bytes: Memory of the arguments.
        output_bytes: Memory of the results.
        alias_bytes: What arguments and results share, because the arguments are donated.
        temp_bytes: Memory of everything between.
        code_bytes: Memory of the program itself and of arrays that it closes over.
        device_bytes: The memory of the device.
        flops: FLOPs of one run.
        matmul_flops: Those of its matmuls and convolutions.
        bytes_accessed: Bytes to and from the device's memory, if no cache held any between two
            kernels.
        matmuls: Its matmuls by dtype, the costliest first.
        collectives: The arrays that devices exchange, those first that send most.
        compute_ms: The time of the FLOPs at the datasheet's peaks.
        memory_ms: The time of the bytes at the datasheet's bandwidth.
        notes: What the figures leave out or assume.
        xla_costs: XLA's own "flops" and "bytes accessed", which count a loop once and a library
            call not at all.
        hlo: The optimized program, as text.
    """

    target: str
    device: str
    devices: int
    jax_version: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    device_bytes: int
    flops: float
    matmul_flops: float
    bytes_accessed: float
    matmuls: tuple[MatmulRow, ...]
    collectives: tuple[CollectiveRow, ...]
    compute_ms: float
    memory_ms: float
    notes: tuple[str, ...]
    xla_costs: dict[str, float] = dataclasses.field(repr=False)
    hlo: str = dataclasses.field(repr=False)

    _drawn_by = "mpjax._src.hardware.page"

    def memory(self) -> tuple[MemoryRow, ...]:
        """Returns what the memory holds, by kind: the rows sum up to `total_bytes`."""
        results = self.output_bytes - self.alias_bytes
        sizes = Sizes(self.argument_bytes, results, self.temp_bytes, self.code_bytes)
        return memory_rows(self.hlo, sizes)

    @property
    def total_bytes(self) -> int:
        """The memory that one run takes: arguments, results that share none, all between, code."""
        kept = self.argument_bytes + self.output_bytes - self.alias_bytes
        return kept + self.temp_bytes + self.code_bytes

    @property
    def fits(self) -> bool:
        """Whether that is no more than the device has, nothing kept free."""
        return self.total_bytes <= self.device_bytes

    @property
    def roofline_ms(self) -> float:
        """The time of a run that keeps units or memory busy throughout: a bound, no forecast."""
        return max(self.compute_ms, self.memory_ms)

    @property
    def bound(self) -> str:
        """What the roofline says limits it: "compute" or "memory"."""
        return "compute" if self.compute_ms >= self.memory_ms else "memory"

    @property
    def matmul_dtypes(self) -> dict[str, int]:
        """How many matmul instructions run in which dtype."""
        counts: dict[str, int] = {}
        for row in self.matmuls:
            counts[row.runs_as] = counts.get(row.runs_as, 0) + row.instructions
        return counts

    @property
    def wire_bytes(self) -> float:
        """What a device sends to others in one run."""
        return sent_by(self.collectives)

    @property
    def disguised(self) -> tuple[MatmulRow, ...]:
        """The matmuls that were asked for in a narrower dtype than they run in."""
        return tuple(row for row in self.matmuls if bits(row.asked) < bits(row.operands))

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, ready for JSON, without the HLO."""
        fields = {k: v for k, v in vars(self).items() if k not in ("hlo", "matmuls", "xla_costs")}
        derived = ("total_bytes", "fits", "roofline_ms", "bound", "matmul_dtypes", "wire_bytes")
        return {
            **fields,
            **{name: getattr(self, name) for name in derived},
            "notes": list(self.notes),
            "matmuls": [dataclasses.asdict(row) for row in self.matmuls],
            "collectives": [dataclasses.asdict(row) for row in self.collectives],
            "disguised": [dataclasses.asdict(row) for row in self.disguised],
            "xla_costs": dict(self.xla_costs),
        }

    def __str__(self) -> str:
        fits = "fits" if self.fits else "DOES NOT FIT"
        lines = [
            f"{self.target}: {self.device}, compiled without one by jax {self.jax_version}",
            f"memory    {size(self.total_bytes)} of {size(self.device_bytes)} "
            f"({self.total_bytes / self.device_bytes:.1%}): {fits}",
            f"          arguments {size(self.argument_bytes)} + results {size(self.output_bytes)} "
            f"- shared {size(self.alias_bytes)} + temporary {size(self.temp_bytes)} "
            f"+ code {size(self.code_bytes)}",
            f"costs     {self.flops / 1e9:,.1f} GFLOP, {self.matmul_flops / 1e9:,.1f} of them in "
            f"matmuls; {self.bytes_accessed / 1e9:,.2f} GB moved",
            f"roofline  {self.roofline_ms:,.3f} ms, bound by {self.bound} "
            f"(compute {self.compute_ms:,.3f} ms, memory {self.memory_ms:,.3f} ms)",
        ]
        lines = [wrapped(line, 10) for line in lines]
        if self.matmuls:
            lines.append(
                f"{'matmuls':<10}{'asked':<8}{'operands':<10}{'run as':<9}{'number':>7}"
                f"{'runs':>9}{'GFLOP':>12}{'share':>8}"
            )
        for row in self.matmuls:
            lines.append(
                f"{'':<10}{row.asked:<8}{row.operands:<10}{row.runs_as:<9}{row.instructions:>7}"
                f"{row.runs:>9}{row.flops / 1e9:>12,.1f}{row.share:>8.1%}"
            )
        for row in self.disguised:
            disguised = (
                f"in disguise: {row.share:.1%} of the matmul FLOPs were asked for in {row.asked} "
                f"and run in {row.operands}."
            )
            lines.append(wrapped(disguised))
        if self.collectives:
            lines += table(COLUMNS, grouped(self.collectives), words=WORDS)
        notes = (wrapped(f"note: {note}", 6) for note in self.notes)
        return "\n".join((*lines, *notes))


# ---- from what a compiler answered ---------------------------------------------------------------


def report_of(target: Target, answer: dict[str, Any]) -> CompileReport:
    """Returns the report of what a child answered."""
    memory, costs = answer["memory"], hlo_costs.costs(answer["hlo"])
    asked = hlo_costs.asked(answer["asked"])
    groups: dict[tuple[str, str, str], list[hlo_costs.Matmul]] = {}
    for matmul in costs.matmuls:
        key = (_asked(asked, matmul), matmul.operands, unit(target, matmul)[0])
        groups.setdefault(key, []).append(matmul)
    total = sum(m.times * m.flops for m in costs.matmuls)
    rows = [_row(key, group, total) for key, group in groups.items()]
    rows.sort(key=lambda row: -row.flops)
    code = memory["code"]
    report = CompileReport(
        target=target.name,
        device=target.device,
        devices=target.devices,
        jax_version=jax.__version__,
        argument_bytes=memory["arguments"],
        output_bytes=memory["outputs"],
        alias_bytes=memory["aliased"],
        temp_bytes=memory["temporary"],
        # The GPU compiler leaves out the program's constants, the TPU compiler counts them.
        code_bytes=code if target.platform == "tpu" else code + int(costs.constant_bytes),
        device_bytes=target.memory,
        flops=total + costs.other_flops,
        matmul_flops=total,
        bytes_accessed=costs.bytes,
        matmuls=tuple(rows),
        collectives=collectives(answer["hlo"], answer["asked"]) if target.devices > 1 else (),
        compute_ms=_compute_seconds(target, costs) * 1e3,
        memory_ms=costs.bytes / target.bandwidth * 1e3,
        notes=tuple(_notes(target, costs, rows, answer.get("left_out"))),
        xla_costs=answer["xla_costs"],
        hlo=answer["hlo"],
    )
    given = GPU_PREALLOCATED if target.platform == "cuda" else 1.0
    if report.fits and report.total_bytes > given * target.memory:
        tight = (
            f"JAX gives programs {given:.0%} of a GPU by default, which is less than this one "
            "takes: set XLA_PYTHON_CLIENT_MEM_FRACTION."
        )
        return dataclasses.replace(report, notes=(*report.notes, tight))
    return report


def unit(target: Target, matmul: hlo_costs.Matmul) -> tuple[str, float]:
    """Returns what a target's matrix units multiply for a matmul, and their FLOP/s."""
    dtype, passes = matmul.operands, matmul.passes
    if matmul.algorithm:
        dtype = matmul.algorithm
    elif target.platform == "tpu" and dtype == "f32":
        dtype, passes = "bf16", {"default": 1, "high": 3, "highest": 6}[matmul.precision]
    elif dtype == "f32" and "tf32" in target.peaks and _may_round(matmul):
        dtype = "tf32"
    kind = "f8" if dtype.startswith("f8") else dtype
    if target.platform == "tpu" and bits(kind) < 32:
        peak = target.peaks.get(kind, target.peaks["bf16"])
    else:
        peak = target.peaks.get(kind, target.peaks["f32"])
    return f"{dtype} x{passes}" if passes > 1 else dtype, peak / passes


# ---- inside --------------------------------------------------------------------------------------


def _compute_seconds(target: Target, costs: hlo_costs.Costs) -> float:
    """Returns the time of the FLOPs: of the matrix units, or of the others if they take longer."""
    matrix = vector = 0.0
    for matmul in costs.matmuls:
        runs_as, peak = unit(target, matmul)
        seconds = matmul.times * matmul.flops / peak
        if target.platform == "cuda" and runs_as == "f32":
            vector += seconds
        else:
            matrix += seconds
    if target.platform == "cuda":  # what a TPU's vector units do is not published
        vector += costs.other_flops / target.peaks["f32"]
    return max(matrix, vector)


def _may_round(matmul: hlo_costs.Matmul) -> bool:
    """Tells whether float32 operands may be rounded to TF32, as XLA reads their precision.

    Seen in the PTX that it writes for A100 and H100: at the default precision ``mma`` on tf32, at
    "high" and "highest" ``fma`` on f32. cuBLAS and cuDNN get leave for TF32 at "high" too.
    """
    return matmul.precision == "default" or (matmul.library and matmul.precision == "high")


def _asked(asked: dict[str, collections.Counter[str]], matmul: hlo_costs.Matmul) -> str:
    """Returns the dtype that the program asked a matmul's operands in, and takes it off the list.

    A compiler may name a matmul after a neighbour that it merged with it: then after those of the
    same scope.
    """
    dtypes = asked.get(matmul.name)
    scope = matmul.name
    while dtypes is None and scope:
        scope = scope.rpartition("/")[0]
        near = [found for name, found in asked.items() if name.startswith(scope)]
        dtypes = sum(near, collections.Counter[str]()) if near else None
    if not dtypes:
        return matmul.operands
    left = [dtype for dtype, count in dtypes.items() if count > 0] or list(dtypes)
    dtype = matmul.operands if matmul.operands in left else min(left, key=bits)
    if matmul.name in asked:
        dtypes[dtype] -= 1
    return dtype


def _row(key: tuple[str, str, str], group: list[hlo_costs.Matmul], total: float) -> MatmulRow:
    flops = sum(m.times * m.flops for m in group)
    return MatmulRow(*key, len(group), sum(m.times for m in group), flops, flops / (total or 1.0))


def _notes(
    target: Target, costs: hlo_costs.Costs, rows: list[MatmulRow], left_out: str | None
) -> Iterator[str]:
    yield BOUND
    if left_out:
        yield (
            f"Compiled with {left_out}=False: XLA found no tiles for its Triton matmuls without a "
            "device to tune them on. cuBLAS takes their place, as it may on a device."
        )
    if target.devices > 1:
        yield (
            f"All figures are of one of {target.devices} devices. Sent is what rings send, as if "
            "none of it were wasted; how long it takes, and how much of it is hidden, depends on "
            "the links."
        )
    if any(row.runs_as == "tf32" for row in rows):
        yield (
            "tf32: float32 operands at JAX's default precision, which XLA lets the tensor cores "
            "round to 10 bits of mantissa; jax.default_matmul_precision('highest') forbids it."
        )
    if target.platform == "tpu" and any(row.operands == "f32" for row in rows):
        yield (
            "float32 operands reach a TPU's matrix unit as bfloat16: once at JAX's default "
            "precision, in 3 or 6 products at 'high' and 'highest'."
        )
    if target.platform == "tpu" and any(row.operands == "f16" for row in rows):
        yield (
            "The HLO says float16, for which a TPU's matrix unit has no products: bfloat16's peak "
            "was assumed, and it may be slower. Use bfloat16."
        )
    if any(row.asked == "bf16" and row.operands == "f32" for row in rows) and (
        "bf16" not in target.peaks
    ):
        yield f"{target.device} has no bfloat16 units. Use float16 (policy='mixed_float16')."
    if costs.unknown_loops:
        yield (
            f"Loops whose number of turns the program does not tell: {costs.unknown_loops} "
            "(while_loop, or fori_loop with a traced bound). Each was counted as one turn."
        )
    if costs.unknown_calls:
        yield f"FLOPs inside of {', '.join(costs.unknown_calls)} were not counted."
