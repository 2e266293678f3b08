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
import numpy as np
from jax.custom_derivatives import SymbolicZero

from mpjax._src import _jax, rules
from mpjax._src.autocast.derivatives import (
    attention,
    cast,
    elementwise,
    pick,
    recomputed,
    recomputed_from_half,
    softmax,
    wide_cotangent,
    wide_matmul,
)
from mpjax._src.autocast.environment import Env
from mpjax._src.autocast.gathers import picks_one_per_row
from mpjax._src.autocast.graph import REGION, ROW, Block, Op, Sub, Value
from mpjax._src.autocast.islands import Island, schedule, signature
from mpjax._src.autocast.plan import Plan, make_plan
from mpjax._src.dtypes import FLOAT32, HALVES
from mpjax._src.policy import Policy


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
    block: Block,
    args: Sequence[Any],
    out_dtypes: Sequence[Any],
    policy: Policy,
    islands: str = "all",
) -> list[Any]:
    env = Env(policy, islands, block.in_loop)
    for value, const in block.consts:
        env.write(value, const)
    for value, arg in zip(block.invars, args, strict=True):
        env.write(value, arg)
    for step in schedule(block, islands):
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


# ---- one op -------------------------------------------------------------------------------------


def _run(op: Op, env: Env, dtype: Any, **params: Any) -> None:
    if dtype in HALVES and op.spec.need == rules.FOLLOW:
        args = [_read_expanded(op, v, env, dtype) for v in op.ins]
    else:
        args = [env.read(v, dtype) for v in op.ins]
    if op.steady:
        args = jax.lax.stop_gradient(args)
    for value, array in zip(op.outs, _jax.bind(op.eqn, args, **params), strict=True):
        env.store(value, array)


def _run_as_planned(op: Op, env: Env) -> None:
    if op.name == "custom_jvp_call" and op.compute != FLOAT32:
        return _run_custom_jvp(op, env)
    if op.name == "broadcast_in_dim" and op.outs[0].is_f32 and op.outs[0].const is not None:
        return env.make(op.outs[0], functools.partial(_broadcast, op, env))
    if op.name == "gather" and op.outs[0].is_f32 and picks_one_per_row(op.eqn):
        return env.store(op.outs[0], pick(op.eqn, [env.read(v, op.compute) for v in op.ins]))
    if rules.SUMS_BACK in op.spec.traits and op.compute in HALVES and _enlarges(op.eqn):
        args = [env.read(v, op.compute) for v in op.ins]
        wide = wide_cotangent(lambda *xs: _jax.bind(op.eqn, xs)[0], args)
        return env.store(op.outs[0], wide)
    return _run(op, env, op.compute)


def _read_expanded(op: Op, value: Value, env: Env, dtype: Any) -> Any:
    """Reads an operand; one that the op would broadcast is so beforehand, to sum wide."""
    shape = op.outs[0].aval.shape
    if not value.is_f32 or value.const is not None or value.aval.shape == shape:
        return env.read(value, dtype)
    if value.dtype == dtype:
        return wide_cotangent(lambda x: _expand(x, op.outs[0].aval), [env.read(value)])
    return cast(_expand(env.read(value, FLOAT32), op.outs[0].aval), dtype)


def _expand(x: Any, aval: Any) -> Any:
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


def _enlarges(eqn: Any) -> bool:
    """Tells whether a layout operation copies: its transpose then sums more than one term."""
    if eqn.primitive.name != "broadcast_in_dim":
        return True
    return np.prod(eqn.outvars[0].aval.shape) > np.prod(eqn.invars[0].aval.shape)


def _broadcast(op: Op, env: Env, dtype: Any) -> Any:
    with _jax.location(op.eqn, op.stack):
        return _jax.bind(op.eqn, [env.read(v, dtype) for v in op.ins])[0]


def _run_half(op: Op, env: Env) -> None:
    if op.spec.need != rules.HALF:
        return _run_as_planned(op, env)
    args = [env.read(v, op.half) for v in op.ins]
    args = [cast(a, op.half) if a.dtype in HALVES and a.dtype != op.half else a for a in args]
    out = op.outs[0]
    if out.is_f32 and out.dtype == FLOAT32:
        array = wide_matmul(op.eqn, args)
    else:
        wanted = op.half if out.is_f32 else out.aval.dtype
        array = _jax.bind(op.eqn, args, preferred_element_type=wanted)[0]
    env.store(out, array)


def _run_cast(op: Op, env: Env) -> None:
    value, out = op.ins[0], op.outs[0]
    new = op.params["new_dtype"]
    if not out.is_f32 and not value.is_f32:
        return _run(op, env, None)
    if not out.is_f32:
        if new in HALVES and value.dtype in HALVES:
            array = env.read(value, value.dtype)
            env.write(out, cast(array, new))
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


def _trace_sub(op: Op, sub: Sub, env: Env, islands: str | None = None) -> Any:
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
        "cond_jaxpr": _trace_sub(op, cond, env, islands="none"),
        "body_jaxpr": _trace_sub(op, body, env, islands="none"),
    }
    _finish(op, env, _jax.bind(op.eqn, args, **new))


def _run_cond(op: Op, env: Env) -> None:
    branches = tuple(_trace_sub(op, sub, env) for sub in op.subs)
    args = [env.read(op.ins[0]), *_args(op, op.subs[0], env)]
    _finish(op, env, _jax.bind(op.eqn, args, branches=branches))


def _run_remat(op: Op, env: Env) -> None:
    (sub,) = op.subs
    # What the user recomputes is not computed a third time.
    jaxpr, consts = _jax.hoisted(_trace_sub(op, sub, env, islands="softmaxes"))
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
    symbolic = bool(op.params["symbolic_zeros"])
    behind = tuple(name for name in op.scopes if not name.startswith(REGION))

    @jax.custom_vjp
    def call(*args):
        return _run_block(sub.block, args, outs, policy, env.islands)

    def fwd(*args):
        perturbed = [True] * len(args)
        if symbolic:
            perturbed, args = [a.perturbed for a in args], tuple(a.value for a in args)
        fwd, trace_bwd, forwards, count = _jax.custom_vjp_rules(
            op.params, [v.aval for v in op.ins], perturbed[consts:]
        )
        inner, inner_consts = _jax.open_jaxpr(fwd)
        computed = len(inner.outvars) - count
        backward, _ = trace_bwd((False,) * count)
        wanted = _residual_dtypes(backward, forwards, outs, policy, behind)
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
        return results[computed:], _Residuals(residuals, trace_bwd)

    def bwd(saved, cts):
        zero_cts = tuple(isinstance(ct, SymbolicZero) for ct in cts)
        backward, zeros = saved.trace_bwd(zero_cts)
        args = [*saved.arrays, *(c for c, zero in zip(cts, zero_cts, strict=True) if not zero)]
        results = iter(
            _run_whole(
                backward,
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

    call.defvjp(fwd, bwd, symbolic_zeros=symbolic)
    _finish(op, env, call(*_args(op, sub, env)))


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """Residuals of a custom_vjp, with what traces the backward program that takes them."""

    def __init__(self, arrays, trace_bwd):
        self.arrays, self.trace_bwd = arrays, trace_bwd

    def tree_flatten(self):
        return (self.arrays,), _ById(self.trace_bwd)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], aux.value)


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
    rule = _wrap_vmap_rule(op.params["rule"], functools.partial(_rerun, env.policy, op))
    new = {"call": _trace_sub(op, sub, env), "rule": rule}
    _finish(op, env, _jax.bind(op.eqn, _args(op, sub, env), **new))


def _wrap_vmap_rule(rule: Any, rerun: Callable[..., Any]) -> Any:
    """Returns a custom_vmap's rule whose program is run by ``rerun(fun, *flat_args)``."""

    def wrapped(axis_size, in_batched, *args):
        leaves, tree = jax.tree_util.tree_flatten(args)
        stored: list[Any] = []

        def flat(*leaves):
            outs, batched = rule(axis_size, in_batched, *jax.tree_util.tree_unflatten(tree, leaves))
            flat_outs, out_tree = jax.tree_util.tree_flatten(outs)
            stored[:] = [out_tree, batched]
            return flat_outs

        outs = rerun(flat, *leaves)
        return jax.tree_util.tree_unflatten(stored[0], outs), stored[1]

    return wrapped


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
    arrays = [env.read(v) for v in island.inputs]
    scopes = _jax.common_stack([op.stack for op in island.ops])
    depth = len(scopes.stack)

    def evaluate(members, given, sums=()):
        inner = env.inside(dict(zip(island.sums, sums, strict=False)))
        for value, array in given:
            inner.write(value, array)
        for op in (*island.free, *members):
            with _jax.location(op.eqn, _jax.below(op.stack, depth)), _row(op):
                EVALUATE[op.forced or op.rule](op, inner)
        return inner

    def run(arrays, sums=()):
        inner = evaluate(island.ops, zip(island.inputs, arrays, strict=True), sums)
        results = [
            inner.read(v, island.half) if v in island.in_half else inner.best(v)
            for v in island.results
        ]
        return results, [inner.read(v) for v in island.sums]

    def weigh(p, more):
        given = zip([*island.sums, *island.inputs[2:]], [p, *more], strict=True)
        return evaluate(island.weights, given).read(island.weights[-1].outs[0], FLOAT32)

    prevent = island.barrier and not env.in_loop
    with _jax.location(island.ops[-1].eqn, scopes), _row(island.ops[-1]):
        if island.matmul:
            weighed = island.weights[-1].outs if island.weights else island.sums
            eqn, place = island.matmul.eqn, island.matmul.ins.index(weighed[0])
            results = attention(
                run, arrays, island.axes, island.half, eqn, place, weigh if island.weights else None
            )
        elif island.axes:
            results = softmax(run, arrays, island.axes, island.half, not env.in_loop)
        elif island.sloped:
            results = elementwise(run, arrays, prevent)
        elif island.rounded:
            rounded = [v in island.rounded for v in island.inputs]
            results = recomputed_from_half(run, arrays, rounded, island.half, prevent)
        else:
            key = signature(island, depth)
            run = run if key is None else env.shared.setdefault(key, run)
            results = recomputed(run, arrays, prevent)
    for value, array in zip(island.results, results, strict=True):
        if value in island.in_half:
            env.write(value, array)
        else:
            env.store(value, array)
