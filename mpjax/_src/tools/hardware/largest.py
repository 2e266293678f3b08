"""The largest number that fits a memory, such as a batch, with few measurements.

The memory of a program grows nearly linearly with its batch. So the answer is where a line through
two sizes reaches what is available, and a third size shows whether there is a line: where its
deviation is less than what the next number is predicted to lack, the next one is not measured.
Elsewhere (padding, other layouts, attention, parts that a compiler computes again) lines say where
to look between the largest number that fits and the smallest that does not, and middles are taken
where they do not help.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

# The second number is at least so many times the first one, and no number is further beyond what is
# known to fit: what is far too large takes long to compile.
NEAR, FAR = 8, 64

# Memory counts as linear if lines predict all sizes within this share of what is available. Those
# through the program of a single example, which is another one, do so within 3% for GPUs.
STRAIGHT = 0.05

Sizes = dict[float, float]  # by number


class Found(NamedTuple):
    """The result of a search. What fits was measured.

    If ``predicted`` is false, so was the next number, which does not fit: where memory grows with
    the number, nothing is missed. If it is true, the next number is predicted not to fit by more
    than the measured sizes deviate from a line: it fits only if it deviates more than they do.
    """

    most: int  # the largest number that fits; 0 if none does
    next_size: float | None  # of the next number; None if all up to the limit fit
    predicted: bool
    linear: bool  # whether lines through two sizes predicted the others


class Line(NamedTuple):
    """A line through the sizes of two numbers."""

    at: float
    size: float
    slope: float

    def size_of(self, number: float) -> float:
        return self.size + self.slope * (number - self.at)

    def number_of(self, size: float) -> float:
        return self.at + (size - self.size) / self.slope


def largest(
    measure: Callable[[int], float],
    available: float,
    limit: int,
    sizes: Sizes | None = None,
    proven: bool = False,
) -> Found:
    """Returns the largest number from 1 to ``limit`` whose size is available.

    ``measure`` returns a size, infinite if it is not known but too large. ``sizes`` has those that
    are known before, by number, and gets the others. With ``proven``, nothing is predicted.
    """
    sizes = {} if sizes is None else sizes
    stride, lined, width, off = 1, False, math.inf, 0.0
    while True:
        low = int(max((n for n, size in sizes.items() if size <= available), default=0))
        high = min((n for n in sizes if n > low), default=limit + 1)
        last, linear = math.ceil(high) - 1, off <= STRAIGHT * available
        if low >= last:
            return Found(low, sizes.get(high), False, linear)
        beyond, error = _next(sizes, low)
        if not proven and beyond - error > available:
            return Found(low, beyond, True, linear)
        line = _line(sizes, available, low, high)
        guess = line.number_of(available) if line else _jump(sizes, available, low, high)
        if high in sizes:
            # After a line that did not halve what is between, a middle.
            lined = not lined or 2 * (high - low) <= width
            guess, width = guess if lined else _middle(low, high), high - low
        elif guess < low + stride:  # not linear: steps, say, one of which is reached
            guess, stride = low + stride, 2 * stride
        else:
            guess = min(guess, FAR * max(low, 1))
        number = min(max(int(guess), low + 1), last)
        sizes[number] = measure(number)
        if line and sizes[number] < math.inf:
            off = max(off, abs(sizes[number] - line.size_of(number)))


# ---- inside --------------------------------------------------------------------------------------


def _finite(sizes: Sizes, order: Callable[[float], float]) -> list[float]:
    """Returns the numbers whose sizes are known, in order."""
    return sorted((n for n, size in sizes.items() if size < math.inf), key=order)


def _line(sizes: Sizes, available: float, low: int, high: float) -> Line | None:
    """Returns a rising line through two sizes near to what is available, if there is one."""
    if high in sizes:
        near = _finite(sizes, lambda n: abs(sizes[n] - available))
    else:  # beyond all sizes, two numbers that are close to each other say too little
        near = [low, *(n for n in _finite(sizes, lambda n: -n) if 8 * n <= 7 * low)]
    lines = (_through(sizes, near[0], other) for other in near[1:])
    return next((line for line in lines if line.slope > 0), None)


def _jump(sizes: Sizes, available: float, low: int, high: float) -> float:
    """Returns a number to try where there is no line."""
    if not sizes:
        return 1
    if high not in sizes:  # the constant part is unknown, without which this is too little
        return low * min(max(available / sizes[low] if sizes[low] else FAR, NEAR), FAR)
    return high * available / sizes[high] if not low and sizes[high] else _middle(low, high)


def _middle(low: int, high: float) -> float:
    """Returns a number between two, as many times the one as the other is times it."""
    return math.sqrt(max(low, 1) * high)


def _next(sizes: Sizes, low: int) -> tuple[float, float]:
    """Returns the size that is expected of the next number, and how far sizes are from a line."""
    near = _finite(sizes, lambda n: abs(n - low))
    if low not in sizes or len(near) < 3:
        return 0.0, math.inf
    line = _through(sizes, low, near[1])
    return line.size_of(low + 1), max(abs(sizes[n] - line.size_of(n)) for n in near[2:])


def _through(sizes: Sizes, one: float, other: float) -> Line:
    return Line(one, sizes[one], (sizes[other] - sizes[one]) / (other - one))
