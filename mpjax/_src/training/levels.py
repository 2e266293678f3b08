"""The optimizer that a policy asks for: master weights, rounding and 8-bit moments."""

from collections.abc import Callable
from typing import Any

import optax

from mpjax._src.policy import Policy
from mpjax._src.training.masters import with_kahan_summation, with_master_weights
from mpjax._src.training.moments import with_8bit_moments
from mpjax._src.training.optimizers import as_optimizer
from mpjax._src.training.rounding import with_stochastic_rounding
from mpjax._src.training.stored import Optimizer, in_full_precision

# How half parameters without masters are rounded, by the policy's `rounding`.
ROUNDINGS: dict[str, Callable[[optax.GradientTransformation], Any]] = {
    "nearest": in_full_precision,
    "stochastic": with_stochastic_rounding,
    "kahan": with_kahan_summation,
}


def under_policy(
    policy: Policy, optimizer: optax.GradientTransformation, argument: str
) -> Optimizer:
    """Returns an optimizer that works in float32, with the masters and moments of a policy.

    Args:
        policy: The policy.
        optimizer: Any optax optimizer.
        argument: The name of ``optimizer`` in errors.
    """
    inner = as_optimizer(optimizer, argument)
    if policy.moments == "8bit":
        inner = with_8bit_moments(inner)
    if policy.master_weights:
        return with_master_weights(inner, policy.masters)  # type: ignore[return-value]
    return ROUNDINGS[policy.rounding](inner)
