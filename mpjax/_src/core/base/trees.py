"""Operations on whole pytrees: cast the floating leaves, test for NaN and Inf, select one of two.

Only real floating array leaves are cast. Integers, booleans, complex numbers, PRNG keys, None and
leaves that are not arrays (functions and strings, as in Equinox modules) pass through unchanged.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT32, FLOAT64, DTypeLike, canonical, is_float, is_narrow
from mpjax._src.core.base.errors import brief
from mpjax._src.core.base.patterns import difference, name_of, path_of, paths

T = TypeVar("T")
NUMBER = (bool, int, float, complex)
# On a GPU, arrays of so few entries take longer to start a kernel for than to read.
SMALL = 2**17
# So many of one shape are several. What the updates of n parameters have in common takes a kernel
# too, so to join them saves n - 2 kernels; its bytes take less than 5% of the time of one. A single
# parameter has up to four arrays: itself, its moments, a master copy.
SEVERAL = 5


# What `pytree_of` compiles for each class, because loops over the fields would take twice as long.
_PYTREE = """
def flatten(self):
    return ({read_leaves}), ({read_static})

def unflatten(static, leaves):
    self = new(cls)
    held = self.__dict__
    ({held_leaves}), ({held_static}) = leaves, static
    return self
"""


def pytree_of(*leaves: str) -> Callable[[type[T]], type[T]]:
    """Registers a dataclass as a pytree of these fields; the others are static.

    Each call of a jitted step flattens and rebuilds its states. `jax.tree_util.register_dataclass`
    rebuilds by ``__init__``, which takes longer, and which may refuse the objects that a tree.map,
    a sharding spec or a checkpoint puts in place of the arrays.
    """

    def register(cls):
        static = [field.name for field in dataclasses.fields(cls) if field.name not in leaves]
        code: dict[str, Any] = {"cls": cls, "new": object.__new__}
        texts = {
            f"{kind}_{side}": "".join(f"{text.format(name)}, " for name in names)
            for kind, text in (("read", "self.{}"), ("held", "held[{!r}]"))
            for side, names in (("leaves", leaves), ("static", static))
        }
        exec(_PYTREE.format(**texts), code)
        flatten, unflatten = code["flatten"], code["unflatten"]

        def flatten_with_keys(self):
            values, static = flatten(self)
            return list(zip(map(jax.tree_util.GetAttrKey, leaves), values, strict=True)), static

        jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
        return cls

    return register


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array that JAX supports (not a NumPy array of strings, say)."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        own = leaf.dtype.isbuiltin == 2 or leaf.dtype == jax.dtypes.float0  # ml_dtypes', JAX's
        return leaf.dtype.kind in "biufc" or own
    return isinstance(leaf, jax.Array)


def is_array_or_shape(leaf: Any) -> bool:
    """Returns whether a leaf is an array, or a `jax.ShapeDtypeStruct` that represents one."""
    return is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def check_fits(argument: str, keys: Any, leaf: Any) -> None:
    """Raises a ValueError for an integer of Python that no dtype has room for."""
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**64:
        raise ValueError(f"{name_of(argument, keys)}={brief(leaf)} must fit in 64 bits.")


def is_floating(leaf: Any) -> bool:
    """Returns whether a leaf is an array of a real floating dtype."""
    return is_array(leaf) and is_float(leaf)


def is_narrow_array(leaf: Any) -> bool:
    """Returns whether a leaf is a floating array narrower than float32."""
    return is_array(leaf) and is_narrow(leaf)


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf, or the shape of one, is an array of typed PRNG keys."""
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", np.dtype(object)), jax.dtypes.prng_key)


def is_one_bool(verdict: Any) -> bool:
    """Returns whether a value is a single bool: of Python, of NumPy, or a traced scalar."""
    if isinstance(verdict, bool):
        return True
    return getattr(verdict, "dtype", None) == np.bool_ and np.shape(verdict) == ()


def varies_over(x: Any) -> tuple[str, ...]:
    """Returns the manual mesh axes that an array varies over, if `jax.shard_map` checks them."""
    return tuple(sorted(getattr(getattr(jax.typeof(x), "mat", None), "varying", ())))


def vary_like(leaf: jax.Array, like: Any) -> jax.Array:
    """Marks an array as varying over the manual mesh axes that another one varies over."""
    return vary_over(leaf, varies_over(like))


def vary_over(leaf: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Marks an array as varying over manual mesh axes."""
    missing = tuple(axis for axis in axes if axis not in varies_over(leaf))
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf


def cast_leaf(leaf: Any, dtype: np.dtype, float64: bool = False) -> Any:
    """Casts a leaf if it is a floating array. A float64 leaf is cast only if ``float64`` is set.

    Without x64, NumPy's float64 is float32 to JAX.
    """
    if not is_floating(leaf) or leaf.dtype == dtype:
        return leaf
    double = leaf.dtype == FLOAT64 and not isinstance(leaf, jax.Array)
    wide = jax.dtypes.canonicalize_dtype(leaf.dtype) if double else leaf.dtype
    return leaf if wide == FLOAT64 and not float64 else leaf.astype(dtype)


def cast(tree: T, dtype: DTypeLike) -> T:
    """Casts the real floating leaves of a pytree, including NumPy arrays, to a dtype.

    Float64 leaves are unchanged, because JAX creates them only on request (without x64, those of
    NumPy are float32 to JAX, and are cast). Casting *to* float64 works.

    Args:
        tree: Any pytree. Leaves that are not real floating arrays pass through unchanged.
        dtype: "float16", "bfloat16", "float32", "float64", a short name ("bf16"), "half" (the
            16-bit dtype that suits the default device, see `half_dtype`) or a dtype.

    Returns:
        A pytree of the same structure and shapes.

    Raises:
        ValueError: If ``dtype`` is not one of these floating dtypes.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> tree = {"w": jnp.ones(3), "step": jnp.arange(3)}
        >>> {k: str(v.dtype) for k, v in mpjax.cast(tree, "bfloat16").items()}
        {'step': 'int32', 'w': 'bfloat16'}
    """
    to = canonical(dtype, "dtype")
    return jax.tree.map(lambda leaf: cast_leaf(leaf, to), tree)


def widen(tree: T) -> T:
    """Casts the 16-bit leaves to float32, and leaves the others unchanged."""
    return jax.tree.map(lambda leaf: leaf.astype(FLOAT32) if is_narrow_array(leaf) else leaf, tree)


def cast_like(tree: T, like: Any) -> T:
    """Casts every floating leaf to the dtype of the corresponding leaf in ``like``."""

    def convert(leaf, model):
        return cast_leaf(leaf, model.dtype, float64=True) if is_floating(model) else leaf

    return jax.tree.map(convert, tree, like)


def all_finite(tree: Any) -> jax.Array:
    """Returns whether all numbers in a pytree are finite: no NaN and no infinity.

    Args:
        tree: Any pytree of arrays and Python numbers. Leaves that are neither floating nor complex
            are ignored.

    Returns:
        A bool array of shape (); True for an empty tree. It may be traced.

    Raises:
        TypeError: If the tree has leaves, but no arrays or numbers.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> bool(mpjax.all_finite({"a": jnp.ones(2), "n": 3})), bool(mpjax.all_finite(jnp.inf))
        (True, False)
    """
    leaves = jax.tree.leaves(tree)
    if leaves and not any(is_array(leaf) or isinstance(leaf, NUMBER) for leaf in leaves):
        raise TypeError(
            f"tree={brief(tree)} has no arrays and no numbers, so nothing of it can be finite. "
            "Pass gradients, a loss or another tree of arrays."
        )
    floats = [
        leaf
        for leaf in leaves
        if (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact))
        or isinstance(leaf, (float, complex))
    ]
    return finite_together(floats)


def finite_together(leaves: Sequence[Any]) -> jax.Array:
    """Returns whether all entries of all leaves are finite: a bool array of shape ()."""
    verdicts = [
        jnp.all(functools.reduce(jnp.logical_and, map(jnp.isfinite, group)))
        for group in reduced_together(leaves)
    ]
    return functools.reduce(jnp.logical_and, verdicts, jnp.array(True))


def reduced_together(leaves: Sequence[Any]) -> Iterable[list[Any]]:
    """Returns traced leaves in groups, whose entries are combined before they are reduced to one.

    XLA:GPU runs a kernel for each reduction. Those of small arrays of one type can be one. The
    barrier keeps it from combining them where it computes the arrays, with other kernels apart.
    """
    groups: dict[Any, list[Any]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(jax.typeof(leaf) if _is_small(leaf) else i, []).append(leaf)
    return (
        [*map(_jax.gpu_barrier, group)] if len(group) > 1 else group for group in groups.values()
    )


def _is_small(leaf: Any) -> bool:
    """Returns whether a leaf is small, and not one that devices divide unlike others of its type.

    They would exchange such leaves to combine them.
    """
    traced = isinstance(leaf, jax.core.Tracer)
    return traced and 1 < leaf.size <= SMALL and not _jax.may_be_divided(leaf)


def stays_finite(new: Any, old: Any) -> jax.Array:
    """Returns whether every leaf of ``new`` is finite whose counterpart in ``old`` is finite.

    A leaf that is the same array in both, such as a frozen weight, is not read. One -Inf anywhere
    in a leaf of ``old``, such as a mask or the start of a running maximum, exempts the whole leaf.
    It is a bool array of shape (); True for an empty tree.
    """
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    verdicts = [all_finite(a) | ~all_finite(b) for a, b in pairs if a is not b]
    return functools.reduce(jnp.logical_and, verdicts, jnp.array(True))


def in_common(pred: Any, leaves: Sequence[Any]) -> Callable[[Any], Any]:
    """Returns a function from a leaf to ``pred``, broadcast for a small leaf with several like it.

    XLA:GPU updates each parameter in a kernel of its own, unless the updates of arrays of one shape
    read another array in common.
    """
    shapes = collections.Counter(map(jnp.shape, filter(_is_small, leaves)))
    common: dict[Any, Any] = {}

    def of(leaf):
        shape = jnp.shape(leaf)
        # The broadcast has no sharding. One that devices divide would have to be given the leaf's.
        if shapes[shape] < SEVERAL or _jax.is_explicit(leaf) or _jax.may_be_divided(leaf):
            return pred
        if shape not in common:
            common[shape] = _jax.gpu_barrier(jnp.broadcast_to(pred, shape))
        return common[shape]

    return of


def _check_same_structure(on_true: Any, on_false: Any) -> None:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (on_true, on_false)]
    if structures[0] != structures[1]:
        lacking = difference({*paths(on_true)}, {*paths(on_false)})
        kinds = "{} is not {}".format(*map(brief, structures))
        raise ValueError(
            "select: on_true and on_false must have the same structure, but "
            f"{f'on_false {lacking}' if lacking else kinds}."
        )


def _check_same_form(where: str, a: Any, b: Any) -> None:
    kinds = [(jnp.shape(x), getattr(x, "dtype", type(x).__name__)) for x in (a, b)]
    if kinds[0] != kinds[1]:
        (shape, dtype), (other_shape, other_dtype) = kinds
        raise ValueError(
            f"select: {where} is {dtype}{shape} in on_true but {other_dtype}{other_shape} in "
            "on_false. Shapes and dtypes must be the same in both. The usual cause is a dtype "
            "that changes from step to step."
        )


def select(pred: Any, on_true: T, on_false: T) -> T:
    """Selects one of two pytrees by a bool that may be traced; values are unchanged, bit for bit.

    Args:
        pred: A bool array of shape (), or a Python bool. For a Python bool the leaves are returned
            as they are.
        on_true: Any pytree: arrays, PRNG keys, Python scalars, and leaves that are not arrays.
        on_false: A pytree of the same structure, shapes and dtypes. Leaves that are neither arrays
            nor numbers cannot be selected on a device, so they must be equal in both trees.

    Returns:
        A pytree of the same structure: ``on_true`` if ``pred`` is true, else ``on_false``.

    Raises:
        ValueError: If ``pred`` is not a single bool; if the trees differ in structure; if two
            leaves differ in shape or dtype; or if two leaves that are not arrays differ in value.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> mpjax.select(jnp.array(False), {"n": 1, "f": "relu"}, {"n": 2, "f": "relu"})["f"]
        'relu'
    """
    if not is_one_bool(pred):
        raise ValueError(
            f"pred={brief(pred)} must be a single bool: a Python bool or a bool array of shape (). "
            "To reduce many values to one, use jnp.all(...) or mpjax.all_finite(...)."
        )

    _check_same_structure(on_true, on_false)
    of = in_common(pred, jax.tree.leaves(on_false))

    def choose(keys, a, b):
        where = f"leaf {path_of(keys)!r}"
        if getattr(a, "dtype", None) == jax.dtypes.float0:  # the gradient of an integer is empty
            return a
        if not (is_array(a) or isinstance(a, NUMBER)):
            if a is b or np.array_equal(a, b):
                return a
            raise ValueError(
                f"select: {where} is not an array, and it is {brief(a)} in on_true but {brief(b)} "
                "in on_false. Such leaves must be equal in both; store values that change in "
                "arrays."
            )
        _check_same_form(where, a, b)
        if isinstance(pred, (bool, np.bool_)):
            return a if pred else b
        check_fits("on_true", keys, a)
        check_fits("on_false", keys, b)
        # The same array in both, such as a frozen weight, takes no kernel.
        return a if a is b else jnp.where(of(a), a, b)

    return jax.tree_util.tree_map_with_path(choose, on_true, on_false)
