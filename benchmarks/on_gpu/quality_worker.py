"""The function that the process of `quality` runs: it trains `byte_gpt` at other sizes."""

import contextlib
import sys
import sysconfig
from pathlib import Path
from typing import Any

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import byte_gpt

KEPT = ("bits_per_byte", "final_train_loss", "skipped_steps", "final_loss_scale", "step_ms")


def source_code(most: int, held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns this number of bytes of Python's standard library; the last ones are held out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(p for p in library.rglob("*.py") if "site-packages" not in p.parts)
    taken, size = [], 0
    for path in paths:
        taken.append(path.read_bytes())
        size += len(taken[-1])
        if size > most:
            break
    data = np.frombuffer(b"\n\n".join(taken)[:most], np.uint8).astype(np.int32)
    return data[:-held_out], data[-held_out:]


def train(policy: str, seed: int, sizes: dict[str, Any], steps: int, text: int) -> dict[str, Any]:
    """Returns the figures of one run, and its loss at every fiftieth step."""
    for key, value in sizes.items():
        setattr(byte_gpt, key, value)
    windows = 8 * byte_gpt.BATCH * byte_gpt.CONTEXT + 1
    byte_gpt.load = lambda: source_code(text, windows)
    byte_gpt.initial.clear_cache()  # it was compiled for the old sizes
    precise = jax.default_matmul_precision("highest")
    with precise if policy == "float32" else contextlib.nullcontext():
        result = byte_gpt.train(policy, steps, seed)
    return {key: result[key] for key in KEPT} | {"losses": result["curves"]["loss"][::50]}
