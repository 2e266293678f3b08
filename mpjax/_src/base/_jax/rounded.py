"""A rounding to a 16-bit dtype that derivatives do not see."""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.lax import reduce_precision

ROUNDED = "rounded"


def _run(x: Any, *, half: Any) -> Any:
    info = jnp.finfo(half)
    return reduce_precision(x, info.nexp, info.nmant)


def _rounded() -> Primitive:
    """Returns a primitive whose result is its float32 operand, rounded; its tangent is the same.

    JAX would round the tangents of a `jax.lax.reduce_precision` too.
    """
    primitive = Primitive(ROUNDED)
    primitive.def_impl(_run)
    primitive.def_abstract_eval(lambda x, *, half: x)
    mlir.register_lowering(primitive, mlir.lower_fun(_run, multiple_results=False))
    ad.primitive_jvps[primitive] = lambda primals, tangents, **params: (
        primitive.bind(*primals, **params),
        *tangents,
    )
    batching.defvectorized(primitive)
    return primitive


rounded_p = _rounded()
