"""A name that mpjax lacks is an error that says where it is, or what replaces it."""

import copy
import importlib
import importlib.util
import re

import jax
import numpy as np
import optax
import pytest

import mpjax
from mpjax._src.core.base.absent import INSTEAD, missing, public_names

MODULES = ["mpjax", *(f"mpjax.{name}" for name in ("checkpoint", "debug", "errors", "hardware"))]
MODULES += [f"mpjax.{name}" for name in ("jmp", "keras", "linen", "nnx", "optim", "reports")]
# Some of what users of other libraries write, and words of the answer.
TRIED = {
    "GradScaler": "mpjax.mixed_precision.*mpjax.DynamicLossScale",
    "LossScaleOptimizer": "mpjax.mixed_precision.*mpjax.keras.LossScaleOptimizer",
    "DynamicScale": "mpjax.DynamicLossScale",
    "amp": "mpjax.mixed_precision.*mpjax.autocast",
    "initialize": "mpjax.mixed_precision",
    "decorate": r"mpjax.autocast\(fun, policy\)",
    "auto_cast": r"mpjax.autocast\(fun, policy\)",
    "custom_fwd": "mpjax.half_inputs",
    "set_global_policy": "no global policy",
    "global_policy": "no global policy",
    "is_autocast_enabled": "mpjax.current_policy",
    "half": "mpjax.cast",
    "BFloat16": "mpjax.cast",
    "grad": "value_and_grad of the optimizer",
    "value_and_grad": "of the optimizer.*or mpjax.nnx.value_and_grad",
    "select_tree": "mpjax.select",
    "fit_memory": "It is mpjax.hardware.fit_memory",
    "Manager": "It is mpjax.checkpoint.Manager",
    "master_parms": "Did you mean mpjax.optim.master_params",
    "fit_memry": "Did you mean mpjax.hardware.fit_memory",
    "no_grad": "jax.lax.stop_gradient",
    "clip_grad_norm_": "optax.clip_by_global_norm",
    "initialise": "mpjax.mixed_precision",
    "recompute": "storage=lean",
    "fp8_autocast": "Transformer Engine",
    "load_state": "mpjax.checkpoint.restore",
    "FSDP": "NamedSharding",
    "DynamicLosScale": "Did you mean 'DynamicLossScale'",
    "autocats": "Did you mean 'autocast'",
}


@pytest.mark.parametrize("name", TRIED)
def test_a_name_of_another_library_or_module_is_answered(name):
    with pytest.raises(AttributeError, match=rf"'mpjax' has no attribute '{name}'.*{TRIED[name]}"):
        getattr(mpjax, name)
    with pytest.raises(ImportError, match=rf"import name '{name}'.*{TRIED[name]}"):
        exec(f"from mpjax import {name}")


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_found_from_every_module(module):
    own = importlib.import_module(module)
    assert {*own.__all__} <= {*public_names()}
    for name, places in public_names().items():
        if name not in own.__all__:
            assert all(place in str(missing(module, name, own.__all__)) for place in places)


def test_an_import_of_a_name_says_where_it_is_too():
    for module in MODULES[1:]:
        with pytest.raises(ImportError, match=r"It is mpjax\.lint\."):
            exec(f"from {module} import lint")
    exec("from mpjax import keras")


@pytest.mark.parametrize("module", ["mpjax.amp", "mpjax.fit_memory", "mpjax.optim.lint"])
def test_a_module_that_is_none_says_what_to_use(module):
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{module}'"):
        importlib.import_module(module)
    with pytest.raises(ModuleNotFoundError, match="mpjax.mixed_precision"):
        exec("from mpjax.amp import GradScaler")
    assert importlib.util.find_spec("mpjax.nothing_like_it") is None


def test_what_replaces_a_name_exists():
    for instead, names in INSTEAD.items():
        for path in re.findall(r"mpjax((?:\.\w+)+)", instead):
            found = mpjax
            for part in path[1:].split("."):
                found = getattr(found, part)
        here = [name for name in names.split() if name in mpjax.__all__]
        assert not here and len({*names.split()}) == len(names.split()), instead
    every = [name.lower() for names in INSTEAD.values() for name in names.split()]
    assert len({*every}) == len(every)


def test_names_that_python_asks_for_get_no_advice():
    for name in ("__wrapped__", "_half"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'.$"):
            getattr(mpjax, name)


OPTIMIZER = mpjax.mixed_precision(optax.sgd(0.1), "mixed_float16")
PARAMS = {"w": np.ones(2, np.float32)}
OBJECTS = {
    "policy": mpjax.get_policy("mixed_bfloat16"),
    "optimizer": OPTIMIZER,
    "scale": mpjax.DynamicLossScale(),
    "static scale": mpjax.StaticLossScale(2.0),
    "state": mpjax.build_train_step(lambda p, b: p["w"].sum(), optax.sgd(0.1))[0](PARAMS),
}


@pytest.mark.parametrize(
    ("which", "name", "words"),
    [
        ("policy", "dtype", "param_dtype, compute_dtype or"),
        ("policy", "cast", "cast_to_compute"),
        ("policy", "compute_dtyp", "Did you mean 'compute_dtype'"),
        ("optimizer", "step", "optimizer.update.*optax.apply_updates"),
        ("optimizer", "zero_grad", "value_and_grad, which returns new gradients"),
        ("optimizer", "state_dict", "mpjax.checkpoint.save"),
        ("scale", "update", "adjust"),
        ("scale", "step", "mpjax.mixed_precision"),
        ("static scale", "get_scale", "loss_scale"),
        ("state", "apply_gradients", "state, metrics = step"),
        ("state", "opt", "opt_state"),
        ("state", "zzz", "$"),
    ],
)
def test_an_attribute_of_other_libraries_is_answered(which, name, words):
    with pytest.raises(AttributeError, match=f"object has no attribute '{name}'.*{words}"):
        getattr(OBJECTS[which], name)


@pytest.mark.parametrize("which", OBJECTS)
def test_objects_that_answer_are_copied_and_have_no_protocol_of_others(which):
    copied = copy.deepcopy(OBJECTS[which])
    assert jax.tree.structure(copied) == jax.tree.structure(OBJECTS[which])
    assert not hasattr(copied, "__array__") and not hasattr(copied, "_repr_html_")
