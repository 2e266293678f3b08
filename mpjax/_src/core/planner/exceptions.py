"""The exceptions to the rule that matmuls, and nothing else, run in 16 bits: each is a region.

A policy's lists and overrides, and what a program shows by itself, are written into it as scopes
``mpjax.precision=DTYPE``, like the user's own regions, before it is differentiated. JAX carries
scopes on to derivatives, so a derivative runs in the dtype of what it is derived from. Equations
that JAX makes later, as by custom derivative rules, are classified when they appear.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT32, HALVES
from mpjax._src.core.base.higher_order import higher_order
from mpjax._src.core.base.rules import FULL, HALF, NO_HALF_FORM, PROGRAM, SAME_PARAMETER, rule_of
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.accumulators import SENT, Sent
from mpjax._src.core.planner.equations import NOWHERE, Equation, Region, Value, called, parts
from mpjax._src.core.planner.integers import LARGE, NONE, SOURCES, of_equation
from mpjax._src.core.planner.searches import loops, routers
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.graph import KERNEL, PLANNED, REGION
from mpjax._src.core.program.site import equations as all_equations
from mpjax._src.core.program.site import overriding, row_of

# Solvers. Their derivatives are matmuls, whose errors a condition number amplifies.
SOLVER = "solver"
CONVOLUTION = "conv_general_dilated"
SOLVERS = ("custom_linear_solve", "triangular_solve")

# Why an operation is an exception, for reports.
SOLVES = "float32: its derivative would amplify rounding errors"
RANKED = "float32: its results are ranked, and rounding them would change the choice"
COUNTED = "float32: it reads integers that 16 bits would merge"
ENDS = "left unchanged: a float32 comparison that depends on a matmul ends it, or repeats it"
ALL_FULL = "the policy computes in float32"


class Known(NamedTuple):
    """What is known of a value: the paths of the parameter that it is, whether it is integers."""

    paths: tuple[str, ...] = ()
    integers: int = NONE


NOTHING = Known()


@dataclasses.dataclass(frozen=True)
class Exceptions:
    """What a policy says of single operations.

    Attributes:
        half: The 16-bit dtype of the program.
        all_full: Whether only a region or an override asks for 16 bits.
        listed: "half", "full" or "follow" for the primitives on its lists.
        overrides: Its overrides.
        sent: What devices send each other in 16 bits.
        done: The programs with regions, by the programs that they were.
        reasons: Why operations are in regions, by their numbers, if they are numbered.
        around: The context in which JAX runs the rules of a program.
    """

    half: np.dtype
    all_full: bool = False
    listed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    overrides: Sequence[tuple[str, Any]] = ()
    sent: Sent = SENT
    done: dict[Any, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    reasons: dict[int, str] = dataclasses.field(default_factory=dict)
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    @classmethod
    def of(cls, policy: Policy, program: Any, around: Any = contextlib.nullcontext) -> "Exceptions":
        """Returns those of a policy, for a program: a closed jaxpr."""
        # A float32 policy may ask for 16 bits in a region or by an override alone.
        halves = [dtype for _, dtype in policy.overrides] + [*half_regions(program)]
        half = next((d for d in (policy.compute_dtype, *halves) if d in HALVES), FLOAT32)
        lists = {"half": policy.half_ops, "full": policy.full_ops, "follow": policy.follow_ops}
        listed = {op: name for name, ops in lists.items() for op in ops}
        all_full = policy.compute_dtype not in HALVES
        sent = Sent(policy.gather == "half", policy.reduce == "half")
        return cls(half, all_full, listed, policy.overrides, sent, around=around)

    def marked(self, program: Any, paths: Sequence[str] = ()) -> Any:
        """Returns a closed jaxpr with regions; ``paths`` are those of its arguments."""
        known = [Known((path,) if path else ()) for path in paths]
        known = known or [NOTHING] * len(_jax.in_avals(program))
        return self._program(program, known, (), NOWHERE)

    def mark(
        self,
        equations: Sequence[Equation],
        known: dict[Value, Known] | None = None,
        names: tuple[str, ...] = (),
    ) -> None:
        """Puts equations into regions, in place.

        Args:
            equations: The equations of a program, of its calls too.
            known: What is known of its arguments.
            names: The names of the scopes around it.
        """
        # Classifying runs on every trace: facts are looked up only where there are some.
        known, decide = known or {}, routers(equations) | loops(equations)
        asks_all = bool(self.overrides)
        for e in equations:
            ins = [known.get(v, NOTHING) for v in e.ins] if known else [NOTHING] * len(e.ins)
            asks = kind_of(e.name) or asks_all or e in decide or e.name in self.listed
            if asks and not _is_planned(e):
                region, why = self._asked(e, ins, names, e in decide)
                if why and (row := row_of(_jax.scope_names(e.stack))) is not None:
                    self.reasons.setdefault(row, why)
                if region and e.region.dtype != region.split(":")[0]:
                    e.enter(region)
                self._lift(e)
                e.params = self._inside(e, ins, names)
            # The user's region may ask for the other 16-bit dtype.
            elif e.region.dtype and self._region_name(e.region.dtype) != e.region.dtype:
                e.enter(self._region_name(e.region.dtype))
            if e.name in SOURCES or (known and not known.keys().isdisjoint(e.ins)):
                facts = zip(e.outs, _results(e, ins), strict=True)
                known.update((v, fact) for v, fact in facts if fact is not NOTHING)

    def _asked(
        self, e: Equation, ins: Sequence[Known], names: Sequence[str], decides: bool
    ) -> tuple[str, str]:
        """Returns the region of an equation, or "" if it stays where it is, and why."""
        kind = kind_of(e.name)
        matmul = kind == HALF
        if not any(v.is_float32 for v in (*e.ins, *e.outs)):
            return "", ""
        # Before regions and lists: no setting makes the condition number smaller.
        if kind == SOLVER:
            return FLOAT32.name, SOLVES
        if e.region.dtype:
            return self._region_name(e.region.dtype), ""
        pattern, override = self._override(e, ins, names) if self.overrides else ("", None)
        listed = self.listed.get(e.name)
        why = f"{listed}_ops of the policy" if override is None else f'override "{pattern}"'
        if override == FLOAT32 or listed == "full":
            # What is no matmul computes in float32 anyway, and needs no region for that.
            return FLOAT32.name if matmul or override == FLOAT32 else "", why
        if listed == "half" and not matmul:
            return f"{self._region_name((override or self.half).name)}:{e.name}", why
        if listed == "follow" and not matmul:
            return f"{rounding.FOLLOWING}:{e.name}", why
        if matmul and (override is not None or listed == "half"):
            return self._region_name((override or self.half).name), why
        pairs = zip(e.ins, ins, strict=True)
        integers = any(fact.integers == LARGE for v, fact in pairs if v.is_float32)
        # After the lists: who names the operation knows better than this guess.
        if decides:
            return FLOAT32.name, RANKED if matmul else ENDS
        if matmul and (self.all_full or integers):
            return FLOAT32.name, ALL_FULL if self.all_full else COUNTED
        return "", ""

    def _region_name(self, dtype: str) -> str:
        """Returns the name of a dtype's region; the program has one 16-bit dtype of the two."""
        foreign = dtype in rounding.HALF_NAMES and self.half not in (FLOAT32, np.dtype(dtype))
        return rounding.OTHER + dtype if foreign else dtype

    def _override(
        self, e: Equation, ins: Sequence[Known], names: Sequence[str]
    ) -> tuple[str, np.dtype | None]:
        """Returns the pattern of the override of an equation, and the dtype that it asks for."""
        scopes = (*names, *_jax.scope_names(e.stack))
        # Inside of a kernel, its author chose the dtypes.
        if any(name.startswith(KERNEL) for name in scopes):
            return "", None
        paths = [path for fact in ins for path in fact.paths]
        matching = overriding(self.overrides, scopes, e.name, paths)
        if not matching:
            return "", None
        pattern, dtype = matching[0]
        # An override names this matmul, so it wins over the ``precision=`` in the code.
        if dtype in HALVES and _jax.own_precision(e.params) is not None:
            e.params = {**e.params, "precision": _jax.FASTEST}
        return pattern, dtype if dtype in HALVES else FLOAT32

    def _lift(self, e: Equation) -> None:
        """Takes off a matmul in 16 bits the precision that JAX's default setting gave it."""
        own = _jax.own_precision(e.params)
        # `jax.default_matmul_precision` is written into each matmul, as if its author had asked for
        # it.
        if own is None or own != _jax.default_precision():
            return
        lifted = e.on(e.ins, params={**e.params, "precision": _jax.FASTEST})
        if rounding.is_half_matmul(lifted) or rounding.other_half(lifted):
            e.params, e.is_half_matmul = lifted.params, None

    def _inside(self, e: Equation, ins: Sequence[Known], names: tuple[str, ...]) -> dict[str, Any]:
        """Returns the parameters of an equation, with regions in the programs inside it."""
        row = e.row
        if not row.params:
            return e.params
        scopes = (*names, *_jax.scope_names(e.stack)) if self.overrides else ()
        changed, same = [], True
        for inside in row.wire(e.like.replace(params=e.params)):
            # What a loop starts with says nothing of a carry in later turns.
            carried = {argument for _, argument in inside.carry}
            known = [NOTHING if i in carried else ins[j] for i, j in enumerate(inside.ins)]
            new = self._program(inside.program, known, scopes, e.region)
            same &= new is inside.program
            changed.append(new)
        return e.params if same else {**e.params, **row.holding(changed)}

    def _program(
        self, program: Any, given: Sequence[Known], names: tuple[str, ...], region: Region
    ) -> Any:
        key = id(program), tuple(given), names, region
        if key not in self.done:
            ins, equations, _ = parts(program, region=region)
            known = {v: fact for v, fact in zip(ins, given, strict=True) if fact is not NOTHING}
            equations = [e for e in equations if e.primitive is e.like.primitive]  # no barriers
            before = [e.stack for e in equations]
            for e in equations:
                # Before it is differentiated, so that the gradient by its kernel is known as such.
                if e.name == CONVOLUTION and "sums" not in e.params:
                    e.primitive, e.params = _jax.planned_conv(e.like)
            self.mark(equations, known, names)
            new = _written_back(program, zip(before, equations, strict=True), {})
            # The program is stored too: while it exists, no other one has its ``id``.
            self.done[key] = program, new
        return self.done[key][1]


def regions(program: Any) -> Iterator[np.dtype]:
    """Yields the dtypes of the regions of a program."""
    for _, site, _ in all_equations(_jax.open_jaxpr(program)[0]):
        for name in site.scopes:
            if name.startswith(REGION):
                yield np.dtype(name.removeprefix(REGION))


def half_regions(program: Any) -> Iterator[np.dtype]:
    """Yields the 16-bit dtypes of the regions of a program."""
    return (dtype for dtype in regions(program) if dtype.name in rounding.HALF_NAMES)


def _written_back(program: Any, marked: Iterator[tuple[Any, Equation]], done: Any) -> Any:
    """Returns a program whose equations, its calls' included, are in their regions.

    Args:
        program: An open or closed jaxpr.
        marked: The scopes of each equation as they were, and the equation.
        done: The programs that were written before, by what was written.
    """
    jaxpr, consts = _jax.open_jaxpr(program)
    eqns, changes = [], []
    for eqn in jaxpr.eqns:
        inner = called(eqn, False)
        if inner is None:
            before, e = next(marked)
            added = e.stack.stack[len(before.stack) :]
            change = (*(scope.name for scope in added), *_changed(eqn.params, e.params))
            if change:
                info = eqn.source_info
                for scope in added:
                    info = info.replace(name_stack=info.name_stack.extend(scope.name))
                eqn = eqn.replace(primitive=e.primitive, params=e.params, source_info=info)
        else:
            new = _written_back(inner, marked, done)
            change = _changed({"": inner}, {"": new})
            if change:
                (name,) = higher_order(eqn.primitive.name).params
                old = eqn.params[name]
                # Some calls hold an open jaxpr, others a closed one.
                new = new if hasattr(old, "consts") else _jax.open_jaxpr(new)[0]
                eqn = eqn.replace(params={**eqn.params, name: new})
        eqns.append(eqn)
        changes.append(change)
    if not any(changes):
        return program
    key = id(jaxpr), tuple(changes)
    if key not in done:  # so that calls of one function stay calls of one function
        new = jaxpr.replace(eqns=eqns)
        done[key] = jaxpr, new if program is jaxpr else _jax.close(new, consts)
    return done[key][1]


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((k, id(p)) for k, p in new.items() if p is not old.get(k, old))


@functools.cache
def kind_of(name: str) -> str:
    """Returns what a primitive is: HALF for a matmul, SOLVER, PROGRAM if it holds one, or ""."""
    row = rule_of(name)
    algebra = row.need == FULL and NO_HALF_FORM in row.traits and not name.startswith("scatter")
    if row.need == HALF:
        return HALF
    return SOLVER if algebra or name in SOLVERS else PROGRAM if higher_order(name).params else ""


def _is_planned(e: Equation) -> bool:
    """Returns whether another autocast, or a kernel's author, planned an equation already."""
    return e.region.dtype == FLOAT32.name and PLANNED in _jax.scope_names(e.stack)


def _results(e: Equation, ins: Sequence[Known]) -> list[Known]:
    """Returns what is known of the results of an equation."""
    if not e.ins or len(e.outs) != 1:
        paths: tuple[str, ...] = ()
    else:
        paths = ins[0].paths if SAME_PARAMETER in e.rule.traits else ()
    integers = [of_equation(e, v, [fact.integers for fact in ins]) for v in e.outs]
    return [Known(paths, kind) if paths or kind else NOTHING for kind in integers]
