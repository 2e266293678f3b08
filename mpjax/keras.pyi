"""The public names of `mpjax.keras`, and where they come from."""

from ._src.core.frameworks.keras import LossScaleOptimizer, mixed_precision

__all__ = [
    "LossScaleOptimizer",
    "mixed_precision",
]
