"""The section on matmuls with odd axes: what their padding changes."""

from typing import Any

from benchmarks.models import TITLES
from benchmarks.padding import LEFT, PADDED
from benchmarks.page.tables import shown, table, written
from benchmarks.results import FAILED

NOTE = """An axis is odd if it is no multiple of 8, as tensor cores load 16-bit operands.
On NVIDIA GPUs, `autocast` pads odd axes of large matmuls with zeros, which the kernels write that
compute the operands ([why](slow.md#odd-sizes)). *Left* is the number of large 16-bit matmuls with
an odd axis without and with this padding, and *their time* the share of the expected time of the
step. What is left is bound by the memory. Ratios are relative to the program without.
*cuBLAS* marks programs in which XLA, without a device, finds no tiles for its own kernels: cuBLAS
runs all their matmuls, and XLA pads them in either program.
"""
FIGURES = {
    "kernels": "kernels",
    "temp_mib": "memory",
    "looped_gb": "bytes moved",
    "expected_ms": "expected time",
}


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns the table of all models."""
    rows = []
    for case, found in stored["cases"].items():
        padded, without = (found.get(name, {FAILED: "not measured"}) for name in (PADDED, LEFT))
        model, _, more = case.partition(", ")
        title = f"{TITLES[model]}, {shown(more)}" if more else TITLES[model]
        if why := padded.get(FAILED) or without.get(FAILED):
            rows.append((title, why, *[None] * (2 + len(FIGURES))))
            continue
        left = [sum(row["odd"].values()) for row in (without, padded)]
        axes = ", ".join(sorted(without["odd"], key=int)) or "none"
        note = "" if padded["triton"] else ", cuBLAS"
        ratios = (written(padded[key] / without[key]) for key in FIGURES)
        times = [f"{row['odd_ms'] / row['expected_ms']:.0%}" for row in (without, padded)]
        pairs = (" → ".join(map(str, pair)) for pair in (left, times))
        rows.append((f"{title}{note}", axes, *pairs, *ratios))
    head = ("model", "odd axes", "left", "their time", *FIGURES.values())
    return f"{NOTE}\n{table(head, rows)}"
