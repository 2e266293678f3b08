"""The names of jmp 0.0.4: ``import mpjax.jmp as jmp`` replaces ``import jmp``.

Results are jmp's, and policies and loss scales go into all of `mpjax`. See docs/coming_from/jmp.md.
"""

from mpjax._src.core.base.lazy import attach as _attach
from mpjax._src.core.frameworks.jmp import dtype_to_names as dtype_to_names
from mpjax._src.core.frameworks.jmp import name_to_dtype as name_to_dtype
from mpjax._src.core.frameworks.jmp import parse_dtype as parse_dtype

__version__ = "0.0.4"  # of the jmp whose names and results these are
__getattr__, __dir__, __all__ = _attach(__name__, __file__)
