"""Puts an equation back into a program that is being traced, with other programs inside.

It serves the watching of tensors, whose programs return more than their own results, and reports on
mapped functions, which are written as one.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mpjax._src.core.base import _jax
from mpjax._src.core.base.higher_order import BRANCH, CALL, MAP, REMATS, SCAN, WHILE, higher_order

# A program as a function of flat arrays.
Body = Callable[..., Sequence[Any]]


class Gains(NamedTuple):
    """Further results, which each program returns after its own, and the equation after its own.

    The condition of a loop returns none.
    """

    start: Sequence[Any]  # their values before a loop turns
    # ``add(total, gained, turn)`` returns their values after one more turn of a loop.
    add: Callable[[Sequence[Any], Sequence[Any], jax.Array], Sequence[Any]]


def rebuild(
    eqn: Any,
    bodies: Sequence[Body],
    avals: Sequence[Sequence[Any]],
    args: Sequence[Any],
    gains: Gains | None = None,
) -> list[Any]:
    """Runs an equation with other programs inside, in the order of `HigherOrder.wire`.

    ``avals`` are the types of each one's arguments. Gains follow the results of the equation.
    """
    return [*REBUILD[higher_order(eqn.primitive.name).kind](eqn, bodies, avals, args, gains)]


def _call(eqn, bodies, avals, args, gains) -> Sequence[Any]:
    name = eqn.primitive.name
    if name in REMATS:
        jaxpr, consts = _jax.hoisted(_jax.trace(bodies[0], avals[0], name))
        new: dict[str, Any] = {"jaxpr": jaxpr}
        if isinstance(eqn.params["prevent_cse"], tuple):  # one for each operand
            new["prevent_cse"] = (True,) * len(consts) + eqn.params["prevent_cse"]
        return _jax.bind(eqn, [*consts, *args], **new)
    # A jit with shardings, layouts or donated arguments stays one. Any other call is written out.
    if name in JITS and _jax.inlined(eqn) is None:
        jaxpr = _jax.trace(bodies[0], avals[0], name)
        return _jax.bind(eqn, args, **_jax.jit_of(jaxpr, eqn.params))
    return bodies[0](*args)


JITS = ("jit", "pjit")


def _map(eqn, bodies, avals, args, gains) -> Sequence[Any]:
    # Programs that gain results combine those of their devices, so each device has them whole.
    more = [PartitionSpec()] * (len(gains.start) if gains else 0)
    params = {**eqn.params, "out_specs": (*eqn.params["out_specs"], *more)}
    return _jax.shard_map(lambda *args: tuple(bodies[0](*args)), params)(*args)


def _traced(eqn, bodies, avals, args, gains) -> Sequence[Any]:
    name = eqn.primitive.name
    programs = [_jax.trace(*each, name) for each in zip(bodies, avals, strict=True)]
    return _jax.bind(eqn, args, **higher_order(name).holding(programs))


def _scan(eqn, bodies, avals, args, gains) -> Sequence[Any]:
    if gains is None:
        return _traced(eqn, bodies, avals, args, gains)
    row = higher_order(eqn.primitive.name)
    (inside,) = row.wire(eqn)
    length, reverse, unroll = row.turns(eqn)
    first, count = inside.consts, len(inside.carry)
    last, results = first + count, len(eqn.outvars)

    def body(carried, xs):
        carry, total, turn = carried
        outs = bodies[0](*args[:first], *carry, *xs)
        # ``turn`` counts from the start, and a reversed scan begins with the last slice.
        total = gains.add(total, outs[results:], length - 1 - turn if reverse else turn)
        return (outs[:count], [*total], turn + 1), outs[count:results]

    start = _typed(args[first:last], avals[0][first:last]), [*gains.start], jnp.int32(0)
    (carry, total, _), ys = jax.lax.scan(body, start, args[last:], length, reverse, unroll)
    return [*carry, *ys, *total]


def _while(eqn, bodies, avals, args, gains) -> Sequence[Any]:
    if gains is None:
        return _traced(eqn, bodies, avals, args, gains)
    cond, body = higher_order(eqn.primitive.name).wire(eqn)
    first, last, results = cond.consts, cond.consts + body.consts, len(eqn.outvars)

    def going(carried):
        return bodies[0](*args[:first], *carried[0])[0]

    def turn(carried):
        carry, total, number = carried
        outs = bodies[1](*args[first:last], *carry)
        return outs[:results], [*gains.add(total, outs[results:], number)], number + 1

    carry = _typed(args[last:], avals[1][body.consts :])
    carry, total, _ = jax.lax.while_loop(going, turn, (carry, [*gains.start], jnp.int32(0)))
    return [*carry, *total]


def _typed(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    """Returns values with the weak types of some arguments."""
    return [_jax.typed_as(aval, x) for aval, x in zip(avals, values, strict=True)]


REBUILD: dict[str, Callable[..., Sequence[Any]]] = {
    CALL: _call,
    MAP: _map,
    SCAN: _scan,
    WHILE: _while,
    BRANCH: _traced,
}
