"""Runs a program one operation at a time with a shadow: the same values in float32."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import at_least_float32, dtype_of, is_float, is_half, short_name
from mpjax._src.core.base.lines import where
from mpjax._src.core.base.public import public
from mpjax._src.core.base.rules import rule_of
from mpjax._src.core.program.interpret import Watcher, is_precise, run, run_in_float32, take, widen
from mpjax._src.core.program.site import Site, shown
from mpjax._src.tools.instruments.noise import SUSPICIOUS

# A float32 sum that is smaller than its terms by this factor is only rounding error.
NOISE = 2.0**-17

# An operand with this relative error (four roundings of bfloat16) is already wrong, so the
# operation is not blamed for the error of its result.
WRONG = 2.0**-6

# The error of an array that is non-finite where float32 is finite.
BROKEN = 1e9

# Errors grow if the terms of a sum cancel. In a gradient the sum is blamed for less of that.
NATURAL = 2.0**-5

# An overflow counts more than any finite error, unless its operands were already wrong.
OVERFLOW = 16.0


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class CompareRow:
    """An operation in its worst iteration.

    Errors are relative errors of the whole array: ``norm(got - wanted) / norm(wanted)``.

    Attributes:
        primitive: The name of the operation.
        source: "file:line" of the user's code.
        scope: The named scopes around it, joined with "/".
        path: The paths of the parameters among its operands, joined with ", ".
        backward: Whether it belongs to the backward pass.
        iteration: The loops around it, with the iterations in which it was worst.
        times: The number of times that it ran.
        dtypes: The dtypes of its operands and result, such as "f16,f16->f32".
        error: The error of its result, relative to the float32 run.
        new: Its own error: that of its result relative to float32 on the same operands.
        inherited: The error of float32 on the same operands, relative to the float32 run.
        operands: The largest error of an operand. Errors that the operation made itself in earlier
            iterations of a loop are not counted, so the drift of an accumulator is its own error.
        underflow: The share of entries that became zero here, and would not in float32.
        overflow: The share of entries that became Inf or NaN here, and would not in float32.
        low: The smallest nonzero magnitude of the float32 result.
        high: The largest magnitude of the float32 result.
        noise: Whether the float32 result is only rounding error, such as a gradient that is zero in
            exact arithmetic. Its relative error means nothing.
        op: The number of this operation in the plan, or of the forward operation that it is the
            derivative of.
        compared: Whether it has a float32 form. Kernels and callbacks written for 16 bits
            have none, and their errors are given as 0.
        library: "file:line" of the library code that ``source`` calls, or "".
        bytes: The bytes of its operands and its result, in one run.
    """

    primitive: str
    source: str
    scope: str
    path: str
    backward: bool
    iteration: tuple[tuple[str, int], ...]
    times: int
    dtypes: str
    error: float
    new: float
    inherited: float
    operands: float
    underflow: float
    overflow: float
    low: float
    high: float
    noise: bool = False
    op: int | None = None
    compared: bool = True
    library: str = ""
    bytes: int = 0

    _also = ("added", "blame")

    @property
    def added(self) -> float:
        """The error that the operation adds, by rounding or by amplifying its operands' error."""
        if self.overflow:
            return math.inf
        return capped(self.new) + max(0.0, capped(self.inherited) - capped(self.operands))

    @property
    def blame(self) -> float:
        """Like ``added``, but reduced if operands were wrong already or a gradient cancels."""
        own = OVERFLOW if self.overflow else min(capped(self.new), 1.0)
        amplified = max(0.0, min(capped(self.inherited), 1.0) - capped(self.operands))
        if self.backward and rules.CANCELS in rule_of(self.primitive).traits:
            amplified *= NATURAL
        return (own + amplified) / (1 + (self.operands / WRONG) ** 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Shadowed:
    """An array, its float32 shadow, and the relative distance of the two."""

    array: Any
    shadow: Any  # the array itself if it is exact
    error: float = 0.0
    path: str = ""
    noise: bool = False  # whether the shadow is only rounding error
    makers: frozenset[Any] = frozenset()  # in a loop, the operations that accumulate it
    given: float = 0.0  # the error before they did

    def error_for(self, key: Any) -> float:
        """Returns the error that was there before the operation, not made by it in a loop."""
        return self.given if key in self.makers else self.error

    @property
    def exact(self) -> bool:
        return self.shadow is self.array


class Comparer(Watcher):
    """The watcher that runs every operation under the policy and in float32."""

    def __init__(self, lines: Callable[[Any, Site], tuple[str, str]]):
        self._find = lines  # as those of a `Program`
        self._found: dict[Any, tuple[str, str]] = {}
        self.rows: dict[Any, CompareRow] = {}
        self.order: dict[Any, int] = {}
        self.diverged: dict[str, None] = {}
        self._paths: dict[Any, str] = {}

    def operation(self, eqn: Any, ins: list[Shadowed], place: Site) -> list[Shadowed]:
        arrays = [v.array for v in ins]
        outs = run(eqn, arrays)
        traits = rule_of(eqn.primitive.name).traits
        path = ins[0].path if ins and rules.SAME_PARAMETER in traits else ""
        loops = tuple(loop for loop, _ in place.loops)
        key = (id(eqn), place.scopes, loops, self._lines(eqn, place))  # JAX shares what it traced
        operands_error = max((v.error_for(key) for v in ins), default=0.0)
        accumulated: dict[str, Any] = {}
        if place.loops and {rules.SAME_PARAMETER, rules.STATE} & traits:
            makers = frozenset({key}).union(*(v.makers for v in ins))
            accumulated = {"makers": makers, "given": operands_error}
        half = any(is_half(x) for x in (*arrays, *outs))
        if not half and all(v.exact for v in ins):  # nothing before it was rounded to 16 bits
            return [Shadowed(out, out, path=path) for out in outs]
        # float32 on the operands as they are tells the operation's own error from what it inherits;
        # on their shadows it gives the result as it should be.
        local = run_in_float32(eqn, arrays) if half else outs
        shadows = [v.shadow for v in ins]
        wanted = local if all(v.exact for v in ins) else run_in_float32(eqn, shadows)
        compared = True
        if local is None or wanted is None:
            # Some operations have no float32 form: their results count as right.
            compared, local = False, [widen(out) for out in outs]
            wanted = local
        paths = ", ".join(dict.fromkeys(v.path for v in ins if v.path))
        if paths:
            self._paths.setdefault(_jax.line_key(eqn), paths)
        results = []
        for out, own, shadow in zip(outs, local, wanted, strict=True):
            if not (is_float(out) and np.size(out)):
                results.append(Shadowed(out, shadow, path=path))
                continue
            stats = dict(zip(STATS, np.asarray(stats_of(out, own, shadow)), strict=True))
            error = capped(float(stats["error"]))
            noise = error > SUSPICIOUS and (
                any(v.noise for v in ins) or _is_noise(eqn, ins, shadow)
            )
            if not self._is_ours(eqn, place):
                stats |= {"operands": operands_error, "compared": compared, "noise": noise}
                self._record(key, eqn, ins, out, stats, place)
            results.append(Shadowed(out, shadow, error, path, noise, **accumulated))
        return results

    def _lines(self, eqn: Any, place: Site) -> tuple[str, str]:
        # Cached, because loops run an equation many times.
        key = (id(eqn), place.op, *map(id, place.callers))
        if key not in self._found:
            self._found[key] = self._find(eqn, place)
        return self._found[key]

    def _is_ours(self, eqn: Any, place: Site) -> bool:
        """Returns whether an equation has no row of its own.

        mpjax adds barriers, roundings for compilers, and the scaling of the loss. What the backward
        pass computes again has the rows of the forward pass.
        """
        unnamed = place.op is None and not self._lines(eqn, place)[0]
        barrier = eqn.primitive.name in (*_jax.BARRIERS, "optimization_barrier")
        return unnamed or barrier or is_precise(eqn) or place.again

    def _record(self, key, eqn, ins, out, stats, place) -> None:
        verdicts = {name: stats.pop(name) for name in ("compared", "noise")}
        stats = {name: float(value) for name, value in stats.items()}
        before = self.rows.get(key)
        row = CompareRow(
            primitive=eqn.primitive.name,
            source="",
            scope="/".join(shown(place.scopes)),
            path="",
            backward=place.backward,
            iteration=place.loops,
            times=1 + (before.times if before else 0),
            dtypes=f"{','.join(dict.fromkeys(_name(v.array) for v in ins))}->{_name(out)}",
            op=place.op,
            bytes=sum(getattr(x, "nbytes", 0) for x in (*(v.array for v in ins), out)),
            **verdicts,
            **stats,
        )
        self.order.setdefault(key, len(self.order))
        if before and badness(row) <= badness(before):
            row = dataclasses.replace(before, times=row.times)
        else:
            key_of_line = _jax.line_key(eqn)
            source, library = self._lines(eqn, place)
            paths = ", ".join(dict.fromkeys(v.path for v in ins if v.path))
            row = dataclasses.replace(
                row,
                source=source,
                library=library,
                path=paths or self._paths.get(key_of_line, ""),
            )
        self.rows[key] = row

    def constant(self, array: Any) -> Shadowed:
        return Shadowed(array, widen(array) if is_half(array) else array)

    def decide(self, value: Shadowed, eqn: Any, place: Site) -> int:
        # The shadow follows the path that was taken, where float32 would have taken another.
        if int(value.array) != int(value.shadow):
            turns = ", ".join(f"{loop} {i}" for loop, i in place.loops)
            line = where(*self._lines(eqn, place))
            self.diverged.setdefault("  ".join(filter(None, [eqn.primitive.name, line, turns])))
        return int(value.array)

    def slice(self, value: Shadowed, index: int) -> Shadowed:
        array = take(value.array, index)
        shadow = array if value.exact else take(value.shadow, index)
        return dataclasses.replace(value, array=array, shadow=shadow)

    def stack(self, values: Sequence[Shadowed]) -> Shadowed:
        array = jnp.stack([v.array for v in values])
        exact = all(v.exact for v in values)
        shadow = array if exact else jnp.stack([v.shadow for v in values])
        return Shadowed(array, shadow, max(v.error for v in values), values[0].path)


def badness(row: CompareRow) -> tuple[bool, float]:
    """Returns the sort key of rows."""
    return not row.noise, row.blame


def capped(error: float) -> float:
    return error if error < BROKEN else BROKEN


def _is_noise(eqn: Any, ins: Sequence[Shadowed], shadow: Any) -> bool:
    """Returns whether the terms of a sum cancel down to float32's rounding error."""
    sums = rules.CANCELS in rule_of(eqn.primitive.name).traits
    if not (sums or eqn.primitive.name in ("add", "sub")):
        return False
    # The same sum of magnitudes, none of which cancel, says how large its terms are.
    magnitudes = [jnp.abs(v.shadow) for v in ins]
    if eqn.primitive.name == "sub":
        magnitudes[1] = -magnitudes[1]
    terms = run_in_float32(eqn, magnitudes)
    return terms is not None and bool(norm(shadow) < NOISE * norm(terms[0]))


STATS = ("error", "new", "inherited", "underflow", "overflow", "low", "high")


@jax.jit
def stats_of(got, own, shadow):
    """Returns `STATS` of a result, of float32 on its operands, and of its shadow, in one pass."""
    wide = at_least_float32(shadow.dtype)
    rows = (-1, shadow.shape[-1] if shadow.ndim else 1)  # sums of sums lose less
    got, own, shadow = (x.astype(wide).reshape(rows) for x in (got, own, shadow))
    sizes = jnp.abs(shadow)
    largest = jnp.max(jnp.where(jnp.isfinite(shadow), sizes, 0))
    unit = jnp.maximum(largest, jnp.finfo(wide).tiny)  # squares neither overflow nor vanish

    def squares(x):
        return jnp.square(x / unit)

    def distance(x, y):
        # Equal infinities, as in a mask, are no error.
        return squares(jnp.where(x == y, 0, x - y))

    sums = (
        distance(got, shadow),
        distance(got, own),
        distance(own, shadow),
        squares(jnp.where(jnp.isfinite(shadow), shadow, 0)),
        squares(jnp.where(jnp.isfinite(own), own, 0)),
        ((got == 0) & (own != 0)).astype(wide),
        (~jnp.isfinite(got) & jnp.isfinite(own)).astype(wide),
    )
    low = jnp.where((sizes > 0) & jnp.isfinite(sizes), sizes, jnp.inf)
    zero, infinite = jnp.zeros((), wide), jnp.full((), jnp.inf, wide)
    *sums, low = jax.lax.reduce(
        (*sums, low),
        (*[zero] * len(sums), infinite),
        lambda a, b: (*map(jax.lax.add, a[:-1], b[:-1]), jax.lax.min(a[-1], b[-1])),
        (1,),
    )
    total, new, inherited, wanted, of_own, lost, broken = map(jnp.sum, sums)
    low = jnp.min(low)
    return jnp.stack(
        [
            _ratio(total, wanted),
            _ratio(new, of_own),
            _ratio(inherited, wanted),
            lost / got.size,
            broken / got.size,
            jnp.where(jnp.isinf(low), 0, low),
            jnp.max(sizes),
        ]
    )


def _ratio(error, size):
    relative = jnp.where(jnp.isfinite(error), jnp.sqrt(error / size), jnp.inf)
    return jnp.where(error == 0, 0, relative)


@jax.jit
def norm(x):
    return jnp.linalg.norm(x)


def _name(x: Any) -> str:
    return short_name(dtype_of(x))
