"""Flax linen: its `TrainState`, with a loss scale, masters, and steps that are skipped."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jmp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from mpjax._src.errors import check_callable
from mpjax._src.hardware.devices import warn_if_unfit
from mpjax._src.policy import Policy, get_policy
from mpjax._src.training.gradients import with_float32_loss, with_scaled_loss
from mpjax._src.training.loss_scale import SCALES, LossScale
from mpjax._src.training.masters import apply_updates
from mpjax._src.training.mixed_precision import in_mixed_precision
from mpjax._src.training.serialization import known_to_flax
from mpjax._src.trees import cast_like, select, stays_finite, widen

P = ParamSpec("P")
R = TypeVar("R")


class TrainState(train_state.TrainState):
    """``flax.training.train_state.TrainState`` in mixed precision.

    Subclass it as you would that one, for batch statistics and other collections.

    Attributes:
        tx: A `MixedPrecision`; its state holds the loss scale, the masters and the counters.
        policy: The `Policy` that `value_and_grad` runs functions under.
        loss_scale: The loss scale.
        skipped_steps: How many steps were skipped in all, an int32 scalar.
        consecutive_skips: How many were skipped in a row up to now, an int32 scalar.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, mpjax.linen, optax
        >>> model, x = nn.Dense(1), jnp.full((2, 3), 0.1)
        >>> state = mpjax.linen.TrainState.create(
        ...     apply_fn=model.apply,
        ...     params=model.init(jax.random.key(0), x)["params"],
        ...     tx=optax.sgd(0.1),
        ...     policy="mixed_float16",
        ... )
        >>> @jax.jit
        ... def train_step(state, x):
        ...     loss_fn = lambda params: jnp.mean(state.apply_fn({"params": params}, x) ** 2)
        ...     loss, grads = state.value_and_grad(loss_fn)(state.params)
        ...     return state.apply_gradients(grads=grads), loss
        >>> state, loss = train_step(state, x)
        >>> int(state.step), float(state.loss_scale.loss_scale)
        (1, 65536.0)

    ``flax.training.dynamic_scale`` without its three more lines in every loop.
    """

    @property
    def policy(self) -> Policy:
        return self.tx.policy  # type: ignore[attr-defined]

    @property
    def loss_scale(self) -> Any:
        return self.opt_state.loss_scale  # type: ignore[attr-defined]

    @property
    def skipped_steps(self) -> jax.Array:
        return self.opt_state.skipped_steps  # type: ignore[attr-defined]

    @property
    def consecutive_skips(self) -> jax.Array:
        return self.opt_state.consecutive_skips  # type: ignore[attr-defined]

    @classmethod
    def create(  # type: ignore[override]
        cls,
        *,
        apply_fn: Callable[..., Any],
        params: Any,
        tx: optax.GradientTransformation,
        policy: str | jmp.Policy = "mixed_bfloat16",
        loss_scale: LossScale | str | float | None = "auto",
        **kwargs: Any,
    ) -> "TrainState":
        """Returns the state before the first step.

        Args:
            apply_fn: As for Flax's.
            params: As for Flax's; what the policy stores in half is cast.
            tx: Any optax optimizer. It works in float32, on float32 masters of half parameters.
            policy: As for `build_train_step`.
            loss_scale: As for `build_train_step`.
            **kwargs: The fields of a subclass.

        Returns:
            The state; its ``tx`` is the optimizer in mixed precision.

        Raises:
            TypeError: If ``tx`` is no optimizer.
            ValueError: If an argument is not legal.
        """
        known_to_flax(*SCALES)
        policy = get_policy(policy)
        warn_if_unfit(policy, stacklevel=2)
        optimizer = in_mixed_precision(tx, policy, loss_scale, "tx")
        trained, overwritten = _split(params)
        state: TrainState = super().create(
            apply_fn=apply_fn,
            params=_join(policy.cast_to_param(trained), overwritten),
            tx=optimizer,
            **kwargs,
        )
        return state.replace(step=jnp.zeros((), jnp.int32))

    def value_and_grad(
        self, loss_fn: Callable[P, R], has_aux: bool = False
    ) -> Callable[P, tuple[R, Any]]:
        """Returns ``jax.value_and_grad(loss_fn)`` under the policy and the loss scale.

        Args:
            loss_fn: A function of parameters, and of more if you like, whose result is a real
                scalar loss, or ``(loss, aux)``.
            has_aux: Whether it returns ``(loss, aux)``.

        Returns:
            A function that returns ``(value, grads)``: ``value`` as ``loss_fn`` returned it,
            gradients unscaled and in float32. What Flax overwrites with its gradient (the scales
            of float8) is the new value as it is.

        Raises:
            TypeError: If ``loss_fn`` is no function; while tracing, if it returns something other
                than a real scalar loss.
        """
        check_callable(loss_fn, "loss_fn")
        run = with_float32_loss(loss_fn, self.policy)
        scaled = with_scaled_loss(run, self.loss_scale, has_aux)
        gradient = jax.value_and_grad(scaled, has_aux=True)

        @functools.wraps(loss_fn)
        def wrapped(*args, **kwargs):
            (_, (loss, aux)), grads = gradient(*args, **kwargs)
            trained, overwritten = _split(grads)
            grads = _join(self.loss_scale.unscale(widen(trained)), overwritten)
            return ((loss, aux) if has_aux else loss), grads

        return wrapped

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "TrainState":
        """Returns the state after a step; where something is not finite, all stays as it was.

        Args:
            grads: From `value_and_grad`, averaged over replicas or clipped as you like.
            **kwargs: New values of fields (batch statistics), which are judged and skipped too.

        Returns:
            The new state. A skipped step counts in ``skipped_steps``, not in ``step``.
        """
        old = {name: getattr(self, name) for name in kwargs}
        leaves = jax.tree.leaves(kwargs)  # in the containers that the state has: a dict may come
        new = cast_like(jax.tree.unflatten(jax.tree.structure(old), leaves), old)
        (trained, written), (params, _) = _split(grads), _split(self.params)
        finite = stays_finite(new, old)
        updates, opt_state = self.tx.update(trained, self.opt_state, params, finite=finite)
        params = _join(apply_updates(params, updates, opt_state), written)
        after = {"params": params, "step": self.step + 1, **new}
        before = {"params": self.params, "step": self.step, **old}
        return self.replace(opt_state=opt_state, **select(opt_state.finite, after, before))


def _split(params: Any) -> tuple[Any, Any]:
    """Returns the trained part of parameters, and what Flax overwrites with its gradient."""
    if isinstance(params, jax.Array) or OVERWRITE_WITH_GRADIENT not in params:
        return params, None
    return params["params"], params[OVERWRITE_WITH_GRADIENT]


def _join(trained: Any, overwritten: Any) -> Any:
    if overwritten is None:
        return trained
    return {"params": trained, OVERWRITE_WITH_GRADIENT: overwritten}
