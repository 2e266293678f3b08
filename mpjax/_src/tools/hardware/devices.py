"""The report of the devices of this process, and how long a short matmul takes on one now."""

import collections
import dataclasses
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.devices import DeviceFacts, device_facts
from mpjax._src.core.base.dtypes import FLOAT32, HALVES
from mpjax._src.core.base.public import public
from mpjax._src.tools.document.model import Document, words_in
from mpjax._src.tools.document.report import Report

SECONDS = 0.05  # that a report times matmuls in each dtype
LEAST = 5  # pairs


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class DeviceReport(Report):
    """The report of `device_report`. ``print`` it, or read ``devices``.

    Attributes:
        devices: One `DeviceFacts` per device of this process.
        jax_version: The version of JAX.
        matmul_times: By 16-bit dtype, how long a short matmul took on the default device when the
            report was made, relative to float32. ``devices`` do not depend on it: what else runs
            on the machine changes it.
    """

    devices: tuple[DeviceFacts, ...]
    jax_version: str
    matmul_times: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)

    def document(self) -> Document:
        devices = collections.Counter(
            (d.name, ", ".join(d.fast) or "float32 only", d.policy, d.reason) for d in self.devices
        )
        rows = (
            (f"{count} x {name}" if count > 1 else name, *rest)
            for (name, *rest), count in devices.items()
        )
        table = words_in("Devices", ("device", "fast", "policy", "why"), rows)
        words = " and ".join(f"{x:.2f}x in {dtype}" for dtype, x in self.matmul_times.items())
        timed = (
            f"A matmul just took {words}, relative to float32. The policy does not depend on it."
        )
        sentence, notes = f"jax {self.jax_version}", (timed,) if words else ()
        return Document("The devices of this process", sentence, tables=(table,), notes=notes)


def device_report() -> DeviceReport:
    """Reports the 16-bit dtypes that this process's devices compute fast in, and a policy each.

    The policy follows from the devices' features, so it is always the same on one machine. The
    report also times a short matmul in each 16-bit dtype on the default device, as autocast runs
    it.

    Returns:
        A `DeviceReport` with one entry per local device.

    Example:
        >>> import mpjax
        >>> report = mpjax.hardware.device_report()
        >>> report.devices[0].platform in ("cpu", "gpu", "tpu")
        True
    """
    times = {dtype.name: matmul_time(dtype, SECONDS) for dtype in HALVES}
    return DeviceReport(local_facts(), jax.__version__, times)


def local_facts() -> tuple[DeviceFacts, ...]:
    """Returns the facts of each device of this process."""
    return tuple(map(device_facts, jax.local_devices()))


# ---- a short matmul, in the form that autocast's matmuls have ------------------------------------


def matmul_size() -> int:
    """Returns the number of rows of the matmul: enough for the default device to be busy."""
    return 512 if jax.default_backend() == "cpu" else 4096


def matmul_time(dtype: np.dtype, seconds: float) -> float:
    """Returns the time of a matmul of two square matrices, relative to float32's.

    Both are timed in turn, for so many seconds but at least five times, and the median of the pairs
    is returned. It tells what the default device does at this moment: other programs change it.
    """
    run = jax.jit(_multiply)
    operands = [jnp.ones((matmul_size(),) * 2, each) for each in (FLOAT32, dtype)]
    # The first call compiles, which must not be timed.
    for x in operands:
        jax.block_until_ready(run(x, x))
    ratios: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(ratios) < LEAST:
        base, half = (_seconds(run, x) for x in operands)
        ratios.append(half / base)
    return statistics.median(ratios)


def _multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    # autocast marks its matmuls, and the lowering of marked ones chooses a form for the device.
    with _jax.marked():
        return jax.lax.dot(x, y)


def _seconds(run, x) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(x, x))
    return time.perf_counter() - start
