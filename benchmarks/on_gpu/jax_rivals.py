"""The rivals in JAX, including mpjax: those of `benchmarks.rivals` with a dtype and settings."""

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.on_gpu.cases import labels
from benchmarks.rivals import lacks, program


class Skip(Exception):
    """A rival cannot run here; the message is the reason."""


def cudnn(query, key, value, is_causal=False):
    """cuDNN's attention, called by hand."""
    if jax.default_backend() != "gpu":
        raise Skip("cuDNN's attention needs a GPU")
    # The float32 model is only traced for its parameters' shapes; cuDNN's kernel takes only half.
    kernel = None if query.dtype == jnp.float32 else "cudnn"
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=is_causal, implementation=kernel
    )


class Way(NamedTuple):
    """A rival of `benchmarks.rivals`, its half dtype, its attention and its matmul precision."""

    rival: str
    half: str = "bfloat16"
    attention: Any = None
    precision: str | None = None


# JAX's default precision lets the tensor cores round float32 to TF32; "highest" does not.
RIVALS = {
    "mpjax": Way("autocast"),
    "mpjax fused": Way("autocast, fused attention"),
    "mpjax lean": Way("autocast, lean"),
    "mpjax 8bit": Way("autocast, 8bit"),
    "mpjax lean, chunked loss": Way("autocast, lean, chunked loss"),
    "mpjax fused, chunked loss": Way("autocast, chunked loss, fused attention"),
    "mpjax 8bit, chunked loss, fused": Way("autocast, 8bit, chunked loss, fused attention"),
    "mpjax 0.5": Way("autocast, 0.5"),
    "mpjax 0": Way("autocast, 0"),
    "mpjax 0, chunked loss, fused": Way("autocast, 0, chunked loss, fused attention"),
    "mpjax float16": Way("build_train_step", "float16"),
    "float32": Way("float32", precision="highest"),
    "float32, TF32": Way("float32"),
    "by hand": Way("by hand"),
    "by hand, fused": Way("by hand", attention=cudnn),
    "jmp": Way("jmp"),
    "mixed-precision-for-JAX": Way("mixed-precision-for-JAX"),
    "DynamicScale float16": Way("flax DynamicScale", "float16"),
}


def program_of(case: str, sizes: dict[str, Any], rival: str) -> Any:
    """Returns a rival's `benchmarks.rivals.Program`.

    Raises:
        Skip: If it cannot run here.
    """
    way = RIVALS[rival]
    if why := lacks(way.rival):
        raise Skip(why)
    if case.startswith("gpt2") and way[:2] == ("flax DynamicScale", "float16") and on_cpu():
        raise Skip("XLA:CPU has no float16 algorithm for jax.nn.dot_product_attention")
    attention = {"attention": way.attention} if way.attention else {}
    return program(case, way.rival, way.half, **sizes, **attention)


def precisely(rival: str) -> Any:
    """Returns the context for tracing a rival's step."""
    precision = RIVALS[rival].precision
    return jax.default_matmul_precision(precision) if precision else contextlib.nullcontext()


def jitted(program: Any) -> Any:
    return jax.jit(program.step, donate_argnums=0)


def compile_step(program: Any, rival: str, flags: dict[str, Any] | None = None) -> Any:
    """Compiles a rival's step for abstract arrays, so that JAX's cache has one entry for it."""
    with precisely(rival):
        lowered = jitted(program).lower(program.state, program.batch)
        return lowered.compile(compiler_options=flags)


def on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def arrays(program: Any, sizes: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns parameters, the rest and a batch. They are the same for every rival."""
    abstract = (program.params, program.rest, program.batch)
    leaves, tree = jax.tree.flatten_with_path(abstract)
    tops = {n: labels(sizes, n) for n in (1, 2) if n == 1 or "vocabulary" in sizes}
    drawn = draw(
        tuple((keys, leaf.shape, leaf.dtype) for keys, leaf in leaves), tuple(tops.items())
    )
    return jax.tree.unflatten(tree, map(jnp.asarray, drawn))


@functools.lru_cache(1)
def draw(leaves: tuple[Any, ...], tops: tuple[tuple[int, int], ...]) -> list[np.ndarray]:
    """Returns arrays for leaves (path, shape, dtype): each process draws those of a model once."""
    rng = np.random.default_rng(0)

    def one(keys, shape, dtype):
        last = str(getattr(keys[-1], "key", keys[-1]))
        if jnp.issubdtype(dtype, jnp.integer):
            return rng.integers(0, dict(tops)[len(shape)], shape, dtype)
        if len(shape) == 1:
            return (np.zeros if last in ("bias", "mean") else np.ones)(shape, dtype)
        fan_in = 1 if keys[0].idx == 2 else np.prod(shape[:-1])
        values = rng.standard_normal(shape, dtype=np.float32) / np.float32(np.sqrt(fan_in))
        return values.astype(dtype)

    return [one(*leaf) for leaf in leaves]


def build(
    case: str, sizes: dict[str, Any], rival: str, smoke: bool
) -> tuple[Callable[[int], float], Callable[[], float], dict[str, Any]]:
    """Returns a function that times steps, a function that returns the last loss, and facts."""
    found = program_of(case, sizes, rival)
    start = time.perf_counter()
    compiled = compile_step(found, rival)
    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(found.params)),
        "compile_s": round(time.perf_counter() - start, 2),
    }
    return (*loaded(found, compiled, sizes), facts)


def loaded(
    program: Any, compiled: Any, sizes: dict[str, Any]
) -> tuple[Callable[[int], float], Callable[[], float]]:
    """Returns a function that times steps of a compiled program, and one for the last loss."""
    state = batch = out = None

    def load() -> None:
        """Fills the device's memory, which the programs of all models would not fit together."""
        nonlocal state, batch
        params, rest, batch = arrays(program, sizes)
        state = jax.block_until_ready(jax.jit(program.init)(params, rest))

    def run(steps: int) -> float:
        nonlocal state, out
        if state is None:
            load()
        start = time.perf_counter()
        for _ in range(steps):
            state, out = compiled(state, batch)
        jax.block_until_ready((state, out))
        return time.perf_counter() - start

    return run, lambda: float(out["loss"] if isinstance(out, dict) else out)


def device() -> str:
    return jax.devices()[0].device_kind
