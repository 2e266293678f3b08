"""The suite "weights": what it measures, and the table that is made of it."""

import jax
import pytest
from support import thorough_but

from benchmarks import Options, weights
from benchmarks.page.weights import section
from benchmarks.results import Results


@pytest.mark.thorough
def test_weights_suite_measures_every_way_and_runs_on_a_small_model(tmp_path):
    names = [(case, name) for case, name, _ in weights.todo(Options(cases=weights.CASES))]
    assert len(set(names)) == len(names) and {case for case, _ in names} == {*weights.CASES}
    assert {*weights.TRAINED, *weights.WHOLE} <= {*weights.KEPT}
    results = Results.open(tmp_path / "weights.json", smoke=True)
    (row, *_) = [
        measure
        for _, name, measure in weights.todo(Options(cases=("quality",), smoke=True))
        if name.startswith("bert")
    ]
    results.put("quality", "bert, float32, seed 0", row())
    assert results.get("quality", "bert, float32, seed 0")["held_out"] > 0


NAMES = [weights.REFERENCE, *weights.KEPT]


@pytest.mark.parametrize("name", thorough_but(NAMES, *range(0, len(NAMES), 3)))
def test_weights_keep_as_many_bytes_as_the_page_says(name):
    """Bytes a weight of GPT-2 355M with one layer, from shapes alone."""
    _, params, *_ = weights.model({"layers": 1})()
    stored, init, advance = weights.optimizer_of(name, params)
    state = jax.eval_shape(init, stored)
    count = sum(x.size for x in jax.tree.leaves(params))
    per_weight = 2 if "bfloat16" in name or "masters" in name else 4  # the parameter itself
    per_weight += {"split8 masters": 1, "masters": 4}.get(name.split(",")[0], 0)
    per_weight += 2 if "Kahan" in name or name.split(",")[0] == "split masters" else 0
    per_weight += 2 if "8-bit" in name else 8
    assert weights.held((stored, state)) / count == pytest.approx(per_weight, abs=0.1)
    new = jax.eval_shape(advance, stored, state, jax.tree.map(lambda p: p, params))
    described = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)  # noqa: E731
    assert described(new) == described((stored, state))


def test_weights_section_has_a_row_for_each_way():
    quality = {
        f"bert, {name}, seed {s}": {"held_out": value + s / 10}
        for s in range(3)
        for name, value in (("float32", 3.0), ("split masters", 3.05), ("bfloat16 alone", 3.2))
    }
    update = {
        weights.REFERENCE: {"kept_per_weight": 12.0, "moved_per_weight": 28.0},
        "split masters": {"kept_per_weight": 12.0, "moved_per_weight": 14.0},
    }
    text = section({"cases": {"quality": quality, "update": update}}, {})
    assert "| bert (3.000 to 3.200) |" in text
    split = "| split masters | `O2:bfloat16,masters=split` | 12.00 | 0.50x | - | 3.150 |"
    assert split in text
    assert "| bfloat16 alone | `O3:bfloat16` | - | - | - | **3.300** |" in text
