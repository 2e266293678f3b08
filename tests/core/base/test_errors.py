"""Illegal arguments raise the library's own errors, with readable messages."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax.checkpoint
import mpjax.linen
import mpjax.nnx
from mpjax._src.core.base.errors import LONGEST, brief, did_you_mean, finite_number

DEEP = []
for _ in range(100_000):
    DEEP = [DEEP]
DEEP_DICT = {}
for _ in range(100_000):
    DEEP_DICT = {"a": DEEP_DICT}
HUGE = 1 << 100_000  # of more digits than Python prints

HISTOGRAM = mpjax.debug.gradient_histogram(jnp.ones(2))
PARAMS = {"w": jnp.ones(2)}


def loss(params, batch):
    return jnp.sum(params["w"] * batch)


def kind(value):
    return type(value).__name__


# ---- words ---------------------------------------------------------------------------------------


def test_brief_shows_values_briefly():
    assert brief("x") == "'x'" and brief(2**70) == str(2**70) and brief([1, None]) == "[1, None]"
    assert brief(DEEP) == "<list>" and brief(DEEP_DICT) == "<dict>"
    assert brief(HUGE) == "<int of 100001 bits>"
    long = brief("a" * 10_000 + "z")
    assert len(long) < LONGEST + 10 and long.startswith("'aaa") and long.endswith("az'")


def test_did_you_mean_takes_deep_and_huge_values():
    assert did_you_mean("bfloat61", ["bfloat16"]) == " Did you mean 'bfloat16'?"
    assert did_you_mean(DEEP, ["list"]) == did_you_mean(HUGE, ["x"]) + did_you_mean(DEEP, ["list"])


# ---- functions -----------------------------------------------------------------------------------

TAKE_FUNCTIONS = {
    "autocast": lambda f: mpjax.autocast(f, "mixed_bfloat16"),
    "autocast, decorating": lambda f: mpjax.autocast(policy="mixed_bfloat16")(f),
    "explain": lambda f: mpjax.explain(f, "mixed_bfloat16"),
    "compare": lambda f: mpjax.compare(f, "mixed_bfloat16"),
    "find_nonfinite": mpjax.find_nonfinite,
    "tune": lambda f: mpjax.debug.tune(f, "mixed_bfloat16", 0.1),
    "half_inputs": mpjax.half_inputs,
    "half_inputs, decorating": lambda f: mpjax.half_inputs(float32=0)(f),
    "scaled_value_and_grad": lambda f: mpjax.scaled_value_and_grad(f, mpjax.NoOpLossScale()),
    "build_train_step": lambda f: mpjax.build_train_step(f, optax.sgd(0.1)),
}
# What is called without a function returns a decorator.
DECORATORS = ("autocast", "half_inputs")


@pytest.mark.parametrize("take", TAKE_FUNCTIONS)
@pytest.mark.parametrize("wrong", [3, None, "mixed_bfloat16", DEEP, HUGE], ids=kind)
def test_argument_that_is_no_function_raises_at_once(take, wrong):
    if wrong is None and take in DECORATORS:
        assert callable(TAKE_FUNCTIONS[take](None))
        return
    with pytest.raises(TypeError, match=r"(fun|kernel|loss_fn)=.* (must be a function|is not)"):
        TAKE_FUNCTIONS[take](wrong)


def test_policy_in_the_place_of_the_function_is_recognized():
    with pytest.raises(
        TypeError, match=r"fun='mixed_bfloat16' must be a function.*second argument"
    ):
        mpjax.autocast("mixed_bfloat16")


# ---- numbers -------------------------------------------------------------------------------------

TAKE_NUMBERS = {
    "loss_scale": lambda n: mpjax.build_train_step(loss, optax.sgd(0.1), loss_scale=n),
    "StaticLossScale": mpjax.StaticLossScale,
    "compare": lambda n: mpjax.compare(loss, "float32", loss_scale=n),
    "find_nonfinite": lambda n: mpjax.find_nonfinite(loss, loss_scale=n),
    "tune, loss_scale": lambda n: mpjax.debug.tune(loss, "float32", 0.1, loss_scale=n),
    "tolerance": lambda n: mpjax.debug.tune(loss, "float32", n),
    "headroom": lambda n: mpjax.debug.recommend_loss_scale(HISTOGRAM, headroom=n),
    "scale": lambda n: HISTOGRAM.rows(scale=n),
    "plot": lambda n: HISTOGRAM.plot(scale=n),
    **{
        name: lambda n, name=name: mpjax.DynamicLossScale(**{name: n})
        for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
    },
    "loss_scale now": lambda n: mpjax.DynamicLossScale(loss_scale=n),
    "growth_interval": lambda n: mpjax.DynamicLossScale(growth_interval=n),
    "hysteresis": lambda n: mpjax.DynamicLossScale(hysteresis=n),
    "accumulate_steps": lambda n: mpjax.build_train_step(loss, optax.sgd(0.1), accumulate_steps=n),
}


@pytest.mark.parametrize("take", TAKE_NUMBERS)
@pytest.mark.parametrize(
    "wrong",
    [2**2000, -(2**2000), HUGE, float("nan"), float("inf"), DEEP, "many", 1j, np.ones(2)],
    ids=[*("2**2000", "-2**2000", "huge", "nan", "inf", "deep", "text", "complex", "array")],
)
def test_argument_that_is_no_usable_number_raises(take, wrong):
    with pytest.raises(ValueError, match=r"(=.* must|Unknown .*=)"):
        TAKE_NUMBERS[take](wrong)


def test_large_integers_that_a_float_holds_are_numbers():
    assert float(mpjax.StaticLossScale(2**100).loss_scale) == 2.0**100
    assert mpjax.debug.recommend_loss_scale(HISTOGRAM, headroom=2**100).loss_scale < 1


@pytest.mark.parametrize("runs", [0, 1.5, True, HUGE - HUGE], ids=str)
def test_max_runs_of_tune_must_be_a_whole_number(runs):
    with pytest.raises(ValueError, match="max_runs=.* must be an integer"):
        mpjax.debug.tune(loss, "float32", 0.1, max_runs=runs)


def test_log_metrics_refuses_steps_beyond_64_bits(tmp_path):
    log = mpjax.debug.JsonLines(tmp_path / "a.jsonl")
    for step in (HUGE, 2**63, True):
        with pytest.raises(TypeError, match="step=.* must be a Python integer of 64 bits"):
            mpjax.debug.log_metrics(log, step, {})
    mpjax.debug.log_metrics(log, np.int64(3), {})


# ---- policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["overrides", "half_ops", "keep_full"])
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000])
def test_policy_json_that_is_nested_too_deep_raises_a_short_message(key, text):
    with pytest.raises(ValueError, match="policy=.*: bad JSON at") as caught:
        mpjax.get_policy(f"float32,{key}={text}")
    assert len(str(caught.value)) < 2000


def test_policy_json_of_too_many_digits_raises():
    with pytest.raises(ValueError, match="policy=.*: bad JSON at"):
        mpjax.get_policy('float32,overrides={"a":' + "9" * 5000 + "}")


TAKE_VALUES = {
    "override": lambda v: mpjax.get_policy("float32").override(v),
    "override's dtype": lambda v: mpjax.get_policy("float32").override({"a": v}),
    "override's pattern": lambda v: mpjax.Policy("f32", "f32", "f32", overrides=[(v, "f32")]),
    **{
        name: lambda v, name=name: mpjax.Policy(**{**dict(DTYPES), name: v})
        for name in ("param_dtype", "compute_dtype", "casting", "storage", "half_ops")
    },
    "get_policy": mpjax.get_policy,
    "half": lambda v: mpjax.get_policy("half", half=v),
    "cast": lambda v: mpjax.cast(PARAMS, v),
    "precision": mpjax.precision,
    "select": lambda v: mpjax.select(v, PARAMS, PARAMS),
    "adjust": lambda v: mpjax.DynamicLossScale().adjust(v),
    "need": lambda v: mpjax.register_rule("tanh", v),
    "primitive": lambda v: mpjax.register_rule(v, "full"),
    "device": mpjax.recommend_policy,
    "half_dtype": mpjax.hardware.half_dtype,
    "has_aux": lambda v: mpjax.build_train_step(loss, optax.sgd(0.1), has_aux=v),
    "optimizer": lambda v: mpjax.build_train_step(loss, v),
    "axis_name": lambda v: mpjax.build_train_step(loss, optax.sgd(0.1), axis_name=v),
    "rng": lambda v: mpjax.build_train_step(loss, optax.sgd(0.1))[0](PARAMS, rng=v),
    "histogram": lambda v: mpjax.debug.gradient_histogram(PARAMS, v),
    "recommend_loss_scale": mpjax.debug.recommend_loss_scale,
    "plot": lambda v: HISTOGRAM.plot(dtype=v),
    "writer": mpjax.debug.flush_metrics,
    "JsonLines": mpjax.debug.JsonLines,
    "loss scale": lambda v: mpjax.scaled_value_and_grad(loss, v),
    "limit": lambda v: mpjax.raise_if_diverged({"consecutive_skips": 1}, v),
    "metrics": lambda v: mpjax.raise_if_diverged(v, 1),
}
DTYPES = {"param_dtype": "f32", "compute_dtype": "f32", "output_dtype": "f32"}


@pytest.mark.parametrize("take", TAKE_VALUES)
@pytest.mark.parametrize("wrong", [DEEP, DEEP_DICT, [("a", DEEP)], -HUGE, 3.5, object()], ids=kind)
def test_illegal_argument_of_any_kind_raises_a_short_message(take, wrong):
    with pytest.raises((TypeError, ValueError)) as caught:
        TAKE_VALUES[take](wrong)
    said = str(caught.value)
    assert len(said) < 2000 and not any(raw in said for raw in RAW), said
    assert any(legal in said for legal in ("must", "Choose", "Use a", "Names")), said


# What Python and NumPy say of such values.
RAW = ("recursion depth", "Exceeds the limit", "setting an array element", "has no attribute")


def test_precision_of_no_dtype_raises_before_it_is_entered():
    with pytest.raises(ValueError, match="dtype='float61' cannot be the dtype of a region"):
        mpjax.precision("float61")


@pytest.mark.parametrize(
    ("module", "name", "meant"),
    [
        (mpjax, "autocats", "autocast"),
        (mpjax, "chekpoint", "checkpoint"),
        (mpjax.nnx, "Optimiser", "Optimizer"),
        (mpjax.linen, "TrainSate", "TrainState"),
        (mpjax.checkpoint, "restored", "restore"),
        (mpjax, "qqq", None),
    ],
)
def test_misspelled_attribute_suggests_the_right_one(module, name, meant):
    hint = f" Did you mean {meant!r}?" if meant else ""
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert str(caught.value) == f"module {module.__name__!r} has no attribute {name!r}.{hint}"
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.lower().count("did you mean") == len([meant] if meant else [])


def test_finite_number_is_none_for_a_traced_number():
    seen = []
    jax.eval_shape(lambda x: seen.append(finite_number(x)), 1.0)
    assert seen == [None] and finite_number(2) == 2.0
