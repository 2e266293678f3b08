"""Functions under the planner alone: without a policy, its lists, and compiled functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building, held
from mpjax._src.core.planner.exceptions import Exceptions
from mpjax._src.core.planner.narrowed import narrowed
from mpjax._src.core.planner.program import Program
from mpjax._src.core.program import trace as programs
from mpjax._src.core.program.trace import Flat

# Plans as for 16 bits, but rounds nothing: gradients are JAX's own.
EXACT = F32 = np.dtype("float32")


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
