"""Targets: the accelerators to compile for, as data."""

import pytest

from mpjax._src.core.base import devices
from mpjax._src.tools.hardware.targets import GPUS, TPU_CHIPS, find_target, room_of

TARGETS = [*GPUS, *TPU_CHIPS]


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_has_all_figures(name):
    target = find_target(name)
    reserve, available = room_of(target, None)
    assert target.memory > 8e9 and target.bandwidth > 1e11 and 0 < reserve < 0.5
    assert abs(available - (1 - reserve) * target.memory) <= 1
    assert target.peaks["f32"] < max(target.peaks["f16" if name in GPUS else "bf16"], 1)
    fast = devices.device_facts(name).fast
    assert ("bf16" in target.peaks) == ("bfloat16" in fast)
    if name in GPUS:
        assert ("f16" in target.peaks) == ("float16" in fast)
        major, minor = devices.CARDS[name].split(".")
        assert f"major: {major} minor: {minor}" in target.config
        assert f'"{target.device}"' in target.config


def test_figures_of_gpus_fit_each_other():
    """Each core has so many multiply-adds a cycle; CUDA reserves 1 KiB from Ampere on."""
    for name, (_, _, _, peaks, facts) in GPUS.items():
        cores, fpus, _, shared, block, _, clock = facts
        assert cores * fpus * 2 * clock / 1e3 == pytest.approx(peaks["f32"], rel=0.01), name
        assert shared - block == (0 if name in ("v100", "t4") else 1024), name


def test_figures_of_targets_equal_the_datasheets():
    cores = {"v100": 80, "t4": 40, "a100-40": 108, "a100-80": 108, "a6000": 84}
    cores |= {"h100": 132, "h200": 132, "b200": 148}
    assert {name: row[-1][0] for name, row in GPUS.items()} == cores
    gibibytes = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32}
    assert {name: row[1] / 2**30 for name, row in TPU_CHIPS.items()} == gibibytes


def test_find_target_takes_each_name_of_a_device():
    assert find_target("NVIDIA A100-80").name == "a100-80"
    assert find_target("TPU v5e").name == "v5e" and find_target("H100").name == "h100"
    assert find_target("a100").name == "a100-40"
    assert find_target("A100-SXM4-80GB x 8").name == "a100-80 x 8"
    for name, row in GPUS.items():
        assert find_target(row[0]).name == name  # what the device calls itself
    with pytest.raises(ValueError, match=r"Unknown target='h101'. Did you mean 'h100'\?.*v6e"):
        find_target("h101")
    with pytest.raises(
        ValueError, match="a10.* lacks the details.*a6000 has the same kind of cores"
    ):
        find_target("a10")
    nearest = "l4' is known to rec.* a6000 has the nearest cores, of 8.6. Choose one of v100"
    with pytest.raises(ValueError, match=nearest):
        find_target("l4")
    for name in ("v3", "mi300x", "p100"):
        with pytest.raises(ValueError, match=r"to compile for it\. Choose"):
            find_target(name)
    for name in ("gpu", "tpu", "cpu"):
        with pytest.raises(ValueError, match=f"target='{name}' does not name a model"):
            find_target(name)
    for name, key in (("H100 PCIe", "h100"), ("V100-SXM2-32GB", "v100"), ("v5litepod-8", "v5e")):
        with pytest.raises(ValueError, match=f"is a variant of {key} .* Write target='{key}'"):
            find_target(name)
    with pytest.raises(TypeError, match="target=7 must be a string. Choose one of v100"):
        find_target(7)


@pytest.mark.parametrize(
    ("name", "found", "topology"),
    [
        ("h100 x 8", "h100 x 8", "1x1x8"),
        ("NVIDIA A100-80 x2", "a100-80 x 2", "1x1x2"),
        ("h100x16", "h100 x 16", "1x2x8"),
        ("b200 x 256", "b200 x 256", "1x32x8"),
        ("v5e x 8", "v5e x 8", "v5e:2x4"),
        ("TPU v6e x 256", "v6e x 256", "v6e:16x16"),
        ("v5ex4", "v5e x 4", "v5e:2x2"),
        ("v5p x 4", "v5p x 4", "v5p:2x2x1"),
        ("v5p x 16", "v5p x 16", "v5p:2x2x4"),
        ("v4 x 128", "v4 x 128", "v4:4x4x8"),
        ("h100 x 1", "h100", "1x1x1"),
        ("v5e x 1", "v5e", "v5e:1x1"),
    ],
)
def test_find_target_takes_several_devices(name, found, topology):
    target = find_target(name)
    assert (target.name, target.topology) == (found, topology)
    one = find_target(target.chip)
    assert one.devices == 1 and target.devices == int((found + " x 1").split(" x ")[1])
    assert (target.memory, target.peaks, target.config) == (one.memory, one.peaks, one.config)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("h100 x 0", "for 0 devices. Choose 1 to 8 GPUs and multiples of 8"),
        ("h100 x 13", "target='h100 x 13' cannot be compiled for 13 devices"),
        ("v5e x 12", "powers of two up to 4096"),
        ("v5e x 99999999", "powers of two"),
        ("rtx 4090", "lacks the details"),
        ("h101 x 8", "Unknown target='h101 x 8'. Did you mean 'h100'"),
        ("x 8", "Unknown target="),
    ],
)
def test_find_target_refuses_numbers_of_devices_that_do_not_exist(name, match):
    with pytest.raises(ValueError, match=match):
        find_target(name)
