"""Reads the arrays of a checkpoint. Only this module imports tensorstore.

An array is read shard by shard as it was stored. Each shard is compared with its checksum, and what
the devices of this process need of it is copied. So no process reads a shard that it needs nothing
of, whichever meshes saved and restore.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax._src.checkpoint import checksums
from mpjax._src.checkpoint.checksums import Box
from mpjax._src.checkpoint.contents import is_held
from mpjax._src.checkpoint.fields import UNVERIFIED
from mpjax._src.checkpoint.packages import needed
from mpjax._src.checkpoint.paths import is_remote, reason
from mpjax._src.core.base.errors import CheckpointError

# How many shards are read at once.
AT_ONCE = 8
DAMAGED = "it is damaged, incomplete or has another format"


class Wanted(NamedTuple):
    """An array to read."""

    stored: Any  # the array of tensorstore
    sharding: Any  # its sharding here, or None for a NumPy array
    parts: dict[Box, np.ndarray]  # an array for each box that the devices of this process need
    shards: list[tuple[Box, str | None]]  # the boxes that are read, each with its checksum or None


def read(
    path: Any, table: Mapping[str, Any], shardings: Mapping[str, Any], sums: Mapping[str, Any]
) -> dict[str, Any]:
    """Reads arrays by their names; random keys as their data.

    Each has the dtype and shape in ``table``, and is compared with its checksum in ``sums``, if
    there is one. It is one of JAX if it has a sharding, and JAX supports its dtype.

    Raises:
        CheckpointError: If a file is damaged. The message names the array.
    """
    arrays = {}
    for name, stored in _opened(path, shardings).items():
        with _naming(path, name):
            _check(path, name, table[name], stored)
            arrays[name] = _wanted(stored, shardings[name], sums.get(name))
    # Shards that overlap with nothing here belong to other processes.
    jobs = [
        (name, box, checksum)
        for name, array in arrays.items()
        for box, checksum in array.shards
        if any(checksums.overlap(box, part) is not None for part in array.parts)
    ]

    def copy(job: tuple[str, Box, str | None]) -> None:
        name, box, checksum = job
        with _naming(path, name):
            piece = arrays[name].stored[checksums.slices(box)].read().result()
            if checksum is not None and checksums.of(piece) != checksum:
                raise CheckpointError(
                    f"{path}: the array {name!r} has a different checksum than when it was saved, "
                    f"in {[[*ends] for ends in box]}. Its files were damaged. {UNVERIFIED}"
                )
            _copy(piece, box, arrays[name].parts)

    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for _ in pool.map(copy, jobs):
            pass
    finally:
        pool.shutdown(cancel_futures=True)  # after an error, no further shard is read
    # One by one, so that an array's copy on the host is freed when the devices have theirs.
    return {name: _made(arrays.pop(name)) for name in [*arrays]}


def check_stored(path: Any, table: Mapping[str, Any]) -> None:
    """Compares the index of arrays that were written with what should be there; reads no values.

    Raises:
        CheckpointError: If an array, or one of its shards, is not there. The message names it.
    """
    opened = _opened(path, table)
    where = {"driver": "ocdbt", "base": _base(path)}
    keys = needed("tensorstore").KvStore.open(where).result().list().result()
    pieces = Counter(key.rpartition(b"/")[0] for key in keys)
    for name, stored in opened.items():
        with _naming(path, name):
            _check(path, name, table[name], stored)
            shape = stored.chunk_layout.write_chunk.shape or ()
            expected = math.prod(-(-n // part) for n, part in zip(stored.shape, shape, strict=True))
            found = pieces[stored.kvstore.path.removesuffix("/").encode()] - 1  # its metadata
            if found != expected:
                raise ValueError(f"{found} of its {expected} shards were stored")


def stored_as(entry: Mapping[str, Any]) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and dtype in which an array is stored, which is a random key's data."""
    if "key" not in entry:
        return tuple(entry["shape"]), np.dtype(entry["dtype"])
    data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=entry["key"])))
    return (*entry["shape"], *data.shape), data.dtype


def _opened(path: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Opens arrays of tensorstore."""
    tensorstore = needed("tensorstore")
    context = tensorstore.Context()  # its own, so that nothing is remembered of earlier reads
    # All are opened at the same time, because each waits for the storage.
    futures = {}
    for name in names:
        # Missing shards are errors. By default, tensorstore fills them with zeros.
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": _base(path), "path": name},
            "fill_missing_data_reads": False,
        }
        futures[name] = tensorstore.open(spec, context=context, open=True, read=True)
    opened = {}
    for name, future in futures.items():
        with _naming(path, name):
            opened[name] = future.result()
    return opened


def _base(path: Any) -> Any:
    text = f"{path}/"
    return text if is_remote(text) else {"driver": "file", "path": text}


@contextlib.contextmanager
def _naming(path: Any, name: str) -> Iterator[None]:
    """Names the array in an error of tensorstore, which raises many classes on damaged files."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: the array {name!r} cannot be read: {DAMAGED}. {reason(error)}"
        ) from error


def _check(path: Any, name: str, entry: Mapping[str, Any], stored: Any) -> None:
    shape, dtype = tuple(stored.shape), stored.dtype.numpy_dtype
    expected = stored_as(entry)
    if (shape, dtype) != expected:
        raise CheckpointError(
            f"{path}: the array {name!r} is {dtype}{shape}, but should be "
            f"{expected[1]}{expected[0]}. Its files are damaged, or belong to another checkpoint."
        )


def _wanted(stored: Any, sharding: Any, sums: Any) -> Wanted:
    shape, dtype = tuple(stored.shape), stored.dtype.numpy_dtype
    boxes = [checksums.whole(shape)]
    if not is_held(dtype):
        sharding = None
    if sharding is not None:
        indices = sharding.addressable_devices_indices_map(shape).values()
        boxes = [checksums.box_of(index, shape) for index in indices]
    parts = {box: np.empty([stop - start for start, stop in box], dtype) for box in boxes}
    if sums is None:
        return Wanted(stored, sharding, parts, [(box, None) for box in parts])
    shards = [(tuple((start, stop) for start, stop in box), number) for box, number in sums]
    for part in parts:
        common = (checksums.overlap(part, box) for box, _ in shards)
        # Shards do not overlap, so only if none is missing do their sizes add up to the part's.
        if sum(_size(box) for box in common if box is not None) != _size(part):
            raise ValueError("its checksums are not those of the whole array")
    return Wanted(stored, sharding, parts, shards)


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _copy(piece: np.ndarray, box: Box, parts: dict[Box, np.ndarray]) -> None:
    """Copies a shard that was read to where it is needed, or puts it there if it is all of it."""
    for part in parts:
        common = checksums.overlap(part, box)
        if part == box:
            parts[part] = piece
        elif common is not None:
            source = piece[checksums.slices(common, box)]
            parts[part][checksums.slices(common, part)] = source


def _made(array: Wanted) -> Any:
    if array.sharding is None:
        (part,) = array.parts.values()
        return part
    shape = tuple(array.stored.shape)
    return jax.make_array_from_callback(
        shape, array.sharding, lambda index: array.parts[checksums.box_of(index, shape)]
    )
