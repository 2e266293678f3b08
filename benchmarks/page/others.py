"""The tables of docs/other_peoples_code.md: other people's training code, unchanged."""

import math
from collections.abc import Iterator
from typing import Any

from benchmarks.others import ABSENT, BASES
from benchmarks.others.runs import same
from benchmarks.page.tables import Cell, prose, table, written
from benchmarks.results import FAILED, SKIPPED

Rows = dict[str, Any]
RUN, PLAIN, SAME = "run mixed_bfloat16", "float32", "run float32"
COLUMNS = (
    *("code base", "command", "lines changed", "functions planned", "16-bit FLOPs"),
    *("loss, mpjax", "loss, own setting", "gradient, mpjax", "same in float32"),
)
COSTS = (
    *("code base", "step", "memory", "to float32", "to its own setting"),
    *("bytes moved", "to float32", "to its own setting"),
)
KINDS = ("code base", "version", "its own 16-bit setting", "replaced to run it here")
HALF = "mixed_bfloat16"
# What notes say of gradients whose errors are not known.
NO_ERROR = ("no error of", "is not finite", "is no relative error")


def section(stored: Rows, causes: Rows) -> str:
    """Returns the table of runs, that of compiled steps, and what did not work."""
    cases = stored["cases"]
    runs = [run_cells(case, rows) for case, rows in cases.items() if "losses" in rows.get(RUN, {})]
    costs = [cells for case, rows in cases.items() for cells in cost_cells(case, rows)]
    parts = [f"## Runs\n\n{table(COLUMNS, runs, 2)}"]
    if costs:
        parts.append(f"## Steps compiled for an H100\n\n{table(COSTS, costs, 2)}")
    parts.append(f"## Versions, settings and shims\n\n{prose(KINDS, map(kind_cells, cases))}")
    if failures := [*unmeasured(cases)]:
        parts.append(f"## What did not work, and why\n\n{prose(('code base', 'why'), failures)}")
    return "\n".join(parts)


def run_cells(case: str, rows: Rows) -> list[Cell]:
    """Returns what `mpjax run` makes of a script."""
    ran = rows[RUN]
    worst = [
        float(row["gradient_error"])  # JSON has "inf" as text
        for step in rows.get("survey", {}).get("steps", ())
        if "gradient_error" in (row := step["rows"].get(HALF, {}))
    ]
    again = rows.get(SAME, {})
    alike = same(rows[PLAIN], again) if "losses" in again else None
    read = f"yes, {again['numbers']} values" if "numbers" in again else "yes"
    return [
        title(case),
        f"`mpjax run {script(case)}`",
        "0",
        f"{ran.get('planned', 0)} of {ran.get('differentiated', 0)}",
        percent(ran.get("half_flops")),
        difference(rows[PLAIN], ran),
        difference(rows[PLAIN], rows.get("own", {})),
        percent(max(worst, default=None)),
        {True: read, False: "**no**", None: None}[alike],
    ]


def cost_cells(case: str, rows: Rows) -> Iterator[list[Cell]]:
    """Yields what the survey of a script says of each step, compiled for an H100."""
    own_steps = rows.get("survey own", {}).get("steps", [])
    for step in rows.get("survey", {}).get("steps", ()):
        whole, half = (step["rows"].get(policy, {}).get("h100", {}) for policy in (PLAIN, HALF))
        own = next((s for s in own_steps if s["name"] == step["name"]), None)
        theirs = next(iter(own["rows"].values()), {}).get("h100", {}) if own else {}
        if not half.get("bytes_accessed"):
            continue
        cells: list[Cell] = [title(case), f"`{step['name']}`"]
        for key, unit, per in (("temp_bytes", "MiB", 2**20), ("bytes_accessed", "MB", 1e6)):
            cells.append(f"{half.get(key, 0) / per:.2f} {unit}")
            cells += [written(ratio(half.get(key), other.get(key))) for other in (whole, theirs)]
        yield cells


def kind_cells(case: str) -> tuple[str, ...]:
    """Returns what a code base is, its own 16-bit setting, and what is replaced to run it here."""
    base = BASES.get(case, {})
    version = base.get("packages", [""])[0].replace("==", " ")
    if "repository" in base:
        version = f"{base['repository'].rpartition('github.com/')[2]} at {base['commit'][:12]}"
    if "jax" in base:
        version += f", with jax {base['jax']}"
    return title(case), version, base.get("setting", "none"), base.get("shim", "nothing")


def unmeasured(cases: Rows) -> Iterator[tuple[str, str]]:
    """Yields the code bases of which something could not be measured, and why."""
    for case, rows in cases.items():
        reasons: dict[str, list[str]] = {}
        for way, row in rows.items():
            if reason := row.get(FAILED) or row.get(SKIPPED):
                reasons.setdefault(reason, []).append(way)
        for reason, ways in reasons.items():
            yield title(case), f"{', '.join(ways)}: {reason}"
        for reason in rows.get(RUN, {}).get("reasons", ()):
            yield title(case), f"no matmul of a function runs in 16 bits: {reason}"
        for reason in unknown(rows):
            yield title(case), reason
        for note in BASES.get(case, {}).get("notes", ()):
            yield title(case), note
    for base in ABSENT.values():
        yield base["title"], base["why"]


def unknown(rows: Rows) -> Iterator[str]:
    """Yields why a survey says nothing of a gradient's error, or of a step on an H100."""
    yield from rows.get("survey", {}).get("notes", ())
    for step in rows.get("survey", {}).get("steps", ()):
        notes = [note for row in (step, *step["rows"].values()) for note in row.get("notes", ())]
        told = [note for note in notes if any(words in note for words in NO_ERROR)]
        yield from dict.fromkeys(f"`{step['name']}`: {note}" for note in told)
        if refused := step["rows"].get(HALF, {}).get("h100", {}).get("refused"):
            yield f"`{step['name']}` is not compiled for an H100: {refused}"


def title(case: str) -> str:
    return BASES[case]["title"] if case in BASES else case


def script(case: str) -> str:
    """Returns how the script of a code base is called, without its sizes."""
    first = BASES.get(case, {}).get("command", [f"train_{case}.py"])
    shown = (word for word in first if "=" not in word and word[:2] != "--" and word != "{source}")
    return " ".join(word.rpartition("/")[2] for word in shown)


def difference(plain: Rows, other: Rows) -> Cell:
    """Returns how far losses are from those in float32: their mean distance, relative to these."""
    if "losses" not in other:
        return None
    pairs = zip(map(float, plain["losses"]), map(float, other["losses"]), strict=True)
    apart, size = map(sum, zip(*((abs(x - y), abs(x)) for x, y in pairs), strict=True))
    return percent(apart / size)


def ratio(mine: float | None, other: float | None) -> float | None:
    return mine / other if mine is not None and other else None


def percent(part: float | None) -> Cell:
    if part is not None and not math.isfinite(part):
        return "not finite"
    return None if part is None else f"{100 * part:.3g}%"
