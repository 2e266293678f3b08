"""The section of the aot suite: memory and bytes relative to strict casts by hand and float32."""

import dataclasses
import operator
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.aot import BATCHES, CASES, FIRST, HARDWARE, STRICT
from benchmarks.aot import CODED as CODED_ON
from benchmarks.models import TITLES
from benchmarks.page.charts import Chart
from benchmarks.page.goals import Goal, every
from benchmarks.page.tables import UNKNOWN, above, mean, prose, shortfalls, shown, table, written
from benchmarks.results import FAILED, SKIPPED

FIGURES = {"temp_mib": "memory", "bytes_gb": "bytes", "looped_gb": "bytes moved"}
CHARTED = ("temp_mib", "looped_gb")
ROOFLINE = {"roofline_ms": "roofline"}
HAND, FLAX, FLOAT32 = STRICT, "by hand", "float32"
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
([`compile_for`](slow.md#memory-and-cost-on-a-device-you-dont-have)). Nothing runs, so the numbers
do not change from run to run. Without a device there is no autotuning: a real run may use other
kernels.

- *memory*: temporary memory, which the step needs in addition to its arguments and results; *size*
  is the same in MiB.
- *bytes*: the bytes that XLA counts. It counts the body of a loop once, and cuDNN's convolutions
  not at all.
- *bytes moved*: the same with every iteration of a loop and every library call counted.
- *roofline*: the least time in which the device can move these bytes and compute these FLOPs.
- *float32 matmuls*: how many matmuls read float32 operands.
- *strict casts by hand*: weights, activations and attention's scores in 16 bits; in float32 the
  statistics of norms and softmax, the state of recurrences, sums over the edges of a graph, and the
  loss. No float32 matmul, in the backward pass either.
- *casts by hand*: flax's `dtype=`. Attention in GPT-2, Llama and the MoE is JAX's own, with float32
  scores, and routers are float32: their backward passes have float32 matmuls.
"""

LEAN_SAYS = """On an H100. `storage=lean` stores the fewest bytes for the backward pass and computes
elementwise operations again: less memory, more bytes moved.
"""

FUSED_SAYS = """On an H100, for models with attention. Fused attention is off by default.
"""

CODED_SAYS = """`storage=8bit` moves bytes to store fewer: XLA reads a value once more to write
its 8-bit code, and writes it decoded for a matmul or a convolution, because a library kernel
reads 16-bit operands; elementwise kernels read the code itself. A softmax is one kernel with one
result, the 16-bit weights that the matmul reads. So a second kernel reads these and writes their
codes, and a third decodes them for the backward matmul. Models without a row on the H100 were not
measured.
"""

OTHERS = """flax's DynamicScale and mpjax's `build_train_step` train in float16, with a loss scale,
and skip non-finite steps. The rows with *finite check* compile that step in bfloat16: without the
check, with a select (as on a GPU), and with a branch. *16-bit softmax* is casts by hand with a
16-bit softmax.
"""

# What is said below the table of the largest batches.
BATCH_NOTES = {
    "batch-a100-40": "if the float32 step does not fit, XLA recomputes parts of it to save memory, "
    "and moves more bytes. It recomputes nothing of autocast's step at that batch",
}


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns the text of the section."""
    cases: Rows = stored["cases"]
    elsewhere = [t for t in HARDWARE if t != "h100" and f"{t}/{CASES[0]}" in cases]
    strict = [t for t in elsewhere if measured(cases, t, HAND)]
    others = [t for t in elsewhere if t not in strict]
    text = [
        HOW,
        "### Goals of compiled steps\n",
        every(goals(stored)),
        "### autocast relative to strict casts by hand\n",
        "On an H100:\n",
        models("h100", "autocast", HAND, cases),
        shortfalls(short(cases, causes, HAND, ("h100",))),
        "### autocast relative to casts by hand\n",
        "On an H100:\n",
        models("h100", "autocast", FLAX, cases, measured(cases, "h100", FLAX)),
        "### storage=lean relative to strict casts by hand\n",
        LEAN_SAYS,
        models("h100", LEAN, HAND, cases),
        "### fused_attention=true relative to strict casts by hand\n",
        FUSED_SAYS,
        models("h100", FUSED, HAND, cases, measured(cases, "h100", FUSED)),
        "### autocast relative to float32\n",
        "On an H100:\n",
        models("h100", "autocast", FLOAT32, cases),
        "### storage=8bit relative to storage=lean\n",
        CODED_SAYS,
        f"On an H100:\n\n{models('h100', CODED, LEAN, cases, measured(cases, 'h100', CODED))}",
        "Memory and bytes moved on other devices (float16 on the V100):\n",
        targets(LEAN, cases, CODED, CODED_ON),
        "### Other libraries\n",
        OTHERS,
        libraries(cases),
        "### Other devices\n",
        "Memory, bytes moved (float16 on the V100); each mean is over the models of its column.\n"
        "Of other devices than the H100, these are figures of the planner before this version's.\n"
        "`autocast` relative to strict casts by hand:\n",
        targets(HAND, cases),
        shortfalls(short(cases, causes, HAND, strict)) if strict else "",
        "Relative to casts by hand:\n",
        targets(FLAX, cases, names=measured(cases, "h100", FLAX)),
        shortfalls(short(cases, causes, FLAX, others)) if others else "",
        "Relative to float32:\n",
        targets(FLOAT32, cases),
        "### Largest batch\n",
        "The largest batch whose step fits into three quarters of the device's memory:\n",
        batches(cases),
        failures(cases),
    ]
    return "\n".join(part for part in text if part)


def charts(stored: dict[str, Any]) -> dict[str, Chart]:
    """Returns the charts by name."""
    cases: Rows = stored["cases"]
    return {
        "overview": overview(cases),
        "aot_by_hand": beside_hand(cases),
        "aot_float32": beside_float32(cases),
    }


def ratio(cases: Rows, case: str, ours: str, theirs: str, figure: str) -> float | None:
    """Returns the ratio of two rows of a case, or None if a row lacks the figure."""
    mine, other = (cases.get(case, {}).get(rival, {}).get(figure) for rival in (ours, theirs))
    return mine / other if mine is not None and other else None


def measured(cases: Rows, target: str, rival: str) -> tuple[str, ...]:
    """Returns the models that a rival trains on a target."""
    return tuple(m for m in CASES if rival in cases.get(f"{target}/{m}", {}))


def over_models(cases: Rows, target: str, ours: str, theirs: str, figure: str):
    return [ratio(cases, f"{target}/{model}", ours, theirs, figure) for model in CASES]


# ---- tables --------------------------------------------------------------------------------------


def goals(stored: dict[str, Any]) -> list[Goal]:
    """Returns the goals."""
    cases: Rows = stored["cases"]
    found = []
    for figure, most in MEANS.items():
        known = [r for r in over_models(cases, "h100", "autocast", HAND, figure) if r is not None]
        name = f"{FIGURES[figure]} relative to strict casts by hand"
        over = sum(map(above, known)) if known else None
        mean_name = f"{name}, geometric mean of {len(known)} models"
        found.append(_goal(mean_name, "", "<=", most, mean(known)))
        found.append(_goal(f"{name}, models above 1.00x", "", "<=", 0, over))
    for model, most in MEMORY.items():
        value = ratio(cases, f"h100/{model}", "autocast", FLOAT32, "temp_mib")
        found.append(_goal("memory relative to float32", TITLES[model], "<=", most, value))
    for model, most in CODED_MEMORY.items():
        value = ratio(cases, f"h100/{model}", CODED, LEAN, "temp_mib")
        name = "memory of `storage=8bit` relative to `lean`"
        found.append(_goal(name, TITLES[model], "<=", most, value))
    moved = [r for r in over_models(cases, "h100", CODED, LEAN, "looped_gb") if r is not None]
    found_of = {"geometric mean": mean(moved), "most": max(moved, default=None)}
    for of, most in CODED_BYTES.items():
        name = f"bytes moved by `storage=8bit` relative to `lean`, {of} of {len(moved)} models"
        found.append(_goal(name, "", "<=", most, found_of[of]))
    for case, least in LARGEST.items():
        value = ratio(cases, case, "autocast", FLOAT32, "batch")
        name = "largest batch relative to float32"
        found.append(_goal(name, _batched(case.split("/")[0]), ">=", least, value))
    for case, least in CODED_LARGEST.items():
        value = ratio(cases, case, CODED, LEAN, "batch")
        name = "largest batch of `storage=8bit` relative to `lean`"
        found.append(_goal(name, _batched(case.split("/")[0]), ">=", least, value))
    return found


def _goal(kind: str, of: str, sense: str, bound: float, found: float | None) -> Goal:
    """Returns a goal. A value counts as it is printed, rounded."""
    met = None if found is None else COMPARE[sense](round(found, 2), bound)
    return Goal(kind, of, sense, bound, found, met)


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
    header = ("model", "size", *figures.values(), f"float32 matmuls ({shown(theirs)})")
    return table(header, rows)


def short(cases: Rows, causes: dict[str, Any], theirs: str, targets: Sequence[str]):
    """Yields the figures in which autocast is above a rival: model, figure, ratio, cause."""
    for target in targets:
        for model in CASES:
            for figure, name in FIGURES.items():
                found = ratio(cases, f"{target}/{model}", "autocast", theirs, figure)
                if found is not None and above(found):
                    known = causes.get(f"{target}/{model}") or causes.get(model, {})
                    cause = known.get(figure) or known.get("all", UNKNOWN)
                    yield f"{TITLES[model]}, {HARDWARE[target]}", name, found, cause


def libraries(cases: Rows) -> str:
    """All rivals relative to float32, for the models that other libraries train too."""
    text = []
    for model in CASES:
        rivals = cases.get(f"h100/{model}", {})
        if set(rivals) <= {*FIRST, FLAX, FUSED, CODED}:
            continue
        rows = []
        for rival, row in rivals.items():
            if SKIPPED in row or FAILED in row:
                continue
            found = (ratio(cases, f"h100/{model}", rival, FLOAT32, figure) for figure in FIGURES)
            cells = (row["dtype"], f"{row['temp_mib']:,.0f} MiB", *map(written, found))
            rows.append((shown(rival), *cells, str(row["f32_matmuls"])))
        header = ("trained with", "dtype", "size", *FIGURES.values(), "float32 matmuls")
        text.append(f"{TITLES[model]}, relative to float32:\n\n{table(header, rows)}")
    return "\n".join(text) or "Not measured.\n"


def targets(theirs: str, cases: Rows, ours: str = "autocast", names: Sequence[str] = CASES) -> str:
    """Models by target: memory and bytes moved."""

    def pair(target, model):
        found = [ratio(cases, f"{target}/{model}", ours, theirs, f) for f in CHARTED]
        return None if None in found else found

    found = {t: {model: pair(t, model) for model in names} for t in HARDWARE}
    known = [t for t, pairs in found.items() if any(pairs.values())]
    rows = [(TITLES[m], *(_pair(found[t][m]) for t in known)) for m in names]
    means = []
    for target in known:
        pairs = filter(None, found[target].values())
        means.append(_pair([mean(of) for of in zip(*pairs, strict=True)]))
    return table(("model", *(HARDWARE[t] for t in known)), [*rows, ("geometric mean", *means)])


def _pair(ratios: Sequence[float | None] | None) -> str | None:
    return ratios and ", ".join(map(written, ratios))


def batches(cases: Rows) -> str:
    """The largest batches, and the reason why a batch is no larger."""
    rows, notes = [], []
    for part, (_, model, rivals, multiple, _) in BATCHES.items():
        for rival in rivals:
            row = cases.get(f"{part}/{model}", {}).get(rival, {})
            found = ratio(cases, f"{part}/{model}", rival, FLOAT32, "batch")
            rows.append(
                (
                    _batched(part),
                    shown(rival),
                    str(row["batch"]) if "batch" in row else None,
                    str(multiple),
                    f"{found:.2f}x" if found else None,
                )
            )
        if part in BATCH_NOTES:
            notes.append(f"\n{_batched(part)}: {BATCH_NOTES[part]}.\n")
    header = ("model", "trained with", "largest batch", "multiple of", "relative to float32")
    return table(header, rows) + "".join(notes)


def _batched(part: str) -> str:
    target, model, *_, flags = BATCHES[part]
    return f"{TITLES[model]}, {HARDWARE[target]}" + (", XLA's recomputation off" if flags else "")


def failures(cases: Rows) -> str:
    """The programs without figures, and the reasons."""
    rows = [
        (_titled(case), rival, reason(row))
        for case, rivals in cases.items()
        for rival, row in rivals.items()
        if FAILED in row or SKIPPED in row
    ]
    if not rows:
        return ""
    return "### Failed compilations\n\n" + prose(("model", "trained with", "why"), rows)


def reason(row: dict[str, Any]) -> str:
    """Returns why a program has no figures. Of a program that is too large, what it needs."""
    why = row.get(FAILED) or f"skipped: {row[SKIPPED]}"
    sizes = re.search(r"temporaries \(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)", why)
    return "out of memory: needs {}G of {}G".format(*sizes.groups()) if sizes else why


def _titled(case: str) -> str:
    target, _, model = case.partition("/")
    return f"{TITLES.get(model, model)}, {HARDWARE.get(target, target)}"


# ---- charts --------------------------------------------------------------------------------------


def beside_hand(cases: Rows) -> Chart:
    return _chart(
        cases,
        HAND,
        OURS,
        "relative to strict casts by hand",
        "Memory and bytes moved by training steps under autocast and with lean storage, by model, "
        "relative to strict casts by hand",
    )


def beside_float32(cases: Rows) -> Chart:
    return _chart(
        cases,
        FLOAT32,
        (HAND, *OURS),
        "relative to float32",
        "Memory and bytes moved by training steps with strict casts by hand, under autocast and "
        "with lean storage, by model, relative to float32",
    )


def overview(cases: Rows) -> Chart:
    """The first picture: a model of each kind, and the mean over all models."""
    alt = "Memory and bytes moved by training steps under autocast, relative to float32"
    rivals = (HAND, "autocast")
    chart = _chart(cases, FLOAT32, rivals, "relative to float32", alt, FAMILIES)
    panels = {
        FIGURES[figure]: {
            rival: (*chart.panels[FIGURES[figure]][rival], _mean_of_all(cases, rival, figure))
            for rival in rivals
        }
        for figure in CHARTED
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
        "| flax's `dtype=` | {} | {} |".format(*sizes(FLAX)),
        "| strict casts by hand | {} | {} |".format(*sizes(HAND)),
        '| mpjax, `"mixed_bfloat16"` | **{}** | **{}** |'.format(*sizes("autocast")),
        f"Of {len(CASES)} models compiled for an H100, {needs} more memory than with strict casts "
        f"by hand"
        f", and {over[1]} move{'s' * (over[1] == 1)} more bytes",
    ]


def headline(cases: Rows) -> str:
    """The means over all models, as a sentence."""
    float32, hand = (
        [mean(over_models(cases, "h100", "autocast", theirs, figure)) for figure in CHARTED]
        for theirs in (FLOAT32, HAND)
    )
    return (
        f"Compiled for an H100, steps of {len(CASES)} models need on average {less(float32[0])} "
        f"temporary memory than in float32, and move {less(float32[1])} data. Compared with strict "
        f"casts by hand: {less(hand[0])} memory and {less(hand[1])} data.\n"
    )


def less(ratio: float | None) -> str:
    """Returns a ratio as a share that is saved."""
    if ratio is None:
        return "an unknown share of"
    return f"{abs(1 - ratio):.0%} {'less' if ratio < 1 else 'more'}"


def _mean_of_all(cases: Rows, ours: str, figure: str) -> float | None:
    found = over_models(cases, "h100", ours, FLOAT32, figure)
    return _rounded(mean(found) if any(found) else None)


def _chart(cases: Rows, theirs: str, rivals, unit: str, alt: str, names=CASES) -> Chart:
    known = [m for m in names if ratio(cases, f"h100/{m}", rivals[0], theirs, "temp_mib")]
    panels = {
        FIGURES[figure]: {
            rival: tuple(
                _rounded(ratio(cases, f"h100/{model}", rival, theirs, figure)) for model in known
            )
            for rival in rivals
        }
        for figure in CHARTED
    }
    return Chart("A training step on an H100", unit, tuple(TITLES[m] for m in known), panels, alt)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
