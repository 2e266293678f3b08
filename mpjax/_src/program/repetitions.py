"""Gathers that repeat all entries of an axis in order, such as nearest-neighbor upsampling.

With ``y[k i + j] = x[i]``, ``dx[i] = sum_j dy[k i + j]``: a sum over an axis of a reshaped ``dy``,
and no scatter into zeros. So they are written as a reshape.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from mpjax._src.base import _jax, rules
from mpjax._src.base._jax import size_of
from mpjax._src.program.graph import CONSTANT_LIMIT, Block, Op, Value


class Repetition(NamedTuple):
    """A gather that a reshape replaces."""

    result: Op
    ins: tuple[Value, ...]
    how: Any
    planned: bool = False

    @property
    def ops(self) -> frozenset[Op]:
        """What is replaced."""
        return frozenset([self.result])

    @property
    def at(self) -> Op:
        """In whose scopes it runs."""
        return self.result

    @staticmethod
    def run(how: Any, arrays: Sequence[Any]) -> list[Any]:
        """Runs in the place of the gather."""
        return [repeat(arrays[0], *how)]


class Repetitions:
    """Finds the repetitions in the blocks of a program."""

    def __call__(self, block: Block, fixed: bool = False) -> dict[Op, Any]:
        """Returns them by their gathers."""
        return {} if fixed else repetitions(block)

    def apart(self) -> "Repetitions":
        """Returns what finds those of another program."""
        return self


def repetitions(block: Block) -> dict[Op, Any]:
    """Returns the repetitions in a block by their gathers."""
    gathers = [op for op in block.ops if op.name == "gather" and op.outs[0].is_f32]
    makers = {v: op for op in block.ops for v in op.outs} if gathers else {}
    each = ((op, repetition_of(op, makers, dict(block.consts))) for op in gathers)
    return {op: Repetition(op, op.ins[:1], how) for op, how in each if how is not None}


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
                with jax.ensure_compile_time_eval():
                    arrays[value] = _jax.bind(op.eqn, args)[op.outs.index(value)]
    return arrays[value]


def repeat(x: Any, axis: int, times: int) -> Any:
    """Repeats each entry along an axis. The transpose is a sum that reads and writes once."""
    shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    spread = lax.broadcast_in_dim(x, shape, [d for d in range(len(shape)) if d != axis + 1])
    return lax.reshape(spread, (*x.shape[:axis], times * x.shape[axis], *x.shape[axis + 1 :]))
