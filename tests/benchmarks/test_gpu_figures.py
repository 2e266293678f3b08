"""Figures made of times: ratios, intervals, FLOPs, differences of memory, goals, counts."""

import json
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest
from support import python_of

from benchmarks.models import MODELS
from benchmarks.on_gpu import cases, energy, flops, goals, memory, quality, worker
from benchmarks.on_gpu.repository_tests import ALL, counted
from benchmarks.on_gpu.statistics import faster, not_slower, paired_ratio, quotient
from benchmarks.page.gpu import headline, section
from benchmarks.page.gpu import judged as judged_on_page


def ratio(median, low=None, high=None):
    return {"median": median, "low": low or median, "high": high or median, "rounds": 15}


def test_paired_ratio_is_taken_within_rounds():
    base = np.array([1.0, 10.0, 100.0])  # a machine that others load more and more
    found = paired_ratio(0.5 * base, base)
    assert found == {"median": 0.5, "low": 0.5, "high": 0.5, "rounds": 3}
    assert quotient(found) == "0.50 (0.50 to 0.50)"


def test_paired_ratio_interval_covers_the_true_ratio():
    rng = np.random.default_rng(0)

    def covers():
        noise = rng.lognormal(sigma=0.05, size=(2, 15))
        found = paired_ratio(0.8 * noise[0], noise[1])
        return found["low"] <= 0.8 <= found["high"]

    assert np.mean([covers() for _ in range(100)]) > 0.85


@pytest.mark.parametrize("rounds", [([], []), ([1.0], [1.0, 2.0])])
def test_paired_ratio_refuses_different_rounds(rounds):
    with pytest.raises(ValueError, match="same rounds"):
        paired_ratio(*rounds)


def test_faster_is_an_interval_on_the_right_side():
    assert faster(ratio(0.9, 0.8, 0.99)) and not faster(ratio(0.9, 0.8, 1.01))
    assert not_slower(ratio(1.01, 0.99, 1.2)) and not not_slower(ratio(1.1, 1.05, 1.2))
    assert faster(ratio(0.4), 1 / 2.2) and not faster(ratio(0.46), 1 / 2.2)


def test_train_flops_equal_a_count_by_hand():
    layers, width, length, vocabulary, batch = 2, 8, 4, 16, 3
    matmuls = layers * (3 + 1 + 4 + 4) * width * width + vocabulary * width
    tokens = batch * length
    forward = 2 * matmuls * tokens + layers * batch * 2 * (2 * length * length * width)
    found = flops.train_flops(matmuls, layers, width, length, tokens)
    assert found == 3 * forward
    assert flops.mfu(found, 2.0, found) == 0.5


def test_step_flops_do_not_count_tables_that_are_only_looked_up():
    sizes = cases.SMOKE["bert"]
    table = sizes["vocabulary"] * sizes["width"]
    like_gpt2 = cases.step_flops("gpt2", sizes, 10**6)
    assert like_gpt2 - cases.step_flops("bert", sizes, 10**6) == 6 * table * cases.items(sizes)
    assert cases.step_flops("resnet50", cases.SMOKE["resnet50"], 10**6) is None
    patches = cases.step_flops("vit", cases.SIZES["vit"], 0) / (12 * 12 * 768 * 64)
    assert patches == 196**2


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("cpu", None), ("NVIDIA", None)],
)
def test_target_of_knows_a_device_by_what_it_calls_itself(kind, name):
    target = flops.target_of(kind)
    assert (target and target.name) == name
    assert flops.peak_of(kind) == (989e12 if name else None)


def test_differences_of_memory_are_attributed():
    fields = {"arguments": 100, "results": 100, "aliased": 90, "temporary": 40, "code": 0}
    assert memory.total(fields) == 150
    few = {**fields, "temporary": 30}
    row = memory.with_differences(
        {"compiled": fields, "predicted": few, "peak": 160, "gb": 8, "predicted_gb": 6}
    )
    assert row["predicted_over_compiled"] == 140 / 150 and row["predicted_over_gb"] == 0.75
    assert row["kernels"] == 10 and row["library_and_allocator"] == 10
    assert row["predicted_over_peak"] == 140 / 160 and row["compiled_over_peak"] == 150 / 160
    assert memory.with_differences({"compiled": fields, "no_peak": "why"}) == {
        "compiled": fields,
        "no_peak": "why",
    }


def test_attempt_turns_what_is_missing_or_fails_into_a_row():
    def missing():
        import no_such_module  # noqa: F401

    def fails():
        raise RuntimeError("RESOURCE_EXHAUSTED: 80 GiB\nmore")

    assert worker.attempt(missing) == {"skipped": "No module named 'no_such_module'"}
    assert worker.attempt(fails) == {"failed": "RuntimeError: RESOURCE_EXHAUSTED: 80 GiB"}
    read, why = energy.meter()
    assert read or why


def test_quality_is_judged_when_all_seeds_ran():
    def rows(figures):
        return {
            f"{policy}, seed {seed}": {"bits_per_byte": x, "final_train_loss": x}
            for policy, values in figures.items()
            for seed, x in enumerate(values)
        }

    three = {"float32": [1.0, 1.1, 1.2], "mixed_bfloat16": [1.1, 1.2, 1.2]}
    found = quality.verdicts(rows({**three, "mixed_float16": [1.3, 1.3, 1.3]}))
    assert found["mixed_bfloat16, bits_per_byte"]["no_worse"]
    assert not found["mixed_float16, final_train_loss"]["no_worse"]
    assert found["mixed_float16, bits_per_byte"]["float32"] == (1.0, 1.2)
    assert not quality.verdicts(rows({**three, "mixed_float16": [1.3]}))


def judged(rows):
    return dict(goals.found(rows))


def test_goals_are_met_by_intervals():
    name = goals.COMPILED
    both = {f"mpjax / {name}": ratio(1.1), f"mpjax fused / {name}": ratio(0.9, 0.85, 0.95)}
    found = judged({"speed gpt2": {name: {"ratios": both}}})[f"gpt2: faster than {name}"]
    assert found["met"] and found["ratio"] == f"mpjax fused / {name}"
    rows = {"speed resnet50": {"float32": {"ratios": {"mpjax / float32": ratio(0.5)}}}}
    assert judged(rows)["resnet50: faster than 2.2 times float32"]["met"] is False
    rows = {"speed gpt2_medium": {"mpjax": {"mfu": 0.4}, "mpjax fused": {"mfu": 0.46}}}
    assert judged(rows)["gpt2_medium: share of the bfloat16 peak"]["met"] is True
    rows = {"memory bert": {"mpjax": {"predicted_over_peak": 0.85}}}
    assert judged(rows)["bert: memory of mpjax as predicted"]["met"] is False
    name = "the repository's tests that fail"
    assert judged({"tests": {ALL: {"files": 2}, "a": {"failures": 0}}})[name]["met"] is None
    assert judged({"tests": {ALL: {"files": 1}, "a": {"failures": 0}}})[name]["met"] is True
    assert judged({"tests": {ALL: {"files": 9}, "a": {"failures": 1}}})[name]["met"] is False
    assert all(row["met"] is None for row in judged({}).values())


def test_goals_are_read_from_a_file_or_from_none(tmp_path):
    path = tmp_path / "gpu.json"
    assert {row["met"] for row in goals.read(path)} == {None}
    path.write_text(json.dumps({"cases": {"tests": {ALL: {"files": 1}, "a": {"failures": 2}}}}))
    assert goals.read(path)[-1]["found"] == 2


def test_gpu_page_shows_ratios_and_what_is_above_one():
    rows = {
        "by hand": {"ratios": {"mpjax / by hand": ratio(1.2, 1.1, 1.3)}},
        "jmp": {"failed": "x"},
    }
    text = section({"cases": {"speed gpt2": rows}}, {})
    assert "| by hand | - | - | **1.20x** (1.10 to 1.30) |" in text and "jmp: failed: x." in text
    assert "| GPT-2 124M | mpjax / by hand **1.20x** | not known |" in text
    ratios = {"predicted_over_peak": 0.99, "predicted_over_gb": 1.0}
    row = {"predicted": {}, **ratios, "memory_ms": 9, "compute_ms": 3}
    timed = {"mpjax": {"ms": 12, "mfu": 0.4}}
    text = section({"cases": {"memory bert": {"mpjax": row}, "speed bert": timed}}, {})
    assert "| BERT-base, mpjax | 0.990 | - | 1.000 | 0.75 |" in text
    assert "| mpjax | 12.0 ms | 40.0% |" in text


def test_gpu_headline_has_the_models_that_were_timed_with_both_rivals():
    both = {"float32, TF32": 0.5, "by hand": 0.8}
    rows = {name: {"ratios": {f"mpjax / {name}": ratio(value)}} for name, value in both.items()}
    cases = {"speed gpt2": rows, "speed bert": {"by hand": rows["by hand"]}}
    said = (
        "Timed on one X, a step of GPT-2 124M takes 0.50x the time of float32 (TF32) and 0.80x the"
    )
    assert headline({"device": "X", "cases": cases}).startswith(said)
    assert headline({"device": "X", "cases": {}}) == ""


def test_gpu_goals_on_the_page_say_which_model_and_what_is_measured():
    rows = {
        "speed gpt2": {"by hand": {"ratios": {"mpjax / by hand": ratio(0.9)}}},
        "speed resnet50": {"float32": {"ratios": {"mpjax / float32": ratio(0.5)}}},
        "memory bert": {"mpjax lean": {"predicted_over_peak": 0.85}},
    }
    found = {(goal.kind, goal.of): goal for goal in judged_on_page({"cases": rows})}
    kind = "time of a step relative to casts by hand"
    assert found[kind, "GPT-2 124M"].met and found[kind, "BERT-base"].met is None
    assert found[f"{kind}, both with fused attention", "GPT-2 124M"].sense == "<="
    slow = found["time of a step relative to float32", "ResNet-50"]
    assert slow.bound == 1 / 2.2 and slow.interval == (0.5, 0.5) and not slow.met
    memory = "predicted memory as a share of the peak", "BERT-base, mpjax, storage=lean"
    assert found[memory].bounds == (0.9, 1.1) and not found[memory].met
    assert found["share of the bfloat16 peak", "GPT-2 355M"].sense == ">="
    assert found["failing tests of this repository", ""].met is None
    held_out = "held-out result no worse than float32", "mixed_float16, bits per byte"
    assert not found[held_out].same and found[held_out].bounds == ()


def test_counted_reads_a_junit_report():
    report = """<testsuites><testsuite errors="0" failures="1" skipped="1" tests="4" time="2.5">
    <testcase name="good"/><testcase name="bad"><failure message="assert 1 == 2&#10;more"/>
    </testcase><testcase name="out"><skipped/></testcase><testcase name="fine"/>
    </testsuite></testsuites>"""
    assert counted(report) == {
        "passed": 2,
        "failures": 1,
        "left_out": 1,
        "seconds": 2.5,
        "names": {"bad": "assert 1 == 2"},
    }


# In a process without JAX, which PyTorch's environment lacks.
THEIRS = """
import importlib.util, json, sys, torch
spec = importlib.util.spec_from_file_location("torch_models", sys.argv[1])
models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models)
with torch.device("meta"):
    built = [models.build(sys.argv[2], sizes) for sizes in json.loads(sys.argv[3])]
print(json.dumps([sum(p.numel() for p in model.parameters()) for model in built]))
"""
TORCH = python_of("torch")


@pytest.mark.elsewhere("test-torch", TORCH is None)
@pytest.mark.parametrize("case", cases.SIZES)
def test_torch_s_models_have_as_many_parameters(case):
    sizes = [cases.SIZES[case], cases.SMOKE[case]]
    path = Path(cases.__file__).with_name("torch_models.py")
    command = [TORCH, "-c", THEIRS, path, case, json.dumps(sizes)]
    theirs = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    ours = [sum(x.size for x in jax.tree.leaves(MODELS[case](**each)[1])) for each in sizes]
    assert theirs == ours
