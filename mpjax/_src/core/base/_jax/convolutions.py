"""16-bit convolutions whose kernel gradients are summed over devices in float32.

A matmul can return the float32 accumulator of that gradient, but cuDNN has no
such convolution. So each device convolves its own part of the batch in 16 bits, and the results are
cast to float32 before they are summed.
"""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad, batching
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mpjax._src.core.base._jax.barriers import row_major
from mpjax._src.core.base._jax.matmuls import marked
from mpjax._src.core.base._jax.programs import bind, evaluate, trace
from mpjax._src.core.base._jax.wire import placed_freely, variant_of

conv_p = jax.lax.conv_general_dilated_p


def planned_conv(eqn: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the primitive and parameters of a convolution whose derivative is planned.

    The gradient by its kernel has the parameter ``sums``. If that is written with 16-bit operands,
    devices sum it in float32.
    """
    return _planned_p, {**eqn.params, "sums": False}


def _plain(x, y, *, half, preferred_element_type, **params):
    x, y = (jax.lax.convert_element_type(v, half) for v in (x, y))
    with marked():
        out = conv_p.bind(x, y, preferred_element_type=half, **params)
    return jax.lax.convert_element_type(out, preferred_element_type)


def _convolve(x, y, *, devices, sums, **params):
    """Convolves. If the convolution sums over a batch, each device sums over its own part.

    On one GPU that sum, the gradient of a kernel, is laid out as the kernel is. cuDNN has its own
    layout, in which XLA would otherwise compute the optimizer's update: it would transpose the
    parameters and moments to it, and back.
    """
    mesh, axes = _split(x, y, devices, **params) if sums and devices > 1 else (None, ())
    if mesh is None or not axes:
        out = _plain(x, y, **params)
        return row_major(out) if sums else out

    def run(x, y):
        # Dimensions that other explicit axes split stay split.
        inside = NamedSharding(jax.sharding.get_abstract_mesh(), params["out_sharding"].spec)
        wide = {"preferred_element_type": np.float32, "out_sharding": inside}
        return jax.lax.psum(_plain(x, y, **{**params, **wide}), axes)

    dims = params["dimension_numbers"]
    parts = tuple(PartitionSpec(*[None] * d, axes) for d in (dims.lhs_spec[1], dims.rhs_spec[1]))
    out = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=parts,
        out_specs=PartitionSpec(),
        axis_names={*axes},
        check_vma=False,
    )(x, y)
    if all(kind == AxisType.Auto for kind in mesh.axis_types):  # else each reads it whole
        out = placed_freely(out, NamedSharding(mesh, PartitionSpec()))
    return jax.lax.convert_element_type(out, params["preferred_element_type"])


def _split(x, y, devices, *, dimension_numbers, feature_group_count, **_):
    """Returns the mesh and the mesh axes that split the batch over which a convolution sums.

    For explicit axes this is known. XLA chooses automatic axes later; the batch is assumed to be
    split over all of them, as in data-parallel training with or without sharded state.
    """
    mesh = jax.typeof(x).sharding.mesh
    mesh = jax.sharding.get_abstract_mesh() if mesh.empty else mesh
    if mesh.empty:
        mesh = AbstractMesh((devices,), ("devices",), axis_types=(AxisType.Auto,))
    dim, other = dimension_numbers.lhs_spec[1], dimension_numbers.rhs_spec[1]
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    automatic = tuple(name for name, kind in kinds if kind == AxisType.Auto)
    axes = _names(x, dim) or _names(y, other) or automatic
    rows, count = x.shape[dim], math.prod(mesh.shape[name] for name in axes)
    # shard_map divides an axis into equal parts only.
    shared = count > 1 and rows % count == 0
    return mesh, axes if shared and feature_group_count == 1 else ()


def _names(x: Any, dim: int) -> tuple[str, ...]:
    """Returns the explicit axes that split a dimension of an array."""
    stated = jax.typeof(x).sharding.spec[dim]
    return (stated,) if isinstance(stated, str) else tuple(stated or ())


def _run(x, y, *, devices, sums, preferred_element_type, **params):
    dtype = {"preferred_element_type": preferred_element_type}
    if sums and preferred_element_type == np.float32 != x.dtype:
        return _convolve(x, y, devices=devices, sums=True, half=x.dtype, **dtype, **params)
    return conv_p.bind(x, y, **dtype, **params)


def _planned_x(ct, x, kernel, *, sums, **params):
    return ad.primitive_transposes[conv_p](ct, ad.UndefinedPrimal(x.aval), kernel, **params)[0]


def _planned_kernel(ct, x, kernel, *, sums, **params):
    def rule(ct, x):
        linear = ad.UndefinedPrimal(kernel.aval)
        return ad.primitive_transposes[conv_p](ct, x, linear, **params)[1:]

    def run(eqn, ins):
        # The "kernel" of a kernel's gradient is a cotangent, whose own gradient is a forward
        # convolution again: only every second one sums over the batch.
        if eqn.primitive is not conv_p:
            return bind(eqn, ins)
        own = {"precision": params["precision"], "out_sharding": kernel.aval.sharding}
        return [_planned_p.bind(*ins, sums=not sums, **{**eqn.params, **own})]

    if np.size(ct) == 0:
        return ad.Zero(kernel.aval)
    jaxpr = trace(rule, [jax.typeof(ct), jax.typeof(x)], "kernel")
    return evaluate(jaxpr, (ct, x), run)[0]


def _batch(axis_data, args, dims, *, batch_group_count, dimension_numbers, sums, **params):
    """Merges a batch axis of the input into its batch; other cases are batched as in JAX."""
    (x, y), (dim, other) = args, dims
    numbers = {"dimension_numbers": dimension_numbers, "batch_group_count": batch_group_count}
    if dim is None and other is None:  # a program is batched as a whole
        return _planned_p.bind(x, y, sums=sums, **numbers, **params), None
    if sums or other is not None or batch_group_count > 1:
        one = functools.partial(conv_p.bind, **numbers, **params)
        return jax.vmap(one, dims)(*args), 0
    place, result = dimension_numbers.lhs_spec[0], dimension_numbers.out_spec[0]
    x = jax.numpy.moveaxis(x, dim, place)
    count, rows = x.shape[place : place + 2]
    x = x.reshape(*x.shape[:place], count * rows, *x.shape[place + 2 :])
    out = _planned_p.bind(x, y, sums=False, **numbers, **params)
    return out.reshape(*out.shape[:result], count, rows, *out.shape[result + 1 :]), result


_planned_p = variant_of(conv_p, _run, "sums")
ad.defbilinear(_planned_p, _planned_x, _planned_kernel)
batching.fancy_primitive_batchers[_planned_p] = _batch
