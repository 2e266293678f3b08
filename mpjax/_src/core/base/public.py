"""The module in which users find a class."""

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound=type)


def public(module: str) -> Callable[[C], C]:
    """Returns a decorator that names the public module of a class as the class's own.

    Pickles and messages then name that module, so the one that defines the class can move. It is
    imported: cloudpickle would store the class itself, and another process find another class.
    """

    def name(cls: C) -> C:
        cls.__module__ = module
        if module not in sys.modules:
            with contextlib.suppress(ImportError):  # it may need the one that defines the class
                importlib.import_module(module)
        return cls

    return name
