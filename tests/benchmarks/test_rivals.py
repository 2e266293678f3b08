"""Rivals: each trains a small model, with the same state after a step as before."""

import inspect
import itertools

import jax
import pytest

from benchmarks.models import MODELS, SMALL
from benchmarks.rivals import LADDER, NEEDS, RIVALS, lacks, program

# The rungs that change the loss of a language model, or attention.
RUNGS = [rung for rung in LADDER if rung not in ("autocast", "autocast, lean")]


def described(tree):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


def cases():
    """Yields each rival with each model that it is for."""
    for rival, model in itertools.product(RIVALS, ("bert", "resnet50")):
        attends = "wide_softmax" in inspect.signature(MODELS[model]).parameters
        if attends or "softmax" not in rival:
            marks = [pytest.mark.elsewhere("bench", bool(lacks(rival)))]
            marks += [pytest.mark.thorough] * (model == "resnet50" or rival in RUNGS)
            yield pytest.param(rival, model, marks=marks)


@pytest.mark.parametrize(("rival", "model"), [*cases()])
def test_a_rival_s_step_keeps_its_state(rival, model):
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
