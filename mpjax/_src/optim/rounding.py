"""Stochastic rounding: to a neighboring 16-bit value, so that the mean is exact."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._src.core.base.dtypes import FLOAT32, HALVES, DTypeLike, canonical
from mpjax._src.core.base.errors import brief, whole_number
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import is_array, is_key, is_narrow_array, widen
from mpjax._src.core.training import optimizers
from mpjax._src.core.training.residuals import UINT32

MANTISSA = jnp.finfo(FLOAT32).nmant
LEAST = jnp.finfo(FLOAT32).minexp  # the exponent of the least normal value and of subnormals


def mixed(bits: jax.Array) -> jax.Array:
    """Returns 32 hashed bits, each depending on all given bits: the finalizer of MurmurHash3."""
    bits = (bits ^ bits >> 16) * np.uint32(0x85EBCA6B)
    bits = (bits ^ bits >> 13) * np.uint32(0xC2B2AE35)
    return bits ^ bits >> 16


def drawn(shape: tuple[int, ...], *numbers: Any) -> jax.Array:
    """Returns 32 random bits for each entry of an array, from its index and the given integers.

    It is a hash, which is good enough for rounding. With `jax.random.bits`, XLA takes half a second
    longer to compile on a GPU for each array of a model.
    """
    # The two halves of 2**64 over the golden ratio, as in SplitMix64. Two words of state keep
    # streams apart whose first words collide.
    keys = jnp.array([0x9E3779B9, 0x7F4A7C15], UINT32)
    for number in numbers:
        constant = isinstance(number, int)
        keys = mixed(keys + (np.uint32(number % 2**32) if constant else number.astype(UINT32)))
    # The index in the whole array: under jit each device computes that of its own part.
    place = jnp.zeros(shape, UINT32)
    for axis, length in enumerate(shape):
        place = place * np.uint32(length) + jax.lax.broadcasted_iota(UINT32, shape, axis)
    return mixed(mixed(place ^ keys[0]) + keys[1])


@public("mpjax.optim")
@optimizers.of_ours
class StochasticRoundingState(NamedTuple):
    """State of `with_stochastic_rounding`.

    Attributes:
        draws: The number of updates so far, an int32 scalar. It selects the random bits of the next
            update.
        inner_state: The state of the inner optimizer, initialized with float32 parameters.
    """

    draws: jax.Array
    inner_state: optax.OptState


def stochastic_round(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Rounds to a neighboring 16-bit value at random, so that the expected value is ``x``.

    The closer an entry is to a 16-bit value, the likelier it is rounded to it. A value that
    the 16-bit dtype represents exactly is not changed. NaN, Inf and values beyond the largest
    finite 16-bit value are cast as usual. The same key gives the same result however ``x`` is
    sharded under jit.

    Args:
        x: A float32 array of any shape. A 16-bit array is widened first.
        dtype: "bfloat16" or "float16".
        key: One PRNG key, of ``jax.random.key`` or ``jax.random.PRNGKey``. 32 random bits are drawn
            for each entry, so a distance of less than 2**-32 of the spacing of 16-bit values counts
            as 0.

    Returns:
        An array of the shape of ``x`` and of ``dtype``.

    Raises:
        TypeError: If ``x`` is not a float32 or 16-bit array, or ``key`` is not a key.
        ValueError: If ``dtype`` is not a 16-bit dtype.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> x = jnp.full(1000, 1 + 2**-9)  # bfloat16 has 1 and 1 + 2**-7: a quarter of the way
        >>> y = mpjax.optim.stochastic_round(x, "bfloat16", jax.random.key(0))
        >>> sorted(set(y.tolist())), 0.2 < (y == 1).mean() < 0.8
        ([1.0, 1.0078125], Array(True, dtype=bool))

    Gupta et al. 2015, "Deep Learning with Limited Numerical Precision"; Zamirai et al. 2020,
    "Revisiting BFloat16 Training".
    """
    to = canonical(dtype, "dtype")
    if to not in HALVES:
        raise ValueError(f"dtype={brief(dtype)} must be a 16-bit dtype: 'bfloat16' or 'float16'.")
    if not (is_array(x) and (x.dtype == FLOAT32 or is_narrow_array(x))):
        raise TypeError(f"x={brief(x)} must be an array of float32, bfloat16 or float16.")
    if not (is_array(key) and (is_key(key) or key.dtype == UINT32)):
        raise TypeError(f"key={brief(key)} must be one PRNG key, such as jax.random.key(0).")
    return stochastically(jnp.asarray(x, FLOAT32), to, jax.random.bits(key, jnp.shape(x), UINT32))


def stochastically(x: jax.Array, dtype: np.dtype, random: jax.Array) -> jax.Array:
    """Rounds float32 to 16 bits with 32 random bits for each entry.

    It computes with integers, because float operations flush subnormals on some devices. The bits
    of the significand that the 16-bit dtype drops are the probability of rounding up.
    """
    info = jnp.finfo(dtype)
    bits = jax.lax.bitcast_convert_type(x, UINT32)
    size = bits & 0x7FFFFFFF
    stored = (size >> MANTISSA).astype(jnp.int32)  # the exponent field; 0 for a subnormal
    # Normal numbers do not store their leading 1.
    significand = size & 0x7FFFFF | jnp.where(stored > 0, 1 << MANTISSA, 0).astype(UINT32)
    exponent = jnp.maximum(stored, 1) - 1 + LEAST
    below = jnp.maximum(info.minexp - exponent, 0)  # bits lost to the 16-bit dtype's subnormals
    drop = (MANTISSA - info.nmant + below).astype(UINT32)  # at least 13 or 16 bits
    shift = lambda x, by: jnp.where(by < 32, x >> jnp.minimum(by, 31), 0)  # noqa: E731
    down = shift(significand, drop)
    # The dropped bits, shifted to the top of 32.
    left = significand << jnp.where(drop < 32, 32 - jnp.minimum(drop, 32), 0)
    chance = jnp.where(drop <= 32, left, shift(significand, drop - 32))
    up = (random < chance).astype(UINT32)
    # The leading 1 of the kept bits adds 1 to the exponent field, and so does a carry: what follows
    # the largest significand is the next power of two.
    field = (jnp.maximum(exponent, info.minexp) - info.minexp).astype(UINT32)
    half = ((field << info.nmant) + down + up).astype(jnp.uint16)
    half = half | (bits >> 31 << 15).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(half, dtype)
    # Beyond the largest 16-bit value there are not two neighbors to choose from.
    return jnp.where(jnp.abs(x) <= info.max.astype(FLOAT32), rounded, x.astype(dtype))


def with_stochastic_rounding(
    inner: optax.GradientTransformation, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Rounds updated 16-bit parameters stochastically, so that on average no update is lost.

    ``inner`` sees float32 gradients and parameters widened to float32. The sum of a parameter and
    its update is rounded as in `stochastic_round`. A 16-bit weight needs 2 bytes: the state stores
    only a counter.

    Args:
        inner: Any optax optimizer.
        seed: A 32-bit integer. Together with the count of updates it determines the random
            bits, so a run that is repeated or resumed from a checkpoint draws the same bits. They
            do not depend on how arrays are sharded under jit; within shard_map each device draws
            the bits of an array of the local shape.

    Returns:
        An optax transformation. Extra arguments of ``update`` are passed to ``inner``.

    Raises:
        TypeError: If ``inner`` is not an optax optimizer.
        ValueError: If ``seed`` is not a 32-bit integer; from ``update``, if it is called
            without ``params`` or with the state of a different optimizer.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.optim.with_stochastic_rounding(optax.sgd(1e-3), seed=1)
        >>> params = jnp.ones(10_000, jnp.bfloat16)
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(jnp.ones(10_000), state, params)
        >>> params = optax.apply_updates(params, updates)
        >>> 0.9985 < params.astype(jnp.float32).mean() < 0.9995  # the mean of 1 and 1 - 2**-8
        Array(True, dtype=bool)

    Zamirai et al. 2020, "Revisiting BFloat16 Training". torchao has the same method as
    ``bf16_stochastic_round``.
    """
    inner = optimizers.as_optimizer(inner, "inner")
    number = whole_number(seed)
    if number is None or not -(2**31) <= number < 2**32:
        raise ValueError(f"seed={brief(seed)} must be an integer from -2**31 to 2**32 - 1.")

    def init(params, reads):
        first = optimizers.first_state(inner, reads.widened(params))
        return StochasticRoundingState(jnp.zeros((), jnp.int32), first)

    def core(advance, state, params, reads):
        optimizers.check_kind(state, StochasticRoundingState, "with_stochastic_rounding")
        optimizers.need_params(params, "with_stochastic_rounding")
        full = reads.widened(params)
        updates, inner_state = advance(state.inner_state, full)

        def rounded(n, param, value, update):
            if update is None or not is_narrow_array(param):
                return None
            random = drawn(param.shape, number, state.draws, n)
            return stochastically(value + widen(update), param.dtype, random)

        rows = optimizers.by_leaf(params, full, reads.trained(updates, params))
        stored = [rounded(n, *row) for n, row in enumerate(rows)]
        return updates, stored, StochasticRoundingState(state.draws + 1, inner_state)

    return optimizers.made(inner, init, core)
