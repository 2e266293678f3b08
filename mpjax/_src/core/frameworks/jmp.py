"""The names of jmp 0.0.4 with jmp's results, for programs that replace ``import jmp``.

Where a class or function of `mpjax` differs from jmp's of that name, these do as jmp does: they
multiply without widening, cast float64, and store a policy's dtypes as they were given.
The classes are subclasses of jmp's, so whatever takes jmp's objects takes these, Haiku and all of
`mpjax` included.
"""

import contextlib
import dataclasses
import warnings
from typing import Any, TypeAlias, TypeVar, Union

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mpjax._src.core.base import called
from mpjax._src.core.base.dtypes import HALVES, is_float
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import finite_together, in_common
from mpjax._src.core.policy import grammar

T = TypeVar("T")

# The first name is the one that str(policy) writes. Programs call these scalar types.
dtype_to_names: dict[Any, tuple[str, ...]] = {
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float16: ("f16", "float16"),
    jnp.float32: ("full", "f32", "float32"),
    jnp.float64: ("f64", "float64"),
}
name_to_dtype = {name: dtype for dtype, names in dtype_to_names.items() for name in names}
KEYS = {
    **dict.fromkeys(("p", "params"), "param_dtype"),
    **dict.fromkeys(("c", "compute"), "compute_dtype"),
    **dict.fromkeys(("o", "output"), "output_dtype"),
}


def parse_dtype(value: str) -> Any:
    """Returns the scalar type that a name of a dtype represents."""
    if value == "half":
        return half_dtype()
    if value in name_to_dtype:
        return name_to_dtype[value]
    raise ValueError(f"Unknown dtype '{value}' must be half or one of {', '.join(name_to_dtype)}.")


def _cast(tree: T, dtype: Any) -> T:
    """Casts the floating arrays of a tree, float64 and NumPy's included, and no other leaf."""

    def convert(leaf):
        arrays = isinstance(leaf, np.ndarray | jax.Array) and is_float(leaf)
        return leaf.astype(dtype) if arrays else leaf

    return jax.tree.map(convert, tree)


class AlsoTheirs(type):
    """The class of the classes here, whose instances jmp's own objects are too.

    A library or a pickle may have made them, and programs ask ``isinstance(scale,
    jmp.DynamicLossScale)`` to know whether to skip a step.
    """

    def __instancecheck__(cls, x: Any) -> bool:
        return issubclass(type(x), cls)

    def __subclasscheck__(cls, kind: type) -> bool:  # unions ask it
        here = cls.__module__ == "mpjax.jmp"  # not a subclass of a user
        return super().__subclasscheck__(kind) or (here and kind is cls.__base__)


@public("mpjax.jmp")
class Policy(jmp.Policy, metaclass=AlsoTheirs):
    """The dtypes of parameters, computation and results: ``jmp.Policy``.

    All of mpjax takes it. `mpjax.get_policy` converts it to a policy with further settings.

    Attributes:
        param_dtype: The dtype of parameters.
        compute_dtype: The dtype of the computation.
        output_dtype: The dtype of results.

    Example:
        >>> import jax.numpy as jnp, mpjax.jmp as jmp
        >>> policy = jmp.Policy(jnp.float32, jnp.bfloat16, jnp.float32)
        >>> str(policy), policy.cast_to_compute(jnp.ones(2)).dtype.name
        ('p=full,c=bf16,o=full', 'bfloat16')
    """

    def cast_to_param(self, x: T) -> T:
        """Casts the floating arrays of a tree to the dtype of parameters."""
        return _cast(x, self.param_dtype)

    def cast_to_compute(self, x: T) -> T:
        """Casts the floating arrays of a tree to the dtype of the computation."""
        with contextlib.suppress(TypeError):  # `astype` refuses what is no dtype
            if np.dtype(self.compute_dtype) in HALVES:
                called.CALLED.add(called.CASTS)
        return _cast(x, self.compute_dtype)

    def cast_to_output(self, x: T) -> T:
        """Casts the floating arrays of a tree to the dtype of results."""
        return _cast(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """Returns a copy with another dtype of results."""
        return dataclasses.replace(self, output_dtype=output_dtype)

    def __str__(self) -> str:
        three = zip("pco", dataclasses.astuple(self), strict=True)
        return ",".join(f"{key}={dtype_to_names[dtype][0]}" for key, dtype in three)


def get_policy(policy_name: str) -> Policy:
    """Returns the policy of a string of jmp's grammar.

    `mpjax.get_policy` reads more strings, such as "mixed_bfloat16".

    Args:
        policy_name: A dtype for everything ("bf16", "half"), or keys and dtypes, such as
            "params=float32,compute=float16,output=float32" or "c=f16". Parameters default to
            float32, the compute dtype to that of the parameters, the output dtype to the compute
            dtype.

    Returns:
        A `Policy`.

    Raises:
        ValueError: If jmp knows no such key or dtype.

    Example:
        >>> import mpjax.jmp as jmp
        >>> str(jmp.get_policy("c=f16"))
        'p=full,c=f16,o=f16'
    """
    try:
        return _parsed(policy_name)
    except ValueError as error:
        said = str(error)
    with contextlib.suppress(ValueError):
        grammar.get_policy(policy_name)
        said += f" mpjax.get_policy({policy_name!r}) knows this policy."
    raise ValueError(said)


def _parsed(policy_name: str) -> Policy:
    """Returns the policy of a string, or raises jmp's errors."""
    if "=" not in policy_name:
        return Policy(*[parse_dtype(policy_name)] * 3)
    given: dict[str, Any] = {}
    for part in policy_name.split(","):
        key, *value = part.split("=")
        if len(value) != 1:
            raise ValueError(f"'{part}' in '{policy_name}' should be one key and one dtype.")
        dtype = parse_dtype(value[0])
        if key not in KEYS:
            raise ValueError(
                f"Unknown key '{key}' in '{policy_name}' should be 'params', 'compute' or 'output'."
            )
        given[KEYS[key]] = dtype
    params = given.get("param_dtype", jnp.float32)
    compute = given.get("compute_dtype", params)
    return Policy(params, compute, given.get("output_dtype", compute))


def cast_to_full(tree: T) -> T:
    """Casts the floating arrays of a tree to float32.

    Args:
        tree: Any pytree. NumPy arrays and float64 are cast too.

    Returns:
        A pytree of the same structure.

    Example:
        >>> import numpy as np, mpjax.jmp as jmp
        >>> jmp.cast_to_full(np.ones(2, np.float16)).dtype
        dtype('float32')
    """
    return _cast(tree, jnp.float32)


def cast_to_half(tree: T) -> T:
    """Casts the floating arrays of a tree to `half_dtype`.

    Args:
        tree: Any pytree. NumPy arrays and float64 are cast too.

    Returns:
        A pytree of the same structure.

    Example:
        >>> import numpy as np, mpjax.jmp as jmp
        >>> jmp.cast_to_half(np.ones(2)).dtype == jmp.half_dtype()
        True
    """
    return _cast(tree, half_dtype())


def half_dtype() -> Any:
    """Returns jmp's 16-bit dtype of a device: bfloat16 on TPUs, float16 on all others.

    `mpjax.hardware.half_dtype` returns the one that a device computes fastest in, which is
    bfloat16 on CPUs and newer GPUs.

    Returns:
        ``jnp.bfloat16`` or ``jnp.float16``.

    Example:
        >>> import mpjax.jmp as jmp
        >>> jmp.half_dtype()(2).item()
        2.0
    """
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def _times(tree: T, factor: Any) -> T:
    """Multiplies all leaves, as JAX promotes them."""
    # The warning that no loss was scaled asks for this fact about the process.
    called.CALLED.add(called.SCALES)
    return jax.tree.map(lambda leaf: leaf * factor, tree)


@public("mpjax.jmp")
class NoOpLossScale(jmp.NoOpLossScale, metaclass=AlsoTheirs):
    """A loss scale of 1 that changes nothing: ``jmp.NoOpLossScale``.

    Example:
        >>> import mpjax.jmp as jmp
        >>> jmp.NoOpLossScale().scale(3.0)
        3.0
    """

    @property
    def loss_scale(self) -> int:
        """The scale: 1."""
        return 1

    def scale(self, tree: T) -> T:
        """Returns the tree."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns the tree."""
        return tree

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Returns this loss scale."""
        return self


@public("mpjax.jmp")
class StaticLossScale(jmp.StaticLossScale, metaclass=AlsoTheirs):
    """A fixed loss scale: ``jmp.StaticLossScale``.

    It is a pytree without leaves, so a scale that is an array cannot be an argument of a jitted
    function. That of `mpjax.StaticLossScale` can.

    Attributes:
        loss_scale: The scale.

    Example:
        >>> import jax.numpy as jnp, mpjax.jmp as jmp
        >>> jmp.StaticLossScale(128).scale(jnp.float16(2))
        Array(256., dtype=float16)
    """

    def scale(self, tree: T) -> T:
        """Multiplies all leaves by the scale."""
        return _times(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Multiplies all leaves by the reciprocal of the scale."""
        return _times(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Returns this loss scale."""
        return self


@public("mpjax.jmp")
class DynamicLossScale(jmp.DynamicLossScale, metaclass=AlsoTheirs):
    """A loss scale that grows while gradients are finite: ``jmp.DynamicLossScale``.

    The scale and the counter are its leaves. As in jmp, ``min_loss_scale`` is 1 again after a
    ``tree.map`` or in a jitted function, the scale has no ceiling below infinity, and a float16
    scale multiplies a float16 loss in float16. `mpjax.DynamicLossScale` does none of these, and
    `mpjax.mixed_precision` and `mpjax.build_train_step` make one of what they get.

    Attributes:
        loss_scale: The scale, a floating scalar.
        counter: The number of finite steps in a row.
        period: The number of finite steps in a row after which the scale grows.
        factor: What the scale is multiplied by then, and divided by when gradients are not finite.
        min_loss_scale: The least scale.

    Example:
        >>> import jax.numpy as jnp, mpjax.jmp as jmp
        >>> scale = jmp.DynamicLossScale(jnp.float32(2**15))
        >>> float(scale.adjust(jnp.bool_(False)).loss_scale)
        16384.0
    """

    def __post_init__(self) -> None:
        for name in ("loss_scale", "min_loss_scale"):
            # What JAX puts in place of leaves is checked nowhere: it may be any object.
            dtype = _dtype_of(getattr(self, name))
            if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
                warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=3)

    def scale(self, tree: T) -> T:
        """Multiplies all leaves by the scale."""
        return _times(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Multiplies all leaves by the reciprocal of the scale."""
        return _times(tree, 1 / self.loss_scale)

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Returns the loss scale for the next step.

        Args:
            grads_finite: Whether all gradients were finite: a bool array of shape ().

        Returns:
            A `DynamicLossScale` with the same settings.

        Raises:
            AssertionError: If ``grads_finite`` is no scalar.
        """
        if grads_finite.ndim:
            raise AssertionError(f"Expected boolean scalar, got the shape {grads_finite.shape}.")
        grown = self.loss_scale * self.factor
        select = jax.lax.select  # which refuses arrays of two dtypes, instead of promoting them
        grown = select(jnp.isfinite(grown).all(), grown, self.loss_scale)
        kept = select(self.counter == self.period - 1, grown, self.loss_scale)
        shrunk = jnp.maximum(self.min_loss_scale, self.loss_scale / self.factor)
        scale = select(grads_finite, kept, shrunk)
        counter = (self.counter + 1) % self.period * grads_finite
        settings = self.period, self.factor, self.min_loss_scale
        return DynamicLossScale(scale, counter, *settings)

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """Returns the leaves, and the settings."""
        return (self.loss_scale, self.counter), (self.period, self.factor)

    @classmethod
    def tree_unflatten(cls, settings: Any, leaves: Any) -> "DynamicLossScale":
        """Returns a loss scale of leaves and settings."""
        return cls(*leaves, *settings)


def _dtype_of(x: Any) -> Any:
    """Returns the dtype that a number or an array has in JAX, or None if it is neither."""
    with contextlib.suppress(TypeError):
        return jnp.result_type(x)
    return getattr(x, "dtype", None)


for _empty in (NoOpLossScale, StaticLossScale):
    jax.tree_util.register_pytree_node(_empty, lambda self: ((), self), lambda self, _: self)
jax.tree_util.register_pytree_node_class(DynamicLossScale)

LossScale: TypeAlias = Union[NoOpLossScale, StaticLossScale, DynamicLossScale]  # noqa: UP007


def all_finite(tree: Any) -> jax.Array:
    """Returns whether all numbers in a tree are finite.

    Args:
        tree: Any pytree of arrays and numbers.

    Returns:
        A bool array of shape (); True for an empty tree.

    Raises:
        TypeError: If a leaf is neither an array of numbers nor a number. `mpjax.all_finite` ignores
            such leaves.

    Example:
        >>> import jax.numpy as jnp, mpjax.jmp as jmp
        >>> bool(jmp.all_finite({"a": jnp.ones(2), "b": jnp.inf}))
        False
    """
    return finite_together(jax.tree.leaves(tree))


def select_tree(pred: Any, a: T, b: T) -> T:
    """Selects one of two trees of arrays.

    Args:
        pred: A bool array of shape ().
        a: Any pytree of arrays and numbers.
        b: A pytree of the same structure, shapes and dtypes.

    Returns:
        ``a`` if ``pred`` is true, else ``b``.

    Raises:
        AssertionError: If ``pred`` is no bool array of shape ().
        TypeError: If two leaves differ in shape or dtype, or are not arrays. `mpjax.select` passes
            equal leaves that are not arrays through.

    Example:
        >>> import jax.numpy as jnp, mpjax.jmp as jmp
        >>> jmp.select_tree(jnp.bool_(False), {"a": 1.0}, {"a": 2.0})["a"].item()
        2.0
    """
    if pred.ndim or pred.dtype != jnp.bool_:
        raise AssertionError(f"expected boolean scalar, got {pred.dtype} of shape {pred.shape}")
    of = in_common(pred, jax.tree.leaves(b))
    return jax.tree.map(lambda x, y: jax.lax.select(of(x), x, y), a, b)
