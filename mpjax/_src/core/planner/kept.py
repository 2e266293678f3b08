"""The program of a traced function. A function that is traced again gets the same one.

So its derivatives are planned once, also outside of `jax.jit`, where each gradient traces anew.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building, internals
from mpjax._src.core.base.dtypes import FLOAT32, dtype_of
from mpjax._src.core.base.higher_order import CUSTOM
from mpjax._src.core.planner.exceptions import Exceptions
from mpjax._src.core.planner.narrowed import narrowed
from mpjax._src.core.planner.program import Program
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.graph import CONSTANT_LIMIT

# The number of programs that are kept.
KEPT_PROGRAMS = 512


def program_of(
    jaxpr: Any,
    policy: Policy,
    paths: Sequence[str],
    dtypes: Sequence[Any],
    out_dtypes: Sequence[Any],
    around: Any = contextlib.nullcontext,
) -> Program:
    """Returns the program of a closed jaxpr, whose constants are its first arguments.

    Args:
        jaxpr: The program as it is written.
        policy: The policy.
        paths: The path of each argument.
        dtypes: The dtype in which each argument arrives.
        out_dtypes: The dtype in which each result is returned; None for its own.
        around: The context in which JAX runs the rules of the program.
    """

    def make():
        inner, consts = _jax.hoisted(jaxpr)
        closed = building.as_closed(inner)
        exceptions = Exceptions.of(policy, closed, around)
        half, constants = exceptions.half, [None] * len(consts)
        arrive = zip(inner.invars, [*constants, *dtypes], strict=True)
        # Regions are written before anything is differentiated: JAX carries them on to derivatives.
        marked = exceptions.marked(closed, [*[""] * len(consts), *paths])
        leave = zip(inner.outvars, out_dtypes, strict=True)
        return Program(
            narrowed(marked, half, sent=exceptions.sent),
            half,
            [dtype_of(v) == FLOAT32 and dtype == half for v, dtype in arrive],
            [dtype_of(v) == FLOAT32 and dtype == half for v, dtype in leave],
            exceptions,
            storage=policy.storage,
            known=known,
        )

    internals.ready()
    known = _known(jaxpr)
    try:
        same = _jax.program_key(jaxpr), _jax.rules_key(jaxpr), _jax.tracing_key()
        # A rule may branch on these values, so they are a part of what was traced.
        same = *same, *((i, str(x.dtype), np.asarray(x).tobytes()) for i, x in known.items())
        kept = _kept((*same, policy, tuple(paths), tuple(dtypes), tuple(out_dtypes)))
    except Exception:  # of a part that is traced, and of __hash__, __eq__ and closures of users
        return make()
    # An entry is a list that is filled here: an error of planning is no error of the key.
    if not kept:
        kept.append(make())
    return kept[0]


def _known(jaxpr: Any) -> dict[int, Any]:
    """Returns the small NumPy constants that custom rules read, which get them as they are."""
    inner, consts = _jax.open_jaxpr(jaxpr)
    ruled = (eqn for eqn in inner.eqns if eqn.primitive.name in CUSTOM)
    read = {v for eqn in ruled for v in eqn.invars if not isinstance(v, _jax.Literal)}
    return {
        i: x
        for i, (v, x) in enumerate(zip(inner.constvars, consts, strict=True))
        if v in read and not isinstance(x, jax.Array) and np.size(x) <= CONSTANT_LIMIT
    }


@functools.lru_cache(KEPT_PROGRAMS)
def _kept(key: Any) -> list[Program]:
    return []


_jax.cleared_with_jax(_kept)
