"""The section on expected times: each program beside its measured time, and the constants."""

from collections.abc import Iterable
from typing import Any

from benchmarks.expected import FIRST, FIT, FORECAST, TIMED
from benchmarks.models import TITLES
from benchmarks.page.tables import prose, shown, table

NOTE = """`compile_for` multiplies the roofline of each kernel by a constant of its kind, and adds
the time in which kernels start. *Predicted*: by constants fitted to all other programs in 16 bits,
so that none predicts itself. All but Llama's have others of the same model among these. *At least*:
the sum of the rooflines of all kernels. Programs are those of the version of mpjax that was timed.
"""
FORECASTS = """Not timed yet, compiled by this version. The *first forecast* is of 2026-11-28, by
constants of ten programs:
"""
CONSTANTS = {
    "bandwidth": "kernels without a matmul",
    "matmuls": "matmuls",
    "odd": "16-bit matmuls with an axis that is no multiple of 8",
    "attention": "cuDNN's attention",
    "convolutions": "cuDNN's convolutions",
}


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns the predictions beside the measured times, the forecasts and the constants."""
    cases = stored["cases"]
    rows = [(f"{TITLES[c]}, {shown(w)}", row) for c in TIMED for w, row in cases[c].items()]
    fitted = [(name, row) for name, row in rows if "float32" not in name]
    others = [(name, row) for name, row in rows if "float32" in name]
    missed, constants = cases[FIT]["left out"], cases[FIT]["all"]
    forecasts = [
        (_named(name), *_kernels(row), f"{row['predicted_ms']:.1f} ms", f"{FIRST[name]:.1f} ms")
        for name, row in cases[FORECAST].items()
    ]
    factors = [(what, f"{constants[key]:.2f}x") for key, what in CONSTANTS.items()]
    start = ("starting a kernel", f"{1e6 * constants['start']:.1f} us")
    return "\n".join(
        [
            NOTE,
            f"{missed['programs']} programs in 16 bits, whose predictions are {missed['mean']:.1%} "
            f"off on average and {missed['most']:.1%} at most:\n",
            _beside(fitted),
            "In float32, which the constants were not fitted to:\n",
            _beside(others),
            FORECASTS,
            table(("program", "kernels", "at least", "expected", "first forecast"), forecasts),
            "The constants, fitted to all programs in 16 bits:\n",
            prose(("of", "time relative to the roofline"), [*factors, start]),
        ]
    )


def _named(forecast: str) -> str:
    model, _, way = forecast.partition(", ")
    return f"{TITLES[model]}, {shown(way)}"


def _beside(rows: Iterable[tuple[str, dict[str, Any]]]) -> str:
    head = ("program", "kernels", "at least", "predicted", "measured", "difference")
    return table(
        head,
        [
            (
                name,
                *_kernels(row),
                f"{row['predicted_ms']:.1f} ms",
                f"{row['ms']:.1f} ms",
                f"{row['predicted_ms'] / row['ms'] - 1:+.1%}",
            )
            for name, row in rows
        ],
    )


def _kernels(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['kernels']:,}", f"{row['kernels_ms']:.1f} ms"
