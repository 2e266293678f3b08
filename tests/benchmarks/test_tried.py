"""The suite on small kernels and known bytes: its changes, what is recorded, and its table."""

import contextlib
import json

import jax
import pytest
from support import thorough_but

from benchmarks import RESULTS, Options, tried
from benchmarks.models import SMALL
from benchmarks.page import tried as page
from benchmarks.results import FAILED, Results
from benchmarks.rivals import program
from benchmarks.tried import CASES, CHANGES, WITH, WITHOUT

# Not kept although they win: 16-bit logits change results, and casts by hand are no part of mpjax.
WINS = ("half_logits", "cast_before_the_loop_by_hand")
RECORDED = json.loads((RESULTS / "tried.json").read_text())["cases"]


def lowered(change, *patches):
    """Returns the StableHLO of a small model's step for a GPU."""
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        found = program(change.model, change.way, "bfloat16", **SMALL[change.model])
        traced = jax.jit(found.step).trace(found.state, found.batch)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("case", thorough_but(CASES, "cast_before_the_loop_by_hand"))
def test_each_change_changes_its_program_and_is_taken_back(case):
    change = CHANGES[case]
    plain = lowered(change)
    assert lowered(change, *change.patches) != plain
    assert lowered(change) == plain


def test_each_program_is_compiled_once(monkeypatch, tmp_path):
    asked = []

    def compiled(model, way, sizes, *changes):
        asked.append((model, way, changes))
        return {"kernels": len(asked)}, None

    monkeypatch.setattr(tried, "compiled", compiled)
    monkeypatch.setattr(tried, "on_the_cpu", lambda: None)
    results = Results.open(tmp_path / "tried.json", **tried.SETTINGS)
    for _ in range(2):  # what has a row is not compiled again
        tried.run(Options(cases=CASES, smoke=True), results)
    assert len(asked) == len(set(asked)) == 15
    assert {*results.cases} == {*CASES}
    for case, rows in results.cases.items():
        change = CHANGES[case]
        changes = [asked[rows[name]["kernels"] - 1][2] for name in (WITHOUT, WITH)]
        assert changes == ([change.patches, ()] if change.kept else [(), change.patches])


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_wins_and_what_is_not_costs(case):
    without, with_it = (RECORDED[case][name] for name in (WITHOUT, WITH))
    ratios = {key: with_it[key] / without[key] for key in page.FIGURES}
    worst = max(ratios["expected_ms"], ratios["temp_mib"])
    if CHANGES[case].kept:
        assert ratios["expected_ms"] < 0.995 and worst <= 1.005
    elif case not in WINS:
        assert worst > 1.005


def test_table_shows_each_change_with_its_figures_and_whether_it_is_kept():
    row = {"kernels": 1931, "temp_mib": 5.0, "bytes_gb": 2.0, "looped_gb": 3.0, "expected_ms": 8.0}
    stored = {
        "joined_updates": {WITHOUT: row, WITH: {**row, "kernels": 750, "expected_ms": 7.654}},
        "copy_of_weights": {WITHOUT: row, WITH: {FAILED: "CompileError: no"}},
        "half_logits_odd": {WITHOUT: row},
    }
    text = page.section({"cases": stored}, {})
    model, trained = "GPT-2 124M, fused attention", "GPT-2 124M, build_train_step, fused attention"
    assert f"together | {trained} | yes: fewer kernels | 1,931 → 750 |" in text
    assert "| 5 → 5 | 2.00 → 2.00 | 3.00 → 3.00 | 8.00 → 7.65 |" in text
    assert f"| {model} | no: more bytes | CompileError: no | - | - | - | - |" in text
    assert "not measured" in text
    assert {*page.WORDS} == {*CASES}
