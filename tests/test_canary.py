"""The canary covers every private name of JAX that mpjax uses, and names what is broken."""

import subprocess
import sys
from pathlib import Path

import canary
import pytest

MODULES = sorted(canary.INSIDE.glob("*.py"))
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)


@each_module
def test_every_private_name_has_a_contract(path):
    names = [use.name for use in canary.uses(path) if canary.is_private(use.name)]
    assert not [name for name in names if not canary.contract_of(path.stem, name)]


@each_module
def test_every_private_attribute_has_a_contract(path):
    names = [use.name for use in canary.uses(path)]
    names += [name for row in canary.CONTRACTS if row.module == path.stem for name in row.names]
    known = {part for name in names for part in name.split(".")}
    assert canary.private_attributes(path) <= known


@pytest.mark.parametrize("row", canary.CONTRACTS, ids=lambda row: row.names[0])
def test_every_contract_is_of_names_in_use(row):
    path = canary.INSIDE / f"{row.module}.py"
    used = {use.name for use in canary.uses(path)}
    for name in row.names:
        if name.startswith("jax."):
            assert any(f"{n}.".startswith(f"{name}.") for n in used), name
        else:
            assert name.split(".")[-1] in canary.private_attributes(path), name


def test_every_module_of_jax_internals_is_described():
    described = {row.module for row in canary.CONTRACTS} | set(canary.PUBLIC)
    assert described == {path.stem for path in MODULES} - {"__init__"}


def test_installed_jax_has_every_private_name():
    assert canary.missing_names() == []


def canary_after(change, *arguments):
    """Returns the exit status and the output of the canary, after a change to JAX."""
    program = f"import runpy, sys; sys.argv = sys.argv[1:]; {change}; "
    program += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", program, str(Path(canary.__file__)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1) and "Traceback" not in done.stdout, done.stderr
    return done.returncode, done.stdout


def test_canary_names_private_names_that_are_gone():
    """One that mpjax cannot be imported without, and one that a function uses."""
    gone = "import jax._src.source_info_util as s, jax._src.named_sharding as n"
    gone += "; del s.Transform, n.UNSPECIFIED"
    status, out = canary_after(gone, "-k", "test_a_name_stack")
    assert status == 1 and "the contract tests did not run" in out
    assert "jax._src.named_sharding.UNSPECIFIED is missing\n" in out
    assert (
        "mpjax/_src/core/base/_jax/jits.py:" in out and "mpjax.autocast cannot be imported" in out
    )
    assert "jax._src.source_info_util.Transform is missing\n" in out
    assert "mpjax/_src/core/base/_jax/sources.py:" in out
    assert "explain, find_nonfinite, compare and lint" in out


@pytest.mark.thorough
def test_canary_names_a_broken_contract():
    change = "import jax; from jax._src import config; config.trace_context = lambda: ()"
    status, out = canary_after(change, "-k", "tracing_key")
    assert status == 1 and out.endswith("\nBroken contracts: 1\n")
    assert "the tracing key tells settings apart does not hold\n" in out
    assert (
        "tests/core/base/_jax/test_contracts.py::test_the_tracing_key_tells_settings_apart" in out
    )
    assert "mpjax/_src/core/base/_jax/programs.py" in out
    assert "autocast: a plan is reused although a setting of JAX changed" in out


@pytest.mark.thorough
def test_canary_names_matmuls_that_are_not_native():
    """In the optimized program, without timing; and it is said where that was not checked."""
    test = "test_compiled_matmuls_run_kernels_of_the_cpu"
    change = "import contextlib, jax.experimental.xla_metadata as x; "
    change += "x.set_xla_metadata = lambda **k: contextlib.nullcontext()"
    status, out = canary_after(change, "-k", test)
    if "Not checked" in out:
        assert status == 0 and f"{test} (Skipped: a CPU without bfloat16 instructions)" in out
        return
    assert status == 1 and "compiled matmuls run kernels of the cpu does not hold\n" in out
    assert "mpjax/_src/core/base/_jax/cpu_matmuls.py" in out
    assert "autocast on CPUs: bfloat16 is slower than float32, and some matmuls fail" in out


@pytest.mark.thorough
def test_canary_passes_a_jax_that_keeps_its_contracts():
    status, out = canary_after("pass", "-k", "tracing_key")
    assert status == 0 and out.endswith("Every contract holds.\n")
