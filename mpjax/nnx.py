"""Mixed precision for Flax NNX: `value_and_grad` and `Optimizer` in place of its own."""

from mpjax._src.frameworks.nnx import Optimizer, value_and_grad

__all__ = ["Optimizer", "value_and_grad"]
