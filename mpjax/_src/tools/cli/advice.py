"""The advice of `mpjax doctor`: XLA flags, and known problems of the installed jaxlib.

Both are tables. JAX or NVIDIA documents every flag, and none was measured with mpjax. For one GPU
there is none: which kernels suit its matmuls depends on their sizes, so flags are tried on the
step itself. XLA ends a process whose flags it does not know, so a test checks that the installed
compilers accept them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

GPU, TPU = "gpu", "tpu"
PLATFORMS = (GPU, TPU)
# The environment variable from which each platform's compiler reads its flags.
VARIABLES = {GPU: "XLA_FLAGS", TPU: "LIBTPU_INIT_ARGS"}

JAX_FLAGS = "https://docs.jax.dev/en/latest/xla_flags.html"
JAX_GPU = "https://docs.jax.dev/en/latest/gpu_performance_tips.html"
NVIDIA = "https://docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance"


class Problem(NamedTuple):
    """A problem of some versions of a package."""

    platform: str  # the platform on which the problem occurs
    package: str
    first: str  # the first version with the problem
    fixed: str  # the first version without it, or "" if none is known
    what: str  # what happens, in words
    advice: str  # what to do about it
    source: str  # where the problem was reported


# What the command says of a GPU.
ONE_GPU = (
    "XLA flags for one GPU: none is advised, because none was measured to help. In a clone of "
    "mpjax, `python -m benchmarks.flags train.py:step` tries some on your step."
)

# The flags that are worth trying with several devices, to set to true, and what they do, by the
# documentation that describes them. A name begins with "xla_" and the platform that knows it.
FLAGS = {
    JAX_GPU: {"gpu_enable_latency_hiding_scheduler": "overlaps communication with computation"},
    JAX_FLAGS: {
        "gpu_enable_pipelined_all_reduce": "in loops, sums gradients during the next iteration",
        "tpu_enable_async_collective_fusion": "fuses communication into compute kernels",
        "tpu_overlap_compute_collective_tc": "overlaps communication with computation on one core",
        "tpu_enable_data_parallel_all_reduce_opt": "sums gradients between slices during "
        "computation",
    },
    NVIDIA: {
        "gpu_enable_pipelined_all_gather": "in loops, gathers sharded weights one iteration ahead",
        "gpu_enable_pipelined_reduce_scatter": "in loops, sums sharded gradients during the "
        "next iteration",
        "gpu_enable_while_loop_double_buffering": "unrolls loops by two, so that collectives "
        "overlap across iterations",
    },
}

PROBLEMS = (
    Problem(
        *(GPU, "jaxlib", "0.10.2", "0.11.1"),
        "a float32 scatter-add, the gradient of an embedding lookup, is hundreds of times slower "
        "if many indices are equal",
        "install jaxlib 0.11.1 or later, or 0.10.1",
        "https://github.com/openxla/xla/issues/46225",
    ),
    Problem(
        *(GPU, "jaxlib", "0.6.0", ""),
        "a 16-bit scatter-add is up to 20 times slower than in float32 if many indices are equal",
        "store embedding tables in float32, as O1 does: their gradients are then summed in float32",
        "https://github.com/openxla/xla/issues/26371",
    ),
)


def flags(devices: Mapping[str, int], environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yields the flags that are worth trying with several devices, with their current values.

    ``devices`` has the number of devices of each platform to advise for; 0 if a platform is absent.
    """
    for source, flags in FLAGS.items():
        for name, why in flags.items():
            platform = name.partition("_")[0]
            # The flags concern communication, which one device has none of. 0 stands for an absent
            # platform, of which the user may rent several devices.
            if devices.get(platform, 1) != 1:
                variable = VARIABLES[platform]
                now = setting(f"xla_{name}", environment.get(variable, ""))
                flag = f"--xla_{name}=true"
                told = {"variable": variable, "flag": flag, "now": now}
                yield {**told, "why": why, "source": source}


def setting(name: str, flags: str) -> str:
    """Returns the last value that a flag is set to, or "" if it is not set."""
    values = re.findall(rf"(?:^|\s)--?{name}(?:=(\S*))?(?=\s|$)", flags)
    # XLA reads a flag without a value as true.
    return (values[-1] or "true") if values else ""


def problems(platforms: Sequence[str], versions: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yields the known problems of the installed versions on some platforms."""
    for problem in PROBLEMS:
        # A package that is not installed has no numbers, and so comes before every version.
        installed = _numbers(versions.get(problem.package, ""))
        fixed = bool(problem.fixed) and installed >= _numbers(problem.fixed)
        if problem.platform in platforms and installed >= _numbers(problem.first) and not fixed:
            told = {name: getattr(problem, name) for name in ("what", "advice", "source")}
            yield {"package": f"{problem.package} {versions[problem.package]}", **told}


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, or an empty tuple if it is not installed."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release.group().split("."))) if release else ()
