"""Targets: the accelerators to compile for, as data."""

import pytest

from mpjax._src.hardware import devices
from mpjax._src.hardware.targets import GPUS, TPU_CHIPS, find_target

TARGETS = [*GPUS, *TPU_CHIPS]


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_is_whole(name):
    target = find_target(name)
    assert target.memory > 8e9 and target.bandwidth > 1e11 and 0 < target.reserve < 0.5
    assert target.peaks["f32"] < max(target.peaks["f16" if name in GPUS else "bf16"], 1)
    fast = devices.device_facts(name).fast
    assert ("bf16" in target.peaks) == ("bfloat16" in fast)
    if name in GPUS:
        assert ("f16" in target.peaks) == ("float16" in fast)
        major, minor = target.capability.split(".")
        assert f"major: {major} minor: {minor}" in target.config
        assert f'"{target.device}"' in target.config


def test_names_of_targets():
    assert find_target("NVIDIA A100-80").name == "a100-80"
    assert find_target("TPU v5e").name == "v5e" and find_target("H100").name == "h100"
    assert find_target("a100").name == "a100-40"
    with pytest.raises(ValueError, match=r"target='h101' is not known. Did you mean 'h100'\?.*v6e"):
        find_target("h101")
    with pytest.raises(ValueError, match="a10.* not in the detail.*a6000 have the same cores"):
        find_target("a10")
    with pytest.raises(TypeError, match="target=7 must be a name. Legal are v100"):
        find_target(7)
