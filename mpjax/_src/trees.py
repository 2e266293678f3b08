"""What is done to whole pytrees: cast their floating leaves, test them, choose between two.

Only real floating array leaves are ever cast. Integers, booleans, complex numbers, PRNG keys, None
and leaves that are no arrays (functions and strings, as in Equinox modules) pass through untouched.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.dtypes import FLOAT32, FLOAT64, DTypeLike, canonical
from mpjax._src.errors import brief
from mpjax._src.patterns import path_of

T = TypeVar("T")


def is_array(leaf: Any) -> bool:
    """Tells whether a leaf is an array that JAX can hold: no NumPy array of strings or objects."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        own = leaf.dtype.isbuiltin == 2 or leaf.dtype == jax.dtypes.float0  # ml_dtypes', JAX's
        return leaf.dtype.kind in "biufc" or own
    return isinstance(leaf, jax.Array)


def is_floating(leaf: Any) -> bool:
    """Tells whether a leaf is an array of a real floating dtype."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_half(leaf: Any) -> bool:
    """Tells whether a leaf is a floating array narrower than float32."""
    return is_floating(leaf) and leaf.dtype.itemsize < FLOAT32.itemsize


def is_key(leaf: Any) -> bool:
    """Tells whether a leaf, or the shape of one, is an array of typed PRNG keys."""
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", np.dtype(object)), jax.dtypes.prng_key)


def is_one_bool(verdict: Any) -> bool:
    """Tells whether a verdict is one bool: Python's, NumPy's, or a traced scalar."""
    if isinstance(verdict, bool):
        return True
    return getattr(verdict, "dtype", None) == np.bool_ and np.shape(verdict) == ()


def cast_leaf(leaf: Any, dtype: np.dtype, float64: bool = False) -> Any:
    """Casts one leaf if it is floating; a float64 one only to float64, or if told to."""
    if not is_floating(leaf) or leaf.dtype == dtype or (leaf.dtype == FLOAT64 and not float64):
        return leaf
    return leaf.astype(dtype)


def cast(tree: T, dtype: DTypeLike) -> T:
    """Casts the real floating leaves of a pytree, NumPy arrays included, to a dtype.

    float64 leaves are left alone: who has them asked for them. Casting *to* float64 is done.

    Args:
        tree: Any pytree. Leaves that are not real floating arrays pass through untouched.
        dtype: "float16", "bfloat16", "float32", "float64", "half", a short name or a dtype.

    Returns:
        A pytree of the same structure.

    Raises:
        ValueError: If ``dtype`` is not a floating dtype.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> tree = {"w": jnp.ones(3), "step": jnp.arange(3)}
        >>> {k: str(v.dtype) for k, v in mpjax.cast(tree, "bfloat16").items()}
        {'step': 'int32', 'w': 'bfloat16'}
    """
    to = canonical(dtype, "dtype")
    return jax.tree.map(lambda leaf: cast_leaf(leaf, to), tree)


def widen(tree: T) -> T:
    """Casts the leaves narrower than float32 to float32, and no others."""
    return jax.tree.map(lambda leaf: leaf.astype(FLOAT32) if is_half(leaf) else leaf, tree)


def cast_like(tree: T, like: Any) -> T:
    """Casts every floating leaf to the dtype of its counterpart in ``like``."""

    def convert(leaf, model):
        return cast_leaf(leaf, model.dtype, float64=True) if is_floating(model) else leaf

    return jax.tree.map(convert, tree, like)


def all_finite(tree: Any) -> jax.Array:
    """Tells whether no floating or complex leaf of a pytree holds a NaN or an infinity.

    Args:
        tree: Any pytree. Leaves that are neither floating nor complex numbers are ignored.

    Returns:
        A scalar bool array; True for an empty tree.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> bool(mpjax.all_finite({"a": jnp.ones(2), "n": 3})), bool(mpjax.all_finite(jnp.inf))
        (True, False)
    """
    verdicts = [
        jnp.all(jnp.isfinite(leaf))
        for leaf in jax.tree.leaves(tree)
        if (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact))
        or isinstance(leaf, (float, complex))
    ]
    return functools.reduce(jnp.logical_and, verdicts, jnp.array(True))


def stays_finite(new: Any, old: Any) -> jax.Array:
    """Tells whether each leaf of ``new`` is finite, but for those that were not in ``old``.

    A leaf is judged whole: a mask of -Inf in it, or a maximum that starts there, exempts it.

    Args:
        new: A pytree of arrays, judged as by `all_finite`.
        old: What it was before, of the same structure.

    Returns:
        A scalar bool array; True for an empty tree.
    """
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    verdicts = [all_finite(a) | ~all_finite(b) for a, b in pairs]
    return functools.reduce(jnp.logical_and, verdicts, jnp.array(True))


def select(pred: Any, on_true: T, on_false: T) -> T:
    """Returns one of two pytrees, bit for bit, by a boolean that may be traced.

    Args:
        pred: A scalar bool. By a Python bool the leaves are chosen as they are.
        on_true: Any pytree: arrays, PRNG keys, Python scalars, and leaves that are no arrays.
        on_false: A pytree of the same structure, shapes and dtypes. Leaves that are neither
            arrays nor numbers cannot be chosen on a device: they must be equal in both.

    Returns:
        A pytree of that structure.

    Raises:
        ValueError: If ``pred`` is no scalar, or the trees differ in structure, or two leaves in
            shape or dtype, or two leaves that are no arrays in value.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> mpjax.select(jnp.array(False), {"n": 1, "f": "relu"}, {"n": 2, "f": "relu"})["f"]
        'relu'
    """
    if not is_one_bool(pred):
        raise ValueError(
            f"pred={brief(pred)} must be one bool: a Python bool or a boolean array of shape (). "
            "For a verdict on many values use jnp.all(...) or mpjax.all_finite(...)."
        )

    def choose(keys, a, b):
        where = f"leaf {path_of(keys)!r}"
        if getattr(a, "dtype", None) == jax.dtypes.float0:  # the gradient of an integer: no value
            return a
        number = (bool, int, float, complex)
        if not (is_array(a) or isinstance(a, number)):
            if a is b or np.array_equal(a, b):
                return a
            raise ValueError(
                f"select: {where} is no array and differs: {brief(a)} against {brief(b)}. Such "
                "leaves must be equal in on_true and on_false; keep what changes in arrays."
            )
        kinds = [(jnp.shape(x), getattr(x, "dtype", type(x).__name__)) for x in (a, b)]
        if kinds[0] != kinds[1]:
            (shape, dtype), (other_shape, other_dtype) = kinds
            raise ValueError(
                f"select: {where} is {dtype}{shape} in on_true but {other_dtype}{other_shape} in "
                "on_false. Both must agree; a dtype that drifts from step to step is the usual "
                "cause."
            )
        if isinstance(pred, (bool, np.bool_)):
            return a if pred else b
        return a if a is b else jnp.where(pred, a, b)

    return jax.tree_util.tree_map_with_path(choose, on_true, on_false)
