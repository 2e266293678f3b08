"""Helpers for tests of programs that are compiled for devices and not run."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from mpjax._src.hardware import compiler
from mpjax._src.hardware import report as aot_report
from mpjax._src.hardware.collectives import collectives
from mpjax._src.hardware.targets import find_target

STORED = Path(__file__).parent.parent / "hardware" / "hlo"


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def compiles(*targets):
    """Skips a test if the compiler of a target is not installed."""
    missing = {m for t in targets for m in compiler.missing_for(find_target(t).platform)}
    if "v100" in targets and compiler._version("jax-cuda13-plugin"):  # begins with Turing
        missing.add("CUDA 12")
    return pytest.mark.skipif(bool(missing), reason=f"needs {missing}: pip install 'mpjax[aot]'")


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
