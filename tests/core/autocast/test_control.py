"""Users control autocast with op lists, and with overrides by path and scope."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import W, X
from support import found, full_matmuls, normal

import mpjax


def test_op_lists_set_the_dtype_of_operations():
    policy = mpjax.get_policy("mixed_bfloat16")
    w, x = normal(0, 32, 32), normal(1, 4, 32)

    def fun(w, x):
        return jnp.exp(-(x @ w)) @ w

    def dtypes(policy, name):
        return found(mpjax.autocast(fun, policy), w, x, names=(name,))[0][2]

    assert dtypes(policy, "exp") == "float32"
    assert dtypes(policy.with_ops(half=["exp"]), "exp") == "bfloat16"
    assert dtypes(policy.with_ops(follow=["exp"]), "exp") == "bfloat16"
    assert dtypes(policy.with_ops(full=["dot_general"]), "dot_general") == "float32"


def test_overrides_by_path_and_scope_set_the_dtype_of_matmuls():
    params = {"encoder": {"kernel": W}, "decoder": {"kernel": W}}

    def fun(params, x):
        h = x @ params["encoder"]["kernel"]
        with jax.named_scope("head"):
            return jax.nn.relu(h.T.reshape(4, 8) @ params["decoder"]["kernel"].T) @ W

    def dtypes(overrides):
        policy = mpjax.get_policy("mixed_bfloat16").override(overrides)
        return [row[1][1] for row in found(mpjax.autocast(fun, policy), params, X)]

    assert dtypes({}) == ["bfloat16"] * 3
    assert dtypes({"*/decoder/*": "float32"}) == ["bfloat16", "float32", "bfloat16"]
    assert dtypes({"*encoder*": "float32"}) == ["float32", "bfloat16", "bfloat16"]
    assert dtypes({"*/head/*": "float32"}) == ["bfloat16", "float32", "float32"]
    with pytest.raises(ValueError, match=r"decodr.*decoder/kernel"):
        dtypes({"*/decodr/*": "float32"})


def test_override_reaches_scanned_parameters():
    def fun(params, x):
        return lax.scan(lambda h, p: (jnp.tanh(h @ p["w"]), None), x, params["layers"])[0]

    params = {"layers": {"w": jnp.stack([W] * 2)}}
    policy = mpjax.get_policy("mixed_bfloat16").override({"layers/*": "float32"})
    assert full_matmuls(mpjax.autocast(fun, policy), params, X)


def two(p, h):
    return jnp.tanh(h @ p["a"]) @ p["b"]


INSIDE = {
    "scan": lambda p, x: lax.scan(lambda h, w: (two(w, h), None), x, p)[0],
    "scan, constants": lambda p, x: lax.scan(lambda h, _: (two(p, h), None), x, None, length=2)[0],
    "scan of remat": lambda p, x: lax.scan(jax.checkpoint(lambda h, w: (two(w, h), None)), x, p)[0],
    "cond": lambda p, x: lax.cond(x[0, 0] > 0, two, lambda p, h: -two(p, h), p, x),
    "remat": lambda p, x: jax.checkpoint(two)(p, x),
    "jit": lambda p, x: jax.jit(two)(p, x),
    "fori": lambda p, x: lax.fori_loop(0, 2, lambda i, h: two(p, h), x),
}


@pytest.mark.parametrize("name", INSIDE)
def test_an_override_by_path_leaves_the_other_matmuls_of_a_program_in_16_bits(name):
    stacked = name.startswith("scan") and "constants" not in name
    shape = (2, 32, 32) if stacked else (32, 32)
    params = {"a": normal(0, *shape), "b": normal(1, *shape)}
    policy = mpjax.get_policy("mixed_bfloat16").override({"a": "float32"})
    report = mpjax.explain(lambda p, x: jnp.sum(INSIDE[name](p, x)), policy, argnums=None)(
        params, normal(2, 8, 32)
    )
    assert report.half_flops == 0.5


def test_an_override_by_path_reaches_a_custom_rule():
    rule = jax.custom_vjp(two)
    rule.defvjp(lambda p, h: jax.vjp(two, p, h), lambda back, ct: back(ct))
    policy = mpjax.get_policy("mixed_bfloat16").override({"a": "float32"})
    params = {"a": normal(0, 32, 32), "b": normal(1, 32, 32)}
    report = mpjax.explain(lambda p, x: jnp.sum(rule(p, x)), policy)(params, normal(2, 8, 32))
    assert report.half_flops == 0  # its derivatives are traced later, without paths
