"""A program that `jax.shard_map` runs on each device, as one program without devices.

Each axis of the mesh becomes an axis of the arrays, mapped by `jax.vmap` under its name: an
exchange is then a sum, a slice or a permutation over it. So the equations inside a shard_map can be
run one by one, as all others are.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.higher_order import CALL, MAP, higher_order
from mpjax._src.core.program.rebuild import rebuild

# What an equation of shard_map may fail with where `jax.vmap` has no rule for it.
UNKNOWN = (NotImplementedError, TypeError, ValueError, KeyError, AssertionError)


def _mapped(
    body: Callable[..., Any], ins: Sequence[Any], sizes: dict[Any, int]
) -> Callable[..., Any]:
    """Returns the program of one device as one of arrays with a leading axis for each mesh axis."""
    for axis, size in reversed(sizes.items()):
        over = [0 if any(axis in names for names in dims) else None for dims in ins]
        body = jax.vmap(body, over, axis_name=axis, axis_size=size)
    return body


@functools.lru_cache(maxsize=64)  # a loop runs its equations in each turn
def unmapped(eqn: Any) -> Any:
    """Returns the closed jaxpr of a shard_map's operands and results without a shard_map, or None
    if an operation inside cannot be mapped over an array's axis."""
    params = eqn.params
    sizes = {a: n for a, n in params["mesh"].shape.items() if a in _jax.manual_axes(params)}
    (inside,) = higher_order(eqn.primitive.name).wire(eqn)
    ins = [
        _names(spec, v.aval.ndim) for spec, v in zip(params["in_specs"], eqn.invars, strict=True)
    ]

    def whole(*arrays):
        body = _mapped(functools.partial(_evaluate, inside.program), ins, sizes)
        outs = body(*(_split(x, dims, sizes) for x, dims in zip(arrays, ins, strict=True)))
        return [
            _joined(x, _names(spec, v.aval.ndim), sizes).reshape(v.aval.shape)
            for x, spec, v in zip(outs, params["out_specs"], eqn.outvars, strict=True)
        ]

    try:
        return _jax.trace(whole, [_plain(v.aval) for v in eqn.invars], "shard_map")
    except UNKNOWN:
        return None


_jax.cleared_with_jax(unmapped)


# ---- arrays -------------------------------------------------------------------------------------


def _names(spec: Any, ndim: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes that split each dimension of an array, the outermost first."""
    entries = (*spec, *[None] * (ndim - len(spec)))
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def _split(x: jax.Array, dims: Sequence[tuple[str, ...]], sizes: dict[str, int]) -> jax.Array:
    """Returns an array with the mesh axes that split it in front, in the order of the mesh."""
    order = [axis for names in dims for axis in (*names, None)]  # None: what each device has
    shape: list[int] = []
    for size, names in zip(x.shape, dims, strict=True):
        devices = [sizes[axis] for axis in names]
        shape += [*devices, size // math.prod(devices)]
    front = [order.index(axis) for axis in sizes if axis in order]
    rest = [i for i, axis in enumerate(order) if axis is None]
    return jnp.transpose(jnp.reshape(x, shape), front + rest)


def _joined(x: jax.Array, dims: Sequence[tuple[str, ...]], sizes: dict[str, int]) -> jax.Array:
    """Returns an array with its mesh axes, which are in front, before the dimensions they split.

    What no axis splits is the same on all its devices: the first one's is taken.
    """
    splitting = {axis for names in dims for axis in names}
    x = x[tuple(slice(None) if axis in splitting else 0 for axis in sizes)]
    front = [axis for axis in sizes if axis in splitting]
    order: list[int] = []
    for i, names in enumerate(dims):
        order += [*map(front.index, names), len(front) + i]
    return jnp.transpose(x, order)


def _plain(aval: Any) -> Any:
    """Returns an aval without a mesh."""
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


# ---- the program --------------------------------------------------------------------------------


def _evaluate(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluates the program of a device where a mesh axis is an axis of `jax.vmap`."""
    inner, consts = _jax.open_jaxpr(jaxpr)
    env = dict(zip((*inner.constvars, *inner.invars), (*consts, *args), strict=True))

    def read(atom):
        if not isinstance(atom, _jax.Literal):
            return env[atom]
        # The type that JAX keeps with a number has the mesh of the shard_map.
        return np.asarray(atom.val) if hasattr(atom.val, "dtype") else atom.val

    for eqn in inner.eqns:
        with _jax.location(eqn, eqn.source_info.name_stack), _no_mesh():
            outs = _run(eqn, [read(atom) for atom in eqn.invars])
        env |= zip(eqn.outvars, outs, strict=True)
    return [read(atom) for atom in inner.outvars]


def _no_mesh() -> Any:
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _run(eqn: Any, ins: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in SAME:
        return ins
    if name in EXCHANGES:
        return EXCHANGES[name](ins, params)
    row = higher_order(name)
    if row.kind == MAP:
        raise NotImplementedError("A shard_map inside a shard_map is run as it is.")
    programs = [inside.program for inside in row.wire(eqn)]
    if row.kind == CALL:
        return _evaluate(programs[0], *ins)
    free = {k: None for k, p in params.items() if isinstance(p, jax.sharding.Sharding)}
    eqn = eqn.replace(params={**params, **free})
    if not programs:
        return _jax.bind(eqn, ins)
    # Traced again: the arrays inside have no mesh either.
    avals = [[*map(_plain, _jax.in_avals(program))] for program in programs]
    return rebuild(eqn, [functools.partial(_evaluate, p) for p in programs], avals, ins)


# Only their types change: what varies over the devices, and where arrays lie.
SAME = frozenset({"pvary", "pcast", "reshard"})

# With checks of what varies (check_vma), these have names of their own.
EXCHANGES: dict[str, Callable[[list[Any], dict[str, Any]], list[Any]]] = {
    "psum_invariant": lambda ins, p: list(jax.lax.psum(tuple(ins), p["axes"])),
    "all_gather_invariant": lambda ins, p: [
        jax.lax.all_gather(x, p["axis_name"], axis=p["all_gather_dimension"], tiled=p["tiled"])
        for x in ins
    ],
}
