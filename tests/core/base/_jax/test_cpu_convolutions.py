"""Convolutions that XLA:CPU is asked for as matmuls are the convolutions that were asked for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import normal, thorough_but

import mpjax
from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import cpu_matmuls

BFLOAT16 = np.dtype(jnp.bfloat16)
IMAGES = ("NHWC", "HWIO", "NHWC")
SAME = ((1, 1), (1, 1))


@pytest.fixture(autouse=True)
def capable(monkeypatch):
    """As on a CPU with bfloat16 instructions, and without a minimum of features."""
    monkeypatch.setattr(cpu_matmuls, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    monkeypatch.setattr(cpu_matmuls, "USES_OF_A_SUM", 1)
    monkeypatch.setattr(cpu_matmuls, "USES_OF_A_STACK", 1)


def convolution(mark=True, strides=(1, 1), padding=SAME, numbers=IMAGES, **params):
    def run(x, kernel):
        more = {"dimension_numbers": numbers, **params}
        if not mark:
            return lax.conv_general_dilated(x, kernel, strides, padding, **more)
        with _jax.marked():
            return lax.conv_general_dilated(x, kernel, strides, padding, **more)

    return run


def arrays(*shapes):
    return [jnp.asarray(normal(i, *shape), BFLOAT16) for i, shape in enumerate(shapes)]


def counted(fun, *args):
    text = jax.jit(fun).lower(*args).as_text()
    return len(re.findall(r"stablehlo\.dot_general", text)), text.count("stablehlo.convolution")


def both(fun):
    def run(x, kernel, ct):
        out, pull = jax.vjp(fun, x, kernel)
        return out, *pull(ct.astype(out.dtype))

    return jax.jit(run)


CASES = {
    "as in a residual network": ((2, 8, 8, 16), (3, 3, 16, 24), {}),
    "one position": ((2, 8, 8, 16), (1, 1, 16, 24), {"padding": "VALID"}),
    "strides": ((2, 9, 8, 16), (3, 2, 16, 24), {"strides": (2, 3), "padding": "SAME"}),
    "dilation": ((2, 9, 8, 16), (3, 2, 16, 8), {"rhs_dilation": (2, 1)}),
    "negative padding": ((2, 9, 8, 16), (3, 3, 16, 8), {"padding": ((-1, 0), (2, -1))}),
    "other orders": ((16, 2, 8, 9), (24, 3, 3, 16), {"numbers": ("CNHW", "OHWI", "HNCW")}),
    "in one dimension": (
        (2, 16, 12),
        (5, 16, 24),
        {"numbers": ("NCW", "WIO", "NWC"), "strides": (1,), "padding": ((2, 2),)},
    ),
}


QUICK = ("as in a residual network", "strides", "negative padding", "other orders")


@pytest.mark.parametrize("case", thorough_but([*CASES], *QUICK))
def test_convolutions_as_matmuls_match_float32_values_and_gradients(case):
    x_shape, kernel_shape, params = CASES[case]
    x, kernel = arrays(x_shape, kernel_shape)
    ours, theirs = convolution(**params), convolution(mark=False, **params)
    out = jax.eval_shape(ours, x, kernel)
    ct = normal(2, *out.shape)
    got = both(ours)(x, kernel, jnp.asarray(ct, BFLOAT16))
    want = both(theirs)(x.astype("f4"), kernel.astype("f4"), jnp.asarray(ct, BFLOAT16).astype("f4"))
    for a, b in zip(got, want, strict=True):
        assert np.linalg.norm(a.astype("f4") - b) < 2**-8 * np.linalg.norm(b)
    assert counted(ours, x, kernel)[1] == 0


def test_convolution_writes_out_the_smaller_window():
    x, kernel = arrays((2, 8, 8, 16), (3, 3, 16, 24))
    ct = jnp.ones((2, 8, 8, 24), BFLOAT16)
    assert counted(convolution(), x, kernel) == (9, 0)
    assert counted(both(convolution()), x, kernel, ct) == (27, 0)
    assert counted(convolution(padding="VALID"), x[:, :3, :3], kernel) == (1, 0)


@pytest.mark.parametrize(
    ("params", "shape"),
    [
        ({"feature_group_count": 2}, (3, 3, 8, 24)),
        ({"batch_group_count": 2}, (3, 3, 16, 24)),
        ({"lhs_dilation": (2, 1)}, (3, 3, 16, 24)),
        ({"padding": ((5, 5), (5, 5))}, (9, 9, 16, 24)),  # too many positions
    ],
)
def test_other_convolutions_are_lowered_by_jax(params, shape):
    x, kernel = arrays((2, 8, 8, 16), shape)
    assert counted(convolution(**params), x, kernel) == (0, 1)


def test_unmarked_or_float32_convolution_is_lowered_by_jax(monkeypatch):
    x, kernel = arrays((2, 8, 8, 16), (3, 3, 16, 24))
    assert counted(convolution(mark=False), x, kernel) == (0, 1)
    assert counted(convolution(), x.astype("f4"), kernel.astype("f4")) == (0, 1)
    monkeypatch.setattr(cpu_matmuls, "cpu_flags", frozenset)
    assert counted(convolution(), x, kernel) == (0, 1)


def test_convolution_over_devices_is_lowered_by_jax():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    x, kernel = arrays((4, 8, 8, 16), (3, 3, 16, 24))
    shared = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    kernel = jax.device_put(kernel, NamedSharding(mesh, PartitionSpec()))
    assert counted(convolution(), shared, kernel) == (0, 1)
    specs = PartitionSpec("data"), PartitionSpec()
    local = jax.shard_map(convolution(), mesh=mesh, in_specs=specs, out_specs=specs[0])
    assert counted(local, shared, kernel) == (9, 0)


def test_convolution_of_few_features_is_lowered_by_jax(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(cpu_matmuls, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    for features, found in (
        (cpu_matmuls.USES_OF_A_SUM - 1, (0, 1)),
        (cpu_matmuls.USES_OF_A_SUM, (9, 0)),
    ):
        assert counted(convolution(), *arrays((2, 8, 8, 4), (3, 3, 4, features))) == found
    assert counted(convolution(padding="VALID"), *arrays((2, 8, 8, 4), (1, 1, 4, 8))) == (1, 0)


def test_autocast_marks_convolutions_forward_and_backward():
    def loss(kernel, x):
        return jnp.sum(jnp.tanh(convolution(mark=False)(x, kernel)) ** 2)

    x, kernel = normal(0, 2, 8, 8, 16), normal(1, 3, 3, 16, 24, scale=0.05)
    grad = jax.grad(mpjax.autocast(loss, "mixed_bfloat16"), (0, 1))
    assert counted(grad, kernel, x) == (27, 0)
    for a, b in zip(grad(kernel, x), jax.grad(loss, (0, 1))(kernel, x), strict=True):
        assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(b)
