"""The suite "expected": constants fitted to measured steps, each predicted by the others."""

import json

import click
import numpy as np
import pytest
from absent import answer

from benchmarks import RESULTS, Options, expected
from benchmarks.page import expected as page
from benchmarks.results import FAILED, Results
from mpjax._src.tools.hardware.hlo_costs import costs
from mpjax._src.tools.hardware.targets import PACES, find_target


@pytest.fixture(scope="module")
def stored():
    return json.loads((RESULTS / "expected.json").read_text())


def row(rng, constants, **more):
    kinds = (
        "matmuls",
        "matmuls with an odd axis",
        "fused attention",
        "convolutions",
        "elementwise",
    )
    runs, times = rng.integers(1, 1000, 5).tolist(), rng.uniform(1, 9, 5).tolist()
    found = [{"runs": n, "ms": ms} for n, ms in zip(runs, times, strict=True)]
    result = {"kinds": dict(zip(kinds, found, strict=True)), **more}
    return {**result, "ms": expected.time_of(result, constants)}


CONSTANTS = [1.2, 1.4, 3.0, 4.0, 2.0, 1.5e-6]


def test_fit_finds_the_constants_that_made_the_times(rng):
    rows = [row(rng, CONSTANTS) for _ in range(9)]
    assert expected.fit(rows) == pytest.approx(CONSTANTS, rel=1e-6)


def test_fit_stays_in_its_range(rng):
    rows = [row(rng, [0.5, 1.4, 9.0, 4.0, 2.0, 9e-6]) for _ in range(9)]
    found = expected.fit(rows)
    assert all(
        low <= value <= high + 1e-12
        for low, value, high in zip(expected.LEAST, found, expected.MOST, strict=True)
    )


def test_a_program_does_not_predict_itself(rng):
    """One that takes twice as long is predicted by the others, and float32 changes no constant."""
    rows = {f"mpjax {n}": row(rng, CONSTANTS) for n in range(9)}
    slow = row(rng, CONSTANTS)
    cases = {
        "gpt2": {**rows, "mpjax slow": {**slow, "ms": 2 * slow["ms"]}},
        "llama": {"float32": {**slow, "ms": 5 * slow["ms"]}},
        "forecast": {"bert, mpjax fused": row(rng, CONSTANTS)},
    }
    expected.predict(cases)
    assert cases["gpt2"]["mpjax slow"]["predicted_ms"] == pytest.approx(slow["ms"], rel=1e-4)
    missed = cases["fit"]["left out"]
    assert missed["programs"] == 10 and missed["most"] > 0.4
    del cases["llama"]
    constants = cases["fit"]["all"]
    expected.predict(cases)
    assert cases["fit"]["all"] == constants


def test_constants_of_the_library_are_those_of_the_results(stored):
    found = stored["cases"]["fit"]["all"]
    for name, value in found.items():
        digits = 7 if name == "start" else 2
        assert getattr(PACES["h100"], name) == pytest.approx(round(value, digits))
    most = stored["cases"]["fit"]["left out"]["most"]
    assert f"{most:.0%}" in PACES["h100"].source and most < 0.08


def test_results_have_each_step_that_was_timed(stored):
    timed = json.loads((RESULTS / "gpu.json").read_text())["cases"]
    for case in expected.TIMED:
        times = {way: r["ms"] for way, r in timed[f"speed {case}"].items() if "ms" in r}
        assert times == {way: r["ms"] for way, r in stored["cases"][case].items()}
        assert {r["commit"] for r in stored["cases"][case].values()} == {expected.TIMED[case]}
    assert {*stored["cases"]["forecast"]} == {*expected.FORECASTS}
    again = json.loads(json.dumps(stored["cases"]))
    expected.predict(again)
    for case, rows in again.items():
        for way, found in rows.items():
            if "predicted_ms" in found:
                recorded = stored["cases"][case][way]["predicted_ms"]
                assert recorded == pytest.approx(found["predicted_ms"], rel=1e-3)


def test_section_has_each_prediction_beside_its_measured_time(stored):
    text = page.section(stored, {})
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [row for case in expected.TIMED for row in stored["cases"][case].values()]
    for found in rows:
        beside = f"| {found['predicted_ms']:.1f} ms | {found['ms']:.1f} ms |"
        assert any(beside in line for line in lines)
    forecast = stored["cases"]["forecast"]["bert, mpjax fused"]["predicted_ms"]
    assert any(line.startswith("| BERT-base") and f"{forecast:.1f} ms" in line for line in lines)


def test_rows_count_the_kernels_of_the_program():
    text = answer("h100", "step")["hlo"]
    found = expected.counted(text, find_target("h100"))
    assert found["kernels"] == sum(kind["runs"] for kind in found["kinds"].values()) == 11
    assert found["gb"] == round(costs(text).bytes / 1e9, 3)
    assert found["kinds"]["matmuls with an odd axis"]["runs"] == 2


def test_step_that_fails_to_compile_has_its_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(expected, "COMPILE", "raise ValueError('no tiles')")
    assert expected.figures("bert", "mpjax fused", {}, "", True) == {FAILED: "ValueError: no tiles"}
    monkeypatch.setattr(expected, "COMPILE", "raise ImportError('mpjax[aot] is missing')")
    with pytest.raises(click.ClickException, match="is missing"):
        expected.figures("bert", "mpjax fused", {}, "", True)


def test_suite_compiles_what_was_timed_by_the_version_that_was(monkeypatch, tmp_path):
    asked = []

    def figures(case, way, sizes, commit, smoke):
        asked.append((case, commit, sizes))
        return {"kinds": {"matmuls": {"runs": len(way), "ms": float(np.float64(len(way)))}}}

    monkeypatch.setattr(expected, "figures", figures)
    results = Results.open(tmp_path / "expected.json", device="none")
    assert not expected.run(Options(cases=("llama", "bert")), results)
    assert asked == [("llama", expected.TIMED["llama"], {}), ("bert", "", {})]
    expected.run(Options(cases=("llama", "bert")), results)
    assert len(asked) == 2  # what has a row is not compiled again
    expected.run(Options(cases=("gpt2",), smoke=True), results)
    assert {commit for _, commit, _ in asked[2:]} == {""} and len(asked) > 3
