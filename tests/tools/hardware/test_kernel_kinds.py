"""The kinds of kernels, in a small step of training and in stored programs."""

import collections
from pathlib import Path

import pytest

from mpjax._src.tools.hardware import hlo_costs
from mpjax._src.tools.hardware.times import kinds_of

FOLDER = Path(__file__).parent / "hlo"

# A step of training with a head of 1001 columns: its loss, its gradient and its update, by hand.
STEP = (FOLDER / "step_h100.hlo").read_text()
KINDS = {
    "casted": "copies and casts",
    "picked": "gathers and scatters",
    "logits": "matmuls with an odd axis",
    "summed": "logits and loss",
    "loss": "norms and reductions",
    "cotangent": "logits and loss",
    "gradient": "matmuls with an odd axis",
    "normed": "norms and reductions",
    "scaled": "elementwise",
    "mine": "other calls",
    "new": "updates",
}


def kinds(text):
    kind_of = kinds_of(text)
    return {kernel.op.name: kind_of(kernel) for kernel in hlo_costs.costs(text).kernels}


def test_each_kernel_of_a_step_has_the_kind_of_its_work():
    assert kinds(STEP) == KINDS


def test_a_loss_that_is_itself_a_product_has_no_logits():
    text = """HloModule product
ENTRY %main (a: f32[9], b: f32[9]) -> f32[] {
  %a = f32[9]{0} parameter(0)
  %b = f32[9]{0} parameter(1)
  %c = f32[9]{0} add(%a, %b)
  ROOT %d = f32[] dot(%c, %b), lhs_contracting_dims={0}, rhs_contracting_dims={0}
}
"""
    assert kinds(text) == {"c": "elementwise", "d": "float32 matmuls"}


def test_updates_are_those_of_donated_arguments():
    kept = STEP.replace("input_output_alias={ {0}: (0, {}, may-alias) }, ", "")
    assert kinds(kept) == {**KINDS, "new": "elementwise"}


def test_a_step_in_a_loop_has_the_same_kinds():
    """As when several steps run in one program: the state goes around."""
    body = STEP[STEP.index("ENTRY") :].replace("ENTRY %main", "%body")
    shape = "(f32[32,1001]{1,0}, f32[], bf16[64,32]{1,0}, s32[64,1]{1,0})"
    begin = f"""  %carry = {shape} parameter(0)
  %w = f32[32,1001]{{1,0}} get-tuple-element(%carry), index=0
  %x = bf16[64,32]{{1,0}} get-tuple-element(%carry), index=2
  %i = s32[64,1]{{1,0}} get-tuple-element(%carry), index=3
"""
    lines = body.splitlines(keepends=True)
    body = f"%body (carry: {shape}) -> {shape} {{\n" + begin + "".join(lines[4:-2])
    body += f"  ROOT %out = {shape} tuple(%new, %loss, %x, %i)\n}}\n"
    entry = f"""ENTRY %main (a: f32[], b: f32[], c: f32[]) -> f32[] {{
  %a = f32[32,1001]{{1,0}} parameter(0)
  %b = bf16[64,32]{{1,0}} parameter(1)
  %c = s32[64,1]{{1,0}} parameter(2)
  %nothing = f32[] constant(0)
  %start = {shape} tuple(%a, %nothing, %b, %c)
  %loop = {shape} while(%start), condition=%test, body=%body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
  %end = f32[32,1001]{{1,0}} get-tuple-element(%loop), index=0
  %last = f32[] get-tuple-element(%loop), index=1
  ROOT %both = (f32[32,1001]{{1,0}}, f32[]) tuple(%end, %last)
}}
"""
    looped = STEP[: STEP.index("ENTRY")] + body + entry
    assert kinds(looped) == KINDS
    kernels = hlo_costs.costs(looped).kernels
    assert {kernel.times for kernel in kernels} == {3} and len(kernels) == len(KINDS)


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "dtype", "odd"),
    [
        (64, 32, 1008, "bf16", 0),
        (64, 32, 1004, "f16", 1004),
        (197, 64, 64, "bf16", 197),
        (64, 31, 64, "bf16", 31),  # the contracted axis
        (64, 31, 1001, "f32", 0),  # TF32
        (1, 32, 1000, "bf16", 0),  # one row is no axis to pad
        (2708, 2704, 7, "bf16", 0),  # few columns: to pad the rows would save nothing
        (257, 15, 64, "f16", 0),
        (17, 16, 16, "bf16", 17),
    ],
)
def test_odd_axes_are_no_multiple_of_8_of_16_bit_operands(rows, inner, columns, dtype, odd):
    text = f"""HloModule dot
ENTRY %main (a: {dtype}[{rows},{inner}], b: {dtype}[{inner},{columns}]) -> f32[{rows},{columns}] {{
  %a = {dtype}[{rows},{inner}]{{1,0}} parameter(0)
  %b = {dtype}[{inner},{columns}]{{1,0}} parameter(1)
  ROOT %d = f32[{rows},{columns}]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{0}}
}}
"""
    (found,) = hlo_costs.costs(text).matmuls
    assert found.odd == odd and found.flops == 2 * rows * inner * columns
    kind = "float32 matmuls" if dtype == "f32" else "matmuls"
    assert kinds(text) == {"d": "matmuls with an odd axis" if odd else kind}


def test_odd_axes_of_batched_dots_leave_out_the_batch():
    text = (FOLDER / "attention_h100.hlo").read_text()
    assert {m.odd for m in hlo_costs.costs(text).matmuls} == {0}
    odd = hlo_costs.costs(text.replace("bf16[8,", "bf16[7,").replace("f32[8,", "f32[7,"))
    assert {m.odd for m in odd.matmuls} == {0}  # seven heads: each matmul has even axes


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attention_cudnn", {"fused attention": 1}),
        ("conv_v100", {"convolutions": 3}),
        ("scan_v100", {"float32 matmuls": 1}),
        ("stack_h100", {"matmuls": 1}),
    ],
)
def test_kernels_of_libraries_and_loops_have_the_kind_of_their_matmul(name, expected):
    text = (FOLDER / f"{name}.hlo").read_text()
    found = collections.Counter(kinds(text).values())
    assert {kind: found[kind] for kind in expected} == expected
    kernels = hlo_costs.costs(text).kernels
    assert sum(len(kernel.matmuls) for kernel in kernels) == sum(expected.values())


@pytest.mark.parametrize("name", ["attention_h100", "scan_h100", "stack_h100", "conv_v100"])
def test_kernels_sum_to_the_program(name):
    found = hlo_costs.costs((FOLDER / f"{name}.hlo").read_text())
    assert sum(k.times * k.bytes for k in found.kernels) == found.bytes
    flops = sum(k.times * sum(m.flops for m in k.matmuls) for k in found.kernels)
    assert flops == sum(m.times * m.flops for m in found.matmuls)
    assert sum(k.times * k.other_flops for k in found.kernels) == found.other_flops


def test_what_devices_and_the_host_exchange_is_no_kernel():
    found = hlo_costs.costs((FOLDER / "hosted.hlo").read_text())
    assert found.host_bytes[0] and not any("start" in k.op.opcode for k in found.kernels)
    summed = STEP.replace("fusion(%w), kind=kLoop, calls=%cast", "all-reduce(%w), to_apply=%add")
    names = {kernel.op.name for kernel in hlo_costs.costs(summed).kernels}
    assert "casted" not in names and len(names) == len(KINDS) - 1
