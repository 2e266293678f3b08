"""Flax NNX: an optimizer with loss scale and master weights, and gradients under its policy."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from mpjax._src.core.base.errors import brief, check_callable
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import all_finite, select, stays_finite, widen
from mpjax._src.core.policy.policy import Policy, PolicyLike
from mpjax._src.core.program.gradient import positions
from mpjax._src.core.program.modules import has_modules
from mpjax._src.core.training.gradients import unscaled, with_float32_loss, with_scaled_loss
from mpjax._src.core.training.levels import training_policy
from mpjax._src.core.training.loss_scale import LossScale, smallest
from mpjax._src.core.training.masters import apply_updates
from mpjax._src.core.training.mixed_precision import in_mixed_precision
from mpjax._src.core.training.replicas import averaged_state, axes_of, local_to

P = ParamSpec("P")
R = TypeVar("R")

GOOD = {"loss": True, "state": True}


@public("mpjax.nnx")
class Optimizer(nnx.Optimizer):
    """``nnx.Optimizer`` for mixed precision: with master weights, loss scale and skipped steps.

    Args:
        model: An NNX module. Its trained variables are cast in place to the dtypes that the policy
            stores; frozen ones never to a wider dtype.
        tx: Any optax optimizer. It works in float32, on the master weights of 16-bit parameters.
        policy: A policy or its name, as for `build_train_step`.
        wrt: A filter of the variables to train, as for ``nnx.Optimizer``.
        loss_scale: The loss scale, as for `build_train_step`.

    Attributes:
        policy: The `Policy` that `value_and_grad` runs functions under.
        loss_scale: The loss scale.

    Raises:
        TypeError: If ``model`` is not an NNX module, or ``tx`` is not an optax optimizer.
        ValueError: If another argument is invalid, or ``model`` has no variables that ``wrt``
            selects.

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

    A step does the same as that of `build_train_step`, with the interface of Flax NNX.
    """

    def __init__(
        self,
        model: Any,
        tx: optax.GradientTransformation,
        policy: "PolicyLike" = "mixed_bfloat16",
        *,
        wrt: Any = nnx.Param,
        loss_scale: LossScale | str | float | None = "auto",
    ):
        if not has_modules(model):
            raise TypeError(
                f"model={brief(model)} must be an NNX module. For a tree of parameters use "
                "mpjax.build_train_step."
            )
        policy = training_policy(policy)
        optimizer = in_mixed_precision(
            tx, policy, loss_scale, "tx", "mpjax.nnx.value_and_grad(loss_fn, optimizer)"
        )
        params = nnx.as_pure(nnx.state(model, wrt))
        if not jax.tree.leaves(params):
            raise ValueError(
                f"wrt={wrt!r} selects no variables of model, so nothing would be trained. It is "
                "usually nnx.Param."
            )
        nnx.update(model, optimizer._rules.stored(params))
        super().__init__(model, optimizer, wrt=wrt)
        # Whether the losses and states in value_and_grad were finite since the last update.
        self.forward = nnx.OptState(jax.tree.map(jnp.asarray, GOOD))

    @property
    def policy(self) -> Policy:
        return self.tx.policy

    @property
    def loss_scale(self) -> Any:
        return nnx.as_pure(self.opt_state.loss_scale)

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Updates the model in place. The update is skipped if anything is non-finite.

        Args:
            model: The module that the optimizer was created with.
            grads: Gradients from `value_and_grad`. You may average them over replicas or clip them.
            **kwargs: Extra arguments of the optax optimizer's ``update``. With
                ``scaled_by=optimizers`` it follows the loss scale of gradients that several
                optimizers share.

        Returns:
            The difference of new and old parameters, in float32: zeros if the step was skipped.

        Raises:
            ValueError: If the model does not belong to this optimizer.
        """
        params, grads = (nnx.as_pure(nnx.state(x, self.wrt)) for x in (model, grads))
        if unread := _unread(params, self):  # they may be missing
            found = {**dict.fromkeys(unread), **dict(nnx.to_flat_state(grads))}
            grads = nnx.from_flat_state(found.items())
        good, before = self.forward.get_value(), nnx.as_pure(self.opt_state)
        if (shared := kwargs.pop("scaled_by", None)) is not None:
            kwargs["scaled_by"] = [other.opt_state for other in _optimizers(shared, "scaled_by")]
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
        """Returns the metrics of the last update, named as those of `build_train_step`."""
        return nnx.as_pure(self.opt_state).metrics()


def value_and_grad(
    f: Callable[P, R],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
) -> Callable[P, tuple[R, Any]]:
    """Returns ``nnx.value_and_grad(f)`` under an optimizer's policy and loss scale.

    The function runs under autocast. Its loss is scaled for the backward pass, and the returned
    gradients are unscaled. Changes that it makes to modules (statistics, counts of random keys,
    caches) are applied if the loss, the gradients and the changed state are finite. Otherwise they
    are undone, and the optimizer's next update is skipped.

    Args:
        f: A function of modules that returns a real scalar loss, or ``(loss, aux)``.
        optimizer: The `Optimizer` of the model. If several optimizers share the gradient (a GAN's
            generator and discriminator), a tuple of them, each for the argument at its place: the
            smallest of their loss scales is used. Pass the same tuple to each ``update`` as
            ``scaled_by=``.
        argnums: The arguments to differentiate, as for ``nnx.value_and_grad``. A plain number
            selects the variables that the optimizer trains.
        has_aux: Whether ``f`` returns ``(loss, aux)``.
        axis_name: The mapped axis or axes of replicas, within ``jax.shard_map`` or ``jax.pmap``.
            Loss, gradients and changed variables, such as batch statistics, are averaged over them
            in float32. Each replica keeps its own ``aux``.

    Returns:
        A function of the same arguments that returns ``(value, grads)``: ``value`` as ``f``
        returned it, and the unscaled gradients in float32, without those of frozen variables.

    Raises:
        TypeError: If ``f`` is not a function or ``optimizer`` is not an `Optimizer`; while tracing,
            if ``f`` does not return a real scalar loss.
        ValueError: If ``argnums`` are not positions of the function's arguments, ``axis_name`` is
            invalid, or no axis of that name is mapped where the function is called.

    Example:
        >>> import jax.numpy as jnp, mpjax.nnx, optax
        >>> from flax import nnx
        >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        >>> optimizer = mpjax.nnx.Optimizer(model, optax.sgd(0.1), "mixed_bfloat16")
        >>> gradient = mpjax.nnx.value_and_grad(lambda model: jnp.sum(model.bias[...]), optimizer)
        >>> loss, grads = gradient(model)
        >>> grads["bias"][...].tolist()
        [1.0]

    It does the work of torch.amp's ``autocast`` and ``GradScaler``.
    """
    check_callable(f, "f")
    axes = axes_of(axis_name)
    optimizers = _optimizers(optimizer, "optimizer")
    run = with_float32_loss(f, optimizers[0].policy, optimizers[0].loss_scale)

    def trained(args, argnum, place):
        # One optimizer may serve several arguments.
        its = optimizers[min(place, len(optimizers) - 1)]
        if not isinstance(argnum, int):
            return argnum
        unread = _unread(nnx.as_pure(nnx.state(args[argnum], its.wrt)), its)
        frozen = lambda path, variable: path in unread  # noqa: E731
        return nnx.DiffState(argnum, nnx.All(its.wrt, nnx.Not(frozen)) if unread else its.wrt)

    single = isinstance(argnums, str) or not isinstance(argnums, Sequence)
    numbers = jax.tree.map(lambda a: getattr(a, "argnum", a), argnums)

    @functools.wraps(f)
    def wrapped(*args, **kwargs):
        positions("mpjax.nnx.value_and_grad", numbers, len(args))
        scale = smallest([each.loss_scale for each in optimizers])
        listed: Any = [argnums] if single else argnums
        wanted = tuple(trained(args, argnum, place) for place, argnum in enumerate(listed))
        old = {path: v.get_value() for path, v in _variables((args, kwargs))}
        local = dict(zip(old, local_to(axes, axis_name, [*old.values()]), strict=True))
        for path, variable in _variables((args, kwargs)) if axes else ():
            variable.set_value(local[path])
        scaled, wanted = with_scaled_loss(run, scale, has_aux), wanted[0] if single else wanted
        gradient = nnx.value_and_grad(scaled, argnums=wanted, has_aux=True)
        (_, (loss, aux)), grads = gradient(*args, **kwargs)
        loss, grads = unscaled(loss, grads, scale.unscale, axes, axis_name)
        # Looked up again, because the function may have replaced variables by others. Those that it
        # added have no value to go back to.
        state = [(v, path) for path, v in _variables((args, kwargs)) if path in old]
        new, before = [v.get_value() for v, _ in state], [old[path] for _, path in state]
        if axes:
            new = averaged_state(new, [local[path] for _, path in state], before, axis_name)
        checks = {"loss": jnp.isfinite(loss), "state": stays_finite(new, before)}
        finite = checks["loss"] & checks["state"] & all_finite(grads)
        for (variable, _), value in zip(state, select(finite, new, before), strict=True):
            variable.set_value(value)
        for each in optimizers:
            # Several gradients may be computed before one update, which all of them decide.
            each.forward.set_value(jax.tree.map(operator.and_, each.forward.get_value(), checks))
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def _unread(params: nnx.State, optimizer: Optimizer) -> set[Any]:
    """Returns the paths of the variables whose gradients an optimizer does not read."""
    unread = optimizer.tx._rules.inner.reads(params).unread
    paths = (path for path, _ in nnx.to_flat_state(params))
    return {path for path, flag in zip(paths, unread, strict=True) if flag}


def _optimizers(value: Any, argument: str) -> Sequence[Optimizer]:
    """Returns one optimizer or several as a sequence."""
    optimizers = value if isinstance(value, Sequence) else (value,)
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise TypeError(
            f"{argument}={brief(value)} must be an mpjax.nnx.Optimizer, which has the policy and "
            "the loss scale, or a tuple of several."
        )
    return optimizers


def _variables(tree: Any) -> list[tuple[Any, nnx.Variable]]:
    return [(path, v) for path, v in nnx.iter_graph(tree) if isinstance(v, nnx.Variable)]
