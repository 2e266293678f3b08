"""The joules that a GPU used, from NVIDIA's management library."""

import functools
from collections.abc import Callable


@functools.cache
def meter() -> tuple[Callable[[], float] | None, str]:
    """Returns a function that reads the joules since the driver's start, or None and the reason."""
    try:
        import pynvml
    except ImportError:
        return None, "pynvml is not installed"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000, ""
