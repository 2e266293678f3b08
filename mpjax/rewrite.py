"""The rewrite: evaluates a planned program, so that tracing it gives the mixed-precision one.

One short loop over the ops of a block, one rule per kind of op, one named function per
higher-order primitive. Casts are made where a value is read in a dtype that it is not held in, and
kept: a value is cast at most once to each dtype in a block. Arguments are the exception: each use
casts on its own, so that their cotangents are summed in float32.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from mpjax import _jax, ops
from mpjax.dtypes import FLOAT32, HALVES
from mpjax.graph import REGION, ROW, Block, Op, Sub, Value
from mpjax.islands import Island, schedule, signature
from mpjax.plan import Plan, make_plan
from mpjax.policy import Policy


def run_plan(plan: Plan, args: Sequence[Any], out_dtypes: Sequence[Any]) -> list[Any]:
    """Evaluates a planned program.

    Args:
        plan: The plan.
        args: One array for each argument, in the dtypes it was planned for.
        out_dtypes: What each float32 result is handed out in.

    Returns:
        The results.
    """
    return _run_block(plan.block, args, out_dtypes, plan.policy)


def _run_block(
    block: Block, args: Sequence[Any], out_dtypes: Sequence[Any], policy: Policy, islands=True
) -> list[Any]:
    env = Env(policy, islands, block.in_loop)
    for value, const in block.consts:
        env.write(value, const)
    for value, arg in zip(block.invars, args, strict=True):
        env.write(value, arg)
    for step in schedule(block) if islands else block.ops:
        _run_step(step, env)
    return [env.result(v, dtype) for v, dtype in zip(block.outvars, out_dtypes, strict=True)]


def _run_step(step: "Op | Island", env: "Env") -> None:
    if isinstance(step, Island):
        _run_island(step, env)
        return
    with _jax.location(step.eqn, step.stack), _row(step):
        EVALUATE[step.forced or step.rule](step, env)


def _row(op: Op) -> Any:
    """Returns the scope by which a report finds what an op became; none where none was asked."""
    return contextlib.nullcontext() if op.row < 0 else jax.named_scope(f"{ROW}{op.row}")


class Env:
    """The arrays of a block as it is evaluated, in each dtype that they were read in."""

    def __init__(self, policy: Policy, islands: bool, in_loop: bool):
        self.policy = policy
        self.islands = islands
        self.in_loop = in_loop
        self.shared: dict[Any, Any] = {}  # islands that were traced, by what they compute
        self._arrays: dict[Value, dict[Any, Any]] = {}
        self._makers: dict[Value, Callable[[Any], Any]] = {}
        self._exact: dict[Value, Any] = {}
        self._known: dict[Value, Any] = {}

    def write(self, value: Value, array: Any) -> None:
        """Records an array in the dtype that it has."""
        self._arrays[value] = {array.dtype if value.is_f32 else None: array}

    def store(self, value: Value, array: Any) -> None:
        """Records a result in the dtype that the plan stores it in."""
        if value in self._known:
            array = _known(array, self._known[value])
        if value.is_f32 and array.dtype != value.dtype:
            if value.returned:
                self._exact[value] = array
            array = _cast(array, value.dtype)
        self.write(value, array)

    def inside(self, known: dict[Value, Any] | None) -> "Env":
        """Returns the environment of an island; values of ``known`` are not computed again."""
        env = Env(self.policy, self.islands, self.in_loop)
        env._known = known or {}
        return env

    def make(self, value: Value, maker: Callable[[Any], Any]) -> None:
        """Records how to make a value in the dtype that somebody asks for."""
        self._makers[value] = maker

    def read(self, value: Value, dtype: Any = None) -> Any:
        """Returns the array of a value; a float32 one in ``dtype`` if given."""
        if not value.is_f32:
            return self._arrays[value][None] if value in self._arrays else value.const
        arrays = self._arrays.setdefault(value, {})
        dtype = np.dtype(dtype or value.dtype)
        if dtype in arrays:
            return arrays[dtype]
        if value in self._makers:
            made = self._makers[value](dtype)
        elif not arrays:  # a literal
            return np.asarray(value.const, dtype)
        elif value.const is not None and dtype in HALVES:
            made = _round_constant(next(iter(arrays.values())), value.const, dtype)
        else:
            made = _cast(next(iter(arrays.values())), dtype)
            if value.raw and dtype in HALVES:
                return made
        arrays[dtype] = made
        return made

    def best(self, value: Value) -> Any:
        """Returns the array of a value as it is held, or as computed where it is handed out so."""
        return self._exact[value] if value in self._exact else self.read(value)

    def result(self, value: Value, dtype: Any) -> Any:
        """Returns what a program hands out: the float32 array itself where one was returned."""
        if value in self._exact and dtype == FLOAT32:
            return self._exact[value]
        if not value.is_f32:
            return self.read(value)
        if value not in self._arrays and value not in self._makers:
            return jnp.asarray(value.const, dtype)
        return self.read(value, dtype)


def _cast(array: Any, dtype: Any) -> Any:
    return jax.lax.convert_element_type(array, dtype)


def _round_constant(array: Any, const: Any, dtype: Any) -> Any:
    """Folds the cast of a constant."""
    with np.errstate(over="ignore"):
        return np.broadcast_to(np.asarray(const).astype(dtype), np.shape(array))


# ---- one op -------------------------------------------------------------------------------------


def _run(op: Op, env: Env, dtype: Any, **params: Any) -> None:
    if dtype in HALVES and op.name in ops.ELEMENTWISE:
        args = [_read_expanded(op, v, env, dtype) for v in op.ins]
    else:
        args = [env.read(v, dtype) for v in op.ins]
    for value, array in zip(op.outs, _jax.bind(op.eqn, args, **params), strict=True):
        env.store(value, array)


def _run_as_planned(op: Op, env: Env) -> None:
    if op.name == "custom_jvp_call" and op.compute != FLOAT32:
        return _run_custom_jvp(op, env)
    if op.name == "broadcast_in_dim" and op.outs[0].is_f32 and op.outs[0].const is not None:
        return env.make(op.outs[0], functools.partial(_broadcast, op, env))
    if op.name == "gather" and op.outs[0].is_f32 and _jax.picks_one_per_row(op.eqn):
        return env.store(op.outs[0], _pick(op, [env.read(v, op.compute) for v in op.ins]))
    if op.name in ops.SUMS_COTANGENTS and op.compute in HALVES and _jax.enlarges(op.eqn):
        args = [env.read(v, op.compute) for v in op.ins]
        wide = _wide_cotangent(lambda *xs: _jax.bind(op.eqn, xs)[0], args)
        return env.store(op.outs[0], wide)
    return _run(op, env, op.compute)


def _pick(op: Op, args: Sequence[Any]) -> Any:
    """Gathers one entry per row; the transpose is a select, not a scatter into a tensor of zeros.

    A cross entropy picks its labels' logits so. XLA fuses the select into what it is added to.
    """

    @jax.custom_jvp
    def call(x, indices):
        return _jax.bind(op.eqn, [x, indices])[0]

    def jvp(primals, tangents):
        out = call(*primals)
        if isinstance(tangents[0], SymbolicZero):
            return out, _jax.zero_tangent(out)
        return out, _jax.select_one_per_row(op.eqn, tangents[0], primals[1]).astype(out.dtype)

    call.defjvp(jvp, symbolic_zeros=True)
    return call(*args)


def _read_expanded(op: Op, value: Value, env: Env, dtype: Any) -> Any:
    """Reads an operand; one that the op would broadcast is so beforehand, to sum wide."""
    shape = op.outs[0].aval.shape
    if not value.is_f32 or value.const is not None or value.aval.shape == shape:
        return env.read(value, dtype)
    if value.dtype == dtype:
        return _wide_cotangent(lambda x: _jax.expand(x, op.outs[0].aval), [env.read(value)])
    return _cast(_jax.expand(env.read(value, FLOAT32), op.outs[0].aval), dtype)


def _wide_cotangent(fun: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Runs a linear function whose transpose sums, so that it sums in float32."""
    first, *rest = args

    @jax.custom_jvp
    def call(x, *rest):
        return fun(x, *rest)

    def jvp(primals, tangents):
        x, *rest = primals
        tangent = tangents[0]
        out = call(x, *rest)
        if isinstance(tangent, SymbolicZero):
            return out, _jax.zero_tangent(out)
        return out, _cast(fun(_cast(tangent, FLOAT32), *rest), out.dtype)

    call.defjvp(jvp, symbolic_zeros=True)
    return call(first, *rest)


def _broadcast(op: Op, env: Env, dtype: Any) -> Any:
    with _jax.location(op.eqn, op.stack):
        return _jax.bind(op.eqn, [env.read(v, dtype) for v in op.ins])[0]


def _run_half(op: Op, env: Env) -> None:
    if op.name not in ops.HALF:
        return _run_as_planned(op, env)
    args = [env.read(v, op.half) for v in op.ins]
    args = [_cast(a, op.half) if a.dtype in HALVES and a.dtype != op.half else a for a in args]
    out = op.outs[0]
    if out.is_f32 and out.dtype == FLOAT32:
        array = _wide_matmul(op.eqn, args)
    else:
        wanted = op.half if out.is_f32 else out.aval.dtype
        array = _jax.bind(op.eqn, args, preferred_element_type=wanted)[0]
    env.store(out, array)


def _wide_matmul(eqn: Any, args: Sequence[Any]) -> Any:
    """A matmul of half operands that gives its float32 accumulator; its tangent is half."""
    primitive, params = eqn.primitive, dict(eqn.params)
    del params["preferred_element_type"]
    key = (primitive, tuple(sorted(params.items())))
    try:
        matmul = _cached_wide_matmul(*key)
    except TypeError:  # a parameter that cannot be hashed
        matmul = _cached_wide_matmul.__wrapped__(*key)
    return matmul(*args)


@functools.lru_cache(maxsize=4096)
def _cached_wide_matmul(primitive: Any, items: tuple[tuple[str, Any], ...]) -> Any:
    params = dict(items)

    def product(operands, dtype):
        return primitive.bind(*operands, **params, preferred_element_type=np.dtype(dtype))

    @jax.custom_jvp
    def matmul(*operands):
        return _jax.cpu_barrier(product(operands, FLOAT32))

    def jvp(primals, tangents):
        half = primals[0].dtype
        out = matmul(*primals)
        terms = [
            product((*primals[:i], tangent, *primals[i + 1 :]), half)
            for i, tangent in enumerate(tangents[:2])
            if not isinstance(tangent, SymbolicZero)
        ]
        if not terms:
            return out, jnp.zeros_like(out)
        return out, _cast(functools.reduce(jax.lax.add, terms), out.dtype)

    matmul.defjvp(jvp, symbolic_zeros=True)
    return matmul


def _run_cast(op: Op, env: Env) -> None:
    value, out = op.ins[0], op.outs[0]
    new = op.params["new_dtype"]
    if not out.is_f32 and not value.is_f32:
        return _run(op, env, None)
    if not out.is_f32:
        if new in HALVES and value.dtype in HALVES:
            array = env.read(value, value.dtype)
            env.write(out, _cast(array, new))
        else:
            _run(op, env, FLOAT32)
    elif value.is_f32:
        env.make(out, functools.partial(env.read, value))
    elif value.aval.dtype in HALVES and out.dtype == value.aval.dtype:
        env.write(out, env.read(value))
    elif value.aval.dtype == np.bool_:
        env.make(out, lambda dtype: _jax.bind(op.eqn, [env.read(value)], new_dtype=dtype)[0])
    else:
        _run(op, env, None)


# ---- programs inside ----------------------------------------------------------------------------


def _run_program(op: Op, env: Env) -> None:
    PROGRAMS[op.name](op, env)


def _out_dtypes(op: Op, sub: Sub) -> list[Any]:
    """Returns what the results of a sub-program are handed out in."""
    carried = dict(sub.carry)
    dtypes = []
    for position, index in enumerate(sub.outs):
        if position in carried:
            dtypes.append(sub.block.invars[carried[position]].dtype)
        else:
            dtypes.append(FLOAT32 if index is None else op.outs[index].dtype)
    return dtypes


def _trace_sub(op: Op, sub: Sub, env: Env, islands: bool | None = None) -> Any:
    """Returns the rewritten jaxpr of a sub-program."""
    islands = env.islands if islands is None else islands
    outs = _out_dtypes(op, sub)
    avals = [_jax.retyped(v.aval, v.dtype) if v.is_f32 else v.aval for v in sub.block.invars]
    return _jax.trace(
        lambda *args: _run_block(sub.block, args, outs, env.policy, islands), avals, op.name
    )


def _args(op: Op, sub: Sub, env: Env) -> list[Any]:
    return [
        env.read(op.ins[index], value.dtype)
        for value, index in zip(sub.block.invars, sub.ins, strict=True)
    ]


def _finish(op: Op, env: Env, results: Sequence[Any]) -> None:
    for value, array in zip(op.outs, results, strict=True):
        env.store(value, array)


def _run_in_place(param: str) -> Callable[[Op, Env], None]:
    """Replaces the one program of a primitive that calls it on all of its operands."""

    def rule(op: Op, env: Env) -> None:
        (sub,) = op.subs
        new = {param: _trace_sub(op, sub, env)}
        _finish(op, env, _jax.bind(op.eqn, _args(op, sub, env), **new))

    return rule


def _run_while(op: Op, env: Env) -> None:
    cond, body = op.subs
    consts = [
        env.read(op.ins[i], v.dtype) for i, v in zip(cond.ins, cond.block.invars, strict=True)
    ]
    args = [*consts[: cond.consts], *_args(op, body, env)]
    new = {
        "cond_jaxpr": _trace_sub(op, cond, env, islands=False),
        "body_jaxpr": _trace_sub(op, body, env, islands=False),
    }
    _finish(op, env, _jax.bind(op.eqn, args, **new))


def _run_cond(op: Op, env: Env) -> None:
    branches = tuple(_trace_sub(op, sub, env) for sub in op.subs)
    args = [env.read(op.ins[0]), *_args(op, op.subs[0], env)]
    _finish(op, env, _jax.bind(op.eqn, args, branches=branches))


def _run_remat(op: Op, env: Env) -> None:
    (sub,) = op.subs
    # What the user recomputes needs no islands of its own.
    jaxpr, consts = _jax.hoisted(_trace_sub(op, sub, env, islands=False))
    new: dict[str, Any] = {"jaxpr": jaxpr}
    if isinstance(op.params["prevent_cse"], tuple):
        new["prevent_cse"] = (True,) * len(consts) + op.params["prevent_cse"]
    _finish(op, env, _jax.bind(op.eqn, [*consts, *_args(op, sub, env)], **new))


def _run_shard_map(op: Op, env: Env) -> None:
    (sub,) = op.subs
    outs = _out_dtypes(op, sub)
    mapped = _jax.shard_map(
        lambda *args: tuple(_run_block(sub.block, args, outs, env.policy, env.islands)), op.params
    )
    _finish(op, env, mapped(*_args(op, sub, env)))


def _run_custom_jvp(op: Op, env: Env) -> None:
    """Keeps the custom rule in force, on primals and tangents of the planned dtypes."""
    (sub,) = op.subs
    policy, params = env.policy, op.params
    if op.rule == "program":
        in_dtypes = [v.dtype for v in sub.block.invars]
        outs = _out_dtypes(op, sub)
        args = _args(op, sub, env)
        primal = functools.partial(_run_block, sub.block, policy=policy, islands=env.islands)
    else:
        in_dtypes = [op.compute if v.is_f32 else None for v in op.ins]
        outs = [op.compute if v.is_f32 else None for v in op.outs]
        args = [env.read(v, op.compute) for v in op.ins]
        primal = functools.partial(_run_whole, params["call_jaxpr"], in_dtypes, policy, op.scopes)
    consts = params["num_consts"]

    @jax.custom_jvp
    def call(*args):
        return primal(args=args, out_dtypes=outs)

    @call.defjvp
    def jvp(primals, tangents):
        rule, zeros = _jax.custom_jvp_rule(params)
        results = _run_whole(
            rule,
            [*in_dtypes[consts:]] * 2,
            policy,
            op.scopes,
            args=[*primals[consts:], *tangents[consts:]],
            out_dtypes=[*outs, *(d for d, zero in zip(outs, zeros, strict=True) if not zero)],
            linear=range(len(primals) - consts, 2 * (len(primals) - consts)),
        )
        out, nonzero = results[: len(outs)], iter(results[len(outs) :])
        return out, [
            _jax.zero_tangent(o) if zero else next(nonzero)
            for o, zero in zip(out, zeros, strict=True)
        ]

    _finish(op, env, call(*args))


def _run_whole(
    jaxpr, in_dtypes, policy, scopes, *, args, out_dtypes, linear: Sequence[int] = ()
) -> list[Any]:
    """Plans and runs a program on its own, such as a custom rule."""
    inner, consts = _jax.open_jaxpr(jaxpr)
    plan = make_plan(inner, consts, policy, in_dtypes, out_dtypes, scopes=scopes, linear=linear)
    return run_plan(plan, args, out_dtypes)


def _run_custom_vjp(op: Op, env: Env) -> None:
    """Keeps the custom rules in force: forward and backward are both planned and rewritten."""
    (sub,) = op.subs
    policy = env.policy
    in_dtypes = [v.dtype for v in sub.block.invars]
    outs = _out_dtypes(op, sub)
    consts = op.params["num_consts"]
    # The backward rule is code of its own: a region around the call does not reach it.
    behind = tuple(name for name in op.scopes if not name.startswith(REGION))

    @jax.custom_vjp
    def call(*args):
        return _run_block(sub.block, args, outs, policy, env.islands)

    def fwd(*args):
        fwd, bwd, forwards, count, zeros = _jax.custom_vjp_rules(
            op.params, [v.aval for v in op.ins]
        )
        inner, inner_consts = _jax.open_jaxpr(fwd)
        computed = len(inner.outvars) - count
        wanted = _residual_dtypes(bwd, forwards, outs, policy, behind)
        res_dtypes = [d for d, f in zip(wanted, forwards, strict=True) if f is None]
        plan = make_plan(
            inner, inner_consts, policy, in_dtypes[consts:], [*res_dtypes, *outs], scopes=op.scopes
        )
        # A residual that is stored in half anyway is handed over as it is.
        kept = [
            v.dtype if v.is_f32 and v.kind == "half" else d
            for v, d in zip(plan.block.outvars[:computed], res_dtypes, strict=True)
        ]
        results = run_plan(plan, args[consts:], [*kept, *outs])
        made = iter(results[:computed])
        residuals = [next(made) if f is None else args[f] for f in forwards]
        return results[computed:], _Residuals(residuals, bwd, zeros)

    def bwd(saved, cts):
        residuals, program, zeros = saved.arrays, saved.program, saved.zeros
        args = [*residuals, *cts]
        results = iter(
            _run_whole(
                program,
                [getattr(a, "dtype", None) for a in args],
                policy,
                behind,
                args=args,
                out_dtypes=[
                    d for d, zero in zip(in_dtypes[consts:], zeros, strict=True) if not zero
                ],
            )
        )
        grads = [None if zero else next(results) for zero in zeros]
        return (*[None] * consts, *grads)

    call.defvjp(fwd, bwd)
    _finish(op, env, call(*_args(op, sub, env)))


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """Residuals of a custom_vjp, with the backward program that takes them."""

    def __init__(self, arrays, program, zeros):
        self.arrays, self.program, self.zeros = arrays, program, zeros

    def tree_flatten(self):
        return (self.arrays,), (_ById(self.program), tuple(self.zeros))

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], aux[0].value, aux[1])


class _ById:
    """Compares by identity, whatever it holds."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _ById) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def _residual_dtypes(bwd, forwards, ct_dtypes, policy, scopes) -> list[Any]:
    """Returns what each residual is stored in: half where only half operations read it."""
    inner, consts = _jax.open_jaxpr(bwd)
    dtypes = [v.aval.dtype if hasattr(v.aval, "dtype") else None for v in inner.invars]
    count = len(forwards)
    dtypes[count:] = [d or t for d, t in zip(ct_dtypes, dtypes[count:], strict=True)]
    plan = make_plan(inner, consts, policy, dtypes, scopes=scopes)
    half = policy.compute_dtype
    return [
        half
        if v.is_f32 and v.outside and v.readers == 1 and not v.all_full and half in HALVES
        else v.aval.dtype
        for v in plan.block.invars[:count]
    ]


def _run_custom_vmap(op: Op, env: Env) -> None:
    (sub,) = op.subs
    rule = _jax.wrap_vmap_rule(op.params["rule"], functools.partial(_rerun, env.policy, op))
    new = {"call": _trace_sub(op, sub, env), "rule": rule}
    _finish(op, env, _jax.bind(op.eqn, _args(op, sub, env), **new))


def _run_linear_call(op: Op, env: Env) -> None:
    (sub,) = op.subs
    thunk = op.params["transpose_thunk"]

    @functools.cache
    def transpose_thunk():
        transpose, consts = thunk()
        avals = _jax.in_avals(transpose)
        run = functools.partial(_jax.eval_closed, transpose)
        return _jax.trace(functools.partial(_rerun, env.policy, op, run), avals, op.name), consts

    new = {"callee": _trace_sub(op, sub, env), "transpose_thunk": transpose_thunk}
    _finish(op, env, _jax.bind(op.eqn, _args(op, sub, env), **new))


def _rerun(policy: Policy, op: Op, fun: Callable[..., Sequence[Any]], *args: Any) -> list[Any]:
    """Traces, plans and runs a function of flat arguments, at its own interface dtypes."""
    avals = [jax.typeof(a) for a in args]
    jaxpr, consts = _jax.open_jaxpr(_jax.trace(fun, avals, op.name))
    in_dtypes = [a.dtype for a in avals]
    outs = [v.aval.dtype for v in jaxpr.outvars]
    plan = make_plan(jaxpr, consts, policy, in_dtypes, outs, scopes=op.scopes)
    return run_plan(plan, args, outs)


PROGRAMS: dict[str, Callable[[Op, Env], None]] = {
    "scan": _run_in_place("jaxpr"),
    "while": _run_while,
    "cond": _run_cond,
    "jit": _run_in_place("jaxpr"),
    "remat2": _run_remat,
    "shard_map": _run_shard_map,
    "custom_jvp_call": _run_custom_jvp,
    "custom_vjp_call": _run_custom_vjp,
    "custom_vmap_call": _run_custom_vmap,
    "linear_call": _run_linear_call,
}

EVALUATE: dict[str, Callable[[Op, Env], None]] = {
    "half": _run_half,
    "full": _run_as_planned,
    "follow": _run_as_planned,
    "layout": _run_as_planned,
    "neutral": _run_as_planned,
    "cast": _run_cast,
    "program": _run_program,
    "leave": _run_as_planned,
    "written": _run_as_planned,
}


# ---- islands ------------------------------------------------------------------------------------


def _run_island(island: Island, env: Env) -> None:
    """Runs a float32 island so that the backward pass recomputes it from its inputs."""
    inputs = island.inputs
    arrays = [env.read(v) for v in inputs]
    scopes = _jax.common_stack([op.stack for op in island.ops])
    depth = len(scopes.stack)

    def run(arrays, known=None):
        inner = env.inside(known)
        for value, array in zip(inputs, arrays, strict=True):
            inner.write(value, array)
        for op in (*island.free, *island.ops):
            with _jax.location(op.eqn, _jax.below(op.stack, depth)), _row(op):
                EVALUATE[op.forced or op.rule](op, inner)
        results = [
            inner.read(v, island.half) if v in island.in_half else inner.best(v)
            for v in island.results
        ]
        return results, [inner.read(v) for v in island.sums]

    prevent = island.barrier and not env.in_loop
    with _jax.scoped(scopes):
        if island.axes:
            results = _run_softmax(run, island, arrays, env.in_loop)
        elif island.rounded:
            results = _recomputed_from_half(run, island, inputs, arrays, prevent)
        else:
            key = signature(island, depth)
            run = run if key is None else env.shared.setdefault(key, run)
            results, _ = jax.checkpoint(run, policy=_keep_reductions, prevent_cse=prevent)(arrays)
    for value, array in zip(island.results, results, strict=True):
        if value in island.in_half:
            env.write(value, array)
        else:
            env.store(value, array)


def _keep_reductions(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in ops.REDUCTIONS


def _recomputed_from_half(run, island: Island, inputs, arrays, prevent: bool) -> list[Any]:
    """Runs an island in float32; its derivative is computed from inputs that are kept in half."""
    rounded = [v in island.rounded for v in inputs]

    @jax.custom_jvp
    def call(*arrays):
        return run(arrays)

    @functools.partial(jax.checkpoint, prevent_cse=prevent, static_argnums=2)
    def tangent(arrays, sums, moving, tangents):
        known = dict(zip(island.sums, sums, strict=True))

        def wide(*varying):
            given = iter(varying)
            full = [next(given) if moves else a for a, moves in zip(arrays, moving, strict=True)]
            return run(full, known)

        arrays = [_cast(a, FLOAT32) if r else a for a, r in zip(arrays, rounded, strict=True)]
        return jax.jvp(wide, [a for a, m in zip(arrays, moving, strict=True) if m], tangents)[1]

    def jvp(primals, tangents):
        results, sums = call(*primals)
        moving = tuple(not isinstance(t, SymbolicZero) for t in tangents)
        if not any(moving):
            return (results, sums), jax.tree.map(_jax.zero_tangent, (results, sums))
        kept = [_cast(p, island.half) if r else p for p, r in zip(primals, rounded, strict=True)]
        given = [t for t, moves in zip(tangents, moving, strict=True) if moves]
        return (results, sums), tangent(kept, sums, moving, given)

    call.defjvp(jvp, symbolic_zeros=True)
    return call(*arrays)[0]


def _run_softmax(run, island: Island, arrays, in_loop: bool) -> list[Any]:
    """Runs a softmax in float32; its derivative is computed from its result, kept in half."""

    @jax.custom_jvp
    def call(*arrays):
        (result,), _ = run(arrays)
        return result

    @call.defjvp
    def jvp(primals, tangents):
        out = call(*primals)
        slope = _softmax_slope(island.axes, out.dtype, not in_loop)
        return out, slope(_cast(out, island.half), tangents[0])

    return [call(*arrays)]


@functools.cache
def _softmax_slope(axes: tuple[int, ...], dtype: Any, prevent_cse: bool) -> Callable[..., Any]:
    """Returns the derivative of a softmax; the same function each time, to be traced once."""

    @functools.partial(jax.checkpoint, prevent_cse=prevent_cse)
    def slope(result, tangent):
        full, tangent = _cast(result, FLOAT32), _cast(tangent, FLOAT32)
        mean = jnp.sum(full * tangent, axes, keepdims=True)
        return _cast(full * (tangent - mean), dtype)

    return slope


@jax.custom_jvp
def _known(computed, known):
    """Returns ``known``, with the tangent of what was computed."""
    return known


@_known.defjvp
def _known_jvp(primals, tangents):
    return primals[1], tangents[0]
