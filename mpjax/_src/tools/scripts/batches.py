"""The axis of a batch among the arguments of a step, and the step for other batches.

What a step gets and does not return is its data. Their axis is found by trying: a batch of another
size has to trace, and has to reach the differentiated function.
"""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.trees import is_key
from mpjax._src.tools.instruments.explain import matmul_flops
from mpjax._src.tools.scripts.steps import Call, Noting

SIZES = 4  # how many sizes are tried along an axis
# How many divisors of a size are tried, for what sizes have to be multiples of.
TRIES = 6
GROWTH = 1.5  # of the matmuls' FLOPs, at least, where a batch doubles
LINEAR = 2.001  # at most, if its axis is not the first one


class Batch(NamedTuple):
    """The batch of a step."""

    size: int
    axes: dict[int, int]  # the axis of the batch in each array that has it, by its number
    multiple_of: int  # which sizes the step takes

    def arrays(self, call: Call, size: int) -> list[Any]:
        """Returns the arrays of a call for a batch of another size, abstract."""
        return [
            _resized(x, self.axes.get(i), size) if i in self.axes else _shape_of(x)
            for i, x in enumerate(call.flat.arrays)
        ]


def batch_of(call: Call, noting: Noting, results: Sequence[Any], flops: float) -> Batch | None:
    """Returns the batch of a step, or None if none is found.

    Args:
        call: A call of the step.
        noting: What it differentiates.
        results: The abstract values of the step's results.
        flops: The FLOPs of its matmuls.
    """
    for size, axes in _candidates(call.flat.arrays, results):
        batch = Batch(size, axes, size)
        if _reaches_loss(call, noting, batch, flops):
            return batch._replace(multiple_of=_multiple(call, batch))
    return None


# ---- inside --------------------------------------------------------------------------------------


def _shape_of(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_sharding(x))


def _resized(x: Any, axis: int | None, size: int) -> Any:
    assert axis is not None
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=_sharding(x))


def _sharding(x: Any) -> Any:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, jax.sharding.NamedSharding) else None


def _candidates(
    arrays: Sequence[Any], results: Sequence[Any]
) -> Iterator[tuple[int, dict[int, int]]]:
    """Yields sizes, each with the arrays that may have an axis of a batch of this size."""
    data = _data(arrays, results)
    # An array of the shape of a result may be data too.
    for among in (data, [i for i, x in enumerate(arrays) if not is_key(x)]):
        for axis in (0, 1):
            sizes: collections.Counter[int] = collections.Counter()
            for i in among:
                if np.ndim(arrays[i]) > axis and arrays[i].shape[axis] > 1:
                    sizes[arrays[i].shape[axis]] += 1
            for size, _ in sizes.most_common(SIZES):
                of_size = [i for i in among if np.ndim(arrays[i]) > axis]
                of_size = [i for i in of_size if arrays[i].shape[axis] == size]
                if among is data or not {*of_size} <= {*data}:
                    yield size, dict.fromkeys(of_size, axis)


def _data(arrays: Sequence[Any], results: Sequence[Any]) -> list[int]:
    """Returns the numbers of the arrays that a step does not return with new values."""
    left = collections.Counter(
        (tuple(r.shape), np.dtype(r.dtype).name) for r in results if not is_key(r)
    )
    data = []
    for i, x in enumerate(arrays):
        if is_key(x):
            continue
        kind = tuple(x.shape), np.dtype(x.dtype).name
        if left[kind]:
            left[kind] -= 1
        elif x.ndim and not (kind[1] == "uint32" and x.shape[-1] == 2):  # a key as plain numbers
            data.append(i)
    return data


def _reaches_loss(call: Call, noting: Noting, batch: Batch, flops: float) -> bool:
    """Returns whether a larger batch traces, reaches what is differentiated, and takes longer."""
    try:
        larger, program = call.noted(batch.arrays(call, 2 * batch.size))
    except Exception:  # whatever the step raises for shapes that it does not expect
        return False
    # A table of a frozen model may have more rows too, and takes no longer. A sequence may be
    # longer too, and takes more than twice as long with attention.
    taken = matmul_flops(_jax.open_jaxpr(program.jaxpr)[0])[1]
    if taken < GROWTH * flops or (taken > LINEAR * flops and any(batch.axes.values())):
        return False
    if len(larger.losses) != len(noting.losses):
        return False
    if not noting.losses:  # what mpjax differentiates is not looked into
        return flops > 0
    pairs = [*zip(larger.losses, noting.losses, strict=True)]
    # More classes are no larger batch: they change the parameters.
    if any(_of(one.parameters) != _of(other.parameters) for one, other in pairs):
        return False
    return any(_shapes(one) != _shapes(other) for one, other in pairs)


def _shapes(loss: Any) -> list[Any]:
    return _of((*loss.call.arrays, *loss.closed_over))


def _of(arrays: Sequence[Any]) -> list[Any]:
    return [x.shape for x in arrays]


def _multiple(call: Call, batch: Batch) -> int:
    """Returns a number whose multiples the step takes as sizes, the smallest that is found."""
    divisors = [d for d in range(1, batch.size) if batch.size % d == 0]
    for divisor in [*divisors[: TRIES // 2], *divisors[TRIES // 2 :][-TRIES // 2 :]]:
        try:
            call.program(None, batch.arrays(call, batch.size + divisor))
        except Exception:  # as above
            continue
        return divisor
    return batch.size
