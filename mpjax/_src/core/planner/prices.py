"""What it costs to keep a value, and to compute it again, in bytes that kernels read and write.

A compiler fuses what may run again into the kernels that read it. So a value is written only if a
matmul reads it or made it, or if several kernels read it. A value that is kept is read once more,
and has to be written where it was not; one that is computed again costs nothing where it is fused,
and is written and read again where it is not.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from mpjax._src.core.base import _jax
from mpjax._src.core.base.rules import LOOKS_UP, REDUCES, UNKNOWN
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.equations import Equation, Value
from mpjax._src.core.planner.kinds import LAYOUT, SAME, kind_of
from mpjax._src.core.planner.partition import runs_again

# The price of a byte that is kept until the backward pass, in bytes that are moved, by the policy's
# setting of storage.
KEPT: dict[str | float, float] = {"fast": 0.5, "lean": 8.0}
# Whoever reads a value can compute it from arrays that are together at most this much larger.
LARGER = 1.5
# Of so many arrays that a value is computed from, none is looked at any more.
MANY = 8


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The prices of values, in halves of a byte.

    Attributes:
        price: The bytes of a value, as it is handed over.
        kept: The price of a byte that is kept, in bytes that are moved.
        written: The values that the forward part writes anyway.
        again: The values that the backward part would write for matmuls if it computed them again.
    """

    price: rounding.Price
    kept: float
    written: Collection[Value]
    again: Collection[Value]

    @classmethod
    def of(
        cls, price: rounding.Price, kept: float, early: Sequence[Equation], late: Sequence[Equation]
    ) -> "Traffic":
        """Finds the prices of the values of a forward and a backward part."""
        fed, again = rounding.fed(early), rounding.fed(late)
        made = {out for e in early if not runs_again(e) for out in e.outs}
        rounded = {out for e in early if rounding.is_rounding(e) for out in e.outs}
        for e in reversed(early):
            moves = kind_of(e) in (SAME, LAYOUT) and not rounding.is_rounding(e)
            if moves and not again.isdisjoint(e.outs):
                again.difference_update(e.outs)
                again.add(e.ins[0])  # which is written, and read in another layout
        again |= _by_kernels(late)
        return cls(price, kept, fed | made | rounded | _by_kernels(early), again)

    def __call__(self, v: Value) -> int:
        """Returns what it costs to keep a value."""
        # The backward part reads it. A write comes on top if the forward part has none anyway.
        times = self.kept + (1 if v in self.written else 2)
        return int(2 * times * self.price(v))

    def costs(self, values: Iterable[Value]) -> Mapping[int, int]:
        """Returns what it costs to compute values again, by their places, beyond what is free."""
        # A write and a read of each byte, in halves of a byte.
        half = self.price.half
        return {i: 4 * _jax.bytes_of(v.aval, half) for i, v in enumerate(values) if v in self.again}


def _by_kernels(equations: Iterable[Equation]) -> set[Value]:
    """Returns what kernels of others read, into which nothing fuses: no view either."""
    kernels = (e for e in equations if e.rule is UNKNOWN or e.name in ("ffi_call", "pallas_call"))
    return {v for e in kernels for v in e.ins}


def read_by_several(equations: Sequence[Equation], results: Collection[Value]) -> set[Value]:
    """Returns the values that two kernels read, through operations that fuse, or a result is."""
    reader: dict[Value, Equation | Value] = {v: v for v in results}
    found: set[Value] = set()
    for e in reversed(equations):
        # A result that two kernels read is written, by one. Of a view, the operand is.
        # A lookup does not run again either, but it fuses into the kernel that reads the rows.
        if not runs_again(e) and LOOKS_UP not in e.rule.traits:
            kernels: set[Equation | Value] = {e}
        elif not found.isdisjoint(e.outs) and rounding.is_view(e):
            found.update(e.ins)
            continue
        else:
            kernels = {v if v in found else reader[v] for v in e.outs if v in reader or v in found}
        if len(kernels) > 1:
            found.update(e.ins)
        for kernel in kernels:
            found.update(v for v in e.ins if reader.setdefault(v, kernel) is not kernel)
    return found


def of_several(equations: Sequence[Equation], values: Collection[Value]) -> list[Value]:
    """Leaves out values that whoever reads them can compute from one array of 16-bit numbers."""
    arrays: dict[Value, dict[Value, int]] = {}  # the largest ones, with their sizes
    found: list[Value] = []
    for e in equations:
        read: dict[Value, int] = {}
        for v in e.ins:
            # An argument is an array, if nothing has made it.
            each = arrays[v] if v in arrays else arrays.setdefault(v, {v: v.size})
            read = read | each if read else each
        if len(read) > MANY:
            read = dict(sorted(read.items(), key=lambda item: -item[1])[:MANY])
        # A view or a statistic of an array is no other array.
        derived = runs_again(e) or rounding.is_view(e) or REDUCES in e.rule.traits
        derived = derived and not rounding.is_rounding(e)  # which is stored for all its readers
        for out in e.outs:
            several = out in values and sum(read.values()) > LARGER * out.size
            if several:
                found.append(out)
            arrays[out] = read if derived and not several else {out: out.size}
    return found
