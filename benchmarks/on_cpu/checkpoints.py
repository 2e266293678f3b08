"""Case "checkpoints": the time that checksums take beside a save and a restore, in pairs."""

import functools
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.on_cpu.paired import Timer, measure
from mpjax import checkpoint
from mpjax._src.checkpoint import checksums

MIB, SMOKE_MIB = 256, 1
ROUNDS, SMOKE_ROUNDS = 11, 2


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    mib = SMOKE_MIB if smoke else MIB
    yield f"{mib} MiB", functools.partial(row, mib, SMOKE_ROUNDS if smoke else ROUNDS)


def row(mib: int, rounds: int) -> dict[str, Any]:
    """Measures a state of 16 float32 arrays that hardly compress, as weights do."""
    draw = np.random.default_rng(0)
    arrays = {
        str(i): jax.device_put(draw.normal(size=(mib, 2**14)).astype(np.float32)) for i in range(16)
    }
    folder = Path(tempfile.mkdtemp())
    try:
        checkpoint.save(folder / "read", arrays)
        names = (str(folder / str(i)) for i in itertools.count())
        restore = functools.partial(checkpoint.restore, folder / "read", arrays)
        timers = {
            "save": timer(lambda: saved(next(names), arrays)),
            "checksums": timer(lambda: checksums.of_arrays(arrays)),
            "restore": timer(restore),
            "restore, verify=False": timer(lambda: restore(verify=False)),
        }
        pairs = [("checksums", "save"), ("restore", "restore, verify=False")]
        return measure(timers, pairs, rounds)
    finally:
        shutil.rmtree(folder)


def saved(directory: str, arrays: Any) -> None:
    """Saves with checksums, and removes what was saved."""
    checkpoint.save(directory, arrays)
    shutil.rmtree(directory)


def timer(run: Callable[[], Any]) -> Timer:
    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            jax.block_until_ready(run())
        return (time.perf_counter() - start) / count

    return seconds
