"""The public names of `mpjax.linen`, and where they come from."""

from ._src.core.frameworks.linen import TrainState

__all__ = [
    "TrainState",
]
