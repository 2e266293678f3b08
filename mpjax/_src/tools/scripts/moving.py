"""What changes between the calls of a function outside of jit, as an argument of its program.

A plan may depend on the value of a small NumPy constant that a custom rule reads, and a program on
that of a NumPy number. Where each call brings another one, each would be planned and compiled.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from mpjax._src.core.autocast.transform import Traced, call
from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building
from mpjax._src.core.base.higher_order import CUSTOM
from mpjax._src.core.base.trees import is_floating
from mpjax._src.core.program.graph import CONSTANT_LIMIT

# How many programs of a function are remembered; each set of shapes has one.
MOST = 64


def runs_now() -> bool:
    """Returns whether operations run where this is called: no `jit` is traced around it.

    It leaves an operation in the trace, so it is asked only where it matters.
    """
    return not isinstance(jax.lax.add(1.0, 1.0), jax.core.Tracer)


class Moving:
    """The values that the programs of a function had, and which of them have changed."""

    def __init__(self) -> None:
        self._before: dict[Any, tuple[dict[Any, Any], dict[Any, bool]]] = {}

    def apart(self, traced: Traced) -> Traced:
        """Returns a program in which what has changed since an earlier call is no constant."""
        inner, consts = _jax.open_jaxpr(traced.jaxpr)
        values = dict([*_constants(inner, consts), *_numbers(inner)])
        if not values:
            return traced
        key = traced.avals, tuple(eqn.primitive for eqn in inner.eqns), tuple(values)
        if key not in self._before and len(self._before) >= MOST:
            return traced
        before, moves = self._before.setdefault(key, (values, {}))
        for place in [place for place, value in values.items() if value != before[place]]:
            if place not in moves:
                others = {other for other, yes in moves.items() if yes}
                ruled = place[0] < 0 or inner.eqns[place[0]].primitive.name in CUSTOM
                moves[place] = not ruled or _can_be_derived(_without(traced, {*others, place}))
        moved = {place for place, yes in moves.items() if yes}
        # A trace that lasts is as it is written.
        return _without(traced, moved) if moved and runs_now() else traced


def _can_be_derived(traced: Traced) -> bool:
    """Returns whether a program has a gradient without the values of its constants.

    A custom rule may branch on them, also one that runs only after the program.
    """
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in traced.avals]
    floats = [i for i, x in enumerate(shapes) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]

    def total(by: Any, arrays: Any) -> Any:
        given = dict(zip(floats, by, strict=True))
        outs = call(traced, [given.get(i, x) for i, x in enumerate(arrays)])
        return sum(jax.numpy.sum(x) for x in outs if is_floating(x))

    try:
        jax.eval_shape(jax.grad(total), [shapes[i] for i in floats], shapes)
    except Exception:  # of a rule
        return False
    return True


def _constants(inner: Any, consts: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the constants on whose values a plan depends, see `planner.kept`."""
    ruled = (eqn for eqn in inner.eqns if eqn.primitive.name in CUSTOM)
    read = {v for eqn in ruled for v in eqn.invars if not isinstance(v, Literal)}
    for i, (v, x) in enumerate(zip(inner.constvars, consts, strict=True)):
        if v in read and not isinstance(x, jax.Array) and np.size(x) <= CONSTANT_LIMIT:
            yield (-1, i), (str(np.asarray(x).dtype), np.asarray(x).tobytes())


def _numbers(inner: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the numbers in a program, by their equation and place; those of inner ones stay."""
    for i, eqn in enumerate(inner.eqns):
        for j, x in enumerate(eqn.invars):
            if isinstance(x, Literal) and _can_move(x):
                yield (i, j), repr(x.val)


def _value(literal: Any) -> Any:
    """Returns a number: of Python, if its dtype is weak, as that of a number of Python is."""
    value = np.asarray(literal.val, literal.aval.dtype)
    return value.item() if getattr(literal.aval, "weak_type", False) else value


def _can_move(literal: Any) -> bool:
    """Returns whether JAX makes an array of the same type of a number."""
    dtype = getattr(literal.aval, "dtype", None)
    if dtype is None or dtype.kind not in "biufc":
        return False
    return jax.dtypes.canonicalize_dtype(np.asarray(_value(literal)).dtype) == dtype


def _without(traced: Traced, moved: set[Any]) -> Traced:
    inner, consts = _jax.open_jaxpr(traced.jaxpr)
    arrays = [jax.numpy.asarray(x) if (-1, i) in moved else x for i, x in enumerate(consts)]
    eqns, new = [*inner.eqns], []
    for i, j in sorted(place for place in moved if place[0] >= 0):
        literal, var = eqns[i].invars[j], building.Var(eqns[i].invars[j].aval)
        invars = [*eqns[i].invars[:j], var, *eqns[i].invars[j + 1 :]]
        eqns[i] = eqns[i].replace(invars=invars)
        new.append(var)
        arrays.append(jax.numpy.asarray(_value(literal)))
    inner = inner.replace(eqns=eqns, constvars=[*inner.constvars, *new])
    return dataclasses.replace(traced, jaxpr=_jax.close(inner, arrays))
