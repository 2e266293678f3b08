"""The mutants that are recorded find their lines, and what killed them is there."""

import json
import re
from pathlib import Path

import sample

ROOT = sample.ROOT
ROWS = json.loads(sample.SAMPLE.read_text())["mutants"]


def test_every_mutant_of_the_sample_finds_its_lines():
    gone = [row for row in ROWS if not (ROOT / row["module"]).exists()]
    gone += [r for r in ROWS if r not in gone and not sample.mutated(text_of(r["module"]), r)]
    assert not gone, [(row["module"], row["line"]) for row in gone]


def test_every_mutant_that_changes_nothing_is_of_lines_that_stand():
    rows = json.loads((ROOT / "tests" / "mutants.json").read_text())
    gone = [
        row["line"]
        for row in rows
        if row["module"] != "*"
        and not {*row["line"].splitlines()}
        <= {*map(str.strip, text_of(row["module"]).splitlines())}
    ]
    assert not gone


def test_every_test_that_killed_a_mutant_exists():
    killers = {row["killed_by"] for row in ROWS if "::" in (row["killed_by"] or "")}
    named = {(k.split("::")[0], re.split(r"::|\[", k.partition("[")[0])[-1]) for k in killers}
    missing = [(file, name) for file, name in named if f"def {name}(" not in text_of(file)]
    assert not missing


def text_of(file):
    return (ROOT / file).read_text() if Path(ROOT / file).exists() else ""
