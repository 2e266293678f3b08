"""The bytes of values: as they are stored, and as the backward pass keeps them."""

from collections.abc import Iterable

from mpjax._src.autocast.tables import Analysis
from mpjax._src.base import _jax
from mpjax._src.base.coded import coded_bytes
from mpjax._src.program.graph import Value


def kept_bytes(analysis: Analysis, value: Value, kind: str | None = None) -> int:
    """Returns the bytes needed to keep a value in each iteration; 0 for an argument or constant."""
    if (
        value in analysis.once
        or analysis.is_raw(value)
        or value.const is not None
        or not _jax.is_array(value.aval)
    ):
        return 0
    return (
        coded_bytes(_jax.shard_shape(value.aval), kind) if kind else stored_bytes(analysis, value)
    )


def stored_bytes(analysis: Analysis, value: Value) -> int:
    """Returns the bytes of an array as it is stored, on one device."""
    stored = analysis.stored[value].dtype if value.is_f32 else None
    dtype = analysis.marks.kept_as.get(value, stored) or value.aval.dtype
    return _jax.size_of(_jax.shard_shape(value.aval)) * dtype.itemsize


def total_kept(analysis: Analysis, values: Iterable[Value]) -> int:
    """Returns the bytes needed to keep some values in each iteration, as they are stored."""
    return sum(kept_bytes(analysis, v) for v in values)
