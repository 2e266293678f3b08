"""Mixed precision for a loop of one's own: an optimizer that holds the loss scale and masters."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import jmp
import optax

from mpjax._src.errors import brief
from mpjax._src.hardware.devices import warn_if_unfit
from mpjax._src.patterns import name_of
from mpjax._src.policy import Policy, get_policy
from mpjax._src.training.gradients import scaled_value_and_grad, with_float32_loss
from mpjax._src.training.levels import under_policy
from mpjax._src.training.loss_scale import LossScale, get_loss_scale
from mpjax._src.training.optimizers import check_kind, updated_if
from mpjax._src.training.transaction import adjusted, counted
from mpjax._src.trees import all_finite, is_array, is_one_bool

P = ParamSpec("P")
R = TypeVar("R")


class MixedPrecisionState(NamedTuple):
    """State of `mixed_precision`.

    Attributes:
        inner_state: The state of the inner optimizer in float32, with masters of half parameters.
        loss_scale: The loss scale.
        skipped_steps: How many updates were skipped in all, an int32 scalar.
        consecutive_skips: How many were skipped in a row up to now, an int32 scalar.
        grads_finite: Whether the last gradients were finite, a bool scalar.
        loss_finite: Whether the last loss was, as far as `update` was told, a bool scalar.
        state_finite: The caller's verdict on what else the last step made, a bool scalar.
    """

    inner_state: optax.OptState
    loss_scale: Any
    skipped_steps: jax.Array
    consecutive_skips: jax.Array
    grads_finite: jax.Array
    loss_finite: jax.Array
    state_finite: jax.Array

    @property
    def finite(self) -> jax.Array:
        """Whether the last update was applied, a bool scalar."""
        return self.grads_finite & self.loss_finite & self.state_finite

    def metrics(self) -> dict[str, jax.Array]:
        """Returns what the last update found, under the names of `build_train_step`'s metrics."""
        return {
            "grads_finite": self.grads_finite,
            "loss_finite": self.loss_finite,
            "state_finite": self.state_finite,
            "loss_scale": jnp.asarray(self.loss_scale.loss_scale, jnp.float32),
            "skipped_steps": self.skipped_steps,
            "consecutive_skips": self.consecutive_skips,
        }


class MixedPrecision(optax.GradientTransformationExtraArgs):
    """What `mixed_precision` returns: an optax optimizer that also differentiates.

    Attributes:
        init: As every optax optimizer has it.
        update: As every optax optimizer has it. ``update(..., value=loss)`` has the loss judged
            too (or ``loss_finite=verdict``), ``update(..., finite=verdict)`` adds the caller's
            verdict on what else the step made: a new model state.
        policy: The `Policy` that functions run under.
    """

    policy: Policy

    def value_and_grad(
        self,
        fun: Callable[P, R],
        opt_state: optax.OptState,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: str | tuple[str, ...] | None = None,
    ) -> Callable[P, tuple[R, Any]]:
        """Returns ``jax.value_and_grad(fun)`` under the policy and the loss scale.

        Args:
            fun: A function whose result is a real scalar loss, or ``(loss, aux)``.
            opt_state: The state of this optimizer, or of one that it is a part of.
            argnums: As for `scaled_value_and_grad`, Equinox's modules included.
            has_aux: Whether ``fun`` returns ``(loss, aux)``.
            axis_name: As for `scaled_value_and_grad`.

        Returns:
            A function of the same arguments that returns ``(value, grads)``: ``value`` as ``fun``
            returned it, gradients unscaled, in float32. Where they are not finite, so they come:
            ``update`` skips them.

        Raises:
            TypeError: As `scaled_value_and_grad`.
            ValueError: If ``opt_state`` holds no state of `mixed_precision`, or two.
        """
        run = with_float32_loss(fun, self.policy)
        scale = _state_in(opt_state).loss_scale
        gradient = scaled_value_and_grad(run, scale, argnums, has_aux, axis_name)
        return lambda *args, **kwargs: gradient(*args, **kwargs)[:2]


def mixed_precision(
    optimizer: optax.GradientTransformation,
    policy: str | jmp.Policy = "mixed_bfloat16",
    loss_scale: LossScale | str | float | None = "auto",
) -> MixedPrecision:
    """Lets a training loop of one's own run in mixed precision: it is the loop's optimizer.

    Its state holds the loss scale, float32 masters of half parameters and the counters, so that the
    loop carries nothing new. Where a gradient is not finite the update is zeros, the inner state is
    as before, bit for bit, and the loss scale sinks.

    Args:
        optimizer: Any optax optimizer. It works in float32, on float32 masters of half parameters.
        policy: As for `build_train_step`, but functions always run under `autocast`: which of
            their arguments casts at the boundary would mean is not known. Parameters that it stores
            in half are made so by ``optimizer.policy.cast_to_param(params)``.
        loss_scale: As for `build_train_step`.

    Returns:
        An optax optimizer with `MixedPrecision.value_and_grad`, which takes the place of
        ``jax.value_and_grad``.

    Raises:
        TypeError: If ``optimizer`` is no optimizer.
        ValueError: If an argument is not legal; from ``init``, if the policy stores parameters in
            half and these are not.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax, optax
        >>> optimizer = mpjax.mixed_precision(optax.sgd(0.1), "mixed_float16")
        >>> loss_fn = lambda params, x: jnp.mean((x @ params) ** 2)
        >>> @jax.jit
        ... def train_step(params, opt_state, x):
        ...     loss, grads = optimizer.value_and_grad(loss_fn, opt_state)(params, x)
        ...     updates, opt_state = optimizer.update(grads, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state
        >>> params = jnp.ones((3, 2))
        >>> opt_state = optimizer.init(params)
        >>> params, opt_state = train_step(params, opt_state, jnp.full((4, 3), jnp.nan))
        >>> metrics = opt_state.metrics()
        >>> float(params[0, 0]), int(metrics["skipped_steps"]), float(metrics["loss_scale"])
        (1.0, 1, 32768.0)

    Apex's ``amp.initialize`` and TensorFlow's ``LossScaleOptimizer`` have this form.
    """
    policy = get_policy(policy)
    warn_if_unfit(policy, stacklevel=2)
    return in_mixed_precision(optimizer, policy, loss_scale, "optimizer")


def in_mixed_precision(
    optimizer: optax.GradientTransformation, policy: Policy, loss_scale: Any, argument: str
) -> MixedPrecision:
    """As `mixed_precision`, of an optimizer that errors call ``argument``."""
    inner, scale = under_policy(policy, optimizer, argument), get_loss_scale(policy, loss_scale)

    def init(params):
        _check_stored(policy, params)
        counters = (jnp.zeros((), jnp.int32) for _ in range(2))
        verdicts = (jnp.ones((), bool) for _ in range(3))
        first = jax.tree.map(jnp.array, scale)  # its own: a buffer cannot be donated twice
        return MixedPrecisionState(inner.init(params), first, *counters, *verdicts)

    def update(updates, state, params=None, *, finite=True, loss_finite=True, **extra_args):
        for name, verdict in (("finite", finite), ("loss_finite", loss_finite)):
            if not is_one_bool(verdict):
                raise ValueError(f"{name}={brief(verdict)} must be one bool.")
        check_kind(state, MixedPrecisionState, "mixed_precision")
        verdicts = {
            "grads_finite": all_finite(updates),
            "loss_finite": jnp.logical_and(loss_finite, all_finite(extra_args.get("value"))),
            "state_finite": jnp.asarray(finite),
        }
        finite = functools.reduce(jnp.logical_and, verdicts.values())
        updates, inner_state = updated_if(
            finite, inner, updates, state.inner_state, params, extra_args
        )
        scale = adjusted(state.loss_scale, **verdicts)
        return updates, MixedPrecisionState(
            inner_state, scale, **counted(state, finite), **verdicts
        )

    made = MixedPrecision(init, update)
    made.policy = policy
    return made


def _state_in(opt_state: Any) -> MixedPrecisionState:
    is_state = lambda node: isinstance(node, MixedPrecisionState)  # noqa: E731
    found = [x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)]
    if len(found) != 1:
        raise ValueError(
            f"opt_state={brief(opt_state)} must hold one state of mpjax.mixed_precision, for its "
            f"loss scale, but holds {len(found) or 'none'}. Pass what optimizer.init(params) or "
            "the last optimizer.update returned."
        )
    return found[0]


def _check_stored(policy: Policy, params: Any) -> None:
    """Refuses parameters that the policy stores in another dtype."""
    stored = policy.cast_to_param(params)
    pairs = zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(stored), strict=True)
    for (keys, leaf), wanted in pairs:
        if is_array(leaf) and leaf.dtype != wanted.dtype:
            raise ValueError(
                f"{name_of('params', keys)} is {leaf.dtype}, but policy={str(policy)!r} stores it "
                f"in {wanted.dtype}. Make parameters so before the first step: params = "
                "optimizer.policy.cast_to_param(params)."
            )
