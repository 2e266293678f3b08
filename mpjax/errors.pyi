"""The public names of `mpjax.errors`, and where they come from."""

from ._src.core.base.errors import (
    CompileError,
    DivergenceError,
    OutOfMemoryError,
    PrecisionWarning,
    UnsupportedJaxError,
)

__all__ = [
    "CompileError",
    "DivergenceError",
    "OutOfMemoryError",
    "PrecisionWarning",
    "UnsupportedJaxError",
]
