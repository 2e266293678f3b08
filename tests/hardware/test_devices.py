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
        ((), "float32"),  # XLA has no kernels for a CPU's float16
        ({"avx512_bf16"}, "mixed_bfloat16"),
        ({"amx_bf16"}, "mixed_bfloat16"),
        ({"bf16", "svebf16"}, "mixed_bfloat16"),
    ],
)
def test_a_cpu_is_judged_by_its_features(monkeypatch, flags, policy):
    monkeypatch.setattr(devices._jax, "cpu_flags", lambda: frozenset(flags))
    assert str(mpjax.recommend_policy("cpu")) == policy
    facts = devices.device_facts(jax.devices("cpu")[0])
    assert facts.policy == policy and facts.fast == (("bfloat16",) if flags else ())
    assert all(flag in facts.reason for flag in flags)


def test_the_report_is_data_and_a_table():
    report = mpjax.device_report()
    assert len(report.devices) == len(jax.local_devices())
    assert json.loads(json.dumps(report.to_dict()))["jax_version"] == jax.__version__
    text = str(report)
    assert f"{len(report.devices)} x {report.devices[0].name}" in text
    assert report.devices[0].policy in text and report.devices[0].reason in text


def test_the_report_shows_the_time_of_a_matmul_beside_the_verdict(monkeypatch):
    """A busy machine changes the time, and neither the devices nor the policy."""
    reports = []
    for factor in (0.5, 3.0):
        monkeypatch.setattr(devices, "matmul_time", lambda dtype, seconds, factor=factor: factor)
        reports.append(mpjax.device_report())
    idle, busy = reports
    assert idle == busy and idle.devices == busy.devices
    assert busy.matmul_times == {"float16": 3.0, "bfloat16": 3.0}
    assert "A matmul just took 0.50x in float16 and 0.50x in bfloat16" in str(idle)
    assert devices.timed_in_words({}) == ()


def build(policy):
    return mpjax.build_train_step(lambda p, b: jnp.sum(p * b), optax.sgd(0.1), policy)


def test_8_bit_moments_are_warned_about_on_a_tpu(monkeypatch, recwarn):
    for device in (gpu("8.0"), TPU):
        monkeypatch.setattr(devices, "default_device", lambda device=device: device)
        devices.warn_if_unfit(mpjax.get_policy("O2:bfloat16,moments=8bit"))
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


@pytest.mark.parametrize("flags", [(), ("amx_bf16",)])
def test_no_policy_is_warned_about_on_a_cpu_where_people_test(monkeypatch, flags):
    monkeypatch.setattr(devices._jax, "cpu_flags", lambda: frozenset(flags))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for half in ("bfloat16", "float16"):
            devices.warn_if_unfit(mpjax.get_policy(f"mixed_{half}"))


@pytest.mark.parametrize(
    ("name", "key", "memory", "variant"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", 80, ()),
        ("A100-SXM4-80GB", "a100-80", 80, ()),
        ("NVIDIA A100-PCIE-40GB", "a100-40", 40, ("pcie",)),
        ("nvidia_h100_pcie", "h100", None, ("pcie",)),
        ("Tesla V100-SXM2-32GB", "v100", 32, ()),
        ("NVIDIA GeForce RTX 4090", "rtx4090", None, ()),
        ("RTX 2080 Ti", "rtx2080", None, ()),
        ("NVIDIA RTX A6000", "a6000", None, ()),
        ("NVIDIA L40S", "l40s", None, ()),
        ("AMD Instinct MI300X", "mi300x", None, ()),
        ("TPU v5 lite", "v5e", None, ()),
        ("v5litepod-16", "v5e", None, ("16",)),
        ("TPU v6 lite", "v6e", None, ()),
        ("TPU v5", "v5p", None, ()),
        ("TPU7x", "v7x", None, ()),
        ("A100-80", "a100-80", 80, ()),
        ("tpu", "tpu", None, ()),
        ("GPU", "gpu", None, ()),
        ("h100 foo", "h100foo", None, ()),
    ],
)
def test_names_that_people_paste(name, key, memory, variant):
    assert devices.named(name) == (key, memory, variant)
    if key in devices.CARDS:
        assert mpjax.recommend_policy(name) == mpjax.recommend_policy(key)


def test_kinds_of_devices():
    assert str(mpjax.recommend_policy("tpu")) == "mixed_bfloat16"
    for name in ("gpu", "cuda", "ROCm"):
        with pytest.raises(ValueError, match=f"device='{name}' names no model.*a100.*jax.devices"):
            mpjax.recommend_policy(name)


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
