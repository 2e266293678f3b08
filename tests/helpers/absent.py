"""Helpers for tests of programs that are compiled for devices and not run."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mpjax._src.tools.hardware import compiler
from mpjax._src.tools.hardware import report as aot_report
from mpjax._src.tools.hardware.collectives import collectives
from mpjax._src.tools.hardware.targets import find_target

STORED = Path(__file__).parent.parent / "tools" / "hardware" / "hlo"

# A mesh of four by two H100s, whose axes are of the kind that the first argument names.
EIGHT_GPUS = """
import collections, json, os, re, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import mpjax
from mpjax._src.core.base.devices import traced_for
from mpjax._src.tools.hardware.targets import find_target

kind, *axes = sys.argv[1:]
gpus = topologies.get_topology_desc(
    platform="cuda", topology="1x1x8", target_config=find_target("h100").config
).devices
mesh = Mesh(np.array(gpus).reshape(4, 2), ("data", "model"), axis_types=(AxisType[kind],) * 2)
"""


def on_eight_gpus(program, *arguments):
    """Returns what a program prints after `EIGHT_GPUS`, in a process of its own."""
    command = [sys.executable, "-c", EIGHT_GPUS + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def compiles(*targets):
    """Leaves a test to `make test-aot` if the compiler of a target is not installed."""
    missing = {m for t in targets for m in compiler.missing_for(find_target(t).platform)}
    if "v100" in targets and compiler._version("jax-cuda13-plugin"):  # begins with Turing
        missing.add("CUDA 12")
    return pytest.mark.elsewhere("test-aot", bool(missing))


def both(*targets):
    return [pytest.param(target, marks=compiles(target)) for target in targets]


def answer(target, name="scan", asked="scan_h100"):
    memory = {"arguments": 100, "outputs": 60, "aliased": 50, "temporary": 2**30, "code": 7}
    text = (STORED / f"{name}_{target}.hlo").read_text()
    return {
        "memory": memory,
        "asked": (STORED / f"{asked}.hlo").read_text(),
        "hlo": text,
        "xla_costs": {"flops": 1.0, "bytes accessed": 2.0},
    }


def report(target, *args, **kwargs):
    return aot_report.report_of(find_target(target), answer(target, *args, **kwargs))


def spread(mesh, spec, *dims, dtype=jnp.float32):
    """Returns the shape of an array that is sharded over a mesh."""
    return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.sharding.NamedSharding(mesh, spec))


def partitioned(mesh, fun, *args, **options):
    """Compiles for the CPU's devices; returns one device's HLO and the collectives in it."""
    lowered = jax.jit(fun, **options).lower(*args)
    with jax.set_mesh(mesh):
        text = lowered.compile().as_text()
    return text, collectives(text, lowered.compiler_ir("hlo").as_hlo_module().to_string())
