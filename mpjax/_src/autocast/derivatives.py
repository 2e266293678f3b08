"""Functions whose derivative mixed precision wants otherwise than JAX would derive it.

All are custom_jvps with linear tangents, so that forward mode, vmap and transposition keep working;
none knows of a plan. Taylor mode takes no custom_jvp: there each is derived as it is written.
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

from mpjax._src import _jax
from mpjax._src.autocast.gathers import select_one_per_row
from mpjax._src.autocast.graph import Place
from mpjax._src.dtypes import FLOAT32
from mpjax._src.rules import rule_of

Run = Callable[..., tuple[list[Any], list[Any]]]


def cast(array: Any, dtype: Any) -> Any:
    return jax.lax.convert_element_type(array, dtype)


# The name of what the backward pass is given rather than computes again.
KEPT = "mpjax.kept"


def keep(array: Any) -> Any:
    """Returns an array that a checkpoint of ours keeps for the backward pass."""
    return array if _jax.in_taylor_mode([array]) else checkpoint_name(array, KEPT)


def kept_alone(run: Callable[[Any], Any], arrays: Any, prevent_cse: bool) -> Any:
    """Runs a function; the backward pass computes it again from what is kept of it.

    What may not be computed twice is kept as well, where the backward pass needs it.
    """
    if _jax.in_taylor_mode(jax.tree.leaves(arrays)):
        return run(arrays)
    arrays = _ended_together(arrays) if prevent_cse else arrays
    return jax.checkpoint(run, policy=_is_kept, prevent_cse=prevent_cse)(arrays)


def _ended_together(arrays: Any) -> Any:
    """Returns arrays of which the backward pass has all cotangents before it goes on.

    XLA would put off the gradients of weights, and hold what was computed again for them.
    """
    leaves, tree = jax.tree.flatten(arrays)

    def jvp(primals, tangents):
        moving = [t for t in tangents if not isinstance(t, SymbolicZero)]
        given = iter(jax.lax.optimization_barrier(moving) if len(moving) > 1 else moving)
        # A zero stays one that JAX knows: what does not move is not differentiated.
        return primals, tuple(t if isinstance(t, SymbolicZero) else next(given) for t in tangents)

    return jax.tree.unflatten(tree, with_tangent(lambda *xs: xs, jvp, symbolic_zeros=True)(*leaves))


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    if primitive.name == "name":
        return bool(params["name"] == KEPT)
    inside = [eqn for jaxpr in _jax.programs_in(params) for eqn in jaxpr.eqns]
    if inside:
        return any(_is_kept(eqn.primitive, **eqn.params) for eqn in inside)
    return not rule_of(primitive.name).runs_again


def with_tangent(
    fun: Callable[..., Any], jvp: Callable[..., Any], symbolic_zeros: bool = False
) -> Callable[..., Any]:
    """Returns a function with a derivative of its own, except in Taylor mode."""
    ruled = jax.custom_jvp(fun)
    ruled.defjvp(jvp, symbolic_zeros=symbolic_zeros)
    return lambda *args: (fun if _jax.in_taylor_mode(args) else ruled)(*args)


def known(computed: Any, given: Any) -> Any:
    """Returns ``given``, with the tangent of what was computed."""
    return _known(computed, given)


_known = with_tangent(lambda computed, given: given, lambda primals, ts: (primals[1], ts[0]))


def pick(eqn: Any, args: Sequence[Any]) -> Any:
    """Gathers one entry per row; the transpose is a select, not a scatter into a tensor of zeros.

    A cross entropy picks its labels' logits so. XLA fuses the select into what it is added to.
    """

    def gather(x, indices):
        return _jax.bind(eqn, [x, indices])[0]

    def jvp(primals, tangents):
        out = call(*primals)
        if isinstance(tangents[0], SymbolicZero):
            return out, _jax.zero_tangent(out)
        return out, cast(select_one_per_row(eqn, tangents[0], primals[1]), out.dtype)

    call = with_tangent(gather, jvp, symbolic_zeros=True)
    return call(*args)


def maximum(eqn: Any, x: Any) -> Any:
    """Takes the largest (or least) entries; where they stand is kept as booleans, not as floats.

    As JAX has it, entries that are equally large share the derivative.
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
    """Returns the tangent of the largest entries, given that of all of them."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def slope(reached, tangent):
        total = jnp.sum(jnp.where(reached, cast(tangent, FLOAT32), 0), axes)
        return total / jnp.sum(cast(reached, FLOAT32), axes)

    reached = jax.lax.eq(x, jnp.broadcast_to(jnp.expand_dims(out, axes), x.shape))
    return cast(slope(reached, tangent), out.dtype)


def maximum_and_sum(eqn: Any, x: Any, exponential: str) -> tuple[Any, Any]:
    """As `maximum`, and beside it the sums of the exponentials of what entries are below it.

    On a GPU that is one pass over ``x`` (`shifts.sum_at_once`).
    """
    axes, exp = eqn.params["axes"], getattr(jnp, exponential)

    def below(x, largest):
        return jnp.sum(exp(x - jnp.expand_dims(largest, axes)), axes)

    def in_two_passes(x):
        largest = _jax.bind(eqn, [x])[0]
        return largest, below(x, largest)

    def in_one_pass(x):
        start = np.float32(-np.inf), np.float32(0)
        # Not mere ones: JAX derives reductions whose operands all have tangents.
        ones = jnp.where(x == x, jnp.float32(1), x)
        return tuple(jax.lax.reduce((x, ones), start, _joining(exp), axes))

    def run(x):
        ways = dict.fromkeys(_jax.GPUS, in_one_pass)
        return jax.lax.platform_dependent(x, **ways, default=in_two_passes)

    def jvp(primals, tangents):
        (x,), (tangent,) = primals, tangents
        largest, sums = ruled(x)
        moved = _of_largest(x, largest, tangent, axes)
        return (largest, sums), (moved, jax.jvp(below, (x, largest), (tangent, moved))[1])

    ruled = with_tangent(run, jvp)
    return in_two_passes(x) if _jax.in_taylor_mode([x]) else ruled(x)


@functools.cache
def _joining(exp: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns what makes the largest entry and the sum of two parts of a row those of both."""

    def joined(a, b):
        (first, some), (second, more) = a, b
        less = jnp.where(first == second, 1.0, exp(-jnp.abs(first - second)))
        total = jnp.where(first > second, some + more * less, some * less + more)
        return jnp.maximum(first, second), total

    return joined


def sum_of_exponentials(eqn: Any, args: Sequence[Any], exponential: str) -> Any:
    """Returns a sum whose value is known from what `maximum_and_sum` gave.

    Args:
        eqn: The sum.
        args: Its operand: exponentials of ``x - shift``; what that function gave of ``x``; the
            shift.
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


def wide_cotangent(fun: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Runs a linear function whose transpose sums, so that it sums in float32."""

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
    centred: Place | None = None,
    wide: Mapping[int, Any] = MappingProxyType({}),
) -> Any:
    """Runs a matmul whose tangents are computed in the dtype of its operands.

    Args:
        eqn: The matmul.
        args: Its operands.
        dtype: What it gives; of half operands, float32 is its accumulator.
        centred: The operand by which the other one's tangent is multiplied less its mean, along
            which dimensions. That is for results whose reader takes no notice of what is added to
            all entries of a row, as a softmax does not.
        wide: Operands, by place, whose cotangents are not to be rounded before devices sum their
            parts of them. Each as a float32 array that is differentiated in its stead, or None.
    """
    primitive, params = eqn.primitive, dict(eqn.params)
    del params["preferred_element_type"]
    twins = {i: array for i, array in wide.items() if array is not None}
    places = tuple(wide), tuple(twins)
    key = (primitive, tuple(sorted(params.items())), np.dtype(dtype), centred, places)
    try:
        call = _cached_matmul(*key)
    except TypeError:  # a parameter that cannot be hashed
        call = _cached_matmul.__wrapped__(*key)
    return call(*args, *twins.values())


@functools.lru_cache(maxsize=4096)
def _cached_matmul(
    primitive: Any,
    items: tuple[tuple[str, Any], ...],
    dtype: Any,
    centred: Place | None,
    places: tuple[tuple[int, ...], tuple[int, ...]],
) -> Any:
    params = dict(items)
    wide, twins = places
    summed_wide = _jax.half_dot if primitive.name == "dot_general" else _jax.half_conv

    def product(operands, dtype):
        return primitive.bind(*operands, **params, preferred_element_type=np.dtype(dtype))

    def run(*operands):
        left, right, *more = operands[: len(operands) - len(twins)]
        if dtype == left.dtype:
            return product((left, right, *more), dtype)
        accumulated = {**params, "preferred_element_type": dtype}
        if "dimension_numbers" in params:
            left, accumulated["dimension_numbers"] = _jax.contracted_last(left, right, **params)
        held = map(_jax.cpu_barrier, (left, right, *more))
        return _jax.cpu_barrier(primitive.bind(*held, **accumulated))

    def along(moving, primals, tangents):
        """Returns the tangent, given those of the operands that move."""
        terms = []
        for i, tangent in zip(moving, tangents, strict=True):
            others = [*primals[:i], *primals[i + 1 :]]
            if centred is not None and centred[0] != i:
                others = [_less_mean(x, centred[1]) for x in others]
            others.insert(i, tangent)
            half = primals[i].dtype
            if i in wide:
                terms.append(summed_wide(others[0], others[1], half, **params))
            else:
                terms.append(product(others, half))
        return functools.reduce(jax.lax.add, terms)

    if centred is not None:  # or what is less its mean would be kept
        along = jax.checkpoint(along, prevent_cse=False, static_argnums=0)

    def jvp(primals, tangents):
        # Where nothing hinders, as it is written: policies of checkpoints know a matmul by name.
        out = (run if dtype == primals[0].dtype and centred is None else call)(*primals)
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


def _less_mean(x: Any, dims: Sequence[int]) -> Any:
    # The barrier: in the forward pass XLA would hold it beside the array itself.
    full = cast(_jax.gpu_barrier(x), FLOAT32)
    return cast(full - jnp.mean(full, dims, keepdims=True), x.dtype)


# ---- float32 islands ----------------------------------------------------------------------------


def recomputed(
    run: Run, arrays: Sequence[Any], rounded: Sequence[bool], half: Any, prevent_cse: bool
) -> list[Any]:
    """Runs an island in float32; its derivative is computed again from its inputs and its sums.

    Args:
        run: ``run(arrays, sums=None)`` gives results and sums, taking the latter where given.
        arrays: The inputs.
        rounded: Which of them are kept in half.
        half: The half dtype, where any is.
        prevent_cse: Whether XLA would rather save the insides than compute them again.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
    def tangent(arrays, sums, moving, tangents):
        if prevent_cse:  # of what is kept alone: a barrier before cotangents has them written
            arrays, sums = jax.tree.map(_jax.again_barrier, (arrays, sums))
        arrays = [cast(a, FLOAT32) if r else a for a, r in zip(arrays, rounded, strict=True)]
        return _tangent(lambda full: run(full, sums), arrays, moving, tangents)

    def jvp(primals, tangents):
        results, sums = call(*primals)
        moving = tuple(not isinstance(t, SymbolicZero) for t in tangents)
        if not any(moving):
            return (results, sums), jax.tree.map(_jax.zero_tangent, (results, sums))
        kept = [cast(p, half) if r else p for p, r in zip(primals, rounded, strict=True)]
        given = [t for t, moves in zip(tangents, moving, strict=True) if moves]
        return (results, sums), tangent(kept, sums, moving, given)

    call = with_tangent(lambda *arrays: run(arrays), jvp, symbolic_zeros=True)
    return call(*arrays)[0]


def _tangent(
    fun: Callable[[list[Any]], Any],
    arrays: Sequence[Any],
    moving: Sequence[bool],
    tangents: Sequence[Any],
) -> Any:
    """Returns the tangent of a function of arrays of which some alone have one."""

    def of_moving(*varying):
        given = iter(varying)
        return fun([next(given) if moves else a for a, moves in zip(arrays, moving, strict=True)])

    varying = [a for a, moves in zip(arrays, moving, strict=True) if moves]
    return jax.jvp(of_moving, varying, tangents)[1]


def elementwise(run: Run, arrays: Sequence[Any], barrier: bool) -> list[Any]:
    """Runs an elementwise island of one half operand; its slope is what is kept for the derivative.

    That takes the room of the operand, which is then not needed, and nothing is computed twice.

    Args:
        run: ``run(arrays)`` gives ``[result], []``, the result in the operand's dtype.
        arrays: The operand.
        barrier: Whether to keep XLA from computing the slope again in the backward pass.
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
    """Runs an elementwise function of a float32 array; its derivative is multiplied in half.

    So the cotangent of ``x`` is a half product: where it is written, that takes two bytes an entry.
    (XLA removes a mere cast to half and back, and would write float32.)
    """

    def jvp(primals, tangents):
        out, slope = jax.jvp(fun, primals, (jnp.ones_like(primals[0]),))
        return out, cast(cast(slope, half) * cast(tangents[0], half), out.dtype)

    return with_tangent(fun, jvp)(x)


class Softmax(NamedTuple):
    """What is known of a softmax.

    Attributes:
        axes: What is summed over.
        rate: The logarithm of the base of its exponential.
        whole: Whether its rows sum to one.
        half: What it is kept in.
        moving: How many of its operands it is differentiated in: the first is what the exponential
            is taken of.
    """

    axes: tuple[int, ...]
    rate: float
    whole: bool
    half: Any
    moving: int


class Weighing(NamedTuple):
    """What becomes of a softmax ``p`` that values are summed by.

    Attributes:
        eqn: The matmul.
        place: Which of its operands is the softmax.
        views: How the layout of ``p`` changes before the matmul.
        weigh: All that happens to ``p`` before the matmul, such as a dropout, if anything: linear
            in its first argument, entry by entry.
    """

    eqn: Any
    place: int
    views: Sequence[Any]
    weigh: Callable[[Any, Sequence[Any]], Any] | None


def softmax(run: Run, arrays: Sequence[Any], known: Softmax, prevent_cse: bool) -> list[Any]:
    """Runs a softmax in float32; its derivative is computed from its result, kept in half.

    Args:
        run: ``run(arrays)`` gives ``[result], [result]``.
        arrays: What the exponential is taken of, and what is constant for the derivative.
        known: What is known of it.
        prevent_cse: Whether XLA would rather save the insides than compute them again.
    """

    def call(*arrays):
        return run(arrays)[0][0]

    def jvp(primals, tangents):
        out = run(primals)[0][0]
        if isinstance(tangents[0], SymbolicZero):
            return out, _jax.zero_tangent(out)
        slope = _softmax_slope(known[:3], out.dtype, prevent_cse)
        kept = keep(cast(out, known.half))
        return kept if out.dtype == known.half else out, slope(kept, tangents[0])

    return [with_tangent(call, jvp, symbolic_zeros=True)(*arrays)]


@functools.cache
def _softmax_slope(
    known: tuple[tuple[int, ...], float, bool], dtype: Any, prevent_cse: bool
) -> Callable[..., Any]:
    """Returns the derivative of a softmax; the same function each time, to be traced once.

    A rounded row does not sum to one, and where one entry is almost all of it, what that lacks of
    one is all of the derivative. So the mean of the row is taken with weights that do.
    """
    axes, rate, whole = known

    @functools.partial(jax.checkpoint, prevent_cse=prevent_cse)
    def slope(result, tangent):
        full, tangent = cast(result, FLOAT32), _at_rate(tangent, rate)
        mean = jnp.sum(full * tangent, axes, keepdims=True)
        if whole:  # or nothing, where all of a row is masked
            mean = mean / jnp.maximum(jnp.sum(full, axes, keepdims=True), 0.5)
        return cast(full * (tangent - mean), dtype)

    return slope


def _at_rate(tangent: Any, rate: float) -> Any:
    """Returns the tangent of an exponent to base e."""
    tangent = cast(tangent, FLOAT32)
    return tangent if rate == 1 else rate * tangent


def attention(run: Run, arrays: Sequence[Any], known: Softmax, by: Weighing) -> list[Any]:
    """Runs a softmax and the matmul that sums values by it.

    The derivative of a softmax ``p`` takes ``sum(p * dp)``. With ``out = p @ v`` that is
    ``sum(dout * out)``, over far smaller arrays, and it is known before ``dp`` is: so nothing but
    ``p`` and the final product is ever written out. (Dao et al., FlashAttention, 2022.)

    Args:
        run: ``run(arrays)`` gives ``[out], [p]``.
        arrays: What the exponential is taken of, the values, what ``by.weigh`` takes, and what is
            constant for the derivative.
        known: What is known of the softmax; its axes are those of the matmul's operand.
        by: What becomes of it.
    """
    eqn, place, half, weigh = by.eqn, by.place, known.half, by.weigh

    def product(p, v):
        operands = (cast(p, half), v) if place == 0 else (v, cast(p, half))
        return _jax.bind(eqn, operands, preferred_element_type=np.dtype(half))[0]

    def weighed(p, others):
        return p if weigh is None else weigh(cast(p, FLOAT32), others)

    def sums(p):
        """Sums over the rows of a softmax, laid out as the result is."""
        for view in by.views:
            (p,) = _jax.bind(view, [p])
        return jnp.expand_dims(jnp.transpose(jnp.sum(p, known.axes), order), others)

    _, batch = eqn.params["dimension_numbers"]
    kept = [d for d in range(len(eqn.invars[place].aval.shape)) if d not in known.axes]
    free = [d for d in kept if d not in batch[place]]
    # Where the rows of the softmax stand in the result: batch first, then those of its operands.
    order = [kept.index(d) for d in (*batch[place], *free)]
    rank = len(eqn.outvars[0].aval.shape)
    first = len(order) if place == 0 else len(batch[0])
    others = tuple(range(first, first + rank - len(order)))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def through_softmax(p, v, out, more, tangent):
        moved = cast(p, FLOAT32) * _at_rate(tangent, known.rate)
        made = cast(product(weighed(moved, more), v), FLOAT32)
        return made - sums(moved) * cast(out, FLOAT32)

    def through_values(p, more, tangent):
        return cast(product(weighed(p, more), cast(tangent, half)), FLOAT32)

    if weigh is not None:  # else there is nothing to compute again
        through_values = jax.checkpoint(through_values, prevent_cse=False)

    @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=3)
    def through_weights(p, v, more, moving, tangents):
        moved = _tangent(lambda full: weighed(p, full), more, moving, tangents)
        return cast(product(moved, v), FLOAT32)

    def call(*arrays):
        return run(arrays)[0][0]

    def jvp(primals, tangents):
        (out,), (p,) = run(primals)
        p, v = _jax.gpu_barrier(cast(p, half)), cast(primals[1], half)
        more, tangents = list(primals[2 : known.moving]), tangents[: known.moving]
        moving = tuple(not isinstance(t, SymbolicZero) for t in tangents)
        terms = []
        if moving[0]:
            terms.append(through_softmax(p, v, cast(out, half), more, tangents[0]))
        if moving[1]:
            terms.append(through_values(p, more, tangents[1]))
        if any(moving[2:]):
            given = [t for t, moves in zip(tangents[2:], moving[2:], strict=True) if moves]
            terms.append(through_weights(p, v, more, moving[2:], given))
        if not terms:
            return out, _jax.zero_tangent(out)
        return out, cast(functools.reduce(jax.lax.add, terms), out.dtype)

    return [with_tangent(call, jvp, symbolic_zeros=True)(*arrays)]
