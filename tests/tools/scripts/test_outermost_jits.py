"""Outermost jitted functions are told of once, in whatever way they are made and called."""

import copy
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import pytest

from mpjax._src.tools.scripts.jits import watching


class Told:
    """A watcher that notes what it is told."""

    def __init__(self):
        self.met_names, self.ran = [], []

    def met(self, jitted, args, kwargs):
        self.met_names.append(jitted.__name__)
        return jitted.__name__

    def runs(self, what):
        self.ran.append(what)


def double(x, n=2):
    return n * x


class Model:
    def __init__(self):
        self.scale = 3.0

    @functools.partial(jax.jit, static_argnums=0)
    def before(self, x):
        return self.scale * x


def module_function(x):
    return x + 1


def test_each_way_to_jit_is_told_once():
    told, plain = Told(), (jax.jit, jax.eval_shape, jax.make_jaxpr)
    with watching(told) as watch:
        called = jax.jit(double)
        assert called(jnp.ones(2)).tolist() == [2, 2]

        @functools.partial(jax.jit, static_argnames="n")
        def static(x, n):
            return double(x, n) if n else x

        @jax.jit
        def decorated(x):
            return called(x) + static(x, n=3)  # calls inside are a part of it

        assert decorated(jnp.ones(2)).tolist() == [5, 5]
        assert called.lower(jnp.ones(2)).compile()(jnp.ones(2)).tolist() == [2, 2]
        assert called.trace(jnp.ones(2)).lower().compile()(jnp.ones(2)).tolist() == [2, 2]
        jax.eval_shape(called, jnp.ones(2))
        jax.make_jaxpr(called)(jnp.ones(2))
        inside = []
        jax.make_jaxpr(lambda: inside.append(watch.is_inside))()
        jax.jit(lambda: inside.append(watch.is_inside)).eval_shape()
        assert inside == [True, True] and not watch.is_inside
        spread = jax.pmap(double)
        assert spread(jnp.ones((1, 2))).tolist() == [[2, 2]]
        one = jax.jit(static_argnames="n")(double)
        assert one(jnp.ones(2), n=4).tolist() == [4, 4]
    assert (jax.jit, jax.eval_shape, jax.make_jaxpr) == plain
    assert told.met_names == ["double", "decorated", *["double"] * 4]
    assert told.ran == told.met_names
    assert called(jnp.ones(2)).tolist() == [2, 2]  # and nobody is told
    assert len(told.met_names) == 6


def test_what_is_made_is_as_good_as_a_jitted_function():
    with watching(Told()):

        class Inside:
            scale = 3.0

            @functools.partial(jax.jit, static_argnums=0)
            def method(self, x):
                """Scales."""
                return self.scale * x

        jitted = jax.jit(double, static_argnums=1)
        assert Inside().method(jnp.ones(1)).tolist() == [3]
        assert Inside.method.__doc__ == "Scales." and Model().before(jnp.ones(1)).tolist() == [3]
        assert inspect.signature(jitted) == inspect.signature(double)
        assert jitted.__wrapped__ is not None and jitted.__name__ == "double"
        assert jitted(1.0) == 2 and jitted._cache_size() >= 1
        assert copy.deepcopy(jitted) is jitted and {jitted: 1}[jitted] == 1
        again = jax.jit(jitted)
        assert again(jnp.ones(1)).tolist() == [2] and repr(jitted).startswith("<PjitFunction")
        assert jax.vmap(jitted)(jnp.ones(3)).tolist() == [2, 2, 2]
        jitted.clear_cache()
        global module_function
        module_function = jax.jit(module_function)  # as a decorator does
        assert pickle.loads(pickle.dumps(module_function)) is module_function


def test_functions_that_were_not_called_are_named():
    with watching(Told()) as watch:

        @jax.jit
        def never(x):
            return x

        used = jax.jit(double)
        used(1.0)
        (only,) = watch.idle()
        assert "never" in only and "test_outermost_jits.py" in only
        assert never is not None


def test_what_a_watcher_raises_ends_the_call():
    class Ends(Told):
        def runs(self, what):
            raise KeyboardInterrupt

    with watching(Ends()) as watch:
        with pytest.raises(KeyboardInterrupt):
            jax.jit(double)(1.0)
        assert not watch.is_inside
