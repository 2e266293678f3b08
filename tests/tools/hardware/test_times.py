"""The times of kernels: their bounds, what is expected, and the table of where the time goes."""

import json

import pytest
from absent import answer, report

from mpjax._src.tools.hardware import hlo_costs
from mpjax._src.tools.hardware import report as aot_report
from mpjax._src.tools.hardware.targets import PACES, find_target
from mpjax._src.tools.hardware.times import SHORT, kernel_rows

STEP = answer("h100", "step")["hlo"]
MANY = STEP.replace("[64,", "[64000,").replace(",32]", ",3200]").replace("[32,", "[3200,")


def of_step(target, text=STEP):
    return aot_report.report_of(find_target(target), {**answer("h100"), "hlo": text})


def test_bound_of_a_kernel_is_the_longer_one_of_its_bytes_and_its_flops():
    target, found = find_target("h100"), hlo_costs.costs(STEP)
    kinds = {row.kind: row for row in kernel_rows(target, STEP, found)}
    odd, update = kinds["matmuls with an odd axis"], kinds["updates"]
    moved = [2 * 64 * 32 + 2 * 32 * 1001 + 4 * 64 * 1001, 2 * 64 * 33 * 0 + 2 * 64 * (32 + 1001)]
    moved[1] += 4 * 32 * 1001
    assert (odd.instructions, odd.runs, odd.short) == (2, 2, 2)
    assert odd.bytes == sum(moved) and odd.flops == 2 * 2 * 64 * 32 * 1001
    assert odd.bound_ms == pytest.approx(1e3 * sum(moved) / target.bandwidth)
    assert update.bytes == 3 * 4 * 32 * 1001 and update.flops == 0
    # A thousand times the rows: the FLOPs take longer, and no run is short.
    rows = kernel_rows(target, MANY, hlo_costs.costs(MANY))
    large = next(row for row in rows if row.kind == odd.kind)
    assert large.bound_ms == pytest.approx(1e3 * large.flops / target.peaks["bf16"])
    assert large.short == 0 and large.bound_ms > 1e3 * SHORT


def test_kernels_in_a_loop_count_once_a_turn():
    rows = {row.kind: row for row in report("h100", "stack").kernels}
    assert rows["matmuls"].instructions == 1 and rows["matmuls"].runs == 7


def test_kernel_by_kernel_is_a_closer_bound():
    found = of_step("h100", MANY)
    assert found.kernels_ms == pytest.approx(sum(row.bound_ms for row in found.kernels))
    assert found.roofline_ms < found.kernels_ms < found.expected_ms
    assert found.kernels_ms <= found.memory_ms + found.compute_ms


def test_expected_time_is_each_bound_times_a_constant_and_the_starts():
    pace, found = PACES["h100"], of_step("h100")
    factors = {"matmuls with an odd axis": pace.odd}
    for row in found.kernels:
        factor = factors.get(row.kind, pace.bandwidth)
        assert row.expected_ms == pytest.approx(factor * row.bound_ms + 1e3 * pace.start * row.runs)
    assert found.expected_ms == pytest.approx(sum(row.expected_ms for row in found.kernels))
    assert min(pace[:5]) >= 1  # nothing is faster than its bound


def test_where_the_time_goes_is_in_text_data_and_page():
    found = of_step("h100")
    text = str(found)
    table = text[text.index("Where the time goes on h100") :]
    assert all(row.kind in table for row in found.kernels) and "expected" in table
    assert all(len(line) <= 80 for line in table.splitlines())
    plain = json.loads(json.dumps(found.to_dict()))
    assert [row["kind"] for row in plain["kernels"]] == [row.kind for row in found.kernels]
    assert plain["expected_ms"] == found.expected_ms and plain["kernels_ms"] == found.kernels_ms
    page = found.to_html()
    assert "Where the time goes on h100" in page and "Time by kind of kernel" in page
    times = [row.expected_ms for row in found.kernels]
    assert times == sorted(times, reverse=True)


def test_odd_axis_is_named_with_its_cure_and_what_it_costs():
    found, pace = of_step("h100"), PACES["h100"]
    (note,) = [note for note in found.notes if "odd axis" in note]
    assert "1001 in Net/head" in note and "multiple of 8" in note and "pad" in note
    odd = next(row for row in found.kernels if row.kind == "matmuls with an odd axis")
    assert f"{odd.bound_ms * (pace.odd - pace.matmuls):.2f} ms" in note
    even = of_step("h100", STEP.replace("1001", "1008"))
    assert not any("odd axis" in note for note in even.notes)
    assert even.expected_ms < found.expected_ms


@pytest.mark.parametrize("target", ["a100-80", "v100", "b200"])
def test_cards_without_timed_steps_have_bounds_only(target):
    found = of_step(target)
    assert found.expected_ms is None and found.kernels and found.kernels_ms > 0
    assert all(row.expected_ms is None for row in found.kernels)
    assert any(f"No step was timed on {target}" in note for note in found.notes)
    table = str(found)[str(found).index("Where the time goes") :]
    assert "expected" not in table.split("\n\n")[0]


def test_constants_of_another_card_are_marked_as_scaled():
    of_h100, of_h200 = of_step("h100"), of_step("h200")
    assert 0 < of_h200.expected_ms < of_h100.expected_ms  # more bandwidth, the same kernels
    assert any("scaled" in note and "H100" in note for note in of_h200.notes)
    assert not any("scaled" in note for note in of_h100.notes)


def test_a_tpu_has_no_sum_over_kernels():
    found = report("v5e", "scan")
    assert found.kernels == () and found.expected_ms is None
    assert found.kernels_ms == found.roofline_ms
    assert "Where the time goes" not in str(found)
