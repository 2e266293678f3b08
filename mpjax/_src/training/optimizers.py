"""Optax transformations: updates skipped when not finite; whose state it is that one is given."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._src.errors import brief
from mpjax._src.patterns import path_of
from mpjax._src.training.transaction import counted, gated_update
from mpjax._src.trees import all_finite, is_one_bool


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`.

    Attributes:
        inner_state: The state of the inner optimizer.
        skipped_steps: How many updates were skipped in all, an int32 scalar.
        consecutive_skips: How many were skipped in a row up to now, an int32 scalar.
    """

    inner_state: optax.OptState
    skipped_steps: jax.Array
    consecutive_skips: jax.Array


def skip_nonfinite(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Skips the updates of an optimizer when its gradients are not finite.

    A skipped update leaves the inner state untouched, bit for bit, and emits zeros. Skips are
    counted and never given up on: a bad gradient is never applied (`optax.apply_if_finite` applies
    it after a number of failures; see `raise_if_diverged` to stop instead). Of several optimizers,
    each judges the gradients that it is given.

    Args:
        inner: Any optax optimizer.

    Returns:
        An optax transformation. ``update(..., finite=verdict)`` adds a verdict of the caller's:
        where it is False the update is skipped too. Other extra arguments are handed to ``inner``.

    Raises:
        TypeError: If ``inner`` is no optimizer.
        ValueError: From ``update``, if ``finite`` is not one bool, or the state is that of another
            optimizer.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.skip_nonfinite(optax.adam(1e-3))
        >>> params = jnp.ones(2)
        >>> state = optimizer.init(params)
        >>> updates, state = optimizer.update(jnp.array([1.0, jnp.nan]), state, params)
        >>> bool((updates == 0).all()), int(state.skipped_steps)
        (True, 1)
    """
    inner = as_optimizer(inner, "inner")

    def init(params):
        # Two arrays, not one twice: a buffer cannot be donated twice.
        zeros = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return SkipNonfiniteState(inner.init(params), *zeros)

    def update(updates, state, params=None, *, finite=True, **extra_args):
        if not is_one_bool(finite):
            raise ValueError(
                f"finite={brief(finite)} must be one bool: a verdict on all gradients."
            )
        check_kind(state, SkipNonfiniteState, "skip_nonfinite")
        finite = jnp.logical_and(all_finite(updates), finite)
        updates, inner_state = updated_if(
            finite, inner, updates, state.inner_state, params, extra_args
        )
        return updates, SkipNonfiniteState(inner_state, **counted(state, finite))

    return optax.GradientTransformationExtraArgs(init, update)


def updated_if(
    finite: jax.Array,
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: optax.OptState,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, optax.OptState]:
    """Returns what an optimizer returns if ``finite``, else zeros and its state as it was.

    Raises:
        ValueError: If the state is that of another optimizer.
    """

    def update(state, grads, params):
        return inner.update(grads, state, params, **extra_args)

    with for_state(inner, state, params):
        return gated_update(finite, update, state, grads, params)


def check_kind(state: Any, kind: type, name: str) -> None:
    """Raises a ValueError if the state of an optimizer is not of its own kind."""
    if not isinstance(state, kind):
        raise ValueError(
            f"state is a {type(state).__name__}, not the {kind.__name__} of {name}: it belongs to "
            "another optimizer. Pass what init or the last update of this one returned."
        )


def check_state(init: Callable[..., Any], state: Any, params: Any, argument: str) -> None:
    """Raises a ValueError if ``init(params)`` would make a state of other arrays than ``state``."""

    def arrays(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {f"{path_of(keys)} {list(jnp.shape(leaf))}" for keys, leaf in leaves}

    wanted, found = arrays(jax.eval_shape(init, params)), arrays(state)
    if wanted == found:
        return
    listed = lambda names: ", ".join(sorted(names)[:3]) or "nothing else"  # noqa: E731
    raise ValueError(
        f"{argument} belongs to another optimizer, or to other parameters: it lacks "
        f"{listed(wanted - found)}, and holds {listed(found - wanted)}. Pass what init of this "
        "optimizer made of these parameters, or restore a checkpoint that was written with it."
    )


@contextlib.contextmanager
def for_state(
    inner: optax.GradientTransformationExtraArgs, state: Any, params: Any
) -> Iterator[None]:
    """Where an optimizer fails, says so if the reason is a state of another one.

    Without ``params`` it is not known what its own would be.
    """
    try:
        yield
    except Exception:
        if params is not None:
            check_state(inner.init, state, params, "state.inner_state")
        raise


def as_optimizer(
    optimizer: optax.GradientTransformation, argument: str
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer whose ``update`` ignores extra arguments that it does not know."""
    if isinstance(optimizer, type) or not (
        hasattr(optimizer, "init") and hasattr(optimizer, "update")
    ):
        raise TypeError(
            f"{argument}={brief(optimizer)} must be an optax optimizer with init and update, such "
            "as optax.adamw(1e-3)."
        )
    return optax.with_extra_args_support(optimizer)
