"""compile_for: reports of programs that are compiled for hardware that is not there.

What needs the compilers (the extra `aot`) is skipped where they are not installed: make test-aot.
"""

import collections
import json
import os
import re
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent import answer, both, compiles, report, shape

import mpjax
from mpjax._src.hardware import aot, compiler, devices, hlo_costs
from mpjax._src.hardware import report as aot_report
from mpjax._src.hardware.targets import GPUS, TPU_CHIPS, find_target

TARGETS = [*GPUS, *TPU_CHIPS]


# ---- targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_is_whole(name):
    target = find_target(name)
    assert target.memory > 8e9 and target.bandwidth > 1e11 and 0 < target.reserve < 0.5
    assert target.peaks["f32"] < max(target.peaks["f16" if name in GPUS else "bf16"], 1)
    fast = devices.device_facts(name).fast
    assert ("bf16" in target.peaks) == ("bfloat16" in fast)
    if name in GPUS:
        assert ("f16" in target.peaks) == ("float16" in fast)
        major, minor = target.capability.split(".")
        assert f"major: {major} minor: {minor}" in target.config
        assert f'"{target.device}"' in target.config


def test_names_of_targets():
    assert find_target("NVIDIA A100-80").name == "a100-80"
    assert find_target("TPU v5e").name == "v5e" and find_target("H100").name == "h100"
    assert find_target("a100").name == "a100-40"
    with pytest.raises(ValueError, match=r"target='h101' is not known. Did you mean 'h100'\?.*v6e"):
        find_target("h101")
    with pytest.raises(ValueError, match="a10.* not in the detail.*a6000 have the same cores"):
        find_target("a10")
    with pytest.raises(TypeError, match="target=7 must be a name. Legal are v100"):
        find_target(7)


# ---- reports, from stored HLO --------------------------------------------------------------------


def test_bfloat16_on_a_v100_is_float32_in_disguise():
    found = report("v100")
    (row,) = found.disguised
    assert (row.asked, row.operands, row.runs_as, row.instructions, row.runs) == (
        *("bf16", "f32", "f32", 1, 7),
    )
    assert row.share == 1 and found.matmul_dtypes == {"f32": 1}
    assert row.flops == found.matmul_flops == 7 * 2 * 64 * 128 * 128
    text = " ".join(str(found).split())
    assert "100.0% of the matmul FLOPs were asked for in bf16 and run in f32" in text
    assert "no bfloat16 units. Use float16" in text and "a bound and not a forecast" in text
    assert not report("h100").disguised and report("h100").matmul_dtypes == {"bf16": 1}


@pytest.mark.parametrize("name", ["closed_call/dot_general", "closed_call/transpose"])
def test_names_that_a_compiler_changed_are_found(name):
    """It names a matmul after a transpose that it merged with it."""
    text = answer("v100")["hlo"].replace("closed_call/dot_general", name)
    found = aot_report.report_of(find_target("v100"), {**answer("v100"), "hlo": text})
    assert found.disguised[0].asked == "bf16"


def test_one_name_for_two_dtypes():
    """Of a function that was asked for in bfloat16 once and in float32 once, one is disguised."""
    matmul = hlo_costs.Matmul("f/dot", "f32", "default", "", 1, True, 1, 1.0)
    asked = {"f/dot": collections.Counter({"f32": 1, "bf16": 1})}
    assert sorted(aot_report._asked(asked, matmul) for _ in range(2)) == ["bf16", "f32"]
    assert aot_report._asked(asked, matmul) == "f32"  # one that the compiler made
    assert aot_report._asked({}, matmul) == "f32"


def test_memory_and_roofline():
    found = report("h100")
    assert found.total_bytes == 100 + 60 - 50 + 2**30 + found.code_bytes
    assert found.fits and found.device_bytes == 84942979072
    costs = hlo_costs.costs(found.hlo)
    seconds = max(found.matmul_flops / 989e12, costs.other_flops / 67e12)
    assert found.compute_ms == pytest.approx(seconds * 1e3)
    assert found.memory_ms == pytest.approx(found.bytes_accessed / 3352.32e9 * 1e3)
    assert found.bound == "memory" and found.roofline_ms == found.memory_ms
    assert found.flops == found.matmul_flops + costs.other_flops


def test_a_report_is_data():
    found = report("v100")
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["target"] == "v100" and plain["matmuls"][0]["operands"] == "f32"
    assert plain["disguised"] == plain["matmuls"] and plain["matmul_dtypes"] == {"f32": 1}
    assert "hlo" not in plain and "ENTRY" in found.hlo and "ENTRY" not in repr(found)
    assert {"total_bytes", "roofline_ms", "bound", "fits"} <= set(plain)


def test_what_does_not_fit_is_told():
    memory = {**answer("v100")["memory"], "temporary": 2**35}
    found = aot_report.report_of(find_target("v100"), {**answer("v100"), "memory": memory})
    assert not found.fits and "DOES NOT FIT" in str(found)
    assert "MEM_FRACTION" not in str(found)
    memory["temporary"] = 13 * 2**30
    found = aot_report.report_of(find_target("v100"), {**answer("v100"), "memory": memory})
    assert found.fits and "75% of a GPU by default, which is less" in " ".join(str(found).split())


@pytest.mark.parametrize(
    ("target", "operands", "precision", "library", "algorithm", "expected", "peak"),
    [
        ("v100", "f32", "default", True, ("", 1), "f32", 15.7),
        ("v100", "f16", "default", True, ("", 1), "f16", 125),
        ("a100-80", "f32", "default", False, ("", 1), "tf32", 156),
        ("a100-80", "f32", "high", True, ("", 1), "tf32", 156),
        ("a100-80", "f32", "high", False, ("", 1), "f32", 19.5),
        ("a100-80", "f32", "highest", True, ("", 1), "f32", 19.5),
        ("h100", "f32", "default", False, ("bf16", 3), "bf16 x3", 989 / 3),
        ("h100", "f8e4m3fn", "default", True, ("", 1), "f8e4m3fn", 1979),
        ("h100", "f64", "default", True, ("", 1), "f64", 67),
        ("v5e", "bf16", "default", False, ("", 1), "bf16", 197),
        ("v5e", "f32", "default", False, ("", 1), "bf16", 197),
        ("v5e", "f32", "high", False, ("", 1), "bf16 x3", 197 / 3),
        ("v5e", "f32", "highest", False, ("", 1), "bf16 x6", 197 / 6),
        ("v5e", "f16", "default", False, ("", 1), "f16", 197),
        ("v5e", "s8", "default", False, ("", 1), "s8", 394),
    ],
)
def test_what_the_matrix_units_multiply(
    target, operands, precision, library, algorithm, expected, peak
):
    matmul = hlo_costs.Matmul("dot", operands, precision, *algorithm, library, 1, 1.0)
    runs_as, flops = aot_report.unit(find_target(target), matmul)
    assert runs_as == expected and flops == pytest.approx(peak * 1e12)


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda f: f("h101", jnp.sin, 1.0), ValueError, "target='h101' is not known"),
        (lambda f: f("h100", 3, 1.0), TypeError, "fun=3 must be a function"),
        (lambda f: f("h100", jnp.sin, 1.0, timeout=-1), ValueError, "timeout=-1 must be a number"),
        (lambda f: f("h100", jnp.sin, 1.0, timeout="1"), ValueError, "timeout='1' must be"),
        (lambda f: f("h100", jnp.sin, 1.0, timeout=float("inf")), ValueError, "timeout=inf must"),
        (lambda f: f("h100", jnp.sin, 1.0, timeout=True), ValueError, "timeout=True must be"),
        (lambda f: f("h100", lambda x: x), TypeError, r"0 were given.*fun\(x\) cannot be called"),
        (lambda f: f("h100", lambda x: x, "x"), TypeError, r"args\[0\]='x' is neither an array"),
        (
            lambda f: f("h100", lambda x: x["a"], {"a": object}),
            TypeError,
            r"args\[0/a\]=.*neither an array.*closure",
        ),
    ],
)
def test_bad_input(monkeypatch, call, error, match):
    monkeypatch.setattr(aot, "require", lambda target: None)
    with pytest.raises(error, match=match):
        call(mpjax.compile_for)


def test_a_function_s_own_errors_are_left_alone(monkeypatch):
    monkeypatch.setattr(aot, "require", lambda target: None)

    def broken(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="^mine"):
        mpjax.compile_for("h100", broken, 1.0)
    with pytest.raises(TypeError, match="contracting dim"):
        mpjax.compile_for("h100", jnp.dot, np.ones((2, 3)), np.ones((2, 3)))


@pytest.mark.parametrize("target", ["h100", "v5e"])
def test_callbacks_and_shardings_are_refused(monkeypatch, target):
    monkeypatch.setattr(aot, "require", lambda target: None)

    def prints(x):
        jax.debug.print("{}", x)
        return x

    with pytest.raises(mpjax.CompileError, match=f"target='{target}': it calls back into Python"):
        mpjax.compile_for(target, prints, 1.0)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with pytest.raises(ValueError, match="fun is sharded over 2 devices"):
        mpjax.compile_for(target, jax.jit(jnp.sin, in_shardings=spread), shape(8))


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
def test_what_is_missing_is_named(monkeypatch, target, installed, missing):
    monkeypatch.setattr(compiler, "_version", lambda n: {"jaxlib": "9.9", **installed}.get(n, ""))
    monkeypatch.setattr(compiler, "_toolkit", lambda: False)
    with pytest.raises(ImportError, match=missing) as caught:
        mpjax.compile_for(target, jnp.sin, 1.0)
    assert "pip install 'mpjax[aot]'" in str(caught.value)
    with pytest.raises(ImportError, match=missing):
        mpjax.largest_batch(target, lambda n: (shape(n),), jnp.sin)


@pytest.mark.parametrize(
    "installed",
    [
        {"jax-cuda12-plugin": "9.9", "nvidia-cuda-nvcc-cu12": "12"},
        {"jax-cuda13-plugin": "9.9", "nvidia-cuda-nvcc": "13"},
        {"jax-cuda12-plugin": "9.9", "toolkit": "there"},
    ],
)
def test_what_is_enough(monkeypatch, installed):
    monkeypatch.setattr(compiler, "_version", lambda n: {"jaxlib": "9.9", **installed}.get(n, ""))
    monkeypatch.setattr(compiler, "_toolkit", lambda: "toolkit" in installed)
    assert compiler.missing_for("cuda") == [] and compiler.missing_for("tpu") == ["libtpu"]


# ---- the process that compiles -------------------------------------------------------------------


def in_child(monkeypatch, code, timeout=60.0):
    """Compiles with another program in the place of the one that compiles."""
    boot = f"import json, os, sys; sys.path[:] = json.loads(sys.argv[1])\n{code}"
    monkeypatch.setattr(compiler, "BOOT", boot)
    monkeypatch.setattr(compiler, "require", lambda target: None)
    with compiler.compilers(find_target("h100")) as child:
        try:
            return child, child.compile(find_target("h100"), b"program", timeout)
        finally:
            assert child.process.pid != os.getpid()


ANSWER = """
from multiprocessing.connection import Connection
c = Connection(int(sys.argv[-1])); request = json.loads(c.recv_bytes())
"""


def test_a_request_and_its_answer(monkeypatch):
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
        ("import time; time.sleep(60)", TimeoutError, "took more than timeout=1 seconds"),
        ("print('last words', file=sys.stderr); os._exit(3)", None, r"exit status 3.*\nlast words"),
        ("os.kill(os.getpid(), 9)", None, "SIGKILL, as when the machine runs out of memory"),
        ("os.abort()", None, "died .SIGABRT."),
        (
            f"{ANSWER}c.send_bytes(json.dumps(dict(error='JaxError: BAD: b\\n\\nc')).encode())",
            None,
            "the compiler of target='h100' refused: BAD: b.$",
        ),
    ],
)
def test_a_child_that_fails(monkeypatch, code, error, match):
    with pytest.raises(error or mpjax.CompileError, match=match):
        in_child(monkeypatch, code, timeout=1 if error else 60)


def test_a_compiler_that_is_not_there_is_an_error_and_not_a_hang(monkeypatch):
    """The true child, where nothing to compile with need be installed."""
    monkeypatch.setattr(compiler, "require", lambda target: None)
    with (
        compiler.compilers(find_target("h100")) as child,
        pytest.raises(mpjax.CompileError, match="target='h100'"),
    ):
        child.compile(find_target("h100"), b"no program", 60)


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        (
            "JaxRuntimeError: UNIMPLEMENTED: Unsupported algorithm on the current device(s): "
            "ALG_DOT_BF16_BF16_F32\n\t\n\nSuspected Python Code Location:\n  /a.py:1",
            mpjax.CompileError,
            "refused: UNIMPLEMENTED: Unsupported.*BF16_F32. The card has no bfloat16 units: .*f",
        ),
        ("JaxError: RESOURCE_EXHAUSTED: HBM", mpjax.OutOfMemoryError, "HBM. Use a smaller batch"),
        ("JaxError: RESOURCE_EXHAUSTED: of vmem", mpjax.CompileError, "RESOURCE_EXHAUSTED: of v"),
        ("libdevice not found", mpjax.CompileError, "pip install nvidia-cuda-nvcc-cu12"),
    ],
)
def test_refusals_are_worded(text, error, match):
    with pytest.raises(error, match=match) as caught:
        compiler._refuse(find_target("v100"), text)
    assert caught.type is error
    assert "Suspected" not in str(caught.value) and "target='v100'" in str(caught.value)


# ---- with the compilers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "dtype", "runs_as"),
    [
        pytest.param(target, dtype, runs_as, marks=compiles(target))
        for target, dtype, runs_as in [
            ("v100", "bfloat16", "f32"),
            ("v100", "float16", "f16"),
            ("v100", "float32", "f32"),
            ("t4", "bfloat16", "f32"),
            ("a100-40", "bfloat16", "bf16"),
            ("a100-80", "float32", "tf32"),
            ("a6000", "float16", "f16"),
            ("h100", "bfloat16", "bf16"),
            ("h100", "float32", "tf32"),
            ("h200", "float16", "f16"),
            ("b200", "bfloat16", "bf16"),
            ("v4", "bfloat16", "bf16"),
            ("v5e", "bfloat16", "bf16"),
            ("v5e", "float32", "bf16"),
            ("v5p", "bfloat16", "bf16"),
            ("v6e", "bfloat16", "bf16"),
        ]
    ],
)
def test_matmuls_of_every_target(target, dtype, runs_as):
    x = shape(1024, 1024, dtype=dtype)
    found = mpjax.compile_for(target, jnp.dot, x, x)
    assert found.matmul_dtypes == {runs_as: 1}
    short = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
    assert found.matmuls[0].asked == short
    assert bool(found.disguised) == (short == "bf16" and runs_as == "f32")
    assert found.matmul_flops == 2 * 1024**3
    nbytes = 1024**2 * jnp.dtype(dtype).itemsize
    assert found.argument_bytes == 2 * nbytes and found.output_bytes == nbytes
    assert found.bytes_accessed >= 3 * nbytes and found.fits


def layers(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=5)[0]


@pytest.mark.parametrize("target", both("v100", "h100", "v5e"))
def test_loops_and_gradients(target):
    half = partial(shape, dtype=jnp.bfloat16)
    grad = jax.grad(lambda w, x: layers(x, w).astype(jnp.float32).sum())
    found = mpjax.compile_for(target, grad, half(256, 256), half(128, 256))
    assert sum(row.runs for row in found.matmuls) == 15
    assert found.matmul_flops == 15 * 2 * 128 * 256 * 256
    assert {row.asked for row in found.matmuls} == {"bf16"}
    assert not any("turns" in note for note in found.notes)


@pytest.mark.parametrize("target", both("h100", "v5e"))
def test_programs_of_all_kinds_compile(target):
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T,))
    closed_over = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
    x = shape(64, 64)

    def everything(tree, key, number):
        y = jnp.linalg.cholesky(tree["x"] @ tree["x"].T)
        y += jax.random.normal(key, (64, 64)) * number
        values, _ = jax.lax.top_k(jnp.sort(y), 3)
        q = jnp.broadcast_to(y[:, None, None, :], (64, 2, 2, 64)).astype(jnp.bfloat16)
        attended = jax.nn.dot_product_attention(q, q, q)
        extra = jnp.ones((4, 512)) @ closed_over
        grads = jax.grad(lambda x: square(x).sum())(y)
        image = y.reshape(1, 64, 64, 1)
        seen = jax.lax.conv(image.transpose(0, 3, 1, 2), jnp.ones((2, 1, 3, 3)), (1, 1), "SAME")
        return values, attended, extra, grads, seen

    key = jax.eval_shape(lambda: jax.random.key(0))
    found = mpjax.compile_for(target, everything, {"x": x, "none": None}, key, 2.0)
    assert found.matmul_flops > 0 and found.temp_bytes >= 0
    assert any("were not counted" in note for note in found.notes)  # Cholesky


def make_step(donate, policy="mixed_float16"):
    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)

    init, step = mpjax.build_train_step(loss, optax.adamw(1e-3), policy)
    state = init({"up": jnp.ones((512, 1024)), "down": jnp.ones((1024, 512))})
    return jax.jit(step, donate_argnums=0 if donate else ()), state, shape(256, 512)


@pytest.mark.parametrize("target", both("v100", "v5e"))
def test_donation_survives(target):
    kept, donated = (
        mpjax.compile_for(target, step, state, batch)
        for step, state, batch in (make_step(False), make_step(True))
    )
    assert kept.alias_bytes == 0
    assert donated.alias_bytes > 0.99 * donated.output_bytes > 12e6
    assert donated.total_bytes < kept.total_bytes
    assert donated.matmul_dtypes == {"f16": 5}


@pytest.mark.parametrize("target", both("v100", "h100", "v5e"))
def test_costs_agree_with_xla_s_where_it_can_count(target):
    """No loop, no library's call: two ways of counting, one answer."""
    w = shape(512, 2048)
    grad = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())
    found = mpjax.compile_for(target, grad, w, shape(256, 512))
    if target != "v100":  # there cuBLAS runs
        assert found.flops == pytest.approx(found.xla_costs["flops"], rel=0.02)
    if target == "h100":  # XLA adds a TPU's vector memory
        assert found.bytes_accessed == pytest.approx(found.xla_costs["bytes accessed"], rel=0.02)


@compiles("v100")
def test_refusals_of_the_true_compiler():
    q = shape(2, 128, 4, 64, dtype=jnp.bfloat16)
    with pytest.raises(mpjax.CompileError, match="v100.*Unsupported algorithm.*compute in float16"):
        mpjax.compile_for("v100", lambda q: jax.nn.dot_product_attention(q, q, q), q)


@compiles("v5e")
def test_a_tpu_that_is_too_small_says_so():
    with pytest.raises(mpjax.OutOfMemoryError, match="target='v5e' refused.*smaller batch"):
        mpjax.compile_for("v5e", jnp.sin, shape(6, 2**30))


@compiles("h100")
def test_a_gpu_that_is_too_small_shows_in_the_report():
    found = mpjax.compile_for("h100", jnp.sin, shape(16, 2**30))
    assert not found.fits and found.total_bytes == 2 * 2**36


@compiles("h100")
def test_attention_keeps_its_softmax_in_half_and_not_its_scores():
    layers, heads, length = 4, 16, 1024

    def loss(w, x):
        for layer in w:
            q, k, v = jnp.split((x @ layer).reshape(*x.shape[:2], 3 * heads, -1), 3, axis=2)
            x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        return jnp.mean(x**2)

    gradient = jax.grad(mpjax.autocast(loss, "mixed_bfloat16"))
    args = shape(layers, 256, 768), shape(4, length, 256)
    found = mpjax.compile_for("h100", gradient, *args)
    softmax = 4 * heads * length**2 * 2  # bytes of one in half; one layer's scores and gradients
    assert layers * softmax < found.temp_bytes < (layers + 3.5) * softmax


@compiles("h100")
def test_where_arrays_lie_does_not_matter():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(jnp.ones((64, 64)), spread)
    assert mpjax.compile_for("h100", jnp.dot, x, x).argument_bytes == 2 * 64 * 64 * 4
    jitted = jax.jit(lambda n, x: x * n, static_argnums=0)
    assert mpjax.compile_for("h100", jitted, 3, x).argument_bytes == 64 * 64 * 4


@compiles("h100", "v5e")
def test_threads():
    found, failed = {}, []

    def work(target, size):
        try:
            x = shape(size, size, dtype=jnp.bfloat16)
            found[target, size] = mpjax.compile_for(target, jnp.dot, x, x)
        except Exception as error:
            failed.append(error)

    jobs = [(target, size) for target in ("h100", "v5e") for size in (256, 512)]
    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert {job: report.matmul_flops for job, report in found.items()} == {
        (target, size): 2 * size**3 for target, size in jobs
    }


@compiles("h100", "v5e")
def test_ordinary_use_of_jax_is_left_as_it_was():
    """In a fresh process, with results, devices, flags and environment before and after."""
    code = """
import os, jax, jax.numpy as jnp, mpjax
def look():
    x = jax.random.normal(jax.random.key(0), (64, 64))
    config = {k: str(v) for k, v in jax.config.values.items()}
    return (jnp.tanh(x @ x).tobytes(), jax.devices(), jax.default_backend(), x.devices(), config,
            dict(os.environ))
before = look()
for target in ("h100", "v5e"):
    assert mpjax.compile_for(target, jnp.dot, jnp.ones((8, 8)), jnp.ones((8, 8))).fits
assert look() == before
"""
    path = os.pathsep.join([str(Path(mpjax.__file__).parent.parent), os.environ.get("PATH", "")])
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True,
    )


@compiles("h100")
def test_the_same_figures_every_time():
    first, second = (mpjax.compile_for("h100", *make_step(True)) for _ in range(2))
    assert first.to_dict() == second.to_dict()


@pytest.mark.slow
@compiles("v100")
def test_the_example_of_the_page_on_instruments(capsys):
    page = (Path(mpjax.__file__).parent.parent / "docs" / "instruments.md").read_text()
    (block,) = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "instruments.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "asked for in bf16 and run in f32" in printed and "the largest batch is" in printed
