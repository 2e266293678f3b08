"""The section of the gpu suite: its goals, and mpjax's steps relative to its rivals'."""

from typing import Any

from benchmarks.models import TITLES
from benchmarks.on_gpu import goals
from benchmarks.on_gpu.speed import OURS
from benchmarks.on_gpu.statistics import quotient
from benchmarks.on_gpu.tables import reason, text
from benchmarks.page.charts import Chart
from benchmarks.page.tables import MET, above, shortfalls, table, written

PREDICTED = """What `compile_for` predicts without the device, relative to what was measured: the
memory, relative to the most in use while steps run and to the executable that the device compiled
after tuning its kernels; the bytes that this executable moves by the same count; and the time of
the roofline, a lower bound, relative to the time of a step.
"""
RATIOS = ("predicted_over_peak", "predicted_over_compiled", "predicted_over_gb")


def section(stored: dict[str, Any], causes: dict[str, Any]) -> tuple[str, dict[str, Chart]]:
    """Returns the goals, a table of steps for each model, and the ratios above 1.00x."""
    rows = stored["cases"]
    found = list(goals.found(rows))
    judged = [
        (name, text(row["bound"]), text(row["found"]), MET[row["met"]])
        for name, row in found
        if row["met"] is not None
    ]
    parts = [
        "A time is the median ratio over rounds, with its 95% bootstrap interval in brackets.\n",
        table(("goal", "bound", "found", ""), judged),
        f"{len(found) - len(judged)} goals were not measured.\n",
    ]
    short = []
    for case, rivals in rows.items():
        part, _, model = case.partition(" ")
        if part != "speed":
            continue
        parts.append(f"### {TITLES[model]}\n")
        parts.append(
            table(
                ("relative to", *OURS, "its step, ms", "of the bf16 peak", "not measured because"),
                [_beside(*row) for row in rivals.items()],
            )
        )
        for name, ratio in _ratios(rivals):
            if above(ratio["median"]):
                cause = causes.get(model, {}).get(name, "not known")
                short.append((TITLES[model], name, ratio["median"], cause))
    if any(row.get("ratios") for ways in rows.values() for row in ways.values()):
        parts.append(shortfalls(short) if short else "No rival takes less time than mpjax.\n")
    parts += ["### What compilers without the device predict\n", PREDICTED, _predictions(rows)]
    return "\n".join(parts), {}


def readme(rows: dict[str, Any]) -> str:
    """What the README says of these results."""
    times, memory = rows["speed gpt2"], rows["memory gpt2"]
    plain, small = "float32, TF32", "mpjax 0, chunked loss, fused"
    ways = ("by hand", "mpjax", "mpjax fused", small)
    hand, ours, fused, least = (f"{times[way]['ms'] / times[plain]['ms']:.2f}x" for way in ways)
    share = f"{memory[small]['peak'] / memory[plain]['peak']:.2f}x"
    return (
        f"Measured on an H100, this step takes {hand} the time of float32 with casts by hand, "
        f"{ours} with mpjax and {fused} with `fused_attention=true`; with `storage=0` and "
        f"`chunked_loss=true` too, {least}, in {share} the memory"
    )


def _predictions(rows: dict[str, Any]) -> str:
    """Returns the table of predicted memory and bytes relative to the device's."""
    columns = ("memory, of the peak", "of the program's", "bytes moved", "roofline, of the time")
    found = [
        (
            f"{TITLES[model]}, {way}",
            *(f"{row[key]:.3f}" if key in row else None for key in RATIOS),
            _roofline(row, rows.get(f"speed {model}", {}).get(way, {})),
        )
        for model, ways in (
            (c.removeprefix("memory "), w) for c, w in rows.items() if "memory" in c
        )
        for way, row in ways.items()
        if "predicted" in row
    ]
    return table(("model, program", *columns), found)


def _roofline(row: dict[str, Any], timed: dict[str, Any]) -> str | None:
    """Returns the roofline's time as a share of the measured time."""
    if "memory_ms" not in row or "ms" not in timed:
        return None
    return f"{max(row['memory_ms'], row['compute_ms']) / timed['ms']:.2f}"


def _beside(rival: str, row: dict[str, Any]) -> tuple[str, ...]:
    found = [row.get("ratios", {}).get(f"{way} / {rival}") for way in OURS]
    cells = [
        f"{written(r['median'])}{quotient(r)[quotient(r).index(' ') :]}" if r else "-"
        for r in found
    ]
    step = f"{row['ms']:.1f}" if "ms" in row else "-"
    share = f"{row['mfu']:.1%}" if row.get("mfu") else "-"
    return rival, *cells, step, share, reason(row) or ""


def _ratios(rivals: dict[str, dict[str, Any]]):
    """Yields the ratios of mpjax's time to that of other rivals."""
    for rival, row in rivals.items():
        if not rival.startswith("mpjax"):
            yield from row.get("ratios", {}).items()
