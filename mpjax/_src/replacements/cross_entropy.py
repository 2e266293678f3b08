"""`linear_cross_entropy`: the loss of a language model without its logits."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.autocast.kernels import half_inputs
from mpjax._src.core.base.dtypes import is_float
from mpjax._src.core.base.errors import (
    as_array,
    brief,
    check_broadcasts,
    check_choice,
    check_count,
    check_flag,
    finite_number,
    optional_array,
    refuse_traced,
)
from mpjax._src.core.program.graph import LOSS
from mpjax._src.replacements.chunked import (
    Form,
    Operands,
    anywhere,
    blocks_of,
    each,
    rows_are_cheaper,
    weighted_sum,
)
from mpjax._src.replacements.derivatives import cast


def linear_cross_entropy(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    transposed: bool = False,
    reduction: str | None = "mean",
    where: Any = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
) -> Any:
    """Computes the cross entropy of ``hidden @ weight + bias`` without storing these logits.

    The logits of a language model are often the largest array of a training step. Here only a block
    of them exists at a time. Otherwise the function equals
    ``optax.softmax_cross_entropy_with_integer_labels`` of the logits, followed by the reduction:
    values, gradients and higher derivatives are the same, up to rounding.

    With a reduction, the forward pass computes the gradients as well, block by block of rows, so no
    matmul runs twice. Without one, if blocks are small, or if devices share the arrays, blocks are
    parts of the vocabulary, and logits are recomputed: for many blocks this moves fewer bytes, and
    devices exchange each gradient once.

    Matmuls compute in the dtype of ``hidden``, to which the weight is cast; under `autocast`, that
    is the 16-bit dtype of the policy. They return float32, in which everything else is computed.
    In float16, the gradients of a reduced loss do not underflow, whatever the loss scale.

    Args:
        hidden: A floating array of shape [..., features], such as the results of the last norm.
        weight: [features, vocabulary]; with ``transposed``, [vocabulary, features].
        labels: Integers of shape [...]. As in optax, those from -vocabulary to -1 count from the
            end, and the loss of any other label that is no word is NaN. To ignore labels, use
            ``where``.
        bias: None, or an array of shape [vocabulary] that is added to the logits.
        transposed: Whether ``weight`` has the layout of an embedding table. It is not copied.
        reduction: "mean" or "sum" of the losses; None returns each.
        where: None, or an array that broadcasts to [...]: which losses count. Numbers are weights:
            the mean is the sum of weighted losses, divided by the sum of weights. The mean of no
            losses is NaN, as in ``jnp.mean``.
        z_loss: The factor of ``logsumexp(logits) ** 2``, which is added to each loss.
        label_smoothing: The probability that is shared by all words, as in ``optax.smooth_labels``.
        chunk: How many rows of logits a block has the size of. If None, as many as there are
            features, but at least 1024.

    Returns:
        A scalar, or the losses of shape [...]. float32; float64 if ``hidden`` is.

    Raises:
        TypeError: If the dtype of an array is not as above.
        ValueError: If shapes do not match, or a setting is invalid.
        NotImplementedError: In Taylor mode (``jax.experimental.jet``).

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> hidden, embedding = jnp.ones((2, 16, 8)), jnp.ones((100, 8))
        >>> labels = jnp.zeros((2, 16), jnp.int32)
        >>> def loss(embedding):
        ...     return mpjax.linear_cross_entropy(hidden, embedding, labels, transposed=True)
        >>> round(float(mpjax.autocast(loss, "mixed_bfloat16")(embedding)), 3)  # log(100)
        4.605
        >>> jax.grad(loss)(embedding).shape
        (100, 8)

    References:
        Hsu et al., Liger Kernel, 2024; Wijmans et al., Cut Your Losses in Large-Vocabulary Language
        Models, 2025. z_loss: Chowdhery et al., PaLM, 2022.
    """
    check_choice("reduction", reduction, "mean", "sum")
    hidden, weight = as_array("hidden", hidden), as_array("weight", weight)
    labels = as_array("labels", labels, "an array of integers")
    bias, where = optional_array("bias", bias), optional_array("where", where)
    _check_dtypes(hidden=hidden, weight=weight, bias=bias, labels=labels)
    check_flag("transposed", transposed)
    _check_shapes(hidden, weight, bias, labels, transposed)
    words, rows = weight.shape[0 if transposed else 1], math.prod(labels.shape)
    chunk = None if chunk is None else check_count("chunk", chunk)
    form = Form(
        words,
        transposed,
        _factor("z_loss", z_loss),
        _factor("label_smoothing", label_smoothing, below=1.0),
        blocks_of(rows, hidden.shape[-1], chunk),
    )
    if where is not None:
        check_broadcasts("where", where, labels.shape, "the shape of labels")
        where = jnp.broadcast_to(where, labels.shape)
    return in_blocks(hidden, weight, bias, labels, where, form, reduction)


@functools.partial(half_inputs, float32=("weight", "bias", "where"))
def in_blocks(
    hidden: Any, weight: Any, bias: Any, labels: Any, where: Any, form: Form, reduction: str | None
) -> Any:
    """Computes the loss in the dtype of ``hidden``."""
    by_rows = reduction is not None and rows_are_cheaper(labels.size, form)
    run = functools.partial(each, form=form)
    if reduction is not None:
        run = functools.partial(_reduced, form=form, reduction=reduction, by_rows=by_rows)
    labels = _from_the_start(labels, form)
    # `explain` reads the blocks from the name of the scope.
    with jax.named_scope(f"{LOSS}{form.describe(by_rows)}"):
        operands = Operands(hidden, weight, labels, bias, where)
        return anywhere(run, operands, per_row=reduction is None)


def _reduced(operands: Operands, form: Form, reduction: str, by_rows: bool) -> Any:
    """Returns the sum or the mean of the losses."""
    where, wide = operands.weights, operands.wide
    weights = jnp.ones(operands.labels.shape, wide) if where is None else cast(where, wide)
    operands = operands._replace(weights=weights)
    # A single row: blocks are parts of an axis of rows.
    if operands.hidden.ndim == 1:
        hidden, labels, weights = (
            x[None] for x in (operands.hidden, operands.labels, operands.weights)
        )
        operands = operands._replace(hidden=hidden, labels=labels, weights=weights)
    total = weighted_sum(operands, form, by_rows)
    return total / jnp.sum(weights) if reduction == "mean" else total


def _from_the_start(labels: Any, form: Form) -> Any:
    """Returns labels of which negative ones no longer count from the end."""
    labels = labels if labels.dtype == np.int64 else cast(labels, np.int32)
    # What is still no word afterwards becomes NaN in `losses`.
    return jnp.where(labels < 0, labels + form.words, labels)


# ---- checks -------------------------------------------------------------------------------------


def _check_dtypes(labels: Any, **floats: Any) -> None:
    for name, x in floats.items():
        if x is not None and not is_float(x):
            raise TypeError(f"{name} is {x.dtype}. Its dtype must be float16, bfloat16 or float32.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"labels is {labels.dtype}. It must contain integers, one for each row of hidden; for "
            "label_smoothing, pass the labels before they are smoothed."
        )


def _check_shapes(hidden: Any, weight: Any, bias: Any, labels: Any, transposed: bool) -> None:
    if not hidden.ndim:
        raise ValueError("hidden is a scalar. Its last axis must be the features.")
    features = hidden.shape[-1]
    wanted = f"[vocabulary, {features}]" if transposed else f"[{features}, vocabulary]"
    axis = 1 if transposed else 0
    if weight.ndim != 2 or weight.shape[axis] != features:
        fits = weight.ndim == 2 and weight.shape[1 - axis] == features
        hint = f" Pass transposed={not transposed}." if fits else ""
        raise ValueError(
            f"weight has shape {weight.shape}. With features as in hidden and transposed="
            f"{transposed}, it must be {wanted}.{hint}"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels has shape {labels.shape}. With one label for each row of hidden, it must be "
            f"{hidden.shape[:-1]}."
        )
    words = weight.shape[1 - axis]
    if bias is not None and bias.shape != (words,):
        raise ValueError(
            f"bias has shape {bias.shape}. With one entry for each word, it must be ({words},)."
        )


def _factor(name: str, value: Any, below: float = math.inf) -> float:
    refuse_traced(name, value)
    number = finite_number(value)
    if number is None or not 0 <= number < below:
        top = f" and below {below:g}" if below < math.inf else ""
        raise ValueError(f"{name}={brief(value)} must be a number of at least 0{top}.")
    return number
