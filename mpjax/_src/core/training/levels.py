"""The optimizer that a policy asks for: master weights, rounding and 8-bit moments."""

from typing import Any

import jax
import optax

from mpjax._src.core.base.dtypes import HALVES
from mpjax._src.core.base.errors import PrecisionWarning, warn_user
from mpjax._src.core.policy.fields import CHOICES
from mpjax._src.core.policy.grammar import get_policy, means_another_policy
from mpjax._src.core.policy.policy import Policy, PolicyLike
from mpjax._src.core.policy.recommend import warn_if_unfit
from mpjax._src.core.training.loss_scale import has_protocol
from mpjax._src.core.training.masters import with_kahan_summation, with_master_weights
from mpjax._src.core.training.optimizers import Optimizer, as_optimizer, in_full_precision


def training_policy(policy: "PolicyLike") -> Policy:
    """Returns the policy of a training loop, and warns if its author may mean another one."""
    resolved = get_policy(policy)
    if means_another_policy(policy):
        name = resolved.compute_dtype.name
        warn_user(
            f"policy={policy!r} stores the parameters in {name} too. Did you mean 'mixed_{name}', "
            f"which stores them in float32? For parameters in {name}, write 'O3:{name}', or "
            f"'O2:{name}' for float32 master weights.",
            PrecisionWarning,
        )
    warn_if_unfit(resolved)
    return resolved


def under_policy(
    policy: Policy, optimizer: optax.GradientTransformation, argument: str
) -> Optimizer:
    """Returns an optimizer that works in float32, with the masters and moments of a policy.

    Errors call the optimizer ``argument``.

    Raises:
        TypeError: If ``optimizer`` is not an optax optimizer.
        ValueError: From ``init``, if the state of ``optimizer`` already holds a loss scale.
    """
    _warn_if_unused(policy)
    inner = _unscaled(as_optimizer(optimizer, argument), argument)
    # 8-bit moments are innermost: what is around them passes float32 parameters to their optimizer.
    if policy.moments == "8bit":
        from mpjax._src.optim.moments import with_8bit_moments

        inner = with_8bit_moments(inner)
    if policy.master_weights:
        return with_master_weights(inner, policy.masters)  # type: ignore[return-value]
    if policy.rounding == "stochastic":
        from mpjax._src.optim.rounding import with_stochastic_rounding

        return with_stochastic_rounding(inner)  # type: ignore[return-value]
    return with_kahan_summation(inner) if policy.rounding == "kahan" else in_full_precision(inner)


def _warn_if_unused(policy: Policy) -> None:
    """Warns of a setting for 16-bit parameters that this policy has none for."""
    stored = {policy.param_dtype, *(dtype for _, dtype in policy.overrides)}
    # Each of the two settings has an effect on 16-bit weights either with masters or without them.
    for name, kept in (("masters", True), ("rounding", False)):
        value = getattr(policy, name)
        if value == CHOICES[name].values[0]:
            continue
        if not stored & {*HALVES}:
            why = (
                f"all parameters are stored in {policy.param_dtype}, where no update is lost. An "
                f"{'O2' if kept else 'O3'} policy stores them in 16 bits"
            )
        elif policy.master_weights != kept:
            verb = "has no" if kept else "keeps"
            why = f"the policy {verb} master weights. Add master_weights={str(kept).lower()}"
        else:
            continue
        warn_user(f"policy={str(policy)!r}: {name}={value} has no effect: {why}.")


def _unscaled(inner: Any, argument: str) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer whose ``init`` refuses a state with its own loss scale."""

    def init(params):
        state = inner.init(params)
        if any(map(has_protocol, jax.tree.leaves(state, is_leaf=has_protocol))):
            raise ValueError(
                f"{argument} is in mixed precision already: its state contains a loss scale, and a "
                "second one around it would be adjusted by gradients that it did not scale. Pass "
                "the optax optimizer itself: mixed_precision, build_train_step and the TrainState "
                "and Optimizer of Flax each wrap it once."
            )
        return state

    return optax.GradientTransformationExtraArgs(init, inner.update)
