"""Writes docs/performance.md: tables and charts from the JSON files of the suites.

Each suite with results has a section. `aot` writes the section of the aot suite; `plain` writes the
sections of suites without a module here. A section is a function ``section(results, causes)`` that
returns ``(text, charts)``. ``results`` is the suite's JSON. ``causes`` is the suite's part of
``causes.toml``, which says by case why a figure is no better.
"""

import importlib
import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any

from benchmarks import HERE, RESULTS, SUITES
from benchmarks.page.charts import Chart, draw

DOCS = HERE.parent / "docs"
PAGE = DOCS / "performance.md"
PICTURES = DOCS / "pictures"
CAUSES = HERE / "causes.toml"

INTRO = """# Performance

This page compares the cost of training under mpjax with float32, with casts placed by hand and
with other libraries: the same model, data and optimizer, measured in one run. Figures are ratios,
and less is better: 0.75x relative to casts by hand means a quarter less than they take. **A ratio
of mpjax above 1.00x is bold**, and a table gives its cause.

`python -m benchmarks --page` writes this page from the files in
[benchmarks/results](../benchmarks/results), which the benchmark suites write; no figure is typed
by hand. The models are in [benchmarks/models](../benchmarks/models), and the other libraries in
[benchmarks/rivals.py](../benchmarks/rivals.py).
"""

TITLES = {
    "aot": "Compiled for GPUs and TPUs",
    "ladder": "Settings that save memory",
    "gpu": "On a GPU",
    "cpu": "On a CPU",
    "scaling": "As models and devices grow",
}


# Suites whose tables are on pages of their subjects.
TABLES = {"watching": "watching", "weights": "weights", "fit": "memory"}


def render(results: Path = RESULTS) -> tuple[str, dict[str, Chart]]:
    """Returns the text of the page, and its charts by name."""
    causes = tomllib.loads(CAUSES.read_text())
    parts, charts = [INTRO], {}
    for suite, title in TITLES.items():
        path = results / f"{suite}.json"
        text, drawn = "Not measured.\n", {}
        if path.exists():
            stored = json.loads(path.read_text())
            found, drawn = _section(suite)(stored, causes.get(suite, {}))
            text = f"{SUITES[suite][0].upper()}{SUITES[suite][1:]}.\n\n{origin(stored)}\n\n{found}"
        parts.append(f"## {title}\n\n{text}")
        charts |= drawn
    return "\n".join(parts), charts


def write() -> None:
    """Writes the page, the tables of other pages, and the charts with changed figures."""
    text, charts = render()
    PAGE.write_text(text)
    for page, filled in filled_pages().items():
        page.write_text(filled)
    PICTURES.mkdir(exist_ok=True)
    for name, chart in charts.items():
        draw(chart, PICTURES / f"{name}.svg")
    print(f"{PAGE}, {len(charts)} charts")


def filled_pages(results: Path = RESULTS) -> dict[Path, str]:
    """Returns the pages that show a suite's table between two marks, with the current table."""
    filled = {}
    for name, subject in TABLES.items():
        page, path = DOCS / f"{subject}.md", results / f"{name}.json"
        stored = json.loads(path.read_text()) if path.exists() else None
        text = f"{_section(name)(stored, {})[0]}\n{origin(stored)}" if stored else "Not measured."
        before, mark, rest = page.read_text().partition(f"<!-- table: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        filled[page] = f"{before}{mark}{text.strip()}\n{end}{after}"
    return filled


def origin(stored: dict[str, Any]) -> str:
    """Returns the origin of results: the command, versions, the device."""
    versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    return f"`{stored['command']}`. Device: {stored['device']}; {versions}; {stored['date']}."


def _section(suite: str):
    own = f"benchmarks.page.{suite}"
    found = importlib.util.find_spec(own)
    return importlib.import_module(own if found else "benchmarks.page.plain").section
