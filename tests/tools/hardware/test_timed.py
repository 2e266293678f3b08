"""The time of a short matmul is that of the form in which autocast's matmuls run."""

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._src.core.base._jax import cpu_matmuls
from mpjax._src.tools.hardware import devices

BFLOAT16 = np.dtype(jnp.bfloat16)


def test_timed_matmul_has_the_form_of_autocasts(monkeypatch):
    monkeypatch.setattr(cpu_matmuls, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    x = jnp.ones((16, 16), BFLOAT16)
    traced = devices.jax.jit(devices._multiply).trace(x, x)
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "(tensor<16x16xbf16>, tensor<16x16xbf16>) -> tensor<16x16xf32>" in text
    assert traced.out_info.dtype == BFLOAT16


def test_matmul_time_is_the_median_of_pairs(monkeypatch):
    monkeypatch.setattr(devices, "matmul_size", lambda: 8)
    took = {"float32": [2.0, 1.0, 1.0, 1.0, 1.0], "bfloat16": [1.0, 3.0, 9.0, 0.5, 2.0]}
    monkeypatch.setattr(devices, "_seconds", lambda run, x: took[x.dtype.name].pop(0))
    assert devices.matmul_time(BFLOAT16, 0.0) == 2.0
    assert took == {"float32": [], "bfloat16": []}


@pytest.mark.parametrize(("backend", "size"), [("cpu", 512), ("gpu", 4096)])
def test_matmul_size_depends_on_the_backend(monkeypatch, backend, size):
    monkeypatch.setattr(devices.jax, "default_backend", lambda: backend)
    assert devices.matmul_size() == size
