"""The models of the benchmarks: their losses are legal, and casts by hand reach their matmuls."""

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from support import thorough_but

import mpjax
from benchmarks.models import MODELS, SMALL, TITLES, strictly, training_step
from benchmarks.models.layers import narrow_softmax
from benchmarks.rivals import program

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot")


def test_every_model_has_a_title_and_small_sizes():
    assert set(MODELS) == set(TITLES) == set(SMALL)


def described(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def matmuls(jaxpr):
    """Yields the operand dtypes of all matmuls, those of programs inside included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in MATMULS:
            yield {v.aval.dtype.name for v in eqn.invars[:2]}
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from matmuls(inner)


# Of every third model its casts by hand in the quick tier, but for what takes seconds to trace.
SLOW = ("ddpm", "pairformer")
QUICK = [(n, jnp.bfloat16) for n in [*MODELS][1::3] if n not in SLOW] + [("gpt2", None)]
# Each way in which strict casts by hand differ from others.
STRICTER = ("gpt2", "llama", "moe_onehot", "moe_ragged", "lstm", "t5")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            *(name, dtype),
            marks=[] if (name, dtype) in QUICK else pytest.mark.thorough,
            id=f"{name}-{'by hand' if dtype else 'float32'}",
        )
        for name in MODELS
        for dtype in (None, jnp.bfloat16)
    ],
)
def test_a_model_is_a_loss_of_abstract_arrays(name, dtype):
    loss, params, rest, batch, optimizer = MODELS[name](dtype=dtype, **SMALL[name])
    assert {leaf.dtype.name for leaf in jax.tree.leaves((params, rest))} == {"float32"}
    jaxpr, (value, after) = jax.make_jaxpr(loss, return_shape=True)(params, rest, batch)
    assert value.shape == () and value.dtype == jnp.float32
    assert described(after) == described(rest)
    found = list(matmuls(jaxpr.jaxpr))
    half = sum(dtypes == {"bfloat16"} for dtypes in found)
    if dtype is None:
        assert found and all(dtypes == {"float32"} for dtypes in found)
    else:
        routers = sum("router" in layer for layer in dict(params).get("layers", ()))
        assert half == len(found) - routers
    state = params, rest, jax.eval_shape(optimizer.init, params)
    after, _ = jax.eval_shape(training_step(loss, optimizer), state, batch)
    assert described(after) == described(state)


@pytest.mark.parametrize("name", thorough_but(MODELS, *STRICTER))
def test_strict_casts_by_hand_have_no_float32_matmul_in_derivatives_either(name):
    found = program(name, "by hand, strict", "bfloat16", **SMALL[name])
    jaxpr = jax.make_jaxpr(found.step)(found.state, found.batch)
    operands = list(matmuls(jaxpr.jaxpr))
    assert operands and all(dtypes == {"bfloat16"} for dtypes in operands)


def drawn(tree, seed=0):
    """Returns random arrays in place of abstract ones; scales and variances are around 1."""
    rng = np.random.default_rng(seed)

    def one(path, x):
        if x.dtype == jnp.int32:
            return rng.integers(4, size=x.shape, dtype=np.int32)
        about = any(word in str(path[-1]) for word in ("scale", "var", "norm"))
        return np.float32(about) + 0.1 * rng.standard_normal(x.shape, np.float32)

    return jax.tree_util.tree_map_with_path(one, tree)


@pytest.mark.parametrize("name", thorough_but(MODELS, "dlrm"))
def test_gradients_agree_in_float32_strictly_by_hand_and_under_autocast(name):
    loss, *arguments, _ = MODELS[name](**SMALL[name])
    arguments = drawn(arguments)
    strict = strictly(MODELS[name](dtype=jnp.bfloat16, **SMALL[name])[0])

    def found(loss):
        (value, _), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(*arguments)
        # Not biases: casts by hand sum their gradients in bfloat16 on a CPU.
        return value, ravel_pytree([g for g in jax.tree.leaves(grads) if g.ndim > 1])[0]

    value, gradient = found(loss)
    for half in (strict, mpjax.autocast(loss, "mixed_bfloat16")):
        near, slope = found(half)
        # bfloat16 keeps 8 bits of each of the tens of values on the way to a loss or a gradient.
        assert jnp.allclose(near, value, rtol=0.01)
        assert jnp.linalg.norm(slope - gradient) < 0.2 * jnp.linalg.norm(gradient)


def test_the_strict_softmax_has_the_derivative_of_a_softmax():
    scores, cotangent = jax.random.normal(jax.random.key(0), (2, 4, 16))

    def slope(softmax, dtype):
        _, pull = jax.vjp(softmax, scores.astype(dtype))
        return pull(cotangent.astype(dtype))[0].astype(jnp.float32)

    wanted = slope(jax.nn.softmax, jnp.float32)
    assert jnp.allclose(slope(narrow_softmax, jnp.bfloat16), wanted, atol=0.01)


def random_loss(name, sizes):
    """Returns the loss of a language model for random weights and tokens, the same each time."""
    loss, params, rest, batch, _ = MODELS[name](**sizes)
    rng = np.random.default_rng(0)
    tokens = rng.integers(64, size=batch[0].shape, dtype=np.int32)
    params = jax.tree.map(lambda p: 0.1 * rng.standard_normal(p.shape, np.float32), params)
    return jax.jit(loss)(params, rest, (tokens, tokens))[0]


def test_spelled_out_attention_is_the_same_function():
    losses = [random_loss(name, SMALL["gpt2"]) for name in ("gpt2", "gpt2_softmax")]
    assert jnp.allclose(*losses, rtol=1e-5)


def test_both_ways_to_the_experts_give_the_same_where_no_token_is_dropped():
    two = {"experts": 2}  # whoever takes two of two has them all
    losses = [random_loss(name, SMALL[name] | two) for name in ("moe_onehot", "moe_ragged")]
    assert jnp.allclose(*losses, rtol=1e-5)
