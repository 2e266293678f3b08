"""Checksums of arrays, one for each stored shard, and of the description. Only this imports xxhash.

A shard is known by its box: the first and last index of each axis. On another mesh, a restore reads
whole shards of the mesh that saved, because only these have checksums; a shard is stored as one
compressed piece, so no smaller part of it could be read anyway.
"""

import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mpjax._src.checkpoint.packages import needed

# The names of the checksums in the description.
ARRAYS, ABOUT = "checksums", "checksum"

# For each axis, the first index and the one after the last.
Box = tuple[tuple[int, int], ...]


def of_arrays(arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the checksums of the shards of each array, as plain data: lists of (box, checksum).

    Each process reads the shards that it writes. Under a distributed program, all processes call
    this at the same time, and all get the checksums of all shards.
    """
    rows: list[tuple[str, Box, int]] = []
    for name, array in arrays.items():
        rows += [(name, box, number) for box, number in _numbers(array).items()]
    values = _summed([value for _, _, value in rows])
    sums: dict[str, list[Any]] = {name: [] for name in arrays}
    for (name, box, _), value in zip(rows, values, strict=True):
        sums[name].append([[[*ends] for ends in box], f"{value:016x}"])
    return sums


def of(array: np.ndarray) -> str:
    """Returns the checksum of an array's bytes."""
    return f"{_number(array):016x}"


def of_about(about: Mapping[str, Any]) -> str:
    """Returns the checksum of a description as it is read back, without that checksum itself."""
    rest = {name: value for name, value in about.items() if name != ABOUT}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return needed("xxhash").xxh3_64_hexdigest(text.encode())


def whole(shape: tuple[int, ...]) -> Box:
    """Returns the box of a whole array."""
    return tuple((0, n) for n in shape)


def box_of(index: Any, shape: tuple[int, ...]) -> Box:
    """Returns the box of an index, which consists of slices without steps."""
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """Returns the box that two boxes have in common, or None."""
    common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return common if all(a < b for a, b in common) else None


def slices(box: Box, within: Box | None = None) -> tuple[slice, ...]:
    """Returns the index of a box, in the whole array or in the array of another box."""
    starts = [0] * len(box) if within is None else [start for start, _ in within]
    return tuple(slice(a - o, b - o) for (a, b), o in zip(box, starts, strict=True))


def _number(array: np.ndarray) -> int:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return needed("xxhash").xxh3_64_intdigest(flat)


def _numbers(array: Any) -> dict[Box, int]:
    """Returns the checksums of all shards of an array, in an order that all processes have.

    That of a shard that another process writes is 0.
    """
    if not isinstance(array, jax.Array):
        return {whole(array.shape): _number(array) if jax.process_index() == 0 else 0}
    indices = array.sharding.devices_indices_map(array.shape).values()
    numbers = dict.fromkeys(sorted(box_of(index, array.shape) for index in indices), 0)
    shards = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    for shard in shards:
        shard.data.copy_to_host_async()
    for shard in shards:
        # The copy on the host stays with the shard, and orbax writes the same one.
        numbers[box_of(shard.index, array.shape)] = _number(np.asarray(shard.data))
    return numbers


def _summed(values: list[int]) -> list[int]:
    """Returns the sums of numbers over all processes; only one process has each that is not 0."""
    if jax.process_count() == 1 or not values:
        return values
    from jax.experimental import multihost_utils

    # JAX would gather 64 bits as 32, unless x64 is enabled.
    halves = multihost_utils.process_allgather(np.array(values, np.uint64).view(np.uint32))
    return np.asarray(halves).sum(0, dtype=np.uint32).view(np.uint64).tolist()
