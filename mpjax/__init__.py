"""mpjax: functional mixed precision for JAX and Flax.

The public names are listed in `__init__.pyi`. Each is imported at its first use, so importing mpjax
takes little longer than importing JAX. The modules are described in docs/architecture.md.
"""

from ._src.core.base import contexts as _contexts  # noqa: F401
from ._src.core.base.lazy import attach as _attach

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = _attach(__name__, __file__)
