"""numpyro's SVI, which takes the gradient itself."""

import warnings

import jax
import numpy as np
import pages
import pytest
from support import matmul_dtypes

import mpjax

numpyro = pytest.importorskip("numpyro")
PAGE = pages.ROOT / "docs" / "libraries.md"


@pytest.mark.thorough
@pytest.mark.parametrize("half, scale", [("float16", "2.0**8"), ("bfloat16", "1")])
def test_numpyro_recipe_learns_in_16_bits(half, scale):
    changes = {"SCALE = 2.0**8": f"SCALE = {scale}", '"mixed_float16"': f'"mixed_{half}"'}
    with warnings.catch_warnings():
        warnings.simplefilter("error", mpjax.errors.PrecisionWarning)
        found = pages.run(PAGE, ("numpyro",), changes)
    svi, x = found["svi"], np.ones((8, 4), np.float32)
    state = svi.init(jax.random.key(0), x, x[:, 0])
    dtypes = matmul_dtypes(lambda state: svi.update(state, x, x[:, 0]), state)
    assert dtypes and set().union(*dtypes) == {half}


@pytest.mark.thorough
@pytest.mark.usefixtures("nothing_called")
def test_numpyro_recipe_without_autocast_is_warned_of():
    plain = {'mpjax.autocast(super().loss, "mixed_float16")': "super().loss"}
    with pytest.warns(mpjax.errors.PrecisionWarning, match="value_and_grad"):
        pages.run(PAGE, ("numpyro",), plain)
