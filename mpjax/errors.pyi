"""The public names of `mpjax.errors`, and where they come from."""

from ._src.core.base.errors import CompileError, DivergenceError, OutOfMemoryError, PrecisionWarning

__all__ = [
    "CompileError",
    "DivergenceError",
    "OutOfMemoryError",
    "PrecisionWarning",
]
