"""Instruments that measure a training run, log it and tune it. See docs/debug.md."""

from mpjax._src.core.base.lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
