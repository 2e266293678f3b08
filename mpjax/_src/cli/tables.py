"""The tables that each command prints: their columns and rows."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from mpjax._src.autocast.explain import COMPUTES, CastReport, Row
from mpjax._src.base.lines import where
from mpjax._src.cli.show import size, table
from mpjax._src.hardware.collectives import COLUMNS as WIRE
from mpjax._src.hardware.collectives import WORDS, CollectiveRow, grouped
from mpjax._src.hardware.devices import timed_in_words
from mpjax._src.instruments.compare import COLUMNS, Comparison, percent
from mpjax._src.lint.rule import Rule

LEFT, RIGHT = "left", "right"
Data = Mapping[str, Any]

# The rows of `compile`: the name of each, and its cell for one target.
COMPILED: dict[str, Callable[[Data], str]] = {
    "fits": lambda d: "yes" if d["fits"] else "NO",
    "memory": lambda d: size(d["total_bytes"]),
    "  of": lambda d: size(d["device_bytes"]),
    "  arguments": lambda d: size(d["argument_bytes"]),
    "  results": lambda d: size(d["output_bytes"]),
    "  aliased": lambda d: size(d["alias_bytes"]),
    "  temporary": lambda d: size(d["temp_bytes"]),
    "  code": lambda d: size(d["code_bytes"]),
    "GFLOP": lambda d: _figure(d["flops"] / 1e9),
    "  in matmuls": lambda d: _figure(d["matmul_flops"] / 1e9),
    "GB moved": lambda d: _figure(d["bytes_accessed"] / 1e9),
    "sent to others": lambda d: size(d["wire_bytes"]) if d["devices"] > 1 else "-",
    "roofline, ms": lambda d: _figure(d["roofline_ms"]),
    "  bound by": lambda d: d["bound"],
    "matmuls": lambda d: ", ".join(f"{n} {dtype}" for dtype, n in d["matmul_dtypes"].items()),
    "  widened": lambda d: f"{sum(row['share'] for row in d['disguised']):.1%}",
}

# The number of results that `compare` lists.
SHOWN = 8


def doctor(found: Data) -> None:
    """Prints versions, devices and self-tests."""
    click.echo(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    devices = collections.Counter(
        (d["name"], ", ".join(d["fast"]) or "float32 only", d["policy"], d["reason"])
        for d in found["devices"]
    )
    counted = [(f"{count} x {name}", *rest) for (name, *rest), count in devices.items()]
    table({"device": LEFT, "fast": LEFT, "policy": LEFT, "why": LEFT}, counted)
    checks = [(c["dtype"], c["name"], c["status"], c["found"]) for c in found["checks"]]
    table({"dtype": LEFT, "test": LEFT, "": LEFT, "found": LEFT}, checks)
    click.echo(f"\nRecommended policy: {found['policy']}")
    if found["matmul_times"]:
        click.echo(timed_in_words(found["matmul_times"]))
    for problem in found["problems"]:
        click.echo("\n{package}: {what}. What to do: {advice}. ({source})".format(**problem))
    if found["flags"]:
        rows = [(f["variable"], f["flag"], f["now"] or "-", f["why"]) for f in found["flags"]]
        table({"set in": LEFT, "worth trying": LEFT, "now": LEFT, "why": LEFT}, rows)


def explain(report: CastReport, rows: int) -> None:
    """Prints a report of autocast with at most ``rows`` of its rows."""
    click.echo("\n".join(report.summary()))
    counts = report.counts()
    if counts:
        table({"operation": LEFT, **dict.fromkeys(COMPUTES, RIGHT)}, counts)
    short = [(r.primitive, r.after, _where(r), r.reason) for r in report.shortfalls()]
    if short:
        named = dict.fromkeys(("operation", "dtypes", "where", "why"), LEFT)
        table(named, short, "Not in half, or left as written:")
    listed = [
        (i, r.primitive, r.before, r.after, _where(r), _why(r))
        for i, r in enumerate(report.rows[:rows])
    ]
    if listed:
        named = dict.fromkeys(("operation", "written", "planned", "where", "why"), LEFT)
        table({"row": RIGHT, **named}, listed)


def compiled(found: Sequence[Data]) -> None:
    """Prints the reports of all compiled targets side by side, then errors and notes."""
    reports = [each for each in found if each["status"] == "compiled"]
    columns = {"": LEFT, **{each["target"]: RIGHT for each in reports}}
    rows = [(name, *(_cell(figure, d) for d in reports)) for name, figure in COMPILED.items()]
    if reports:
        table(columns, rows)
    for each in found:
        sent = [CollectiveRow(**row) for row in each.get("collectives", ())]
        if sent:
            titles = {name: LEFT if name in WORDS else RIGHT for name in WIRE}
            table(titles, grouped(sent), f"What each device of {each['target']} sends in one run:")
    remarks: dict[str, list[str]] = {}
    for each in found:
        for line in [each["error"]] if "error" in each else each.get("notes", ()):
            remarks.setdefault(line, []).append(each["target"])
    click.echo()
    for line, targets in remarks.items():
        click.echo(f"{', '.join(targets)}: {line}")


def compared(comparison: Comparison, top: int) -> None:
    """Prints the errors of the results and the worst rows of a comparison."""
    results = comparison.worst_results()
    table({"error": RIGHT, "result": LEFT}, [(percent(e), name) for name, e in results[:SHOWN]])
    if len(results) > SHOWN:
        click.echo(f"and {len(results) - SHOWN} more")
    for line in comparison.diverged:
        click.echo(f"float32 would have taken another path at {line}")
    columns = {name: RIGHT if i < 4 else LEFT for i, name in enumerate(COLUMNS)}
    table(columns, comparison.cells(top), "Operations, worst first:")
    if len(comparison.rows) > top:
        more = len(comparison.rows)
        click.echo(f"\n{more - top} more rows: --top {more} shows them.")


def rules(listed: Sequence[Rule]) -> None:
    """Prints the linter's rules: what each needs and what it finds."""
    columns = {"rule": LEFT, "needs": LEFT, "finds": LEFT}
    table(columns, [(rule.name, rule.needs, rule.summary) for rule in listed])


# ---- cells ---------------------------------------------------------------------------------------


def _cell(figure: Callable[[Data], str], found: Data) -> str:
    try:
        return figure(found)
    except KeyError:
        return "-"


def _figure(value: float) -> str:
    """Returns a number with at least three significant digits."""
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def _why(row: Row) -> str:
    return f"{row.reason}; {row.storage}" if row.storage else row.reason


def _where(row: Row) -> str:
    return row.scope or row.path or where(row.source, row.library)
