"""Barriers against harmful rewrites, and layouts, for the compilers of some platforms."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import jet
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.extend.core.primitives import name_p
from jax.interpreters import ad, batching, mlir

from mpjax._src.core.base._jax.matmuls import is_local, is_marked


def _held(x: Any, order: tuple[int, ...] | None = None) -> Any:
    """Returns ``x`` behind a barrier, where its dimensions are in the given order."""
    if order is None:
        return jax.lax.optimization_barrier(x)
    transposed = jax.lax.optimization_barrier(jax.lax.transpose(x, order))
    return jax.lax.transpose(transposed, np.argsort(order))


def _laid_out(x: Any, order: tuple[int, ...]) -> Any:
    """Returns ``x`` with its axes in memory in the given order, the last one contiguous."""
    return with_layout_constraint(x, Layout(order))


def may_be_partitioned(ctx: Any) -> bool:
    """Returns whether XLA may partition what is lowered; an exported program where it is called."""
    return ctx.module_context.lowering_parameters.for_export or not is_local(ctx)


def _barrier(
    name: str, *platforms: str, held: Callable[..., Any] = _held, alone: bool = False
) -> Primitive:
    """Returns a linear identity primitive, which is a barrier on some platforms.

    There it is what ``held`` is; with ``alone``, nothing in programs that XLA partitions.
    """
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    barrier = mlir.lower_fun(held, multiple_results=False)

    def lowering(ctx, x, **params):
        # The lowering of a marked matmul stores its operands as it needs them.
        left = is_marked(ctx) or (alone and may_be_partitioned(ctx))
        return [x] if left else barrier(ctx, x, **params)

    for platform in platforms:
        mlir.register_lowering(primitive, lowering, platform=platform)
    ad.deflinear2(primitive, lambda ct, _, **params: [ct])
    jet.deflinear(primitive)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    return primitive


def _batch(primitive: Primitive, args: Any, dims: Any, order: Any = None) -> Any:
    dim = dims[0]
    if order is None:
        return primitive.bind(*args), dim
    return primitive.bind(*args, order=(dim, *(d + (d >= dim) for d in order))), dim


def on_transpose(name: str, tell: Callable[[], None]) -> Callable[[Any], Any]:
    """Returns an identity that calls ``tell`` while its backward pass is traced.

    It sees the backward pass of a function that is traced first and differentiated later, in a jit,
    a loop or a checkpoint. What is not traced, or has no floating dtype, has no backward pass.
    """
    primitive = _barrier(name)

    def transposed(ct: Any, _: Any) -> list[Any]:
        tell()
        return [ct]

    ad.deflinear2(primitive, transposed)

    def identity(x: Any) -> Any:
        differs = isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.floating)
        return primitive.bind(x) if differs else x

    return identity


GPUS = ("cuda", "rocm")

_cpu_barrier_p = _barrier("cpu_barrier", "cpu")
_gpu_barrier_p = _barrier("gpu_barrier", *GPUS)
_again_barrier_p = _barrier("again_barrier", "cpu", *GPUS)
_row_major_p = _barrier("row_major", *GPUS, held=_laid_out, alone=True)
FLOAT16_GRADIENT = "float16_gradient"
BARRIERS = frozenset({"cpu_barrier", "gpu_barrier", "again_barrier", "row_major", FLOAT16_GRADIENT})

# What autocast stores has a name, wherever it is computed: also in code that is transposed as it
# is, such as a linear function, or a dropout that runs on tangents. JAX has no rule for that.
ad.primitive_transposes.setdefault(name_p, lambda ct, _, *, name: [ct])


CARRIER, CARRIED = "carrier", "carried"


# The result is zero, but has the tangent of the operand.
_carrier_p = Primitive(CARRIER)
_carrier_p.def_impl(lambda x: jnp.zeros_like(x))
_carrier_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_carrier_p, mlir.lower_fun(jnp.zeros_like, multiple_results=False))
ad.primitive_jvps[_carrier_p] = lambda primals, tangents: (_carrier_p.bind(*primals), *tangents)
batching.defvectorized(_carrier_p)


def carrier(x: jax.Array) -> jax.Array:
    """Returns zeros with the tangent of ``x``.

    A derivative that reads a code of ``x`` depends on ``x``, but the code, an integer, has no
    tangent. Second derivatives get it from the zeros, whose value nobody reads. A custom_jvp would
    not do: partial evaluation of a loop's body drops its rule.
    """
    return _carrier_p.bind(x)


# The result is the second operand, with the tangent of the first.
_carried_p = Primitive(CARRIED)
_carried_p.def_impl(lambda carrier, x: x)
_carried_p.def_abstract_eval(lambda carrier, x: carrier)
mlir.register_lowering(_carried_p, lambda ctx, carrier, x: [x])
ad.primitive_jvps[_carried_p] = lambda primals, tangents: (_carried_p.bind(*primals), tangents[0])
batching.defbroadcasting(_carried_p)


def carried(carrier: jax.Array, x: jax.Array) -> jax.Array:
    """Returns ``x`` with the tangent of what its carrier was made of."""
    return _carried_p.bind(carrier, x)


def cpu_barrier(x: jax.Array) -> jax.Array:
    """Returns ``x``; on XLA:CPU behind an optimization barrier."""
    return _cpu_barrier_p.bind(x)


def held_for_cpu(
    left: jax.Array, right: jax.Array, dimension_numbers: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the 16-bit operands of a matmul with float32 result as XLA:CPU can multiply them.

    A marked matmul does not need it (`cpu_matmuls`). But whoever evaluates a program equation by
    equation may lose the mark, and without either, XLA:CPU can fail.

    XLA:CPU decides whether it has a kernel for a matmul once it has transposed the operands: batch
    dimensions first, then the free ones of the left operand, then the contracted ones. Later it
    merges transposes into the matmul, its own ones too. It has no kernel for a left operand that is
    stored with the contracted dimensions before the free ones, and fails at run time ("BF16 x BF16
    = F32"). So the left operand is held in that order, whatever its matmul becomes under `vmap`,
    and barriers keep all other transposes away. A barrier for the result has to follow.
    """
    (summed, _), (batch, _) = dimension_numbers
    free = [d for d in range(left.ndim) if d not in (*summed, *batch)]
    order = (*batch, *free, *summed)
    return _cpu_barrier_p.bind(left, order=order), _cpu_barrier_p.bind(right)


def gpu_barrier(x: jax.Array) -> jax.Array:
    """Returns ``x``; on GPUs behind an optimization barrier.

    Without it, XLA:GPU recomputes a softmax from its float32 operand, and stores that for the
    backward pass. On TPUs the barrier costs memory.
    """
    return _gpu_barrier_p.bind(x)


def again_barrier(x: jax.Array) -> jax.Array:
    """Returns ``x``; on CPUs and GPUs behind an optimization barrier.

    Without it, their compilers save values computed from ``x`` instead of recomputing them. TPU
    compilers recompute elementwise operations by themselves, in the matmuls that read them; there a
    barrier would make them save more.
    """
    return _again_barrier_p.bind(x)


def row_major(x: jax.Array) -> jax.Array:
    """Returns ``x``; on one GPU, or in each part of a shard_map, in the order of its axes.

    XLA:GPU may lay out codes in another order, in which their blocks are not contiguous. Then all
    kernels that compute or read the coded values transpose arrays, in float32. To
    partition the constraint, XLA would gather the array. `jax.export` does not permit it.
    """
    return _row_major_p.bind(x, order=tuple(range(x.ndim)))
