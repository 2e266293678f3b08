"""What an optimizer keeps for each weight under a policy."""

from collections.abc import Callable
from typing import Any

import optax

from mpjax._src.policy import Policy
from mpjax._src.training.masters import with_kahan_summation, with_master_weights
from mpjax._src.training.moments import with_8bit_moments
from mpjax._src.training.optimizers import as_optimizer
from mpjax._src.training.rounding import with_stochastic_rounding
from mpjax._src.training.stored import Optimizer, in_full_precision

# What becomes of small updates of half parameters without masters, by the policy's `rounding`.
ROUNDINGS: dict[str, Callable[[optax.GradientTransformation], Any]] = {
    "nearest": in_full_precision,
    "stochastic": with_stochastic_rounding,
    "kahan": with_kahan_summation,
}


def under_policy(
    policy: Policy, optimizer: optax.GradientTransformation, argument: str
) -> Optimizer:
    """Returns an optimizer that works in float32, and keeps of each weight what a policy says.

    Args:
        policy: The policy.
        optimizer: Any optax optimizer.
        argument: What errors call it.
    """
    inner = as_optimizer(optimizer, argument)
    if policy.moments == "8bit":
        inner = with_8bit_moments(inner)
    if policy.master_weights:
        return with_master_weights(inner, policy.masters)  # type: ignore[return-value]
    return ROUNDINGS[policy.rounding](inner)
