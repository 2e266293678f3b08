"""`mpjax doctor` judges a device by its features, and shows the time of a matmul beside."""

import json

import jax
import pytest
from click.testing import CliRunner

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import internals
from mpjax._src.tools.cli import doctor
from mpjax._src.tools.cli.commands import cli


@pytest.fixture(autouse=True)
def timed_alone(monkeypatch):
    monkeypatch.setattr(doctor, "CHECKS", (doctor.speed,))


def run(*arguments):
    return CliRunner().invoke(cli, ["doctor", *arguments])


@pytest.mark.parametrize(
    ("flags", "policy"), [((), "float32"), (("avx512_bf16",), "mixed_bfloat16")]
)
def test_doctor_judges_by_features_whatever_a_matmul_takes(monkeypatch, flags, policy):
    ratios = {"float16": 0.25, "bfloat16": 7.5}
    monkeypatch.setattr(doctor, "matmul_time", lambda dtype, seconds: ratios[dtype.name])
    monkeypatch.setattr(_jax, "cpu_flags", lambda: frozenset(flags))
    found = json.loads(run("--json").stdout)
    assert found["policy"] == policy and found["matmul_times"] == ratios
    assert {device["policy"] for device in found["devices"]} == {policy}
    said = run().stdout.partition(f"Recommended policy: {policy}\n")[2]
    assert said.startswith("A matmul just took 0.25x in float16 and 7.50x in bfloat16")


def test_matmul_time_that_cannot_be_taken_is_a_failed_doctor_check(monkeypatch):
    def broken(dtype, seconds):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(doctor, "matmul_time", broken)
    result = run()
    assert result.exit_code == 1 and "RuntimeError: no kernel" in result.stdout
    assert "A matmul just took" not in result.stdout


def test_doctor_says_what_plans_lack_in_the_installed_jax(monkeypatch):
    assert [*doctor.problems_of_jax()] == []
    monkeypatch.setattr(jax, "__version__", "0.99.0")
    (told,) = doctor.problems_of_jax()
    assert told["package"] == "jax 0.99.0" and "is newer than the newest version" in told["what"]
    monkeypatch.setattr(internals, "_found", lambda place: object())
    lacking = [*doctor.problems_of_jax()][1:]
    assert len(lacking) == len(internals.PLACES)
    assert any("primitive_linearizations (autocast: " in each["what"] for each in lacking)
    assert {"what", "advice", "source", "package"} == {*lacking[0]}
