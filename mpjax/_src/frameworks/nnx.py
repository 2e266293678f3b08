"""Flax NNX: an optimizer that holds the loss scale and the masters, and gradients by its policy."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jmp
import optax
from flax import nnx

from mpjax._src.autocast.modules import has_modules
from mpjax._src.errors import brief, check_callable
from mpjax._src.hardware.devices import warn_if_unfit
from mpjax._src.policy import Policy, get_policy
from mpjax._src.training.gradients import with_float32_loss, with_scaled_loss
from mpjax._src.training.loss_scale import LossScale
from mpjax._src.training.masters import apply_updates
from mpjax._src.training.mixed_precision import in_mixed_precision
from mpjax._src.trees import all_finite, select, stays_finite, widen

P = ParamSpec("P")
R = TypeVar("R")

GOOD = {"loss": True, "state": True}


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` for mixed precision: masters, a loss scale, and steps that are skipped.

    Args:
        model: An NNX module. What the policy stores in half is cast in place.
        tx: Any optax optimizer. It works in float32, on float32 masters of half parameters.
        policy: As for `build_train_step`.
        wrt: Which variables are trained, as for ``nnx.Optimizer``.
        loss_scale: As for `build_train_step`.

    Attributes:
        policy: The `Policy` that `value_and_grad` runs functions under.
        loss_scale: The loss scale.

    Raises:
        TypeError: If ``model`` is no module, or ``tx`` no optimizer.
        ValueError: If an argument is not legal.

    Example:
        >>> import jax.numpy as jnp, mpjax.nnx, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        >>> optimizer = mpjax.nnx.Optimizer(model, optax.sgd(0.1), "mixed_float16", wrt=nnx.Param)
        >>> @nnx.jit
        ... def train_step(model, optimizer, x):
        ...     loss_fn = lambda model: jnp.mean(model(x) ** 2)
        ...     loss, grads = mpjax.nnx.value_and_grad(loss_fn, optimizer)(model)
        ...     optimizer.update(model, grads)
        ...     return loss
        >>> loss = train_step(model, optimizer, jnp.ones((2, 3)))
        >>> int(optimizer.step[...]), float(optimizer.metrics()["loss_scale"])
        (1, 65536.0)

    The step of `build_train_step`, in the form of Flax NNX.
    """

    def __init__(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        policy: str | jmp.Policy = "mixed_bfloat16",
        *,
        wrt: Any = nnx.Param,
        loss_scale: LossScale | str | float | None = "auto",
    ):
        if not has_modules(model):
            raise TypeError(
                f"model={brief(model)} must be an NNX module. For trees of parameters there is "
                "mpjax.build_train_step."
            )
        policy = get_policy(policy)
        warn_if_unfit(policy, stacklevel=2)
        optimizer = in_mixed_precision(tx, policy, loss_scale, "tx")
        params = nnx.as_pure(nnx.state(model, wrt))
        if not jax.tree.leaves(params):
            raise ValueError(f"wrt={wrt!r}: model has no such variables, so nothing is trained.")
        nnx.update(model, policy.cast_to_param(params))
        super().__init__(model, optimizer, wrt=wrt)
        # What value_and_grad found since the last update.
        self.forward = nnx.OptState(jax.tree.map(jnp.asarray, GOOD))

    @property
    def policy(self) -> Policy:
        return self.tx.policy

    @property
    def loss_scale(self) -> Any:
        return nnx.as_pure(self.opt_state.loss_scale)

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Updates the model; where something is not finite, all stays as it was.

        Args:
            model: The module that the optimizer was made with.
            grads: From `value_and_grad`, averaged over replicas or clipped as you like.
            **kwargs: For the optimizer.

        Returns:
            What was added to the parameters, in float32: zeros if the step was skipped.
        """
        params, grads = (nnx.as_pure(nnx.state(x, self.wrt)) for x in (model, grads))
        good, before = self.forward.get_value(), nnx.as_pure(self.opt_state)
        verdicts = {"loss_finite": good["loss"], "finite": good["state"]}
        updates, opt_state = self.tx.update(
            grads, before, params, **verdicts, **nnx.as_pure(kwargs)
        )
        new = apply_updates(params, updates, opt_state)
        nnx.update(model, select(opt_state.finite, new, params))
        nnx.update(self.opt_state, nnx.state(opt_state))
        self.step.set_value(self.step.get_value() + opt_state.finite)
        self.forward.set_value(jax.tree.map(jnp.asarray, GOOD))
        return jax.tree.map(jnp.subtract, widen(new), widen(params))

    def metrics(self) -> dict[str, jax.Array]:
        """Returns what the last update found, under the names of `build_train_step`'s metrics."""
        return nnx.as_pure(self.opt_state).metrics()


def value_and_grad(
    f: Callable[P, R],
    optimizer: Optimizer,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
) -> Callable[P, tuple[R, Any]]:
    """`nnx.value_and_grad` under an optimizer's policy and loss scale.

    The function runs under autocast; its loss is scaled, the gradients are not. What it changes of
    modules (statistics, counts of random keys, caches) is kept; where the loss, a gradient or a
    new state is not finite it is as before the call, and the optimizer's next update is skipped.

    Args:
        f: A function of modules whose result is a real scalar loss, or ``(loss, aux)``.
        optimizer: The `Optimizer` of the model.
        argnums: As for ``nnx.value_and_grad``; a plain number stands for the variables that the
            optimizer trains.
        has_aux: Whether ``f`` returns ``(loss, aux)``.

    Returns:
        A function of the same arguments that returns ``(value, grads)``: ``value`` as ``f``
        returned it, gradients in float32.

    Raises:
        TypeError: If ``f`` is no function or ``optimizer`` no `Optimizer`; while tracing, if ``f``
            returns something other than a real scalar loss.

    Example:
        >>> import jax.numpy as jnp, mpjax.nnx, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        >>> optimizer = mpjax.nnx.Optimizer(model, optax.sgd(0.1), "mixed_bfloat16")
        >>> gradient = mpjax.nnx.value_and_grad(lambda model: jnp.sum(model.bias[...]), optimizer)
        >>> loss, grads = gradient(model)
        >>> grads["bias"][...].tolist()
        [1.0]

    torch.amp's ``autocast`` and ``GradScaler`` in one.
    """
    check_callable(f, "f")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer={brief(optimizer)} must be an mpjax.nnx.Optimizer: it holds the policy and "
            "the loss scale."
        )
    run = with_float32_loss(f, optimizer.policy)

    def trained(argnum):
        return nnx.DiffState(argnum, optimizer.wrt) if isinstance(argnum, int) else argnum

    wanted: Any = (
        tuple(map(trained, argnums)) if isinstance(argnums, Sequence) else trained(argnums)
    )

    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        scale = optimizer.loss_scale
        old = {path: v.get_value() for path, v in _variables((args, kwargs))}
        gradient = nnx.value_and_grad(
            with_scaled_loss(run, scale, has_aux),
            argnums=wanted,
            has_aux=True,
        )
        (_, (loss, aux)), grads = gradient(*args, **kwargs)
        grads = scale.unscale(widen(grads))
        # Not the variables of before: a function may have put others in their places.
        state = [(v, old[path]) for path, v in _variables((args, kwargs)) if path in old]
        new, before = [v.get_value() for v, _ in state], [value for _, value in state]
        found = {"loss": jnp.isfinite(loss), "state": stays_finite(new, before)}
        finite = found["loss"] & found["state"] & all_finite(grads)
        for (variable, _), value in zip(state, select(finite, new, before), strict=True):
            variable.set_value(value)
        so_far = optimizer.forward.get_value()
        optimizer.forward.set_value(jax.tree.map(operator.and_, so_far, found))
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def _variables(tree: Any) -> list[tuple[Any, nnx.Variable]]:
    return [(path, v) for path, v in nnx.iter_graph(tree) if isinstance(v, nnx.Variable)]
