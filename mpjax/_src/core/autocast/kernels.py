"""Casts the inputs of kernels to 16 bits while a function is traced under `autocast`.

A kernel reads the dtypes of its operands when it is traced, before there is a plan. A context
variable therefore tells it, during tracing, which dtype autocast would give it. JAX's caches depend
on the variable, so a jit that was traced outside of autocast is not reused inside.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import numpy as np

from mpjax._src.core.autocast.classify import override_of
from mpjax._src.core.base.contexts import PLANNED_FOR
from mpjax._src.core.base.dtypes import FLOAT32, HALVES
from mpjax._src.core.base.errors import brief, check_callable
from mpjax._src.core.base.trees import is_array
from mpjax._src.core.base.wrapped import Decorator, Wrapped
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.graph import KERNEL, PLANNED, REGION, Block

F = TypeVar("F", bound=Callable[..., Any])


class Tracing(NamedTuple):
    """The state of autocast while it traces a function."""

    half: str  # the name of the 16-bit dtype that kernels get; "" for float32
    policy: Policy  # the policy, with the dtype of the region around the code that is traced
    # The counter of kernel calls, if an override gives some calls another dtype.
    numbers: "Numbers | None" = None
    # Pairs (number of a call, name of the dtype) for these calls.
    others: tuple[tuple[int, str], ...] = ()

    def next_half(self) -> str:
        """Returns the name of the 16-bit dtype that the next call of a kernel gets."""
        return dict(self.others).get(self.numbers.count, self.half) if self.numbers else self.half


def overridden(block: Block, policy: Policy) -> dict[int, str]:
    """Returns the dtypes that overrides give to calls of kernels, by the number of the call.

    Several places of the program may share one call, in a nested jit. It is float32 if an override
    says so for one of them.
    """
    dtypes: dict[int, str] = {}
    for op in block.walk():
        boundary = op.kernel and PLANNED not in op.scopes
        dtype = override_of(op, policy, set()) if boundary else None
        if dtype is not None and _name(dtype) != _name(policy.compute_dtype):
            number, name = int(op.kernel.partition("#")[2] or -1), _name(dtype)
            # float32 has the name "", which is the least.
            dtypes[number] = min(name, dtypes.get(number, name))
    return dtypes


class Numbers:
    """A counter. It is compared by identity, so JAX's caches treat each one as a new context."""

    def __init__(self) -> None:
        self.count = 0


def tracing(policy: Policy, **options: Any) -> contextlib.AbstractContextManager[Any]:
    """Tells kernels traced inside the context which policy the program is planned under."""
    return PLANNED_FOR(Tracing(_name(policy.compute_dtype), policy, **options))


@contextlib.contextmanager
def region(dtype: Any) -> Iterator[None]:
    """Puts what is traced into a region of a dtype, and tells kernels; autocast alone reads it."""
    current = PLANNED_FOR.value
    if current is not None:
        # A region overrules overrides, so calls inside need no numbers.
        policy = dataclasses.replace(current.policy, compute_dtype=dtype)
        current = Tracing(_name(dtype), policy)
    with jax.named_scope(f"{REGION}{dtype.name}"), PLANNED_FOR(current):
        yield


def current_policy() -> Policy | None:
    """Returns the policy of the `autocast` that the calling code is traced under.

    Use it in code that depends on the precision: to choose a kernel or an epsilon, or to check
    something. It combines ``torch.is_autocast_enabled`` and ``torch.get_autocast_dtype``.

    Returns:
        The `Policy` of the innermost `autocast`, or of the innermost training step with op-level
        casting, around the call. Inside a region (`precision`), its ``compute_dtype`` is the dtype
        of the region. None outside of autocast. Arrays in the code are still float32.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> def normalized(x):
        ...     policy = mpjax.current_policy()
        ...     half = policy is not None and policy.compute_dtype == jnp.float16
        ...     return x / jnp.sqrt(jnp.sum(x**2) + (1e-4 if half else 1e-8))
        >>> mpjax.current_policy() is None
        True
    """
    current = PLANNED_FOR.value
    return None if current is None else current.policy


def _name(dtype: Any) -> str:
    return np.dtype(dtype).name if dtype in HALVES else ""


def given_dtype(dtype: Any) -> Any:
    """Returns the dtype in which a kernel called here would get an array of some dtype."""
    half = PLANNED_FOR.value.next_half() if PLANNED_FOR.value is not None else ""
    return np.dtype(half if half and dtype == FLOAT32 else dtype)


@overload
def half_inputs(kernel: F, *, float32: int | str | Sequence[int | str] = ...) -> F: ...
@overload
def half_inputs(
    kernel: None = None, *, float32: int | str | Sequence[int | str] = ...
) -> Callable[[F], F]: ...
def half_inputs(
    kernel: Callable[..., Any] | None = None, *, float32: int | str | Sequence[int | str] = ()
) -> Any:
    """Tells `autocast` that a kernel may run on 16-bit inputs.

    A fused kernel (cuDNN or Pallas attention, Triton, an FFI call, Transformer Engine) computes in
    the dtype of its operands. In a float32 model that is float32, which the kernel may be slow at
    or reject. Autocast cannot look into kernels, so by default it leaves their inputs in float32.
    ``torch.amp.custom_fwd(cast_inputs=...)`` does the same in PyTorch.

    Args:
        kernel: Any function that JAX can trace. If None, a decorator is returned.
        float32: The arguments that stay float32: a position, a name, or a sequence of these.

    Returns:
        A function of the same signature. Under `autocast`, its float32 array arguments, also those
        in pytrees, are cast to the 16-bit dtype of the policy, or of the region or override around
        the call. The surrounding function sees 16-bit results as float32, but the plan treats them
        as 16-bit. The kernel itself runs unchanged, and so does its own derivative, which gets
        cotangents in the dtypes of the kernel's results. Under a float32 policy, in a float32
        region and outside of autocast the kernel runs unchanged.

    Raises:
        TypeError: If ``kernel`` is not callable.
        ValueError: If ``float32`` does not name an argument of the kernel.

    Example:
        >>> import functools, jax, jax.numpy as jnp, mpjax
        >>> @mpjax.half_inputs
        ... def attention(q, k, v):
        ...     assert q.dtype != jnp.float32  # as cuDNN's does
        ...     return jax.nn.dot_product_attention(q, k, v)
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> mpjax.autocast(lambda x: attention(x, x, x), "mixed_bfloat16")(x).dtype
        dtype('float32')
    """
    if kernel is None:
        return Decorator(HalfInputs, float32=_places(float32))
    return HalfInputs(kernel, float32)


class HalfInputs(Wrapped):
    """A kernel that runs on 16-bit inputs: what `half_inputs` returns."""

    def __init__(self, kernel: Callable[..., Any], float32: Any) -> None:
        check_callable(kernel, "kernel")
        super().__init__(kernel, float32)
        self.kept = _positions_and_names(kernel, float32)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kernel, kept = self.fun, self.kept
        name = getattr(kernel, "__name__", type(kernel).__name__)
        current = PLANNED_FOR.value
        if current is None:
            return kernel(*args, **kwargs)
        half, mark = current.next_half(), f"{KERNEL}{name}"
        if current.numbers is not None:
            # By this number `overridden` knows the call: each trace counts in the same order.
            mark = f"{mark}#{current.numbers.count}"
            current.numbers.count += 1
        if not half:
            # A kernel may consist of operations that autocast knows, and would cast.
            with jax.named_scope(f"{REGION}{FLOAT32.name}"):
                return kernel(*args, **kwargs)
        with jax.named_scope(mark):
            args = tuple(x if i in kept else _cast(x, FLOAT32, half) for i, x in enumerate(args))
            kwargs = {k: x if k in kept else _cast(x, FLOAT32, half) for k, x in kwargs.items()}
            # Autocast leaves everything inside unchanged.
            with jax.named_scope(PLANNED), PLANNED_FOR(None):
                results = kernel(*args, **kwargs)
            return _cast(results, np.dtype(half), FLOAT32)


def _cast(tree: Any, old: Any, new: Any) -> Any:
    """Casts the arrays of dtype ``old`` in a tree to ``new``, and leaves other leaves unchanged."""
    return jax.tree.map(
        lambda x: jax.lax.convert_element_type(x, new) if is_array(x) and x.dtype == old else x,
        tree,
    )


ARGS, KWARGS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


def _positions_and_names(kernel: Callable[..., Any], chosen: Any) -> Collection[int | str]:
    """Returns the positions and names of the chosen arguments, as far as they have both."""
    chosen = _places(chosen)
    try:
        parameters = list(inspect.signature(kernel).parameters.values())
    except (TypeError, ValueError):  # the signature is not known
        return frozenset(chosen)
    variadic = {p.kind for p in parameters} & {ARGS, KWARGS}
    pairs = [(i, p.name) for i, p in enumerate(parameters) if p.kind not in variadic]
    keys: set[int | str] = set(chosen)
    for one in chosen:
        both = {key for pair in pairs if one in pair for key in pair}
        taken = KWARGS in variadic if isinstance(one, str) else ARGS in variadic and one >= 0
        if not both and not taken:
            names = ", ".join(f"{i} {p.name!r}" for i, p in enumerate(parameters))
            raise ValueError(
                f"float32={brief(one)} is not an argument of the kernel. Choose one of these "
                f"positions and names: {names or 'none, the kernel has no arguments'}."
            )
        keys |= both
    return frozenset(keys)


def _places(chosen: Any) -> tuple[int | str, ...]:
    places = (chosen,) if isinstance(chosen, int | str) else chosen
    if not isinstance(places, Collection) or any(
        isinstance(one, bool) or not isinstance(one, int | str) for one in places
    ):
        raise ValueError(
            f"float32={brief(chosen)} must be the position or name of an argument that stays "
            "float32, or a sequence of these."
        )
    return tuple(places)
