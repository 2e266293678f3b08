"""The table of all rules of the linter: their checks, and their texts in ``rules.toml``."""

import tomllib
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any

from mpjax._src.core.base.errors import brief, did_you_mean
from mpjax._src.core.base.patterns import matches
from mpjax._src.tools.document.model import Document, words_in
from mpjax._src.tools.lint import (
    casts,
    constants,
    exchanges,
    guards,
    indices,
    losses,
    matmuls,
    norms,
    phases,
    probabilities,
    states,
    sums,
    totals,
    updates,
)
from mpjax._src.tools.lint.rule import Rule, nothing

CHECKS: dict[str, Callable[..., Any]] = {
    "half-sum": sums.half_sums,
    "half-accumulator": totals.half_accumulators,
    "half-collective": sums.half_collectives,
    "half-scatter": sums.half_scatters,
    "half-average": totals.half_averages,
    "lost-constant": constants.lost_constants,
    "half-count": constants.half_counts,
    "rounded-integer": constants.rounded_integers,
    "half-phase": phases.half_phases,
    "rounded-phase": phases.rounded_phases,
    "mask-overflow": constants.overflowing_masks,
    "double-rounding": casts.double_rounding,
    "cast-undone": casts.casts_undone,
    "rounded-gradient": casts.rounded_gradients,
    "cast-deleted": casts.casts_deleted,
    "rounding-error": casts.rounding_errors,
    "half-loss": losses.half_log_sums,
    "rounded-probability": probabilities.rounded_probabilities,
    "half-saturation": probabilities.half_saturations,
    "half-sample": probabilities.half_samples,
    "half-variance": losses.half_variances,
    "half-norm": norms.half_norms,
    "half-distance": losses.half_distances,
    "unscaled-gradient": losses.unscaled_gradients,
    "promoted-matmul": matmuls.promoted_matmuls,
    "narrow-backward": matmuls.narrow_backward,
    "mixed-matmul": matmuls.mixed_matmuls,
    "recomputed-dtype": matmuls.recomputed_matmuls,
    "kernel-dtypes": matmuls.mixed_kernels,
    "gather-before-cast": exchanges.gathers_before_casts,
    "wide-all-gather": exchanges.wide_gathers,
    "half-all-reduce": exchanges.half_sums_of_devices,
    "widened-matmul": exchanges.widened_matmuls,
    "state-dtype-drift": states.drifting,
    "ungated-state": states.ungated_states,
    "hidden-nonfinite": guards.hidden_nonfinite,
    "late-scale": guards.late_scales,
    "endless-scale": guards.endless_scales,
    "stalled-update": updates.stalled_updates,
    "overflowing-loss-scale": updates.overflowing_scales,
    "flushed-gradient": updates.backward_values,
    "index-out-of-range": indices.index_values,
}
# What looks at the whole step when it has run.
AFTER = {
    "flushed-gradient": updates.flushed_gradients,
    "index-out-of-range": indices.indices_out_of_range,
}

# The texts of each rule, prose for users: `needs`, `summary`, `why` and `instead`.
TEXTS = tomllib.loads((resources.files(__package__) / "rules.toml").read_text("utf-8"))

RULES: tuple[Rule, ...] = tuple(
    Rule(name, **TEXTS[name], check=CHECKS[name], after=AFTER.get(name, nothing))
    for name in sorted(CHECKS)
)


def chosen(select: Any = (), ignore: Any = ()) -> tuple[Rule, ...]:
    """Returns the selected rules (all if ``select`` is empty) without the ignored ones.

    Both are a name or glob, such as "half-sum" or "half-*", or several. One that matches no rule
    raises a ValueError.
    """
    wanted = _matching("select", select or "*") - _matching("ignore", ignore)
    return tuple(rule for rule in RULES if rule.name in wanted)


def as_data(rules: Iterable[Rule]) -> list[dict[str, str]]:
    """Returns the texts of rules as plain data."""
    return [{"name": rule.name, **TEXTS[rule.name]} for rule in rules]


def listed(rules: Iterable[Rule]) -> Document:
    """Returns what is shown of rules: what each needs and what it finds."""
    rows = ((rule.name, rule.needs, rule.summary) for rule in rules)
    return Document("The rules", tables=(words_in("Rules", ("rule", "needs", "finds"), rows),))


def _matching(argument: str, patterns: str | Iterable[str]) -> set[str]:
    selected: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        matched = {name for name in CHECKS if isinstance(pattern, str) and matches(pattern, name)}
        if not matched:
            raise ValueError(
                f"{argument}={brief(pattern)} matches no rule.{did_you_mean(pattern, CHECKS)} "
                "`mpjax lint --rules` lists the rules; a glob such as 'half-*' matches several."
            )
        selected |= matched
    return selected
