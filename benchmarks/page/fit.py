"""The table of the frontier of each model, beside its default."""

from typing import Any

from benchmarks import gate
from benchmarks.fit import JUDGED, LAYERS, frontier, place
from benchmarks.models import TITLES
from benchmarks.page.tables import table
from benchmarks.results import FAILED

NOTE = """Memory of the whole step and its roofline, relative to the policy as given; **bold** is on
the frontier. `jax.checkpoint` wraps the whole loss, or each layer where the row says so.
"""


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns the table."""
    rows = []
    for case in (*gate.CASES, LAYERS):  # whole models would make a table of a hundred rows
        found = stored["cases"].get(case, {})
        settings = {name: row for name, row in found.items() if FAILED not in row}
        if JUDGED[0] not in settings:
            continue
        (memory, ms), best = place(settings[JUDGED[0]]), frontier(settings)
        for name in dict.fromkeys((*best, *(n for n in JUDGED[1:] if n in settings))):
            took, lasts = place(settings[name])
            shown = f"**{name}**" if name in best else name
            rows.append((titled(case), shown, f"{took / memory:.2f}x", f"{lasts / ms:.2f}x"))
    return f"{table(['model', 'setting', 'memory', 'roofline'], rows)}\n{NOTE}"


def titled(case: str) -> str:
    """Returns the title of a case, which says what is not the whole model."""
    model = case.removesuffix("_layers")
    if case == LAYERS:
        return f"{TITLES[model]}, around each layer"
    return f"{TITLES[model]}, few layers" if gate.CASES[case][0] else TITLES[model]
