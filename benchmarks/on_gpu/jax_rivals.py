"""Training steps of one float32 model under mpjax and its rivals in JAX."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from benchmarks.models import MODELS, training_step
from benchmarks.on_gpu.cases import labels

# mpjax by policy. A policy that fuses attention by itself is one more line here.
POLICIES = {
    "mpjax": "mixed_bfloat16",
    "mpjax lean": "mixed_bfloat16,storage=lean",
    "mpjax fused": "mixed_bfloat16",  # and `mpjax.dot_product_attention` in the model
}

Step = tuple[Any, Callable[..., Any]]  # the first state, and (state, batch) -> (state, loss)


class Skip(Exception):
    """Says why a rival cannot run here."""


def model_of(case: str, sizes: dict[str, Any], dtype: Any = None, attention: Any = None):
    if attention is not None:
        sizes = {**sizes, "attention": attention}
    return MODELS[case](dtype=dtype, **sizes)


def cudnn(query, key, value, is_causal=False):
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, implementation="cudnn"
    )


def plain(loss: Callable, optimizer: Any, params: Any, rest: Any) -> Step:
    state = params, rest, jax.jit(optimizer.init)(params)
    return state, training_step(loss, optimizer)


def with_policy(case, sizes, rival, params, rest) -> Step:
    attention = mpjax.dot_product_attention if rival == "mpjax fused" else None
    loss, _, _, _, optimizer = model_of(case, sizes, attention=attention)
    return plain(mpjax.autocast(loss, POLICIES[rival]), optimizer, params, rest)


def with_scale(case, sizes, rival, params, rest) -> Step:
    """mpjax's float16, its loss scale dynamic."""
    loss, _, _, _, optimizer = model_of(case, sizes)

    def loss_fn(params, batch, model_state):
        return loss(params, model_state, batch)

    init, step = mpjax.build_train_step(loss_fn, optimizer, "mixed_float16")

    def to_loss(state, batch):
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return init(params, model_state=rest), to_loss


def in_float32(case, sizes, rival, params, rest) -> Step:
    """Float32 as it is written, or with matmuls rounded to TF32, which JAX does by default."""
    loss, _, _, _, optimizer = model_of(case, sizes)
    state, step = plain(loss, optimizer, params, rest)

    def precise(state, batch):
        with jax.default_matmul_precision("highest"):
            return step(state, batch)

    return state, step if rival == "float32, TF32" else precise


def by_hand(case, sizes, rival, params, rest) -> Step:
    """flax's ``dtype=``, with XLA's attention or with cuDNN's."""
    fused = rival == "by hand, fused"
    if fused and jax.default_backend() != "gpu":
        raise Skip("cuDNN's attention needs a GPU")
    loss, _, _, _, optimizer = model_of(case, sizes, jnp.bfloat16, cudnn if fused else None)
    return plain(loss, optimizer, params, rest)


def with_jmp(case, sizes, rival, params, rest) -> Step:
    """jmp's casts at the boundary."""
    import jmp

    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    loss, _, _, _, optimizer = model_of(case, sizes)

    def cast(params, rest, batch):
        value, new = loss(policy.cast_to_compute(params), rest, policy.cast_to_compute(batch))
        return policy.cast_to_output((value, new))

    return plain(cast, optimizer, params, rest)


def with_dynamic_scale(case, sizes, rival, params, rest) -> Step:
    """flax's ``dtype=float16`` and `DynamicScale`, as in its ImageNet example."""
    from flax.training.dynamic_scale import DynamicScale

    loss, _, _, _, optimizer = model_of(case, sizes, jnp.float16)

    def step(state, batch):
        params, rest, opt, scale = state
        scale, finite, (value, new_rest), grads = scale.value_and_grad(loss, has_aux=True)(
            params, rest, batch
        )
        updates, new_opt = optimizer.update(grads, opt, params)
        new = optax.apply_updates(params, updates), new_rest, new_opt
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, rest, opt))
        return (*kept, scale), value

    scale = jax.tree.map(jnp.asarray, DynamicScale())
    return (params, rest, jax.jit(optimizer.init)(params), scale), step


RIVALS: dict[str, Callable[..., Step]] = {
    **dict.fromkeys(POLICIES, with_policy),
    "mpjax float16": with_scale,
    "float32": in_float32,
    "float32, TF32": in_float32,
    "by hand": by_hand,
    "by hand, fused": by_hand,
    "jmp": with_jmp,
    "DynamicScale float16": with_dynamic_scale,
}


def arrays(case: str, sizes: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns parameters, the rest and a batch, the same for every rival."""
    rng = np.random.default_rng(0)

    def draw(keys, leaf):
        last = str(getattr(keys[-1], "key", keys[-1]))
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            top = labels(sizes, len(leaf.shape))
            return jnp.asarray(rng.integers(0, top, leaf.shape), leaf.dtype)
        if len(leaf.shape) == 1:
            return (jnp.zeros if last in ("bias", "mean") else jnp.ones)(leaf.shape, leaf.dtype)
        fan_in = 1 if keys[0].idx == 2 else np.prod(leaf.shape[:-1])
        values = rng.standard_normal(leaf.shape, dtype=np.float32) / np.float32(np.sqrt(fan_in))
        return jnp.asarray(values, leaf.dtype)

    _, params, rest, batch, _ = model_of(case, sizes)
    return jax.tree.map_with_path(draw, (params, rest, batch))


def build(
    case: str, sizes: dict[str, Any], rival: str, smoke: bool
) -> tuple[Callable[[int], float], Callable[[], float], dict[str, Any]]:
    """Returns what does so many steps and returns their seconds, the last loss, and facts."""
    params, rest, batch = arrays(case, sizes)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    state, step = RIVALS[rival](case, sizes, rival, params, rest)
    jitted = jax.jit(step, donate_argnums=0)
    start = time.perf_counter()
    state, loss = jax.block_until_ready(jitted(state, batch))
    facts = {"parameters": int(count), "first_call_s": round(time.perf_counter() - start, 2)}

    def run(steps: int) -> float:
        nonlocal state, loss
        start = time.perf_counter()
        for _ in range(steps):
            state, loss = jitted(state, batch)
        jax.block_until_ready((state, loss))
        return time.perf_counter() - start

    return run, lambda: float(loss), facts


def device() -> str:
    return jax.devices()[0].device_kind
