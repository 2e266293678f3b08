"""Functions with cheaper or more accurate derivatives than those that JAX derives.

All of them are custom_jvps with linear tangents, so that forward mode, vmap and transposition work.
They do not depend on a plan. Taylor mode does not support custom_jvp; there JAX differentiates the
functions as written.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from mpjax._src.base import _jax
from mpjax._src.base.coded import Coded, decode
from mpjax._src.base.dtypes import FLOAT32
from mpjax._src.base.rules import rule_of
from mpjax._src.program.graph import Place
from mpjax._src.replacements.derivatives import cast, in_one_pass, with_tangent

Run = Callable[..., tuple[list[Any], list[Any]]]


# The names of values that are kept for the backward pass: from the forward pass on, or from when it
# computes them again.
KEPT, PASSING = "mpjax.kept", "mpjax.passing"


def keep(array: Any, name: str = KEPT) -> Any:
    """Marks an array that mpjax's checkpoints keep for the backward pass."""
    return array if _jax.in_taylor_mode([array]) else checkpoint_name(array, name)


def kept_alone(
    run: Callable[[Any], Any],
    arrays: Sequence[Any],
    prevent_cse: bool,
    whole: bool = False,
    halves: Sequence[Any] = (),
) -> Any:
    """Runs a function under a checkpoint: the backward pass repeats it from the marked values.

    Values that may not be computed twice are kept as well, if the backward pass needs them; but if
    ``whole``, matmuls and all else run twice, and only values with the name `KEPT` are kept.
    ``halves`` are the 16-bit dtypes in which one device computes cotangents, or None.
    """
    if _jax.in_taylor_mode(jax.tree.leaves(arrays)):
        return run(arrays)
    arrays = _ended_together(arrays, halves) if prevent_cse else arrays
    policy = jax.checkpoint_policies.save_only_these_names(KEPT) if whole else _is_kept
    return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(arrays)


def from_codes(
    run: Callable[..., Any],
    arrays: Sequence[Any],
    codes: Sequence[Any],
    prevent_cse: bool,
    halves: Sequence[Any] = (),
) -> Any:
    """Runs steps as they are. Their derivative is that at the values which codes represent.

    Args:
        run: ``run(arrays, kept=(), codes=())`` returns results, kept values, and the code or None
            of each of these. Given kept values are not computed again; given codes are those of the
            inputs and the kept values.
        arrays: The inputs.
        codes: The code of each input, or its rounded copy, or None.
        prevent_cse: Whether a barrier must keep XLA from saving the values inside.
        halves: The 16-bit dtype in which the cotangent of each input is computed, or None.

    Returns:
        What ``run`` returns.
    """
    if _jax.in_taylor_mode(jax.tree.leaves(arrays)):
        return run(arrays)
    arrays = _ended_together(arrays, halves) if prevent_cse else arrays
    # The carriers are for second derivatives. Behind a barrier, they would be written to memory.
    barriers = (prevent_cse, False, prevent_cse)

    @functools.partial(jax.checkpoint, prevent_cse=barriers, static_argnums=3)
    def tangent(stored, carriers, tangents, moving):
        codes = [x if isinstance(x, Coded) else None for x in stored]
        values = [
            x if carrier is None else known(carrier, _of_code(x, carrier.dtype))
            for x, carrier in zip(stored, carriers, strict=True)
        ]
        inputs, kept = values[: len(moving)], values[len(moving) :]
        return _tangent(lambda full: run(full, kept, codes)[:2], inputs, moving, tangents)

    def jvp(primals, tangents):
        (arrays, codes), tangents = primals, tangents[0]
        _, kept, made = out = call(arrays, codes)
        moving = tuple(not isinstance(t, SymbolicZero) for t in tangents)
        if not any(moving):
            return out, jax.tree.map(_jax.zero_tangent, out)
        pairs = [*zip((*arrays, *kept), (*codes, *made), strict=True)]
        stored = [array if code is None else code for array, code in pairs]
        carriers = [None if code is None else _jax.carrier(array) for array, code in pairs]
        nonzero = [t for t, moves in zip(tangents, moving, strict=True) if moves]
        moved = tangent(stored, carriers, nonzero, moving)
        return out, (*moved, jax.tree.map(_jax.zero_tangent, made))

    def kept_in_8_bits(arrays, codes):  # the name by which reports call it
        return run(arrays)

    call = with_tangent(kept_in_8_bits, jvp, symbolic_zeros=True)
    return call(arrays, codes)


def _of_code(x: Any, dtype: Any) -> Any:
    return decode(x, dtype) if isinstance(x, Coded) else cast(x, dtype)


def _ended_together(arrays: Sequence[Any], halves: Sequence[Any]) -> Sequence[Any]:
    """Returns the arrays behind a barrier: the backward pass waits for all of their cotangents.

    Without it, XLA would delay the gradients of weights and hold the recomputed values for them.
    """
    halves = halves or [None] * len(arrays)

    def jvp(primals, tangents):
        # Symbolic zeros are kept: JAX does not differentiate constant operands.
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        if len(moving) < 2:
            return primals, tangents
        behind = _jax.one_barrier([tangents[i] for i in moving], [halves[i] for i in moving])
        moved = dict(zip(moving, behind, strict=True))
        return primals, tuple(moved.get(i, t) for i, t in enumerate(tangents))

    return with_tangent(lambda *xs: xs, jvp, symbolic_zeros=True)(*arrays)


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    if primitive.name == "name":
        return params["name"] in (KEPT, PASSING)
    inside = [eqn for jaxpr in _jax.programs_in(params) for eqn in jaxpr.eqns]
    if inside:
        return any(_is_kept(eqn.primitive, **eqn.params) for eqn in inside)
    return not rule_of(primitive.name).runs_again


def known(computed: Any, array: Any) -> Any:
    """Returns ``array``, with the tangent of the computed value."""
    return _known(computed, array)


_known = with_tangent(lambda computed, array: array, lambda primals, ts: (primals[1], ts[0]))


def pick(eqn: Any, args: Sequence[Any]) -> Any:
    """Gathers one entry per row. The transpose is a select instead of a scatter into zeros.

    A cross entropy picks the logits of its labels in this way. XLA fuses the select into the sum
    that reads it.
    """

    def gather(x, indices):
        return _jax.bind(eqn, [x, indices])[0]

    def jvp(primals, tangents):
        out = call(*primals)
        if isinstance(tangents[0], SymbolicZero):
            return out, _jax.zero_tangent(out)
        return out, cast(_select_one_per_row(eqn, tangents[0], primals[1]), out.dtype)

    call = with_tangent(gather, jvp, symbolic_zeros=True)
    return call(*args)


def _select_one_per_row(eqn: Any, x: Any, indices: Any) -> Any:
    """Runs the gather of an equation for which `picks_one_per_row` as a masked sum."""
    (axis,) = eqn.params["dimension_numbers"].start_index_map
    size = x.shape[axis]
    indices = indices.reshape([1 if d == axis else n for d, n in enumerate(x.shape)])
    if "clip" in str(eqn.params["mode"]).lower():
        indices = jnp.clip(indices, 0, size - 1)
    positions = jax.lax.broadcasted_iota(indices.dtype, x.shape, axis)
    zero = jnp.zeros((), x.dtype)
    picked = jnp.where(positions == indices, x, zero).sum(axis)
    return picked.reshape(eqn.outvars[0].aval.shape)


def maximum(eqn: Any, x: Any) -> Any:
    """Computes the largest (or smallest) entries. Their positions are kept as booleans.

    As in JAX, equal entries share the derivative.
    """
    axes = eqn.params["axes"]

    def call(x):
        return _jax.bind(eqn, [x])[0]

    def jvp(primals, tangents):
        (x,), (tangent,) = primals, tangents
        out = ruled(x)
        return out, _of_largest(x, out, tangent, axes)

    ruled = with_tangent(call, jvp)
    return ruled(x)


def _of_largest(x: Any, out: Any, tangent: Any, axes: Sequence[int]) -> Any:
    """Returns the tangent of the largest entries, given the tangent of all entries."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def slope(reached, tangent):
        total = jnp.sum(jnp.where(reached, cast(tangent, FLOAT32), 0), axes)
        return total / jnp.sum(cast(reached, FLOAT32), axes)

    reached = jax.lax.eq(x, jnp.broadcast_to(jnp.expand_dims(out, axes), x.shape))
    return cast(slope(reached, tangent), out.dtype)


def maximum_and_sum(eqn: Any, x: Any, exponential: str) -> tuple[Any, Any]:
    """Computes `maximum` and the sum of ``exp(x - maximum)``.

    On a GPU this takes one pass over ``x`` (`shifts.sum_at_once`).
    """
    axes, exp = eqn.params["axes"], getattr(jnp, exponential)

    def below(x, largest):
        return jnp.sum(exp(x - jnp.expand_dims(largest, axes)), axes)

    def in_two_passes(x):
        largest = _jax.bind(eqn, [x])[0]
        return largest, below(x, largest)

    def jvp(primals, tangents):
        (x,), (tangent,) = primals, tangents
        largest, sums = ruled(x)
        moved = _of_largest(x, largest, tangent, axes)
        return (largest, sums), (moved, jax.jvp(below, (x, largest), (tangent, moved))[1])

    ruled = with_tangent(lambda x: in_one_pass(x, in_two_passes, axes, exp), jvp)
    return in_two_passes(x) if _jax.in_taylor_mode([x]) else ruled(x)


def sum_of_exponentials(eqn: Any, args: Sequence[Any], exponential: str) -> Any:
    """Returns a sum of exponentials whose value follows from the result of `maximum_and_sum`.

    Args:
        eqn: The equation of the sum.
        args: Its operand, the exponentials of ``x - shift``; the results of `maximum_and_sum` for
            ``x``; the shift.
        exponential: "exp" or "exp2".
    """

    def add(e):
        return _jax.bind(eqn, [e])[0]

    def call(e, largest, sums, shift):
        return sums * getattr(jnp, exponential)(largest - shift.reshape(largest.shape))

    def jvp(primals, tangents):
        out = ruled(*primals)
        moves = not isinstance(tangents[0], SymbolicZero)
        return out, add(tangents[0]) if moves else _jax.zero_tangent(out)

    ruled = with_tangent(call, jvp, symbolic_zeros=True)
    return add(args[0]) if _jax.in_taylor_mode(args) else ruled(*args)


def recurrence(
    a: Any, b: Any, axis: int, half: Any, name: str = KEPT, there: Sequence[Any] = ()
) -> Any:
    """Computes ``h[t] = a[t] h[t-1] + b[t]`` along an axis, from ``h[0] = b[0]``.

    If ``half`` is not None, ``h`` is rounded to it, and its derivative reads it as it is rounded.

    Args:
        a: The factors.
        b: What is added.
        axis: The axis.
        half: The dtype of the result, or None.
        name: The name under which checkpoints keep it.
        there: The result, if it was kept; then it is not computed again.
    """
    if _jax.in_taylor_mode([a, b]):
        h = _jax.scanned(a, b, axis=axis)
        return h if half is None else cast(h, half)
    if half is None and not there:
        return _jax.recurrence(a, b, axis)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # else the moved recurrence would be kept
    def drive(moving, out):
        return _jax.drive(moving, cast(out, FLOAT32), axis)

    def call(a, b, *there):
        return there[0] if there else cast(_jax.recurrence(a, b, axis), half)

    def jvp(primals, tangents):
        out = keep(call(*primals), name)
        moving = [None if isinstance(t, SymbolicZero) else t for t in tangents[:2]]
        if moving == [None, None]:
            return out, _jax.zero_tangent(out)
        return out, cast(_jax.recurrence(primals[0], drive(moving, out), axis), out.dtype)

    return with_tangent(call, jvp, symbolic_zeros=True)(a, b, *there)


def wide_cotangent(fun: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Runs a linear function whose transpose is a sum, which is computed in float32."""

    def jvp(primals, tangents):
        out = call(*primals)
        if isinstance(tangents[0], SymbolicZero):
            return out, _jax.zero_tangent(out)
        return out, cast(fun(cast(tangents[0], FLOAT32), *primals[1:]), out.dtype)

    call = with_tangent(fun, jvp, symbolic_zeros=True)
    return call(*args)


# ---- matmuls ------------------------------------------------------------------------------------


def matmul(
    eqn: Any,
    args: Sequence[Any],
    dtype: Any,
    centered: Place | None = None,
    wide: Mapping[int, Any] = MappingProxyType({}),
) -> Any:
    """Runs a matmul whose tangents are computed in the dtype of its operands.

    Args:
        eqn: The equation of the matmul.
        args: Its operands.
        dtype: The dtype of the result. For 16-bit operands, float32 is the accumulator.
        centered: An operand and some of its dimensions. The mean over these is subtracted from the
            operand where the tangent of the other one is multiplied by it, and from its own tangent
            (so from its cotangent). This is correct if the reader of the result ignores a constant
            added to all entries of a row, like a softmax.
        wide: Operands, by position, whose cotangents are not rounded before devices sum them. The
            value is a float32 array that is differentiated instead of the operand, or None.
    """
    primitive, params = eqn.primitive, dict(eqn.params)
    del params["preferred_element_type"]
    twins = {i: array for i, array in wide.items() if array is not None}
    places = tuple(wide), tuple(twins)
    key = (primitive, tuple(sorted(params.items())), np.dtype(dtype), centered, places)
    try:
        call = _cached_matmul(*key)
    except TypeError:  # a parameter is not hashable
        call = _cached_matmul.__wrapped__(*key)
    return call(*args, *twins.values())


@functools.lru_cache(maxsize=4096)
def _cached_matmul(
    primitive: Any,
    items: tuple[tuple[str, Any], ...],
    dtype: Any,
    centered: Place | None,
    places: tuple[tuple[int, ...], tuple[int, ...]],
) -> Any:
    params = dict(items)
    wide, twins = places
    summed_wide = _jax.half_dot if primitive.name == "dot_general" else _jax.half_conv

    def product(operands, dtype):
        with _jax.marked():
            return primitive.bind(*operands, **params, preferred_element_type=np.dtype(dtype))

    def run(*operands):
        left, right, *more = operands[: len(operands) - len(twins)]
        if dtype == left.dtype:
            return product((left, right, *more), dtype)
        with _jax.marked():
            left, right = _jax.held_for_cpu(left, right, _summed_and_batch(params))
            return _jax.cpu_barrier(product((left, right, *more), dtype))

    def along(moving, primals, tangents):
        """Returns the tangent, given those of the operands that are not constant."""
        terms = []
        for i, tangent in zip(moving, tangents, strict=True):
            others = [*primals[:i], *primals[i + 1 :]]
            if centered is not None and centered[0] != i:
                # Without the barrier, XLA would hold it beside the array itself, forward.
                others = [_less_mean(_jax.gpu_barrier(x), centered[1]) for x in others]
            elif centered is not None:
                tangent = _less_mean(tangent, centered[1])
            others.insert(i, tangent)
            half = primals[i].dtype
            if i in wide:
                terms.append(summed_wide(others[0], others[1], half, **params))
            else:
                terms.append(product(others, half))
        return functools.reduce(jax.lax.add, terms)

    if centered is not None:  # else the centered operand would be kept
        along = jax.checkpoint(along, prevent_cse=False, static_argnums=0)

    def jvp(primals, tangents):
        # As written if possible, because checkpoint policies recognize matmuls by name.
        out = (run if dtype == primals[0].dtype and centered is None else call)(*primals)
        operands = primals[: len(primals) - len(twins)]
        moves = dict(enumerate(tangents[:2])) | dict(
            zip(twins, tangents[len(operands) :], strict=True)
        )
        moves = {i: t for i, t in moves.items() if not isinstance(t, SymbolicZero)}
        if not moves:
            return out, _jax.zero_tangent(out)
        return out, cast(along((*moves,), operands, [*moves.values()]), out.dtype)

    call = with_tangent(run, jvp, symbolic_zeros=True)
    return call


def _summed_and_batch(params: Mapping[str, Any]) -> Any:
    """Returns the dimension numbers of a matmul, ragged or not."""
    ragged = params.get("ragged_dot_dimension_numbers")
    return ragged.dot_dimension_numbers if ragged else params["dimension_numbers"]


def _less_mean(x: Any, dims: Sequence[int]) -> Any:
    full = cast(x, FLOAT32)
    return cast(full - jnp.mean(full, dims, keepdims=True), x.dtype)


# ---- float32 islands ----------------------------------------------------------------------------


def recomputed(
    run: Run,
    arrays: Sequence[Any],
    rounded: Sequence[bool],
    half: Any,
    prevent_cse: bool,
    halves: Mapping[int, Any] = MappingProxyType({}),
) -> list[Any]:
    """Runs an island in float32. The backward pass recomputes it from its inputs and sums.

    Args:
        run: ``run(arrays, sums=None)`` returns results and sums; given sums are not recomputed.
        arrays: The inputs.
        rounded: Which of the inputs are kept in 16 bits.
        half: The 16-bit dtype, if some are.
        prevent_cse: Whether a barrier must keep XLA from saving the values inside.
        halves: By position, the 16-bit arrays of which inputs are copies in float32. They are kept;
            the derivative is with respect to the copies.
    """
    count = len(arrays)

    @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
    def tangent(arrays, sums, moving, tangents):
        if prevent_cse:  # on kept values alone; a barrier on cotangents would write them out
            arrays, sums = jax.tree.map(_jax.again_barrier, (arrays, sums))
        arrays = [cast(a, FLOAT32) if r else a for a, r in zip(arrays, rounded, strict=True)]
        return _tangent(lambda full: run(full, sums), arrays, moving, tangents)

    def jvp(primals, tangents):
        results, sums = call(*primals)
        own, tangents = dict(zip(halves, primals[count:], strict=True)), tangents[:count]
        moving = tuple(not isinstance(t, SymbolicZero) for t in tangents)
        if not any(moving):
            return (results, sums), jax.tree.map(_jax.zero_tangent, (results, sums))
        kept = [own.get(i, p) for i, p in enumerate(primals[:count])]
        kept = [cast(p, half) if r else p for p, r in zip(kept, rounded, strict=True)]
        nonzero = [t for t, moves in zip(tangents, moving, strict=True) if moves]
        return (results, sums), tangent(kept, sums, moving, nonzero)

    call = with_tangent(lambda *operands: run(operands[:count]), jvp, symbolic_zeros=True)
    return call(*arrays, *halves.values())[0]


def _tangent(
    fun: Callable[[list[Any]], Any],
    arrays: Sequence[Any],
    moving: Sequence[bool],
    tangents: Sequence[Any],
) -> Any:
    """Returns the tangent of a function of arrays, of which only some have tangents."""

    def of_moving(*varying):
        inputs = iter(varying)
        return fun([next(inputs) if moves else a for a, moves in zip(arrays, moving, strict=True)])

    varying = [a for a, moves in zip(arrays, moving, strict=True) if moves]
    return jax.jvp(of_moving, varying, tangents)[1]


def elementwise(run: Run, arrays: Sequence[Any], barrier: bool) -> list[Any]:
    """Runs an elementwise island with one 16-bit operand, and keeps its slope for the derivative.

    The slope takes the memory of the operand, which is not kept, and nothing is computed twice.

    Args:
        run: ``run(arrays)`` returns ``[result], []``, with the result in the operand's dtype.
        arrays: The operand.
        barrier: Whether a barrier must keep XLA from recomputing the slope in the backward pass.
    """

    def call(x):
        return run([x])[0][0]

    def jvp(primals, tangents):
        ones = jnp.ones_like(primals[0])
        out, slope = jax.jvp(lambda x: run([x])[0][0], primals, (ones,))
        if barrier:
            slope = _jax.again_barrier(slope)
        return out, slope * tangents[0]

    return [with_tangent(call, jvp)(*arrays)]


def activation(fun: Callable[[Any], Any], x: Any, half: Any) -> Any:
    """Runs an elementwise function of a float32 array, and multiplies its derivative in 16 bits.

    The cotangent of ``x`` is then a 16-bit product, which takes two bytes per entry in memory. A
    cast to 16 bits and back would not do: XLA removes it and writes float32.
    """

    def jvp(primals, tangents):
        out, slope = jax.jvp(fun, primals, (jnp.ones_like(primals[0]),))
        return out, cast(cast(slope, half) * cast(tangents[0], half), out.dtype)

    return with_tangent(fun, jvp)(x)


class Softmax(NamedTuple):
    """The properties of a softmax.

    Attributes:
        axes: The axes of its sum.
        rate: The logarithm of the base of its exponential.
        whole: Whether its rows sum to 1.
        half: The dtype in which it is kept.
        moving: The number of operands with respect to which it is differentiated; these come first,
            and the first of all is the exponent.
    """

    axes: tuple[int, ...]
    rate: float
    whole: bool
    half: Any
    moving: int


class Weighing(NamedTuple):
    """The matmul of a softmax ``p`` with values, and the operations in between.

    Attributes:
        eqn: The equation of the matmul.
        place: The position of the softmax among its operands.
        views: The changes of the layout of ``p`` before the matmul.
        weigh: A function with everything that is applied to ``p`` before the matmul, such as a
            dropout, or None. It is elementwise and linear in its first argument.
    """

    eqn: Any
    place: int
    views: Sequence[Any]
    weigh: Callable[[Any, Sequence[Any]], Any] | None


def softmax(
    run: Run, arrays: Sequence[Any], form: Softmax, prevent_cse: bool, name: str = KEPT
) -> list[Any]:
    """Runs a softmax in float32. Its derivative is computed from its result, kept in 16 bits.

    Args:
        run: ``run(arrays)`` returns ``[result], [result]``.
        arrays: The exponent, and operands that are constant for the derivative.
        form: The properties of the softmax.
        prevent_cse: Whether a barrier must keep XLA from saving the values inside.
        name: The name under which checkpoints keep the result.
    """

    def call(*arrays):
        return run(arrays)[0][0]

    def jvp(primals, tangents):
        out = run(primals)[0][0]
        if isinstance(tangents[0], SymbolicZero):
            return out, _jax.zero_tangent(out)
        slope = _softmax_slope(form[:3], out.dtype, prevent_cse)
        kept = keep(cast(out, form.half), name)
        return kept if out.dtype == form.half else out, slope(kept, tangents[0])

    return [with_tangent(call, jvp, symbolic_zeros=True)(*arrays)]


@functools.cache
def _softmax_slope(
    form: tuple[tuple[int, ...], float, bool], dtype: Any, prevent_cse: bool
) -> Callable[..., Any]:
    """Returns the derivative of a softmax; the same function each time, so that it is traced once.

    A rounded row does not sum to exactly 1. If one entry is close to 1, its distance from 1
    dominates the derivative. The mean over the row therefore uses weights that do sum to 1.
    """
    axes, rate, whole = form

    @functools.partial(jax.checkpoint, prevent_cse=prevent_cse)
    def slope(result, tangent):
        full, tangent = cast(result, FLOAT32), _at_rate(tangent, rate)
        mean = jnp.sum(full * tangent, axes, keepdims=True)
        if whole:  # or zero, if the whole row is masked
            mean = mean / jnp.maximum(jnp.sum(full, axes, keepdims=True), 0.5)
        return cast(full * (tangent - mean), dtype)

    return slope


def _at_rate(tangent: Any, rate: float) -> Any:
    """Returns the tangent of an exponent, converted to base e."""
    tangent = cast(tangent, FLOAT32)
    return tangent if rate == 1 else rate * tangent


def _rows(
    eqn: Any, place: int, axes: Sequence[int]
) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Returns how a matmul reads a softmax.

    Args:
        eqn: The matmul.
        place: Which of its operands the softmax is.
        axes: The axes of the softmax, which the matmul sums.

    Returns:
        The rows of the softmax, in the order in which they are axes of the matmul's result: batch
        axes first, then its own free axes; all its axes in that order, the summed ones last; and
        the other axes of the result.
    """
    _, batch = eqn.params["dimension_numbers"]
    kept = [d for d in range(len(eqn.invars[place].aval.shape)) if d not in axes]
    free = [d for d in kept if d not in batch[place]]
    order = [kept.index(d) for d in (*batch[place], *free)]
    first = len(order) if place == 0 else len(batch[0])
    others = range(first, first + len(eqn.outvars[0].aval.shape) - len(order))
    return order, [*batch[place], *free, *axes], tuple(others)


def attention(
    run: Run,
    arrays: Sequence[Any],
    form: Softmax,
    by: Weighing,
    shows: bool = False,
    again: bool = False,
    names: Sequence[str] = ("", ""),
    in_order: bool = False,
) -> list[Any]:
    """Runs a softmax and its matmul with values.

    The derivative of a softmax ``p`` needs ``sum(p * dp)``. With ``out = p @ v`` this equals
    ``sum(dout * out)``, a sum over far smaller arrays, which is known before ``dp``. Therefore only
    ``p`` and the final product are written to memory. (Dao et al., FlashAttention, 2022.)

    Args:
        run: ``run(arrays)`` returns ``[out], [p]``.
        arrays: The exponent, the values, the further arguments of ``by.weigh``, and operands that
            are constant for the derivative.
        form: The properties of the softmax; its axes are those of the matmul's operand.
        by: The matmul, and the operations before it.
        shows: Whether the softmax is returned after the result, in 16 bits and without a tangent.
        again: Whether ``run`` returns one that was kept.
        names: The names under which checkpoints keep the result and the softmax, or "".
        in_order: Whether the softmax is kept in the order in which its matmul reads it: batch axes,
            rows, summed axes. Else XLA:GPU may store it in another order than derivatives read it
            in. What a loop keeps it then copies as a whole, which takes twice the memory.
    """
    eqn, place, half, weigh = by.eqn, by.place, form.half, by.weigh

    def product(p, v):
        operands = (cast(p, half), v) if place == 0 else (v, cast(p, half))
        return _jax.bind(eqn, operands, preferred_element_type=np.dtype(half))[0]

    def weighed(p, others):
        return p if weigh is None else weigh(cast(p, FLOAT32), others)

    def sums(p):
        """Sums over the rows of a softmax. The sums have the layout of the softmax's result."""
        for view in by.views:
            (p,) = _jax.bind(view, [p])
        return jnp.expand_dims(jnp.transpose(jnp.sum(p, form.axes), order), others)

    order, stored, others = _rows(eqn, place, form.axes)
    moves = in_order and not by.views and stored != sorted(stored)
    back = np.argsort(stored).tolist()
    as_read = (lambda p: jnp.transpose(p, back)) if moves else lambda p: p

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def through_softmax(p, v, out, more, tangent):
        p = as_read(p)
        # A weight of 1 hardly moves, but what is left of its cotangent is the rounding of `dp`.
        moved = cast(jnp.where(p < 1, p, 0), FLOAT32) * _at_rate(tangent, form.rate)
        change = cast(product(weighed(moved, more), v), FLOAT32)
        return change - sums(moved) * cast(out, FLOAT32)

    def through_values(p, more, tangent):
        return cast(product(weighed(as_read(p), more), cast(tangent, half)), FLOAT32)

    if weigh is not None or moves:  # else nothing is recomputed
        through_values = jax.checkpoint(through_values, prevent_cse=False)

    @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
    def through_weights(p, v, more, moving, tangents):
        moved = _tangent(lambda full: weighed(as_read(p), full), more, moving, tangents)
        return cast(product(moved, v), FLOAT32)

    in_half = (lambda p: cast(p, half)) if again else lambda p: _jax.gpu_barrier(cast(p, half))

    def call(*arrays):
        (out,), (p,) = run(arrays)
        return [out, in_half(p)] if shows else [out]

    def jvp(primals, tangents):
        ((out,), (p,)), v = run(primals), cast(primals[1], half)
        more, tangents = list(primals[2 : form.moving]), tangents[: form.moving]
        p = _jax.row_major(jnp.transpose(in_half(p), stored)) if moves else in_half(p)
        out, p = (keep(x, name) if name else x for x, name in zip((out, p), names, strict=True))
        moving = tuple(not isinstance(t, SymbolicZero) for t in tangents)
        terms = []
        if moving[0]:
            terms.append(through_softmax(p, v, cast(out, half), more, tangents[0]))
        if moving[1]:
            terms.append(through_values(p, more, tangents[1]))
        if any(moving[2:]):
            nonzero = [t for t, varies in zip(tangents[2:], moving[2:], strict=True) if varies]
            terms.append(through_weights(p, v, more, moving[2:], nonzero))
        total = functools.reduce(jax.lax.add, terms) if terms else _jax.zero_tangent(out)
        shown = [as_read(p)] if shows else []
        return [out, *shown], [cast(total, out.dtype), *map(_jax.zero_tangent, shown)]

    return with_tangent(call, jvp, symbolic_zeros=True)(*arrays)
