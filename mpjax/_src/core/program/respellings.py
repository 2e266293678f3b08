"""Operations that JAX differentiates better, or at all, in another spelling.

- Gathers that repeat all entries of an axis in order, such as nearest-neighbor upsampling. With
  ``y[k i + j] = x[i]``, ``dx[i] = sum_j dy[k i + j]``: a sum over an axis of a reshaped ``dy``, and
  no scatter into zeros. So they are written as a reshape.
- Max and min pools whose windows are dilated, which have no derivative in JAX. They are written as
  the largest of the slices that the entries of all windows make.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base._jax import size_of
from mpjax._src.core.program.graph import CONSTANT_LIMIT, Block, Op, Value


class Found(NamedTuple):
    """Ops that are replaced, and what runs in their place. Equal ones run the same program."""

    ops: frozenset[Op]
    ins: Sequence[Value]  # what it reads
    result: Op  # the op whose results it returns
    at: Op  # the op in whose place it runs
    # ``run(how, arrays)`` returns them; ``how`` is plain data.
    run: Callable[[Any, Sequence[Any]], list[Any]]
    how: Any
    planned: bool = True  # nothing in it is cast


class Respellings:
    """Finds what is respelled in the blocks of a program."""

    def __call__(self, block: Block, fixed: bool = False) -> dict[Op, Any]:
        """Returns it by its op."""
        return {} if fixed else respellings(block)

    def apart(self) -> "Respellings":
        """Returns what finds that of another program."""
        return self


def respellings(block: Block) -> dict[Op, Any]:
    """Returns what is respelled in a block by its op."""
    found: dict[Op, Any] = {}
    # Most blocks have no gather, so this is not made before one asks.
    makers = functools.cache(lambda: {v: op for op in block.ops for v in op.outs})
    for op in block.ops:
        run, how = _repeated, None
        if op.name == "gather" and op.outs[0].is_f32:
            how = repetition_of(op, makers(), dict(block.consts))
        elif op.name in POOLS and op.outs[0].is_f32 and _is_dilated(op):
            run, how = _pooled, (op.name, *map(op.params.get, WINDOWS))
        if how is not None:
            found[op] = Found(frozenset([op]), op.ins[:1], op, op, run, how, planned=False)
    return found


# ---- repetitions --------------------------------------------------------------------------------


def _repeated(how: Any, arrays: Sequence[Any]) -> list[Any]:
    return [repeat(arrays[0], *how)]


def repetition_of(op: Op, makers: Mapping[Value, Op], consts: Mapping[Value, Any]) -> Any:
    """Returns (axis, count) if a gather repeats all entries of an axis in order, else None."""
    numbers, (operand, indices) = op.params["dimension_numbers"], (v.aval for v in op.ins)
    shape, result = operand.shape, op.outs[0].aval.shape
    axes = numbers.start_index_map
    along = len(axes) == 1 and numbers.collapsed_slice_dims == axes and len(result) == len(shape)
    if not along or size_of(indices.shape) > CONSTANT_LIMIT:
        return None
    (axis,) = axes
    others = tuple(d for d in range(len(shape)) if d != axis)
    whole = all(op.params["slice_sizes"][d] == shape[d] for d in others)
    sizes = shape[axis], result[axis]
    if not whole or numbers.offset_dims != others or not all(type(n) is int and n for n in sizes):
        return None  # or a size is symbolic
    if any(_jax.is_sharded_along(operand, d) for d in range(len(shape))):
        return None
    times, rest = divmod(result[axis], shape[axis])
    if rest or times < 2 or (array := known_array(op.ins[1], makers, dict(consts))) is None:
        return None
    in_order = np.array_equal(np.ravel(array), np.arange(result[axis]) // times)
    return (axis, times) if in_order else None


def known_array(value: Value, makers: Mapping[Value, Op], arrays: dict[Value, Any]) -> Any:
    """Returns the array of a value that does not depend on arguments; None for other values.

    The result, and those of the values that it is computed from, are added to ``arrays``.
    """
    if value not in arrays:
        op = makers.get(value)
        unknown = op is None or op.subs or op.eqn.effects or op.spec is rules.UNKNOWN
        arrays[value] = value.const if value.literal else None
        if op is not None and not unknown and value.size <= CONSTANT_LIMIT:
            args = [known_array(v, makers, arrays) for v in op.ins]
            if all(arg is not None for arg in args):
                arrays[value] = computed(op, args)[op.outs.index(value)]
    return arrays[value]


def computed(op: Op, args: Sequence[Any]) -> list[Any]:
    """Runs an op now, whatever JAX is tracing, and whatever it checks of the user's arrays."""
    with (
        jax.ensure_compile_time_eval(),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        return _jax.bind(op.eqn, args)


def repeat(x: Any, axis: int, times: int) -> Any:
    """Repeats each entry along an axis. The transpose is a sum that reads and writes once."""
    shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    spread = lax.broadcast_in_dim(x, shape, [d for d in range(len(shape)) if d != axis + 1])
    return lax.reshape(spread, (*x.shape[:axis], times * x.shape[axis], *x.shape[axis + 1 :]))


# ---- pools --------------------------------------------------------------------------------------

POOLS = {
    "reduce_window_max": (jnp.maximum, -math.inf),
    "reduce_window_min": (jnp.minimum, math.inf),
}
WINDOWS = "window_dimensions", "window_strides", "window_dilation", "padding"


def _is_dilated(op: Op) -> bool:
    p = op.params
    windows = zip(p["window_dimensions"], p["window_dilation"], strict=True)
    # `entries_of` does not dilate the operand itself.
    return any(size > 1 < step for size, step in windows) and {*p["base_dilation"]} == {1}


def _pooled(how: Any, arrays: Sequence[Any]) -> list[Any]:
    name, *how = how
    larger, edge = POOLS[name]
    return [functools.reduce(larger, entries_of(arrays[0], edge, *how))]


def entries_of(
    x: Any,
    outside: Any,
    window: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Iterator[Any]:
    """Yields the entries at each position of the windows, in order."""
    padded = lax.pad(x, jnp.asarray(outside, x.dtype), [(low, high, 0) for low, high in padding])
    for place in itertools.product(*map(range, window)):
        dims = zip(padded.shape, window, place, dilation, strict=True)
        end = [size - (w - 1 - i) * step for size, w, i, step in dims]
        start = [i * step for i, step in zip(place, dilation, strict=True)]
        yield lax.slice(padded, start, end, strides)
