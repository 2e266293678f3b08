"""The advice of `mpjax doctor`: flags that the compilers accept, and problems by version."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absent import compiles
from click.testing import CliRunner

from mpjax._src.tools.cli import advice, doctor
from mpjax._src.tools.cli.commands import cli
from mpjax._src.tools.hardware.compiler import ENVIRONMENT

ROOT = Path(__file__).parents[3]
START = {
    advice.GPU: "import jax; jax.devices()",
    advice.TPU: "from mpjax._src.core.base._jax import aot; "
    "from mpjax._src.tools.hardware.targets import *; "
    "t = find_target('v5e'); aot._compile_only_device(t.platform, t.topology, t.config)",
}


def starts(platform, flags):
    """Runs what reads a platform's flags; returns whether it lives, and what it says."""
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    for variable in advice.VARIABLES.values():
        env.pop(variable, None)
    env[advice.VARIABLES[platform]] = flags
    done = subprocess.run(
        [sys.executable, "-c", START[platform]], env=env, capture_output=True, text=True
    )
    return done.returncode == 0, done.stderr


PLATFORMS = [advice.GPU, pytest.param(advice.TPU, marks=[pytest.mark.thorough, compiles("v5e")])]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_installed_compilers_know_every_advised_flag(platform):
    flags = [flag["flag"] for flag in advice.flags({platform: 0}, {})]
    assert flags
    lives, says = starts(platform, " ".join(flags))
    assert lives, says
    assert not starts(platform, f"--xla_{platform}_no_such_flag=true")[0]  # else that says nothing


def names(devices, environment=None):
    return [row["flag"] for row in advice.flags(devices, environment or {})]


def test_advised_flags_fit_platforms_and_numbers_of_devices():
    assert names({"cpu": 8}) == []
    assert names({"gpu": 1}) == []  # none was measured to help
    assert names({"gpu": 0}) == names({"gpu": 8}) and len(names({"gpu": 8})) == 5
    assert names({"tpu": 4, "cpu": 1}) == [f for f in names({"tpu": 0}) if "xla_tpu" in f] != []
    for row in advice.flags({"gpu": 2, "tpu": 2}, {}):
        assert row["why"] and row["source"].startswith("https://") and row["now"] == ""
        assert row["variable"] == ("XLA_FLAGS" if "_gpu_" in row["flag"] else "LIBTPU_INIT_ARGS")


@pytest.mark.parametrize(
    ("flags", "now"),
    [
        ("", ""),
        ("--xla_a=true", "true"),
        ("--xla_b=1 --xla_a", "true"),
        ("--xla_a=true --xla_a=false", "false"),
        ("-xla_a=1", "1"),
        ("--xla_a_b=true", ""),
        ("--no_xla_a=true", ""),
    ],
)
def test_setting_reads_what_a_flag_is_set_to(flags, now):
    assert advice.setting("xla_a", flags) == now


FLOAT32, HALF = "xla/issues/46225", "xla/issues/26371"


@pytest.mark.parametrize(
    ("jaxlib", "platforms", "expected"),
    [
        ("0.5.3", ["gpu"], []),
        ("0.6.0", ["gpu"], [HALF]),
        ("0.10.1", ["gpu"], [HALF]),
        ("0.10.2", ["gpu"], [FLOAT32, HALF]),
        ("0.10.2.dev20260601", ["cpu", "gpu"], [FLOAT32, HALF]),
        ("0.11.0", ["gpu"], [FLOAT32, HALF]),
        ("0.11.1", ["gpu"], [HALF]),
        ("0.12.0.1", ["gpu"], [HALF]),
        ("0.10.2", ["cpu"], []),
        ("0.10.2", ["tpu"], []),
        ("not installed", ["gpu"], []),
    ],
)
def test_advised_problems_are_those_of_the_installed_version(jaxlib, platforms, expected):
    found = list(advice.problems(platforms, {"jaxlib": jaxlib}))
    assert [row["source"].partition("openxla/")[2] for row in found] == expected
    assert all(row["package"] == f"jaxlib {jaxlib}" and row["advice"] for row in found)


def test_doctor_prints_advice_for_a_platform_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", ())
    monkeypatch.setattr(doctor, "versions", lambda: {"jaxlib": "0.10.2"})
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_overlap_compute_collective_tc=false")
    run = CliRunner().invoke
    plain = run(cli, ["doctor"]).stdout
    assert "worth trying" not in plain and "benchmarks.flags" not in plain
    said = run(cli, ["doctor", "--platform", "gpu", "--platform", "tpu"]).stdout
    assert "What to do: install jaxlib 0.11.1" in said and "overlap_compute_collective" in said
    assert "benchmarks.flags" in said and "triton" not in said
    found = json.loads(run(cli, ["doctor", "--platform", "tpu", "--json"]).stdout)
    assert [row["now"] for row in found["flags"]] == ["", "false", ""]
    assert found["problems"] == []
