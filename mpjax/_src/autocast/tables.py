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
    """The facts about a value.

    Attributes:
        half: It comes from a 16-bit operation, perhaps through elementwise operations.
        exact: Rounding it for storage would lose information.
        span: Its size: BOUNDED, FITS or BEYOND.
        writes: The number of roundings of a state that it would contain if each sum were stored in
            16 bits.
        scaled: It may be small compared with the value that it is added to.
        factor: The product of the known factors below 1 since the last matmul.
        norm: "scale" if it is the reciprocal of a size, "unit" if it was multiplied by one.
        counts: It contains integers of more than 8 bits as floats, which 16 bits would merge.
        mask: It contains only zeros and ones.
        spread: It is a broadcast argument.
        linear: It depends on a tangent of the planned program.
        made: The matmuls, sums and loop carries that it is computed from, as a bit mask. Empty for
            arguments and values computed from arguments alone.
        chain: The members of ``made`` of which it is the latest state.
        peak: The values whose largest entry it is, as a bit mask.
        negative: It is at most zero, because its largest entry was subtracted.
        solved: It is the result of a loop left unchanged, up to sums and constant factors.
        weights: The arguments that the matmuls before it multiplied by, as a bit mask.
        shifted: Since the last matmul, a constant or an argument was added to it or multiplied it.
        offset: The signs with which constants and arguments were added to it since the last
            matmul: a bit mask of ADDED and SUBTRACTED.
        block: Since the last matmul, a residual block was added to it.
        level: The axes along which a term of it is constant, as a bit mask.
        mean: The values whose mean it is, as a bit mask.
        centered: It is an array minus its mean, which subtracts such a term.
        huge: Some of its entries are, or contain, a constant beyond the range of float16.
        data: It is computed from arguments alone, and perhaps from rows that were looked up in one.
    """

    half: bool = False
    exact: bool = False
    span: int = BOUNDED
    writes: int = 0
    scaled: bool = False
    factor: float = 1.0
    norm: str = ""
    counts: bool = False
    mask: bool = False
    spread: bool = False
    linear: bool = False
    negative: bool = False
    solved: bool = False
    made: int = 0
    peak: int = 0
    chain: int = 0
    weights: int = 0
    shifted: bool = False
    offset: int = 0
    block: bool = False
    level: int = 0
    mean: int = 0
    centered: bool = False
    huge: bool = False
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

    Attributes:
        readers: The operations that read it.
        full: Every reader computes in float32.
        half: Every reader certainly computes in 16 bits.
        needed: A reader would amplify a rounding error, or the value is returned.
        amplified: A reader would amplify a rounding error.
        phase: The largest factor by which an error enters a phase or a pole.
        whole: A reader would notice a rounding between the last matmul and itself.
        steep: The slope of a reader is unbounded near zero.
        unrounded: A reader multiplies a state by it, so its distance from 1 matters.
        beside: It is added to the result of a loop left unchanged.
        outside: A reader computes in 16 bits.
        kink: A relu or similar function reads it, outside of float32 operations.
        returned: It is returned.
    """

    readers: frozenset[object] = frozenset()
    full: bool = True
    half: bool = True
    needed: bool = False
    amplified: bool = False
    phase: float = 0.0
    whole: bool = False
    steep: bool = False
    unrounded: bool = False
    beside: bool = False
    outside: bool = False
    kink: bool = False
    returned: bool = False

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
    """The rule of an operation.

    Attributes:
        rule: The rule by its primitive.
        half: The 16-bit dtype that it uses if it computes in 16 bits.
        forced: "half" or "full", whatever its operands are.
        why: The reason.
    """

    rule: str = ""
    half: Any = None
    forced: str = ""
    why: Why = NO_REASON

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
    """The dtype of an operation.

    Attributes:
        compute: The dtype in which it reads float32 operands; None: as stored.
        why: The reason, where its ruling does not say it.
        sent_half: For a lookup in a parameter: devices may exchange it in 16 bits.
    """

    compute: Any = None
    why: Why | None = None
    sent_half: bool = False


NO_CHOICE = Choice()


class Choices(dict[Op, Choice]):
    """The choice for each operation."""

    def __missing__(self, op: Op) -> Choice:
        return NO_CHOICE


class Stored(NamedTuple):
    """How a value is stored.

    Attributes:
        kind: "half", "full", "flexible"; "" if it is not float32.
        dtype: Its storage dtype.
        wide: It is made with a constant that 16 bits cannot represent: never rounded for storage.
        lost: 16 bits would lose information of it (`facts`): not rounded either.
        rounded: It is computed in float32, and stored in 16 bits.
    """

    kind: str = ""
    dtype: Any = None
    wide: bool = False
    lost: bool = False
    rounded: bool = False


NOT_STORED = Stored()


class Storage(dict[Value, Stored]):
    """How each value is stored."""

    def __missing__(self, value: Value) -> Stored:
        return NOT_STORED


@dataclasses.dataclass(frozen=True)
class Marks:
    """What derivatives do differently, besides the steps that run.

    Attributes:
        steady: Ops whose operands derivatives may hold constant.
        centered: For a matmul, an operand and dimensions over which derivatives subtract its mean.
        repeats: For a gather that repeats entries: the axis, and how often.
        online: For a maximum, the exponential whose sums it also returns; for such a sum, the same.
        attention: For a matmul that reads a softmax: the fused kernel, or why there is none.
        losses: For the matmul of a loss's logits: its blocks, or why there are none.
        kept_as: For a float32 value of which the backward pass reads a 16-bit copy, its dtype.
        stands_for: For an op that reads or computes other values than one of the program, that one.
    """

    steady: set[Op] = dataclasses.field(default_factory=set)
    centered: dict[Op, Place] = dataclasses.field(default_factory=dict)
    repeats: dict[Op, tuple[int, int]] = dataclasses.field(default_factory=dict)
    online: dict[Op, str] = dataclasses.field(default_factory=dict)
    attention: dict[Op, str] = dataclasses.field(default_factory=dict)
    losses: dict[Op, str] = dataclasses.field(default_factory=dict)
    kept_as: dict[Value, Any] = dataclasses.field(default_factory=dict)
    stands_for: dict[Op, Op] = dataclasses.field(default_factory=dict)

    def is_steady(self, op: Op) -> bool:
        """Returns whether derivatives hold the operands of an op constant."""
        return op.cancels or op in self.steady


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What the passes of a plan find out, as tables. A pass returns its own, and reads others.

    Attributes:
        rulings: The rule of each operation: by `classify`. `facts` adds loops that are left as
            written, and `demand` matmuls in float32.
        small: The results of reductions, and values computed from such results alone: by
            `classify`. `decide` adds results of programs.
        arguments: The arguments of the program and of those inside it that arrive in float32.
        facts: The fact of each value.
        carries: Which arguments of loops are stored in 16 bits: by `facts`.
        wants: The demand on each value: by `demand`.
        choices: The dtype of each operation: by `decide`. `store` leaves more of them in float32.
        stored: How each value is stored: by `decide`, and by `store` likewise.
        marks: By `store`.
        once: In loops, the values that are the same in all iterations: by `store`.
        steps: The steps that run each block, in order: by `store`.
        kept: The values that `storage=lean` and `storage=8bit` keep for the backward pass, which
            computes those around them again.
        codes: The kind of code of those that are kept in 8 bits.
        convolved: The shapes of arrays whose layout convolutions choose: by `store`.
        passing: The values that a backward pass which computes matmuls again keeps from then on.
    """

    rulings: Rulings = dataclasses.field(default_factory=Rulings)
    small: set[Value] = dataclasses.field(default_factory=set)
    arguments: frozenset[Value] = frozenset()
    facts: Facts = dataclasses.field(default_factory=Facts)
    carries: Carries = dataclasses.field(default_factory=dict)
    wants: Wants = dataclasses.field(default_factory=Wants)
    choices: Choices = dataclasses.field(default_factory=Choices)
    stored: Storage = dataclasses.field(default_factory=Storage)
    marks: Marks = dataclasses.field(default_factory=Marks)
    once: set[Value] = dataclasses.field(default_factory=set)
    steps: dict[Block, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    kept: set[Value] = dataclasses.field(default_factory=set)
    codes: dict[Value, str] = dataclasses.field(default_factory=dict)
    convolved: set[tuple[int, ...]] = dataclasses.field(default_factory=set)
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
