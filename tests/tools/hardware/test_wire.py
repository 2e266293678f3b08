"""Compiled programs send parameters in half and sums in float32 between devices."""

import math

import pytest
from absent import compiles

from benchmarks import wire

pytestmark = [pytest.mark.thorough, compiles("h100")]

# Biases aside, these read their parameters in float32: norms, and what is added before the first
# of them.
EXACT = {(wire.WIDTH,), (wire.LENGTH, wire.WIDTH), (64,)}
DECODERS = [name for name in wire.PROGRAMS if not name.startswith("ResNet")]


def whole(row):
    """Returns the number of entries of a parameter that is gathered."""
    return math.prod(row.shape) * row.devices


@pytest.mark.parametrize("half", wire.HALVES)
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_sends_parameters_in_16_bits_and_sums_gradients_in_float32(name, half):
    report = wire.compiled(wire.PROGRAMS[name], f"mixed_{half}")
    rows = report.collectives
    sums = [r for r in rows if r.carries == "gradients"]
    assert sums and {r.dtype for r in sums} == {"f32"}
    parts = [r for r in rows if r.carries == "parameters"]
    assert bool(parts) == (name != "data parallel")
    exact = {math.prod(shape) for shape in EXACT}
    assert {whole(r) for r in parts if r.dtype == "f32"} <= exact
    assert {r.dtype for r in parts if whole(r) not in exact} <= {wire.SHORT[half]}
    # Partial sums of activations are what their matmul gives.
    bytes_of = wire.counted(report, "activations")
    assert bytes_of["f32"] <= 0.01 * sum(bytes_of.values())
    # Norm and verdict take one exchange for each set of axes over which gradients are spread.
    verdicts = {r.exchange for r in rows if r.carries == "verdict"}
    assert len(verdicts) <= len(wire.PROGRAMS[name].axes)
    assert report.matmul_dtypes.keys() == {wire.SHORT[half]}


@pytest.mark.parametrize("half", wire.HALVES)
@pytest.mark.parametrize("name", ["FSDP", "FSDP, explicit axes", "data parallel"])
def test_reduce_half_sums_gradients_in_16_bits(name, half):
    rows = wire.compiled(wire.PROGRAMS[name], f"mixed_{half},reduce=half").collectives
    matrices = [r for r in rows if r.carries == "gradients" and r.dtype == wire.SHORT[half]]
    layers = 6 * wire.LAYERS * wire.WIDTH**2
    assert sum(math.prod(r.shape) for r in matrices) >= layers


@pytest.mark.parametrize("half", wire.HALVES)
def test_gather_float32_gathers_parameters_in_float32(half):
    program = wire.PROGRAMS["FSDP, explicit axes"]
    rows = wire.compiled(program, f"mixed_{half},gather=float32").collectives
    assert {r.dtype for r in rows if r.carries == "parameters"} == {"f32"}


@pytest.mark.parametrize("half", wire.HALVES)
@pytest.mark.parametrize("name", ["ResNet, data parallel", "ResNet, FSDP"])
def test_resnet_sends_kernels_in_16_bits_and_sums_gradients_in_float32(name, half):
    """Convolutions stay half; kernels are sent in half, their gradients in float32."""
    report = wire.compiled(wire.PROGRAMS[name], f"mixed_{half}")
    assert report.matmul_dtypes.keys() == {wire.SHORT[half]}
    sums = [r for r in report.collectives if r.carries == "gradients"]
    assert sums and {r.dtype for r in sums} == {"f32"}
    parts = [r for r in report.collectives if r.carries == "parameters"]
    if name == "ResNet, FSDP":
        assert {r.dtype for r in parts if len(r.shape) == 4} == {wire.SHORT[half]}
        assert {r.kind for r in sums} == {"reduce-scatter"}
    else:
        assert not parts
    assert sum(math.prod(r.shape) for r in sums) >= 4 * 9 * 64**2
