"""Checkpoints that never lose precision without an error. See docs/checkpoints.md."""

from mpjax._src.core.base.lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
