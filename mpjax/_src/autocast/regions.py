"""Regions: parts of a function whose dtype the author fixes, whatever the policy says.

A region is a named scope. It belongs to the traced operations and is not a global setting, so it
stays with them under grad, scan, cond, remat, vmap and custom_jvp. `autocast` reads it; without
autocast it has no effect.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from mpjax._src.autocast.kernels import region
from mpjax._src.base.dtypes import FLOAT32, HALVES, DTypeLike, canonical
from mpjax._src.base.errors import brief, check_callable
from mpjax._src.program.graph import REGION

F = TypeVar("F", bound=Callable[..., Any])


def precision(dtype: DTypeLike) -> "contextlib._GeneratorContextManager[None]":
    """Fixes the dtype of a part of a function under `autocast`.

    The innermost region wins. It takes precedence over the policy's op lists and overrides. The
    backward pass of the operations inside uses the same dtype, except for the backward rule of a
    ``custom_vjp``, which is separate code. It corresponds to a nested ``torch.autocast`` with
    another dtype or ``enabled=False``.

    Args:
        dtype: "float32" runs the operations inside unchanged; "bfloat16" and "float16" run them
            in 16 bits, including softmax and norms.

    Returns:
        A context manager that also works as a decorator.

    Raises:
        ValueError: If ``dtype`` is not float32, bfloat16 or float16.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> @mpjax.autocast(policy="mixed_bfloat16")
        ... def head(x, w):
        ...     with mpjax.precision("float32"):
        ...         return x @ w
        >>> "bf16" in str(jax.make_jaxpr(head)(jnp.ones((2, 3)), jnp.ones((3, 2))))
        False
        >>> @mpjax.precision("float32")
        ... def gram(x):
        ...     return x @ x.T
        >>> model = mpjax.autocast(lambda x: gram(x), "mixed_bfloat16")
        >>> "bf16" in str(jax.make_jaxpr(model)(jnp.ones((2, 3))))
        False
    """
    region_dtype = canonical(dtype, "dtype")
    if region_dtype not in (FLOAT32, *HALVES):
        raise ValueError(
            f"dtype={brief(dtype)} cannot be the dtype of a region. Choose one of 'float32', "
            "'bfloat16' and 'float16'."
        )
    return _region(region_dtype)


@contextlib.contextmanager
def _region(dtype: Any) -> Iterator[None]:
    with jax.named_scope(f"{REGION}{dtype.name}"), region(dtype):
        yield


def full_precision(fun: F) -> F:
    """Is the old name of the decorator ``precision("float32")``."""

    check_callable(fun, "fun")

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        with precision("float32"):
            return fun(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
