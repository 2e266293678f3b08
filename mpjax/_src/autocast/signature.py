"""Cache keys of calls: whether the trace of an earlier call can be used for another one."""

import dataclasses
import enum
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.base import _jax
from mpjax._src.base.trees import is_array

# The number of traces of a function that are cached for calls outside of transformations.
KEPT_CALLS = 128

# Types whose objects do not change. Values that a function reads are read when it is traced.
LASTING = (
    *(enum.Enum, np.dtype, type(jnp.float32)),
    *(types.FunctionType, types.BuiltinFunctionType, type(jax.jit(abs))),
    *(jax.custom_jvp, jax.custom_vjp),
)


def signature(leaves: list[Any], tree: Any) -> Any:
    """Returns the values that a trace depends on, or None if they are not known."""
    described = [_jax.aval_of(x) if is_array(x) else _value(x) for x in leaves]
    key = (*described, _jax.Structure(tree), _jax.tracing_key())
    try:
        hash(key)
    except TypeError:
        return None
    return None if None in described else key


def _value(x: Any) -> Any:
    """Returns a key that is equal for equal objects, or None if the object may change."""
    if type(x) in (float, complex):
        return type(x), repr(x)  # tells -0.0 from 0.0, and nan is nan
    if type(x) in (bool, int, str, bytes) or isinstance(x, LASTING):
        return type(x), x
    if getattr(getattr(type(x), "__dataclass_params__", None), "frozen", False):
        fields = [getattr(x, field.name, None) for field in dataclasses.fields(x)]
        leaves, tree = jax.tree_util.tree_flatten(fields)
        inside = [_value(leaf) for leaf in leaves]
        return None if None in inside else (type(x), tree, *inside)
    return None
