"""The table of internals has every private name of JAX that mpjax uses; the canary reads it."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import canary
import pytest

MODULES = sorted(canary.INSIDE.glob("*.py"))
each_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)


@each_module
def test_internals_of_jax_are_named_in_the_table_alone(path):
    """Other modules ask the table; and no private attribute of JAX's objects is read."""
    assert not [use for use in canary.uses(path) if canary.is_private(use.name)]
    text = path.read_text()
    assert path.stem == "internals" or "jax._src" not in text.replace("mpjax._src", "")
    attributes = {node.attr for node in ast.walk(ast.parse(text)) if hasattr(node, "attr")}
    own = {"_replace"}  # of named tuples
    assert path.stem == "internals" or not {a for a in attributes if re.match("_[a-z]", a)} - own


@pytest.mark.parametrize("row", canary.internals.CONTRACTS, ids=lambda row: row.places[0])
def test_every_row_of_the_table_is_of_names_in_use(row):
    used = {module: (canary.INSIDE / f"{module}.py").read_text() for module in row.modules}
    for place in row.places:
        name = place.rpartition(".")[2].lstrip("_")
        asked = [module for module, text in used.items() if re.search(rf"\b{name}\b", text)]
        assert asked == [*row.modules], place


def test_every_module_of_jax_internals_is_described():
    described = {m for row in canary.internals.CONTRACTS for m in row.modules} | {*canary.PUBLIC}
    assert described == {path.stem for path in MODULES} - {"__init__", "internals"}


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


def test_canary_names_names_that_are_gone():
    """A public one that mpjax cannot be imported without, and a private one."""
    gone = "import jax._src.source_info_util as s, jax.interpreters.xla as x"
    gone += "; del s.user_frames, x.apply_primitive"
    status, out = canary_after(gone, "-k", "test_a_name_stack")
    assert status == 1 and "the contract tests did not run" in out
    assert "jax.interpreters.xla.apply_primitive is missing\n" in out
    assert (
        "mpjax/_src/core/base/_jax/wire.py:" in out and "mpjax.autocast cannot be imported" in out
    )
    assert "jax._src.source_info_util.user_frames is missing\n" in out
    assert "mpjax/_src/core/base/_jax/sources.py\n" in out
    assert "explain, find_nonfinite, compare and lint" in out


@pytest.mark.thorough
def test_canary_names_a_broken_contract():
    change = "import jax.extend.backend as b; b.register_backend_cache = lambda *_: None"
    status, out = canary_after(change, "-k", "test_a_cache")
    assert status == 1 and out.endswith("\nBroken contracts: 1\n")
    assert "a cache is cleared with those of jax does not hold\n" in out
    assert "tests/core/base/_jax/test_contracts.py::test_a_cache_is_cleared" in out
    assert "mpjax/_src/core/base/_jax/programs.py" in out
    assert "matmuls under jax.default_matmul_precision are misread" in out


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
