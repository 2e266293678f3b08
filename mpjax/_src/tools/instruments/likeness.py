"""Finds values of two programs that are the same numbers, in whatever layout.

Values are compared by their entries, in any order and shape: heads may be split or not, tokens may
come all at once or one by one, layers may come from a loop. The values are those of float32 runs,
in which two programs of the same formula differ only by float32 rounding.
"""

import dataclasses

import numpy as np

# How many entries are searched for: the largest ones, which are far apart.
SOUGHT = 64

# The share of these that must be found; the rest may be positions that only one program has.
FOUND = 0.95

# The same for values with equal numbers of entries, which have no such positions.
EQUAL = 0.995

# Larger entries belong to masks, and are ignored.
MASK = 1e29


@dataclasses.dataclass(frozen=True)
class Pool:
    """The entries of a value, from all iterations of the loops around it."""

    entries: np.ndarray  # the entries that are neither zero nor part of a mask, sorted, float32
    largest: np.ndarray  # the `SOUGHT` largest of them
    size: float  # the root mean square of the entries

    def __bool__(self) -> bool:
        return bool(len(self.entries))


def pool_of(arrays: list[np.ndarray]) -> Pool:
    """Returns the pool of all arrays of a value."""
    entries = np.concatenate([np.ravel(x) for x in arrays]).astype(np.float32)
    entries = np.sort(entries[(entries != 0) & (np.abs(entries) < MASK)])  # NaN is left out too
    order = np.argsort(np.abs(entries), kind="stable")
    size = float(np.sqrt(np.mean(np.square(entries, dtype=np.float64)))) if len(entries) else 0.0
    return Pool(entries, entries[order[-SOUGHT:]], size)


def alike(first: Pool, second: Pool, tolerance: float) -> bool:
    """Returns whether two values are the same numbers, or one is a part of the other.

    Entries may differ by the tolerance, relative to their root mean square.
    """
    if not first or not second:
        return first.size == second.size
    few, many = sorted((first, second), key=lambda pool: len(pool.entries))
    room = tolerance * max(few.size, 1e-30)
    if len(few.entries) == len(many.entries):
        return bool(np.mean(np.abs(few.entries - many.entries) <= room) >= EQUAL)
    # A part has no larger entry than the whole.
    if np.abs(few.largest[-1]) > np.abs(many.largest[-1]) + room:
        return False
    # The nearest entry is on one of the two sides of where an entry would be inserted.
    at = np.searchsorted(many.entries, few.largest)
    near = np.stack([many.entries[np.clip(at + i, 0, len(many.entries) - 1)] for i in (-1, 0)])
    matches = np.min(np.abs(near - few.largest), axis=0) <= room
    return bool(np.mean(matches) >= FOUND)
