"""Replicas and shards in shard_map and pmap: averages, and one check and one norm for all.

Replicas hold the same parameters and average their gradients. Shards hold parts of the parameters,
so each of them sees a part of the gradients: what is decided or computed of all gradients must be
reduced over the axes that split them. By default `jax.shard_map` records over which axes of the
mesh an array varies, so nothing has to be named. With ``check_vma=False`` only the user knows.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import HALVES
from mpjax._src.core.base.errors import PrecisionWarning, brief, did_you_mean, warn_user
from mpjax._src.core.base.trees import cast_like, is_key, reduced_together, varies_over, widen
from mpjax._src.core.policy.policy import Policy

Axes = tuple[str, ...]
# Primitives that combine the parts of devices.
SUMS = "psum", "pmax", "pmin", "all_gather"


# ---- replicas ------------------------------------------------------------------------------------


def axes_of(axis_name: Any) -> tuple[str, ...]:
    """Returns the names of the mapped axes of a user's ``axis_name`` argument."""
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if axis_name is None:
        return ()
    valid = all(isinstance(name, str) and name for name in names)
    if not (names and valid and len({*names}) == len(names)):
        raise ValueError(
            f"axis_name={brief(axis_name)} must be the name of a mapped axis, such as 'data', a "
            "tuple of several, or None under plain jit."
        )
    return tuple(names)


def check_axis(name: str, axis_name: Any) -> None:
    """Raises a ValueError if no axis of this name is mapped here."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        mapped = jax.sharding.get_abstract_mesh().manual_axes
        raise ValueError(
            f"axis_name={axis_name!r}: no axis {name!r} is mapped here. Mapped axes: "
            f"{', '.join(map(repr, mapped)) or 'none'}.{did_you_mean(name, mapped)} Make the call "
            "within jax.shard_map, jax.pmap or jax.vmap over an axis of that name. Under plain jit "
            "with sharded arrays, leave axis_name out."
        ) from None


def local_to(axes: tuple[str, ...], axis_name: Any, tree: Any) -> Any:
    """Checks that these axes of ``axis_name`` are mapped, and marks arrays as local to them."""
    for name in axes:
        check_axis(name, axis_name)
    manual = jax.sharding.get_abstract_mesh().manual_axes  # others are those of vmap
    if not (local := tuple(name for name in axes if name in manual)):
        return tree
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, local, to="varying"), tree)


def averaged(tree: Any, axis_name: Any) -> Any:
    """Averages floating leaves over replicas in float32 or wider; copies others from the first."""

    def from_first(leaf):
        # By a sum with zeros, whose result shard_map knows to be the same on all replicas.
        first = jax.lax.axis_index(axis_name) == 0
        return jax.lax.psum(jnp.where(first, leaf, jnp.zeros_like(leaf)), axis_name)

    def average(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.lax.pmean(leaf, axis_name)
        if is_key(leaf):
            key = from_first(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(key, impl=jax.random.key_impl(leaf))
        return from_first(leaf).astype(leaf.dtype)  # bools are summed as integers

    return jax.tree.map(average, widen(tree))


def averaged_state(new: Any, local: Any, before: Any, axis_name: Any) -> Any:
    """Averages what has changed of a state, in its dtypes; the rest is as before it was local."""

    def average(x, y, old):
        return old if x is y else cast_like(averaged(x, axis_name), x)

    return jax.tree.map(average, new, local, before)


def average_gradients(grads: Any, axis_name: Any, policy: Policy, loss_scale: Any) -> Any:
    """Averages gradients over replicas in float32, or in 16 bits if the policy has reduce=half."""
    half = policy.compute_dtype if policy.reduce == "half" else None
    if half not in HALVES:
        return averaged(grads, axis_name)
    # Scaled again, because float16 would flush unscaled gradients to zero.
    scale = jnp.asarray(loss_scale.loss_scale, jnp.float32)
    sent = jax.tree.map(lambda g: (g.astype(jnp.float32) * scale).astype(half), grads)
    sums = jax.lax.pmean(sent, axis_name)
    return jax.tree.map(lambda g: g.astype(jnp.float32) / scale, sums)


# ---- shards --------------------------------------------------------------------------------------


class Shards(NamedTuple):
    """The axes over which parameters are split."""

    each: tuple[Axes, ...]  # the axes that split each parameter, in the order of the leaves
    # The axes over which the state itself has several loss scales and counts: there each member of
    # an ensemble has its own check.
    held: Axes
    known: bool  # whether arrays tell the axes over which they vary

    @property
    def all(self) -> Axes:
        return tuple(dict.fromkeys(axis for axes in self.each for axis in axes))

    def norm(self, tree: Any) -> jax.Array:
        """Returns the norm of the whole of a tree of which each device has a part."""
        if not self.all:
            return jnp.sqrt(_squares(jax.tree.leaves(tree)))
        groups: dict[Axes, list[Any]] = {}  # one sum over devices for each, not for each leaf
        for leaf, axes in zip(jax.tree.leaves(tree), self.each, strict=True):
            groups.setdefault(axes, []).append(leaf)
        squares = (
            jax.lax.psum(_squares(group), axes) if axes else _squares(group)
            for axes, group in groups.items()
        )
        return jnp.sqrt(sum(squares))

    def agreed(self, verdict: jax.Array) -> jax.Array:
        """Returns whether a check is true on all shards."""
        axes = without(varies_over(verdict), self.held) if self.known else self.all
        return _on_all(verdict, axes)


def agreed(verdict: jax.Array, count: Any) -> jax.Array:
    """Returns whether a check is true on all shards, as far as `jax.shard_map` knows them.

    Over the axes that ``count``, a number of the state, varies over too, each has its own.
    """
    return _on_all(verdict, without(varies_over(verdict), varies_over(count)))


def _squares(leaves: Sequence[Any]) -> jax.Array:
    """Returns the sum of all squares. Those of small arrays of one type are added first."""
    sums = (
        jnp.sum(sum(jnp.real(x * jnp.conj(x)) for x in group))
        if len(group) > 1
        else optax.tree.norm(group, squared=True)
        for group in reduced_together(leaves)
    )
    return jnp.asarray(sum(sums))


def _on_all(verdict: jax.Array, axes: Axes) -> jax.Array:
    return jax.lax.pmin(verdict.astype(jnp.int32), axes).astype(bool) if axes else verdict


def shards_of(grads: Any, specs: Any, count: Any, axis_name: Any, replicas: Axes) -> Shards:
    """Returns the axes over which gradients are split, after their average over replicas.

    ``specs`` is the user's ``param_specs``, ``axis_name`` is too, and ``replicas`` are its axes.
    ``count`` is a counter of the state, which varies where the state does.

    Raises:
        ValueError: If ``specs`` does not fit.
    """
    mesh = jax.sharding.get_abstract_mesh()
    mapped = [axis for axis in mesh.manual_axes if mesh.shape[axis] > 1]
    state_axes = varies_over(count)
    # Without check_vma a mark is forgotten at once, so marking a number shows whether marks count.
    marked = bool(mapped) and bool(varies_over(jax.lax.pcast(0.0, mapped[0], to="varying")))
    leaves, structure = jax.tree.flatten(grads)
    if specs is not None and mapped:
        each = _of_specs(specs, structure, replicas, mesh.manual_axes)
        return Shards(tuple(without(axes, state_axes) for axes in each), state_axes, marked)
    if not marked:
        warn_if_unknown(axis_name, replicas)
    each = [without(varies_over(leaf), state_axes) for leaf in leaves]
    return Shards(tuple(each), state_axes, marked)


def warn_if_unknown(axis_name: Any, replicas: Axes) -> None:
    """Warns within a shard_map that maps more axes than replicas, but does not check its arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    others = [a for a in without(mesh.manual_axes, replicas) if mesh.shape[a] > 1]
    if not (replicas and others) or varies_over(jax.lax.pcast(0.0, others[0], to="varying")):
        return
    warn_user(
        f"axis_name={axis_name!r}, but this shard_map maps {', '.join(map(repr, others))} too, and "
        "with check_vma=False it is unknown whether parameters are split over that axis. If they "
        "are, a gradient that overflows is skipped on its own shard alone, the loss scales of the "
        "shards part, and grad_norm is that of one shard. Leave check_vma at True, or pass "
        "build_train_step the in_specs of the parameters as param_specs=. If nothing is split over "
        "that axis, add it to axis_name.",
        PrecisionWarning,
    )


def without(axes: Iterable[str], others: Iterable[str]) -> Axes:
    return tuple(axis for axis in axes if axis not in {*others})


def check_specs(specs: Any) -> None:
    """Raises an error if ``param_specs`` is not a tree of partition specs."""
    leaves = jax.tree.leaves(specs, is_leaf=_is_spec)
    if specs is not None and not (leaves and all(map(_is_spec, leaves))):
        raise ValueError(
            f"param_specs={brief(specs)} must be a tree of jax.sharding.PartitionSpec for the "
            "parameters, or one for all of them, as in shard_map's in_specs, or None."
        )


def check_reductions(update: Any, shards: Shards, grads: Any, state: Any, extra_args: Any) -> None:
    """Refuses an optimizer that reduces arrays to single numbers, of which a device has a part."""
    if not shards.all:
        return
    names, communicates = [], False
    run = lambda *args: update(*args[:3], **args[3])  # noqa: E731
    waiting = [jax.make_jaxpr(run)(grads, state.opt_state, state.params, extra_args).jaxpr]
    while waiting:
        for eqn in waiting.pop().eqns:
            waiting += [getattr(inner, "jaxpr", inner) for inner in _jax.inner_jaxprs(eqn)]
            name, over = eqn.primitive.name, eqn.params.get("axes", eqn.params.get("axis_name"))
            axes = over if isinstance(over, tuple) else (over,)
            communicates |= name.startswith(SUMS) and not {*shards.all}.isdisjoint(axes)
            if name.startswith("reduce_") and eqn.invars[0].aval.ndim:
                names += [name] * (not eqn.outvars[0].aval.ndim)
    # A sum over these axes anywhere in it says that its author knows of the shards.
    if names and not communicates:
        raise ValueError(
            f"optimizer: its update reduces arrays to single numbers ({names[0]}), as clipping by "
            "the global norm and trust ratios do, but parameters are split over "
            f"{', '.join(map(repr, shards.all))}: each device would see its own part alone. Clip "
            "by the norm of all parts, which the step passes to update as grad_norm= (see "
            "docs/training.md#clip-gradients), or reduce over that axis in the optimizer "
            "(jax.lax.psum)."
        )


def _of_specs(specs: Any, structure: Any, replicas: Sequence[str], mapped: Any) -> list[Axes]:
    whole = jax.tree.unflatten(structure, [0] * structure.num_leaves)  # None: a gradient not read
    try:
        full = jax.tree.broadcast(specs, whole, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            f"param_specs={brief(specs)} does not fit the parameters: {error}"
        ) from error
    return [
        without((axis for axis in _axes_in(spec) if axis in mapped), replicas)
        for spec in jax.tree.leaves(full, is_leaf=_is_spec)
    ]


def _axes_in(spec: Any) -> Axes:
    parts = (part if isinstance(part, tuple) else (part,) for part in spec)
    return tuple(axis for part in parts for axis in part if axis is not None)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)
