"""Optax transformations that keep what small updates add to half weights.

An optimizer works in float32, on full values of half parameters. What a half parameter lacks of its
full value is kept in the optimizer's state (a master, or a residual), drawn by lot, or lost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._src.dtypes import BFLOAT16, FLOAT32
from mpjax._src.errors import brief, did_you_mean
from mpjax._src.patterns import name_of, path_of
from mpjax._src.policy import CHOICES
from mpjax._src.training import residuals
from mpjax._src.training.optimizers import as_optimizer, check_kind
from mpjax._src.training.stored import (
    Optimizer,
    added,
    by_leaf,
    inner_update,
    is_masked,
    made,
    need_params,
)
from mpjax._src.trees import is_half, widen

# What stands beside a half parameter, by the policy's name for it; see `residuals`.
KINDS = FLOAT32, residuals.UINT16, residuals.UINT8
STORAGES = dict(zip(CHOICES["masters"].values, KINDS, strict=True))
COMPENSATED = "compensation"  # in the parameter's own dtype


class MasterWeightsState(NamedTuple):
    """State of `with_master_weights` and `with_kahan_summation`.

    Attributes:
        masters: The parameters' tree with what is kept beside half leaves: float32 masters; uint16
            or uint8 residuals, where masters are split; in the parameter's own dtype, what its
            rounding took (Kahan). ``optax.MaskedNode()`` stands for every other leaf. An empty
            tuple if no parameter is half.
        inner_state: The state of the inner optimizer, built on float32.
    """

    masters: Any
    inner_state: optax.OptState


# In place of a tree of nodes without masters: flattening and rebuilding it costs every step time.
NO_MASTERS: tuple[()] = ()


def with_master_weights(
    inner: optax.GradientTransformation, storage: str = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Lets an optimizer work in float32 on parameters that are stored in half.

    ``inner`` sees float32 gradients and float32 parameters, so that weight decay and trust ratios
    are right and small updates are not rounded away. The state keeps what half parameters lack:

    - "float32": a float32 master of each, 6 bytes a weight with the parameter. Parameters are their
      masters rounded to the nearest, ties to even.
    - "split": the 16 bits that a bfloat16 parameter lacks, 4 bytes a weight. Masters are the same
      float32 numbers, bit for bit; parameters are rounded to the nearest, ties away from zero.
    - "split8": 8 of these bits, 3 bytes a weight. Masters have 16 significant bits: an update of
      less than 2**-17 of a weight is lost.

    The updates of half parameters are float32 differences to the *rounded* masters: after
    ``optax.apply_updates`` parameters equal their masters rounded to half, bit for bit, except
    where float32 addition cannot get there: a value that shrinks by more than about 2**12 in one
    step (bfloat16: 2**16), -0.0, subnormals where the device flushes them, and a parameter that has
    overflowed to infinity, which no addition brings back. With float32 masters the next step
    corrects that; a split master is then off by as much as the addition was, about one rounding of
    float32 at the weight's former size. `build_train_step` has no such exception.

    Args:
        inner: Any optax optimizer.
        storage: "float32", "split" or "split8".

    Returns:
        An optax transformation; extra arguments of ``update`` are handed to ``inner``.

    Raises:
        TypeError: If ``inner`` is no optimizer.
        ValueError: If ``storage`` is not known; from ``init``, if it is split and a parameter is
            float16, which is no part of a float32 number; from ``update``, if it is called without
            ``params``, with parameters of other dtypes than ``init`` saw, or with the state of
            another optimizer.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.with_master_weights(optax.sgd(1e-3), storage="split")
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> state = optimizer.init(params)
        >>> for _ in range(8):  # in bfloat16 alone, 1 - 0.001 is 1 again
        ...     updates, state = optimizer.update(jnp.ones(1, jnp.bfloat16), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params[0]), str(state.masters.dtype)
        (0.9921875, 'uint16')

    Micikevicius et al. 2017, section 3.1; Apex O2, paddle.amp.decorate(master_weight=True). Split:
    DeepSpeed's and FlashOptim's (2026) bfloat16 optimizers.
    """
    if storage not in STORAGES:
        raise ValueError(
            f"storage={brief(storage)} must be one of {', '.join(map(repr, STORAGES))}: what is "
            f"kept of a master beside a half parameter.{did_you_mean(storage, STORAGES)}"
        )
    return _beside(inner, storage, "with_master_weights")


def with_kahan_summation(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Adds the updates of half parameters with a compensation for what rounding takes.

    The state keeps, in each half parameter's own dtype, what its last rounding took; the next
    update adds it again. 4 bytes a weight, and 16 significant bits for bfloat16 (22 for float16).
    ``with_master_weights(inner, storage="split")`` takes as much and holds all 24 bits, but knows
    bfloat16 alone.

    Args:
        inner: Any optax optimizer. It sees float32 gradients, and the float32 sum of each half
            parameter and its compensation.

    Returns:
        An optax transformation; extra arguments of ``update`` are handed to ``inner``.

    Raises:
        TypeError: If ``inner`` is no optimizer.
        ValueError: From ``update``, as `with_master_weights`.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.with_kahan_summation(optax.sgd(1e-3))
        >>> params = jnp.ones(1, jnp.float16)
        >>> state = optimizer.init(params)
        >>> for _ in range(8):
        ...     updates, state = optimizer.update(jnp.full(1, 0.1), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params[0])  # in float16 alone it stays 1
        0.9990234375

    Kahan 1965; Zamirai et al., "Revisiting BFloat16 Training", 2020.
    """
    return _beside(inner, COMPENSATED, "with_kahan_summation")


def _beside(inner: optax.GradientTransformation, storage: str, name: str) -> Optimizer:
    """Keeps something beside each half parameter."""
    inner = as_optimizer(inner, "inner")

    def kind(dtype):
        return np.dtype(STORAGES.get(storage, dtype))

    def init(params):
        def first(keys, param):
            if not is_half(param):
                return optax.MaskedNode()
            if kind(param.dtype).kind == "u" and param.dtype != BFLOAT16:
                raise ValueError(
                    f"{name_of('params', keys)} is {param.dtype}, and {name} has "
                    f"storage={storage!r}: a master is split into a bfloat16 parameter, which is "
                    "the first 16 bits of a float32 number, and the rest. Store parameters in "
                    "bfloat16, or take storage='float32'."
                )
            return residuals.split(param.astype(FLOAT32), param.dtype, kind(param.dtype))[1]

        masters = jax.tree_util.tree_map_with_path(first, params)
        if not jax.tree.leaves(masters):
            masters = NO_MASTERS
        return MasterWeightsState(masters, inner.init(_full(params, masters, kind, name)))

    def core(grads, state, params, extra_args):
        check_kind(state, MasterWeightsState, name)
        if not _are_none(state.masters):
            need_params(params, name)
        full = None if params is None else _full(params, state.masters, kind, name)
        updates, inner_state = inner_update(inner, grads, state.inner_state, full, extra_args)
        if _are_none(state.masters):
            return updates, None, MasterWeightsState(NO_MASTERS, inner_state)

        def stored(param, beside, value, update):
            if update is None or not is_half(param):
                return None, beside
            return residuals.split(value + widen(update), param.dtype, kind(param.dtype))

        pairs = [stored(*row) for row in by_leaf(params, state.masters, full, updates)]
        new, besides = zip(*pairs, strict=True)
        masters = jax.tree.unflatten(jax.tree.structure(params), besides)
        return updates, new, MasterWeightsState(masters, inner_state)

    return made(init, core)


def _are_none(masters: Any) -> bool:
    return isinstance(masters, tuple) and masters == NO_MASTERS


def _full(params: Any, masters: Any, kind: Callable[[Any], np.dtype], name: str) -> Any:
    """Returns the parameters with the full values of half ones in their places."""

    if _are_none(masters):  # whatever the tree of parameters: a node for each costs time
        masters = jax.tree.map(lambda _: optax.MaskedNode(), params)
    trees: list[Any] = [jax.tree.structure(tree, is_leaf=is_masked) for tree in (params, masters)]
    wanted, found = trees
    if wanted != found:
        raise ValueError(
            f"{name}: the state belongs to other parameters: its masters are in {brief(found)}, "
            f"the parameters in {brief(wanted)}."
        )

    def choose(keys, param, beside):
        if is_half(param) == is_masked(beside):
            seen, now = ("float32", "half") if is_half(param) else ("half", "float32")
            raise ValueError(
                f"{name}: {name_of('params', keys)} was {seen} when init saw it, and is {now} now. "
                "Cast parameters before init, and keep their dtypes."
            )
        if not is_half(param):
            return param
        if jnp.shape(beside) != jnp.shape(param):
            raise ValueError(
                f"{name}: {name_of('params', keys)} has shape {jnp.shape(param)}, but its master "
                f"{jnp.shape(beside)}. The state belongs to other parameters."
            )
        if beside.dtype != kind(param.dtype):
            raise ValueError(
                f"{name}: the state keeps {beside.dtype} beside {name_of('params', keys)}, of "
                f"{param.dtype}, and this optimizer {kind(param.dtype)}. The state is that of "
                "another storage of masters, or parameters were cast after init."
            )
        return residuals.full(param, beside)

    return jax.tree_util.tree_map_with_path(choose, params, masters)


def master_params(opt_state: optax.OptState, params: Any) -> Any:
    """Returns the float32 parameters: the masters, wherever the optimizer state keeps them.

    Args:
        opt_state: The state of an optimizer, with `with_master_weights` or `with_kahan_summation`
            anywhere inside it (chain, masked, multi_transform, inject_hyperparams, MultiSteps), or
            without them.
        params: The parameters that the optimizer trains.

    Returns:
        A tree like ``params``. Half parameters that have a master, whole or split, are replaced by
        it; half ones without one are widened, being the only copy there is; all others are handed
        through.

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
    return _with_kept(params, opt_state, full_value)


def apply_updates(params: Any, updates: Any, opt_state: optax.OptState) -> Any:
    """Returns the updated parameters, exactly equal to their float32 masters, rounded.

    Where masters are split, or there are none, what ``optax.apply_updates`` returns.

    Args:
        params: Parameters in the dtypes that they are stored in.
        updates: What the optimizer returned.
        opt_state: The state that the optimizer returned with them.
    """

    def exact(param, beside):
        is_master = beside is not None and beside.dtype == FLOAT32
        return beside.astype(param.dtype) if is_master else param

    return _with_kept(jax.tree.map(added, params, updates), opt_state, exact)


def full_value(param: Any, beside: Any) -> Any:
    """Returns the float32 value of a parameter: what lies beside it may be None."""
    return widen(param) if beside is None else residuals.full(param, beside)


def stored(opt_state: Any, params: Any) -> list[tuple[jax.Array, ...]]:
    """Returns of each parameter the arrays that hold it: itself, and what lies beside it."""

    def arrays(param, beside):
        return (param,) if beside is None else (param, beside)

    held = _with_kept(params, opt_state, arrays)
    return jax.tree.structure(params).flatten_up_to(held)  # type: ignore[attr-defined]


def _with_kept(params: Any, opt_state: Any, make: Callable[[Any, Any], Any]) -> Any:
    """Returns what is made of each parameter and of what the state keeps beside it, or None."""

    def is_state(node):
        return isinstance(node, MasterWeightsState)

    found = {}
    for state in filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)):
        for keys, beside in jax.tree_util.tree_leaves_with_path(state.masters):
            found[keys] = beside

    def full(keys, param):
        beside = found.pop(keys, None)
        if beside is not None and jnp.shape(beside) != jnp.shape(param):
            raise ValueError(
                f"opt_state: the master of {path_of(keys)!r} has shape {jnp.shape(beside)}, but "
                f"the parameter has {jnp.shape(param)}. They belong to different models."
            )
        return make(param, beside)

    tree = jax.tree_util.tree_map_with_path(full, params)
    if found:
        raise ValueError(
            f"opt_state holds masters for {sorted(map(path_of, found))[:5]}, which are not in "
            "params. Pass the tree of parameters that the optimizer was initialized with."
        )
    return tree
