"""The scaling suite: what it counts, and that it runs on small programs."""

import collections
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import Options, scaling, wire
from benchmarks.page.scaling import section
from benchmarks.results import Results


@pytest.fixture
def results(tmp_path):
    return Results.open(tmp_path / "scaling.json", smoke=True)


def run(results, *cases, **others):
    return scaling.run(Options(cases=cases, smoke=True, **others), results)


@pytest.mark.thorough
def test_layers_are_traced_and_compiled_both_ways(results):
    assert run(results, "layers") == []
    one, two = results.cases["layers"].values()
    assert two["float32_equations"] > one["float32_equations"]
    assert two["autocast_calls"] > two["float32_calls"] > 0
    assert two["autocast_compile_s"] > 0 and two["ratios"]["autocast / float32, seconds"] > 0


@pytest.mark.thorough
def test_scaling_run_grows_nothing_with_steps(results):
    assert run(results, "steps") == []
    assert {row["arrays_grown_by"] for row in results.cases["steps"].values()} == {0}
    assert results.cases["steps"]["mixed_float16"]["compilations"] > 0


def test_scaling_run_reports_growth_as_a_problem(results):
    results.put("steps", "float32", {"grew": ["arrays"]})
    assert run(results, "devices") == ["float32: arrays grew"]


def test_scaling_row_that_cannot_be_compiled_says_why(results):
    model = scaling.functools.partial(scaling.MODELS["ode"], steps=1, width=8)
    for row in (scaling.memory(model), scaling.data_parallel(model, 1)):
        assert "not installed" in row.get("skipped", "") or row["ratios"]


def test_a_budget_that_is_spent_starts_nothing(results):
    run(results, *scaling.CASES, budget=-1.0)
    assert not results.cases


def test_equations_and_calls_are_counted():
    def loop(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(x) * 2, None), x, length=3)[0]

    assert scaling.equations(jax.make_jaxpr(loop)(1.0).jaxpr) == 3
    assert scaling.calls(loop, 1.0) > 10


def test_scaling_section_has_a_row_for_each_size():
    rows = {"6 layers": {"ratios": {"a / b": 1.2}}, "12 layers": {"ratios": {"a / b": 0.9}}}
    grown = {"steps": 30, "arrays_grown_by": 0, "grew": []}
    stored = {
        "cases": {"layers": rows, "steps": {"float32": grown}, "devices": {"2": {"skipped": "x"}}}
    }
    text = section(stored, {"layers": {"a / b": "why"}})
    assert "| 6 layers | **1.20x** |" in text and "| 12 layers | 0.90x |" in text
    assert "| float32 | in 30 steps: 0 arrays |" in text and "| 2 | skipped: x |" in text
    assert "time by number of layers | a / b **1.20x** | why |" in text


def test_scaling_section_says_what_is_sent_in_which_dtype():
    sent = {
        "float32": {"parameters": {}, "gradients": {"f32": 50.0}},
        "bfloat16": {"parameters": {"bf16": 12.25, "f32": 0.5}, "gradients": {"f32": 25.0}},
    }
    row = {"sent_mib": sent, "ratios": {"bfloat16 / float32, bytes sent": 0.75}}
    text = section({"cases": {"wire": {"FSDP": row, "HSDP": {"skipped": "x"}}}}, {})
    assert "| FSDP | 0.75x |" in text
    assert "| MiB sent by each device | float32 | bfloat16 |" in text
    assert "| FSDP | gradients f32 50 | parameters bf16 12.2, f32 0.5; gradients f32 25 |" in text


def test_wire_counted_sums_bytes_sent_by_dtype():
    row = collections.namedtuple("row", "carries dtype wire_bytes runs")
    rows = [row("gradients", "f32", 3, 2), row("gradients", "bf16", 5, 1), row("data", "s32", 7, 1)]
    report = types.SimpleNamespace(collectives=rows)
    assert wire.counted(report, "gradients") == {"f32": 6, "bf16": 5}
    assert wire.counted(report, "parameters") == {}
