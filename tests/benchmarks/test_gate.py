"""The gate: what it lets through, and what it fails."""

import json

import pytest

from benchmarks import Options, gate
from benchmarks.results import Results

ROW = {"temp_mib": 100.0, "bytes_gb": 10.0, "looped_gb": 20.0}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gate.json"


def judge(path, found, monkeypatch, fresh=False):
    """Runs the gate on GPT-2, where every compilation finds these figures."""
    monkeypatch.setattr(gate, "figures", lambda *_: found)
    results = Results.open(path, fresh=fresh, **gate.SETTINGS)
    return gate.run(Options(cases=("gpt2",), fresh=fresh), results)


def test_gate_records_and_passes_what_is_not_recorded(path, monkeypatch):
    assert judge(path, ROW, monkeypatch) == []
    assert set(json.loads(path.read_text())["cases"]["gpt2"]) == {
        *gate.MORE["gpt2"],
        "by hand, strict",
        "by hand",
        "autocast",
        "autocast, lean",
    }


@pytest.mark.parametrize("figure", gate.JUDGED)
def test_gate_fails_figures_more_than_two_percent_worse(path, monkeypatch, figure):
    judge(path, ROW, monkeypatch)
    before = path.read_text()
    assert judge(path, {**ROW, figure: 1.019 * ROW[figure]}, monkeypatch) == []
    problems = judge(path, {**ROW, figure: 1.03 * ROW[figure]}, monkeypatch)
    assert len(problems) == len(gate.OURS) + len(gate.MORE["gpt2"])
    assert all(f"{figure} " in p and "1.030x" in p for p in problems)
    assert judge(path, {**ROW, figure: 0.5 * ROW[figure]}, monkeypatch) == []
    assert path.read_text() == before


def test_gate_fails_what_does_not_compile(path, monkeypatch):
    assert judge(path, {"failed": "CompileError"}, monkeypatch)
    judge(path, ROW, monkeypatch, fresh=True)
    problems = judge(path, {"failed": "CompileError"}, monkeypatch)
    ours = *gate.OURS, *gate.MORE["gpt2"]
    assert problems == [f"gpt2, {rival}: CompileError" for rival in ours]


def test_gate_does_not_compare_figures_of_another_jax(path, monkeypatch, capsys):
    judge(path, ROW, monkeypatch)
    stored = json.loads(path.read_text())
    stored["versions"]["jax"] = "0.0.1"
    path.write_text(json.dumps(stored))
    twice = {**ROW, "temp_mib": 200.0}
    assert judge(path, twice, monkeypatch) == []
    assert "Not compared: recorded with {'jax': '0.0.1'" in capsys.readouterr().out
    assert json.loads(path.read_text()) == stored
    assert judge(path, twice, monkeypatch, fresh=True) == []
    assert json.loads(path.read_text())["cases"]["gpt2"]["autocast"] == twice
