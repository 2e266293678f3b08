"""Compiles a training step for an H100 that is not there: memory, bytes and matmul dtypes.

Needs jax-cuda12-plugin and nvidia-cuda-nvcc-cu12 of jax's version, but no GPU and no driver. XLA's
real GPU compiler runs and nothing executes; the figures do not change from run to run.
"""

import collections
import re

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib._jax import hlo_module_cost_analysis

# Device facts as published in openxla/xla, xla/backends/gpu/target_config/specs (Apache-2.0).
TARGET = """
gpu_device_info {
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000 device_memory_size: 84942979072 l2_cache_size: 52428800
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 threads_per_block_limit: 1024 threads_per_warp: 32
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

MATMUL = re.compile(
    r"= .*? (?:dot|convolution)\(|custom_call_target=\"(?:__cublas|__cudnn|__triton)[^\"]*\""
)


def compile_step(step, state, batch):
    """Compiles ``step(state, batch)`` with its state donated; returns its figures."""
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=TARGET)
    mesh = Mesh(np.array(topology.devices).reshape(1), ("x",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)  # noqa: E731
    args = jax.tree.map(place, (state, batch))
    jitted = jax.jit(step, donate_argnums=0, out_shardings=everywhere)
    compiled = jitted.lower(*args).compile()
    module = compiled.runtime_executable().hlo_modules()[0]
    costs = hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    memory = compiled.memory_analysis()
    return {
        "temp_mib": round(memory.temp_size_in_bytes / 2**20),
        "bytes_gb": round(costs["bytes accessed"] / 1e9, 1),
        "matmuls": matmul_dtypes(module.to_string()),
        "hlo": module.to_string(),
    }


def matmul_dtypes(hlo: str) -> dict[str, int]:
    """Counts the matmuls and convolutions of an HLO module by their operands' dtype."""
    dtypes = dict(re.findall(r"(%?[\w.\-]+) = \(?(\w+)\[", hlo))
    counts: collections.Counter[str] = collections.Counter()
    for line in hlo.splitlines():
        call = re.search(r" (?:dot|convolution|custom-call)\(([^)]*)\)", line)
        if not call or not MATMUL.search(line):
            continue
        names = re.findall(r"(%[\w.\-]+)", call[1])
        floats = [dtypes.get(n, dtypes.get(n.lstrip("%"), "?")) for n in names[:2]]
        counts["f32" if "f32" in floats else floats[0]] += 1
    return dict(counts)
