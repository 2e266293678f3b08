"""Kernels that want half: what they are given while a function is traced under `autocast`.

A kernel looks at the dtypes of its operands when it is traced, so a plan made afterwards comes too
late for it. What autocast would give it is known while it is traced: a context that JAX's caches
know of, so that a jit traced outside of autocast is not taken for one inside.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
import numpy as np

from mpjax._src.autocast.classify import override_of
from mpjax._src.autocast.graph import KERNEL, PLANNED, REGION, Block
from mpjax._src.contexts import PLANNED_FOR
from mpjax._src.dtypes import FLOAT32, HALVES
from mpjax._src.errors import brief
from mpjax._src.policy import Policy
from mpjax._src.trees import is_array

F = TypeVar("F", bound=Callable[..., Any])


class Tracing(NamedTuple):
    """What holds while a function is traced under autocast.

    Attributes:
        half: The half dtype that a kernel is given, by name; "" if float32.
        numbers: Numbers the calls of kernels, where a policy may speak of single ones.
        others: What calls of these numbers are given in its place.
        policy: The policy, with the dtype of the region around.
    """

    half: str
    policy: Policy
    numbers: "Numbers | None" = None
    others: tuple[tuple[int, str], ...] = ()

    def next_half(self) -> str:
        """Returns what the next call of a kernel is given."""
        return dict(self.others).get(self.numbers.given, self.half) if self.numbers else self.half


def overridden(block: Block, policy: Policy) -> dict[int, str]:
    """Returns the calls of kernels that an override gives another dtype, by number, and which.

    A call that several places of the program share, as a jit inside does, is float32 if one is.
    """
    found: dict[int, str] = {}
    for op in block.walk():
        boundary = op.kernel and PLANNED not in op.scopes
        chosen = override_of(op, policy) if boundary else None
        if chosen and _name(chosen[1]) != _name(policy.compute_dtype):
            number, name = int(op.kernel.partition("#")[2] or -1), _name(chosen[1])
            found[number] = min(name, found.get(number, name))
    return found


class Numbers:
    """A count. Compared by identity, so that each is a context of its own to JAX's caches."""

    def __init__(self) -> None:
        self.given = 0


def tracing(policy: Policy, **options: Any) -> contextlib.AbstractContextManager[Any]:
    """Tells kernels that what is traced inside will be planned under a policy."""
    return PLANNED_FOR(Tracing(_name(policy.compute_dtype), policy, **options))


@contextlib.contextmanager
def region(dtype: Any) -> Iterator[None]:
    """Tells kernels of the region around them. Outside of autocast it changes nothing."""
    current = PLANNED_FOR.value
    if current is None:
        yield
    else:
        policy = dataclasses.replace(current.policy, compute_dtype=dtype)
        with PLANNED_FOR(Tracing(_name(dtype), policy)):
            yield


def current_policy() -> Policy | None:
    """Returns the policy under which the code that asks is being traced.

    For code that chooses by precision: a kernel of its own, a smaller epsilon, a check.

    Returns:
        The `Policy` of the innermost `autocast` (or training step that casts operation by
        operation) around the call, with the ``compute_dtype`` of the region around it; None
        outside of autocast. The code itself still sees float32 arrays.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> def normalized(x):
        ...     policy = mpjax.current_policy()
        ...     half = policy is not None and policy.compute_dtype == jnp.float16
        ...     return x / jnp.sqrt(jnp.sum(x**2) + (1e-4 if half else 1e-8))
        >>> mpjax.current_policy() is None
        True

    ``torch.is_autocast_enabled`` and ``torch.get_autocast_dtype`` in one.
    """
    current = PLANNED_FOR.value
    return None if current is None else current.policy


def _name(dtype: Any) -> str:
    return np.dtype(dtype).name if dtype in HALVES else ""


def given_dtype(dtype: Any) -> Any:
    """Returns what a kernel is given, here and now, of an array of some dtype."""
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
    """Gives a kernel half inputs under `autocast`, as it would be given by casts by hand.

    A fused kernel (cuDNN or Pallas attention, Triton, an FFI call, Transformer Engine) computes in
    the dtype of its operands, which in a float32 model is float32, or refuses that. Autocast does
    not look into kernels, so it leaves them as they are. This tells it that one may run in half.

    Args:
        kernel: Any function that JAX can trace; if None, a decorator is returned.
        float32: Arguments that stay float32, by position or name: one of them or several.

    Returns:
        A function of the same signature. While it is traced under `autocast`, float32 arrays among
        its arguments, pytrees of them too, arrive in the half dtype of the policy, or of the region
        or override around the call; half arrays among its results are float32 to the function
        around it, and half to the plan. The kernel runs as it is written, and so does its own
        derivative, whose cotangents arrive in the dtypes of its results. Under a float32 policy,
        in a float32 region, and outside of autocast, it is the kernel itself.

    Raises:
        TypeError: If ``kernel`` is not callable.
        ValueError: If ``float32`` names no argument of the kernel.

    Example:
        >>> import functools, jax, jax.numpy as jnp, mpjax
        >>> @mpjax.half_inputs
        ... def attention(q, k, v):
        ...     assert q.dtype != jnp.float32  # as cuDNN's does
        ...     return jax.nn.dot_product_attention(q, k, v)
        >>> x = jnp.ones((1, 4, 2, 8))
        >>> mpjax.autocast(lambda x: attention(x, x, x), "mixed_bfloat16")(x).dtype
        dtype('float32')

    As ``torch.amp.custom_fwd(cast_inputs=)`` does in PyTorch.
    """
    if kernel is None:
        return functools.partial(_half_inputs, float32=float32)
    return _half_inputs(kernel, float32)


def _half_inputs(kernel: Callable[..., Any], float32: Any) -> Callable[..., Any]:
    if not callable(kernel):
        raise TypeError(f"kernel={brief(kernel)} is not callable. Legal is a function.")
    kept = _positions_and_names(kernel, float32)
    name = getattr(kernel, "__name__", type(kernel).__name__)

    @functools.wraps(kernel, updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        current = PLANNED_FOR.value
        if current is None:
            return kernel(*args, **kwargs)
        half, mark = current.next_half(), f"{KERNEL}{name}"
        if current.numbers is not None:
            mark = f"{mark}#{current.numbers.given}"
            current.numbers.given += 1
        if not half:
            with jax.named_scope(f"{REGION}{FLOAT32.name}"):
                return kernel(*args, **kwargs)
        with jax.named_scope(mark):
            args = tuple(x if i in kept else _cast(x, FLOAT32, half) for i, x in enumerate(args))
            kwargs = {k: x if k in kept else _cast(x, FLOAT32, half) for k, x in kwargs.items()}
            # What is inside runs as it is written.
            with jax.named_scope(PLANNED), PLANNED_FOR(None):
                results = kernel(*args, **kwargs)
            return _cast(results, np.dtype(half), FLOAT32)

    return wrapped


def _cast(tree: Any, old: Any, new: Any) -> Any:
    """Casts the arrays of one dtype in a tree, and leaves the rest as it is."""
    return jax.tree.map(
        lambda x: jax.lax.convert_element_type(x, new) if is_array(x) and x.dtype == old else x,
        tree,
    )


def _positions_and_names(kernel: Callable[..., Any], chosen: Any) -> Collection[int | str]:
    """Returns both the positions and the names of some arguments, as far as they have both."""
    chosen = (chosen,) if isinstance(chosen, int | str) else tuple(chosen)
    try:
        parameters = list(inspect.signature(kernel).parameters.values())
    except (TypeError, ValueError):  # nobody knows them
        return frozenset(chosen)
    kinds = {p.kind for p in parameters}
    found: set[int | str] = set()
    for one in chosen:
        for place, p in enumerate(parameters):
            if one in (place, p.name) and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                found |= {place, p.name}
        if one not in found and not _taken(one, kinds, len(parameters)):
            names = ", ".join(f"{i} {p.name!r}" for i, p in enumerate(parameters))
            raise ValueError(
                f"float32={brief(one)} is no argument of the kernel. Legal are positions and "
                f"names: {names or 'it has none'}."
            )
        found.add(one)
    return frozenset(found)


def _taken(one: Any, kinds: Collection[Any], count: int) -> bool:
    """Tells whether ``*args`` or ``**kwargs`` of a kernel take an argument."""
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return several[isinstance(one, str)] in kinds and (isinstance(one, str) or one >= 0)
