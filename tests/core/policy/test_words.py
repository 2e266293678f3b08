"""Strings that the grammar refuses get an answer, and configuration files need no string."""

import collections
import dataclasses
import json
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

LEAN = "mixed_bfloat16,storage=lean"
NORMS = 'mixed_bfloat16,overrides={"*norm*": "f32"}'
# What people write, and the string that they mean.
MEANT = {
    **dict.fromkeys(
        (f"mixed_bfloat16{sep}storage=lean" for sep in (*";|/&+ :\n", " ; ", ", ,")), LEAN
    ),
    **dict.fromkeys((f"mixed_bfloat16,storage{is_}lean" for is_ in (":", " : ", "==", ":=")), LEAN),
    "storage=lean,mixed_bfloat16": LEAN,
    "mixed_bfloat16,lean": LEAN,
    "'mixed_bfloat16,storage=lean'": LEAN,
    "mixed_bfloat16,storage=lean,": LEAN,
    "{policy: mixed_bfloat16, storage: lean}": LEAN,
    "policy: mixed_bfloat16\nstorage: lean": LEAN,
    "mixed_bfloat16,fused_attention": "mixed_bfloat16,fused_attention=true",
    "O2:float16;moments=8bit": "O2:float16,moments=8bit",
    "mixed_bfloat16,overrides={'*norm*': 'f32'}": NORMS,
    "mixed_bfloat16,overrides={*norm*: f32}": NORMS,
    "mixed_bfloat16,overrides=*norm*: f32": NORMS,
    "mixed_bfloat16,overrides=*norm*=f32": NORMS,
    "mixed_bfloat16;overrides:{'*norm*':'f32',}": NORMS,
    'mixed_bfloat16,overrides={"*norm*": "f32"': NORMS,
    "policy: mixed_bfloat16\noverrides:\n  '*norm*': f32\n": NORMS,
    "mixed_bfloat16,half_ops=['exp', 'log']": 'mixed_bfloat16,half_ops=["exp", "log"]',
    "mixed_bfloat16,half_ops=[exp]": 'mixed_bfloat16,half_ops=["exp"]',
    "amp": "mixed_bfloat16",
    "amp_fp16": "mixed_float16",
    "O4": "O1:bfloat16",
    "16": "16-mixed",
    "None": "float32",
}


@pytest.mark.parametrize("text", MEANT)
def test_an_invalid_string_is_answered_with_the_valid_one(text):
    with pytest.raises(ValueError, match="Did you mean '.*'") as caught:
        mpjax.get_policy(text)
    assert f"Did you mean {MEANT[text]!r}?" in str(caught.value)
    assert str(caught.value).count("Did you mean") == 1
    mpjax.get_policy(MEANT[text])


@pytest.mark.parametrize(
    ("text", "way"),
    [
        *(
            (name, "Qwix")
            for name in ("mixed_fp8", "fp8", "float8_e4m3fn", "nvfp4", "nf4", "int8", "c=fp8")
        ),
        *((name, "in TF32 by default.*'float32'") for name in ("tf32", "TensorFloat32", "O1:tf32")),
        ("auto", "recommend_policy"),
        *((f"O1{sep}loss_scale=128", "mpjax.build_train_step: loss_scale=") for sep in ",; "),
        ("mixed_float16,dtype=bf16", "name of a policy alone"),
        ("mixed_float16,custom_white_list=[]", "Did you mean 'half_ops'"),
        ("mixed_float16,use_amp=false", "'float32' turns"),
        ("storage=lean", "no name and no dtype.*'mixed_bfloat16,storage=lean'"),
        ("mixed_bfloat16,overrides=" + "9" * 400, "must map patterns to dtypes"),
        ("mixed_bfloat16,storage=" + "9" * 400, "a number from 0"),
    ],
)
def test_what_no_policy_has_is_answered_with_the_way(text, way):
    with pytest.raises(ValueError, match=way):
        mpjax.get_policy(text)


@pytest.mark.parametrize(
    ("x", "way"),
    [
        (jnp.bfloat16, "Did you mean 'mixed_bfloat16'"),
        (np.dtype("float16"), "Did you mean 'mixed_float16'"),
        (None, "'float32'"),
        (False, "YAML reads no"),
        (32, "Put quotes"),
        (optax.sgd(0.1), "It is an optax optimizer"),
        (np.ones(2), "It is an array"),
        (abs, "It is a function"),
        (dict, "It is a class"),
        (["mixed_bfloat16", 8], "Put quotes"),
    ],
)
def test_what_is_no_policy_is_answered_with_what_it_is(x, way):
    with pytest.raises(TypeError, match=f"^policy=.* must be .*{way}"):
        mpjax.get_policy(x)


LEAN_O2 = mpjax.get_policy('O2:bfloat16,storage=lean,overrides={"*head*": "f32"},half_ops=["exp"]')
SETTINGS = {"storage": "lean", "overrides": {"*head*": "float32"}, "half_ops": ["exp"]}
CONFIGURED = {
    "a mapping": {"policy": "O2:bfloat16", **SETTINGS},
    "a mapping by name": collections.OrderedDict(SETTINGS, name="O2:bfloat16"),
    "a read-only mapping": types.MappingProxyType({"policy": "O2:bfloat16", **SETTINGS}),
    "a list": ["O2:bfloat16", SETTINGS],
    "a list of mappings": [{"policy": "O2:bfloat16"}, *({k: v} for k, v in SETTINGS.items())],
    "a string split at its commas": tuple(str(LEAN_O2).split(",")),
    "fields": dataclasses.asdict(LEAN_O2),
    "fields in JSON": json.loads(json.dumps(dataclasses.asdict(LEAN_O2), default=str)),
}


@pytest.mark.parametrize("form", CONFIGURED)
def test_a_configuration_file_may_have_a_mapping_or_a_list(form):
    policy = mpjax.get_policy(CONFIGURED[form])
    assert policy == LEAN_O2 == mpjax.get_policy(str(policy))


@pytest.mark.parametrize("base", ["O2:bfloat16", mpjax.get_policy("O2:bfloat16")], ids=type)
def test_settings_may_be_given_by_name(base):
    assert mpjax.get_policy(base, **SETTINGS) == LEAN_O2
    assert mpjax.get_policy("O2", half="float16", overrides={"a": "half"}).override_for("a") == "f2"
    assert (
        mpjax.get_policy({"compute": "half"}, half="bfloat16", p="f32").compute_dtype == "bfloat16"
    )


@pytest.mark.parametrize(
    ("args", "settings", "message"),
    [
        (
            ("mixed_bfloat16",),
            {"stroage": "lean"},
            "'stroage' is not a key.*Did you mean 'storage'",
        ),
        (("O1,storage=lean",), {"storage": "8bit"}, "sets 'storage' twice"),
        (({"policy": "O1", "storage": None},), {}, "storage=None must be 'fast'"),
        (({"mixed_bfloat16": {}},), {}, "belongs under 'policy'"),
        (({},), {}, "is empty"),
        (([],), {}, "is empty"),
    ],
)
def test_settings_that_do_not_fit_are_refused(args, settings, message):
    with pytest.raises(ValueError, match=message):
        mpjax.get_policy(*args, **settings)


def test_a_mapping_is_a_policy_wherever_one_is_asked_for():
    lean = CONFIGURED["a list"]
    assert mpjax.mixed_precision(optax.sgd(0.1), lean).policy == LEAN_O2
    for use in (mpjax.autocast, mpjax.explain, mpjax.compare, mpjax.find_nonfinite):
        assert callable(use(abs, {"policy": "mixed_bfloat16", "storage": "lean"}))
    with pytest.warns(mpjax.errors.PrecisionWarning, match="Did you mean 'mixed_bfloat16'"):
        mpjax.mixed_precision(optax.sgd(0.1), {"policy": "bf16", "storage": "lean"})


def test_a_policy_made_of_a_name_says_what_makes_one():
    with pytest.raises(TypeError, match="mpjax.get_policy.'mixed_bfloat16'. returns"):
        mpjax.Policy("mixed_bfloat16")


@pytest.mark.parametrize("text", ["{norm: f32}", "{'norm': 'f32'}", "norm=f32", '{"norm": "f32"}'])
def test_overrides_in_a_string_are_answered_with_a_mapping(text):
    for ask in (
        lambda: mpjax.get_policy("O1", overrides=text),
        lambda: mpjax.get_policy("O1").override(text),
        lambda: mpjax.get_policy({"policy": "O1", "overrides": text}),
    ):
        with pytest.raises(ValueError, match='overrides=.*Did you mean {"norm": "f32"}'):
            ask()
