"""A float32 program, as it is written in mixed precision, and what transformations make of it."""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building, held
from mpjax._src.core.base.garbage import collected_later
from mpjax._src.core.planner import rounding, saving
from mpjax._src.core.planner.cotangents import rounded_once
from mpjax._src.core.planner.dependence import between, deduplicated, dependents, without_known
from mpjax._src.core.planner.equations import Equation, Listed, Value, closed, needed, opened, parts
from mpjax._src.core.planner.exceptions import Exceptions
from mpjax._src.core.planner.handover import handed_over
from mpjax._src.core.planner.held_apart import held_apart, stored
from mpjax._src.core.planner.linear_recurrences import recurrent
from mpjax._src.core.planner.loops import joined, zeros_like
from mpjax._src.core.planner.maxima import unpooled
from mpjax._src.core.planner.partition import Parts, parted
from mpjax._src.core.planner.replaced import batch
from mpjax._src.core.planner.rewrites import rewritten
from mpjax._src.core.planner.turns import hoisted
from mpjax._src.core.planner.write import written


class Program:
    """A float32 program, and which of its arguments and results are passed in 16 bits.

    Attributes:
        half: The 16-bit dtype; float32 plans the same, but rounds nothing.
        halved_in: For each argument, whether it arrives in 16 bits.
        halved_out: For each result, whether it leaves in 16 bits.
        returned: How many results are returned. The others are kept for a backward pass.
        exceptions: What the policy says of single operations that JAX adds to it later.
        storage: The policy's setting of storage, which changes no number.
        known: The values of arguments, by their places, that custom rules may branch on.
    """

    def __init__(
        self,
        program: Any,
        half: np.dtype,
        halved_in: Sequence[bool] = (),
        halved_out: Sequence[bool] = (),
        exceptions: Exceptions | None = None,
        returned: int | None = None,
        storage: str | float = "fast",
        known: Mapping[int, Any] = MappingProxyType({}),
    ) -> None:
        self._program, self.half, self.storage, self.known = program, half, storage, known
        self.exceptions = exceptions or Exceptions(half)
        if isinstance(program, Listed):
            arguments, results, self.effects = program.ins, program.outs, program.effects
        else:
            jaxpr, _ = _jax.open_jaxpr(self.closed)
            arguments, results, self.effects = jaxpr.invars, jaxpr.outvars, jaxpr.effects
        self.float_avals = [v.aval for v in arguments]
        self.result_avals = [v.aval for v in results]
        self.halved_in = tuple(halved_in) or (False,) * len(self.float_avals)
        self.halved_out = tuple(halved_out) or (False,) * len(self.result_avals)
        self.returned = len(self.result_avals) if returned is None else returned
        self.in_avals = _passed(self.float_avals, self.halved_in, half)
        self.out_avals = _passed(self.result_avals, self.halved_out, half)
        self._derived: dict[Any, Any] = {}

    @functools.cached_property
    def closed(self) -> Any:
        """The closed jaxpr."""
        program = self._program
        # A Ref that the function makes for itself has no derivative in two parts.
        return program.closed() if isinstance(program, Listed) else building.without_refs(program)

    @functools.cached_property
    @collected_later()
    def written(self) -> Any:
        """The closed jaxpr that runs."""
        returned = [i < self.returned for i in range(len(self.result_avals))]
        options = self.half, self.halved_in, self.halved_out, returned, self.exceptions.sent
        # What was derived is a list of equations already, and need not become a jaxpr in between.
        program = self._program.written_out() if isinstance(self._program, Listed) else self.closed
        return written(program, *options, outermost=True)

    @property
    def calling(self) -> Any:
        """The closed jaxpr that runs, with its calls of functions with rules."""
        returned = [True] * self.returned
        options = self.half, self.halved_in, self.halved_out, returned, self.exceptions.sent
        return written(self.closed, *options, outermost=True, rules=False)

    @functools.cached_property
    def jitted(self) -> Callable[..., list[Any]]:
        """The program that runs, jitted, unless it donates arguments to a jit inside."""
        program = self.written
        run = functools.partial(_jax.eval_closed, program)
        # A jit around it would ignore what the jit inside donates.
        return run if _jax.donates(program) else jax.jit(lambda *args: run(*args))

    def __repr__(self) -> str:  # people read it in jaxprs
        return f"Program({self.half.name})"

    @functools.cached_property
    def computes_in(self) -> frozenset[np.dtype]:
        """The 16-bit dtypes in which something runs, if in its derivative alone."""
        return rounding.computes_in(parts(self.closed, rules=True)[1], self.half)

    def ran(self) -> Iterator[Any]:
        """Yields the closed jaxprs that ran so far: its own, and of what was derived from it."""
        if "written" in vars(self):
            yield self.written
        for derived in [*self._derived.values()]:
            for each in derived if isinstance(derived, tuple) else (derived,):
                if isinstance(each, Program | Derivative):
                    yield from each.ran()

    def cut(self, moving: tuple[bool, ...]) -> "Derivative":
        """Returns the derivative by the arguments that move."""
        return self._once(moving, lambda: Derivative(self, moving))

    def forward_mode(self, moving: tuple[bool, ...]) -> tuple["Program", Sequence[bool]]:
        """Returns the program of arguments and moving tangents, and which results have tangents."""

        def make():
            with self.exceptions.around():
                jaxpr, moves = building.forward_mode(self.closed, moving)
            ins = [*self.halved_in, *_chosen(self.halved_in, moving)]
            outs = [*self.halved_out, *_chosen(self.halved_out, moves)]
            # Tangents come last: they count as returned only if no residuals stand before them.
            all_of_them = self.returned == len(self.result_avals)
            returned = None if all_of_them else self.returned
            return self.another(self.exceptions.marked(jaxpr), ins, outs, returned), moves

        return self._once(("jvp", moving), make)

    def batched(self, axis: Any, which: tuple[bool, ...]) -> tuple["Program", Sequence[bool]]:
        """Returns the program of batched arguments, and which results are batched."""

        def make():
            jaxpr, batched = batch(self.closed, axis, which)
            return self.another(jaxpr, self.halved_in, self.halved_out, self.returned), batched

        return self._once((axis, which), make)

    def transpose(
        self, linear: tuple[bool, ...], nonzero: tuple[bool, ...]
    ) -> tuple["Program", Sequence[int]]:
        """Returns the program of the other arguments and cotangents, and the linear arguments."""

        def make():
            # `transposed` expects the linear arguments behind the others.
            order = sorted(range(len(linear)), key=lambda i: linear[i])
            ins, equations, outs = parts(self.closed)
            info = building.anonymous(self.closed)
            ordered = Listed.of([ins[i] for i in order], equations, _chosen(outs, nonzero), info)
            low = [self.halved_in[i] for i in order], _chosen(self.halved_out, nonzero)
            count = linear.count(False)
            cotangents = [v.aval.to_ct_aval() for v in ordered.outs]
            program = self.another(ordered, *low)
            every = range(len(ordered.outs))
            return program.transposed(count, every, cotangents, low[1]), order[count:]

        return self._once(("transpose", linear, nonzero), make)

    def transposed(
        self, count: int, places: Sequence[int], given: Sequence[Any], low: Sequence[bool]
    ) -> "Program":
        """Returns the transpose by all arguments but the first ones.

        Args:
            count: How many come first.
            places: The cotangent of each result.
            given: The types of the cotangents.
            low: Which of them arrive in 16 bits.
        """
        jaxpr, avals = unbarred(self.closed), self.float_avals

        def run(*args):
            known, cts = args[:count], args[count:]
            linear = lambda *xs: _jax.eval_closed(jaxpr, *known, *xs)  # noqa: E731
            like = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals[count:]]
            return jax.linear_transpose(linear, *like)([cts[i] for i in places])

        linear = _jax.trace(run, [*avals[:count], *given], "transposed")
        return self.another(linear, [*self.halved_in[:count], *low], self.halved_in[count:])

    def another(
        self,
        program: Any,
        halved_in: Sequence[bool],
        halved_out: Sequence[bool],
        returned: int | None = None,
    ) -> "Program":
        """Returns a program that is made from this one."""
        options = self.exceptions, returned, self.storage
        return Program(program, self.half, halved_in, halved_out, *options)

    def checkpointed(
        self, moving: tuple[bool, ...], where: saving.Where
    ) -> tuple["Program", "Program"] | None:
        """Returns the program with what a policy saves as results, and as arguments, if it does."""
        cut = self.cut(moving)
        saved = cut.saveable(where)
        # By what is saved, not by the policy: many policies are new functions in each call.
        key = moving, tuple(saved.values.items())
        return self._once(key, lambda: cut.resumed(saved)) if saved.values else None

    @collected_later()
    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]


def _passed(avals: Sequence[Any], halved: Sequence[bool], half: np.dtype) -> list[Any]:
    pairs = zip(avals, halved, strict=True)
    return [rounding.halved(a, half) if low else a for a, low in pairs]


def _chosen(values: Sequence[Any], which: Sequence[bool]) -> list[Any]:
    return [v for v, yes in zip(values, which, strict=True) if yes]


def _moves(e: Equation) -> bool:
    """Returns whether results of an equation have tangents if its operands have."""
    return e.name != "stop_gradient" and any(held.is_inexact(v.aval) for v in e.outs)


class Derivative:
    """A program and its derivative by some arguments, cut into a forward and a backward part.

    Attributes:
        program: The program.
        inputs: Its arguments.
        by: The arguments that move.
        given: The arguments that the backward part reads.
        saved: What the forward part hands to the backward part besides.
        moves: Which results depend on the arguments that move.
        prices: What it costs to keep values.
    """

    def __init__(self, program: Program, moving: Sequence[bool]) -> None:
        self.program, half = program, program.half
        self.by = [i for i, m in enumerate(moving) if m]
        self._floats = [i for i, a in enumerate(program.result_avals) if held.is_inexact(a)]
        self._info = building.anonymous(program.closed)
        values, equations, results = _with_gradient(program, self.by, self._floats)
        self.inputs, self._cts = values[: len(moving)], values[len(moving) :]
        count = len(program.result_avals)
        self._outs, self._grads = results[:count], results[count:]
        equations = needed(equations, results)
        # Loops first: what they hand over, and what `hoisted` takes out of their turns, is then
        # divided and rewritten as all else is.
        joined(equations, self._cts, self.inputs, results, half, program.storage)
        self._early, self._late = parted(hoisted(needed(equations, results)), self._cts)
        parts_of = Parts(self._early, self._late, self._outs, self._grads, self._cts, half)
        self._early, self._late, *_ = rewritten(parts_of)
        # Behind an integer or `stop_gradient` there are no tangents, and JAX does not ask for any.
        moved = dependents([*filter(_moves, self._early)], [self.inputs[i] for i in self.by])
        self.moves = [v in moved and held.is_inexact(v.aval) for v in self._outs]
        self.moved_avals = _chosen(program.out_avals, self.moves)
        self._low_in = program.halved_in
        self._splits: dict[Any, saving.Split] = {}
        self._hand_over()

    def _hand_over(self) -> None:
        """Chooses what the forward part hands to the backward part, and closes it."""
        program, grads = self.program, self._grads
        low = _chosen(self.inputs, self._low_in)
        asked = [g for g, i in zip(grads, self.by, strict=True) if program.halved_in[i]]
        parts_of = Parts(self._early, self._late, self._outs, grads, self._cts, program.half)
        given: dict[str, Any] = {"low": low, "asked": asked, "inside": False}
        hand = handed_over(parts_of, self.inputs, program.storage, **given)
        self._held, carriers, early, self._before, self._again, self._late, self.prices = hand
        self.saved = [*self._held, *carriers]
        later = [*self._before, *self._again, *self._late]
        read = {*grads, *(v for e in later for v in e.ins)}
        self.given = [i for i, v in enumerate(self.inputs) if v in read]
        # What runs again reads saved values too, some in float32. So which ones are handed over in
        # 16 bits is decided once the cut is known, and may differ from its prices.
        made, wanted = rounding.made(self._early, low, program.half), rounding.wanted
        exact = rounding.Price(made, wanted(later, grads, asked), program.half)
        self._low = [v in carriers or exact.is_half(v) for v in self.saved]
        early, self._padded = stored(early, self._held, later, self._cts)
        forward = Listed.of(self.inputs, early, [*self._outs, *self.saved], self._info)
        low_out = [*program.halved_out, *self._low]
        self.forward = program.another(forward, self._low_in, low_out, program.returned)
        self._backward: dict[tuple[bool, ...], Any] = {}

    @property
    def makers(self) -> dict[Value, Equation]:
        """The equations that make the values of the forward part."""
        return {out: e for e in self._early for out in e.outs}

    def saveable(self, where: saving.Where) -> saving.Saved:
        """Returns what a checkpoint's policy saves of what the backward part needs, and where."""
        read = {*self._grads, *(v for e in self._late for v in e.ins)}
        crossing = [v for e in self._early for v in e.outs if v in read]
        return saving.saved(self._early, crossing, self.inputs, where, self._splits)

    def resumed(self, saved: saving.Saved) -> tuple[Program, Program]:
        """Returns the program with saved values as further results, and with them as arguments."""
        program, new = self.program, copy.copy(self)
        # The cached tangent program reads the residuals of the cut that was copied.
        new.__dict__.pop("tangent", None)
        low_in, low_out, half = program.halved_in, program.halved_out, program.half
        early = saved.first(self._early)
        made = rounding.made(early, _chosen(self.inputs, low_in), half)
        low = [v in made and v.is_float32 for v in saved.values]
        sent, early = saving.sent(saved.values, early)
        forward = Listed.of(self.inputs, early, [*self._outs, *sent], self._info)
        first = program.another(forward, low_in, [*low_out, *low], program.returned)
        arrived, back = saving.received(saved.values)
        new.inputs, new._low_in = [*self.inputs, *arrived], (*low_in, *low)
        read = [*self._outs, *self._grads, *(v for e in self._late for v in e.ins)]
        again = between(saved.second(self._early), read, {*self.inputs, *saved.values})
        new._early = [*back, *again]
        new._hand_over()
        return first, Resumed(program, new, low)

    def ran(self) -> Iterator[Any]:
        """Yields the closed jaxprs of its parts that ran so far."""
        parts = [self.forward, *(back for back, _ in [*self._backward.values()])]
        for part in [*parts, *([self.tangent] if "tangent" in vars(self) else ())]:
            yield from part.ran()

    def __repr__(self) -> str:
        return f"Derivative({self.program.half.name}, by={self.by})"

    @collected_later()
    def backward(self, nonzero: tuple[bool, ...]) -> tuple[Program, Sequence[int]]:
        """Returns the program of residuals and cotangents, and the places of its gradients."""
        if nonzero not in self._backward:
            self._backward[nonzero] = self._make_backward(nonzero)
        return self._backward[nonzero]

    def _make_backward(self, nonzero: tuple[bool, ...]) -> tuple[Program, Sequence[int]]:
        program, numbered = self.program, zip(self._cts, self._floats, strict=True)
        cts = {ct: i for ct, i in numbered if nonzero[i]}
        zeros = {*self._cts} - {*cts}
        late, alias = without_zeros(self._late, self._cts, zeros)
        grads = [alias.get(g, g) for g in self._grads]
        # Once for each pattern of zeros: a cotangent may be rounded for all readers if it meets no
        # other copy of what it is made of, and fewer meet where some are zero.
        shared = rounded_once(Parts(self._early, late, self._outs, grads, cts, program.half))
        late = unpooled(rounding.with_rounded(late, shared, program.half))
        parts_of = self._held, self._padded, self._before, [*self._again, *late], grads
        body, grads = held_apart(*parts_of, [*cts], in_turns=program.storage != "fast")
        places = [i for i, g in enumerate(grads) if g not in zeros]
        ins = [*(self.inputs[i] for i in self.given), *self.saved, *cts]
        low_in = [
            *(self._low_in[i] for i in self.given),
            *self._low,
            *(program.halved_out[i] for i in cts.values()),
        ]
        low_out = [program.halved_in[self.by[i]] for i in places]
        back = Listed.of(ins, body, [grads[i] for i in places], self._info)
        return program.another(back, low_in, low_out), places

    @functools.cached_property
    def tangent(self) -> Program:
        """The linear program of residuals and tangents: the transpose of the backward part."""
        program, (back, places) = self.program, self.backward(tuple(self.moves))
        tangents = [program.float_avals[i].to_tangent_aval() for i in self.by]
        low = [program.halved_in[i] for i in self.by]
        return back.transposed(len(self.given) + len(self.saved), places, tangents, low)


class Resumed(Program):
    """A program that gets some of its values as further arguments, which its derivative reads."""

    def __init__(self, program: Program, cut: Derivative, low: Sequence[bool]) -> None:
        jaxpr, consts = _jax.open_jaxpr(program.closed)
        count = len(jaxpr.invars)
        further = [building.Var(v.aval) for v in cut.inputs[count:]]
        info = building.anonymous(program.closed)
        jaxpr = jaxpr.replace(invars=[*jaxpr.invars, *further], debug_info=info)
        options = program.halved_out, program.exceptions, program.returned, program.storage
        super().__init__(
            _jax.close(jaxpr, consts), program.half, [*program.halved_in, *low], *options
        )
        moving = tuple(i in cut.by for i in range(count))
        # JAX asks for the derivative by what moves, which saved values do not: it is known already.
        self._derived[(*moving, *[False] * len(further))] = cut


def _with_gradient(
    program: Program, by: Sequence[int], floats: Sequence[int]
) -> tuple[list[Value], list[Equation], list[Value]]:
    """Returns the arguments, equations and results of a program with its gradients.

    The arguments are followed by the cotangents of the results ``floats``, the results by the
    gradients by the arguments ``by``. What JAX does in its backward pass waits for the cotangents:
    that a rule computes its function again there is what its author asked for.
    """
    residuals: Any = None
    jaxpr = recurrent(program.closed, program.half)

    def ahead(*args):
        nonlocal residuals

        def of_moving(*moving):
            # A custom rule that branches on a number gets the number, not its tracer.
            full = [program.known.get(i, x) for i, x in enumerate(args)]
            for i, x in zip(by, moving, strict=True):
                full[i] = x
            return _jax.eval_once(jaxpr, *full)

        outs, vjp = jax.vjp(of_moving, *(args[i] for i in by))
        kept, tree = jax.tree.flatten(vjp)
        # What is not traced, as Python values, a rule gets back as it is.
        arrays = [isinstance(x, _jax.Tracer) for x in kept]
        others = [None if traced else x for x, traced in zip(kept, arrays, strict=True)]
        residuals = tree, others
        return [*outs, *_chosen(kept, arrays)]

    def back(*args):
        kept, given = args[: len(args) - len(floats)], iter(args[len(args) - len(floats) :])
        cts = [
            next(given) if i in floats else np.zeros(a.shape, jax.dtypes.float0)
            for i, a in enumerate(program.result_avals)
        ]
        tree, others = residuals
        values = iter(kept)
        return jax.tree.unflatten(tree, [next(values) if x is None else x for x in others])(cts)

    with program.exceptions.around():
        first = _jax.trace(ahead, program.float_avals, "planned")
    values, equations, outs = parts(first)
    outs, kept = outs[: len(program.result_avals)], outs[len(program.result_avals) :]
    # JAX takes a cotangent for each result; those of integers are float0.
    cts = [Value(program.result_avals[i].to_ct_aval()) for i in floats]
    inputs = [*kept, *cts]
    with program.exceptions.around():
        later = _jax.trace(back, [v.aval for v in inputs], "planned")
    grads = opened(later, inputs, equations, again=True)
    program.exceptions.mark(equations)
    equations, results = deduplicated(equations, [*outs, *grads])
    return [*values, *cts], equations, results


def without_zeros(
    equations: Sequence[Equation], cotangents: Sequence[Value], zeros: set[Value]
) -> tuple[list[Equation], dict[Value, Value]]:
    """Leaves out what only zero cotangents make; adds to ``zeros`` the values that are.

    Returns:
        The equations that are left; and for a value that is the same as another one, that one.
    """
    if not zeros:
        return [*equations], {}
    # The backward part is linear in cotangents: what is made of zeros alone is zero.
    linear = dependents(equations, cotangents)
    alias: dict[Value, Value] = {}
    left = []
    for e in equations:
        ins = [alias.get(v, v) for v in e.ins]
        if e.is_barrier:
            zeros.update(out for v, out in zip(ins, e.outs, strict=True) if v in zeros)
            rest = without_known(e.on(ins), zeros)
            left += [rest] if rest.outs else []
            continue
        moved = [v for v in ins if v in linear]
        if moved and all(v in zeros for v in moved):
            zeros.update(e.outs)
        elif e.name == "add_any" and any(v in zeros for v in ins):
            alias[e.outs[0]] = next(v for v in ins if v not in zeros)
        else:
            left.append(e.on(ins))
    return _filled(left, zeros), alias


def _filled(equations: Sequence[Equation], zeros: set[Value]) -> list[Equation]:
    """Makes the zeros that equations read."""
    read = {v for e in equations for v in e.ins}
    made: list[Equation] = []
    at = {v: zeros_like(v.aval, made) for v in zeros if v in read}
    return [*made, *(e.reading(at) for e in equations)]


def unbarred(program: Any) -> Any:
    """Returns a closed jaxpr without barriers, also inside.

    JAX cannot transpose a barrier that holds residuals and tangents together.
    """
    ins, equations, outs = parts(program)
    same: dict[Value, Value] = {}
    kept = []
    for e in equations:
        operands = [same.get(v, v) for v in e.ins]
        if e.is_barrier:
            same.update(zip(e.outs, operands, strict=True))
        else:
            kept.append(e.on(operands, params=rounding.with_programs(e, unbarred)))
    return closed(ins, kept, [same.get(v, v) for v in outs], building.anonymous(program))
