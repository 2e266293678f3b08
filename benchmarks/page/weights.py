"""The table of docs/weights.md: the bytes kept and moved for each weight, and the quality."""

from typing import Any

from benchmarks import weights
from benchmarks.page.tables import table

NOTE = """Bytes stored: parameters and optimizer state, in bytes per weight of GPT-2 355M under
AdamW. Bytes moved: by the optimizer's part of a step on an H100, relative to optax.adamw on float32
weights. Temporary memory: of the whole step, relative to float32. The other columns are a model's
held-out result, the mean over three seeds; lower is better. The range of float32 is in parentheses,
and results above it are **bold**. Under O3, losses are returned in bfloat16: in steps of 1/64
around 3 and of 1/32 around 6.
"""


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns the table."""
    cases = stored["cases"]
    update, step = cases.get("update", {}), cases.get("step", {})
    base, whole = update.get(weights.REFERENCE), step.get(weights.REFERENCE)
    found: dict[str, dict[str, Any]] = {}
    spreads = {}
    for model, name, row in weights.verdicts(cases.get("quality", {})):
        found.setdefault(name, {})[model] = row
        spreads[model] = "{:.3f} to {:.3f}".format(*row["float32"])
    header = ["weights and moments", "policy", "bytes stored", "bytes moved", "temporary memory"]
    header += [f"{model} ({spread})" for model, spread in spreads.items()]

    def cells(name):
        row, run = update.get(name), step.get(name)
        yield f"{row['kept_per_weight']:.2f}" if row else None
        yield f"{row['moved_per_weight'] / base['moved_per_weight']:.2f}x" if row and base else None
        yield f"{run['temp_mib'] / whole['temp_mib']:.2f}x" if run and whole else None
        for model in spreads:
            row = found.get(name, {}).get(model)
            if row is None:
                yield None
            else:
                yield f"{row['mean']:.3f}" if row["no_worse"] else f"**{row['mean']:.3f}**"

    rows = [(name, f"`{policy}`", *cells(name)) for name, policy in weights.KEPT.items()]
    return f"{table(header, rows)}\n{NOTE}"
