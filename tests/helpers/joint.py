"""Functions under the planner that sees the derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax._src.autocast import transform
from mpjax._src.autocast.kernels import tracing
from mpjax._src.base import _jax
from mpjax._src.base._jax import building, held
from mpjax._src.planner import rounding
from mpjax._src.planner.exceptions import Exceptions
from mpjax._src.planner.kept import program_of
from mpjax._src.planner.narrowed import narrowed
from mpjax._src.planner.program import Program
from mpjax._src.program import trace as programs
from mpjax._src.program.trace import Flat

# Plans as for 16 bits, but rounds nothing: gradients are JAX's own.
EXACT = F32 = np.dtype("float32")
_call = transform.call
# The rules that spare traffic apply to the tests' programs too, which are small.
rounding.SMALL = 1


def planned(fun, half="bfloat16", **options):
    """Returns a function under the planner; with `EXACT`, nothing is rounded."""

    @functools.wraps(fun)
    def run(*args, **kwargs):
        flat = Flat.of((args, kwargs))
        traced = programs.trace(flat.on(fun), flat.avals, getattr(fun, "__name__", "planned"))
        inner, consts = _jax.hoisted(traced.jaxpr)
        dtype = np.dtype(jnp.dtype(half))
        closed = Exceptions(dtype).marked(building.as_closed(inner))
        program = Program(narrowed(closed, dtype), dtype, **options)
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in flat.arrays]
        outs = held.call_held(program, *consts, *arrays)
        return traced.rebuild(outs)

    return run


def autocast(fun, policy, marked=False):
    """Returns a function under the planner and a policy; with ``marked``, what it classifies."""
    policy = mpjax.get_policy(policy)

    def run(*args):
        traced = transform.trace(fun, policy, args, {})
        if marked:
            closed = building.as_closed(_jax.hoisted(traced.jaxpr)[0])
            return Exceptions.of(policy, closed).marked(closed)
        return traced.rebuild(call(traced, Flat.of((args, {})).arrays))

    return run


def call(traced, arrays, rows=False):
    """Does what `transform.call` does, by programs that see their derivative.

    Of the settings of storage, they know lean.
    """
    if traced.as_written or rows:
        return _call(traced, arrays, rows)
    consts = _jax.open_jaxpr(traced.jaxpr)[1]
    arrays = [*map(jnp.asarray, arrays)]
    dtypes = [x.dtype for x in arrays]
    around = functools.partial(tracing, traced.policy)
    settings = traced.policy, traced.paths, dtypes, traced.out_dtypes, around
    program = program_of(traced.jaxpr, *settings)
    typed = zip([*consts, *arrays], program.in_avals, strict=True)
    outs = held.call_held(program, *(cast(x, aval.dtype) for x, aval in typed))
    return [cast(x, to) for x, to in zip(outs, traced.out_dtypes, strict=True)]


def cast(x, dtype):
    return x if dtype is None or x.dtype == dtype else x.astype(dtype)
