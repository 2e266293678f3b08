"""The models that are trained, with their sizes for measurements and for smoke tests.

The sizes are those of the suite `benchmarks.aot`, except that Llama's batch is half.
"""

import math
from typing import Any

from benchmarks.on_gpu.flops import train_flops

GPT2 = {"batch": 8, "length": 1024, "vocabulary": 50257}
SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT2, "layers": 12, "width": 768, "heads": 12},
    "resnet50": {"batch": 128, "size": 224, "blocks": (3, 4, 6, 3)},
    "bert": {
        "batch": 16,
        "length": 512,
        "vocabulary": 30522,
        "layers": 12,
        "width": 768,
        "heads": 12,
    },
    "llama": {
        "batch": 2,
        "length": 2048,
        "vocabulary": 32000,
        "layers": 12,
        "width": 1024,
        "heads": 16,
    },
    "gpt2_medium": {**GPT2, "layers": 24, "width": 1024, "heads": 16},
    "vit": {"batch": 64, "size": 224, "layers": 12, "width": 768, "heads": 12},
}

TINY = {"layers": 1, "width": 32, "heads": 2}
SMOKE: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 2, "length": 16, "vocabulary": 64, **TINY},
    "resnet50": {"batch": 2, "size": 32, "blocks": (1,)},
    "bert": {"batch": 2, "length": 16, "vocabulary": 64, **TINY},
    "llama": {"batch": 2, "length": 16, "vocabulary": 64, **TINY, "groups": 1},
    "gpt2_medium": {"batch": 2, "length": 16, "vocabulary": 64, **TINY, "layers": 2},
    "vit": {"batch": 2, "size": 32, **TINY},
}

TRANSFORMERS = ("gpt2", "gpt2_medium", "bert", "vit", "llama")
LANGUAGE_MODELS = ("gpt2", "gpt2_medium", "llama")
UNTIED = ("bert", "llama")  # their embedding tables are only looked up


def sizes_of(case: str, smoke: bool) -> dict[str, Any]:
    return (SMOKE if smoke else SIZES)[case]


def items(sizes: dict[str, Any]) -> int:
    """Returns the number of tokens or images in a step."""
    return sizes["batch"] * sizes.get("length", 1)


def labels(sizes: dict[str, Any], dimensions: int) -> int:
    """Returns the upper bound of a batch's integers: tokens in two dimensions, classes in one."""
    return sizes["vocabulary"] if dimensions == 2 else 1000


def step_flops(case: str, sizes: dict[str, Any], parameters: int) -> float | None:
    """Returns the FLOPs of a transformer's step; None for other models."""
    if case not in TRANSFORMERS:
        return None
    length = sizes.get("length") or math.prod((sizes["size"] // 16,) * 2)
    looked_up = sizes["vocabulary"] * sizes["width"] if case in UNTIED else 0
    tokens = sizes["batch"] * length
    return train_flops(parameters - looked_up, sizes["layers"], sizes["width"], length, tokens)
