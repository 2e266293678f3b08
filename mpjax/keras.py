"""Mixed precision for Keras 3 on JAX: `mixed_precision` for `fit`, and a `LossScaleOptimizer`."""

from typing import TYPE_CHECKING

from mpjax._src.core.base.absent import suggesting
from mpjax._src.core.frameworks.keras import LossScaleOptimizer, mixed_precision

__all__ = ["LossScaleOptimizer", "mixed_precision"]

if not TYPE_CHECKING:  # type checkers refuse other names by themselves
    __getattr__ = suggesting(__name__, __all__)
