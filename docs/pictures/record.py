"""Records what guides.py draws, into docs/pictures/recorded.

python docs/pictures/record.py run       trains 300 steps of examples/byte_gpt.py twice (minutes)
python docs/pictures/record.py timeline  compiles GPT-2 for an H100 (needs mpjax[aot,bench])
python docs/pictures/record.py wire      compiles a decoder for eight H100s (the same)
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

import mpjax

FOLDER = Path(__file__).parent / "recorded"
ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), str(ROOT / "examples")]

STEPS, INTERVAL = 300, 20
POINTS = 60  # of each pass in the timeline

# The policies of the timeline, and the rivals of the benchmarks that train under them.
TIMELINE = {
    "float32": "float32",
    "mixed_bfloat16": "autocast",
    "mixed_bfloat16,storage=lean": "autocast, lean",
    "mixed_bfloat16,fused_attention=true,chunked_loss=true,storage=lean": (
        "autocast, lean, chunked loss, fused attention"
    ),
}
REDUCED = "mixed_bfloat16,reduce=half"


def trained(policy):
    """Trains the GPT of byte_gpt.py, with a loss scale that may grow every few steps."""
    import byte_gpt

    train_set, _ = byte_gpt.load()
    rng = np.random.default_rng(0)
    scale = mpjax.DynamicLossScale(growth_interval=INTERVAL) if "float16" in policy else "auto"
    optimizer = byte_gpt.make_optimizer(STEPS)
    init, step = mpjax.build_train_step(byte_gpt.loss_fn, optimizer, policy, loss_scale=scale)
    state, step = init(byte_gpt.initial(0)), jax.jit(step, donate_argnums=0)
    losses, scales, skipped = [], [], []
    for number in range(STEPS):
        scales.append(float(state.loss_scale.loss_scale))  # with which this step runs
        state, metrics = step(state, byte_gpt.sample(train_set, rng))
        losses.append(round(float(metrics["loss"]), 3))
        if not metrics["grads_finite"]:
            skipped.append(number)
    exponents = np.log2(scales).astype(int).tolist()
    return {"loss": losses, "loss_scale_log2": exponents, "skipped": skipped}


def run():
    cases = {policy: trained(policy) for policy in ("float32", "mixed_float16")}
    return {"model": "byte_gpt", "growth_interval": INTERVAL, "cases": cases}


def alive(hlo):
    """Returns the MiB of temporary arrays at each kernel of a program, by pass."""
    from mpjax._src.tools.hardware.hlo import is_backward, op_name, parse
    from mpjax._src.tools.hardware.lifetimes import alive_at, lives

    entry = parse(hlo).entry
    ops = [*entry.ops.values()]
    mib = alive_at(entry, *lives(entry)) / 2**20
    kernels = [i for i, op in enumerate(ops) if op.opcode in ("fusion", "custom-call", "while")]
    backward = [is_backward(op_name(ops[i])) for i in kernels]
    # A kernel of the backward pass may run early: the pass begins where five come in a row.
    start = next(i for i in range(len(kernels)) if all(backward[i : i + 5]))
    return {
        name: [round(float(part.max()), 1) for part in np.array_split(mib[places], POINTS)]
        for name, places in (("forward", kernels[:start]), ("backward", kernels[start:]))
    }


def timeline():
    from benchmarks.rivals import program

    jax.config.update("jax_platforms", "cpu")
    cases = {}
    for policy, rival in TIMELINE.items():
        found = program("gpt2", rival, "bfloat16")
        step = jax.jit(found.step, donate_argnums=0)
        report = mpjax.compile_for("h100", step, found.state, found.batch, timeout=3600)
        cases[policy] = {"temp_mib": round(report.temp_bytes / 2**20, 1), **alive(report.hlo)}
    return {"model": "gpt2", "target": "h100", "cases": cases}


def wire():
    from benchmarks.wire import CARRIED, PROGRAMS, compiled, counted

    jax.config.update("jax_platforms", "cpu")
    report = compiled(PROGRAMS["FSDP"], REDUCED)
    sent = {
        what: {dtype: size / 2**20 for dtype, size in counted(report, what).items()}
        for what in CARRIED
    }
    return {"target": "h100 x 8", "cases": {"FSDP": {REDUCED: sent}}}


if __name__ == "__main__":
    from benchmarks.results import versions

    for name in sys.argv[1:]:
        found = {"versions": versions(), **{"run": run, "timeline": timeline, "wire": wire}[name]()}
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / f"{name}.json").write_text(json.dumps(found) + "\n")
