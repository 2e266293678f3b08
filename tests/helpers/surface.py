"""What is public: the modules, and everything in their ``__all__``."""

import importlib
import pkgutil
import typing

import mpjax

NAMES = [
    "mpjax",
    *(f"mpjax.{m.name}" for m in pkgutil.iter_modules(mpjax.__path__) if m.name[0] != "_"),
]
MODULES = [importlib.import_module(name) for name in NAMES]
# Every public object, by its whole name. What is an alias of other types is none.
NAMED = {f"{m.__name__}.{name}": getattr(m, name) for m in MODULES for name in m.__all__}
PUBLIC = {name: thing for name, thing in NAMED.items() if not typing.get_args(thing)}
