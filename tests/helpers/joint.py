"""Functions under the planner that sees the derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.autocast import transform
from mpjax._src.base import _jax
from mpjax._src.base._jax import building, held
from mpjax._src.planner.narrowed import narrowed
from mpjax._src.planner.program import Program
from mpjax._src.program import trace as programs
from mpjax._src.program.trace import Flat

# Plans as for 16 bits, but rounds nothing: gradients are JAX's own.
EXACT = F32 = np.dtype("float32")
_call = transform.call


def planned(fun, half="bfloat16"):
    """Returns a function under the planner; with `EXACT`, nothing is rounded."""

    @functools.wraps(fun)
    def run(*args, **kwargs):
        flat = Flat.of((args, kwargs))
        traced = programs.trace(flat.on(fun), flat.avals, getattr(fun, "__name__", "planned"))
        inner, consts = _jax.hoisted(traced.jaxpr)
        half_dtype = np.dtype(jnp.dtype(half))
        program = Program(narrowed(building.as_closed(inner), half_dtype), half_dtype)
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in flat.arrays]
        outs = held.call_held(program, *consts, *arrays)
        return traced.rebuild(outs)

    return run


def call(traced, arrays, rows=False):
    """Does what `transform.call` does, by programs that see their derivative.

    They know neither lists, overrides and regions nor settings of storage.
    """
    if traced.as_written or rows:
        return _call(traced, arrays, rows)
    half, (inner, consts) = traced.policy.compute_dtype, _jax.hoisted(traced.jaxpr)
    arrays = [*consts, *map(jnp.asarray, arrays)]
    avals = [v.aval for v in inner.invars]
    passed = [a.dtype == F32 and x.dtype == half for a, x in zip(avals, arrays, strict=True)]
    results = zip(inner.outvars, traced.out_dtypes, strict=True)
    returned = [v.aval.dtype == F32 and to == half for v, to in results]
    program = Program(narrowed(building.as_closed(inner), half), half, passed, returned)
    typed = zip(arrays, program.in_avals, strict=True)
    outs = held.call_held(program, *(cast(x, aval.dtype) for x, aval in typed))
    return [cast(x, to) for x, to in zip(outs, traced.out_dtypes, strict=True)]


def cast(x, dtype):
    return x if dtype is None or x.dtype == dtype else x.astype(dtype)
