"""Mixed precision for Flax linen: `TrainState` in place of ``flax.training.train_state``'s."""

from mpjax._src.frameworks.linen import TrainState

__all__ = ["TrainState"]
