"""The policy and the 16-bit dtype that suit a device."""

import jax
import numpy as np

from mpjax._src.core.base.devices import device_facts
from mpjax._src.core.base.dtypes import default_device, half_of
from mpjax._src.core.base.errors import warn_user
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import Policy, halves_of


def recommend_policy(device: jax.Device | str | None = None) -> Policy:
    """Returns the policy that suits a device.

    Args:
        device: A `jax.Device`, a name such as "v100", "NVIDIA H100 80GB HBM3", "v5e", "tpu" or
            "cpu" (this machine need not have the device), or None for the default device.

    Returns:
        The policy mixed_bfloat16 if the device has matrix units for bfloat16, else mixed_float16 if
        it has matrix units for float16, else float32. A CPU counts if it has instructions for
        bfloat16, which XLA uses: avx512_bf16, AMX, or bfloat16 of ARM, as Linux names them. XLA
        has no kernels for the float16 of CPUs.

    Raises:
        TypeError: If ``device`` is neither a device nor a name nor None.
        ValueError: If the name is unknown.

    Example:
        >>> import mpjax
        >>> [str(mpjax.recommend_policy(name)) for name in ("v100", "a100", "v5e", "p100")]
        ['mixed_float16', 'mixed_bfloat16', 'mixed_bfloat16', 'float32']
    """
    return get_policy(device_facts(device).policy)


def half_dtype(device: jax.Device | str | None = None) -> np.dtype:
    """Returns the 16-bit dtype that suits a device.

    That is bfloat16 on TPUs, CPUs, AMD GPUs and NVIDIA GPUs of compute capability 8.0 or more, and
    float16 on older NVIDIA GPUs, whose tensor cores do not support bfloat16. ``jmp.half_dtype``,
    by contrast, returns float16 everywhere except on TPUs.

    Args:
        device: A device, a name or None, as for `recommend_policy`.

    Returns:
        ``np.dtype`` of bfloat16 or float16.

    Raises:
        TypeError: If ``device`` is neither a device nor a name nor None.
        ValueError: If the name is unknown.

    Example:
        >>> import mpjax
        >>> [str(mpjax.hardware.half_dtype(name)) for name in ("v100", "a100", "cpu")]
        ['float16', 'bfloat16', 'bfloat16']
    """
    return half_of(device_facts(device).capability)


def warn_if_unfit(policy: Policy) -> None:
    """Warns if a policy uses a 16-bit dtype or 8-bit moments that the default device is slow with.

    It does not warn on a CPU.
    """
    device = default_device()
    platform = getattr(device, "platform", "cpu")
    if platform == "cpu":
        return  # a place to test what trains elsewhere; many CPUs have no fast 16-bit dtype
    if platform == "tpu" and policy.moments == "8bit":
        warn_user(
            f"policy={str(policy)!r}: on a TPU, moments=8bit saves memory between steps but needs "
            "more memory within a step: blocks of 32 entries do not fit its tiles, so XLA copies "
            "large moments to another layout. Use moments=float32.",
        )
    facts = device_facts(device)
    for dtype in halves_of(policy):
        # The first one is enough: the warning names the policy to use instead.
        if dtype.name not in facts.fast:
            warn_user(
                f"policy={str(policy)!r} computes in {dtype.name}, which is no faster than float32 "
                f"on {facts.name}: {facts.reason}. Use policy={facts.policy!r}.",
            )
            return
