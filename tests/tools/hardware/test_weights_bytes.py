"""The bytes that an optimizer keeps and moves for each weight, compiled for an H100."""

import functools

import jax
import pytest
from absent import compiles

from benchmarks import weights
from mpjax._src.optim.codes import BLOCK

pytestmark = [pytest.mark.thorough, compiles("h100")]

LAYERS = {"layers": 2}  # of GPT-2 355M


@functools.cache
def figures(name):
    return weights.update(name, LAYERS)


def scales_mib():
    """Returns what an update of two 8-bit moments needs beside them.

    A block's scale is known when all of the block is. So the scales of all blocks, of one byte,
    exist twice until the new codes are written, and the maxima of a parameter's blocks, in float32,
    until its scales are.
    """
    _, params, *_ = weights.model(LAYERS)()
    blocks = [-(-x.size // BLOCK) for x in jax.tree.leaves(params)]
    return 2 * (sum(blocks) + 4 * max(blocks)) / 2**20


@pytest.mark.parametrize("name", [name for name in weights.KEPT if name != "masters"])
def test_optimizer_moves_no_more_bytes_a_weight_than_adamw(name):
    adamw = figures(weights.REFERENCE)
    assert figures(name)["moved_per_weight"] <= 1.02 * adamw["moved_per_weight"]
    scales = scales_mib() if "8-bit" in name else 0
    assert figures(name)["temp_mib"] <= adamw["temp_mib"] + scales + 1


def test_split_masters_take_no_more_bytes_than_float32_weights():
    assert figures("split masters")["kept_per_weight"] == pytest.approx(12, abs=0.01)


@pytest.mark.parametrize(
    "name, most",
    [
        ("split masters, 8-bit moments", 6.1),
        ("split8 masters, 8-bit moments", 5.1),
    ],
)
def test_eight_bit_moments_keep_less_than_half_the_bytes_of_masters(name, most):
    assert figures(name)["kept_per_weight"] <= most
    assert figures(name)["kept_per_weight"] <= 0.44 * figures("masters")["kept_per_weight"]
