"""What a plan knows of a value, as elements of small lattices: joined where ways meet."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

# span: no larger than about 1; of ordinary size; perhaps beyond the range of float16.
BOUNDED, FITS, BEYOND = range(3)


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        half: It comes from a half operation, through elementwise ones at most.
        exact: A rounding for storage would lose what matters of it.
        span: How large it may be.
        writes: How many roundings of a state it would hold, if each sum were stored in half.
        scaled: It may be small beside what it is added to.
        factor: The product of the known factors that made it smaller since the last matmul.
        norm: "scale" if it is one over a size, "unit" if it was multiplied by such.
        counts: Integers of more than 8 bits, made floats: half would merge them.
        mask: Zeros and ones.
        spread: An argument that was broadcast.
        linear: It depends on a tangent of the program that is planned.
        made: The matmuls, sums and loop carries that it is computed from, as a bit mask; an
            argument, or computed from arguments alone, if there are none.
        chain: Of those, the ones that it is the latest state of.
        peak: The values that it is the largest entry of, as a bit mask.
        negative: At most zero, for its largest entry was subtracted.
        solved: A loop that was left alone gave it, up to sums and constant factors.
        weights: The arguments that the matmuls behind it multiplied by, as a bit mask.
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

    @property
    def given(self) -> bool:
        """Whether it is an argument, or computed from arguments alone, that nobody has rounded."""
        return not (self.made or self.half)


NOTHING = Fact()


def join(facts: Sequence[Fact]) -> Fact:
    """Returns what is known of a value that comes from several."""
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
    )


def union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def argument(bit: int, half: bool = False, linear: bool = False) -> Fact:
    """Returns what is known of an argument of the program, whose bit is given."""
    return Fact(half=half, span=FITS, linear=linear, weights=bit)


class Want(NamedTuple):
    """What the readers of a value want of it, layout operations looked through.

    As it stands, of a value that nobody reads.

    Attributes:
        readers: Who reads it.
        full: Every reader computes in float32.
        half: Every reader certainly computes in half.
        needed: Some reader would amplify a rounding error, or hands the value out.
        amplified: Some reader would amplify a rounding error.
        phase: The largest factor by which an error enters a phase or a pole.
        whole: Some reader would see a rounding between the last matmul and itself.
        steep: The slope of some reader grows without bound towards zero.
        unrounded: Some reader multiplies a state by it: what it lacks of one counts.
        beside: It is added to what a loop that was left alone gave.
        outside: Some reader computes in half.
        kink: A relu or the like reads it, outside of float32 operations.
        returned: It is handed out.
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


UNREAD = Want()


def both(first: Want, second: Want) -> Want:
    """Returns what two readers want."""
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
    """Returns what several readers want."""
    return functools.reduce(both, wants, UNREAD)
