"""The suite `fit`: which settings it compiles, and what it says of their frontier."""

import pytest
from absent import report

from benchmarks import Options, fit
from benchmarks.results import Results
from mpjax._src.tools.hardware.trials import Steps


def row(mib, ms):
    return {"total_mib": float(mib), "roofline_ms": float(ms)}


ROWS = {
    "as given": row(100, 10),
    "storage lean": row(80, 12),
    "fused attention": row(80, 9),
    "jax.checkpoint, nothing_saveable": row(120, 13),
    "jax.checkpoint, dots_saveable": row(70, 20),
}


def test_frontier_is_what_no_other_setting_beats():
    assert fit.frontier(ROWS) == ["fused attention", "jax.checkpoint, dots_saveable"]
    assert fit.frontier(ROWS | {"other": row(70, 20)})[1] == "jax.checkpoint, dots_saveable"


def test_show_says_what_dominates_the_judged_settings(capsys):
    fit.show("gpt2", ROWS)
    shown = " ".join(capsys.readouterr().out.split())
    assert "gpt2: 100 MiB, 10 ms" in shown and "fused attention 0.800x 0.900x frontier" in shown
    assert "as given is beaten; no better than: fused attention" in shown
    assert "nothing_saveable is beaten; no better than: as given; storage lean; fused" in shown
    fit.show("gpt2", {})
    assert not capsys.readouterr().out


def test_faults_are_a_checkpoint_that_is_better_and_numbers_that_do_not_fall():
    assert list(fit.faults(ROWS)) == []
    better = ROWS | {fit.NOTHING: row(60, 9)}
    assert list(fit.faults(better)) == [f"no setting of the policy dominates {fit.NOTHING}"]
    numbers = {
        "storage 1.0": row(100, 10),
        "storage 0.5": row(101.9, 9.9),
        "storage 0": row(90, 20),
    }
    assert list(fit.faults(numbers)) == []
    for worse in (row(103, 11), row(90, 9.7)):
        (fault,) = fit.faults(numbers | {"storage 0.5": worse})
        assert fault.startswith("storage 0.5 is not below storage 1.0")
    fused = {f"fused attention, {name}": row for name, row in numbers.items()}
    assert fit.by_number(fused | numbers | ROWS) == {
        "": ["storage 1.0", "storage 0.5", "storage 0"],
        "fused attention, ": [f"fused attention, storage {n}" for n in ("1.0", "0.5", "0")],
    }


@pytest.mark.thorough
@pytest.mark.parametrize("case", ["llama_layers", "bert"])
def test_the_suite_compiles_each_setting_once_judged_ones_first(case, tmp_path, monkeypatch):
    compiled = []

    def compile_setting(self, setting, args):
        compiled.append(setting.name)
        return None if setting.keeping == "dots_saveable" else report("h100")

    monkeypatch.setattr(Steps, "compiled", compile_setting)
    monkeypatch.setattr(fit, "on_the_cpu", lambda: None)
    results = Results.open(tmp_path / "fit.json", **fit.SETTINGS)
    fit.run(Options(cases=(case,), parts=fit.PARTS, smoke=True), results)
    assert compiled[:3] == list(fit.JUDGED) and len(set(compiled)) == len(compiled)
    keeping = [name for name in compiled if "jax.checkpoint" in name]
    fused = [name for name in keeping if name.startswith("fused attention")]
    assert fused and len(keeping) == 2 * len(fused)
    rows = results.cases[case]
    assert "failed" in rows["jax.checkpoint, dots_saveable"] and rows["as given"]["total_mib"]
