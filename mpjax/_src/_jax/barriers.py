"""Optimization barriers against harmful rewrites by the compilers of some platforms."""

import jax
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def _barrier(name: str, *platforms: str) -> Primitive:
    """Returns a linear identity primitive, which is an optimization barrier on some platforms."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, lambda ctx, x: [x])
    lowering = mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False)
    for platform in platforms:
        mlir.register_lowering(primitive, lowering, platform=platform)
    ad.deflinear2(primitive, lambda ct, _: [ct])
    jet.deflinear(primitive)
    batching.defvectorized(primitive)
    return primitive


GPUS = ("cuda", "rocm")

_cpu_barrier_p = _barrier("cpu_barrier", "cpu")
_gpu_barrier_p = _barrier("gpu_barrier", *GPUS)
_again_barrier_p = _barrier("again_barrier", "cpu", *GPUS)
BARRIERS = frozenset({"cpu_barrier", "gpu_barrier", "again_barrier"})


def cpu_barrier(x: jax.Array) -> jax.Array:
    """Returns ``x``; on XLA:CPU behind an optimization barrier."""
    return _cpu_barrier_p.bind(x)


def gpu_barrier(x: jax.Array) -> jax.Array:
    """Returns ``x``; on GPUs behind an optimization barrier.

    Without it, XLA:GPU recomputes a softmax from its float32 operand, and keeps that for the
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
