"""A walk over a rewritten program: which 16-bit results are rounded without being stored."""

import collections

import jax
import jax.numpy as jnp
from evaluation import names
from jax.extend import core as jex

from mpjax._src.core.base import _jax

ELEMENTWISE = names("add sub mul div max min abs neg select_n clamp sqrt sign add_any")
COTANGENTS = "add_any"
HALVES = (jnp.bfloat16, jnp.float16)


def programs_in(jaxpr):
    """Yields a jaxpr and those inside it."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in _jax.inner_jaxprs(eqn):
            yield from programs_in(getattr(inner, "jaxpr", inner))


def variables(eqn):
    return [v for v in eqn.invars if not isinstance(v, jex.Literal)]


def backward_pass(fun, params, *others):
    """Returns the program of a function and of its gradient in the first argument."""

    def run(params, *others):
        out, vjp = jax.vjp(lambda p: fun(p, *others), params)
        return vjp(jax.tree.map(jnp.ones_like, out))

    return jax.make_jaxpr(run)(params, *others).jaxpr


def needless(jaxpr):
    """Yields elementwise operations whose 16-bit result only elementwise operations read.

    Casts to float32 count as their own readers. The sums in the epilogue of a matmul are no fault:
    its kernel rounds once, after them. Nor are the cotangents of a 16-bit value: they have its
    dtype, and JAX adds them up in it.
    """
    for program in programs_in(jaxpr):
        maker = {v: eqn for eqn in program.eqns for v in eqn.outvars}
        readers = collections.defaultdict(list)
        for eqn in program.eqns:
            for v in variables(eqn):
                readers[v].append(eqn)

        def read_by(v, readers=readers):
            for eqn in readers[v]:
                widens = eqn.primitive.name == "convert_element_type"
                if widens and eqn.outvars[0].aval.dtype == jnp.float32:
                    yield from read_by(eqn.outvars[0])
                else:
                    yield eqn.primitive.name

        def is_sum_of_a_matmul(eqn, maker=maker):
            makers = [maker[v] for v in variables(eqn) if v in maker]
            if eqn.primitive.name not in ("add", "add_any"):
                return False
            return any(
                "dot_general" in str(m) or "conv_general" in str(m) or is_sum_of_a_matmul(m)
                for m in makers
            )

        for eqn in program.eqns:
            out = eqn.outvars[0] if eqn.outvars else None
            if eqn.primitive.name not in ELEMENTWISE or out.aval.dtype not in HALVES:
                continue
            found = {*read_by(out)}
            if eqn.primitive.name == COTANGENTS or found == {COTANGENTS}:
                continue
            inner = out not in program.outvars and out.aval.ndim and found
            if inner and found <= ELEMENTWISE and not is_sum_of_a_matmul(eqn):
                yield eqn
