"""docs/performance.md is what the results give, and its tables and charts say what they hold."""

import json

import pytest

from benchmarks import RESULTS, SUITES
from benchmarks.aot import CASES
from benchmarks.page import PAGE, PICTURES, TABLES, TITLES, aot, filled_pages, gpu, plain, render
from benchmarks.page.aot import section
from benchmarks.page.charts import Chart, draw, is_drawn
from benchmarks.page.tables import above, mean, table, written

ADVICE = "python -m benchmarks --page"


def test_committed_performance_page_is_what_the_results_give():
    text, charts = render()
    assert PAGE.read_text() == text, ADVICE
    for name, chart in charts.items():
        assert is_drawn(chart, PICTURES / f"{name}.svg"), ADVICE
    for page, filled in filled_pages().items():
        assert page.read_text() == filled, ADVICE


def test_every_suite_but_the_gate_has_a_section():
    assert {*TITLES, *TABLES} == set(SUITES) - {"gate"}


def test_performance_page_without_results_says_not_measured(tmp_path):
    text, charts = render(tmp_path)
    assert text.count("Not measured.") == len(TITLES) and not charts


def row(**figures):
    base = {"temp_mib": 100.0, "bytes_gb": 10.0, "looped_gb": 10.0, "roofline_ms": 1.0}
    return {**base, "dtype": "bfloat16", "f32_matmuls": 2, **figures}


STORED = {
    "cases": {
        "h100/gpt2": {"float32": row(temp_mib=200.0), "by hand": row(), "autocast": row()},
        "h100/mamba": {"by hand": row(), "autocast": row(temp_mib=106.0, f32_matmuls=0)},
        "h100/vit": {"by hand": {"failed": "CompileError: no tiles"}, "autocast": row()},
        "batch-v100/resnet50": {"float32": {"batch": 50}, "autocast": {"batch": 100}},
    }
}


def test_performance_page_marks_ratios_above_one_with_their_cause():
    text, _ = section(STORED, {"mamba": {"temp_mib": "slices are padded"}})
    assert "| Mamba | 106 MiB | **1.06x** | 1.00x | 1.00x | 0 (2) |" in text
    assert "| Mamba, H100 | memory | **1.06x** | slices are padded |" in text
    text, _ = section(STORED, {})
    assert "| Mamba, H100 | memory | **1.06x** | not known |" in text


def test_performance_page_shows_failures_and_ratios_of_known_rows():
    text, charts = section(STORED, {})
    assert "| h100/vit | by hand | CompileError: no tiles |" in text
    assert "geometric mean of 2 models | <= 0.75x | 1.03x | **not met** |" in text
    assert "bytes relative to casts by hand, H100: models above 1.00x | <= 0 | 0 | met |" in text
    assert "| largest batch relative to float32, ResNet-50, V100 | >= 1.56x | 2.00x | met |" in text
    assert "| largest batch relative to float32, BERT-base, A100 40 GB | >= 2.25x | - | not" in text
    assert charts["aot_by_hand"].rows == ("GPT-2 124M", "Mamba")
    assert charts["aot_float32"].rows == ("GPT-2 124M",)


def test_a_suite_without_a_section_of_its_own_shows_its_ratios():
    ratios = {
        "autocast / by hand": {"median": 1.25, "quartiles": [1.2, 1.3]},
        "by hand / float32": 1.5,
    }
    cases = {"gpt2": {"steps": {"ratios": ratios}, "jmp": {"skipped": "not installed"}}}
    text, _ = plain.section({"cases": cases}, {"gpt2": {"autocast / by hand": "an extra copy"}})
    assert "| gpt2 | autocast / by hand | **1.25x** | 1.20 to 1.30 |" in text
    assert "| gpt2 | by hand / float32 | 1.50x | - |" in text
    assert "| gpt2 | autocast / by hand | **1.25x** | an extra copy |" in text
    assert "skipped: not installed" in text


def test_table_and_written_format_ratios():
    assert table(("a", "b"), [("x", None)]) == "| a | b |\n| --- | ---: |\n| x | - |\n"
    assert [written(r) for r in (None, 0.5, 1.004, 1.006)] == [None, "0.50x", "1.00x", "**1.01x**"]
    assert not above(None) and mean([]) is None and mean([2.0, None, 8.0]) == pytest.approx(4)


def test_a_chart_is_the_same_bytes_each_time(tmp_path):
    pytest.importorskip("matplotlib")
    series = {"autocast": (0.5, 1.2), "by hand": (None, 1.0)}
    chart = Chart("Title", ("one", "two"), {"memory": series, "bytes": series}, "Dots")
    first, second = tmp_path / "first.svg", tmp_path / "second.svg"
    draw(chart, first)
    draw(chart, second)
    assert first.read_bytes() == second.read_bytes() and is_drawn(chart, first)
    other = Chart("Title", ("one", "two"), {"memory": series}, "Dots")
    assert not is_drawn(other, first)


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
    said = f"Tracing takes [{min(found):.1f}x to {max(found):.1f}x](docs/performance.md#tracing)"
    assert said in readme, said


def test_performance_page_has_the_overview_picture_and_the_means():
    cases = json.loads((RESULTS / "aot.json").read_text())["cases"]
    text, charts = aot.section({"cases": cases}, {})
    assert f"Over {len(CASES)} models, a step on an H100 takes" in text
    assert aot.headline(cases) in text
    assert f"![{charts['overview'].alt}](pictures/overview.svg)" in text


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
