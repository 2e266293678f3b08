import functools
import itertools
import operator
import re
import warnings

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from support import HALVES, assert_near, normal, thorough_but

import mpjax

pytestmark = pytest.mark.usefixtures("strict_promotion")

ALL_SCALES = {
    "none": mpjax.NoOpLossScale(),
    "static": mpjax.StaticLossScale(1024.0),
    "dynamic": mpjax.DynamicLossScale(),
    "jmp none": jmp.NoOpLossScale(),
    "jmp static": jmp.StaticLossScale(jnp.float32(1024)),
    "jmp dynamic": jmp.DynamicLossScale(jnp.float32(2**15)),
}


QUICK = ((False, "dynamic"), (True, "static"), (True, "jmp dynamic"), (True, "none"))


def loss_of(params, x, power=2):
    return jnp.mean(jnp.abs(x @ params["w"] + params["b"]) ** power)


def problem(rng):
    draw = lambda *shape: np.float32(rng.normal(size=shape))  # noqa: E731
    return {"w": draw(4, 3), "b": draw(3)}, draw(5, 4)


@pytest.mark.parametrize(
    "jitted, name", thorough_but(itertools.product([False, True], ALL_SCALES), *QUICK)
)
def test_scaled_value_and_grad_equals_value_and_grad(name, jitted, rng):
    params, x = problem(rng)
    fun = mpjax.scaled_value_and_grad(loss_of, ALL_SCALES[name])
    value, grads, finite = (jax.jit(fun) if jitted else fun)(params, x)
    expected, expected_grads = jax.jit(jax.value_and_grad(loss_of))(params, x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), grads, expected_grads)
    assert finite.shape == () and finite.dtype == jnp.bool_ and finite


@pytest.mark.parametrize("argnums", [0, 1, (0, 1), (1,)])
def test_scaled_value_and_grad_takes_argnums_and_keyword_arguments(argnums, rng):
    params, x = problem(rng)
    fun = mpjax.scaled_value_and_grad(loss_of, mpjax.DynamicLossScale(), argnums)
    _, grads, _ = jax.jit(fun, static_argnames="power")(params, x, power=3)
    expected = jax.jit(jax.grad(loss_of, argnums), static_argnames="power")(params, x, power=3)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), grads, expected)


def test_has_aux_returns_aux_beside_the_value(rng):
    params, x = problem(rng)
    fun = lambda p, x: (loss_of(p, x), {"n": x.shape[0], "x": x})  # noqa: E731
    (value, aux), _, _ = mpjax.scaled_value_and_grad(fun, mpjax.DynamicLossScale(), has_aux=True)(
        params, x
    )
    np.testing.assert_allclose(value, loss_of(params, x), rtol=1e-6)  # another sum of 15 terms
    assert aux["n"] == 5 and (aux["x"] == x).all()


def test_loss_value_is_exact_even_where_scaling_overflows():
    huge = jnp.float32(3e38)
    value, _, finite = mpjax.scaled_value_and_grad(lambda w: w, mpjax.DynamicLossScale())(huge)
    assert value == huge and finite
    third = jnp.float32(1 / 3)
    assert (
        mpjax.scaled_value_and_grad(lambda w: w, mpjax.StaticLossScale(1000.0))(third)[0] == third
    )


def test_half_gradients_come_back_in_float32_and_do_not_vanish():
    """A gradient of 2**-30 is 0 in float16; scaled by 2**16 it is not."""
    w = jnp.ones(3, jnp.float16)

    def fun(w):
        return jnp.sum((w * jnp.float16(2**-15)).astype(jnp.float32)) * jnp.float32(2**-15)

    _, lost, _ = mpjax.scaled_value_and_grad(fun, mpjax.NoOpLossScale())(w)
    _, kept, _ = jax.jit(mpjax.scaled_value_and_grad(fun, mpjax.DynamicLossScale()))(w)
    assert lost.dtype == kept.dtype == jnp.float32
    assert (lost == 0).all() and (kept == 2.0**-30).all()


def test_gradients_below_what_half_holds_survive_unscaling():
    """Unscaled in half, 1.5e-8 becomes 0."""
    w = jnp.ones((), jnp.float16)
    _, grad, _ = mpjax.scaled_value_and_grad(
        lambda w: w.astype(jnp.float32) * jnp.float32(1.5e-8), mpjax.DynamicLossScale()
    )(w)
    np.testing.assert_allclose(grad, 1.5e-8, rtol=1e-3)


def test_complex_gradients_keep_their_imaginary_part():
    z = jnp.complex64(1 + 2j)
    fun = lambda z: jnp.real(z * jnp.conj(z))  # noqa: E731
    _, grad, finite = mpjax.scaled_value_and_grad(fun, mpjax.DynamicLossScale())(z)
    assert grad.dtype == jnp.complex64 and grad == jax.grad(fun)(z) and finite


@pytest.mark.usefixtures("x64")
def test_float64_gradients_keep_their_precision():
    w = jnp.asarray(1 / 3, jnp.float64)
    for scale in (mpjax.DynamicLossScale(), mpjax.StaticLossScale(1000.0)):
        value, grad, _ = mpjax.scaled_value_and_grad(lambda w: w**3, scale)(w)
        assert value.dtype == grad.dtype == jnp.float64
        np.testing.assert_allclose(grad, 3 * w**2, rtol=1e-15)


def test_finite_flag_judges_the_gradients_not_the_loss():
    scale = mpjax.DynamicLossScale()
    _, grad, finite = jax.jit(mpjax.scaled_value_and_grad(jnp.sqrt, scale))(jnp.float32(0))
    assert not finite and jnp.isinf(grad)
    value, _, finite = mpjax.scaled_value_and_grad(lambda w: jnp.float32(jnp.nan) + w, scale)(
        jnp.float32(1)
    )
    assert jnp.isnan(value) and finite


def test_backward_pass_runs_on_the_scaled_loss():
    """A float16 overflow in the backward pass, which a smaller scale avoids."""
    fun = lambda w: jnp.sum((w * jnp.float16(2)).astype(jnp.float32))  # noqa: E731
    w = jnp.ones(2, jnp.float16)
    assert not mpjax.scaled_value_and_grad(fun, mpjax.StaticLossScale(2.0**15))(w)[2]
    assert mpjax.scaled_value_and_grad(fun, mpjax.StaticLossScale(2.0**14))(w)[2]


def test_a_float16_loss_draws_one_warning_while_tracing():
    fun = jax.jit(mpjax.scaled_value_and_grad(lambda w: w * w, mpjax.DynamicLossScale()))
    w = jnp.float16(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value, _, _ = fun(w)
        fun(w)
        built_in = functools.partial(operator.mul, w)  # is defined nowhere
        mpjax.scaled_value_and_grad(built_in, mpjax.DynamicLossScale())(w)
    assert [str(c.message)[:19] for c in caught] == ["The loss is float16"] * 2
    assert caught[0].filename == __file__
    assert value == 4 and value.dtype == jnp.float16


def test_a_bfloat16_loss_is_scaled_in_float32_without_a_warning():
    w = jnp.bfloat16(2)
    value, grad, finite = mpjax.scaled_value_and_grad(lambda w: w * w, mpjax.DynamicLossScale())(w)
    assert value == 4 and grad == 4 and grad.dtype == jnp.float32 and finite


def test_jmps_weakly_typed_scale_does_not_overflow_a_half_loss():
    scale = jmp.DynamicLossScale(jnp.asarray(2.0**15))
    with pytest.warns(UserWarning, match="loss is float16"):
        value, grad, finite = mpjax.scaled_value_and_grad(lambda w: w * w, scale)(jnp.float16(0.5))
    assert value == 0.25 and finite and grad == 1


def test_scaled_value_and_grad_runs_under_vmap_scan_and_remat(rng):
    params, x = problem(rng)
    fun = mpjax.scaled_value_and_grad(jax.checkpoint(loss_of), mpjax.DynamicLossScale())
    xs = np.stack([x, 2 * x])
    values, grads, finite = jax.jit(jax.vmap(fun, in_axes=(None, 0)))(params, xs)
    assert values.shape == finite.shape == (2,) and grads["w"].shape == (2, 4, 3)
    _, (scanned, _, _) = jax.lax.scan(lambda c, x: (c, fun(params, x)), 0, xs)
    np.testing.assert_allclose(scanned, values, rtol=1e-6)


@pytest.mark.parametrize("wrong", [128.0, "dynamic", None, mpjax.DynamicLossScale])
def test_error_names_an_argument_that_is_no_loss_scale(wrong):
    with pytest.raises(TypeError, match="loss_scale=.*must be an instance of a loss scale"):
        mpjax.scaled_value_and_grad(lambda w: w, wrong)


@pytest.mark.parametrize(
    ("fun", "has_aux", "message"),
    [
        (lambda w: (w, w), False, "it is a tuple of 2.*For .loss, aux. pass has_aux=True"),
        (lambda w: w, True, r"must return \(loss, aux\), but it returned float32\[\]"),
        (lambda w: (w, w, w), True, "it returned a tuple of 3"),
        (lambda w: ((w, w), w), True, r"it is a tuple of 2.*jnp.mean\(losses\)\.(?!.)"),
        (lambda w: w[None], False, r"it is float32\[1\].*jnp.mean\(losses\)\.(?!.)"),
        (lambda w: jnp.int32(1), False, r"it is int32\[\]"),
        (lambda w: w * 1j, False, r"it is complex64\[\]"),
        (lambda w: None, False, "it is None"),
    ],
)
def test_error_names_a_loss_of_the_wrong_form(fun, has_aux, message):
    wrapped = mpjax.scaled_value_and_grad(fun, mpjax.NoOpLossScale(), has_aux=has_aux)
    with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match=message):
        wrapped(jnp.float32(1))


@pytest.mark.parametrize("wrong", ["w", None, 1.0, True, 5, -3, (), (0, "x"), (0, 0), (0, -2)])
def test_error_names_bad_argnums(wrong):
    wrapped = mpjax.scaled_value_and_grad(operator.mul, mpjax.NoOpLossScale(), argnums=wrong)
    with pytest.raises(ValueError, match=rf"argnums={re.escape(repr(wrong))} (must be pos|names)"):
        wrapped(jnp.float32(1), jnp.float32(2))
    with pytest.raises(ValueError, match="but there are none. Pass the arguments to differentiate"):
        wrapped()


# ---- replicas ------------------------------------------------------------------------------------


def replicas(way, fun, w, x):
    """Runs ``fun(w, rows)`` on each of eight devices, with an eighth of the rows."""
    if way == "pmap":
        out = jax.pmap(fun, "data", in_axes=(None, 0))(w, x.reshape(8, -1, *x.shape[1:]))
        return jax.tree.map(lambda leaf: leaf[0], out)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())
    return jax.jit(mapped)(w, x)


WAYS = list(itertools.product(["shard_map", "pmap"], HALVES))


@pytest.mark.parametrize(
    "way, half", thorough_but(WAYS, ("shard_map", "bfloat16"), ("pmap", "float16"))
)
def test_replicas_average_gradients_in_float32_and_agree(way, half):
    def loss_fn(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    def gradient(w, x):
        run = mpjax.autocast(loss_fn, f"mixed_{half}")
        scale = mpjax.StaticLossScale(256.0)
        return mpjax.scaled_value_and_grad(run, scale, axis_name="data")(w, x)

    w, x = normal(0, 4, 3), np.array(normal(1, 64, 4))
    loss, grads, finite = replicas(way, gradient, w, x)
    want_loss, want = jax.jit(jax.value_and_grad(loss_fn))(w, x)
    np.testing.assert_allclose(loss, want_loss, rtol=0.02)
    assert_near(grads, want, 0.02)
    assert finite and grads.dtype == jnp.float32
    x[3] = np.inf  # on one of them
    *_, finite = replicas(way, gradient, w, x)
    assert not finite


def test_axis_name_that_is_not_mapped_is_refused():
    with pytest.raises(ValueError, match="axis_name=3 must be the name of a mapped axis"):
        mpjax.scaled_value_and_grad(jnp.sum, mpjax.NoOpLossScale(), axis_name=3)
    gradient = mpjax.scaled_value_and_grad(jnp.sum, mpjax.NoOpLossScale(), axis_name="rows")
    with pytest.raises(ValueError, match="no axis 'rows' is mapped here"):
        gradient(jnp.ones(3))


OUTSIDE = {"w": np.ones((4, 3), np.float32), "b": np.ones(3, np.float32)}
CONSTANT = {
    "parameters from outside": lambda params, x: loss_of(OUTSIDE, x),
    "a number": lambda params, x: 0.5,
    "stop_gradient": lambda params, x: loss_of(jax.lax.stop_gradient(params), x),
    "in a jit": jax.jit(lambda params, x: loss_of(jax.lax.stop_gradient(params), x)),
    "a count": lambda params, x: jnp.mean((x @ params["w"] > 0).astype(jnp.float32)),
    "in a loop": lambda params, x: jax.lax.scan(
        lambda total, x: (total + jnp.round(x @ params["w"]).sum(), None), 0.0, x
    )[0],
}


def in_loop(fun, params, x):
    optimizer = mpjax.mixed_precision(optax.sgd(0.1))
    state = optimizer.init(params)
    jax.jit(lambda state, params, x: optimizer.value_and_grad(fun, state)(params, x))(
        state, params, x
    )


def in_step(fun, params, x, **settings):
    init, step = mpjax.build_train_step(fun, optax.sgd(0.1), **settings)
    jax.jit(step)(init(params), x)


TRAINED_BY = {
    "mixed_precision": in_loop,
    "step": in_step,
    "micro-batches": functools.partial(in_step, accumulate_steps=2),
    "scaled": lambda fun, *args: mpjax.scaled_value_and_grad(fun, ALL_SCALES["static"])(*args),
}


@pytest.mark.parametrize("cause", thorough_but(CONSTANT, "stop_gradient"))
@pytest.mark.parametrize("way", TRAINED_BY)
def test_loss_that_depends_on_no_parameter_is_told_once(way, cause):
    params = jax.tree.map(np.zeros_like, OUTSIDE)
    with pytest.warns(UserWarning, match="does not depend on the parameters") as heard:
        TRAINED_BY[way](CONSTANT[cause], params, np.ones((2, 4), np.float32))
    assert len(heard) == 1 and heard[0].filename == __file__


def test_loss_that_depends_on_one_parameter_is_fine():
    held = lambda params, x: loss_of({**jax.lax.stop_gradient(params), "b": params["b"]}, x)  # noqa: E731
    params = jax.tree.map(np.zeros_like, OUTSIDE)
    for way in TRAINED_BY.values():
        way(held, params, np.ones((2, 4), np.float32))
    scaled = mpjax.scaled_value_and_grad(lambda w, x: jnp.sum(x), ALL_SCALES["none"], (0, 1))
    scaled(params["b"], params["b"])
