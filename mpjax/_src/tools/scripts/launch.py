"""Runs a script, a module or a notebook as Python would run it: as `__main__`, with its arguments.

Nothing of JAX is imported here: a script may set its environment before it imports JAX.
"""

import builtins
import contextlib
import difflib
import importlib.machinery
import importlib.util
import io
import json
import linecache
import os
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

REFUSED = 3
REFUSING = f"""
import json, sys
sys.path[:], asked = json.loads(sys.argv[1])
try:
    {{judge}}
except (ValueError, TypeError) as error:
    print(error)
    sys.exit({REFUSED})
"""


class LaunchError(LookupError):
    """What was to be run cannot be run; nothing of it ran."""


def launch(target: str, args: Sequence[str] = (), module: bool = False) -> None:
    """Runs a file, or a module, in this process; raises what it raises.

    Afterwards it still is `__main__`, for what runs at the end of the process. If it raises an
    exception that nobody handles, the traceback begins in its own code.

    Args:
        target: The path of a script (``.py``), of a notebook (``.ipynb``) or of a folder with a
            ``__main__.py``; or the name of a module.
        args: Its arguments, `sys.argv` behind its name.
        module: Whether it is the name of a module, as for ``python -m``.

    Raises:
        LaunchError: If there is nothing of this name to run, or a cell needs IPython.
    """
    run = _module(target, args) if module else _file(target, args)
    try:
        run()
    except BaseException as error:
        _begin_in_its_own_code(error)
        raise


def file_of(target: str, module: bool) -> str:
    """Returns the file of a script, or of a module; "" for a module that has none."""
    return (getattr(_spec(target), "origin", None) or "") if module else target


def refusal(judge: str, *asked: Any) -> str | None:
    """Returns what code prints that refuses what was asked for, or None if it does not.

    It runs in a process of its own, because it needs JAX, which the script is to import.

    Args:
        judge: The code, which raises a ValueError or a TypeError. It finds ``asked`` as a list.
        asked: What was asked for, as data for JSON.
    """
    path = [each or os.getcwd() for each in sys.path]
    child = subprocess.run(
        [sys.executable, "-c", REFUSING.format(judge=judge), json.dumps([path, asked])],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    return child.stdout.strip() if child.returncode == REFUSED else None


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Gives the process back what a launched script changes of it, for what comes after."""
    main, argv, path, hook = sys.modules["__main__"], [*sys.argv], [*sys.path], sys.excepthook
    try:
        yield
    finally:
        sys.modules["__main__"], sys.argv[:], sys.path[:] = main, argv, path
        sys.excepthook = hook


# ---- what is run ---------------------------------------------------------------------------------


def _file(target: str, args: Sequence[str]) -> Any:
    path = os.path.abspath(target)
    if not os.path.exists(path):
        raise LaunchError(f"there is no file {target!r}.{_near(target)}")
    folder = os.path.dirname(os.path.realpath(path))
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise LaunchError(f"{target!r} is a folder without a __main__.py: name a script in it.")
    if path.endswith(".ipynb"):
        cells = [*_cells(path)]
        _enter(target, args, folder)
        return lambda: _run_cells(cells, _main(path))
    if os.path.isdir(path) or path.endswith((".pyc", ".zip", ".pyz")):
        _enter(target, args)
        return lambda: runpy.run_path(path, run_name="__main__")
    with io.open_code(path) as file:
        source = file.read()
    _enter(target, args, folder)
    main = _main(path, importlib.machinery.SourceFileLoader("__main__", path))
    return lambda: exec(compile(source, path, "exec", dont_inherit=True), vars(main))


def _module(name: str, args: Sequence[str]) -> Any:
    _enter("-m", args, os.getcwd())
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _spec(name)
    if spec is None or spec.loader is None:
        raise LaunchError(
            f"there is no module {name!r} in {os.getcwd()} or among the installed packages. To run "
            "a file, give its path without -m."
        )
    code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    if code is None:
        raise LaunchError(f"the module {name!r} has no Python code to run.")
    main = _main(spec.origin or name, spec.loader)
    vars(main).update(__spec__=spec, __package__=spec.parent, __cached__=spec.cached)
    sys.argv[0] = spec.origin or name
    return lambda: exec(code, vars(main))


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None  # the module itself or a package of it, and no import in it
        raise
    except ValueError:  # a module without a spec, or a relative name
        return None


def _enter(name: str, args: Sequence[str], folder: str = "") -> None:
    """Gives the process the arguments and the first entry of the path of what runs."""
    before = os.path.dirname(os.path.realpath(sys.argv[0])) if sys.argv else ""
    sys.argv[:] = [name, *args]
    if sys.flags.safe_path or not folder:
        return
    # The command's own entry is its folder; under python -m it is the current one.
    if sys.path and sys.path[0] in ("", before, os.getcwd()):
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)


def _main(file: str, loader: Any = None) -> types.ModuleType:
    """Returns the new main module."""
    main = types.ModuleType("__main__")
    more: dict[str, Any] = {
        "__file__": file,
        "__cached__": None,
        "__builtins__": builtins,
        "__annotations__": {},
    }
    vars(main).update(more, __loader__=loader, __package__=None)
    sys.modules["__main__"] = main
    return main


def _near(target: str) -> str:
    for name in (f"{target}.py", f"{target}.ipynb"):
        if os.path.exists(name):
            return f" Did you mean {name!r}?"
    try:
        names = os.listdir(os.path.dirname(target) or ".")
    except OSError:
        names = []
    if "." in target and not target.endswith(".py") and "/" not in target:
        return f" To run a module, write -m {target}."
    near = difflib.get_close_matches(os.path.basename(target), names, 1)
    return f" Did you mean {os.path.join(os.path.dirname(target), near[0])!r}?" if near else ""


# ---- notebooks -----------------------------------------------------------------------------------


def _cells(path: str) -> Iterator[tuple[str, str]]:
    """Yields the name and the source of each code cell."""
    try:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
        sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"{path!r} is no notebook of format 4: {error}.") from None
    for number, source in enumerate(sources, 1):
        yield f"{path}[{number}]", source if isinstance(source, str) else "".join(source)


def _run_cells(cells: Sequence[tuple[str, str]], main: types.ModuleType) -> None:
    for name, source in cells:
        # Tracebacks, and who looks for a function's source, find it here.
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    shell = _shell(main) if any(map(_needs_ipython, (source for _, source in cells))) else None
    for name, source in cells:
        if shell is not None:
            source = shell.transform_cell(source)
        exec(compile(source, name, "exec", dont_inherit=True), vars(main))


def _needs_ipython(source: str) -> bool:
    """Returns whether a cell has lines that are IPython's and not Python's."""
    lines = [line.strip() for line in source.splitlines()]
    if not any(line.startswith(("%", "!", "?")) or line.endswith("?") for line in lines):
        return "get_ipython" in source
    try:
        compile(source, "cell", "exec", dont_inherit=True)
    except SyntaxError:
        return True
    return "get_ipython" in source


def _shell(main: types.ModuleType) -> Any:
    try:
        from IPython.core.interactiveshell import InteractiveShell
    except ImportError:
        raise LaunchError(
            "the notebook has cells that only IPython runs (lines that begin with % or !). Install "
            "it with pip install ipython, or remove these lines."
        ) from None
    shell = InteractiveShell.instance(user_module=main)
    vars(main)["get_ipython"] = lambda: shell
    return shell


# ---- tracebacks ----------------------------------------------------------------------------------


def _begin_in_its_own_code(error: BaseException) -> None:
    """Lets a traceback that nobody handles begin where the script's own code does."""
    show = sys.excepthook

    def shown(kind: Any, value: Any, trace: Any) -> None:
        if value is error:
            trace = own_code(trace)
            value = value.with_traceback(trace)
        show(kind, value, trace)

    sys.excepthook = shown


def own_code(trace: Any) -> Any:
    """Returns a traceback behind the last frame that is of this file, or of what runs modules."""
    own = trace
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
            own = trace.tb_next
        trace = trace.tb_next
    return own
