"""The suite on matmuls with odd axes: what is recorded, and its table."""

import json

import pytest

from benchmarks import RESULTS, padding
from benchmarks.padding import LEFT, PADDED
from benchmarks.page import padding as page

RECORDED = json.loads((RESULTS / "padding.json").read_text())["cases"]
# A bias behind the odd axis: its gradient takes one more pass over the logits.
BIASED = ("bert_mlm", "bert_mlm, fused attention")


@pytest.mark.parametrize("case", RECORDED)
def test_no_large_matmul_with_an_odd_axis_is_left(case):
    padded, left = RECORDED[case][PADDED], RECORDED[case][LEFT]
    assert padded["odd"] == {}
    assert padded["expected_ms"] <= left["expected_ms"] * 1.002
    if case not in BIASED:
        assert padded["looped_gb"] <= left["looped_gb"] * 1.005
        assert padded["temp_mib"] <= left["temp_mib"] * 1.005


def test_every_model_of_the_aot_suite_is_recorded():
    assert {case.partition(",")[0] for case in RECORDED} == set(padding.CASES)


def test_table_shows_what_is_left_and_the_ratios():
    row = {"odd": {}, "kernels": 10, "temp_mib": 5.0, "looped_gb": 2.0, "triton": True}
    stored = {
        "cases": {
            "gpt2": {PADDED: row, LEFT: {**row, "odd": {"50257": 3}, "looped_gb": 4.0}},
            "vit, fused attention": {
                PADDED: {**row, "triton": False},
                LEFT: {**row, "triton": False},
            },
            "swin": {PADDED: {"failed": "CompileError: no"}},
        }
    }
    text = page.section(stored, {})
    assert "| GPT-2 124M | 50257 | 3 → 0 | 1.00x | 1.00x | 0.50x |" in text
    assert "| ViT-B/16, fused attention, cuBLAS | none | 0 → 0 |" in text
    assert "| Swin-T | CompileError: no | - |" in text
