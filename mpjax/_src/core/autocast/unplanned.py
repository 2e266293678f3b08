"""Warnings of programs whose matmuls do not run in 16 bits, although the policy asks for it.

And the errors of a program in which another library's dtype policy casts too, and of one whose
checks somebody else has to find.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpjax._src.core.autocast.classify import ELSEWHERE, Rulings
from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import FLOAT32, FLOAT64, HALVES, short_name
from mpjax._src.core.base.errors import PrecisionWarning, first_of, warn_user
from mpjax._src.core.policy.policy import Policy
from mpjax._src.core.program.graph import Block, Value
from mpjax._src.core.program.site import equations


def warn_if_nothing_is_half(block: Block, rulings: Rulings, policy: Policy) -> None:
    """Warns if no matmul of a program runs in 16 bits because they ask for a precision.

    A user who asks for float32 by a region, an override or a list knows it.
    """
    matmuls = {op: rulings[op] for op in block.walk() if op.spec.need == rules.HALF}
    asking = [op for op, ruling in matmuls.items() if ruling.precision is not None]
    # What a kernel's author planned may run in 16 bits, for all that is known here.
    planned = any(r.in_force == "half" or r.kind == ELSEWHERE for r in matmuls.values())
    if not asking or planned:
        return
    precisions = {str(p) for op in asking for p in _precisions(rulings[op].precision)}
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


NAMED = 3  # how many causes a warning names


def warn_if_wide(
    block: Block, rulings: Rulings, policy: Policy, names: Callable[[], Sequence[str]]
) -> None:
    """Warns if most matmul FLOPs are float64: one float64 operand makes float32 ones float64 too.

    ``names`` returns the name of each argument.
    """
    matmuls = [op for op in block.walk() if op.spec.need == rules.HALF]
    wide = [op for op in matmuls if any(map(_is_wide, op.ins))]
    planned = [op for op in matmuls if rulings[op].in_force == "half" and op not in wide]
    flops_of_wide, flops = (sum(_jax.flops_of(op.eqn) for op in ops) for ops in (wide, planned))
    # A few float64 matmuls beside a model are often meant, as those of a solver.
    if flops_of_wide <= flops:
        return
    causes = [*_wide_sources(block, names())]
    half = policy.compute_dtype.name
    warn_user(
        f"{len(wide)} of {len(matmuls)} matmuls run in float64 and not in {half}, because of "
        f"{first_of(causes, NAMED)}. The first is at {wide[0].source}. NumPy's numbers are "
        "float64, and under jax_enable_x64 they make float32 arrays float64. Cast them before the "
        'call, such as x.astype("float32"), or turn jax_enable_x64 off. If float64 is meant, use '
        'policy="float32", which changes no dtype.',
        PrecisionWarning,
    )


def _is_wide(value: Value) -> bool:
    return getattr(value.aval, "dtype", None) == FLOAT64


def _wide_sources(block: Block, names: Sequence[str]) -> Iterator[str]:
    """Yields what is float64 from the start: arguments, captured arrays, or the first operation."""
    given = [name for name, v in zip(names, block.invars, strict=True) if _is_wide(v)]
    yield from (f"the float64 argument {name}" for name in given)
    arrays = [v for each in block.blocks() for v, _ in each.consts if _is_wide(v)]
    yield from (f"a captured float64 array of shape {v.aval.shape}" for v in arrays)
    if not given and not arrays:
        # Then an operation makes it of other dtypes, as a cast or a NumPy number.
        first = next(op for op in block.walk() if any(map(_is_wide, op.outs)))
        yield f"a float64 number at {first.source}"


def _precisions(precision: object) -> tuple[object, ...]:
    return precision if isinstance(precision, tuple) else (precision,)


# The files of Keras that cast for its dtype policy.
KERAS = ("keras/src/dtype_policies/dtype_policy.py", "keras/src/backend/common/variables.py")


class ChecksInside(ValueError):
    """Checks of `checkify` in a function under autocast."""


def check_no_checks(jaxpr: Any, debug: bool = False) -> None:
    """Raises an error for a program with checks of `checkify`, which does not look into plans.

    With ``debug``, also for those that do nothing where `checkify` is not around them.
    """
    inner, _ = _jax.open_jaxpr(jaxpr)
    if not inner.effects:  # a check has one
        return
    for eqn, *_ in equations(inner):
        if eqn.primitive.name == "check" and (debug or not eqn.params["debug"]):
            raise ChecksInside(
                f"The check at {_jax.source_line(eqn)} is in a function under autocast, where "
                "checkify.checkify does not find it. Apply it first: checked = "
                "checkify.checkify(fun), and then autocast(checked), which returns (error, result)."
            )


def check_no_other_policy(block: Block) -> None:
    """Raises a ValueError if Keras's own dtype policy casts float32 to 16 bits.

    All operations of its layers would run in 16 bits, norms and softmax too, whatever the plan
    says.
    """
    # Nobody who has not imported it uses its layers.
    for op in block.walk() if "keras" in sys.modules else ():
        if op.name != rules.CAST or not op.ins[0].is_f32:
            continue
        if op.outs[0].aval.dtype in HALVES and _jax.passed_through(op.eqn, KERAS):
            raise ValueError(
                f"keras's own dtype policy casts {FLOAT32.name} to {op.outs[0].aval.dtype.name} in "
                f"{op.source or 'a layer'}, but under autocast mpjax chooses the dtype of each "
                "operation. With both, the layers run norms and softmax in 16 bits. Use one of "
                "them. To use autocast: call keras.config.set_dtype_policy('float32') before you "
                "create the model, and pass no 16-bit dtype= to its layers."
            )
