"""Case "bf16_dots": half beside float32 training, on CPUs that multiply half.

The networks spend nearly all of their time in matmuls. The optimized program shows whether the
CPU's half instructions are used, because XLA may convert operands to float32 first.
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
from mpjax._src.core.base.devices import device_facts
from mpjax._src.tools.hardware.hlo import attribute, parse

POLICY = "mixed_bfloat16"
SIZES = [{"batch": 1024, "width": width, "layers": 3} for width in (2048, 512)]
SMOKE = {"batch": 8, "width": 16, "layers": 2}
KERNEL = "__ynn_fusion"  # a fusion that XLA gives to YNNPACK, which has kernels for bfloat16
NATIVE = "bf16, native"
ROUNDS, SMOKE_ROUNDS = 15, 2
PAIRS = (("autocast", "float32"), ("by hand", "float32"), ("autocast", "by hand"))


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    for sizes in [SMOKE] if smoke else SIZES:
        yield name(sizes), functools.partial(row, sizes, SMOKE_ROUNDS if smoke else ROUNDS)


def name(sizes: dict[str, int]) -> str:
    return "MLP, {layers} layers of width {width}, batch {batch}".format(**sizes)


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
    """Returns the number of matmuls in the optimized program by the dtype of their operands.

    Those of bfloat16 that are inside a kernel of the CPU's own instructions count as `NATIVE`.
    """
    ops = parse(jax.jit(step).lower(*args).compile().as_text()).ops()
    kernels = {attribute(op, "calls") for op in ops if KERNEL in op.attributes}
    counted: dict[str, int] = {}
    for op in ops:
        if op.opcode == "dot":
            dtype = op.operands[0].shapes[0].dtype
            native = dtype == "bf16" and op.room.name in kernels
            key = NATIVE if native else dtype
            counted[key] = counted.get(key, 0) + 1
    return counted


def reading(counted: dict[str, int]) -> str:
    """Describes the matmuls of the optimized program in words."""
    total, wide, native = sum(counted.values()), counted.get("f32", 0), counted.get(NATIVE, 0)
    if native:
        return f"{_of(native, total)} run in kernels of the CPU's own bfloat16 instructions"
    if not wide:
        return f"all {total} matmuls of the optimized program take half operands"
    return (
        f"{_of(wide, total)} take float32 operands: XLA converts them first, so the CPU's own half "
        "instructions are not used for them"
    )


def _of(some: int, total: int) -> str:
    how = "all" if some == total else f"{some} of"
    return f"{how} {total} matmuls of the optimized program"
