"""A setting of a policy is changed alone, by `replace` and by every method."""

import dataclasses
import itertools

import pytest

import mpjax
from mpjax._src.policy.policy import KEYS

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
    "storage": ("lean", mpjax.Policy.with_storage),
    "fused_attention": (True, mpjax.Policy.with_fused_attention),
    "gather": ("float32", lambda p, x: p.with_communication(gather=x)),
    "reduce": ("half", lambda p, x: p.with_communication(reduce=x)),
    "masters": ("split", lambda p, x: p.with_optimizer_state(masters=x)),
    "rounding": ("kahan", lambda p, x: p.with_optimizer_state(rounding=x)),
    "moments": ("8bit", lambda p, x: p.with_optimizer_state(moments=x)),
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
    assert base.with_communication() == base.with_optimizer_state() == base.replace() == base


def test_the_setters_of_two_forms_add_up():
    policy = mpjax.get_policy("O2:bfloat16,moments=8bit").with_optimizer_state(masters="split")
    assert str(policy) == "O2:bfloat16,masters=split,moments=8bit"
    assert str(policy.with_optimizer_state("float32")) == "O2:bfloat16,moments=8bit"
    with pytest.raises(ValueError, match="rounding='kahan' is for half parameters without"):
        policy.replace(rounding="kahan")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"moment": "8bit"}, "moment='8bit' is not a setting.*Legal are.*Did you mean 'moments'"),
        ({"half_op": ("exp",)}, "Did you mean 'half_ops'"),
        ({"compute": "f16", "c": "f16"}, "c='f16': compute_dtype is given twice"),
        ({"param_type": "f16"}, "Legal are param_dtype, compute_dtype.*Did you mean 'param_dtype'"),
    ],
)
def test_an_unknown_setting_is_refused(setting, message):
    with pytest.raises(TypeError, match=message):
        mpjax.get_policy("mixed_bfloat16").replace(**setting)
