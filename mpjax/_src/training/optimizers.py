"""Optax transformations: `skip_nonfinite`, and checks that a state belongs to its optimizer."""

import contextlib
import inspect
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
        skipped_steps: The total number of skipped updates, an int32 scalar.
        consecutive_skips: The number of updates skipped in a row up to now, an int32 scalar.
    """

    inner_state: optax.OptState
    skipped_steps: jax.Array
    consecutive_skips: jax.Array


def skip_nonfinite(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Skips the updates of an optimizer when its gradients are not finite.

    A skipped update is zero and leaves the inner state unchanged, bit for bit. Skips are counted. A
    gradient that is not finite is never applied, whereas ``optax.apply_if_finite`` applies it after
    a number of failures; use `raise_if_diverged` to stop instead. If several optimizers are wrapped
    (as in ``optax.multi_transform``), each checks only the gradients that it receives.

    Args:
        inner: Any optax optimizer.

    Returns:
        An optax transformation. ``update(..., finite=False)`` skips the update too, for a check of
        your own. Other extra arguments are passed to ``inner``.

    Raises:
        TypeError: If ``inner`` is not an optax optimizer.
        ValueError: From ``update``, if ``finite`` is not one bool, or the state belongs to another
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
        # Two arrays, because one buffer cannot be donated twice.
        zeros = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return SkipNonfiniteState(inner.init(params), *zeros)

    def update(updates, state, params=None, *, finite=True, **extra_args):
        if not is_one_bool(finite):
            raise ValueError(f"finite={brief(finite)} must be one bool for all gradients.")
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
    """Returns an optimizer's updates and new state if ``finite``, else zeros and the old state.

    Raises:
        ValueError: If the state belongs to another optimizer.
    """

    def update(state, grads, params):
        return inner.update(grads, state, params, **extra_args)

    with for_state(inner, state, params):
        return gated_update(finite, update, state, grads, params)


def check_kind(state: Any, kind: type, name: str) -> None:
    """Raises a ValueError if an optimizer's state is not an instance of ``kind``."""
    if not isinstance(state, kind):
        raise ValueError(
            f"state is a {type(state).__name__}, not the {kind.__name__} of {name}: it belongs to "
            "another optimizer. Pass the state that init or the last update of this one returned."
        )


def check_state(init: Callable[..., Any], state: Any, params: Any, argument: str) -> None:
    """Raises a ValueError if ``init(params)`` would return other arrays than ``state`` holds."""

    def arrays(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {f"{path_of(keys)} {list(jnp.shape(leaf))}" for keys, leaf in leaves}

    wanted, found = arrays(jax.eval_shape(init, params)), arrays(state)
    if wanted == found:
        return
    differences = " and ".join(
        f"{verb} {', '.join(sorted(names)[:3])}"
        for verb, names in (("lacks", wanted - found), ("holds", found - wanted))
        if names
    )
    raise ValueError(
        f"{argument} belongs to another optimizer, or to parameters of other shapes or dtypes: it "
        f"{differences}. Pass the state that init of this optimizer returned for these parameters, "
        "or restore a checkpoint that was written with it."
    )


@contextlib.contextmanager
def for_state(
    inner: optax.GradientTransformationExtraArgs, state: Any, params: Any
) -> Iterator[None]:
    """Replaces the error of a failing optimizer, if its state belongs to another optimizer.

    Without ``params`` the right state is unknown, and the error is raised as it is.
    """
    try:
        yield
    except Exception:
        if params is not None:
            check_state(inner.init, state, params, "state.inner_state")
        raise


def is_optimizer(value: Any) -> bool:
    """Returns whether a value has the functions of an optax optimizer."""
    return hasattr(value, "init") and hasattr(value, "update")


def shown(update: Any) -> str:
    """Returns the name of an optimizer, such as "chain(trace, scale)", by its update function."""
    known = inspect.isfunction(update) or inspect.ismethod(update)
    inside = inspect.getclosurevars(update).nonlocals if known else {}
    parts = []
    for value in inside.values():
        for part in jax.tree.leaves(value, is_leaf=is_optimizer):
            part = part.update if is_optimizer(part) else part
            if "update" in getattr(part, "__name__", ""):
                parts.append(shown(part))
    name = getattr(update, "__qualname__", type(update).__name__).split(".")[0]
    if name == "with_extra_args_support":
        return parts[0]
    return f"{name}({', '.join(parts)})" if parts else name


def as_optimizer(
    optimizer: optax.GradientTransformation, argument: str
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer whose ``update`` ignores unknown extra arguments."""
    if isinstance(optimizer, type) or not is_optimizer(optimizer):
        raise TypeError(
            f"{argument}={brief(optimizer)} must be an optax optimizer with init and update, such "
            "as optax.adamw(1e-3)."
        )
    return optax.with_extra_args_support(optimizer)
