"""Evaluates functions with custom derivative, transposition or batching rules.

The rule is kept. It is planned and rewritten as its own program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from mpjax._src.autocast.environment import Env
from mpjax._src.autocast.kernels import tracing
from mpjax._src.autocast.operations import (
    avals_of,
    body_of,
    evaluates,
    finish,
    operands,
    result_dtypes,
    run_block,
)
from mpjax._src.autocast.plan import analyze, make_plan, outline, run_plan
from mpjax._src.base import _jax
from mpjax._src.base.dtypes import HALVES
from mpjax._src.policy.policy import Policy
from mpjax._src.program.graph import REGION, Op


@evaluates("custom_jvp_call")
def _run_custom_jvp(op: Op, env: Env) -> None:
    """Evaluates a custom_jvp with its own rule, on primals and tangents of the planned dtypes."""
    (sub,) = op.subs
    policy, params = env.settings.policy, op.params
    if env.rulings[op].rule == "program":
        in_dtypes = [env.stored[v].dtype for v in sub.program.invars]
        outs = result_dtypes(op, sub, env)
        args = operands(op, env)
        primal = functools.partial(run_block, sub.program, settings=env.settings)
    else:
        in_dtypes = [env.choices[op].compute if v.is_f32 else None for v in op.ins]
        outs = [env.choices[op].compute if v.is_f32 else None for v in op.outs]
        args = [env.read(v, env.choices[op].compute) for v in op.ins]
        primal = functools.partial(_run_whole, params["call_jaxpr"], in_dtypes, policy, op.scopes)
    consts = params["num_consts"]

    @jax.custom_jvp
    def call(*args):
        return primal(args=args, out_dtypes=outs)

    @call.defjvp
    def jvp(primals, tangents):
        with tracing(policy):
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

    finish(op, env, call(*args))


def _run_whole(
    jaxpr, in_dtypes, policy, scopes, *, args, out_dtypes, linear: Sequence[int] = ()
) -> list[Any]:
    """Plans and runs a separate program, such as a custom rule."""
    inner, consts = _jax.open_jaxpr(jaxpr)
    plan = make_plan(inner, consts, policy, in_dtypes, out_dtypes, scopes=scopes, linear=linear)
    return run_plan(plan, args, out_dtypes)


@evaluates("custom_vjp_call")
def _run_custom_vjp(op: Op, env: Env) -> None:
    """Evaluates a custom_vjp: its forward and backward rules are both planned and rewritten."""
    (sub,) = op.subs
    policy = env.settings.policy
    in_dtypes = [env.stored[v].dtype for v in sub.program.invars]
    outs = result_dtypes(op, sub, env)
    consts = op.params["num_consts"]
    # The backward rule is separate code, so a region around the call does not apply to it.
    symbolic = bool(op.params["symbolic_zeros"])
    behind = tuple(name for name in op.scopes if not name.startswith(REGION))

    @jax.custom_vjp
    def call(*args):
        return run_block(sub.program, args, outs, env.settings)

    def fwd(*args):
        perturbed, args = [a.perturbed for a in args], tuple(a.value for a in args)
        avals = [v.aval for v in op.ins]
        with tracing(policy):
            rules = _jax.custom_vjp_rules(op.params, avals, perturbed, concrete)
            backward = _with_all_cotangents(rules.trace_bwd, len(outs))
        wanted = _computed_dtypes(rules, backward, outs, policy, behind)
        plan = make_plan(
            *_jax.open_jaxpr(rules.fwd),
            policy,
            in_dtypes[consts:],
            [*wanted, *outs],
            scopes=op.scopes,
        )
        kept = _passed_on(plan, wanted)
        results = run_plan(plan, args[consts:], [*kept, *outs])
        residuals = [args[i] if is_argument else results[i] for is_argument, i in rules.residuals]
        return results[len(kept) :], _Residuals(residuals, rules.trace_bwd)

    def bwd(saved, cts):
        if not symbolic:
            cts = [_jax.instantiated(ct) for ct in cts]
        zero_cts = tuple(isinstance(ct, SymbolicZero) for ct in cts)
        with tracing(policy):
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

    # Which operands are differentiated, only a rule with symbolic zeros is told. The rule of the
    # program may ask: one that was evaluated from its jaxpr refuses a gradient of its constants.
    call.defvjp(fwd, bwd, symbolic_zeros=True)
    args = operands(op, env)
    concrete = _concrete(op, args)
    finish(op, env, call(*args))


def _concrete(op: Op, args: Sequence[Any]) -> dict[int, Any]:
    """Returns the operands, by position, that are Python values or arrays with a value.

    The backward rule gets them unchanged, because it may branch on them.
    """
    return {
        i: v.const if v.literal else a
        for i, (v, a) in enumerate(zip(op.ins, args, strict=True))
        if v.literal or not (v.is_f32 or isinstance(a, jax.core.Tracer))
    }


def _computed_dtypes(rules, backward, ct_dtypes, policy, scopes) -> list[Any]:
    """Returns the dtype of each residual that the forward rule computes, as the backward wants."""
    inner, _ = _jax.open_jaxpr(rules.fwd)
    dtypes = [getattr(v.aval, "dtype", None) for v in inner.outvars[: rules.num_computed]]
    if backward is not None:
        wanted = _residual_dtypes(backward, len(rules.residuals), ct_dtypes, policy, scopes)
        for (given, index), dtype in zip(rules.residuals, wanted, strict=True):
            if not given:  # else it is an operand, which is passed on as it is
                dtypes[index] = dtype
    return dtypes


def _passed_on(plan: Any, dtypes: Sequence[Any]) -> list[Any]:
    """Returns the dtypes of residuals: one that is stored in 16 bits is passed on in 16 bits."""
    stored = plan.analysis.stored
    return [
        stored[v].dtype if v.is_f32 and stored[v].kind == "half" else d
        for v, d in zip(plan.block.outvars[: len(dtypes)], dtypes, strict=True)
    ]


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """The residuals of a custom_vjp, with the function that traces its backward program."""

    def __init__(self, arrays, trace_bwd):
        self.arrays, self.trace_bwd = arrays, trace_bwd

    def tree_flatten(self):
        return (self.arrays,), _ById(self.trace_bwd)

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children[0], aux.value)


class _ById:
    """A static value that is compared by identity."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _ById) and self.value is other.value

    def __hash__(self):
        return id(self.value)


def _with_all_cotangents(trace_bwd: Callable[..., Any], count: int) -> Any:
    """Returns the program of a backward rule for all cotangents, or None if the rule raises.

    A rule may reject a cotangent that it never gets, such as that of a counter or of a result that
    is not batched under vmap.
    """
    try:
        return trace_bwd((False,) * count)[0]
    except Exception:  # a real error will be raised again when the rule runs
        return None


def _residual_dtypes(bwd, count, ct_dtypes, policy, scopes) -> list[Any]:
    """Returns the storage dtype of each residual: 16-bit if only 16-bit operations read it."""
    inner, consts = _jax.open_jaxpr(bwd)
    dtypes = [v.aval.dtype if hasattr(v.aval, "dtype") else None for v in inner.invars]
    dtypes[count:] = [d or t for d, t in zip(ct_dtypes, dtypes[count:], strict=True)]
    plan = outline(inner, consts, policy, scopes=scopes)
    wants = analyze(plan, dtypes).wants
    half = policy.compute_dtype
    return [
        half
        if v.is_f32
        and wants[v].outside
        and len(wants[v].readers) == 1
        and not wants[v].full
        and half in HALVES
        else v.aval.dtype
        for v in plan.block.invars[:count]
    ]


@evaluates("custom_vmap_call")
def _run_custom_vmap(op: Op, env: Env) -> None:
    rule = _wrap_vmap_rule(op.params["rule"], functools.partial(_rerun, env.settings.policy, op))
    _run_with(op, env, rule=rule)


def _wrap_vmap_rule(rule: Any, rerun: Callable[..., Any]) -> Any:
    """Returns the rule of a custom_vmap whose program ``rerun(fun, *flat_args)`` runs."""

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


@evaluates("linear_call")
def _run_linear_call(op: Op, env: Env) -> None:
    thunk = op.params["transpose_thunk"]

    @functools.cache
    def transpose_thunk():
        transpose, consts = thunk()
        avals = _jax.in_avals(transpose)
        run = functools.partial(_jax.eval_closed, transpose)
        return _jax.trace(
            functools.partial(_rerun, env.settings.policy, op, run), avals, op.name
        ), consts

    _run_with(op, env, transpose_thunk=transpose_thunk)


def _run_with(op: Op, env: Env, **rules: Any) -> None:
    """Evaluates an equation with its program under its plan, and other rules."""
    (sub,) = op.subs
    program = _jax.trace(body_of(op, sub, env), avals_of(sub, env), op.name)
    new = op.inside.holding([program])
    finish(op, env, _jax.bind(op.eqn, operands(op, env), **new, **rules))


def _rerun(policy: Policy, op: Op, fun: Callable[..., Sequence[Any]], *args: Any) -> list[Any]:
    """Traces, plans and runs a function of flat arguments, with the dtypes of its own interface."""
    avals = [jax.typeof(a) for a in args]
    with tracing(policy):
        jaxpr, consts = _jax.open_jaxpr(_jax.trace(fun, avals, op.name))
    in_dtypes = [a.dtype for a in avals]
    outs = [v.aval.dtype for v in jaxpr.outvars]
    plan = make_plan(jaxpr, consts, policy, in_dtypes, outs, scopes=op.scopes)
    return run_plan(plan, args, outs)
