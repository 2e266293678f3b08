"""The suite on matmuls with odd axes: what is recorded, and its table."""

import json

import pytest

from benchmarks import RESULTS, padding
from benchmarks.padding import LEFT, PADDED
from benchmarks.page import padding as page

RECORDED = json.loads((RESULTS / "padding.json").read_text())["cases"]


# Matmuls with fewer than 200 FLOPs for each byte that padding would add: 27 x 27 products of
# features, and pairs of 132 channels.
BOUND_BY_MEMORY = ("dlrm", "pairformer")


@pytest.mark.parametrize("case", RECORDED)
def test_padding_leaves_no_time_in_matmuls_with_an_odd_axis(case):
    padded, left = RECORDED[case][PADDED], RECORDED[case][LEFT]
    if case.partition(",")[0] not in BOUND_BY_MEMORY:
        assert padded["odd_ms"] <= 0.03 * padded["expected_ms"]
    assert padded["temp_mib"] <= 1.005 * left["temp_mib"]


@pytest.mark.parametrize("case", RECORDED)
def test_padding_adds_bytes_only_where_that_pays(case):
    """A bias behind the odd axis takes one more pass over the logits, in BERT's head."""
    padded, left = RECORDED[case][PADDED], RECORDED[case][LEFT]
    bytes_, time = (padded[key] / left[key] for key in ("looped_gb", "expected_ms"))
    assert time <= 1.005
    assert bytes_ <= 1.005 or (bytes_ <= 1.04 and time <= 0.95)


def test_every_model_of_the_aot_suite_is_recorded():
    assert {case.partition(",")[0] for case in RECORDED} == set(padding.CASES)


def test_table_shows_what_is_left_and_the_ratios():
    row = {"odd": {}, "kernels": 10, "temp_mib": 5.0, "looped_gb": 2.0, "triton": True}
    row |= {"odd_ms": 0.0, "expected_ms": 8.0}
    stored = {
        "cases": {
            "gpt2": {
                PADDED: row,
                LEFT: {**row, "odd": {"50257": 3}, "odd_ms": 2.0, "looped_gb": 4.0},
            },
            "vit, fused attention": {
                PADDED: {**row, "triton": False},
                LEFT: {**row, "triton": False},
            },
            "swin": {PADDED: {"failed": "CompileError: no"}},
        }
    }
    text = page.section(stored, {})
    assert "| GPT-2 124M | 50257 | 3 → 0 | 25% → 0% | 1.00x | 1.00x | 0.50x | 1.00x |" in text
    assert "| ViT-B/16, fused attention, cuBLAS | none | 0 → 0 |" in text
    assert "| Swin-T | CompileError: no | - |" in text
