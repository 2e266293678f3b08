"""The optimizer that a policy asks for: master weights, rounding and 8-bit moments."""

from collections.abc import Callable
from typing import Any

import jmp
import optax

from mpjax._src.errors import PrecisionWarning, warn_user
from mpjax._src.hardware.devices import warn_if_unfit
from mpjax._src.policy import Policy, get_policy, means_another_policy
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


def training_policy(policy: str | jmp.Policy) -> Policy:
    """Returns the policy of a training loop, and warns if its author may mean another one."""
    found = get_policy(policy)
    if means_another_policy(policy):
        name = found.compute_dtype.name
        warn_user(
            f"policy={policy!r} stores the parameters in {name} too. Did you mean 'mixed_{name}', "
            f"which stores them in float32? For parameters in {name}, write 'O3:{name}', or "
            f"'O2:{name}' for float32 master weights.",
            PrecisionWarning,
        )
    warn_if_unfit(found, stacklevel=3)
    return found


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
