"""The functions that the processes of `memory` run."""

import time
from typing import Any

import jax

import mpjax
from benchmarks.on_gpu.cases import sizes_of
from benchmarks.on_gpu.flops import target_of
from benchmarks.on_gpu.jax_rivals import Skip, arrays, precisely, program_of


def kind() -> dict[str, str]:
    """Returns the name of the device."""
    return {"kind": jax.local_devices()[0].device_kind}


def step_of(found: Any) -> Any:
    return jax.jit(found.step, donate_argnums=0)


def compiled(case: str, way: str, smoke: bool) -> dict[str, Any]:
    """Compiles for the device; returns the memory of the executable and of autotuning.

    The memory of autotuning is None if the program was in JAX's cache.
    """
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    found = program_of(case, sizes_of(case, smoke), way)
    with precisely(way):
        stats = step_of(found).lower(found.state, found.batch).compile().memory_analysis()
    fields = {
        "arguments": stats.argument_size_in_bytes,
        "results": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    cached = any("cache_hits" in event for event in hits)
    return {"compiled": fields, "tuning": None if cached else in_use("peak_bytes_in_use")}


def peak(case: str, way: str, smoke: bool) -> dict[str, Any]:
    """Runs some steps; returns the most bytes in use, less the bytes in use before."""
    before = in_use("bytes_in_use")
    sizes = sizes_of(case, smoke)
    found = program_of(case, sizes, way)
    start = time.perf_counter()
    with precisely(way):
        step = step_of(found).lower(found.state, found.batch).compile()
    seconds = time.perf_counter() - start
    params, rest, batch = arrays(found, sizes)
    state = jax.block_until_ready(jax.jit(found.init)(params, rest))
    del params, rest
    loading = in_use("peak_bytes_in_use")
    for _ in range(3):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    most = in_use("peak_bytes_in_use")
    if most is None:
        return {"no_peak": f"{jax.default_backend()} does not count its bytes in use"}
    if most == loading:
        return {"no_peak": "loading took more than a step does", "load_s": seconds}
    return {"peak": most - before, "load_s": seconds}


def predicted(case: str, way: str, smoke: bool, kind: str) -> dict[str, Any]:
    """Compiles for a device that this process does not see."""
    target = target_of(kind)
    if target is None:
        raise Skip(f"compile_for has no target that calls itself {kind!r}")
    found = program_of(case, sizes_of(case, smoke), way)
    with precisely(way):
        report = mpjax.compile_for(target.name, step_of(found), found.state, found.batch)
    fields = {
        "arguments": report.argument_bytes,
        "results": report.output_bytes,
        "aliased": report.alias_bytes,
        "temporary": report.temp_bytes,
        "code": report.code_bytes,
    }
    return {"predicted": fields, "target": target.name}


def in_use(key: str) -> int | None:
    return (jax.local_devices()[0].memory_stats() or {}).get(key)
