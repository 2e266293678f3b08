"""Rows of figures: written as they come, resumed under the same JAX and on the same device."""

import json

import pytest

from benchmarks import results as module
from benchmarks.results import FAILED, SKIPPED, Results


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "suite.json"


def test_results_resume_rows(path):
    first = Results.open(path, rounds=(3, 5), command="a")
    assert first.get("gpt2", "float32") is None
    first.put("gpt2", "float32", {"ms": 1.5, "ratios": {"a / b": 0.5}})
    again = Results.open(path, rounds=(3, 5), command="b")
    assert again.get("gpt2", "float32") == {"ms": 1.5, "ratios": {"a / b": 0.5}}
    assert again.get("gpt2", "by hand") is None and again.other is None


def test_results_file_says_what_it_was_measured_with(path):
    Results.open(path, command="python").put("case", "rival", {"ms": 1})
    stored = json.loads(path.read_text())
    assert set(stored) == {"versions", "device", "command", "date", "cases"}
    assert set(stored["versions"]) == {"jax", "jaxlib", "flax", "optax", "mpjax"}


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head["versions"].update(jax="0.0.1"),
        lambda head: head.update(device="another"),
        lambda head: head.update(rounds=7),
    ],
)
def test_rows_of_another_jax_device_or_setting_are_not_resumed(path, change):
    Results.open(path, rounds=3).put("gpt2", "float32", {"ms": 1})
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    again = Results.open(path, rounds=3)
    assert again.get("gpt2", "float32") is None and again.other == {
        key: value for key, value in stored.items() if key != "cases"
    }
    again.put("gpt2", "by hand", {"ms": 2})
    assert json.loads(path.read_text())["cases"] == {"gpt2": {"by hand": {"ms": 2}}}


def test_another_optax_is_no_reason_to_measure_again(path, monkeypatch):
    Results.open(path).put("gpt2", "float32", {"ms": 1})
    monkeypatch.setattr(module, "versions", lambda: {**module_versions, "optax": "99"})
    again = Results.open(path)
    assert again.get("gpt2", "float32") and again.head["versions"]["optax"] == "99"


module_versions = module.versions()


def test_fresh_rows_replace_old_ones_one_by_one(path):
    old = Results.open(path)
    for rival in ("float32", "by hand"):
        old.put("gpt2", rival, {"ms": 1})
    again = Results.open(path, fresh=True)
    assert again.get("gpt2", "float32") is None
    again.put("gpt2", "float32", {"ms": 2})
    assert again.get("gpt2", "float32") == {"ms": 2}
    assert json.loads(path.read_text())["cases"]["gpt2"]["by hand"] == {"ms": 1}


def test_skipped_row_is_tried_again_and_failed_row_is_not(path):
    results = Results.open(path)
    results.put("gpt2", "jmp", {SKIPPED: "jmp is not installed"})
    results.put("gpt2", "by hand", {FAILED: "CompileError"})
    assert results.get("gpt2", "jmp") is None and results.get("gpt2", "by hand")


def test_a_write_that_breaks_off_leaves_the_file_whole(path, monkeypatch):
    results = Results.open(path)
    results.put("gpt2", "float32", {"ms": 1})
    before = path.read_text()

    def breaks(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(module.os, "replace", breaks)
    with pytest.raises(OSError, match="full"):
        results.put("gpt2", "by hand", {"ms": 2})
    assert path.read_text() == before
