"""Reads the arrays of a checkpoint. Only this module imports tensorstore.

An array is read shard by shard as it was stored. Each shard is compared with its checksum, and what
the devices of this process need of it is copied. So no process reads a shard that it needs nothing
of, whichever meshes saved and restore.
"""

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.checkpoint import checksums
from mpjax._src.checkpoint.checksums import Box
from mpjax._src.checkpoint.contents import is_held
from mpjax._src.checkpoint.fields import DAMAGED, UNVERIFIED
from mpjax._src.checkpoint.match import held
from mpjax._src.checkpoint.packages import needed
from mpjax._src.checkpoint.paths import is_remote, worded
from mpjax._src.core.base.errors import CheckpointError


def read(
    path: Any, about: dict[str, Any], shardings: Mapping[str, Any], verify: bool
) -> dict[str, Any]:
    """Reads leaves by their paths, in the dtypes they were saved in.

    ``shardings`` has None for an array that is not committed to a device. The arrays are of JAX, or
    of NumPy if JAX does not support the dtype. ``verify`` compares them with their checksums, if
    the description ``about`` has them.

    Raises:
        CheckpointError: If a file is damaged. The message names the array.
    """
    table, sums = about["leaves"], about.get(checksums.ARRAYS, {}) if verify else {}
    started = {}
    for name, stored in _opened(path, table, shardings).items():
        with _naming(path, name):
            sharding = shardings[name] if is_held(stored.dtype.numpy_dtype) else None
            shards = _shards(stored.shape, sharding, sums.get(name))
            # All at the same time: tensorstore has threads of its own.
            reads = {box: (stored[checksums.slices(box)].read(), shards[box]) for box in shards}
            started[name] = stored.shape, sharding, reads
    arrays = {}
    # One by one, so that an array's copy on the host is freed when the devices have theirs.
    for name in shardings:
        entry = table[name]
        if name in started:
            with _naming(path, name):
                array = _joined(f"{path}: the array {name!r}", *started.pop(name))
        else:
            array = np.zeros(*stored_as(entry))
        if "key" in entry:
            array = jax.random.wrap_key_data(jnp.array(array), impl=entry["key"])
        arrays[name] = held(array)
    return arrays


def check_stored(path: Any, table: Mapping[str, Any]) -> None:
    """Compares the index of arrays that were written with what should be there; reads no values.

    Raises:
        CheckpointError: If an array, or one of its shards, is not there. The message names it.
    """
    opened = _opened(path, table, table)
    if not opened:
        return
    where = {"driver": "ocdbt", "base": _base(path)}
    keys = needed("tensorstore").KvStore.open(where).result().list().result()
    pieces = Counter(key.rpartition(b"/")[0] for key in keys)
    for name, stored in opened.items():
        with _naming(path, name):
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


def _opened(path: Any, table: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Opens arrays of tensorstore, and compares their shapes and dtypes with those in a table.

    Empty arrays are not written: their shape is all of them.
    """
    tensorstore = needed("tensorstore")
    context = tensorstore.Context()  # its own, so that nothing is remembered of earlier reads
    # All are opened at the same time, because each waits for the storage.
    futures = {}
    for name in names:
        if 0 in table[name]["shape"]:
            continue
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
            stored = opened[name] = future.result()
            found, expected = (stored.shape, stored.dtype.numpy_dtype), stored_as(table[name])
            if found != expected:
                raise CheckpointError(
                    f"{path}: the array {name!r} is {found[1]}{found[0]}, but should be "
                    f"{expected[1]}{expected[0]}. Its files are damaged, or belong to another "
                    "checkpoint."
                )
    return opened


def _base(path: Any) -> Any:
    text = f"{path}/"
    return text if is_remote(text) else {"driver": "file", "path": text}


def _naming(path: Any, name: str) -> contextlib.AbstractContextManager[None]:
    """Names the array in an error of tensorstore, which raises many classes on damaged files."""
    return worded(f"{path}: the array {name!r} cannot be read: {DAMAGED}. ")


def _shards(shape: tuple[int, ...], sharding: Any, sums: Any) -> dict[Box, str | None]:
    """Returns the boxes that this process has to read of an array, each with its checksum or None.

    Shards that overlap with nothing here belong to other processes.
    """
    parts = {checksums.whole(shape)}
    if sharding is not None:
        indices = sharding.addressable_devices_indices_map(shape).values()
        parts = {checksums.box_of(index, shape) for index in indices}
    if sums is None:
        return dict.fromkeys(parts)
    shards = {tuple((start, stop) for start, stop in box): number for box, number in sums}
    for part in parts:
        common = (checksums.overlap(part, box) for box in shards)
        # Shards do not overlap, so only if none is missing do their sizes add up to the part's.
        if sum(_size(box) for box in common if box is not None) != _size(part):
            raise ValueError("its checksums are not those of the whole array")
    return {
        box: number
        for box, number in shards.items()
        if any(checksums.overlap(box, part) is not None for part in parts)
    }


def _size(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _joined(what: str, shape: tuple[int, ...], sharding: Any, reads: Mapping[Box, Any]) -> Any:
    """Waits for the shards of an array, compares them with their checksums, and joins them."""
    pieces = {}
    for box, (future, checksum) in reads.items():
        piece = pieces[box] = future.result()
        if checksum is not None and checksum != checksums.of(piece):
            raise CheckpointError(
                f"{what} has a different checksum than when it was saved, in "
                f"{[[*ends] for ends in box]}. Its files were damaged. {UNVERIFIED}"
            )

    @functools.cache  # several devices may have the same part
    def part_of(box: Box) -> np.ndarray:
        if box in pieces:
            return pieces[box]
        part = np.empty([stop - start for start, stop in box], next(iter(pieces.values())).dtype)
        for other, piece in pieces.items():
            common = checksums.overlap(box, other)
            if common is not None:
                part[checksums.slices(common, box)] = piece[checksums.slices(common, other)]
        return part

    if sharding is None:
        return part_of(checksums.whole(shape))
    return jax.make_array_from_callback(
        shape, sharding, lambda index: part_of(checksums.box_of(index, shape))
    )
