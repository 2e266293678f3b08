"""The planner's representation of a program: a nested graph of values, with inner jits inlined.

`build` turns a jaxpr into a `Block` of `Op`s. Sub-programs (the body of a scan, the branches of a
cond) are blocks of their own. `higher_order` describes how they connect to the outer values, so an
analysis needs no rule per control-flow primitive. This module makes no decisions; see `plan`.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._src.autocast.why import NO_REASON, Why
from mpjax._src.base import _jax, rules
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.base.higher_order import HigherOrder, Inside, higher_order, turns_of
from mpjax._src.base.rules import Rule, rule_of

# The planner does not read the entries of larger constants.
CONSTANT_LIMIT = 1 << 16

# The names of scopes that mpjax uses as marks.
REGION = "mpjax.precision="
PLANNED = "mpjax.autocast"
KERNEL = "mpjax.kernel="
ATTENTION = "mpjax.attention="

# An operand of a matmul, and some of its dimensions.
Place = tuple[int, tuple[int, ...]]


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Value:
    """One array of the program, with the facts and decisions of the plan about it."""

    aval: Any
    const: Any = None  # its known value: a scalar that fills it, or a small array
    entries: Any = None  # the known values of its entries, in any order and number
    paths: tuple[str, ...] = ()  # the paths of the parameter that it is or views
    given: bool = False  # an argument, or made from arguments by moves alone
    moved: bool = False  # the same, with a sharding set by the program: devices send it
    raw: bool = False  # an argument or constant, perhaps after layout operations
    literal: bool = False  # written in the program
    small: bool = False  # the result of a reduction, or made from such results alone
    # The decision (`decide`).
    kind: str = ""  # "half", "full", "flexible"; "" if not float32
    dtype: Any = None  # its storage dtype
    wide: bool = False  # made with a constant that half cannot hold: never rounded for storage
    lost: bool = False  # half would lose information of it (`facts`): not rounded either
    rounded: bool = False  # computed in float32, stored in half
    # Read in every sweep, so they are not computed again.
    is_f32: bool = dataclasses.field(init=False)
    size: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        is_array = _jax.is_array(self.aval)
        self.is_f32 = is_array and getattr(self.aval, "dtype", None) == FLOAT32
        self.size = _jax.size_of(getattr(self.aval, "shape", ()))

    @property
    def is_one(self) -> bool:
        """Whether it has a single entry."""
        return all(size == 1 for size in self.aval.shape)


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Op:
    """One equation of the flattened program."""

    eqn: Any
    ins: list[Value]
    outs: list[Value]
    stack: Any  # the name stack, from the root of its block
    scopes: tuple[str, ...]  # the names on it, from the root of the program
    callers: tuple[Any, ...] = ()  # the equations around it, jits that were inlined included
    subs: list[Inside] = dataclasses.field(default_factory=list)
    rule: str = ""
    half: Any = None  # the half dtype that it uses if it computes in half
    forced: str = ""  # "half" or "full", whatever its operands are
    compute: Any = None  # the dtype in which it reads float32 operands; None: as stored
    why: Why = NO_REASON  # the reason for that dtype
    index: int = -1
    steady: bool = False  # derivatives may hold its operands constant
    # For a matmul, an operand and dimensions over which derivatives subtract its mean.
    centred: Place | None = None
    # For a maximum, the exponential whose sums it also returns; for such a sum, the same.
    online: str = ""
    repeats: tuple[int, int] | None = None  # of a gather that repeats entries: axis, count
    sent_half: bool = False  # for a lookup in a parameter: devices may exchange it in half
    attention: str = ""  # for a matmul that reads a softmax: the fused kernel, or why there is none
    # Read in every sweep, so they are not looked up again.
    name: str = dataclasses.field(init=False)
    spec: Rule = dataclasses.field(init=False)  # the row of its primitive in `rules`

    def __post_init__(self) -> None:
        self.name = self.eqn.primitive.name
        self.spec = rule_of(self.name)

    @property
    def in_force(self) -> str:
        """The rule that decides and evaluates it: the one that was forced on it, or its own."""
        return self.forced or self.rule

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

    @property
    def left_alone(self) -> bool:
        """Whether it is float32 and runs as written although no one asked for that."""
        unknown = self.rule == "leave" and not self.forced and PLANNED not in self.scopes
        return self.rule == "written" or (unknown and self.has_float32)


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Block:
    """A sequence of ops with its arguments, constants and results."""

    invars: list[Value]
    outvars: list[Value]
    consts: list[tuple[Value, Any]]
    ops: list[Op]
    in_loop: bool = False
    steps: tuple[Any, ...] = ()  # the ops and islands to run, in order (`storage`)

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


def numbered(block: Block, times: int = 1) -> Iterator[tuple[Op, int]]:
    """Yields the ops that have rows in reports, in order, and how often each runs.

    An op that is planned as one operation, such as an activation with its own rule, is one row.
    """
    for op in block.ops:
        yield op, times
        if op.rule == "program" or op.left_alone:
            for sub in op.subs:
                yield from numbered(sub.program, times * turns_of(op.eqn))


def build(
    jaxpr: Any, consts: Sequence[Any], scopes: tuple[str, ...] = (), callers: tuple[Any, ...] = ()
) -> Block:
    """Returns the graph of a jaxpr.

    Args:
        jaxpr: The jaxpr, with ``consts`` the values of its constants.
        consts: Arrays or tracers.
        scopes: Names of the scopes around it.
        callers: The equations around it.
    """
    block = Block([Value(v.aval) for v in jaxpr.invars], [], [], [])
    known = [
        (_constant(v.aval, value), value) for v, value in zip(jaxpr.constvars, consts, strict=True)
    ]
    block.consts = known
    env = dict(zip(jaxpr.invars, block.invars, strict=True))
    env |= {v: value for v, (value, _) in zip(jaxpr.constvars, known, strict=True)}
    block.outvars = _flatten(jaxpr, env, block, None, scopes, callers)
    for index, op in enumerate(block.ops):
        op.index = index
    return block


def _flatten(jaxpr, env, block: Block, stack, scopes, callers) -> list[Value]:
    """Appends a jaxpr's equations to a block, the insides of its jits included."""

    def read(atom):
        if isinstance(atom, _jax.Literal):
            # The tangent of an integer has no entries that are numbers.
            dtype = getattr(atom.aval, "dtype", None)
            entries = None if dtype == jax.dtypes.float0 else atom.val
            return Value(atom.aval, atom.val, entries, raw=True, literal=True)
        return env[atom]

    for eqn in jaxpr.eqns:
        here = eqn.source_info.name_stack if stack is None else stack + eqn.source_info.name_stack
        names = scopes + _jax.scope_names(eqn.source_info.name_stack)
        ins = [read(atom) for atom in eqn.invars]
        if (called := _jax.inlined(eqn)) is not None:
            inner, inner_consts = _jax.open_jaxpr(called)
            inner_env = dict(zip(inner.invars, ins, strict=True))
            for var, value in zip(inner.constvars, inner_consts, strict=True):
                inner_env[var] = _constant(var.aval, value)
                block.consts.append((inner_env[var], value))
            results = _flatten(inner, inner_env, block, here, names, (*callers, eqn))
            env |= zip(eqn.outvars, results, strict=True)
            continue
        outs = [Value(var.aval) for var in eqn.outvars]
        env |= zip(eqn.outvars, outs, strict=True)
        op = Op(eqn, ins, outs, here, names, callers)
        # The cotangents of x - x cancel, but not after each is added to another and rounded.
        op.steady = op.name == "sub" and ins[0] is ins[1]
        for inside in op.inside.wire(eqn):
            inner = build(*_jax.open_jaxpr(inside.program), names, (*callers, eqn))
            inner.in_loop = block.in_loop or op.inside.loops
            op.subs.append(inside._replace(program=inner))
        block.ops.append(op)
    return [read(atom) for atom in jaxpr.outvars]


def _constant(aval, value) -> Value:
    known = Value(aval, raw=True)
    if known.is_f32 and not isinstance(value, jax.core.Tracer) and known.size <= CONSTANT_LIMIT:
        known.const = known.entries = np.asarray(value)
    return known


def known_value(op: Op) -> Any:
    """Returns the constant value of an op's first result, or None if it is not constant."""
    if not (op.ins and rules.SAME_CONSTANT in op.spec.traits and op.outs[0].is_f32):
        return None
    value = op.ins[0].const
    if value is None:
        return None
    if np.size(value) == 1:
        return np.asarray(value).reshape(())
    return value if op.name == "convert_element_type" else None


def half_of(block: Block) -> Any:
    """Returns the half dtype of a block's operations."""
    return next((op.half for op in block.walk() if op.half is not None), None)


def is_steady(op: Op, value: Value) -> bool:
    """Returns whether an op's derivative by an operand is bounded or tolerates its rounding."""
    dividend = op.name == "div" and value is not op.ins[1]
    return op.spec.linear or op.spec.steady_of(op.params) or dividend


def is_float(value: Value) -> bool:
    """Returns whether a value is half, float32 or float64."""
    dtype = getattr(value.aval, "dtype", None)
    return dtype == FLOAT32 or dtype in HALVES or dtype == np.float64
