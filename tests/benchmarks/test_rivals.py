"""Rivals: each trains a small model, with the same state after a step as before."""

import inspect

import jax
import pytest
from support import thorough_but

from benchmarks.models import MODELS, SMALL
from benchmarks.rivals import LADDER, NEEDS, RIVALS, lacks, program

# The rungs that change the loss of a language model, or attention.
RUNGS = [rung for rung in LADDER if rung not in ("autocast", "autocast, lean")]


def described(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@pytest.mark.parametrize("model", ["bert", pytest.param("resnet50", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("rival", thorough_but(RIVALS, *(RIVALS.keys() - {*RUNGS})))
def test_a_rival_s_step_keeps_its_state(rival, model):
    if reason := lacks(rival):
        pytest.skip(reason)
    if "softmax" in rival and "wide_softmax" not in inspect.signature(MODELS[model]).parameters:
        pytest.skip("a model without attention")
    model = "gpt2" if rival in RUNGS else model
    found = program(model, rival, "float16", **SMALL[model])
    after, _ = jax.eval_shape(found.step, found.state, found.batch)
    assert described(after) == described(found.state)


def test_a_rival_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(NEEDS, "jmp", "no_such_module")
    assert lacks("jmp") == "no_such_module is not installed" and lacks("float32") is None


def test_a_rung_whose_setting_is_not_there_says_so(monkeypatch):
    monkeypatch.setitem(LADDER, "autocast, lean", ",storage=none")
    assert "storage='none' must be" in (lacks("autocast, lean") or "")
