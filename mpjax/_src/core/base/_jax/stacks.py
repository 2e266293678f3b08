"""What the loops of autocast stack is written once: nothing fills its memory with zeros before.

A scan writes the results of its iterations into arrays that JAX fills with zeros first. A GPU then
writes all that a loop stores for the backward pass twice. Each entry is overwritten, so on one GPU
a marked scan starts with `jax.lax.empty`, which may hold anything. XLA does not partition that.
"""

import types
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Literal
from jax.extend.core.primitives import name_p, scan_p
from jax.interpreters import mlir

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base._jax.barriers import GPUS, may_be_partitioned
from mpjax._src.core.base._jax.matmuls import is_marked
from mpjax._src.core.base._jax.programs import open_jaxpr, scan_counts

MARK = "mpjax_stack"


def stacking() -> Any:
    """Returns a context in which scans are marked, and those of their derivatives."""
    return set_xla_metadata(**{MARK: 1})


def _scan(*args: Any, **params: Any) -> Any:
    """Runs a scan as JAX does, but stacks in memory that nothing was written to.

    XLA finds out that two results are the same only if they start as the same array.
    """
    jaxpr, _ = open_jaxpr(params["jaxpr"])
    same = _same(jaxpr)
    results, started = iter(jaxpr.outvars[scan_counts(params)[1] :]), dict[Any, Any]()

    def start(prefix: tuple[int, ...], length_spec: Any, aval: Any) -> Any:
        value = _first(next(results), same)
        if id(value) not in started:
            started[id(value)] = _empty(prefix, length_spec, aval)
        return started[id(value)]

    # JAX's scan takes no arrays to stack in, so its own code runs with another `_empty_array`.
    own, (_, name) = internals.scan_impl, internals.home_of("empty_array")
    names = {**own.__globals__, name: start}
    return types.FunctionType(own.__code__, names)(*args, **params)


def _same(jaxpr: Any) -> dict[Any, Any]:
    """Returns values of a program that are others by another name, or handed through a call."""
    same = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive is name_p:
            same[eqn.outvars[0]] = eqn.invars[0]
        elif eqn.primitive.name in ("remat2", "jit"):
            inner, _ = open_jaxpr(eqn.params["jaxpr"])
            inside, taken = _same(inner), dict(zip(inner.invars, eqn.invars, strict=True))
            for out, value in zip(eqn.outvars, inner.outvars, strict=True):
                value = _first(value, inside)
                if not isinstance(value, Literal) and value in taken:
                    same[out] = taken[value]
    return same


def _first(value: Any, same: dict[Any, Any]) -> Any:
    while not isinstance(value, Literal) and value in same:
        value = same[value]
    return value


def _empty(prefix: tuple[int, ...], length_spec: Any, aval: Any) -> Any:
    """Returns an array to stack results of a type in; zeros if they are no numbers on a device."""
    mesh, axes = aval.sharding.mesh, tuple(aval.mat.varying)
    explicit = not (mesh.empty or mesh.are_all_axes_auto or mesh.are_all_axes_manual)
    special = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    if special or explicit or aval.memory_space != jax.memory.Space.Device:
        return internals.empty_array(prefix, length_spec, aval)
    empty = jax.lax.empty((*prefix, *aval.shape), aval.dtype)
    # In a shard_map, the type of what is stacked says over which axes it varies.
    return jax.lax.pcast(empty, axes, to="varying") if axes else empty


def _lower(ctx: Any, *args: Any, **params: Any) -> Any:
    alone = is_marked(ctx, MARK) and not may_be_partitioned(ctx)
    run = _scan if alone else internals.scan_impl
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args, **params)


@internals.at_first_plan
def _register() -> None:
    internals.scan_impl, internals.empty_array  # noqa: B018  (missing ones leave JAX's own rule)
    for platform in GPUS:
        mlir.register_lowering(scan_p, internals.guarded(_lower), platform=platform)
