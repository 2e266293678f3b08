"""Derivative rules that a program's author wrote, read from the equations that hold them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad

from mpjax._src._jax.programs import close, open_jaxpr, trace
from mpjax._src._jax.sources import own_lines


def custom_jvp_rule(params: dict[str, Any]) -> tuple[Any, Sequence[bool]]:
    """Returns the program of a custom_jvp's rule and which of its output tangents are zero.

    The program takes primals and tangents of the arguments that are not constants.
    """
    count = len(open_jaxpr(params["call_jaxpr"])[0].invars) - params["num_consts"]
    jaxpr, consts, zeros = own_lines(params["jvp_jaxpr_fun"]).call_wrapped(*[False] * count)
    return close(jaxpr, consts), list(zeros)


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
    fwd = close(fwd_jaxpr, fwd_consts)
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


def zero_tangent(x: Any) -> Any:
    """Returns an array of zeros that is a tangent of ``x``."""
    return ad.instantiate_zeros(ad.Zero(jax.typeof(x).to_tangent_aval()))


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
