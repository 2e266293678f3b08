"""The outermost jitted functions that a script calls, found where it asks JAX for them.

`jax.jit` and `jax.pmap` are replaced as attributes of `jax`, as `hooks` replaces what
differentiates. What they make is wrapped: libraries' own forms (`nnx.jit`, `eqx.filter_jit`) are
made of them. The wrapper calls what JAX made, so results are JAX's own.
"""

import contextlib
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from mpjax._src.core.base import _jax
from mpjax._src.core.base.lines import short
from mpjax._src.core.base.wrapped import Wrapped, name_in_module
from mpjax._src.tools.scripts import hooks


class Watcher(Protocol):
    """What is told of outermost calls."""

    def met(self, jitted: "Jitted", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Is told of a call before it runs, or of what is compiled ahead of time for later calls.

        Returns what `runs` is told; None if nobody wants to know of its runs.
        """

    def runs(self, what: Any) -> None:
        """Is told that what `met` returned runs now. It may raise what ends the script."""


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator["Watch"]:
    """Tells a watcher of the outermost calls of functions that are jitted inside.

    Functions that were jitted before are not seen.
    """
    watch, make_jaxpr = Watch(watcher), jax.make_jaxpr
    pairs: list[tuple[Any, Any]] = [(x, _watched_maker(x, watch)) for x in (jax.jit, jax.pmap)]
    # What only traces, as libraries do to know the shapes of a step: nothing of it runs.
    pairs.append((jax.eval_shape, watch.unseen(jax.eval_shape)))
    traced = functools.wraps(make_jaxpr)(lambda *args, **kw: watch.unseen(make_jaxpr(*args, **kw)))
    pairs.append((make_jaxpr, traced))
    hooks.swept(pairs)
    try:
        yield watch
    finally:
        watch.watcher = None
        hooks.swept([(new, old) for old, new in pairs])


class Watch:
    """Who is told, until the end."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher: Watcher | None = watcher
        self._inside = threading.local()
        self._made: weakref.WeakSet[Jitted] = weakref.WeakSet()

    def wrapped(self, jitted: Callable[..., Any]) -> "Jitted":
        made = Jitted(jitted, self)
        self._made.add(made)
        return made

    def idle(self) -> Iterator[str]:
        """Yields the user's jitted functions that were never called, each with its line."""
        for each in [*self._made]:
            code = getattr(inspect.unwrap(each), "__code__", None)
            if not each.called and code and _jax.is_users_file(code.co_filename):
                yield f"{code.co_qualname} ({short(f'{code.co_filename}:{code.co_firstlineno}')})"

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside a call that was told."""
        return getattr(self._inside, "call", False)

    def told(self, args: Any, kwargs: Any) -> Watcher | None:
        """Returns who is told of a call: nobody of one inside another, or of one being traced."""
        if self.watcher is None or self.is_inside:
            return None
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs)))
        return None if traced else self.watcher

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        before, self._inside.call = self.is_inside, True
        try:
            yield
        finally:
            self._inside.call = before

    def unseen(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function in which nobody is told of anything."""

        @functools.wraps(fun)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.within():
                return fun(*args, **kwargs)

        return wrapped


def _watched_maker(maker: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    @functools.wraps(maker)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made = maker(*args, **kwargs)
        name = sys._getframe(1).f_globals.get("__name__", "")
        if any(hooks.is_within(name, package) for package in ("jax", "mpjax")):
            return made
        # `jax.jit(static_argnums=0)` returns a decorator.
        return watch.wrapped(made) if args or "fun" in kwargs else _decorator(made, watch)

    return wrapped


def _decorator(made: Callable[..., Any], watch: Watch) -> Callable[..., Any]:
    return lambda fun: watch.wrapped(made(fun))


class Jitted(Wrapped):
    """What `jax.jit` made of a function, whose outermost calls are told."""

    def __init__(self, jitted: Callable[..., Any], watch: Watch) -> None:
        super().__init__(jitted)
        self.jitted, self._watch, self.called = jitted, watch, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called = True
        watcher = self._watch.told(args, kwargs)
        if watcher is None:
            return self.jitted(*args, **kwargs)
        with self._watch.within():
            what = watcher.met(self, args, kwargs)
            if what is not None:
                watcher.runs(what)
            return self.jitted(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self._staged("lower", args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self._staged("trace", args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch.unseen(self.jitted.eval_shape)(*args, **kwargs)  # type: ignore[attr-defined]

    def _staged(self, name: str, args: Any, kwargs: Any) -> Any:
        self.called = True
        watcher, stage = self._watch.told(args, kwargs), getattr(self.jitted, name)
        if watcher is None:
            return stage(*args, **kwargs)
        with self._watch.within():
            made = watcher.met(self, args, kwargs)
            found = stage(*args, **kwargs)
        return found if made is None else Staged(found, self._watch, made)

    def __getattr__(self, name: str) -> Any:
        if name == "jitted":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.jitted, name)

    def __reduce__(self) -> Any:
        return name_in_module(self) or (_itself, (self.jitted,))

    def __repr__(self) -> str:
        return repr(self.jitted)


class Staged:
    """A jitted function that is compiled ahead of time, or on the way there."""

    def __init__(self, stage: Any, watch: Watch, made: Any) -> None:
        self._stage, self._watch, self._made = stage, watch, made

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return Staged(self._stage.lower(*args, **kwargs), self._watch, self._made)

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        return Staged(self._stage.compile(*args, **kwargs), self._watch, self._made)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watcher = self._watch.told(args, kwargs)
        if watcher is not None:
            watcher.runs(self._made)
        return self._stage(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_stage":  # of a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self._stage, name)


def _itself(jitted: Any) -> Any:
    return jitted
