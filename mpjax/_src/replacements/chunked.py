"""Cross entropy of a linear layer's results, which are computed by blocks and never kept.

    logits = hidden @ weight + bias                                 [..., vocabulary]
    loss   = log(sum(exp(logits))) - logits[label]

Matmuls get operands of the dtype of ``hidden``, and return their accumulators. Everything else is
computed in them. There are two ways to avoid the logits:

- `weighted_sum`, by blocks of *rows*. If the weights of the losses are known, the cotangents of a
  block's logits are known as soon as the block is. So the forward pass makes the gradients too, and
  the backward pass only scales them. Each block adds to a gradient of the whole weight.
- `statistics`, by blocks of the *vocabulary*. It returns three numbers of each row, of which any
  loss is a function. The backward pass recomputes each block of logits, and with it
  computes a block of the weight's gradient, which is written once.

Blocks are interleaved: block ``i`` of ``n`` has the entries ``i``, ``i + n``, ``i + 2 n``, ... of
the axis. If devices share an axis, they then share each block of it.

References:
    Hsu et al., Liger Kernel, 2024 (rows); Wijmans et al., Cut Your Losses in Large-Vocabulary
    Language Models, 2025 (vocabulary).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.trees import vary_like
from mpjax._src.replacements.derivatives import (
    accumulated,
    as_one_operation,
    cast,
    log_sum_exp,
    with_tangent,
)

# A block has at least this many rows: then its matmuls take longer than adding to the gradient of
# the weight.
ROWS = 1024
# How many operations a device does in the time in which it moves a byte: 295 on an H100, 156 on an
# A100, 240 on a TPU v5e.
OPERATIONS_PER_BYTE = 300
# XLA pads operands of 16-bit matmuls to a multiple of this, in every iteration of a loop.
ALIGNED = 128


NAN, SHARE, NORMALIZER = "NaN", "share", "normalizer"


class Form(NamedTuple):
    """What a loss is, and in how many blocks it is computed."""

    words: int  # the size of the vocabulary
    # Whether the weight is [vocabulary, features], or else [features, vocabulary].
    transposed: bool = False
    z_loss: float = 0.0  # the factor of the squared log-sum-exp
    label_smoothing: float = 0.0  # the probability that all words share
    blocks: int = 1  # the number of blocks
    # The loss of a label that is no word: NAN; that of its SHARE of the targets, which are one-hot
    # before they are smoothed; or the NORMALIZER alone.
    unknown: str = NAN
    scale: float = 1.0  # what ``hidden @ weight`` is multiplied by

    @property
    def axis(self) -> int:
        """The axis of the weight along which the vocabulary lies."""
        return 0 if self.transposed else 1

    def describe(self, by_rows: bool) -> str:
        """Returns its blocks in words, such as "in 8 blocks of rows"."""
        kind = "rows" if by_rows else "the vocabulary"
        return f"in {self.blocks} block{'s'[: self.blocks - 1]} of {kind}"


def blocks_of(rows: int, features: int, chunk: int | None = None) -> int:
    """Returns into how many blocks of the size of ``chunk`` rows the logits are divided.

    By default, a block is no larger than the weight, if that has 1024 features or more. If the
    number of rows is a symbol, there is one block.
    """
    if not isinstance(rows, int):
        return 1
    return max(1, -(-rows // (chunk or max(features, ROWS))))


def rows_are_cheaper(rows: int, form: Form) -> bool:
    """Returns whether blocks of rows take less time than parts of the vocabulary.

    Both read and write the same logits. Each further block of rows also reads and writes the
    float32 gradient of the weight, 8 bytes an entry. Each further part of the vocabulary reads the
    rows in 16 bits for three matmuls, and reads and writes their float32 gradient, 14 bytes an
    entry; and the logits are multiplied twice. All in bytes for each feature.
    """
    more = form.blocks - 1
    if not more:
        return True
    by_rows = more * 8 * form.words
    by_words = more * 14 * rows + 2 * rows * form.words / OPERATIONS_PER_BYTE
    return by_rows <= by_words


class Statistics(NamedTuple):
    """Three numbers of each row of logits."""

    normalizer: Any  # the logarithm of the sum of its exponentials
    label_logit: Any  # the logit of its label; 0 if there is no such word
    total: Any  # the sum of its logits; 0 if no label is smoothed


class Operands(NamedTuple):
    """The arrays of a loss."""

    # [..., features], with at least one more axis. Matmuls compute in its dtype.
    hidden: Any
    weight: Any  # [features, vocabulary] or [vocabulary, features]
    labels: Any  # [...], signed integers
    bias: Any = None  # [vocabulary], or None
    weights: Any = None  # the weights of the losses, [...], in the dtype `wide`

    @property
    def wide(self) -> Any:
        """The dtype of everything but matmuls."""
        return np.promote_types(self.hidden.dtype, FLOAT32)

    def along_words(self, form: Form, blocks: int) -> tuple[Any, Any]:
        """Returns the blocks of weight and bias along the vocabulary, at most so many."""
        blocks = min(blocks, -(-form.words // ALIGNED))
        weight, bias = (
            None if x is None else _split(x, axis, blocks, ALIGNED)
            for x, axis in ((self.weight, form.axis), (self.bias, 0))
        )
        return weight, bias


def losses(found: Statistics, labels: Any, form: Form) -> Any:
    """Returns the loss of each row."""
    smoothing = form.label_smoothing
    normalizer, picked = found.normalizer, found.label_logit
    is_word = (labels >= 0) & (labels < form.words)
    if form.unknown == NAN:
        picked = jnp.where(is_word, picked, jnp.nan)
    elif form.unknown == SHARE:
        normalizer = normalizer * jnp.where(is_word, 1, smoothing)
    loss = normalizer - (1 - smoothing) * picked
    if smoothing:
        loss -= smoothing / form.words * found.total
    return loss + form.z_loss * found.normalizer**2 if form.z_loss else loss


def each(operands: Operands, form: Form) -> Any:
    """Returns the loss of each row, by parts of the vocabulary, times its weight if it has one."""
    found = losses(statistics(operands, form), operands.labels, form)
    return found if operands.weights is None else weighed(found, operands.weights)


# ---- a block of logits --------------------------------------------------------------------------


def _logits(hidden: Any, weight: Any, bias: Any, columns: Any, form: Form) -> Any:
    """Returns logits in float32; those of columns that are no words are minus infinity."""
    wide = np.promote_types(hidden.dtype, FLOAT32)
    x = accumulated(hidden, weight, ((hidden.ndim - 1,), (1 - form.axis,)), wide)
    x = x if form.scale == 1 else x * form.scale
    x = x if bias is None else x + cast(bias, wide)
    return jnp.where(columns < form.words, x, -jnp.inf)


def _product(rows: Any, matrix: Any, axis: int, dtype: Any) -> Any:
    """Multiplies rows with a matrix along one of its axes, both rounded to a dtype."""
    numbers = ((rows.ndim - 1,), (axis,)), ((), ())
    more = {"precision": None, "out_sharding": None}
    return _jax.half_dot(rows, matrix, dtype, dimension_numbers=numbers, **more)


def _statistics(x: Any, columns: Any, labels: Any, form: Form) -> Statistics:
    return Statistics(log_sum_exp(x), *_of_labels(x, columns, labels, form))


def _of_labels(x: Any, columns: Any, labels: Any, form: Form) -> tuple[Any, Any]:
    """Returns the entries of the labels' columns, and the sums over all words if they count."""
    picked = jnp.sum(jnp.where(columns == labels[..., None], x, 0), -1)
    if not form.label_smoothing:
        return picked, jnp.zeros_like(picked)
    return picked, jnp.sum(jnp.where(columns < form.words, x, 0), -1)


# ---- blocks -------------------------------------------------------------------------------------


def _split(x: Any, axis: int, blocks: int, aligned: int = 1) -> Any:
    """Returns the blocks of an axis, stacked along a new first one; the last may end in zeros."""
    size = x.shape[axis]
    each = -(-size // (blocks * aligned)) * aligned
    if (more := each * blocks - size) > 0:
        x = jnp.pad(x, [(0, more if d == axis else 0) for d in range(x.ndim)])
    x = x.reshape(*x.shape[:axis], each, blocks, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis + 1, 0)


def _joined(parts: Any, axis: int, size: int) -> Any:
    """Returns the axis whose blocks are stacked along the first one."""
    # Blocks are interleaved, so the number of the block is the inner part of the axis.
    x = jnp.moveaxis(parts, 0, axis + 1)
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return jax.lax.slice_in_dim(x, 0, size, axis=axis)


def _zeros(shape: Sequence[int], operands: Operands) -> Any:
    """Returns zeros to which results of operands may be added, in `jax.shard_map` too."""
    return vary_like(jnp.zeros(shape, operands.wide), operands.hidden)


def _varying(operands: Operands) -> Operands:
    """Returns arrays that all vary over the mesh axes of `jax.shard_map` that one varies over."""
    leaves = jax.tree.leaves(operands)
    return jax.tree.map(lambda x: functools.reduce(vary_like, leaves, x), operands)


def anywhere(fun: Callable[[Operands], Any], operands: Operands, per_row: bool) -> Any:
    """Calls a function of operands. If types say how they are sharded, XLA places the blocks.

    The result is ``per_row``, of the shape of the labels, or else a scalar. In Taylor mode this
    raises a NotImplementedError.
    """
    if _jax.in_taylor_mode(jax.tree.leaves(operands)):
        raise NotImplementedError(
            "A loss by blocks of its logits has no Taylor mode, because jax.experimental.jet has "
            "none of jax.lax.scan. Write the loss out, and remove chunked_loss=true."
        )
    typed = [x for x in jax.tree.leaves(operands) if _jax.is_explicit(x)]
    if not typed:
        return fun(operands)
    mesh, spec = jax.typeof(typed[0]).sharding.mesh, PartitionSpec()
    if per_row and _jax.is_explicit(operands.labels):
        spec = jax.typeof(operands.labels).sharding.spec
    place = NamedSharding(mesh, spec)
    return jax.sharding.auto_axes(fun, axes=mesh.explicit_axes, out_sharding=place)(operands)


def _moving(tangents: Operands) -> Operands:
    """Returns the tangents that are not zero."""
    moving = [None if isinstance(t, SymbolicZero) else t for t in tangents]
    return Operands(*moving)._replace(labels=None)


# ---- by rows ------------------------------------------------------------------------------------


def weighted_sum(operands: Operands, form: Form, by_rows: bool = True) -> Any:
    """Returns the weighted sum of the losses of all rows. Rows of weight 0 do not count.

    Where devices share no array, blocks are rows if ``by_rows`` is set.
    """

    def with_slopes(operands, moving):
        wanted = Operands(*(t is not None for t in moving))
        rows, words = (
            functools.partial(fun, form=form, wanted=wanted) for fun in (_by_rows, _by_words)
        )
        alone = rows if by_rows else words

        def run(operands):
            return _jax.by_devices(alone, words, operands)

        return with_tangent(run, functools.partial(jax.jvp, alone))(operands)

    def call(operands):
        return with_slopes(operands, Operands(*[None] * 5))[0]

    def jvp(primals, tangents):
        moving = _moving(*tangents)
        out, slopes = with_slopes(primals[0], moving)
        # What pads a slope is dropped here, where XLA fuses it into the product.
        pairs = [
            (slope[tuple(map(slice, t.shape))], t)
            for slope, t in zip(slopes, moving, strict=True)
            if t is not None
        ]
        if not pairs:
            return out, _jax.zero_tangent(out)
        terms = [jnp.sum(cast(slope, out.dtype) * cast(t, out.dtype)) for slope, t in pairs]
        return out, functools.reduce(jax.lax.add, terms)

    # In float16, cotangents need weights near 1.
    scale = jnp.max(jnp.abs(operands.weights), initial=jnp.finfo(operands.wide).tiny)
    operands = operands._replace(weights=operands.weights / scale)
    return with_tangent(call, jvp, symbolic_zeros=True)(_varying(operands)) * scale


def _by_rows(operands: Operands, form: Form, wanted: Operands) -> tuple[Any, Operands]:
    """Returns the sum, and its gradients with respect to the operands that are wanted.

    Those of weight and bias have the padding of `Operands.along_words`.
    """
    hidden, weight, labels, bias, weights = operands
    lead, dtype, wide = hidden.shape[:-1], hidden.dtype, operands.wide
    axis, rows = lead.index(max(lead)) if form.blocks > 1 else 0, tuple(range(len(lead)))
    weight, bias = jax.tree.map(lambda x: x[0], operands.along_words(form, 1))
    weight, columns = cast(weight, dtype), jax.lax.iota(labels.dtype, weight.shape[form.axis])

    def step(sums, block):
        x, label, weigh = block
        logits = _logits(x, weight, bias, columns, form)

        def loss(logits):
            return losses(_statistics(logits, columns, label, form), label, form)

        of_rows, pull = jax.vjp(loss, logits)
        ct = pull(cast(weigh, wide))[0]
        half, slope = cast(ct if form.scale == 1 else ct * form.scale, dtype), None
        if wanted.hidden:
            slope = _product(half, weight, form.axis, dtype)
        if wanted.weight:
            pair = (half, x) if form.transposed else (x, half)
            sums["weight"] += accumulated(*pair, (rows, rows), wide)
        if wanted.bias:
            sums["bias"] += jnp.sum(ct, rows)
        return sums, (of_rows, slope)

    shapes = {"weight": weight.shape, "bias": columns.shape}
    start = {k: _zeros(x, operands) for k, x in shapes.items() if getattr(wanted, k)}
    blocks = [_split(x, axis, form.blocks) for x in (hidden, labels, weights)]
    sums, parts = jax.lax.scan(step, start, blocks)
    of_rows, slope = jax.tree.map(lambda x: _joined(x, axis, lead[axis]), parts)
    slopes = Operands(slope, sums.get("weight"), None, sums.get("bias"), of_rows)
    return jnp.sum(weighed(of_rows, weights)), _chosen(slopes, wanted)


def weighed(found: Any, weights: Any) -> Any:
    """Returns weighted losses. Not products alone: a loss that does not count may be NaN."""
    return jnp.where(weights != 0, cast(weights, found.dtype) * found, 0)


def _chosen(slopes: Operands, wanted: Operands) -> Operands:
    return Operands(*(x if yes else None for x, yes in zip(slopes, wanted, strict=True)))


# ---- by parts of the vocabulary -----------------------------------------------------------------


def _by_words(operands: Operands, form: Form, wanted: Operands) -> tuple[Any, Operands]:
    """Returns what `_by_rows` returns. Devices that share an array exchange it once."""

    def total(moving):
        given = (x if t is None else t for x, t in zip(operands, moving, strict=True))
        return jnp.sum(each(Operands(*given), form))

    out, pull = jax.vjp(total, _chosen(operands, wanted))
    slopes = jax.tree.map(lambda x: cast(x, operands.wide), pull(jnp.ones_like(out))[0])
    weight, bias = slopes.along_words(form, 1)
    return out, slopes._replace(
        weight=None if weight is None else weight[0], bias=None if bias is None else bias[0]
    )


def statistics(operands: Operands, form: Form) -> Statistics:
    """Returns the statistics of each row."""

    def call(operands):
        return as_one_operation(functools.partial(_online, form=form))(operands)

    def jvp(primals, tangents):
        # Statistics do not depend on the weights of losses.
        found, moving = ruled(*primals), _moving(*tangents)._replace(weights=None)
        if all(t is None for t in moving):
            return found, jax.tree.map(_jax.zero_tangent, found)
        return found, _online_tangent(primals[0], moving, found.normalizer, form)

    ruled = with_tangent(call, jvp, symbolic_zeros=True)
    return ruled(_varying(operands))


def _parts(operands: Operands, form: Form) -> tuple[Any, Any, Any]:
    """Returns the numbers of the columns of each block, and what the logits are made of."""
    weight, bias = operands.along_words(form, form.blocks)
    size = weight.shape[0] * weight.shape[1 + form.axis]
    columns = _split(jax.lax.iota(operands.labels.dtype, size), 0, weight.shape[0])
    return columns, cast(weight, operands.hidden.dtype), bias


def _online(operands: Operands, form: Form) -> Statistics:
    hidden, labels = operands.hidden, operands.labels

    def step(found, part):
        columns, weight, bias = part
        logits = _logits(hidden, weight, bias, columns, form)
        more = _statistics(logits, columns, labels, form)
        normalizer = jnp.logaddexp(found.normalizer, more.normalizer)
        label_logit, total = found.label_logit + more.label_logit, found.total + more.total
        return Statistics(normalizer, label_logit, total), None

    zero = _zeros(labels.shape, operands)
    start = Statistics(zero - jnp.inf, zero, zero)
    return jax.lax.scan(step, start, _parts(operands, form))[0]


def _online_tangent(
    operands: Operands, moving: Operands, normalizer: Any, form: Form
) -> Statistics:
    """Returns the tangents of the statistics. The logits are recomputed."""
    hidden, labels, wide = operands.hidden, operands.labels, operands.wide
    product = functools.partial(_product, axis=1 - form.axis, dtype=hidden.dtype)
    ahead = None if moving.hidden is None else cast(moving.hidden, wide)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def tangents(ahead, part, moves):
        columns, weight, bias = part
        of_weight, of_bias = moves
        logits = _logits(hidden, weight, bias, columns, form)
        terms = []
        if ahead is not None:
            terms.append(cast(product(ahead, weight), wide) * form.scale)
        if of_weight is not None:
            terms.append(cast(product(hidden, of_weight), wide) * form.scale)
        if of_bias is not None:
            terms.append(jnp.broadcast_to(cast(of_bias, wide), logits.shape))
        tangent = functools.reduce(jax.lax.add, terms)
        share = jnp.exp(logits - normalizer[..., None])
        return Statistics(jnp.sum(share * tangent, -1), *_of_labels(tangent, columns, labels, form))

    def step(sums, block):
        return jax.tree.map(jax.lax.add, sums, tangents(ahead, *block)), None

    moves = moving.along_words(form, form.blocks)
    zero = _zeros(labels.shape, operands)
    return jax.lax.scan(step, Statistics(zero, zero, zero), (_parts(operands, form), moves))[0]
