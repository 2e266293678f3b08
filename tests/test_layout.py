"""Tests lie where what they test lies, in files short enough to find something in."""

from pathlib import Path

from support import chosen_seed

import mpjax

TESTS = Path(__file__).parent
INSIDE = Path(mpjax.__file__).parent / "_src"
LONGEST = 500


def test_folders_mirror_the_packages():
    folders = {path.parent.relative_to(TESTS) for path in TESTS.glob("*/**/test_*.py")}
    packages = {path.parent.relative_to(INSIDE) for path in INSIDE.glob("*/**/__init__.py")}
    assert folders == packages - {Path("core"), Path("tools")} | {Path("benchmarks"), Path("site")}


def test_no_test_file_is_too_long():
    lengths = {path: len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
    assert not {path.name: n for path, n in lengths.items() if n > LONGEST}


def test_one_module_imports_matplotlib():
    users = [path.name for path in INSIDE.rglob("*.py") if "from matplotlib" in path.read_text()]
    assert users == ["plots.py"]


def test_no_two_files_of_tests_have_one_name():
    names = [path.name for path in TESTS.rglob("test_*.py")]
    assert len({*names}) == len(names), {n for n in names if names.count(n) > 1}  # pytest needs it


# What draws numbers that the seed of the run does not decide. Split, so that this file has none.
UNSEEDED = (
    "default_rng" + "()",
    "System" + "Random(",
    "import " + "secrets",
    "random.Random" + "()",
)


def test_all_random_inputs_come_from_the_seed_of_the_run():
    """A generator without it would fail by chance, and not again. Only `chosen_seed` draws."""
    files = [path for path in TESTS.rglob("*.py") if path.name != "support.py"]
    assert not [(p.name, what) for p in files for what in UNSEEDED if what in p.read_text()]


def test_the_quick_tier_draws_the_same_numbers_in_every_run(monkeypatch):
    monkeypatch.delenv("SEED")
    assert chosen_seed(quick=True) == 0
    assert chosen_seed(quick=False) != chosen_seed(quick=False)
    monkeypatch.setenv("SEED", "7")
    assert chosen_seed(quick=True) == chosen_seed(quick=False) == 7
