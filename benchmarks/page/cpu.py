"""The section of the cpu suite: its goals, and a table for each case."""

from collections.abc import Iterator
from typing import Any

from benchmarks.on_cpu import codes, dots, goals, quality
from benchmarks.on_gpu.tables import reason, text
from benchmarks.page.charts import Chart
from benchmarks.page.tables import above, shortfalls, table, written

# The sentence above the table of each case.
SAYS = {
    "steps": "Small models trained in bfloat16 with each library, timed in pairs",
    "overhead": "A complete mpjax step relative to plain optax with the same casts, timed in pairs",
    "gates": "mpjax's step with its gate as a select and as a branch, timed in pairs",
    "dispatch": "Host time to dispatch an almost empty step",
    "tracing": "Tracing and compiling a gradient, before the first step",
    "reports": "A float16 step with reports relative to one without, timed in pairs",
    "histogram": "A step with a gradient histogram relative to one without, timed in pairs",
    "instruments": "Time and peak memory of instruments that run a program operation by operation",
    "checkpoints": "Checksums of a state's arrays, relative to a save and to a restore without",
    "underflow": "One gradient of the byte-level GPT in float16, compared with float32",
    "codes": "Error of a bfloat16 gradient, relative to float32's, by storage: small models",
    "bf16_dots": "Training of networks that mostly multiply, on a CPU that multiplies bfloat16",
    "inference": "Forward passes with bfloat16 weights, relative to float32 ones, timed in pairs",
    "quality": "Held-out figures as means over three seeds, compared with the range of float32",
}
OURS = ("autocast", "mpjax")


def section(stored: dict[str, Any], causes: dict[str, Any]) -> tuple[str, dict[str, Chart]]:
    """Returns the goals, a table for each case, and our ratios above 1.00x."""
    rows = stored["cases"]
    judged = [
        (name, text(row["bound"]), text(row["found"]), verdict(row))
        for name, row in goals.found(rows)
    ]
    parts = [
        "A ratio is the median over rounds, with its 95% bootstrap interval in brackets. Other "
        f"programs kept {busy(rows)} of the machine's cores busy during the measurement. "
        "Goals relative to float32 are for CPUs with instructions for bfloat16.\n",
        table(("goal", "bound", "found", ""), judged),
    ]
    for case, says in SAYS.items():
        if case in rows:
            parts.append(f"### {case}\n\n{says}.\n")
            parts += OWN.get(case, ratios)(rows[case])
    return "\n".join((*parts, shortfalls(short(rows, causes)))), {}


def verdict(row: dict[str, Any]) -> str:
    return goals.words(row).replace("not met", "**not met**")


def busy(rows: goals.Rows) -> str:
    """Returns the smallest and the largest number of cores that other programs kept busy."""
    found = [
        row["load"]["cores_of_others"] for r in rows.values() for row in r.values() if "load" in row
    ]
    return f"{min(found):.1f} to {max(found):.1f}" if found else "an unknown number"


# ---- tables --------------------------------------------------------------------------------------


def ratios(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yields a table, with ratios as rows and the case's rows as columns, and then notes."""
    measured = {name: row["ratios"] for name, row in rows.items() if "ratios" in row}
    if measured:
        names = dict.fromkeys(ratio for found in measured.values() for ratio in found)
        cells = [
            (name, *(cell(name, found.get(name)) for found in measured.values())) for name in names
        ]
        yield table(("", *measured), cells)
    notes = [f"{name}: {why}." for name, row in rows.items() if (why := reason(row))]
    notes += [
        f"{name}: {row['cpu']}; under autocast {dots.reading(row['matmuls']['autocast'])}."
        for name, row in rows.items()
        if "matmuls" in row
    ]
    absent = {
        f"{who}: {why}." for row in rows.values() for who, why in row.get("absent", {}).items()
    }
    for note in (*notes, *sorted(absent)):
        yield f"{note}\n"


def cell(name: str, ratio: Any) -> str | None:
    """Returns a ratio with its interval. A ratio of ours above 1 is bold."""
    if ratio is None:
        return None
    value = middle(ratio)
    shown = written(value) if name.startswith(OURS) else f"{value:.2f}x"
    spread = " ({low:.2f} to {high:.2f})".format(**ratio) if isinstance(ratio, dict) else ""
    return f"{shown}{spread}"


def middle(ratio: Any) -> float:
    return ratio["median"] if isinstance(ratio, dict) else ratio


def underflow(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield table(
        ("windows in the batch", "loss scale", "relative error", "entries lost"),
        [
            (
                str(row["batch"]),
                f"{row['loss_scale']:g}",
                f"{row['relative_error']:.2%}",
                f"{row['entries_lost']:.3%}",
            )
            for row in rows.values()
            if "batch" in row
        ],
    )


def means(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    dates = sorted({row["date"] for row in rows.values() if "date" in row})
    yield f"Measured on {', '.join(dates)}.\n"
    yield table(
        ("example, figure, run", "mean", "range of float32", "inside it", "no worse"),
        [
            (
                f"{module}, {figure}, {name}",
                f"{found['mean']:.4f}",
                "{:.4f} to {:.4f}".format(*found["float32"]),
                "yes" if found["within"] else "no",
                "yes" if found["no_worse"] else "**no**",
            )
            for module, figure, name, found in quality.verdicts(rows)
        ],
    )


def errors(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield table(
        ("model", *codes.STORAGES, "8bit / fast"),
        [
            (name, *(f"{row[s]:.2%}" for s in codes.STORAGES), f"{row['ratio']:.2f}x")
            for name, row in rows.items()
            if "ratio" in row
        ],
    )


OWN = {"underflow": underflow, "codes": errors, quality.CASE: means}


def short(rows: goals.Rows, causes: dict[str, Any]) -> list[tuple[str, str, float, str]]:
    """Returns our ratios above 1.00x: the worst row for each ratio and cause."""
    worst: dict[tuple[str, str, str], tuple[float, str]] = {}
    for case in SAYS:
        why = causes.get(case, {})
        for name, row in rows.get(case, {}).items():
            for ratio, found in row.get("ratios", {}).items():
                if ratio.startswith(OURS) and above(middle(found)):
                    cause = why.get(f"{name}, {ratio}", why.get(ratio, why.get("all", "not known")))
                    seen = worst.get((case, ratio, cause), (0.0, ""))
                    worst[case, ratio, cause] = max(seen, (middle(found), name))
    return [
        (f"{case}, {name}", ratio, value, cause)
        for (case, ratio, cause), (value, name) in worst.items()
    ]
