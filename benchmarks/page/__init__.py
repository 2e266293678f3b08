"""Writes the results of the suites into the documentation: tables and charts from JSON files.

docs/performance_tables.md is written as a whole, with a section for each suite: `aot` writes that
of the aot suite, and `plain` those of suites without a module here. Other pages are written by hand
except for what is between ``<!-- table: NAME -->`` and ``<!-- end -->``: docs/performance.md, the
summary, and pages with the table of a suite. A section is a function ``section(results, causes)``
that returns text. ``results`` is the suite's JSON. ``causes`` is the suite's part of
``causes.toml``, which says by case why a figure is no better.
"""

import importlib
import importlib.util
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import HERE, RESULTS, SUITES
from benchmarks.page import aot, cpu, goals, gpu
from benchmarks.page.charts import Chart, drawn, image
from benchmarks.page.tables import prose

DOCS = HERE.parent / "docs"
PAGE, SUMMARY = DOCS / "performance_tables.md", DOCS / "performance.md"
PICTURES = DOCS / "pictures"
CAUSES = HERE / "causes.toml"

INTRO = """# Benchmark tables

The numbers behind [Performance](performance.md). Ratios: lower is better. 0.75x means 25% less.
**Ratios of mpjax above 1.00x**, where it loses, are bold; the last column of the tables below them
refers to the [causes](#causes-of-ratios-above-100x).

*By hand* is the same model with casts written into it. `python -m benchmarks --page` writes this
page from the files in [benchmarks/results](../benchmarks/results), which the benchmark suites
write. The models are in [benchmarks/models](../benchmarks/models), and the other libraries in
[benchmarks/rivals.py](../benchmarks/rivals.py).
"""

TITLES = {
    "aot": "Compiled for GPUs and TPUs",
    "ladder": "Memory settings",
    "fit": "Memory and roofline of each setting",
    "padding": "Matmuls with odd axes",
    "tried": "Small kernels and known bytes",
    "gpu": "Timed on a GPU",
    "gpu_session": "Predictions tried on a GPU",
    "expected": "Expected and measured times",
    "cpu": "Timed on a CPU",
    "errors": "Estimated and measured errors",
    "scaling": "Size of models and number of devices",
}
UNMEASURED = "Not measured.\n"

# Suites whose tables are on pages of their subjects.
TABLES = {"watching": "watching", "weights": "weights", "others": "other_peoples_code"}
# The suites with goals, and what each row of the summary says of where it was measured.
GOALS = {"aot": ("compiled", aot.goals), "gpu": ("GPU", gpu.judged), "cpu": ("CPU", cpu.judged)}


def render(results: Path = RESULTS) -> str:
    """Returns the text of the page of all tables."""
    causes = tomllib.loads(CAUSES.read_text())
    parts = [INTRO]
    for suite, title in TITLES.items():
        text = UNMEASURED
        if stored := _read(results, suite):
            found = _section(suite)(stored, causes.get(suite, {}))
            text = f"{SUITES[suite][0].upper()}{SUITES[suite][1:]}.\n\n{origin(stored)}\n\n{found}"
        parts.append(f"## {title}\n\n{text}")
    lines = "\n".join(parts).splitlines()
    used = {label for line in lines for label in line.rpartition(" | ")[2][:-2].split(", ")}
    labels = [(label, why) for label, why in causes["causes"].items() if label in used]
    parts.append(f"## Causes of ratios above 1.00x\n\n{prose(('cause', 'what happens'), labels)}")
    return "\n".join(parts)


def charts(results: Path = RESULTS) -> dict[str, Chart]:
    """Returns the charts by name."""
    stored = _read(results, "aot")
    return aot.charts(stored) if stored else {}


def write() -> None:
    """Writes the pages and the charts."""
    PAGE.write_text(render())
    for page, filled in filled_pages().items():
        page.write_text(filled)
    pictures = charts()
    for name, chart in pictures.items():
        (PICTURES / f"{name}.svg").write_text(drawn(chart))
    print(f"{PAGE}, {SUMMARY}, {len(pictures)} charts")


def filled_pages(results: Path = RESULTS) -> dict[Path, str]:
    """Returns the pages with generated parts between two marks, with what these are now."""
    filled: dict[Path, str] = {}
    for page, name, text in _parts(results):
        before, mark, rest = filled.get(page, page.read_text()).partition(
            f"<!-- table: {name} -->\n"
        )
        _, end, after = rest.partition("<!-- end -->")
        filled[page] = f"{before}{mark}{text.strip()}\n{end}{after}"
    return filled


def _parts(results: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields the generated parts of pages: the page, the name of the part, its text."""
    for name, subject in TABLES.items():
        stored = _read(results, name)
        text = f"{_section(name)(stored, {})}\n{origin(stored)}" if stored else UNMEASURED
        yield DOCS / f"{subject}.md", name, text
    found = {suite: stored for suite in GOALS if (stored := _read(results, suite))}
    judged = {suite: GOALS[suite][1](stored) for suite, stored in found.items()}
    pictures = charts(results)
    yield SUMMARY, "unmeasured", unmeasured(found, judged)
    yield SUMMARY, "headline", headline(found)
    for name, chart in pictures.items():
        yield SUMMARY, name, image(name, chart)
    rows = ((GOALS[suite][0], goals_) for suite, goals_ in judged.items())
    yield SUMMARY, "goals", goals.summary(rows) if judged else UNMEASURED


def unmeasured(found: dict[str, Any], judged: dict[str, list[goals.Goal]]) -> str:
    """Returns what the suites with goals did not measure."""
    parts = []
    for suite, of_suite in judged.items():
        if left := [goal for goal in of_suite if goal.met is None]:
            where = {"aot": "Compiled"}.get(suite, f"On the {found[suite]['device']}")
            number = f"{len(left)} of {len(of_suite)} goals were"
            parts.append(f"{where}, {number} not measured:\n\n{goals.unmeasured(left)}")
    return "\n".join(parts) or "All goals were measured.\n"


def headline(found: dict[str, Any]) -> str:
    """Returns the means over all models, and the times on a GPU."""
    parts = []
    if "aot" in found:
        parts.append(aot.headline(found["aot"]["cases"]))
    if "gpu" in found:
        parts.append(gpu.headline(found["gpu"]))
    return "\n".join(parts) or UNMEASURED


def origin(stored: dict[str, Any]) -> str:
    """Returns the origin of results: the command, the device, versions."""
    device = re.sub(r"none: compiled for (an )?absent (\w+)", _compiled, stored["device"])
    versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    return f"`{stored['command']}`. Device: {device}; {versions}; {stored['date']}."


def _compiled(match: re.Match) -> str:
    return "none, cross-compiled" + (f" for an {match[2]}" if match[1] else "")


def _read(results: Path, suite: str) -> dict[str, Any] | None:
    path = results / f"{suite}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _section(suite: str):
    own = f"benchmarks.page.{suite}"
    found = importlib.util.find_spec(own)
    return importlib.import_module(own if found else "benchmarks.page.plain").section
