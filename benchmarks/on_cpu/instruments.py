"""Case "instruments": time and peak memory of `find_nonfinite` and `compare` on GPT-2.

They are compared with one compiled float32 gradient, and with the same gradient run operation by
operation, which keeps the values that XLA would fuse away. Every run has its own process, so that
each peak of resident memory belongs to one run.
"""

import functools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from benchmarks import HERE
from benchmarks.models import MODELS, SMALL
from benchmarks.on_cpu.steps import concrete
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.program.interpret import Plain, interpret
from mpjax._src.tools.instruments.programs import make_program

RUNS = ("compiled", "operation by operation", "find_nonfinite", "compare")
BASES = RUNS[:2]
SIZES: dict[str, Any] = {"layers": 6, "batch": 2, "length": 256}


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    if smoke:
        yield "ode", functools.partial(row, RUNS[:3], "ode", SMALL["ode"])
    else:
        yield "gpt2, {layers} layers".format(**SIZES), functools.partial(row, RUNS, "gpt2", SIZES)


def row(runs: tuple[str, ...], model: str, sizes: dict[str, Any]) -> dict[str, Any]:
    found = {name: child(name, model, sizes) for name in runs}
    return {
        "sizes": sizes,
        "runs": found,
        "ratios": {
            f"{name} / {base}, {figure}": found[name][figure] / found[base][figure]
            for name in runs
            for base in BASES
            for figure in ("seconds", "mib")
            if base in runs and name not in BASES
        },
    }


def child(name: str, model: str, sizes: dict[str, Any]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.on_cpu.instruments", name, model, json.dumps(sizes)],
        cwd=HERE.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def one(name: str, model: str, sizes: dict[str, Any]) -> dict[str, float]:
    """Runs once to compile and once timed; returns the seconds and the peak memory in MiB."""
    loss, params, rest, batch, _ = MODELS[model](**sizes)
    params, batch = concrete((params, batch), sizes.get("vocabulary", 50257))
    once = runner(name, lambda params, batch: loss(params, rest, batch)[0], params, batch)
    once()
    start = time.perf_counter()
    once()
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def runner(name: str, scalar: Callable, *args: Any) -> Callable[[], Any]:
    if name == "compiled":
        gradient = jax.jit(jax.value_and_grad(scalar))
        return lambda: jax.block_until_ready(gradient(*args))
    if name == "operation by operation":
        program = make_program("run", scalar, get_policy("float32"), args, {}, 0, False)
        # Each run has its own list: `interpret` removes arrays from it after their last use.
        return lambda: interpret(program.jaxpr, [*program.arrays, jnp.float32(1)], Plain())
    tool = getattr(mpjax, name)
    return lambda: tool(scalar, "mixed_bfloat16")(*args)


if __name__ == "__main__":
    print(json.dumps(one(*sys.argv[1:3], json.loads(sys.argv[3]))))
