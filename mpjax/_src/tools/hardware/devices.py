"""The report of the devices of this process."""

import collections
import dataclasses

import jax

from mpjax._src.core.base.devices import DeviceFacts, device_facts
from mpjax._src.core.base.dtypes import HALVES
from mpjax._src.core.base.public import public
from mpjax._src.tools.document.model import Document, Table
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.hardware.timed import matmul_time

SECONDS = 0.05  # that a report times matmuls in each dtype


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
        rows = tuple(
            (
                f"{count} x {facts.name}" if count > 1 else facts.name,
                ", ".join(facts.fast) or "float32 only",
                facts.policy,
                facts.reason,
            )
            for facts, count in collections.Counter(self.devices).items()
        )
        titles = ("device", "fast", "policy", "why")
        return Document(
            "The devices of this process",
            f"jax {self.jax_version}",
            tables=(Table("Devices", titles, rows, titles),),
            notes=timed_in_words(self.matmul_times),
        )


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


def timed_in_words(times: dict[str, float]) -> tuple[str, ...]:
    """Says how long a matmul took in each 16-bit dtype, relative to float32, if any was timed."""
    words = " and ".join(f"{ratio:.2f}x in {dtype}" for dtype, ratio in times.items())
    sentence = f"A matmul just took {words}, relative to float32. The policy does not depend on it."
    return (sentence,) if words else ()
