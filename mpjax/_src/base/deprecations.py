"""Old names that still work for a while, as data. See docs/release.md for the rule."""

import datetime
import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from types import ModuleType
from typing import NamedTuple


class Deprecated(NamedTuple):
    """A public name that is going away.

    Attributes:
        instead: The name in `mpjax` that replaces it.
        since: The date of the first release that warned.
        removal: The first date on which a release may lack the name.
    """

    instead: str
    since: datetime.date
    removal: datetime.date


# Old name -> what replaces it, and until when it works: at least three months.
DEPRECATED: dict[str, Deprecated] = {}


# Old place of a module -> its place now. Pickles name the modules of their classes.
MOVED = {"mpjax._src.errors": "mpjax._src.base.errors"}


class Moved(importlib.abc.Loader):
    """Finds the modules of `MOVED` at their old places."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(MOVED[module.__name__])


sys.meta_path.append(Moved())


def resolve(name: str) -> str:
    """Returns the name to look up for a name of `mpjax`; warns if that name is an old one."""
    row = DEPRECATED.get(name)
    if row is None:
        return name
    message = (
        f"mpjax.{name} is deprecated, and may be removed from {row.removal} on. "
        f"Use mpjax.{row.instead} instead."
    )
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return row.instead
