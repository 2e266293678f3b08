"""device_report, recommend_policy, and the warning about unfit policies."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._src.core.base import devices


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
def test_recommend_policy_goes_by_what_a_device_runs_fast(device, policy, fast):
    assert mpjax.recommend_policy(device) == mpjax.get_policy(policy)
    assert devices.device_facts(device).fast == fast


def test_named_cards_agree_with_their_capability():
    for name, capability in devices.CARDS.items():
        assert mpjax.recommend_policy(name) == mpjax.recommend_policy(gpu(capability))
        assert devices.device_facts(name).capability == capability
        assert mpjax.hardware.half_dtype(name) == mpjax.hardware.half_dtype(gpu(capability))


@pytest.mark.parametrize(
    ("name", "half"), [("v100", "float16"), ("k80", "float16"), ("H100", "bfloat16")]
)
def test_half_dtype_takes_the_name_of_a_device(name, half):
    assert str(mpjax.hardware.half_dtype(name)) == half
    assert (
        str(mpjax.hardware.half_dtype("v5e")) == str(mpjax.hardware.half_dtype("cpu")) == "bfloat16"
    )


@pytest.mark.parametrize("name", ["k40", "k80", "m40", "m60"])
def test_cards_before_half_say_why(name):
    reason = devices.device_facts(name).reason
    assert "compute capability" in reason and reason.endswith("no 16-bit dtype")


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
def test_named_reads_device_names_that_people_paste(name, key, memory, variant):
    assert devices.named(name) == (key, memory, variant)
    if key in devices.CARDS:
        assert mpjax.recommend_policy(name) == mpjax.recommend_policy(key)


def test_recommend_policy_takes_tpu_and_refuses_gpu_without_a_model():
    assert str(mpjax.recommend_policy("tpu")) == "mixed_bfloat16"
    for name in ("gpu", "cuda", "ROCm"):
        with pytest.raises(
            ValueError, match=f"device='{name}' does not name a model.*a100.*jax.devices"
        ):
            mpjax.recommend_policy(name)


def test_unknown_device_names_are_refused_with_a_suggestion():
    with pytest.raises(ValueError, match=r"Unknown device='h101'. Did you mean 'h100'\?"):
        mpjax.recommend_policy("h101")
    with pytest.raises(ValueError, match=r"Unknown device='h101'. Did you mean 'h100'\?"):
        mpjax.hardware.half_dtype("h101")


@pytest.mark.parametrize("ask", [mpjax.recommend_policy, mpjax.hardware.half_dtype])
@pytest.mark.parametrize("wrong", [object(), 3, jnp.float16, ("h100",)])
def test_recommend_policy_and_half_dtype_refuse_what_is_no_device(ask, wrong):
    with pytest.raises(TypeError, match=r"device=.* must be a jax.Device, such as jax.devices"):
        ask(wrong)
