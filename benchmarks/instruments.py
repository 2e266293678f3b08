"""What `find_nonfinite` and `compare` cost: time and peak memory beside one compiled gradient.

    python benchmarks/instruments.py --layers 12 --batch 2 --length 256

GPT-2 on this machine's default device; every run is a process of its own, so that its peak resident
memory is its own. Ratios to the compiled float32 gradient, and to the same gradient run operation
by operation, which keeps what XLA would fuse away.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from models import gpt2
from paired import save

import mpjax
from mpjax._src.instruments.interpret import Plain, interpret
from mpjax._src.instruments.programs import make_program
from mpjax._src.policy import get_policy

RUNS = ("compiled", "operation by operation", "find_nonfinite", "compare")


def one(name, layers, batch, length):
    """Runs once to compile, once for the clock; returns seconds and the peak of memory in MiB."""
    loss, params, rest, tokens, _ = gpt2(batch=batch, length=length, layers=layers)
    keys = iter(jax.random.split(jax.random.key(0), 1000))
    params = jax.tree.map(lambda p: 0.02 * jax.random.normal(next(keys), p.shape), params)
    tokens = tuple(jax.random.randint(next(keys), t.shape, 0, 50257) for t in tokens)

    def scalar(params, tokens):
        return loss(params, rest, tokens)[0]

    if name == "compiled":
        gradient = jax.jit(jax.value_and_grad(scalar))
        once = lambda: jax.block_until_ready(gradient(params, tokens))  # noqa: E731
    elif name == "operation by operation":
        args = (params, tokens)
        program = make_program("run", scalar, get_policy("float32"), args, {}, 0, False)
        once = lambda: interpret(  # noqa: E731
            program.jaxpr, [*program.arrays, jnp.float32(1)], Plain()
        )
    else:
        tool = getattr(mpjax, name)
        once = lambda: tool(scalar, "mixed_bfloat16")(params, tokens)  # noqa: E731
    once()
    start = time.perf_counter()
    once()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--one", choices=RUNS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = {"layers": options.layers, "batch": options.batch, "length": options.length}
    if options.one:
        print(json.dumps(one(options.one, **sizes)))
        return
    figures = {}
    for name in RUNS:
        flags = [f"--{key}={value}" for key, value in sizes.items()]
        done = subprocess.run(
            [sys.executable, __file__, "--one", name, *flags],
            capture_output=True,
            text=True,
            check=True,
        )
        figures[name] = json.loads(done.stdout.splitlines()[-1])
        ratios = [
            f"{figures[name][key] / figures[base][key]:.2f}x {base}"
            for base in RUNS[:2]
            if base in figures
            for key in ("mib",)
        ]
        print(
            f"{name:<24}{figures[name]['seconds']:>8.1f} s{figures[name]['mib']:>9.0f} MiB   "
            f"memory {', '.join(ratios)}",
            flush=True,
        )
    if options.json:
        save(options.json, {"sizes": sizes, "runs": figures})


if __name__ == "__main__":
    main()
