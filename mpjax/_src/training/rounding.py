"""Stochastic rounding: to one of the two nearest half values, such that the mean is exact."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._src.dtypes import FLOAT32, HALVES, DTypeLike, canonical
from mpjax._src.errors import brief
from mpjax._src.training.loss_scale import whole_number
from mpjax._src.training.optimizers import as_optimizer, check_kind
from mpjax._src.training.residuals import UINT32
from mpjax._src.training.stored import by_leaf, inner_update, made, need_params
from mpjax._src.trees import is_array, is_half, is_key, widen

MANTISSA = jnp.finfo(FLOAT32).nmant
LEAST = jnp.finfo(FLOAT32).minexp  # the exponent of the least normal value, and of all below it


def mixed(bits: jax.Array) -> jax.Array:
    """Returns 32 bits each of which depends on all of those given: the finalizer of MurmurHash3."""
    bits = (bits ^ bits >> 16) * np.uint32(0x85EBCA6B)
    bits = (bits ^ bits >> 13) * np.uint32(0xC2B2AE35)
    return bits ^ bits >> 16


def drawn(shape: tuple[int, ...], *numbers: Any) -> jax.Array:
    """Returns 32 random bits for each entry of an array, by its place and by whole numbers.

    A hash, and not `jax.random.bits`: XLA takes half a second for the rounds of that on a GPU, for
    each array of a model. Rounding asks for no more than this.
    """
    keys = jnp.array([0x9E3779B9, 0x7F4A7C15], UINT32)
    for number in numbers:
        known = isinstance(number, int)
        keys = mixed(keys + (np.uint32(number % 2**32) if known else number.astype(UINT32)))
    place = jnp.zeros(shape, UINT32)
    for axis, length in enumerate(shape):
        place = place * np.uint32(length) + jax.lax.broadcasted_iota(UINT32, shape, axis)
    return mixed(mixed(place ^ keys[0]) + keys[1])


class StochasticRoundingState(NamedTuple):
    """State of `with_stochastic_rounding`.

    Attributes:
        draws: How many updates were rounded, an int32 scalar: each draws other bits.
        inner_state: The state of the inner optimizer, built on float32.
    """

    draws: jax.Array
    inner_state: optax.OptState


def stochastic_round(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Rounds to one of the two nearest half values, at random, such that the mean is ``x``.

    The nearer one is the likelier one. A value that the half dtype holds is never moved. Values
    beyond the largest finite one are cast, as are NaN and Inf. The same key gives the same bits
    however ``x`` is sharded under jit.

    Args:
        x: A float32 array of any shape; a half one is widened first.
        dtype: "bfloat16" or "float16".
        key: One PRNG key, typed or of `jax.random.PRNGKey`. 32 random bits are drawn for each
            entry: what is less than 2**-32 of the distance between two half values is rounded down.

    Returns:
        An array of ``x``'s shape and of ``dtype``.

    Raises:
        TypeError: If ``x`` is not a float32 or half array, or ``key`` is not a key.
        ValueError: If ``dtype`` is no half dtype.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> x = jnp.full(1000, 1 + 2**-9)  # bfloat16 has 1 and 1 + 2**-7: a quarter of the way
        >>> y = mpjax.stochastic_round(x, "bfloat16", jax.random.key(0))
        >>> sorted(set(y.tolist())), 0.2 < (y == 1).mean() < 0.8
        ([1.0, 1.0078125], Array(True, dtype=bool))

    Gupta et al. 2015; Zamirai et al., "Revisiting BFloat16 Training", 2020.
    """
    to = canonical(dtype, "dtype")
    if to not in HALVES:
        raise ValueError(f"dtype={brief(dtype)} must be a half dtype: 'bfloat16' or 'float16'.")
    if not (is_array(x) and (x.dtype == FLOAT32 or is_half(x))):
        raise TypeError(f"x={brief(x)} must be an array of float32, or of half.")
    if not (is_array(key) and (is_key(key) or key.dtype == UINT32)):
        raise TypeError(f"key={brief(key)} must be one PRNG key, such as jax.random.key(0).")
    return stochastically(jnp.asarray(x, FLOAT32), to, jax.random.bits(key, jnp.shape(x), UINT32))


def stochastically(x: jax.Array, dtype: np.dtype, random: jax.Array) -> jax.Array:
    """Rounds float32 to half by 32 random bits for each entry.

    In integers, because floats would flush subnormals where a device does. Of a significand, of
    which the half dtype drops so many bits, these bits say how likely the next value is.
    """
    info = jnp.finfo(dtype)
    bits = jax.lax.bitcast_convert_type(x, UINT32)
    size = bits & 0x7FFFFFFF
    stored = (size >> MANTISSA).astype(jnp.int32)  # the exponent's field; 0 of a subnormal
    significand = size & 0x7FFFFF | jnp.where(stored > 0, 1 << MANTISSA, 0).astype(UINT32)
    exponent = jnp.maximum(stored, 1) - 1 + LEAST
    below = jnp.maximum(info.minexp - exponent, 0)  # in the half dtype's subnormals
    drop = (MANTISSA - info.nmant + below).astype(UINT32)  # from 13 or 16 bits up
    shift = lambda x, by: jnp.where(by < 32, x >> jnp.minimum(by, 31), 0)  # noqa: E731
    down = shift(significand, drop)
    # The bits that are dropped, as the first of 32.
    left = significand << jnp.where(drop < 32, 32 - jnp.minimum(drop, 32), 0)
    chance = jnp.where(drop <= 32, left, shift(significand, drop - 32))
    up = (random < chance).astype(UINT32)
    field = (jnp.maximum(exponent, info.minexp) - info.minexp).astype(UINT32)
    half = ((field << info.nmant) + down + up).astype(jnp.uint16)
    half = half | (bits >> 31 << 15).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(half, dtype)
    return jnp.where(jnp.abs(x) <= info.max.astype(FLOAT32), rounded, x.astype(dtype))


def with_stochastic_rounding(
    inner: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Rounds updated half parameters at random, such that on average no update is lost.

    2 bytes a weight: nothing is kept but a counter. ``inner`` sees float32 gradients and widened
    parameters; their sum with the update is rounded by `stochastic_round`.

    Args:
        inner: Any optax optimizer.
        seed: Of the random bits, with the count of updates: a run that is repeated, or resumed
            from a checkpoint, draws the same. The bits do not depend on how arrays are sharded
            under jit; within shard_map each device draws those of an array of the local shape.

    Returns:
        An optax transformation; extra arguments of ``update`` are handed to ``inner``.

    Raises:
        TypeError: If ``inner`` is no optimizer.
        ValueError: If ``seed`` is not a whole number; from ``update``, if it is called without
            ``params``, or with the state of another optimizer.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.with_stochastic_rounding(optax.sgd(1e-3), seed=1)
        >>> params = jnp.ones(10_000, jnp.bfloat16)
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(jnp.ones(10_000), state, params)
        >>> params = optax.apply_updates(params, updates)
        >>> 0.9985 < params.astype(jnp.float32).mean() < 0.9995  # the mean of 1 and 1 - 2**-8
        Array(True, dtype=bool)

    Zamirai et al., "Revisiting BFloat16 Training", 2020; torchao's ``bf16_stochastic_round``.
    """
    inner = as_optimizer(inner, "inner")
    number = whole_number(seed)
    if number is None or not -(2**31) <= number < 2**32:
        raise ValueError(f"seed={brief(seed)} must be a whole number of 32 bits.")

    def init(params):
        return StochasticRoundingState(jnp.zeros((), jnp.int32), inner.init(widen(params)))

    def core(grads, state, params, extra_args):
        check_kind(state, StochasticRoundingState, "with_stochastic_rounding")
        need_params(params, "with_stochastic_rounding")
        full = widen(params)
        updates, inner_state = inner_update(inner, grads, state.inner_state, full, extra_args)

        def rounded(n, param, value, update):
            if update is None or not is_half(param):
                return None
            random = drawn(param.shape, number, state.draws, n)
            return stochastically(value + widen(update), param.dtype, random)

        stored = [rounded(n, *row) for n, row in enumerate(by_leaf(params, full, updates))]
        return updates, stored, StochasticRoundingState(state.draws + 1, inner_state)

    return made(init, core)
