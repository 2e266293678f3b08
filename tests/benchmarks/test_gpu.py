"""The gpu suite: every part runs on a CPU, stops when its budget is spent, and goes on."""

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import Options, gpu
from benchmarks.on_gpu import cases, children, quality, speed, worker
from benchmarks.results import Results

ROOT = Path(__file__).parents[2]
NO_TORCH = importlib.util.find_spec("torch") is None


@pytest.fixture
def results(tmp_path):
    return Results.open(tmp_path / "gpu.json", fresh=True, smoke=True)


def options(*parts, **others):
    given = {"cases": ("gpt2",), "parts": parts, "smoke": True, **others}
    return Options(**given)


@pytest.fixture
def cache(tmp_path_factory):
    """Compiled programs are shared by the tests."""
    return tmp_path_factory.getbasetemp() / "compiled"


@pytest.mark.thorough
def test_speed_times_pairs_and_says_what_is_missing(results, cache, monkeypatch, capsys):
    monkeypatch.setattr(speed, "TIERS", (("torch autocast, compile", "by hand"),))
    monkeypatch.setattr(speed, "OURS", ("mpjax",))
    gpu.run(options("speed", cache=cache), results)
    rows = results.cases["speed gpt2"]
    by_hand = rows["by hand"]
    assert by_hand["ms"] > 0 and by_hand["parameters"] == rows["mpjax"]["parameters"]
    assert by_hand["joules"] or by_hand["no_joules"]
    ratio = by_hand["ratios"]["mpjax / by hand"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    theirs = rows["torch autocast, compile"]
    if NO_TORCH:
        assert theirs == {"skipped": "torch is not installed"}
    else:
        assert theirs["parameters"] == rows["mpjax"]["parameters"]
    assert rows["mpjax"]["loss"] == pytest.approx(by_hand["loss"], abs=0.1)
    printed = capsys.readouterr().out
    assert "gpt2: not slower than by hand" in printed and "mpjax / rival" in printed


@pytest.mark.thorough
def test_gpu_memory_part_says_what_cannot_be_compared(results, cache):
    gpu.run(options("memory", "predictions", cache=cache), results)
    row = results.cases["memory gpt2"]["mpjax"]
    assert row["compiled"]["arguments"] > 0 and row["compiled"]["temporary"] > 0
    assert "cpu" in row["no_peak"] and "'cpu'" in row["no_prediction"]


@pytest.mark.thorough
def test_gpu_quality_part_trains_the_example(results, cache, monkeypatch):
    monkeypatch.setattr(quality, "POLICIES", ("float32", "mixed_float16"))
    gpu.run(options("quality", cache=cache), results)
    rows = results.cases[quality.CASE]
    assert list(rows) == ["float32, seed 0", "mixed_float16, seed 0"]
    assert all(0 < row["bits_per_byte"] < 9 and row["losses"] for row in rows.values())


@pytest.mark.thorough
def test_gpu_tests_part_counts_tests(results):
    gpu.run(options("tests"), results)
    rows = results.cases["tests"]
    assert rows["all"] == {"files": 1}
    assert rows["tests/core/base/test_dtypes.py"]["passed"] > 9
    assert rows["tests/core/base/test_dtypes.py"]["failures"] == 0
    assert results.cases["goals"]["the repository's tests that fail"]["met"] is True


@pytest.mark.thorough
def test_gpu_command_runs_all_parts(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--smoke", "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(
        [*command, "--cache", str(tmp_path / "cache")],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Goals" in done.stdout and "failed" not in done.stdout


# ---- budgets -------------------------------------------------------------------------------------


class Bell:
    """A budget that rings after so many rivals were built."""

    def __init__(self, rivals):
        self.rivals, self.built = rivals, []

    def left(self):
        return self.rivals - len(self.built)

    def call(self, function, case, rival, *args):
        if function is worker.build:
            if self.left() <= 0:
                raise children.Late("build")
            self.built.append((case, rival))
            facts = {"parameters": 7, "compile_s": 1.0}
            return {**facts, "peak": 1e12, "no_joules": "none here"}
        if function is worker.warm:
            return {"seconds": 0.1}
        return 0.5 if function is worker.loss else {"seconds": 0.1 * args[0]}


@pytest.fixture
def ring(monkeypatch, results):
    def ring(rivals, budget=100.0):
        bell = Bell(rivals)

        @contextlib.contextmanager
        def processes(smoke, variables, left):
            yield lambda framework: contextlib.nullcontext(bell.call)

        monkeypatch.setattr(speed, "processes", processes)
        asked = options("speed", cases=("gpt2", "resnet50"), smoke=False, budget=budget)
        with contextlib.suppress(children.Late):
            speed.run(asked, results, bell.left, {})
        return bell.built

    return ring


def test_a_budget_that_runs_out_leaves_rows_and_the_next_call_goes_on(ring, results):
    first = {*speed.OURS, *speed.TIERS[0]}
    assert len(ring(len(first) + 1)) == len(first) + 1
    assert set(results.cases["speed gpt2"]) == first
    assert "speed resnet50" not in results.cases
    before = {(case, rival) for case, rows in results.cases.items() for rival in rows}
    again = ring(1000)
    anew = [pair for pair in again if (f"speed {pair[0]}", pair[1]) in before]
    assert {rival for _, rival in anew} <= set(speed.OURS)  # what the others are held against
    assert ring(1000) == []


def test_speed_runs_the_first_tier_of_rivals_for_all_models_first(ring):
    first = [(case, r) for case in ("gpt2", "resnet50") for r in speed.TIERS[0]]
    built = [pair for pair in ring(1000) if pair[1] not in speed.OURS]
    first = [pair for pair in first if speed.applies(*pair)]
    assert set(built[: len(first)]) == set(first)


def test_rival_that_takes_longer_than_the_budget_is_not_tried_again(ring, results):
    ring(1, budget=100.0)
    assert not results.cases
    ring(1, budget=1.0)
    assert "takes longer than the budget" in str(results.cases)


def test_child_process_is_killed_when_the_budget_is_spent():
    times = iter([60.0])
    with (
        pytest.raises(children.Late, match="sleep"),
        children.child({"MPJAX_TEST": "1"}, lambda: next(times, 0.2)) as call,
    ):
        assert call(os.getenv, "MPJAX_TEST") == "1"
        call(__import__("time").sleep, 60)


def test_gpu_suite_imports_no_jax_before_a_worker_is_set_up():
    code = "import sys, benchmarks.gpu; assert not {'jax', 'torch', 'mpjax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_rivals_of_torch_run_in_processes_of_torch():
    names = [rival for tier in speed.TIERS for rival in tier]
    theirs = {name for name in names if worker.framework_of(name) == "torch"}
    assert {name for name in names if name.startswith("torch")} | {"Transformer Engine"} == theirs
    assert set(cases.SMOKE) == set(cases.SIZES) == set(gpu.CASES)
    assert SimpleNamespace(**cases.SIZES["gpt2"]).vocabulary == 50257
