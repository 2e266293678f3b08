"""Runs a program one operation at a time with a shadow: the same values in float32, or in float64.

A shadow in float64 is computed from the traced program too, so no line of the user's runs under
another setting of JAX: integers, branches and random bits are those of the program. The float64
arrays exist within `interpret.handling` alone.

Some results are only rounding error in float32: the gradients that are zero in exact arithmetic,
such as those of a bias before BatchNorm, of the key bias in attention, of a loss whose advantages
sum to zero. An error relative to their size means nothing. Such a value changes completely if the
last bits of the arguments change (stochastic arithmetic; Vignes, 1993), and the change tells how
large the canceled terms are. Its error is measured relative to the size of these terms.

To see the effect of some lines' rounding, `run_healed` runs a program with their results in
float32.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import FLOAT32, at_least_float32, dtype_of, is_float
from mpjax._src.core.base.lines import where
from mpjax._src.core.base.public import public
from mpjax._src.core.base.rules import MOVE, rule_of
from mpjax._src.core.program import interpret
from mpjax._src.core.program.interpret import WIDER, handling, run, run_in, take, typed, widen
from mpjax._src.core.program.site import Site, shown
from mpjax._src.tools.instruments.ranges import is_small
from mpjax._src.tools.instruments.rows import signature_of, turns_of

# A sum that is smaller than its terms by this many roundings is only rounding error: in float32 by
# 2**-17.
NOISE = 64.0

# An operand with this relative error (four roundings of bfloat16) is already wrong, so the
# operation is not blamed for the error of its result.
WRONG = 2.0**-6

# The error of an array that is non-finite where float32 is finite.
BROKEN = 1e9

# Errors grow if the terms of a sum cancel. In a gradient the sum is blamed for less of that.
NATURAL = 2.0**-5

# An overflow counts more than any finite error, unless its operands were already wrong.
OVERFLOW = 16.0

# A value that changes by more than this share with the last bits of the arguments is noise. Zeros
# change by about their own size; float32 still knows what is only ill-conditioned to a few percent.
CHANGES = 2.0**-3

# Only results with a larger relative error are tested for noise. Two roundings of zero differ by
# about their own size: a quarter of it leaves room for those that agree in part.
SUSPICIOUS = 0.25

# Operations that return entries of their operands, besides those whose rule is MOVE.
CHOOSES = frozenset({"select_n"})


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
        backward: Whether it depends on a cotangent. What a backward pass computes again does not.
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
        float32: The error of its result in the float32 run, if the reference is float64 and the
            policy is not float32; else None.
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
    float32: float | None = None

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
    """An array, its shadow, and the relative distance of the two."""

    array: Any
    shadow: Any  # the array itself if it is exact
    error: float = 0.0
    path: str = ""
    noise: bool = False  # whether the shadow is only rounding error
    makers: frozenset[Any] = frozenset()  # in a loop, the operations that accumulate it
    given: float = 0.0  # the error before they did
    node: int = -1  # its number where an instrument records the values
    single: Any = None  # beside a float64 shadow: the array of the float32 run

    def error_for(self, key: Any) -> float:
        """Returns the error that was there before the operation, not made by it in a loop."""
        return self.given if key in self.makers else self.error

    @property
    def exact(self) -> bool:
        return self.shadow is self.array


class Comparer(interpret.Watcher):
    """The watcher that runs every operation under the policy and in a wide dtype.

    Attributes:
        rows: The operations, in the order in which they first ran.
        diverged: The lines where the wide run would have taken another path.
    """

    def __init__(self, lines: Callable[[Any, Site], tuple[str, str]], wide: Any = FLOAT32):
        self._find = lines  # as those of a `Program`
        self.wide = wide
        self._found: dict[Any, tuple[str, str]] = {}
        self.rows: dict[Any, CompareRow] = {}
        self.diverged: dict[str, None] = {}
        self._paths: dict[Any, str] = {}  # of the parameters that a line reads

    def operation(self, eqn: Any, ins: list[Shadowed], place: Site) -> list[Shadowed]:
        arrays = [v.array for v in ins]
        outs = run(eqn, arrays)
        traits = rule_of(eqn.primitive.name).traits
        path = ins[0].path if ins and rules.SAME_PARAMETER in traits else ""
        singles = self._singles(eqn, ins, outs)
        narrow = any(dtype_of(x) in WIDER[self.wide] for x in (*arrays, *outs))
        if not narrow and all(v.exact for v in ins):  # nothing before it was rounded
            return [Shadowed(out, out, path=path, single=out) for out in outs]
        with handling(self.wide):
            return self._measured(eqn, ins, outs, singles, narrow, path, place)

    def _singles(self, eqn: Any, ins: list[Shadowed], outs: list[Any]) -> list[Any]:
        """Returns the results of the float32 run, if it is neither the one nor the other run."""
        if self.wide == FLOAT32:
            return [None] * len(outs)
        halves = any(dtype_of(v.aval) in WIDER[FLOAT32] for v in (*eqn.invars, *eqn.outvars))
        if not halves and all(v.single is v.array for v in ins):
            return outs
        return run_in(FLOAT32, eqn, [v.single for v in ins]) or [widen(out) for out in outs]

    def _measured(
        self,
        eqn: Any,
        ins: list[Shadowed],
        outs: list[Any],
        singles: list[Any],
        narrow: bool,
        path: str,
        place: Site,
    ) -> list[Shadowed]:
        """Returns the results of an operation with their shadows, and makes its row."""
        local, wanted, compared = self._in_wide(eqn, ins, outs, narrow)
        loops = tuple(loop for loop, _ in place.loops)
        key = (id(eqn), place.scopes, loops, self.lines(eqn, place))  # JAX shares what it traced
        operands = max((v.error_for(key) for v in ins), default=0.0)
        accumulated: dict[str, Any] = {}
        traits = rule_of(eqn.primitive.name).traits
        if place.loops and {rules.SAME_PARAMETER, rules.STATE} & traits:
            makers = frozenset({key}).union(*(v.makers for v in ins))
            accumulated = {"makers": makers, "given": operands}
        if paths := _paths_of(ins):
            self._paths.setdefault(_jax.line_key(eqn), paths)
        results = []
        for out, own, shadow, single in zip(outs, local, wanted, singles, strict=True):
            if not (is_float(out) and np.size(out)):
                results.append(Shadowed(out, shadow, path=path, single=single))
                continue
            stats = dict(zip(STATS, np.asarray(stats_of(out, own, shadow)).tolist(), strict=True))
            error = capped(stats["error"])
            noise = error > SUSPICIOUS and (
                any(v.noise for v in ins) or is_noise(eqn, ins, shadow, self.wide)
            )
            if eqn.primitive.name in CHOOSES:  # what it chooses is as wrong as it was
                error = max(error, operands)
            if not self._is_ours(eqn, place):
                facts = {"operands": operands, "compared": compared, "noise": noise}
                if single is not None and single is not out:
                    facts["float32"] = float(stats_of(single, shadow, shadow)[0])
                self._record(key, eqn, ins, out, place, stats | facts)
            value = Shadowed(out, shadow, error, path, noise, single=single, **accumulated)
            results.append(value)
        return results

    def _in_wide(
        self, eqn: Any, ins: Sequence[Shadowed], outs: list[Any], narrow: bool
    ) -> tuple[list[Any], list[Any], bool]:
        """Returns the results of the wide dtype on the operands, and on their shadows; and whether
        it has any.

        The first tell the operation's own error from what it inherits; the second are what the
        results should be. Some operations have no wide form: their results count as right.
        """
        local = run_in(self.wide, eqn, [v.array for v in ins]) if narrow else outs
        exact = all(v.exact for v in ins)
        wanted = local if exact else run_in(self.wide, eqn, [v.shadow for v in ins])
        if local is None or wanted is None:
            right = [widen(out, self.wide) for out in outs]
            return right, right, False
        return local, wanted, True

    def lines(self, eqn: Any, place: Site) -> tuple[str, str]:
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
        unnamed = place.op is None and not self.lines(eqn, place)[0]
        barrier = eqn.primitive.name in rules.BARRIERS
        return unnamed or barrier or interpret.is_precise(eqn) or place.again

    def _record(
        self, key: Any, eqn: Any, ins: list[Shadowed], out: Any, place: Site, stats: dict[str, Any]
    ) -> None:
        before = self.rows.get(key)
        source, library = self.lines(eqn, place)
        row = CompareRow(
            primitive=eqn.primitive.name,
            source=source,
            scope="/".join(shown(place.scopes)),
            path=_paths_of(ins) or self._paths.get(_jax.line_key(eqn), ""),
            backward=place.is_derived(eqn),
            iteration=place.loops,
            times=1 + (before.times if before else 0),
            dtypes=signature_of([v.array for v in ins], [out]),
            op=place.op,
            library=library,
            bytes=sum(getattr(x, "nbytes", 0) for x in (*(v.array for v in ins), out)),
            **stats,
        )
        if before and badness(row) <= badness(before):
            row = dataclasses.replace(before, times=row.times)
        self.rows[key] = row

    def constant(self, array: Any) -> Shadowed:
        single = None if self.wide == FLOAT32 else widen(array)
        with handling(self.wide):
            return Shadowed(array, widen(array, self.wide), single=single)

    def decide(self, value: Shadowed, eqn: Any, place: Site) -> int:
        # The shadow follows the path that was taken, where float32 would have taken another.
        if int(value.array) != int(value.shadow):
            line = where(*self.lines(eqn, place))
            parts = eqn.primitive.name, line, turns_of(place.loops)
            self.diverged.setdefault("  ".join(filter(None, parts)))
        return int(value.array)

    def slice(self, value: Shadowed, index: int) -> Shadowed:
        return self._each([value], lambda x: take(x, index), value)

    def stack(self, values: Sequence[Shadowed]) -> Shadowed:
        like = Shadowed(None, None, max(v.error for v in values), values[0].path)
        return self._each(values, lambda *xs: jnp.stack(xs), like)

    def _each(
        self, values: Sequence[Shadowed], made: Callable[..., Any], like: Shadowed
    ) -> Shadowed:
        """Returns a value like another, made alike from the arrays of values and their shadows."""
        array = made(*(v.array for v in values))
        single = shadow = array
        if self.wide != FLOAT32 and not all(v.single is v.array for v in values):
            single = made(*(v.single for v in values))
        if not all(v.exact for v in values):
            with handling(self.wide):
                shadow = made(*(v.shadow for v in values))
        return dataclasses.replace(like, array=array, shadow=shadow, single=single)


def _paths_of(values: Sequence[Shadowed]) -> str:
    return ", ".join(dict.fromkeys(v.path for v in values if v.path))


def badness(row: CompareRow) -> tuple[bool, float]:
    """Returns the sort key of rows."""
    return not row.noise, row.blame


def capped(error: float) -> float:
    return error if error < BROKEN else BROKEN


def is_noise(eqn: Any, ins: Sequence[Any], shadow: Any, wide: Any) -> bool:
    """Returns whether the terms of a sum cancel down to the rounding error of the wide dtype."""
    name = eqn.primitive.name
    if not (rules.CANCELS in rule_of(name).traits or name in rules.SUMS_OF_TWO):
        return False
    # The same sum of magnitudes, none of which cancel, says how large its terms are.
    magnitudes = [jnp.abs(v.shadow) for v in ins]
    if name == "sub":
        magnitudes[1] = -magnitudes[1]
    terms = run_in(wide, eqn, magnitudes)
    least = NOISE * jnp.finfo(wide).eps
    return terms is not None and bool(norm(shadow) < least * norm(terms[0]))


STATS = ("error", "new", "inherited", "underflow", "overflow", "low", "high")


def stats_of(got, own, shadow):
    """Returns `STATS` of a result, of float32 on its operands, and of its shadow, in one pass."""
    if not is_small(got, own, shadow):
        return _compiled_stats(got, own, shadow, jnp)
    with np.errstate(all="ignore"):  # infinities are counted
        return _stats(np.asarray(got), np.asarray(own), np.asarray(shadow), np)


def _stats(got, own, shadow, xp):
    wide = at_least_float32(shadow.dtype)
    rows = (-1, shadow.shape[-1] if shadow.ndim else 1)  # sums of sums lose less
    got, own, shadow = (x.astype(wide).reshape(rows) for x in (got, own, shadow))
    sizes = xp.abs(shadow)
    largest = xp.max(xp.where(xp.isfinite(shadow), sizes, 0))
    unit = xp.maximum(largest, jnp.finfo(wide).tiny)  # squares neither overflow nor vanish

    def squares(x):
        return xp.square(x / unit)

    def distance(x, y):
        # Equal infinities, as in a mask, are no error.
        return squares(xp.where(x == y, 0, x - y))

    sums = (
        distance(got, shadow),
        distance(got, own),
        distance(own, shadow),
        squares(xp.where(xp.isfinite(shadow), shadow, 0)),
        squares(xp.where(xp.isfinite(own), own, 0)),
        ((got == 0) & (own != 0)).astype(wide),
        (~xp.isfinite(got) & xp.isfinite(own)).astype(wide),
    )
    low = xp.where((sizes > 0) & xp.isfinite(sizes), sizes, xp.inf)
    if xp is jnp:
        sums, low = _sums_of_rows(sums, low)
    total, new, inherited, wanted, of_own, lost, broken = map(xp.sum, sums)
    low = xp.min(low)
    return xp.stack(
        [
            _ratio(total, wanted, xp),
            _ratio(new, of_own, xp),
            _ratio(inherited, wanted, xp),
            lost / got.size,
            broken / got.size,
            xp.where(xp.isinf(low), 0, low),
            xp.max(sizes),
        ]
    )


def _sums_of_rows(sums, low):
    """Returns the sums of the rows of arrays, and the least entries of those of one more."""
    zero, infinite = jnp.zeros((), low.dtype), jnp.full((), jnp.inf, low.dtype)
    *sums, low = jax.lax.reduce(
        (*sums, low),
        (*[zero] * len(sums), infinite),
        lambda a, b: (*map(jax.lax.add, a[:-1], b[:-1]), jax.lax.min(a[-1], b[-1])),
        (1,),
    )
    return sums, low


def _ratio(error, size, xp):
    relative = xp.where(xp.isfinite(error), xp.sqrt(error / size), xp.inf)
    return xp.where(error == 0, 0, relative)


_compiled_stats = jax.jit(_stats, static_argnums=3)


@jax.jit
def norm(x):
    return jnp.linalg.norm(x)


def percent(share: float) -> str:
    """Returns a relative error as text."""
    if share == 0:
        return "0"
    if not share < BROKEN:
        return "Inf"
    return f"{share:.0%}" if share >= 0.1 else f"{share:.2g}" if share < 1e-4 else f"{share:.2%}"


# ---- results that are only rounding error --------------------------------------------------------


def perturbed(arrays: Sequence[jax.Array], wide: Any = FLOAT32) -> list[jax.Array]:
    """Returns arrays whose floating entries are changed in the last bit, up or down at random."""
    last = float(jnp.finfo(wide).eps)

    def changed(x: jax.Array, seed: int) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        # In NumPy, because JAX would compile for each shape.
        up = np.random.default_rng(seed).integers(0, 2, x.shape, bool)
        factor = np.where(up, 1 + 2 * last, 1 - 2 * last)
        return jnp.asarray((np.asarray(x, np.float64) * factor).astype(x.dtype))

    return [changed(x, seed) for seed, x in enumerate(arrays)]


def results_of_perturbed(
    jaxpr: Any, arrays: Sequence[jax.Array], *more: Any, wide: Any = FLOAT32, last: Any = None
) -> list[Any] | None:
    """Returns the wide results for `perturbed` arrays, or None without a wide form.

    ``last`` is the dtype whose last bit changes, by default the wide one.
    """
    with handling(wide):
        changed = perturbed([widen(x, wide) for x in arrays], last or wide)
    try:
        return interpret.interpret(jaxpr, [*changed, *more], interpret.Wide(wide))
    except NotImplementedError:
        return None


def size_of_terms(wanted: Any, result: Any, wide: Any = FLOAT32) -> float:
    """Returns the size of the terms of a value that is only rounding error, and 0 for any other.

    ``wanted`` is the value in the wide dtype, ``result`` that for `perturbed` arguments.
    """
    noise, size = (float(jnp.linalg.norm(jnp.ravel(x))) for x in (result - wanted, wanted))
    return noise / float(jnp.finfo(wide).eps) if noise > CHANGES * size else 0.0


# ---- lines in a wide dtype -----------------------------------------------------------------------


class Healed(interpret.Wide):
    """The watcher that returns results of some equations in a wide dtype, as `heals` selects."""

    def __init__(self, heals: Callable[[Any, Site], bool], wide: Any = FLOAT32):
        super().__init__(wide)
        self.heals = heals

    def operation(self, eqn: Any, ins: list[Any], place: Site) -> list[Any]:
        to = WIDER[self.wide]
        heals = any(dtype_of(v.aval) in to for v in eqn.outvars) and self.heals(eqn, place)
        # An operand may be the wide result of a healed line, where the program has a narrow one.
        wider = any(dtype_of(v.aval) != dtype_of(x) for v, x in zip(eqn.invars, ins, strict=True))
        with handling(self.wide):
            outs = run_in(self.wide, eqn, ins) if heals or wider else None
            written = typed(ins, eqn.invars)
        if outs is None:  # as it is written; also if it has no wide form
            outs = run(eqn, written)
        name = eqn.primitive.name
        if heals or rule_of(name).need == MOVE or name in CHOOSES:
            return outs
        with handling(self.wide):
            return typed(outs, eqn.outvars)

    def constant(self, array: Any) -> Any:
        return array

    def stack(self, values: Sequence[Any]) -> Any:
        with handling(self.wide):
            wide = jnp.result_type(*values)  # an iteration may be healed, and another not
            return jnp.stack([x.astype(wide) for x in values])


def run_healed(
    jaxpr: Any,
    arrays: Sequence[Any],
    heals: Callable[[Any, Site], bool] = lambda *_: False,
    wide: Any = FLOAT32,
) -> list[Any]:
    """Returns the results of a program in which some lines return a wide dtype."""
    return interpret.interpret(jaxpr, list(arrays), Healed(heals, wide))
