"""The module in which users find a class."""

from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound=type)


def public(module: str) -> Callable[[C], C]:
    """Returns a decorator that names the public module of a class as the class's own.

    Pickles and messages then name that module, so the one that defines the class can move.
    """

    def name(cls: C) -> C:
        cls.__module__ = module
        return cls

    return name
