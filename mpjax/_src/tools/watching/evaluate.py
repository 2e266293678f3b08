"""Evaluates a program, and measures its watched values on the way.

The program's own equations, their order, names and lines do not change. Loops carry the figures of
their bodies; branches that are not taken return empty figures; the figures of the devices of a mesh
are combined at the end of shard_map.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax._src.core.base import _jax
from mpjax._src.core.base.higher_order import BRANCH, MAP, WHILE, higher_order
from mpjax._src.core.base.trees import vary_over
from mpjax._src.core.program.rebuild import Gains, rebuild
from mpjax._src.tools.watching.figures import (
    Figures,
    combined,
    in_turn,
    joined,
    measure,
    nothing,
    over_devices,
)
from mpjax._src.tools.watching.places import Watch

Result = tuple[list[Any], Figures]


def evaluate(jaxpr: Any, watch: Watch, args: Sequence[Any], axes: tuple[str, ...] = ()) -> Result:
    """Evaluates a program: returns its results, and the `Figures` of ``watch.tensors``.

    ``axes`` are the mesh axes that are mapped around it.
    """
    inner, consts = _jax.open_jaxpr(jaxpr)
    env = dict(zip([*inner.constvars, *inner.invars], [*consts, *args], strict=True))
    parts: list[Figures] = []

    def read(atom):
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    for i, eqn in enumerate(inner.eqns):
        ins = [read(atom) for atom in eqn.invars]
        with _jax.location(eqn, eqn.source_info.name_stack):
            if any(w.tensors for w in watch.inside.get(i, ())):
                outs, figures = _enter(eqn, watch.inside[i], ins, axes)
                parts.append(figures)
            else:
                outs = _jax.bind(eqn, ins)
        env.update(zip(eqn.outvars, outs, strict=True))
        for t in watch.at.get(i, ()):
            # The program's own cast says what is stored, so that the figures need no second one.
            stored = outs[0] if t.part == "cast" else None
            # Within a mesh, each device measures its own part.
            parts.append(_varying(measure(env[t.value], t.half, t.rounded, stored), axes))
    return [read(atom) for atom in inner.outvars], joined(parts)


def traced(program: Any, watch: Watch) -> Any:
    """Returns a program with the results of another one, followed by its figures."""
    return _jax.trace(_returning(program, watch), _jax.in_avals(program), "watched")


def _returning(program, watch, axes=(), ends=lambda figures: figures) -> Callable[..., list[Any]]:
    """Returns a function with the results of a program, followed by what its figures end as."""
    inner, _ = _jax.open_jaxpr(program)

    def flat(*args):
        outs, figures = evaluate(program, watch, args, axes)
        return [*_typed(outs, inner.outvars), *jax.tree.leaves(ends(figures))]

    return flat


# ---- programs inside ----------------------------------------------------------------------------


def _enter(eqn: Any, watches: Sequence[Watch], ins: list[Any], axes: tuple[str, ...]) -> Result:
    """Evaluates an equation whose programs return their figures too."""
    row = higher_order(eqn.primitive.name)
    programs = [inside.program for inside in row.wire(eqn)]
    mine = tuple(_jax.manual_axes(eqn.params)) if row.kind == MAP else ()

    def body(number):
        def among_all(figures):  # those of the other branches are empty
            parts = [_nothing([watch], axes) for watch in watches]
            return joined([*parts[:number], figures, *parts[number + 1 :]])

        # JAX's while loop accepts no result of its condition besides the verdict.
        if row.kind == WHILE and number == 0:  # the condition
            return functools.partial(_jax.eval_closed, programs[number])
        ends = {BRANCH: among_all, MAP: lambda figures: over_devices(figures, mine)}
        end = ends.get(row.kind, lambda figures: figures)
        return _returning(programs[number], watches[number], (*axes, *mine), end)

    def add(total, seen, turn):
        return jax.tree.leaves(combined(Figures(*total), in_turn(Figures(*seen), turn)))

    # A loop begins with figures of nothing, and adds those of each iteration.
    gains = Gains(jax.tree.leaves(_nothing(watches, axes)), add)
    bodies = [body(number) for number in range(len(programs))]
    return split(rebuild(eqn, bodies, [*map(_jax.in_avals, programs)], ins, gains))


def split(outs: Sequence[Any]) -> Result:
    """Splits a program's outputs into its results and the figures after them."""
    count = len(outs) - len(dataclasses.fields(Figures))
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
    return jax.tree.map(lambda x: vary_over(x, axes), figures)
