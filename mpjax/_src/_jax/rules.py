"""Derivative rules that a program's author wrote, read from the equations that hold them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.jet import JetTracer
from jax.extend.core import Literal
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


class VjpRules(NamedTuple):
    """The rules of a custom_vjp.

    Attributes:
        fwd: A program. It takes the operands that are not constants, and gives what the next two
            fields say.
        num_computed: How many of its results, the first, are residuals.
        residuals: For each residual that the backward rule takes, whether it is an operand, and
            which; otherwise which result of ``fwd`` it is. Those whose value is known (Python
            values) are left out: the backward rule has them as they were, and may branch on them.
        trace_bwd: ``trace_bwd(zero_cts)`` gives ``(bwd, zeros)``: the program ``bwd`` takes these
            residuals and the cotangents that are not zero, and gives the cotangents that are not in
            ``zeros``.
    """

    fwd: Any
    num_computed: int
    residuals: Sequence[tuple[bool, int]]
    trace_bwd: Callable[[tuple[bool, ...]], tuple[Any, Sequence[bool]]]


def custom_vjp_rules(
    params: dict[str, Any],
    avals: Sequence[Any],
    perturbed: Sequence[bool],
    known: Mapping[int, Any],
) -> VjpRules:
    """Returns the programs of a custom_vjp's rules.

    Args:
        params: Of the equation.
        avals: Of its operands, constants included.
        perturbed: Which operands that are not constants are differentiated.
        known: The operands whose values are known.
    """
    fwd_jaxpr, fwd_consts = own_lines(params["fwd_jaxpr_thunk"]).call_wrapped(*perturbed)
    fwd = close(fwd_jaxpr, fwd_consts)
    _, tree, forwards = params["out_trees"]()
    call = open_jaxpr(params["call_jaxpr"])[0]
    computed = open_jaxpr(fwd)[0].outvars[: tree.num_leaves - sum(f is not None for f in forwards)]
    made = _known_values(computed, fwd)
    places = iter(range(len(computed)))
    found = [(True, f) if f is not None else (False, next(places)) for f in forwards]
    values = [(known if given else made).get(i, _UNKNOWN) for given, i in found]
    residuals = [at for at, value in zip(found, values, strict=True) if value is _UNKNOWN]
    res_avals = [avals[i] if given else computed[i].aval for given, i in residuals]
    ct_avals = [v.aval.to_tangent_aval() for v in call.outvars]

    @functools.cache
    def trace_bwd(zero_cts: tuple[bool, ...]):
        zeros: list[bool] = []

        def run(*args):
            arrays, cts = iter(args[: len(res_avals)]), iter(args[len(res_avals) :])
            given = [next(arrays) if value is _UNKNOWN else value for value in values]
            given += [
                jax.custom_derivatives.SymbolicZero(aval) if zero else next(cts)
                for aval, zero in zip(ct_avals, zero_cts, strict=True)
            ]
            grads = own_lines(params["bwd"]).call_wrapped(*given)
            if isinstance(grads, tuple) and len(grads) == 2 and isinstance(grads[0], list | tuple):
                grads = grads[0]  # 0.12 returns logs as well
            zeros[:] = [type(g) in (ad.Zero, jax.custom_derivatives.SymbolicZero) for g in grads]
            return [g for g, zero in zip(grads, zeros, strict=True) if not zero]

        given_avals = [aval for aval, zero in zip(ct_avals, zero_cts, strict=True) if not zero]
        return trace(run, [*res_avals, *given_avals], "custom_vjp_bwd"), zeros

    return VjpRules(fwd, len(computed), residuals, trace_bwd)


_UNKNOWN = object()


def _known_values(atoms: Sequence[Any], program: Any) -> dict[int, Any]:
    """Returns which of a program's atoms are literals, or constants that are no tracers."""
    jaxpr, consts = open_jaxpr(program)
    pairs = zip(jaxpr.constvars, consts, strict=True)
    known = {var: value for var, value in pairs if not isinstance(value, jax.core.Tracer)}
    found = ((a.val if isinstance(a, Literal) else known.get(a, _UNKNOWN)) for a in atoms)
    return {i: value for i, value in enumerate(found) if value is not _UNKNOWN}


def in_taylor_mode(args: Sequence[Any]) -> bool:
    """Tells whether `jax.experimental.jet`, which has no custom derivatives, traces some array."""
    return any(_is_taylor(x) for x in args if isinstance(x, jax.core.Tracer))


def _is_taylor(x: Any) -> bool:
    """Looks through the tracers of other transformations."""
    while isinstance(x, jax.core.Tracer) and not isinstance(x, JetTracer):
        x = getattr(x, "val", getattr(x, "primal", None))
    return isinstance(x, JetTracer)


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
