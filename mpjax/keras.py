"""Mixed precision for Keras 3 on JAX: `mixed_precision` for `fit`, and a `LossScaleOptimizer`."""

from mpjax._src.frameworks.keras import LossScaleOptimizer, mixed_precision

__all__ = ["LossScaleOptimizer", "mixed_precision"]
