"""The process that compiles: what it needs, what it is asked, how it fails."""

import os
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import psutil
import pytest
from absent import shape

import mpjax
from mpjax._src.tools.hardware import compiler
from mpjax._src.tools.hardware.targets import find_target

# ---- what is installed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "installed", "missing"),
    [
        ("h100", {}, "jax-cuda12-plugin==9.9 and nvidia-cuda-nvcc-cu12, which are not"),
        ("h100", {"jax-cuda12-plugin": "9.9"}, "needs nvidia-cuda-nvcc-cu12, which is not"),
        (
            "h100",
            {"jax-cuda12-plugin": "9.8", "nvidia-cuda-nvcc-cu12": "1"},
            r"needs jax-cuda12-plugin==9.9 \(found: jax-cuda12-plugin 9.8\), which is not",
        ),
        ("v5e", {}, "needs libtpu, which is not installed: .*'mpjax.aot-tpu.'. No TPU"),
    ],
)
def test_error_names_the_packages_that_a_target_lacks(monkeypatch, target, installed, missing):
    monkeypatch.setattr(compiler, "_version", lambda n: {"jaxlib": "9.9", **installed}.get(n, ""))
    monkeypatch.setattr(compiler, "_toolkit", lambda: False)
    with pytest.raises(ImportError, match=missing) as caught:
        mpjax.compile_for(target, jnp.sin, 1.0)
    assert "pip install 'mpjax[aot]'" in str(caught.value)
    with pytest.raises(ImportError, match=missing):
        mpjax.hardware.largest_batch(target, lambda n: (shape(n),), jnp.sin)


@pytest.mark.parametrize(
    "installed",
    [
        {"jax-cuda12-plugin": "9.9", "nvidia-cuda-nvcc-cu12": "12"},
        {"jax-cuda13-plugin": "9.9", "nvidia-cuda-nvcc": "13"},
        {"jax-cuda12-plugin": "9.9", "toolkit": "there"},
    ],
)
def test_missing_for_is_empty_with_enough_packages(monkeypatch, installed):
    monkeypatch.setattr(compiler, "_version", lambda n: {"jaxlib": "9.9", **installed}.get(n, ""))
    monkeypatch.setattr(compiler, "_toolkit", lambda: "toolkit" in installed)
    assert compiler.missing_for("cuda") == [] and compiler.missing_for("tpu") == ["libtpu"]


# ---- the process ---------------------------------------------------------------------------------


def in_child(monkeypatch, code, timeout=60.0):
    """Compiles with another program in the place of the one that compiles."""
    boot = f"import json, os, sys; sys.path[:] = json.loads(sys.argv[1])\n{code}"
    monkeypatch.setattr(compiler, "BOOT", boot)
    monkeypatch.setattr(compiler, "require", lambda target: None)
    with compiler.compilers(find_target("h100")) as child:
        try:
            return child, child.compile(find_target("h100"), timeout, {}, b"program")
        finally:
            assert child.process.pid != os.getpid()


ANSWER = """
from multiprocessing.connection import Connection
c = Connection(int(sys.argv[-1])); request = json.loads(c.recv_bytes())
"""


def test_compiler_process_gets_the_request_and_a_clean_environment(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    code = f"{ANSWER}c.send_bytes(json.dumps([request, dict(os.environ)]).encode())"
    child, (request, environment) = in_child(monkeypatch, code)
    assert request["platform"] == "cuda" and "NVIDIA H100" in request["config"]
    assert environment["JAX_PLATFORMS"] == "cpu" and environment["CUDA_VISIBLE_DEVICES"] == ""
    assert not {"XLA_FLAGS", "JAX_ENABLE_X64"} & set(environment) and "PATH" in environment
    assert child.process.returncode is not None  # neither running nor a zombie
    assert not Path(request["program"]).exists()


@pytest.mark.parametrize(
    ("code", "error", "match"),
    [
        ("import time; time.sleep(60)", TimeoutError, r"took more than timeout=0\.1 seconds"),
        ("print('last words', file=sys.stderr); os._exit(3)", None, r"exit status 3.*\nlast words"),
        ("os.kill(os.getpid(), 9)", None, "SIGKILL, probably because this machine ran out"),
        ("os.abort()", None, "crashed .SIGABRT."),
        (
            f"{ANSWER}c.send_bytes(json.dumps(dict(error='JaxError: BAD: b\\n\\nc')).encode())",
            None,
            "the compiler of target='h100' refused: BAD: b.$",
        ),
    ],
)
def test_failure_of_the_compiler_process_is_an_error(monkeypatch, code, error, match):
    with pytest.raises(error or mpjax.errors.CompileError, match=match):
        in_child(monkeypatch, code, timeout=0.1 if error else 60)


def test_a_compiler_that_is_not_there_is_an_error_and_not_a_hang(monkeypatch):
    """The true child, where nothing to compile with need be installed."""
    monkeypatch.setattr(compiler, "require", lambda target: None)
    with (
        compiler.compilers(find_target("h100")) as child,
        pytest.raises(mpjax.errors.CompileError, match="target='h100'"),
    ):
        child.compile(find_target("h100"), 60, {}, b"no program")


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        (
            "JaxRuntimeError: UNIMPLEMENTED: Unsupported algorithm on the current device(s): "
            "ALG_DOT_BF16_BF16_F32\n\t\n\nSuspected Python Code Location:\n  /a.py:1",
            mpjax.errors.CompileError,
            "refused: UNIMPLEMENTED: Unsupported.*BF16_F32. The GPU has no bfloat16 units: .*f",
        ),
        (
            "JaxError: RESOURCE_EXHAUSTED: HBM",
            mpjax.errors.OutOfMemoryError,
            "HBM. Use a smaller batch",
        ),
        (
            "JaxError: RESOURCE_EXHAUSTED: of vmem",
            mpjax.errors.CompileError,
            "RESOURCE_EXHAUSTED: of v",
        ),
        (
            "ptxas too old. Falling back",
            mpjax.errors.CompileError,
            "not for a V100: install jax-cuda12",
        ),
        ("libdevice not found", mpjax.errors.CompileError, "pip install nvidia-cuda-nvcc-cu12"),
    ],
)
def test_compiler_refusals_become_errors_with_advice(text, error, match):
    with pytest.raises(error, match=match) as caught:
        compiler._refuse(find_target("v100"), text)
    assert caught.type is error
    assert "Suspected" not in str(caught.value) and "target='v100'" in str(caught.value)


def test_compiler_process_ends_with_its_parent():
    """A killed process leaves no compiler that computes for nobody.

    What keeps the connection open stands for a compiler that is busy, and does not listen.
    """
    code = (
        "import subprocess, time\n"
        "from mpjax._src.tools.hardware import compiler, targets\n"
        "compiler.require = lambda target: None\n"
        "with compiler.compilers(targets.find_target('h100')) as child:\n"
        "    fds = [child.connection.fileno()]\n"
        "    other = subprocess.Popen(['sleep', '100'], stdout=subprocess.DEVNULL, pass_fds=fds)\n"
        "    print(child.process.pid, other.pid, flush=True)\n"
        "    time.sleep(100)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(mpjax.__file__).parent.parent)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as asking:
        child, other = (psutil.Process(int(pid)) for pid in asking.stdout.readline().split())
        while child.num_threads() < 2:  # it has not begun to watch
            time.sleep(0.1)
        asking.kill()
    ended, _ = psutil.wait_procs([child], timeout=20)
    other.kill()
    assert ended
