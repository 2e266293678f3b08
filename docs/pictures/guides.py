"""Draws the pictures of the front page, of "Choose a precision" and of "Debug".

python docs/pictures/guides.py
"""

import json
from pathlib import Path

from svg import BLUE, GREEN, GREY, ORANGE, WIDTH, box, line, picture, text

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parents[1] / "benchmarks" / "results" / "aot.json"

STEPS = {
    "float32": ("float32", GREY),
    "by hand": ("casts by hand", ORANGE),
    "autocast": ("mpjax, mixed_bfloat16", BLUE),
    "autocast, 8bit": ("mpjax, mixed_bfloat16,storage=8bit", GREEN),
}


def memory():
    """The temporary memory of a training step of GPT-2, in GiB."""
    rows = json.loads(RESULTS.read_text())["cases"]["h100/gpt2"]
    most = rows["float32"]["temp_mib"]
    parts = [text(0, 14, "Temporary memory of a training step, GPT-2 124M, H100", 12)]
    for i, (row, (label, fill)) in enumerate(STEPS.items()):
        top, size = 40 + 42 * i, rows[row]["temp_mib"]
        width = (WIDTH - 70) * size / most
        parts += [text(0, top - 5, label, 12, weight="bold"), box(0, top, width, 18, fill)]
        parts.append(text(width + 6, top + 14, f"{size / 1024:.1f} GiB", 13))
    return picture(40 + 42 * len(STEPS) - 14, parts)


DEVICES = (
    ("TPU, or NVIDIA\nfrom A100 on", "mixed_bfloat16"),
    ("V100 or T4", "mixed_float16"),
    ("CPU", "mpjax.recommend_policy()"),
)
NEEDS = (
    ("activations do\nnot fit", "...,storage=lean or 8bit"),
    ("optimizer state\ndoes not fit", "...,moments=8bit"),
    ("weights in 16 bits", "O2:bfloat16,masters=split"),
)


def _arrows(top, pairs, fill):
    parts = []
    for i, (asked, answer) in enumerate(pairs):
        y = top + 46 * i
        parts += [box(0, y, 118, 36, GREY, asked, 11), line(120, y + 18, 142, y + 18, arrow=True)]
        parts.append(box(145, y, WIDTH - 145, 36, fill, answer, 11.5))
    return parts


def policy():
    """From the device, and what does not fit, to the policy string."""
    parts = [text(0, 14, "Which device?", 13, weight="bold"), *_arrows(24, DEVICES, BLUE)]
    below = 24 + 46 * len(DEVICES) + 14
    parts += [text(0, below, "Does it fit? Add to the string:", 13, weight="bold")]
    return picture(below + 10 + 46 * len(NEEDS), parts + _arrows(below + 10, NEEDS, GREEN))


SYMPTOMS = (
    ("the loss is NaN\nor Inf", "find_nonfinite: the line"),
    ("steps are skipped", "metrics, then find_nonfinite"),
    ("worse than\nfloat32", "compare, debug.tune"),
    ("no faster", "explain, mpjax doctor"),
    ("out of memory", "compile_for, hardware.fit_memory"),
    ("weights do not\nchange", "report_stalled=True"),
    ("a long run may\noverflow", "watch_precision"),
    ("before training", "lint"),
)


def debug():
    """From the symptom to the tool."""
    return picture(4 + 46 * len(SYMPTOMS), _arrows(2, SYMPTOMS, BLUE))


PICTURES = {"memory": memory, "policy": policy, "debug": debug}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())
