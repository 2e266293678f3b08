"""Regions: parts of a function whose dtype the author fixes, whatever the policy says.

A region is a named scope. It belongs to the traced operations and is not a global setting, so it
stays with them under grad, scan, cond, remat, vmap and custom rules. `autocast` reads it; without
autocast it has no effect.
"""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mpjax._src.core.autocast.kernels import region
from mpjax._src.core.base.dtypes import FLOAT32, HALVES, DTypeLike, canonical
from mpjax._src.core.base.errors import brief, check_callable
from mpjax._src.core.base.wrapped import Wrapped

F = TypeVar("F", bound=Callable[..., Any])


class Region:
    """A context manager that also works as a decorator: what `precision` returns."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        # One object may be entered by several threads, and again inside of itself.
        self.here = threading.local()

    def __enter__(self) -> None:
        context = region(self.dtype)
        context.__enter__()
        self.here.entered = [*getattr(self.here, "entered", ()), context]

    def __exit__(self, *error: Any) -> bool | None:
        return self.here.entered.pop().__exit__(*error)

    def __call__(self, fun: F) -> F:
        check_callable(fun, "fun")
        return InRegion(fun, self.dtype)  # type: ignore[return-value]

    def __reduce__(self) -> Any:
        # What belongs to a thread cannot be pickled.
        return Region, (self.dtype,)


class InRegion(Wrapped):
    """A function that runs in a region."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with region(*self.settings):
            return self.fun(*args, **kwargs)


def precision(dtype: DTypeLike) -> Region:
    """Fixes the dtype of a part of a function under `autocast`.

    The innermost region wins. It takes precedence over the policy's op lists and overrides. It
    reaches the derivatives of the operations inside, and so the rules of a ``custom_jvp`` or
    ``custom_vjp``: matmuls run in its dtype, all else of a derivative in float32. It corresponds to
    a nested ``torch.autocast`` with another dtype or ``enabled=False``.

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
    try:
        region_dtype = canonical(dtype, "dtype")
    except ValueError:
        region_dtype = None
    if region_dtype not in (FLOAT32, *HALVES):
        hint = ' Write @mpjax.precision("float32") above it.' if callable(dtype) else ""
        raise ValueError(
            f"dtype={brief(dtype)} cannot be the dtype of a region. Choose one of 'float32', "
            f"'bfloat16' and 'float16'.{hint}"
        )
    return Region(region_dtype)
