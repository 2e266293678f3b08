"""compile_for: reports of programs that are compiled for hardware that is not there.

What needs the compilers (the extra `aot`) is skipped where they are not installed: make test-aot.
"""

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
from absent import both, compiles, shape

import mpjax
from benchmarks.models import MODELS
from mpjax._src.tools.hardware import aot

# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda f: f("h101", jnp.sin, 1.0), ValueError, "Unknown target='h101'"),
        (lambda f: f("h100", 3, 1.0), TypeError, "fun=3 must be a function"),
        (lambda f: f("h100", jnp.sin, 1.0, timeout=-1), ValueError, "timeout=-1 must be a number"),
        (lambda f: f("h100", jnp.sin, 1.0, timeout="1"), ValueError, "timeout='1' must be"),
        (lambda f: f("h100", jnp.sin, 1.0, timeout=float("inf")), ValueError, "timeout=inf must"),
        (lambda f: f("h100", jnp.sin, 1.0, timeout=True), ValueError, "timeout=True must be"),
        (
            lambda f: f("h100", jnp.sin, 1.0, compiler_options={"a": 1}),
            ValueError,
            "'a': 1.*XLA flags",
        ),
        (lambda f: f("h100", jnp.sin, 1.0, compiler_options="xla_"), ValueError, "options='xla_'"),
        (
            lambda f: f("h100", jnp.sin, 1.0, compiler_options={"xla_a": [1]}),
            ValueError,
            "without dashes",
        ),
        (lambda f: f("h100", lambda x: x), TypeError, r"fun\(x\) cannot be called with the 0 arg"),
        (lambda f: f("h100", lambda x: x, "x"), TypeError, r"args\[0\]='x' must be an array"),
        (
            lambda f: f("h100", lambda x: x["a"], {"a": object}),
            TypeError,
            r"args\[0/a\]=.*must be an array.*closure",
        ),
    ],
)
def test_compile_for_refuses_bad_arguments(monkeypatch, call, error, match):
    monkeypatch.setattr(aot, "require", lambda target: None)
    with pytest.raises(error, match=match):
        call(mpjax.compile_for)


def test_compile_for_passes_on_errors_of_the_function(monkeypatch):
    monkeypatch.setattr(aot, "require", lambda target: None)

    def broken(x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="^mine"):
        mpjax.compile_for("h100", broken, 1.0)
    with pytest.raises(TypeError, match="contracting dim"):
        mpjax.compile_for("h100", jnp.dot, np.ones((2, 3)), np.ones((2, 3)))


@pytest.mark.parametrize("target", ["h100", "v5e"])
def test_compile_for_refuses_callbacks(monkeypatch, target):
    monkeypatch.setattr(aot, "require", lambda target: None)

    def prints(x):
        jax.debug.print("{}", x, ordered=True)
        kind = jax.ShapeDtypeStruct((), jnp.float32)
        checked = lambda: jax.pure_callback(lambda x: x, kind, x)  # noqa: E731
        return jax.lax.cond(x > 0, checked, lambda: x)

    with pytest.raises(
        mpjax.errors.CompileError, match=f"target='{target}': it calls back into Python"
    ):
        mpjax.compile_for(target, prints, 1.0)
    program = aot.lower(aot.find_target(target), prints, (1.0,), alone=True)
    assert program.left_out == 2 and "custom_call" not in program.lowered.as_text()
    reference = jax.new_ref(jnp.ones(3))

    def writes(x):
        reference[...] = x * reference[...]

    assert not aot.lower(aot.find_target(target), writes, (2.0,), alone=True).left_out


def test_compile_for_refuses_callbacks_beside_a_gpu_too(monkeypatch):
    """There JAX lowers them, as here a call of the same name."""
    monkeypatch.setattr(aot, "require", lambda target: None)

    def prints(x):
        kind = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.ffi.ffi_call("xla_ffi_python_gpu_callback", kind)(x)

    with pytest.raises(mpjax.errors.CompileError, match="it calls back into Python"):
        mpjax.compile_for("h100", prints, 1.0)


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
def test_compile_for_reports_the_dtypes_of_matmuls_on_each_target(target, dtype, runs_as):
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
def test_compile_for_counts_matmuls_of_loops_and_gradients(target):
    half = partial(shape, dtype=jnp.bfloat16)
    grad = jax.grad(lambda w, x: layers(x, w).astype(jnp.float32).sum())
    found = mpjax.compile_for(target, grad, half(256, 256), half(128, 256))
    assert sum(row.runs for row in found.matmuls) == 15
    assert found.matmul_flops == 15 * 2 * 128 * 256 * 256
    assert {row.asked for row in found.matmuls} == {"bf16"}
    assert not any("turns" in note for note in found.notes)


@pytest.mark.parametrize("target", both("h100", "v5e"))
def test_compile_for_takes_programs_of_all_kinds(target):
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
    assert any("are not counted" in note for note in found.notes)  # Cholesky


def make_step(donate, policy="mixed_float16"):
    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)

    init, step = mpjax.build_train_step(loss, optax.adamw(1e-3), policy)
    state = init({"up": jnp.ones((512, 1024)), "down": jnp.ones((1024, 512))})
    return jax.jit(step, donate_argnums=0 if donate else ()), state, shape(256, 512)


@pytest.mark.parametrize("target", both("v100", "v5e"))
def test_donation_survives_compile_for(target):
    kept, donated = (
        mpjax.compile_for(target, step, state, batch)
        for step, state, batch in (make_step(False), make_step(True))
    )
    assert kept.alias_bytes == 0
    assert donated.alias_bytes > 0.99 * donated.output_bytes > 12e6
    assert donated.total_bytes < kept.total_bytes
    assert donated.matmul_dtypes == {"f16": 5}


@pytest.mark.parametrize("target", both("v100", "h100", "v5e"))
def test_costs_of_compile_for_agree_with_those_of_xla(target):
    """No loop, no library's call: two ways of counting, one answer."""
    w = shape(512, 2048)
    grad = jax.grad(lambda w, x: jnp.tanh(x @ w).sum())
    found = mpjax.compile_for(target, grad, w, shape(256, 512))
    if target != "v100":  # there cuBLAS runs
        assert found.flops == pytest.approx(found.xla_costs["flops"], rel=0.02)
    if target == "h100":  # XLA adds a TPU's vector memory
        assert found.bytes_accessed == pytest.approx(found.xla_costs["bytes accessed"], rel=0.02)


@compiles("v100")
def test_refusal_by_the_compiler_is_a_compile_error_that_advises():
    q = shape(2, 128, 4, 64, dtype=jnp.bfloat16)
    with pytest.raises(
        mpjax.errors.CompileError, match="v100.*Unsupported algorithm.*compute in float16"
    ):
        mpjax.compile_for("v100", lambda q: jax.nn.dot_product_attention(q, q, q), q)


@compiles("v5e")
def test_program_too_large_for_a_tpu_is_an_out_of_memory_error():
    with pytest.raises(mpjax.errors.OutOfMemoryError, match="target='v5e' refused.*smaller batch"):
        mpjax.compile_for("v5e", jnp.sin, shape(6, 2**30))


@compiles("h100")
def test_report_says_that_a_program_does_not_fit_a_gpu():
    found = mpjax.compile_for("h100", jnp.sin, shape(16, 2**30))
    assert not found.fits and found.total_bytes == 2 * 2**36


@compiles("h100")
def test_attention_keeps_its_softmax_in_16_bits_and_not_its_scores():
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
def test_a_logsumexp_moves_fewer_bytes_than_one_pass_over_them_in_float32():
    def loss(h, w):
        return jnp.sum(jax.nn.logsumexp(h @ w, -1))

    fun = jax.jit(mpjax.autocast(loss, "mixed_bfloat16"))
    rows, words = 2048, 16384
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 128), (128, words))]
    logits = 4 * rows * words
    found = mpjax.compile_for("h100", fun, *args).bytes_accessed
    assert 1.5 * logits < found < 1.7 * logits  # in 16 bits: written, read twice
    assert mpjax.compile_for("h100", jax.jit(loss), *args).bytes_accessed > 2.9 * logits


@compiles("h100")
def test_compile_for_heeds_compiler_options():
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    by_triton = mpjax.compile_for("h100", jnp.dot, x, x)
    without = {"xla_gpu_enable_triton_gemm": False}
    by_cublas = mpjax.compile_for("h100", jnp.dot, x, x, compiler_options=without)
    assert "triton" in by_triton.hlo and "cublas" not in by_triton.hlo
    assert "triton" not in by_cublas.hlo and "cublas" in by_cublas.hlo
    with pytest.raises(mpjax.errors.CompileError, match="xla_no_such_flag"):
        mpjax.compile_for("h100", jnp.dot, x, x, compiler_options={"xla_no_such_flag": 1})


@compiles("h100")
def test_compile_for_ignores_the_devices_of_its_arguments():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(jnp.ones((64, 64)), spread)
    assert mpjax.compile_for("h100", jnp.dot, x, x).argument_bytes == 2 * 64 * 64 * 4
    jitted = jax.jit(lambda n, x: x * n, static_argnums=0)
    assert mpjax.compile_for("h100", jitted, 3, x).argument_bytes == 64 * 64 * 4


@compiles("h100", "v5e")
def test_compile_for_works_in_threads():
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
def test_compile_for_leaves_jax_as_it_was():
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
def test_compile_for_gives_the_same_figures_every_time():
    first, second = (mpjax.compile_for("h100", *make_step(True)) for _ in range(2))
    assert first.to_dict() == second.to_dict()


@pytest.mark.thorough
@compiles("v100")
def test_examples_of_the_page_on_memory_elsewhere_print_what_they_should(capsys):
    page = (Path(mpjax.__file__).parent.parent / "docs" / "slow.md").read_text()
    one, several = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(one, "slow.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "run in f32, but the program\n    asked for bf16" in printed
    assert "the largest batch is" in printed
    exec(compile(several, "slow.md", "exec"), {"__name__": "__main__"})
    printed = " ".join(capsys.readouterr().out.split())
    assert "parameters all-gather bf16 8 2 1 14.00 MiB 33.3%" in printed
    assert "gradients reduce-scatter f32 8 2 1 28.00 MiB 66.7%" in printed


def attend(q, k, v):
    return jnp.mean(mpjax.dot_product_attention(q, k, v, is_causal=True) ** 2)


def attend_by_hand(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.swapaxes(-2, -1) / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:])) == 0, -jnp.inf, scores)
    return jnp.mean((jax.nn.softmax(scores) @ v) ** 2)


FUSED = {
    "asked for": (attend, "mixed_bfloat16"),
    "by hand": (attend_by_hand, "mixed_bfloat16,fused_attention=true"),
    "by hand, lean": (attend_by_hand, "mixed_bfloat16,storage=lean,fused_attention=true"),
}


@pytest.mark.thorough
@compiles("h100")
@pytest.mark.parametrize("name", FUSED)
def test_memory_of_fused_attention_grows_with_the_length_not_its_square(name):
    fun, policy = FUSED[name]
    step = jax.value_and_grad(mpjax.autocast(fun, policy), (0, 1, 2))
    sizes = []
    for length in (512, 2048):
        report = mpjax.compile_for("h100", step, *[shape(1, length, 4, 64)] * 3)
        assert "cudnn$fmha" in report.hlo and "not counted" not in str(report)
        sizes.append(report.temp_bytes)
    assert sizes[1] < 4.5 * sizes[0]
    report = mpjax.compile_for("v100", step, *[shape(1, 512, 4, 64)] * 3)
    assert "cudnn" not in report.hlo


@pytest.mark.thorough
@compiles("v5e")
def test_a_tpu_compiles_flash_attention():
    step = jax.value_and_grad(mpjax.autocast(attend, "mixed_bfloat16"), (0, 1, 2))
    report = mpjax.compile_for("v5e", step, *[shape(1, 512, 4, 128)] * 3)
    assert "tpu_custom_call" in str(report)


@pytest.mark.thorough
@compiles("h100")
def test_matmuls_that_find_no_tiles_without_a_device_are_left_to_cublas():
    loss, params, rest, batch, _ = MODELS["vit"](batch=4, layers=1)
    step = jax.grad(lambda params, batch: loss(params, rest, batch)[0])
    assert "xla_gpu_enable_triton_gemm=False" in str(mpjax.compile_for("h100", step, params, batch))
