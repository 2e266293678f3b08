"""The settings that fit_memory tries."""

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._src.tools.hardware import ladder

BASE = mpjax.get_policy("mixed_bfloat16")


def policies(settings):
    return [str(setting.policy) for setting in settings]


def test_rungs_add_one_setting_at_a_time(monkeypatch):
    steps = {"fused_attention": True}, {"gather": "float32"}, {"storage": "lean"}
    monkeypatch.setattr(ladder, "LADDER", steps)
    found = ladder.rungs(BASE)
    assert policies(found) == [
        "mixed_bfloat16",
        "mixed_bfloat16,fused_attention=true",
        "mixed_bfloat16,fused_attention=true,gather=float32",
        "mixed_bfloat16,fused_attention=true,storage=lean,gather=float32",
    ]
    last = "fused attention, gather float32, storage lean"
    assert [s.name for s in found][::3] == [ladder.AS_GIVEN, last]
    alone = policies(ladder.each_alone(BASE))
    assert alone == [
        "mixed_bfloat16,fused_attention=true",
        "mixed_bfloat16,gather=float32",
        "mixed_bfloat16,storage=lean",
    ]


def test_rungs_leave_out_what_policies_do_not_accept_have_or_need(monkeypatch):
    steps = {"no_such": 1}, {"storage": "lean"}, {"storage": "no"}, {"fused_attention": True}
    monkeypatch.setattr(ladder, "LADDER", steps)
    lean = ["mixed_bfloat16,storage=lean", "mixed_bfloat16,fused_attention=true,storage=lean"]
    assert policies(ladder.rungs(BASE)) == ["mixed_bfloat16", *lean]
    assert policies(ladder.rungs(BASE.replace(storage="lean"))) == lean
    alone = ladder.each_alone(BASE.replace(storage="lean"))
    assert policies(alone) == lean[1:]
    fused = ladder.rungs(BASE, lambda before, after: after.policy.fused_attention)
    assert policies(fused) == ["mixed_bfloat16", "mixed_bfloat16,fused_attention=true"]


def test_a_later_storage_replaces_an_earlier_one():
    for setting in ladder.rungs(BASE):
        assert setting.name.count("storage") <= 1
        assert mpjax.get_policy(str(setting.policy)) == setting.policy


@pytest.mark.parametrize(
    "setting", ladder.checkpoints(ladder.rungs(BASE)[:1]), ids=lambda s: s.keeping
)
def test_checkpoints_wrap_a_function(setting):
    loss = setting.checkpoint(lambda x: jnp.sum(jnp.sin(x @ x)))
    program = jax.make_jaxpr(jax.grad(loss))(jnp.ones((2, 2)))
    assert setting.policy == BASE and "remat" in str(program)
    assert str(program).count("dot_general") == 3 + (setting.keeping == "nothing_saveable")


def test_checkpoints_are_tried_with_fused_attention_too():
    found = ladder.checkpoints(ladder.rungs(BASE))
    count = len(ladder.KEEPING)
    assert len(found) == 2 * count and policies(found[:count]) == ["mixed_bfloat16"] * count
    assert all(setting.policy.fused_attention for setting in found[count:])
    assert all(setting.policy.storage == "fast" for setting in found)
    assert found[-1].name.startswith("fused attention, ")


def test_a_setting_without_a_checkpoint_leaves_a_function_as_it_is():
    assert ladder.rungs(BASE)[0].checkpoint(jnp.sin) is jnp.sin
