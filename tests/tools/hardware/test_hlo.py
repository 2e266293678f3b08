"""The reader of optimized HLO, on small programs that XLA compiled.

tests/hlo holds: seven turns of ``c = tanh(c @ w)`` in bfloat16, as a scan and with its carries
stacked; the gradients of a strided float16 convolution; `jax.nn.dot_product_attention`; a float32
matmul at precision="highest"; and, by hand in XLA's form, arrays that go to the host and back, a
call of cuDNN's attention, and a step of training.
"""

import weakref
from pathlib import Path

import numpy as np
import pytest
from absent import report

from mpjax._src.tools.hardware import hlo, hlo_costs
from mpjax._src.tools.hardware.flow import flow_of
from mpjax._src.tools.hardware.hlo import Shape
from mpjax._src.tools.hardware.hlo_costs import Matmul
from mpjax._src.tools.hardware.memory import Sizes, by_kind, memory_rows
from mpjax._src.tools.hardware.times import kinds_of

FOLDER = Path(__file__).parent / "hlo"
TURN = 2 * 64 * 128 * 128


def read(name):
    return (FOLDER / f"{name}.hlo").read_text()


@pytest.mark.parametrize(
    ("target", "operands", "library"),
    [("v100", "f32", True), ("h100", "bf16", False), ("v5e", "bf16", False)],
)
def test_matmuls_of_a_scan_count_once_a_turn(target, operands, library):
    """XLA writes the number of turns on GPUs; on TPUs it is read off the loop's condition."""
    costs = hlo_costs.costs(read(f"scan_{target}"))
    (matmul,) = costs.matmuls
    assert (matmul.operands, matmul.library, matmul.times) == (operands, library, 7)
    assert (matmul.flops, matmul.passes, matmul.precision) == (TURN, 1, "default")
    assert matmul.name.startswith("jit(scan)/while/body")
    assert costs.unknown_loops == 0 and not costs.unknown_calls
    assert 7 * 64 * 128 <= costs.other_flops < 0.05 * 7 * TURN


def test_a_text_is_one_graph_as_long_as_it_is_used(monkeypatch):
    text, parsed = read("scan_h100"), []
    monkeypatch.setattr(hlo, "parsed", lambda text, real=hlo.parsed: parsed.append(1) or real(text))
    graph = hlo.parse(text)
    assert hlo.parse(text) is graph and flow_of(graph) is flow_of(graph)
    asked = hlo_costs.costs(text), memory_rows(text, Sizes(0, 0, 2**20, 0)), kinds_of(text)
    del asked
    assert len(parsed) == 1
    gone = weakref.ref(graph)
    del graph
    assert gone() is None and hlo.parse(text) and len(parsed) == 2


def test_a_report_parses_a_program_once(monkeypatch):
    parsed = []
    monkeypatch.setattr(hlo, "parsed", lambda text, real=hlo.parsed: parsed.append(1) or real(text))
    report("v100")
    assert len(parsed) == 2  # as it was written, and optimized


def test_loop_in_vector_memory_of_a_tpu_costs_no_bytes():
    """Only the arguments and the result move through main memory."""
    assert hlo_costs.costs(read("scan_v5e")).bytes == pytest.approx(
        2 * (2 * 64 * 128 + 128 * 128), 0.01
    )


def test_a_stack_that_a_loop_fills_costs_the_slices():
    plain, stacked = (hlo_costs.costs(read(f"{name}_h100")).bytes for name in ("scan", "stack"))
    turn = 2 * 64 * 128
    assert 7 * turn <= stacked - plain <= 4 * 7 * turn  # not 7 times the whole stack: 49 turns
    assert plain > 7 * turn


def test_kernel_that_runs_beside_others_is_read_as_a_kernel():
    text = read("stack_h100")
    line = next(x for x in text.splitlines() if " %loop_dynamic_update_slice_fusion = " in x)
    before, rest = line.split(" fusion(")
    name, result = before.split(" = ")
    given = f"(({result}, s32[], bf16[64,128]{{1,0}}), {result}, u32[])"
    start = f"{name}.start = {given} fusion-start({rest}"
    apart = text.replace(line, f"{start}\n{before} fusion-done({name.strip()}.start)")
    assert hlo_costs.costs(apart) == hlo_costs.costs(text)
    sizes = Sizes(0, 0, 2**20, 0)
    assert by_kind(memory_rows(apart, sizes)) == by_kind(memory_rows(text, sizes))


def test_bytes_to_and_from_the_host_are_those_on_the_device():
    """As XLA writes them, for GPUs and TPUs: whole arrays, and slices in loops."""
    array, row = 2 * 8 * 4, 2 * 1 * 4
    costs = hlo_costs.costs(read("hosted"))
    assert costs.host_bytes == (array + row, array + row)
    assert costs.bytes == sum(costs.host_bytes) + 2 * row  # and the slice, on the device
    assert hlo_costs.costs(read("scan_h100")).host_bytes == (0, 0)
    assert hlo_costs.costs(read("scan_v5e")).host_bytes == (0, 0)  # its own vector memory


@pytest.mark.parametrize(("name", "products"), [("", 2), ("Backward", 5)])
def test_fused_attention_counts_the_products_of_its_scores(name, products):
    text = read("attention_cudnn").replace("fmhaSoftmax", f"fmhaSoftmax{name}")
    whole = hlo_costs.costs(text)
    (matmul,) = whole.matmuls
    assert matmul.flops == products * 2 * 4 * 8 * 512 * 1024 * 64
    assert (matmul.operands, matmul.library, whole.unknown_calls) == ("bf16", True, ())
    (causal,) = hlo_costs.costs(text.replace("NO_MASK", "CAUSAL")).matmuls
    assert causal.flops == products * 2 * 4 * 8 * (512 * 513 // 2) * 64


def test_convolutions_by_a_library_count_as_convolutions():
    """Strides and padding: XLA counts only where the window meets a true input."""
    forward = 2 * 8 * 16 * 16 * 128 * 64 * 9
    by_library = hlo_costs.costs(read("conv_v100"))
    assert [m.operands for m in by_library.matmuls] == ["f16"] * 3
    assert all(m.library and 0.95 * forward < m.flops <= forward for m in by_library.matmuls)
    on_tpu = hlo_costs.costs(read("conv_v5e"))
    assert len(on_tpu.matmuls) == 3 and not any(m.library for m in on_tpu.matmuls)
    assert sum(m.flops for m in on_tpu.matmuls) == pytest.approx(3 * forward, 0.06)
    # Scratch is nobody's traffic; operands and results of a library's call are.
    assert by_library.bytes > 2 * (2 * 8 * 32 * 32 * 64)


def test_dot_algorithm_decides_what_is_multiplied():
    scores, values = hlo_costs.costs(read("attention_h100")).matmuls
    assert (scores.algorithm, scores.operands, values.algorithm) == ("bf16", "bf16", "")
    text = read("attention_h100").replace("=dot_bf16_bf16_f32,", "=dot_tf32_tf32_f32_x3,")
    scores, _ = hlo_costs.costs(text).matmuls
    assert (scores.algorithm, scores.passes) == ("tf32", 3)


@pytest.mark.parametrize("name", ["highest_v5e", "highest_v100"])
def test_precision_is_read_from_attributes_and_from_a_library_s_settings(name):
    (matmul,) = hlo_costs.costs(read(name)).matmuls
    assert matmul.precision == "highest"
    text = read(name).replace("highest", "high").replace("HIGHEST", "HIGH")
    assert hlo_costs.costs(text).matmuls[0].precision == "high"


def test_a_loop_whose_turns_nobody_knows_counts_once():
    text = read("scan_v5e").replace("constant(7)", "parameter(1)")
    costs = hlo_costs.costs(text)
    assert costs.unknown_loops == 1 and costs.matmuls[0].times == 1
    down = hlo_costs.costs(read("scan_v5e").replace("direction=LT", "direction=GT"))
    assert down.unknown_loops == 1


def test_loop_that_counts_by_more_than_one_has_fewer_turns():
    by_two = hlo_costs.costs(read("scan_v5e").replace("constant(1)", "constant(2)"))
    assert by_two.unknown_loops == 0 and by_two.matmuls[0].times == 4  # 0, 2, 4, 6 are below 7


def test_unknown_custom_calls_are_named():
    text = read("highest_v100").replace("__cublas$lt$matmul", "somebody_s_kernel")
    costs = hlo_costs.costs(text)
    assert costs.unknown_calls == ("somebody_s_kernel",) and not costs.matmuls


def test_asked_gives_the_dtypes_of_matmuls_by_name():
    name = "jit(scan)/while/body/closed_call/dot_general"
    assert hlo_costs.asked(read("scan_h100")) == {name: {"bf16": 1}}
    assert hlo_costs.asked(CALLS) == {"jit(f)/a/dot": {"bf16": 1}, "jit(f)/b/dot": {"bf16": 1}}


CALLS = """HloModule calls
%inner (x: bf16[4,4]) -> bf16[4,4] {
  %x = bf16[4,4]{1,0} parameter(0)
  ROOT %dot = bf16[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, metadata={op_name="dot"}
}
ENTRY %main (y: bf16[4,4]) -> bf16[4,4] {
  %y = bf16[4,4]{1,0} parameter(0)
  %once = bf16[4,4]{1,0} call(%y), to_apply=%inner, metadata={op_name="jit(f)/a"}
  ROOT %again = bf16[4,4]{1,0} call(%once), to_apply=%inner, metadata={op_name="jit(f)/b"}
}
"""


PROGRAM = """HloModule small
%fused (p0: f32[10,64], p1: f32[64], p2: s32[]) -> f32[10,64] {
  %p0 = f32[10,64]{1,0} parameter(0)
  %p1 = f32[64]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %row = f32[1,64]{1,0} bitcast(%p1)
  %zero = s32[] constant(0)
  ROOT %dus = f32[10,64]{1,0} dynamic-update-slice(%p0, %row, %p2, %zero)
}
%picks (q0: f32[10,64], q1: s32[]) -> bf16[1,64] {
  %q0 = f32[10,64]{1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %slice = f32[1,64]{1,0} dynamic-slice(%q0, %q1, %zero.1), dynamic_slice_sizes={1,64}
  ROOT %half = bf16[1,64]{1,0} convert(%slice)
}
ENTRY %main (a: f32[10,64], b: f32[64], i: s32[]) -> (f32[10,64], bf16[1,64]) {
  %a = f32[10,64]{1,0} parameter(0)
  %b = f32[64]{0} parameter(1)
  %i = s32[] parameter(2)
  %written = f32[10,64]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%fused
  %read = bf16[1,64]{1,0} fusion(%a, %i), kind=kLoop, calls=%picks
  %both = f32[64]{0} add(%b, %b)
  %kept = f32[64]{0} constant({...})
  %start = (f32[64]{0:S(1)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%b)
  %done = f32[64]{0:S(1)} copy-done(%start)
  ROOT %result = (f32[10,64]{1,0}, bf16[1,64]{1,0}) tuple(%written, %read)
}
"""


def test_costs_of_a_program_equal_bytes_by_hand():
    """A row written in place, a row read; an operand that is read twice is read once."""
    written = 64 * 4 + 64 * 4 + 4
    read_ = 64 * 4 + 64 * 2 + 4
    added, prefetched = 2 * 64 * 4, 64 * 4
    costs = hlo_costs.costs(PROGRAM)
    assert costs.bytes == written + read_ + added + prefetched
    assert costs.constant_bytes == 64 * 4
    assert costs.other_flops == 64


def test_hlo_shapes_and_dtype_sizes_are_parsed():
    entry = hlo.parse(PROGRAM).entry
    start = entry.ops["start"]
    assert start.shapes[0] == Shape("f32", (64,), 1) and start.shapes[0].bytes == 0
    assert entry.root.name == "result"
    sizes = {"pred": 8, "s4": 4, "bf16": 16, "f8e4m3fn": 8, "c64": 64, "token": 0}
    assert {dtype: hlo.bits(dtype) for dtype in sizes} == sizes


def test_hlo_parse_refuses_text_that_is_no_program():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.parse("something else")


def test_convolution_window_counts_true_inputs_only(rng):
    """Against a count by hand: dilations, strides and padding at random."""
    for _ in range(50):
        size, kernel, outputs, stride, spread, dilation = rng.integers(1, 6, 6)
        pad = int(rng.integers(0, 4))
        met = 0
        for o in range(outputs):
            for k in range(kernel):
                at = o * stride - pad + k * dilation
                met += 0 <= at <= (size - 1) * spread and at % spread == 0
        numbers = map(int, (size, kernel, outputs, stride, spread, dilation, pad))
        assert hlo_costs._meetings(*numbers) == met


def test_matmul_rows_compare_as_data():
    fields = Matmul("dot", "f16", "default", "", 1, False, 1, 2.0)
    assert fields == Matmul("dot", "f16", "default", "", 1, False, 1, np.float64(2))
