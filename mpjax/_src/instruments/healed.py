"""A program of which some lines give float32: what would be without their rounding.

Everything else runs as it is written, and rounds as it does. A result that is kept in float32 stays
so where it is only moved (a cache is written, heads are split), and is rounded again with the next
arithmetic of another line.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._src.instruments.interpret import Place, Plain, interpret, is_half, run, run_in_float32
from mpjax._src.rules import MOVE, rule_of

# What gives entries of its operands, besides what its rule says moves them.
CHOOSES = frozenset({"select_n"})


class Healed(Plain):
    """The watcher that gives some results in float32: those of equations that `heals` names."""

    def __init__(self, heals: Callable[[Any, Place], bool]):
        self.heals = heals

    def operation(self, eqn: Any, ins: list[Any], place: Place) -> list[Any]:
        halves = [is_half(v.aval) for v in eqn.outvars]
        heals = any(halves) and self.heals(eqn, place)
        wide = any(
            is_half(atom.aval) and not is_half(x) for atom, x in zip(eqn.invars, ins, strict=True)
        )
        outs = run_in_float32(eqn, ins) if heals or wide else None
        if outs is None:  # as it is written; or it has no float32 form, and is given what it knows
            outs = run(eqn, [_rounded(x, a.aval) for x, a in zip(ins, eqn.invars, strict=True)])
        name = eqn.primitive.name
        if heals or rule_of(name).need == MOVE or name in CHOOSES:
            return outs
        return [_rounded(x, v.aval) for x, v in zip(outs, eqn.outvars, strict=True)]

    @staticmethod
    def stack(values: Sequence[Any]) -> Any:
        wide = jnp.result_type(*values)
        return jnp.stack([x.astype(wide) for x in values])


def run_healed(
    jaxpr: Any, arrays: Sequence[Any], heals: Callable[[Any, Place], bool] = lambda *_: False
) -> list[Any]:
    """Returns the results of a program of which some lines give float32."""
    return interpret(jaxpr, list(arrays), Healed(heals))


def _rounded(x: Any, aval: Any) -> Any:
    """Returns an array in the dtype that the program has there."""
    if is_half(aval) and getattr(x, "dtype", aval.dtype) != aval.dtype:
        return x.astype(aval.dtype)
    return x
