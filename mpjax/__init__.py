"""mpjax: functional mixed precision for JAX and Flax.

The public names are listed in `__init__.pyi`. Each is imported at its first use, and JAX with the
first. The modules are described in docs/architecture.md.
"""

from ._src.core.base.lazy import attach as _attach
from ._src.core.base.lazy import create_contexts as _create_contexts

_create_contexts()

__version__ = "1.0.0rc1"
__getattr__, __dir__, __all__ = _attach(__name__, __file__)
