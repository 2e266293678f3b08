"""The accelerators that `compile_for` can compile for, from the table of devices."""

import dataclasses
import math
import re
from typing import Any, NamedTuple

from mpjax._src.core.base.devices import CARDS, GIB, GPUS, KINDS, TPUS, Named, Peaks, named
from mpjax._src.core.base.errors import brief, did_you_mean, finite_number

# What JAX's allocator takes of a GPU by default (XLA_PYTHON_CLIENT_MEM_FRACTION).
GPU_PREALLOCATED = 0.75

# The default share of the memory that programs cannot use.
RESERVES = {"cuda": 1 - GPU_PREALLOCATED, "tpu": 0.05}

CARD_FIELDS = (
    *("core_count", "fpus_per_core", "threads_per_core_limit", "shared_memory_per_core"),
    *("shared_memory_per_block_optin", "l2_cache_size", "clock_rate_ghz"),
)

# The limits that all cards have.
LIMITS = (
    "shared_memory_per_block: 49152 threads_per_block_limit: 1024 threads_per_warp: 32 "
    "registers_per_core_limit: 65536 registers_per_block_limit: 65536 "
    "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
    "thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64"
)

# PCI Express of 16 lanes, in bytes per second in each direction, by the major compute capability:
# generations 3, 4, 5 and 6 (NVIDIA's datasheets give the sum of both directions).
PCIE = {"7": 16e9, "8": 32e9, "9": 64e9, "10": 128e9}

TPU_CHIPS = {name: chip for name, chip in TPUS.items() if chip}


class Pace(NamedTuple):
    """How much longer kernels take than the roofline says, from the times of whole steps.

    The first five are factors, of the longer one of the times of a kernel's bytes and FLOPs.
    """

    bandwidth: float  # of kernels without a matmul
    matmuls: float
    odd: float  # of 16-bit matmuls with an axis that is no multiple of 8
    attention: float  # of calls of cuDNN's attention
    convolutions: float  # of cuDNN's
    start: float  # the seconds that each run of a kernel adds
    source: str  # where they come from, for the report


# ``python -m benchmarks --suite expected`` fits them, and predicts each step by the others.
_H100 = (1.13, 1.38, 3.32, 4.13, 2.06, 2e-6)
PACES = {  # by chip
    "h100": Pace(
        *_H100,
        "Expected times use constants of 17 steps in 16 bits (GPT-2, Llama, ResNet-50), timed on "
        "an NVIDIA H100 80GB HBM3 in 2026-11 with jax 0.11.2. Each is within 6% of what the others "
        "predict; steps in float32 are within 20%.",
    ),
    # The same cores with other memory.
    "h200": Pace(
        *_H100,
        "Expected times are scaled: the constants of an H100, with the bandwidth of this card, on "
        "which no step was timed.",
    ),
}

ALIASES = {"a100": "a100-40"}  # the smaller: what fits it fits both

# "h100 x 8", "v5e x4", "h100x8"; but an "rtx 4090" is one.
SEVERAL = re.compile(r"(.*?\S)(?:\s+x\s*|(?<=\d)x|(?<=\d[ep])x)(\d+)")
GPUS_PER_HOST, MOST = 8, 4096


@dataclasses.dataclass(frozen=True)
class Target:
    """One accelerator or several equal ones: the facts for the compiler and the roofline."""

    name: str  # the name in this table, with the number of devices if there are several: "h100 x 8"
    platform: str  # "cuda" or "tpu"
    device: str  # the name that the device reports
    memory: int  # the memory of one device, in bytes
    bandwidth: float  # the bandwidth of that memory, in bytes per second
    link: float  # the bandwidth of the link to the host in each direction, in bytes per second
    peaks: Peaks  # the peak FLOP/s by dtype, of the matrix units if they support the dtype
    topology: str  # XLA's name of the topology
    config: str  # the text proto that XLA's GPU compiler needs; "" for TPUs
    chip: str  # the name of one device
    devices: int = 1  # the number of devices


def find_target(name: str) -> Target:
    """Returns the target of a name such as "h100", "A100-SXM4-80GB", "TPU v5e" or "h100 x 8"."""
    names = [*GPUS, *ALIASES, *TPU_CHIPS]
    valid = f"Choose one of {', '.join(names)}."
    if not isinstance(name, str):
        raise TypeError(f"target={brief(name)} must be a string. {valid}")
    several = SEVERAL.fullmatch(name.strip())
    asked = named(several[1] if several else name)
    key = ALIASES.get(asked.key, asked.key)
    if key in GPUS or key in TPU_CHIPS:
        one = _gpu(key) if key in GPUS else _tpu(key)
        # Of a variant, neither the number of cores nor the bandwidth is known.
        if not asked.variant and _fits(asked.memory, one.memory):
            return _several(one, int(several[2]), name) if several else one
        raise ValueError(
            f"target={brief(name)} is a variant of {key} whose details mpjax lacks: its {key} is "
            f"the {one.device}, with {size(one.memory)}. Write target={key!r} to compile for that "
            f"one, and {key + ' x 8'!r} for several devices. {valid}"
        )
    if key in KINDS:
        raise ValueError(f"target={brief(name)} does not name a model of a device. {valid}")
    if asked.known:
        raise ValueError(
            f"target={brief(name)} is known to recommend_policy, but mpjax lacks the details to "
            f"compile for it.{_alike(asked)} {valid}"
        )
    raise ValueError(f"Unknown target={brief(name)}.{did_you_mean(key, names)} {valid}")


def _fits(asked: int | None, memory: int) -> bool:
    """Returns whether a card's name gives the memory of a target; a part of it is reserved."""
    return asked is None or 0.9 * asked < memory / GIB < 1.02 * asked


def _alike(asked: Named) -> str:
    """Says which targets have the cores that are most like those of a card."""
    versions = {k: tuple(map(int, CARDS[k].split("."))) for k in GPUS}
    try:
        mine = tuple(map(int, CARDS[asked.key].split(".")))
    except (KeyError, ValueError):  # a TPU, or AMD's
        return ""
    older = [v for v in versions.values() if v <= mine and v[0] == mine[0]]
    like = [k for k, v in versions.items() if older and v == max(older)]
    if not like:
        return ""
    same = versions[like[0]] == mine
    kind = "the same kind of cores" if same else f"the nearest cores, of {CARDS[like[0]]}"
    return f" {' and '.join(like)} {'has' if len(like) == 1 else 'have'} {kind}."


def room_of(target: Target, reserve: Any) -> tuple[float, int]:
    """Returns the share of the memory to leave free, and the bytes that are available.

    None means the target's default.
    """
    share = RESERVES[target.platform] if reserve is None else reserve
    number = finite_number(share)
    if number is None or not 0 <= number < 1:
        raise ValueError(
            f"reserve={brief(share)} must be a share of the device's memory, from 0 to less "
            f"than 1, or None for the default: {1 - GPU_PREALLOCATED:g} on GPUs, which JAX leaves "
            "free, and 0.05 on TPUs."
        )
    return number, int(target.memory * (1 - number))


def room_in_words(available: float, reserve: float, memory: float) -> str:
    return f"{size(available)} ({reserve:.0%} of {size(memory)} left free)"


def size(count: float) -> str:
    """Returns a number of bytes as text, in B, KiB, MiB or GiB."""
    for unit_name, unit_size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= unit_size:
            return f"{count / unit_size:,.2f} {unit_name}"
    return f"{count:,.0f} B"


def _gpu(name: str) -> Target:
    device, memory, bandwidth, peaks, facts = GPUS[name]
    capability = CARDS[name]
    return Target(
        *(name, "cuda", device, memory, bandwidth, PCIE[capability.split(".")[0]]),
        {dtype: peak * 1e12 for dtype, peak in peaks.items()},
        "1x1x1",
        _config(
            device,
            capability,
            memory,
            bandwidth,
            " ".join(map("{}: {}".format, CARD_FIELDS, facts)),
        ),
        name,
    )


def _tpu(name: str) -> Target:
    axes, memory, bandwidth, half, byte, link = TPU_CHIPS[name]
    # The matrix unit takes bfloat16: float32 is 6 passes of it, or 3 at precision="high".
    peaks = {"bf16": half * 1e12, "f32": half * 1e12 / 6, "s8": byte * 1e12}
    topology = f"{name}:{_torus(1, axes)}"
    return Target(name, "tpu", f"TPU {name}", memory, bandwidth, link, peaks, topology, "", name)


def _several(one: Target, count: int, asked: str) -> Target:
    """Returns a target of several devices: GPUs in hosts of eight, or a slice of TPUs."""
    if one.platform == "cuda":
        hosts = math.ceil(count / GPUS_PER_HOST)
        valid = 1 <= count <= MOST and count % hosts == 0
        topology = f"1x{hosts}x{count // hosts}" if valid else ""
        which = f"1 to {GPUS_PER_HOST} GPUs and multiples of {GPUS_PER_HOST} up to {MOST}"
    else:
        valid = 1 <= count <= MOST and not count & (count - 1)
        topology = f"{one.chip}:{_torus(count, TPU_CHIPS[one.chip][0])}" if valid else ""
        which = f"the sizes of TPU slices: powers of two up to {MOST}"
    if not valid:
        raise ValueError(
            f"target={brief(asked)} cannot be compiled for {count} devices. Choose {which}."
        )
    if count == 1:
        return one
    return dataclasses.replace(one, name=f"{one.chip} x {count}", topology=topology, devices=count)


def _torus(count: int, axes: int) -> str:
    """Returns the dimensions of a slice as Google offers them: "2x2x1" for 4, "2x2x4" for 16."""
    sizes = [1] * axes
    while math.prod(sizes) < count:  # double the smallest: the first 1, else the last minimum
        least = min(range(axes), key=lambda a: (sizes[a], a if sizes[a] == 1 else -a))
        sizes[least] *= 2
    return "x".join(map(str, sizes))


def _config(device: str, capability: str, memory: int, bandwidth: float, facts: str) -> str:
    """Returns the text proto of a GPU for XLA's compiler."""
    major, minor = capability.split(".")
    measured = f"memory_bandwidth: {int(bandwidth)} device_memory_size: {memory}"
    return (
        f"gpu_device_info {{ {facts} {measured} {LIMITS}\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n}}\n"
        'platform_name: "CUDA"\ndnn_version_info { major: 9 minor: 10 patch: 0 }\n'
        f'device_description_str: "{device}"\n'
    )
