"""Case "bf16_dots": half beside float32 training, on CPUs that multiply half.

The network is wide and spends nearly all of its time in matmuls. The optimized program shows
whether the CPU's half instructions are used, because XLA may convert operands to float32 first.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks.models import training_step
from benchmarks.on_cpu.paired import measure, timer
from benchmarks.on_cpu.steps import concrete
from benchmarks.results import SKIPPED
from mpjax._src.hardware.devices import device_facts
from mpjax._src.hardware.hlo_costs import costs

POLICY = "mixed_bfloat16"
SIZES = {"batch": 1024, "width": 2048, "layers": 3}
SMOKE = {"batch": 8, "width": 16, "layers": 2}
ROUNDS, SMOKE_ROUNDS = 15, 2
PAIRS = (("autocast", "float32"), ("by hand", "float32"), ("autocast", "by hand"))


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    sizes = SMOKE if smoke else SIZES
    name = "MLP, {layers} layers of width {width}, batch {batch}".format(**sizes)
    yield name, functools.partial(row, sizes, SMOKE_ROUNDS if smoke else ROUNDS)


def row(sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    facts = device_facts("cpu")
    if "bfloat16" not in facts.fast:
        return {SKIPPED: f"no bfloat16 dot instructions: {facts.reason}"}
    ways = {
        "float32": mlp(),
        "by hand": mlp(jnp.bfloat16),
        "autocast": mpjax.autocast(mlp(), POLICY),
    }
    optimizer = optax.sgd(1e-3)
    width = sizes["width"]
    arrays = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * sizes["layers"]
    params, x = concrete((arrays, jax.ShapeDtypeStruct((sizes["batch"], width), jnp.float32)), 1)
    state = params, {}, optimizer.init(params)
    steps = {name: training_step(loss, optimizer) for name, loss in ways.items()}
    found = {name: matmuls(step, state, x) for name, step in steps.items()}
    timers = {name: timer(state, step, x) for name, step in steps.items()}
    return {
        **measure(timers, PAIRS, rounds),
        "cpu": facts.reason,
        "matmuls": found,
    }


def mlp(dtype: Any = None) -> Any:
    def loss(params, rest, x):
        for w in params:
            dtype_ = dtype or x.dtype
            x = jax.nn.relu(x.astype(dtype_) @ w.astype(dtype_))
        return jnp.mean(x.astype(jnp.float32) ** 2), rest

    return loss


def matmuls(step: Any, *args: Any) -> dict[str, int]:
    """Returns the number of matmuls in the optimized program by the dtype of their operands."""
    text = jax.jit(step).lower(*args).compile().as_text()
    counted: dict[str, int] = {}
    for matmul in costs(text).matmuls:
        counted[matmul.operands] = counted.get(matmul.operands, 0) + 1
    return counted


def reading(counted: dict[str, int]) -> str:
    """Describes the matmuls of the optimized program in words."""
    total, wide = sum(counted.values()), counted.get("f32", 0)
    if not wide:
        return f"all {total} matmuls of the optimized program take half operands"
    how = "all" if wide == total else f"{wide} of"
    return (
        f"{how} {total} matmuls of the optimized program take float32 operands: XLA converts them "
        "first, so the CPU's own half instructions are not used for them"
    )
