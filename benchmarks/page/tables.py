"""Markdown tables, the text of ratios, and the names of what is measured."""

import re
from collections.abc import Iterable
from statistics import geometric_mean

Cell = str | None
UNKNOWN = "not known"
# What takes the place of the names of the results' files, in this order.
NAMES = (
    (r"\bbyte_gpt\b", "byte-level GPT"),
    (r"\bdigits_cnn\b", "digits CNN"),
    (r"\bbits_per_byte\b", "bits per byte"),
    (r"\bheld_out_loss\b", "held-out loss"),
    (r"\bheld out\b", "held-out loss"),
    (r"\bgpt2\b", "GPT-2"),
    (r"\bresnet(\d+)\b", r"ResNet-\1"),
    (r"\blstm\b", "LSTM"),
    (r"\bvit\b", "ViT"),
    (r"\bbert\b", "BERT"),
    (r"\bmoe\b", "MoE"),
    (r"\bode (\d+)\b", r"neural ODE, \1 steps"),
    (r"\bgate a (select|branch)\b", r"finite check by \1"),
    (r"\bno gate\b", "no finite check"),
    (r", boundary\b", ", casts as jmp"),
    (r"\bhalf (scores|softmax)\b", r"16-bit \1"),
    (r",? (lean|8bit|0\.\d+|0)\b", r", storage=\1"),
    (r"\bmpjax fused\b", "mpjax, fused attention"),
    (r", fused$", ", fused attention"),
    (r", mib$", ", memory"),
    (r", seconds$", ", time"),
    (r", compile_s$", ", compile time"),
    (r", calls$", ", Python calls"),
    (r"^1 devices$", "1 device"),
    (r"\bbytes sent of\b", "bytes sent by"),
)


def table(header: Iterable[str], rows: Iterable[Iterable[Cell]], texts: int = 1) -> str:
    """Returns a table whose first column, or columns, are text. The others are numbers."""
    header = list(header)
    lines = [header, ["---"] * texts + ["---:"] * (len(header) - texts)]
    lines += [["-" if cell is None else cell for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def prose(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table whose columns are all text."""
    header = list(header)
    return table(header, rows, len(header))


def shown(name: str) -> str:
    """Returns the name of what is measured as readers see it."""
    for pattern, words in NAMES:
        name = re.sub(pattern, words, name)
    return name


def above(ratio: float | None) -> bool:
    """Returns whether a ratio, rounded as it is printed, is above 1."""
    return ratio is not None and round(ratio, 2) > 1


def written(ratio: float | None) -> Cell:
    if ratio is None:
        return None
    return f"**{ratio:.2f}x**" if above(ratio) else f"{ratio:.2f}x"


def mean(ratios: Iterable[float | None]) -> float | None:
    """Returns the geometric mean of the ratios that are not None."""
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(known) if known else None


def shortfalls(found: Iterable[tuple[str, str, float, str | list[str]]]) -> str:
    """Returns the table of ratios above 1.00x, from the case, the figure, the ratio and its causes.

    Figures of a case with the same causes are in one row.
    """
    merged: dict[tuple[str, str], list[str]] = {}
    for case, figure, ratio, causes in found:
        labels = causes if isinstance(causes, str) else ", ".join(causes)
        merged.setdefault((case, labels), []).append(f"{figure} {written(ratio)}")
    if not merged:
        return "Nothing is above 1.00x.\n"
    rows = [(case, ", ".join(figures), labels) for (case, labels), figures in merged.items()]
    return prose(("above 1.00x", "ratios", "cause"), rows)
