"""Prints jaxprs so that two processes print the same, whatever was traced before.

JAX's own printing names functions, shows addresses, and writes a program that several equations
share only once, so it changes with what JAX's caches contain. Here a variable is a number, an inner
program stands where it is called, and whatever runs in Python alone is left out. So are equations
whose results nothing reads: JAX drops them when Python collects their tracers, sooner or later.
"""

import enum
import hashlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex

JAXPRS = (jex.Jaxpr, jex.ClosedJaxpr)
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
PLAIN = (str, int, float, complex, type(None), np.generic, np.dtype, enum.Enum)


def digest(jaxpr):
    """Returns a hash of the printed jaxpr."""
    return hashlib.sha256("\n".join(lines(jaxpr)).encode()).hexdigest()[:16]


def lines(jaxpr, indent=""):
    """Yields the lines of a jaxpr: its arguments and constants, its equations, its results."""
    jaxpr, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    numbers, fresh = {}, itertools.count()

    def name(v):
        if isinstance(v, jex.Literal):
            return f"{v.val}:{v.aval.str_short()}"
        return f"%{numbers[v]}"

    def named(v):
        numbers[v] = next(fresh)
        return f"%{numbers[v]}:{v.aval.str_short()}{' weak' * bool(v.aval.weak_type)}"

    yield f"{indent}arguments {' '.join(map(named, jaxpr.invars))}"
    yield f"{indent}constants {' '.join(map(named, jaxpr.constvars))} {shown(consts)}"
    for eqn in living(jaxpr):
        operands, results = map(name, eqn.invars), map(named, eqn.outvars)
        yield f"{indent}{' '.join(results)} = {eqn.primitive} {' '.join(operands)}"
        # Beside an inner program, a name is that of the traced function.
        calls = any(isinstance(value, JAXPRS) for value in eqn.params.values())
        for key, value in sorted(eqn.params.items()):
            if not (calls and key == "name"):
                yield from parameter(f"{indent}  {key}", value, indent)
    yield f"{indent}results {' '.join(map(name, jaxpr.outvars))}"


def living(jaxpr):
    """Returns the equations that the results depend on, or that have effects."""
    read, found = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}, []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not read.isdisjoint(eqn.outvars):
            read |= {v for v in eqn.invars if not isinstance(v, jex.Literal)}
            found.append(eqn)
    return found[::-1]


def parameter(key, value, indent):
    """Yields the lines of a parameter; an inner program takes several."""
    if isinstance(value, JAXPRS):
        yield key
        yield from lines(value, indent + "    ")
    elif isinstance(value, tuple | list) and any(isinstance(x, JAXPRS) for x in value):
        for i, inner in enumerate(value):
            yield from parameter(f"{key} {i}", inner, indent)
    else:
        yield f"{key} {shown(value)}"


def shown(value):
    """Returns a constant or a parameter as text, without addresses and names of functions."""
    if isinstance(value, PLAIN):
        return str(value)
    if isinstance(value, set | frozenset):
        return "{" + " ".join(sorted(map(shown, value))) + "}"
    if isinstance(value, dict):
        return "{" + " ".join(sorted(f"{shown(k)}={shown(v)}" for k, v in value.items())) + "}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}(" + " ".join(map(shown, value)) + ")"
    if isinstance(value, np.ndarray | jax.Array):
        return array(value)
    if isinstance(value, jax.sharding.Mesh):
        return f"Mesh({shown(dict(value.shape))})"
    if callable(value) or hasattr(value, "call_wrapped"):
        return "function"
    if type(value).__module__.startswith("mpjax"):
        return type(value).__name__
    return ADDRESS.sub("", str(value))


def array(value):
    """Returns the shape and dtype of an array, and a hash of its entries unless they are floats.

    Those may have been computed, and then their last bits are another processor's.
    """
    text = f"{value.dtype}{list(value.shape)}"
    exact = jnp.issubdtype(value.dtype, jnp.integer) or value.dtype == bool
    return text + (hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:8] if exact else "")
