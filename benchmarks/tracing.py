"""What tracing the gradient of a function costs under autocast, against float32's.

    python benchmarks/tracing.py [gpt2 llama-24 ode-64 ...] [--json benchmarks/results/tracing.json]

GPT-2 124M, Llama with its layers written out, and neural ODEs with their Runge-Kutta steps written
out, traced by `jax.make_jaxpr` with JAX's caches cleared. Seconds are of CPU, the best of several,
the two measured in turns; "calls" are how often Python called a function of Python or C, which does
not change from run to run, however busy the machine is. Nothing is compiled and nothing runs.
"""

import argparse
import collections
import gc
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.extend
from models import gpt2, llama, ode

import mpjax

CASES = {
    "gpt2": lambda: gpt2(),
    **{f"llama-{n}": lambda n=n: llama(layers=n, scanned=False) for n in (12, 24, 48, 96)},
    **{f"ode-{n}": lambda n=n: ode(steps=n) for n in (64, 256)},
}
DEFAULT = ["gpt2", "llama-12", "llama-24", "ode-64", "ode-256"]


def trace(loss, *args):
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(*args)
    return time.process_time() - start, jaxpr


def calls(loss, *args):
    """Returns how many functions tracing calls."""
    counts = collections.Counter()

    def count(frame, event, arg):
        counts[event] += 1

    jax.clear_caches()
    sys.setprofile(count)
    try:
        jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(*args)
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]


def equations(jaxpr):
    """Counts the equations of a program, those of programs inside included."""
    inner = (sub for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(map(equations, inner))


def measure(name, repeats):
    loss, params, rest, batch, _ = CASES[name]()
    losses = {"float32": loss, "autocast": mpjax.autocast(loss, "mixed_bfloat16")}
    found = {label: {"seconds": float("inf")} for label in losses}
    for _ in range(repeats):
        for label, traced in losses.items():
            seconds, jaxpr = trace(traced, params, rest, batch)
            row = found[label]
            row["seconds"] = round(min(row["seconds"], seconds), 3)
            row["equations"] = equations(jaxpr.jaxpr)
    for label, traced in losses.items():
        found[label]["calls"] = calls(traced, params, rest, batch)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", default=DEFAULT, help=", ".join(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in options.cases:
        if name not in CASES:
            parser.error(f"{name!r} is none of {', '.join(CASES)}")
    found = {}
    keys = ("seconds", "calls", "equations")
    print(f"{'':<20}" + "".join(f"{key:>14}" for key in keys))
    for name in options.cases:
        found[name] = measure(name, options.repeats)
        for label, row in found[name].items():
            cells = "".join(f"{row[key]:>14}" for key in keys)
            print(f"{name + ' ' + label:<20}{cells}", flush=True)
        plain, auto = found[name].values()
        cells = "".join(f"{auto[key] / plain[key]:>13.2f}x" for key in keys)
        print(f"{'':<20}{cells}", flush=True)
    if options.json:
        text = json.dumps({"jax": jax.__version__, "cases": found}, indent=2)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
