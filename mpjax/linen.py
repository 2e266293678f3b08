"""Mixed precision for Flax linen: `TrainState` replaces ``flax.training``'s."""

from typing import TYPE_CHECKING

from mpjax._src.core.base.absent import suggesting
from mpjax._src.core.frameworks.linen import TrainState

__all__ = ["TrainState"]

if not TYPE_CHECKING:  # type checkers refuse other names by themselves
    __getattr__ = suggesting(__name__, __all__)
