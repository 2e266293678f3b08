"""The section of the aot suite: memory and bytes relative to casts by hand and float32."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from benchmarks.aot import ATTENTIVE, BATCHES, CASES, FIRST, HARDWARE
from benchmarks.aot import CODED as CODED_ON
from benchmarks.models import TITLES
from benchmarks.page.charts import Chart, image
from benchmarks.page.tables import MET, above, mean, shortfalls, table, written
from benchmarks.results import FAILED, SKIPPED

FIGURES = {"temp_mib": "memory", "bytes_gb": "bytes", "looped_gb": "bytes moved"}
ROOFLINE = {"roofline_ms": "roofline"}
HAND, FLOAT32 = "by hand", "float32"
OURS = ("autocast", "autocast, lean")
FUSED = "autocast, fused attention"
LEAN, CODED = "autocast, lean", "autocast, 8bit"
# A model of each kind, for the first picture.
FAMILIES = ("gpt2", "llama", "bert", "vit", "moe_ragged", "resnet50", "ddpm", "lstm", "mamba")

# The goals of autocast on an H100: for the geometric mean over models, and for single models.
MEANS = {"temp_mib": 0.75, "bytes_gb": 0.85}
MEMORY = {"resnet50": 0.6, "bert": 0.6}
LARGEST = {
    "batch-v100/resnet50": 1.56,
    "batch-a100-40/bert": 2.25,
    "batch-a100-40-once/bert": 2.25,
}
# The goals of 8-bit storage on an H100, relative to storage=lean: the memory of single models, and
# the bytes moved by all, as their geometric mean and at most.
CODED_MEMORY = {
    "gpt2": 0.69,
    "gpt2_medium": 0.66,
    "llama_unrolled": 0.63,
    "bert": 0.70,
    "vit": 0.66,
    "t5": 0.69,
    "resnet50": 0.68,
    "convnext": 0.55,
    "moe_onehot": 0.87,
    "ddpm": 0.67,
}
CODED_LARGEST = {"batch-v100/resnet50": 1.35, "batch-a100-40/bert": 1.35}
CODED_BYTES = {"geometric mean": 1.05, "most": 1.15}
COMPARE = {"<=": operator.le, ">=": operator.ge}

Rows = dict[str, dict[str, dict[str, Any]]]

HOW = """XLA's own compiler for the device compiles a training step, with its state donated
([`compile_for`](slow.md#memory-and-cost-on-a-device-you-dont-have)). Nothing
runs, so the figures do not change from run to run. Without a device there is no autotuning: a
real run may use other kernels.

- *memory*: what the step takes in addition to its arguments and results; *size* is the same in
  MiB.
- *bytes*: the bytes that XLA counts. It counts the body of a loop once, and cuDNN's convolutions
  not at all.
- *bytes moved*: the same with every iteration of a loop and every library call counted.
- *roofline*: the least time in which the device can move these bytes and compute these FLOPs.
"""

OTHERS = """flax's DynamicScale and mpjax's `build_train_step` train in float16, with a loss scale
and a gate that skips a step that is not finite. In the last three rows, that step is compiled in
bfloat16: without a gate, with the gate as a select (as on a GPU), and with the gate as a branch.
*Half scores* is `autocast` with `with_ops(half="dot_general")`; *half softmax* is casts by hand
with a half softmax.
"""


def section(stored: dict[str, Any], causes: dict[str, Any]) -> tuple[str, dict[str, Chart]]:
    """Returns the text of the section, and its charts by name."""
    cases: Rows = stored["cases"]
    charts = {
        "aot_by_hand": beside_hand(cases),
        "aot_float32": beside_float32(cases),
        "overview": overview(cases),
    }
    elsewhere = tuple(t for t in HARDWARE if t != "h100" and f"{t}/{CASES[0]}" in cases)
    text = [
        HOW,
        image("overview", charts["overview"]),
        f"Over {len(CASES)} models, a step on an H100 takes on average {headline(cases)}.\n",
        "### Goals\n",
        goals(cases),
        "### H100, relative to casts by hand\n",
        image("aot_by_hand", charts["aot_by_hand"]),
        f"`autocast`:\n\n{models('h100', 'autocast', HAND, cases)}",
        shortfalls(short(cases, causes, ("h100",))),
        f"`autocast` with `storage=lean`, which {causes.get('lean', {}).get('all', '')}:\n",
        models("h100", "autocast, lean", HAND, cases),
        "`autocast` with fused attention (`fused_attention=true` in the policy, off by default), "
        "for models with attention:\n",
        models("h100", FUSED, HAND, cases, ATTENTIVE),
        "### H100, 8-bit storage relative to lean storage\n",
        f"`autocast` with `storage=8bit`, which {causes.get('8bit', {}).get('all', '')}:\n",
        models("h100", CODED, LEAN, cases),
        "Memory and bytes moved on other hardware (float16 on the V100):\n",
        targets(LEAN, cases, CODED, CODED_ON),
        "### H100, relative to float32\n",
        image("aot_float32", charts["aot_float32"]),
        f"`autocast`:\n\n{models('h100', 'autocast', FLOAT32, cases)}",
        "### Other libraries\n",
        OTHERS,
        libraries(cases),
        "### Other hardware\n",
        "`autocast` relative to casts by hand: memory, bytes moved (float16 on the V100):\n",
        targets(HAND, cases),
        shortfalls(short(cases, causes, elsewhere)) if elsewhere else "",
        "Relative to float32:\n",
        targets(FLOAT32, cases),
        "### Largest batch\n",
        "The largest batch whose step fits into three quarters of the device's memory:\n",
        batches(cases, causes),
        failures(cases),
    ]
    return "\n".join(part for part in text if part), charts


def ratio(cases: Rows, case: str, ours: str, theirs: str, figure: str) -> float | None:
    """Returns the ratio of two rows of a case, or None if a row lacks the figure."""
    mine, other = (cases.get(case, {}).get(rival, {}).get(figure) for rival in (ours, theirs))
    return mine / other if mine is not None and other else None


def over_models(cases: Rows, target: str, ours: str, theirs: str, figure: str):
    return [ratio(cases, f"{target}/{model}", ours, theirs, figure) for model in CASES]


# ---- tables --------------------------------------------------------------------------------------


def goals(cases: Rows) -> str:
    """The goals, the measured values, and whether each goal is met."""
    rows = []
    for figure, most in MEANS.items():
        found = [r for r in over_models(cases, "h100", "autocast", HAND, figure) if r is not None]
        name = f"{FIGURES[figure]} relative to casts by hand, H100"
        over = sum(map(above, found)) if found else None
        rows.append(
            _goal(f"{name}: geometric mean of {len(found)} models", "<=", most, mean(found))
        )
        rows.append(_goal(f"{name}: models above 1.00x", "<=", 0, over))
    for model, most in MEMORY.items():
        value = ratio(cases, f"h100/{model}", "autocast", FLOAT32, "temp_mib")
        rows.append(_goal(f"memory relative to float32, {TITLES[model]}, H100", "<=", most, value))
    for model, most in CODED_MEMORY.items():
        value = ratio(cases, f"h100/{model}", CODED, LEAN, "temp_mib")
        name = f"memory under 8bit relative to lean, {TITLES[model]}"
        rows.append(_goal(name, "<=", most, value))
    moved = [r for r in over_models(cases, "h100", CODED, LEAN, "looped_gb") if r is not None]
    found_of = {"geometric mean": mean(moved), "most": max(moved, default=None)}
    for of, most in CODED_BYTES.items():
        name = f"bytes moved under 8bit relative to lean: {of} of {len(moved)} models"
        rows.append(_goal(name, "<=", most, found_of[of]))
    for case, least in LARGEST.items():
        value = ratio(cases, case, "autocast", FLOAT32, "batch")
        name = f"largest batch relative to float32, {_batched(case.split('/')[0])}"
        rows.append(_goal(name, ">=", least, value))
    for case, least in CODED_LARGEST.items():
        value = ratio(cases, case, CODED, LEAN, "batch")
        name = f"largest batch under 8bit relative to lean, {_batched(case.split('/')[0])}"
        rows.append(_goal(name, ">=", least, value))
    return table(("goal", "bound", "found", ""), rows)


def _goal(name: str, sense: str, bound: float, found: float | None) -> tuple[str | None, ...]:
    """Returns a row of the goals. A value counts as it is printed, rounded."""

    def shown(value: float) -> str:
        return f"{value:.2f}x" if isinstance(value, float) else str(value)

    if found is None:
        return name, f"{sense} {shown(bound)}", None, MET[None]
    met = COMPARE[sense](round(found, 2), bound)
    return name, f"{sense} {shown(bound)}", shown(found), MET[met]


def models(target: str, ours: str, theirs: str, cases: Rows, names=CASES) -> str:
    """One row for each model, and the geometric mean last."""
    rows = []
    figures = FIGURES | ROOFLINE if theirs == FLOAT32 else FIGURES
    for model in names:
        found = cases.get(f"{target}/{model}", {})
        ratios = (ratio(cases, f"{target}/{model}", ours, theirs, f) for f in figures)
        left = [found.get(rival, {}).get("f32_matmuls") for rival in (ours, theirs)]
        matmuls = f"{left[0]} ({left[1]})" if None not in left else None
        size = found.get(ours, {}).get("temp_mib")
        memory = f"{size:,.0f} MiB" if size is not None else None
        rows.append((TITLES[model], memory, *map(written, ratios), matmuls))
    means = (mean(over_models(cases, target, ours, theirs, figure)) for figure in figures)
    rows.append(("geometric mean", None, *map(written, means), None))
    header = ("model", "size", *figures.values(), f"float32 matmuls ({theirs})")
    return table(header, rows)


def short(cases: Rows, causes: dict[str, Any], targets: tuple[str, ...]):
    """Yields the figures in which autocast is above casts by hand: model, figure, ratio, cause."""
    for target in targets:
        for model in CASES:
            for figure, name in FIGURES.items():
                found = ratio(cases, f"{target}/{model}", "autocast", HAND, figure)
                if found is not None and above(found):
                    known = causes.get(f"{target}/{model}") or causes.get(model, {})
                    cause = known.get(figure) or known.get("all", "not known")
                    yield f"{TITLES[model]}, {HARDWARE[target]}", name, found, cause


def libraries(cases: Rows) -> str:
    """All rivals relative to float32, for the models that other libraries train too."""
    text = []
    for model in CASES:
        rivals = cases.get(f"h100/{model}", {})
        if set(rivals) <= {*FIRST, FUSED, CODED}:
            continue
        rows = []
        for rival, row in rivals.items():
            if SKIPPED in row or FAILED in row:
                continue
            found = (ratio(cases, f"h100/{model}", rival, FLOAT32, figure) for figure in FIGURES)
            cells = (row["dtype"], f"{row['temp_mib']:,.0f} MiB", *map(written, found))
            rows.append((rival, *cells, str(row["f32_matmuls"])))
        header = ("", "dtype", "size", *FIGURES.values(), "float32 matmuls")
        text.append(f"{TITLES[model]}, relative to float32:\n\n{table(header, rows)}")
    return "\n".join(text) or "Not measured.\n"


def targets(theirs: str, cases: Rows, ours: str = "autocast", names: Sequence[str] = CASES) -> str:
    """Models by target: memory and bytes moved."""
    figures = ("temp_mib", "looped_gb")

    def pair(target, model):
        found = [ratio(cases, f"{target}/{model}", ours, theirs, f) for f in figures]
        return None if None in found else found

    found = {t: {model: pair(t, model) for model in names} for t in HARDWARE}
    shown = [t for t, pairs in found.items() if any(pairs.values())]
    rows = [(TITLES[m], *(_pair(found[t][m]) for t in shown)) for m in names]
    means = []
    for target in shown:
        pairs = filter(None, found[target].values())
        means.append(_pair([mean(of) for of in zip(*pairs, strict=True)]))
    return table(("model", *(HARDWARE[t] for t in shown)), [*rows, ("geometric mean", *means)])


def _pair(ratios: Sequence[float | None] | None) -> str | None:
    return ratios and ", ".join(map(written, ratios))


def batches(cases: Rows, causes: dict[str, Any]) -> str:
    """The largest batches, and the reason why a batch is no larger."""
    rows, notes = [], []
    for part, (_, model, rivals, multiple, _) in BATCHES.items():
        for rival in rivals:
            row = cases.get(f"{part}/{model}", {}).get(rival, {})
            found = ratio(cases, f"{part}/{model}", rival, FLOAT32, "batch")
            rows.append(
                (
                    _batched(part),
                    rival,
                    str(row["batch"]) if "batch" in row else None,
                    str(multiple),
                    f"{found:.2f}x" if found else None,
                )
            )
        if known := causes.get(part):
            notes.append(f"\n{_batched(part)}: {known['all']}.\n")
    header = ("model", "trained with", "largest batch", "multiple of", "relative to float32")
    return table(header, rows) + "".join(notes)


def _batched(part: str) -> str:
    target, model, *_, flags = BATCHES[part]
    return f"{TITLES[model]}, {HARDWARE[target]}" + (", XLA's recomputation off" if flags else "")


def failures(cases: Rows) -> str:
    """The programs without figures, and the reasons."""
    rows = [
        (case, rival, row.get(FAILED) or f"skipped: {row[SKIPPED]}")
        for case, rivals in cases.items()
        for rival, row in rivals.items()
        if FAILED in row or SKIPPED in row
    ]
    return "### Not compiled\n\n" + table(("case", "rival", "why"), rows) if rows else ""


# ---- charts --------------------------------------------------------------------------------------


def beside_hand(cases: Rows) -> Chart:
    return _chart(
        cases,
        HAND,
        OURS,
        "A training step on an H100, relative to casts by hand (less is better)",
        "Memory and bytes of training steps under autocast, by model, relative to casts by hand",
    )


def beside_float32(cases: Rows) -> Chart:
    return _chart(
        cases,
        FLOAT32,
        (HAND, *OURS),
        "A training step on an H100, relative to float32 (less is better)",
        "Memory and bytes of training steps by hand and under autocast, relative to float32",
    )


def overview(cases: Rows) -> Chart:
    """The first picture: a model of each kind, and the mean over all models."""
    title = "A training step on an H100, relative to float32 (less is better)"
    alt = "Memory and bytes moved by training steps under autocast, relative to float32"
    shown, figures = (HAND, "autocast"), ("temp_mib", "looped_gb")
    chart = _chart(cases, FLOAT32, shown, title, alt, FAMILIES, figures)
    panels = {
        FIGURES[figure]: {
            rival: (*chart.panels[FIGURES[figure]][rival], _mean_of_all(cases, rival, figure))
            for rival in shown
        }
        for figure in figures
    }
    return dataclasses.replace(
        chart, rows=(*chart.rows, f"mean of {len(CASES)} models"), panels=panels
    )


def readme(cases: Rows) -> list[str]:
    """What the README says of these results: the rows of its table, and a part of a sentence."""
    gpt2 = cases["h100/gpt2"]

    def sizes(rival: str) -> tuple[str, str]:
        row = gpt2[rival]
        return f"{row['temp_mib'] / 1024:.1f} GiB", f"{row['looped_gb']:.0f} GB"

    over = [
        sum(map(above, over_models(cases, "h100", "autocast", HAND, figure)))
        for figure in ("temp_mib", "looped_gb")
    ]
    needs = f"{over[0] or 'none'} need{'s' * (over[0] < 2)}"
    return [
        "| {} | {} | {} |".format(FLOAT32, *sizes(FLOAT32)),
        "| casts by hand | {} | {} |".format(*sizes(HAND)),
        '| mpjax, `"mixed_bfloat16"` | **{}** | **{}** |'.format(*sizes("autocast")),
        f"Of {len(CASES)} models compiled for an H100, {needs} more memory than with casts by hand"
        f", and {over[1]} move{'s' * (over[1] == 1)} more bytes",
    ]


def headline(cases: Rows) -> str:
    """The means over all models, as a part of a sentence."""
    float32, hand = (
        [
            mean(over_models(cases, "h100", "autocast", theirs, figure))
            for figure in ("temp_mib", "looped_gb")
        ]
        for theirs in (FLOAT32, HAND)
    )
    return (
        f"{float32[0]:.2f}x the temporary memory of float32 and moves {float32[1]:.2f}x the bytes "
        f"({hand[0]:.2f}x and {hand[1]:.2f}x compared with casts placed by hand)"
    )


def _mean_of_all(cases: Rows, ours: str, figure: str) -> float | None:
    found = over_models(cases, "h100", ours, FLOAT32, figure)
    return _rounded(mean(found) if any(found) else None)


def _chart(
    cases, theirs, shown, title, alt, names=CASES, figures=("temp_mib", "bytes_gb", "looped_gb")
) -> Chart:
    known = [m for m in names if ratio(cases, f"h100/{m}", shown[0], theirs, "temp_mib")]
    panels = {
        FIGURES[figure]: {
            rival: tuple(
                _rounded(ratio(cases, f"h100/{model}", rival, theirs, figure)) for model in known
            )
            for rival in shown
        }
        for figure in figures
    }
    return Chart(title, tuple(TITLES[model] for model in known), panels, alt)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
