"""Suite "padding": what the padding of matmuls with odd axes changes, compiled for an H100.

    python -m benchmarks --suite padding [gpt2 bert_mlm ...]

Each model's step by autocast is compiled twice: as it is, and with odd axes left alone. A row has
its 16-bit matmuls with an odd axis (no multiple of 8) of at least `gpu_matmuls.LEAST_FLOPS`, the
time that these and the step are expected to take, the number of its kernels, its temporary memory
and its bytes. Figures do not change from run to run. A program that XLA cannot compile with
Triton's matmuls, because no device is there to tune them, is compiled with cuBLAS's alone, which
XLA pads itself: ``triton`` is false. Needs mpjax[aot]; minutes.
"""

import collections
import math
import time
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import jax

import mpjax
from benchmarks import Options
from benchmarks.aot import ATTENTIVE, SETTINGS, TIMEOUT, on_the_cpu
from benchmarks.aot import CASES as MODELS
from benchmarks.models import SMALL
from benchmarks.results import FAILED, Results, Row
from benchmarks.rivals import program
from mpjax._src.core.base._jax import gpu_matmuls
from mpjax._src.tools.hardware.hlo_costs import costs
from mpjax._src.tools.hardware.report import CompileReport
from mpjax._src.tools.hardware.times import ODD

__all__ = ["SETTINGS"]

CASES = MODELS
PADDED, LEFT = "padded", "odd axes left alone"
# Models with attention, as most people train them on a GPU.
FUSED = "autocast, fused attention"


def run(options: Options, results: Results) -> None:
    """Compiles the programs that have no row yet."""
    on_the_cpu()
    for model in options.cases:
        sizes = SMALL[model] if options.smoke else {}
        ways = ("autocast", FUSED) if model in ATTENTIVE else ("autocast",)
        for way in ways:
            case = f"{model}, fused attention" if way == FUSED else model
            if all(results.get(case, name) for name in (PADDED, LEFT)):
                continue
            padded, count = figures(model, way, True, sizes)
            results.put(case, PADDED, padded)
            # Where nothing is padded, both programs are the same.
            left = figures(model, way, False, sizes)[0] if count else padded
            results.put(case, LEFT, left)


def figures(model: str, way: str, padded: bool, sizes: dict[str, Any]) -> tuple[Row, int]:
    """Compiles a training step; returns its row, and the number of its padded matmuls."""
    least = gpu_matmuls.LEAST_FLOPS
    leave = mock.patch.object(gpu_matmuls, "LEAST_FLOPS", least if padded else math.inf)
    with mock.patch.object(gpu_matmuls, "_multiply", wraps=gpu_matmuls._multiply) as multiplied:
        row, report = compiled(model, way, sizes, leave)
    if report is None:
        return row, 0
    odd = collections.Counter(
        str(matmul.odd)
        for kernel in costs(report.hlo).kernels
        for matmul in kernel.matmuls
        if matmul.odd and matmul.flops >= least
    )
    odd_ms = sum(row.expected_ms or 0 for row in report.kernels if row.kind == ODD)
    return {"odd": dict(odd), "odd_ms": odd_ms, **row}, multiplied.call_count


def compiled(
    model: str, way: str, sizes: dict[str, Any], *changes: AbstractContextManager
) -> tuple[Row, CompileReport | None]:
    """Compiles a training step while the changes are in force; returns its row and its report."""
    start = time.monotonic()
    jax.clear_caches()  # of programs with other changes
    try:
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            found = program(model, way, "bfloat16", **sizes)
            step = jax.jit(found.step, donate_argnums=0)
            report = mpjax.compile_for("h100", step, found.state, found.batch, timeout=TIMEOUT)
    except Exception as error:
        return {FAILED: f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}, None
    row = {
        "kernels": sum(row.runs for row in report.kernels),
        "temp_mib": round(report.temp_bytes / 2**20, 1),
        "bytes_gb": round(report.xla_costs["bytes accessed"] / 1e9, 3),
        "looped_gb": round(report.bytes_accessed / 1e9, 3),
        "expected_ms": report.expected_ms,
        "triton": not any("triton" in note for note in report.notes),
        "seconds": round(time.monotonic() - start, 1),
    }
    return row, report
