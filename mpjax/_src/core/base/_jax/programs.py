"""Jaxprs: reading, evaluating, tracing and rebuilding them, and their rules by other authors."""

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.api_util import debug_info, shaped_abstractify
from jax.experimental.jet import JetTracer
from jax.extend import linear_util as lu
from jax.extend.backend import register_backend_cache
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params, set_current_trace
from jax.extend.core.primitives import convert_element_type_p, jit_p
from jax.interpreters import ad, batching
from jax.interpreters.partial_eval import trace_to_jaxpr_dynamic

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base._jax.sources import location, own_lines

_PATCHING = threading.RLock()


@contextlib.contextmanager
def patched(*changes: tuple[Any, Any]) -> Iterator[None]:
    """Returns a context in which attributes of JAX's modules are others.

    Each change is a place, (module, name) or the name of an internal, and a value.
    """
    # They are for all threads, and two would restore each other's.
    with _PATCHING:
        found = [internals.home_of(at) if isinstance(at, str) else at for at, _ in changes]
        before = [getattr(*place) for place in found]
        try:
            for (module, name), (_, value) in zip(found, changes, strict=True):
                setattr(module, name, value)
            yield
        finally:
            for (module, name), value in zip(found, before, strict=True):
                setattr(module, name, value)


def primitive_names() -> frozenset[str]:
    """Returns the names of every primitive that JAX can lower or differentiate."""
    # Without these tables, no name is known that has neither a derivative nor a batched form.
    of_platforms = internals.offered("platform_specific_lowerings", {}).values()
    everywhere: tuple[Any, ...] = (internals.offered("lowerings", ()), ad.primitive_jvps)
    more = ad.primitive_transposes, batching.fancy_primitive_batchers
    tables = (*everywhere, *more, *of_platforms)
    return frozenset(primitive.name for table in tables for primitive in table)


def is_array(aval: Any) -> bool:
    """Returns whether an aval is that of an array, and not of a Ref, a token or another value."""
    return isinstance(aval, jax.core.ShapedArray)


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns a sub-program's jaxpr and constants. (From 0.12 on the two classes are one.)"""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Returns the open jaxprs among the parameters of an equation."""
    return [*jaxprs_in_params(eqn.params)]


class Structure:
    """A tree structure as a key: equal to another if JAX can tell.

    The metadata of a tree may contain arrays. They are compared by value, outside of any trace that
    is active. Arrays with several elements, or of an outer trace, have no truth value.
    """

    __slots__ = ("tree",)

    def __init__(self, tree: Any):
        self.tree = tree

    def __hash__(self) -> int:
        return hash(self.tree)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Structure):
            return False
        try:
            with _no_trace():
                return bool(self.tree == other.tree)
        except Exception:  # any that the metadata raises
            return False


def _no_trace() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which nothing is traced, or no arrays with values at least."""
    outermost = internals.offered("eval_trace", None)
    return set_current_trace(outermost) if outermost else jax.ensure_compile_time_eval()


def equation_key(eqn: Any) -> Any:
    """Returns a key of an equation's operation and source, comparable by value where possible."""
    params = tuple(
        (name, Structure(x) if isinstance(x, jax.tree_util.PyTreeDef) else x)
        for name, x in sorted(eqn.params.items(), key=lambda item: item[0])
    )
    return eqn.primitive, params, eqn.ctx, eqn.source_info.traceback


# Calls without any meaning beyond the program that they call.
_CALLS = ("closed_call", "call", "eval_jaxpr")

_nothing = jax.jit(lambda: ())


def jit_params() -> dict[str, Any]:
    """Returns the parameters of a jit without arguments and results, in the context around."""
    return dict(_equation_of(_nothing).params)


@functools.cache
def unspecified() -> Any:
    """Returns what stands in the parameters of a jit for a sharding that nobody chose."""
    return _equation_of(jax.jit(lambda x: x), 0).params["in_shardings"][0]


def _equation_of(jitted: Callable[..., Any], *args: Any) -> Any:
    """Returns the equation of a call of a jitted function."""
    with jax.disable_jit(False):
        return open_jaxpr(jax.make_jaxpr(jitted)(*args))[0].eqns[0]


def inlined(eqn: Any) -> Any:
    """Returns the program of an equation that only calls it, or None.

    A jit with shardings, layouts or donated arguments is more than a call.
    """
    if eqn.primitive.name in _CALLS:
        return eqn.params["call_jaxpr"]
    if eqn.primitive is not jit_p:
        return None
    p = eqn.params
    shardings, layouts = (
        (*p[f"in_{each}"], *p[f"out_{each}"]) for each in ("shardings", "layouts")
    )
    nobodys = type(unspecified())
    placed = not all(isinstance(sharding, nobodys) for sharding in shardings)
    asks = placed or any(p["donated_invars"]) or any(layout is not None for layout in layouts)
    return None if asks else p["jaxpr"]


def donates(jaxpr: Any) -> bool:
    """Returns whether a program contains a jit that donates its arguments."""
    eqns = open_jaxpr(jaxpr)[0].eqns
    own = any(any(eqn.params.get("donated_invars", ())) for eqn in eqns)
    return own or any(donates(inner) for eqn in eqns for inner in inner_jaxprs(eqn))


def with_rule(params: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the parameters of a custom_jvp or custom_vjp whose rule's program is changed.

    That is the closed jaxpr of primals and tangents, or the forward one.
    """
    name = "fwd_jaxpr_thunk" if "fwd_jaxpr_thunk" in params else "jvp_jaxpr_fun"
    return {**params, name: _changed(params[name], change)}


@lu.transformation2
def _changed(fun: Callable[..., Any], change: Callable[[Any], Any], *args: Any) -> Any:
    jaxpr, consts, *more = fun(*args)
    return (*open_jaxpr(change(close(jaxpr, consts))), *more)


def in_taylor_mode(args: Sequence[Any]) -> bool:
    """Returns whether `jax.experimental.jet`, which ignores custom derivatives, traces an array."""
    return any(_is_taylor(x) for x in args if isinstance(x, jax.core.Tracer))


def _is_taylor(x: Any) -> bool:
    """Searches the tracers of other transformations too."""
    while isinstance(x, jax.core.Tracer) and not isinstance(x, JetTracer):
        x = getattr(x, "val", getattr(x, "primal", None))
    return isinstance(x, JetTracer)


def zeros_of(aval: Any) -> Any:
    """Returns zeros of a type."""
    return ad.instantiate_zeros(ad.Zero(aval))


def zero_tangent(x: Any) -> Any:
    """Returns a zero tangent of ``x`` as an array."""
    return zeros_of(jax.typeof(x).to_tangent_aval())


def manual_axes(params: dict[str, Any]) -> frozenset[str]:
    """Returns the mesh axes that an equation of shard_map with these parameters maps."""
    return frozenset(params.get("newly_manual_axes") or params["manual_axes"])


def shard_map(fun: Callable[..., Any], params: dict[str, Any]) -> Callable[..., Any]:
    """Returns ``fun``, mapped like an equation of shard_map with these parameters."""
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=manual_axes(params),
        check_vma=params["check_vma"],
    )


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns the numbers of a scan's constants and carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def in_avals(jaxpr: Any) -> list[Any]:
    """Returns the avals of a closed jaxpr's arguments."""
    return [v.aval for v in open_jaxpr(jaxpr)[0].invars]


def aval_of(x: Any) -> Any:
    """Returns the aval of an array, a NumPy value or a `jax.ShapeDtypeStruct`."""
    return jax.typeof(x) if isinstance(x, jax.Array) else shaped_abstractify(x)


# The value of a symbolic dimension where sizes are compared: exported batches are usually large.
SYMBOL = 1 << 20


def size_of(shape: Sequence[Any]) -> int:
    """Returns the number of entries of an array; a symbolic dimension counts as a large one."""
    size = math.prod(shape)
    if isinstance(size, int):
        return size
    return math.prod(d if isinstance(d, int) else _evaluated(d) for d in shape)


def _evaluated(dimension: Any) -> int:
    symbols = dict.fromkeys(internals.get_vars(dimension), SYMBOL)
    return int(internals.evaluate(dimension, symbols))


def bytes_of(aval: Any, dtype: np.dtype | None = None) -> int:
    """Returns the bytes of an array in its own or another dtype; 0 for what is none."""
    stored = getattr(aval, "dtype", None) if dtype is None else dtype
    return size_of(getattr(aval, "shape", (0,))) * getattr(stored, "itemsize", 0)


def retyped(aval: Any, dtype: Any) -> Any:
    """Returns an aval with another dtype, its sharding and axes kept."""
    return aval.update(dtype=np.dtype(dtype))


def typed_as(aval: Any, x: Any) -> Any:
    """Returns an array or literal as an array with the dtype and weak type of an aval."""
    if not is_array(aval) or aval.dtype == jax.dtypes.float0:
        return x
    x = jnp.asarray(x, getattr(x, "dtype", aval.dtype))
    if jax.typeof(x).weak_type == aval.weak_type:
        return x
    # The public cast always returns a strong type.
    return convert_element_type_p.bind(
        x, new_dtype=x.dtype, weak_type=aval.weak_type, sharding=None
    )


def eval_closed(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr."""
    inner, consts = open_jaxpr(jaxpr)
    return jax.core.eval_jaxpr(inner, consts, *args)


def walk(
    jaxpr: Any,
    ins: Sequence[Any],
    results: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any],
) -> list[Any]:
    """Returns what is known of a program's results, given what is known of its arguments.

    ``results(eqn, operands)`` returns that of an equation's results, ``constant(value)`` that of a
    constant.
    """
    inner, consts = open_jaxpr(jaxpr)
    known = [*map(constant, consts), *ins]
    env = dict(zip((*inner.constvars, *inner.invars), known, strict=True))

    def read(atom):
        return constant(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in inner.eqns:
        env |= zip(eqn.outvars, results(eqn, [*map(read, eqn.invars)]), strict=True)
    return [*map(read, inner.outvars)]


def bind(eqn: Any, args: Sequence[Any], **params: Any) -> list[Any]:
    """Runs an equation's primitive on other operands, with some parameters changed."""
    params = _with_own_lines(eqn.primitive.name, {**eqn.params, **params})
    params = eqn.primitive.get_bind_params(params)
    # JAX casts a literal with NumPy, which warns of overflow; XLA turns -1e30 into -Inf silently.
    with np.errstate(over="ignore"):
        outs = eqn.primitive.bind(*args, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def evaluate(jaxpr: Any, args: Sequence[Any], run: Callable[[Any, list[Any]], Any]) -> list[Any]:
    """Evaluates a closed jaxpr, each equation by a function of it and its operands."""
    inner, consts = open_jaxpr(jaxpr)
    values = dict(zip((*inner.constvars, *inner.invars), (*consts, *args), strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else values[v]  # noqa: E731
    for eqn in inner.eqns:
        values.update(zip(eqn.outvars, run(eqn, [*map(read, eqn.invars)]), strict=True))
    return [*map(read, inner.outvars)]


def eval_apart(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr, each equation by itself, so that an error names its line."""

    def run(eqn, ins):
        with location(eqn, eqn.source_info.name_stack):
            inner = inlined(eqn)
            return eval_apart(inner, *ins) if inner else bind(eqn, ins)

    return evaluate(jaxpr, args, run)


# The precision of a matmul that JAX's default setting does not change.
FASTEST = (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT)


def own_precision(params: dict[str, Any]) -> Any:
    """Returns the precision that a matmul asks for, or None if it takes the fastest."""
    asked = params.get("precision")
    each = asked if isinstance(asked, tuple) else (asked,)
    own = any(p is not None and str(p) not in ("DEFAULT", "Precision.DEFAULT") for p in each)
    return asked if own else None


def default_precision() -> Any:
    """Returns the precision that JAX writes into matmuls without one, or None."""
    return internals.canonicalize_precision(None)


def trace(fun: Callable[..., Sequence[Any]], avals: Sequence[Any], name: str) -> Any:
    """Returns the closed jaxpr of a function of flat arguments."""
    info = debug_info(name, fun, tuple(avals), {})
    jaxpr, _, consts = trace_to_jaxpr_dynamic(lu.wrap_init(fun, debug_info=info), list(avals))
    return close(jaxpr, consts)


def close(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Returns a jaxpr closed over its constants."""
    with_consts = getattr(jaxpr, "with_consts", None)
    return with_consts(consts) if with_consts else ClosedJaxpr(jaxpr, consts)


def lowered(jaxpr: Any) -> Any:
    """Returns a closed jaxpr of what can be compiled: some equations are functions until then.

    They have derivatives of their own, so they stay until a program is compiled.
    """
    return internals.lower_jaxpr2(jaxpr) if open_jaxpr(jaxpr)[0].is_high else jaxpr


def with_results(jaxpr: Any, outvars: Sequence[Any]) -> Any:
    """Returns a closed jaxpr with other results, of the equations that they depend on."""
    inner, consts = open_jaxpr(jaxpr)
    needed, eqns = {*outvars}, []
    # From the end, so that all readers of an equation's results are known before it.
    for eqn in reversed(inner.eqns):
        if not needed.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            needed |= {atom for atom in eqn.invars if not isinstance(atom, Literal)}
    return close(inner.replace(eqns=eqns[::-1], outvars=list(outvars)), consts)


def hoisted(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns an open jaxpr whose constants are its first arguments, and these constants."""
    inner, consts = open_jaxpr(jaxpr)
    if not consts:
        return inner, []
    return _hoisted(inner), list(consts)


def _hoisted(inner: Any) -> Any:
    with_consts = getattr(inner, "with_consts", None)
    if with_consts:  # from 0.12 on it has constants
        return with_consts(())
    info, count = inner.debug_info, len(inner.constvars)
    if info.arg_names is not None:
        info = info._replace(arg_names=("",) * count + (*info.arg_names,))
    return inner.replace(constvars=(), invars=inner.constvars + inner.invars, debug_info=info)


def cleared_with_jax(cache: Any) -> None:
    """Registers a `functools.lru_cache` to be cleared by `jax.clear_caches`."""
    register_backend_cache(cache, "mpjax")


def tracing_key() -> Any:
    """Returns the settings of JAX that a trace depends on, besides the arguments."""
    # JAX traces a function again if one of them changed, and only then.
    return _nothing.trace().jaxpr


def abstract(aval: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    """Returns a `jax.ShapeDtypeStruct` for the type of an array, with its sharding."""
    sharding = aval.sharding if is_explicit(aval) else None
    return jax.ShapeDtypeStruct(aval.shape, dtype or aval.dtype, sharding=sharding)


def is_explicit(x: Any) -> bool:
    """Returns whether the type of an array or shape contains a sharding."""
    sharding = _sharding(x)
    return sharding is not None and bool(not sharding.mesh.empty and sharding.mesh.explicit_axes)


def may_be_divided(x: Any) -> bool:
    """Returns whether the type of an array or shape leaves it to XLA how devices divide it."""
    sharding = _sharding(x)
    axes = () if sharding is None or sharding.mesh.empty else sharding.mesh.auto_axes
    return any(sharding.mesh.shape[axis] > 1 for axis in axes)


def is_sharded_along(x: Any, dim: int) -> bool:
    """Returns whether the type of an array says that a given dimension is sharded."""
    if not is_explicit(x):
        return False
    # A spec may be shorter than the shape: its missing entries mean that nothing is sharded there.
    return (*_sharding(x).spec, *[None] * x.ndim)[: x.ndim][dim] is not None


def _sharding(x: Any) -> Any:
    is_type = isinstance(x, jax.ShapeDtypeStruct | jax.core.AbstractValue)
    return x.sharding if is_type else jax.typeof(x).sharding


def shard_shape(aval: Any) -> tuple[Any, ...]:
    """Returns the shape of one device's part of an array, as far as the program says."""
    return aval.sharding.shard_shape(aval.shape) if is_explicit(aval) else aval.shape


def numbered(jaxpr: Any, name: str, holds: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """Puts each equation of a closed jaxpr into a scope with a number, inner programs included.

    JAX leaves an equation's scopes on the equations of its derivative, so the number says which
    equation a derivative belongs to. Equations of a program that is called twice are numbered once.
    Returns the program, and its equations by their numbers. ``holds`` says of an equation whether
    the programs in its parameters are its inner programs.
    """
    equations: list[Any] = []
    done: dict[int, tuple[Any, Any]] = {}  # with the programs themselves, so that ids stay theirs

    def program(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(program, x))
        inner = open_jaxpr(x)[0]
        if not hasattr(inner, "eqns"):
            return x
        if id(x) not in done:
            new = inner.replace(eqns=[equation(eqn) for eqn in inner.eqns])
            done[id(x)] = x, (new if inner is x else x.replace(jaxpr=new))
        return done[id(x)][1]

    def equation(eqn: Any) -> Any:
        info = eqn.source_info
        stack = info.name_stack.extend(f"{name}{len(equations)}")
        equations.append(eqn)
        params = eqn.params
        if holds(eqn):
            inner = {k: program(p) for k, p in params.items()}
            params = _with_own_lines(eqn.primitive.name, inner)
        return eqn.replace(params=params, source_info=info.replace(name_stack=stack))

    return program(jaxpr), equations


def _with_own_lines(name: str, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of an equation; rules of its author get their own source lines."""
    if not name.startswith("custom_"):
        return params
    return {k: own_lines(p) if isinstance(p, lu.WrappedFun) else p for k, p in params.items()}


def called(eqn: Any) -> str:
    """Returns the name of the function that an equation calls, or that of its primitive."""
    program = eqn.params.get("call_jaxpr")
    info = getattr(open_jaxpr(program)[0], "debug_info", None)
    return getattr(info, "func_name", None) or eqn.primitive.name


def flops_of(eqn: Any) -> int:
    """Returns the number of floating-point operations of a matmul or convolution."""
    if not eqn.outvars:
        return 0
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = [eqn.invars[0].aval.shape[d] for d in contracted]
        return 2 * size_of((*out.shape, *depth))
    if name == "ragged_dot_general":
        # A row is multiplied by the matrix of its own group alone.
        return 2 * size_of((*out.shape, eqn.invars[0].aval.shape[-1]))
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernel = eqn.invars[1].aval.shape
        per_output = [size for d, size in enumerate(kernel) if d != numbers.rhs_spec[0]]
        return 2 * size_of((*out.shape, *per_output))
    return 0
