"""Ways to keep fewer bytes for the backward pass, as data: the settings that `fit_memory` tries."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from mpjax._src.core.policy.policy import Policy

# Settings of a policy, each of which keeps fewer bytes than those before it; where "8bit" stands
# among the numbers depends on the model. They add up, and a setting replaces an earlier one of its
# name. What `Policy` does not accept is left out.
LADDER: tuple[dict[str, Any], ...] = (
    {"fused_attention": True},  # no scores of attention
    {"chunked_loss": True},  # no logits
    {"storage": "lean"},  # elementwise operations are computed again
    {"storage": 0.5},  # matmuls are computed again, as far as the budget asks for it
    {"storage": 0.25},
    {"storage": "8bit"},  # most of what is kept takes a byte for each entry
    {"storage": 0.0},
)

# What `jax.checkpoint` may keep of the function that it is put around, by name.
KEEPING: dict[str, Callable[..., Any]] = {
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "offload_dot_with_no_batch_dims": jax.checkpoint_policies.offload_dot_with_no_batch_dims(
        "device", "pinned_host"
    ),
}


AS_GIVEN = "as given"  # the name of a policy to which nothing is added


class Setting(NamedTuple):
    """One way to compile a training step."""

    name: str  # its name in tables
    policy: Policy
    keeping: str = ""  # the name in `KEEPING` of what ``jax.checkpoint`` keeps; "" without one

    def checkpoint(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function with this setting's ``jax.checkpoint`` around it, or as it is."""
        keeping = KEEPING.get(self.keeping)
        return jax.checkpoint(fun, policy=keeping) if keeping else fun


def rungs(
    policy: Policy, matters: Callable[[Setting, Setting], bool] = lambda before, after: True
) -> list[Setting]:
    """Returns the ladder of a policy: itself, and then one setting more at a time.

    Settings for which ``matters`` is false, such as fused attention of a model without attention,
    are left out.
    """
    found, added = [Setting(AS_GIVEN, policy)], dict[str, Any]()
    for step in LADDER:
        setting = _with(policy, added | step)
        if setting and setting.policy != found[-1].policy and matters(found[-1], setting):
            found.append(setting)
            added = added | step
    return found


def each_alone(policy: Policy) -> list[Setting]:
    """Returns a policy with each setting of the ladder alone."""
    found = (_with(policy, step) for step in LADDER)
    return [setting for setting in found if setting and setting.policy != policy]


def checkpoints(ladder: Sequence[Setting]) -> list[Setting]:
    """Returns each ``jax.checkpoint`` under the given policy, and under all but lower storage."""
    given = ladder[0]
    stored = [setting for setting in ladder if setting.policy.storage == given.policy.storage]
    return [
        Setting(
            f"{'' if base == given else f'{base.name}, '}jax.checkpoint, {name}", base.policy, name
        )
        for base in dict.fromkeys((given, stored[-1]))
        for name in KEEPING
    ]


# ---- inside --------------------------------------------------------------------------------------


def _with(policy: Policy, settings: dict[str, Any]) -> Setting | None:
    """Returns a policy with settings, or None if it does not accept them."""
    try:
        changed = policy.replace(**settings)
    except (TypeError, ValueError):
        return None
    return Setting(", ".join(map(_word, settings.items())), changed)


def _word(setting: tuple[str, Any]) -> str:
    name, value = setting
    return name.replace("_", " ") if value is True else f"{name} {value}"
