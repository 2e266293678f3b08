"""Compiles programs for hardware that this machine does not have."""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.backend import get_compile_options
from jax.interpreters import mlir

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base._jax.programs import patched


@functools.cache
def _absent_devices(platform: str, topology: str, config: str, count: int) -> tuple[Any, ...]:
    from jax.experimental import topologies

    options: dict[str, Any]
    if platform == "tpu":
        options = {"topology_name": topology}
        if count < 4:  # less than one host, which libtpu must be told
            options["chips_per_host_bounds"] = (1, 1, 1)
    else:
        options = {"topology": topology, "target_config": config}
    devices = topologies.get_topology_desc(platform=platform, **options).devices
    # Chips with two cores may count twice; JAX runs them as one device.
    return tuple(d for d in devices if not getattr(d, "core_on_chip", 0))


# XLA's error if its Triton matmuls need a device for tuning, and the flag that turns them off.
UNTUNED, TRITON = "output tile sizes", "xla_gpu_enable_triton_gemm"


def compile_only(
    platform: str, topology: str, config: str, count: int, program: bytes, options: dict[str, Any]
) -> dict[str, Any]:
    """Compiles StableHLO for absent devices: returns its memory, and the HLO before and after.

    Call it in a separate process, because it loads the plugins of the platform, "cuda" or "tpu".
    XLA's name of the devices is ``topology``, its description of a GPU ``config``, and the program
    is partitioned over ``count`` of them.
    """
    devices = _absent_devices(platform, topology, config, count)
    before = internals.mlir_module_to_xla_computation(program)
    left_out = ""
    try:
        executable = _executable(devices, program, options)
    except jax.errors.JaxRuntimeError as error:
        if UNTUNED not in str(error):
            raise
        left_out = TRITON
        executable = _executable(devices, program, {**options, TRITON: False})
    optimized = executable.hlo_modules()[0]
    return {
        "left_out": left_out,
        "memory": memory_of(executable),
        "asked": before.as_hlo_module().to_string(),
        "hlo": optimized.to_string(),
        "xla_costs": _costs_of(optimized),
    }


def _executable(devices: tuple[Any, ...], program: bytes, options: dict[str, Any]) -> Any:
    settings = get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        env_options_overrides=options,
    )
    with mlir.make_ir_context():
        module = mlir.ir.Module.parse(program)
        return devices[0].client.compile(
            module, executable_devices=internals.DeviceList(devices), compile_options=settings
        )


def memory_of(executable: Any) -> dict[str, int]:
    """Returns the bytes of a program on one device, by kind."""
    stats = executable.get_compiled_memory_stats()
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
    }


def _costs_of(module: Any) -> dict[str, float]:
    """Returns what XLA counts in a module of HLO, whatever device it was compiled for."""
    # The analysis needs some client. Of the target there is none, but every machine has a CPU.
    cpu = jax.devices("cpu")[0].client
    costs = internals.hlo_module_cost_analysis(cpu, module)
    return {
        name: costs[name]
        for name in ("flops", "bytes accessed", "transcendentals")
        if name in costs
    }


def lowered_without(traced: Any, platform: str, primitives: Iterable[Any]) -> Any:
    """Lowers a traced function without what some primitives do. Their results are zeros that no
    compiler sees as such, as if they came from elsewhere."""
    rules: Any = tuple((primitive, _zeros) for primitive in primitives)
    parameters = mlir.LoweringParameters(override_lowering_rules=rules)
    return traced.lower(lowering_platforms=(platform,), _private_parameters=parameters)


def _zeros(ctx: Any, *args: Any, **params: Any) -> Any:
    def zeros(*_: Any) -> list[Any]:
        return [jax.lax.optimization_barrier(jnp.zeros(a.shape, a.dtype)) for a in ctx.avals_out]

    return mlir.lower_fun(zeros, multiple_results=True)(ctx, *args)


CUDNN_VERSION = 91000  # version 9.10, which has all features that JAX checks


def as_if_on_gpu(capability: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which JAX's checks of the GPU and of cuDNN see another GPU.

    JAX checks them while `jax.nn.dot_product_attention` is traced for cuDNN. Inside the context it
    sees a GPU of the given compute capability; "" changes nothing.
    """

    def version(text):
        return tuple(map(int, text.split(".")))

    answers = {
        "check_cudnn_version": lambda: CUDNN_VERSION,
        "check_compute_capability": lambda least: version(capability) >= version(least),
        "is_cuda_compute_capability_equal": lambda same: version(capability) == version(same),
    }
    return patched(*((name, answer) for name, answer in answers.items() if capability))
