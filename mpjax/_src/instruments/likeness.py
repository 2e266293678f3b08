"""Which values of two programs are the same numbers, however each program lays them out.

A value is known by its entries, in any order and shape: heads may be split or not, tokens come all
at once or one after the other, layers from a loop. What is compared are float32 runs, in which two
programs of the same formula differ by float32's rounding alone.
"""

import dataclasses

import numpy as np

# Entries that are looked for: the largest ones, which are far from each other.
SOUGHT = 64

# The share of these that has to be there; the rest may be of places that one program has alone.
FOUND = 0.95

# The same of values of as many entries, of which there are no such places.
EQUAL = 0.995

# Entries of masks, which say nothing.
MASK = 1e29


@dataclasses.dataclass(frozen=True)
class Pool:
    """The entries of a value, of all turns of the loops that it is in.

    Attributes:
        entries: Those that are neither zero nor of a mask, sorted, float32.
        largest: The `SOUGHT` of them that are largest.
        size: The root of their mean square.
    """

    entries: np.ndarray
    largest: np.ndarray
    size: float

    def __bool__(self) -> bool:
        return bool(len(self.entries))


def pool_of(arrays: list[np.ndarray]) -> Pool:
    """Returns the pool of the arrays that a value was."""
    entries = np.concatenate([np.ravel(x) for x in arrays]).astype(np.float32)
    entries = np.sort(entries[(entries != 0) & (np.abs(entries) < MASK)])  # NaN is left out too
    order = np.argsort(np.abs(entries), kind="stable")
    size = float(np.sqrt(np.mean(np.square(entries, dtype=np.float64)))) if len(entries) else 0.0
    return Pool(entries, entries[order[-SOUGHT:]], size)


def alike(first: Pool, second: Pool, tolerance: float) -> bool:
    """Tells whether two values are the same numbers, or one is a part of the other.

    Args:
        first: A value.
        second: Another one.
        tolerance: What entries may differ by, relative to the root of their mean square.
    """
    if not first or not second:
        return first.size == second.size
    few, many = sorted((first, second), key=lambda pool: len(pool.entries))
    room = tolerance * max(few.size, 1e-30)
    if len(few.entries) == len(many.entries):
        return bool(np.mean(np.abs(few.entries - many.entries) <= room) >= EQUAL)
    if np.abs(few.largest[-1]) > np.abs(many.largest[-1]) + room:
        return False
    at = np.searchsorted(many.entries, few.largest)
    near = np.stack([many.entries[np.clip(at + i, 0, len(many.entries) - 1)] for i in (-1, 0)])
    found = np.min(np.abs(near - few.largest), axis=0) <= room
    return bool(np.mean(found) >= FOUND)
