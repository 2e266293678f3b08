"""The gate: is autocast still ahead of casts placed by hand? Five minutes, no GPU.

    python benchmarks/gate.py [gpt2 resnet50 ...] [--json benchmarks/results/gate_h100.json]

Compiles one training step (donated state) of models of many kinds for an H100 that need not be
there, with casts by hand and under `mpjax.autocast` of the plain float32 model, and prints for
both: temp memory; bytes accessed as XLA counts them (a loop's body once, library calls not at all);
bytes as they are moved (loops by their turns, library calls counted); and how many matmuls are left
in float32. Layers are few and sizes are real, so what a change of the planner does to a layer shows
at once; figures do not change from run to run. (`autocast.py` compiles the whole models.)

The figures recorded in ``results/gate_h100.json`` stand beside autocast's new ones; those of casts
by hand, which depend on JAX and the models alone, are taken from there unless ``--hand`` is given.
``--json`` writes all figures to a file. Needs mpjax[aot-cuda].
"""

import argparse
import functools
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from models import MODELS, training_step

import mpjax

RECORDED = Path(__file__).parent / "results" / "gate_h100.json"

# The sizes of each model, and the ways to write it by hand.
HALF_SOFTMAX = {"by hand": {}, "by hand, half softmax": {"wide_softmax": False}}
CASES = {
    "gpt2": ({"layers": 2}, {"by hand": {}}),
    "resnet50": ({"blocks": (2, 1, 1, 1)}, {"by hand": {}}),
    "unet": ({}, {"by hand": {}}),
    "bert": ({}, HALF_SOFTMAX),
    "vit": ({}, HALF_SOFTMAX),
    "llama": ({}, {"by hand": {}}),
    "lstm": ({}, {"by hand": {}}),
    "mamba": ({}, {"by hand": {}}),
}
OURS = {"autocast": "mixed_bfloat16", "autocast, lean": "mixed_bfloat16,storage=lean"}
RATIOS = ("temp_mib", "bytes_gb", "looped_gb")


def figures_of(name, wrap=lambda loss: loss, **arguments):
    """Compiles one training step of a model for an H100; returns its figures."""
    loss, params, rest, batch, optimizer = MODELS[name](**CASES[name][0], **arguments)
    step = jax.jit(training_step(wrap(loss), optimizer), donate_argnums=0)
    state = params, rest, jax.eval_shape(optimizer.init, params)
    report = mpjax.compile_for("h100", step, state, batch)
    return {
        "temp_mib": round(report.temp_bytes / 2**20),
        "bytes_gb": round(report.xla_costs["bytes accessed"] / 1e9, 2),
        "looped_gb": round(report.bytes_accessed / 1e9, 2),
        "f32_matmuls": sum(row.instructions for row in report.matmuls if row.operands == "f32"),
    }


def show(label, cells):
    print(f"{label:<32}" + "".join(f"{cell:>12}" for cell in cells), flush=True)


def run(name, recorded, hand_anew):
    """Prints the figures of a model beside the recorded ones; returns them."""
    found = {}
    for label, arguments in CASES[name][1].items():
        if hand_anew or label not in recorded:
            found[label] = figures_of(name, dtype=jnp.bfloat16, **arguments)
        else:
            found[label] = recorded[label]
        show(f"{name} {label}", found[label].values())
    others = dict(found)
    for label, policy in OURS.items():
        ours = found[label] = figures_of(name, functools.partial(mpjax.autocast, policy=policy))
        show(f"{name} {label}", ours.values())
        for other, theirs in {**others, "recorded": recorded.get(label, ours)}.items():
            if theirs != ours:
                show(f"    of {other}", (f"{ours[key] / theirs[key]:.3f}x" for key in RATIOS))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--json", type=Path, help="writes the figures to this file")
    parser.add_argument("--hand", action="store_true", help="compiles casts by hand anew")
    options = parser.parse_args()
    for name in options.models:
        if name not in CASES:
            parser.error(f"{name!r} is none of {', '.join(CASES)}")
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    models = recorded["models"] if recorded.get("jax") == jax.__version__ else {}
    start = time.monotonic()
    show("", (*RATIOS, "f32 matmuls"))
    for name in options.models:
        models[name] = run(name, models.get(name, {}), options.hand)
    print(f"{time.monotonic() - start:.0f} s")
    if options.json:
        results = {"jax": jax.__version__, "target": "H100, compiled without a device"}
        options.json.write_text(json.dumps({**results, "models": models}, indent=2) + "\n")


if __name__ == "__main__":
    main()
