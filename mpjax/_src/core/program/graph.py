"""A program as a nested graph of values, with inner jits inlined: for reports, lints, replacements.

`build` turns a jaxpr into a `Block` of `Op`s. Sub-programs (the body of a scan, the branches of a
cond) are separate blocks. `higher_order` describes how they connect to the outer values, so an
analysis needs no rule per control-flow primitive. This module makes no decisions.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import FLOAT32, HALVES
from mpjax._src.core.base.higher_order import HigherOrder, Inside, higher_order
from mpjax._src.core.base.rules import Rule, rule_of

T = TypeVar("T")

# The planner does not read the entries of larger constants.
CONSTANT_LIMIT = 1 << 16

# The names of scopes that mpjax uses as marks.
REGION = "mpjax.precision="
PLANNED = "mpjax.autocast"
ARGUMENTS = "mpjax.arguments"  # around a function whose arguments autocast casts, and no operation
KERNEL = "mpjax.kernel="
ATTENTION = "mpjax.attention="
LOSS = "mpjax.loss="
AGAIN = "rematted_computation"  # JAX's own, around what a backward pass recomputes


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Value:
    """One array of the program, with what the program alone says of it."""

    aval: Any
    const: Any = None  # its known value: a scalar that fills it, or a small array
    paths: tuple[str, ...] = ()  # the paths of the parameter that it is or views
    given: bool = False  # a parameter, or made from parameters by moves alone
    constant: bool = False  # a constant of the program, perhaps after layout operations
    literal: bool = False  # written in the program
    # Read in every sweep, so they are computed once.
    is_f32: bool = dataclasses.field(init=False)
    size: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        is_array = _jax.is_array(self.aval)
        is_f32 = is_array and getattr(self.aval, "dtype", None) == FLOAT32
        object.__setattr__(self, "is_f32", is_f32)
        object.__setattr__(self, "size", _jax.size_of(getattr(self.aval, "shape", ())))

    @property
    def is_one(self) -> bool:
        """Whether it has a single entry."""
        return all(size == 1 for size in self.aval.shape)


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Op:
    """One equation of the flattened program."""

    eqn: Any
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]
    stack: Any  # the name stack, from the root of its block
    scopes: tuple[str, ...]  # the names on it, from the root of the program
    callers: tuple[Any, ...] = ()  # the equations around it, jits that were inlined included
    subs: tuple[Inside, ...] = ()
    index: int = -1  # its place in the block
    # Read in every sweep, so they are not looked up again.
    name: str = dataclasses.field(init=False)
    spec: Rule = dataclasses.field(init=False)  # the row of its primitive in `rules`

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.eqn.primitive.name)
        object.__setattr__(self, "spec", rule_of(self.name))

    @property
    def inside(self) -> HigherOrder:
        """The row of its primitive in `higher_order`."""
        return higher_order(self.name)

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def source(self) -> str:
        """The user's line that it comes from, or that of the innermost user call around it."""
        return self.lines[0]

    @property
    def lines(self) -> tuple[str, str]:
        """The user's line, as in `source`, and the library's line that it calls, or ""."""
        return _jax.source_lines(self.eqn, *reversed(self.callers))

    @property
    def kernel(self) -> str:
        """The mark of the kernel call that it is a part of, or ""."""
        return next((name for name in self.scopes if name.startswith(KERNEL)), "")

    @property
    def has_float32(self) -> bool:
        """Whether it has a float32 operand or result."""
        return any(v.is_f32 for v in (*self.ins, *self.outs))


@dataclasses.dataclass(frozen=True, slots=True, eq=False, repr=False)
class Block:
    """A sequence of ops with its arguments, constants and results."""

    invars: tuple[Value, ...]
    outvars: tuple[Value, ...]
    consts: tuple[tuple[Value, Any], ...]
    ops: tuple[Op, ...]

    def walk(self):
        """Yields every op, including those of sub-programs."""
        for op in self.ops:
            yield op
            for sub in op.subs:
                yield from sub.program.walk()

    def blocks(self):
        """Yields the block and those inside it."""
        yield self
        for op in self.ops:
            for sub in op.subs:
                yield from sub.program.blocks()


def build(
    jaxpr: Any,
    consts: Sequence[Any],
    scopes: tuple[str, ...] = (),
    paths: Sequence[str] = (),
) -> Block:
    """Returns the graph of a program.

    ``consts`` are the values of its constants, ``scopes`` the names of the scopes around it, and
    ``paths`` has the path of each argument that is a parameter.
    """
    invars = [Value(v.aval) for v in jaxpr.invars]
    if paths:
        named = zip(invars, paths, strict=True)
        invars = [dataclasses.replace(v, paths=(path,), given=True) for v, path in named]
    return _block(jaxpr, consts, invars, scopes, ())


def _block(jaxpr, consts, invars: Sequence[Value], scopes, callers) -> Block:
    constants = [
        (_constant(v.aval, value), value) for v, value in zip(jaxpr.constvars, consts, strict=True)
    ]
    env = dict(zip(jaxpr.invars, invars, strict=True))
    env |= {v: value for v, (value, _) in zip(jaxpr.constvars, constants, strict=True)}
    ops: list[Op] = []
    outvars = _flatten(jaxpr, env, ops, constants, None, scopes, callers)
    return Block(tuple(invars), tuple(outvars), tuple(constants), tuple(ops))


def _flatten(jaxpr, env, ops: list[Op], consts, stack, scopes, callers) -> list[Value]:
    """Appends a jaxpr's equations and constants, the insides of its jits included."""

    def read(atom):
        if isinstance(atom, _jax.Literal):
            return Value(atom.aval, atom.val, constant=True, literal=True)
        return env[atom]

    for eqn in jaxpr.eqns:
        here = eqn.source_info.name_stack if stack is None else stack + eqn.source_info.name_stack
        names = scopes + _jax.scope_names(eqn.source_info.name_stack)
        ins = tuple([read(atom) for atom in eqn.invars])
        if (called := _jax.inlined(eqn)) is not None:
            inner, inner_consts = _jax.open_jaxpr(called)
            inner_env = dict(zip(inner.invars, ins, strict=True))
            for var, value in zip(inner.constvars, inner_consts, strict=True):
                inner_env[var] = _constant(var.aval, value)
                consts.append((inner_env[var], value))
            results = _flatten(inner, inner_env, ops, consts, here, names, (*callers, eqn))
            env |= zip(eqn.outvars, results, strict=True)
            continue
        outs = tuple([_result(eqn, ins, var.aval) for var in eqn.outvars])
        env |= zip(eqn.outvars, outs, strict=True)
        subs = _programs(eqn, ins, names, (*callers, eqn))
        ops.append(Op(eqn, ins, outs, here, names, callers, subs, index=len(ops)))
    return [read(atom) for atom in jaxpr.outvars]


def _result(eqn, ins: Sequence[Value], aval: Any) -> Value:
    """Returns a result of an equation, with what is known of it: a constant, or a parameter."""
    spec, value = rule_of(eqn.primitive.name), Value(aval)
    fields: dict[str, Any] = {}
    if rules.SAME_PARAMETER in spec.traits and ins:
        fields = {"paths": ins[0].paths, "constant": ins[0].constant}
        fields["constant"] &= rules.FRESH not in spec.traits
        if rules.SAME_CONSTANT in spec.traits and (value.is_f32 or value.size == 1):
            fields["const"] = _same_constant(eqn, ins[0].const)
    if spec.need == rules.MOVE and rules.LOOKS_UP not in spec.traits:
        fields["given"] = all(v.given for v in ins if is_float(v))
    return dataclasses.replace(value, **fields) if fields else value


# These set the sharding of a parameter.
EXCHANGES = frozenset(["reshard", "sharding_constraint", "all_gather", "all_gather_invariant"])


def _same_constant(eqn, value: Any) -> Any:
    """Returns the known value of the result of an equation whose operand has a known value."""
    if value is None:
        return None
    if np.size(value) == 1:
        return np.asarray(value).reshape(())
    return value if eqn.primitive.name == "convert_element_type" else None


def _programs(eqn, ins: Sequence[Value], scopes, callers) -> tuple[Inside, ...]:
    """Returns the programs inside an equation, and what their arguments are outside of it."""
    row = higher_order(eqn.primitive.name)
    programs = []
    for inside in row.wire(eqn):
        jaxpr, consts = _jax.open_jaxpr(inside.program)
        carried = {argument for _, argument in inside.carry}
        invars = [
            # A carry has its first value in one iteration alone, so nothing is known of it.
            Value(v.aval) if place in carried else _argument(v.aval, ins[index], row.knows)
            for place, (v, index) in enumerate(zip(jaxpr.invars, inside.ins, strict=True))
        ]
        program = _block(jaxpr, consts, invars, scopes, callers)
        programs.append(inside._replace(program=program))
    return tuple(programs)


def _argument(aval: Any, outside: Value, knows: bool) -> Value:
    """Returns an argument of a program inside an equation, which reads a value for it."""
    fields: dict[str, Any] = {"paths": outside.paths, "given": outside.given}
    if knows:
        const = outside.const
        # A loop passes slices, of which only a number that fills the whole array is known.
        filled = const is not None and np.size(const) == 1
        fields["const"] = np.reshape(const, ()) if filled else None
    return Value(aval, **fields)


def _constant(aval, value) -> Value:
    constant = Value(aval, constant=True)
    traced = isinstance(value, jax.core.Tracer)
    if not constant.is_f32 or traced or constant.size > CONSTANT_LIMIT:
        return constant
    return dataclasses.replace(constant, const=np.asarray(value))


def wires(op: Op) -> Iterator[tuple[Value, Value]]:
    """Yields the pairs of values that are one, where programs inside an op begin, turn and end."""
    for sub in op.subs:
        inner = sub.program
        for place, value in zip(sub.ins, inner.invars, strict=True):
            yield op.ins[place], value
        for value, out in zip(inner.outvars, sub.outs, strict=True):
            if out is not None:
                yield value, op.outs[out]
        for result, argument in sub.carry:
            yield inner.outvars[result], inner.invars[argument]


def walked(starts: Iterable[T], following: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yields some nodes of a graph and all that follow, the nearest first."""
    waiting = collections.deque(dict.fromkeys(starts))
    seen = {*waiting}
    while waiting:
        node = waiting.popleft()
        yield node
        for each in following(node):
            if each not in seen:
                seen.add(each)
                waiting.append(each)


def is_float(value: Value) -> bool:
    """Returns whether a value is 16-bit, float32 or float64."""
    dtype = getattr(value.aval, "dtype", None)
    return dtype == FLOAT32 or dtype in HALVES or dtype == np.float64
