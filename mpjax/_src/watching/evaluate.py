"""Evaluates a program, and measures its watched values on the way.

The program's own equations, their order, names and lines do not change. Loops carry the figures of
their bodies; branches that are not taken return empty figures; the figures of the devices of a mesh
are combined at the end of shard_map.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mpjax._src.base import _jax
from mpjax._src.base.higher_order import BRANCH, CALL, MAP, SCAN, WHILE, higher_order
from mpjax._src.watching.figures import (
    Figures,
    combined,
    in_turn,
    joined,
    measure,
    nothing,
    over_devices,
)
from mpjax._src.watching.places import Tensor, Watch

Result = tuple[list[Any], Figures]


def evaluate(jaxpr: Any, watch: Watch, args: Sequence[Any], axes: tuple[str, ...] = ()) -> Result:
    """Evaluates a program.

    Args:
        jaxpr: The program, closed, or open without constants.
        watch: Its watched values.
        args: Its arguments.
        axes: The mesh axes that are mapped around it.

    Returns:
        Its results, and the `Figures` of ``watch.tensors``.
    """
    inner, consts = _jax.open_jaxpr(jaxpr)
    env = dict(zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True))
    parts: list[Figures] = []

    def read(atom):
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    for i, eqn in enumerate(inner.eqns):
        seen: list[Figures] = []
        ins = [read(atom) for atom in eqn.invars]
        if any(w.tensors for w in watch.inside.get(i, ())):
            with _jax.location(eqn, eqn.source_info.name_stack):
                kind = higher_order(eqn.primitive.name).kind
                outs, figures = ENTER[kind](eqn, watch.inside[i], ins, axes)
            seen = [figures]
        else:
            with _jax.location(eqn, eqn.source_info.name_stack):
                outs = _jax.bind(eqn, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
        for v, t in watch.before.get(i, ()):
            parts.append(measured(read(v), t, axes, outs[0] if t.part == "cast" else None))
        parts += seen + [measured(env[v], t, axes) for v, t in watch.after.get(i, ())]
    return [read(atom) for atom in inner.outvars], joined(parts)


def measured(x: Any, tensor: Tensor, axes: tuple[str, ...], stored: Any = None) -> Figures:
    """Measures one array; within a mesh, each device measures its own part."""
    return _varying(measure(x, tensor.half, tensor.rounded, stored), axes)


def traced(program: Any, watch: Watch, axes: tuple[str, ...] = ()) -> Any:
    """Returns a program with the results of another one, followed by its figures."""
    inner, _ = _jax.open_jaxpr(program)

    def flat(*args):
        outs, figures = evaluate(program, watch, args, axes)
        return [*_typed(outs, inner.outvars), *jax.tree.leaves(figures)]

    return _jax.trace(flat, _jax.in_avals(program), "watched")


# ---- programs inside ----------------------------------------------------------------------------


def _call(eqn: Any, watches: Sequence[Watch], ins: list[Any], axes: tuple[str, ...]) -> Result:
    (inside,) = higher_order(eqn.primitive.name).wire(eqn)
    name = eqn.primitive.name
    if name in REMATS:
        jaxpr, consts = _jax.hoisted(traced(inside.program, watches[0], axes))
        new: dict[str, Any] = {"jaxpr": jaxpr}
        if isinstance(eqn.params["prevent_cse"], tuple):
            new["prevent_cse"] = (True,) * len(consts) + eqn.params["prevent_cse"]
        return split(_jax.bind(eqn, [*consts, *ins], **new))
    if name in JITS and _jax.inlined(eqn) is None:
        params = _jax.jit_of(traced(inside.program, watches[0], axes), eqn.params)
        return split(_jax.bind(eqn, ins, **params))
    outs, figures = evaluate(inside.program, watches[0], ins, axes)
    return _typed(outs, eqn.outvars), figures


def _scan(eqn: Any, watches: Sequence[Watch], ins: list[Any], axes: tuple[str, ...]) -> Result:
    (inside,) = higher_order("scan").wire(eqn)
    inner, _ = _jax.open_jaxpr(inside.program)
    count, length = len(inside.carry), eqn.params["length"]
    first, last = inside.consts, inside.consts + count

    def body(carried, xs):
        carry, figures, turn = carried
        args = [*ins[:first], *carry, *xs]
        outs, seen = evaluate(inside.program, watches[0], args, axes)
        index = length - 1 - turn if eqn.params["reverse"] else turn
        figures = combined(figures, in_turn(seen, index))
        outs = _typed(outs, inner.outvars)
        return (outs[:count], figures, turn + 1), outs[count:]

    carry = _typed(ins[first:last], inner.invars[first:last])
    start = carry, _nothing(watches, axes), jnp.int32(0)
    names = ("length", "reverse", "unroll")
    (carry, figures, _), ys = jax.lax.scan(
        body, start, ins[last:], **{name: eqn.params[name] for name in names}
    )
    return [*carry, *ys], figures


def _while(eqn: Any, watches: Sequence[Watch], ins: list[Any], axes: tuple[str, ...]) -> Result:
    cond, body = higher_order("while").wire(eqn)
    inner, _ = _jax.open_jaxpr(body.program)
    consts, start = cond.consts + body.consts, body.consts

    def going(carried):
        return _jax.eval_closed(cond.program, *ins[: cond.consts], *carried[0])[0]

    def turn(carried):
        carry, figures, number = carried
        outs, seen = evaluate(body.program, watches[1], [*ins[cond.consts : consts], *carry], axes)
        return _typed(outs, inner.outvars), combined(figures, in_turn(seen, number)), number + 1

    carry = _typed(ins[consts:], inner.invars[start:])
    carry, figures, _ = jax.lax.while_loop(
        going, turn, (carry, _nothing(watches, axes), jnp.int32(0))
    )
    return carry, figures


def _cond(eqn: Any, watches: Sequence[Watch], ins: list[Any], axes: tuple[str, ...]) -> Result:
    counts = [len(w.tensors) for w in watches]
    programs = [inside.program for inside in higher_order("cond").wire(eqn)]

    def branch(taken):
        inner, _ = _jax.open_jaxpr(programs[taken])

        def flat(*args):
            outs, seen = evaluate(programs[taken], watches[taken], args, axes)
            others = [_varying(nothing(count), axes) for count in counts]
            figures = joined([*others[:taken], seen, *others[taken + 1 :]])
            return [*_typed(outs, inner.outvars), *jax.tree.leaves(figures)]

        return _jax.trace(flat, _jax.in_avals(programs[taken]), "branch")

    branches = tuple(map(branch, range(len(programs))))
    return split(_jax.bind(eqn, ins, branches=branches))


def _map(eqn: Any, watches: Sequence[Watch], ins: list[Any], axes: tuple[str, ...]) -> Result:
    params = eqn.params
    mine = tuple(_jax.manual_axes(params))
    (inside,) = higher_order("shard_map").wire(eqn)

    def body(*args):
        outs, figures = evaluate(inside.program, watches[0], args, (*axes, *mine))
        return *outs, *jax.tree.leaves(over_devices(figures, mine))

    specs = (*params["out_specs"], *[PartitionSpec()] * len(_fields()))
    return split(_jax.shard_map(body, {**params, "out_specs": specs})(*ins))


ENTER: dict[str, Callable[..., Result]] = {
    CALL: _call,
    SCAN: _scan,
    WHILE: _while,
    BRANCH: _cond,
    MAP: _map,
}
REMATS, JITS = ("remat2", "checkpoint"), ("jit", "pjit")


def _fields() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(Figures))


def split(outs: Sequence[Any]) -> Result:
    """Splits a program's outputs into its results and the figures after them."""
    count = len(outs) - len(_fields())
    return list(outs[:count]), Figures(*outs[count:])


def _nothing(watches: Sequence[Watch], axes: tuple[str, ...]) -> Figures:
    return _varying(nothing(sum(len(w.tensors) for w in watches)), axes)


def _typed(values: Sequence[Any], atoms: Sequence[Any]) -> list[Any]:
    """Returns values with the weak types of a program."""
    return [
        _jax.typed_as(atom.aval, x) if _jax.is_array(atom.aval) else x
        for atom, x in zip(atoms, values, strict=True)
    ]


def _varying(figures: Figures, axes: tuple[str, ...]) -> Figures:
    """Marks figures as varying over mapped axes."""

    def vary(x):
        known = getattr(getattr(jax.typeof(x), "mat", None), "varying", ())
        missing = tuple(axis for axis in axes if axis not in known)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, figures) if axes else figures
