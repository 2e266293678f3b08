"""The section of the gpu suite: its goals, and mpjax's steps relative to its rivals'."""

from typing import Any

from benchmarks.models import TITLES
from benchmarks.on_gpu import goals
from benchmarks.on_gpu.speed import OURS
from benchmarks.on_gpu.statistics import quotient
from benchmarks.on_gpu.tables import reason
from benchmarks.page.goals import RANGE, Goal, every, recorded
from benchmarks.page.tables import UNKNOWN, above, shortfalls, shown, table, written

PREDICTED = """What `compile_for` predicts without the device, as a share of what was measured: the
memory, of the most in use while steps run, and of the executable that the device compiled after
tuning its kernels; the bytes that this executable moves by the same count; and the time of the
roofline, a lower bound, of the time of a step.
"""
RATIOS = ("predicted_over_peak", "predicted_over_compiled", "predicted_over_gb")
NAMES = {
    "torch autocast, compile": "PyTorch (autocast, compiled)",
    "by hand": "casts by hand",
    "by hand, fused": "casts by hand, both with fused attention",
}
PLAIN = {"float32, TF32": "float32 (TF32)", "by hand": "casts by hand"}
QUALITY = " no worse than float32's seeds"


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns the goals, a table of steps for each model, and the ratios above 1.00x."""
    rows = stored["cases"]
    parts = [
        "A ratio is the median over rounds, with its 95% bootstrap interval in brackets. "
        "*float32, TF32* is float32 as JAX runs it by default.\n",
        "### Goals on a GPU\n",
        every(judged(stored)),
    ]
    short = []
    for case, rivals in rows.items():
        part, _, model = case.partition(" ")
        if part != "speed":
            continue
        timed = [(rival, row) for rival, row in rivals.items() if not reason(row)]
        columns = [way for way in OURS if any(_ratio(row, way, rival) for rival, row in timed)]
        relative = (f"{shown(way)}, relative to it" for way in columns)
        parts.append(f"### Time of a step on a GPU: {TITLES[model]}\n")
        parts.append(
            table(
                ("trained with", "time", "share of the bfloat16 peak", *relative),
                [_beside(rival, row, columns) for rival, row in timed],
            )
        )
        left = {shown(rival): why for rival, row in rivals.items() if (why := reason(row))}
        parts += [f"{rival}: {why}.\n" for rival, why in left.items()]
        for name, ratio in _ratios(rivals):
            if above(ratio["median"]):
                cause = causes.get(model, {}).get(name, UNKNOWN)
                short.append((TITLES[model], shown(name), ratio["median"], cause))
    if any(row.get("ratios") for ways in rows.values() for row in ways.values()):
        parts.append(shortfalls(short) if short else "No rival is faster than mpjax.\n")
    parts += ["### Predicted and measured memory\n", PREDICTED, _predictions(rows)]
    return "\n".join(parts)


def judged(stored: dict[str, Any]) -> list[Goal]:
    """Returns the goals."""
    return [_goal(name, row) for name, row in goals.found(stored["cases"])]


def _goal(name: str, row: dict[str, Any]) -> Goal:
    """Returns a goal, whose name is "model: rule", "policy: figure ..." or one without a colon."""
    of, _, rule = name.rpartition(": ")
    way = rule.removeprefix("memory of ").removesuffix(" as predicted")
    rival = rule.removeprefix("faster than ").removeprefix("not slower than ").split(" times ")[-1]
    sense, unit, title = "<=", "x", TITLES.get(of, of)
    if rule.endswith(QUALITY):
        title = f"{of}, {shown(rule.removesuffix(QUALITY))}"
        rule, sense, unit = "held-out result no worse than float32", RANGE, ""
    elif way != rule:
        title = f"{TITLES[of]}, {shown(way)}"
        rule, sense = "predicted memory as a share of the peak", RANGE
    elif rival != rule:
        rule = f"time of a step relative to {NAMES.get(rival, shown(rival))}"
    elif of:
        sense, unit = ">=", ""
    else:
        rule, unit = "failing tests of this repository", ""
    same = not (sense == RANGE and unit == "")
    return recorded(row, rule, title, sense, unit, same)


def headline(stored: dict[str, Any]) -> str:
    """Returns the times of mpjax's steps relative to casts by hand and to float32, as sentences."""
    said = []
    for case, rivals in stored["cases"].items():
        part, _, model = case.partition(" ")
        found = [_ratio(rivals.get(rival, {}), "mpjax", rival) for rival in PLAIN]
        if part == "speed" and all(found):
            times = [
                f"{ratio['median']:.2f}x the time of {name}"
                for ratio, name in zip(found, PLAIN.values(), strict=True)
            ]
            said.append(f"{TITLES[model]} takes {' and '.join(times)}")
    if not said:
        return ""
    return f"Timed on one {stored['device']}, a step of " + ", and one of ".join(said) + ".\n"


def readme(rows: dict[str, Any]) -> str:
    """What the README says of these results."""
    times, memory = rows["speed gpt2"], rows["memory gpt2"]
    plain, small = "float32, TF32", "mpjax 0, chunked loss, fused"
    ways = ("by hand", "mpjax", "mpjax fused", small)
    hand, ours, fused, least = (f"{times[way]['ms'] / times[plain]['ms']:.2f}x" for way in ways)
    share = f"{memory[small]['peak'] / memory[plain]['peak']:.2f}x"
    return (
        f"Measured on an H100, this step takes {hand} the time of float32 with flax's `dtype=`, "
        f"{ours} with mpjax and {fused} with `fused_attention=true`; with `storage=0` and "
        f"`chunked_loss=true` too, {least}, in {share} the memory"
    )


def _predictions(rows: dict[str, Any]) -> str:
    """Returns the table of predicted memory and bytes relative to the device's."""
    columns = ("memory, of the peak", "of the executable", "bytes moved", "roofline, of the time")
    found = [
        (
            f"{TITLES[model]}, {shown(way)}",
            *(f"{row[key]:.3f}" if key in row else None for key in RATIOS),
            _roofline(row, rows.get(f"speed {model}", {}).get(way, {})),
        )
        for model, ways in (
            (c.removeprefix("memory "), w) for c, w in rows.items() if "memory" in c
        )
        for way, row in ways.items()
        if "predicted" in row
    ]
    return table(("model, program", *columns), found)


def _roofline(row: dict[str, Any], timed: dict[str, Any]) -> str | None:
    """Returns the roofline's time as a share of the measured time."""
    if "memory_ms" not in row or "ms" not in timed:
        return None
    return f"{max(row['memory_ms'], row['compute_ms']) / timed['ms']:.2f}"


def _beside(rival: str, row: dict[str, Any], columns: list[str]) -> tuple[str, ...]:
    found = [_ratio(row, way, rival) for way in columns]
    cells = [
        f"{written(r['median'])}{quotient(r)[quotient(r).index(' ') :]}" if r else "-"
        for r in found
    ]
    step = f"{row['ms']:.1f} ms" if "ms" in row else "-"
    share = f"{row['mfu']:.1%}" if row.get("mfu") else "-"
    return shown(rival), step, share, *cells


def _ratio(row: dict[str, Any], way: str, rival: str) -> dict[str, float] | None:
    return row.get("ratios", {}).get(f"{way} / {rival}")


def _ratios(rivals: dict[str, dict[str, Any]]):
    """Yields the ratios of mpjax's time to that of other rivals."""
    for rival, row in rivals.items():
        if not rival.startswith("mpjax"):
            yield from row.get("ratios", {}).items()
