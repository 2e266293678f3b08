"""The frontier of memory and time of each model, compiled for an H100 that is not there.

    python -m benchmarks --suite fit [gpt2 resnet50 ... | gpt2_whole ...] [--part judged]

The settings are those of `mpjax.hardware.fit_memory`: the policy as given, the ladder, each setting
alone, and jax.checkpoint's policies around the whole loss; in "llama_layers", around each layer. A
row contains the memory of the step, the temporary part of it, the roofline and the bytes moved. By
default the models are those of the gate, of few layers; the whole models, which take a minute for
each row, are named with "_whole".
The part "judged" is the default, lean storage and ``nothing_saveable``.

Printed are the frontier of each model, and what dominates the default, lean storage and
``nothing_saveable``: takes no more memory and no more time by the roofline. The suite fails where a
``jax.checkpoint`` that keeps nothing is not dominated by a setting of the policy, and where a
smaller number of ``storage`` takes more memory, or less time, by more than 2%. Needs mpjax[aot].
"""

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import click
import jax

import mpjax
from benchmarks import Options, gate
from benchmarks.aot import CASES as MODELS
from benchmarks.aot import SETTINGS, TIMEOUT, on_the_cpu
from benchmarks.models import MODELS as MAKE
from benchmarks.models import SMALL, training_step
from benchmarks.results import FAILED, Results, Row
from mpjax._src.tools.hardware.aot import Job
from mpjax._src.tools.hardware.ladder import AS_GIVEN, Setting
from mpjax._src.tools.hardware.targets import find_target
from mpjax._src.tools.hardware.trials import EQUAL, REFUSALS, Steps

__all__ = ["SETTINGS"]

TARGET, POLICY = "h100", mpjax.get_policy("mixed_bfloat16")
PARTS = ("judged", "settings", "checkpoints")
LAYERS = "llama_layers"
# Of some models, the gate has all layers.
LONG = tuple(f"{m}_whole" for m in MODELS if m not in gate.CASES or gate.CASES[m][0])
CASES = (*gate.CASES, LAYERS, *LONG)

LEAN, NOTHING = "storage lean", "jax.checkpoint, nothing_saveable"
JUDGED = (AS_GIVEN, LEAN, NOTHING)
SLACK = 1.02


def run(options: Options, results: Results) -> list[str]:
    """Compiles the settings that have no row yet; returns what the frontier should not show."""
    on_the_cpu()
    problems = []
    for case in options.cases:
        measure(case, options, results)
        rows = {n: row for n, row in results.cases.get(case, {}).items() if FAILED not in row}
        show(case, rows)
        problems += [f"{case}: {line}" for line in faults(rows)]
    return problems


def measure(case: str, options: Options, results: Results) -> None:
    """Compiles the settings of a model that have no row."""
    steps, args = programs(case, options.smoke)
    names: dict[int, str] = {}  # of programs, which several settings may give
    for setting in wanted(steps, args, options.parts):
        if not results.get(case, setting.name):
            start = time.monotonic()
            row = figures(steps, setting, args, names)
            results.put(case, setting.name, {**row, "seconds": round(time.monotonic() - start, 1)})
    jax.clear_caches()


def programs(case: str, smoke: bool) -> tuple[Steps, tuple[Any, ...]]:
    """Returns the training steps of a model, one for each setting, and their arguments."""
    model = case.removesuffix("_whole").removesuffix("_layers")
    sizes = SMALL[model] if smoke else {} if case in LONG else gate.CASES[model][0]
    loss, params, rest, batch, optimizer = MAKE[model](**sizes)

    def make_step(policy: Any, checkpoint: Any) -> Any:
        layered = case == LAYERS
        fun = MAKE[model](**sizes, around=checkpoint)[0] if layered else checkpoint(loss)
        return jax.jit(training_step(mpjax.autocast(fun, policy), optimizer), donate_argnums=0)

    state = params, rest, jax.eval_shape(optimizer.init, params)
    return Steps(Job(find_target(TARGET), TIMEOUT, {}), make_step), (state, batch)


def wanted(steps: Steps, args: tuple[Any, ...], parts: tuple[str, ...]) -> Iterator[Setting]:
    """Returns the settings to compile, those that are judged first."""
    ladder = steps.ladder(POLICY, args)
    settings = dict.fromkeys([*ladder, *steps.off_ladder(ladder, args)])
    for setting in sorted(settings, key=lambda s: s.name not in JUDGED):
        part = "judged" if setting.name in JUDGED else PARTS[1 + bool(setting.keeping)]
        if part in parts:
            yield setting


def figures(steps: Steps, setting: Setting, args: Any, names: dict[int, str]) -> Row:
    """Returns the figures of a setting, or the reason why there are none."""
    try:
        report = steps.compiled(setting, args)
    except REFUSALS as error:
        return {FAILED: f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
    if report is None:
        return {FAILED: "too large"}
    row = {
        "policy": str(setting.policy),
        "total_mib": round(report.total_bytes / 2**20, 1),
        "temp_mib": round(report.temp_bytes / 2**20, 1),
        "roofline_ms": round(report.roofline_ms, 3),
        "bound": report.bound,
        "looped_gb": round(report.bytes_accessed / 1e9, 3),
    }
    same = names.setdefault(id(report), setting.name)
    return row if same == setting.name else {**row, "same_as": same}


# ---- what the frontier says ----------------------------------------------------------------------


def place(row: Row) -> tuple[float, float]:
    return row["total_mib"], row["roofline_ms"]


def dominates(one: Row, other: Row) -> bool:
    """Returns whether a setting takes no more memory and no more time than another one."""
    return all(a <= b for a, b in zip(place(one), place(other), strict=True))


def frontier(rows: dict[str, Row]) -> list[str]:
    """Returns the settings that no other one beats, the fastest first."""
    order = sorted(rows, key=lambda name: place(rows[name])[::-1])
    best, least = [], math.inf
    for name in order:
        if rows[name]["total_mib"] < (1 - EQUAL) * least:
            best.append(name)
            least = rows[name]["total_mib"]
    return best


def ours(rows: dict[str, Row]) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if "jax.checkpoint" not in name}


def show(case: str, rows: dict[str, Row]) -> None:
    """Prints the settings of a model beside its default, and what dominates the judged ones."""
    if AS_GIVEN not in rows:
        return
    memory, ms = place(rows[AS_GIVEN])
    click.echo(f"\n{case}: {memory:,.0f} MiB, {ms:.4g} ms; memory and roofline beside the default")
    best = frontier(rows)
    for name in sorted(rows, key=lambda name: place(rows[name])[::-1]):
        took, lasts = place(rows[name])
        mark = "frontier" if name in best else ""
        click.echo(f"  {name:<48} {took / memory:.3f}x  {lasts / ms:.3f}x  {mark}")
    for name in JUDGED:
        if name in rows:
            others = {n: r for n, r in ours(rows).items() if n != name}
            by = [n for n, row in others.items() if dominates(row, rows[name])]
            at = "is on the frontier" if name in best else "is beaten"
            click.echo(f"  {name} {at}; no better than: {'; '.join(by) or 'none'}")


def faults(rows: dict[str, Row]) -> Iterator[str]:
    """Yields where the settings of the policy do not do what they are for."""
    settings = ours(rows)
    if NOTHING in rows and not any(dominates(row, rows[NOTHING]) for row in settings.values()):
        yield f"no setting of the policy dominates {NOTHING}"
    for names in by_number(settings).values():
        for larger, smaller in itertools.pairwise(names):
            (memory, ms), (less, longer) = place(rows[larger]), place(rows[smaller])
            if less > SLACK * memory or SLACK * longer < ms:
                yield f"{smaller} is not below {larger}: {less / memory:.3f}x, {longer / ms:.3f}x"


def by_number(rows: dict[str, Row]) -> dict[str, list[str]]:
    """Returns the settings with a number, the largest first, by what else they have."""
    found: dict[str, list[tuple[float, str]]] = {}
    for name in rows:
        head, _, number = name.rpartition("storage ")
        if number.replace(".", "", 1).isdigit():
            found.setdefault(head, []).append((-float(number), name))
    return {head: [name for _, name in sorted(pairs)] for head, pairs in found.items()}
