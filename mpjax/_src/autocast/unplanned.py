"""A warning for programs of which no matmul runs in 16 bits, although the policy asks for it."""

from mpjax._src.autocast.tables import Reason, Rulings
from mpjax._src.base import rules
from mpjax._src.base.errors import PrecisionWarning, warn_user
from mpjax._src.policy.policy import Policy, short_name
from mpjax._src.program.graph import Block

# Reasons of matmuls that say nothing about the program: another autocast or a kernel runs them, or
# they read no float32 array.
ELSEWHERE = frozenset([Reason.INNER_AUTOCAST, Reason.KERNEL, Reason.NO_FLOAT32])


def warn_if_nothing_is_half(block: Block, rulings: Rulings, policy: Policy) -> None:
    """Warns if no matmul of a program runs in 16 bits because they ask for a precision.

    A user who asks for float32 by a region, an override or a list knows it.
    """
    matmuls = {op: rulings[op] for op in block.walk() if op.spec.need == rules.HALF}
    asking = [op for op, ruling in matmuls.items() if ruling.why.reason is Reason.PRECISION]
    planned = any(r.in_force == "half" or r.why.reason in ELSEWHERE for r in matmuls.values())
    if not asking or planned:
        return
    precisions = {str(p) for op in asking for p in _precisions(rulings[op].why.about[0])}
    asked = ", ".join(sorted(precisions))
    names = sorted({op.name for op in asking})
    half = short_name(policy.compute_dtype)
    lifts = ", ".join(f'"*{name}": "{half}"' for name in names)
    warn_user(
        f"No matmul runs in {policy.compute_dtype.name}: {len(asking)} of {len(matmuls)} ask for "
        f"precision={asked}, and stay in float32. The first is at {asking[0].source}. Remove "
        f"precision= from the model, or lift it with policy.override({{{lifts}}}). If float32 is "
        'meant, use policy="float32".',
        PrecisionWarning,
    )


def _precisions(precision: object) -> tuple[object, ...]:
    return precision if isinstance(precision, tuple) else (precision,)
