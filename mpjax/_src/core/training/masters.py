"""Optax transformations that preserve small updates of 16-bit weights: masters, Kahan sums.

The inner optimizer works in float32, on the full values of 16-bit parameters. The optimizer's state
stores the bits that a 16-bit parameter lacks: a float32 master, or a residual.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._src.core.base.dtypes import BFLOAT16, FLOAT32
from mpjax._src.core.base.errors import brief, did_you_mean, is_state, misplaced
from mpjax._src.core.base.patterns import name_of, path_of
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import is_narrow_array, widen
from mpjax._src.core.policy.fields import CHOICES
from mpjax._src.core.training import optimizers, residuals
from mpjax._src.core.training.frozen import Reads

# The dtype that is stored with a 16-bit parameter, by the policy's `masters`; see `residuals`.
KINDS = FLOAT32, residuals.UINT16, residuals.UINT8
STORAGES = dict(zip(CHOICES["masters"].values, KINDS, strict=True))
COMPENSATED = "compensation"  # in the parameter's own dtype


@public("mpjax.optim")
@optimizers.of_ours
class MasterWeightsState(NamedTuple):
    """State of `with_master_weights` and `with_kahan_summation`.

    Attributes:
        masters: A tree like the parameters. For each 16-bit leaf that ``inner`` may change it
            contains a float32 master, a uint16 or uint8 residual (split masters), or a compensation
            in the parameter's own dtype (Kahan); for every other leaf ``optax.MaskedNode()``. An
            empty tuple if there is no such parameter.
        inner_state: The state of the inner optimizer, initialized with float32 parameters.
    """

    masters: Any
    inner_state: optax.OptState


# Replaces a tree of MaskedNodes, whose flattening and rebuilding would cost time in each step.
NO_MASTERS: tuple[()] = ()


def with_master_weights(
    inner: optax.GradientTransformation, storage: str = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Stores master weights of 16-bit parameters, so that the inner optimizer works in float32.

    ``inner`` sees float32 gradients and float32 parameters. Weight decay and trust ratios are
    therefore computed on full values, and small updates are not rounded away. ``storage`` says how
    the master of a 16-bit parameter is stored in the optimizer's state:

    - "float32": as a float32 array; 6 bytes a weight, parameter included. The parameter is its
      master rounded to nearest, ties to even.
    - "split": as the 16 bits that a bfloat16 parameter lacks; 4 bytes a weight. The masters are
      float32 numbers too; the parameter is rounded to nearest, ties away from zero. After the first
      tie, the gradients differ from those under "float32", and so do all later masters.
    - "split8": as 8 of these bits; 3 bytes a weight. Masters have 16 significant bits, so an update
      of less than 2**-17 of a weight is lost.

    The updates of 16-bit parameters are float32 differences to the *rounded* masters. After
    ``optax.apply_updates`` the parameters equal their masters rounded to 16 bits, bit for bit,
    except where a float32 addition cannot produce that value: a value that shrinks by more than
    about 2**12 in one step (bfloat16: 2**16), -0.0, subnormals if the device flushes them, and a
    parameter that has overflowed to infinity. Float32 masters correct such an error in the next
    step; a split master retains it, about one float32 rounding error at the former size of the
    weight. `build_train_step` has no such exceptions.

    Args:
        inner: Any optax optimizer.
        storage: "float32", "split" or "split8".

    Returns:
        An optax transformation. Extra arguments of ``update`` are passed to ``inner``.

    Raises:
        TypeError: If ``inner`` is not an optax optimizer.
        ValueError: If ``storage`` is unknown; from ``init``, if ``storage`` is split and a
            parameter is float16, whose bits are not a part of a float32 number; from ``update``, if
            it is called without ``params``, with parameters of other dtypes than in ``init``, or
            with the state of a different optimizer.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.optim.with_master_weights(optax.sgd(1e-3), storage="split")
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> state = optimizer.init(params)
        >>> for _ in range(8):  # in bfloat16 alone, 1 - 0.001 is 1 again
        ...     updates, state = optimizer.update(jnp.ones(1, jnp.bfloat16), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params[0]), str(state.masters.dtype)
        (0.9921875, 'uint16')

    Master weights are described by Micikevicius et al. 2017, "Mixed Precision Training", section
    3.1, and used by Apex O2 and paddle.amp.decorate(master_weight=True); split masters by the
    bfloat16 optimizers of DeepSpeed and FlashOptim (2026).
    """
    if storage not in STORAGES:
        raise ValueError(
            f"storage={brief(storage)} must be one of {', '.join(map(repr, STORAGES))}. It says "
            f"how master weights are stored.{did_you_mean(storage, STORAGES)}"
        )
    return _with_masters(inner, storage, "with_master_weights")


def with_kahan_summation(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Updates 16-bit parameters by Kahan summation, which compensates for rounding errors.

    The state stores the last rounding error of each 16-bit parameter, in the parameter's own dtype,
    and the next update adds it. This needs 4 bytes a weight, and stores 16 significant bits for
    bfloat16 and 22 for float16. ``with_master_weights(inner, storage="split")`` needs the same
    memory and stores all 24 bits, but only for bfloat16.

    Args:
        inner: Any optax optimizer. It sees float32 gradients, and the float32 sum of each 16-bit
            parameter and its compensation.

    Returns:
        An optax transformation. Extra arguments of ``update`` are passed to ``inner``.

    Raises:
        TypeError: If ``inner`` is not an optax optimizer.
        ValueError: From ``update``, as for `with_master_weights`.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.optim.with_kahan_summation(optax.sgd(1e-3))
        >>> params = jnp.ones(1, jnp.float16)
        >>> state = optimizer.init(params)
        >>> for _ in range(8):
        ...     updates, state = optimizer.update(jnp.full(1, 0.1), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> float(params[0])  # in float16 alone it stays 1
        0.9990234375

    Kahan 1965, "Further remarks on reducing truncation errors"; Zamirai et al. 2020, "Revisiting
    BFloat16 Training".
    """
    return _with_masters(inner, COMPENSATED, "with_kahan_summation")


def _with_masters(inner: Any, storage: str, name: str) -> optimizers.Optimizer:
    """Returns an optimizer that stores a master or residual of each 16-bit parameter."""
    inner = optimizers.as_optimizer(inner, "inner")

    def kind(dtype):
        return np.dtype(STORAGES.get(storage, dtype))

    def init(params, reads):
        def first(keys, param, frozen):
            if frozen or not is_narrow_array(param):
                return optax.MaskedNode()
            if kind(param.dtype).kind == "u" and param.dtype != BFLOAT16:
                raise ValueError(
                    f"{name_of('params', keys)} is {param.dtype}, but storage={storage!r} of "
                    f"{name} needs bfloat16 parameters: it splits a float32 master into a bfloat16 "
                    "parameter, which is its first 16 bits, and the remaining bits. Store the "
                    "parameters in bfloat16, or use storage='float32'."
                )
            return residuals.split(param.astype(FLOAT32), param.dtype, kind(param.dtype))[1]

        masters = jax.tree_util.tree_map_with_path(first, params, reads.flags(params))
        if not jax.tree.leaves(masters):
            masters = NO_MASTERS
        full = _full(params, masters, kind, name, reads)
        return MasterWeightsState(masters, optimizers.first_state(inner, full))

    def core(advance, state, params, reads):
        optimizers.check_kind(state, MasterWeightsState, name)
        if not _are_none(state.masters):
            optimizers.need_params(params, name)
        full = None if params is None else _full(params, state.masters, kind, name, reads)
        updates, inner_state = advance(state.inner_state, full)
        if _are_none(state.masters):  # no 16-bit parameters: the updates are applied as they are
            return updates, None, MasterWeightsState(NO_MASTERS, inner_state)

        def stored(param, master, value, update):
            if update is None or not is_narrow_array(param):
                return None, master
            return residuals.split(value + widen(update), param.dtype, kind(param.dtype))

        updates = reads.trained(updates, params)
        pairs = [stored(*row) for row in optimizers.by_leaf(params, state.masters, full, updates)]
        new, leaves = zip(*pairs, strict=True)
        masters = jax.tree.unflatten(jax.tree.structure(params), leaves)
        return updates, new, MasterWeightsState(masters, inner_state)

    return optimizers.made(inner, init, core)


def _are_none(masters: Any) -> bool:
    return isinstance(masters, tuple) and masters == NO_MASTERS


def _full(params, masters, kind: Callable[[Any], np.dtype], name: str, reads: Reads) -> Any:
    """Returns the parameters, with trained 16-bit ones replaced by their full float32 values."""

    if _are_none(masters):
        # Spelled out for the comparison of structures, and for the map over both trees.
        masters = jax.tree.map(lambda _: optax.MaskedNode(), params)
    is_masked = optimizers.is_masked
    trees: list[Any] = [jax.tree.structure(t, is_leaf=is_masked) for t in (params, masters)]
    wanted, of_masters = trees
    if wanted != of_masters:
        raise ValueError(
            f"{name}: the state was created for other parameters: the tree of its masters is "
            f"{brief(of_masters)}, the tree of the parameters {brief(wanted)}."
        )

    def choose(keys, param, master, frozen):
        if frozen:
            return param
        # 16-bit parameters have a master, and only they do, unless dtypes have changed since init.
        if is_narrow_array(param) == optimizers.is_masked(master):
            seen, now = ("float32", "16-bit") if is_narrow_array(param) else ("16-bit", "float32")
            raise ValueError(
                f"{name}: {name_of('params', keys)} was {seen} in init, but is {now} now. Cast "
                "parameters before init, and do not change their dtypes afterwards. If it was "
                "frozen and is trained now, call init again, which makes its master."
            )
        if not is_narrow_array(param):
            return param
        if jnp.shape(master) != jnp.shape(param):
            raise ValueError(
                f"{name}: {name_of('params', keys)} has shape {jnp.shape(param)}, but its master "
                f"has shape {jnp.shape(master)}. The state was created for other parameters."
            )
        if master.dtype != kind(param.dtype):
            raise ValueError(
                f"{name}: the state has {master.dtype} for {name_of('params', keys)}, which is "
                f"{param.dtype}, but this optimizer stores {kind(param.dtype)}. Either the state "
                "has another storage of masters, or the parameters were cast after init."
            )
        return residuals.full(param, master)

    return jax.tree_util.tree_map_with_path(choose, params, masters, reads.flags(params))


def master_params(opt_state: optax.OptState, params: Any) -> Any:
    """Returns the parameters in float32: their master weights, if the optimizer's state has them.

    Args:
        opt_state: The state of any optimizer. `with_master_weights` and `with_kahan_summation` may
            be anywhere inside it (chain, masked, multi_transform, inject_hyperparams, MultiSteps).
        params: The parameters that the optimizer trains.

    Returns:
        A tree like ``params``. 16-bit parameters are replaced by their float32 masters, whole or
        split; those without a master are widened to float32. All others are returned as they are.

    Raises:
        ValueError: If the state contains masters of other parameters, or if ``params`` contains an
            optimizer's state, or ``opt_state`` is ``params``.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = mpjax.optim.with_master_weights(optax.adam(1e-3)).init(params)
        >>> str(mpjax.optim.master_params(state, params)["w"].dtype)
        'float32'

    Apex has the same function as amp.master_params.
    """
    if is_state(params):
        raise ValueError(
            "params is the state of an optimizer. The order is master_params(opt_state, params)."
        )
    optimizers.check_params(params)
    flat = [jax.tree.flatten(tree) for tree in (opt_state, params)]
    (leaves, structure), (others, other) = flat
    if leaves and structure == other and all(map(operator.is_, leaves, others)):  # type: ignore[operator]
        raise ValueError(
            "opt_state is the parameters, which have no master weights. Pass the state that "
            "optimizer.init(params) or the last update returned."
        )
    # A state of an optimizer of the user's has arrays.
    may_be = is_state(opt_state) or any(hasattr(x, "shape") for x in leaves)
    if not may_be and (opt_state is None or misplaced(opt_state)):
        raise TypeError(
            f"opt_state={brief(opt_state)} must be the state of an optimizer.{misplaced(opt_state)}"
        )
    return _map_masters(params, opt_state, full_value)


def _states_in(tree: Any) -> list[MasterWeightsState]:
    is_state = lambda node: isinstance(node, MasterWeightsState)  # noqa: E731
    return [node for node in jax.tree.leaves(tree, is_leaf=is_state) if is_state(node)]


def apply_updates(params: Any, updates: Any, opt_state: optax.OptState) -> Any:
    """Returns the updated parameters, exactly equal to their rounded float32 masters.

    Without float32 masters it returns what ``optax.apply_updates`` returns. The updates and the
    state are those that the optimizer returned.
    """

    def exact(param, master):
        # The sum of a parameter and its update may miss the master by a rounding. A split master
        # has no such value of its own: the sum is all that is known here.
        is_master = master is not None and master.dtype == FLOAT32
        return master.astype(param.dtype) if is_master else param

    return _map_masters(jax.tree.map(optimizers.added, params, updates), opt_state, exact)


def full_value(param: Any, master: Any) -> Any:
    """Returns the float32 value of a parameter and its master or residual, which may be None."""
    return widen(param) if master is None else residuals.full(param, master)


def stored(opt_state: Any, params: Any) -> list[tuple[jax.Array, ...]]:
    """Returns for each parameter the arrays that hold it: itself, and its master or residual."""

    def arrays(param, master):
        return (param,) if master is None else (param, master)

    by_parameter = _map_masters(params, opt_state, arrays)
    return jax.tree.structure(params).flatten_up_to(by_parameter)  # type: ignore[attr-defined]


def _map_masters(params: Any, opt_state: Any, make: Callable[[Any, Any], Any]) -> Any:
    """Returns ``make(param, master)`` for each parameter; ``master`` is its master or residual."""
    by_path = {}
    for state in _states_in(opt_state):
        # Several states, of parts of the parameters, may be anywhere in those of other optimizers.
        # The paths in them are those of the parameters.
        for keys, master in jax.tree_util.tree_leaves_with_path(state.masters):
            by_path[keys] = master

    def full(keys, param):
        master = by_path.pop(keys, None)
        if master is not None and jnp.shape(master) != jnp.shape(param):
            raise ValueError(
                f"opt_state: the master of {path_of(keys)!r} has shape {jnp.shape(master)}, but "
                f"the parameter has shape {jnp.shape(param)}. They belong to different models."
            )
        return make(param, master)

    tree = jax.tree_util.tree_map_with_path(full, params)
    if by_path:
        raise ValueError(
            f"opt_state has masters of {sorted(map(path_of, by_path))[:5]}, which are not in "
            "params. Pass the tree of parameters that the optimizer was initialized with."
        )
    return tree
