"""Models under `mpjax.keras` that are saved, loaded and copied: their policy is in the file."""

import mpjax.keras  # isort: skip  # before Keras, for its backend

import copy
import dataclasses
import pickle

import jax
import keras
import numpy as np
import pytest
from keras_models import LAYERS, X, Y, dtypes_of_step, fitted, made, run_python, same, values
from support import thorough_but

import mpjax

pytestmark = pytest.mark.filterwarnings("ignore:.*__array__ implementation:DeprecationWarning")


@keras.saving.register_keras_serializable("mpjax_tests")
class Subclass(keras.Model):
    """Is built when it is called, and its step calls `stateless_call`."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.last = LAYERS.Dense(8, "relu"), LAYERS.Dense(1)

    def call(self, x):
        return self.last(self.first(x))


@keras.saving.register_keras_serializable("mpjax_tests")
class OwnCompile(Subclass):
    def compile(self, optimizer, extra=1):
        super().compile(optimizer, "mse")


def trained(kind=keras.Model, loss_scale=1024.0):
    if issubclass(kind, Subclass):
        model = kind()
        model.compile(
            keras.optimizers.Adam(1e-2), **({} if kind is OwnCompile else {"loss": "mse"})
        )
    else:
        model = made(kind)
    model = mpjax.keras.mixed_precision(model, "mixed_float16", loss_scale)
    fitted(model, epochs=1)
    return model


def copies(model, path):
    model.save(path / "model.keras")
    keras.models.save_model(model, path / "other.keras")
    return {
        "saved": lambda: keras.saving.load_model(path / "model.keras"),
        "save_model": lambda: keras.models.load_model(path / "other.keras"),
        "deepcopy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.loads(pickle.dumps(model)),
    }


@pytest.mark.parametrize("kind", thorough_but([keras.Model, Subclass], 0))
def test_a_copy_has_the_policy_the_scale_and_the_optimizer(tmp_path, kind):
    model = trained(kind)
    for name, make in copies(model, tmp_path).items():
        again = make()
        assert isinstance(again.optimizer, mpjax.keras.LossScaleOptimizer), name
        assert float(again.optimizer.loss_scale.loss_scale) == 1024, name
        assert again.optimizer.inner_optimizer.name == model.optimizer.inner_optimizer.name, name
        assert same(values(again.weights), values(model.weights)), name
        if kind is keras.Model:  # Keras restores moments of models that it can build
            assert same(values(again.optimizer.variables), values(model.optimizer.variables)), name
        again(X)
        assert dtypes_of_step(again) == {"float16"}, name
    # What the first version of a program says after loading still holds.
    state = again.optimizer
    assert mpjax.keras.mixed_precision(again, "mixed_float16", 1024.0).optimizer is state
    fitted(again, epochs=1)


def test_a_clone_has_the_policy_and_a_copy_that_is_not_compiled_has_none(tmp_path):
    model = trained()
    clone = keras.models.clone_model(model)
    assert dtypes_of_step(clone) == {"float16"}
    model.save(tmp_path / "model.keras")
    bare = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    bare.compile("adam", "mse")
    assert type(bare.optimizer) is keras.optimizers.Adam and dtypes_of_step(bare) == {"float32"}


def test_the_state_of_the_dynamic_scale_is_saved_and_goes_on(tmp_path):
    model = trained(loss_scale="dynamic")
    assert int(model.optimizer.skipped_steps.value) > 0  # the first scale is too high
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert same(values(again.optimizer.variables), values(model.optimizer.variables))
    again.compile("adam", "mse")
    assert float(again.optimizer.loss_scale.loss_scale) == 2.0**16


def test_weights_are_restored_with_the_scale(tmp_path):
    model = trained(loss_scale="dynamic")
    model.save_weights(tmp_path / "model.weights.h5")
    again = mpjax.keras.mixed_precision(made(), "mixed_float16")
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "model.weights.h5")
    assert same(values(again.optimizer.variables), values(model.optimizer.variables))


def test_overrides_and_other_settings_of_a_policy_are_restored(tmp_path):
    model = made(compiled=False)
    last = model.layers[-1].name
    policy = f'mixed_bfloat16,overrides={{"*{last}*": "float32"}}'
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    mpjax.keras.mixed_precision(model, policy).save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.get_compile_config() == model.get_compile_config()
    assert dtypes_of_step(again) == {"bfloat16", "float32"}


def test_a_model_with_its_own_compile_is_planned_once_it_is_compiled(tmp_path):
    trained(OwnCompile).save(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match="`compile\\(\\)` was not called"):
        again = keras.saving.load_model(tmp_path / "model.keras")
    again.compile("adam")
    again(X)
    fitted(again, epochs=1)
    assert dtypes_of_step(again) == {"float16"}


@pytest.mark.thorough
def test_a_file_is_one_of_the_model_without_mpjax(tmp_path):
    model = trained()
    model.save(tmp_path / "model.keras")
    code = """if True:
        import sys, warnings, keras, numpy as np
        with warnings.catch_warnings(record=True) as seen:
            model = keras.saving.load_model(sys.argv[1])
        assert any("import_mpjax.keras_before_loading" in str(w.message) for w in seen), seen
        x, y = (np.load(path) for path in sys.argv[2:])
        out = model.predict(x, verbose=0)
        model.fit(x, y, verbose=0)
        assert "mpjax" not in sys.modules
        print(type(model.optimizer).__name__, *out.ravel())
    """
    for name, value in (("x", X), ("y", Y)):
        np.save(tmp_path / f"{name}.npy", value)
    files = [tmp_path / name for name in ("model.keras", "x.npy", "y.npy")]
    optimizer, *out = run_python(code, *files).split()
    assert optimizer == "Adam"
    predicted = model.predict(X, verbose=0).ravel()
    np.testing.assert_allclose(np.float32(out), predicted, atol=0.01)  # float16 rounds to 1e-3


def test_a_loss_scale_of_another_class_cannot_be_saved(tmp_path):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Own(mpjax.StaticLossScale):
        pass

    model = mpjax.keras.mixed_precision(made(), "mixed_float16", Own(8.0))
    with pytest.raises(ValueError, match=r"Own.* cannot be saved .* StaticLossScale"):
        model.save(tmp_path / "model.keras")
    optimizer = mpjax.keras.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0)
    again = mpjax.keras.LossScaleOptimizer.from_config(optimizer.get_config())
    assert again._starts_at(mpjax.StaticLossScale(8.0))
    assert not again._starts_at(mpjax.StaticLossScale(4.0))
    assert not again._starts_at(mpjax.NoOpLossScale())
