"""The dtypes that each device computes fast in, and the policy that suits it."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax._src import _jax
from mpjax._src.contexts import COMPILED_FOR
from mpjax._src.document.model import Document, Table
from mpjax._src.document.report import Report
from mpjax._src.dtypes import BFLOAT16, FLOAT16, HALVES, capability_of, default_device, half_of
from mpjax._src.errors import brief, did_you_mean, warn_user
from mpjax._src.hardware.timed import matmul_time
from mpjax._src.policy import Policy, get_policy

SECONDS = 0.05  # that a report times matmuls in each dtype
# NVIDIA: the lowest compute capability with tensor cores for a dtype.
TENSOR_CORES = {FLOAT16: (7, 0), BFLOAT16: (8, 0)}

# GPUs that a user may name, with their compute capability (NVIDIA) or architecture (AMD).
CARDS = {
    "k40": "3.5",
    "k80": "3.7",
    "m40": "5.2",
    "m60": "5.2",
    "gtx980": "5.2",
    "p100": "6.0",
    "p4": "6.1",
    "p40": "6.1",
    "gtx1080": "6.1",
    "v100": "7.0",
    "t4": "7.5",
    "rtx2080": "7.5",
    "a100": "8.0",
    "a100-40": "8.0",
    "a100-80": "8.0",
    "a30": "8.0",
    "a10": "8.6",
    "a10g": "8.6",
    "a40": "8.6",
    "a6000": "8.6",
    "rtx3090": "8.6",
    "rtx4090": "8.9",
    "l4": "8.9",
    "l40": "8.9",
    "l40s": "8.9",
    "h100": "9.0",
    "h200": "9.0",
    "gh200": "9.0",
    "b100": "10.0",
    "b200": "10.0",
    "gb200": "10.0",
    "rtx5090": "12.0",
    "mi250x": "gfx90a",
    "mi300x": "gfx942",
}
TPUS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x")
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


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """The half dtypes that one device computes fast in, and the policy that suits it.

    Attributes:
        name: The name that the device reports, or the name that the user gave.
        platform: "gpu", "tpu" or "cpu".
        capability: The compute capability (NVIDIA) or the architecture (AMD); "" for others.
        fast: The half dtypes for which it has matrix units, the preferred one first.
        policy: The name of the policy that suits it.
        reason: The reason for the choice of policy.
    """

    name: str
    platform: str
    capability: str
    fast: tuple[str, ...]
    policy: str
    reason: str


@dataclasses.dataclass(frozen=True)
class DeviceReport(Report):
    """The report of `device_report`. ``print`` it, or read ``devices``.

    Attributes:
        devices: One `DeviceFacts` per device of this process.
        jax_version: The version of JAX.
        matmul_times: By half dtype, how long a short matmul took on the default device when the
            report was made, relative to float32. ``devices`` do not depend on it: what else runs
            on the machine changes it.
    """

    devices: tuple[DeviceFacts, ...]
    jax_version: str
    matmul_times: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)

    def document(self) -> Document:
        rows = tuple(
            (
                f"{count} x {facts.name}" if count > 1 else facts.name,
                ", ".join(facts.fast) or "float32 only",
                facts.policy,
                facts.reason,
            )
            for facts, count in _counted(self.devices)
        )
        titles = ("device", "fast", "policy", "why")
        return Document(
            "The devices of this process",
            f"jax {self.jax_version}",
            tables=(Table("Devices", titles, rows, titles),),
            notes=timed_in_words(self.matmul_times),
        )


def device_report() -> DeviceReport:
    """Reports the half dtypes that the devices of this process compute fast in, and a policy each.

    Devices are judged by their features, so a report of the same machine says the same. Beside
    this it times a short matmul in each half dtype on the default device, as autocast runs it.

    Returns:
        A `DeviceReport` with one entry per local device.

    Example:
        >>> import mpjax
        >>> report = mpjax.device_report()
        >>> report.devices[0].platform in ("cpu", "gpu", "tpu")
        True
    """
    times = {dtype.name: matmul_time(dtype, SECONDS) for dtype in HALVES}
    return DeviceReport(local_facts(), jax.__version__, times)


def local_facts() -> tuple[DeviceFacts, ...]:
    """Returns the facts of each device of this process."""
    return tuple(map(device_facts, jax.local_devices()))


def timed_in_words(times: dict[str, float]) -> tuple[str, ...]:
    """Says how long a matmul took in each half dtype, relative to float32, if any was timed."""
    told = " and ".join(f"{ratio:.2f}x in {dtype}" for dtype, ratio in times.items())
    sentence = f"A matmul just took {told}, relative to float32. The policy does not depend on it."
    return (sentence,) if told else ()


def recommend_policy(device: jax.Device | str | None = None) -> Policy:
    """Returns the policy that suits a device.

    Args:
        device: A `jax.Device`, a name such as "v100", "NVIDIA H100 80GB HBM3", "v5e", "tpu" or
            "cpu" (this machine need not have the device), or None for the default device.

    Returns:
        The policy mixed_bfloat16 if the device has matrix units for bfloat16, else mixed_float16 if
        it has matrix units for float16, else float32. A CPU counts if it has instructions for
        bfloat16, which XLA uses: avx512_bf16, AMX, or bfloat16 of ARM, as Linux names them. XLA
        has no kernels for the float16 of CPUs.

    Raises:
        TypeError: If ``device`` is neither a device nor a name nor None.
        ValueError: If the name is not known.

    Example:
        >>> import mpjax
        >>> [str(mpjax.recommend_policy(name)) for name in ("v100", "a100", "v5e", "p100")]
        ['mixed_float16', 'mixed_bfloat16', 'mixed_bfloat16', 'float32']
    """
    return get_policy(device_facts(device).policy)


def half_dtype(device: jax.Device | str | None = None) -> np.dtype:
    """Returns the half dtype that suits a device.

    That is bfloat16 on TPUs, CPUs, AMD GPUs and NVIDIA GPUs of compute capability 8.0 or more, and
    float16 on older NVIDIA GPUs, whose tensor cores do not support bfloat16. ``jmp.half_dtype``,
    by contrast, returns float16 everywhere except on TPUs.

    Args:
        device: A device, a name or None, as for `recommend_policy`.

    Returns:
        ``np.dtype`` of bfloat16 or float16.

    Raises:
        TypeError: If ``device`` is neither a device nor a name nor None.
        ValueError: If the name is not known.

    Example:
        >>> import mpjax
        >>> [str(mpjax.half_dtype(name)) for name in ("v100", "a100", "cpu")]
        ['float16', 'bfloat16', 'bfloat16']
    """
    return half_of(device_facts(device).capability)


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


def warn_if_unfit(policy: Policy) -> None:
    """Warns if a policy uses a half dtype or 8-bit moments that the default device is slow with.

    It does not warn on a CPU.
    """
    device = default_device()
    platform = getattr(device, "platform", "cpu")
    if platform == "cpu":
        return  # people test there what they train elsewhere, on CPUs without any fast half too
    if platform == "tpu" and policy.moments == "8bit":
        warn_user(
            f"policy={str(policy)!r}: on a TPU, moments=8bit saves memory between steps but takes "
            "more memory within a step: blocks of 32 entries do not fit its tiles, so XLA copies "
            "large moments to another layout. Use moments=float32.",
        )
    facts = device_facts(device)
    dtypes = (policy.compute_dtype, *(dtype for _, dtype in policy.overrides))
    for dtype in dict.fromkeys(dtypes):
        if dtype in HALVES and dtype.name not in facts.fast:
            warn_user(
                f"policy={str(policy)!r} computes in {dtype.name}, which is no faster than float32 "
                f"on {facts.name}: {facts.reason}. Use policy={facts.policy!r}.",
            )
            return


class Named(NamedTuple):
    """What a user's name of a device says.

    Attributes:
        key: A name in `CARDS`, `TPUS` or `KINDS`; or what is left of an unknown name.
        memory: The memory in the name, in GB; None if it has none.
        variant: Other words that tell cards of one name apart, such as "pcie".
    """

    key: str
    memory: int | None
    variant: tuple[str, ...]

    @property
    def known(self) -> bool:
        return self.key in CARDS or self.key in TPUS or self.key in KINDS


def named(name: str) -> Named:
    """Reads a user's name of a device, such as "h100", "TPU v5 lite" or "A100-SXM4-80GB"."""
    words = re.findall(r"[^\W_]+", name.lower())
    if len(words) == 1 and words[0] in KINDS:
        return Named(words[0], None, ())
    told = [word for word in words if VARIANT.fullmatch(word)]
    model = [word for word in words if word not in told and not NOISE.fullmatch(word)]
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
    sizes = [int(m[1]) for m in map(VARIANT.fullmatch, told) if m and m[1]]
    variant = [word for word in told if not word[0].isdigit()] + rest
    if len(rest) == 1 and f"{key}-{rest[0]}" in CARDS:
        sizes, variant = [int(rest[0])], variant[:-1]
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
    known = [*CARDS, *TPUS, "tpu", "cpu"]
    wrong = (
        "names no model, and what it runs fast depends on that."
        if key in KINDS
        else f"is not known.{did_you_mean(key, known)}"
    )
    others = ""
    if argument == "device":
        others = " and, for a device of this process, jax.devices()[0]"
    raise ValueError(f"{argument}={brief(name)} {wrong} Legal are {', '.join(known)}{others}.")


def _facts(name: str, platform: str, capability: str, fast: list[np.dtype], reason: str):
    policies = {(): "float32", (FLOAT16,): "mixed_float16"}
    policy = policies.get(tuple(fast), "mixed_bfloat16")
    return DeviceFacts(
        name, platform, capability, tuple(dtype.name for dtype in fast), policy, reason
    )


def _gpu(name: str, capability: str) -> DeviceFacts:
    parts = capability.split(".")
    if not parts[0].isdigit():  # AMD's architectures: matrix units for both since gfx908
        fast = [BFLOAT16, FLOAT16]
        return _facts(name, "gpu", capability, fast, "matrix units for bfloat16 and float16")
    version = tuple(int(part) for part in (*parts, "0")[:2])
    fast = [d for d in (BFLOAT16, FLOAT16) if version >= TENSOR_CORES[d]]
    reason = f"compute capability {capability}, tensor cores for " + (
        " and ".join(d.name for d in fast) or "no half dtype"
    )
    return _facts(name, "gpu", capability, fast, reason)


def _tpu(name: str) -> DeviceFacts:
    return _facts(name, "tpu", "", [BFLOAT16], "a TPU's matrix units support only bfloat16")


def _cpu(name: str) -> DeviceFacts:
    flags = ", ".join(sorted(_jax.cpu_flags()))
    if not flags:
        reason = "no bfloat16 instructions were found"
        return _facts(name, "cpu", "", [], reason)
    return _facts(name, "cpu", "", [BFLOAT16], f"the CPU has {flags}")


def _counted(devices: tuple[DeviceFacts, ...]) -> list[tuple[DeviceFacts, int]]:
    return [(facts, devices.count(facts)) for facts in dict.fromkeys(devices)]
