"""Calls of programs whose equations are inlined into the calling program."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal, Primitive, Var, set_current_trace
from jax.extend.source_info_util import NameStack, current, current_name_stack, user_context
from jax.interpreters import ad
from jax.interpreters.partial_eval import DynamicJaxprTracer

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base._jax.keys import call_key
from mpjax._src.core.base._jax.programs import bind, close, eval_closed, evaluate, open_jaxpr


class _Inlined(Primitive):
    """Evaluates a program that is linearized as a whole.

    The traced program contains its equations, each with its own source line, instead of a call.
    """

    multiple_results = True

    def bind_with_trace(self, trace, args, avals, params, /):
        inner, consts = open_jaxpr(params["jaxpr"])
        if not inner.effects and not any(isinstance(c, jax.core.Tracer) for c in consts):
            if isinstance(trace, internals.LinearizeTrace):
                return trace.process_primitive(self, args, params)
            if isinstance(trace, internals.DynamicJaxprTrace):
                # All types are known, so a copy evaluates no equation abstractly.
                return _copy(trace, inner, consts, args, params.get("line"))
        with set_current_trace(trace):
            return eval_closed(params["jaxpr"], *args)


_inlined_p = _Inlined("inlined")


def linearized_once(jaxpr: Any, line: Any = None) -> Callable[..., list[Any]]:
    """Returns a closed jaxpr as a function whose derivative is computed once for all calls.

    What comes from ``line``, a traceback, comes from the line of the call.
    """
    internals.ready()
    return functools.partial(_inlined_p.bind, jaxpr=jaxpr, line=line)


def eval_once(jaxpr: Any, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr; equal equations, which repeat, are linearized once."""
    internals.ready()
    info, programs = open_jaxpr(jaxpr)[0].debug_info, dict[Any, Any]()

    def run(eqn, values):
        stack = current_name_stack() + eqn.source_info.name_stack
        with user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
            program = None if eqn.effects else _alone(eqn, info, programs)
            if program is None:
                return bind(eqn, values)
            atoms = zip(eqn.invars, values, strict=True)
            ins = [x for a, x in atoms if not isinstance(a, Literal)]
            line = open_jaxpr(program)[0].eqns[0].source_info.traceback
            return _inlined_p.bind(*ins, jaxpr=program, line=line)

    return evaluate(jaxpr, args, run)


def _alone(eqn: Any, info: Any, programs: dict[Any, Any]) -> Any:
    """Returns an equation as a program of its variables, the same one for equal equations."""
    literals = [(i, a) for i, a in enumerate(eqn.invars) if isinstance(a, Literal)]
    types = tuple(atom.aval for atom in eqn.invars)
    try:
        # By their bytes: -0.0 equals 0.0 as a number, and a NaN does not equal itself.
        numbers = tuple((i, type(a.val), np.asarray(a.val).tobytes()) for i, a in literals)
        key = call_key(eqn), types, numbers
        if key in programs:
            return programs[key]
    except TypeError:  # a parameter that has no hash
        return None
    ins = [a if isinstance(a, Literal) else Var(a.aval) for a in eqn.invars]
    outs = [Var(var.aval) for var in eqn.outvars]
    # Each call puts its own scopes around the program, so what they share has none.
    source = eqn.source_info.replace(name_stack=NameStack())
    alone = eqn.replace(invars=ins, outvars=outs, source_info=source)
    variables = [a for a in ins if not isinstance(a, Literal)]
    jaxpr = Jaxpr([], variables, outs, [alone], eqn.effects, info.with_unknown_names())
    return programs.setdefault(key, close(jaxpr, ()))


def _copy(trace, jaxpr, consts, args, line):
    """Copies the equations of a program into the traced one, as an evaluation would."""
    here = current()
    env = {
        var: trace.to_jaxpr_tracer(x, here)
        for var, x in zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True)
    }

    def read(atom, place):
        if isinstance(atom, Literal):
            return DynamicJaxprTracer(trace, atom.aval, atom, place)
        return env[atom]

    for eqn in jaxpr.eqns:
        source = eqn.source_info
        traceback = here.traceback if source.traceback is line else source.traceback
        stack = here.name_stack + source.name_stack
        place = source.replace(traceback=traceback, name_stack=stack)
        ins = [read(atom, place) for atom in eqn.invars]
        avals = [var.aval for var in eqn.outvars]
        outs = trace.emit_eqn(ins, avals, eqn.primitive, eqn.params, eqn.effects, place, eqn.ctx)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom, here) for atom in jaxpr.outvars]


def _linearize(is_vjp, nonzero, *primals, jaxpr, line=None):
    forward, described, moving, places, tangent = internals.linearize_jaxpr(
        jaxpr, nonzero, is_vjp=is_vjp
    )
    results = linearized_once(forward, line)(*primals)
    computed = iter(results[len(moving) :])
    operands = [*open_jaxpr(jaxpr)[1], *primals]
    residuals = [next(computed) if i is None else operands[i] for i in places]
    avals = [v.aval.to_tangent_aval() for v in open_jaxpr(jaxpr)[0].outvars]

    def linearized(residuals, *rest):
        more, tangents = rest[: -len(nonzero)], rest[-len(nonzero) :]
        varying = [t for t, yes in zip(tangents, nonzero, strict=True) if yes]
        ins = *residuals, *varying, *jax.tree.leaves(more)
        outs = iter(linearized_once(tangent, line)(*ins))
        return [next(outs) if yes else ad.Zero(a) for a, yes in zip(avals, moving, strict=True)]

    if isinstance(described, int):
        return results[: len(moving)], moving, residuals, linearized
    # From JAX 0.12 on, some residuals are passed separately, as a pytree.
    structured = described.unpack()[2].update([*computed]).unflatten()
    return results[: len(moving)], moving, residuals, structured, linearized


@internals.at_first_plan
def _register() -> None:
    internals.primitive_linearizations[_inlined_p] = internals.guarded(_linearize)
