"""Public modules, whose names are in their stub and are imported when they are first used."""

import ast
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Hinting(importlib.abc.MetaPathFinder):
    """Says what replaces a module that `mpjax` does not have: ``mpjax.amp``, say."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("mpjax."):
            from mpjax._src.core.base.absent import hint_for

            hint = hint_for(*name.rpartition(".")[::2])
            if hint:
                raise ModuleNotFoundError(f"No module named {name!r}.{hint}", name=name)


class WithJax(importlib.abc.MetaPathFinder):
    """Calls a function as soon as JAX is imported, before who imports it goes on.

    So importing mpjax needs no JAX, whose plugins may log and take most of the time of a command,
    and a script that mpjax runs sets the environment of its JAX.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then
        self.asked = False  # whether it asks the other finders

    def find_spec(self, name, path=None, target=None):
        if name != "jax" or self.asked:
            return None
        self.asked = True
        spec = importlib.util.find_spec(name)
        self.asked = False
        if spec and spec.loader:  # which others may also look up without an import
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def create_contexts() -> None:
    """Creates mpjax's contexts, or has them created as soon as JAX is imported."""

    def create() -> None:
        from mpjax._src.core.base import contexts  # noqa: F401

    with_jax(create)


def with_jax(then: Callable[[], None]) -> None:
    """Calls a function now if JAX is imported, else as soon as it is."""
    if "jax" in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, WithJax(then))


# The last finder is asked only after all others have failed, so it delays no import that succeeds.
sys.meta_path.append(Hinting())


def attach(module: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list]:
    """Returns the ``__getattr__``, ``__dir__`` and ``__all__`` of the public module of a file.

    The stub next to the file says where each name comes from. ``__all__`` leaves out modules.
    """
    places: dict[str, str | None] = {}  # the module of each name; a module itself has None
    for node in ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            places |= {alias.name: node.module for alias in node.names}

    def __getattr__(name: str) -> Any:
        if name not in places:
            own = Path(file).with_name(f"{name}.py")
            if module == "mpjax" and name[0] != "_" and own.exists():  # needs an extra
                return importlib.import_module(f"mpjax.{name}")
            from mpjax._src.core.base.absent import missing  # importing mpjax loads next to nothing

            raise missing(module, name, places)
        within = places[name]
        if within is None:
            return importlib.import_module(f"mpjax.{name}")
        value = getattr(importlib.import_module(f"mpjax.{within}"), name)
        setattr(sys.modules[module], name, value)  # found without this function from now on
        return value

    return __getattr__, lambda: sorted(places), sorted(n for n, within in places.items() if within)
