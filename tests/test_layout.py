"""Tests lie where what they test lies, in files short enough to find something in."""

from pathlib import Path

import mpjax

TESTS = Path(__file__).parent
INSIDE = Path(mpjax.__file__).parent / "_src"
LONGEST = 500


def test_folders_mirror_the_packages():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.glob("*/**/test_*.py")}
    packages = {path.parent.relative_to(INSIDE) for path in INSIDE.glob("*/**/__init__.py")}
    assert folders == packages | {Path("benchmarks"), Path("site")}


def test_no_test_file_is_too_long():
    lengths = {path: len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    assert not {path.name: n for path, n in lengths.items() if n > LONGEST}


def test_one_module_imports_matplotlib():
    users = [path.name for path in INSIDE.rglob("*.py") if "from matplotlib" in path.read_text()]
    assert users == ["plots.py"]


def test_no_two_files_of_tests_have_one_name():
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len({*names}) == len(names), {n for n in names if names.count(n) > 1}  # pytest needs it


def test_fresh_inputs_are_the_same_under_ci():
    """A generator without a seed would fail in CI by chance, and not again."""
    without = "default_rng" + "()"
    assert not [path.name for path in TESTS.rglob("*.py") if without in path.read_text()]
