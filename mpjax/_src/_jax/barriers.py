"""Barriers that keep the compiler of some platforms from a rewriting that goes wrong there."""

import jax
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def _barrier(name: str, *platforms: str) -> Primitive:
    """Returns a linear primitive: the identity, on these platforms an optimization barrier."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, lambda ctx, x: [x])
    lowering = mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False)
    for platform in platforms:
        mlir.register_lowering(primitive, lowering, platform=platform)
    ad.deflinear2(primitive, lambda ct, _: [ct])
    jet.deflinear(primitive)
    batching.primitive_batchers[primitive] = lambda args, dims: (primitive.bind(*args), dims[0])
    return primitive


GPUS = ("cuda", "rocm")

_cpu_barrier_p = _barrier("cpu_barrier", "cpu")
_gpu_barrier_p = _barrier("gpu_barrier", *GPUS)
_again_barrier_p = _barrier("again_barrier", "cpu", *GPUS)
BARRIERS = frozenset({"cpu_barrier", "gpu_barrier", "again_barrier"})


def cpu_barrier(x: jax.Array) -> jax.Array:
    """Returns ``x``, on XLA:CPU behind an optimization barrier.

    XLA:CPU fails at run time on a half matmul with a float32 result that it fuses with a transpose
    of an operand or of the result ("BF16 x BF16 = F32"). Kept apart by barriers, they work. Other
    platforms need none.
    """
    return _cpu_barrier_p.bind(x)


def gpu_barrier(x: jax.Array) -> jax.Array:
    """Returns ``x``, on GPUs behind an optimization barrier.

    XLA:GPU would rather compute a softmax again from its float32 operand, which it then keeps for
    the backward pass. On a TPU the barrier costs memory.
    """
    return _gpu_barrier_p.bind(x)


def again_barrier(x: jax.Array) -> jax.Array:
    """Returns ``x``, on CPUs and GPUs behind an optimization barrier.

    Their compilers would save what follows from ``x`` rather than compute it again. A TPU's does
    elementwise work again by itself, in the matmuls that read it: a barrier has it save more.
    """
    return _again_barrier_p.bind(x)
