"""A warning of gradients of float16 plans that nothing scales.

An identity on the results of a plan sees their cotangents. That is the first moment in which it is
known that the plan is differentiated, and the last in which it is known how: the scale multiplies
the loss after the plan has run.
"""

from mpjax._src.core.base import _jax
from mpjax._src.core.base.called import CALLED, SCALES, UNSCALED
from mpjax._src.core.base.contexts import IN_REPORT
from mpjax._src.core.base.errors import PrecisionWarning, warn_user


def _warn_if_unscaled() -> None:
    """Warns once in a process of a cotangent that reaches a float16 plan without a loss scale."""
    if {SCALES, UNSCALED} & CALLED or IN_REPORT.get() or _jax.is_scaled():
        return
    CALLED.add(UNSCALED)
    warn_user(
        "The gradient of a function under autocast in float16 is computed, and no loss scale is "
        "seen: float16 flushes gradients below 6e-8 to zero, and keeps few digits below 6e-5. "
        "Scale the loss, by optimizer = mpjax.mixed_precision(optimizer, policy) and "
        "optimizer.value_and_grad(loss_fn, opt_state), or by mpjax.scaled_value_and_grad. Or use "
        "bfloat16, which needs no scale. mpjax.lint(step)(*args) measures what is lost. If you "
        "scale the loss yourself, ignore this warning: "
        'warnings.filterwarnings("ignore", category=mpjax.errors.PrecisionWarning).',
        PrecisionWarning,
    )


watched = _jax.on_transpose(_jax.FLOAT16_GRADIENT, _warn_if_unscaled)
