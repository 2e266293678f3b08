"""Reports of a function, called with its arguments at once or in a second call, and misused."""

import inspect
import re

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax._src.core.program.curried import Pending
from mpjax._src.tools.instruments.passes import passes

PARAMS = {"w": np.full((8, 32), 0.5, np.float32)}
BATCH = np.ones((4, 8), np.float32)


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def rollout(params, batch):
    return loss(params, batch) + 0.0


def step(params, batch):
    return {"w": params["w"] - 0.1 * jnp.mean(batch)}


BF16 = "mixed_bfloat16"
# The tools with the settings that stand before the arguments, by position.
TOOLS = {
    "explain": (mpjax.explain, loss, (BF16,)),
    "compare": (mpjax.compare, loss, (BF16,)),
    "compare of two": (mpjax.compare, loss, (rollout,)),
    "find_nonfinite": (mpjax.find_nonfinite, loss, (BF16,)),
    "lint": (mpjax.lint, step, ()),
    "tune": (mpjax.debug.tune, loss, (BF16, 0.5)),
    "passes": (passes, loss, (BF16,)),
}


@pytest.mark.parametrize("name", TOOLS)
def test_arguments_come_along_or_in_a_second_call(name):
    tool, fun, settings = TOOLS[name]
    curried = tool(fun, *settings)(PARAMS, BATCH)
    direct = tool(fun, *settings, PARAMS, BATCH)
    assert type(direct) is type(curried)
    assert str(direct) == str(curried)


@pytest.mark.parametrize("name", TOOLS)
def test_settings_stay_named_beside_arguments(name):
    tool, fun, settings = TOOLS[name]
    parameters = inspect.signature(tool).parameters
    more = {"argnums": None} if "argnums" in parameters and name != "compare of two" else {}
    curried = tool(fun, *settings, **more)(PARAMS, BATCH)
    assert str(tool(fun, *settings, PARAMS, BATCH, **more)) == str(curried)


@pytest.mark.parametrize("name", TOOLS)
def test_what_is_no_report_yet_says_so(name):
    tool, fun, settings = TOOLS[name]
    pending = tool(fun, *settings)
    shown = ", ".join([fun.__name__, *(getattr(s, "__name__", repr(s)) for s in settings)])
    call = f"{tool.__name__}({shown})(params, batch)"
    assert repr(pending) == str(pending)
    assert call in repr(pending) and "0x" not in repr(pending)
    for use in (bool, lambda x: x.rows, lambda x: x.to_html(), lambda x: f"{x.half_flops:.0%}"):
        with pytest.raises((TypeError, AttributeError), match=re.escape(call)):
            use(pending)
    assert pending.__name__ == fun.__name__ and callable(pending)
    assert not hasattr(pending, "_repr_html_")


ODD = {
    "an array": BATCH,
    "a dict": PARAMS,
    "a module": nnx.Linear(8, 32, rngs=nnx.Rngs(0)),
    "a shape": jax.ShapeDtypeStruct((3,), jnp.float32),
    "a list of arrays": [BATCH],
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", [n for n in TOOLS if n not in ("passes", "compare of two")])
def test_argnums_and_has_aux_that_are_arguments_raise(name, kind):
    tool, fun, settings = TOOLS[name]
    call = re.escape(", ".join([fun.__name__, *map(repr, settings)]))
    message = rf"argnums=.* must be positions.*{tool.__name__}\({call}\)\(params, batch\)"
    with pytest.raises(ValueError, match=message):
        tool(fun, *settings, argnums=ODD[kind])
    with pytest.raises(ValueError, match="has_aux=.* must be True or False"):
        tool(fun, *settings, has_aux=ODD[kind])


@pytest.mark.parametrize("name", [n for n in TOOLS if n != "compare of two"])
def test_misspelt_settings_and_named_arguments_raise_with_the_call_to_write(name):
    tool, fun, settings = TOOLS[name]
    with pytest.raises(TypeError, match=r"no setting 'train'.*\)\(params, batch, train=True\)"):
        tool(fun, *settings, PARAMS, BATCH, train=True)
    if name != "passes":
        with pytest.raises(TypeError, match="no setting 'argnum'. Did you mean 'argnums'"):
            tool(fun, *settings, argnum=0)
    with pytest.raises(TypeError, match=r"fun=.* must be a function"):
        tool(0.5, *settings, PARAMS, BATCH)


@pytest.mark.parametrize("name", ["explain", "find_nonfinite", "tune", "passes"])
@pytest.mark.parametrize("policy", [3, jnp.float32, object()])
def test_what_is_no_policy_raises(name, policy):
    tool, fun, settings = TOOLS[name]
    with pytest.raises((TypeError, ValueError), match="olicy|policy|dtype"):
        tool(fun, policy, *settings[1:], PARAMS, BATCH)
    with pytest.raises((TypeError, ValueError), match="olicy|policy|dtype"):
        tool(fun, policy, *settings[1:])


@pytest.mark.parametrize("name", ["explain", "compare", "find_nonfinite", "tune", "passes"])
def test_arguments_in_the_place_of_the_policy_raise_with_the_call_to_write(name):
    tool, fun, _ = TOOLS[name]
    before = "policy, tolerance" if name == "tune" else "policy"
    call = re.escape(f"{tool.__name__}(loss, {before})(params, batch).")
    for values in ((PARAMS, BATCH), (BATCH,), ([BATCH], BATCH)):
        with pytest.raises(TypeError, match=f"policy=.* must be a policy.*{call}"):
            tool(fun, *values)


def test_tune_names_the_tolerance_that_is_missing():
    with pytest.raises(ValueError, match="tolerance=.* must be a positive number"):
        mpjax.debug.tune(loss, BF16, PARAMS, BATCH)


def test_a_value_that_may_be_a_setting_or_an_argument_raises():
    def power(n, x):
        return jnp.sum(x**n)

    for value, shown in ((2, "2"), (None, "None"), ((0, 1), "(0, 1)"), (True, "True")):
        both = re.escape(f"explain(power, 'O1', argnums={shown})(n) or explain(power, 'O1')(n, x)")
        with pytest.raises(TypeError, match=both):
            mpjax.explain(power, "O1", value, BATCH)
    with pytest.raises(TypeError, match=r"It takes no policy: pass mpjax.autocast\(loss, policy"):
        mpjax.lint(loss, BF16, PARAMS, BATCH)
    with pytest.raises(TypeError, match=r"It takes no policy"):
        mpjax.lint(loss, mpjax.get_policy(BF16), PARAMS, BATCH)
    with pytest.raises(TypeError, match=r"lint\(loss\)\(..., ..., ...\)"):
        mpjax.lint(loss, 0, PARAMS, BATCH)
    # Where argnums has no place by position, and for what is no setting, nothing is unclear.
    assert not mpjax.find_nonfinite(power, BF16, 2, BATCH, argnums=1)
    assert mpjax.explain(power, BF16, 2.0, BATCH).rows
    assert mpjax.explain(lambda nothing, x: x @ x.T, BF16, {}, BATCH).half_flops == 1


def test_a_module_for_the_second_function_or_the_first_argument_raises():
    def apply(model, x):
        return jnp.sum(model(x))

    model = nnx.Linear(8, 32, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"may be policy or the first argument of apply"):
        mpjax.compare(apply, model, BATCH)
    assert mpjax.compare(apply, "mixed_bfloat16", model, BATCH).results
    assert mpjax.compare(model, model)(BATCH).by_formula is False
    with pytest.raises(TypeError, match=r"explain: policy=.* must be a policy"):
        mpjax.explain(apply, model, BATCH)  # has no second function


def test_policies_of_jmp_and_of_mpjax_are_settings():
    for policy in (jmp.get_policy("params=f32,compute=bf16,output=f32"), mpjax.get_policy(BF16)):
        assert mpjax.explain(loss, policy, PARAMS, BATCH).half_flops == 1


def test_arguments_are_named_as_the_function_names_them():
    def keyed(model, *, key, train=False):
        return model

    class Apply:
        def __call__(self, model, x):
            return model

    jitted = jax.jit(loss)
    assert "explain(keyed)(model, key=key)" in repr(mpjax.explain(keyed))
    assert "explain(Apply)(model, x)" in repr(mpjax.explain(Apply()))
    assert "explain(loss)(params, batch)" in repr(mpjax.explain(jitted))
    assert "explain(fun)(x, *rest)" in repr(mpjax.explain(lambda x, *rest, **kw: x))
    assert "lint(loss, argnums=(0, 1), run=False)" in repr(
        mpjax.lint(loss, argnums=(0, 1), run=False)
    )
    assert isinstance(mpjax.explain(loss), Pending)


def test_reports_run_under_transformations_of_the_function():
    for fun in (jax.jit(loss), jax.checkpoint(loss), mpjax.autocast(loss, BF16)):
        assert str(mpjax.explain(fun, BF16, PARAMS, BATCH)) == str(
            mpjax.explain(fun, BF16)(PARAMS, BATCH)
        )
