"""Padding of matmuls with odd axes, in steps that are compiled for an absent H100.

The suite `benchmarks.padding` has whole models; these have one layer of real sizes.
"""

import pytest
from absent import compiles

from benchmarks import padding

pytestmark = [pytest.mark.thorough, compiles("h100")]


def ratios(model, way="autocast", **sizes):
    """Returns the steps with and without padding, and the ratio of bytes and of memory."""
    (padded, _), (odd, _) = (padding.figures(model, way, on, sizes) for on in (True, False))
    keys = ("bytes_gb", "looped_gb", "temp_mib")
    return padded, odd, [padded[key] / odd[key] for key in keys]


@pytest.mark.parametrize("way", ["autocast", padding.FUSED, "autocast, chunked loss"])
def test_head_of_an_odd_vocabulary_is_padded_in_place(way):
    """The zeros are written with the operands, and no kernel copies the logits without them."""
    padded, odd, more = ratios("gpt2", way, layers=1)
    assert not padded["odd"]
    # The blocks of a chunked loss are aligned as they are.
    assert odd["odd"] == ({} if "chunked" in way else {"50257": 3})
    assert padded["kernels"] == odd["kernels"]
    assert max(more) < 1.005


def test_tokens_of_an_image_are_padded():
    """Without a device XLA finds no tiles for 196 tokens, takes cuBLAS, and pads as well."""
    padded, _, more = ratios("vit", layers=1, batch=128)
    assert not padded["odd"] and max(more) < 1.02


def test_a_bias_behind_a_padded_axis_costs_one_more_pass_over_the_logits():
    padded, odd, _ = ratios("bert_mlm", layers=1)
    assert odd["odd"] == {"30522": 3} and not padded["odd"]
    logits = 16 * 512 * 30522 * 4 / 1e9
    assert padded["looped_gb"] - odd["looped_gb"] < 1.05 * logits
    assert padded["expected_ms"] < odd["expected_ms"]


def test_windows_whose_padding_would_add_more_bytes_than_it_saves_time_are_left_alone():
    padded, odd, more = ratios("swin", blocks=(2,), heads=(3,))
    assert padded == {**odd, "seconds": padded["seconds"]} and max(more) == 1
