"""Flax linen: its `TrainState`, with a loss scale, master weights and skipped steps."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state

from mpjax._src.core.base.errors import check_callable
from mpjax._src.core.base.outlines import outline
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import cast_like, select, stays_finite
from mpjax._src.core.policy.policy import Policy, PolicyLike
from mpjax._src.core.training.gradients import value_and_grad, with_float32_loss
from mpjax._src.core.training.levels import training_policy
from mpjax._src.core.training.loss_scale import LossScale
from mpjax._src.core.training.masters import apply_updates
from mpjax._src.core.training.mixed_precision import in_mixed_precision
from mpjax._src.core.training.replicas import axes_of
from mpjax._src.core.training.serialization import known_to_flax

P = ParamSpec("P")
R = TypeVar("R")


@public("mpjax.linen")
class TrainState(train_state.TrainState, repr=False):
    """``flax.training.train_state.TrainState`` for mixed precision.

    Subclass it like Flax's class to add batch statistics and other collections.

    Attributes:
        tx: The optimizer, a `MixedPrecision`. Its state contains the loss scale, the master weights
            and the skip counters.
        policy: The `Policy` that `value_and_grad` runs functions under.
        loss_scale: The loss scale.
        skipped_steps: The total number of skipped steps, an int32 scalar.
        consecutive_skips: The number of steps skipped in a row up to now, an int32 scalar.

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

    It replaces ``flax.training.dynamic_scale``, which takes three more lines in every loop.
    """

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**{"repr": False, **kwargs})
        known_to_flax(cls)  # flax alone narrows parameters to those of another policy

    __repr__ = outline

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
        policy: "PolicyLike" = "mixed_bfloat16",
        loss_scale: LossScale | str | float | None = "auto",
        **kwargs: Any,
    ) -> "TrainState":
        """Returns the initial state.

        Args:
            apply_fn: The model's ``apply``, as for Flax's class.
            params: The parameters, as for Flax's class. They are cast to the dtypes that the policy
                stores; frozen ones never to a wider dtype.
            tx: Any optax optimizer. It works in float32, on the master weights of 16-bit
                parameters.
            policy: A policy or its name, as for `build_train_step`.
            loss_scale: The loss scale, as for `build_train_step`.
            **kwargs: The fields of a subclass.

        Returns:
            The state. Its ``tx`` is ``mixed_precision(tx, policy, loss_scale)``.

        Raises:
            TypeError: If ``tx`` is not an optax optimizer.
            ValueError: If another argument is invalid.
        """
        policy = training_policy(policy)
        optimizer = in_mixed_precision(
            tx, policy, loss_scale, "tx", "state.value_and_grad(loss_fn)"
        )
        trained, overwritten = _split(params)
        state: TrainState = super().create(
            apply_fn=apply_fn,
            params=_join(optimizer._rules.stored(trained), overwritten),
            tx=optimizer,
            **kwargs,
        )
        # Flax counts from a Python 0. An array from the start keeps the type of the state as it is.
        return state.replace(step=jnp.zeros((), jnp.int32))

    def value_and_grad(
        self,
        loss_fn: Callable[P, R],
        has_aux: bool = False,
        axis_name: str | tuple[str, ...] | None = None,
    ) -> Callable[P, tuple[R, Any]]:
        """Returns ``jax.value_and_grad(loss_fn)`` under the policy and the loss scale.

        Args:
            loss_fn: A function whose first argument is the parameters, and which returns a real
                scalar loss, or ``(loss, aux)``.
            has_aux: Whether ``loss_fn`` returns ``(loss, aux)``.
            axis_name: The mapped axis or axes of replicas, as for `scaled_value_and_grad`. Each
                replica keeps its own ``aux``: average new batch statistics yourself.

        Returns:
            A function of the same arguments that returns ``(value, grads)``: ``value`` as
            ``loss_fn`` returned it, and the unscaled gradients of the parameters in float32.
            Variables that Flax overwrites with their gradient (the scales of float8) are not
            unscaled: their gradient is their new value.

        Raises:
            TypeError: If ``loss_fn`` is not a function; while tracing, if it does not return a real
                scalar loss.
            ValueError: If ``axis_name`` is invalid, or no axis of that name is mapped where the
                function is called.
        """
        check_callable(loss_fn, "loss_fn")
        axes_of(axis_name)

        def unscale(grads):
            trained, overwritten = _split(grads)
            return _join(self.loss_scale.unscale(trained), overwritten)

        run = with_float32_loss(loss_fn, self.policy, self.loss_scale)
        settings = run, self.loss_scale, unscale, 0, has_aux, axis_name
        wrapped = lambda *args, **kwargs: value_and_grad(*settings, *args, **kwargs)[:2]  # noqa: E731
        return functools.wraps(loss_fn)(wrapped)

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "TrainState":
        """Returns the state after a step. The step is skipped if anything is non-finite.

        A skipped step changes only the loss scale and the skip counters.

        Args:
            grads: Gradients from `value_and_grad`. You may average them over replicas or clip them.
            **kwargs: New values of other fields, such as batch statistics. They must be finite too,
                and keep their old values if the step is skipped.

        Returns:
            The new state. A skipped step counts in ``skipped_steps``, not in ``step``.

        Raises:
            ValueError: If the state was created by a different optimizer.
        """
        old = {name: getattr(self, name) for name in kwargs}
        leaves = jax.tree.leaves(kwargs)  # put into the state's containers: these may be dicts
        new = cast_like(jax.tree.unflatten(jax.tree.structure(old), leaves), old)
        (trained, written), (params, _) = _split(grads), _split(self.params)
        finite = stays_finite(new, old)
        updates, opt_state = self.tx.update(trained, self.opt_state, params, finite=finite)
        params = _join(apply_updates(params, updates, opt_state), written)
        # `update` has chosen its own state already. All other fields follow its verdict.
        after = {"params": params, "step": self.step + 1, **new}
        before = {"params": self.params, "step": self.step, **old}
        return self.replace(opt_state=opt_state, **select(opt_state.finite, after, before))


known_to_flax(TrainState)


def _split(params: Any) -> tuple[Any, Any]:
    """Returns the trained parameters, and the variables that Flax overwrites with gradients."""
    # An array is asked first: ``in`` would compare its entries with the name.
    if isinstance(params, jax.Array) or OVERWRITE_WITH_GRADIENT not in params:
        return params, None
    return params["params"], params[OVERWRITE_WITH_GRADIENT]


def _join(trained: Any, overwritten: Any) -> Any:
    if overwritten is None:
        return trained
    return {"params": trained, OVERWRITE_WITH_GRADIENT: overwritten}
