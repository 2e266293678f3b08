"""The goals on a CPU, as data. Case "goals" has a row for each, which says whether it is met."""

from collections.abc import Iterator
from statistics import geometric_mean
from typing import Any

from benchmarks.on_cpu import dispatch, dots, overhead, quality

CASE = "goals"
BY_HAND, FLOAT32 = "autocast / by hand", "autocast / float32"
# By case: a ratio, and the largest median that meets the goal, of all rows or of each one. Those
# relative to float32 are for CPUs that multiply bfloat16.
RATIOS: dict[str, dict[str, float | dict[str, float]]] = {
    "steps": {
        BY_HAND: 1.00,
        FLOAT32: {
            "gpt2": 0.65,
            "gpt2, width 512": 0.58,
            "lstm": 1.00,
            "lstm, width 512": 0.95,
            "vit": 0.70,
            "bert": 0.70,
            "resnet18": 1.00,
        },
    },
    "overhead": {f"mpjax {policy} / optax {policy}": 1.02 for policy in overhead.POLICIES},
    "dispatch": {f"{dispatch.OURS} / {dispatch.BARE}": 1.05},
    "bf16_dots": {FLOAT32: {dots.name(dots.SIZES[0]): 0.70}},
}
# The largest geometric mean of autocast relative to casts by hand, over all rows that have a goal
# relative to float32.
MEAN_BY_HAND = 0.72
QUALITY = ("mixed_bfloat16", "mixed_float16", "O2:float16", *quality.CODED)

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
            measured = of_rows(rows, case, name)
            if not isinstance(bound, dict):
                bound = dict.fromkeys(measured or [""], bound)
            for row, most in bound.items():
                named = ", ".join(filter(None, (case, row, name)))
                yield named, at_most(most, measured.get(row))
    yield f"steps and bf16_dots, {BY_HAND}, geometric mean", mean_by_hand(rows)
    seen = {
        (module, figure, name): verdict
        for module, figure, name, verdict in quality.verdicts(rows.get(quality.CASE, {}))
    }
    for module, figures in quality.FIGURES.items():
        for figure in figures:
            for policy in filter(quality.runs(module).__contains__, QUALITY):
                verdict = seen.get((module, figure, policy))
                yield (
                    f"quality, {module}, {policy}: {figure} no worse than float32's worst seed",
                    {
                        "bound": verdict and verdict["float32"],
                        "found": verdict and verdict["mean"],
                        "met": verdict and verdict["no_worse"],
                    },
                )


def of_rows(rows: Rows, case: str, name: str) -> dict[str, Any]:
    """Returns a ratio of each row of a case, or None if it was not measured."""
    return {row: r.get("ratios", {}).get(name) for row, r in rows.get(case, {}).items()}


def mean_by_hand(rows: Rows) -> dict[str, Any]:
    ratios = [
        of_rows(rows, case, BY_HAND).get(row)
        for case, bounds in RATIOS.items()
        for row in bounds.get(FLOAT32, {})  # type: ignore[union-attr]
    ]
    found = None if None in ratios else geometric_mean(ratio["median"] for ratio in ratios)
    return {
        "bound": MEAN_BY_HAND,
        "found": found,
        "met": None if found is None else found <= MEAN_BY_HAND,
    }


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
    doubt = ", within noise" if row.get("sure") is False else ""
    return ("met" if row["met"] else "not met") + doubt
