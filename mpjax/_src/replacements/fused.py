"""A plain description of an attention for a fused kernel: its axes, biases and masks."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.replacements import fused_kernels
from mpjax._src.replacements.derivatives import cast

# What an axis runs over: part of an axis of the scores, as in `forms`, or one that the first matmul
# sums over, or one that the second takes from the values (of these two, which). Its size is last.
Atom = tuple[Any, Any, int]
SUM, VALUE = "sum", "value"
Labels = tuple[tuple[Atom, ...], ...]


class Term(NamedTuple):
    """A bias that is added to scores, or a mask."""

    labels: Labels  # what its axes run over
    factor: float | None  # the factor of a bias; None for a mask
    kept: bool = True  # for a mask, whether scores count where it is True, or where it is False


class Fusion(NamedTuple):
    """An attention as a fused kernel runs it. Plain data, equal for equal attentions."""

    kernel: str  # the name of the kernel
    half: Any  # the dtype of its operands
    operands: tuple[Labels, Labels, Labels]  # what the axes of queries, keys and values run over
    terms: tuple[Term, ...]  # the biases and masks of the scores, whose arrays follow the operands
    result: Labels  # what the axes of the result run over
    # What the axes of the kernel run over: batch, queries, heads of keys, heads that share keys,
    # keys, the contracted axis of the scores, the features of the values.
    groups: Labels
    options: tuple[tuple[str, Any], ...]  # the kernel's other arguments

    def describe(self) -> str:
        """Returns the name of the kernel and its options, such as "cudnn, causal, a bias"."""
        options = dict(self.options)
        parts = [
            "causal" if options["is_causal"] else "",
            "a window" if "local_window_size" in options else "",
            "a bias" if any(term.factor is not None for term in self.terms) else "",
            "a mask" if any(term.factor is None for term in self.terms) else "",
        ]
        return ", ".join([self.kernel, *filter(None, parts)])


def run(fusion: Fusion, arrays: Sequence[Any]) -> list[Any]:
    """Runs an attention by its fused kernel: queries, keys, values and the arrays of its terms."""
    inputs, options = arranged(fusion, arrays), dict(fusion.options)
    try:
        out = fused_kernels.kernel_of(fusion.kernel, options)(*inputs)
    except fused_kernels.REFUSALS:  # a kernel may reject operands under vmap alone
        out = jax.nn.dot_product_attention(*inputs, implementation="xla", **options)
    batch, sequence, heads, sharing, _, _, values = fusion.groups
    labels = batch, sequence, (*heads, *sharing), values
    return [_laid_out(out, labels, fusion.result)]


def arranged(fusion: Fusion, arrays: Sequence[Any]) -> list[Any]:
    """Returns queries, keys, values, bias, mask as in `jax.nn.dot_product_attention`."""
    batch, sequence, heads, sharing, keys, summed, values = fusion.groups
    layouts = (
        (batch, sequence, (*heads, *sharing), summed),
        (batch, keys, heads, summed),
        (batch, keys, heads, values),
    )
    inputs = [
        _laid_out(cast(x, fusion.half), labels, layout)
        for x, labels, layout in zip(arrays, fusion.operands, layouts, strict=False)
    ]
    bias = mask = None
    for term, x in zip(fusion.terms, arrays[3:], strict=True):
        x = _spread(x, term.labels, (batch, (*heads, *sharing), sequence, keys))
        if term.factor is None:
            x = x if term.kept else jnp.logical_not(x)
            mask = x if mask is None else mask & x
        else:
            x = lax.mul(cast(x, FLOAT32), np.float32(term.factor))
            bias = x if bias is None else bias + x
    return [*inputs, bias, mask]


def _laid_out(x: Any, labels: Labels, wanted: Labels) -> Any:
    """Returns an array, whose axes run over ``labels``, in another layout."""
    flat = [a for axis in labels for a in axis]
    order = [flat.index(a) for axis in wanted for a in axis]
    x = lax.transpose(lax.reshape(x, [a[2] for a in flat]), order)
    return lax.reshape(x, [math.prod(a[2] for a in axis) for axis in wanted])


def _spread(x: Any, labels: Labels, wanted: Labels) -> Any:
    """Returns an array with some of the axes in another layout, full along queries and keys."""
    own = {a for axis in labels for a in axis}
    flat = [a for axis in wanted for a in axis]
    x = _laid_out(x, labels, tuple((a,) for a in flat if a in own))
    x = lax.reshape(x, [a[2] if a in own else 1 for a in flat])
    # Axes of the kernel that no axis of the array is a part of have size 1.
    full = [axis if d > 1 or not own.isdisjoint(axis) else () for d, axis in enumerate(wanted)]
    whole = {a for axis in full for a in axis}
    x = jnp.broadcast_to(x, [a[2] if a in whole else 1 for a in flat])
    return lax.reshape(x, [math.prod(a[2] for a in axis) for axis in full])
