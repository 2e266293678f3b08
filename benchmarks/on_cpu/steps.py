"""Case "steps": small models trained by each rival, timed in pairs.

They train in bfloat16 only, because `jax.nn.dot_product_attention` asks for a float16 algorithm
that XLA:CPU does not have. So flax's DynamicScale scales a loss that needs no scaling.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import SMALL
from benchmarks.on_cpu.paired import measure, timer
from benchmarks.rivals import lacks, program

TEXT = {"batch": 8, "length": 128, "layers": 4, "width": 128, "heads": 4, "vocabulary": 512}
LSTM = {"batch": 16, "length": 32, "layers": 2, "width": 256, "vocabulary": 1000}
# The name of a row: its model, the model's sizes, and the number of rounds.
ROWS: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpt2": ("gpt2", TEXT, 51),
    "resnet50": ("resnet50", {"batch": 8, "size": 64}, 25),
    "lstm": ("lstm", LSTM, 51),
    "gpt2, width 512": ("gpt2", {**TEXT, "width": 512, "heads": 8}, 15),
    "lstm, width 512": ("lstm", {**LSTM, "width": 512}, 25),
    "vit": ("vit", {"batch": 8, "size": 64, "layers": 4, "width": 192, "heads": 3}, 51),
    "bert": ("bert", {**TEXT, "layers": 2, "heads": 2, "vocabulary": 1000}, 51),
    "resnet18": (
        "resnet50",
        {"batch": 8, "size": 64, "blocks": (2, 2, 2, 2), "bottleneck": False},
        15,
    ),
}
OURS = "autocast"
RIVALS = ("by hand", "float32", "jmp", "mixed-precision-for-JAX", "flax DynamicScale")
PAIRS = (*((OURS, rival) for rival in RIVALS), ("by hand", "float32"))


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    rows = {"ode": ("ode", SMALL["ode"], 2)} if smoke else ROWS
    for name, row in rows.items():
        yield name, functools.partial(paired, *row)


def paired(model: str, sizes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Returns the row of a model: the ratios of all rivals that can run."""
    absent = {rival: why for rival in RIVALS if (why := lacks(rival))}
    timers = {rival: timed(model, rival, sizes) for rival in (OURS, *RIVALS) if rival not in absent}
    row = measure(timers, [pair for pair in PAIRS if not absent.keys() & pair], rounds)
    return {**row, "sizes": sizes, **({"absent": absent} if absent else {})}


def timed(model: str, rival: str, sizes: dict[str, Any]):
    """Returns the timer of a rival's step, which starts from random parameters and data."""
    found = program(model, rival, "bfloat16", **sizes)
    params, batch = concrete((found.params, found.batch), sizes.get("vocabulary", 1000))
    rest = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), found.rest)
    return timer(found.init(params, rest), found.step, batch)


def concrete(tree: Any, below: int) -> Any:
    """Returns random arrays for abstract ones, integers below a bound. They are always the same."""
    rng = np.random.default_rng(0)

    def array(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, below, leaf.shape), leaf.dtype)
        fan_in = max(1, int(np.prod(leaf.shape[:-1])))
        return jnp.asarray(rng.normal(size=leaf.shape) / np.sqrt(fan_in), leaf.dtype)

    return jax.tree.map(array, tree)
