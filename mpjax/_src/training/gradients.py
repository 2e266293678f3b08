"""Gradients of a scaled loss: `scaled_value_and_grad`."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp

from mpjax._src import _jax
from mpjax._src.autocast.modules import modules_in
from mpjax._src.dtypes import FLOAT16
from mpjax._src.errors import brief, check_callable
from mpjax._src.training.loss_scale import LossScale, NoOpLossScale, has_protocol
from mpjax._src.trees import all_finite, widen


def scaled_value_and_grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """Returns a function like ``jax.value_and_grad(fun)`` that scales the backward pass.

    The loss is multiplied by the scale in float32 before the backward pass, so that small
    cotangents survive float16, and the gradients are divided by the same scale in float32 after
    it.

    Args:
        fun: A function whose result is a real scalar loss, or ``(loss, aux)``.
        loss_scale: An mpjax or jmp loss scale.
        argnums: Which positional arguments to differentiate by, as for ``jax.grad``.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.

    Returns:
        A function of the same arguments, keyword arguments too, with the result
        ``(value, grads, finite)``: ``value`` is the loss (or ``(loss, aux)``) exactly as ``fun``
        returned it; ``grads`` are unscaled, half ones in float32, others in their own dtype;
        ``finite`` is a scalar bool array, whether all gradients are finite.

    Raises:
        TypeError: If ``fun`` is not a function or ``loss_scale`` not a loss scale; while tracing,
            if ``fun`` returns something other than a real scalar loss.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> grad_fn = mpjax.scaled_value_and_grad(lambda w: w**2, mpjax.StaticLossScale(1024.0))
        >>> value, grad, finite = grad_fn(jnp.float32(3))
        >>> float(value), float(grad), bool(finite)
        (9.0, 6.0, True)

    Micikevicius et al. 2017, section 3.2; torch.amp.GradScaler's scale and unscale_ in one.
    """

    check_callable(fun, "fun")
    if not has_protocol(loss_scale):
        raise TypeError(
            f"loss_scale={brief(loss_scale)} must be a loss scale, such as "
            "mpjax.DynamicLossScale() or mpjax.StaticLossScale(128.0): an instance, which the "
            "caller keeps and adjusts."
        )
    differentiated = jax.value_and_grad(
        with_scaled_loss(fun, loss_scale, has_aux), argnums, has_aux=True
    )

    def value_and_grad(*args, **kwargs):
        if modules_in((args, kwargs)):
            raise TypeError(
                "scaled_value_and_grad takes trees of arrays, not modules of Flax NNX, which the "
                "function may change: use mpjax.nnx.value_and_grad with an mpjax.nnx.Optimizer."
            )
        (_, (loss, aux)), grads = differentiated(*args, **kwargs)
        grads = loss_scale.unscale(widen(grads))
        return ((loss, aux) if has_aux else loss), grads, all_finite(grads)

    return value_and_grad


def observed_value_and_grad(
    fun: Callable[..., Any], loss_scale: LossScale, observe: Callable[[Any, Any], Any]
) -> Callable[..., tuple[Any, Any, Any]]:
    """As `scaled_value_and_grad` with an aux, but the third result is what ``observe`` returns.

    ``observe(grads, program)`` is called while tracing, with the gradients by the first argument as
    they leave the backward pass, scaled, and a function that returns that pass as a jaxpr.
    """

    scaled = with_scaled_loss(fun, loss_scale, has_aux=True)

    def value_and_grad(params, *args):
        run = lambda params: scaled(params, *args)  # noqa: E731
        scaled_loss, backward, (loss, aux) = jax.vjp(run, params, has_aux=True)
        one = jnp.ones_like(scaled_loss)
        (grads,) = backward(one)

        def program():
            jaxpr = jax.make_jaxpr(lambda backward, one: backward(one))(backward, one)
            return _jax.open_jaxpr(jaxpr)[0]

        return (loss, aux), loss_scale.unscale(widen(grads)), observe(grads, program)

    return value_and_grad


def with_scaled_loss(
    fun: Callable[..., Any], loss_scale: LossScale, has_aux: bool
) -> Callable[..., Any]:
    """Returns ``fun`` with its loss scaled: ``(scaled_loss, (loss, aux))``."""

    def scaled(*args, **kwargs):
        out = fun(*args, **kwargs)
        loss, aux = _split_aux(out) if has_aux else (out, None)
        _check_loss(loss, has_aux)
        no_op = isinstance(loss_scale, (NoOpLossScale, jmp.NoOpLossScale))
        if jnp.result_type(loss) == FLOAT16 and not no_op:
            _warn_at(
                fun,
                "The loss is float16, so its first cotangent is the loss scale itself rounded to "
                "float16: infinity from 2**16 on, and every step is skipped. Return the loss in "
                "float32, e.g. compute it from logits.astype(jnp.float32).",
            )
        # Widened here too: jmp's scales multiply in the dtype of the loss.
        return loss_scale.scale(widen(jnp.asarray(loss))), (loss, aux)

    return scaled


def _warn_at(fun: Callable[..., Any], message: str) -> None:
    """Warns at the definition of the user's function, if it has one: the call stack is JAX's."""
    code = getattr(inspect.unwrap(fun), "__code__", _warn_at.__code__)
    warnings.warn_explicit(message, UserWarning, code.co_filename, code.co_firstlineno)


def _split_aux(out: Any) -> tuple[Any, Any]:
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    raise TypeError(
        f"has_aux=True, so the function must return (loss, aux), but it returned {_kind(out)}."
    )


def _check_loss(loss: Any, has_aux: bool) -> None:
    number = isinstance(loss, float) or hasattr(loss, "dtype")
    if number and jnp.shape(loss) == () and jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        return
    hint = "" if has_aux or not isinstance(loss, tuple) else " For (loss, aux) pass has_aux=True."
    raise TypeError(
        f"The loss must be one real floating number of shape (), but it is {_kind(loss)}. "
        f"Losses of several examples are usually averaged: jnp.mean(losses).{hint}"
    )


def _kind(value: Any) -> str:
    if hasattr(value, "dtype"):
        return f"{value.dtype}{list(jnp.shape(value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{brief(value)} ({type(value).__name__})"
