"""Gradients of a scaled loss: `scaled_value_and_grad`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jmp
from jax.custom_derivatives import SymbolicZero

from mpjax._src.core.autocast.transform import Autocast
from mpjax._src.core.base import _jax, called, errors
from mpjax._src.core.base.dtypes import FLOAT16
from mpjax._src.core.base.trees import all_finite, is_array, is_floating, widen
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.gradient import check_loss, positions
from mpjax._src.core.program.modules import has_modules
from mpjax._src.core.training.frozen import joined
from mpjax._src.core.training.loss_scale import LossScale, NoOpLossScale, has_protocol
from mpjax._src.core.training.replicas import agreed, averaged, axes_of, local_to, warn_if_unknown

P = ParamSpec("P")
R = TypeVar("R")


def scaled_value_and_grad(
    fun: Callable[P, R],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
) -> Callable[P, tuple[R, Any, jax.Array]]:
    """Returns a function like ``jax.value_and_grad(fun)`` that uses a loss scale.

    The loss is multiplied by the scale in float32 before the backward pass, so that float16 does
    not flush small cotangents to zero. After it, the gradients are divided by the same scale in
    float32.

    Args:
        fun: A function that returns a real scalar loss, or ``(loss, aux)``.
        loss_scale: A loss scale object of mpjax or jmp.
        argnums: The positional arguments to differentiate, as for ``jax.grad``. If an argument has
            leaves that are not floating (an Equinox module), only its floating arrays are
            differentiated; the other gradients are None, as in ``eqx.filter_grad``.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.
        axis_name: The mapped axis or axes of replicas, within ``jax.shard_map`` or ``jax.pmap``.
            Loss and gradients are averaged over them in float32, so ``finite`` is the same on all
            replicas, and on all shards of parameters that shard_map splits over other axes. Each
            replica keeps its own ``aux``.

    Returns:
        A function of the same arguments that returns ``(value, grads, finite)``: ``value`` is the
        loss (or ``(loss, aux)``) as ``fun`` returned it; ``grads`` are the unscaled gradients,
        16-bit ones as float32, others in their own dtype; ``finite`` is a bool scalar, whether all
        gradients are finite.

    Raises:
        TypeError: If ``fun`` is not a function or ``loss_scale`` not a loss scale; while tracing,
            if ``fun`` returns something other than a real scalar loss.
        ValueError: If ``axis_name`` is invalid, or no axis of that name is mapped where the
            function is called; or if ``argnums`` are not positions of its arguments.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> grad_fn = mpjax.scaled_value_and_grad(lambda w: w**2, mpjax.StaticLossScale(1024.0))
        >>> value, grad, finite = grad_fn(jnp.float32(3))
        >>> float(value), float(grad), bool(finite)
        (9.0, 6.0, True)

    Loss scaling is described by Micikevicius et al. 2017, "Mixed Precision Training", section 3.2.
    The function does the work of ``scale`` and ``unscale_`` of torch.amp.GradScaler.
    """

    errors.check_callable(fun, "fun")
    errors.check_flag("has_aux", has_aux)
    if not has_protocol(loss_scale):
        raise TypeError(
            f"loss_scale={errors.brief(loss_scale)} must be an instance of a loss scale, such as "
            "mpjax.DynamicLossScale() or mpjax.StaticLossScale(128.0). The caller stores it and "
            f"adjusts it after each step.{errors.misplaced(loss_scale)}"
        )
    axes_of(axis_name)
    settings = loss_scale, loss_scale.unscale, argnums, has_aux, axis_name
    return functools.partial(value_and_grad, fun, *settings)


def value_and_grad(fun, loss_scale, unscale, argnums, has_aux, axis_name, /, *args, **kwargs):
    """Returns what the function that `scaled_value_and_grad` makes returns."""
    axes = axes_of(axis_name)
    if has_modules((args, kwargs)):
        raise TypeError(
            "scaled_value_and_grad takes trees of arrays, not Flax NNX modules, because the "
            "function may change a module. Use mpjax.nnx.value_and_grad with an "
            "mpjax.nnx.Optimizer."
        )
    scaled = with_scaled_loss(fun, loss_scale, has_aux)
    trained: list[Any] = list(args)
    rest: dict[int, Any] = {}
    for i in positions("value_and_grad", argnums, len(args)):
        floating, rest[i] = differentiable(args[i])
        # Local, so that gradients are averaged once, and here.
        trained[i] = local_to(axes, axis_name, floating)

    def run(*args, **kwargs):
        whole = (joined(arg, rest.get(i)) for i, arg in enumerate(args))
        return scaled(*whole, **kwargs)

    gradient = jax.value_and_grad(run, argnums, has_aux=True)
    (_, (loss, aux)), grads = gradient(*trained, **kwargs)
    loss, grads = unscaled(loss, grads, unscale, axes, axis_name)
    finite = all_finite(grads)
    finite = agreed(finite, loss_scale.loss_scale) if axes else finite
    return ((loss, aux) if has_aux else loss), grads, finite


def unscaled(loss, grads, unscale: Callable[[Any], Any], axes: tuple[str, ...], axis_name):
    """Returns a loss and its gradients, unscaled, and averaged over replicas if there are axes."""
    # Widened here too: jmp's scales divide in the dtype of a gradient, which flushes small ones.
    grads = unscale(widen(grads))
    if axes:
        loss, grads = averaged((loss, grads), axis_name)
        warn_if_unknown(axis_name, axes)
    return loss, grads


def differentiable(tree: Any) -> tuple[Any, Any]:
    """Returns the floating arrays of a tree, and the rest of it.

    The rest is None if JAX can differentiate the tree as it is, or refuses it as a whole.
    """
    floats = lambda x: is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
    leaves = jax.tree.leaves(tree)
    numbers = (floats(x) or isinstance(x, (float, complex)) for x in leaves)
    if all(numbers) or not any(map(floats, leaves)):
        return tree, None
    arrays = jax.tree.map(lambda x: x if floats(x) else None, tree)
    return arrays, jax.tree.map(lambda x: None if floats(x) else x, tree)


def observed_value_and_grad(
    fun: Callable[..., Any], loss_scale: LossScale, observe: Callable[[Any, Any], Any]
) -> Callable[..., tuple[Any, Any, Any]]:
    """Is `scaled_value_and_grad` with an aux, but its third result is what ``observe`` returns.

    ``observe(grads, program)`` is called while tracing. ``grads`` are the gradients of the first
    argument, still scaled; ``program()`` returns the backward pass as a jaxpr.
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


def with_float32_loss(
    fun: Callable[..., Any], policy: Policy, loss_scale: LossScale
) -> Callable[..., Any]:
    """Autocasts a loss function; the loss is float32, whatever the policy's output dtype."""
    # The loss that the function returns is seen before autocast returns it in float32.
    return Autocast(fun, policy, True, functools.partial(_warn_if_float16, fun, loss_scale))


def _warn_if_float16(fun: Callable[..., Any], loss_scale: LossScale, out: Any) -> None:
    """Warns of a float16 loss, alone or with an aux, if it is scaled."""
    loss = out[0] if isinstance(out, (tuple, list)) and out else out
    no_op = isinstance(loss_scale, (NoOpLossScale, jmp.NoOpLossScale))
    if getattr(loss, "dtype", None) == FLOAT16 and not no_op:
        errors.warn_at(
            fun,
            "The loss is float16, so the backward pass starts with the loss scale rounded to "
            "float16. A loss scale of 2**16 or more is infinity there, and every step is "
            "skipped. Return the loss in float32: compute it from logits.astype(jnp.float32).",
        )


def with_scaled_loss(
    fun: Callable[..., Any], loss_scale: LossScale, has_aux: bool
) -> Callable[..., Any]:
    """Returns ``fun`` with its loss scaled: ``(scaled_loss, (loss, aux))``."""

    def scaled(*args, **kwargs):
        out = fun(*args, **kwargs)
        called.CALLED.add(called.SCALES)  # the module: cloudpickle would copy the set
        check_loss(out, has_aux)
        loss, aux = out if has_aux else (out, None)
        _warn_if_float16(fun, loss_scale, loss)
        # Widened here too, because jmp's scales multiply in the dtype of the loss.
        whole = loss_scale.scale(widen(jnp.asarray(loss)))
        # Of a loss without a tangent, JAX runs no rule, so the rule gets the arguments too.
        return _of_arguments(whole, list(filter(is_floating, jax.tree.leaves(args)))), (loss, aux)

    return scaled


@jax.custom_jvp
def _of_arguments(loss: Any, arguments: Any) -> Any:
    """Returns a loss, and warns if it is differentiated and does not depend on its arguments."""
    return loss


@functools.partial(_of_arguments.defjvp, symbolic_zeros=True)
def _of_arguments_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        return primals[0], tangents[0]
    errors.warn_user(
        "The loss does not depend on the parameters: all of their gradients are zero, and nothing "
        "is trained. Usual causes: the function uses parameters from outside instead of its "
        "argument, argnums names another argument, jax.lax.stop_gradient, or a loss that counts, "
        "such as an accuracy."
    )
    return primals[0], jnp.zeros_like(primals[0])
