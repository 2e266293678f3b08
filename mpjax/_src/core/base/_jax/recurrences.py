"""Linear recurrences ``h[t] = a[t] h[t-1] + b[t]`` whose derivatives are recurrences as well.

The tangent of ``h`` obeys the same recurrence, driven by ``da[t] h[t-1] + db[t]``. Its transpose is
the recurrence in the other direction, with the factors of the next element: ``g[t] = a[t+1] g[t+1]
+ ct[t]``. So the backward pass reads ``a`` and ``h``, and none of the levels of the associative
scan that computes them (Martin and Cundy, Parallelizing linear recurrent neural nets over sequence
length, 2018).
"""

import functools
from typing import Any

import jax
from jax.experimental import jet
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpjax._src.core.base._jax.programs import zero_tangent
from mpjax._src.core.base._jax.rounded import rounded_p


def recurrence(a: Any, b: Any, axis: int, half: Any = None) -> Any:
    """Returns ``h`` with ``h[t] = a[t] h[t-1] + b[t]`` along an axis, and ``h[0] = b[0]``.

    Its derivative reads ``h`` rounded to ``half``, if that is not None.
    """
    return recurrence_p.bind(a, b, axis=axis, reverse=False, half=half)


def scanned(a: Any, b: Any, *, axis: int, reverse: bool = False, half: Any = None) -> Any:
    """Returns a linear recurrence as an associative scan."""
    return jax.lax.associative_scan(_then, (a, b), axis=axis, reverse=reverse)[1]


def _then(first: Any, second: Any) -> Any:
    """Composes two affine maps."""
    return first[0] * second[0], second[0] * first[1] + second[1]


def _moved(x: Any, axis: int, later: bool) -> Any:
    """Returns an array moved by one element along an axis, to later ones or to earlier ones."""
    size = x.shape[axis]
    rest = jax.lax.slice_in_dim(x, 0 if later else 1, size - later, axis=axis)
    zero = jax.lax.full_like(jax.lax.slice_in_dim(x, 0, 1, axis=axis), 0)
    return jax.lax.concatenate([zero, rest] if later else [rest, zero], axis)


def _drive(tangents: Any, h: Any, axis: int, reverse: bool = False) -> Any:
    """Returns what drives the tangent of a recurrence ``h``.

    The tangent of ``a`` or of ``b`` is None if it is zero; not both are.
    """
    da, db = tangents
    terms = [] if da is None else [da * _moved(h, axis, later=not reverse)]
    return functools.reduce(jax.lax.add, terms if db is None else [*terms, db])


def _jvp(primals: Any, tangents: Any, *, axis: int, reverse: bool, half: Any) -> Any:
    h = recurrence_p.bind(*primals, axis=axis, reverse=reverse, half=half)
    moving = [None if isinstance(t, ad.Zero) else t for t in tangents]
    if moving == [None, None]:
        return h, zero_tangent(h)
    read = h if half is None else rounded_p.bind(h, half=half)
    driven = _drive(moving, read, axis, reverse)
    return h, recurrence_p.bind(primals[0], driven, axis=axis, reverse=reverse, half=None)


def _transpose(ct: Any, a: Any, b: Any, *, axis: int, reverse: bool, half: Any) -> Any:
    if isinstance(ct, ad.Zero):
        return None, ad.Zero(b.aval)
    # Only ``b`` is linear in what is transposed: the factors of a tangent are primal values.
    following = _moved(a, axis, later=reverse)
    return None, recurrence_p.bind(following, ct, axis=axis, reverse=not reverse, half=half)


def _batch(args: Any, dims: Any, *, axis: int, **params: Any) -> Any:
    (size,) = {x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None}
    a, b = (batching.bdim_at_front(x, d, size) for x, d in zip(args, dims, strict=True))
    return recurrence_p.bind(a, b, axis=axis + 1, **params), 0


def _taylor(primals: Any, series: Any, **params: Any) -> Any:
    run = functools.partial(scanned, **params)
    return jet.jet(run, primals, series, factorial_scaled=False)


recurrence_p = Primitive("linear_recurrence")
recurrence_p.def_impl(jax.jit(scanned, static_argnames=("axis", "reverse", "half")))
recurrence_p.def_abstract_eval(lambda a, b, **_: b)
mlir.register_lowering(recurrence_p, mlir.lower_fun(scanned, multiple_results=False))
ad.primitive_jvps[recurrence_p] = _jvp
ad.primitive_transposes[recurrence_p] = _transpose
batching.primitive_batchers[recurrence_p] = _batch
jet.jet_rules[recurrence_p] = _taylor  # type: ignore[assignment]
