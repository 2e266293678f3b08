"""What a process differentiates, found where it asks JAX for it, and replaced there.

`jax.grad` and its like are replaced as attributes of `jax`, where libraries look them up at each
call, and in the modules that imported them before. The context `HOOKED` says what is put around a
differentiated function: JAX's caches depend on it, so a function that was jitted outside of the
hook is traced again inside, and the other way round. It is set for all threads.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.scipy.optimize  # `import jax` does not
from jax.experimental import checkify

from mpjax._src.core.base import _jax
from mpjax._src.core.base.contexts import HOOKED, PLANNED_FOR
from mpjax._src.core.base.wrapped import Wrapped
from mpjax._src.tools.scripts.missed import defined_at, holders_of, name_of

# What is differentiated is replaced in these. In those of forward mode it is only noted: who asks
# for a tangent may look at its tracers.
TRANSFORMS = (
    *("grad", "value_and_grad", "vjp", "linearize", "jacrev", "jacobian", "hessian", "fwd_and_bwd"),
)
FORWARD = ("jvp", "jacfwd")
WITH_ARGNUMS = {*TRANSFORMS, "jacfwd"} - {"vjp", "linearize"}
# What is a library on top of JAX, although JAX brings it along: its calls are replaced.
ITS_LIBRARIES = (f"{_jax.JAX}experimental{os.sep}sparse{os.sep}",)
# The frames below a script's own.
HERE = Path(__file__).parent
LAUNCHING = (
    f"{HERE / 'launch.py'}",
    f"{HERE.parent / 'cli'}{os.sep}",
    f"{HERE.parents[2]}{os.sep}__",
)
# What of mpjax computes gradients through other packages. The rest calls functions of others, which
# may differentiate: a survey traces and compiles the steps of libraries.
COMPUTING = tuple(
    f"{HERE.parents[1] / 'core' / room}{os.sep}" for room in ("training", "frameworks")
)


class Site(NamedTuple):
    """A call of a transformation of JAX."""

    transform: str  # its name in `jax`
    file: str  # the user's line that led to it; a library's, if no line is the user's
    line: int
    fun: str  # the name of the differentiated function
    library: str = ""  # "file:line" of the library that made the call, or ""
    argnums: Any = None  # as given; None for transformations without them
    has_aux: bool = False
    defined: str = ""  # "file:line" of the function's own code, as far as it is known

    @property
    def source(self) -> str:
        """ "file:line" of the user's call."""
        return f"{self.file}:{self.line}"


Around = Callable[[Callable[..., Any], Site], Callable[..., Any]]
Tell = Callable[[Site], None]


@dataclasses.dataclass(eq=False)
class Hook:
    """What is put around differentiated functions.

    Hooks with equal keys share what JAX has traced under them.

    Attributes:
        around: Is called with a function and the `Site` where it is differentiated, at each call
            of what the transformation made. Returns what is differentiated in its place.
        key: What traces depend on; by default, ``around`` itself.
        forward: Is called with the site of each function that `jax.jvp` or `jax.jacfwd` run, if
            nothing inside was replaced.
        own: Is called with the site of each gradient that mpjax itself computes, as its training
            step does, which is left alone.
        checked: Is called with the site of each function that is differentiated inside of what
            `checkify` looks into, which then is left alone too.
        calls: How many functions were replaced so far.
    """

    around: Around
    key: Any = None
    forward: Tell | None = None
    own: Tell | None = None
    checked: Tell | None = None
    calls: int = 0

    @property
    def missed(self) -> tuple[str, ...]:
        """What holds transformations, or what they made, from before, each a phrase."""
        return holders_of([old for old, _ in _REPLACED], _namespaces(), Differentiated)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hook) and (self.key or self.around) == (other.key or other.around)

    def __hash__(self) -> int:
        return hash(self.key or self.around)


@contextlib.contextmanager
def hooked(*args: Any, **kwargs: Any) -> Iterator[Hook]:
    """Replaces what the code inside differentiates, in all threads; yields the hook, a `Hook` of
    the arguments.

    Only the outermost function is replaced: not those that are differentiated while it is traced,
    nor in the rules of custom derivatives. Calls of JAX's and mpjax's own are left alone.
    """
    hook = Hook(*args, **kwargs)
    with _installed():
        _open(hook)
        try:
            yield hook
        finally:
            _close(hook)


# ---- what is differentiated ----------------------------------------------------------------------


class Differentiated(Wrapped):
    """A function that is differentiated: each call asks the hook that is in force then."""

    def __init__(self, fun: Callable[..., Any], site: Site) -> None:
        super().__init__(fun, site)
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook = _in_force()
        if hook is None:
            return self.fun(*args, **kwargs)
        hook.calls += 1
        with HOOKED(None):  # what is differentiated inside is a part of it
            return hook.around(self.fun, self.site)(*args, **kwargs)


class Forward(Differentiated):
    """A function of which tangents are taken: it runs as it is."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook = _in_force()
        before = hook and hook.calls
        out = self.fun(*args, **kwargs)
        if hook is not None and hook.forward and hook.calls == before:
            hook.forward(self.site)
        return out


class Checked(Differentiated):
    """A function whose operations `checkify` looks at: what is differentiated inside is noted."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        hook = _in_force()
        if hook is None or hook.checked is None:
            return self.fun(*args, **kwargs)
        tell = hook.checked

        def around(fun: Callable[..., Any], site: Site) -> Callable[..., Any]:
            tell(site)
            return fun

        with HOOKED(Hook(around, ("checked", hook.key), hook.forward, hook.own)):
            return self.fun(*args, **kwargs)


def _in_force() -> Hook | None:
    """Returns the hook for a function that is differentiated here, unless it is inside another."""
    hook: Hook | None = HOOKED.value
    inside = hook is None or PLANNED_FOR.value is not None
    return None if inside or _jax.in_custom_rule(sys._getframe(2)) else hook


def _planning(
    transform: Callable[..., Any], kind: type[Differentiated], module: str
) -> Callable[..., Any]:
    """Returns a transformation of JAX whose first argument is wrapped."""
    first = next(iter(inspect.signature(transform).parameters))

    @functools.wraps(transform)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        fun = args[0] if args else kwargs.get(first)
        file = frame.f_code.co_filename
        own = file.startswith(_jax.JAX) and not file.startswith(ITS_LIBRARIES)
        if not callable(fun) or own:
            return transform(*args, **kwargs)
        site, ours = _site(frame, transform, fun, args, kwargs)
        if ours:
            hook = _in_force()
            if hook is not None and hook.own:
                hook.own(site)
            return transform(*args, **kwargs)
        if args:
            return transform(kind(fun, site), *args[1:], **kwargs)
        return transform(**{**kwargs, first: kind(fun, site)})

    wrapped.__module__ = module  # where pickles find it
    return wrapped


def _site(frame: Any, transform: Any, fun: Any, args: Any, kwargs: Any) -> tuple[Site, bool]:
    """Returns the site of a call, by its frame, and whether mpjax itself makes the call."""
    first, ours = frame, False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(LAUNCHING):
            frame = None
            break
        ours |= file.startswith(_jax.PACKAGE) and (frame is first or file.startswith(COMPUTING))
        if _jax.is_users_file(file):
            break
        frame = frame.f_back
    library = "" if frame is first else f"{first.f_code.co_filename}:{first.f_lineno}"
    user = first if frame is None else frame
    argnums, has_aux = None, kwargs.get("has_aux", False)
    if transform.__name__ in WITH_ARGNUMS:
        given = inspect.signature(transform).bind_partial(*args, **kwargs).arguments
        argnums, has_aux = given.get("argnums", 0), given.get("has_aux", False)
    place = user.f_code.co_filename, user.f_lineno
    named = transform.__name__, *place, name_of(fun)
    return Site(*named, library, argnums, bool(has_aux), defined_at(fun)), ours


def is_within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


# ---- where it is asked for -----------------------------------------------------------------------

PLACES: tuple[tuple[types.ModuleType, type[Differentiated], Sequence[str]], ...] = (
    (jax, Differentiated, TRANSFORMS),
    (jax, Forward, FORWARD),
    (jax.scipy.optimize, Differentiated, ("minimize",)),  # by names of JAX's own
    (checkify, Checked, ("checkify",)),
)
# These, and where JAX defines them, from where some import them.
_DEFINED = (getattr(module, name).__module__ for module, _, names in PLACES for name in names)
HOMES = [vars(sys.modules[name]) for name in {*_DEFINED, *(m.__name__ for m, *_ in PLACES)}]
_LOCK = threading.RLock()
_DEPTH = [0]
_OPEN: list[Hook] = []  # the last one is in force
_REPLACED: list[tuple[Any, Any]] = []  # transformations of JAX, each with what replaces it


def _open(hook: Hook) -> None:
    with _LOCK:
        _OPEN.append(hook)
        HOOKED.set_global(hook)


def _close(hook: Hook) -> None:
    """Ends a hook. Blocks of threads overlap, so it may not be the one that is in force."""
    with _LOCK:
        _OPEN[:] = [each for each in _OPEN if each is not hook]
        HOOKED.set_global(_OPEN[-1] if _OPEN else None)


@contextlib.contextmanager
def _installed() -> Iterator[None]:
    """Replaces transformations, while any hook is open."""
    with _LOCK:
        if not _DEPTH[0]:
            _REPLACED.clear()  # only here: reports are read after their blocks
            for module, kind, names in PLACES:
                for transform in (getattr(module, name) for name in names):
                    _REPLACED.append((transform, _planning(transform, kind, module.__name__)))
            swept(_REPLACED)
        _DEPTH[0] += 1
    try:
        yield
    finally:
        with _LOCK:
            _DEPTH[0] -= 1
            if not _DEPTH[0]:
                swept([(new, old) for old, new in _REPLACED])


def swept(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Replaces the first of each pair by the second in variables of modules, by identity; other
    modules of JAX and those of mpjax keep theirs."""
    table = {id(old): new for old, new in pairs}
    for space in [*HOMES, *_namespaces()]:
        for name, value in [*space.items()]:
            if id(value) in table:
                space[name] = table[id(value)]


def _namespaces() -> list[dict[str, Any]]:
    modules = [(n, m) for n, m in [*sys.modules.items()] if isinstance(m, types.ModuleType)]
    ours = ("jax", "jaxlib", "mpjax")
    return [vars(m) for n, m in modules if not any(is_within(n, package) for package in ours)]
