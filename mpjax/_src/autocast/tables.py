"""The tables of a plan: what its passes find out about each operation and value.

Facts about values and demands of their readers are elements of lattices.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mpjax._src.base.dtypes import FLOAT16
from mpjax._src.program.graph import PLANNED, Block, Op, Place, Value

# ---- reasons ------------------------------------------------------------------------------------


class Reason(enum.Enum):
    """The reason for a dtype. Comments in brackets name the further data in its `Why`."""

    # The primitive of the operation, or the program inside it.
    HALF_ROW = enum.auto()
    FULL_ROW = enum.auto()
    FULL_INSIDE = enum.auto()
    OPERANDS = enum.auto()  # it computes in the dtype of its operands
    GIVES_NO_FLOAT = enum.auto()
    NO_FLOAT32 = enum.auto()
    PROGRAM = enum.auto()
    OWN_RULE = enum.auto()
    UNKNOWN = enum.auto()
    FLOAT32_KERNEL = enum.auto()
    NO_ROW = enum.auto()
    # The program, or the user.
    CAST = enum.auto()
    PRECISION = enum.auto()  # (the precision)
    WRITTEN = enum.auto()
    LISTED = enum.auto()  # (the list)
    OVERRIDE = enum.auto()  # (the pattern)
    REGION = enum.auto()  # (its dtype)
    INNER_AUTOCAST = enum.auto()
    KERNEL = enum.auto()  # (its name)
    FLOAT32_POLICY = enum.auto()
    # The values that it reads.
    HALF_OPERAND = enum.auto()
    CHAIN = enum.auto()
    FULL_OPERAND = enum.auto()
    CONSTANT = enum.auto()  # (the constant, the 16-bit dtype)
    OF_CONSTANTS = enum.auto()  # (the 16-bit dtype)
    INTEGERS = enum.auto()
    POSITIONS = enum.auto()  # (the 16-bit dtype)
    SPECIAL = enum.auto()
    FLATTENS = enum.auto()
    # The operations that read it.
    FULL_READERS = enum.auto()
    WIDE_RESULT = enum.auto()
    AMPLIFIED = enum.auto()
    SHORT_SUM = enum.auto()
    SELECTS = enum.auto()
    SOLUTION = enum.auto()
    # Information that 16 bits would lose.
    LOST = enum.auto()
    ENDS_LOOP = enum.auto()
    REPEATS_LOOP = enum.auto()
    REPLAYS_LOOP = enum.auto()
    WITHIN = enum.auto()  # (the primitive of what is left unchanged around it, its line)


class Why(NamedTuple):
    """A reason, and the data that its wording needs."""

    reason: Reason
    about: tuple[Any, ...] = ()


def why(reason: Reason, *about: Any) -> Why:
    """Returns a reason with its data."""
    return Why(reason, about)


NO_REASON = why(Reason.NO_FLOAT32)


# ---- facts --------------------------------------------------------------------------------------

# span: at most about 1; of ordinary size; perhaps beyond the range of float16.
BOUNDED, FITS, BEYOND = range(3)

# offset
ADDED, SUBTRACTED = 1, 2


class Fact(NamedTuple):
    """The facts about a value."""

    half: bool = False  # it comes from a 16-bit operation, perhaps through elementwise operations
    exact: bool = False  # rounding it for storage would lose information
    span: int = BOUNDED  # its size: BOUNDED, FITS or BEYOND
    # The number of roundings of a state that it would contain if each sum were stored in 16 bits.
    writes: int = 0
    scaled: bool = False  # it may be small compared with the value that it is added to
    factor: float = 1.0  # the product of the known factors below 1 since the last matmul
    norm: str = ""  # "scale" if it is the reciprocal of a size, "unit" if it was multiplied by one
    # It contains integers of more than 8 bits as floats, which 16 bits would merge.
    counts: bool = False
    mask: bool = False  # it contains only zeros and ones
    spread: bool = False  # it is a broadcast argument
    linear: bool = False  # it depends on a tangent of the planned program
    negative: bool = False  # it is at most zero, because its largest entry was subtracted
    # It is the result of a loop left unchanged, up to sums and constant factors.
    solved: bool = False
    # The matmuls, sums and loop carries that it is computed from, as a bit mask. Empty for
    # arguments and values computed from arguments alone.
    made: int = 0
    peak: int = 0  # the values whose largest entry it is, as a bit mask
    chain: int = 0  # the members of ``made`` of which it is the latest state
    weights: int = 0  # the arguments that the matmuls before it multiplied by, as a bit mask
    # Since the last matmul, a constant or an argument was added to it or multiplied it.
    shifted: bool = False
    # The signs with which constants and arguments were added to it since the last matmul: a bit
    # mask of ADDED and SUBTRACTED.
    offset: int = 0
    block: bool = False  # since the last matmul, a residual block was added to it
    level: int = 0  # the axes along which a term of it is constant, as a bit mask
    mean: int = 0  # the values whose mean it is, as a bit mask
    centered: bool = False  # it is an array minus its mean, which subtracts such a term
    # Some of its entries are, or contain, a constant beyond the range of float16.
    huge: bool = False
    # It is computed from arguments alone, and perhaps from rows that were looked up in one.
    data: bool = False

    @property
    def given(self) -> bool:
        """Whether it is an argument, or computed from arguments alone, without rounding."""
        return not (self.made or self.half)


NOTHING = Fact()


def join(facts: Sequence[Fact]) -> Fact:
    """Returns the facts that hold for a value computed from several."""
    if len(facts) < 2:
        return facts[0] if facts else NOTHING
    columns: Any = Fact._make(zip(*facts, strict=True))
    behind = [f.weights for f in facts if f.made] or columns.weights
    return Fact(
        half=any(columns.half),
        exact=any(columns.exact),
        span=max(columns.span),
        writes=max(columns.writes),
        scaled=any(columns.scaled),
        factor=max(columns.factor),
        norm=columns.norm[0] if len(set(columns.norm)) == 1 else "",
        counts=any(columns.counts),
        mask=all(columns.mask),
        spread=all(columns.spread),
        linear=any(columns.linear),
        negative=all(columns.negative),
        solved=any(columns.solved),
        made=union(columns.made),
        peak=union(columns.peak),
        chain=union(columns.chain),
        weights=union(behind),
        shifted=any(columns.shifted),
        offset=union(columns.offset),
        block=any(columns.block),
        level=union(columns.level),
        mean=union(columns.mean),
        centered=False,
        huge=any(columns.huge),
        data=all(columns.data),
    )


def union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def argument(bit: int, half: bool = False, linear: bool = False) -> Fact:
    """Returns the facts about an argument of the program with a given bit."""
    return Fact(half=half, span=FITS, linear=linear, weights=bit, data=not half)


class Want(NamedTuple):
    """The demands of a value's readers, where layout operations count as their own readers.

    The defaults are those of a value without readers.
    """

    readers: frozenset[object] = frozenset()  # the operations that read it
    full: bool = True  # every reader computes in float32
    half: bool = True  # every reader certainly computes in 16 bits
    needed: bool = False  # a reader would amplify a rounding error, or the value is returned
    amplified: bool = False  # a reader would amplify a rounding error
    phase: float = 0.0  # the largest factor by which an error enters a phase or a pole
    whole: bool = False  # a reader would notice a rounding between the last matmul and itself
    steep: bool = False  # the slope of a reader is unbounded near zero
    unrounded: bool = False  # a reader multiplies a state by it, so its distance from 1 matters
    beside: bool = False  # it is added to the result of a loop left unchanged
    outside: bool = False  # a reader computes in 16 bits
    kink: bool = False  # a relu or similar function reads it, outside of float32 operations
    returned: bool = False  # it is returned

    @property
    def held(self) -> bool:
        """Whether a reader would amplify or notice a rounding error."""
        return self.amplified or self.unrounded or self.whole


UNREAD = Want()


def both(first: Want, second: Want) -> Want:
    """Returns the joint demands of two readers."""
    return Want(
        readers=first.readers | second.readers,
        full=first.full and second.full,
        half=first.half and second.half,
        needed=first.needed or second.needed,
        amplified=first.amplified or second.amplified,
        phase=max(first.phase, second.phase),
        whole=first.whole or second.whole,
        steep=first.steep or second.steep,
        unrounded=first.unrounded or second.unrounded,
        beside=first.beside or second.beside,
        outside=first.outside or second.outside,
        kink=first.kink or second.kink,
        returned=first.returned or second.returned,
    )


def joined(wants: Iterable[Want]) -> Want:
    """Returns the joint demands of several readers."""
    return functools.reduce(both, wants, UNREAD)


# ---- the tables ---------------------------------------------------------------------------------


class Ruling(NamedTuple):
    """The rule of an operation."""

    rule: str = ""  # the rule by its primitive
    half: Any = None  # the 16-bit dtype that it uses if it computes in 16 bits
    forced: str = ""  # "half" or "full", whatever its operands are
    why: Why = NO_REASON  # the reason

    @property
    def in_force(self) -> str:
        """The rule that decides and evaluates it: the one that was forced on it, or its own."""
        return self.forced or self.rule

    def leaves_alone(self, op: Op) -> bool:
        """Returns whether it is float32 and runs as written although no one asked for that."""
        unknown = self.rule == "leave" and not self.forced and PLANNED not in op.scopes
        return self.rule == "written" or (unknown and op.has_float32)


NO_RULING = Ruling()


class Rulings(dict[Op, Ruling]):
    """The rule of each operation."""

    def __missing__(self, op: Op) -> Ruling:
        return NO_RULING


class Facts(dict[Value, Fact]):
    """The fact of each value; of a literal there is none."""

    def __missing__(self, value: Value) -> Fact:
        return NOTHING


# For the body of each loop, which of its arguments are stored in 16 bits.
Carries = dict[Block, tuple[bool, ...]]


class Wants(dict[Value, Want]):
    """The joint demand on each value, and that on the results of each loop in the last sweep."""

    def __init__(self) -> None:
        self.results: dict[Block, list[Want]] = {}

    def __missing__(self, value: Value) -> Want:
        return UNREAD


class Choice(NamedTuple):
    """The dtype of an operation."""

    compute: Any = None  # the dtype in which it reads float32 operands; None: as stored
    why: Why | None = None  # the reason, where its ruling does not say it
    sent_half: bool = False  # for a lookup in a parameter: devices may exchange it in 16 bits


NO_CHOICE = Choice()


class Choices(dict[Op, Choice]):
    """The choice for each operation."""

    def __missing__(self, op: Op) -> Choice:
        return NO_CHOICE


class Stored(NamedTuple):
    """How a value is stored."""

    kind: str = ""  # "half", "full", "flexible"; "" if it is not float32
    dtype: Any = None  # its storage dtype
    # It is made with a constant that 16 bits cannot represent: never rounded for storage.
    wide: bool = False
    lost: bool = False  # 16 bits would lose information of it (`facts`): not rounded either
    rounded: bool = False  # it is computed in float32, and stored in 16 bits


NOT_STORED = Stored()


class Storage(dict[Value, Stored]):
    """How each value is stored."""

    def __missing__(self, value: Value) -> Stored:
        return NOT_STORED


@dataclasses.dataclass(frozen=True)
class Marks:
    """What derivatives do differently, besides the steps that run."""

    # Ops whose operands derivatives may hold constant.
    steady: set[Op] = dataclasses.field(default_factory=set)
    # Ops whose result, or a view of it, is kept behind the barrier of a checkpoint.
    held: set[Op] = dataclasses.field(default_factory=set)
    # For a matmul, an operand and dimensions over which derivatives subtract its mean.
    centered: dict[Op, Place] = dataclasses.field(default_factory=dict)
    # For a gather that repeats entries: the axis, and how often.
    repeats: dict[Op, tuple[int, int]] = dataclasses.field(default_factory=dict)
    # For a maximum, the exponential whose sums it also returns; for such a sum, the same.
    online: dict[Op, str] = dataclasses.field(default_factory=dict)
    # For a matmul that reads a softmax: the fused kernel, or why there is none.
    attention: dict[Op, str] = dataclasses.field(default_factory=dict)
    # For the matmul of a loss's logits: its blocks, or why there are none.
    losses: dict[Op, str] = dataclasses.field(default_factory=dict)
    # For a float32 value of which the backward pass reads a 16-bit copy, its dtype.
    kept_as: dict[Value, Any] = dataclasses.field(default_factory=dict)
    # For an op that reads or computes other values than one of the program, that one.
    stands_for: dict[Op, Op] = dataclasses.field(default_factory=dict)

    def is_steady(self, op: Op) -> bool:
        """Returns whether derivatives hold the operands of an op constant."""
        return op.cancels or op in self.steady


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What the passes of a plan find out, as tables. A pass returns its own, and reads others."""

    # The rule of each operation: by `classify`. `facts` adds loops that are left as written, and
    # `demand` matmuls in float32.
    rulings: Rulings = dataclasses.field(default_factory=Rulings)
    # The results of reductions, and values computed from such results alone: by `classify`.
    # `decide` adds results of programs.
    small: set[Value] = dataclasses.field(default_factory=set)
    # The arguments of the program and of those inside it that arrive in float32.
    arguments: frozenset[Value] = frozenset()
    facts: Facts = dataclasses.field(default_factory=Facts)  # the fact of each value
    # Which arguments of loops are stored in 16 bits: by `facts`.
    carries: Carries = dataclasses.field(default_factory=dict)
    wants: Wants = dataclasses.field(default_factory=Wants)  # the demand on each value: by `demand`
    # The dtype of each operation: by `decide`. `store` leaves more of them in float32.
    choices: Choices = dataclasses.field(default_factory=Choices)
    # How each value is stored: by `decide`, and by `store` likewise.
    stored: Storage = dataclasses.field(default_factory=Storage)
    marks: Marks = dataclasses.field(default_factory=Marks)  # by `store`
    # In loops, the values that are the same in all iterations: by `store`.
    once: set[Value] = dataclasses.field(default_factory=set)
    # The steps that run each block, in order: by `store`.
    steps: dict[Block, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    # The values that `storage=lean` and `storage=8bit` keep for the backward pass, which computes
    # those around them again.
    kept: set[Value] = dataclasses.field(default_factory=set)
    # The kind of code of those that are kept in 8 bits.
    codes: dict[Value, str] = dataclasses.field(default_factory=dict)
    # The shapes of arrays whose layout convolutions choose: by `store`.
    convolved: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
    # The values that a backward pass which computes matmuls again keeps from then on.
    passing: set[Value] = dataclasses.field(default_factory=set)

    def is_beyond(self, value: Value, half: Any) -> bool:
        """Returns whether a value or its cotangents may leave the range of a 16-bit dtype.

        Cotangents of an operand near a pole (``1 / (x + 1e-6)``) grow as the operand shrinks, and
        the smallest numbers of float16 have few digits.
        """
        return half == FLOAT16 and (self.facts[value].span == BEYOND or self.wants[value].steep)

    def is_raw(self, value: Value) -> bool:
        """Returns whether a value is an argument or constant, perhaps after layout operations."""
        return value.constant or value in self.arguments

    def may_be_rounded(self, value: Value) -> bool:
        """Returns whether a value may be rounded to 16 bits without harm."""
        stored, held = self.stored[value], self.wants[value].held
        statistic = value in self.small or value.is_one
        return not (stored.wide or stored.lost or held or statistic)

    def why(self, op: Op) -> Why:
        """Returns the reason for the dtype of an operation."""
        return self.choices[op].why or self.rulings[op].why

    def half_of(self, block: Block) -> Any:
        """Returns the 16-bit dtype of a block's operations."""
        halves = (self.rulings[op].half for op in block.walk())
        return next((half for half in halves if half is not None), None)
