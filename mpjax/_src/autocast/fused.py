"""Attention as a fused kernel runs it: what its axes run over, and what it is changed by."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.autocast import fused_kernels
from mpjax._src.autocast.derivatives import cast
from mpjax._src.dtypes import FLOAT32

# What an axis runs over: part of an axis of the scores, as in `forms`, or one that the first matmul
# sums over, or one that the second takes from the values (of these two, which). Its size is last.
Atom = tuple[Any, Any, int]
SUM, VALUE = "sum", "value"
Labels = tuple[tuple[Atom, ...], ...]


class Term(NamedTuple):
    """What is added to scores, or which of them count.

    Attributes:
        labels: What its axes run over.
        factor: What it is added times; None of a mask.
        kept: Of a mask, whether scores count where it is true, or where it is false.
    """

    labels: Labels
    factor: float | None
    kept: bool = True


class Fusion(NamedTuple):
    """How a fused kernel runs an attention. Plain data, the same for attentions that are alike.

    Attributes:
        kernel: Its name.
        half: What it takes its operands in.
        operands: What the axes of queries, keys and values run over.
        terms: What the scores are changed by; the arrays follow the operands.
        result: What the axes of the result run over.
        groups: What the axes of the kernel run over: batch, queries, heads of keys, heads that
            share them, keys, what is summed over, what values are made of.
        options: The kernel's other arguments.
    """

    kernel: str
    half: Any
    operands: tuple[Labels, Labels, Labels]
    terms: tuple[Term, ...]
    result: Labels
    groups: Labels
    options: tuple[tuple[str, Any], ...]

    def describe(self) -> str:
        """Returns which kernel runs, and what it is told and given."""
        options = dict(self.options)
        told = [
            "causal" if options["is_causal"] else "",
            "a window" if "local_window_size" in options else "",
            "a bias" if any(term.factor is not None for term in self.terms) else "",
            "a mask" if any(term.factor is None for term in self.terms) else "",
        ]
        return ", ".join([self.kernel, *filter(None, told)])


def run(fusion: Fusion, arrays: Sequence[Any]) -> list[Any]:
    """Runs an attention by its fused kernel.

    Args:
        fusion: How.
        arrays: Queries, keys, values, and the arrays of its terms.

    Returns:
        The result, in half.
    """
    given, options = arranged(fusion, arrays), dict(fusion.options)
    try:
        out = fused_kernels.kernel_of(fusion.kernel, options)(*given)
    except fused_kernels.REFUSALS:  # under vmap, a kernel may refuse what it takes otherwise
        out = jax.nn.dot_product_attention(*given, implementation="xla", **options)
    batch, sequence, heads, sharing, _, _, values = fusion.groups
    labels = batch, sequence, (*heads, *sharing), values
    return [_laid_out(out, labels, fusion.result)]


def arranged(fusion: Fusion, arrays: Sequence[Any]) -> list[Any]:
    """Returns queries, keys, values, bias and mask as `jax.nn.dot_product_attention` has them."""
    batch, sequence, heads, sharing, keys, summed, values = fusion.groups
    layouts = (
        (batch, sequence, (*heads, *sharing), summed),
        (batch, keys, heads, summed),
        (batch, keys, heads, values),
    )
    given = [
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
            x = jax.lax.mul(cast(x, FLOAT32), np.float32(term.factor))
            bias = x if bias is None else bias + x
    return [*given, bias, mask]


def _laid_out(x: Any, labels: Labels, wanted: Labels) -> Any:
    """Returns an array whose axes run over ``labels`` in another layout."""
    flat = [a for axis in labels for a in axis]
    order = [flat.index(a) for axis in wanted for a in axis]
    x = _reshape(x, [a[2] for a in flat])
    x = x if order == sorted(order) else jnp.transpose(x, order)
    return _reshape(x, [math.prod(a[2] for a in axis) for axis in wanted])


def _spread(x: Any, labels: Labels, wanted: Labels) -> Any:
    """As `_laid_out`, of an array that runs over some of it; full along queries and keys."""
    there = {a for axis in labels for a in axis}
    full = [{*axis} if not there.isdisjoint(axis) or d > 1 else () for d, axis in enumerate(wanted)]
    present = tuple(tuple(a for a in axis if a in there) for axis in wanted)
    x = _laid_out(x, labels, tuple((a,) for axis in present for a in axis))
    x = _reshape(x, [a[2] if a in there else 1 for axis in wanted for a in axis])
    sizes = [a[2] if a in full[d] else 1 for d, axis in enumerate(wanted) for a in axis]
    x = jnp.broadcast_to(x, sizes)
    return _reshape(
        x, [math.prod(a[2] for a in axis if a in full[d]) for d, axis in enumerate(wanted)]
    )


def _reshape(x: Any, shape: Sequence[int]) -> Any:
    return x if x.shape == (*shape,) else jnp.reshape(x, shape)
