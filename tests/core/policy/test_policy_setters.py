"""A setting of a policy is changed alone, by `replace` and by the methods that add to one."""

import dataclasses
import itertools

import numpy as np
import pytest

import mpjax
from mpjax._src.core.base.errors import brief
from mpjax._src.core.policy.policy import KEYS

# Another value of each setting, and the setter that has an argument for it.
SETTINGS = {
    "param_dtype": ("float16", None),
    "compute_dtype": ("float16", None),
    "output_dtype": ("float16", None),
    "master_weights": (False, None),
    "casting": ("boundary", None),
    "keep_full": (("*norm*",), None),
    "overrides": ({"*head*": "float32"}, lambda p, x: p.override(x)),
    "half_ops": (("exp",), lambda p, x: p.with_ops(half=x)),
    "full_ops": (("tanh",), lambda p, x: p.with_ops(full=x)),
    "follow_ops": (("add",), lambda p, x: p.with_ops(follow=x)),
    "storage": ("lean", None),
    "fused_attention": (True, None),
    "chunked_loss": (True, None),
    "gather": ("float32", None),
    "reduce": ("half", None),
    "masters": ("split", None),
    "rounding": ("kahan", None),
    "moments": ("8bit", None),
}


def test_a_setter_changes_what_it_names_and_nothing_else():
    # Masters that are split and a rounding contradict each other unless parameters are float32.
    base = mpjax.get_policy("mixed_bfloat16")
    assert {*SETTINGS} == {field.name for field in dataclasses.fields(base)}
    for pair in itertools.permutations(SETTINGS, 2):
        if "param_dtype" in pair and {"masters", "rounding"} & {*pair}:
            continue
        by_setters = base
        for name in pair:
            value, setter = SETTINGS[name]
            setter = setter or (lambda policy, value, name=name: policy.replace(**{name: value}))
            changed = setter(by_setters, value)
            kept = dataclasses.asdict(by_setters) | {name: getattr(changed, name)}
            assert dataclasses.asdict(changed) == kept and changed != by_setters, pair
            by_setters = changed
        assert by_setters == base.replace(**{name: SETTINGS[name][0] for name in pair}), pair
        assert mpjax.get_policy(str(by_setters)) == by_setters, pair
    assert {*KEYS.values()} == {*SETTINGS}
    for key, name in KEYS.items():  # the keys of the grammar
        assert base.replace(**{key: SETTINGS[name][0]}) == base.replace(**{name: SETTINGS[name][0]})
    assert base.replace() == base


def test_masters_and_moments_settings_add_up():
    policy = mpjax.get_policy("O2:bfloat16,moments=8bit").replace(masters="split")
    assert str(policy) == "O2:bfloat16,masters=split,moments=8bit"
    assert str(policy.replace(masters="float32")) == "O2:bfloat16,moments=8bit"
    with pytest.raises(ValueError, match="rounding='kahan' .*without master weights"):
        policy.replace(rounding="kahan")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            {"moment": "8bit"},
            "moment='8bit' is not a setting.*Choose one of.*Did you mean 'moments'",
        ),
        ({"half_op": ("exp",)}, "Did you mean 'half_ops'"),
        ({"compute": "f16", "c": "f16"}, "c='f16': compute_dtype is set twice"),
        (
            {"param_type": "f16"},
            "Choose one of param_dtype, compute_dtype.*Did you mean 'param_dtype'",
        ),
    ],
)
def test_replace_refuses_an_unknown_setting(setting, message):
    with pytest.raises(TypeError, match=message):
        mpjax.get_policy("mixed_bfloat16").replace(**setting)


@pytest.mark.parametrize(
    ("given", "stored"),
    [(0.4, 0.4), ("0.4", 0.4), (0, 0.0), (np.float32(0.5), 0.5), (1, "fast"), ("1.0", "fast")],
)
def test_storage_may_be_a_number(given, stored):
    policy = mpjax.get_policy("mixed_bfloat16").replace(storage=given)
    assert policy.storage == stored and type(policy.storage) is type(stored)
    assert mpjax.get_policy(str(policy)) == policy == eval(repr(policy), {"Policy": mpjax.Policy})
    assert hash(policy) == hash(mpjax.get_policy(f"mixed_bfloat16,storage={given}"))


@pytest.mark.parametrize("bad", [True, float("nan"), 1.5, -0.1, "2", "nan", None, "leen", 1j])
def test_storage_refuses_other_numbers(bad):
    with pytest.raises(ValueError, match=r"storage=.* number from 0 .* to 1") as caught:
        mpjax.get_policy("mixed_bfloat16").replace(storage=bad)
    assert brief(bad) in str(caught.value)
    assert ("Did you mean 'lean'" in str(caught.value)) == (bad == "leen")
