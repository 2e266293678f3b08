"""Printed jaxprs depend on the program alone, and on all of it."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxprs import digest, lines


def of(fun, *args):
    return digest(jax.make_jaxpr(fun)(*args))


def shared(x):
    """JAX prints the program that is called twice only once, with its name."""
    sine = jax.jit(jnp.sin)
    return sine(sine(x)) + jax.nn.relu(x)


def apart(x):
    def another_name(y):
        return jnp.sin(y)

    return jax.jit(another_name)(jax.jit(lambda y: jnp.sin(y))(x)) + jax.nn.relu(x)


def test_printed_jaxpr_ignores_names_of_functions_and_shared_caches():
    assert of(shared, 1.0) == of(apart, 1.0)
    assert str(jax.make_jaxpr(shared)(1.0)) != str(jax.make_jaxpr(apart)(1.0))


def doubled(x):
    return lax.scan(lambda c, _: (c * 2, None), x, None, length=3)[0]


TABLE = np.arange(3)
OTHERS = {
    "an operand": (lambda x, y: x - y, lambda x, y: y - x),
    "a constant in an inner program": (
        doubled,
        lambda x: lax.scan(lambda c, _: (c * 3, None), x, None, length=3)[0],
    ),
    "a parameter of a loop": (
        doubled,
        lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=4)[0],
    ),
    "one of two branches": (
        lambda x: lax.cond(x > 0, jnp.sin, jnp.cos, x),
        lambda x: lax.cond(x > 0, jnp.sin, jnp.tan, x),
    ),
    "a table of integers": (lambda x: x + jnp.take(TABLE, 0), lambda x: x + jnp.take(-TABLE, 0)),
    "a dtype": (lambda x: x.astype("bfloat16"), lambda x: x.astype("float16")),
    "results": (lambda x: (x, 2 * x), lambda x: (2 * x, x)),
}


def test_printed_jaxpr_ignores_what_nothing_reads():
    def with_more(x):
        also = jnp.exp(x)
        return shared(x) if also is not None else also

    assert of(shared, 1.0) == of(with_more, 1.0)
    assert any("= exp" in line for line in lines(jax.make_jaxpr(lambda x: jnp.exp(x))(1.0)))


def test_printed_jaxpr_shows_every_other_difference():
    for name, (one, other) in OTHERS.items():
        args = [1.0] * one.__code__.co_argcount
        assert of(one, *args) != of(other, *args), name


def test_printed_jaxpr_is_the_same_in_a_new_process():
    code = (
        "import jax, test_jaxprs as t; from jaxprs import lines;"
        "print(*lines(jax.make_jaxpr(t.whole)(1.0)), sep='\\n')"
    )
    here = Path(__file__).parent
    paths = [str(here), str(here / "helpers")]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == [*lines(jax.make_jaxpr(whole)(1.0))]


def whole(x):
    return lax.cond(x > 0, shared, apart, jax.checkpoint(doubled)(x))
