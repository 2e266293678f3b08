"""The pages of results are what the results give, and say what these contain."""

import json
import re
import tomllib

import pytest

from benchmarks import RESULTS, SUITES
from benchmarks import page as pages
from benchmarks.aot import CASES
from benchmarks.page import PAGE, PICTURES, SUMMARY, TABLES, TITLES, aot, filled_pages, gpu, plain
from benchmarks.page.aot import section
from benchmarks.page.charts import STYLES, Chart, drawn, svg
from benchmarks.page.goals import RANGE, Goal, every, summary, unmeasured
from benchmarks.page.tables import above, mean, shortfalls, shown, table, written

ADVICE = "python -m benchmarks --page"


def test_committed_pages_and_charts_are_what_the_results_give():
    assert PAGE.read_text() == pages.render(), ADVICE
    for name, chart in pages.charts().items():
        assert (PICTURES / f"{name}.svg").read_text() == drawn(chart), ADVICE
    for page, filled in filled_pages().items():
        assert page.read_text() == filled, ADVICE


def test_every_suite_but_the_gate_has_a_section():
    assert {*TITLES, *TABLES} == set(SUITES) - {"gate"}


def test_pages_without_results_say_not_measured(tmp_path):
    assert pages.render(tmp_path).count("Not measured.") == len(TITLES)
    assert not pages.charts(tmp_path)
    filled = filled_pages(tmp_path)
    assert {*filled} == {SUMMARY, *(SUMMARY.parent / f"{page}.md" for page in TABLES.values())}
    assert all("Not measured." in text for text in filled.values())


def test_the_summary_is_short_and_begins_with_what_was_not_measured():
    lines = SUMMARY.read_text().splitlines()
    assert len(lines) <= 100
    assert next(line for line in lines if line.startswith("## ")) == "## What was not measured"
    assert sum(line.startswith("![") for line in lines) == len(pages.charts()) == 3


def test_every_cause_is_described_and_used():
    causes = tomllib.loads(pages.CAUSES.read_text())
    described = {*causes.pop("causes")}
    cases = [case for suite in causes.values() for case in suite.values()]
    used = {label for case in cases for labels in case.values() for label in labels}
    assert used == described
    text = PAGE.read_text()
    listed = re.findall(r"^\| ([^|]*) \|", text.rpartition("## Causes")[2], re.MULTILINE)
    assert {*listed[2:]} <= described and "float32 scatters" in listed


def row(**figures):
    base = {"temp_mib": 100.0, "bytes_gb": 10.0, "looped_gb": 10.0, "roofline_ms": 1.0}
    return {**base, "dtype": "bfloat16", "f32_matmuls": 2, **figures}


STORED = {
    "cases": {
        "h100/gpt2": {
            "float32": row(temp_mib=200.0),
            "by hand, strict": row(),
            "by hand": row(bytes_gb=12.5),
            "autocast": row(),
        },
        "h100/mamba": {"by hand, strict": row(), "autocast": row(temp_mib=106.0, f32_matmuls=0)},
        "h100/vit": {"by hand, strict": {"failed": "CompileError: no tiles"}, "autocast": row()},
        "batch-v100/resnet50": {"float32": {"batch": 50}, "autocast": {"batch": 100}},
    }
}


def test_performance_page_marks_ratios_above_one_with_their_cause():
    text = section(STORED, {"mamba": {"temp_mib": ["padding"]}})
    assert "| Mamba | 106 MiB | **1.06x** | 1.00x | 1.00x | 0 (2) |" in text
    assert "| Mamba, H100 | memory **1.06x** | padding |" in text
    assert "| Mamba, H100 | memory **1.06x** | not known |" in section(STORED, {})


def test_performance_page_shows_failures_and_ratios_of_known_rows():
    text, charts = section(STORED, {}), aot.charts(STORED)
    assert "| ViT-B/16, H100 | by hand, strict | CompileError: no tiles |" in text
    assert "| GPT-2 124M | 100 MiB | 1.00x | 0.80x | 1.00x | 2 (2) |" in text
    assert "geometric mean of 2 models | <= 0.75x | 1.03x | **not met** |" in text
    assert "bytes relative to strict casts by hand, models above 1.00x | <= 0 | 0 | met |" in text
    assert "| largest batch relative to float32: ResNet-50, V100 | >= 1.56x | 2.00x | met |" in text
    left = [goal.of for goal in aot.goals(STORED) if goal.met is None]
    assert "BERT-base, A100 40 GB" in left and "ResNet-50, V100" in left  # of 8-bit storage
    assert charts["aot_by_hand"].rows == ("GPT-2 124M", "Mamba")
    assert charts["aot_float32"].rows == ("GPT-2 124M",)


def test_a_suite_without_a_section_of_its_own_shows_its_ratios():
    ratios = {
        "autocast / by hand": {"median": 1.25, "quartiles": [1.2, 1.3]},
        "by hand / float32": 1.5,
    }
    cases = {"gpt2": {"steps": {"ratios": ratios}, "jmp": {"skipped": "not installed"}}}
    text = plain.section({"cases": cases}, {"gpt2": {"autocast / by hand": "an extra copy"}})
    assert "| gpt2 | autocast / by hand | **1.25x** | 1.20 to 1.30 |" in text
    assert "| gpt2 | by hand / float32 | 1.50x | - |" in text
    assert "| gpt2 | autocast / by hand **1.25x** | an extra copy |" in text
    assert "skipped: not installed" in text


def test_table_and_written_format_ratios():
    assert table(("a", "b"), [("x", None)]) == "| a | b |\n| --- | ---: |\n| x | - |\n"
    assert [written(r) for r in (None, 0.5, 1.004, 1.006)] == [None, "0.50x", "1.00x", "**1.01x**"]
    assert not above(None) and mean([]) is None and mean([2.0, None, 8.0]) == pytest.approx(4)


def test_names_of_the_results_are_shown_in_words():
    names = {
        "autocast, lean, chunked loss": "autocast, storage=lean, chunked loss",
        "mpjax 0.5": "mpjax, storage=0.5",
        "mpjax 0, chunked loss, fused": "mpjax, storage=0, chunked loss, fused attention",
        "mpjax fused": "mpjax, fused attention",
        "build_train_step, gate a select": "build_train_step, finite check by select",
        "autocast / float32, compile_s": "autocast / float32, compile time",
        "gpt2, width 512": "GPT-2, width 512",
        "MLP, 3 layers of width 2048, batch 8": "MLP, 3 layers of width 2048, batch 8",
        "digits_cnn, held_out_loss, O2:float16": "digits CNN, held-out loss, O2:float16",
    }
    assert {name: shown(name) for name in names} == names


def test_ratios_above_one_with_the_same_causes_share_a_row():
    found = [("a", "x", 1.2, ["one", "two"]), ("a", "y", 1.3, ["one", "two"]), ("a", "z", 2, "one")]
    assert "| a | x **1.20x**, y **1.30x** | one, two |\n| a | z **2.00x** | one |" in shortfalls(
        found
    )
    assert shortfalls([]) == "Nothing is above 1.00x.\n"


GOALS = [
    Goal("time", "one", "<=", 1.0, 0.5, True, interval=(0.4, 0.6)),
    Goal("time", "two", "<=", 0.8, 0.9, False, sure=False),
    Goal("time", "three, small", "<=", 1.0, None, None),
    Goal("models", "", "<=", 0, 1, False),
    Goal("loss", "one", RANGE, (1.0, 2.0), 1.5, True, "", same=False),
    Goal("loss", "two", RANGE, (10.0, 20.0), 15.0, True, "", same=False),
    Goal("loss", "none", RANGE, None, None, None, "", same=False),
]


def test_goals_are_listed_and_summed_up_by_kind():
    assert every(GOALS).splitlines()[2:] == [
        "| time: one | <= 1.00x | 0.50x (0.40x to 0.60x) | met |",
        "| time: two | <= 0.80x | 0.90x | **not met**, within noise |",
        "| models | <= 0 | 1 | **not met** |",
        "| loss: one | 1 to 2 | 1.5 | met |",
        "| loss: two | 10 to 20 | 15 | met |",
    ]
    assert summary([("CPU", GOALS)]).splitlines()[2:] == [
        "| CPU: time | <= 0.80x to 1.00x | 0.50x to 0.90x | **1 of 2** met, not two |",
        "| CPU: models | <= 0 | 1 | **not met** |",
        "| CPU: loss | the range of float32's seeds | - | 2 of 2 met |",
    ]
    assert "| CPU: time: one |" in summary([("CPU", GOALS[:1])])
    assert unmeasured(GOALS) == "- time: three\n- loss: none\n"


def test_a_chart_has_a_mark_for_each_ratio_in_colors_of_both_themes():
    series = {"autocast": (0.5, 1.2), "by hand": (None, 1.0)}
    rows = ("one", "a label that does not fit into one line")
    chart = Chart("Title", "relative to x", rows, {"memory": series, "bytes": series}, "Dots")
    text = drawn(chart)
    assert text == drawn(chart) and "relative to x; lower is better" in text
    assert text.count("<circle") == 2 * 2 + 1 and text.count("<polygon") == 2 + 1  # and the legend
    assert len(re.findall(">a label that does not|>into one line", text)) >= 1
    assert {*re.findall("#[0-9a-f]{6}", text)} == {svg.GREY, STYLES["autocast"][0], svg.ORANGE}
    assert "background" not in text and "<rect" not in text


def test_shown_results_have_command_device_versions_and_date():
    for suite in TITLES:
        path = RESULTS / f"{suite}.json"
        if path.exists():
            assert {"command", "device", "versions", "date"} <= set(json.loads(path.read_text()))


def test_readme_figures_are_what_the_results_give():
    cases = json.loads((RESULTS / "aot.json").read_text())["cases"]
    readme = " ".join((PAGE.parent.parent / "README.md").read_text().replace("\n>", "\n").split())
    measured = json.loads((RESULTS / "gpu.json").read_text())["cases"]
    for said in [*aot.readme(cases), gpu.readme(measured)]:
        assert said in readme, said
    found = [
        row["ratios"]["autocast / float32, seconds"]
        for suite, parts in (("cpu", ["tracing"]), ("scaling", ["layers", "programs"]))
        for part in parts
        for row in json.loads((RESULTS / f"{suite}.json").read_text())["cases"][part].values()
    ]
    page = "docs/performance_tables.md#tracing-and-compile-time"
    said = f"Tracing takes [{min(found):.1f}x to {max(found):.1f}x]({page})"
    assert said in readme, said


def test_strict_casts_by_hand_have_no_float32_matmul_on_any_device():
    cases = json.loads((RESULTS / "aot.json").read_text())["cases"]
    rows = {case: rivals[aot.HAND] for case, rivals in cases.items() if aot.HAND in rivals}
    assert {f"h100/{model}" for model in CASES} <= set(rows)
    assert [case for case, row in rows.items() if row["f32_matmuls"]] == []


def test_the_summary_has_the_pictures_and_the_means():
    stored = json.loads((RESULTS / "aot.json").read_text())
    text = SUMMARY.read_text()
    assert f"steps of {len(CASES)} models need" in text and aot.headline(stored["cases"]) in text
    assert aot.less(0.554) == "45% less" and aot.less(1.1) == "10% more"
    for name, chart in aot.charts(stored).items():
        assert f"![{chart.alt}](pictures/{name}.svg)" in text


DEVICES = {"H100": "h100", "A100": "a100-80", "B200": "b200", "V100": "v100", "TPU v5e": "v5e"}


def gains(cases, device, key):
    """Returns what each model needs on a device, relative to float32."""
    rows = [rows for case, rows in cases.items() if case.startswith(f"{device}/")]
    both = [(r["autocast"].get(key), r["float32"].get(key)) for r in rows if len(r) > 1]
    return [ours / theirs for ours, theirs in both if ours and theirs]


def test_the_page_of_gains_has_the_figures_of_the_results():
    page = (PAGE.parent / "will_it_help.md").read_text()
    cases = json.loads((RESULTS / "aot.json").read_text())["cases"]
    for name, device in DEVICES.items():
        (line,) = [
            line for line in page.splitlines() if line.startswith(f"| {name}") and "_" in line
        ]
        for key in ("temp_mib", "looped_gb"):
            found = gains(cases, device, key)
            shown = f"{mean(found):.2f}x ({min(found):.2f}x to {max(found):.2f}x)"
            assert f"| {shown} |" in line, f"{name}: {key} is {shown}"


def test_the_gains_of_models_are_those_of_the_performance_page():
    page = (PAGE.parent / "will_it_help.md").read_text().partition("## Gain by model")[2]
    rows = [line.split(" | ") for line in page.splitlines() if line.count(" | ") == 2]
    shown = {name[2:]: pairs for name, *pairs in rows if "x, " in pairs[0]}
    assert len(shown) == 9
    performance = PAGE.read_text()
    for name, (float32, by_hand) in shown.items():
        for pair in (float32, by_hand.removesuffix(" |")):
            assert f"\n| {name} | {pair} |" in performance, f"{name}: {pair}"
