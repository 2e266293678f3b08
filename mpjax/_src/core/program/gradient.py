"""Gradients of a traced function: checks its loss and its `argnums`, and runs forward and backward.

The reports share this module. They work on a traced function, which takes a flat list of arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.dtypes import is_float
from mpjax._src.core.base.errors import brief, check_flag
from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.trees import is_array, is_array_or_shape
from mpjax._src.core.program.modules import leaves_trained


def positions(tool: str, argnums: Any, count: int) -> set[int]:
    """Returns the positions that ``argnums`` selects of ``count`` positional arguments."""
    numbers = tuple(argnums) if isinstance(argnums, Sequence | set | frozenset) else (argnums,)
    if not count:
        raise ValueError(
            f"{tool}: argnums={brief(argnums)} counts positional arguments, but there are none. "
            "Pass the arguments to differentiate by position, not by name."
        )
    if not (numbers and all(_is_position(i, count) for i in numbers)):
        is_policy = isinstance(argnums, str) or hasattr(argnums, "compute_dtype")
        hint = " For a policy, pass mpjax.autocast(fun, policy) as the function." * is_policy
        raise ValueError(
            f"{tool}: argnums={brief(argnums)} must be positions of arguments, from 0 to "
            f"{count - 1}, because the function was called with {count}.{hint}"
        )
    chosen = {int(i) % count for i in numbers}
    if len(chosen) < len(numbers):
        raise ValueError(f"{tool}: argnums={brief(argnums)} names an argument twice. Name it once.")
    return chosen


def differentiated(tool: str, args: Any, kwargs: Any, argnums: Any) -> list[bool]:
    """Returns for each array argument whether the loss is differentiated with respect to it."""
    chosen = positions(tool, argnums, len(args))
    active = [
        i in chosen and trained and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
        for i, arg in enumerate(args)
        for leaf, trained in leaves_trained(arg)
        if is_array_or_shape(leaf)
    ]
    if not any(active):
        raise ValueError(
            f"{tool}: argnums={brief(argnums)}: these arguments contain no floating arrays, so "
            "there are no gradients. Choose others, or pass argnums=None for the forward pass "
            "alone."
        )
    return active + [False for leaf in jax.tree.leaves(kwargs) if is_array_or_shape(leaf)]


def _is_position(i: Any, count: int) -> bool:
    whole = isinstance(i, int | np.integer) and not isinstance(i, bool)
    return whole and -count <= i < count


def loss_of(outs: Any, has_aux: bool, tool: str = "") -> Any:
    """Returns the loss of what a function returned: all of it, or the first of ``(loss, aux)``."""
    check_flag("has_aux", has_aux)
    if not has_aux:
        return outs
    if isinstance(outs, (tuple, list)) and len(outs) == 2:
        return outs[0]
    raise TypeError(
        f"{tool}{': ' * bool(tool)}has_aux=True, so the function must return (loss, aux), but it "
        f"returned {_kind(outs)}.{loss_hint(outs, True)}"
    )


def is_loss(outs: Any, has_aux: bool, tool: str = "") -> bool:
    """Returns whether a result, or its shape, is a loss: one real floating number."""
    loss = loss_of(outs, has_aux, tool)
    return is_float(loss) and loss.shape == ()


def is_pair_of_loss(outs: Any) -> bool:
    """Returns whether an abstract result may be ``(loss, aux)``."""
    return isinstance(outs, tuple) and len(outs) == 2 and is_loss(outs, True)


def check_loss(outs: Any, has_aux: bool, tool: str = "") -> None:
    """Raises a TypeError if a function that is to be differentiated does not return a loss."""
    loss = loss_of(outs, has_aux, tool)
    if is_loss(loss, False) or (isinstance(loss, float) and not tool):
        return
    number, hint = "one real floating number of shape (), but it", loss_hint(loss, has_aux)
    raise TypeError(
        f"{tool}: to be differentiated, the function must return {number} returned {_kind(loss)}."
        f"{hint} For the forward pass alone, pass argnums=None."
        if tool
        else f"The loss must be {number} is {_kind(loss)}.{hint}"
    )


def _kind(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, (tuple, list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{brief(value)} ({type(value).__name__})"


def loss_hint(loss: Any, has_aux: bool) -> str:
    """Returns what to change in a function that returned something else than a loss."""
    if loss is None:
        return " Does the function lack a return statement?"
    if isinstance(loss, dict):
        return ' Return one entry, such as out["loss"]; others are aux, with has_aux=True.'
    pair = isinstance(loss, tuple) and not has_aux
    hint = " For (loss, aux) pass has_aux=True." if pair else ""
    return f" Losses of several examples are usually averaged: jnp.mean(losses).{hint}"


def check_result(tool: str, outs: Any, arrays: Sequence[Any]) -> None:
    """Raises a TypeError if a function returned, and changed, no array at all."""
    if not arrays:
        raise TypeError(
            f"{tool}: the function returned {brief(outs)}, which contains no array, so there is "
            f"nothing to report.{loss_hint(outs, True)}"
        )


class Pullback(NamedTuple):
    """A loss and its backward pass."""

    loss: Any
    aux: dict[str, Any]  # the arrays of ``aux``, by their paths
    residuals: Any  # the values that the forward pass stores for the backward pass, and its program
    # A function that runs the backward pass and returns the gradients.
    gradients: Callable[[], list[Any]]


def pull_back(
    run: Callable[..., Any],
    active: Sequence[bool],
    arrays: Sequence[Any],
    has_aux: bool,
    scaled: Callable[[Any], Any] = lambda loss: loss,
) -> Pullback:
    """Runs the forward pass of a function, and returns the loss with its backward pass.

    ``active`` says which arrays are differentiated. ``scaled`` is applied to the loss before the
    backward pass: a loss scale, say.
    """
    paths: list[str] = []

    def loss(moving):
        inputs = iter(moving)
        out = run(*[next(inputs) if m else a for a, m in zip(arrays, active, strict=True)])
        value, aux = out if has_aux else (out, ())
        pairs = jax.tree_util.tree_leaves_with_path(aux)
        pairs = [(keys, x) for keys, x in pairs if is_array(x)]
        # The paths of an aux are known while the function runs, and JAX returns arrays alone.
        paths[:] = [path_of(keys) for keys, _ in pairs]
        return scaled(value), (value, [x for _, x in pairs])

    moving = [a for a, m in zip(arrays, active, strict=True) if m]
    final, back, (value, aux) = jax.vjp(loss, moving, has_aux=True)
    return Pullback(
        value, dict(zip(paths, aux, strict=True)), back, lambda: back(jnp.ones_like(final))[0]
    )
