"""Mixed precision for Flax linen: `TrainState` replaces ``flax.training``'s."""

from mpjax._src.core.base.lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
