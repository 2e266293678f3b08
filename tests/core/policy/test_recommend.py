"""A warning of policies that are slow on the default device."""

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax._src.core.base import devices
from mpjax._src.core.policy import recommend


def gpu(capability, kind="a card"):
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")


def build(policy):
    return mpjax.build_train_step(lambda p, b: jnp.sum(p * b), optax.sgd(0.1), policy)


def test_8_bit_moments_are_warned_about_on_a_tpu(monkeypatch, recwarn):
    for device in (gpu("8.0"), TPU):
        monkeypatch.setattr(recommend, "default_device", lambda device=device: device)
        recommend.warn_if_unfit(mpjax.get_policy("O2:bfloat16,moments=8bit"))
    (caught,) = recwarn.list
    assert "on a TPU, moments=8bit" in str(caught.message) and caught.filename == __file__


@pytest.mark.parametrize(
    ("device", "policy", "instead"),
    [
        (gpu("7.0", "Tesla V100"), "mixed_bfloat16", "mixed_float16"),
        (gpu("6.0", "Tesla P100"), "O2:float16", "float32"),
        (TPU, "mixed_float16", "mixed_bfloat16"),
        (TPU, 'mixed_bfloat16,overrides={"x":"f16"}', "mixed_bfloat16"),
    ],
)
def test_an_unfit_policy_is_warned_about_once(monkeypatch, device, policy, instead):
    monkeypatch.setattr(recommend, "default_device", lambda: device)
    with pytest.warns(UserWarning, match=f"is no faster than float32.*{instead}") as caught:
        mpjax.build_train_step(lambda p, b: jnp.sum(p * b), optax.sgd(0.1), policy)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert device.device_kind in str(caught[0].message)


@pytest.mark.parametrize("device", [gpu("8.0"), TPU, jax.devices("cpu")[0]])
def test_fit_policy_is_not_warned_about(monkeypatch, device):
    monkeypatch.setattr(recommend, "default_device", lambda: device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build("mixed_bfloat16")
        build("float32")


@pytest.mark.parametrize("flags", [(), ("amx_bf16",)])
def test_no_policy_is_warned_about_on_a_cpu_where_people_test(monkeypatch, flags):
    monkeypatch.setattr(devices._jax, "cpu_flags", lambda: frozenset(flags))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for half in ("bfloat16", "float16"):
            recommend.warn_if_unfit(mpjax.get_policy(f"mixed_{half}"))
