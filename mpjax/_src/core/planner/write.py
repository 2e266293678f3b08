"""Writes a float32 program in mixed precision: graph in, graph out.

Nothing is traced again, for the types of all results are known. Each float32 value has a float32
form, a 16-bit form, or both; a form that is missing is cast where it is first read.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core.primitives import convert_element_type_p, reduce_precision_p

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building
from mpjax._src.core.base.contexts import CONSTANTS_AS_CASTS
from mpjax._src.core.base.dtypes import FLOAT32, HALVES
from mpjax._src.core.base.higher_order import CALL, SCAN, WHILE
from mpjax._src.core.base.rules import CAST, HALF, LOOKS_UP
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.accumulators import SENT, Returned, Sent, unrounded
from mpjax._src.core.planner.equations import (
    NOWHERE,
    Equation,
    Listed,
    Region,
    Value,
    appended,
    barred,
    closed,
    parts,
)
from mpjax._src.core.program.graph import EXCHANGES


def written(
    program: Any,
    half: np.dtype,
    halved_in: Sequence[bool],
    halved_out: Sequence[bool],
    returned: Sequence[bool],
    sent: Sent = SENT,
    region: Region = NOWHERE,
    outermost: bool = False,
    rules: bool = True,
) -> Any:
    """Returns a float32 program with casts.

    Args:
        program: The closed jaxpr, or its equations.
        half: The 16-bit dtype; float32 leaves the program as it is.
        halved_in: For each argument, whether it arrives in 16 bits.
        halved_out: For each result, whether it leaves in 16 bits.
        returned: For each result, whether it leaves as an accumulator, if it is one.
        sent: What devices send each other in 16 bits.
        region: The region of the equation that holds the program.
        outermost: Whether its arguments are arrays, and no parts of some in a loop.
        rules: Whether functions with derivative rules are taken apart.

    Returns:
        The closed jaxpr.
    """
    listed = program
    if not isinstance(program, Listed):
        arguments = parts(program, rules=rules, region=region)
        listed = Listed(*arguments, building.anonymous(program))
    ins, equations, outs, info = listed
    back = {out for e in equations if e.region.back for out in e.outs}
    each = zip(outs, returned, halved_out, strict=True)
    # A gradient that leaves in 16 bits is rounded once devices have summed it.
    in_full = [yes and (not low or v in back) for v, yes, low in each]
    sums = unrounded(equations, outs, in_full, sent)
    equations, outs = sums.equations, sums.outs
    given = zip(ins, halved_in, strict=True)
    lows = {v: Value(rounding.halved(v.aval, half)) for v, low in given if low}
    asked = [v for v, low in zip(outs, halved_out, strict=True) if low]
    wanted, numbers = rounding.wanted(equations, outs, asked), rounding.constants(equations, half)
    arrived = [lows.get(v, v) for v in ins]
    writer = Writer(half, wanted, numbers, sums, {*ins} if outermost else (), sent, lows)
    for e in equations:
        writer.write(e)
    # A cast has the scopes of the equation next to it. Results are cast behind the last one.
    end = writer.written[-1] if writer.written else None
    results = [
        writer.low(v, end) if low else writer.full(v, end)
        for v, low in zip(outs, halved_out, strict=True)
    ]
    return closed(arrived, writer.written, results, info)


@dataclasses.dataclass
class Writer:
    """The equations that are written so far, and the forms of the values.

    Attributes:
        half: The 16-bit dtype.
        wanted: The values that are read in 16 bits alone.
        numbers: The constants that are 16-bit numbers.
        sums: The accumulators that the program returns.
        arrays: The arguments that are arrays in float32, or in 16 bits.
        sent: What devices send each other in 16 bits.
        lows: The 16-bit forms.
        fulls: The float32 forms.
        same: What stands for values of other dtypes: for the user's own casts to 16 bits.
        written: The equations.
    """

    half: np.dtype
    wanted: Collection[Value]
    numbers: Collection[Value]
    sums: Returned
    arrays: Collection[Value]
    sent: Sent
    lows: dict[Value, Value]
    fulls: dict[Value, Value] = dataclasses.field(default_factory=dict)
    same: dict[Value, Value] = dataclasses.field(default_factory=dict)
    written: list[Equation] = dataclasses.field(default_factory=list)

    def full(self, v: Value, near: Equation | None) -> Value:
        """Returns the float32 form of a value, or a value of another dtype itself."""
        if v not in self.lows:
            return self.same.get(v, v)
        if v not in self.fulls:
            self.fulls[v] = self._cast(self.lows[v], v.aval, near)
        return self.fulls[v]

    def low(self, v: Value, near: Equation | None) -> Value:
        """Returns the 16-bit form of a float32 value."""
        if not v.is_float32:
            return self.same.get(v, v)
        if v not in self.lows:
            self.fulls[v] = v
            self.lows[v] = self._cast(v, rounding.halved(v.aval, self.half), near)
        return self.lows[v]

    def is_made(self, v: Value) -> bool:
        """Returns whether a value was made in 16 bits: its float32 form would be a cast."""
        return v in self.lows and self.fulls.get(v) is not v

    def _cast(self, v: Value, aval: Any, near: Equation | None) -> Value:
        if v.aval.dtype == aval.dtype:
            return v
        if v.literal and not CONSTANTS_AS_CASTS.value:
            # A mask's -1e30 becomes infinite in float16, as by a cast: no reason to warn.
            with np.errstate(over="ignore"):
                return Value(aval, np.asarray(v.const, aval.dtype), literal=True)
        if v.aval.dtype in HALVES:
            v = self._rounded(v, near)
        params = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
        return self._append(convert_element_type_p, params, v, aval, near)

    def _rounded(self, v: Value, near: Equation | None) -> Value:
        """Returns a 16-bit value whose rounding XLA does not skip.

        XLA removes a cast to 16 bits and back (`xla_allow_excess_precision`), also that of a
        matmul's result on CPU. What is kept in 16 bits would then be another number than what the
        forward pass went on with: rows of softmax weights would not sum to one.
        """
        info = jnp.finfo(v.aval.dtype)
        params = {"exponent_bits": info.nexp, "mantissa_bits": info.nmant}
        return self._append(reduce_precision_p, params, v, v.aval, near)

    def _append(
        self, primitive: Any, params: dict[str, Any], v: Value, aval: Any, near: Equation | None
    ) -> Value:
        like = near.like.replace(effects=building.NO_EFFECTS) if near else building.blank()
        stack = near.stack if near else like.source_info.name_stack
        out = Value(aval)
        self.written.append(Equation(primitive, params, [v], [out], like, stack))
        return out

    def write(self, e: Equation) -> None:
        """Writes an equation in the dtypes that its operands and readers ask for."""
        if rounding.is_rounding(e):
            # Who reads float32 casts that back, so all readers see the rounded numbers.
            self.lows[e.outs[0]] = self.low(e.ins[0], e)
            return None
        if (other := rounding.other_half(e)) is not None:
            return self._in_other_half(e, other)
        if e.name == CAST and self._drops_cast(e):
            return None
        halved_in, halved_out, params = self._forms(e)
        if e.row.kind == SCAN:
            # What a loop stacks need not be filled with zeros before (`base/_jax/stacks`).
            e = e.on(e.ins, like=building.stacking(e.like))
        forms = zip(e.ins, halved_in, strict=True)
        ins = [self.low(v, e) if low else self.full(v, e) for v, low in forms]
        if e.outs and e.outs[0] in self.sums.accumulators:
            return self._with_accumulator(e, ins, params)
        if e.name in EXCHANGES:
            ins = self._sent(e, ins)
        outs = []
        for v, low in zip(e.outs, halved_out, strict=True):
            if low:
                self.lows[v] = Value(rounding.halved(v.aval, self.half))
            outs.append(self.lows[v] if low else v)
        like = _marked(e) if rounding.is_half_matmul(e) else e.like
        self.written.append(e.on(ins, outs, params=params, like=like))
        if e.name in EXCHANGES and not (self.sent.gathered or e.region.back):  # no cast moves ahead
            held = barred(outs, self.written, like=e.like, stack=e.stack)
            self.same.update(zip(outs, held, strict=True))

    def _drops_cast(self, e: Equation) -> bool:
        """Leaves out the user's own cast between float32 and 16 bits, if it changes no number."""
        (v,), (out,) = e.ins, e.outs
        if rounding.widens(e, self.half):
            self.lows[out] = self.full(v, e)
        elif out.aval.dtype == self.half and v.is_float32 and self.is_made(v):
            self.same[out] = self.lows[v]
        else:
            return False
        return True

    def _forms(self, e: Equation) -> tuple[Sequence[bool], Sequence[bool], dict[str, Any]]:
        """Returns which operands and results are in 16 bits, and the parameters for that."""
        row, as_they_are = e.row, ([False] * len(e.ins), [False] * len(e.outs))
        if rounding.is_half_matmul(e):
            ins = [i < 2 for i in range(len(e.ins))]
            low = rounding.returns_half(e)
            kind = {"preferred_element_type": self.half if low else FLOAT32}
            # An operation of a user returns the dtype of its operands.
            own = "preferred_element_type" in e.params
            return ins, [low], {**e.params, **kind} if own else e.params
        if rounding.is_half_operation(e):
            return [True] * len(e.ins), [v.is_float32 for v in e.outs], e.params
        if rounding.is_view(e):
            return self._view(e)
        # Constants and carries of while loops stay float32: matmuls inside cast what they read.
        if row.kind in (WHILE, CALL) and row.params:
            inner = {k: self._plain(e.params[k], e.region) for k in row.params}
            return *as_they_are, {**e.params, **inner}
        return self._around(e) if rounding.programs(e) else (*as_they_are, e.params)

    def _view(self, e: Equation) -> tuple[Sequence[bool], Sequence[bool], dict[str, Any]]:
        if e.is_barrier:
            pairs = zip(e.ins, e.outs, strict=True)
            each = [self.is_made(v) or (v.is_float32 and out in self.wanted) for v, out in pairs]
            return each, each, e.params
        floats = [v for v in e.ins if v.is_float32]
        kept = any(map(self.is_made, floats)) and all(
            self.is_made(v) or v in self.numbers for v in floats
        )
        commutes = rounding.commutes(e) and (self.sent.gathered or e.name not in EXCHANGES)
        commutes &= LOOKS_UP not in e.rule.traits  # a table is larger than its rows
        asked = commutes and all(out in self.wanted for out in e.outs)
        low = bool(floats) and (kept or asked)
        return [low] * len(e.ins), [low and v.is_float32 for v in e.outs], e.params

    def _sent(self, e: Equation, ins: list[Value]) -> list[Value]:
        """Returns the operands of an equation between devices: XLA moves no cast across it."""
        cast = ins[0].aval.dtype in HALVES and not self.is_made(e.ins[0])
        if e.name != "sharding_constraint" or not cast:
            return ins
        run = lambda x: [_jax.placed_freely(x, e.params["sharding"])]  # noqa: E731
        return appended(run, ins, self.written, like=e)

    def _with_accumulator(self, e: Equation, ins: list[Value], params: dict[str, Any]) -> None:
        """Writes a matmul that returns float32, and its rounding, if someone reads it."""
        (v,), kind = e.outs, {"preferred_element_type": FLOAT32}
        accumulator = self.sums.accumulators[v]
        self.written.append(e.on(ins, [accumulator], params={**params, **kind}, like=_marked(e)))
        self.lows[v] = self._cast(accumulator, rounding.halved(v.aval, self.half), e)

    def _in_other_half(self, e: Equation, half: np.dtype) -> None:
        """Writes an equation in another 16-bit dtype than the program's; results are float32."""

        def cast(v):
            typed = rounding.halved(v.aval, half)
            return self._cast(self.full(v, e), typed, e) if v.is_float32 else v

        outs = [Value(rounding.halved(v.aval, half)) if v.is_float32 else v for v in e.outs]
        returns = "preferred_element_type" in e.params
        params = {**e.params, "preferred_element_type": half} if returns else e.params
        self.written.append(e.on(map(cast, e.ins), outs, params=params, like=_marked(e)))
        for v, out in zip(e.outs, outs, strict=True):
            if out is not v:
                # `_cast` makes a new value, but readers know the old one.
                self._cast(out, v.aval, e)
                self.written[-1].outs = [v]

    def _plain(self, program: Any, region: Region) -> Any:
        """Returns the program of a loop's body or condition, whose arguments are all float32."""
        jaxpr, _ = _jax.open_jaxpr(program)
        ins, outs = ([False] * len(each) for each in (jaxpr.invars, jaxpr.outvars))
        return written(program, self.half, ins, outs, outs, self.sent, region)

    def _around(self, e: Equation) -> tuple[Sequence[bool], Sequence[bool], dict[str, Any]]:
        """Writes the programs of a loop, branch or map."""
        first, start, end = rounding.places(e)
        low = [v for v in e.ins if self.is_made(v)]
        outs_made = rounding.made([e], low, self.half)
        asked = [v in self.wanted for v in e.outs]
        read = rounding.wanted([e], e.outs, [v for v in e.outs if v in self.wanted])
        # A turn copies its slice of an array: it casts the copy.
        slices = end if e.row.kind == SCAN else len(e.ins)
        # In 16 bits enters what was made so, or what is read so by all programs, but no carry and
        # no operand that selects a branch.
        inside = [
            v.is_float32
            and i >= first
            and not start <= i < end
            and (self.is_made(v) or (v in read and not (i >= slices and v in self.arrays)))
            for i, v in enumerate(e.ins)
        ]
        unrounded = self.sums.inside.get(e) or [False] * len(e.outs)
        results = [
            v.is_float32 and i >= end - start and (ask or v in outs_made) and not wide
            for i, (v, ask, wide) in enumerate(zip(e.outs, asked, unrounded, strict=True))
        ]
        rewrite = functools.partial(
            written,
            half=self.half,
            halved_in=inside[first:],
            halved_out=results,
            returned=unrounded,
            sent=self.sent,
            region=e.region,
        )
        return inside, results, rounding.with_programs(e, rewrite)


def _marked(e: Equation) -> Any:
    """Returns what a matmul is like, with the mark by which its lowering finds its form."""
    own = e.params.get("sums")  # its lowering marks the convolution alone
    return building.marked(e.like) if e.rule.need == HALF and not own else e.like
