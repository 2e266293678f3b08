"""Runs on fresh seeds and instruction sets: what fails in any of them is listed, and read again."""

import subprocess

import flaky
import pytest


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """The runs of pytest that were made. One test fails under AVX2 for the second seed."""
    made = []

    def run(command, env=None, **_):
        if command[0] == "git":
            return subprocess.CompletedProcess(command, 0, "abc\n", "")
        made.append((env["XLA_FLAGS"], env["SEED"]))
        failed = made[-1] == ("--xla_cpu_max_isa=AVX2", "2")
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
    assert len(runs) == 4 and runs[1] == ("", "1")
    assert capsys.readouterr().out.endswith("test_b[x - y]\n    AVX2 2\n")


def test_runs_that_were_made_are_not_repeated(runs, monkeypatch, capsys):
    assert end_of(monkeypatch, "--sets", "SSE4_2") == 0
    assert end_of(monkeypatch, "--sets", "SSE4_2") == 0
    assert len(runs) == 2


def test_further_seeds_run_the_files_that_draw():
    assert flaky.drawing(["tests/training/test_step.py", "tests/test_flaky.py"]) == [
        "tests/training/test_step.py"
    ]
    assert "tests/autocast/test_sound_random.py" in flaky.drawing([])
