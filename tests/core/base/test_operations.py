"""An operation of another library is answered with the primitives that compute it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import equations

import mpjax
from mpjax._src.core.base._jax import primitive_names
from mpjax._src.core.base.operations import OPERATIONS

X = np.ones((4, 4), np.float32)
IMAGE = np.ones((1, 4, 4, 4), np.float32)


def layer(module):
    return lambda x: module.init_with_output(jax.random.key(0), x)[0]


def lstm(x):
    cell = nn.LSTMCell(4)
    carry = x, x
    return cell.init_with_output(jax.random.key(0), carry, x)[0]


# A function for each row of the table, and its operand.
PROGRAMS = {
    "matmul": (lambda x: jnp.einsum("ij,jk->ik", x, x), X),
    "conv2d": (layer(nn.Conv(2, (2, 2))), IMAGE),
    "attention": (lambda x: jax.nn.dot_product_attention(x, x, x), IMAGE),
    "softmax": (jax.nn.softmax, X),
    "crossentropy": (lambda x: optax.softmax_cross_entropy(x, x), X),
    "softplus": (jax.nn.softplus, X),
    "layernorm": (layer(nn.LayerNorm()), X),
    "norm": (jnp.linalg.norm, X),
    "mean": (jnp.mean, X),
    "amax": (jnp.max, X),
    "amin": (jnp.min, X),
    "prod": (jnp.prod, X),
    "avgpool": (lambda x: nn.avg_pool(x, (2, 2)), IMAGE),
    "maxpool": (lambda x: nn.max_pool(x, (2, 2)), IMAGE),
    "sigmoid": (jax.nn.sigmoid, X),
    "gelu": (jax.nn.gelu, X),
    "lstm": (lstm, X),
    "leakyrelu": (lambda x: nn.leaky_relu(x - 0.5), X),
    "cat": (lambda x: jnp.concatenate([x, x]), X),
    "where": (lambda x: jnp.where(x > 0, x, 1), X),
    "power": (lambda x: jnp.power(x, 2.5), X),
    "ln": (jnp.log, X),
    "biasadd": (lambda x: x + 1, X),
    "subtract": (lambda x: x - 1, X),
    "multiply": (lambda x: x * 2, X),
    "divide": (lambda x: x / 3, X),
    "relu": (jax.nn.relu, X),
    "minimum": (lambda x: jnp.minimum(x, 0), X),
    "embedding": (lambda x: x[jnp.array([0, 1])], X),
}


def rows(name):
    return [row for row, names in OPERATIONS.items() if name in names.split()]


@pytest.mark.parametrize("row", OPERATIONS)
def test_an_operation_consists_of_the_primitives_of_its_row(row):
    (name,) = [name for name in PROGRAMS if rows(name) == [row]]
    fun, x = PROGRAMS[name]
    used = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(fun)(x))}
    assert {*row.split()} <= used, used


def test_no_name_of_the_table_is_a_primitive_or_twice_there():
    names = [name for row in OPERATIONS.values() for name in row.split()]
    later = {"log2", "reciprocal"}  # primitives from JAX 0.12 on, and of Pallas
    assert not {*names} - later & primitive_names() and len({*names}) == len(names)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "Write 'dot_general'") for name in ("matmul", "einsum", "MatMul", "matmul_v2")),
        *((name, "Write 'dot_general'") for name in ("aten::mm", "torch.bmm", "addmm", "linear")),
        ("conv2d", "Write 'conv_general_dilated'"),
        *((name, "'exp'.*'reduce_sum'.*mpjax.precision") for name in ("softmax", "log_softmax")),
        ("softmax_with_cross_entropy", "'exp'.*'log'"),
        ("layer_norm", "'rsqrt'.*mpjax.precision"),
        ("exp_p", "Did you mean 'exp'"),
        ("LSTMCell", "'dot_general', 'logistic'"),
        ("interpolate", "Write 'dot_general'"),
        ("nothing_like_it", "jax.make_jaxpr prints"),
    ],
)
def test_an_operation_list_is_answered_with_primitives(name, words):
    policy = mpjax.get_policy("mixed_bfloat16")
    for ask in (
        lambda: policy.with_ops(full=name),
        lambda: policy.with_ops(half=["add", name]),
        lambda: mpjax.get_policy("mixed_bfloat16", follow_ops=[name]),
    ):
        with pytest.raises(ValueError, match=f"_ops: JAX has no primitive named '{name}'.*{words}"):
            ask()


def test_a_rule_for_an_operation_that_is_no_primitive_is_refused():
    with pytest.raises(ValueError, match="no primitive named 'softmax'.*'exp'"):
        mpjax.register_rule("softmax", "full")


def test_primitives_are_taken_as_they_are():
    policy = mpjax.get_policy("mixed_bfloat16")
    for given in (jax.lax.exp_p, [jax.lax.exp_p], "exp", ("exp",)):
        assert policy.with_ops(full=given).full_ops == ("exp",)
    for fun, words in ((jnp.exp, "make_jaxpr"), (jnp.matmul, "Write 'dot_general'.*make_jaxpr")):
        with pytest.raises(ValueError, match=f"full=.* must be a sequence of strings.*{words}"):
            policy.with_ops(full=fun)
