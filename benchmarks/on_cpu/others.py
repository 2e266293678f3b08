"""Measures how busy other processes keep the machine during a measurement."""

import os
import time
from collections.abc import Callable
from typing import Any

import psutil


def watched(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the row of a measurement, with the machine's load during it.

    ``load`` holds the machine's load average at the end, this process included, and the average
    number of cores that other processes kept busy. This process and its children are not others.
    """
    start, busy, own = time.monotonic(), _busy(), _own()
    row = measure()
    seconds = time.monotonic() - start
    others = max(0.0, (_busy() - busy) - (_own() - own)) / seconds
    load = {"average": os.getloadavg()[0], "cores_of_others": round(others, 2)}
    return {**row, "load": load, "seconds": round(seconds, 1)}


def _busy() -> float:
    """Returns the CPU seconds that this machine spent, or that a hypervisor took from it."""
    times = psutil.cpu_times()._asdict()
    # Linux includes guests in user time.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return sum(value for name, value in times.items() if name not in idle)


def _own() -> float:
    return sum(os.times()[:4])
