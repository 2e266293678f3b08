"""The public names of `mpjax.nnx`, and where they come from."""

from ._src.core.frameworks.nnx import Optimizer, value_and_grad

__all__ = [
    "Optimizer",
    "value_and_grad",
]
