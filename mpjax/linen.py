"""Mixed precision for Flax linen: `TrainState` replaces ``flax.training``'s."""

from mpjax._src.frameworks.linen import TrainState

__all__ = ["TrainState"]
