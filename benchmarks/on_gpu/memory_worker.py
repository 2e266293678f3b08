"""The functions that the processes of `memory` run."""

import time
from typing import Any

import jax

import mpjax
from benchmarks.on_gpu.cases import sizes_of
from benchmarks.on_gpu.flops import target_of
from benchmarks.on_gpu.jax_rivals import Skip, arrays, compile_step, jitted, precisely, program_of
from mpjax._src.tools.hardware.hlo_costs import costs

# By model and rival: the program, its sizes and its executable.
COMPILED: dict[tuple[str, str], tuple[Any, dict[str, Any], Any]] = {}


def compiled(case: str, way: str, smoke: bool) -> dict[str, Any]:
    """Compiles for the device; returns the executable's memory and GB, and autotuning's memory.

    The memory of autotuning is None if the program was in JAX's cache.
    """
    hits: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    sizes = sizes_of(case, smoke)
    found = program_of(case, sizes, way)
    start = time.perf_counter()
    executable = compile_step(found, way)
    seconds = time.perf_counter() - start
    COMPILED[case, way] = found, sizes, executable
    stats = executable.memory_analysis()
    fields = {
        "arguments": stats.argument_size_in_bytes,
        "results": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }
    cached = any("cache_hits" in event for event in hits)
    return {
        "kind": jax.local_devices()[0].device_kind,
        "compiled": fields,
        "gb": round(costs(executable.as_text()).bytes / 1e9, 3),
        "compile_s": round(seconds, 1),
        "tuning": None if cached else in_use("peak_bytes_in_use"),
    }


def peak(case: str, way: str) -> dict[str, Any]:
    """Runs the compiled step; returns the most bytes in use."""
    found, sizes, step = COMPILED[case, way]
    params, rest, batch = arrays(found, sizes)
    state = jax.block_until_ready(jax.jit(found.init)(params, rest))
    del params, rest
    before = in_use("peak_bytes_in_use")
    for _ in range(3):
        state, _ = step(state, batch)
    jax.block_until_ready(state)
    most = in_use("peak_bytes_in_use")
    if most is None:
        return {"no_peak": f"{jax.default_backend()} does not count its bytes in use"}
    if most == before:
        return {"no_peak": "compiling or loading took more than a step does"}
    return {"peak": most}


def predicted(case: str, way: str, smoke: bool, kind: str) -> dict[str, Any]:
    """Compiles for a device that this process does not see."""
    target = target_of(kind)
    if target is None:
        raise Skip(f"compile_for has no target that calls itself {kind!r}")
    found = program_of(case, sizes_of(case, smoke), way)
    with precisely(way):
        report = mpjax.compile_for(target.name, jitted(found), found.state, found.batch)
    fields = {
        "arguments": report.argument_bytes,
        "results": report.output_bytes,
        "aliased": report.alias_bytes,
        "temporary": report.temp_bytes,
        "code": report.code_bytes,
    }
    return {
        "predicted": fields,
        "target": target.name,
        "predicted_gb": round(report.bytes_accessed / 1e9, 3),
        "compute_ms": round(report.compute_ms, 3),
        "memory_ms": round(report.memory_ms, 3),
    }


def in_use(key: str) -> int | None:
    return (jax.local_devices()[0].memory_stats() or {}).get(key)
