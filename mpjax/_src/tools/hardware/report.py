"""The report on a compiled program: memory, matmul dtypes, FLOPs, bytes moved, a roofline."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mpjax._src.core.base.public import public
from mpjax._src.tools.document.model import Document, Drawing, Table
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.hardware import hlo_costs, times
from mpjax._src.tools.hardware.collectives import CollectiveRow, collectives, sent_by, sent_table
from mpjax._src.tools.hardware.drawing import drawing_of
from mpjax._src.tools.hardware.hlo import bits, parse
from mpjax._src.tools.hardware.memory import MemoryRow, Sizes, memory_rows
from mpjax._src.tools.hardware.targets import GPU_PREALLOCATED, Target, size
from mpjax._src.tools.hardware.times import figure

BOUND = (
    "The roofline is a lower bound, not a forecast: it assumes datasheet peaks, and compute and "
    "memory traffic that overlap perfectly. Only a cache that keeps arrays from one kernel to the "
    "next can beat it."
)


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class MatmulRow:
    """The matmuls and convolutions of a program that have the same dtypes.

    Dtypes are spelled as in HLO: "bf16", "f16", "f32".

    Attributes:
        asked: The dtype of the operands in the program that JAX wrote.
        operands: The wider dtype of the operands in the optimized program.
        runs_as: The dtype that the matrix units multiply: "tf32" if NVIDIA's may round float32
            operands, "bf16" if a TPU's do, "bf16 x3" if one product is computed as three.
        instructions: The number of instructions in the program.
        runs: The number of executions; an instruction in a loop counts once per iteration.
        flops: The FLOPs of all executions; a product of several passes counts once.
        share: The share of the FLOPs of all matmuls, from 0 to 1.
    """

    asked: str
    operands: str
    runs_as: str
    instructions: int
    runs: int
    flops: float
    share: float


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class CompileReport(Report):
    """The report of `compile_for`: the memory and cost of one run of a program. ``print`` it.

    For a target of several devices, all numbers are those of one device.

    Attributes:
        target: The name of the target.
        device: The name that the device reports.
        devices: The number of devices.
        jax_version: The version of JAX whose compilers were used.
        argument_bytes: The memory of the arguments, in bytes.
        output_bytes: The memory of the results, in bytes.
        alias_bytes: The memory that donated arguments share with results, in bytes.
        temp_bytes: The memory of temporary arrays, in bytes.
        code_bytes: The memory of the program and of the arrays that it closes over, in bytes.
        device_bytes: The memory of the device, in bytes.
        flops: The FLOPs of one run.
        matmul_flops: The FLOPs of its matmuls and convolutions.
        bytes_accessed: The bytes read from and written to the device's memory, assuming that no
            cache keeps arrays between two kernels.
        matmuls: Its matmuls by dtype, the most FLOPs first.
        collectives: The arrays that devices exchange, the most bytes first.
        compute_ms: The time of the FLOPs at the datasheet's peak rates, in milliseconds.
        memory_ms: The time of the bytes at the datasheet's bandwidth, in milliseconds.
        host_bytes: The bytes that the program exchanges with the host's memory, where it keeps
            arrays there (offloading).
        host_ms: The time of these bytes on the link to the host, in milliseconds, the longer one of
            both directions.
        notes: Sentences on the assumptions behind the numbers, and on costs that they leave out.
        xla_costs: XLA's own "flops" and "bytes accessed". XLA counts the body of a loop once and
            ignores library calls.
        hlo: The text of the optimized program.
        kernels: On GPUs, its kernels by the kind of their work: where the time goes.
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
    host_bytes: float
    host_ms: float
    notes: tuple[str, ...]
    xla_costs: dict[str, float] = dataclasses.field(repr=False)
    hlo: str = dataclasses.field(repr=False)
    kernels: tuple[times.KernelRow, ...] = ()

    _without = ("hlo",)
    _also = (
        *("total_bytes", "fits", "roofline_ms", "bound", "kernels_ms", "expected_ms"),
        *("matmul_dtypes", "wire_bytes", "disguised"),
    )

    def memory(self) -> tuple[MemoryRow, ...]:
        """Returns the contents of the memory, as rows whose bytes add up to `total_bytes`."""
        results = self.output_bytes - self.alias_bytes
        sizes = Sizes(self.argument_bytes, results, self.temp_bytes, self.code_bytes)
        return memory_rows(self.hlo, sizes)

    @property
    def total_bytes(self) -> int:
        """The memory of one run in bytes: arguments, results, temporary arrays and code.

        Memory that results share with donated arguments counts once.
        """
        kept = self.argument_bytes + self.output_bytes - self.alias_bytes
        return kept + self.temp_bytes + self.code_bytes

    @property
    def fits(self) -> bool:
        """Whether `total_bytes` is at most the whole memory of the device."""
        return self.total_bytes <= self.device_bytes

    @property
    def roofline_ms(self) -> float:
        """The longest of `compute_ms`, `memory_ms` and `host_ms`: a lower bound, not a forecast."""
        return max(self.compute_ms, self.memory_ms, self.host_ms)

    @property
    def bound(self) -> str:
        """The longest part of the roofline: "compute", "memory" or "host"."""
        parts = {"compute": self.compute_ms, "memory": self.memory_ms, "host": self.host_ms}
        return max(parts, key=parts.__getitem__)

    @property
    def kernels_ms(self) -> float:
        """The sum of the bounds of all kernels: a lower bound too, and at least `roofline_ms`.

        One kernel moves bytes while it computes, but does not overlap with the next one. On TPUs,
        whose copies do, it is `roofline_ms`.
        """
        return max(self.roofline_ms, sum(row.bound_ms for row in self.kernels))

    @property
    def expected_ms(self) -> float | None:
        """The time of a run that measured steps let expect, or None without any on the device.

        It leaves out what devices exchange. A note says where it comes from.
        """
        expected = [row.expected_ms for row in self.kernels if row.expected_ms is not None]
        return max(self.host_ms, sum(expected)) if expected else None

    @property
    def matmul_dtypes(self) -> dict[str, int]:
        """The number of matmul instructions by the dtype that they run in."""
        counts: dict[str, int] = {}
        for row in self.matmuls:
            counts[row.runs_as] = counts.get(row.runs_as, 0) + row.instructions
        return counts

    @property
    def wire_bytes(self) -> float:
        """The bytes that one device sends to others in one run."""
        return sent_by(self.collectives)

    @property
    def disguised(self) -> tuple[MatmulRow, ...]:
        """The matmuls that run in a wider dtype than the program asked for."""
        return tuple(row for row in self.matmuls if bits(row.asked) < bits(row.operands))

    def document(self) -> Document:
        return document_of([self])

    def _drawing(self) -> Drawing:
        return drawing_of(self.hlo, self.memory(), self.kernels)


# The costs of a program: the name of each, and how it is written; "" where it has none: times of
# kernels are those of GPUs, and few programs keep arrays in the host's memory.
COSTS: dict[str, Callable[[CompileReport], str]] = {
    "fits": lambda r: "yes" if r.fits else "NO",
    "memory": lambda r: size(r.total_bytes),
    "device's memory": lambda r: size(r.device_bytes),
    "arguments": lambda r: size(r.argument_bytes),
    "results": lambda r: size(r.output_bytes),
    "shared": lambda r: size(r.alias_bytes),
    "temporary": lambda r: size(r.temp_bytes),
    "code": lambda r: size(r.code_bytes),
    "GFLOP": lambda r: figure(r.flops / 1e9),
    "in matmuls": lambda r: figure(r.matmul_flops / 1e9),
    "GB moved": lambda r: figure(r.bytes_accessed / 1e9),
    "sent to others": lambda r: size(r.wire_bytes) if r.devices > 1 else "-",
    "roofline, ms": lambda r: figure(r.roofline_ms),
    "compute, ms": lambda r: figure(r.compute_ms),
    "memory, ms": lambda r: figure(r.memory_ms),
    "bound by": lambda r: r.bound,
    "matmuls": lambda r: ", ".join(f"{n} {dtype}" for dtype, n in r.matmul_dtypes.items()),
    "widened": lambda r: f"{sum(row.share for row in r.disguised):.1%}",
    "kernel by kernel, ms": lambda r: figure(r.kernels_ms) if r.kernels else "",
    "expected, ms": lambda r: figure(r.expected_ms) if r.expected_ms else "-" * bool(r.kernels),
    "to and from host": lambda r: size(r.host_bytes) if r.host_bytes else "",
    "host, ms": lambda r: figure(r.host_ms) if r.host_bytes else "",
}


def document_of(reports: Sequence[CompileReport]) -> Document:
    """Returns what reports on one program show, the targets side by side."""
    names = tuple(r.target for r in reports)
    written = ((name, [*map(write, reports)]) for name, write in COSTS.items())
    costs = tuple((name, *(c or "-" for c in cells)) for name, cells in written if any(cells))
    tables = [Table("Memory and costs of one run", ("", *names), costs, ("",))]
    matmuls = ("asked", "operands", "run as", "number", "runs", "GFLOP", "share")
    sentences, notes = [], dict[str, list[str]]()
    for r in reports:
        fits = "fits" if r.fits else "DOES NOT FIT"
        sentences.append(
            f"{r.target}: {fits} {r.device} ({r.total_bytes / r.device_bytes:.1%} of its memory); "
            f"compiled without the device by jax {r.jax_version}"
        )
        sentences += [
            f"wider than asked for: {row.share:.1%} of the matmul FLOPs run in {row.operands}, "
            f"but the program asked for {row.asked}"
            for row in r.disguised
        ]
        rows = tuple(map(_cells, r.matmuls))
        tables.append(Table(f"Matmuls on {r.target}", matmuls, rows, matmuls[:3]))
        if r.kernels:
            tables.append(times.table_of(r.target, r.kernels))
        tables.append(sent_table(r.target, r.collectives))
        # Targets of one kind have the same notes, which are printed once.
        for note in r.notes:
            notes.setdefault(note, []).append(r.target)
    return Document(
        f"Compiled for {', '.join(names)}",
        sentences[0],
        tuple(sentences[1:]),
        tuple(tables),
        tuple(f"{', '.join(targets)}: {note}" for note, targets in notes.items()),
        drawing=reports[0]._drawing,
    )


def _cells(row: MatmulRow) -> tuple[str, ...]:
    numbers = f"{row.instructions}", f"{row.runs}", figure(row.flops / 1e9), f"{row.share:.1%}"
    return (row.asked, row.operands, row.runs_as, *numbers)


# ---- from what a compiler answered ---------------------------------------------------------------


def report_of(target: Target, answer: dict[str, Any]) -> CompileReport:
    """Returns the report for a child's answer."""
    module = parse(answer["hlo"])  # the graph that all below ask, while it is here
    memory, costs = answer["memory"], hlo_costs.costs(module.text)
    asked = hlo_costs.asked(answer["asked"])
    groups: dict[tuple[str, str, str], list[hlo_costs.Matmul]] = {}
    for matmul in costs.matmuls:
        key = (_asked(asked, matmul), matmul.operands, times.unit(target, matmul)[0])
        groups.setdefault(key, []).append(matmul)
    total = sum(m.times * m.flops for m in costs.matmuls)
    unsorted = (_row(key, group, total) for key, group in groups.items())
    rows = sorted(unsorted, key=lambda row: -row.flops)
    kernels = times.kernel_rows(target, answer["hlo"], costs)
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
        kernels=kernels,
        compute_ms=times.compute_seconds(target, costs) * 1e3,
        memory_ms=costs.bytes / target.bandwidth * 1e3,
        host_bytes=sum(costs.host_bytes),
        host_ms=max(costs.host_bytes) / target.link * 1e3,
        notes=(
            *_notes(target, costs, rows, answer.get("left_out")),
            *times.notes_on_kernels(target, costs, kernels),
        ),
        xla_costs=answer["xla_costs"],
        hlo=answer["hlo"],
    )
    share = GPU_PREALLOCATED if target.platform == "cuda" else 1.0
    if report.fits and report.total_bytes > share * target.memory:
        tight = (
            f"By default JAX lets programs use {share:.0%} of a GPU's memory, which is less than "
            "this program needs. Set XLA_PYTHON_CLIENT_MEM_FRACTION to a larger share."
        )
        return dataclasses.replace(report, notes=(*report.notes, tight))
    return report


# ---- inside --------------------------------------------------------------------------------------


def _asked(asked: dict[str, collections.Counter[str]], matmul: hlo_costs.Matmul) -> str:
    """Returns the dtype of a matmul's operands in the program as written, and uses it up.

    A compiler may name a matmul after a neighbor that it merged. Then the matmuls of the same
    scope are searched.
    """
    dtypes = asked.get(matmul.name)
    scope = matmul.name
    while dtypes is None and scope:
        scope = scope.rpartition("/")[0]
        near = [counts for name, counts in asked.items() if name.startswith(scope)]
        dtypes = sum(near, collections.Counter[str]()) if near else None
    if not dtypes:
        return matmul.operands
    # A compiler may copy a matmul, so that more of a name run than were asked for.
    left = [dtype for dtype, count in dtypes.items() if count > 0] or list(dtypes)
    dtype = matmul.operands if matmul.operands in left else min(left, key=bits)
    if matmul.name in asked:
        # Each matmul of this name uses up one, because they may have different dtypes.
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
            f"Compiled with {left_out}=False, because XLA found no tiles for its Triton matmuls "
            "without a device to tune them on. cuBLAS runs them instead, as it may on a device."
        )
    if target.devices > 1:
        yield (
            f"All numbers are for one of {target.devices} devices. The bytes sent assume ring "
            "algorithms without overhead. Their time, and the part hidden by compute, depend on "
            "the links."
        )
    yield from _notes_on_units(target, rows)
    if costs.unknown_loops:
        yield (
            f"Loops with an unknown number of iterations: {costs.unknown_loops} (while_loop, or "
            "fori_loop with a traced bound). Each was counted as one iteration."
        )
    if costs.unknown_calls:
        yield f"The FLOPs inside {', '.join(costs.unknown_calls)} are not counted."


def _notes_on_units(target: Target, rows: list[MatmulRow]) -> Iterator[str]:
    """Yields what the matrix units of a target do to its matmuls."""
    if any(row.runs_as == "tf32" for row in rows):
        yield (
            "tf32: at JAX's default precision, XLA lets the tensor cores round float32 operands "
            "to 10 bits of mantissa; jax.default_matmul_precision('highest') forbids it."
        )
    if target.platform == "tpu" and any(row.operands == "f32" for row in rows):
        yield (
            "A TPU's matrix unit multiplies float32 operands as bfloat16: in one product at JAX's "
            "default precision, in 3 at 'high' and 6 at 'highest'."
        )
    if target.platform == "tpu" and any(row.operands == "f16" for row in rows):
        yield (
            "A TPU's matrix unit does not multiply float16, which this program uses. The times "
            "assume the peak rate of bfloat16, but it may be slower. Use bfloat16."
        )
    if any(row.asked == "bf16" and row.operands == "f32" for row in rows) and (
        "bf16" not in target.peaks
    ):
        yield (
            f"{target.device} has no matrix units for bfloat16. Use float16 "
            "(policy='mixed_float16')."
        )
