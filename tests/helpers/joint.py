"""Functions under the planner that sees the derivative."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax._src.autocast import transform
from mpjax._src.base import _jax
from mpjax._src.base._jax import building, held
from mpjax._src.planner.exceptions import Exceptions
from mpjax._src.planner.narrowed import narrowed
from mpjax._src.planner.program import Program
from mpjax._src.program import trace as programs
from mpjax._src.program.trace import Flat

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


def autocast(fun, policy, marked=False):
    """Returns a function under the planner and a policy; with ``marked``, what it classifies."""
    policy = mpjax.get_policy(policy)

    def run(*args):
        traced = transform.trace(fun, policy, args, {})
        if marked:
            closed = building.as_closed(_jax.hoisted(traced.jaxpr)[0])
            return Exceptions.of(policy, closed).marked(closed)
        with mock.patch.object(transform, "SEES_DERIVATIVE", True):
            return traced.rebuild(transform.call(traced, Flat.of((args, {})).arrays))

    return run
