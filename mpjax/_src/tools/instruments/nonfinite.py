"""`find_nonfinite`: finds the operation that produced the first NaN or Inf, and says what to do."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.autocast.boundary import casts_arguments
from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import FLOAT32, is_half
from mpjax._src.core.base.lines import short, where
from mpjax._src.core.base.public import public
from mpjax._src.core.base.rules import rule_of
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.curried import takes_arguments
from mpjax._src.core.program.graph import ARGUMENTS, PLANNED
from mpjax._src.core.program.interpret import Watcher, interpret, root_of, run, run_in_float32, take
from mpjax._src.core.program.modules import changed_by, has_modules
from mpjax._src.core.program.site import Site, shown
from mpjax._src.core.training.loss_scale import LossScale, get_loss_scale, resolve_loss_scale
from mpjax._src.tools.document import model
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.instruments.derivative import Producer, derivative_at, ranges_of
from mpjax._src.tools.instruments.places import Places
from mpjax._src.tools.instruments.programs import LEAST_EXPONENT, Program, make_program
from mpjax._src.tools.instruments.ranges import Range, counts, is_number, largest_finite, range_of
from mpjax._src.tools.instruments.rows import HALF, turns_of
from mpjax._src.tools.lint.linter import lint

# The most parts of the program that a tried override moves to float32.
ROUNDS = 4

# The parts of the names of results that count skipped steps: of mpjax's states and optax's.
SKIPS = ("consecutive_skips", "notfinite_count")

KINDS = {
    "overflow": "its dtype is too narrow for the result",
    "undefined": "the result is non-finite in float32 too",
}


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class NonfiniteReport(Report):
    """The report of `find_nonfinite`. ``print`` it; it is true if a NaN or Inf was found.

    Attributes:
        found: Whether a result of the program is NaN or Inf.
        kind: "overflow" (the result is finite in float32, but not in 16 bits), "undefined" (it is
            non-finite in float32 too), "argument" (an argument was non-finite), "compiled" (only
            the compiled program returns non-finite values), or "" if nothing was found.
        made: "NaN" or "Inf".
        backward: Whether the operation depends on a cotangent. What a backward pass computes again
            does not.
        primitive: The name of the operation. If it is part of a derivative, it is the operation
            that JAX computes the derivative with, such as "div" for that of "sqrt".
        source: "file:line" of the user's code. For an operation that mpjax inserted, that of what
            reads its result, or of what made its operand.
        about: If mpjax inserted the operation, as a policy's casts and what a step does to
            gradients: its operand, such as "w" or "the result of dot_general", and what reads its
            result. Otherwise "".
        scope: The named scopes around the operation, joined with "/".
        path: The paths of the parameters among its operands, or among those of the corresponding
            forward operation, joined with ", "; for an argument, its own path.
        loops: The loops around the operation with their iterations, counted from 0, the outermost
            loop first.
        inputs: The ranges of its operands; those of ``derivative_of`` if it is a derivative.
        result: The range of its result; that of ``expression`` if it is a derivative.
        largest: The largest magnitude of the result in float32 if it is finite there, else None.
        reaches: The non-finite results of the program.
        loss_scale: The scale that the loss was multiplied by.
        loss_scale_from: Where this scale is from: "from state.loss_scale", "as given", or "assumed"
            with the reason; "" if nothing was scaled.
        curable: Whether a lower loss scale prevents it; None if nothing was found.
        safe_loss_scale: The largest power of two at which the compiled program is finite, or None.
        advice: What to do.
        op: The number of this operation in the plan, or of the forward operation that it is the
            derivative of.
        given: The paths of arguments that are infinite and reach its operands.
        library: "file:line" of the library code that ``source`` calls, or "".
        overrides: A dict for ``policy.override``, from pattern to dtype, that prevents it by moving
            few operations to float32. With it, the program was run and is finite. Empty if none is
            known.
        float32_flops: The share of the matmul FLOPs that these overrides move, from 0 to 1.
        derivative_of: The name of the operation whose derivative is non-finite, such as "sqrt", if
            the operation found is part of this derivative, and "" otherwise. JAX writes a
            derivative with other operations, and computes some of them in the forward pass.
        derivative: What this derivative is: "Inf", "-Inf" or "NaN", or "".
        expression: How JAX computes it, with the numbers, such as "0.5 / sqrt(0)"; "" if there is
            no derivative, or if it is not computed entry by entry.
    """

    found: bool
    kind: str = ""
    made: str = ""
    backward: bool = False
    primitive: str = ""
    source: str = ""
    scope: str = ""
    path: str = ""
    loops: tuple[tuple[str, int], ...] = ()
    inputs: tuple[Range, ...] = ()
    result: Range | None = None
    largest: float | None = None
    reaches: tuple[str, ...] = ()
    loss_scale: float = 1.0
    curable: bool | None = None
    safe_loss_scale: float | None = None
    advice: str = ""
    op: int | None = None
    given: tuple[str, ...] = ()
    library: str = ""
    overrides: dict[str, str] = dataclasses.field(default_factory=dict)
    float32_flops: float | None = None
    derivative_of: str = ""
    derivative: str = ""
    expression: str = ""
    loss_scale_from: str = ""
    about: str = ""

    def __bool__(self) -> bool:
        return self.found

    def document(self) -> model.Document:
        title, advice = "The first NaN or Inf", self.advice.splitlines()
        scale = f"loss scale {self.loss_scale:g}, {self.loss_scale_from}"
        lines = (*(advice if self.found else ()), *([scale] if self.loss_scale_from else ()))
        if not self.found:
            return model.Document(title, self.advice, lines)
        narrow = self.result and self.result.dtype == "f16"
        in_float32 = ""
        if self.largest is not None:
            most = "; float16's is 65504" if narrow else ""
            in_float32 = f"its largest magnitude would be {self.largest:.4g}{most}"
        rows = (
            ("scope", self.scope),
            ("path", self.path),
            ("iteration", turns_of(self.loops)),
            *(("" if i else "inputs", str(operand)) for i, operand in enumerate(self.inputs)),
            ("slope" if self.derivative_of else "result", str(self.result or "")),
            ("float32", in_float32),
            ("reaches", ", ".join(self.reaches)),
        )
        filled = tuple(row for row in rows if row[1])
        return model.Document(
            title,
            self.headline,
            lines,
            (model.Table("Where, and of what", ("", ""), filled, ("",)),),
            drawing=self._drawing,
        )

    def _drawing(self) -> model.Drawing:
        if not self.primitive:
            return model.Drawing()
        verb = "its derivative is" if self.derivative_of else "produced"
        found = f"{verb} {self.derivative or self.made}: {KINDS.get(self.kind, self.kind)}"
        operation = model.Operation(
            label=self.derivative_of or self.primitive,
            scope=model.box_of(self.scope, self.source),
            facts=model.facts(
                why=found,
                derivative=self.expression,
                **model.place_of(self),
                parameters=self.path,
                iteration=turns_of(self.loops),
                row_of_explain=self.op,
            ),
            colors={
                "dtype": model.DTYPES.get(
                    self.result.dtype if self.result else "", model.DTYPES["other"]
                ),
                "pass": "backward" if self.backward else "forward",
            },
            backward=self.backward,
        )
        return model.Drawing(operations=(operation,), colors=(model.DTYPE, model.PASS))

    @property
    def headline(self) -> str:
        """The first sentence of the report: what is non-finite, and where."""
        place = where(self.source, self.library)
        if not self.found:
            return self.advice
        if self.kind == "argument":
            return f"The argument {self.path} contains {self.made} before anything is computed"
        if self.kind == "compiled":
            return f"{self.made} in the compiled program only"
        if self.derivative_of:
            computed = f" ({self.expression})" if self.expression else ""
            what = f"The derivative of {self.derivative_of} is {self.derivative}"
            finite = all(name.startswith("gradient of ") for name in self.reaches)
            return f"{what} at {place}{computed}" + "; the loss itself is finite" * finite
        which = "backward" if self.backward else "forward"
        subject = f"{self.primitive} of {self.about}" if self.about else self.primitive
        if self.about and self.result and self.primitive == rules.CAST:
            subject = f"The cast to {model.DTYPES[self.result.dtype]} of {self.about}"
        return f"{subject} produced {self.made} in the {which} pass" + f", {place}" * bool(place)


@takes_arguments
def find_nonfinite(
    fun: Callable[..., Any],
    policy: Any = None,
    *,
    loss_scale: LossScale | str | float | None = "auto",
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
) -> Callable[..., NonfiniteReport]:
    """Finds the operation that produced the first NaN or Inf that reaches a result.

    The function under the policy, and the gradient of its scaled loss, run one operation at a time
    and uncompiled, including the operations inside jit, scan, while, cond, remat and custom rules.
    Infinities that the program masks out later, as in an attention mask, are ignored.

    Args:
        fun: A function, as for `autocast`. If it returns a scalar loss, its gradient is checked
            too.
        policy: A policy or its name: the function runs under `autocast`. None runs it as it is.
        loss_scale: The loss scale: a number, a loss scale object such as ``state.loss_scale``,
            "dynamic", or None for no scaling. With "auto", it is that of a state among the
            arguments; without one, float16 has the scale that it starts with, 65536. The report
            says which scale was used.
        argnums: The arguments to differentiate; None for the forward pass only.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.

    Returns:
        A function of the same arguments, which must be concrete arrays. It returns a
        `NonfiniteReport`: the operation, its source line, scope, parameter path and iteration, the
        ranges of its operands, whether a lower loss scale prevents it, and what to do. With
        these arguments after the policy, the report.

    Raises:
        TypeError: If ``fun`` is not a function, or an array is abstract or being traced.
        ValueError: If there are no arrays, or nothing to differentiate.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.exp(x @ w) * 0.5)
        >>> report = mpjax.find_nonfinite(loss)(jnp.full((2,), 100.0), jnp.ones((3, 2)))
        >>> report.primitive, report.made, report.backward, report.curable
        ('exp', 'Inf', False, False)

    In comparison, jax.debug_nans stops at a compiled function, and jax.experimental.checkify must
    be built into the program.
    """
    policy = get_policy("float32" if policy is None else policy)
    resolve_loss_scale(loss_scale, False)

    def report(*args, **kwargs):
        settings: Any = {"argnums": argnums, "has_aux": has_aux, "numbers": True}
        settings |= {"args": args, "kwargs": kwargs}
        make = functools.partial(make_program, "find_nonfinite", fun, **settings)
        program = make(policy=policy)
        if program.scales_itself and has_modules((args, kwargs)):  # a step that changes its state
            settings |= {"argnums": None, "has_aux": False}
            make = functools.partial(make_program, "find_nonfinite", changed_by(fun), **settings)
            program = make(policy=policy)
        scale, source = _scale(program, policy, loss_scale)
        found = dataclasses.replace(_search(program, scale), loss_scale_from=source)
        found = _advised(found, program, policy, make)
        if found.kind in ("undefined", "compiled"):
            lines = (found.advice, *_of_indices(fun, program, args, kwargs))
            found = dataclasses.replace(found, advice="\n".join(filter(None, lines)))
        return found

    return report


def _scale(program: Program, policy: Policy, loss_scale: Any) -> tuple[float, str]:
    """Returns the loss scale of a program, and where it is from: "" if nothing is scaled."""
    scale = float(get_loss_scale(policy, loss_scale).loss_scale)
    scaled = program.follows_gradient or program.scales_itself
    if not (isinstance(loss_scale, str) and loss_scale.lower() == "auto"):
        return scale, "as given" if scaled else ""
    if program.held:
        return program.held.scale, f"from {program.held.name}" if scaled else ""
    why = "no policy computes in float16" if scale == 1 else "the scale that float16 starts with"
    return scale, f"assumed: {why}; pass loss_scale= or the state" if scaled else ""


# ---- the search ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Watched:
    """An array, and the events that its NaN and Inf come from."""

    array: Any
    bad: bool = False  # holds NaN or Inf
    origins: frozenset[int] = frozenset()  # the events; empty for an infinite argument
    given: frozenset[str] = frozenset()  # the arguments whose infinities it holds
    path: str = ""  # its path, if it is a parameter or argument
    what: str = "a constant"  # its path, or "the result of ..."
    lines: tuple[str, str] = ("", "")  # where it was made, as far as a line is known


class _Finder(Watcher):
    """The watcher: an event is an operation that produces NaN or Inf of finite operands."""

    def __init__(self, program: Program):
        self.program = program
        # Each event with its operation; None for an argument.
        self.events: list[tuple[NonfiniteReport, Producer | None]] = []
        self.compared: frozenset[int] = frozenset()  # the events that the program looks for
        # What reads the result of an event first, with its lines, by the number of the event.
        self.readers: dict[int, tuple[str, tuple[str, str]]] = {}
        self._lines: dict[int, tuple[Any, tuple[str, str]]] = {}
        # The parameters that an equation reads, by its number.
        self._read: dict[int, list[str]] = collections.defaultdict(list)

    def operation(self, eqn: Any, ins: list[Watched], place: Site) -> list[Watched]:
        arrays = [v.array for v in ins]
        rule, name = rule_of(eqn.primitive.name), eqn.primitive.name
        carries = rules.SAME_PARAMETER in rule.traits
        path = ins[0].path if carries and ins else ""
        what = ins[0].what if rule.need == rules.MOVE and ins else f"the result of {name}"
        origins, given = _sources(ins)
        infinite = any(v.bad for v in ins)
        if rule.need == rules.COMPARE:
            self.compared |= origins
        lines = self._lines_of(eqn, place)
        if lines[0] and rule.need != rules.MOVE:
            for number in origins:
                self.readers.setdefault(number, (name, lines))
        lines = lines if lines[0] else next((v.lines for v in ins if v.lines[0]), lines)
        for number in place.numbers[-1:]:
            self._read[number] += self._parameters(ins)
        results = []
        for index, out in enumerate(run(eqn, arrays)):
            nans, infs = counts(out)
            blame = origins
            # Infinite operands may only hand on their Inf: then it is new where they are finite.
            made = nans or (infs and (not infinite or _is_new(eqn, arrays, out)))
            # What follows from bad operands is no event of its own: they are blamed for it.
            if made and not origins:
                blame = self._event(eqn, ins, index, out, given, place)
            results.append(Watched(out, bool(nans or infs), blame, given, path, what, lines))
        return results

    def _lines_of(self, eqn: Any, place: Site) -> tuple[str, str]:
        if id(eqn) not in self._lines:  # with the equation, so that no other gets its identity
            self._lines[id(eqn)] = eqn, self.program.lines(eqn, place)
        return self._lines[id(eqn)][1]

    def placed(self, number: int) -> NonfiniteReport:
        """Returns an event; one that mpjax inserted has the place of what it is done for."""
        event, _ = self.events[number]
        name, lines = self.readers.get(number, ("", ("", "")))
        if event.about and name and not event.about.startswith("the result"):
            event = dataclasses.replace(event, about=f"{event.about}, read by {name},")
        if event.about and lines[0] and not event.source:
            event = dataclasses.replace(event, source=lines[0], library=lines[1])
        return event

    def _parameters(self, values: Sequence[Watched]) -> list[str]:
        return [v.path for v in values if v.path in self.program.parameters]

    def _event(self, eqn, ins, index, out, given, place) -> frozenset[int]:
        wide = run_in_float32(eqn, [v.array for v in ins])
        in_float32 = None if wide is None else wide[index]
        # Fewer, not none: the infinities of a mask are in float32 too.
        finite = in_float32 is not None and sum(counts(in_float32)) < sum(counts(out))
        # An operation of the backward pass often reads no parameter, but its forward operation
        # does.
        own = [path for number in place.numbers[-1:] for path in self._read[number]]
        paths = self._parameters(ins) or own or [v.path for v in ins if v.path]
        lines, result = self._lines_of(eqn, place), range_of(out)
        inserted = not lines[0] or (
            not {PLANNED, ARGUMENTS}.isdisjoint(place.scopes)
            and eqn.primitive.name == rules.CAST
            and not _jax.is_written_cast(eqn)
        )
        operand = max(ins, key=lambda v: bool(v.path or v.lines[0]), default=Watched(out))
        source, library = lines if lines[0] else operand.lines
        event = NonfiniteReport(
            found=True,
            kind="overflow" if finite else "undefined",
            made="NaN" if result.nans else "Inf",
            backward=place.is_derived(eqn),
            primitive=eqn.primitive.name,
            source=source,
            library=library,
            scope="/".join(shown(place.scopes)),
            path=", ".join(dict.fromkeys(paths)),
            loops=place.loops,
            op=place.op,
            given=tuple(sorted(given)),
            inputs=tuple(range_of(v.array, v.path) for v in ins if is_number(v.array)),
            result=result,
            largest=largest_finite(in_float32) if finite else None,
            about=operand.what if inserted else "",
        )
        here = dataclasses.replace(place, callers=())
        maker = Producer(event.primitive, ranges_of(ins), result, here, lines)
        return self._noted(event, maker)

    def _noted(self, event: NonfiniteReport, maker: Producer | None = None) -> frozenset[int]:
        self.events.append((event, maker))
        return frozenset({len(self.events) - 1})

    def argument(self, array: Any, path: str) -> Watched:
        nans, infs = counts(array)
        # Infinities may be a mask, so they are no event by themselves.
        if not nans:
            names = frozenset({path} if infs else ())
            what = path or "the loss scale"
            return Watched(array, bool(infs), given=names, path=path, what=what)
        event = NonfiniteReport(True, "argument", "NaN", path=path, result=range_of(array))
        return Watched(array, True, self._noted(event), path=path, what=path)

    def constant(self, array: Any) -> Watched:
        return Watched(array, any(counts(array)))

    def slice(self, value: Watched, index: int) -> Watched:
        # The bad entries may be in the slices of other iterations.
        array = take(value.array, index)
        return dataclasses.replace(value, array=array, bad=value.bad and any(counts(array)))

    def stack(self, values: Sequence[Watched]) -> Watched:
        array, bad = jnp.stack([v.array for v in values]), any(v.bad for v in values)
        origins, given = _sources(values)
        return dataclasses.replace(values[0], array=array, bad=bad, origins=origins, given=given)


def _sources(values: Sequence[Watched]) -> tuple[frozenset[int], frozenset[str]]:
    """Returns the events and the arguments that the NaN and Inf of some values come from."""
    bad = [v for v in values if v.bad]
    return frozenset().union(*(v.origins for v in bad)), frozenset().union(*(v.given for v in bad))


def _search(program: Program, scale: float) -> NonfiniteReport:
    """Returns the first event that reaches a result, or a report that there is none."""
    finder = _Finder(program)
    args = [finder.argument(x, path) for x, path in program.arguments(scale)]
    jaxpr = program.jaxpr
    results = [*program.named(interpret(jaxpr, args, finder, root_of(jaxpr)))]
    # An infinite constant that the program returns is intended.
    bad = [(name, v) for name, v in results if v.bad and (v.origins or v.given)]
    if not bad and finder.compared:  # a step that looks for them, and skips the update
        counters = ((n, v) for n, v in results if _is_bad(n, v.array) and not v.bad)
        bad = [(n, dataclasses.replace(v, bad=True, origins=finder.compared)) for n, v in counters]
    if not bad:
        meant = {name for name, v in results if v.bad}
        return _in_compiled_alone(program, scale, meant)
    # If the loss is non-finite, so are its gradients: only the loss is followed.
    blamed = bad[:1] if program.follows_gradient and bad[0][0] == "loss" else bad
    guilty, _ = _sources([v for _, v in blamed])
    if not guilty:  # an infinite argument that reaches the result
        _, paths = _sources([v for _, v in bad])
        event = NonfiniteReport(True, "argument", "Inf", path=", ".join(sorted(paths)))
    else:
        # A pole, such as log(0), is often masked out later; an overflow or a NaN never is.
        first = min(guilty, key=lambda i: (_is_pole(finder.events[i][0]), i))
        event, maker = finder.placed(first), finder.events[first][1]
        before = [each for _, each in finder.events[:first]]
        if maker and (derivative := derivative_at(program, maker, before)):
            event = dataclasses.replace(event, **derivative)
    return dataclasses.replace(event, reaches=tuple(name for name, _ in bad), loss_scale=scale)


def _is_bad(name: str, result: Any) -> bool:
    """Returns whether a result is NaN or Inf, or counts a step that was skipped for one."""
    return any(counts(result)) or (
        any(part in name for part in SKIPS) and bool(jnp.any(result > 0))
    )


def _is_pole(event: NonfiniteReport) -> bool:
    poles = rules.POLE in rule_of(event.primitive).traits
    return poles and (event.kind, event.made) == ("undefined", "Inf")


def _in_compiled_alone(program: Program, scale: float, meant: set[str]) -> NonfiniteReport:
    outs = program.at(scale)
    reaches = tuple(name for name, out in outs if name not in meant and any(counts(out)))
    what = "loss and gradients are" if program.follows_gradient else "every result is"
    if not reaches:
        return NonfiniteReport(False, loss_scale=scale, advice=f"Nothing found: {what} finite.")
    advice = (
        "If operations run one by one, every result is finite. In the compiled program it "
        "is not, because XLA fuses operations. Look for expressions whose order of evaluation "
        "matters."
    )
    return NonfiniteReport(
        *(True, "compiled", "NaN or Inf"), reaches=reaches, loss_scale=scale, advice=advice
    )


# ---- cause and advice ---------------------------------------------------------------------------


def _advised(
    event: NonfiniteReport, program: Program, policy: Policy, make: Callable[..., Program]
) -> NonfiniteReport:
    """Completes a report: whether a lower loss scale or an override helps, and the advice."""
    if not event.found:
        return event
    gradients = {*itertools.compress(program.results, program.gradients)}
    safe = None
    # If the loss is non-finite too, no scale of it helps.
    if program.scales_itself:
        gradients = {*program.results}
    if event.kind not in ("argument", "compiled") and set(event.reaches) <= gradients:

        def is_finite(scale: float) -> bool:
            return not any(n in event.reaches and _is_bad(n, x) for n, x in program.at(scale))

        high = math.ceil(math.log2(event.loss_scale))
        safe = program.largest_finite_scale(high, is_finite, _least(program))
    event = dataclasses.replace(event, curable=safe is not None, safe_loss_scale=safe)
    if event.kind == "compiled":
        return event
    op = None if event.op is None else program.ops[event.op]
    # As the function is written: a cast of its own stays under any policy.
    own = op is not None and any(is_half(v.aval) for v in (*op.ins, *op.outs))
    own &= not event.about
    tried: list[str] = []
    if not event.curable and not own and _in_half(event):
        tried, cured = _moved_to_float32(event, program, policy, make)
        if cured:
            places, overrides = Places(program.plan), dict.fromkeys(tried, FLOAT32.name)
            flops = places.flops(frozenset().union(*(places.place(each).ops for each in tried)))
            event = dataclasses.replace(event, overrides=overrides, float32_flops=flops)
    once = casts_arguments(policy) or (op is not None and ARGUMENTS in op.scopes)
    advice = _advice(event, gradients, own, once, tried, _least(program))
    return dataclasses.replace(event, advice="\n".join(advice))


def _least(program: Program) -> int:
    """Returns the least exponent of a loss scale to try: no step lowers its own below 1."""
    return 0 if program.scales_itself else LEAST_EXPONENT


def _of_indices(fun: Callable[..., Any], program: Program, args: Any, kwargs: Any) -> Iterator[str]:
    """Yields what is out of range of what it indexes, such as labels, and reaches a result."""
    if any(jnp.issubdtype(x.dtype, jnp.integer) for x in program.arrays):
        look = lint(fun, select="index-out-of-range", progress=False)
        for each in look(*args, **kwargs).findings:
            yield f"{each.message} This is at {short(each.source)}."


def _in_half(event: NonfiniteReport) -> bool:
    return any(r.dtype in HALF for r in (*event.inputs, event.result) if r)


def _moved_to_float32(
    event: NonfiniteReport, program: Program, policy: Policy, make: Callable[..., Program]
) -> tuple[list[str], bool]:
    """Moves the operation to float32, and then the next one that overflows in 16 bits, and so on.

    Returns:
        The patterns, and whether the compiled program is finite with them.
    """
    patterns: list[str] = []
    for _ in range(ROUNDS):
        if event.op is None:
            break
        around = Places(program.plan).around(program.ops[event.op])
        fresh = [place.pattern for place in around if place.ops and place.pattern not in patterns]
        if not fresh:
            break
        # The smallest place first, so that as much as possible stays in 16 bits.
        patterns.append(fresh[0])
        program = make(policy=policy.override(dict.fromkeys(patterns, "float32")))
        outs = program.at(event.loss_scale)
        if not any(name in event.reaches and _is_bad(name, out) for name, out in outs):
            return patterns, True
        event = _search(program, event.loss_scale)
        if not (event.found and _in_half(event)):
            break
    return patterns, False


def _advice(
    event: NonfiniteReport,
    gradients: set[str],
    own: bool,
    once: bool,
    tried: Sequence[str],
    least: int,
) -> Iterator[str]:
    if event.kind == "argument":
        yield "Lowering the loss scale does not help: the argument itself is NaN or Inf."
        yield (
            "If it is a parameter, training diverged before this step: go back to a checkpoint "
            "and lower the learning rate. If it is data, check the code that loads and normalizes "
            "it."
        )
    elif event.safe_loss_scale is not None:
        yield (
            f"Use a lower loss scale: the compiled program is finite at "
            f"2^{int(math.log2(event.safe_loss_scale))} and below (it was "
            f"2^{math.log2(event.loss_scale):.3g}). DynamicLossScale finds it automatically: "
            "it skips one step for each halving."
        )
        if event.safe_loss_scale < 1:
            yield "A scale below 1 loses small gradients. Use bfloat16 for this backward pass."
    else:
        if set(event.reaches) <= gradients:
            yield (
                f"Lowering the loss scale does not help: results are still NaN or Inf at 2^{least}."
            )
        elif gradients:
            yield (
                f"Lowering the loss scale does not help: the {event.made} appears in the forward "
                "pass."
            )
        if any(r.infs for r in event.inputs):
            names = ", ".join(event.given) or "an operand"
            yield (
                f"{names} was already infinite. That is valid only in a mask, and a fully masked "
                "row computes inf - inf = NaN. Use a large finite number such as -1e9, or check "
                "the data."
            )
        yield from _against(event, own, once, tried)


def _against(event: NonfiniteReport, own: bool, once: bool, tried: Sequence[str]) -> Iterator[str]:
    """Yields what helps in the function itself; ``once`` says that its arguments are cast once."""
    # How to avoid the point where a derivative is non-finite.
    guard = event.derivative_of and INFINITE_DERIVATIVE.get(event.derivative_of, GUARD)
    if event.kind == "overflow" and own and once:
        yield (
            "The policy casts the arguments of the function once, so that its operations run in 16 "
            "bits. Add casting=op to the policy, which runs this one in float32, cast to float32 "
            "before it, or use bfloat16, which has float32's range."
        )
    elif event.kind == "overflow" and own:
        yield (
            "The function itself casts to 16 bits here, and a policy cannot undo that. Remove the "
            "cast, so that the policy decides, or cast to bfloat16, which has float32's range."
        )
    elif event.kind == "overflow":
        if event.result is not None and event.result.dtype == "f16":
            yield "bfloat16 has float32's range: try 'mixed_bfloat16'."
        yield _override(event, tried)
        yield guard or SMALLER
    else:
        rule = rule_of(event.primitive)
        grew = event.made == "Inf" and not any(r.infs for r in event.inputs)
        grew &= rule.gain in (rules.ONE, rules.SUM) and rules.POLE not in rule.traits
        other = "The result is non-finite in float32 too."
        yield guard or (BEYOND if grew else UNDEFINED.get(event.primitive, other))
        if any(r.dtype in HALF for r in event.inputs):
            # float16 flushes below 2**-25, or 3e-8, and the square of what is below 1.7e-4.
            yield (
                "A zero may be a small number that was flushed in 16 bits, such as an epsilon: in "
                "float16 use 1e-4 or more, or compute the operation in float32."
            )
            yield _override(event, tried)


def _override(event: NonfiniteReport, tried: Sequence[str]) -> str:
    """Returns the override that prevents it, as far as that is known."""
    call = f"policy.override({dict.fromkeys(tried, 'float32')!r})"
    if event.overrides:
        return (
            f"Compute {'this part' if len(tried) == 1 else 'these parts'} in float32 (tried: the "
            f"program is then finite). It moves {event.float32_flops:.1%} of the matmul FLOPs: "
            f"{call}."
        )
    if tried:
        return f"Float32 for this part alone does not help (tried): {call}."
    return "Or compute this part in float32, inside `with mpjax.precision('float32'):`."


SMALLER = "Or make its operands smaller: normalize them, or scale before the product, not after."
GUARD = (
    "Add an epsilon to the operand, or guard it with jnp.where before the operation, not after it."
)
BEYOND = "The result is beyond the largest number of float32, 3.4e38: make the operands smaller."
REPEATED = "It exists only if these values differ: do not differentiate repeated ones."
SINGULAR = "It exists only for a nonsingular matrix: add an epsilon to its diagonal."
RANGED = "Clip the operand to a slightly smaller range before the operation."
INFINITE_DERIVATIVE = {
    **dict.fromkeys(("asin", "acos", "acosh", "atanh", "erf_inv"), RANGED),
    **dict.fromkeys(("eig", "eigh", "svd"), REPEATED),
    **dict.fromkeys(("cholesky", "lu", "qr", "triangular_solve"), SINGULAR),
}

UNDEFINED = {
    "div": "A division by zero: add an epsilon, or guard the operand with jnp.where before the "
    "operation, not after it.",
    "log": "The logarithm of 0 or a negative number: add an epsilon, or use log_softmax, "
    "log1p or logaddexp.",
    "log1p": "The operand is -1 or less.",
    "sqrt": "The root of a negative number, perhaps from cancellation: clamp it at 0.",
    "rsqrt": "The operand is zero or negative: add an epsilon to a variance.",
    "pow": "A negative base with a fractional power, or 0 with a negative power.",
    "integer_pow": "Zero to a negative power, or a result beyond float32.",
    "exp": "The operand is above 88, where exp overflows float32: subtract the maximum first.",
    "sub": "inf - inf: a row that is fully masked, or a sum that overflowed.",
    "mul": "0 * inf: an infinite derivative under a mask. Guard the operand with jnp.where before "
    "the operation, not after it.",
}


def _is_new(eqn: Any, arrays: Sequence[Any], out: Any) -> bool:
    """Returns whether an elementwise operation produced infinities from finite operands."""
    name = eqn.primitive.name
    if rule_of(name).need not in (rules.FOLLOW, rules.FULL) and name != "convert_element_type":
        return False
    # Only operands of the shape of the result can be compared with it entry by entry.
    same = [x for x in arrays if np.shape(x) == out.shape and is_number(x)]
    if len(same) + sum(np.ndim(x) == 0 for x in arrays) < len(arrays):
        return False
    fresh = jnp.isinf(out)
    for x in same:
        fresh &= jnp.isfinite(x)
    return bool(same) and bool(jnp.any(fresh))
