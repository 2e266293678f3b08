"""Operations that depend on the number of devices, so that devices exchange 16 bits, or less.

A compiler partitions a program after differentiation. It puts an exchange right before an operation
that reads a sharded array, or right after one that sums over it. So devices exchange arrays in the
dtypes of operands and results. A single device exchanges nothing, and there the form that moves the
fewest bytes is used.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters.xla import apply_primitive
from jax.sharding import NamedSharding, PartitionSpec

from mpjax._src.core.base._jax.cpu_matmuls import has_kernel
from mpjax._src.core.base._jax.matmuls import is_local, marked
from mpjax._src.core.base._jax.programs import (
    bind,
    eval_closed,
    evaluate,
    open_jaxpr,
    retyped,
    trace,
)

dot_general_p, gather_p = jax.lax.dot_general_p, jax.lax.gather_p


def half_dot(x: Any, y: Any, half: Any, **params: Any) -> Any:
    """Multiplies two arrays in 16 bits, one of which may be float32. It is linear in both.

    If several devices sum their parts of an operand's cotangent, the cotangent is the matmul's
    float32 accumulator. On one device it is a 16-bit result, which moves fewer bytes. The
    parameters are those of ``dot_general`` without ``preferred_element_type``.
    """
    return _half_dot(x, y, half, half, None, False, **params)


def _half_dot(x, y, half, dtype, order, sums, **params):
    dtypes = {"half": np.dtype(half), "preferred_element_type": np.dtype(dtype)}
    return _half_dot_p.bind(x, y, order=order, sums=sums, **dtypes, **params)


def planned_gather(eqn: Any, half: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the primitive and parameters of a lookup of which devices exchange 16-bit parts.

    On several devices the float32 array is rounded to 16 bits before the gather. The derivative is
    that of the float32 gather: entries of the cotangent are summed in float32.
    """
    return _half_gather_p, {**eqn.params, "half": np.dtype(half)}


def primitive_of(name: str, run: Callable[..., Any], abstract_eval: Callable[..., Any]) -> Any:
    """Returns a primitive that is lowered as a function of the number of devices.

    ``run`` gets it as ``devices``. The name is that of the corresponding JAX operation.
    """

    primitive = Primitive(name)
    primitive.def_impl(functools.partial(apply_primitive, primitive))
    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, _lowering(run))
    return primitive


def variant_of(like: Primitive, run: Callable[..., Any], *own: str) -> Any:
    """Returns one with the types and parameters of a primitive of JAX, and its ``own`` ones."""

    def as_it_is(rule):
        def call(*args, **params):
            return rule(*args, **{k: p for k, p in params.items() if k not in own})

        return call

    primitive = primitive_of(
        like.name, run, as_it_is(lambda *x, **p: like.abstract_eval(*x, **p)[0])
    )
    jet.jet_rules[primitive] = as_it_is(jet.jet_rules[like])
    return primitive


def _lowering(run: Callable[..., Any]) -> Any:
    def lower(ctx, *args, **params):
        bound = functools.partial(run, devices=_devices(ctx))
        return mlir.lower_fun(bound, multiple_results=False)(ctx, *args, **params)

    return lower


def _devices(ctx: Any) -> int:
    axes = ctx.module_context.axis_context
    return getattr(axes, "num_devices", None) or axes.mesh.size


def placed_freely(x: Any, sharding: Any) -> Any:
    """Returns a cast array, separated from a following sharding constraint.

    XLA's partitioner would apply the constraint to the operand of the cast too, and exchange
    float32. A constraint that leaves every dimension open prevents this.
    """
    if not isinstance(sharding, NamedSharding):
        return x
    anywhere = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim)
    return jax.lax.with_sharding_constraint(x, NamedSharding(sharding.mesh, anywhere))


# ---- matmuls ------------------------------------------------------------------------------------


def _multiply(x, y, *, half, preferred_element_type, order, sums, devices, **params):
    """Multiplies in 16 bits, transposes the result and casts it."""
    x, y = (jax.lax.convert_element_type(v, half) for v in (x, y))
    # Devices add their parts in the dtype of the result, and each addition in 16 bits rounds.
    wide = sums and devices > 1
    params["preferred_element_type"] = np.promote_types(half, np.float32) if wide else half
    with marked():
        out = dot_general_p.bind(x, y, **params)
    return jax.lax.convert_element_type(_in_order(out, order), preferred_element_type)


def _multiply_on_cpu(x, y, *, half, order, sums, dimension_numbers, devices, **params):
    """Multiplies in the form for which XLA:CPU has a kernel, whose result is the accumulator.

    The kernel copies a left operand that it has to transpose, so the operands change places if the
    result would be transposed too.
    """
    (summed, batch), kernel = dimension_numbers, has_kernel(half)
    count, rows = len(batch[0]), x.ndim - len(summed[0])
    if kernel and order == (*range(count), *range(rows, len(order or ())), *range(count, rows)):
        x, y, order = y, x, None
        dimension_numbers = summed[::-1], batch[::-1]
    more = {"half": half, "order": order, "dimension_numbers": dimension_numbers}
    # A kernel returns its float32 accumulator; that is asked for as if several devices summed.
    return _multiply(x, y, sums=sums, devices=2 if kernel else devices, **more, **params)


def _in_order(x: Any, order: tuple[int, ...] | None) -> Any:
    return x if order is None else jax.lax.transpose(x, order)


def _abstract_eval(x, y, *, half, order, sums, **params):
    out = dot_general_p.abstract_eval(retyped(x, half), retyped(y, half), **params)[0]
    if order is None:
        return out
    return jax.lax.transpose_p.abstract_eval(out, permutation=order)[0]


def _transpose(place, ct, x, y, *, half, order, sums, preferred_element_type, **params):
    """Transposes a matmul as JAX does, with the cotangent in the dtype of the operand."""
    moving, other = (x, y) if place == 0 else (y, x)
    ct = _in_order(ct, None if order is None else tuple(np.argsort(order)))
    linear = ad.UndefinedPrimal(retyped(moving.aval, half))

    def rule(ct, other):
        operands = (linear, other) if place == 0 else (other, linear)
        transpose = ad.primitive_transposes[dot_general_p]
        return [transpose(ct, *operands, preferred_element_type=None, **params)[place]]

    avals = [retyped(jax.typeof(v), half) for v in (ct, other)]
    dot, *turn = open_jaxpr(trace(rule, avals, "transposed"))[0].eqns
    order = turn[0].params["permutation"] if turn else None
    # The precision stays its own: JAX writes its default setting into a new matmul.
    params |= {name: dot.params[name] for name in ("dimension_numbers", "out_sharding")}
    return _half_dot(ct, other, half, moving.aval.dtype, order, True, **params)


def _batch(axis_data, args, dims, *, half, order, sums, preferred_element_type, **params):
    """Batches a matmul as JAX does: the program of JAX's rule, with this matmul in it."""
    places: list[Any] = []

    def rule(*operands):
        batched = batching.fancy_primitive_batchers[dot_general_p]
        out, dim = batched(axis_data, operands, dims, preferred_element_type=None, **params)
        places.append(dim)
        return [out]

    def run(eqn, ins):
        if eqn.primitive is not dot_general_p:
            return bind(eqn, ins)
        changed = {name: eqn.params[name] for name in ("dimension_numbers", "out_sharding")}
        x, y = ins
        return [_half_dot(x, y, half, preferred_element_type, None, sums, **params | changed)]

    program = trace(rule, [retyped(jax.typeof(x), half) for x in args], "batched")
    (out,), (dim,) = evaluate(program, args, run), places
    if order is None or dim is None:
        return _in_order(out, order), dim
    return jax.lax.transpose(out, (dim, *(d + (d >= dim) for d in order))), 0


_half_dot_p = primitive_of(dot_general_p.name, _multiply, _abstract_eval)
mlir.register_lowering(_half_dot_p, _lowering(_multiply_on_cpu), platform="cpu")
ad.defbilinear(_half_dot_p, *(functools.partial(_transpose, place) for place in (0, 1)))
batching.fancy_primitive_batchers[_half_dot_p] = _batch


# ---- lookups ------------------------------------------------------------------------------------


def _look_up(x, indices, *, half, devices, **params):
    if devices == 1:
        return gather_p.bind(x, indices, **params)
    rows = gather_p.bind(jax.lax.convert_element_type(x, half), indices, **params)
    return jax.lax.convert_element_type(rows, x.dtype)


def _gather_tangent(tangent, x, indices, *, half, **params):
    return gather_p.bind(tangent, indices, **params)


def _gather_batch(args, dims, *, half, **params):
    return jax.vmap(functools.partial(gather_p.bind, **params), dims)(*args), 0


_half_gather_p = variant_of(gather_p, _look_up, "half")
ad.defjvp(_half_gather_p, _gather_tangent, None)
batching.primitive_batchers[_half_gather_p] = _gather_batch


# ---- programs ------------------------------------------------------------------------------------


def by_devices(one: Callable[..., Any], several: Callable[..., Any], operands: Any) -> Any:
    """Calls ``one`` on a single device, and ``several``, of the same meaning, on arrays they share.

    Which one is known when the program is lowered; in `jax.shard_map` it is ``one``. Operands are a
    pytree. `jax.checkpoint` sees one operation. It is not differentiated; under `jax.vmap` it runs
    as ``one``.
    """
    leaves, tree = jax.tree.flatten(operands)
    avals, results = [jax.typeof(x) for x in leaves], []

    def flat(fun):
        def run(*leaves):
            outs, out_tree = jax.tree.flatten(fun(jax.tree.unflatten(tree, leaves)))
            results.append(out_tree)
            return outs

        return trace(run, avals, getattr(fun, "__name__", "by_devices"))

    outs = _by_devices_p.bind(*leaves, one=flat(one), several=flat(several))
    return jax.tree.unflatten(results[0], outs)


def _lower_by_devices(ctx, *args, one, several):
    run = functools.partial(eval_closed, one if is_local(ctx) else several)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


def _batch_by_devices(args, dims, *, one, several):
    outs = jax.vmap(functools.partial(eval_closed, one), dims)(*args)
    return outs, [0] * len(outs)


_by_devices_p = Primitive("by_devices")
_by_devices_p.multiple_results = True
_by_devices_p.def_impl(functools.partial(apply_primitive, _by_devices_p))
_by_devices_p.def_abstract_eval(lambda *_, one, **__: [v.aval for v in open_jaxpr(one)[0].outvars])
mlir.register_lowering(_by_devices_p, _lower_by_devices)
batching.primitive_batchers[_by_devices_p] = _batch_by_devices
