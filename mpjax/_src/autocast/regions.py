"""Regions: parts of a function whose precision its author decides, whatever the policy says.

A region is a named scope, so it is a property of the traced operations and not a global setting:
it goes with them through grad, scan, cond, remat, vmap and custom_jvp. `autocast` reads it; without
autocast it changes nothing.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from mpjax._src.autocast.graph import REGION
from mpjax._src.autocast.kernels import region
from mpjax._src.dtypes import FLOAT32, HALVES, DTypeLike, canonical
from mpjax._src.errors import brief, check_callable

F = TypeVar("F", bound=Callable[..., Any])


def precision(dtype: DTypeLike) -> Any:
    """Marks a region that `autocast` computes in one dtype.

    The innermost region wins, over the policy's op lists and overrides too. The backward pass of
    what is inside follows; the backward rule of a custom_vjp does not, it is code of its own.

    Args:
        dtype: "float32" keeps the operations inside as they are written; "bfloat16" and "float16"
            force them to half, softmax and norms included.

    Returns:
        A context manager, which also serves as a decorator.

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
    """
    found = canonical(dtype, "dtype")
    if found not in (FLOAT32, *HALVES):
        raise ValueError(
            f"dtype={brief(dtype)} is not one that a region can ask for. Legal are 'float32', "
            "'bfloat16' and 'float16'."
        )
    return _region(found)


@contextlib.contextmanager
def _region(dtype: Any) -> Iterator[None]:
    with jax.named_scope(f"{REGION}{dtype.name}"), region(dtype):
        yield


def full_precision(fun: F) -> F:
    """Makes a function a float32 region: under `autocast` it runs as it is written.

    Args:
        fun: Any function.

    Returns:
        The same function, inside ``precision("float32")``.

    Raises:
        TypeError: If ``fun`` is not a function.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> @mpjax.full_precision
        ... def gram(x):
        ...     return x @ x.T
        >>> model = mpjax.autocast(lambda x: gram(x), "mixed_bfloat16")
        >>> "bf16" in str(jax.make_jaxpr(model)(jnp.ones((2, 3))))
        False
    """

    check_callable(fun, "fun")

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        with precision("float32"):
            return fun(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
