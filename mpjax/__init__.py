"""mpjax: functional mixed precision for JAX and Flax.

What is public is listed in `__init__.pyi`, and imported when it is first asked for: importing mpjax
takes little more than importing JAX. See docs/architecture.md for the map.
"""

import lazy_loader

from ._src import contexts as _contexts  # noqa: F401
from ._src import deprecations as _deprecations

__version__ = "0.1.0"
_find, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
# Modules are not for `from mpjax import *`: each imports a framework.
__all__ = sorted({*_names} - {"checkpoint", "linen", "nnx"})


def __getattr__(name):
    """Imports what is public when it is first asked for, by its old name too."""
    return _find(_deprecations.resolve(name))
