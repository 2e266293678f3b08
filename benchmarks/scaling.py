"""Suite "scaling": costs by the number of layers, batches, devices and steps.

    python -m benchmarks --suite scaling [layers programs batch devices wire steps] [--budget 470]

    layers    tracing and compiling the gradient of a Llama whose layers are unrolled in Python
    programs  tracing the gradients of GPT-2 and of neural ODEs with unrolled steps
    batch     the memory of a training step, compiled for an absent H100
    devices   what each of 1 to 256 H100s sends and takes in a data-parallel step
    wire      the bytes and dtypes that eight H100s send each other, by how the state is sharded
    steps     arrays, memory and compilations after thousands of steps; none of them may grow

Seconds are CPU time, the best of several repetitions. The ways are measured in turns, with JAX's
caches cleared. "calls" is the number of Python and C functions that Python called during tracing;
it does not change from run to run, however busy the machine is.
"""

import collections
import functools
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import psutil
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax
from benchmarks import Options
from benchmarks.models import MODELS, SMALL, training_step
from benchmarks.wire import PROGRAMS as SPREAD
from benchmarks.wire import measured

LLAMA = functools.partial(MODELS["llama_unrolled"], **{**SMALL["llama"], "heads": 4, "groups": 2})
LAYERS = (6, 12, 24, 48, 96)
PROGRAMS = {
    "gpt2": MODELS["gpt2"],
    **{f"ode {n}": functools.partial(MODELS["ode"], steps=n) for n in (64, 256)},
}
DEVICES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BATCHES, BATCH_MODEL = (1, 2, 4, 8, 16, 32, 64), functools.partial(MODELS["gpt2"], layers=4)
STEPS = 10_000
POLICY = "mixed_bfloat16"
POLICIES = {"autocast": POLICY, "autocast, lean": f"{POLICY},storage=lean"}


def run(options: Options, results: Any) -> list[str]:
    """Measures missing rows until the budget is spent; returns the quantities that grew."""
    end = time.monotonic() + options.budget
    for case in options.cases:
        for rival, measure in CASES[case](options.smoke):
            if time.monotonic() > end:
                return []
            if results.get(case, rival) is None:
                results.put(case, rival, measure())
    grown = {k: v for k, v in results.cases.get("steps", {}).items() if v.get("grew")}
    return [f"{rival}: {', '.join(row['grew'])} grew" for rival, row in grown.items()]


# ---- layers and programs -------------------------------------------------------------------------


def layers(smoke: bool):
    for count in (1, 2) if smoke else LAYERS:
        yield (
            f"{count} layers",
            functools.partial(
                tracing, functools.partial(LLAMA, layers=count), 1 if smoke else 3, compiles=True
            ),
        )


def programs(smoke: bool):
    small = {"gpt2": functools.partial(MODELS["gpt2"], **SMALL["gpt2"])}
    for name, model in (small if smoke else PROGRAMS).items():
        yield name, functools.partial(tracing, model, 1 if smoke else 3)


def tracing(model: Callable, repeats: int, compiles: bool = False) -> dict[str, Any]:
    """Returns the cost of tracing a gradient in float32 and under autocast, and their ratios."""
    loss, *arguments, _ = model()
    ways = {"float32": loss, "autocast": mpjax.autocast(loss, POLICY)}
    found = traced(ways, arguments, repeats, compiles)
    return tracing_row(found, (("autocast", "float32"),))


def traced(
    ways: dict[str, Callable], arguments: list[Any], repeats: int, compiles: bool
) -> dict[str, dict[str, float]]:
    """Returns the cost of tracing the gradients of functions in turns, and of compiling them."""
    found: dict[str, dict[str, float]] = {way: {"seconds": float("inf")} for way in ways}
    for _ in range(repeats):
        for way, loss in ways.items():
            seconds, jaxpr = timed(gradient(loss), *arguments)
            found[way]["seconds"] = min(found[way]["seconds"], seconds)
            found[way]["equations"] = equations(jaxpr.jaxpr)
    for way, loss in ways.items():
        found[way]["calls"] = calls(gradient(loss), *arguments)
        if compiles:
            found[way]["compile_s"] = compiling(gradient(loss), *arguments)
    return found


def tracing_row(found: dict[str, dict[str, float]], pairs: Any) -> dict[str, Any]:
    """Returns the figures with the ratio of each pair (measured, measured against)."""
    return {
        **{f"{way}_{key}": value for way, row in found.items() for key, value in row.items()},
        "ratios": {
            f"{way} / {base}, {key}": found[way][key] / found[base][key]
            for way, base in pairs
            for key in found[base]
        },
    }


def gradient(loss: Callable) -> Callable:
    return jax.value_and_grad(loss, has_aux=True)


def timed(fun: Callable, *args: Any) -> tuple[float, Any]:
    jax.clear_caches()
    gc.collect()
    start = time.process_time()
    jaxpr = jax.make_jaxpr(fun)(*args)
    return time.process_time() - start, jaxpr


def calls(fun: Callable, *args: Any) -> int:
    """Returns the number of functions that tracing calls."""
    counts: collections.Counter[str] = collections.Counter()

    def count(frame, event, arg):
        counts[event] += 1

    jax.clear_caches()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        jax.make_jaxpr(fun)(*args)
    finally:
        sys.setprofile(before)
    return counts["call"] + counts["c_call"]


def compiling(fun: Callable, *args: Any) -> float:
    lowered = jax.jit(fun).lower(*args)
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start


def equations(jaxpr: Any) -> int:
    """Returns the number of equations in a program, including those of inner programs."""
    inner = (sub for eqn in jaxpr.eqns for sub in jax.extend.core.jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(map(equations, inner))


# ---- batches and devices -------------------------------------------------------------------------


def batches(smoke: bool):
    model = functools.partial(MODELS["gpt2"], **SMALL["gpt2"]) if smoke else BATCH_MODEL
    for batch in BATCHES[:1] if smoke else BATCHES:
        yield f"batch {batch}", functools.partial(memory, functools.partial(model, batch=batch))


def memory(model: Callable) -> dict[str, Any]:
    """Returns the temporary memory of a step on an H100, in float32 and under autocast."""
    loss, params, rest, batch, optimizer = model()
    state = params, rest, jax.eval_shape(optimizer.init, params)
    ways = {"float32": loss} | {k: mpjax.autocast(loss, v) for k, v in POLICIES.items()}
    found = {}
    for way, taken in ways.items():
        step = jax.jit(training_step(taken, optimizer), donate_argnums=0)
        try:
            found[way] = mpjax.compile_for("h100", step, state, batch).temp_bytes / 2**20
        except ImportError as error:
            return {"skipped": str(error)}
    return {
        **{f"{way}_mib": value for way, value in found.items()},
        "ratios": {
            f"{way} / float32, memory on an H100": found[way] / found["float32"] for way in POLICIES
        },
    }


def devices(smoke: bool):
    sizes = SMALL["gpt2"] if smoke else {"layers": 4, "batch": 8}
    for count in DEVICES[:2] if smoke else DEVICES:
        taken = {**sizes, "batch": count * sizes["batch"]}
        yield (
            f"{count} devices",
            functools.partial(data_parallel, functools.partial(MODELS["gpt2"], **taken), count),
        )


def data_parallel(model: Callable, count: int) -> dict[str, Any]:
    """Returns the bytes that each of several H100s sends and takes in a data-parallel step."""
    loss, params, rest, batch, optimizer = model()
    mesh = AbstractMesh((count,), ("data",), axis_types=(AxisType.Auto,))

    def spread(tree, spec):
        place = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree)

    state = spread((params, rest, jax.eval_shape(optimizer.init, params)), P())
    batch, shardings = spread(batch, P("data")), NamedSharding(mesh, P())
    found = {}
    for way, taken in {"float32": loss, "autocast": mpjax.autocast(loss, POLICY)}.items():
        step = training_step(taken, optimizer)
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
        try:
            report = mpjax.compile_for(f"h100 x {count}", jitted, state, batch, timeout=3600)
        except ImportError as error:
            return {"skipped": str(error)}
        found[way] = {"wire": report.wire_bytes / 2**20, "memory": report.temp_bytes / 2**20}
    return {
        **{f"{way}_{key}_mib": value for way, row in found.items() for key, value in row.items()},
        "ratios": {
            f"autocast / float32, {name} of each H100": found["autocast"][key] / value
            for key, name in (("wire", "bytes sent"), ("memory", "memory"))
            if (value := found["float32"][key])
        },
    }


def wire(smoke: bool):
    for name, program in [*SPREAD.items()][: 1 if smoke else None]:
        yield name, functools.partial(measured, program)


# ---- steps ---------------------------------------------------------------------------------------


def steps(smoke: bool):
    for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
        yield policy, functools.partial(endurance, policy, 30 if smoke else STEPS)


def endurance(policy: str, count: int) -> dict[str, Any]:
    """Takes many steps of a small model; returns what the process holds early and at the end."""
    width = 64
    params = {"up": jnp.ones((8, width)) / 8, "down": jnp.ones((width, 1)) / width}
    x = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] - 1) ** 2)

    init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-3), policy)
    step, state = jax.jit(step, donate_argnums=0), init(params)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    seen = []
    for index in range(count):
        state, metrics = step(state, x)
        if index in (count // 10, count - 1):  # lazy initialization is done by the first steps
            jax.block_until_ready((state, metrics))
            gc.collect()
            seen.append(
                {
                    "arrays": len(jax.live_arrays()),
                    "mib": psutil.Process().memory_info().rss / 2**20,
                    "compilations": len(compiled),
                }
            )
    early, late = seen
    allowed = {"arrays": 0, "mib": 8, "compilations": 0}
    return {
        "steps": count,
        **{f"{key}_grown_by": late[key] - early[key] for key in allowed},
        "compilations": late["compilations"],
        "grew": [key for key, most in allowed.items() if late[key] - early[key] > most],
    }


CASES = {
    "layers": layers,
    "programs": programs,
    "batch": batches,
    "devices": devices,
    "wire": wire,
    "steps": steps,
}
