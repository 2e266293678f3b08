"""Type checkers accept the blocks of README, and a loop in each framework as a user writes it."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from pages import BLOCK, ROOT

import mpjax
from mpjax._src.core.policy.policy import ALIASES, LEVELS, NAMES, PolicyName

MYPY = [sys.executable, "-m", "mypy", "--check-untyped-defs", "--ignore-missing-imports"]
PYRIGHT = ["pyright", "--pythonpath", sys.executable]


def test_policy_names_that_editors_complete_are_policies():
    names = {*get_args(PolicyName)}
    assert {*NAMES, *LEVELS, *ALIASES} <= names
    for name in names:
        assert isinstance(mpjax.get_policy(name), mpjax.Policy)


@pytest.mark.thorough
@pytest.mark.parametrize("command", [MYPY, PYRIGHT], ids=["mypy", "pyright"])
def test_type_checkers_accept_the_readme_and_loops_of_each_framework(command, tmp_path):
    if command is PYRIGHT and not shutil.which("pyright"):
        pytest.skip("needs pyright: pip install pyright, which needs Node.js")
    found = BLOCK.findall((ROOT / "README.md").read_text())
    readme = "\n".join(code for language, _, code in found if language == "python")
    (tmp_path / "readme.py").write_text(readme)
    loops = Path(__file__).parent / "helpers" / "typed.py"
    command = [*command, str(tmp_path / "readme.py"), str(loops)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
