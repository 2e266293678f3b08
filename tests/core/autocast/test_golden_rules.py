"""Rules of the planner, each with a construct whose gradient is another program without it."""

import sys

import constructs
import jax
import pytest
import test_golden
from jaxprs import digest

import mpjax
from mpjax._src.core.planner import kept, program  # noqa: F401  so that all modules are imported


def unchanged(given, *_, **__):
    return given


def none(*_, **__):
    return set()


def no(*_, **__):
    return False


# The function of each rule, what stands in for it, and the construct.
RULES = {
    ("rewrites.copies", unchanged): "dropout on weights",
    ("rewrites.weights_of_softmax", unchanged): "dropout on weights",
    ("rewrites._weights_again", lambda both: both.late): "weights of a checkpoint",
    ("rewrites.compared", unchanged): "picked entries",
    ("rewrites.joined_sums", unchanged): "again",
    ("maxima.with_positions", unchanged): "program pools",
    ("maxima.masks", unchanged): "program grouped",
    ("linear_recurrences.recurrent", unchanged): "linear recurrence",
    ("searches.routers", none): "router",
    ("searches.loops", none): "while loop that a matmul ends",
    ("cotangents.rounded_once", lambda both: []): "tail",
    ("narrowed.narrowed", unchanged): "sent parameter",
    ("turns.hoisted", unchanged): "program rnn",
    ("accumulators._accumulates", no): "linear recurrence",
    ("accumulators.adds_or_moves", no): "tail",
    ("rounding.may_be_half_operation", no): "overrides",
    ("rounding.is_exact", no): "linear recurrence",
    ("rounding.no_faster", lambda e: ""): "short products",
}
OFF = [pytest.param(*rule, construct, id=rule[0]) for rule, construct in RULES.items()]


def gradient(name):
    """Returns a digest of a construct's gradient, planned anew."""
    kind = name if name.startswith("program") else f"construct {name}"
    ((fun, args),) = [
        (fun, args) for key, fun, args in test_golden.programs(kind.split()[0]) if key == kind
    ]
    kept._kept.cache_clear()
    with test_golden.target(kind):
        policy = test_golden.POLICIES["bfloat16"] + constructs.SETTINGS.get(kind, "")
        anew = mpjax.autocast(lambda *args: fun(*args), policy)
        return digest(jax.make_jaxpr(jax.grad(anew, allow_int=True))(*args))


@pytest.mark.parametrize(("rule", "instead", "construct"), OFF)
def test_every_rule_is_needed(rule, instead, construct, monkeypatch):
    module, name = rule.split(".")
    planner = "mpjax._src.core.planner"
    known = [m for key, m in sys.modules.items() if key.startswith(planner)]
    given = getattr(sys.modules[f"{planner}.{module}"], name)
    before = gradient(construct)
    for place in known:
        if getattr(place, name, None) is given:
            monkeypatch.setattr(place, name, instead)
    assert gradient(construct) != before
    kept._kept.cache_clear()
