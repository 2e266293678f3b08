"""Building jaxprs from equations, and equations of loops from their parts."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Var, new_jaxpr_eqn, no_effects, unmapped_aval
from jax.extend.source_info_util import NameStack
from jax.lax import optimization_barrier_p as barrier_p
from jax.sharding import PartitionSpec, use_abstract_mesh

from mpjax._src.core.base._jax import internals, matmuls, stacks
from mpjax._src.core.base._jax.programs import (
    close,
    eval_closed,
    in_avals,
    manual_axes,
    open_jaxpr,
    trace,
)
from mpjax._src.core.base._jax.sources import (
    JAX,
    OURS,
    file_of,
    has_users_line,
    is_users_file,
)

NO_EFFECTS = no_effects
NO_SCOPES = NameStack()
WHOLE = PartitionSpec()  # what each device of a shard_map has whole

__all__ = ["Var", "barrier_p"]


def stacked_aval(size: int, aval: Any) -> Any:
    """Returns the type of a stack of arrays."""
    return unmapped_aval(size, aval.leading_axis_spec(), aval)


def acts(effects: Any) -> bool:
    """Returns whether an equation with these effects does something besides its results."""
    if not effects:
        return False
    silent = internals.NamedAxisEffect, internals.InternalMutableArrayEffect
    return any(not isinstance(e, silent) for e in effects)


def varying(aval: Any) -> Any:
    """Returns the axes of a shard_map over which values of this type vary."""
    return getattr(getattr(aval, "mat", None), "varying", None)


def effects_of(equations: Iterable[Any]) -> Any:
    """Returns the effects of some equations."""
    return frozenset(e for eqn in equations for e in eqn.effects) or no_effects


def jaxpr_of(
    constants: Mapping[Any, Any],
    arguments: Sequence[Any],
    results: Sequence[Any],
    equations: Sequence[Any],
    info: Any,
) -> Any:
    """Returns the closed jaxpr of some equations; ``constants`` are values by their variables."""
    effects = effects_of(equations)
    # JAX lowers such equations before it compiles, but only where a jaxpr says that it has some.
    high = any(e.primitive.is_high(*(v.aval for v in e.invars), **e.params) for e in equations)
    jaxpr = Jaxpr([*constants], [*arguments], [*results], [*equations], effects, info, high)
    return close(jaxpr, [*constants.values()])


def blank() -> Any:
    """Returns an equation without operands, which has the source and context of this moment."""
    return new_jaxpr_eqn([], [], barrier_p, {}, no_effects)


def marked(eqn: Any) -> Any:
    """Returns the equation of a matmul with the mark of those that autocast makes."""
    # The context of an equation is fixed. A new one records what is active, so the equation's own
    # settings are entered around the mark.
    with eqn.ctx.manager, matmuls.marked():
        return eqn.replace(ctx=blank().ctx)


def stored(eqn: Any) -> Any:
    """Returns the equation of a matmul with the mark of those whose result is stored as it is."""
    with eqn.ctx.manager, matmuls.storing():
        return eqn.replace(ctx=blank().ctx)


def stacking(eqn: Any) -> Any:
    """Returns the equation of a scan with the mark of those that fill no memory with zeros."""
    with eqn.ctx.manager, stacks.stacking():
        return eqn.replace(ctx=blank().ctx)


def as_closed(jaxpr: Any) -> Any:
    """Returns an open or closed jaxpr as a closed one."""
    return close(*open_jaxpr(jaxpr))


def without_refs(jaxpr: Any) -> Any:
    """Returns a closed jaxpr whose own Refs are values: a Ref has no derivative in two parts."""
    effects = open_jaxpr(jaxpr)[0].effects
    if not effects:
        return jaxpr
    has_refs = any(isinstance(e, internals.InternalMutableArrayEffect) for e in effects)
    return internals.discharge_state(jaxpr) if has_refs else jaxpr


def anonymous(jaxpr: Any) -> Any:
    """Returns the debug info of a closed jaxpr for one with other arguments and results."""
    return open_jaxpr(jaxpr)[0].debug_info.with_unknown_names()


def at_call(call: Any, program: Any) -> Callable[[Any], Any] | None:
    """Returns a function that gives an equation of a program the line of the equation that calls
    it, if no user wrote it; or None, if a user wrote the program, as far as that is known."""
    file, line = file_of(open_jaxpr(program)[0]), call.source_info.traceback
    if file and is_users_file(file):
        return None

    def moved(eqn: Any) -> Any:
        # What JAX traced of its own functions may have the line of another call.
        if not file.startswith((JAX, OURS)) and has_users_line(eqn):
            return eqn
        return eqn.replace(source_info=eqn.source_info.replace(traceback=line))

    return moved


def forward_mode(jaxpr: Any, moving: Sequence[bool]) -> tuple[Any, Sequence[bool]]:
    """Returns the closed jaxpr of arguments and moving tangents, and which results have one."""
    return internals.jvp_jaxpr(jaxpr, moving, False)


def batched(jaxpr: Any, axis: Any, which: Sequence[bool]) -> tuple[Any, Sequence[bool]]:
    """Returns the closed jaxpr of batched arguments, and which results are batched."""
    return internals.batch_jaxpr(jaxpr, axis, which, False)


def one_by_one(jaxpr: Any, axis: Any, which: Sequence[bool]) -> tuple[Any, Sequence[bool]]:
    """Returns what `batched` does, as a loop over the batch."""

    def run(*args):
        def turn(_, slices):
            rest = iter(slices)
            one = [next(rest) if yes else x for x, yes in zip(args, which, strict=True)]
            return None, eval_closed(jaxpr, *one)

        slices = [x for x, yes in zip(args, which, strict=True) if yes]
        return jax.lax.scan(turn, None, slices, axis.size)[1]

    each = zip(in_avals(jaxpr), which, strict=True)
    avals = [stacked_aval(axis.size, aval) if yes else aval for aval, yes in each]
    program = trace(run, avals, "one_by_one")
    return program, [True] * len(open_jaxpr(program)[0].outvars)


def scan_of(params: dict[str, Any], jaxpr: Any, consts: int, carry: int, xs: int) -> dict[str, Any]:
    """Returns the parameters of a scan with another body and other numbers of operands."""
    name = next(k for k, p in params.items() if hasattr(open_jaxpr(p)[0], "eqns"))
    if "num_consts" in params:
        return {**params, name: jaxpr, "num_consts": consts, "num_carry": carry}
    ft = sys.modules[type(params["ft_in"]).__module__]  # from JAX 0.12 on
    ys = len(open_jaxpr(jaxpr)[0].outvars) - carry
    ins, outs = map(ft.nones, (consts, carry, xs)), map(ft.nones, (carry, ys))
    return {**params, name: jaxpr, "ft_in": ft.pack((*ins,)), "ft_out": ft.pack((*outs,))}


@contextlib.contextmanager
def on_each_device(params: dict[str, Any]) -> Iterator[None]:
    """Enters the body of a shard_map with these parameters."""
    mesh, axes = params["mesh"], manual_axes(params)
    manual = use_abstract_mesh(internals.as_manual_mesh(mesh, axes))
    checked = internals.check_vma(params["check_vma"])
    with internals.extend_axis_env(mesh, axes), manual, checked:
        yield


def spread_specs(params: dict[str, Any], avals: Sequence[Any]) -> list[Any]:
    """Returns the specs by which a shard_map hands out what its devices keep for themselves."""
    names = internals.all_newly_manual_mesh_names(params["mesh"], manual_axes(params))
    return [aval.nospec(params["mesh"], params["check_vma"], names) for aval in avals]


def whole_aval(params: dict[str, Any], spec: Any, aval: Any) -> Any:
    """Returns the type of an array of which each device of a shard_map has a part."""
    return internals.unshard_aval(params["mesh"], params["check_vma"], spec, aval)


def as_body(params: dict[str, Any], jaxpr: Any) -> Any:
    """Returns an open jaxpr as the body of a shard_map."""
    inner, names = open_jaxpr(jaxpr)[0], params["mesh"].axis_names
    if not inner.effects:
        return inner
    named = internals.NamedAxisEffect
    kept = (e for e in inner.effects if not (isinstance(e, named) and e.name in names))
    return inner.replace(effects=frozenset(kept))
