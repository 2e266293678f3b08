"""The first sweep of a plan: the rule of each operation, and the reason for it.

The rule comes from the table in `rules`, unless the policy's op lists, an override, a region or the
program itself says otherwise.
"""

from typing import Any

import numpy as np

from mpjax._src.autocast.graph import KERNEL, PLANNED, REGION, Block, Op, is_float
from mpjax._src.autocast.why import Reason, Why, why
from mpjax._src.base import _jax, rules
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.base.patterns import matches
from mpjax._src.policy.policy import Policy


def classify(block: Block, policy: Policy) -> frozenset[str]:
    """Sets the rule of every op, and returns the override patterns that matched."""
    used: set[str] = set()
    listed = {
        **dict.fromkeys(policy.half_ops, "half"),
        **dict.fromkeys(policy.full_ops, "full"),
        **dict.fromkeys(policy.follow_ops, "follow"),
    }
    paths = {path for value in block.invars for path in value.paths}
    used |= {p for p, _ in policy.overrides for path in paths if matches(p, path)}
    _classify(block, policy, listed, used)
    return frozenset(used)


def mark_raw(block: Block) -> None:
    """Marks what is an argument of a program inside others too, given the arguments that are."""
    for op in block.ops:
        for sub in op.subs:
            for value, index in zip(sub.program.invars, sub.ins, strict=True):
                value.raw = op.ins[index].raw
            for _, argument in sub.carry:
                sub.program.invars[argument].raw = False
            mark_raw(sub.program)


def _classify(block: Block, policy: Policy, listed: dict[str, str], used: set[str]) -> None:
    for value, _ in block.consts:
        value.raw = True
    for op in block.ops:
        op.half = policy.compute_dtype if policy.compute_dtype in HALVES else None
        for out in op.outs:
            out.raw = out.constant
        for value in op.ins:
            value.raw = value.raw or value.literal
        for sub in op.subs:
            for value, index in zip(sub.program.invars, sub.ins, strict=True):
                value.small = op.ins[index].small
            _classify(sub.program, policy, listed, used)
        op.rule, op.why = _rule(op)
        _apply_lists(op, listed)
        _apply_overrides(op, policy, used)
        _apply_region(op)
        if op.half is None and op.forced != "full" and op.rule != "program":
            op.forced, op.why = "full", why(Reason.FLOAT32_POLICY)
        reduces = rules.REDUCES in op.spec.traits
        if reduces or (op.ins and op.rule in ("follow", "layout", "full")):
            big = [v for v in op.ins if v.is_f32 and v.entries is None]
            small = reduces or (bool(big) and all(v.small for v in big))
            for out in op.outs:
                out.small = small


def _rule(op: Op) -> tuple[str, Why]:
    """Returns the rule of an op, by its primitive, and the reason."""
    wide_form = rules.HAS_WIDE_FORM in op.spec.traits
    if not any(v.is_f32 for v in (*op.ins, *op.outs)) and not op.subs and not wide_form:
        return "leave", why(Reason.NO_FLOAT32)
    if op.subs:
        return _custom_jvp_rule(op) if op.inside.as_one else ("program", why(Reason.PROGRAM))
    if op.spec.need == rules.HALF:
        return _matmul_rule(op)
    if op.name == "convert_element_type":
        return "cast", why(Reason.CAST)
    if op.spec is rules.UNKNOWN:
        return "leave", why(Reason.NO_ROW)
    if op.spec.need == rules.PROGRAM:  # a kernel
        return "leave", why(Reason.FLOAT32_KERNEL)
    return NEEDS.get(op.spec.need, ("leave", why(Reason.UNKNOWN)))


# The rule of an op, by the column `need` of its primitive, and the reason.
NEEDS = {
    rules.FULL: ("full", why(Reason.FULL_ROW)),
    rules.COMPARE: ("neutral", why(Reason.GIVES_NO_FLOAT)),
    rules.FOLLOW: ("follow", why(Reason.OPERANDS)),
    rules.MOVE: ("layout", why(Reason.OPERANDS)),
}


def _matmul_rule(op: Op) -> tuple[str, Why]:
    precision = op.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    explicit = any(p is not None and str(p) not in ("DEFAULT", "Precision.DEFAULT") for p in asked)
    # JAX writes its default precision into each matmul. Only another precision is the user's own.
    if explicit and precision != _jax.default_precision():
        return "written", why(Reason.PRECISION, precision)
    return _matmul_of_its_operands(op)


def _matmul_of_its_operands(op: Op) -> tuple[str, Why]:
    floats = [v for v in op.ins if is_float(v)]
    wanted = op.params.get("preferred_element_type")
    operands = {v.aval.dtype for v in floats}
    if operands <= {FLOAT32, *HALVES} and (op.outs[0].is_f32 or wanted in HALVES):
        if FLOAT32 not in operands and not (
            op.outs[0].is_f32 and rules.HAS_WIDE_FORM in op.spec.traits
        ):
            return "leave", why(Reason.NO_FLOAT32)
        return "half", why(Reason.HALF_ROW)
    if FLOAT32 not in operands:
        return "leave", why(Reason.NO_FLOAT32)
    return "written", why(Reason.WRITTEN)


def _custom_jvp_rule(op: Op) -> tuple[str, Why]:
    """An elementwise custom_jvp function is one op; with matmuls inside it is a program."""
    floats = [o for o in op.subs[0].program.walk() if o.rule != "leave" or not _has_none(o)]
    rules = {o.rule for o in floats}
    if rules & {"half", "written", "leave"} or any(o.subs and o.rule == "program" for o in floats):
        return "program", why(Reason.OWN_RULE)
    if "full" in rules or any(o.forced == "full" for o in floats):
        return "full", why(Reason.FULL_INSIDE)
    return "follow", why(Reason.OPERANDS)


def _has_none(op: Op) -> bool:
    """Returns whether an op has no float32 operand or result."""
    return op.why == why(Reason.NO_FLOAT32)


def _asked_for_float32(op: Op, asked: Why) -> None:
    """Records that the user asks for the float32 that a matmul's own precision gives it."""
    if op.why.reason is Reason.PRECISION:
        op.why = asked


# Rules that a list, an override or a region may change.
CHANGEABLE = ("half", "full", "follow", "layout", "leave", "neutral")


def _apply_lists(op: Op, listed: dict[str, str]) -> None:
    name = listed.get(op.name)
    if name == "full":
        _asked_for_float32(op, why(Reason.LISTED, name))
    if name is None or op.rule not in CHANGEABLE or _has_none(op):
        return
    op.why = why(Reason.LISTED, name)
    if name == "follow":
        op.rule, op.forced = "follow", ""
    else:
        op.forced = name
        op.rule = "follow" if op.rule != "half" else op.rule


def _apply_overrides(op: Op, policy: Policy, used: set[str]) -> None:
    chosen = None if _has_none(op) else override_of(op, policy, used)
    if chosen is None:
        return
    pattern, dtype = chosen
    if dtype in HALVES:
        op.half = dtype
        if op.why.reason is Reason.PRECISION:  # the override is about this program, and lifts it
            op.rule, op.why = _matmul_of_its_operands(op)
            if op.rule == "half":
                op.why = why(Reason.OVERRIDE, pattern)
    else:
        _asked_for_float32(op, why(Reason.OVERRIDE, pattern))
    if dtype not in HALVES and op.rule in CHANGEABLE and op.rule not in ("layout", "neutral"):
        op.forced, op.why = "full", why(Reason.OVERRIDE, pattern)


def override_of(op: Op, policy: Policy, used: set[str] | None = None) -> tuple[str, Any] | None:
    """Returns the first override that matches an op, and adds all that match to ``used``."""
    if not policy.overrides:
        return None
    user_scopes = (name for name in op.scopes if not name.startswith(KERNEL))
    places = ["/".join(op.scopes), "/".join((*op.scopes, op.name)), "/".join(user_scopes)]
    places += [path for v in op.ins for path in v.paths]
    found = [o for o in policy.overrides if any(matches(o[0], place) for place in places)]
    if used is not None:
        used.update(pattern for pattern, _ in found)
    return found[0] if found else None


def _apply_region(op: Op) -> None:
    if op.kernel:
        op.why = why(Reason.KERNEL, op.kernel.removeprefix(KERNEL).partition("#")[0])
        op.rule, op.forced = "leave" if PLANNED in op.scopes else op.rule, ""
        return
    if PLANNED in op.scopes:
        op.rule, op.forced, op.why = "leave", "", why(Reason.INNER_AUTOCAST)
        return
    for name in reversed(op.scopes):
        if name.startswith(REGION):
            dtype = np.dtype(name.removeprefix(REGION))
            if dtype not in HALVES:
                _asked_for_float32(op, why(Reason.REGION, dtype.name))
            if op.rule not in CHANGEABLE or _has_none(op):
                return
            op.why = why(Reason.REGION, dtype.name)
            if dtype in HALVES:
                op.half = dtype
                arithmetic = op.rule in ("half", "full", "follow")
                op.forced = (
                    "half" if arithmetic and rules.NO_HALF_FORM not in op.spec.traits else ""
                )
            elif op.rule not in ("layout", "neutral"):
                op.forced = "full"
            return
