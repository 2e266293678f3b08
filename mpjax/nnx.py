"""Mixed precision for Flax NNX: `value_and_grad` and `Optimizer` replace those of ``flax.nnx``."""

from mpjax._src.core.base.lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
