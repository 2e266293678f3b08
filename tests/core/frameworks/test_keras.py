"""Keras 3 on JAX: `fit` in mixed precision, however it runs, and Keras's own dtype policy."""

import mpjax.keras  # isort: skip  # before Keras, for its backend

import functools

import jax
import keras
import numpy as np
import pytest
from keras_models import LAYERS, X, Y, dtypes_of_step, fitted, made, run_python, same, values
from support import matmul_dtypes, thorough_but

import mpjax

pytestmark = pytest.mark.filterwarnings("ignore:.*__array__ implementation:DeprecationWarning")
POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]


@functools.cache
def plain():
    """Returns the losses of Keras's own `fit`, and of `evaluate` after it."""
    model = made()
    return fitted(model), model.evaluate(X, Y, verbose=0)[0]


@pytest.mark.parametrize("policy", thorough_but(POLICIES, "mixed_float16"))
def test_fit_is_keras_own_under_float32_and_near_it_in_half(policy):
    wanted, evaluated = plain()
    model = mpjax.keras.mixed_precision(made(), policy, 64.0)
    losses = fitted(model)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5 if policy == "float32" else 0.15)
    assert losses[-1] < losses[0] and model.predict(X, verbose=0).dtype == np.float32
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    loss, _ = model.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(loss, evaluated, rtol=0.15)


def test_keras_fit_evaluate_and_predict_run_in_float16():
    model = mpjax.keras.mixed_precision(made(), "mixed_float16")
    fitted(model, epochs=1)
    trained, carried, metrics, variables = (
        [v.value for v in group]
        for group in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.metrics_variables,
            model.optimizer.variables,
        )
    )
    batch = (X[:16], Y[:16])
    for dtypes in (
        matmul_dtypes(lambda t: model.train_step((t, carried, variables, metrics), batch), trained),
        matmul_dtypes(lambda t: model.test_step((t, carried, metrics), batch), trained),
        matmul_dtypes(lambda t: model.predict_step((t, carried), batch), trained),
    ):
        assert len(dtypes) >= 2 and set(dtypes) == {("float16", "float16")}


def test_skipped_keras_step_leaves_no_trace():
    model = mpjax.keras.mixed_precision(made(), "mixed_float16")
    fitted(model, epochs=2)
    before, skips = values(model.variables), int(model.optimizer.skipped_steps.value)
    inner = values(model.optimizer.inner_optimizer.variables)
    scale = float(model.optimizer.loss_scale.loss_scale)
    bad = np.where(np.arange(64)[:, None] % 16 == 3, np.inf, X)  # one row of each batch
    fitted(model, epochs=1, x=bad)
    assert same(values(model.variables), before)
    assert same(values(model.optimizer.inner_optimizer.variables), inner)
    assert int(model.optimizer.skipped_steps.value) == skips + 4
    assert float(model.optimizer.loss_scale.loss_scale) == scale / 16


@pytest.mark.thorough
def test_a_model_is_compiled_before_after_and_again():
    after = mpjax.keras.mixed_precision(made(), "mixed_float16", 64.0)
    before = made(compiled=False)
    mpjax.keras.mixed_precision(before, "mixed_float16", 64.0)
    before.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    assert fitted(before, epochs=2) == fitted(after, epochs=2)
    after.compile(keras.optimizers.SGD(1e-2), "mae")
    again = fitted(after, epochs=1)
    assert dtypes_of_step(after) == {"float16"} and np.isfinite(again).all()
    assert float(after.optimizer.loss_scale.loss_scale) == 64
    inner = after.optimizer.inner_optimizer
    after.optimizer.skipped_steps.assign(3)
    for policy, scale, kept in (
        ("mixed_float16", "auto", True),
        ("mixed_float16", 64.0, True),
        ("mixed_bfloat16", "auto", True),
        ("mixed_bfloat16", "none", False),
        ("mixed_float16", "auto", False),
    ):
        state = after.optimizer
        mpjax.keras.mixed_precision(after, policy, scale)
        assert (after.optimizer is state) == kept and after.optimizer.inner_optimizer is inner
        assert dtypes_of_step(after) == {policy.removeprefix("mixed_")}


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize(
    "options", [{"jit_compile": False}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str
)
def test_all_ways_to_run_a_step_train_alike(policy, options):
    usual, other = (mpjax.keras.mixed_precision(made(), policy, 64.0) for _ in range(2))
    other.compile(keras.optimizers.Adam(1e-2), "mse", **options)
    # The losses round where XLA does not fuse as much.
    np.testing.assert_allclose(fitted(other, 3), fitted(usual, 3), rtol=0.02)
    assert np.isfinite(other.evaluate(X, Y, verbose=0)).all()
    assert np.isfinite([other.train_on_batch(X, Y), other.test_on_batch(X, Y)]).all()


def test_lora_and_frozen_layers_train_what_they_should():
    model = mpjax.keras.mixed_precision(made(), "mixed_float16", 64.0)
    model.layers[1].enable_lora(2)
    model.layers[-1].trainable = False
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    before = values(model.weights)
    fitted(model, epochs=1)
    changed = {
        v.path
        for v, old in zip(model.weights, before, strict=True)
        if not np.array_equal(v.value, old) and "seed" not in v.path and "moving" not in v.path
    }
    names = {path.rsplit("/", 1)[-1] for path in changed}
    assert names == {"lora_kernel_a", "lora_kernel_b", "bias", "gamma", "beta"}
    assert not any(np.array_equal(v, 0) for v in values(model.layers[1].trainable_variables))


@pytest.mark.thorough
def test_steps_of_a_distribution_run_in_float16():
    code = """if True:
        import mpjax.keras, jax, keras, numpy as np
        x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
        mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], jax.devices())
        layouts = keras.distribution.LayoutMap(mesh)
        layouts[".*kernel"] = (None, "model")
        for distribution in (
            keras.distribution.DataParallel(devices=jax.devices()),
            keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"),
        ):
            keras.distribution.set_distribution(distribution)
            layers = [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
            model = keras.Sequential(layers)
            model.compile("adam", "mse")
            mpjax.keras.mixed_precision(model, "mixed_float16")
            for _ in range(2):
                losses = model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0).history["loss"]
                assert np.isfinite(losses).all()
                model.compile("adam", "mse")
            print(model.trainable_variables[0].value.is_fully_replicated)
    """
    flags = "--xla_force_host_platform_device_count=4"
    assert run_python(code, XLA_FLAGS=flags).split() == ["True", "False"]


@pytest.mark.parametrize("own", thorough_but(["mixed_float16", "bfloat16"], 0))
def test_a_dtype_policy_of_keras_is_an_error(own):
    wanted = rf"layer 'dense.*' has the dtype policy '{own}'.* with dtype='float32'"
    with pytest.raises(ValueError, match=wanted):
        mpjax.keras.mixed_precision(made(dtype=own))
    mpjax.keras.mixed_precision(made(dtype="float32"))  # the advice
    model = made(dtype="mixed_float16")
    trained, carried = ([v.value for v in vs] for vs in (model.trainable_variables, []))
    carried = [v.value for v in model.non_trainable_variables]
    run = mpjax.autocast(lambda *args: model.stateless_call(*args)[0], "mixed_bfloat16")
    with pytest.raises(ValueError, match=r"keras's own dtype policy .* Use one of them"):
        run(trained, carried, X)
    plain = mpjax.autocast(lambda *args: model.stateless_call(*args)[0], "float32")
    assert jax.eval_shape(plain, trained, carried, X).shape == (64, 1)


def test_layers_of_integers_have_their_dtype():
    layers = [
        keras.Input((1,)),
        LAYERS.Discretization([0.0], dtype="int32"),
        LAYERS.Embedding(2, 3),
    ]
    assert layers[1].dtype_policy.compute_dtype.startswith("int")
    mpjax.keras.mixed_precision(keras.Sequential(layers))


def test_keras_mixed_precision_refuses_bad_arguments(monkeypatch):
    with pytest.raises(TypeError, match="must be a Keras model"):
        mpjax.keras.mixed_precision(3)
    with pytest.raises(ValueError, match="stores parameters in bfloat16"):
        mpjax.keras.mixed_precision(made(), "O2:bfloat16")
    with pytest.raises(ValueError, match="loss_scale='automatic'"):
        mpjax.keras.mixed_precision(made(), loss_scale="automatic")
    doubled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model = made(compiled=False)
    model.compile(doubled, "mse")
    with pytest.raises(ValueError, match="would be scaled twice"):
        mpjax.keras.mixed_precision(model)
    model = mpjax.keras.mixed_precision(made())
    with pytest.raises(ValueError, match="would be scaled twice"):
        model.compile(doubled, "mse")
    model.optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match=r"was replaced .* Call model\.compile"):
        fitted(model, epochs=1)
    monkeypatch.setattr(keras.config, "is_nnx_enabled", lambda: True)
    with pytest.raises(ValueError, match="KERAS_NNX_ENABLED"):
        mpjax.keras.mixed_precision(made())
