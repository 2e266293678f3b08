"""Reports of compiled programs, from stored HLO."""

import collections
import json

import pytest
from absent import answer, report

from mpjax._src.tools.hardware import hlo_costs, times
from mpjax._src.tools.hardware import report as aot_report
from mpjax._src.tools.hardware.targets import find_target


def test_bfloat16_on_a_v100_is_float32_in_disguise():
    found = report("v100")
    (row,) = found.disguised
    assert (row.asked, row.operands, row.runs_as, row.instructions, row.runs) == (
        *("bf16", "f32", "f32", 1, 7),
    )
    assert row.share == 1 and found.matmul_dtypes == {"f32": 1}
    assert row.flops == found.matmul_flops == 7 * 2 * 64 * 128 * 128
    text = " ".join(str(found).split())
    assert "100.0% of the matmul FLOPs run in f32, but the program asked for bf16" in text
    assert (
        "no matrix units for bfloat16. Use float16" in text
        and "a lower bound, not a forecast" in text
    )
    assert not report("h100").disguised and report("h100").matmul_dtypes == {"bf16": 1}


@pytest.mark.parametrize("name", ["closed_call/dot_general", "closed_call/transpose"])
def test_report_finds_matmuls_whose_names_the_compiler_changed(name):
    """It names a matmul after a transpose that it merged with it."""
    text = answer("v100")["hlo"].replace("closed_call/dot_general", name)
    found = aot_report.report_of(find_target("v100"), {**answer("v100"), "hlo": text})
    assert found.disguised[0].asked == "bf16"


def test_asked_dtypes_of_a_shared_name_are_used_once_each():
    """Of a function that was asked for in bfloat16 once and in float32 once, one is disguised."""
    matmul = hlo_costs.Matmul("f/dot", "f32", "default", "", 1, True, 1, 1.0)
    asked = {"f/dot": collections.Counter({"f32": 1, "bf16": 1})}
    assert sorted(aot_report._asked(asked, matmul) for _ in range(2)) == ["bf16", "f32"]
    assert aot_report._asked(asked, matmul) == "f32"  # one that the compiler made
    assert aot_report._asked({}, matmul) == "f32"


def test_report_gives_memory_and_roofline():
    found = report("h100")
    assert found.total_bytes == 100 + 60 - 50 + 2**30 + found.code_bytes
    assert found.fits and found.device_bytes == 84942979072
    costs = hlo_costs.costs(found.hlo)
    seconds = max(found.matmul_flops / 989e12, costs.other_flops / 67e12)
    assert found.compute_ms == pytest.approx(seconds * 1e3)
    assert found.memory_ms == pytest.approx(found.bytes_accessed / 3352.32e9 * 1e3)
    assert found.bound == "memory" and found.roofline_ms == found.memory_ms
    assert found.flops == found.matmul_flops + costs.other_flops


def test_report_counts_the_link_to_the_host(monkeypatch):
    assert report("h100").host_ms == 0.0 and "host" not in str(report("h100"))
    monkeypatch.setattr(hlo_costs, "host_bytes", lambda op: (2**31, 2**30))
    found = report("h100")
    assert found.bound == "host" and found.roofline_ms == found.host_ms
    runs = found.host_bytes / (3 * 2**30)
    assert runs >= 1 and found.host_ms == pytest.approx(runs * 2 * 2**30 / 64e9 * 1e3)
    assert "host, ms" in str(found)


def test_compile_report_is_data():
    found = report("v100")
    plain = json.loads(json.dumps(found.to_dict()))
    assert plain["target"] == "v100" and plain["matmuls"][0]["operands"] == "f32"
    assert plain["disguised"] == plain["matmuls"] and plain["matmul_dtypes"] == {"f32": 1}
    assert "hlo" not in plain and "ENTRY" in found.hlo and "ENTRY" not in repr(found)
    assert {"total_bytes", "roofline_ms", "bound", "fits"} <= set(plain)


def test_report_names_the_option_left_out_to_compile():
    left = {**answer("h100"), "left_out": "xla_gpu_enable_triton_gemm"}
    found = str(aot_report.report_of(find_target("h100"), left))
    assert "xla_gpu_enable_triton_gemm=False" in found and "=False" not in str(report("h100"))


def test_report_says_that_a_program_does_not_fit():
    memory = {**answer("v100")["memory"], "temporary": 2**35}
    found = aot_report.report_of(find_target("v100"), {**answer("v100"), "memory": memory})
    assert not found.fits and "DOES NOT FIT" in str(found)
    assert "MEM_FRACTION" not in str(found)
    memory["temporary"] = 13 * 2**30
    found = aot_report.report_of(find_target("v100"), {**answer("v100"), "memory": memory})
    assert found.fits and "75% of a GPU's memory, which is less" in " ".join(str(found).split())


@pytest.mark.parametrize(
    ("target", "operands", "precision", "library", "algorithm", "expected", "peak"),
    [
        ("v100", "f32", "default", True, ("", 1), "f32", 15.7),
        ("v100", "f16", "default", True, ("", 1), "f16", 125),
        ("a100-80", "f32", "default", False, ("", 1), "tf32", 156),
        ("a100-80", "f32", "high", True, ("", 1), "tf32", 156),
        ("a100-80", "f32", "high", False, ("", 1), "f32", 19.5),
        ("a100-80", "f32", "highest", True, ("", 1), "f32", 19.5),
        ("h100", "f32", "default", False, ("bf16", 3), "bf16 x3", 989 / 3),
        ("h100", "f8e4m3fn", "default", True, ("", 1), "f8e4m3fn", 1979),
        ("h100", "f64", "default", True, ("", 1), "f64", 67),
        ("v5e", "bf16", "default", False, ("", 1), "bf16", 197),
        ("v5e", "f32", "default", False, ("", 1), "bf16", 197),
        ("v5e", "f32", "high", False, ("", 1), "bf16 x3", 197 / 3),
        ("v5e", "f32", "highest", False, ("", 1), "bf16 x6", 197 / 6),
        ("v5e", "f16", "default", False, ("", 1), "f16", 197),
        ("v5e", "s8", "default", False, ("", 1), "s8", 394),
        ("v5e", "s32", "default", False, ("", 1), "s32", 197 / 6),
    ],
)
def test_unit_gives_dtype_and_peak_of_the_matrix_units(
    target, operands, precision, library, algorithm, expected, peak
):
    matmul = hlo_costs.Matmul("dot", operands, precision, *algorithm, library, 1, 1.0)
    runs_as, flops = times.unit(find_target(target), matmul)
    assert runs_as == expected and flops == pytest.approx(peak * 1e12)
