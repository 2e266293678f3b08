"""Keys of programs: equal for two traces of the same program, and for no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._src.core.base import _jax

X = np.ones((4, 4), np.float32)


def key_of(fun, *args):
    return _jax.program_key(jax.make_jaxpr(lambda *args: fun(*args))(*args))


def everything(x, w=X, number=2.0, scope="a", callback=None, times=3):
    @jax.custom_jvp
    def own(x):
        return x * number

    own.defjvp(lambda primals, tangents: (own(*primals), tangents[0]))
    with jax.named_scope(scope):
        x = own(x) * w
    x, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c) * number, None), x, None, times)
    x = jax.lax.cond(x[0, 0] > number, jax.checkpoint(jnp.sin), lambda x: x, x)
    shape = jax.ShapeDtypeStruct((), np.float32)
    return x * jax.pure_callback(callback or (lambda x: x * number), shape, x[0, 0])


def test_two_traces_have_the_same_key():
    assert key_of(everything, X) == key_of(everything, X)
    assert hash(key_of(everything, X)) == hash(key_of(everything, X))


def test_the_values_of_constants_are_no_part_of_a_key():
    assert key_of(everything, X) == key_of(functools.partial(everything, w=2 * X), X)


OTHERS = {
    "number": {"number": 3.0},
    "sign of zero": {"number": -0.0},
    "scope": {"scope": "b"},
    "shape of a constant": {"w": np.ones((1, 4), np.float32)},
    "callback": {"callback": lambda x: x},
    "callback with a list": {"callback": (lambda seen: lambda x: (seen.append(x), x)[1])([])},
    "length of a loop": {"times": 4},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_programs_have_other_keys(name):
    base = {"number": 0.0} if name == "sign of zero" else {}
    if "with a list" in name:  # an equal list, but another one
        base = {"callback": (lambda seen: lambda x: (seen.append(x), x)[1])([])}
    keys = [key_of(functools.partial(everything, **kwargs), X) for kwargs in (base, OTHERS[name])]
    assert keys[0] != keys[1]


def test_constants_of_a_jit_are_part_of_a_key():
    def fun(x, w):
        return jax.jit(lambda x: x @ w)(x)

    arrays = jnp.asarray(X), jnp.asarray(2 * X)
    keys = [key_of(lambda x, w=w: fun(x, w), X) for w in (*arrays, arrays[0], X, 2 * X, X.copy())]
    assert keys[0] == keys[2] and keys[3] == keys[5]
    assert keys[0] != keys[1] and keys[3] != keys[4]


def test_a_program_that_holds_tracers_has_no_key():
    inner, _ = _jax.open_jaxpr(jax.make_jaxpr(lambda x: x @ X)(X))

    def outer(w):
        with pytest.raises(TypeError, match="traced"):
            _jax.program_key(_jax.close(inner, [w]), known=True)
        return w

    jax.make_jaxpr(outer)(X)


def with_rule(rule):
    fun = jax.custom_jvp(jnp.sin)
    fun.defjvp(rule)
    return lambda: _jax.rules_key(jax.make_jaxpr(lambda x: fun(x) + jax.nn.relu(x))(1.0))


def test_rules_are_the_same_if_they_are_one_function_that_reads_the_same():
    numbers = [2.0]

    def made(number):
        return lambda primals, tangents: (primals[0], number * tangents[0])

    rule = made(2.0)
    assert with_rule(rule)() == with_rule(rule)()
    assert with_rule(rule)() != with_rule(made(2.0))()
    held = with_rule(lambda primals, tangents: (primals[0], numbers[0] * tangents[0]))
    assert held() == held() and hash(held()) == hash(held())


def test_policies_of_checkpoints_are_the_same_if_they_read_the_same():
    policies, limits = jax.checkpoint_policies, [3]

    def key(policy):
        return _jax.rules_key(jax.make_jaxpr(jax.checkpoint(jnp.sin, policy=policy))(1.0))

    def made(limit, held=None):
        return lambda prim, *args, **params: len(args) < limit and held is not limits

    equal = [
        (None, None),
        (policies.dots_saveable, policies.dots_saveable),
        (policies.save_only_these_names("a"), policies.save_only_these_names("a")),
        (made(1), made(1)),
        (made(1, limits), made(1, limits)),
    ]
    others = [
        (None, policies.dots_saveable),
        (policies.nothing_saveable, policies.dots_saveable),
        (policies.save_only_these_names("a"), policies.save_only_these_names("b")),
        (made(1), made(2)),
        (made(1, limits), made(1, [3])),
    ]
    assert all(key(one) == key(other) for one, other in equal)
    assert not any(key(one) == key(other) for one, other in others)


def test_a_rule_that_reads_a_traced_value_has_no_key():
    def fun(number):
        key = with_rule(lambda primals, tangents: (primals[0], number * tangents[0]))
        with pytest.raises(TypeError, match="traced"):
            key()
        return number

    jax.make_jaxpr(fun)(2.0)
