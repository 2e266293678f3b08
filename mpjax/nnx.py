"""Mixed precision for Flax NNX: `value_and_grad` and `Optimizer` replace those of ``flax.nnx``."""

from typing import TYPE_CHECKING

from mpjax._src.core.base.absent import suggesting
from mpjax._src.core.frameworks.nnx import Optimizer, value_and_grad

__all__ = ["Optimizer", "value_and_grad"]

if not TYPE_CHECKING:  # type checkers refuse other names by themselves
    __getattr__ = suggesting(__name__, __all__)
