"""Whole loops in plain JAX, run unchanged: the losses of the loop with the lines changed."""

import sys
from pathlib import Path

import plain_loops
import pytest

import mpjax.scripts

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

import expected  # noqa: E402

BF16 = "mixed_bfloat16"
AUTOCAST = mpjax.autocast
NAMES = sorted(
    path.stem
    for path in EXAMPLES.glob("*.py")
    if path.stem not in ("common", "expected", "demo", "multihost", "byte_gpt", "digits_cnn")
)
QUICK = {"recommender"}


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.thorough) for n in NAMES]
)
def test_a_loop_that_is_run_unchanged_has_the_losses_of_autocast(name, monkeypatch):
    def run(a):
        with monkeypatch.context() as patch:
            plain_loops.install(patch, a)
            result = expected.run(name, "float32", "smoke", 3)
        return result["curves"], result["figures"]

    with mpjax.scripts.autocast_gradients(BF16, tell=False) as report:
        unchanged = run(lambda fun: fun)
    assert report.rows and all(row.planned for row in report.rows), report
    assert report.half_flops > 0.5, report
    assert unchanged == run(lambda fun: AUTOCAST(fun, BF16))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["ctc", "gan", "recommender", "vit"])
def test_a_loop_under_float32_has_the_losses_that_it_has_alone(name, monkeypatch):
    plain_loops.install(monkeypatch, lambda fun: fun)
    plain = expected.run(name, "float32", "smoke", 3)
    with mpjax.scripts.autocast_gradients("float32", tell=False) as report:
        same = expected.run(name, "float32", "smoke", 3)
    assert (same["curves"], same["figures"]) == (plain["curves"], plain["figures"])
    assert report.rows and not any(row.planned for row in report.rows)
