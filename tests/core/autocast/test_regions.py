"""Regions of a precision."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from measure import run
from support import assert_near, found, normal

import mpjax
from mpjax._src.core.planner import rounding

W, X = normal(0, 8, 8, scale=0.3), normal(1, 4, 8)


@mpjax.precision("float32")
def exact(x, w):
    return x @ w


def dtypes(fun, *args):
    return [row[1][0] for row in found(fun, *args)]


AROUND = {
    "plain": lambda w, x: jnp.sum(exact(x, w)),
    "jit": lambda w, x: jnp.sum(jax.jit(exact)(x, w)),
    "scan": lambda w, x: jnp.sum(lax.scan(lambda h, _: (exact(h, w), None), x, None, length=2)[0]),
    "cond": lambda w, x: jnp.sum(lax.cond(x[0, 0] > 0, exact, lambda x, w: x, x, w)),
    "remat": lambda w, x: jnp.sum(jax.checkpoint(exact)(x, w)),
    "vmap": lambda w, x: jnp.sum(jax.vmap(exact, (0, None))(x, w)),
    "custom_jvp": lambda w, x: jnp.sum(_with_rule(x, w)),
    "grad inside": lambda w, x: jnp.sum(jax.grad(lambda w: jnp.sum(exact(x, w) ** 2))(w)),
}


@jax.custom_jvp
def _with_rule(x, w):
    return exact(x, w)


@_with_rule.defjvp
def _rule(primals, tangents):
    return jax.jvp(exact, primals, tangents)


@pytest.mark.parametrize("name", AROUND)
def test_float32_regions_survive(name):
    auto = mpjax.autocast(AROUND[name], "mixed_bfloat16")
    assert set(dtypes(auto, W, X)) == {"float32"}
    assert set(dtypes(jax.grad(auto), W, X)) == {"float32"}


def test_half_regions_force_half():
    def fun(w, x):
        with mpjax.precision("bfloat16"):
            return jnp.exp(x @ w)

    rows = found(mpjax.autocast(fun, "mixed_bfloat16"), W, X, names=("exp", "dot_general"))
    assert [row[2] for row in rows] == ["bfloat16", "bfloat16"]


def test_innermost_region_wins_and_beats_overrides():
    def fun(w, x):
        with mpjax.precision("float32"), mpjax.precision("float16"), jax.named_scope("head"):
            return x @ w

    policy = mpjax.get_policy("mixed_bfloat16").override({"*/head/*": "float32"})
    assert dtypes(mpjax.autocast(fun, policy), W, X) == ["float16"]


def test_without_autocast_a_region_changes_nothing():
    assert (exact(X, W) == X @ W).all()


def test_precision_refuses_an_illegal_dtype():
    for wrong in (None, 32, "mixed_bfloat16", "int8"):
        with pytest.raises(ValueError, match=r"dtype=.*Choose one of 'float32', 'bfloat16' and"):
            mpjax.precision(wrong)
    with pytest.raises(ValueError, match="Write @mpjax.precision"):
        mpjax.precision(lambda x: x)
    with pytest.raises(ValueError, match="float64"), mpjax.precision("float64"):
        pass


def test_a_half_region_leaves_alone_what_has_no_half_form():
    def fun(x):
        with mpjax.precision("bfloat16"):
            factor = jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(8))
            return factor.at[0].add(1.0), jnp.fft.rfft(x).real

    assert_near(*run(lambda w: (mpjax.autocast(fun, "mixed_bfloat16")(w), fun(w)), W))


def test_backward_rule_of_custom_vjp_is_in_the_region_around_its_call():
    @jax.custom_vjp
    def ruled(x, w):
        return x @ w

    ruled.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g))
    auto = mpjax.autocast(
        lambda w, x: jnp.sum(mpjax.precision("float32")(ruled)(x, w)), "mixed_bfloat16"
    )
    assert dtypes(jax.grad(auto, (0, 1)), W, X) == ["float32"] * 3


def _deep(ws, x):
    for w in ws:
        x = jnp.tanh(jnp.sin(x @ w * 9) + jax.nn.softmax(x @ w))
    return jnp.mean(jnp.cos(x) ** 2)


def test_nothing_inside_a_float32_region_is_rounded_not_even_for_the_backward_pass():
    ws, x = [normal(i, 16, 16, scale=0.5) for i in range(4)], normal(9, 8, 16)
    everything = mpjax.get_policy("mixed_bfloat16").override({"*": "float32"})
    want = run(jax.value_and_grad(_deep), ws, x)
    for fun in (
        mpjax.autocast(_deep, everything),
        mpjax.autocast(mpjax.precision("float32")(_deep), "mixed_bfloat16"),
    ):
        assert "bf16" not in str(jax.make_jaxpr(jax.value_and_grad(fun))(ws, x))
        # Float32 itself is no closer to the exact gradient; one rounding changes it by a tenth.
        assert_near(run(jax.value_and_grad(fun), ws, x), want, 5e-4)


def _norm(h):
    return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)


def _summed(apart):
    return lambda ws, x: jnp.mean(
        (_norm(apart(jnp.add)(x @ ws[0], _norm(x @ ws[0]) @ ws[1])) @ ws[2]) ** 2
    )


def _nested(apart):
    def fun(ws, x):
        h = x @ ws[0]
        for w in ws[1:]:
            h = h + apart(jnp.tanh)(_norm(h)) @ w
        return jnp.mean(h**2)

    return fun


@pytest.mark.parametrize("make", [_summed, _nested])  # a stream, and cotangents
def test_what_a_float32_region_makes_is_not_rounded_for_all_who_read_it(make, monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)
    ws, x = [normal(i, 32, 32, scale=0.2) for i in range(3)], normal(3, 64, 32)

    def marks(apart):
        fun = mpjax.autocast(make(apart), "mixed_bfloat16")
        return str(jax.make_jaxpr(jax.grad(fun))(ws, x)).count("reduce_precision")

    assert marks(mpjax.precision("float32")) < marks(lambda part: part)
