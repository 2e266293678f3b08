"""Placement of arrays: on which devices they are."""

import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mpjax._src.core.base.patterns import name_of

T = TypeVar("T")


def commit_like(tree: T, like: Any) -> T:
    """Commits uncommitted arrays to the devices of another tree's arrays, replicated.

    A step with one committed input returns only committed arrays, so an uncommitted array in the
    first state would make the step compile a second time. Traced arrays are returned as they are.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((tree, like))):
        return tree
    leaves = [x for x in jax.tree.leaves(like) if x.committed]
    if not leaves:
        return tree
    place = leaves[0].sharding
    if isinstance(place, NamedSharding):
        place = place.update(spec=PartitionSpec())
    return jax.tree.map(lambda x: x if x.committed else jax.device_put(x, place), tree)


def state_shardings(state: T, param_shardings: Any) -> T:
    """Returns the shardings of a whole training state, given those of its parameters.

    Optimizer state of a parameter's shape (master weights, moments, averages) is sharded like the
    parameter. State without one of its axes (Adafactor) is sharded like the remaining axes, and so
    are the scales of 8-bit moments if their last axis can be divided. Everything else, such as
    counters, the loss scale, the rng and the model state, is replicated.

    Args:
        state: A `TrainState`, flax's ``TrainState``, or the shapes of one
            (``jax.eval_shape(init, params)``).
        param_shardings: A sharding for each parameter, as a tree of the same structure or a prefix
            of it: ``jax.sharding.NamedSharding``, or ``jax.sharding.PartitionSpec`` if a mesh is
            set.

    Returns:
        The state with a sharding in place of each array, for ``jax.jit(init, out_shardings=...)``,
        ``jax.jit(step, out_shardings=(shardings, None))``, ``jax.device_put`` and
        ``mpjax.checkpoint.restore``.

    Raises:
        TypeError: If ``state`` has no ``params``, or a leaf of ``param_shardings`` is not a
            sharding.
        ValueError: If ``param_shardings`` is not a prefix of the parameters, or a sharding has more
            axes than its parameter.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax, optax
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> init, step = mpjax.build_train_step(lambda w, x: jnp.sum(w @ x), optax.adam(0.1))
        >>> w = jnp.ones((4, 4))
        >>> sharding = NamedSharding(mesh, P("data"))
        >>> where = mpjax.optim.state_shardings(jax.eval_shape(init, w), sharding)
        >>> optax.tree.get(where.opt_state, "mu").spec, where.step.spec
        (P('data',), P())
        >>> state = jax.jit(init, out_shardings=where)(w)

    Sharding optimizer state like the parameters is the method of ZeRO (Rajbhandari et al. 2020) and
    FSDP (Zhao et al. 2023).
    """
    if not hasattr(state, "params"):
        raise TypeError(
            f"state is a {type(state).__name__}, which has no params: it must be a TrainState, or "
            "the shapes of one (jax.eval_shape(init, params))."
        )
    by_path = _of_params(state.params, param_shardings)
    first = next(iter(by_path.values()), (None, PartitionSpec()))[1]
    # In the form of the user's shardings: with their mesh, or as a spec for the mesh that is set.
    everywhere = _with_spec(first, PartitionSpec())

    def place(keys: Any, leaf: Any) -> Any:
        for start in range(len(keys) + 1):  # the longest suffix of the path that is a parameter
            if row := by_path.get(keys[start:]):
                part = _part(*row, jnp.shape(leaf))
                return everywhere if part is None else part
        return everywhere

    return jax.tree_util.tree_map_with_path(place, state)


def _of_params(params: Any, shardings: Any) -> dict[Any, tuple[tuple[int, ...], Any]]:
    """Returns each parameter's shape and sharding, by its path."""
    try:
        spread = jax.tree.broadcast(shardings, params, is_leaf=_is_sharding)
    except ValueError as error:
        raise ValueError(
            f"param_shardings must have the structure of state.params, or a prefix of it: {error}"
        ) from None
    by_path = {}
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shardings = jax.tree.leaves(spread, is_leaf=_is_sharding)
    for (keys, leaf), sharding in zip(leaves, shardings, strict=True):
        _check_sharding(keys, sharding, jnp.shape(leaf))
        by_path[keys] = jnp.shape(leaf), sharding
    return by_path


def _is_sharding(x: Any) -> bool:
    return isinstance(x, NamedSharding | PartitionSpec)


def _check_sharding(keys: Any, sharding: Any, shape: tuple[int, ...]) -> None:
    if not _is_sharding(sharding):
        raise TypeError(
            f"{name_of('param_shardings', keys)}={sharding!r} must be a "
            "jax.sharding.NamedSharding, or a PartitionSpec where a mesh is set."
        )
    if len(_spec(sharding)) > len(shape):
        raise ValueError(
            f"{name_of('param_shardings', keys)}={_spec(sharding)} has more axes than its "
            f"parameter, which has shape {shape}."
        )


def _part(whole: tuple[int, ...], sharding: Any, shape: tuple[int, ...]) -> Any:
    """Returns the sharding of an array that has a parameter's shape, or lacks one of its axes.

    An array that is shorter along the last axis only contains one entry per block (scales).
    """
    spec = [*_spec(sharding), *[None] * (len(whole) - len(_spec(sharding)))]
    if shape == whole:
        return sharding
    for axis in range(len(whole)):
        # Of a square matrix either axis fits, and the first one counts. If it was the other one,
        # devices exchange more, but no number changes.
        if shape == whole[:axis] + whole[axis + 1 :]:
            return _with_spec(sharding, PartitionSpec(*spec[:axis], *spec[axis + 1 :]))
    if whole and shape[:-1] == whole[:-1] and len(shape) == len(whole):
        divides = _divides(sharding, spec[-1], shape[-1])
        return sharding if divides else _with_spec(sharding, PartitionSpec(*spec[:-1]))
    return None


def _divides(sharding: Any, names: Any, length: int) -> bool:
    """Returns whether the mesh axes divide a length, as XLA requires of a sharded axis."""
    mesh = getattr(sharding, "mesh", None) or jax.sharding.get_abstract_mesh()
    names = () if names is None else names if isinstance(names, tuple) else (names,)
    return length % math.prod(mesh.shape[name] for name in names) == 0


def _with_spec(sharding: Any, spec: PartitionSpec) -> Any:
    return sharding.update(spec=spec) if isinstance(sharding, NamedSharding) else spec


def _spec(sharding: Any) -> PartitionSpec:
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding
