"""Functions that are made of other functions, as objects that pickle."""

import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any


class NoBlock:
    """What chooses a precision and is no context manager, and says so."""

    def __enter__(self) -> Any:
        raise TypeError(
            "mpjax has no `with` block that sets a policy: a function is traced and planned as a "
            "whole. Write fun = mpjax.autocast(fun, policy), or @mpjax.autocast(policy=policy) "
            "above the function. `with mpjax.precision(dtype):` sets the dtype of a part of it. "
            "`with mpjax.scripts.autocast_gradients(policy):` plans each function that is "
            "differentiated in the block."
        )

    def __exit__(self, *error: Any) -> None: ...


class Wrapped(NoBlock):
    """A function that is made of another one and of settings.

    It has the name, the documentation and the signature of the other, and becomes a method in a
    class. It pickles if the function and the settings do. Closures do not: cloudpickle stores them
    by value, and with them copies of the global variables of this library that they read.
    """

    def __init__(self, fun: Callable[..., Any], *settings: Any) -> None:
        own = isinstance(fun, types.FunctionType | Wrapped)  # else they are the state of an object
        functools.update_wrapper(self, fun, updated=("__dict__",) if own else ())
        self.fun, self.settings = fun, settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __deepcopy__(self, memo: Any) -> "Wrapped":
        return self  # as functions do

    def __reduce__(self) -> Any:
        """Stores what was made by a decorator by its name, as functions are, else its parts."""
        # cloudpickle's files are for processes that do not have the main module of this one.
        to_others = "cloudpickle" in sys._getframe(1).f_globals.get("__name__", "")
        name = name_in_module(self)
        by_name = name and not (self.__module__ == "__main__" and to_others)
        return name if by_name else (type(self), (self.fun, *self.settings))


def name_in_module(thing: Any) -> str:
    """Returns the name by which its module has an object, or "" if it has another or none."""
    place, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", "")
    try:
        return name if operator.attrgetter(name)(sys.modules[place]) is thing else ""
    except (AttributeError, KeyError):
        return ""


class Decorator(NoBlock, functools.partial):
    """A decorator of settings that were given without a function."""
