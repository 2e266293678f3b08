"""A setting that is True or False is an error that names it, if it is anything else."""

import importlib
import inspect

import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
import mpjax.checkpoint
import mpjax.hardware
import mpjax.linen
import mpjax.nnx

PARAMS = {"w": np.ones((3, 2), np.float32)}
BATCH = np.ones((4, 3), np.float32)
POLICY = "mixed_bfloat16"
OPTIMIZER = optax.sgd(0.1)
MIXED = mpjax.mixed_precision(OPTIMIZER)
STATE = MIXED.init(PARAMS)
LINEN = mpjax.linen.TrainState.create(apply_fn=None, params=PARAMS, tx=OPTIMIZER)
MODEL = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
NNX = mpjax.nnx.Optimizer(MODEL, OPTIMIZER)


def loss(params, x):
    return ((x @ params["w"]) ** 2).mean()


def manager(folder, **settings):
    with mpjax.checkpoint.Manager(folder / "runs", **settings) as made:
        return made


def save_and_restore(folder, **settings):
    save_numbered(folder)
    mpjax.checkpoint.restore(folder / "runs" / "1", PARAMS, **settings)


def save_numbered(folder, **settings):
    with mpjax.checkpoint.Manager(folder / "runs") as made:
        made.save(1, PARAMS, **settings)


def restore_numbered(folder, **settings):
    save_numbered(folder)
    with mpjax.checkpoint.Manager(folder / "runs") as made:
        made.restore(PARAMS, **settings)


def load(folder, **settings):
    mpjax.checkpoint.save_safetensors(folder / "a", PARAMS)
    mpjax.checkpoint.load_safetensors(folder / "a", PARAMS, **settings)


# How each public function with such settings is called with one.
CALLS = {
    "build_train_step": lambda _, **flag: mpjax.build_train_step(loss, OPTIMIZER, **flag),
    "compare": lambda _, **flag: mpjax.compare(loss, POLICY, argnums=0, **flag)(PARAMS, BATCH),
    "compile_for": lambda _, **flag: mpjax.compile_for("h100", loss, **flag),
    "dot_product_attention": lambda _, **flag: mpjax.dot_product_attention(
        *[BATCH[None, None]] * 3, **flag
    ),
    "explain": lambda _, **flag: mpjax.explain(loss, POLICY, argnums=0, **flag)(PARAMS, BATCH),
    "find_nonfinite": lambda _, **flag: mpjax.find_nonfinite(loss, **flag)(PARAMS, BATCH),
    "linear_cross_entropy": lambda _, **flag: mpjax.linear_cross_entropy(
        BATCH, BATCH.T, np.zeros(4, int), **flag
    ),
    "lint": lambda _, **flag: mpjax.lint(loss, argnums=0, **flag)(PARAMS, BATCH),
    "scaled_value_and_grad": lambda _, **flag: mpjax.scaled_value_and_grad(
        loss, mpjax.DynamicLossScale(), **flag
    ),
    "Policy": lambda _, **flag: mpjax.get_policy(POLICY).replace(**flag),
    "Manager": manager,
    "Manager.save": save_numbered,
    "Manager.restore": restore_numbered,
    "load_safetensors": load,
    "restore": save_and_restore,
    "calibrate": lambda _, **flag: mpjax.debug.calibrate(loss, POLICY, **flag)(PARAMS, BATCH),
    "tune": lambda _, **flag: mpjax.debug.tune(loss, POLICY, tolerance=0.1, **flag)(PARAMS, BATCH),
    "fit_memory": lambda _, **flag: mpjax.hardware.fit_memory("h100", lambda policy: loss, **flag)(
        PARAMS, BATCH
    ),
    "largest_batch": lambda _, **flag: mpjax.hardware.largest_batch("h100", 4, loss, **flag),
    "TrainState.value_and_grad": lambda _, **flag: LINEN.value_and_grad(loss, **flag)(
        PARAMS, BATCH
    ),
    "value_and_grad": lambda _, **flag: mpjax.nnx.value_and_grad(
        lambda model, x: model(x).mean(), NNX, **flag
    )(MODEL, BATCH),
    "MixedPrecision.value_and_grad": lambda _, **flag: MIXED.value_and_grad(loss, STATE, **flag),
}
MODULES = ("checkpoint", "debug", "hardware", "linen", "nnx", "optim")


def public_functions():
    """Yields the name of each public function and method, and the function."""
    for module in (mpjax, *(importlib.import_module(f"mpjax.{name}") for name in MODULES)):
        for name in module.__all__:
            made = getattr(module, name)
            if inspect.isclass(made) and issubclass(made, BaseException):
                continue
            if callable(made):
                yield name, made
            methods = vars(made) if inspect.isclass(made) else ()
            for method in methods:
                if not method.startswith("_") and callable(getattr(made, method)):
                    yield f"{name}.{method}", getattr(made, method)


FLAGS = [
    (name, parameter.name)
    for name, fun in public_functions()
    for parameter in inspect.signature(fun).parameters.values()
    if isinstance(parameter.default, bool)
]


@pytest.mark.parametrize(("name", "flag"), FLAGS)
def test_a_flag_is_true_or_false(name, flag, tmp_path):
    for wrong in ("yes", 1, None, PARAMS):
        with pytest.raises((TypeError, ValueError), match=rf"\b{flag}=.* must be True or False"):
            CALLS[name](tmp_path, **{flag: wrong})
