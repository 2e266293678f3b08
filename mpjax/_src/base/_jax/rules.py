"""Custom derivative rules of a program's author, read from the equations that hold them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax._src.interpreters.ad import CustomVJPException
from jax.experimental.jet import JetTracer
from jax.extend.core import Literal
from jax.extend.linear_util import transformation2
from jax.interpreters import ad

from mpjax._src.base._jax.programs import close, open_jaxpr, trace
from mpjax._src.base._jax.sources import own_lines


def custom_jvp_rule(params: dict[str, Any]) -> tuple[Any, Sequence[bool]]:
    """Returns the program of a custom_jvp's rule, and which output tangents are zero.

    Its arguments are the primals and tangents of the arguments that are not constants.
    """
    count = len(open_jaxpr(params["call_jaxpr"])[0].invars) - params["num_consts"]
    jaxpr, consts, zeros = own_lines(params["jvp_jaxpr_fun"]).call_wrapped(*[False] * count)
    return close(jaxpr, consts), list(zeros)


def with_rule(params: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the parameters of a custom_jvp or custom_vjp whose rule's program is changed.

    That is the closed jaxpr of primals and tangents, or the forward one.
    """
    name = "fwd_jaxpr_thunk" if "fwd_jaxpr_thunk" in params else "jvp_jaxpr_fun"
    return {**params, name: _changed(params[name], change)}


@transformation2
def _changed(fun: Callable[..., Any], change: Callable[[Any], Any], *args: Any) -> Any:
    jaxpr, consts, *more = fun(*args)
    return (*open_jaxpr(change(close(jaxpr, consts))), *more)


class VjpRules(NamedTuple):
    """The rules of a custom_vjp."""

    # The forward program. Its arguments are the operands that are not constants.
    fwd: Any
    num_computed: int  # the number of leading results of ``fwd`` that are residuals
    # For each residual of the backward rule, whether it is an operand, and the index of the operand
    # or of the result of ``fwd``. Residuals with known values (Python values) are left out: the
    # backward rule gets them unchanged, and may branch on them.
    residuals: Sequence[tuple[bool, int]]
    # ``trace_bwd(zero_cts)`` returns ``(bwd, zeros)``. The arguments of the program ``bwd`` are
    # these residuals and the cotangents that are not zero; its results are the cotangents that are
    # not in ``zeros``.
    trace_bwd: Callable[[tuple[bool, ...]], tuple[Any, Sequence[bool]]]


def custom_vjp_rules(
    params: dict[str, Any],
    avals: Sequence[Any],
    perturbed: Sequence[bool],
    known: Mapping[int, Any],
) -> VjpRules:
    """Returns the programs of a custom_vjp's rules.

    ``perturbed`` says which operands are differentiated, and ``known`` has those whose values are
    known. If a constant is differentiated, which has no rule, it raises what JAX does.
    """
    num_consts = params["num_consts"]
    if any(perturbed[:num_consts]):
        raise CustomVJPException
    perturbed = perturbed[num_consts:]
    fwd_jaxpr, fwd_consts = own_lines(params["fwd_jaxpr_thunk"]).call_wrapped(*perturbed)
    fwd = close(fwd_jaxpr, fwd_consts)
    _, tree, forwards = params["out_trees"]()
    call = open_jaxpr(params["call_jaxpr"])[0]
    computed = open_jaxpr(fwd)[0].outvars[: tree.num_leaves - sum(f is not None for f in forwards)]
    constants = _known_values(computed, fwd)
    places = iter(range(len(computed)))
    sources = [(True, f) if f is not None else (False, next(places)) for f in forwards]
    values = [(known if forwarded else constants).get(i, _UNKNOWN) for forwarded, i in sources]
    residuals = [at for at, value in zip(sources, values, strict=True) if value is _UNKNOWN]
    res_avals = [avals[i] if forwarded else computed[i].aval for forwarded, i in residuals]
    ct_avals = [v.aval.to_tangent_aval() for v in call.outvars]

    @functools.cache
    def trace_bwd(zero_cts: tuple[bool, ...]):
        zeros: list[bool] = []

        def run(*args):
            arrays, cts = iter(args[: len(res_avals)]), iter(args[len(res_avals) :])
            inputs = [next(arrays) if value is _UNKNOWN else value for value in values]
            inputs += [
                jax.custom_derivatives.SymbolicZero(aval) if zero else next(cts)
                for aval, zero in zip(ct_avals, zero_cts, strict=True)
            ]
            grads = own_lines(params["bwd"]).call_wrapped(*inputs)
            if isinstance(grads, tuple) and len(grads) == 2 and isinstance(grads[0], list | tuple):
                grads = grads[0]  # 0.12 returns logs as well
            zeros[:] = [type(g) in (ad.Zero, jax.custom_derivatives.SymbolicZero) for g in grads]
            return [g for g, zero in zip(grads, zeros, strict=True) if not zero]

        given_avals = [aval for aval, zero in zip(ct_avals, zero_cts, strict=True) if not zero]
        return trace(run, [*res_avals, *given_avals], "custom_vjp_bwd"), zeros

    return VjpRules(fwd, len(computed), residuals, trace_bwd)


_UNKNOWN = object()


def _known_values(atoms: Sequence[Any], program: Any) -> dict[int, Any]:
    """Returns the atoms of a program that are literals, or constants that are not tracers."""
    jaxpr, consts = open_jaxpr(program)
    pairs = zip(jaxpr.constvars, consts, strict=True)
    constants = {var: value for var, value in pairs if not isinstance(value, jax.core.Tracer)}
    values = ((a.val if isinstance(a, Literal) else constants.get(a, _UNKNOWN)) for a in atoms)
    return {i: value for i, value in enumerate(values) if value is not _UNKNOWN}


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


def instantiated(ct: Any) -> Any:
    """Returns a cotangent as an array, also if it is a symbolic zero."""
    zero = isinstance(ct, jax.custom_derivatives.SymbolicZero)
    return zeros_of(ct.aval) if zero else ct


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
