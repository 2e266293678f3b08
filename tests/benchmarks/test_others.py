"""The benchmark of other people's code: its list, its figures, and what its page says of them."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.others import ABSENT, BASES, WAYS, runs
from benchmarks.page import others as page

REPORT = {
    "half_flops": 0.92,
    "rows": [
        {"planned": True, "reason": "", "half_before": 0.0},
        {"planned": False, "reason": "forward mode", "half_before": None},
    ],
    "missed": [],
}
STEP = {
    "name": "train_step",
    "parameters": 10,
    "matmul_flops": 100,
    "notes": [],
    "rows": [
        {"policy": "float32", "half_flops": 0.0, "gradient_error": None, "notes": []},
        {"policy": "mixed_bfloat16", "half_flops": 0.9, "gradient_error": 0.01, "notes": ["few"]},
    ],
}
PROGRAM = {"target": "h100", "temp_bytes": 2**20, "total_bytes": None, "bytes_accessed": 4e6}


def step(scale=1.0):
    """Returns a step of a survey's JSON, in which 16 bits take half of the memory."""
    found = {**STEP, "rows": [dict(row) for row in STEP["rows"]]}
    for number, row in enumerate(found["rows"], 1):
        bytes_ = {"temp_bytes": 2**20 * scale / number, "bytes_accessed": 4e6 * scale / number}
        row["programs"] = [{**PROGRAM, **bytes_, "roofline_ms": None, "refused": ""}]
    return found


@pytest.mark.parametrize("case", BASES)
def test_a_code_base_is_pinned_and_its_script_does_not_know_mpjax(case):
    base = BASES[case]
    assert base["title"] and all("==" in package for package in base["packages"])
    assert ("commit" in base) == ("repository" in base)
    assert "setting" in base or "own" not in base
    path = runs.SCRIPTS / f"train_{case}.py"
    assert path.exists() or "command" in base
    if path.exists():
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert "mpjax" not in names and "import mpjax" not in path.read_text()


def test_every_script_belongs_to_a_code_base():
    named = {f"train_{case}" for case in BASES}
    words = " ".join(" ".join(base.get("command", ())) for base in BASES.values())
    for path in runs.SCRIPTS.glob("train_*.py"):
        assert path.stem in named or path.name in words


@pytest.mark.parametrize(
    ("line", "loss"),
    [("step 3 loss 0.25", "0.25"), ("loss: 1e-3", "1e-3"), ("train loss=nan,", "nan")],
)
def test_losses_are_read_from_what_a_script_prints(line, loss):
    assert re.findall(runs.LOSS, line) == [loss]


def test_a_script_is_run_and_its_losses_and_its_report_are_kept(tmp_path, monkeypatch):
    text = (
        "import json\nprint('loss 1.5')\nopen('report.json', 'w').write(json.dumps("
        + repr(REPORT)
        + "))"
    )
    (tmp_path / "train.py").write_text(text)
    base = {"command": [str(tmp_path / "train.py")], "packages": []}
    monkeypatch.setattr(runs, "environment", lambda *args: sys.executable)
    row = runs.measured("mine", base, "float32", tmp_path)
    assert row["losses"] == ["1.5"] and (row["planned"], row["reasons"]) == (1, ["forward mode"])
    (tmp_path / "train.py").write_text("raise ValueError('no data')")
    row = runs.measured("mine", base, "float32", tmp_path)
    assert row == {"failed": "exit status 1: ValueError: no data"}
    absent = {**base, "repository": "them/theirs", "commit": "0" * 40}
    assert "them/theirs" in runs.measured("mine", absent, "float32", tmp_path)["skipped"]


def test_an_environment_has_the_command_and_the_versions_that_a_code_base_needs(
    tmp_path, monkeypatch
):
    asked = []

    def done(command):
        asked.append(" ".join(map(str, command)))
        for word in {"venv", "--target"} & {*command}:
            Path(command[command.index(word) + 1]).mkdir(parents=True)

    monkeypatch.setattr(runs, "done", done)
    monkeypatch.setattr(runs.shutil, "which", {"python3.20": "/bin/python3.20"}.get)
    base = {"packages": ["theirs==1.2"], "jax": "0.99", "python": "3.20", "alone": ["odd==1"]}
    python = runs.environment("mine", base, tmp_path)
    assert runs.environment("mine", base, tmp_path) == python and len(asked) == 4
    assert asked.pop(0) == "/bin/python3.20 -c "
    assert asked[0] == f"/bin/python3.20 -m venv {python.parent.parent}"
    assert f"--editable {runs.TREE}[cli] jax==0.99 jaxlib==0.99 theirs==1.2" in asked[1]
    assert asked[2].startswith(f"{python} -m pip") and asked[2].endswith("--no-deps odd==1")
    assert runs.compilers(base, python, tmp_path).name == "compilers-0.99-3.20"
    assert asked[3].startswith(f"{python} -m pip") and "jax-cuda12-plugin==0.99" in asked[3]

    def managed(command):
        raise runs.Failed("exit status 127")

    monkeypatch.setattr(runs, "done", managed)
    row = runs.measured("mine", {**base, "python": "3.21"}, "float32", tmp_path)
    assert row == {"skipped": "python3.21 is not on this machine"}


def test_the_reason_of_a_failure_is_its_error_and_not_what_follows_it():
    notes = "----\nFor simplicity, JAX has removed its internal frames\n"
    assert (
        runs.why(f"Traceback:\n  f()\njax.errors.SomeError: no\n{notes}")
        == "jax.errors.SomeError: no"
    )
    assert runs.why("usage: train.py\n") == "usage: train.py" and runs.why("") == ""


def test_values_that_differ_under_float32_are_problems():
    rows = {"float32": {"losses": ["1", "2"]}, "run float32": {"losses": ["1", "2"]}}
    assert not runs.problems({"mine": rows})
    rows["run float32"] = {"losses": ["1", "2.1"]}
    rows["own"] = {"failed": "exit status 1"}
    differ = "mine: the values differ under mpjax run --policy float32"
    assert runs.problems({"mine": rows}) == ["mine, own: exit status 1", differ]
    rows = {way: {"losses": ["1"], "digest": way} for way in ("float32", "run float32")}
    assert runs.problems({"mine": rows}) == [differ]


def test_the_page_compares_with_float32_and_with_the_own_setting_and_tells_what_failed():
    survey = {"steps": [runs.step_figures(step())]}
    own = {"steps": [runs.step_figures(step(0.75))]}
    rows = {
        "float32": {"losses": ["4", "2"]},
        "run float32": {"losses": ["4", "2"]},
        "run mixed_bfloat16": {"losses": ["4", "2.06"], **runs.report_figures(REPORT)},
        "own": {"losses": ["3.8", "1.9"]},
        "survey": survey,
        "survey own": own,
    }
    assert {*rows} == {*WAYS}
    text = page.section({"cases": {"mine": rows, "yours": {"own": {"failed": "no dtype"}}}}, {})
    command = "| mine | `mpjax run train_mine.py` | 0 | 1 of 2 | 92% | 1% | 5% | 1% | yes |"
    assert command in text
    assert "| mine | `train_step` | 0.50 MiB | 0.50x | 0.67x | 2.00 MB | 0.50x | 0.67x |" in text
    assert "| yours | own: no dtype |" in text
    assert "| mine | no matmul of a function runs in 16 bits: forward mode |" in text
    assert all(base["title"] in text for base in ABSENT.values())


def test_the_page_tells_why_a_survey_knows_no_error_and_has_no_figures_of_an_h100():
    seen = runs.step_figures({**step(), "notes": ["no error of the gradient is known: a", "b"]})
    seen["rows"]["mixed_bfloat16"]["h100"] = {"refused": "CompileError: c"}
    rows = {"survey": {"steps": [seen], "notes": ["for h100 without d"]}}
    assert [*page.unknown(rows)] == [
        "for h100 without d",
        "`train_step`: no error of the gradient is known: a",
        "`train_step` is not compiled for an H100: CompileError: c",
    ]
    assert [*page.cost_cells("mine", rows)] == []


def test_a_survey_keeps_its_steps_and_what_it_left_out_of_them(monkeypatch):
    report = {
        "steps": [step()],
        "not_covered": ["for h100 without checks", "/home/f was not called"],
    }
    run = runs.Run(json.dumps(report), "", None, 1.0, [])
    monkeypatch.setattr(runs, "executed", lambda *args: run)
    monkeypatch.setattr(runs, "compilers", lambda *args: None)
    found = runs.survey_figures("mine", {}, None, ["train.py"], None, False)
    assert found == {"steps": [runs.step_figures(step())], "notes": ["for h100 without checks"]}


def test_an_error_of_0_is_known():
    found = step()
    found["rows"][1]["gradient_error"] = 0.0
    assert runs.step_figures(found)["rows"]["mixed_bfloat16"]["gradient_error"] == 0


def test_a_command_on_the_page_is_without_sizes_and_a_version_tells_another_jax():
    words = ["-m", "theirs.train", "{source}/configs/base.yml", "width=64", "--steps=8"]
    command = {"command": words, "packages": ["theirs==1.2"], "title": "Theirs", "jax": "0.99"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BASES, "mine", command)
        assert page.script("mine") == "-m theirs.train base.yml"
        assert page.kind_cells("mine")[1] == "theirs 1.2, with jax 0.99"
