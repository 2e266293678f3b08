"""Devices by their names: the dtypes that each computes fast in, and the policy that suits it."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.contexts import COMPILED_FOR
from mpjax._src.core.base.dtypes import BFLOAT16, FLOAT16, capability_of, default_device
from mpjax._src.core.base.errors import brief, did_you_mean
from mpjax._src.core.base.public import public

# NVIDIA: the lowest compute capability with tensor cores for a dtype.
TENSOR_CORES = {FLOAT16: (7, 0), BFLOAT16: (8, 0)}

GIB = 2**30
Peaks = dict[str, float]  # TFLOP/s by dtype


class Sheet(NamedTuple):
    """What `compile_for` needs of a GPU.

    The facts that XLA's compiler needs are published in openxla/xla (xla/backends/gpu/
    target_config/specs, Apache-2.0). Those of the T4 are from its datasheet; its clock and L2 cache
    are approximate. Peak rates are from NVIDIA's datasheets: dense (no sparsity), at boost clock;
    of V100 SXM2, T4, A100 SXM, RTX A6000, H100 SXM, H200 SXM, HGX B200 / 8.
    """

    device: str  # what it calls itself
    memory: int  # in bytes
    bandwidth: float  # in bytes per second
    peaks: Peaks  # by dtype
    facts: tuple[float, ...]  # as in `hardware.targets.CARD_FIELDS`


class Chip(NamedTuple):
    """What `compile_for` needs of a TPU, from cloud.google.com/tpu/docs, one page per version.

    The link is from "How to scale your model" (jax-ml.github.io/scaling-book/tpus).
    """

    axes: int  # the axes of the torus
    memory: int  # in bytes
    bandwidth: float  # in bytes per second
    half: float  # the peak of bfloat16, in TFLOP/s
    byte: float  # the peak of int8
    # The bandwidth of the link to the host in each direction, in bytes per second.
    link: float = 16e9


A100: Peaks = {"bf16": 312, "f16": 312, "tf32": 156, "f32": 19.5, "f64": 19.5, "s8": 624}
H100: Peaks = {"f8": 1979, "bf16": 989, "f16": 989, "tf32": 494.5, "f32": 67, "f64": 67, "s8": 1979}

# The GPUs that a user may name, by NVIDIA's compute capability, or AMD's architecture.
CAPABILITIES = {
    "3.5": "k40",
    "3.7": "k80",
    "5.2": "m40 m60 gtx980",
    "6.0": "p100",
    "6.1": "p4 p40 gtx1080",
    "7.0": "v100",
    "7.5": "t4 rtx2080",
    "8.0": "a100 a100-40 a100-80 a30",
    "8.6": "a10 a10g a40 a6000 rtx3090",
    "8.9": "rtx4090 l4 l40 l40s",
    "9.0": "h100 h200 gh200",
    "10.0": "b100 b200 gb200",
    "12.0": "rtx5090",
    "gfx90a": "mi250x",
    "gfx942": "mi300x",
}
CARDS = {name: each for each, names in CAPABILITIES.items() for name in names.split()}
# Those that `compile_for` has details of.
GPUS = {
    "v100": Sheet(
        *("Tesla V100-SXM2-16GB", 16935682048, 898.048e9),
        {"f16": 125, "f32": 15.7, "f64": 7.8},
        (80, 64, 2048, 98304, 98304, 6291456, 1.53),
    ),
    "t4": Sheet(
        *("Tesla T4", 15843721216, 320.064e9),
        {"f16": 65, "f32": 8.1, "f64": 0.25, "s8": 130},
        (40, 64, 1024, 65536, 65536, 4194304, 1.59),
    ),
    "a100-40": Sheet(
        *("NVIDIA A100-SXM4-40GB", 42331013120, 1555.2e9, A100),
        (108, 64, 2048, 167936, 166912, 41943040, 1.41),
    ),
    "a100-80": Sheet(
        *("NVIDIA A100-SXM4-80GB", 85100068864, 2039.04e9, A100),
        (108, 64, 2048, 167936, 166912, 41943040, 1.41),
    ),
    "a6000": Sheet(
        *("NVIDIA RTX A6000", 51041271808, 768.096e9),
        {"bf16": 155, "f16": 155, "tf32": 77.4, "f32": 38.7, "f64": 0.6, "s8": 310},
        (84, 128, 1536, 102400, 101376, 6291456, 1.8),
    ),
    "h100": Sheet(
        *("NVIDIA H100 80GB HBM3", 84942979072, 3352.32e9, H100),
        (132, 128, 2048, 233472, 232448, 52428800, 1.98),
    ),
    "h200": Sheet(
        *("NVIDIA H200 141GB HBM3e", 151397597184, 4800e9, H100),
        (132, 128, 2048, 233472, 232448, 52428800, 1.98),
    ),
    "b200": Sheet(
        *("NVIDIA B200", 191514411008, 7672.32e9),
        {"f8": 4500, "bf16": 2250, "f16": 2250, "tf32": 1125, "f32": 75, "f64": 37, "s8": 4500},
        (148, 128, 2048, 233472, 232448, 132644864, 1.965),
    ),
}
TPUS = {
    "v2": None,
    "v3": None,
    "v4": Chip(3, 32 * GIB, 1228e9, 275, 275),
    "v5e": Chip(2, 16 * GIB, 819e9, 197, 394),
    "v5p": Chip(3, 95 * GIB, 2765e9, 459, 918),
    "v6e": Chip(2, 32 * GIB, 1640e9, 918, 1836, 32e9),
    "v7x": None,
}
# Names that JAX, clouds and vendors use for the same devices.
SPELLED = {
    "v5lite": "v5e",
    "v5litepod": "v5e",
    "v5": "v5p",
    "v6lite": "v6e",
    "trillium": "v6e",
    "tpu7x": "v7x",
    "ironwood": "v7x",
    "rtxa6000": "a6000",
}
# Kinds of devices: of these alone, only a TPU and a CPU are known well enough for a policy.
KINDS = ("cpu", "tpu", "gpu", "cuda", "rocm")
# Words of a device's name that do not change what it is, and words that tell variants of it apart.
NOISE = re.compile(
    "nvidia|amd|google|cloud|tesla|geforce|quadro|instinct|gpu|tpu|ti|super|laptop|tensor|core"
    r"|sxm\d?|oam|hbm\w*|gddr\w*"
)
VARIANT = re.compile(r"pcie|nvl|(\d+)(?:g|gb|gib)")


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """The 16-bit dtypes that one device computes fast in, and the policy that suits it.

    Attributes:
        name: The name that the device reports, or the name that the user gave.
        platform: "gpu", "tpu" or "cpu".
        capability: The compute capability (NVIDIA) or the architecture (AMD); "" for others.
        fast: The 16-bit dtypes for which it has matrix units, the preferred one first.
        policy: The name of the policy that suits it.
        reason: The reason for the choice of policy.
    """

    name: str
    platform: str
    capability: str
    fast: tuple[str, ...]
    policy: str
    reason: str


@contextlib.contextmanager
def traced_for(name: str) -> Iterator[None]:
    """Returns a context in which functions are traced for another device, given by its name."""
    capability = _named(name).capability
    nvidia = capability[:1].isdigit()  # AMD's begin with "gfx"
    with COMPILED_FOR(name), _jax.as_if_on_gpu(capability if nvidia else ""):
        yield


def target_facts() -> DeviceFacts | None:
    """Returns the facts of the target of `compile_for`, or None outside of it."""
    return _named(COMPILED_FOR.value) if COMPILED_FOR.value else None


def current_facts() -> DeviceFacts:
    """Returns the facts of the device that a function is traced for.

    That is the target of `compile_for`, or else the default device.
    """
    return target_facts() or device_facts(None)


def device_facts(device: Any) -> DeviceFacts:
    """Returns the facts of a device, a name such as "h100", or for None the default device."""
    device = default_device() if device is None else device
    if isinstance(device, str):
        return _named(device)
    platform = getattr(device, "platform", None)
    if not isinstance(platform, str):
        raise TypeError(
            f"device={brief(device)} must be a jax.Device, such as jax.devices()[0], a name, such "
            "as 'h100', or None for the default device."
        )
    name = str(getattr(device, "device_kind", platform))
    if platform == "tpu":
        return _tpu(name)
    if platform == "cpu":
        return _cpu(name)
    return _gpu(name, capability_of(device))


class Named(NamedTuple):
    """What a user's name of a device says."""

    key: str  # a name in `CARDS`, `TPUS` or `KINDS`; or what is left of an unknown name
    memory: int | None  # the memory in the name, in GB; None if it has none
    variant: tuple[str, ...]  # other words that tell cards of one name apart, such as "pcie"

    @property
    def known(self) -> bool:
        return self.key in CARDS or self.key in TPUS or self.key in KINDS


def named(name: str) -> Named:
    """Reads a user's name of a device, such as "h100", "TPU v5 lite" or "A100-SXM4-80GB"."""
    words = re.findall(r"[^\W_]+", name.lower())
    if len(words) == 1 and words[0] in KINDS:
        return Named(words[0], None, ())
    variant_words = [word for word in words if VARIANT.fullmatch(word)]
    model = [word for word in words if word not in variant_words and not NOISE.fullmatch(word)]
    key, rest = "".join(model), []
    # Numbers may follow the model: the size of its memory or of a slice.
    for n in range(len(model), 0, -1):
        start = "".join(model[:n])
        start = SPELLED.get(start, start)
        if start in (*CARDS, *TPUS):
            key, rest = start, model[n:]
            break
        if not model[n - 1].isdigit():
            break
    sizes = [int(m[1]) for m in map(VARIANT.fullmatch, variant_words) if m and m[1]]
    variant = [word for word in variant_words if not word[0].isdigit()] + rest
    if len(rest) == 1 and f"{key}-{rest[0]}" in CARDS:
        sizes, variant = [int(rest[0])], variant[:-1]
    # The A100s differ in bandwidth too, so there the size of the memory is a part of the name.
    if sizes and f"{key}-{sizes[0]}" in CARDS:
        key = f"{key}-{sizes[0]}"
    return Named(key, sizes[0] if sizes else None, tuple(variant))


def check_name(argument: str, name: Any) -> None:
    """Raises a TypeError or ValueError if an argument is not the name of a known device."""
    if not isinstance(name, str):
        raise TypeError(f"{argument}={brief(name)} must be the name of a device, such as 'h100'.")
    _named(name, argument)


def _named(name: str, argument: str = "device") -> DeviceFacts:
    key = named(name).key
    if key in CARDS:
        return _gpu(name, CARDS[key])
    if key in (*TPUS, "tpu"):
        return _tpu(name)
    if key == "cpu":
        return _cpu(name)
    names = [*CARDS, *TPUS, "tpu", "cpu"]
    given = f"{argument}={brief(name)}"
    wrong = (
        f"{given} does not name a model, and what it runs fast depends on that."
        if key in KINDS
        else f"Unknown {given}.{did_you_mean(key, names)}"
    )
    here = " and, for a device of this process, jax.devices()[0]"
    others = here if argument == "device" else ""
    raise ValueError(f"{wrong} Choose one of {', '.join(names)}{others}.")


def _facts(name: str, platform: str, capability: str, fast: list[np.dtype], reason: str):
    # float16 only where there is nothing else: bfloat16 needs no loss scale.
    names = tuple(dtype.name for dtype in fast)
    policy = {(): "float32", ("float16",): "mixed_float16"}.get(names, "mixed_bfloat16")
    return DeviceFacts(name, platform, capability, names, policy, reason)


def _gpu(name: str, capability: str) -> DeviceFacts:
    parts = capability.split(".")
    if not parts[0].isdigit():  # AMD's architectures: matrix units for both since gfx908
        fast = [BFLOAT16, FLOAT16]
        return _facts(name, "gpu", capability, fast, "matrix units for bfloat16 and float16")
    version = tuple(int(part) for part in (*parts, "0")[:2])
    fast = [d for d in (BFLOAT16, FLOAT16) if version >= TENSOR_CORES[d]]
    cores = " and ".join(d.name for d in fast) or "no 16-bit dtype"
    reason = f"compute capability {capability}, tensor cores for {cores}"
    return _facts(name, "gpu", capability, fast, reason)


def _tpu(name: str) -> DeviceFacts:
    return _facts(name, "tpu", "", [BFLOAT16], "a TPU's matrix units support only bfloat16")


def _cpu(name: str) -> DeviceFacts:
    flags = ", ".join(sorted(_jax.cpu_flags()))
    reason = f"the CPU has {flags}" if flags else "no bfloat16 instructions were found"
    return _facts(name, "cpu", "", [BFLOAT16] if flags else [], reason)
