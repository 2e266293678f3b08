"""One version everywhere; the page of versions says what pyproject.toml says."""

import re
import tomllib
from pathlib import Path

import pytest
import release
import surface
import yaml
from packaging.version import Version

import mpjax
from mpjax._src.core.base._jax import internals

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGE = (ROOT / "docs" / "release.md").read_text()
README = (ROOT / "README.md").read_text()


def test_the_changelog_opens_with_this_version():
    entries = re.findall(r"^## \[(.*)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0][0] == mpjax.__version__
    dated = [when for _, when in entries if when != "unreleased"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", when) for when in dated)
    assert dated == sorted(dated, reverse=True) and len(entries) - len(dated) <= 1


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == mpjax.__version__
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


@pytest.mark.parametrize(("row", "name"), [("JAX", "jax"), ("Flax", "flax"), ("optax", "optax")])
def test_release_page_has_the_oldest_versions(row, name):
    (floor,) = re.findall(rf"^{name}>=([\d.]+)", "\n".join(PROJECT["dependencies"]), re.MULTILINE)
    (oldest,) = re.findall(rf"^\| {row} \| (\S+) \|", PAGE, re.MULTILINE)
    assert oldest.split(".")[: floor.count(".") + 1] == floor.split(".")


def test_jax_has_no_ceiling_and_the_newest_one_tested_is_known_to_mpjax():
    """A ceiling would hold back the user's JAX. What needs its internals says so when called."""
    (bound,) = [each for each in PROJECT["dependencies"] if re.match(r"jax\b", each)]
    assert re.fullmatch(r"jax>=[\d.]+", bound)
    (newest,) = re.findall(r"^\| JAX \| \S+ \| (\S+) \|", PAGE, re.MULTILINE)
    assert newest == internals.TESTED


def row_of(contract):
    """Returns the row of some internals of JAX on the page of versions."""
    names = ", ".join(f"`{place.removeprefix('jax._src.')}`" for place in contract.places)
    loss = f"{contract.breaks}{' (the rest works)' * contract.optional}"
    return f"| {names} | {loss} | {contract.instead} |"


def test_release_page_has_the_table_of_internals():
    rows = [*map(row_of, internals.CONTRACTS)]
    table = PAGE.partition("## Internals of JAX")[2].partition("\n## ")[0]
    found = [line for line in table.splitlines() if line.startswith("| `")]
    assert found == rows, "The table on docs/release.md has to be:\n" + "\n".join(rows)


def test_the_readme_names_the_versions_and_the_dependencies():
    ((oldest, newest),) = re.findall(r"^\| JAX \| (\S+) \| (\S+) \|", PAGE, re.MULTILINE)
    assert f"Tested with JAX {oldest} to {newest}." in README
    minor = newest.rsplit(".", newest.count(".") - 1)[0]
    assert f"Plans read JAX's internals: a JAX after {minor} may need a newer mpjax" in README
    (listed,) = re.findall(r"^- It installs (.*), even", README, re.MULTILINE)
    named = {re.match(r"[\w-]+", dependency)[0] for dependency in PROJECT["dependencies"]}
    assert set(re.split(r", | and ", listed)) == named - {"jax"}


def test_the_readme_says_how_large_mpjax_is():
    said = r"It is large: ([\d,]+) lines and (\d+) public names, (\d+) of them in `mpjax` itself"
    ((lines, names, top),) = re.findall(said, README)
    files = [path for path in ROOT.glob("mpjax/**/*.py*") if path.suffix in (".py", ".pyi")]
    found = sum(len(path.read_text().splitlines()) for path in files)
    assert int(lines.replace(",", "")) == pytest.approx(found, rel=0.05)
    assert (int(names), int(top)) == (len(surface.PUBLIC), len(mpjax.__all__))
    assert f"{lines} lines and {names} public names" in (ROOT / "docs/will_it_help.md").read_text()


def test_release_page_has_the_versions_of_python():
    prefix = "Programming Language :: Python :: 3."
    named = [int(c.removeprefix(prefix)) for c in PROJECT["classifiers"] if c.startswith(prefix)]
    assert PROJECT["requires-python"] == f">=3.{min(named)}"
    assert f"| Python | 3.{min(named)} | 3.{max(named)} |" in PAGE


def test_the_dry_run_knows_what_is_left_before_a_tag(monkeypatch, tmp_path):
    monkeypatch.setattr(release, "ROOT", tmp_path)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - unreleased\n")
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.2\n")
    left = release.undone("1.2.3")
    assert [each.split()[0] for each in left] == ["CHANGELOG.md", "CITATION.cff", "CITATION.cff"]
    assert "begins with 1.2.3, not with 1.2.4" in release.undone("1.2.4")[0]
    (tmp_path / "CHANGELOG.md").write_text("## [1.2.3] - 2026-12-01\n")
    (tmp_path / "CITATION.cff").write_text("x: 1\nversion: 1.2.3\ndate-released: 2026-12-01\n")
    assert not release.undone("1.2.3")


def test_the_dry_run_runs_the_program_of_the_readme_and_names_this_version():
    assert "mpjax.autocast(" in release.program() and release.program() in README
    assert release.version() == mpjax.__version__
    assert str(Version(mpjax.__version__)) == mpjax.__version__  # as PyPI writes it


@pytest.mark.parametrize("tag", ["v0.0.1", mpjax.__version__])
def test_a_tag_that_is_not_the_version_is_refused(tag, monkeypatch):
    monkeypatch.setattr("sys.argv", ["release.py", "--tag", tag])
    with pytest.raises(SystemExit, match=f"the tag {re.escape(tag)} is not v"):
        release.main()
