"""``mpjax compile`` of a program that is spread over devices that are not there."""

import json
import sys

import pytest
from absent import compiles
from click.testing import CliRunner

from mpjax._src.tools.cli import commands as cli

PROGRAM = """
import jax, jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))


def spread(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("data")))


def gradient():
    return jax.grad(lambda w, x: jnp.mean((x @ w) ** 2)), (spread(512, 512), spread(4096, 512))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    (tmp_path / "meshes.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "meshes:gradient"
    sys.modules.pop("meshes", None)


@compiles("h100")
def test_compile_prints_what_each_device_of_a_mesh_sends(program):
    result = CliRunner().invoke(cli.cli, ["compile", program, "--target", "h100 x 8"])
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "What each device of h100 x 8 sends in one run:" in lines
    (row,) = [line for line in lines if line.startswith("gradients")]
    assert "f32 8 1 1" in row and row.endswith("meshes.py:14")
    (sent,) = [line for line in lines if line.startswith("sent to others")]
    assert sent.split()[-1] in ("KiB", "MiB")


@compiles("h100")
def test_compile_as_json_has_collectives_of_a_mesh(program):
    arguments = ["compile", program, "--target", "h100 x 8", "--policy", "mixed_bfloat16", "--json"]
    result = CliRunner().invoke(cli.cli, arguments)
    (found,) = json.loads(result.stdout)["results"]
    assert found["devices"] == 8 and found["wire_bytes"] > 0
    assert "gradients" in {row["carries"] for row in found["collectives"]}
