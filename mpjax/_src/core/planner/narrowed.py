"""Writes the roundings of streams into a float32 program, before it is differentiated.

A stream ``v`` with the level ``L`` becomes ``rounded(v - L) + L`` for all who read it. Derivatives
do not see the rounding, so all of them, and the program itself, read the same numbers.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax.rounded import rounded_p
from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.garbage import collected_later
from mpjax._src.core.base.rules import LOOKS_UP, RESHAPES
from mpjax._src.core.planner import kinds
from mpjax._src.core.planner.accumulators import Sent
from mpjax._src.core.planner.equations import NOWHERE, Equation, Value, appended, given
from mpjax._src.core.planner.kinds import axes_of_view
from mpjax._src.core.planner.levels import Facts
from mpjax._src.core.planner.recall import Opened
from mpjax._src.core.planner.rounding import is_zero
from mpjax._src.core.planner.streams import NOT_ROUNDED, Walks, streams

NOT_SENT = Sent(gathered=False)


@collected_later()
def narrowed(program: Any, half: np.dtype, sent: Sent = NOT_SENT) -> Any:
    """Returns a float32 program whose streams are rounded; the same one if it has none.

    Args:
        program: The closed jaxpr.
        half: The 16-bit dtype; float32 leaves the program as it is.
        sent: What devices send each other in 16 bits.
    """
    if half == FLOAT32:
        return program
    parts = Opened(program)
    found, facts = streams(parts.equations, parts.outs, half, parts.ruled)
    # A custom rule stays as its author wrote it, since its derivative would not change with it. Its
    # results can be rounded behind it.
    found = [v for v in found if parts.is_reached(v)]
    writer = Narrowing(parts, facts, half)
    for v in found:
        writer.choose(v)
    inside = sent_in_half(parts, facts, half) if sent.gathered else []
    inside += parts.inside(functools.partial(narrowed, half=half))
    # The same object: whoever holds the program sees by `is` that nothing changed.
    if not writer.rounded and not inside:
        return program
    values = [*writer.rounded, *writer.levelled, *inside]
    return parts.changed(values, writer.alias, writer.write)


def sent_in_half(parts: Opened, facts: Facts, half: np.dtype) -> list[Value]:
    """Lets devices exchange tables in 16 bits for lookups, where rows may be rounded."""
    tables = {v for v in parts.ins if v.is_float32}
    each = [e for e in parts.equations if LOOKS_UP in e.rule.traits and e.ins[0] in tables]
    lookups = [e for e in each if not e.region.dtype and not parts.is_fixed(e.outs[0])]
    if not lookups:
        return []
    # Without candidates, `streams` returns the facts of no equation.
    facts = facts if facts.kinds else Facts(parts.equations)
    walks = Walks(parts.equations, parts.outs, facts, parts.ruled)
    # Each row is sent by itself: what it is added to does not matter.
    found = [e for e in lookups if walks.refused(e.outs[0]) in (None, NOT_ROUNDED)]
    for e in found:
        e.primitive, e.params = _jax.planned_gather(e.like, half)
    return [out for e in found for out in e.outs]


# How terms are computed, and of what.
Recipe = tuple[Callable[..., Any], list[Value]]
Terms = Callable[["Narrowing", Equation], Recipe]


class Narrowing:
    """Writes roundings, and the levels that they leave out.

    Attributes:
        rounded: The values to round.
        levelled: The values whose terms are read.
        alias: What is read in the place of a rounded value.
        terms: The terms of values that were written.
    """

    def __init__(self, parts: Opened, facts: Facts, half: np.dtype) -> None:
        self.parts, self.facts, self.half = parts, facts, half
        self.rounded: dict[Value, None] = {}
        self.levelled: dict[Value, None] = {}
        self.alias: dict[Value, Value] = {}
        self.terms: dict[Value, list[Value]] = collections.defaultdict(list)
        self._traced: dict[Any, Any] = {}

    def choose(self, v: Value) -> None:
        """Chooses a value to round, unless its terms are out of reach."""
        chain: dict[Value, None] = {}
        todo = [v] if self.facts.terms(v) else []
        while todo:
            x = todo.pop()
            if x in chain or x in self.levelled:
                continue
            e = self.facts.maker[x]
            if self.parts.is_fixed(x) or self._terms_of(e) is None:
                return
            chain[x] = None
            todo += [y for y in e.ins if self.facts.terms(y)]
        # Only once every term is in reach: a level that is rounded with its value is lost to
        # whoever takes it off.
        self.levelled |= chain
        self.rounded[v] = None

    def write(self, v: Value, e: Equation, into: list[Equation]) -> None:
        """Writes what follows the equation that makes a value: its terms, or its rounding."""
        if v in self.levelled:
            find = self._terms_of(e)
            assert find is not None
            self.terms[v] = self._append(*find(self, e), e, into)
        if v in self.rounded:
            values = [v, *self.terms[v]]
            (self.alias[v],) = self._append(given(_rounded, self.half), values, e, into)

    def _terms_of(self, e: Equation) -> Terms | None:
        """Returns what finds the terms of a result: small arrays, which are its level together."""
        kind = self.facts.kinds[e]
        if e.name in ("neg", "transpose", *RESHAPES):
            return _of_view
        # `_of_view` reads the first operand. That of a barrier may belong to another result.
        same = kind in (kinds.SAME, kinds.MOVED) and not e.is_barrier
        return _of_view if same else {kinds.ADDED: _of_sum, kinds.MULTIPLIED: _of_product}.get(kind)

    def _append(
        self, run: Callable[..., Any], values: Sequence[Value], e: Equation, into: list[Equation]
    ) -> list[Value]:
        first = len(into)
        # `Opened.changed` redirects the equations of the program alone.
        values = [self.alias.get(v, v) for v in values]
        like = e.on(e.ins, region=NOWHERE)  # whose scopes alone say where it is
        outs = appended(run, values, into, like, traced=self._traced)
        for new in into[first:]:
            # Reports name the user's line, not a line of this module.
            new.like = new.like.replace(source_info=e.like.source_info)
        return outs


def _rounded(half: np.dtype, v: Any, *terms: Any) -> list[Any]:
    held = [lax.stop_gradient(t) for t in terms]  # what is taken off is added again
    r = rounded_p.bind(functools.reduce(lambda x, t: x - t, held, v), half=half)
    return [functools.reduce(lambda x, t: x + t, held, r)]


# ---- the terms of a value, by the operation that makes it: how, and of what ----------------------


def _of_sum(n: Narrowing, e: Equation) -> Recipe:
    f, aval = n.facts, e.outs[0].aval
    own = f.mean_of(e.ins[1], e.ins[0]) if e.inverts else None
    if own is not None:
        return given(_centered, tuple(sorted(own))), n.terms[e.ins[0]]
    steps: list[tuple[str, tuple[int, ...], bool]] = []
    values: list[Value] = []
    for i, v in enumerate(e.ins):
        if is_zero(v):
            continue
        constant = tuple(sorted(f.constant_along(v, e.outs[0])))
        each: list[tuple[str, tuple[int, ...], Value]]
        each = [("sliced", constant, v)] if constant else [("term", (), t) for t in n.terms[v]]
        # Nothing says which level v has, so its mean over the last axis counts as one (`levels`).
        if not constant and f.unknown_level(v):
            each.append(("mean", (len(aval.shape) - 1,), v))
        steps += [(how, axes, e.inverts and i == 1) for how, axes, _ in each]
        values += [x for *_, x in each]
    return given(_sum, len(aval.shape), tuple(steps)), values


def _centered(axes: Sequence[int], *terms: Any) -> list[Any]:
    """Takes off what terms have in common along axes, as ``x - mean(x)`` does."""
    # A term with one entry along all these axes is its own mean: nothing is left of it.
    left = [t for t in terms if any(t.shape[axis] != 1 for axis in axes)]
    return [t - jnp.mean(t, axes, keepdims=True) for t in left]


def _sum(rank: int, steps: Sequence[tuple[str, tuple[int, ...], bool]], *xs: Any) -> list[Any]:
    found: dict[Any, Any] = {}
    for x, (how, axes, negative) in zip(xs, steps, strict=True):
        t = _small(x, rank, axes) if how == "sliced" else x
        t = jnp.mean(t, axes, keepdims=True) if how == "mean" else t
        t = -t if negative else t
        # Terms of one shape become one array, however many layers add to a stream.
        found[t.shape] = found[t.shape] + t if t.shape in found else t
    return [*found.values()]


def _of_product(n: Narrowing, e: Equation) -> Recipe:
    constant = [tuple(sorted(n.facts.constant_along(v, e.outs[0]))) for v in e.ins]
    # Two small factors spread each other, as in an outer product: then the first one is the term.
    both = all(constant)
    whole = 1 if constant[0] and not both else 0  # the operand whose terms are multiplied
    terms = [e.ins[0]] if both else n.terms[e.ins[whole]]
    axes = constant[0] if both else (), constant[1 - whole]
    run = given(_product, e.inverts, len(e.outs[0].aval.shape), *axes)
    return run, [e.ins[1 - whole], *terms]


def _product(
    divides: bool, rank: int, axes: Sequence[int], others: Sequence[int], factor: Any, *terms: Any
) -> list[Any]:
    factor = _small(factor, rank, others)
    small = (_small(t, rank, axes) if axes else t for t in terms)
    return [t / factor if divides else t * factor for t in small]


def _of_view(n: Narrowing, e: Equation) -> Recipe:
    terms = n.terms[e.ins[0]]
    if e.name in RESHAPES:
        places = tuple((a, *at) for a, at in axes_of_view(e).items())
        return given(_reshaped, e.ins[0].aval.shape, e.outs[0].aval.shape, places), terms
    return given(_viewed, e.name, e.params.get("permutation")), terms


def _viewed(name: str, permutation: Sequence[int], *terms: Any) -> list[Any]:
    if permutation:
        return [lax.transpose(t, permutation) for t in terms]
    return [-t if name == "neg" else t for t in terms]


def _small(x: Any, rank: int, axes: Sequence[int]) -> Any:
    """Returns an array with one entry along the axes along which it is constant."""
    if not x.shape:
        return lax.reshape(x, (1,) * rank)
    return functools.reduce(lambda y, axis: lax.slice_in_dim(y, 0, 1, axis=axis), axes, x)


def _reshaped(before: Any, after: Any, places: Any, *terms: Any) -> list[Any]:
    found = []
    for t in terms:
        # Where the term has one entry and the value several, the reshaped term has one as well.
        constant = {a for a, (n, m) in enumerate(zip(t.shape, before, strict=True)) if n == 1 != m}
        ones = {i for a, *at in places if a in constant for i in at}
        found.append(lax.reshape(t, [1 if i in ones else n for i, n in enumerate(after)]))
    return found
