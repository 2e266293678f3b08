"""Functions under the planner that sees the derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.base import _jax
from mpjax._src.planner.program import Program
from mpjax._src.program import trace as programs
from mpjax._src.program.trace import Flat

# Plans as for 16 bits, but rounds nothing: gradients are JAX's own.
EXACT = np.dtype("float32")


def planned(fun, half="bfloat16"):
    """Returns a function under the planner; with `EXACT`, nothing is rounded."""

    @functools.wraps(fun)
    def run(*args, **kwargs):
        flat = Flat.of((args, kwargs))
        traced = programs.trace(flat.on(fun), flat.avals, getattr(fun, "__name__", "planned"))
        inner, consts = _jax.hoisted(traced.jaxpr)
        program = Program(_jax.as_closed(inner), np.dtype(jnp.dtype(half)))
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in flat.arrays]
        outs = _jax.call_held(program, *consts, *arrays)
        return traced.rebuild(outs)

    return run


def kept(fun, *args):
    """Returns the bytes that a forward pass hands to its backward pass, arguments left out."""

    def residuals(*args):
        return jax.tree.leaves(jax.vjp(fun, *args)[1])

    jaxpr = jax.make_jaxpr(residuals)(*args).jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    results = {v for v in jaxpr.outvars if not isinstance(v, _jax.Literal)} - given
    return sum(_jax.bytes_of(v.aval) for v in results)
