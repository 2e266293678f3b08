"""What is public: the modules, and everything in their ``__all__``."""

import importlib
import pkgutil

import mpjax

NAMES = [
    "mpjax",
    *(f"mpjax.{m.name}" for m in pkgutil.iter_modules(mpjax.__path__) if m.name[0] != "_"),
]
MODULES = [importlib.import_module(name) for name in NAMES]
# Every public object, by its whole name.
PUBLIC = {f"{m.__name__}.{name}": getattr(m, name) for m in MODULES for name in m.__all__}
