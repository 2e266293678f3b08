"""autocast against casts placed by hand, compiled for an H100 without having one.

    python benchmarks/autocast.py [--json benchmarks/results/autocast_h100.json] [gpt2 resnet50]

Prints temp memory, bytes accessed and the matmuls' dtypes of one training step (donated state) of
GPT-2 124M (batch 8 x 1024, AdamW) and ResNet-50 (batch 128, SGD momentum): float32, flax's
``dtype=bfloat16`` by hand, jmp and mixed-precision-for-JAX (casts at the boundary) and
`mpjax.autocast` of the plain float32 model: as it is, with attention scores and logits rounded to
half, which its policy's half list asks for, and with lean storage. Bytes are counted as XLA counts
them, without those of cuDNN's convolutions; matmuls by the dtype that their operands are stored in.
Needs mpjax[aot-cuda]; nothing executes, so the figures do not change from run to run.
``mixed_precision_for_jax`` is skipped where it is not installed.
"""

import argparse
import collections
import importlib.util
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import jax
import jax.numpy as jnp
import jmp
from models import MODELS, training_step

import mpjax

POLICY = mpjax.get_policy("mixed_bfloat16")


def with_jmp(loss):
    """Casts parameters and inputs once, at the boundary."""
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")

    def cast(params, rest, batch):
        return loss(policy.cast_to_compute(params), rest, policy.cast_to_compute(batch))

    return cast


def with_mixed_precision_for_jax(loss):
    import mpx

    def cast(params, rest, batch):
        call = mpx.cast_function(lambda p, b: loss(p, rest, b), jnp.bfloat16)
        value, rest_ = call(params, batch)
        back = lambda new, old: new.astype(old.dtype)  # noqa: E731
        return value.astype(jnp.float32), jax.tree.map(back, rest_, rest)

    return cast


def variants(name):
    """Yields (label, training step, abstract state, abstract batch)."""
    plain = MODELS[name]()
    losses = {
        "float32": plain[0],
        "by hand": MODELS[name](dtype=jnp.bfloat16)[0],
        "jmp": with_jmp(plain[0]),
        "mpjax.autocast": mpjax.autocast(plain[0], POLICY),
        "the same, scores in half": mpjax.autocast(plain[0], POLICY.with_ops(half="dot_general")),
        "the same, lean storage": mpjax.autocast(plain[0], POLICY.with_storage("lean")),
    }
    if importlib.util.find_spec("mpx"):
        losses["mixed-precision-for-JAX"] = with_mixed_precision_for_jax(plain[0])
    _, params, rest, batch, optimizer = plain
    state = params, rest, jax.eval_shape(optimizer.init, params)
    for label, loss in losses.items():
        yield label, training_step(loss, optimizer), state, batch


def compile_step(step, state, batch):
    """Compiles ``step(state, batch)`` for an H100, its state donated; returns its figures."""
    report = mpjax.compile_for("h100", jax.jit(step, donate_argnums=0), state, batch)
    matmuls = collections.Counter()
    for row in report.matmuls:
        matmuls[row.operands] += row.instructions
    return {
        "temp_mib": round(report.temp_bytes / 2**20),
        "bytes_gb": round(report.xla_costs["bytes accessed"] / 1e9, 1),
        "matmuls": dict(matmuls),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["gpt2", "resnet50"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {"jax": jax.__version__, "target": "H100, compiled without a device", "models": {}}
    for name in options.models:
        rows = results["models"][name] = {}
        for label, step, state, batch in variants(name):
            figures = compile_step(step, state, batch)
            rows[label] = figures
            print(
                f"{name:<10}{label:<26}{figures['temp_mib']:>7} MiB{figures['bytes_gb']:>8} GB  "
                f"{figures['matmuls']}",
                flush=True,
            )
        hand, ours = rows["by hand"], rows["mpjax.autocast"]
        for key in ("temp_mib", "bytes_gb"):
            print(f"{name:<10}{key:<26}{ours[key] / hand[key]:>7.3f} of by hand")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
