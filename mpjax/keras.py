"""Mixed precision for Keras 3 on JAX: `mixed_precision` for `fit`, and a `LossScaleOptimizer`."""

from mpjax._src.core.base.lazy import attach as _attach
from mpjax._src.core.frameworks import keras as _keras  # noqa: F401  (Keras loads what is defined)

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
