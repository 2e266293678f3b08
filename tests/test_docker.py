"""The images are pinned, run as a user, and check the machine first; no daemon is needed here."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = "cli", "html", "checkpoint", "safetensors"
LOCKS = sorted(FOLDER.glob("requirements-*.txt"))
TARGETS = "cpu", "cuda"


def stages():
    """Returns the instructions of each stage, by its name, and what it begins from."""
    found = {}
    for line in DockerfileParser(str(FOLDER / "Dockerfile")).structure:
        if line["instruction"] == "COMMENT":
            continue
        if line["instruction"] == "FROM":
            base, _, name = line["value"].partition(" AS ")
            found[name] = (base, [])
        else:
            found[name][1].append((line["instruction"], line["value"]))
    return found


STAGES = stages()


def pins(path):
    """Returns the one version of each package in a lock file."""
    requirements = [Requirement(line) for line in path.read_text().splitlines()]
    assert all(re.fullmatch(r"==[^*]+", str(r.specifier)) for r in requirements), path
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in requirements}


def test_every_base_image_is_pinned():
    bases = {base for base, _ in STAGES.values()} - set(STAGES)
    (base,) = bases
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    assert set(TARGETS) < set(STAGES)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_a_user_and_checks_the_machine_first(target):
    base, own = STAGES[target]
    lines = STAGES[base][1] + own
    assert [value for name, value in lines if name == "USER"] == ["1000"]
    assert ("RUN", "useradd --create-home --uid 1000 mpjax") in lines
    assert lines[-2:] == [("USER", "1000"), ("ENTRYPOINT", '["doctor-first"]')]
    assert any(f"docker/requirements-{target}.txt" in value for _, value in own)


def test_files_that_images_copy_exist_and_reach_the_builder():
    let_in = (ROOT / ".dockerignore").read_text().splitlines()
    assert let_in[1] == "*"
    copied = 0
    for _, lines in STAGES.values():
        for name, value in lines:
            if name == "COPY" and not value.startswith("--from="):
                *sources, _ = [word for word in value.split() if not word.startswith("--")]
                for source in sources:
                    assert (ROOT / source).exists(), source
                    assert f"!{source.removeprefix('./').split('/')[0]}" in let_in, source
                    copied += 1
    assert copied > 5


def test_images_install_pinned_packages_alone():
    for _, lines in STAGES.values():
        for name, value in lines:
            if name == "RUN" and "pip install" in value:
                pinned = "--requirement" in value or "/tmp/dist/mpjax-" in value
                assert pinned and "--no-deps" in value, value


@pytest.mark.parametrize("target", TARGETS)
def test_the_lock_has_all_that_mpjax_needs(target):
    locked = pins(FOLDER / f"requirements-{target}.txt")
    needed = [*PROJECT["dependencies"]]
    for extra in EXTRAS:
        needed += PROJECT["optional-dependencies"][extra]
    for requirement in map(Requirement, needed):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])
    assert ("jax-cuda12-plugin" in locked) == (target == "cuda")


def test_cpu_and_cuda_images_lock_the_same_versions():
    cpu, cuda = (pins(FOLDER / f"requirements-{target}.txt") for target in TARGETS)
    assert {name: cuda[name] for name in cpu} == cpu


def test_the_wheel_is_built_by_a_pinned_backend():
    assert "hatchling" in pins(FOLDER / "requirements-build.txt")
    assert len(LOCKS) == 3


@pytest.mark.parametrize(("healthy", "printed"), [(True, ["doctor", "asked"]), (False, ["doctor"])])
def test_doctor_first_runs_the_doctor_which_may_stop_an_image(tmp_path, healthy, printed):
    doctor = tmp_path / "mpjax"
    doctor.write_text(f'#!/bin/sh\necho "$@"\nexit {int(not healthy)}\n')
    doctor.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(FOLDER / "doctor-first"), "echo", "asked"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == printed and (done.returncode == 0) == healthy
