"""The origin of a program's equations: the scopes around them, and the user's lines."""

import contextlib
import inspect
import itertools
import os
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core.primitives import jit_p
from jax.extend.linear_util import transformation2
from jax.extend.source_info_util import (
    NameStack,
    SourceInfo,
    current_name_stack,
    register_exclusion,
    user_context,
)

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base.errors import UnsupportedJaxError
from mpjax._src.core.base.lines import is_library

JAX = f"{Path(jax.__file__).parent}{os.sep}"

# Lines of mpjax are never the user's.
register_exclusion(str(Path(__file__).parents[3]))
HERE = f"{Path(__file__).parent}{os.sep}"
OURS = f"{Path(__file__).parents[3]}{os.sep}"
PACKAGE = f"{Path(__file__).parents[4]}{os.sep}"
# The classes of what is in a name stack.
SCOPE = type(NameStack().extend("scope").stack[0])
TRANSFORM = type(NameStack().transform("jvp").stack[0])
SCRIPTS = f"{sysconfig.get_path('scripts')}{os.sep}"


def scope_names(stack: Any) -> tuple[str, ...]:
    """Returns the names of a name stack's scopes, without transformations."""
    return tuple(s.name for s in stack.stack if isinstance(s, SCOPE))


def transforms(stack: Any) -> tuple[str, ...]:
    """Returns the names of a name stack's transformations, such as "jvp" and "transpose"."""
    return tuple(s.name for s in stack.stack if isinstance(s, TRANSFORM))


def scopes_named(stack: Any, start: str) -> tuple[list[str], bool]:
    """Returns the scopes whose names start so, and whether a name stack is of a transpose."""
    names, transposed = [], False
    for entry in stack.stack:
        name = entry.name
        if name.startswith(start):
            names.append(name)
        elif name == "transpose":
            transposed |= isinstance(entry, TRANSFORM)
    return names, transposed


def source_lines(*eqns: Any) -> tuple[str, str]:
    """Returns "file:line" of the user's code, and of the library that it calls there, or "".

    The equation is followed by the calls around it, because a function that a library jits does
    not record its caller. The first one with a user's line counts. If all of the code belongs to
    libraries, the library's line counts as the user's.
    """
    library = ""
    for eqn, caller in itertools.zip_longest(eqns, eqns[1:]):
        # JAX keeps what it traced of its own functions, with the line of another call perhaps.
        if caller is not None and _calls_jax(caller):
            continue
        frames = internals.user_frames(eqn.source_info.traceback)
        innermost = own = next(frames, None)
        if innermost is None:
            continue
        while own and is_library(own.file_name):
            own = next(frames, None)
        if own:
            return _line(own), library or ("" if own is innermost else _line(innermost))
        library = library or _line(innermost)
    return library, ""


def _calls_jax(eqn: Any) -> bool:
    """Returns whether an equation is a jit of a function of JAX."""
    return eqn.primitive is jit_p and file_of(eqn.params["jaxpr"].jaxpr).startswith(JAX)


def source_line(*eqns: Any) -> str:
    """Returns "file:line" of the user's code, for the first equation that has one, or ""."""
    return source_lines(*eqns)[0]


def line_of_caller() -> str:
    """Returns "file:line" of the user's code that runs, or "" if the command runs alone."""
    frame = inspect.currentframe()
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def has_users_line(eqn: Any) -> bool:
    """Returns whether the user's code led to an equation, as far as JAX recorded it."""
    traceback = eqn.source_info.traceback
    codes = () if traceback is None else traceback.raw_frames()[0]
    return any(is_users_file(code.co_filename) for code in codes)


def is_users_file(file: str) -> bool:
    """Returns whether a file belongs to the user, not to JAX, mpjax, Python or a library."""
    return not (is_library(file) or file.startswith((JAX, PACKAGE, SCRIPTS)))


def _line(frame: Any) -> str:
    return f"{frame.file_name}:{frame.start_line}"


def passed_through(eqn: Any, files: Sequence[str]) -> bool:
    """Returns whether a call in one of some files led to an equation; files are path endings."""
    traceback = eqn.source_info.traceback
    frames = () if traceback is None else traceback.frames
    names = (frame.file_name.replace("\\", "/") for frame in frames)
    return any(name.endswith(tuple(files)) for name in names)


# Functions that cast on request. Functions that cast internally, such as a mean, are not listed.
WRITTEN = frozenset({"astype", "asarray", "array", "convert_element_type"})


def is_written_cast(eqn: Any) -> bool:
    """Returns whether the user asked for a cast, or for the cast that it is the derivative of.

    Users ask by a JAX function that casts, or by a library function with "cast" in its name.
    """
    inside, callers = _callers(eqn)
    if not callers or WRITTEN.isdisjoint(frame.function_name for frame in inside):
        return False
    # What stands in for functions of JAX (`casts_of_numbers`) is in this folder.
    libraries = [f for f in inside if not f.file_name.startswith((JAX, HERE))]
    libraries += callers[:1] if is_library(callers[0].file_name) else []
    return not libraries or any("cast" in frame.function_name for frame in libraries)


def is_promotion(eqn: Any) -> bool:
    """Returns whether JAX made a cast to promote operands to one dtype, unasked."""
    inside, _ = _callers(eqn)
    return WRITTEN.isdisjoint(frame.function_name for frame in inside)


def is_called_directly(eqn: Any) -> bool:
    """Returns whether the user's own line made an equation, by a call of jax.numpy or jax.lax.

    Equations that a library or a function of jax.nn makes do not count.
    """
    inside, callers = _callers(eqn)
    within_nn = any(f"{os.sep}nn{os.sep}" in frame.file_name.removeprefix(JAX) for frame in inside)
    return bool(callers) and not within_nn and not is_library(callers[0].file_name)


def in_one_call(first: Any, second: Any) -> bool:
    """Returns whether two equations come from one call of a function outside of JAX."""
    (one, *around), (other, *others) = (_callers(eqn)[1] or [None] for eqn in (first, second))
    if one is None or other is None or len(around) != len(others):
        return False
    same = (one.file_name, one.function_name) == (other.file_name, other.function_name)
    return same and all(
        (a.file_name, a.line_num) == (b.file_name, b.line_num)
        for a, b in zip(around, others, strict=True)
    )


def call_of(eqn: Any) -> tuple[Any, ...]:
    """Returns the calls outside of JAX and mpjax that produced an equation, as a key.

    An equation has the same key as the equation that it is the derivative of.
    """
    traceback = eqn.source_info.traceback
    frames = () if traceback is None else zip(*traceback.raw_frames(), strict=True)
    return tuple(f for f in frames if not f[0].co_filename.startswith((JAX, OURS)))


def _callers(eqn: Any) -> tuple[list[Any], list[Any]]:
    """Returns the frames of JAX and mpjax that produced an equation, and the frames around them."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else list(traceback.frames)
    own = (i for i, f in enumerate(frames) if not f.file_name.startswith((JAX, OURS)))
    start = next(own, len(frames))
    return frames[:start], frames[start:]


def file_of(fun: Any) -> str:
    """Returns "file:line" where a function that JAX traces is defined, as far as it is known."""
    return str(fun.debug_info.func_src_info).rpartition(" at ")[2]


def line_key(eqn: Any) -> Any:
    """Returns a key that an equation shares with those of its derivative."""
    return eqn.source_info.traceback


@contextlib.contextmanager
def location(eqn: Any, stack: Any, callers: Callable[[], Sequence[Any]] = tuple):
    """Returns a context in which traced equations get the source and scopes of an equation.

    Under jax_debug_nans, the error of one that runs says its line. JAX handles its internal error,
    that of a jit, only where the user's own code calls the jit.
    """
    stack = current_name_stack() + stack
    traceback = eqn.source_info.traceback
    with user_context(traceback, name_stack=stack), eqn.ctx.manager:
        try:
            yield
        except internals.offered("InternalFloatingPointError", ()) as error:
            what = f"invalid value ({error.ty}) encountered in {eqn.primitive.name}"
            raise _at_line(FloatingPointError(what), eqn, *callers()) from None
        except FloatingPointError as error:
            _at_line(error, eqn, *callers())
            raise


AT = "The operation is at "


def _at_line(error: FloatingPointError, *eqns: Any) -> FloatingPointError:
    """Adds the line of an equation, or of the calls around it, to an error that names none."""
    try:
        line, library = source_lines(*eqns)
    except UnsupportedJaxError:  # an error of the user's program says more
        return error
    if line and not any(note.startswith(AT) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{AT}{line}" + f", in {library}" * bool(library))
    return error


def own_lines(rule: Any) -> Any:
    """Returns a custom rule whose equations get their own source lines, if a user wrote it.

    In JAX they get the line of the call. In a library's rule no line would be the user's.
    """
    return _own_lines(rule) if is_users_file(file_of(rule)) else rule


@transformation2
def _own_lines(fun: Callable[..., Any], *args: Any) -> Any:
    context = internals.offered("source_info_context", None)
    if context is None:
        return fun(*args)
    before = context.context
    # Where the context has no traceback, JAX records that of each equation.
    context.context = SourceInfo(None, before.name_stack)
    try:
        return fun(*args)
    finally:
        context.context = before
