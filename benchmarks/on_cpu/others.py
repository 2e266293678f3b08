"""What else ran on the machine while something was measured."""

import os
import time
from collections.abc import Callable
from typing import Any

import psutil


def watched(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns a row, with the load meanwhile.

    ``load`` holds the machine's load average at the end, this process included, and how many cores
    others kept busy on average, this process and its children left out.
    """
    start, busy, own = time.monotonic(), _busy(), _own()
    row = measure()
    seconds = time.monotonic() - start
    others = max(0.0, (_busy() - busy) - (_own() - own)) / seconds
    load = {"average": os.getloadavg()[0], "cores_of_others": round(others, 2)}
    return {**row, "load": load, "seconds": round(seconds, 1)}


def _busy() -> float:
    """Returns the seconds of CPU that were spent on this machine, or taken from it."""
    times = psutil.cpu_times()._asdict()
    # Linux counts guests as users already.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return sum(value for name, value in times.items() if name not in idle)


def _own() -> float:
    return sum(os.times()[:4])
