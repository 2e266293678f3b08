"""Mixed precision for Flax NNX: `value_and_grad` and `Optimizer` replace those of ``flax.nnx``."""

from mpjax._src.frameworks.nnx import Optimizer, value_and_grad

__all__ = ["Optimizer", "value_and_grad"]
