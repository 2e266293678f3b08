"""The goals on a GPU, as data. Case "goals" has a row for each, which says whether it is met."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.on_gpu import quality, speed
from benchmarks.on_gpu.cases import SIZES
from benchmarks.on_gpu.repository_tests import ALL
from benchmarks.on_gpu.repository_tests import CASE as TESTS
from benchmarks.on_gpu.statistics import faster, not_slower

CASE = "goals"
COMPILED = "torch autocast, compile"
# Fused attention is compared with fused attention.
BY_HAND = {"by hand": "mpjax", "by hand, fused": "mpjax fused"}

Rows = dict[str, dict[str, dict[str, Any]]]
# (model, rival, mpjax's way or None for the faster one, the factor, the test of the ratio)
RATIOS = (
    *((case, COMPILED, None, 1.0, faster) for case in SIZES),
    *((case, hand, way, 1.0, not_slower) for case in SIZES for hand, way in BY_HAND.items()),
    ("resnet50", "float32", None, 2.2, faster),
    ("bert", "float32", None, 2.3, faster),
)
MFU = (("gpt2_medium", 0.45),)
MEMORY = 0.1  # the largest error of a prediction, as a share of the peak


def judge(results: Any) -> None:
    """Writes a row for each goal: its bound, the measured value, and whether the goal is met."""
    for name, row in found(results.cases):
        results.cases.setdefault(CASE, {})[name] = row
    results.write()


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the goals from a suite's JSON. Without a file, none of them is measured."""
    rows = json.loads(path.read_text())["cases"] if path.exists() else {}
    return [{"goal": name, **row} for name, row in found(rows)]


def found(rows: Rows) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each goal with its row; ``met`` is None if nothing was measured."""
    for case, rival, way, bound, shown in RATIOS:
        if not speed.applies(case, rival):
            continue
        ratios = rows.get(f"speed {case}", {}).get(rival, {}).get("ratios", {})
        taken = [f"{way} / {rival}"] if way else sorted(ratios, key=lambda w: ratios[w]["median"])
        ratio = ratios.get(taken[0]) if taken else None
        rule = "faster than" if shown is faster else "not slower than"
        times = f"{bound:g} times " if bound != 1 else ""
        met = shown(ratio, 1 / bound) if ratio else None
        which = {"ratio": taken[0]} if ratio else {}
        yield f"{case}: {rule} {times}{rival}", _row(1 / bound, ratio, met) | which
    for case, bound in MFU:
        ours = [rows.get(f"speed {case}", {}).get(way, {}) for way in speed.OURS]
        best = max((row["mfu"] for row in ours if row.get("mfu")), default=None)
        yield f"{case}: share of the bfloat16 peak", _row(bound, best, best and best >= bound)
    for case in SIZES:
        for way, row in rows.get(f"memory {case}", {"mpjax": {}}).items():
            ratio = row.get("predicted_over_peak")
            met = None if ratio is None else abs(ratio - 1) <= MEMORY
            yield (
                f"{case}: memory of {way} as predicted",
                _row([1 - MEMORY, 1 + MEMORY], ratio, met),
            )
    shown = quality.verdicts(rows.get(quality.CASE, {}))
    for policy in quality.POLICIES[1:]:
        for figure in quality.FIGURES:
            verdict = shown.get(f"{policy}, {figure}")
            yield (
                f"{policy}: {figure} no worse than float32's seeds",
                _row(
                    verdict and list(verdict["float32"]),
                    verdict and verdict["mean"],
                    verdict and verdict["no_worse"],
                ),
            )
    yield "the repository's tests that fail", _tests(rows.get(TESTS, {}))


def _tests(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the row of all tests; it is met only if all files were run and no test failed."""
    files = [row for row in rows.values() if "failures" in row]
    failures = sum(row["failures"] for row in files) if files else None
    done = len(files) == rows.get(ALL, {}).get("files")
    return _row(0, failures, False if failures else (True if done else None))


def _row(bound: Any, value: Any, met: Any) -> dict[str, Any]:
    return {"bound": bound, "found": value, "met": met}
