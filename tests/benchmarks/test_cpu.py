"""The cpu suite: every case runs on small programs, goals are judged, and the page shows them."""

import contextlib
import functools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import Options, cpu
from benchmarks.__main__ import chosen
from benchmarks.on_cpu import (
    dispatch,
    dots,
    goals,
    inference,
    others,
    overhead,
    paired,
    quality,
    steps,
)
from benchmarks.on_cpu import tasks as tasks_
from benchmarks.page.cpu import SAYS, section
from benchmarks.results import Results

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path):
    return Results.open(tmp_path / "cpu.json", smoke=True)


def run(results, *cases):
    return cpu.run(Options(cases=cases, smoke=True), results)


@pytest.mark.thorough
def test_cpu_suite_command_runs_every_case_but_long_ones(tmp_path):
    out = tmp_path / "cpu.json"
    command = [sys.executable, "-m", "benchmarks", "--suite", "cpu", "--smoke", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=quick(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stored = json.loads(out.read_text())
    assert set(stored["cases"]) == set(cpu.CASES) - set(cpu.LONG) | {goals.CASE}
    rows = [row for rows in stored["cases"].values() for row in rows.values()]
    assert not any("failed" in row for row in rows)
    text = section(stored, {})
    assert all(f"### {SAYS[case][0]}\n" in text for case in SAYS if case in stored["cases"])


def quick():
    """Returns the environment of a trial: what is compiled is compiled fast."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0",
    }


def test_long_cases_are_run_when_they_are_named():
    assert quality.CASE not in chosen("CASE", (), cpu.CASES, cpu.LONG)
    assert chosen("CASE", (quality.CASE,), cpu.CASES, cpu.LONG) == (quality.CASE,)


def test_a_row_that_fails_stops_none_of_the_others(results, monkeypatch):
    def broken(smoke):
        yield "bad", lambda: 1 / 0
        yield "good", lambda: {"ratios": {}}

    monkeypatch.setitem(cpu.CASES, "steps", broken)
    assert run(results, "steps") == ["steps, bad: ZeroDivisionError: division by zero"]
    good = results.cases["steps"]["good"]
    assert "failed" in results.cases["steps"]["bad"] and good["load"]
    assert run(results, "steps") and results.cases["steps"]["good"] is good  # the bad one again


def test_watched_row_counts_cores_of_other_processes(monkeypatch):
    clock = iter([(10.0, 5.0), (16.0, 7.0)])  # all of the machine, this process
    seen = []

    def now():
        seen.append(next(clock))
        return seen[-1][0]

    monkeypatch.setattr(others, "_busy", now)
    monkeypatch.setattr(others, "_own", lambda: seen[-1][1] if seen else 5.0)
    monkeypatch.setattr(others.time, "monotonic", iter([0.0, 2.0]).__next__)
    row = others.watched(lambda: {"ms": 1})
    assert row["ms"] == 1 and row["seconds"] == 2.0 and row["load"]["cores_of_others"] == 2.0


# ---- what is timed -------------------------------------------------------------------------------


def test_pairs_are_timed_in_turn_and_take_the_ratio_of_rounds():
    order = []

    def clock(name, seconds):
        def run(count):
            order.append(name)
            return seconds * len(order)

        return run

    row = paired.measure({"a": clock("a", 2.0), "b": clock("b", 1.0)}, [("a", "b")], 4, turn=0.1)
    assert order[4:] == ["a", "b", "b", "a"] * 2 and row["steps_per_round"] == 1
    found = row["ratios"]["a / b"]
    assert found["low"] <= found["median"] <= found["high"] and found["rounds"] == 4


@pytest.mark.parametrize(
    "policy",
    [
        *(pytest.param(p, marks=pytest.mark.thorough) for p in overhead.POLICIES[:-1]),
        overhead.POLICIES[-1],
    ],
)
def test_hand_written_steps_train_as_mpjax_does(policy):
    task, losses = tasks_.tiny(), []
    for state, step in (overhead.mpjax_step(task, policy), overhead.optax_step(task, policy)):
        jitted = jax.jit(step)
        for _ in range(3):
            state, metrics = jitted(state, task.batch)
        losses.append(float(metrics["loss"] if isinstance(metrics, dict) else metrics))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_bare_dispatch_step_has_as_many_arrays(results):
    row = dispatch.paired(2, "mixed_float16", 2)
    assert row["ratios"][f"{dispatch.OURS} / {dispatch.BARE}"]["median"] > 0
    state, step = dispatch.bare({"a": 1.0, "b": 2.0}, dispatch.optax.sgd(1.0), 9, 3)
    assert len(dispatch.jax.tree.leaves(state)) == 9 and len(step(state, 1.0)[1]) == 3


def test_rivals_that_are_absent_are_named(monkeypatch):
    monkeypatch.setattr(steps, "lacks", lambda rival: "not here" if rival != "by hand" else None)
    row = steps.paired("ode", steps.SMALL["ode"], 2)
    assert set(row["ratios"]) == {"autocast / by hand"}
    assert row["absent"]["float32"] == "not here"


def test_dots_reading_says_what_is_multiplied_or_why_not(monkeypatch):
    assert dots.reading({"bf16": 3}).startswith("all 3 matmuls") and "half operands" in (
        dots.reading({"bf16": 3})
    )
    assert dots.reading({"f32": 3}).startswith("all 3 ")
    assert dots.reading({"f32": 2, "bf16": 3}).startswith("2 of 5 matmuls")
    native = "matmuls of the optimized program run in kernels of the CPU's own"
    assert dots.reading({dots.NATIVE: 3}).startswith(f"all 3 {native}")
    assert dots.reading({dots.NATIVE: 3, "bf16": 1}).startswith(f"3 of 4 {native}")
    monkeypatch.setattr("mpjax._src.core.base._jax.cpu_flags", frozenset)
    assert "no bfloat16 instructions were found" in dots.row(dots.SMOKE, 2)["skipped"]


HLO = """HloModule step

%kernel (a: bf16[2,2], b: bf16[2,2]) -> f32[2,2] {
  %a = bf16[2,2]{1,0} parameter(0)
  %b = bf16[2,2]{1,0} parameter(1)
  ROOT %dot.1 = f32[2,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[2,2], y: f32[2,2]) -> f32[2,2] {
  %x = bf16[2,2]{1,0} parameter(0)
  %y = f32[2,2]{1,0} parameter(1)
  %dot.2 = f32[2,2]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %dot.3 = bf16[2,2]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %f = f32[2,2]{1,0} fusion(%x, %x), kind=kCustom, calls=%kernel, backend_config={"x":KIND}
}
"""


@pytest.mark.parametrize(
    ("kind", "counted"),
    [
        (dots.KERNEL, {dots.NATIVE: 1, "f32": 1, "bf16": 1}),
        ("__other", {"f32": 1, "bf16": 2}),
    ],
)
def test_a_matmul_in_a_kernel_of_the_cpu_is_native(monkeypatch, kind, counted):
    compiled = types.SimpleNamespace(as_text=lambda: HLO.replace("KIND", f'"{kind}"'))
    lowered = types.SimpleNamespace(compile=lambda: compiled)
    jitted = types.SimpleNamespace(lower=lambda *args: lowered)
    monkeypatch.setattr(dots.jax, "jit", lambda step: jitted)
    assert dots.matmuls(None) == counted


def test_inference_of_bfloat16_weights_equals_that_of_float32(monkeypatch):
    """The rows' functions agree, and the weights are bfloat16 in both ways of half."""
    seen = {}

    def measure(timers, pairs, rounds):
        return {"ratios": dict.fromkeys(f"{a} / {b}" for a, b in pairs)}

    def timed(apply, params, x):
        got = jax.jit(apply)(params, x)
        seen[jax.tree.leaves(params)[0].dtype.name, got.dtype.name] = got
        return got

    monkeypatch.setattr(inference, "measure", measure)
    monkeypatch.setattr(inference, "timed", timed)
    row = inference.row(functools.partial(inference.mlp, width=16), 4, 2)
    assert set(row["ratios"]) == {"autocast / float32", "by hand / float32", "autocast / by hand"}
    assert {params for params, _ in seen} == {"float32", "bfloat16"}
    for got in seen.values():
        np.testing.assert_allclose(
            got.astype("float32"), seen["float32", "float32"], rtol=0.1, atol=0.02
        )
    names = [name for name, _ in inference.case(False)]
    assert len(names) == 6 and "gpt2, width 512, batch 64" in names


# ---- goals and quality ---------------------------------------------------------------------------


def ratio(median, low, high):
    return {"median": median, "low": low, "high": high, "rounds": 9, "quartiles": [low, high]}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ratio(0.9, 0.8, 0.95), "met"),
        (ratio(0.99, 0.9, 1.1), "met, within noise"),
        (ratio(1.01, 0.9, 1.1), "not met, within noise"),
        (ratio(1.2, 1.1, 1.3), "not met"),
        (None, "not measured"),
    ],
)
def test_a_goal_says_whether_it_is_met_and_how_surely(found, said):
    assert goals.words(goals.at_most(1.0, found)) == said


def test_goals_have_a_bound_for_each_row_and_a_mean():
    def stored(by_hand, *names):
        found = {
            "autocast / by hand": ratio(by_hand, 0.5, 0.9),
            "autocast / float32": ratio(0.6, 0.5, 0.7),
        }
        return {name: {"ratios": found} for name in names}

    steps_, dots_ = goals.RATIOS["steps"][goals.FLOAT32], goals.RATIOS["bf16_dots"][goals.FLOAT32]
    assert set(steps_) == set(steps.ROWS) - {"resnet50"}
    rows = {"steps": stored(0.5, "gpt2", "gpt2, width 512")}
    goal = dict(goals.found(rows))
    assert goal["steps, gpt2, autocast / float32"]["met"]
    assert goal["steps, gpt2, width 512, autocast / float32"]["met"] is False
    assert goals.words(goal["steps, vit, autocast / float32"]) == "not measured"
    assert (
        goals.words(goal["steps and bf16_dots, autocast / by hand, geometric mean"])
        == "not measured"
    )
    rows = {"steps": stored(0.5, *steps_), "bf16_dots": stored(1.0, *dots_)}
    mean = dict(goals.found(rows))["steps and bf16_dots, autocast / by hand, geometric mean"]
    assert mean["met"] and mean["found"] == pytest.approx(0.5 ** (7 / 8))
    rows["bf16_dots"] = stored(20.0, *dots_)
    assert (
        dict(goals.found(rows))["steps and bf16_dots, autocast / by hand, geometric mean"]["met"]
        is False
    )


def runs(**figures):
    """Returns rows of quality, three seeds a run."""
    return {
        f"byte_gpt, {run}, seed {seed}": {"bits_per_byte": value, "date": "2026-01-01"}
        for run, values in figures.items()
        for seed, value in enumerate(values)
    }


def test_quality_goal_holds_a_mean_against_the_spread_of_seeds():
    rows = runs(float32=(2.0, 2.2, 2.1), mixed_float16=(2.1, 2.1, 2.1), slow=(3.0, 2.0, 2.0))
    del rows["byte_gpt, slow, seed 2"]
    found = {name: verdict for *_, name, verdict in quality.verdicts(rows)}
    assert set(found) == {"float32", "mixed_float16"}
    assert found["mixed_float16"]["within"] and found["mixed_float16"]["no_worse"]
    worse = runs(float32=(2.0, 2.2, 2.1), mixed_float16=(2.3, 2.3, 2.3))
    goal = dict(goals.found({"quality": worse}))
    name = "quality, byte_gpt, mixed_float16: bits_per_byte no worse than float32's worst seed"
    assert goal[name]["met"] is False


@pytest.mark.thorough
def test_a_run_of_quality_keeps_its_held_out_figures(monkeypatch):
    monkeypatch.setattr(quality, "EXAMPLES", ("digits_cnn",))
    monkeypatch.setattr(quality, "SMOKE", ("mixed_float16",))
    with contextlib.suppress(ModuleNotFoundError):
        import sklearn  # noqa: F401

        ((name, train),) = quality.case(True)
        assert name == "digits_cnn, mixed_float16, seed 0" and 0 <= train()["accuracy"] <= 1


def test_cpu_page_shows_goals_and_what_falls_short():
    stored = {
        "cases": {
            "steps": {
                "gpt2": {
                    "ratios": {
                        "autocast / by hand": ratio(1.2, 1.1, 1.3),
                        "by hand / float32": ratio(1.5, 1.4, 1.6),
                    },
                    "absent": {"jmp": "jmp is not installed"},
                    "load": {"average": 2.0, "cores_of_others": 0.5},
                }
            },
            "bf16_dots": {"MLP": {"skipped": "no instructions"}},
            "quality": runs(float32=(2.0, 2.2, 2.1)),
        }
    }
    text = section(stored, {"steps": {"gpt2, autocast / by hand": ["copies", "casts"]}})
    goal = "| time of a step relative to casts by hand: GPT-2 | <= 1.00x |"
    assert f"{goal} 1.20x (1.10x to 1.30x) | **not met** |" in text
    assert "| autocast / by hand | **1.20x** (1.10 to 1.30) |" in text
    assert "| by hand / float32 | 1.50x (1.40 to 1.60) |" in text
    assert "step on a CPU: GPT-2 | autocast / by hand **1.20x** | copies, casts |" in text
    assert "jmp: jmp is not installed." in text and "MLP: skipped: no instructions." in text
    assert "0.5 to 0.5 of the machine's cores" in text
    assert (
        "| byte-level GPT, bits per byte, float32 | 2.1000 | 2.0000 to 2.2000 | yes | yes |" in text
    )
