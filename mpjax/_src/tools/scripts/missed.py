"""What holds a transformation of JAX where no sweep of modules replaces it, in words."""

import contextlib
import copy
import functools
import gc
import inspect
import re
import sys
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from mpjax._src.core.base import _jax

OWN = ("jax.", "jaxlib.", "mpjax.")
HALF = re.compile(r"\bb?f16\[")
CONTAINERS = (dict, list, tuple, set, functools.partial)


def holders_of(
    transforms: Sequence[Any], swept: Sequence[dict[str, Any]], known: type
) -> tuple[str, ...]:
    """Returns phrases for what holds transformations, and for the derivatives that they made.

    Args:
        transforms: Functions of JAX.
        swept: The variables of modules, where they are found.
        known: The class of functions whose derivatives need no phrase.
    """
    found = _holders(transforms, swept), _made(transforms, known)
    if any(found):
        gc.collect()  # some of it may be garbage, and nobody calls that
        found = _holders(transforms, swept), _made(transforms, known)
    return tuple(sorted(set().union(*found)))


def compiled_before() -> tuple[str, ...]:
    """Returns phrases for the user's functions that are compiled ahead of time with a gradient, all
    of whose matmuls are float32: so they stay."""
    stages = gc.get_referrers(jax.stages.Compiled)
    for stage in [s for s in stages if isinstance(s, jax.stages.Compiled) and s not in _SAID]:
        _SAID[stage] = ""
        with contextlib.suppress(Exception):  # of a runtime that does not tell
            _SAID[stage] = _said_of(stage.as_text() or "")
    return tuple(sorted({*_SAID.values()} - {""}))


# The phrases of functions that are compiled ahead of time, whose text takes a while to print.
_SAID: weakref.WeakKeyDictionary[jax.stages.Compiled, str] = weakref.WeakKeyDictionary()


def _said_of(text: str) -> str:
    matmuls = re.search(r"transpose\(.*(dot|conv)_general", text)
    if not matmuls or HALF.search(text):
        return ""
    files = re.findall(r'^\d+ "(.*)"$', text, re.MULTILINE)
    name = text.split(",")[0].split()[-1].removeprefix("jit_")
    return f"{name}, compiled ahead of time" * any(map(_jax.is_users_file, files))


def _holders(transforms: Sequence[Any], swept: Sequence[dict[str, Any]]) -> set[str]:
    names = {id(t): t.__name__ for t in transforms}
    known = {id(space) for space in swept} | {id(transforms)}
    known |= {id(vars(m)) for m in _modules()}
    direct = [h for h in gc.get_referrers(*transforms) if id(h) not in known]
    direct = [h for h in direct if not isinstance(h, types.FrameType)]
    # A default is in a tuple, a variable of a closure in a cell in a tuple, a method in a dict.
    second = gc.get_referrers(*direct) if direct else []
    inner = [h for h in second if type(h) in (tuple, dict) and id(h) not in known]
    third = gc.get_referrers(*inner) if inner else []
    found: list[str] = []
    for holder in {id(h): h for h in (*direct, *second, *third)}.values():
        if isinstance(holder, types.FunctionType):
            found += _in_function(holder, names)
        elif isinstance(holder, type):
            found += _in_class(holder, names)
    return {*found, *_variables([h for h in direct if isinstance(h, CONTAINERS)], names)}


def name_of(fun: Any) -> str:
    """Returns the name of a function, or of the one that it wraps."""
    for _ in range(8):
        name = getattr(fun, "__qualname__", None) or getattr(fun, "__name__", None)
        if isinstance(name, str):
            return name.rpartition("<locals>.")[2]
        fun = getattr(fun, "func", None) or getattr(fun, "__wrapped__", fun)
    return type(fun).__name__


def code_of(fun: Any) -> types.CodeType | None:
    """Returns the code of a function, or of the one that it wraps."""
    for _ in range(8):
        inner = getattr(fun, "func", None) or getattr(fun, "__wrapped__", None)
        code = getattr(fun, "__code__", None)
        if inner is None and isinstance(code, types.CodeType):
            return code
        fun = vars(type(fun)).get("__call__") if inner is None else inner
    return None


def apart(fun: Any, *kinds: type) -> Any:
    """Returns a function with containers of its own, of some kinds, if it is an object that holds
    any: its call leaves the original as it is, so that this can be called too."""
    held = vars(fun) if hasattr(fun, "__dict__") else {}
    own = {name: copy.copy(each) for name, each in held.items() if isinstance(each, kinds)}
    if own:
        fun = copy.copy(fun)
        vars(fun).update(own)
    return fun


def defined_at(fun: Any) -> str:
    """Returns "file:line" of the code of a function, or ""."""
    code = code_of(fun)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _modules() -> list[types.ModuleType]:
    return [m for m in [*sys.modules.values()] if isinstance(m, types.ModuleType)]


def _is_own(module: object) -> bool:
    return f"{module}.".startswith(OWN)


def _in_function(fun: types.FunctionType, names: Mapping[int, str]) -> Iterator[str]:
    """Yields what a function holds as a default of an argument, or in its closure."""
    if _is_own(fun.__module__):
        return
    place = f"{name_of(fun)} ({fun.__code__.co_filename}:{fun.__code__.co_firstlineno})"
    for value in (*(fun.__defaults__ or ()), *(fun.__kwdefaults__ or {}).values()):
        if id(value) in names:
            yield f"jax.{names[id(value)]} as a default of {place}"
    for cell in fun.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            if id(cell.cell_contents) in names:
                yield f"jax.{names[id(cell.cell_contents)]} in the closure of {place}"


def _in_class(kind: type, names: Mapping[int, str]) -> Iterator[str]:
    for name, value in [*vars(kind).items()]:
        bare = getattr(value, "__func__", value)  # of a static method
        if id(bare) in names and not _is_own(kind.__module__):
            yield f"jax.{names[id(bare)]} as {kind.__module__}.{kind.__qualname__}.{name}"


def _variables(holders: Sequence[Any], names: Mapping[int, str]) -> Iterator[str]:
    """Yields what those containers hold that are variables of modules, each by its first name."""
    sought = {id(holder): holder for holder in holders}
    for module in _modules():
        if not sought or sought.keys().isdisjoint(map(id, [*vars(module).values()])):
            continue  # most of them: this runs over every variable of a process
        for name, each in [*vars(module).items()]:
            if id(each) in sought and not _is_own(module.__name__):
                holder = sought.pop(id(each))
                values = (*holder, *holder.values()) if isinstance(holder, dict) else holder
                values = [holder.func] if isinstance(holder, functools.partial) else values
                held = next(names[id(v)] for v in values if id(v) in names)
                yield f"jax.{held} in {module.__name__}.{name}"


def _made(transforms: Sequence[Any], known: type) -> set[str]:
    """Returns the derivatives of the user's functions that transformations have made."""
    found = set()
    for fun in _jax.gradients_of(transforms):
        code = getattr(inspect.unwrap(fun), "__code__", None)
        if code and not isinstance(fun, known) and _jax.is_users_file(code.co_filename):
            place = f"{code.co_filename}:{code.co_firstlineno}"
            found.add(f"the derivative of {name_of(fun)} ({place})")
    return found
