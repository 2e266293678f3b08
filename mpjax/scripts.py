"""Runs other people's scripts in mixed precision without changing a line. See docs/unchanged.md."""

from mpjax._src.core.base.lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
