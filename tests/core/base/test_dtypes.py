from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax._src.core.base.dtypes import (
    BY_NAME,
    canonical,
    half_of,
    is_float,
    is_half,
    is_narrow,
    limits_of,
    short_name,
    shown,
)


@pytest.mark.parametrize("name", [*BY_NAME, "F16", " bf16 "])
def test_canonical_understands_every_spelling_of_a_dtype(name):
    assert canonical(name, "dtype") is BY_NAME[name.strip().lower()]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, np.float32, jnp.dtype("float64")])
def test_scalar_types_and_dtypes_become_np_dtypes(dtype):
    found = canonical(dtype, "dtype")
    assert isinstance(found, np.dtype) and found == dtype
    assert canonical(short_name(found), "dtype") == found


@pytest.mark.parametrize("wrong", ["float61", "int32", jnp.int8, None, 3, object(), "", bool])
def test_canonical_refuses_other_dtypes_with_what_is_legal(wrong):
    with pytest.raises(ValueError, match="param_dtype=.*Choose one of 'float16', 'bfloat16'"):
        canonical(wrong, "param_dtype")


def test_canonical_suggests_the_dtype_of_a_near_miss():
    with pytest.raises(ValueError, match=r"Did you mean 'bfloat16'\?"):
        canonical("bfloat61", "dtype")


@pytest.mark.parametrize(
    ("capability", "half"),
    [
        ("7.0", "float16"),
        ("7.5", "float16"),
        ("8.0", "bfloat16"),
        ("9.0", "bfloat16"),
        ("10.0", "bfloat16"),
        ("12.1", "bfloat16"),
        ("gfx90a", "bfloat16"),
        ("3.7", "float16"),
        ("", "bfloat16"),
    ],
)
def test_half_is_what_the_device_is_best_at(capability, half):
    assert half_of(capability) == half
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    assert mpjax.hardware.half_dtype(device) == half


def test_half_dtype_is_that_of_the_default_device():
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        assert mpjax.hardware.half_dtype() == mpjax.hardware.half_dtype(cpu) == jnp.bfloat16


@pytest.mark.parametrize(
    ("dtype", "answers"),
    [
        ("float16", (True, True, True)),
        ("bfloat16", (True, True, True)),
        ("float8_e5m2", (False, True, True)),
        ("float32", (False, False, True)),
        ("float64", (False, False, True)),
        ("complex64", (False, False, False)),
        ("int8", (False, False, False)),
    ],
)
def test_is_half_is_narrow_and_is_float_go_by_the_dtype(dtype, answers):
    shape = jax.core.ShapedArray((2,), jnp.dtype(dtype))
    variable = SimpleNamespace(aval=shape)  # as those of a jaxpr
    for x in (np.zeros(2, jnp.dtype(dtype)), shape, variable):
        assert (is_half(x), is_narrow(x), is_float(x)) == answers
        assert shown(x) == f"{short_name(shape.dtype)}[2]"


def test_is_float_is_false_for_what_has_no_dtype():
    for x in (None, 1.0, "f16", SimpleNamespace(aval=None)):
        assert not (is_half(x) or is_narrow(x) or is_float(x))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_limits_are_those_of_casts(dtype):
    limits, kind = limits_of(jnp.dtype(dtype)), jnp.dtype(dtype)

    def cast(power, factor=1.0):
        with np.errstate(over="ignore"):
            return float((np.float64(factor) * np.float64(2.0) ** power).astype(kind))

    assert cast(limits.flush) == 0 < cast(limits.flush, 1.01)
    assert cast(limits.overflow) == np.inf > cast(limits.overflow - 1)
    assert cast(0, 1 + 2.0 ** (1 - limits.digits)) > 1 == cast(0, 1 + 2.0**-limits.digits)
    assert cast(limits.normal) == float(jnp.finfo(kind).smallest_normal)
