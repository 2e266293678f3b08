"""Primitives that hold a program, which every transformation of JAX turns into such programs again.

JAX would take a jit apart to differentiate or batch it, and would choose itself what the backward
pass gets. These primitives ask the program instead: for its derivative, cut in two where it likes
(`Cut`), or for its forward mode. So whoever makes programs chooses what is stored between the
passes, and the derivatives of any order are programs of its making.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.ad_checkpoint import Offloadable
from jax.experimental import jet
from jax.extend.core import Primitive, Var
from jax.extend.core.primitives import reduce_precision_p
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import (
    custom_partial_eval_rules,
    partial_eval_jaxpr_custom_rules,
)

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base._jax.building import barrier_p
from mpjax._src.core.base._jax.programs import eval_apart, eval_closed, lowered, open_jaxpr

# From JAX 0.12 on, a derivative may have residuals that are no arrays, passed apart.
STRUCTURED = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)


class Held(Protocol):
    """A program that a primitive holds. What is derived from it is made once."""

    in_avals: Any  # the types of its arguments
    out_avals: Any  # the types of its results
    effects: Any  # its effects

    @property
    def written(self) -> Any:
        """The closed jaxpr that runs."""

    @property
    def jitted(self) -> Callable[..., list[Any]]:
        """The same, jitted."""

    def cut(self, moving: tuple[bool, ...]) -> "Cut":
        """Returns the derivative by the arguments that move."""

    def forward_mode(self, moving: tuple[bool, ...]) -> tuple["Held", Sequence[bool]]:
        """Returns the program of arguments and moving tangents, and which results have tangents."""

    def transpose(
        self, linear: tuple[bool, ...], nonzero: tuple[bool, ...]
    ) -> tuple["Held", Sequence[int]]:
        """Returns the program of the other arguments and the cotangents that are not zero.

        Its results are the cotangents of the linear arguments whose places are returned too.
        """

    def checkpointed(self, moving: tuple[bool, ...], where: Any) -> "tuple[Held, Held] | None":
        """Returns the program with what a checkpoint saves as further results, and as arguments.

        Args:
            moving: The arguments that move.
            where: Says of the primitive, the operand types and the parameters of an equation in
                which memory its results are saved; None if they are not.

        Returns:
            None if nothing is saved.
        """

    def batched(self, axis: Any, which: tuple[bool, ...]) -> tuple["Held", Sequence[bool]]:
        """Returns the program of batched arguments, and which results are batched, in front."""


class Cut(Protocol):
    """A program and its derivative by some arguments, as a forward and a backward part."""

    by: Any  # the arguments that move
    given: Any  # the arguments that the backward part reads: its first residuals
    forward: Any  # the program of the results, then the other residuals
    moves: Any  # which results depend on the arguments that move
    moved_avals: Any  # the types of these results

    @property
    def tangent(self) -> Held:
        """The linear map of residuals and tangents."""

    def backward(self, nonzero: tuple[bool, ...]) -> tuple[Held, Sequence[int]]:
        """Returns the program of residuals and cotangents of these results.

        Its results are the gradients of the arguments whose places in ``by`` are returned too.
        """


def _holding(name: str, program: Callable[..., Held], *, shown: bool = True) -> Primitive:
    """Returns a primitive that runs the program that its parameters hold.

    An equation shows what it runs (``shown``): to people, and to JAX, which finds devices there.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def stage(trace, source_info, *args, jaxpr=None, **params):
        params["jaxpr"] = program(**params).written
        return trace.default_process_primitive(primitive, args, params, source_info=source_info)

    def lower(ctx, *args, jaxpr=None, **params):
        inner, consts = open_jaxpr(lowered(program(**params).written))
        outs, tokens = mlir.jaxpr_subcomp(
            ctx.module_context,
            inner,
            ctx.name_stack,
            ctx.tokens_in,
            internals.ir_consts(consts, [v.aval for v in inner.constvars]),
            *args,
            dim_var_values=ctx.dim_var_values,
            const_lowering=ctx.const_lowering,
            outer_traceback=ctx.traceback,
        )
        ctx.set_tokens_out(tokens)
        return outs

    @internals.at_first_plan
    def register() -> None:
        if shown:
            internals.custom_staging_rules[primitive] = internals.guarded(stage)
        mlir.register_lowering(primitive, internals.guarded(lower))

    return primitive


def _transformed(primitive: Primitive, jvp: Any, linearize: Any, batch: Any) -> None:
    """Tells JAX how a primitive is transformed."""

    @internals.at_first_plan
    def register() -> None:
        internals.primitive_linearizations[primitive] = internals.guarded(linearize)
        ad.primitive_jvps[primitive] = internals.guarded(jvp)
        batching.fancy_primitive_batchers[primitive] = internals.guarded(batch)


# ---- a program on its arguments -----------------------------------------------------------------

call_p = _holding("planned", lambda program: program)


def call_held(program: Held, *args: Any) -> list[Any]:
    """Runs a program on flat arguments."""
    internals.ready()
    return call_p.bind(*args, program=program)


def _moving(program: Held, tangents: Sequence[Any]) -> tuple[bool, ...]:
    pairs = zip(tangents, program.in_avals, strict=True)
    return tuple(type(t) is not ad.Zero and is_inexact(aval) for t, aval in pairs)


def is_inexact(aval: Any) -> bool:
    """Returns whether a value of this type can have a tangent."""
    return hasattr(aval, "dtype") and bool(jax.dtypes.issubdtype(aval.dtype, np.inexact))


def _filled(avals: Sequence[Any], moves: Sequence[bool], tangents: Sequence[Any]) -> list[Any]:
    """Returns a tangent for each result, a symbolic zero where it does not move."""
    rest, types = iter(tangents), [aval.to_tangent_aval() for aval in avals]
    return [next(rest) if m else ad.Zero(a) for m, a in zip(moves, types, strict=True)]


def _jvp(primals, tangents, *, program, jaxpr=None):
    moving = _moving(program, tangents)
    moves = program.forward_mode(moving)[1]
    given = [ad.instantiate_zeros(t) for t, m in zip(tangents, moving, strict=True) if m]
    # JAX may run program and tangents at once (jax.jvp), or separate them by partial evaluation
    # (jax.checkpoint, rules of custom_jvp). One primitive stands for both until that is known.
    outs = jvp_p.bind(*primals, *given, program=program, moving=moving)
    count = len(program.out_avals)
    return outs[:count], _filled(program.out_avals, moves, outs[count:])


def _linearize(is_vjp, moving, *primals, program, jaxpr=None):
    pairs = zip(moving, program.in_avals, strict=True)
    cut = program.cut(tuple(m and is_inexact(aval) for m, aval in pairs))
    outs = call_held(cut.forward, *primals)
    count = len(program.out_avals)

    def linearized(residuals, *rest):
        tangents = rest[-len(primals) :]
        given = [ad.instantiate_zeros(tangents[i]) for i in cut.by]
        return _filled(program.out_avals, cut.moves, linear_p.bind(*residuals, *given, cut=cut))

    residuals = [*(primals[i] for i in cut.given), *outs[count:]]
    structured = (None,) if STRUCTURED else ()
    return outs[:count], cut.moves, residuals, *structured, linearized


def _cotangents(cts, args, known, transposed):
    """Returns those of linear operands, by a program that reads ``known``, and by its places."""
    given = [ct for ct in cts if type(ct) is not ad.Zero]
    grads: dict[int, Any] = {}
    if given:
        program, places = transposed()
        grads = dict(zip(places, call_held(program, *known, *given), strict=True))
    linear = map(ad.is_undefined_primal, args)
    return [grads.get(i, ad.Zero(args[i].aval)) if yes else None for i, yes in enumerate(linear)]


def _transposed(cts, *args, program, jaxpr=None):
    linear = tuple(map(ad.is_undefined_primal, args))
    nonzero = tuple(type(ct) is not ad.Zero for ct in cts)
    known = [x for x, yes in zip(args, linear, strict=True) if not yes]
    return _cotangents(cts, args, known, lambda: program.transpose(linear, nonzero))


def _batch(axis, args, dims, *, program, jaxpr=None):
    pairs = zip(args, dims, strict=True)
    args = [x if d is None else batching.bdim_at_front(x, d, axis.size) for x, d in pairs]
    new, which = program.batched(axis, tuple(d is not None for d in dims))
    return call_held(new, *args), [0 if w else None for w in which]


def _taylor(primals, series, *, program, jaxpr=None):
    run = lambda *args: eval_closed(program.written, *args)  # noqa: E731
    return jet.jet(run, primals, series, factorial_scaled=False)


def _run_now(*args, program, jaxpr=None):
    # JAX looks for the operation that made a NaN by running all of them.
    apart = jax.debug_nans.value or jax.debug_infs.value
    return eval_apart(program.written, *args) if apart else program.jitted(*args)


call_p.def_impl(_run_now)
call_p.def_effectful_abstract_eval(
    lambda *args, program, jaxpr=None: (program.out_avals, program.effects)
)
ad.primitive_transposes[call_p] = internals.guarded(_transposed)
_transformed(call_p, _jvp, _linearize, _batch)
jet.jet_rules[call_p] = _taylor  # type: ignore[assignment]
# What written programs contain besides what the function does.
jet.deflinear(reduce_precision_p)
jet.jet_rules[barrier_p] = lambda primals, series, **_: (primals, series)  # type: ignore[assignment]

# ---- a program and its derivative, where JAX separates them later -------------------------------


def _pushed(program: Held, moving: tuple[bool, ...]) -> Held:
    return program.forward_mode(moving)[0]


jvp_p = _holding("planned_jvp", _pushed)


def _through(rule: Callable[..., Any], found: Callable[..., Held]) -> Callable[..., Any]:
    """Returns the rule of a primitive that calls the program that its parameters stand for."""

    def run(*args, jaxpr=None, **params):
        return rule(*args, program=found(**params))

    return run


def _run(*args, program):
    return call_held(program, *args)


def _jvp_known(trace, *tracers, program, moving, jaxpr=None):
    """Runs the program now, if its arguments are known, and leaves the tangents to later."""
    count = len(moving)
    primals, tangents = tracers[:count], tracers[count:]
    known = all(t.is_known() for t in primals)
    if not known or all(t.is_known() for t in tangents):
        params = {"program": program, "moving": moving}
        return trace.default_process_primitive(jvp_p, tracers, params)
    cut = program.cut(moving)
    values = [t.pval.get_known() for t in primals]
    outs = call_held(cut.forward, *values)
    results = len(program.out_avals)
    residuals = [*(values[i] for i in cut.given), *outs[results:]]
    linear = trace.default_process_primitive(linear_p, [*residuals, *tangents], {"cut": cut})
    moved = _filled(program.out_avals, cut.moves, linear)
    moves = program.forward_mode(moving)[1]
    pairs = zip(moved, moves, strict=True)
    return [*outs[:results], *(ad.instantiate_zeros(t) for t, m in pairs if m)]


def _jvp_again(saveable, unknown, instantiated, eqn):
    """Under `jax.checkpoint`: runs the program now, and program and tangents again later.

    What the policy saves inside, the later one gets.
    """
    program, moving = eqn.params["program"], eqn.params["moving"]
    count = len(moving)
    results, all_of_them = len(program.out_avals), [True] * len(eqn.outvars)
    pairs = zip(eqn.invars, instantiated, strict=True)
    needed = [v for v, done in pairs if isinstance(v, Var) and not done]
    # JAX asks for five things: what runs now, what runs later, which results are unknown after the
    # first, which the second computes, and the values that the second needs of the first.
    if any(unknown[:count]):
        return None, eqn, all_of_them, all_of_them, needed
    first, second = program.checkpointed(moving, _where(saveable)) or (program, program)
    saved = [Var(aval) for aval in first.out_avals[results:]]
    now = eqn.replace(
        invars=eqn.invars[:count],
        outvars=[*eqn.outvars[:results], *saved],
        primitive=call_p,
        params={"program": first, "jaxpr": first.written},
        effects=program.effects,
    )
    if saved:
        moving = (*moving, *[False] * len(saved))
        params = {"program": second, "moving": moving, "jaxpr": _pushed(second, moving).written}
        invars = [*eqn.invars[:count], *saved, *eqn.invars[count:]]
        eqn = eqn.replace(invars=invars, params=params)
    later = [False] * results + [True] * (len(eqn.outvars) - results)
    return now, eqn, later, all_of_them, [*needed, *saved]


def _where(saveable):
    """Returns in which memory a policy saves the results of an equation, or None."""

    def where(primitive, avals, params):
        answer, space = saveable(primitive, *avals, **params), jax.memory.Space
        if isinstance(answer, Offloadable):
            return space.Host if answer.dst == "pinned_host" else space.Device
        if isinstance(answer, bool):
            return space.Device if answer else None
        return None if isinstance(answer, internals.RecomputeType) else space.Device

    return where


jvp_p.def_impl(_through(_run, _pushed))
jvp_p.def_effectful_abstract_eval(
    lambda *args, program, moving, jaxpr=None: (_pushed(program, moving).out_avals, program.effects)
)
_transformed(jvp_p, *(_through(rule, _pushed) for rule in (_jvp, _linearize, _batch)))
custom_partial_eval_rules[jvp_p] = internals.guarded(_jvp_known)
partial_eval_jaxpr_custom_rules[jvp_p] = internals.guarded(_jvp_again)

# ---- the linear part of a derivative ------------------------------------------------------------


def _tangent(cut: Cut) -> Held:
    return cut.tangent


linear_p = _holding("planned_linear", _tangent, shown=False)


def _transpose(cts, *args, cut):
    # The linear primitive has results only for those of the program that move.
    of_results = iter(cts)
    nonzero = tuple(bool(m) and type(next(of_results)) is not ad.Zero for m in cut.moves)
    first = len(args) - len(cut.by)

    def transposed():
        program, places = cut.backward(nonzero)
        return program, [first + i for i in places]

    return _cotangents(cts, args, args[:first], transposed)


linear_p.def_impl(_through(_run, _tangent))
linear_p.def_abstract_eval(lambda *args, cut: [a.to_tangent_aval() for a in cut.moved_avals])
_transformed(linear_p, *(_through(rule, _tangent) for rule in (_jvp, _linearize, _batch)))
ad.primitive_transposes[linear_p] = internals.guarded(_transpose)
