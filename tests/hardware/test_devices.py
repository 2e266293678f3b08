"""device_report, recommend_policy, and the warning about unfit policies."""

import json
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax._src.hardware import devices


def gpu(capability, kind="a card"):
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


TPU = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")


@pytest.mark.parametrize(
    ("device", "policy", "fast"),
    [
        (gpu("6.1"), "float32", ()),
        (gpu("7.0"), "mixed_float16", ("float16",)),
        (gpu("7.5"), "mixed_float16", ("float16",)),
        (gpu("8.0"), "mixed_bfloat16", ("bfloat16", "float16")),
        (gpu("12.1"), "mixed_bfloat16", ("bfloat16", "float16")),
        (gpu("gfx942"), "mixed_bfloat16", ("bfloat16", "float16")),
        (TPU, "mixed_bfloat16", ("bfloat16",)),
        ("V100", "mixed_float16", ("float16",)),
        ("NVIDIA H100", "mixed_bfloat16", ("bfloat16", "float16")),
        ("v5e", "mixed_bfloat16", ("bfloat16",)),
        ("TPU v6e", "mixed_bfloat16", ("bfloat16",)),
        ("k80", "float32", ()),
        ("Tesla M60", "float32", ()),
    ],
)
def test_what_a_device_runs_fast(device, policy, fast):
    assert mpjax.recommend_policy(device) == mpjax.get_policy(policy)
    assert devices.device_facts(device).fast == fast


def test_named_cards_agree_with_their_capability():
    for name, capability in devices.CARDS.items():
        assert mpjax.recommend_policy(name) == mpjax.recommend_policy(gpu(capability))
        assert devices.device_facts(name).capability == capability
        assert mpjax.half_dtype(name) == mpjax.half_dtype(gpu(capability))


@pytest.mark.parametrize(
    ("name", "half"), [("v100", "float16"), ("k80", "float16"), ("H100", "bfloat16")]
)
def test_half_of_a_device_by_name(name, half):
    assert str(mpjax.half_dtype(name)) == half
    assert str(mpjax.half_dtype("v5e")) == str(mpjax.half_dtype("cpu")) == "bfloat16"


@pytest.mark.parametrize("name", ["k40", "k80", "m40", "m60"])
def test_cards_before_half_say_why(name):
    reason = devices.device_facts(name).reason
    assert "compute capability" in reason and reason.endswith("tensor cores for no half dtype")


@pytest.mark.parametrize(
    ("flags", "policy"),
    [
        ({"avx2"}, "float32"),
        ({"avx512_bf16"}, "mixed_bfloat16"),
        ({"amx_fp16"}, "mixed_float16"),
        ({"amx_bf16", "avx512_fp16"}, "mixed_bfloat16"),
    ],
)
def test_a_cpu_is_judged_by_its_features(monkeypatch, flags, policy):
    monkeypatch.setattr(devices, "_cpu_flags", lambda: flags)
    assert str(mpjax.recommend_policy("cpu")) == policy
    assert str(mpjax.recommend_policy(jax.devices("cpu")[0])) == policy


def test_the_report_is_data_and_a_table():
    report = mpjax.device_report()
    assert len(report.devices) == len(jax.local_devices())
    assert json.loads(json.dumps(report.to_dict()))["jax_version"] == jax.__version__
    text = str(report)
    assert f"{len(report.devices)} x {report.devices[0].name}" in text
    assert report.devices[0].policy in text and report.devices[0].reason in text


def build(policy):
    return mpjax.build_train_step(lambda p, b: jnp.sum(p * b), optax.sgd(0.1), policy)


def test_8_bit_moments_are_warned_about_on_a_tpu(monkeypatch, recwarn):
    for device in (gpu("8.0"), TPU):
        monkeypatch.setattr(devices, "default_device", lambda device=device: device)
        devices.warn_if_unfit(mpjax.get_policy("O2:bfloat16,moments=8bit"), 1)
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
    monkeypatch.setattr(devices, "default_device", lambda: device)
    with pytest.warns(UserWarning, match=f"is no faster than float32.*{instead}") as caught:
        mpjax.build_train_step(lambda p, b: jnp.sum(p * b), optax.sgd(0.1), policy)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert device.device_kind in str(caught[0].message)


@pytest.mark.parametrize("device", [gpu("8.0"), TPU, jax.devices("cpu")[0]])
def test_a_fit_policy_is_not(monkeypatch, device):
    monkeypatch.setattr(devices, "default_device", lambda: device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build("mixed_bfloat16")
        build("float32")
        if device.platform == "cpu":
            build("mixed_float16")


def test_unknown_names():
    with pytest.raises(ValueError, match=r"device='h101' is not known. Did you mean 'h100'\?"):
        mpjax.recommend_policy("h101")
    with pytest.raises(ValueError, match=r"device='h101' is not known. Did you mean 'h100'\?"):
        mpjax.half_dtype("h101")


@pytest.mark.parametrize("ask", [mpjax.recommend_policy, mpjax.half_dtype])
@pytest.mark.parametrize("wrong", [object(), 3, jnp.float16, ("h100",)])
def test_what_is_no_device_is_named(ask, wrong):
    with pytest.raises(TypeError, match=r"device=.* must be a jax.Device, such as jax.devices"):
        ask(wrong)
