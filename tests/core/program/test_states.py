"""States that go through a function under autocast keep their dtypes, whatever it hands out."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import W, X
from support import thorough_but

import mpjax

HALF_OUT = ["O3:bfloat16", "O3:float16", "p=f32,c=bf16,o=bf16", "p=f32,c=f16,o=f16"]


def dtypes(tree):
    return [x.dtype.name for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]


def layer(params, state, x):
    h = x @ params["w"]
    mean = 0.999 * state["mean"] + 0.001 * h.mean(0)
    return (h - h.mean(0)) * 2, {"mean": mean, "count": state["count"] + 1}


WAYS = [lambda f: f, jax.jit]
PAIRS = [(way, policy) for way in WAYS for policy in HALF_OUT]


@pytest.mark.parametrize(("transform", "policy"), thorough_but(PAIRS, 0, 5, 6))
def test_statistics_stay_float32(policy, transform):
    """An average with a momentum of 0.999 stands still in half."""
    policy = mpjax.get_policy(policy)
    auto = transform(mpjax.autocast(layer, policy))
    params = policy.cast_to_param({"w": W})
    state = exact = {"mean": jnp.ones(8), "count": jnp.int32(0)}
    plain = jax.jit(layer)
    for _ in range(30):
        out, state = auto(params, state, X)
        exact = plain({"w": W}, exact, X)[1]
    assert out.dtype == policy.output_dtype and dtypes(state) == ["int32", "float32"]
    np.testing.assert_allclose(state["mean"], exact["mean"], rtol=1e-3)
    steps = lambda state, _: (auto(params, state, X)[1], None)  # noqa: E731
    scanned = jax.eval_shape(lambda state: lax.scan(steps, state, None, length=2)[0], state)
    assert dtypes(scanned) == ["int32", "float32"]


MODES = [(mode, policy) for mode in ("ema", "batch") for policy in HALF_OUT]


@pytest.mark.parametrize(("mode", "policy"), thorough_but(MODES, 1, 4))
def test_an_equinox_batch_norm_can_be_called_again(policy, mode):
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode=mode)
    before = dtypes(state)
    run = functools.partial(jax.vmap, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    # Its branches have one dtype each, so that it refuses 16-bit inputs beside float32 statistics.
    policy += ",casting=op"
    auto = jax.jit(mpjax.autocast(lambda w, x, state: run(norm)(x @ w, state), policy))
    for _ in range(2):
        out, state = auto(W, X, state)
    assert out.dtype == mpjax.get_policy(policy).output_dtype and dtypes(state) == before


def decode(params, cache, token):
    keys = lax.dynamic_update_slice(cache["keys"], (token @ params["w"])[None], (cache["at"], 0))
    seen = jax.nn.softmax(keys @ token) @ keys
    return seen, (cache["at"], {"at": cache["at"] + 1, "keys": keys})


@pytest.mark.parametrize("policy", ["O2:bfloat16", "O2:float16", "O3:bfloat16"])
def test_a_half_cache_stays_half(policy):
    policy = mpjax.get_policy(policy)
    half = policy.param_dtype
    auto = mpjax.autocast(decode, policy)
    params, token = {"w": W.astype(half)}, X[0]
    cache = {"at": 0, "keys": jnp.zeros((4, 8), half)}
    cache = jax.tree.map(jnp.asarray, cache)
    out, (_, new) = jax.jit(auto)(params, cache, token)
    assert out.dtype == policy.output_dtype and dtypes(new) == ["int32", half.name]
    steps = lambda cache, token: (auto(params, cache, token)[1][1], None)  # noqa: E731
    scanned = jax.eval_shape(lambda cache: lax.scan(steps, cache, X)[0], cache)
    assert dtypes(scanned) == ["int32", half.name]


def test_results_with_the_structure_of_an_argument_count_as_a_state():
    policy = mpjax.get_policy("p=f32,c=bf16,o=bf16")

    def handed_out(fun, *args):
        return dtypes(mpjax.autocast(fun, policy)(*args))

    tree = {"a": X, "b": (W, 1.0)}
    double = functools.partial(jax.tree.map, lambda x: x * 2)
    assert handed_out(double, tree)[:2] == ["float32"] * 2  # the same, by itself
    assert handed_out(lambda t: [0, (double(t), X)], tree)[-1] == "bfloat16"
    assert handed_out(lambda t: {"mutated": double(t["b"])}, tree)[0] == "float32"  # a part of one
    assert handed_out(lambda t, x=None: double(t), tree)[:2] == ["float32"] * 2
    # An array is an array, and another shape, structure or dtype is another thing.
    assert handed_out(lambda x: x * 2, X) == ["bfloat16"]
    assert handed_out(lambda x: (x * 2,), X) == ["bfloat16"]
    assert handed_out(lambda t: {"a": X[:2], "b": (W, 1.0)}, tree)[0] == "bfloat16"
    assert handed_out(lambda t: {"a": X, "c": (W, 1.0)}, tree)[0] == "bfloat16"
    assert handed_out(lambda t: {"a": t["a"] * 1.5}, {"a": jnp.arange(3)}) == ["bfloat16"]


def test_constant_results_are_arrays():
    def fun(w, x):
        return jnp.sum(x @ w), (jnp.array(False), jnp.array(3), jnp.float32(2))

    (_, aux), _ = jax.value_and_grad(mpjax.autocast(fun, "mixed_bfloat16"), has_aux=True)(W, X)
    assert all(hasattr(x, "dtype") for x in aux)
    assert dtypes(aux) == ["bool", "int32", "float32"]
