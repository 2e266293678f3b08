"""Optax transformations: float32 masters of half weights, and updates skipped when not finite."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mpjax._src.dtypes import FLOAT32
from mpjax._src.errors import brief
from mpjax._src.patterns import name_of, path_of
from mpjax._src.policy import Policy
from mpjax._src.training.transaction import counted, gated_update
from mpjax._src.trees import all_finite, cast_like, is_half, is_one_bool, widen


class MasterWeightsState(NamedTuple):
    """State of `with_master_weights`.

    Attributes:
        masters: The parameters' tree with float32 masters for half leaves; ``optax.MaskedNode()``
            stands for every other leaf. An empty tuple if no parameter is half.
        inner_state: The state of the inner optimizer, built on float32.
    """

    masters: Any
    inner_state: optax.OptState


# In place of a tree of nodes without masters: flattening and rebuilding it costs every step time.
NO_MASTERS: tuple[()] = ()


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


def with_master_weights(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Lets an optimizer work in float32 on parameters that are stored in half.

    The state keeps a float32 master of every half parameter; ``inner`` sees float32 gradients and
    float32 parameters, so that weight decay and trust ratios are right and small updates are not
    rounded away. The updates of half parameters are float32 differences to the *rounded* masters:
    after ``optax.apply_updates`` parameters equal their masters rounded to half, bit for bit,
    except where float32 addition cannot get there (a value that shrinks by more than about 2**12
    in one step, -0.0), which the next step corrects, and a float16 parameter that has overflowed to
    infinity, which no addition brings back. `build_train_step` has neither exception.

    Args:
        inner: Any optax optimizer.

    Returns:
        An optax transformation; extra arguments of ``update`` are handed to ``inner``.

    Raises:
        TypeError: If ``inner`` is no optimizer.
        ValueError: From ``update``, if it is called without ``params``, with parameters of other
            dtypes than ``init`` saw, or with the state of another optimizer.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.with_master_weights(optax.sgd(1e-3))
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> state = optimizer.init(params)
        >>> for _ in range(8):  # in bfloat16 alone, 1 - 0.001 is 1 again
        ...     updates, state = optimizer.update(jnp.ones(1, jnp.bfloat16), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params[0])
        0.9921875

    Micikevicius et al. 2017, section 3.1; Apex O2, paddle.amp.decorate(master_weight=True).
    """
    inner = as_optimizer(inner, "inner")

    def init(params):
        masters = jax.tree.map(
            lambda p: p.astype(FLOAT32) if is_half(p) else optax.MaskedNode(), params
        )
        if not jax.tree.leaves(masters):
            masters = NO_MASTERS
        return MasterWeightsState(masters, inner.init(_with_masters(params, masters)))

    def update(updates, state, params=None, **extra_args):
        check_kind(state, MasterWeightsState, "with_master_weights")
        if params is None and not _are_none(state.masters):
            raise ValueError(
                "with_master_weights: update was called without params. Call "
                "optimizer.update(grads, state, params): updates of half parameters are "
                "differences to their masters."
            )
        full = None if params is None else _with_masters(params, state.masters)
        grads, inner_state = widen(updates), state.inner_state
        trained = grads if full is None else full
        with _for_state(lambda: check_state(inner.init, inner_state, trained, "state.inner_state")):
            updates, inner_state = inner.update(grads, inner_state, full, **extra_args)
        if _are_none(state.masters):
            return updates, MasterWeightsState(NO_MASTERS, inner_state)

        def advance(param, master, update):
            return master if not is_half(param) or update is None else master + widen(update)

        def difference(param, master, update):
            if not is_half(param) or update is None:
                return update
            return master.astype(param.dtype).astype(FLOAT32) - param.astype(FLOAT32)

        masters = jax.tree.map(advance, params, state.masters, updates)
        updates = jax.tree.map(difference, params, masters, updates)
        return updates, MasterWeightsState(masters, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _are_none(masters: Any) -> bool:
    return isinstance(masters, tuple) and masters == NO_MASTERS


def _with_masters(params: Any, masters: Any) -> Any:
    """Returns the parameters with masters in the place of half ones."""

    if _are_none(masters):  # whatever the tree of parameters: a node for each costs time
        masters = jax.tree.map(lambda _: optax.MaskedNode(), params)
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
    trees: list[Any] = [jax.tree.structure(tree, is_leaf=is_masked) for tree in (params, masters)]
    wanted, found = trees
    if wanted != found:
        raise ValueError(
            "with_master_weights: the state belongs to other parameters: its masters are in "
            f"{brief(found)}, the parameters in {brief(wanted)}."
        )

    def choose(keys, param, master):
        if is_half(param) == isinstance(master, optax.MaskedNode):
            seen, now = ("float32", "half") if is_half(param) else ("half", "float32")
            raise ValueError(
                f"with_master_weights: {name_of('params', keys)} was {seen} when init saw it, and "
                f"is {now} now. Cast parameters before init, and keep their dtypes."
            )
        if is_half(param) and jnp.shape(master) != jnp.shape(param):
            raise ValueError(
                f"with_master_weights: {name_of('params', keys)} has shape {jnp.shape(param)}, but "
                f"its master {jnp.shape(master)}. The state belongs to other parameters."
            )
        return master if is_half(param) else param

    return jax.tree_util.tree_map_with_path(choose, params, masters)


def master_params(opt_state: optax.OptState, params: Any) -> Any:
    """Returns the float32 parameters: the masters, wherever the optimizer state keeps them.

    Args:
        opt_state: The state of an optimizer, with `with_master_weights` anywhere inside it (chain,
            masked, multi_transform, inject_hyperparams, MultiSteps), or without it.
        params: The parameters that the optimizer trains.

    Returns:
        A tree like ``params``. Half parameters that have a master are replaced by it; half ones
        without one are widened, being the only copy there is; all others are handed through.

    Raises:
        ValueError: If the state holds masters for other parameters than these.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = mpjax.with_master_weights(optax.adam(1e-3)).init(params)
        >>> str(mpjax.master_params(state, params)["w"].dtype)
        'float32'

    Apex's amp.master_params.
    """

    def is_state(node):
        return isinstance(node, MasterWeightsState)

    found = {}
    for state in filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)):
        for keys, master in jax.tree_util.tree_leaves_with_path(state.masters):
            found[keys] = master

    def full(keys, param):
        master = found.pop(keys, None)
        if master is None:
            return widen(param)
        if jnp.shape(master) != jnp.shape(param):
            raise ValueError(
                f"opt_state: the master of {path_of(keys)!r} has shape {jnp.shape(master)}, but "
                f"the parameter has {jnp.shape(param)}. They belong to different models."
            )
        return master

    tree = jax.tree_util.tree_map_with_path(full, params)
    if found:
        raise ValueError(
            f"opt_state holds masters for {sorted(map(path_of, found))[:5]}, which are not in "
            "params. Pass the tree of parameters that the optimizer was initialized with."
        )
    return tree


def in_full_precision(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Shows an optimizer half gradients and parameters in float32, without keeping masters.

    The state of ``inner`` and its updates are float32, so no dtype drifts; only the sum that
    ``optax.apply_updates`` makes is rounded to half.

    Args:
        inner: Any optax optimizer.

    Returns:
        An optax transformation; extra arguments of ``update`` are handed to ``inner``.
    """
    inner = as_optimizer(inner, "inner")

    def init(params):
        return inner.init(widen(params))

    def update(updates, state, params=None, **extra_args):
        return inner.update(widen(updates), state, widen(params), **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def under_policy(
    policy: Policy, optimizer: optax.GradientTransformation, argument: str
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that works in float32, on masters if the policy keeps them."""
    keep_masters = with_master_weights if policy.master_weights else in_full_precision
    return keep_masters(as_optimizer(optimizer, argument))


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

    def check():
        if params is not None:
            check_state(inner.init, state, params, "state.inner_state")

    with _for_state(check):
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
def _for_state(check: Callable[[], None]) -> Iterator[None]:
    """Where an optimizer fails, says so if the reason is a state of another one."""
    try:
        yield
    except Exception:
        check()
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


def apply_updates(params: Any, updates: Any, opt_state: optax.OptState) -> Any:
    """Returns the updated parameters, exactly equal to their rounded masters where there are any.

    Args:
        params: Parameters in the dtypes that they are stored in.
        updates: What the optimizer returned.
        opt_state: The state that the optimizer returned with them.
    """
    added = jax.tree.map(
        lambda p, u: p if u is None else p + u.astype(p.dtype), widen(params), updates
    )
    return cast_like(master_params(opt_state, added), params)
