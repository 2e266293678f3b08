"""What it costs to keep a value, and to compute it again, in bytes that kernels read and write.

A compiler fuses what may run again into the kernels that read it. So a value is written only if a
matmul reads it or made it, or if several kernels read it. A value that is kept is read once more,
and has to be written where it was not; one that is computed again costs nothing where it is fused,
and is written and read again where it is not.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from mpjax._src.base.rules import DEAR, rule_of
from mpjax._src.planner import rounding
from mpjax._src.planner.equations import Equation, Value, readers_of
from mpjax._src.planner.partition import runs_again

# The price of a byte that is kept until the backward pass, in bytes that are moved.
KEPT = 0.5


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The prices of values, in halves of a byte.

    Attributes:
        price: The bytes of a value, as it is handed over.
        written: The values that the forward part writes anyway.
        again: The values that the backward part would write if it computed them again.
    """

    price: rounding.Price
    written: Collection[Value]
    again: Collection[Value]

    @classmethod
    def of(
        cls,
        price: rounding.Price,
        early: Sequence[Equation],
        late: Sequence[Equation],
        results: Collection[Value],
    ) -> "Traffic":
        """Finds the prices of the values of a forward and a backward part."""
        fed, fed_late = rounding.fed(early), rounding.fed(late)
        made = {out for e in early if not runs_again(e) for out in e.outs}
        sinks = _sinks([*early, *late], {*map(id, late)}, {*results} | fed_late)
        dear = {out for e in early if rule_of(e.name).cost == DEAR for out in e.outs}
        several = {v for v in dear if len(sinks[v]) > 1}
        return cls(price, fed | made, fed_late | several)

    def __call__(self, v: Value) -> int:
        """Returns what it costs to keep a value."""
        times = KEPT + (1 if v in self.written else 2)
        return int(2 * times * self.price(v))

    def costs(self, values: Iterable[Value]) -> Mapping[int, int]:
        """Returns what it costs to compute values again, by their places, beyond what is free."""
        return {i: 4 * self.price(v) for i, v in enumerate(values) if v in self.again}


def _sinks(
    equations: Sequence[Equation], late: Collection[int], written: Collection[Value]
) -> dict[Value, set[int]]:
    """Returns two of the late kernels that read each value, through what is fused."""
    readers = readers_of(equations)
    sinks: dict[Value, set[int]] = {}
    for e in reversed(equations):
        for v in e.outs:
            found: set[int] = set()
            for r in readers[v]:
                if not runs_again(r):
                    found.update({id(r)} if id(r) in late else ())
                    continue
                for x in r.outs:
                    if id(r) not in late and x in written:
                        continue  # where it is written again, that is its own price
                    found.update({id(x)} if x in written else sinks.get(x, ()))
            sinks[v] = {*[*found][:2]}
    return sinks
