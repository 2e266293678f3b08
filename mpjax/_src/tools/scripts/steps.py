"""The training steps of a script: programs that differentiate something, traced again as asked.

A step is the outermost jitted function around a differentiated one, or the gradient alone where
nothing around it is jitted. It is traced while the script calls it, because some libraries keep
what a trace needs only for so long. What it differentiates is traced apart, as a function of the
values that it gets there.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.autocast.transform import autocast
from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import held
from mpjax._src.core.base.contexts import HOOKED, unchecked
from mpjax._src.core.base.higher_order import CALL, MAP, higher_order
from mpjax._src.core.base.trees import is_array, is_key
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program import trace as programs
from mpjax._src.core.program.interpret import Plain, interpret
from mpjax._src.core.program.site import Site as Place
from mpjax._src.core.program.site import equations
from mpjax._src.core.program.trace import Flat
from mpjax._src.tools.scripts.hooks import Around, Hook, Site, is_within
from mpjax._src.tools.scripts.missed import apart

# The scope of what a function is differentiated at, with the number of the function.
MARK = "mpjax.survey"

# So many operations run one by one before the gradient is given up on.
MOST = 10_000

# The parameter of a differentiated function for what it closes over.
CLOSED_OVER = "closed_over"


class NoValues(Exception):
    """A step's values cannot be looked at; the message says why."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """A function that a step differentiates, apart from the step.

    Attributes:
        site: Where it is differentiated.
        call: Its call, of which the arrays are abstract.
        program: Its program. The arguments after those of the call are what it closes over.
        closed_over: The abstract values of these.
        signature: The function itself, for the names of its parameters.
    """

    site: Site
    call: Flat
    program: programs.Traced
    closed_over: tuple[Any, ...]
    signature: Callable[..., Any]

    @property
    def fun(self) -> Callable[..., Any]:
        """The function, which gets what it closes over as an argument of its own."""

        @functools.wraps(self.signature)
        def pure(*args: Any, **kwargs: Any) -> Any:
            outer = kwargs.pop(CLOSED_OVER)
            arrays = Flat.of((args, kwargs), is_array).arrays
            closed = _jax.close(self.program.jaxpr, outer)
            return self.program.rebuild(_jax.eval_closed(closed, *arrays))

        return pure

    def arguments(self, values: Sequence[Any] | None = None) -> tuple[tuple[Any, ...], dict]:
        """Returns the arguments of `fun`: of these values, or abstract ones."""
        count = len(self.call.arrays)
        given = [*self.call.arrays, *self.closed_over] if values is None else [*values]
        args, kwargs = self.call.filled(given[:count])
        return args, {**kwargs, CLOSED_OVER: given[count:]}

    @property
    def argnums(self) -> tuple[int, ...]:
        """The positions of the differentiated arguments."""
        args, _ = self.call.tree.children()
        count, given = len(args.children()), self.site.argnums
        if given is None:
            return tuple(range(count))
        several = given if isinstance(given, Sequence) else (given,)
        return tuple(int(i) % count for i in several)

    @property
    def places(self) -> list[int]:
        """The numbers of the floating arrays that it is differentiated with respect to."""
        # By their paths, (args, kwargs)[0][argnum]...: a user's nodes may refuse leaves of ours.
        paths = [jax.tree_util.keystr(keys[:2]) for keys in self.call.keys]
        numbers = [n for i in self.argnums for n, at in enumerate(paths) if at == f"[0][{i}]"]
        return [n for n in numbers if jnp.issubdtype(self.call.arrays[n].dtype, jnp.inexact)]

    @property
    def parameters(self) -> list[Any]:
        """The abstract values of these."""
        return [self.call.arrays[n] for n in self.places]


# ---- what is put around a differentiated function ------------------------------------------------


class Noting:
    """Notes what is differentiated in one trace, and marks the values that it gets there."""

    def __init__(self) -> None:
        self.losses: list[Loss] = []
        self.own: list[Site] = []  # gradients that mpjax computes, under a policy of the script
        self.place: tuple[str, str, int] | None = None  # of the step: its name, its file and line
        self._alive: list[Any] = []  # the marked values, which JAX would leave out otherwise

    def __call__(self, fun: Callable[..., Any], site: Site) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.place = self.place or _step_around(sys._getframe())
            known = [loss.site for loss in self.losses]
            call = Flat.of((args, kwargs), is_array)
            if not call.arrays:
                return fun(*args, **kwargs)
            number = known.index(site) if site in known else len(known)
            traced = programs.trace(call.on(fun), call.avals, "differentiated")
            inner, outer = _jax.open_jaxpr(traced.jaxpr)
            shapes = [tuple(map(_shape_of, arrays)) for arrays in (call.arrays, outer)]
            # JAX may trace the body of a loop twice, and keep the second trace.
            old = self.losses[number] if number < len(known) else None
            if old is None or _alike(shapes, [old.call.arrays, old.closed_over]):
                self._mark(number, [*call.arrays, *outer])
            if old is not None:
                return traced.rebuild(_jax.eval_closed(traced.jaxpr, *call.arrays))
            abstract = dataclasses.replace(call, arrays=shapes[0])
            program = dataclasses.replace(traced, jaxpr=inner)
            self.losses.append(Loss(site, abstract, program, shapes[1], fun))
            return traced.rebuild(_jax.eval_closed(traced.jaxpr, *call.arrays))

        return noted

    def computed(self, site: Site) -> None:
        """Is told of a gradient that mpjax itself computes."""
        self.place = self.place or _step_around(sys._getframe())
        self.own.append(site)

    def _mark(self, number: int, arrays: Sequence[Any]) -> None:
        values = tuple(jax.lax.stop_gradient(x) for x in arrays)
        with jax.named_scope(f"{MARK}{number}."):
            self._alive.append(jax.lax.optimization_barrier(values))

    def done(self) -> None:
        self._alive.clear()  # no tracer may outlive its trace


def trains(noting: Noting, program: programs.Traced) -> bool:
    """Returns whether gradients come out of a step, or what they update: an array of the shape of
    one that it differentiates with respect to, or as many numbers as these have.

    What it writes to references or hands to Python comes out too. A validation pass that computes
    forces returns neither.
    """
    inner, _ = _jax.open_jaxpr(program.jaxpr)
    own = _passed_on(inner)
    out = [v.aval for i, v in enumerate(inner.outvars) if i not in own]
    asked: dict[int, list[Any]] = {}  # what is marked, with the axes that a vmap adds
    for eqn, place, _ in equations(inner):
        if (number := _marked(place)) is not None:
            asked[number] = [v.aval for v in eqn.invars]
        elif eqn.effects and not _jax.inner_jaxprs(eqn):
            out += [getattr(v.aval, "inner_aval", v.aval) for v in eqn.invars]
    shapes = [x.shape for x in out if _jax.is_array(x)]  # weights may be stored as integers
    numbers = _numbers([x.shape for x in out if held.is_inexact(x)])
    for number, loss in enumerate(noting.losses):
        arrays = asked.get(number, loss.call.arrays)
        wanted = [arrays[n].shape for n in loss.places]
        if not {*wanted}.isdisjoint(shapes) or _numbers(wanted) <= numbers:
            return True
    return bool(noting.own)


def _numbers(shapes: Sequence[Any]) -> int:
    return sum(map(_jax.size_of, shapes))


def _passed_on(jaxpr: Any) -> dict[int, int]:
    """Returns the results of an open jaxpr that are its arguments, each with the argument."""
    known = {v: i for i, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        row = higher_order(eqn.primitive.name)
        for inside in row.wire(eqn) if row.kind in (CALL, MAP) else ():
            for out, argument in _passed_on(_jax.open_jaxpr(inside.program)[0]).items():
                given, place = eqn.invars[inside.ins[argument]], inside.outs[out]
                if place is not None and not isinstance(given, _jax.Literal) and given in known:
                    known[eqn.outvars[place]] = known[given]
    found = ((i, v) for i, v in enumerate(jaxpr.outvars) if not isinstance(v, _jax.Literal))
    return {i: known[v] for i, v in found if v in known}


def under(policy: Policy | None) -> Hook | None:
    """Returns the hook that plans what is differentiated; None for a step as it is written."""
    if policy is None:
        return None
    around: Around = lambda fun, site: autocast(fun, policy)  # noqa: E731
    return Hook(around, key=("survey", str(policy)))


def _step_around(frame: Any) -> tuple[str, str, int] | None:
    """Returns the user's outermost function that is being traced."""
    found = None
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if module == __name__ and code.co_name == _call_traced.__name__:
            break
        if _jax.is_users_file(code.co_filename) and not is_within(module, "mpjax"):
            found = code.co_qualname, code.co_filename, code.co_firstlineno
        frame = frame.f_back
    return found


def _alike(some: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> bool:
    """Returns whether arrays have the shapes and the dtypes of others."""
    one, other = ([[(x.shape, x.dtype) for x in xs] for xs in each] for each in (some, others))
    return one == other


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    aval = _jax.aval_of(x)
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)


# ---- a call of a step ----------------------------------------------------------------------------


class Call:
    """A call of a jitted function, which is traced under any hook."""

    place: tuple[str, str, int] | None = None  # its name, its file and line, where it has them
    why_abstract = "the script compiles the step for shapes, so no batch is known"

    def __init__(self, jitted: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.jitted, self.args, self.kwargs = jitted, args, kwargs
        self.marked: programs.Traced | None = None  # its program, as `noted` has it

    @functools.cached_property
    def flat(self) -> Flat:
        return Flat.of((self.args, self.kwargs))

    @functools.cached_property
    def is_abstract(self) -> bool:
        return any(isinstance(x, jax.ShapeDtypeStruct) for x in self.flat.arrays)

    def planned(self, hook: Hook | None) -> tuple[Callable[..., Any], Hook | None]:
        """Returns what is traced where a hook plans it, and the hook to trace it under."""
        return self.jitted, hook

    def flattened(self, hook: Hook | None) -> Any:
        """Returns a jitted function of the arrays of the call, to compile.

        A class of the script may refuse what stands for arrays, so it is none of its arguments.
        """
        fun, hook = self.planned(hook)
        flat = self.flat.on(fun)

        def step(*arrays: Any) -> Any:
            with traced_again(hook):
                return _call_traced(flat, *arrays)

        return jax.jit(step, donate_argnums=tuple(self.donated))

    @functools.cached_property
    def donated(self) -> list[int]:
        """The numbers of the arrays that the step donates."""
        inner, _ = _jax.open_jaxpr((self.marked or self.program(None)).jaxpr)
        found = (
            zip(e.invars, e.params.get("donated_invars", ()), strict=False) for e in inner.eqns
        )
        donated = {id(v) for pairs in found for v, yes in pairs if yes}
        return [i for i, v in enumerate(inner.invars) if id(v) in donated]

    def program(self, hook: Hook | None, arrays: Sequence[Any] = ()) -> programs.Traced:
        """Returns the step as a program of its arrays."""
        given = dataclasses.replace(self.flat, arrays=tuple(arrays) or self.flat.arrays)
        fun, hook = self.planned(hook)
        with traced_again(hook):
            flat = functools.partial(_call_traced, given.on(fun))
            return programs.trace(flat, given.avals, "step")

    def sites(self) -> list[Site]:
        """Returns where the step differentiates, also where it cannot be looked into."""
        found: list[Site] = []

        def around(fun: Callable[..., Any], site: Site) -> Callable[..., Any]:
            found.append(site)
            return fun

        self.program(Hook(around))
        return found

    def noted(self, arrays: Sequence[Any] = ()) -> tuple[Noting, programs.Traced]:
        """Returns what the step differentiates, and its program, in which that is marked."""
        noting = Noting()
        try:
            # A key of its own: a cached trace would note nothing.
            hook = Hook(noting, key=(noting,), own=noting.computed)
            self.marked = self.program(hook, arrays)
            return noting, self.marked
        finally:
            noting.done()


class Gradient(Call):
    """A function that is differentiated outside of jit, as a step."""

    why_abstract = "it is traced by what is around it, so its values are not known"

    def __init__(self, fun: Callable[..., Any], site: Site, args: Any, kwargs: Any) -> None:
        self.fun, self.site = fun, site
        self.place = f"gradient of {site.fun}", site.file, site.line
        super().__init__(self.planned(None)[0], args, kwargs)

    def planned(self, hook: Hook | None) -> tuple[Callable[..., Any], Hook | None]:
        own = with_own_state(self.fun)
        fun = own if hook is None else hook.around(own, self.site)
        return _derivative(fun, self.site), None

    def sites(self) -> list[Site]:
        return [self.site]


@contextlib.contextmanager
def traced_again(hook: Hook | None) -> Iterator[None]:
    """Traces under a hook, without what the script prints while it is traced."""
    with HOOKED(hook), unchecked(), muted():
        yield


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Drops what this thread prints."""
    stream: Any = _Muted(sys.stdout)
    with contextlib.redirect_stdout(stream):
        yield


class _Muted:
    """A stream that drops what one thread writes to it."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        mine = threading.get_ident() == self._thread
        return len(text) if mine else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _call_traced(flat: Callable[..., Any], *arrays: Any) -> Any:
    """Calls what is traced: the frames above belong to the step."""
    return flat(*arrays)


def with_own_state(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that may be called once more. Flax NNX's hold states that a call takes
    out."""
    return fun if inspect.isroutine(fun) else apart(fun, list, dict, set, collections.deque)


def _derivative(fun: Callable[..., Any], site: Site) -> Callable[..., Any]:
    """Returns a function of the arguments of another one, which returns its derivatives too."""
    options = {"argnums": site.argnums, "has_aux": site.has_aux}

    def derivative(*args: Any, **kwargs: Any) -> Any:
        if site.transform in ("grad", "value_and_grad"):
            return jax.value_and_grad(fun, **options, allow_int=True)(*args, **kwargs)
        if site.argnums is not None:
            return getattr(jax, site.transform)(fun, **options)(*args, **kwargs)
        run = functools.partial(fun, **kwargs)
        if site.has_aux:
            out, back, _ = jax.vjp(run, *args, has_aux=True)
        else:
            out, back = jax.vjp(run, *args)
        return out, back(jax.tree.map(jnp.ones_like, out))

    derivative.__name__ = site.transform
    return derivative


# ---- the values of a call ------------------------------------------------------------------------


def values_of(call: Call, noting: Noting, program: programs.Traced) -> list[Sequence[Any] | None]:
    """Returns what each noted function is first called with; None if this call does not call it.

    The step runs one operation at a time, up to there. A loop, or a function, in which none of
    them is called runs as a whole.

    Raises:
        NoValues: If it cannot be run so.
    """
    if call.is_abstract:
        raise NoValues(call.why_abstract)
    until = _Until(noting.losses)
    until.marked = _marks_in(_jax.open_jaxpr(program.jaxpr)[0])
    if not until.marked:
        raise NoValues("JAX left out of the step's program what its values are read from")
    # A new list, because `interpret` empties the one that it is given.
    with contextlib.suppress(_Reached):
        interpret(program.jaxpr, [jnp.asarray(x) for x in call.flat.arrays], until)
    return until.found


class _Reached(Exception):
    """All values are found."""


class _Until(Plain):
    """The watcher that keeps what each function is first differentiated at."""

    def __init__(self, losses: Sequence[Loss]) -> None:
        self.losses, self.ran = losses, 0
        self.found: list[Sequence[Any] | None] = [None] * len(losses)
        self.marked = set(range(len(losses)))  # those of which the program has values
        self._marks: dict[int, tuple[Any, set[int]]] = {}  # by the identity of the equation

    def whole(self, eqn: Any, ins: list[Any]) -> bool:
        if id(eqn) not in self._marks:
            self._marks[id(eqn)] = eqn, set().union(*map(_marks_in, _jax.inner_jaxprs(eqn)))
        _, numbers = self._marks[id(eqn)]
        return not (eqn.effects or any(self.found[n] is None for n in numbers))

    def operation(self, eqn: Any, ins: list[Any], place: Place) -> list[Any]:
        self.ran += 1
        if self.ran > MOST:
            raise NoValues(f"the gradient is not reached within {MOST:,} operations")
        if (number := _marked(place)) is not None:
            self._keep(number, ins)
            return ins
        if eqn.effects:  # of callbacks, which the step itself makes
            if eqn.outvars:
                raise NoValues("the step asks Python for values (io_callback) before the gradient")
            return []
        return Plain.operation(eqn, ins, place)

    def _keep(self, number: int, ins: Sequence[Any]) -> None:
        if self.found[number] is not None:
            return
        loss = self.losses[number]
        shapes = [*loss.call.arrays, *loss.closed_over]
        self.found[number] = [_one(x, s.shape) for x, s in zip(ins, shapes, strict=True)]
        if all(self.found[n] is not None for n in self.marked):
            raise _Reached


def _marks_in(jaxpr: Any) -> set[int]:
    """Returns the numbers of the functions whose values are marked in an open jaxpr."""
    return {n for _, place, _ in equations(jaxpr) if (n := _marked(place)) is not None}


def _marked(place: Place) -> int | None:
    """Returns the number of the function whose values are marked at a place."""
    found = next((s for s in reversed(place.scopes) if s.startswith(MARK)), None)
    return None if found is None else int(found.removeprefix(MARK).rstrip("."))


def _one(x: Any, shape: tuple[int, ...]) -> Any:
    """Returns an array of a shape, on one device: of several that a vmap makes, the first."""
    if len(getattr(x, "devices", set)()) > 1 and not is_key(x):
        x = np.asarray(x)
    while x.ndim > len(shape):
        kept = (i for i in range(x.ndim) if x.shape[:i] + x.shape[i + 1 :] == shape)
        axis = next(kept, 0)
        x = x[(slice(None),) * axis + (0,)]
    return jnp.asarray(x) if isinstance(x, np.ndarray | np.generic) else x
