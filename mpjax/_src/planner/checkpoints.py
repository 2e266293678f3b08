"""Programs under a `jax.checkpoint` with a policy: what it saves of their values.

Of what a policy saves JAX keeps what the rest is computed from. So do programs, of the equations
that their backward part needs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from mpjax._src.base import _jax
from mpjax._src.planner import rounding
from mpjax._src.planner.equations import Equation, Value, opened

# Says of the primitive, the operand types and the parameters of an equation where its results are
# saved: in a memory space, or None, so that it runs again.
Where = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


def places(equations: Sequence[Equation], where: Where) -> dict[Value, Any]:
    """Returns the values that a policy saves, and where."""
    found: dict[Value, Any] = {}
    for e in equations:
        place = where(e.primitive, [v.aval for v in e.ins], e.params)
        if place is not None:
            found.update(dict.fromkeys(e.outs, place))
            continue
        _, start, end = rounding.places(e)
        for _, inner, outs in rounding.bodies(e):
            inside = places(inner, where)
            pairs = [*zip(e.outs, outs, strict=True)][end - start :]  # no carries: they are many
            found.update((out, inside[v]) for out, v in pairs if v in inside)
    return found


def sent(
    saved: dict[Value, Any], equations: Sequence[Equation]
) -> tuple[list[Value], list[Equation]]:
    """Returns saved values in their places, and the equations that compute them and others."""
    into = [*equations]
    return [v if _is_here(place) else _moved(v, place, into) for v, place in saved.items()], into


def received(saved: dict[Value, Any]) -> tuple[list[Value], list[Equation]]:
    """Returns saved values as they arrive from their places, and the equations that fetch them."""
    into: list[Equation] = []
    arrived = []
    for v, place in saved.items():
        far = v if _is_here(place) else Value(v.aval.update(memory_space=place))
        if far is not v:
            _moved(far, v.aval.memory_space, into)
            into[-1].outs = [v]
        arrived.append(far)
    return arrived, into


def _is_here(place: Any) -> bool:
    return place is jax.memory.Space.Device


def _moved(v: Value, place: Any, into: list[Equation]) -> Value:
    program = _jax.trace(lambda x: [jax.device_put(x, place)], [v.aval], "saved")
    (out,) = opened(program, [v], into)
    return out
