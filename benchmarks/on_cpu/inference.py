"""Case "inference": forward passes with bfloat16 weights, relative to float32 ones, by batch."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import mpjax
from benchmarks.models.transformers import GPT2
from benchmarks.on_cpu.dots import POLICY
from benchmarks.on_cpu.paired import measure, timer
from benchmarks.on_cpu.steps import ROWS, concrete

BATCHES = (1, 8, 64)
ROUNDS, SMOKE_ROUNDS = 15, 2
PAIRS = (("autocast", "float32"), ("by hand", "float32"), ("autocast", "by hand"))
Model = tuple[Callable[..., Any], Any, Any]  # (apply, abstract parameters, abstract input)


def mlp(dtype: Any, batch: int, width: int = 2048) -> Model:
    def apply(params, x):
        for w in params:
            x = jax.nn.relu(x.astype(dtype or x.dtype) @ w)
        return x

    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return apply, [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 3, x


def gpt2(dtype: Any, batch: int) -> Model:
    sizes = {k: v for k, v in ROWS["gpt2, width 512"][1].items() if k != "batch"}
    tokens = jax.ShapeDtypeStruct((batch, sizes.pop("length")), jnp.int32)
    model = GPT2(context=tokens.shape[1], dtype=dtype, **sizes)
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), tokens), tokens


MODELS = {"MLP, 3 layers of width 2048": mlp, "gpt2, width 512": gpt2}


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    if smoke:
        yield "MLP", functools.partial(row, functools.partial(mlp, width=16), 1, SMOKE_ROUNDS)
        return
    for name, make in MODELS.items():
        for batch in BATCHES:
            yield f"{name}, batch {batch}", functools.partial(row, make, batch, ROUNDS)


def row(make: Callable[[Any, int], Model], batch: int, rounds: int) -> dict[str, Any]:
    apply, params, x = make(None, batch)
    params, x = concrete((params, x), 500)
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)
    ways = {
        "float32": (apply, params),
        "by hand": (make(jnp.bfloat16, batch)[0], half),
        "autocast": (mpjax.autocast(apply, POLICY), half),
    }
    return measure({name: timed(*way, x) for name, way in ways.items()}, PAIRS, rounds)


def timed(apply: Callable[..., Any], params: Any, x: Any):
    """Returns the timer of a forward pass: a step that leaves the parameters as they are."""
    return timer(params, lambda params, x: (params, apply(params, x)), x)
