"""The reasons for the dtype of each operation, as data. `explain` puts them into words."""

import enum
from typing import Any, NamedTuple


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
    CONSTANT = enum.auto()  # (the constant, the half dtype)
    OF_CONSTANTS = enum.auto()  # (the half dtype)
    INTEGERS = enum.auto()
    POSITIONS = enum.auto()  # (the half dtype)
    SPECIAL = enum.auto()
    FLATTENS = enum.auto()
    # The operations that read it.
    FULL_READERS = enum.auto()
    WIDE_RESULT = enum.auto()
    AMPLIFIED = enum.auto()
    SHORT_SUM = enum.auto()
    SELECTS = enum.auto()
    SOLUTION = enum.auto()
    # Information that half would lose.
    LOST = enum.auto()
    ENDS_LOOP = enum.auto()
    REPEATS_LOOP = enum.auto()
    REPLAYS_LOOP = enum.auto()
    WITHIN = enum.auto()  # (the primitive of what is left as written around it, its line)


class Why(NamedTuple):
    """A reason, and the data that its wording needs."""

    reason: Reason
    about: tuple[Any, ...] = ()


def why(reason: Reason, *about: Any) -> Why:
    """Returns a reason with its data."""
    return Why(reason, about)


NO_REASON = why(Reason.NO_FLOAT32)
