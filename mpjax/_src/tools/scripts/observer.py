"""Watches a script: finds its training steps, has each examined once, and ends the script."""

import contextlib
import dataclasses
import functools
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from mpjax._src.core.base import _jax
from mpjax._src.core.base.contexts import HOOKED
from mpjax._src.core.base.errors import first_of
from mpjax._src.core.base.lines import short
from mpjax._src.core.base.progress import progress_bar
from mpjax._src.core.base.trees import is_array
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.program.trace import Flat
from mpjax._src.tools.scripts.compiled import Compiling
from mpjax._src.tools.scripts.differentiated import Use
from mpjax._src.tools.scripts.edits import proposed
from mpjax._src.tools.scripts.ending import Stopping, quiet_threads
from mpjax._src.tools.scripts.examine import STAGE, Examined, reason_of
from mpjax._src.tools.scripts.hooks import Site, hooked
from mpjax._src.tools.scripts.jits import Jitted, Watch, watching
from mpjax._src.tools.scripts.steps import Call, Gradient, muted, trains, with_own_state

NAMED = 4  # how many functions a sentence names

# What stands in for a step that no watched jit is around.
UNSEEN = (
    "{} at {} is differentiated inside a jit, scan or vmap that the survey does not see: the table "
    "is of its gradient alone, whose calls are not counted"
)
UNKNOWN = "{} at {} cannot be looked into: {}"
FORWARD = "{} at {} is differentiated in forward mode (jax.{}), which no policy changes here"
OWN = (
    "{} at {} is differentiated by mpjax, under a policy that the script chooses: mpjax.explain "
    "and mpjax.compile_for report on it"
)
# What differentiates and is no step.
EVALUATES = (
    "{} at {} differentiates {}, and returns no gradient and nothing that one updates: it is no "
    "training step"
)


class Observer:
    """Finds the training steps of what runs while it observes; raises for invalid names.

    Attributes:
        steps: The steps that were found, in the order of their first calls.
        not_covered: What is differentiated and was not looked at, each a sentence.
        stopped: Whether it has ended the script.
        interrupted: Whether Ctrl-C ended an examination.
    """

    def __init__(
        self, options: Any, count: int | None, stuck: Callable[[], None] = lambda: None
    ) -> None:
        # Nothing here may start a backend: the script may set it up after its import of JAX.
        policies = tuple(map(get_policy, options.policies))
        self.options = dataclasses.replace(options, policies=policies)
        self.compiling = Compiling(options.targets, options.timeout)
        self.count, self._stop = count, Stopping(stuck)
        self.steps: list[Examined] = []
        self.not_covered: dict[str, None] = {}
        self.stopped = self.interrupted = False
        self._known: dict[Any, Examined | None] = {}
        self._by_place: dict[Any, Examined] = {}
        self._lock = threading.RLock()
        self._watch: Watch | None = None
        self._alive: list[Any] = []  # whose identities are keys
        self._forward: dict[Site, None] = {}

    @contextlib.contextmanager
    def observing(self) -> Iterator["Observer"]:
        """Observes what runs inside."""
        hooks = hooked(self.around, ("survey",), self._ran_forward, self._ran_own)
        with hooks as hook:
            with watching(self) as self._watch, quiet_threads():
                yield self
            for phrase in hook.missed:
                self.not_covered[f"not seen, because it was made before: {phrase}"] = None
        lines = {site.source for step in self.steps for site in _sites(step)}
        for site in self._forward:
            if site.source not in lines:
                self.not_covered[FORWARD.format(*_named(site), site.transform)] = None

    # ---- jitted functions ------------------------------------------------------------------------

    def met(self, jitted: Jitted, args: Any, kwargs: Any) -> Examined | None:
        """Examines a jitted function that differentiates something, at its first call."""
        key = _key_of(jitted, args, kwargs)
        if key not in self._known:
            with self._lock:
                self._alive.append(jitted)
                self._known[key] = self._examined(Call(jitted.jitted, args, kwargs))
        return self._known[key]

    def runs(self, what: Examined) -> None:
        """Counts the calls of a step, and ends the script before one more than is asked for."""
        with self._lock:
            if self.stopped or (self.count is not None and what.calls >= self.count):
                self.stopped = True
                self._stop()
            what.calls += 1

    def _examined(self, call: Call) -> Examined | None:
        try:
            noting, program = call.noted()
        except Exception as error:  # of what a program of arrays cannot be
            with contextlib.suppress(Exception):  # the script's own, which its call will raise
                for site in call.sites():
                    self.not_covered[UNKNOWN.format(*_named(site), reason_of(error))] = None
            return None
        if not (noting.losses or noting.own):
            return None
        name = getattr(call.jitted, "__name__", type(call.jitted).__name__)
        place = call.place or noting.place or (name, *_line_of_call())
        if not trains(noting, program):
            name, file, line = place
            losses = first_of([*dict.fromkeys(loss.site.fun for loss in noting.losses)], NAMED)
            self.not_covered[EVALUATES.format(name, short(f"{file}:{line}"), losses)] = None
            return None
        return self._step(Examined(call, noting, program, place))

    def _step(self, step: Examined) -> Examined:
        """Has a step examined, or returns the same step that was called in another way before."""
        shapes = tuple((x.shape, str(x.dtype)) for loss in step.losses for x in loss.parameters)
        known = self._by_place.setdefault((step.place, shapes), step)
        if known is not step:
            return known
        self.steps.append(step)
        try:
            bar = progress_bar(self.options.progress, f"survey {step.place[0]}", STAGE)
            with HOOKED(None), muted(), jax.transfer_guard("allow"), bar:
                step.examine(self.options, self.compiling)
        except KeyboardInterrupt:
            self.stopped = self.interrupted = True
            self._stop()  # the script would take the interrupt for its own
        finally:
            step.forget()
        return step

    # ---- what is differentiated outside of them --------------------------------------------------

    def around(self, fun: Callable[..., Any], site: Site) -> Callable[..., Any]:
        """Returns a function that is differentiated as it is, and looked at if no jit is around."""

        @functools.wraps(fun)
        def differentiated(*args: Any, **kwargs: Any) -> Any:
            if self._watch is None or self._watch.is_inside:
                return fun(*args, **kwargs)
            key = site, tuple(map(_kind, jax.tree.leaves((args, kwargs))))
            known = self._known.get(key)
            if known is not None:
                self.runs(known)
            again = with_own_state(fun)
            out = fun(*args, **kwargs)
            # Behind its own call, because it may keep what later calls change.
            if key not in self._known:
                with self._lock, self._watch.within():
                    flat = Flat.of((args, kwargs), is_array)
                    step = self._known[key] = self._gradient(again, site, flat)
                if step is not None:
                    self.runs(step)
            return out

        return differentiated

    def _gradient(self, fun: Any, site: Site, flat: Flat) -> Examined | None:
        arrays = [jax.lax.stop_gradient(x) for x in flat.arrays]
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            self.not_covered[UNSEEN.format(*_named(site))] = None
            arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
        args, kwargs = flat.filled(arrays)
        return self._examined(Gradient(fun, site, args, kwargs))

    def _ran_own(self, site: Site) -> None:
        if self._watch is not None and self._watch.is_inside:  # a step, which says so
            return
        self.not_covered[OWN.format(*_named(site))] = None

    def _ran_forward(self, site: Site) -> None:
        self._forward[site] = None

    # ---- what is told at the end -----------------------------------------------------------------

    def ending(self, ended: str) -> str:
        """Returns how the run ended, of which a script may not have told."""
        if self.interrupted:
            return "interrupted"
        return "stopped" if self.stopped else ended

    def notes(self) -> Iterator[str]:
        """Yields what was not looked at, and why."""
        yield from self.compiling.notes
        yield from self.not_covered
        idle = list(self._watch.idle()) if self._watch and self.stopped else []
        if idle:
            yield (
                f"jitted, and not called before the script was ended: {first_of(idle, NAMED)}. "
                "With --steps N or --whole the script goes on."
            )

    def proposal(self) -> Any:
        """Returns the changes of the script for the first policy that computes in 16 bits."""
        rows = [row for step in self.steps for row in step.rows if row.policy]
        policy = next((row.name for row in rows if row.computes_in_half), None)
        if policy is None:
            return None
        sites = dict.fromkeys(site for step in self.steps for site in _sites(step))
        uses = [Use(site.file, site.line, site.transform, site.fun or None) for site in sites]
        return proposed(uses, policy)


# ---- inside --------------------------------------------------------------------------------------


def _sites(step: Examined) -> list[Site]:
    return [loss.site for loss in step.losses]


def _named(site: Site) -> tuple[str, str]:
    return site.fun, short(site.source)


def _line_of_call() -> tuple[str, int]:
    """Returns the user's file and line that is running, or a library's, if none is the user's."""
    frames = [f for f in traceback.extract_stack() if not f.filename.startswith(_jax.OURS)]
    users = [f for f in frames if _jax.is_users_file(f.filename)] or frames
    return users[-1].filename, users[-1].lineno or 0


def _key_of(jitted: Jitted, args: Any, kwargs: Any) -> Any:
    """Returns what JAX makes a new trace for, as far as it matters here."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    return id(jitted), _hashed(tree), tuple(map(_kind, leaves))


def _kind(leaf: Any) -> Any:
    if is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return tuple(leaf.shape), str(leaf.dtype)
    return (type(leaf), leaf) if _hashed(leaf) is leaf else type(leaf)


def _hashed(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return type(value)
    return value
