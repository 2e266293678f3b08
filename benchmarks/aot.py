"""Training steps compiled for GPUs and TPUs that are not there: memory, bytes, matmuls, batches.

    python -m benchmarks --suite aot [gpt2 resnet50 ...] [--part h100]

`mpjax.compile_for` compiles a step, with its state donated, with XLA's own compiler for the target.
Nothing is executed, so the figures do not change from run to run. A row contains: temporary memory;
bytes as XLA counts them (a loop's body once, library calls not at all); bytes moved (a loop's body
once for each iteration, and library calls); the roofline's time for the bytes moved; and the number
of matmuls by the dtype of their operands. Needs mpjax[aot].
"""

import collections
import time
from typing import Any

import click
import jax

import mpjax
from benchmarks import Options
from benchmarks.gates import GATES
from benchmarks.models import MODELS, SMALL
from benchmarks.results import FAILED, SKIPPED, Results, Row
from benchmarks.rivals import lacks, program

jax.config.update("jax_platforms", "cpu")  # other devices' compilers run in a separate process

SETTINGS = {"device": "none: compiled for absent ones"}
TIMEOUT = 3600

CASES = tuple(name for name in MODELS if name != "ode")  # the neural ODE is only traced
HARDWARE = {
    "h100": "H100",
    "v100": "V100",
    "a100-80": "A100",
    "b200": "B200",
    "v5e": "TPU v5e",
    "a100-40": "A100 40 GB",
}
HALF = collections.defaultdict(lambda: "bfloat16", v100="float16")

# Models with attention.
ATTENTIVE = tuple(
    name
    for name in CASES
    if name.startswith(("gpt2", "llama", "moe", "bert"))
    or name in ("vit", "t5", "swin", "whisper", "dit", "mla", "pairformer")
)

# Models whose steps are compiled with 8-bit storage for other targets too.
CODED = ("gpt2", "bert", "t5", "resnet50")

# The programs to compile, the most valuable first: target, models, rivals.
STRICT = "by hand, strict"
FIRST = ("float32", STRICT, "autocast", "autocast, lean")
GATED = tuple(f"build_train_step, {gate}" for gate in GATES)
COMPILED = {
    "h100": ("h100", CASES, FIRST),
    "rivals": (
        "h100",
        ("gpt2", "resnet50"),
        ("jmp", "mixed-precision-for-JAX", "flax DynamicScale", "build_train_step"),
    ),
    "softmax": ("h100", ("bert", "vit"), ("by hand, half softmax",)),
    "fused": ("h100", ATTENTIVE, ("autocast, fused attention",)),
    "gates": ("h100", ("gpt2", "resnet50"), GATED),
    "codes": ("h100", CASES, ("autocast, 8bit",)),
    "flax": ("h100", CASES, ("by hand",)),
    **{
        f"codes-{target}": (target, CODED, ("autocast, lean", "autocast, 8bit"))
        for target in ("v100", "a100-80", "v5e")
    },
    **{
        target: (target, CASES, (*FIRST[:3], "by hand"))
        for target in ("v100", "a100-80", "b200", "v5e")
    },
}
# These train in float16 with a loss scale.
SCALED = ("flax DynamicScale", "build_train_step")
BATCHED = ("float32", "autocast", "by hand", "autocast, lean", "autocast, 8bit")
# Near the memory limit, XLA rematerializes values unless it is told that there is more memory.
ONCE = {"xla_gpu_memory_limit_slop_factor": 1000}
# Searches for the largest batch that fits: target, model, its rivals, the step of the search and
# XLA's flags.
BATCHES: dict[str, tuple[str, str, tuple[str, ...], int, dict[str, Any]]] = {
    "batch-v100": ("v100", "resnet50", BATCHED, 8, {}),
    "batch-a100-40": ("a100-40", "bert", (*BATCHED, "autocast, fused attention"), 2, {}),
    "batch-a100-40-once": ("a100-40", "bert", BATCHED, 2, ONCE),
}
PARTS = (*list(COMPILED)[:5], *BATCHES, *list(COMPILED)[5:])


def run(options: Options, results: Results) -> list[str]:
    """Compiles the programs that have no row yet; returns where strict casts are not strict."""
    on_the_cpu()
    for part in options.parts:
        if part in BATCHES:
            target, model, rivals, multiple, flags = BATCHES[part]
            if model in options.cases:
                for rival in rivals:
                    if not results.get(f"{part}/{model}", rival):
                        row = largest(target, model, rival, multiple, options.smoke, flags)
                        results.put(f"{part}/{model}", rival, row)
            continue
        target, models, rivals = COMPILED[part]
        for model in models:
            for rival in rivals:
                if model in options.cases and not results.get(f"{target}/{model}", rival):
                    sizes = SMALL[model] if options.smoke else {}
                    results.put(f"{target}/{model}", rival, figures(target, model, rival, sizes))
    return [
        f"{case}, {STRICT}: {left} float32 matmuls"
        for case, rivals in results.cases.items()
        if (left := rivals.get(STRICT, {}).get("f32_matmuls"))
    ]


def on_the_cpu() -> None:
    """Keeps JAX off the devices at hand; the compilers of the targets run in a separate process."""
    jax.config.update("jax_platforms", "cpu")


def figures(target: str, model: str, rival: str, sizes: dict[str, Any]) -> Row:
    """Compiles one training step; returns its figures, or the reason why there are none."""
    if reason := lacks(rival):
        return {SKIPPED: reason}
    half = "float16" if rival in SCALED else HALF[target]
    start = time.monotonic()
    try:
        found = program(model, rival, half, **sizes)
        step = jax.jit(found.step, donate_argnums=0)
        report = mpjax.compile_for(target, step, found.state, found.batch, timeout=TIMEOUT)
    except Exception as error:
        return _failure(error)
    finally:
        jax.clear_caches()
    matmuls = collections.Counter()
    for row in report.matmuls:
        matmuls[row.operands] += row.instructions
    return {
        "dtype": "float32" if rival == "float32" else half,
        "temp_mib": round(report.temp_bytes / 2**20, 1),
        "bytes_gb": round(report.xla_costs["bytes accessed"] / 1e9, 3),
        "looped_gb": round(report.bytes_accessed / 1e9, 3),
        "roofline_ms": round(report.roofline_ms, 3),
        "f32_matmuls": matmuls["f32"],
        "matmuls": dict(matmuls),
        "seconds": round(time.monotonic() - start, 1),
    }


def largest(
    target: str, model: str, rival: str, multiple: int, smoke: bool, flags: dict[str, Any]
) -> Row:
    """Searches for the largest batch with which a training step fits a target."""
    sizes = {k: v for k, v in SMALL[model].items() if smoke and k != "batch"}
    step = jax.jit(program(model, rival, HALF[target], **sizes).step, donate_argnums=0)

    def make_args(batch):
        found = program(model, rival, HALF[target], batch=batch, **sizes)
        return found.state, found.batch

    try:
        found = mpjax.hardware.largest_batch(
            target,
            make_args,
            step,
            multiple_of=multiple,
            limit=4 * multiple if smoke else 2**12,
            timeout=TIMEOUT,
            compiler_options=flags,
        )
    except Exception as error:
        return _failure(error)
    finally:
        jax.clear_caches()
    return {
        "dtype": "float32" if rival == "float32" else HALF[target],
        "batch": found.batch,
        "multiple_of": multiple,
        "total_mib": round(found.report.total_bytes / 2**20, 1),
        "available_mib": round(found.available_bytes / 2**20, 1),
        "compiled": len(found.tries),
    }


def _failure(error: Exception) -> Row:
    """Returns a row for a program that does not compile, so that the other programs still run."""
    if isinstance(error, ImportError):  # without the compilers, no program would compile
        raise click.ClickException(str(error)) from error
    return {FAILED: f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
