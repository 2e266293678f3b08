"""The section of the cpu suite: its goals, and a table for each case."""

from collections.abc import Iterator
from typing import Any

from benchmarks.models import TITLES
from benchmarks.on_cpu import codes, dots, goals, quality, searches
from benchmarks.on_gpu.tables import reason
from benchmarks.page.goals import RANGE, Goal, every, recorded
from benchmarks.page.tables import UNKNOWN, above, shortfalls, shown, table, written

# The heading of each case, and what is said above its table.
SAYS = {
    "steps": (
        "Time of a training step on a CPU",
        "Small models trained in bfloat16 with each library, timed in pairs. Casts by hand are "
        "mostly slower than float32, because XLA converts the operands of their matmuls to "
        "float32, and rounding comes on top",
    ),
    "overhead": (
        "Overhead relative to plain optax",
        "A complete mpjax step relative to plain optax with the same casts, timed in pairs",
    ),
    "gates": (
        "Finite check: select or branch",
        "mpjax's step with its finite check as a select and as a branch, timed in pairs. On a CPU, "
        "each pass writes one array, so a select computes the new moments again for the "
        "parameters. mpjax uses a branch there",
    ),
    "dispatch": ("Dispatch time", "Host time to dispatch an almost empty step"),
    "tracing": (
        "Tracing and compile time",
        "Time to trace and compile a gradient, before the first step; also the equations of the "
        "traced program, and the Python calls made to trace it",
    ),
    "reports": (
        "Overflow and underflow reports",
        "A float16 step with reports relative to one without, timed in pairs",
    ),
    "histogram": (
        "Gradient histogram",
        "A step with a gradient histogram relative to one without, timed in pairs",
    ),
    "instruments": (
        "Time and memory of find_nonfinite and compare",
        "Both run a program operation by operation. They are compared with the compiled gradient, "
        "and with the same operations run one by one",
    ),
    "checkpoints": (
        "Checkpoint checksums",
        "The time of checksums relative to a save and to a restore without them",
    ),
    "underflow": (
        "Gradient underflow in float16",
        "One gradient of the byte-level GPT in float16, compared with float32",
    ),
    "codes": (
        "Gradient error by storage",
        "Error of a bfloat16 gradient relative to float32, by `storage`, in small versions of "
        "these models",
    ),
    "searches": (
        "Searches of the cheapest float32 part",
        "`debug.tune` beside delta debugging, as in Precimonious (SC 2013), and greedy gains less "
        "the cost of casts, as in Campo (ATC 2022), both written from the papers. Of 220 sums of 9 "
        "errors the optimum is known. On programs all three measure by one mask, and the last set "
        "is compiled; error is relative to the tolerance, cost is the time that float32 adds to a "
        "step on an H100. A search that has not ended after 1,000 runs has no run left to compile "
        "a set, so the given policy stays. Gradients: the processor time in those of one gradient",
    ),
    "bf16_dots": (
        "Training an MLP on a CPU with bfloat16 instructions",
        "Networks that consist almost only of matmuls, timed in pairs",
    ),
    "inference": (
        "Inference with bfloat16 weights on a CPU",
        "Forward passes with bfloat16 weights relative to float32, timed in pairs",
    ),
    "quality": (
        "Held-out quality by policy",
        "Means over three seeds, compared with the range of float32's seeds",
    ),
}
OURS = ("autocast", "mpjax")
# The kind of each goal, by its case and ratio; the rest of its name says which one it is.
KINDS = {
    ("steps", goals.BY_HAND): "time of a step relative to casts by hand",
    ("steps", goals.FLOAT32): "time of a step relative to float32",
    ("steps and bf16_dots", "geometric mean"): "time of a step relative to casts by hand, mean",
    ("bf16_dots", goals.FLOAT32): "time of a step relative to float32",
    "overhead": "time of a step relative to plain optax",
    "dispatch": "dispatch time relative to a bare step",
}
NO_WORSE = " no worse than float32's worst seed"


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns the goals, a table for each case, and our ratios above 1.00x."""
    rows = stored["cases"]
    parts = [
        "A ratio is the median over rounds, with its 95% bootstrap interval in brackets. Other "
        f"programs kept {busy(rows)} of the machine's cores busy during the measurement. "
        "Goals relative to float32 are for CPUs with instructions for bfloat16. *Within noise*: "
        "the interval reaches the bound.\n",
        "### Goals on a CPU\n",
        every(judged(stored)),
    ]
    for case, (title, says) in SAYS.items():
        if case in rows:
            parts.append(f"### {title}\n\n{says}.\n")
            parts += OWN.get(case, ratios)(rows[case])
    return "\n".join((*parts, shortfalls(short(rows, causes))))


def judged(stored: dict[str, Any]) -> list[Goal]:
    """Returns the goals."""
    return [_goal(name, row) for name, row in goals.found(stored["cases"])]


def _goal(name: str, row: dict[str, Any]) -> Goal:
    if name.endswith(NO_WORSE):
        of = shown(name.removeprefix("quality, ").removesuffix(NO_WORSE))
        kind, sense, unit = "held-out result no worse than float32", RANGE, ""
    else:
        case, *middle, last = name.split(", ")
        kind = KINDS.get((case, last)) or KINDS.get(case, shown(f"{case}, {last}"))
        ours = last.partition(" / ")[0].removeprefix("mpjax").strip() if case == "overhead" else ""
        of = "" if case not in SAYS else shown(", ".join(filter(None, (*middle, ours))))
        sense, unit = "<=", "x"
    return recorded(row, kind, of, sense, unit, same=sense != RANGE)


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
            (shown(name), *(cell(name, found.get(name)) for found in measured.values()))
            for name in names
        ]
        yield table(("ratio", *map(shown, measured)), cells)
    notes = [f"{shown(name)}: {why}." for name, row in rows.items() if (why := reason(row))]
    notes += [
        f"{shown(name)}: {row['cpu']}; under autocast {dots.reading(row['matmuls']['autocast'])}."
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
        ("example, result, policy", "mean", "range of float32", "inside it", "no worse"),
        [
            (
                shown(f"{module}, {figure}, {name}"),
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
        ("model", *(f"`{storage}`" for storage in codes.STORAGES), "8bit / fast"),
        [
            (
                TITLES.get(name, name),
                *(f"{row[s]:.2%}" for s in codes.STORAGES),
                f"{row['ratio']:.2f}x",
            )
            for name, row in rows.items()
            if "ratio" in row
        ],
    )


def searched(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield table(
        ("search", "within 5% of the optimum", "cost / optimum", "sets measured"),
        [
            (
                name.removeprefix(f"{searches.SUMS}, "),
                f"{row['near']:.0%}",
                f"{row['cost']:.2f}x",
                f"{row['measured']:.0f}",
            )
            for name, row in rows.items()
            if "near" in row
        ],
    )
    yield table(
        (
            *("program, search", "places", "in float32", "runs", "processor time", "gradients"),
            *("cost", "error", "meets the tolerance"),
        ),
        [
            (
                shown(name),
                *(str(row[figure]) for figure in ("places", "float32", "runs")),
                f"{row['processor_seconds']:.0f} s",
                f"{row['gradients']:,.0f}",
                f"{row['cost'] * 1e9:.2f} ns",
                f"{row['error']:.2f}x",
                "yes" if row["met"] else "no",
            )
            for name, row in rows.items()
            if "places" in row
        ],
    )


OWN = {"underflow": underflow, "codes": errors, "searches": searched, quality.CASE: means}


def short(rows: goals.Rows, causes: dict[str, Any]) -> list[tuple[str, str, float, Any]]:
    """Returns our ratios above 1.00x: the worst row for each ratio and cause."""
    worst: dict[tuple[str, str, str], tuple[float, str, Any]] = {}
    for case in SAYS:
        why = causes.get(case, {})
        for name, row in rows.get(case, {}).items():
            for ratio, found in row.get("ratios", {}).items():
                if ratio.startswith(OURS) and above(middle(found)):
                    cause = why.get(f"{name}, {ratio}", why.get(ratio, why.get("all", UNKNOWN)))
                    seen = worst.get((case, ratio, str(cause)), (0.0, "", cause))
                    worst[case, ratio, str(cause)] = max(seen, (middle(found), name, cause))
    return [
        (f"{SAYS[case][0]}: {shown(name)}", shown(ratio), value, cause)
        for (case, ratio, _), (value, name, cause) in worst.items()
    ]
