"""A program as a list of equations on shared values, its calls inlined.

The variables of a jaxpr are its own. Here a result of one program may be an operand of another, so
the forward and the backward part of a function are one list, which can be cut anywhere and closed
into jaxprs again.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building
from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.higher_order import CALL, CUSTOM, REMATS, HigherOrder, higher_order
from mpjax._src.core.base.rules import Rule, rule_of
from mpjax._src.core.program.graph import PLANNED, REGION

BARRIER = "optimization_barrier"


class Value:
    """What an argument, a constant or an equation gives.

    Attributes:
        aval: Its type.
        const: Its value, if it is a constant.
        literal: Whether the constant is written into the equations that read it.
        is_float32: Whether it is a float32 array.
        shape: Its shape; a symbolic dimension counts as a large one.
        size: The number of its entries.
    """

    __slots__ = ("aval", "const", "is_float32", "literal", "shape", "size")

    def __init__(self, aval: Any, const: Any = None, literal: bool = False) -> None:
        self.aval, self.const, self.literal = aval, const, literal
        self.is_float32 = getattr(aval, "dtype", None) == FLOAT32 and _jax.is_array(aval)
        self.shape: tuple[int, ...] = getattr(aval, "shape", ())
        self.size = math.prod(self.shape)
        # A symbolic dimension is no int, and beside a zero the product of all would hide it.
        if type(self.size) is not int or not self.size:
            self.size = _jax.size_of(self.shape)
            self.shape = tuple(_jax.size_of((n,)) for n in self.shape)


class Region(NamedTuple):
    """What the scopes around an equation ask of it.

    Attributes:
        dtype: The dtype of the innermost region; "" if there is none.
        back: Whether the equation is the transpose of another one.
    """

    dtype: str = ""
    back: bool = False


NOWHERE = Region()
OURS = "mpjax."  # how the names of the library's scopes begin


def region_of(stack: Any, name: str, outer: Region = NOWHERE) -> Region:
    """Returns what the scopes of a primitive's equation ask for, in a program in a region.

    A region is the scope ``mpjax.precision=DTYPE``. Of a primitive alone it is ``DTYPE:NAME``, and
    ``DTYPE:NAME:again`` if it runs a second time, in the backward pass.
    """
    if not stack.stack:
        return outer
    names, back = _jax.scopes_named(stack, OURS)
    back = back or outer.back
    if not names:
        # Almost all equations are in the region around them: they share one object.
        return outer if back == outer.back else Region(outer.dtype, back)
    if PLANNED in names:  # its author planned it already
        return Region(FLOAT32.name, back)
    for scope in reversed(names):
        if scope.startswith(REGION):
            dtype, *of = scope.removeprefix(REGION).split(":")
            if not of or of[0] == name:
                anywhere = len(of) == 2 or of == ["add_any"]  # which cotangents alone are
                return Region(dtype, back and not anywhere)
    return Region(outer.dtype, back)


@dataclasses.dataclass(eq=False, slots=True)
class Equation:
    """An operation on values."""

    primitive: Any
    params: dict[str, Any]
    ins: list[Value]
    outs: list[Value]
    like: Any  # the equation of a jaxpr that it came from: its source, context and effects
    stack: Any  # the scopes around it
    again: bool = False  # whether a checkpoint computes it again: it waits for cotangents
    region: Region = NOWHERE
    # Of its primitive, read in every sweep: the name, and its rows in the tables.
    name: str = dataclasses.field(init=False)
    rule: Rule = dataclasses.field(init=False)
    row: HigherOrder = dataclasses.field(init=False)
    # Whether its second operand is subtracted, or divides; whether it is a barrier; and whether its
    # author wrote its derivative.
    inverts: bool = dataclasses.field(init=False)
    is_barrier: bool = dataclasses.field(init=False)
    is_custom: bool = dataclasses.field(init=False)
    is_half_matmul: bool | None = dataclasses.field(init=False, default=None)  # once it is known

    def __post_init__(self) -> None:
        self.name = self.primitive.name
        self.rule, self.row = rule_of(self.name), higher_order(self.name)
        self.inverts, self.is_barrier = self.name in ("sub", "div"), self.name == BARRIER
        self.is_custom = self.name in CUSTOM

    @property
    def acts(self) -> bool:
        """Whether it has an effect, so that it runs even if nobody reads its results."""
        return bool(self.like.effects) and building.acts(self.like.effects)

    def on(
        self, ins: Iterable[Value], outs: list[Value] | None = None, **changes: Any
    ) -> "Equation":
        """Returns the equation with other operands, and what else is given."""
        outs = self.outs if outs is None else outs
        return dataclasses.replace(self, ins=[*ins], outs=outs, **changes)

    def reading(self, instead: Mapping[Value, Value]) -> "Equation":
        """Returns the equation on what is read ``instead`` of some operands, or itself."""
        # Unchanged, it stays itself: for sets and dictionaries a copy is another equation.
        if instead.keys().isdisjoint(self.ins):
            return self
        return self.on(instead.get(v, v) for v in self.ins)

    def enter(self, region: str) -> None:
        """Puts it into a region."""
        self.stack = self.stack.extend(f"{REGION}{region}")
        self.region = region_of(self.stack, self.name, self.region)
        self.is_half_matmul = None


class Call(NamedTuple):
    """An equation that was inlined, on values, and the places of the equations inside of it."""

    start: int
    stop: int
    equation: Equation


class Listed(NamedTuple):
    """A program as a list of equations, before it is closed into a jaxpr."""

    ins: Sequence[Value]
    equations: Sequence[Equation]
    outs: Sequence[Value]
    info: Any

    @classmethod
    def of(
        cls, ins: Sequence[Value], equations: Sequence[Equation], outs: Sequence[Value], info: Any
    ) -> "Listed":
        """Returns the program of the equations that the results need."""
        return cls(ins, needed(equations, outs), outs, info)

    @property
    def effects(self) -> Any:
        """Its effects."""
        return building.effects_of(e.like for e in self.equations)

    def closed(self) -> Any:
        """Returns its closed jaxpr."""
        return closed(*self)

    def written_out(self) -> "Listed":
        """Returns it with what functions with rules do in place of their calls."""
        into: list[Equation] = []
        same: dict[Value, Value] = {}
        for e in self.equations:
            e = e.reading(same)
            if e.is_custom:
                # Nobody differentiates what is written, so the function stands for its rule.
                inner = called(e, True)
                flags = {"again": e.again, "stack": _scopes(e), "rules": True}
                flags["line"] = building.at_call(e.like, inner)
                same.update(zip(e.outs, opened(inner, e.ins, into, **flags), strict=True))
            else:
                into.append(e)
        return self._replace(equations=into, outs=[same.get(v, v) for v in self.outs])


def parts(
    program: Any, rules: bool = False, region: Region = NOWHERE
) -> tuple[list[Value], list[Equation], list[Value]]:
    """Returns the arguments, equations and results of a program; the options are `opened`'s."""
    ins = [Value(aval) for aval in _jax.in_avals(program)]
    equations: list[Equation] = []
    outs = opened(program, ins, equations, rules=rules, region=region)
    return ins, equations, outs


def opened(
    closed: Any,
    ins: Sequence[Value],
    into: list[Equation],
    *,
    again: bool = False,
    stack: Any = None,
    rules: bool = False,
    region: Region = NOWHERE,
    calls: list[Call] | None = None,
    line: Callable[[Any], Any] | None = None,
) -> list[Value]:
    """Appends the equations of a closed jaxpr, with its calls inlined, and returns its results.

    Custom derivative rules are kept, unless ``rules`` are to be inlined too: nobody differentiates
    what is written. The ``region`` is that of the equation which holds the program: its scopes are
    not repeated on those inside.
    ``calls`` gets what was inlined, the innermost first. ``line`` gives an equation the line
    where a user calls the program, if no user wrote it.
    """
    jaxpr, consts = _jax.open_jaxpr(closed)
    pairs = zip(jaxpr.constvars, consts, strict=True)
    env = {var: Value(var.aval, const) for var, const in pairs}
    env.update(zip(jaxpr.invars, ins, strict=True))

    def read(atom):
        literal = isinstance(atom, _jax.Literal)
        return Value(atom.aval, atom.val, literal=True) if literal else env[atom]

    for eqn in jaxpr.eqns:
        # Errors and reports name the user's line, not one inside of JAX.
        if line is not None:
            eqn = line(eqn)
        operands = [read(atom) for atom in eqn.invars]
        scopes = eqn.source_info.name_stack
        scopes = scopes if stack is None else stack + scopes
        inner = called(eqn, rules)
        if inner is None:
            outs = [Value(var.aval) for var in eqn.outvars]
            here = region_of(scopes, eqn.primitive.name, region)
            e = Equation(eqn.primitive, eqn.params, operands, outs, eqn, scopes, again, here)
            into.append(e)
        else:
            start, given = len(into), operands
            # JAX sets ``differentiated`` where it puts a checkpoint into the backward pass.
            once_more = eqn.primitive.name in REMATS and eqn.params["differentiated"]
            if once_more:
                operands = _behind_barrier(eqn, operands, into, scopes)
            flags = {"again": again or once_more, "stack": scopes, "rules": rules, "calls": calls}
            flags["line"] = building.at_call(eqn, inner)
            outs = opened(inner, operands, into, region=region, **flags)
            if calls is not None:
                if eqn.primitive.name in CUSTOM:
                    # An identity with a rule holds no equation: its call would be lost (`recall`).
                    outs = _owned(outs, start, into, like=eqn, stack=scopes)
                call = Equation(eqn.primitive, eqn.params, given, outs, eqn, scopes, again)
                calls.append(Call(start, len(into), call))
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def appended(
    run: Callable[..., list[Any]],
    ins: Sequence[Value],
    into: list[Equation],
    like: Equation | None = None,
    outs: Sequence[Value] = (),
    again: bool = False,
    traced: dict[Any, Any] | None = None,
) -> list[Value]:
    """Appends what a function computes from values, in the region and scopes of an equation.

    Its first results are ``outs``; returned are all. Who appends the same function often gives a
    dictionary ``traced``, which keeps its programs.
    """
    avals, traced, start = [v.aval for v in ins], {} if traced is None else traced, len(into)
    if (run, *avals) not in traced:
        traced[run, *avals] = _jax.trace(run, avals, "appended")
    flags: dict[str, Any] = {}
    if like:
        flags = {"again": again or like.again, "stack": like.stack, "region": like.region}
    made = opened(traced[run, *avals], ins, into, **flags)
    for v, out in zip(made, outs, strict=False):
        rename(into[start:], v, out)
    return [*outs, *made[len(outs) :]]


@functools.lru_cache(maxsize=512)
def given(run: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Returns a function whose first arguments are given: one object, which `appended` knows."""
    return functools.partial(run, *args)


def rename(equations: Sequence[Equation], old: Value, new: Value) -> None:
    """Puts a value in the place of another one, wherever it is made and read."""
    for e in equations:
        e.ins, e.outs = ([new if v is old else v for v in values] for values in (e.ins, e.outs))


def _owned(
    outs: Sequence[Value], start: int, into: list[Equation], *, like: Any, stack: Any
) -> list[Value]:
    """Returns results of a rule that are values of their own: an identity may have a rule."""
    made = {v for e in into[start:] for v in e.outs}
    own: list[Value] = []
    for v in outs:
        fresh = v in made and v not in own
        own += [v] if fresh else barred([v], into, like=like, stack=stack)
    return own


def called(eqn: Any, rules: bool) -> Any:
    """Returns the closed jaxpr of an equation that is no more than a call of it, or None."""
    name = eqn.primitive.name
    if name in REMATS:
        return building.as_closed(eqn.params["jaxpr"])
    if name in CUSTOM:
        return eqn.params[higher_order(name).params[0]] if rules else None
    return _jax.inlined(eqn) if higher_order(name).kind == CALL else None


def _behind_barrier(
    eqn: Any, operands: list[Value], into: list[Equation], stack: Any
) -> list[Value]:
    """Puts the operands of a recomputation behind a barrier, where its author did not forbid it."""
    which = eqn.params["prevent_cse"]
    # JAX has one flag for all operands, or a flag for each.
    which = which if isinstance(which, tuple) else (which,) * len(operands)
    chosen = [v for v, yes in zip(operands, which, strict=True) if yes]
    held = iter(barred(chosen, into, like=eqn, stack=stack))
    return [next(held) if yes else v for v, yes in zip(operands, which, strict=True)]


def barred(values: Sequence[Value], into: list[Equation], *, like: Any, stack: Any) -> list[Value]:
    """Appends a barrier, which keeps compilers from merging what reads it with what does not."""
    outs = [Value(v.aval) for v in values]
    groups = collections.defaultdict(list)
    for v, out in zip(values, outs, strict=True):  # a barrier's values vary over the same axes
        groups[building.varying(v.aval)].append((v, out))
    for pairs in groups.values():
        ins, results = map(list, zip(*pairs, strict=True))
        # The equation that it is like may print: that must happen once.
        plain = like.replace(effects=building.NO_EFFECTS)
        into.append(Equation(building.barrier_p, {}, ins, results, plain, stack, again=True))
    return outs


def needed(equations: Sequence[Equation], results: Iterable[Value]) -> list[Equation]:
    """Returns the equations that the results depend on, and those that have effects."""
    wanted, found = set(results), []
    for e in reversed(equations):
        if not wanted.isdisjoint(e.outs) or e.acts:
            found.append(e)
            wanted.update(e.ins)
    return found[::-1]


def closed(
    ins: Sequence[Value], equations: Sequence[Equation], outs: Sequence[Value], info: Any
) -> Any:
    """Returns the closed jaxpr of the equations that the results need."""
    env: dict[Value, Any] = {v: building.Var(v.aval) for v in ins}
    constants: dict[Any, Any] = {}

    def read(v):
        if v not in env and v.const is not None:
            if v.literal:
                return _jax.Literal(v.const, v.aval)
            env[v] = building.Var(v.aval)
            constants[env[v]] = v.const
        return env[v]

    eqns = []
    for e in needed(equations, outs):
        operands = [read(v) for v in e.ins]
        env.update((out, building.Var(out.aval)) for out in e.outs)
        source, scopes = e.like.source_info, _scopes(e)
        # Most stacks are unchanged: their equations share what JAX knows of the source.
        if source.name_stack is not scopes:
            source = source.replace(name_stack=scopes)
        eqns.append(
            e.like.replace(
                invars=operands,
                outvars=[env[out] for out in e.outs],
                primitive=e.primitive,
                params=e.params,
                source_info=source,
            )
        )
    arguments, results = [env[v] for v in ins], [read(v) for v in outs]
    return building.jaxpr_of(constants, arguments, results, eqns, info)


def _scopes(e: Equation) -> Any:
    """Returns the scopes of an equation, with its region: it may have moved to another program."""
    # What was in a loop has the region of the loop, which its own scopes do not repeat.
    alone = region_of(e.stack, e.name) if e.region.dtype else e.region
    return e.stack if e.region.dtype == alone.dtype else e.stack.extend(REGION + e.region.dtype)
