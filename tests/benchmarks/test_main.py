"""The command line of the benchmarks."""

import importlib
import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks.__main__ import FOUND, main


def invoke(*args):
    return CliRunner().invoke(main, args)


def test_list_option_names_every_suite_and_its_cases():
    found = invoke("--list")
    assert found.exit_code == 0 and all(suite in found.output for suite in FOUND)
    found = invoke("--list", "--suite", "gate")
    assert "resnet50" in found.output and "convnext" not in found.output


@pytest.mark.parametrize("suite", FOUND)
def test_every_suite_is_a_module_with_cases_and_a_run(suite):
    module = importlib.import_module(f"benchmarks.{suite}")
    assert module.CASES and callable(module.run) and module.__doc__


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "--suite must be given: "),
        (("--suite", "nosuch"), "'nosuch' is not one of"),
        (("--suite", "aot", "gpt3"), "'gpt3' is none of gpt2, "),
        (("--suite", "aot", "--part", "h1000"), "'h1000' is none of h100, "),
        (("--suite", "gate", "--part", "h100"), "'h100' is none of"),
    ],
)
def test_command_refuses_unknown_suites_cases_and_parts(args, words):
    found = invoke(*args)
    assert found.exit_code == 2 and words in " ".join(found.output.split())


def suite(problems=()):
    def run(options, results):
        for case in options.cases:
            results.put(case, "rival", {"smoke": options.smoke, "parts": list(options.parts)})
        return list(problems)

    return SimpleNamespace(CASES=("a", "b"), PARTS=("fast", "slow"), run=run)


def test_cases_and_parts_are_selected_in_the_suite_s_order(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "load", lambda name: suite())
    out = tmp_path / "out.json"
    assert invoke("--suite", FOUND[0], "--out", str(out), "b", "a", "--part", "slow").exit_code == 0
    stored = json.loads(out.read_text())
    assert list(stored["cases"]) == ["a", "b"]
    assert stored["cases"]["a"]["rival"] == {"smoke": False, "parts": ["slow"]}
    assert stored["command"] == f"python -m benchmarks --suite {FOUND[0]}"


def test_a_suite_s_problems_are_the_exit_status(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "load", lambda name: suite(["gpt2 is worse"]))
    found = invoke("--suite", FOUND[0], "--out", str(tmp_path / "out.json"))
    assert found.exit_code == 1 and "gpt2 is worse" in found.output


def test_smoke_option_leaves_the_results_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "load", lambda name: suite())
    monkeypatch.setattr(command.tempfile, "gettempdir", lambda: str(tmp_path))
    assert invoke("--suite", FOUND[0], "--smoke").exit_code == 0
    stored = json.loads((tmp_path / "mpjax_smoke" / f"{FOUND[0]}.json").read_text())
    assert stored["smoke"] and stored["cases"]["a"]["rival"]["smoke"]
