"""The examples run as scripts, and the policy alone decides what they compute in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from support import events_of, matmul_dtypes

import mpjax

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import byte_gpt  # noqa: E402
import demo  # noqa: E402
import digits_cnn  # noqa: E402

FIGURES = {digits_cnn: {"accuracy", "held_out_loss"}, byte_gpt: {"bits_per_byte"}}
RESULT = {
    *("example", "policy", "steps", "seed", "jax", "device", "curves", "step_ms"),
    *("final_train_loss", "skipped_steps", "final_loss_scale"),
}

examples = pytest.mark.parametrize("example", FIGURES, ids=lambda module: module.__name__)


def started(example, policy):
    """Returns an example's step, its first state and a batch."""
    init, step = mpjax.build_train_step(example.loss_fn, example.make_optimizer(10), policy)
    if example is digits_cnn:
        state = init(*example.initial(0), rng=jax.random.key(0))
    else:
        state = init(example.initial(0))
    return step, state, example.sample(example.load()[0], np.random.default_rng(0))


def run_script(path, *arguments):
    """Runs a script as a user does, with every warning an error."""
    return subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / path), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


DTYPES = {
    "float32": "float32",
    "mixed_bfloat16": "bfloat16",
    "mixed_float16": "float16",
    "O2:float16": "float16",
    "O3:bfloat16": "bfloat16",
}
QUICK = (digits_cnn, "mixed_bfloat16"), (digits_cnn, "O2:float16")


@pytest.mark.parametrize(
    ("policy", "dtype", "example"),
    [
        pytest.param(
            *(policy, dtype, example),
            marks=[] if (example, policy) in QUICK else pytest.mark.thorough,
            id=f"{policy}-{dtype}-{example.__name__}",
        )
        for policy, dtype in DTYPES.items()
        for example in FIGURES
    ],
)
def test_policy_decides_the_dtype_of_every_matmul_and_convolution(example, policy, dtype):
    step, state, batch = started(example, policy)
    found = matmul_dtypes(step, state, batch)
    assert len(found) >= 8
    assert set(found) == {(dtype, dtype)}


@pytest.mark.parametrize(
    "example",
    [digits_cnn, pytest.param(byte_gpt, marks=pytest.mark.thorough)],
    ids=lambda module: module.__name__,
)
def test_norm_statistics_and_loss_stay_float32_in_half_precision(example):
    step, state, batch = started(example, "O3:float16")
    state, metrics = jax.eval_shape(step, state, batch)
    assert metrics["loss"].dtype == np.float32
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.model_state)} <= {"float32"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("example", "policy"),
    [
        (digits_cnn, "mixed_float16"),
        (digits_cnn, "float32"),
        (byte_gpt, "mixed_float16"),
        (byte_gpt, "float32"),
    ],
)
def test_main_trains_and_writes_its_result(example, policy, tmp_path, capsys):
    out = tmp_path / "deep" / "result.json"
    example.main(["--policy", policy, "--steps", "25", "--seed", "3", "--out", str(out)])
    result = json.loads(out.read_text())
    assert set(result) >= RESULT | FIGURES[example]
    assert (result["policy"], result["steps"], result["seed"]) == (policy, 25, 3)
    losses = result["curves"]["loss"]
    assert len(losses) == len(result["curves"]["loss_scale"]) == 25
    assert np.isfinite(losses).all()
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert result["final_loss_scale"] == (2.0**16 if policy == "mixed_float16" else 1.0)
    assert policy in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.parametrize(("text", "scale"), [("none", 1.0), ("dynamic", 2.0**16), ("128", 128.0)])
def test_loss_scale_option_sets_the_scale_of_an_example(text, scale, tmp_path):
    out = tmp_path / "result.json"
    digits_cnn.main(
        ["--policy", "mixed_float16", "--steps", "2", "--loss-scale", text, "--out", str(out)]
    )
    assert json.loads(out.read_text())["final_loss_scale"] == scale


@pytest.mark.thorough
@examples
def test_example_runs_as_a_script_without_warnings(example):
    done = run_script(f"examples/{example.__name__}.py", "--steps", 2, "--policy", "mixed_bfloat16")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mixed_bfloat16: ")


@pytest.mark.thorough
def test_a_wrong_policy_is_refused_with_the_nearest_name():
    done = run_script("examples/digits_cnn.py", "--steps", 2, "--policy", "mixed_float61")
    assert done.returncode != 0
    assert "mixed_float16" in done.stderr


def fake_result(example):
    """Returns a result as an example's train returns it, for the table and the picture."""
    _, key, _ = demo.FIGURES[example]
    return {
        key: 0.5,
        "steps": 3,
        "bigram_bits_per_byte": 3.3,
        "final_train_loss": 1.25,
        "skipped_steps": 1,
        "final_loss_scale": 2.0**15,
        "step_ms": 4.0,
        "stored_mib": 1.5,
        "curves": {"loss": [2.0, 1.0, 0.5], "loss_scale": [2.0**16, 2.0**16, 2.0**15]},
    }


def test_demo_draws_tables_and_a_picture(tmp_path, capsys):
    results = {ex: dict.fromkeys(demo.RUNS, fake_result(ex)) for ex in demo.TITLES}
    for runs in results.values():
        runs["mixed_bfloat16"] = {**runs["mixed_bfloat16"], "step_ms": 2.0}
    console = demo.Console(width=80)
    for example, runs in results.items():
        console.print(demo.table(example, runs))
    printed = capsys.readouterr().out
    for name in demo.RUNS:
        assert printed.count(f"  {demo.typeset(name)}  ") == 2
    assert "…" not in printed, "the table does not fit a terminal of 80 columns"
    assert "2¹⁵" in printed and "x 2⁻⁸" in printed and "^" not in printed
    figure = demo.picture(results)
    figure.savefig(tmp_path / "demo.png")
    shown = [[text.get_text() for text in axis.texts] for axis in figure.axes[-len(results) :]]
    for column in shown:
        assert column[:2] == ["float32: 4.0 ms, 1.00x", "mixed_bfloat16: 2.0 ms, 0.50x"]
        assert len(column) == len(demo.RUNS)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "this cpu, which multiplies no 16-bit dtype faster than float32 (no bfloat16"),
        (("amx_bf16",), "this cpu, which multiplies bfloat16 faster than float32 (the CPU has amx"),
    ],
)
def test_the_demo_says_what_times_are_of(monkeypatch, flags, said):
    monkeypatch.setattr("mpjax._src.core.base._jax.cpu_flags", lambda: frozenset(flags))
    assert said in demo.on_times()


def test_the_demo_takes_steps_of_its_runs_in_turns():
    taken = []

    def run(name, chunks):
        for chunk in range(chunks):
            taken.append((name, chunk))
            yield 10
        return f"{name} ends"

    done = []
    results = demo.in_turns({"a": run("a", 1), "b": run("b", 3), "c": run("c", 2)}, done.append)
    assert results == {"a": "a ends", "b": "b ends", "c": "c ends"} and list(results) == [*"abc"]
    assert taken == [("a", 0), ("b", 0), ("c", 0), ("b", 1), ("c", 1), ("b", 2)]
    assert sum(done) == 60


def test_demo_runs_the_policies_that_it_promises():
    assert list(demo.RUNS)[:2] == ["float32", "mixed_bfloat16"]  # beside each other
    policies = {policy for policy, _ in demo.RUNS.values()}
    assert policies == {"float32", "mixed_bfloat16", "mixed_float16", "O2:float16", "O3:bfloat16"}
    assert ("mixed_float16", "none") in demo.RUNS.values()


@pytest.mark.thorough
def test_demo_runs_as_a_script(tmp_path):
    out = tmp_path / "out"
    logs = tmp_path / "logs"
    done = run_script("examples/demo.py", "--steps", 2, "--out", out, "--logdir", logs)
    assert done.returncode == 0, done.stderr
    assert str(out / "demo.png") in done.stdout
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((out / "demo.json").read_text())
    assert {name: set(runs) for name, runs in data.items()} == {
        name: set(demo.RUNS) for name in ("digits_cnn", "byte_gpt")
    }
    assert all(demo.typeset(name) in done.stdout for name in demo.RUNS)
    assert len([*logs.glob("byte_gpt/*/events*")]) == len(demo.RUNS)


def scalars_of(folder):
    found = {}
    for event in events_of(folder):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


@pytest.mark.thorough
def test_the_demo_logs_scale_skips_and_what_underflows(tmp_path):
    with demo.writer(tmp_path, "digits_cnn", "a run") as log:
        digits_cnn.train("mixed_float16", steps=3, log=log)
    found = scalars_of(tmp_path / "digits_cnn" / "a_run")
    assert found["loss_scale"] == [(0, 65536.0), (1, 65536.0), (2, 65536.0)]
    assert [step for step, _ in found["skipped_steps"]] == [0, 1, 2]
    assert all(0 <= share < 1 for _, share in found["underflow/zeros"])
    assert {"underflow/flushed", "underflow/subnormal", "overflow/largest"} <= found.keys()
    with demo.writer(None, "digits_cnn", "a run") as log:
        assert log is None
