"""mpjax: functional mixed precision for JAX and Flax.

The public names are listed in `__init__.pyi`. Each is imported at its first use, so importing mpjax
takes little longer than importing JAX. The modules are described in docs/architecture.md.
"""

import lazy_loader

from ._src.base import contexts as _contexts  # noqa: F401
from ._src.base import deprecations as _deprecations

__version__ = "0.1.0"
_find, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
# `from mpjax import *` leaves out these modules, because each imports another package.
__all__ = sorted({*_names} - {"checkpoint", "linen", "nnx"})


def __getattr__(name):
    """Imports what is public when it is first asked for, by its old name too."""
    name = _deprecations.resolve(name)
    if name in _names:
        return _find(name)
    from ._src.base.errors import no_attribute  # importing mpjax loads next to nothing

    raise no_attribute(f"module {__name__!r}", name, _names)
