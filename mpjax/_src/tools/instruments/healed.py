"""Runs a program with the results of some lines in float32, to see the effect of their rounding.

All other lines run as they are written. A float32 result stays float32 while it is only moved (a
cache is written, heads are split), and is rounded by the next arithmetic operation of another line.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._src.core.base.dtypes import is_half
from mpjax._src.core.base.rules import MOVE, rule_of
from mpjax._src.core.program.interpret import Plain, interpret, run, run_in_float32
from mpjax._src.core.program.site import Site

# Operations that return entries of their operands, besides those whose rule is MOVE.
CHOOSES = frozenset({"select_n"})


class Healed(Plain):
    """The watcher that returns the results of some equations in float32, as `heals` selects."""

    def __init__(self, heals: Callable[[Any, Site], bool]):
        self.heals = heals

    def operation(self, eqn: Any, ins: list[Any], place: Site) -> list[Any]:
        halves = [is_half(v.aval) for v in eqn.outvars]
        heals = any(halves) and self.heals(eqn, place)
        # An operand may be the float32 result of a healed line, where the program has 16 bits.
        wide = any(
            is_half(atom.aval) and not is_half(x) for atom, x in zip(eqn.invars, ins, strict=True)
        )
        outs = run_in_float32(eqn, ins) if heals or wide else None
        if outs is None:  # as it is written; also if it has no float32 form
            outs = run(eqn, [_rounded(x, a.aval) for x, a in zip(ins, eqn.invars, strict=True)])
        name = eqn.primitive.name
        if heals or rule_of(name).need == MOVE or name in CHOOSES:
            return outs
        return [_rounded(x, v.aval) for x, v in zip(outs, eqn.outvars, strict=True)]

    @staticmethod
    def stack(values: Sequence[Any]) -> Any:
        wide = jnp.result_type(*values)  # an iteration may be healed, and another not
        return jnp.stack([x.astype(wide) for x in values])


def run_healed(
    jaxpr: Any, arrays: Sequence[Any], heals: Callable[[Any, Site], bool] = lambda *_: False
) -> list[Any]:
    """Returns the results of a program in which some lines return float32."""
    return interpret(jaxpr, list(arrays), Healed(heals))


def _rounded(x: Any, aval: Any) -> Any:
    """Returns an array in the dtype of the program."""
    if is_half(aval) and getattr(x, "dtype", aval.dtype) != aval.dtype:
        return x.astype(aval.dtype)
    return x
