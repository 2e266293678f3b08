"""Functions with derivatives of their own, which losses by blocks are made of.

All of them are custom_jvps with linear tangents, so that forward mode, vmap and transposition work.
Taylor mode does not support custom_jvp; there JAX differentiates the functions as written.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from mpjax._src.core.base import _jax


def cast(array: Any, dtype: Any) -> Any:
    return jax.lax.convert_element_type(array, dtype)


def with_tangent(
    fun: Callable[..., Any], jvp: Callable[..., Any], symbolic_zeros: bool = False
) -> Callable[..., Any]:
    """Returns a function with a custom derivative, except in Taylor mode."""
    ruled = jax.custom_jvp(fun)
    ruled.defjvp(jvp, symbolic_zeros=symbolic_zeros)
    return lambda *args: (fun if _jax.in_taylor_mode(jax.tree.leaves(args)) else ruled)(*args)


def as_one_operation(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that checkpoint policies see as one operation, whatever it contains.

    Of a loop, they would keep the matmuls of every iteration.
    """
    return with_tangent(fun, functools.partial(jax.jvp, fun))


def log_sum_exp(x: Any) -> Any:
    """Returns the logarithm of the sum of exponentials along the last axis."""

    def in_two_passes(x):
        largest = jnp.max(x, -1)
        # Of minus infinity alone, the sum is zero and not NaN.
        shift = jnp.where(jnp.isfinite(largest), largest, 0)
        return largest, jnp.sum(jnp.exp(x - shift[..., None]), -1)

    def run(x):
        largest, sums = in_one_pass(x, in_two_passes, (x.ndim - 1,), jnp.exp)
        return jnp.where(jnp.isfinite(largest), largest + jnp.log(sums), largest)

    def jvp(primals, tangents):
        (x,), (tangent,) = primals, tangents
        out = ruled(x)
        return out, jnp.sum(jnp.exp(x - out[..., None]) * tangent, -1)

    ruled = with_tangent(run, jvp)
    return jax.nn.logsumexp(x, -1) if _jax.in_taylor_mode([x]) else ruled(x)


def in_one_pass(x: Any, in_two_passes: Any, axes: Any, exp: Any) -> tuple[Any, Any]:
    """Computes the maximum and the sum of exponentials; on a GPU in one pass."""

    def in_one_pass(x):
        start = np.asarray(-np.inf, x.dtype), np.asarray(0, x.dtype)
        # Not constant ones: JAX differentiates such reductions only if all operands have tangents.
        ones = jnp.where(x == x, jnp.ones((), x.dtype), x)
        return tuple(jax.lax.reduce((x, ones), start, _joining(exp), axes))

    ways = dict.fromkeys(_jax.GPUS, in_one_pass)
    return jax.lax.platform_dependent(x, **ways, default=in_two_passes)


@functools.cache
def _joining(exp: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a function that combines the maximum and sum of two parts of a row."""

    def joined(a, b):
        (first, some), (second, more) = a, b
        less = jnp.where(first == second, 1.0, exp(-jnp.abs(first - second)))
        total = jnp.where(first > second, some + more * less, some * less + more)
        return jnp.maximum(first, second), total

    return joined


def accumulated(x: Any, y: Any, summed: tuple[tuple[int, ...], tuple[int, ...]], dtype: Any) -> Any:
    """Returns the accumulator of a matmul, whose tangents are as those of `half_dot`.

    Args:
        x: The left operand.
        y: The right operand, of the same dtype.
        summed: The dimensions of both that are summed over.
        dtype: The dtype of the accumulator.
    """
    return _accumulating(summed, np.dtype(dtype))(x, y)


@functools.lru_cache(maxsize=4096)
def _accumulating(summed: Any, dtype: Any) -> Callable[..., Any]:
    numbers = summed, ((), ())
    params = {"dimension_numbers": numbers, "out_sharding": None, "precision": None}

    def run(x, y):
        with _jax.marked():
            exact = dtype == x.dtype
            x, y = (x, y) if exact else _jax.held_for_cpu(x, y, numbers)
            out = jax.lax.dot_general_p.bind(x, y, **params, preferred_element_type=dtype)
            return out if exact else _jax.cpu_barrier(out)

    def jvp(primals, tangents):
        # As written if possible, because checkpoint policies recognize matmuls by name.
        out = (run if dtype == primals[0].dtype else call)(*primals)
        pairs = [(tangents[0], primals[1]), (primals[0], tangents[1])]
        terms = [
            _jax.half_dot(*pair, x.dtype, **params)
            for x, t, pair in zip(primals, tangents, pairs, strict=True)
            if not isinstance(t, SymbolicZero)
        ]
        if not terms:
            return out, _jax.zero_tangent(out)
        return out, cast(functools.reduce(jax.lax.add, terms), out.dtype)

    call = with_tangent(run, jvp, symbolic_zeros=True)
    return call
