"""The only file that reaches into JAX's internals, or knows how its versions differ."""

import contextlib
import functools
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import compiler, config, core, source_info_util, tree_util, util
from jax._src import linear_util as lu
from jax._src.api_util import debug_info
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lib import _jax as jaxlib_module
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax._src.named_sharding import UnspecifiedValue
from jax.extend.core import Literal, Primitive
from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["Literal"]

T = TypeVar("T")


def primitive_names() -> frozenset[str]:
    """Returns the names of every primitive that JAX can lower or differentiate."""
    of_platforms = mlir._platform_specific_lowerings.values()
    everywhere: tuple[Any, ...] = (mlir._lowerings, ad.primitive_jvps, ad.primitive_transposes)
    tables = (*everywhere, *of_platforms)
    return frozenset(primitive.name for table in tables for primitive in table)


# ---- reading programs ---------------------------------------------------------------------------


def is_array(aval: Any) -> bool:
    """Tells an ordinary array from a Ref, a token or another kind of value."""
    return isinstance(aval, core.ShapedArray)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a sub-program's jaxpr and constants. (From 0.12 on the two classes are one.)"""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


# Calls that mean nothing but their insides.
_CALLS = frozenset({"closed_call", "core_call", "call", "core_closed_call", "eval_jaxpr"})


def inlined(eqn: Any) -> Any:
    """Returns the program inside an equation that is only a call of it, or None.

    A jit that asks for something of its own (shardings, layouts, donation, compiler options) is
    more than that.
    """
    if eqn.primitive.name in _CALLS:
        return eqn.params["call_jaxpr"]
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    p = eqn.params
    asks = (
        any(p["donated_invars"])
        or any(
            not isinstance(s, UnspecifiedValue) for s in (*p["in_shardings"], *p["out_shardings"])
        )
        or any(layout is not None for layout in (*p["in_layouts"], *p["out_layouts"]))
        or p["compiler_options_kvs"]
    )
    return None if asks else p["jaxpr"]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of a scan's constants and carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def scope_names(stack: Any) -> tuple[str, ...]:
    """Returns the names of a name stack's scopes, its transformations left out."""
    return tuple(s.name for s in stack.stack if isinstance(s, source_info_util.Scope))


def transforms(stack: Any) -> tuple[str, ...]:
    """Returns the names of a name stack's transformations, such as "jvp" and "transpose"."""
    return tuple(s.name for s in stack.stack if isinstance(s, source_info_util.Transform))


# A line of ours is never the user's.
source_info_util.register_exclusion(str(Path(__file__).parents[2]))


def source_line(*eqns: Any) -> str:
    """Returns "file:line" of the user's code of the first equation that has one, or ""."""
    for eqn in eqns:
        frame = source_info_util.user_frame(eqn.source_info.traceback)
        if frame:
            return f"{frame.file_name}:{frame.start_line}"
    return ""


def line_key(eqn: Any) -> Any:
    """Returns what an equation shares with those that differentiating it makes."""
    return eqn.source_info.traceback


# ---- evaluating programs ------------------------------------------------------------------------


@contextlib.contextmanager
def location(eqn: Any, stack: Any):
    """Puts what is traced inside at the place, and in the context, of an equation."""
    stack = source_info_util.current_name_stack() + stack
    traceback = eqn.source_info.traceback
    with source_info_util.user_context(traceback, name_stack=stack), eqn.ctx.manager:
        yield


def below(stack: Any, depth: int) -> Any:
    """Returns a name stack without its first names."""
    return source_info_util.NameStack(stack.stack[depth:])


def common_stack(stacks: Sequence[Any]) -> Any:
    """Returns the names that name stacks begin with together."""
    first, *rest = (stack.stack for stack in stacks)
    depth = 0
    while depth < len(first) and all(
        s[depth : depth + 1] == first[depth : depth + 1] for s in rest
    ):
        depth += 1
    return source_info_util.NameStack(first[:depth])


def bind(eqn: Any, args: Sequence[Any], **params: Any) -> list[Any]:
    """Runs an equation's primitive on other operands, with some parameters changed."""
    params = {**eqn.params, **params}
    if eqn.primitive.name.startswith("custom_"):
        params |= {k: own_lines(f) for k, f in params.items() if isinstance(f, lu.WrappedFun)}
    params = eqn.primitive.get_bind_params(params)
    outs = eqn.primitive.bind(*args, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


@lu.transformation2
def own_lines(fun: Callable[..., Any], *args: Any) -> Any:
    """Lets what a custom rule does stand at its own lines; JAX has it stand at that of the call."""
    context = source_info_util._source_info_context
    before = context.context
    context.context = source_info_util.SourceInfo(None, before.name_stack)
    try:
        return fun(*args)
    finally:
        context.context = before


def retyped(aval: Any, dtype: Any) -> Any:
    """Returns an aval with another dtype, its sharding and axes kept."""
    return aval.update(dtype=np.dtype(dtype))


def trace(fun: Callable[..., Sequence[Any]], avals: Sequence[Any], name: str) -> Any:
    """Returns the closed jaxpr of a function of flat arguments."""
    info = debug_info(name, fun, tuple(avals), {})
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(lu.wrap_init(fun, debug_info=info), list(avals))
    return _close(jaxpr, consts)


def _close(jaxpr: Any, consts: Sequence[Any]) -> Any:
    closed = getattr(core, "ClosedJaxpr", None)
    return jaxpr.with_consts(consts) if closed is None else closed(jaxpr, consts)


def like(jaxpr: Any, old: Any) -> Any:
    """Returns a closed jaxpr in the form, open or closed, that an old one has."""
    inner, consts = open_jaxpr(jaxpr)
    if hasattr(old, "jaxpr"):
        return jaxpr
    if consts:
        raise NotImplementedError("A program with constants cannot stand here.")
    return inner


def flat_tracing(fun: Callable[..., Any], avals: Sequence[Any], name: str) -> tuple[Any, Any]:
    """As `trace`, for a function that returns a pytree: the jaxpr, and what `fun` returned.

    The second result holds tracers that are dead; only its structure means anything.
    """
    stored: list[Any] = []

    def flat(*args):
        leaves, tree = tree_util.tree_flatten(fun(*args))
        stored.append((leaves, tree))
        return [leaf for leaf in leaves if is_traceable(leaf)]

    return trace(flat, avals, name), stored[-1]


def is_traceable(x: Any) -> bool:
    """Tells arrays (JAX's, NumPy's, tracers, keys) from Python values and other objects."""
    return isinstance(x, jax.Array | np.ndarray | np.generic) and (
        not isinstance(x, np.ndarray | np.generic)
        or x.dtype == jax.dtypes.float0
        or jax.dtypes.issubdtype(x.dtype, np.number)
        or x.dtype == np.bool_
    )


def cleared_with_jax(cache: Any) -> None:
    """Has `jax.clear_caches` clear a cache too, one of `functools.lru_cache`."""
    util.register_cache(cache, "mpjax")


def tracing_key() -> Any:
    """Returns what, besides its arguments, the trace of a function depends on."""
    return config.trace_context()


# ---- custom rules -------------------------------------------------------------------------------


def custom_jvp_rule(params: dict[str, Any]) -> tuple[Any, Sequence[bool]]:
    """Returns the program of a custom_jvp's rule and which of its output tangents are zero.

    The program takes primals and tangents of the arguments that are not constants.
    """
    count = len(open_jaxpr(params["call_jaxpr"])[0].invars) - params["num_consts"]
    jaxpr, consts, zeros = own_lines(params["jvp_jaxpr_fun"]).call_wrapped(*[False] * count)
    return _close(jaxpr, consts), list(zeros)


def custom_vjp_rules(params: dict[str, Any], avals: Sequence[Any], perturbed: Sequence[bool]):
    """Returns the programs of a custom_vjp's rules.

    Args:
        params: Of the equation.
        avals: Of its operands, constants included.
        perturbed: Which operands that are not constants are differentiated.

    Returns:
        ``(fwd, trace_bwd, forwards, num_results)``. ``fwd`` takes the operands that are not
        constants, and gives residuals, then results. ``forwards`` says for each residual which
        operand it is, or None where ``fwd`` computes it. ``trace_bwd(zero_cts)`` gives
        ``(bwd, zeros)``: ``bwd`` takes residuals and the cotangents that are not zero, and gives
        the cotangents that are not in ``zeros``.
    """
    fwd_jaxpr, fwd_consts = own_lines(params["fwd_jaxpr_thunk"]).call_wrapped(*perturbed)
    fwd = _close(fwd_jaxpr, fwd_consts)
    _, residuals, forwards = params["out_trees"]()
    call = open_jaxpr(params["call_jaxpr"])[0]
    computed = residuals.num_leaves - sum(f is not None for f in forwards)
    outs = iter(v.aval for v in open_jaxpr(fwd)[0].outvars[:computed])
    res_avals = [next(outs) if f is None else avals[f] for f in forwards]
    ct_avals = [v.aval.to_tangent_aval() for v in call.outvars]

    @functools.cache
    def trace_bwd(zero_cts: tuple[bool, ...]):
        zeros: list[bool] = []

        def run(*args):
            given = iter(args[len(res_avals) :])
            cts = [
                jax.custom_derivatives.SymbolicZero(aval) if zero else next(given)
                for aval, zero in zip(ct_avals, zero_cts, strict=True)
            ]
            bwd = own_lines(params["bwd"])
            grads = bwd.call_wrapped(*args[: len(res_avals)], *cts)
            if isinstance(grads, tuple) and len(grads) == 2 and isinstance(grads[0], list | tuple):
                grads = grads[0]  # 0.12 returns logs as well
            zeros[:] = [type(g) in (ad.Zero, jax.custom_derivatives.SymbolicZero) for g in grads]
            return [g for g, zero in zip(grads, zeros, strict=True) if not zero]

        given_avals = [aval for aval, zero in zip(ct_avals, zero_cts, strict=True) if not zero]
        return trace(run, [*res_avals, *given_avals], "custom_vjp_bwd"), zeros

    return fwd, trace_bwd, forwards, len(call.outvars)


# ---- barriers on some platforms -----------------------------------------------------------------


def _barrier(name: str, *platforms: str) -> Primitive:
    """Returns a linear primitive: the identity, on these platforms an optimization barrier."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, lambda ctx, x: [x])
    lowering = mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False)
    for platform in platforms:
        mlir.register_lowering(primitive, lowering, platform=platform)
    ad.deflinear2(primitive, lambda ct, _: [ct])
    batching.primitive_batchers[primitive] = lambda args, dims: (primitive.bind(*args), dims[0])
    return primitive


_cpu_barrier_p = _barrier("cpu_barrier", "cpu")
_gpu_barrier_p = _barrier("gpu_barrier", "cuda", "rocm")
BARRIERS = frozenset({"cpu_barrier", "gpu_barrier"})


def cpu_barrier(x: jax.Array) -> jax.Array:
    """Returns ``x``, on XLA:CPU behind an optimization barrier.

    XLA:CPU fails at run time on a half matmul with a float32 result that it fuses with a transpose
    ("BF16 x BF16 = F32"). Kept apart by a barrier, the two work. Other platforms need none.
    """
    return _cpu_barrier_p.bind(x)


def gpu_barrier(x: jax.Array) -> jax.Array:
    """Returns ``x``, on GPUs behind an optimization barrier.

    XLA:GPU would rather compute a softmax again from its float32 operand, which it then keeps for
    the backward pass. On a TPU the barrier costs memory.
    """
    return _gpu_barrier_p.bind(x)


# ---- rebuilding higher-order primitives ---------------------------------------------------------


def hoisted(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns an open jaxpr whose constants are its first arguments, and these constants."""
    inner, consts = open_jaxpr(jaxpr)
    if not consts:
        return inner, []
    return pe.convert_constvars_jaxpr(inner), list(consts)


def in_avals(jaxpr: Any) -> list[Any]:
    """Returns the avals of a closed jaxpr's arguments."""
    return [v.aval for v in open_jaxpr(jaxpr)[0].invars]


def eval_closed(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr."""
    inner, consts = open_jaxpr(jaxpr)
    return core.eval_jaxpr(inner, consts, *args)


def zero_tangent(x: Any) -> Any:
    """Returns an array of zeros that is a tangent of ``x``."""
    return ad.instantiate_zeros(ad.Zero(core.typeof(x).to_tangent_aval()))


def shard_map(fun: Callable[..., Any], params: dict[str, Any]) -> Callable[..., Any]:
    """Returns ``fun`` mapped as an equation of shard_map with these parameters maps."""
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=params.get("newly_manual_axes") or params["manual_axes"],
        check_vma=params["check_vma"],
    )


def wrap_vmap_rule(rule: Any, rerun: Callable[..., Any]) -> Any:
    """Returns a custom_vmap's rule whose program is run by ``rerun(fun, *flat_args)``."""

    def wrapped(axis_size, in_batched, *args):
        leaves, tree = tree_util.tree_flatten(args)
        stored: list[Any] = []

        def flat(*leaves):
            outs, batched = rule(axis_size, in_batched, *tree_util.tree_unflatten(tree, leaves))
            flat_outs, out_tree = tree_util.tree_flatten(outs)
            stored[:] = [out_tree, batched]
            return flat_outs

        outs = rerun(flat, *leaves)
        return tree_util.tree_unflatten(stored[0], outs), stored[1]

    return wrapped


# ---- asking about programs ----------------------------------------------------------------------


def aval_of(x: Any) -> Any:
    """Returns the aval of an array, a NumPy value or a `jax.ShapeDtypeStruct`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return core.shaped_abstractify(x)
    return core.typeof(x) if isinstance(x, jax.Array) else core.shaped_abstractify(x)


def holds_tracers(block: Any) -> bool:
    """Tells whether a planned program closes over tracers of an enclosing transformation."""
    return any(isinstance(const, core.Tracer) for _, const in block.consts)


def donates(block: Any) -> bool:
    """Tells whether a program holds a jit that donates its arguments."""
    return any(op.name == "jit" and any(op.params["donated_invars"]) for op in block.ops)


def enlarges(eqn: Any) -> bool:
    """Tells whether a layout operation copies: its transpose then sums more than one term."""
    if eqn.primitive.name != "broadcast_in_dim":
        return True
    return np.prod(eqn.outvars[0].aval.shape) > np.prod(eqn.invars[0].aval.shape)


def expand(x: Any, aval: Any) -> Any:
    """Broadcasts an operand to the shape (and sharding) of an elementwise operation's result."""
    shape, rank = aval.shape, np.ndim(x)
    dims = tuple(range(len(shape) - rank, len(shape)))
    sharding = (
        None if aval.sharding.mesh.empty or aval.sharding.mesh.are_all_axes_auto else aval.sharding
    )
    if all(x.shape[i] == shape[d] for i, d in enumerate(dims)):
        return jax.lax.broadcast_in_dim(x, shape, dims, out_sharding=sharding)
    kept = [i for i, d in enumerate(dims) if x.shape[i] == shape[d]]
    x = jax.lax.squeeze(x, [i for i in range(rank) if i not in kept])
    return jax.lax.broadcast_in_dim(x, shape, [dims[i] for i in kept], out_sharding=sharding)


# ---- gathers ------------------------------------------------------------------------------------


def picks_one_per_row(eqn: Any) -> bool:
    """Tells whether a gather takes one entry along one axis for every index of the other axes."""
    numbers, operand = eqn.params["dimension_numbers"], eqn.invars[0].aval
    axes = tuple(numbers.start_index_map)
    return (
        len(axes) == 1
        and all(size == 1 for size in eqn.params["slice_sizes"])
        and operand.shape[axes[0]] > 1
        and len(numbers.operand_batching_dims) == operand.ndim - 1
        and tuple(numbers.start_indices_batching_dims) == tuple(range(operand.ndim - 1))
        and tuple(numbers.operand_batching_dims)
        == tuple(d for d in range(operand.ndim) if d != axes[0])
        and np.prod(eqn.outvars[0].aval.shape) * operand.shape[axes[0]] == np.prod(operand.shape)
    )


def select_one_per_row(eqn: Any, x: Any, indices: Any) -> Any:
    """As the gather of an equation for which `picks_one_per_row`, written as a masked sum."""
    (axis,) = eqn.params["dimension_numbers"].start_index_map
    size = x.shape[axis]
    indices = indices.reshape([1 if d == axis else n for d, n in enumerate(x.shape)])
    if "clip" in str(eqn.params["mode"]).lower():
        indices = jax.numpy.clip(indices, 0, size - 1)
    positions = jax.lax.broadcasted_iota(indices.dtype, x.shape, axis)
    zero = jax.numpy.zeros((), x.dtype)
    picked = jax.numpy.where(positions == indices, x, zero).sum(axis)
    return picked.reshape(eqn.outvars[0].aval.shape)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Returns the open jaxprs among the parameters of an equation."""
    return list(core.jaxprs_in_params(eqn.params))


# ---- arrays and where they live ------------------------------------------------------------------


def vary_like(leaf: jax.Array, like: Any) -> jax.Array:
    """Marks an array as varying over the manual mesh axes that another one varies over."""
    varying = [getattr(getattr(jax.typeof(x), "mat", None), "varying", ()) for x in (leaf, like)]
    missing = tuple(axis for axis in varying[1] if axis not in varying[0])
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf


def commit_like(tree: T, like: Any) -> T:
    """Commits uncommitted arrays to the devices of another tree's arrays, replicated.

    A step returns committed arrays as soon as one of its inputs is; an uncommitted input would make
    it compile once more. Under a trace nothing is committed, and nothing is done.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((tree, like))):
        return tree
    leaves = [x for x in jax.tree.leaves(like) if x.committed]
    if not leaves:
        return tree
    place = leaves[0].sharding
    if isinstance(place, NamedSharding):
        place = NamedSharding(place.mesh, PartitionSpec(), memory_kind=place.memory_kind)
    return jax.tree.map(lambda x: x if x.committed else jax.device_put(x, place), tree)


# ---- compiling for hardware that is not there ----------------------------------------------------


def is_jitted(fun: Any) -> bool:
    """Tells what `jax.jit` returned, which can be traced and lowered, from other functions."""
    return hasattr(fun, "trace") and hasattr(fun, "lower")


def stablehlo_for(platform: str, fun: Callable[..., Any], args: Sequence[Any]) -> tuple[bytes, int]:
    """Returns a function's StableHLO for a platform that need not be there, and its partitions.

    A function that is jitted already keeps its donation and its static arguments.
    """
    jitted: Any = fun if is_jitted(fun) else jax.jit(fun)
    module = jitted.trace(*args).lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)
    return buffer.getvalue(), ir.IntegerAttr(
        module.operation.attributes["mhlo.num_partitions"]
    ).value


@functools.cache
def _compile_only_device(platform: str, topology: str, config: str) -> Any:
    from jax.experimental import topologies

    if platform == "tpu":
        options: dict[str, Any] = {"topology_name": topology, "chips_per_host_bounds": (1, 1, 1)}
    else:
        options = {"topology": topology, "target_config": config}
    return topologies.get_topology_desc(platform=platform, **options).devices[0]


def compile_only(platform: str, topology: str, config: str, program: bytes) -> dict[str, Any]:
    """Compiles StableHLO for a device that is not there: its memory, and the HLO before and after.

    To be called where the plugins may load: in a process of its own.
    """
    device = _compile_only_device(platform, topology, config)
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]])
    )
    before = jaxlib_module.mlir.mlir_module_to_xla_computation(program)
    with mlir.make_ir_context():
        module = ir.Module.parse(program)
        executable = device.client.compile(
            module, executable_devices=xla_client.DeviceList((device,)), compile_options=options
        )
    stats = executable.get_compiled_memory_stats()
    optimized = executable.hlo_modules()[0]
    cpu = jax.devices("cpu")[0].client
    return {
        "memory": {
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "aliased": stats.alias_size_in_bytes,
            "temporary": stats.temp_size_in_bytes,
            "code": stats.generated_code_size_in_bytes,
        },
        "asked": before.as_hlo_module().to_string(),
        "hlo": optimized.to_string(),
        "xla_costs": {
            key: value
            for key, value in jaxlib_module.hlo_module_cost_analysis(cpu, optimized).items()
            if key in ("flops", "bytes accessed", "transcendentals")
        },
    }
