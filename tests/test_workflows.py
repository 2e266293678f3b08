"""Workflows test the versions that pyproject.toml allows, and run what the Makefile has."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".github" / "workflows"
if not FOLDER.exists():
    pytest.skip("not a git checkout", allow_module_level=True)

FILES = sorted(FOLDER.glob("*.yml"))
FLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WHEELS = tomllib.loads((ROOT / "tests" / "jax_wheels.toml").read_text())["jaxlib"]
PAIRS = [
    (row["python"], row["jax"])
    for row in FLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]["include"]
]
MAKEFILE = (ROOT / "Makefile").read_text()

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
each_flow = pytest.mark.parametrize("name", FLOWS)


def numbers(version):
    return tuple(map(int, version.split(".")))


def steps(flow):
    return [step for job in flow["jobs"].values() for step in job["steps"]]


NEWEST = max(WHEELS, key=numbers)


@pytest.mark.parametrize(("python", "jax"), PAIRS)
def test_every_tested_pair_of_python_and_jax_has_wheels(python, jax):
    assert python in WHEELS[jax]


def test_the_oldest_jax_runs_on_the_oldest_python():
    (floor,) = re.findall(r"^jax>=([\d.]+)", "\n".join(PROJECT["dependencies"]), re.MULTILINE)
    oldest = min((jax for _, jax in PAIRS), key=numbers)
    assert numbers(oldest)[: len(numbers(floor))] == numbers(floor)
    assert not any(numbers(floor) <= numbers(jax) < numbers(oldest) for jax in WHEELS)
    python = PROJECT["requires-python"].removeprefix(">=")
    assert (python, oldest) in PAIRS


def test_the_newest_jax_runs_on_every_python_that_it_has_wheels_for():
    assert {python for python, jax in PAIRS if jax == NEWEST} == set(WHEELS[NEWEST])


def test_every_python_that_is_allowed_runs_its_newest_jax():
    least = numbers(PROJECT["requires-python"].removeprefix(">="))
    pythons = {p for found in WHEELS.values() for p in found if numbers(p) >= least}
    for python in pythons:
        newest = max((jax for jax in WHEELS if python in WHEELS[jax]), key=numbers)
        assert (python, newest) in PAIRS


def test_every_python_of_the_classifiers_is_tested():
    prefix = "Programming Language :: Python :: "
    named = {c.removeprefix(prefix) for c in PROJECT["classifiers"] if c.startswith(f"{prefix}3.")}
    assert named <= {python for python, _ in PAIRS}


def test_the_page_of_versions_has_the_newest_jax():
    assert re.search(
        rf"^\| JAX \| \S+ \| {NEWEST} \|$", (ROOT / "docs/release.md").read_text(), re.M
    )


@each_file
def test_actions_are_pinned(path):
    """To a commit, with the version beside it; an image to a version."""
    lines = [line.strip() for line in path.read_text().splitlines() if "uses:" in line]
    assert lines
    for line in lines:
        commit = re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)
        assert commit or re.search(r"uses: docker://[\w/-]+:\d+\.\d+\.\d+$", line), line


@each_flow
def test_jobs_have_few_permissions_and_a_timeout(name):
    flow = FLOWS[name]
    assert flow["permissions"] == {"contents": "read"} and flow["concurrency"]
    for job in flow["jobs"].values():
        assert 0 < job["timeout-minutes"] <= 90
        assert not re.search("latest", job["runs-on"])


def test_only_jobs_that_upload_may_write():
    allowed = {
        (name, job): set(what["permissions"])
        for name, flow in FLOWS.items()
        for job, what in flow["jobs"].items()
        if "permissions" in what
    }
    assert allowed == {
        ("release", "publish"): {"id-token"},
        ("docs", "deploy"): {"pages", "id-token"},
    }


@each_flow
def test_make_targets_and_paths_of_jobs_exist(name):
    for step in steps(FLOWS[name]):
        said = step.get("run", "")
        for target in re.findall(r"\bmake (\S+)", said):
            known = target == ".venv/ready" or re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
            assert known, target
        for path in re.findall(r"\btests/\S+", said):
            assert (ROOT / path).exists(), path


def test_jobs_run_the_commands_they_are_for():
    said = {name: " ".join(step.get("run", "") for step in steps(f)) for name, f in FLOWS.items()}
    for command in (
        "make lint",
        "make docs",
        "make build",
        "make docker",
        "pytest -n 2",
        "lowest-direct",
    ):
        assert command in said["ci"]
    assert "--pre jax jaxlib" in said["nightly"] and "make canary" in said["nightly"]
    assert "schedule" in FLOWS["nightly"][True]  # YAML reads the key `on` as true
    assert FLOWS["release"][True] == {"push": {"tags": ["v*"]}}
    for name in ("ci", "release"):
        assert "make build" in said[name] and "tests/helpers/release.py" in said[name]
    assert '--tag "$GITHUB_REF_NAME"' in said["release"]
    assert "--trusted-publishing always" in said["release"]
    assert FLOWS["release"]["jobs"]["publish"]["needs"] == "build"
