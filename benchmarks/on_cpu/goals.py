"""The goals on a CPU, as data. Case "goals" has a row for each, which says whether it is met."""

from collections.abc import Iterator
from typing import Any

from benchmarks.on_cpu import dispatch, overhead, quality

CASE = "goals"
# By case: a ratio, and the largest median that meets the goal.
RATIOS: dict[str, dict[str, float]] = {
    "steps": {"autocast / by hand": 1.00},
    "overhead": {f"mpjax {policy} / optax {policy}": 1.02 for policy in overhead.POLICIES},
    "dispatch": {f"{dispatch.OURS} / {dispatch.BARE}": 1.05},
    "bf16_dots": {"autocast / float32": 1.00},
}
QUALITY = ("mixed_bfloat16", "mixed_float16", "O2:float16")

Rows = dict[str, dict[str, dict[str, Any]]]


def judge(results: Any) -> None:
    """Writes a row for each goal: its bound, the measured value, and whether the goal is met."""
    results.cases[CASE] = dict(found(results.cases))
    results.write()


def found(rows: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each goal with its row; ``met`` is None if nothing was measured.

    ``sure`` tells whether the whole 95% interval lies on the side of the bound where the median is.
    """
    for case, bounds in RATIOS.items():
        for name, bound in bounds.items():
            measured = {row: r.get("ratios", {}).get(name) for row, r in rows.get(case, {}).items()}
            for row, ratio in (measured or {"": None}).items():
                yield ", ".join(filter(None, (case, row, name))), at_most(bound, ratio)
    seen = {
        (module, figure, name): verdict
        for module, figure, name, verdict in quality.verdicts(rows.get(quality.CASE, {}))
    }
    for module, figures in quality.FIGURES.items():
        for figure in figures:
            for policy in QUALITY:
                verdict = seen.get((module, figure, policy))
                yield (
                    f"quality, {module}, {policy}: {figure} no worse than float32's worst seed",
                    {
                        "bound": verdict and verdict["float32"],
                        "found": verdict and verdict["mean"],
                        "met": verdict and verdict["no_worse"],
                    },
                )


def at_most(bound: float, ratio: dict[str, Any] | None) -> dict[str, Any]:
    if ratio is None:
        return {"bound": bound, "found": None, "met": None}
    met = ratio["median"] <= bound
    sure = ratio["high"] <= bound if met else ratio["low"] > bound
    return {"bound": bound, "found": ratio, "met": met, "sure": sure}


def words(row: dict[str, Any]) -> str:
    """Says whether a goal is met, and whether the interval leaves a doubt."""
    if row["met"] is None:
        return "not measured"
    doubt = ", though the interval reaches the bound" if row.get("sure") is False else ""
    return ("met" if row["met"] else "not met") + doubt
