"""Mixed precision for Keras 3 on JAX: `mixed_precision(model)`, and an optimizer for own loops."""

from mpjax._src.frameworks.keras import LossScaleOptimizer, mixed_precision

__all__ = ["LossScaleOptimizer", "mixed_precision"]
