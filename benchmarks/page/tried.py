"""The section on changes to small kernels and known bytes: what each one wins, and costs."""

from typing import Any

from benchmarks.models import TITLES
from benchmarks.page.tables import table
from benchmarks.results import FAILED
from benchmarks.tried import CHANGES, WITH, WITHOUT

NOTE = """Each row is one change: a training step without → with it, all else as mpjax is. *Bytes*
are as XLA counts them (a loop's body once), and *bytes moved* count each iteration.
"""
WORDS = {
    "joined_updates": ("small parameters are updated together", "fewer kernels"),
    "joined_sums": ("small gradients are summed together", "fewer kernels"),
    "gradients_of_convolutions": (
        "gradients of convolutions are laid out as kernels",
        "no transposes",
    ),
    "empty_stacks": ("what a loop stacks starts without zeros", "fewer bytes"),
    "cast_before_the_loop": ("weights are cast before a loop", "the plan stores more"),
    "cast_before_the_loop_by_hand": ("weights are cast before a loop", "autocast stores more"),
    "gelu_before_its_bias": ("GELU's input is stored before its bias", "more bytes"),
    "copy_of_weights": ("the update writes 16-bit weights too", "more bytes"),
    "half_logits": (
        "logits are stored in 16 bits",
        "rounds them; [a cast of yours does it](memory.md#chunked-loss)",
    ),
    "half_logits_odd": ("logits are stored in 16 bits", "as above; a kernel takes off padding"),
}
FIGURES = {
    "kernels": ("kernels", "{:,}"),
    "temp_mib": ("memory, MiB", "{:,.0f}"),
    "bytes_gb": ("bytes, GB", "{:.2f}"),
    "looped_gb": ("bytes moved, GB", "{:.2f}"),
    "expected_ms": ("expected, ms", "{:.2f}"),
}


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns the table of all changes."""
    rows = []
    for case, change in CHANGES.items():
        if found := stored["cases"].get(case):
            ways = (way for way in change.way.split(", ") if way != "autocast")
            what, why = WORDS[case]
            kept = f"{'yes' if change.kept else 'no'}: {why}"
            rows.append((what, ", ".join([TITLES[change.model], *ways]), kept, *_cells(found)))
    head = ("change", "model", "kept?", *(name for name, _ in FIGURES.values()))
    return f"{NOTE}\n{table(head, rows)}"


def _cells(found: dict[str, Any]) -> list[str | None]:
    """Returns each figure without the change and with it, or why there is none."""
    pair = [found.get(name, {FAILED: "not measured"}) for name in (WITHOUT, WITH)]
    for row in pair:
        if FAILED in row:
            return [row[FAILED], *[None] * (len(FIGURES) - 1)]
    return [" → ".join(f.format(row[key]) for row in pair) for key, (_, f) in FIGURES.items()]
