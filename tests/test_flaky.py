"""Runs on fresh seeds and instruction sets: what fails in any of them is listed, and read again."""

import subprocess
import sys
from pathlib import Path

import flaky
import pytest


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The runs of pytest that were made. One test fails under AVX2 for the second seed."""
    made = []

    def run(command, env=None, **_):
        if command[0] == "git":
            return subprocess.CompletedProcess(command, 0, "abc\n", "")
        made.append((env["XLA_FLAGS"], env["SEED"], "--drawing" in command))
        failed = made[-1][:2] == ("--xla_cpu_max_isa=AVX2", "2")
        said = (
            "FAILED tests/test_a.py::test_b[x - y] - assert 1 == 2\n1 failed"
            if failed
            else "1 passed"
        )
        return subprocess.CompletedProcess(command, int(failed), said, "")

    monkeypatch.setattr(flaky, "FOLDER", tmp_path)
    monkeypatch.setattr(flaky.subprocess, "run", run)
    return made


def end_of(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["flaky", "--seeds", "2", *arguments])
    with pytest.raises(SystemExit) as ended:
        flaky.main()
    return ended.value.code


def test_a_test_that_fails_for_one_seed_is_listed(runs, monkeypatch, capsys):
    assert end_of(monkeypatch, "--sets", "AVX2", "default") == 1
    assert len(runs) == 4 and runs[1] == ("", "1", False)
    assert capsys.readouterr().out.endswith("test_b[x - y]\n    AVX2 2\n")


def test_runs_that_were_made_are_not_repeated(runs, monkeypatch, capsys):
    assert end_of(monkeypatch, "--sets", "SSE4_2") == 0
    assert end_of(monkeypatch, "--sets", "SSE4_2") == 0
    assert len(runs) == 2


def test_further_seeds_run_the_tests_that_draw(runs, monkeypatch):
    end_of(monkeypatch, "--sets", "default")
    assert runs == [("", "1", False), ("", "2", True)]


@pytest.mark.thorough
def test_tests_that_draw_are_found():
    command = [sys.executable, "-m", "pytest", "--drawing", "--collect-only", "-q"]
    folder = Path(__file__).parent
    paths = [
        folder / "core" / "base" / "test_coded.py",
        folder / "test_sample.py",
        folder / "test_flaky.py",
    ]
    found = subprocess.run([*command, *paths], capture_output=True, text=True).stdout.splitlines()
    tests = [line for line in found if "::" in line]
    assert tests and all("test_coded.py::" in line for line in tests)
