"""Programs without conditionals: every branch runs, and the results are selected."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._src.core.base import _jax
from mpjax._src.core.base.higher_order import BRANCH, higher_order


def flattened(jaxpr: Any) -> Any:
    """Returns a closed jaxpr without conditionals and the calls that `_jax.inlined` finds.

    A scalar float in a branch is 1 where the branch is not taken.
    """
    return _jax.trace(lambda *args: _evaluated(jaxpr, args), _jax.in_avals(jaxpr), "flattened")


def _evaluated(jaxpr, args, masked=lambda x: x):

    def run(eqn, operands):
        body = _jax.inlined(eqn)
        if body is not None:
            return _evaluated(body, operands, masked)
        if higher_order(eqn.primitive.name).kind == BRANCH:
            return _chosen(eqn, operands, masked)
        return map(masked, _jax.bind(eqn, operands))

    return _jax.evaluate(jaxpr, args, run)


def _chosen(eqn: Any, operands: Sequence[Any], masked: Callable[[Any], Any]) -> list[Any]:
    """Returns the results of all branches of a conditional, and selects among them."""
    # All branches run here, also on operands that their condition would keep from them: a division
    # by the zero that it tests for. So in a branch that is not taken, scalars are replaced by 1.
    branches = [inside.program for inside in higher_order(eqn.primitive.name).wire(eqn)]
    index, *operands = operands
    # It is known which branch runs, so nothing is selected.
    if isinstance(eqn.invars[0], _jax.Literal):
        return _evaluated(branches[int(index)], operands, masked)

    def of(case, x):
        number = isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.floating)
        if not number or x.shape:
            return x
        return masked(jax.lax.select(index == case, x, jnp.ones_like(x)))

    runs = []
    for case, branch in enumerate(branches):
        here = functools.partial(of, case)
        runs.append(_evaluated(branch, list(map(here, operands)), here))
    return [
        jax.lax.select_n(index, *(jnp.asarray(x, v.aval.dtype) for x in cases))
        for v, *cases in zip(eqn.outvars, *runs, strict=True)
    ]
