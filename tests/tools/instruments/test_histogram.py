"""gradient_histogram, recommend_loss_scale and their picture."""

import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpjax
from mpjax._src.core.base.dtypes import limits_of
from mpjax._src.tools.instruments.histogram import BINS, EXPONENTS


def reference(values):
    """Counts by NumPy in float64."""
    values = np.abs(np.asarray(values, np.float64)).ravel()
    finite = values[np.isfinite(values) & (values > 0)]
    exponents = np.floor(np.log2(finite)).astype(int)
    inside = [np.sum(exponents == e) for e in EXPONENTS]
    return np.array([np.sum(values == 0), *inside, np.sum(~np.isfinite(values))])


@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_gradient_histogram_counts_every_float_in_its_bin(values):
    values = np.resize(np.array(values, np.float32), 40)  # of one shape: compiled once
    # log2 in float64 rounds up just below a power of two.
    values = np.where(np.abs(np.frexp(values)[0]) > 1 - 2e-7, np.float32(1), values)
    histogram = mpjax.debug.gradient_histogram(values)
    assert (histogram.numbers()[0] == reference(values)).all()


@pytest.mark.parametrize(("dtype", "half"), [("float16", np.float16), ("bf16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("power", [-30, 0, 10, 24])
def test_gradient_histogram_shares_equal_those_of_a_cast(dtype, half, power, rng):
    center = -20 if dtype == "float16" else -130
    exact = rng.normal(size=20000) * 2.0 ** rng.uniform(center - 15, center + 25, 20000)
    values = exact.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        scaled = values.astype(np.float64) * 2.0**power
        cast = scaled.astype(half).astype(np.float64)
    row = mpjax.debug.gradient_histogram({"w": values}).rows(dtype, 2.0**power)[0]
    flushed = np.mean((cast == 0) & (values != 0))
    # Of float32's own subnormals many lie exactly between zero and bfloat16's least.
    assert abs(row.flushed - flushed) <= (0 if dtype == "float16" else 2e-3)
    assert abs(row.overflowed - np.mean(np.isinf(cast))) < 1e-3  # just below 2**16 rounds up too
    assert row.entries == 20000


def test_gradient_histogram_accumulates_in_a_scan_beyond_32_bits():
    grads = {"w": jnp.array([1.0, 0.0, 2.0**-30]), "n": jnp.arange(3)}
    histogram = mpjax.debug.gradient_histogram(grads)
    assert histogram.paths == ("w",) and histogram.sizes == (3,)

    @jax.jit
    def run(histogram):
        return jax.lax.scan(
            lambda h, _: (mpjax.debug.gradient_histogram(grads, h), None), histogram, None, length=9
        )[0]

    total = run(histogram)
    assert (total.numbers() == 10 * histogram.numbers()).all()
    near = total.counts.at[0].set(jnp.uint32(2**32 - 1))
    over = run(mpjax.reports.GradientHistogram(near, total.paths, total.sizes))
    assert (over.numbers() == 2**32 - 1 + 9 * histogram.numbers()).all()


def test_gradient_histogram_of_bfloat16_gives_ranges_text_and_json():
    grads = {"a": jnp.array([2.0**-130, 3e38, -jnp.inf, jnp.nan], jnp.bfloat16), "b": jnp.zeros(4)}
    histogram = mpjax.debug.gradient_histogram(grads)
    a, b, whole = histogram.rows("bfloat16")
    assert (a.smallest, a.largest, a.nonfinite) == (-130, 127, 0.5)
    assert b.smallest is b.median is None and b.zeros == 1.0
    assert whole.path == "all" and whole.entries == 8
    text = str(histogram)
    assert "\nparameter   min  median" in text and "12.50%" in text
    found = json.loads(json.dumps(histogram.to_dict()))
    assert found["log2"] == {"a": {"-130": 1, "127": 1}, "b": {}}
    jax.eval_shape(lambda h: (str(h), h)[1], histogram)  # printing waits for nothing


def test_recommend_loss_scale_gives_the_largest_safe_scale(rng):
    values = jnp.asarray(rng.normal(size=5000) * 2.0 ** rng.uniform(-40, -8, 5000), jnp.float32)
    histogram = mpjax.debug.gradient_histogram(values)
    advice = mpjax.debug.recommend_loss_scale(histogram, headroom=1)
    scaled = np.asarray(values, np.float64) * advice.loss_scale
    assert np.isfinite(scaled.astype(np.float16)).all()
    assert np.max(np.abs(scaled)) * 2 >= 2**16  # twice as large would not be safe
    assert advice.flushed_with == np.mean(scaled.astype(np.float16) == 0) < advice.flushed_without
    roomy = mpjax.debug.recommend_loss_scale(histogram, headroom=16)
    assert roomy.loss_scale == advice.loss_scale / 16
    assert str(roomy).startswith("loss scale 2^") and "overflows at 2^16" in str(roomy)


@pytest.mark.parametrize("half", [np.float16, ml_dtypes.bfloat16])
def test_limits_of_gives_the_power_that_overflows(half):
    largest = 2.0 ** (limits_of(half).overflow - 1)
    with np.errstate(over="ignore"):
        assert np.isfinite(np.float64(largest).astype(half))
        assert np.isinf(np.float64(2 * largest).astype(half))


def test_gradient_histogram_median_of_three_is_the_second():
    row = mpjax.debug.gradient_histogram(np.float32([2.0**-3, 2.0**5, 2.0**4])).rows()[0]
    assert (row.smallest, row.median, row.largest) == (-3, 4, 5)


def test_gradient_histogram_gives_a_known_underflow_share():
    # A standard normal has 2 * (Phi(2**-9) - 1/2) of its mass below 2**-9.
    values = jax.random.normal(jax.random.key(0), (2**18,)) * 2.0**-16
    row = mpjax.debug.gradient_histogram(values).rows()[0]
    expected = jax.scipy.special.erf(2.0**-9 / np.sqrt(2))
    assert abs(row.flushed - expected) < 5 * np.sqrt(expected / 2**18)


def test_recommend_loss_scale_of_a_large_gradient_is_small():
    advice = mpjax.debug.recommend_loss_scale(
        mpjax.debug.gradient_histogram(jnp.array([2.0**20])), headroom=1
    )
    assert advice.loss_scale == 2.0**-5
    fine = mpjax.debug.recommend_loss_scale(
        mpjax.debug.gradient_histogram(jnp.array([1.0, jnp.inf]))
    )
    assert any("1 would be enough" in r for r in fine.reasons) and any(
        "Inf" in r for r in fine.reasons
    )


def advice_of(*values, dtype=np.float32):
    histogram = mpjax.debug.gradient_histogram({"w": np.asarray(values, dtype)})
    return str(mpjax.debug.recommend_loss_scale(histogram))


def test_recommend_loss_scale_does_not_call_flushed_gradients_kept():
    assert "No gradient is lost" in advice_of(1.0, 0.5)
    lost = advice_of(*np.float16([1.0, 1e-9, 1e-10]))  # in float32, but flushed before
    assert "No gradient is lost" not in lost and "66.67% of the entries are zero already" in lost
    assert "would be enough" not in advice_of(1.0, 2.0**-16)  # subnormal: not all of its digits
    for dtype in (np.float32, np.float64, ml_dtypes.bfloat16):
        assert "came in float16" not in advice_of(1.0, 0.5, dtype=dtype)
    assert "w came in float16" in advice_of(1.0, 0.5, dtype=np.float16)
    with pytest.raises(ValueError, match="All are zero. If they were computed in float16"):
        advice_of(0.0, 0.0)


def test_gradient_histogram_carries_its_first_dtypes_through_a_loop():
    grads = jnp.ones(3, jnp.float16)
    first = mpjax.debug.gradient_histogram(grads)
    count = lambda h, _: (mpjax.debug.gradient_histogram(grads.astype("float32"), h), None)  # noqa: E731
    (last, _) = jax.lax.scan(count, first, None, 2)
    assert last.narrow and last.numbers().sum() == 9


def test_gradient_histogram_plots_each_parameter(tmp_path, rng):
    grads = {"a": rng.normal(size=500) * 2.0**-20, "b": {"c": rng.normal(size=500) * 2.0**-12}}
    histogram = mpjax.debug.gradient_histogram(grads)
    figure = histogram.plot(tmp_path / "h.png", scale=2.0**4)
    assert (tmp_path / "h.png").read_bytes()[:4] == b"\x89PNG"
    top, below, _ = figure.axes
    assert sum(bar.get_height() for bar in top.patches[: len(top.containers[0])]) == pytest.approx(
        1
    )
    assert [t.get_text() for t in below.get_yticklabels()] == ["a", "b/c"]
    assert "2^4" in top.get_title()


def test_gradient_histogram_refuses_bad_arguments(monkeypatch):
    histogram = mpjax.debug.gradient_histogram(jnp.zeros(3))
    for grads in ({}, {"n": jnp.arange(3)}, None):
        with pytest.raises(ValueError, match=r"grads=.* has no floating array leaf"):
            mpjax.debug.gradient_histogram(grads)
    with pytest.raises(ValueError, match="histogram belongs to other parameters"):
        mpjax.debug.gradient_histogram({"w": jnp.zeros(3)}, histogram)
    for scale in (3.0, 0, -2.0, float("inf"), "2", None):
        with pytest.raises(ValueError, match=r"scale=.* must be a power of two"):
            histogram.rows(scale=scale)
    with pytest.raises(ValueError, match="dtype='float32' must be 'float16' or 'bfloat16'"):
        histogram.rows("float32")
    with pytest.raises(ValueError, match="no finite nonzero gradient"):
        mpjax.debug.recommend_loss_scale(histogram)
    with pytest.raises(ValueError, match="nothing to plot"):
        histogram.plot()
    with pytest.raises(ValueError, match="headroom=0 must be"):
        mpjax.debug.recommend_loss_scale(histogram, headroom=0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"mpjax\[plot\]"):
        histogram.plot()


def test_gradient_histogram_has_counts_of_all_bins():
    assert mpjax.debug.gradient_histogram(jnp.ones(2)).counts.shape == (2, 1, BINS)
