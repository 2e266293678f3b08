"""Elementwise operations that follow each other are rounded once, where their result is stored."""

import jax
import jax.numpy as jnp
import measure
import numpy as np
import pytest
from models import MODELS
from programs import PROGRAMS
from programs import W as ROOT
from programs import X as BATCH
from roundings import HALVES, backward_pass, needless
from support import equations, normal, thorough_but

import mpjax

ROWS, WIDTH = 32, 16
X = normal(0, ROWS, WIDTH)
W1, W2, W3 = (normal(i, WIDTH, WIDTH, scale=WIDTH**-0.5) for i in (1, 2, 3))
SCALES, SHIFTS = 1 + normal(4, 12, WIDTH, scale=0.2), normal(5, 12, WIDTH, scale=0.2)


def chained(link, count):
    def fun(w, x):
        h = x @ w[0]
        for i in range(count):
            h = link(h, i)
        return h @ w[1]

    return fun


CHAINS = {
    "scaled": chained(lambda h, i: h * 1.01, 40),
    "shifted": chained(lambda h, i: (h - 0.3) * 0.97, 20),
    "folded": chained(lambda h, i: jnp.abs(h * 0.97) + 0.05, 20),
    "leaky relu": chained(lambda h, i: jax.nn.leaky_relu(h * SCALES[i] + SHIFTS[i]), 12),
    "clipped": chained(lambda h, i: jnp.clip(h * 1.1 - 0.1, -1, 1), 12),
    "products": chained(lambda h, i: h * SCALES[i] + h * 0.1, 8),
}


def roundings(fun, *args):
    """Returns how many arrays of activations' size are cast to bfloat16 in the forward pass."""
    casts = [
        e
        for e in equations(jax.make_jaxpr(fun)(*args))
        if e.primitive.name == "convert_element_type"
    ]
    outs = [e.outvars[0].aval for e in casts]
    return sum(x.dtype == jnp.bfloat16 and x.shape == X.shape for x in outs)


def inexact(fun, *args):
    """Returns the dtypes of the elementwise operations of a forward pass."""
    names = ("mul", "add", "sub", "max", "min", "abs", "div", "tanh")
    found = equations(jax.make_jaxpr(fun)(*args))
    return {e.outvars[0].aval.dtype.name for e in found if e.primitive.name in names}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_is_rounded_once(name):
    planned = mpjax.autocast(CHAINS[name], "mixed_bfloat16")
    assert roundings(planned, (W1, W2), X) == 2  # x, and the operand of the last matmul
    assert inexact(planned, (W1, W2), X) == {"float32"}


def in_a_loop(fun):
    """Returns a function whose scan runs another one twice."""
    return lambda w, x: jax.lax.scan(lambda x, _: (fun(w, x), None), x, length=2)[0]


@pytest.mark.parametrize("name", ["scaled", "shifted", "folded", "clipped"])
def test_a_chain_in_a_loop_is_rounded_where_it_is_kept(name):
    planned = mpjax.autocast(in_a_loop(CHAINS[name]), "mixed_bfloat16")
    assert roundings(planned, (W1, W2), X) <= 4  # the carry, the matmuls' operands, what is kept


def test_products_whose_cotangents_are_summed_are_rounded_in_a_loop():
    def fun(w, x):  # XLA writes the cotangent of `h * w[2][0]`, which two kernels read
        h = x @ w[0]
        return jnp.maximum(h * w[2][0], h * 0.1) @ w[1]

    weights = W1, W2, SCALES
    assert inexact(mpjax.autocast(fun, "mixed_bfloat16"), weights, X) == {"float32"}
    looped = mpjax.autocast(in_a_loop(fun), "mixed_bfloat16")
    assert inexact(looped, weights, X) == {"float32", "bfloat16"}


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", thorough_but(CHAINS, "scaled", "products"))
def test_chains_have_sound_values_and_gradients(name, half):
    parts = "result" if name in ("folded", "leaky relu", "clipped") else "result gradient"
    measure.check(CHAINS[name], ((W1, W2), X), half, parts=parts)


@pytest.mark.parametrize("name", thorough_but(CHAINS, "leaky relu", "products"))
def test_no_more_bytes_are_kept_than_in_16_bits(name):
    report = mpjax.explain(lambda *args: jnp.sum(CHAINS[name](*args)), argnums=0)((W1, W2), X)
    large = [k for k in report.kept if k.shape == X.shape]
    assert all(k.dtype in ("bf16", "bool") for k in large)
    assert sum(k.bytes for k in large) <= 2 * X.nbytes  # x, two operands of the matmuls, h


# ---- a walk over every program of the suite ----------------------------------------------------

EVERY = {name: (fun, (ROOT, BATCH)) for name, fun in PROGRAMS.items()}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", EVERY)
def test_no_program_rounds_between_elementwise_operations(name, half):
    fun, args = EVERY[name]
    planned = mpjax.autocast(fun, f"mixed_{jnp.dtype(half).name}")
    assert not [*needless(jax.make_jaxpr(planned)(*args).jaxpr)]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", EVERY)
def test_no_backward_pass_rounds_between_elementwise_operations(name, half):
    fun, args = EVERY[name]
    planned = mpjax.autocast(fun, f"mixed_{jnp.dtype(half).name}")
    assert not [*needless(backward_pass(planned, *args))]


@pytest.mark.parametrize("name", thorough_but(MODELS, "linen transformer"))
def test_no_model_rounds_between_elementwise_operations(name):
    loss, params = MODELS[name]()
    planned = mpjax.autocast(loss, "mixed_bfloat16")
    assert not [*needless(backward_pass(planned, params))]


def test_needless_finds_a_rounding_between_elementwise_operations():
    half = jnp.ones((4, 4), jnp.bfloat16)
    assert len([*needless(jax.make_jaxpr(lambda x: jnp.abs(x * 2) @ x)(half).jaxpr)]) == 1


# ---- decisions ---------------------------------------------------------------------------------


def test_a_chain_of_more_inputs_than_derivatives_read_is_no_island():
    def fun(w, x):
        sums = (x @ w[0]) * 2.0 + (x @ w[1]) * 3.0 + (x @ w[2]) * 4.0
        return jnp.sum(jnp.abs(sums) @ w[0])

    kept = mpjax.explain(fun, argnums=0)((W1, W2, W3), X).kept
    assert sum(k.bytes for k in kept if k.shape == X.shape) <= 2 * X.nbytes + X.size


def test_a_chain_in_a_remat_is_rounded_once():
    fun = jax.checkpoint(CHAINS["leaky relu"])
    program = jax.make_jaxpr(mpjax.autocast(fun, "mixed_bfloat16"))((W1, W2), X)
    assert not [*needless(program.jaxpr)]


def computes(fun, *names):
    rows = mpjax.explain(fun)(X, W1, W2).rows
    return [row.after.split("->")[0].split(",")[0] for row in rows if row.primitive in names]


def test_a_bias_and_a_stream_are_added_by_the_kernel_of_the_matmul():
    assert computes(lambda x, a, b: ((x @ a + SHIFTS[0]) + x @ b) @ a, "add") == ["bf16"] * 2
    assert computes(lambda x, a, b: (x @ a + 1.5 - 0.5) @ b, "sub") == ["f32"]


@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.silu, jax.nn.softplus])
def test_what_an_activation_alone_reads_is_a_part_of_its_island(activation):
    def fun(x, a, b):
        return activation(((x @ a) * SCALES[0] + SHIFTS[0]) * SCALES[1]) @ b

    assert {*computes(fun, "mul", "add")} == {"f32"}
    kept = mpjax.explain(lambda *w: jnp.sum(fun(X, *w)), argnums=(0, 1))(W1, W2).kept
    assert sum(k.shape == X.shape for k in kept) <= 3  # x, h, the operand of the last matmul


@pytest.mark.parametrize("unit", [(ROWS, 1), (WIDTH,)])
def test_units_do_not_overflow_before_an_activation(unit):
    units = 1e6 + normal(6, *unit, scale=1e5)
    fun = lambda w, x, u: jax.nn.gelu((x @ w[0]) * u / 1e6) @ w[1]  # noqa: E731
    measure.check(fun, ((W1, W2), X, units), "float16")


@pytest.mark.parametrize("scale", [lambda h: h / 1e6, lambda h: h * 1e-3 * 1e-3])
def test_sums_with_units_do_not_overflow_between_matmuls(scale):
    units = 1e6 + normal(6, WIDTH, scale=1e5)
    fun = lambda w, x, u: scale((x @ w[0]) * u + u) @ w[1]  # noqa: E731
    measure.check(fun, ((W1, W2), X, units), "float16")


def test_a_sum_from_which_a_term_is_taken_off_is_not_rounded():
    fun = lambda x, a, b: ((x @ a + 100.0) - 100.0) @ b  # noqa: E731
    assert computes(fun, "add", "sub") == ["f32"] * 2


def test_a_comparison_of_float32_values_is_not_repeated_on_rounded_ones():
    """An entry that dropout drops forward has no gradient."""

    def fun(b):
        h = jnp.abs((X @ W1).repeat(32, 1) * b * 2.0)
        keep = jax.random.bernoulli(jax.random.key(0), 0.5, h.shape)
        h = jnp.where(keep, h, 0.0) / 0.5
        return (h @ jnp.eye(h.shape[1])).sum(), h

    gradient, h = jax.grad(mpjax.autocast(fun, "mixed_bfloat16"), has_aux=True)(
        jnp.ones((ROWS, WIDTH * 32))
    )
    np.testing.assert_array_equal(gradient != 0, h != 0)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, lambda f: jax.vmap(f, (None, 0))])
def test_chains_match_float32_under_jit_checkpoint_and_vmap(around):
    x = normal(9, 3, ROWS, WIDTH)
    fun = lambda w, x: jnp.mean(CHAINS["leaky relu"](w, x) ** 2)  # noqa: E731

    def total(f):
        return jax.jit(jax.value_and_grad(lambda w: jnp.sum(around(f)(w, x))))

    (want, wanted), (got, gradient) = (
        total(f)((W1, W2)) for f in (fun, mpjax.autocast(fun, "mixed_bfloat16"))
    )
    np.testing.assert_allclose(got, want, rtol=0.02)
    for a, b in zip(gradient, wanted, strict=True):
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b)


def test_tangent_of_a_chain_matches_float32():
    fun = CHAINS["products"]
    run = lambda f: jax.jit(lambda w: jax.jvp(lambda w: f(w, X), (w,), (w,))[1])((W1, W2))  # noqa: E731
    got, want = run(mpjax.autocast(fun, "mixed_bfloat16")), run(fun)
    assert np.linalg.norm(got - want) < 0.02 * np.linalg.norm(want)
