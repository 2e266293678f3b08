"""The session on a lent GPU: its order, its budget, its traces and what it concludes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks import Options, expected, gpu_session
from benchmarks.gpu_session import EXPERIMENTS, Step
from benchmarks.on_gpu import cases, jax_rivals
from benchmarks.page import gpu_session as page
from benchmarks.results import Results


@pytest.fixture
def results(tmp_path):
    return Results.open(tmp_path / "gpu_session.json", fresh=True, smoke=True)


def options(*names, **others):
    return Options(**{"cases": names or tuple(EXPERIMENTS), "smoke": True, **others})


@pytest.fixture(scope="module")
def compiled():
    return jax.jit(lambda x: jnp.tanh(x @ x).sum()).lower(jnp.ones((64, 64))).compile()


@pytest.fixture
def counted_steps(compiled, monkeypatch):
    """Steps that do nothing in 10 ms; returns the experiments that were prepared."""
    asked = []

    def prepared(experiment, smoke):
        asked.append(experiment)
        if experiment.case == "bert":
            raise jax_rivals.Skip("no tokens here")
        if experiment.case == "resnet50":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nmore")
        facts = {"parameters": 10, "compile_s": 1.0}
        return Step(lambda steps: 0.01 * steps, compiled.as_text(), facts)

    monkeypatch.setattr(gpu_session, "prepared", prepared)
    monkeypatch.setattr(gpu_session, "traced", lambda step: {"kinds": {}})
    return asked


def test_every_experiment_is_a_step_of_the_gpu_suite():
    for experiment in EXPERIMENTS.values():
        sizes = gpu_session.sizes_of(experiment, smoke=False)
        assert set(sizes) == set(cases.SIZES[experiment.case])
        assert experiment.way in jax_rivals.RIVALS and experiment.question
    # The decisive ones come first: their answers are there if the budget ends.
    assert list(EXPERIMENTS)[:2] == ["gpt2", "gpt2, odd axes"]


def test_each_row_has_the_time_beside_what_was_predicted(counted_steps, results, capsys):
    gpu_session.run(options(), results)
    rows = {name: rows.get("step") for name, rows in results.cases.items()}
    assert rows["gpt2"]["ms"] == pytest.approx(10) and "ratio" not in rows["gpt2"]
    assert rows["gpt2, odd axes"]["ratio"]["median"] == pytest.approx(1)
    assert rows["gpt2"]["predicted_ms"] == 19.0
    assert rows["llama"]["expected_ms"] > 0 and "ratio" not in rows["llama"]
    assert rows["bert"] == {"skipped": "no tokens here"}
    assert rows["resnet50"] == {"failed": "RESOURCE_EXHAUSTED: out of memory"}
    assert "gpt2: 10.00 ms, predicted 19.0" in capsys.readouterr().out


def test_a_session_resumes_and_stops_at_its_budget(counted_steps, results, capsys):
    gpu_session.run(options("gpt2", "llama"), results)
    assert [experiment.case for experiment in counted_steps] == ["gpt2", "llama"]
    gpu_session.run(options(budget=-1.0), results)
    assert len(counted_steps) == 2
    assert "spent before 'gpt2, odd axes'" in capsys.readouterr().out


def test_constants_are_fitted_to_the_rows(results, capsys):
    constants = [1.2, 1.3, 3.0, 4.0, 2.0, 2e-6]
    kinds = ["elementwise", "matmuls", "matmuls with an odd axis", "fused attention"]
    kinds.append("convolutions")
    for number in range(12):
        row = {
            "kinds": {
                kind: {"ms": 1.0 + (7 * number + 3 * place) % 5, "runs": 10 + number % 7}
                for place, kind in enumerate(kinds)
            }
        }
        row |= {"ms": expected.time_of(row, constants), "predicted_ms": None}
        results.put(f"step {number}", "step", row)
    gpu_session.conclude(results)
    found = results.cases["constants"]["fitted"]
    assert [*found.values()] == pytest.approx(constants, rel=0.05)


def test_the_page_has_predictions_beside_measured_times(counted_steps, results, monkeypatch):
    kinds = {"kinds": {"matmuls": 1.5, "elementwise": 0.25}}
    monkeypatch.setattr(gpu_session, "traced", lambda step: kinds)
    gpu_session.run(options("gpt2", "gpt2, odd axes", "resnet50"), results)
    text = page.section({"cases": results.cases}, {})
    assert "| gpt2 | which term of the expected time is wrong | 19.00 |" in text
    assert "| 22.40 |" in text and "10.00 | 1.00 (1.00 to 1.00) |" in text
    assert "RESOURCE_EXHAUSTED" in text and "| matmuls | " in text and " 1.50 |" in text


# ---- traces -------------------------------------------------------------------------------------


def plane(name, **seconds):
    events = [
        SimpleNamespace(name="kernel", duration_ns=1e9 * s, stats=[("hlo_op", op), ("other", 1)])
        for op, s in seconds.items()
    ]
    events.append(SimpleNamespace(name="python", duration_ns=5e9, stats=[]))
    return SimpleNamespace(name=name, lines=[SimpleNamespace(events=events)] * 2)


def test_events_of_the_device_count_and_those_of_the_host_only_without_one():
    host, device = plane("/host:CPU", dot=3.0), plane("/device:GPU:0", dot=0.5, fusion=0.25)
    both = SimpleNamespace(planes=iter([host, device]))
    assert gpu_session.times_of(both) == {"dot": 1.0, "fusion": 0.5}
    assert gpu_session.times_of(SimpleNamespace(planes=iter([host]))) == {"dot": 6.0}


def test_traced_events_are_joined_to_kernels_by_name(compiled):
    """A real trace, of a program on the CPU."""
    x = jnp.ones((64, 64))

    def run(steps):
        for _ in range(steps):
            jax.block_until_ready(compiled(x))
        return 0.003

    found = gpu_session.traced(Step(run, compiled.as_text(), {}))
    assert found["wall"] == pytest.approx(1)
    assert found["kinds"] and all(ms >= 0 for ms in found["kinds"].values())
    assert sum(found["kinds"].values()) > 0


@pytest.mark.thorough
def test_session_runs_on_any_device(results):
    gpu_session.run(options("gpt2", "gpt2, odd axes", "llama, zeros"), results)
    first, second = (results.cases[name]["step"] for name in ("gpt2", "gpt2, odd axes"))
    assert first["kinds"] and first["traced"]["kinds"] and second["ratio"]["median"] > 0
    assert results.cases["llama, zeros"]["step"]["ms"] > 0
