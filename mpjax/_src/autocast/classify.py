"""The first sweep of a plan: the rule of each operation, and the reason for it.

The rule comes from the table in `rules`, unless the policy's op lists, an override, a region or the
program itself says otherwise.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from mpjax._src.autocast.tables import Reason, Ruling, Rulings, Why, why
from mpjax._src.base import _jax, rules
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.base.patterns import matches
from mpjax._src.policy.policy import Policy
from mpjax._src.program.graph import KERNEL, PLANNED, REGION, Block, Op, Value, is_float
from mpjax._src.program.site import overriding


def classify(block: Block, policy: Policy) -> tuple[Rulings, set[Value], frozenset[str]]:
    """Finds the rule of every op.

    Returns:
        The rules; the results of reductions, and values computed from such results alone; and the
        override patterns that matched.
    """
    listed = {
        **dict.fromkeys(policy.half_ops, "half"),
        **dict.fromkeys(policy.full_ops, "full"),
        **dict.fromkeys(policy.follow_ops, "follow"),
    }
    paths = {path for value in block.invars for path in value.paths}
    used = {p for p, _ in policy.overrides for path in paths if matches(p, path)}
    half = policy.compute_dtype if policy.compute_dtype in HALVES else None
    rulings = Rulings()
    small: set[Value] = set()
    for op in _inside_out(block, small):
        rule, reason = _rule(op, rulings)
        ruling = Ruling(rule, half, why=reason)
        ruling = _by_lists(op, ruling, listed)
        ruling = _by_overrides(op, ruling, policy, used)
        ruling = _by_region(op, ruling)
        if ruling.half is None and ruling.forced != "full" and ruling.rule != "program":
            ruling = ruling._replace(forced="full", why=why(Reason.FLOAT32_POLICY))
        rulings[op] = ruling
        if _is_small(op, ruling, small):
            small.update(op.outs)
    return rulings, small, frozenset(used)


def _inside_out(block: Block, small: set[Value]) -> Iterator[Op]:
    """Yields the ops of a program, those inside an op before it, with what enters them."""
    for op in block.ops:
        for sub in op.subs:
            arguments = zip(sub.program.invars, sub.ins, strict=True)
            small.update(value for value, index in arguments if op.ins[index] in small)
            yield from _inside_out(sub.program, small)
        yield op


def _is_small(op: Op, ruling: Ruling, small: Collection[Value]) -> bool:
    """Returns whether an op is a reduction, or computes from results of reductions alone."""
    if rules.REDUCES in op.spec.traits:
        return True
    big = [v for v in op.ins if v.is_f32 and v.entries is None]
    return (
        ruling.rule in ("follow", "layout", "full") and bool(big) and all(v in small for v in big)
    )


def arguments_of(block: Block, in_dtypes: Sequence[Any]) -> frozenset[Value]:
    """Returns the arguments of a program, and of those inside it, that arrive in float32."""
    arrive = zip(block.invars, in_dtypes, strict=True)
    arguments = {value for value, dtype in arrive if value.is_f32 and dtype not in HALVES}
    for op in block.walk():
        for sub in op.subs:
            carried = {argument for _, argument in sub.carry}
            arguments.update(
                value
                for place, (value, index) in enumerate(
                    zip(sub.program.invars, sub.ins, strict=True)
                )
                if (op.ins[index].constant or op.ins[index] in arguments) and place not in carried
            )
    return frozenset(arguments)


def _rule(op: Op, rulings: Rulings) -> tuple[str, Why]:
    """Returns the rule of an op, by its primitive, and the reason."""
    wide_form = rules.HAS_WIDE_FORM in op.spec.traits
    if not any(v.is_f32 for v in (*op.ins, *op.outs)) and not op.subs and not wide_form:
        return "leave", why(Reason.NO_FLOAT32)
    if op.subs:
        return (
            _custom_jvp_rule(op, rulings) if op.inside.as_one else ("program", why(Reason.PROGRAM))
        )
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
    precision = _jax.own_precision(op.params)
    # JAX writes its default precision into each matmul. Only another precision is the user's own.
    if precision is not None and precision != _jax.default_precision():
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


def _custom_jvp_rule(op: Op, rulings: Rulings) -> tuple[str, Why]:
    """An elementwise custom_jvp function is one op; with matmuls inside it is a program."""
    inside = [(o, rulings[o]) for o in op.subs[0].program.walk()]
    floats = [(o, r) for o, r in inside if r.rule != "leave" or r.why != why(Reason.NO_FLOAT32)]
    rules = {r.rule for _, r in floats}
    programs = any(o.subs and r.rule == "program" for o, r in floats)
    if rules & {"half", "written", "leave"} or programs:
        return "program", why(Reason.OWN_RULE)
    if "full" in rules or any(r.forced == "full" for _, r in floats):
        return "full", why(Reason.FULL_INSIDE)
    return "follow", why(Reason.OPERANDS)


def _may_change(ruling: Ruling) -> bool:
    """Returns whether a list, an override or a region may change a rule."""
    return ruling.rule in CHANGEABLE and ruling.why != why(Reason.NO_FLOAT32)


def _asked_for_float32(ruling: Ruling, asked: Why) -> Ruling:
    """Returns a ruling by which the user asks for the float32 that a precision gives a matmul."""
    return ruling._replace(why=asked) if ruling.why.reason is Reason.PRECISION else ruling


# Rules that a list, an override or a region may change.
CHANGEABLE = ("half", "full", "follow", "layout", "leave", "neutral")


def _by_lists(op: Op, ruling: Ruling, listed: dict[str, str]) -> Ruling:
    name = listed.get(op.name)
    if name is None:
        return ruling
    asked = why(Reason.LISTED, name)
    if name == "full":
        ruling = _asked_for_float32(ruling, asked)
    if not _may_change(ruling):
        return ruling
    if name == "follow":
        return ruling._replace(rule="follow", forced="", why=asked)
    rule = "half" if ruling.rule == "half" else "follow"
    return ruling._replace(rule=rule, forced=name, why=asked)


def _by_overrides(op: Op, ruling: Ruling, policy: Policy, used: set[str]) -> Ruling:
    has_none = ruling.why == why(Reason.NO_FLOAT32)
    chosen = None if has_none else override_of(op, policy, used)
    if chosen is None:
        return ruling
    pattern, dtype = chosen
    asked = why(Reason.OVERRIDE, pattern)
    if dtype not in HALVES:
        fixed = ruling.rule in ("layout", "neutral") or ruling.rule not in CHANGEABLE
        ruling = _asked_for_float32(ruling, asked)
        return ruling if fixed else ruling._replace(forced="full", why=asked)
    ruling = ruling._replace(half=dtype)
    if ruling.why.reason is Reason.PRECISION:  # the override is about this program, and lifts it
        rule, reason = _matmul_of_its_operands(op)
        return ruling._replace(rule=rule, why=asked if rule == "half" else reason)
    return ruling


def override_of(op: Op, policy: Policy, used: set[str] | None = None) -> tuple[str, Any] | None:
    """Returns the first override that matches an op, and adds all that match to ``used``."""
    if not policy.overrides:
        return None
    paths = [path for v in op.ins for path in v.paths]
    matching = overriding(policy.overrides, op.scopes, op.name, paths)
    if used is not None:
        used.update(pattern for pattern, _ in matching)
    return matching[0] if matching else None


def _by_region(op: Op, ruling: Ruling) -> Ruling:
    if op.kernel:
        reason = why(Reason.KERNEL, op.kernel.removeprefix(KERNEL).partition("#")[0])
        rule = "leave" if PLANNED in op.scopes else ruling.rule
        return ruling._replace(rule=rule, forced="", why=reason)
    # Its author planned it already, perhaps in another dtype.
    if PLANNED in op.scopes:
        return ruling._replace(rule="leave", forced="", why=why(Reason.INNER_AUTOCAST))
    # The innermost region decides.
    name = next((name for name in reversed(op.scopes) if name.startswith(REGION)), None)
    if name is None:
        return ruling
    dtype = np.dtype(name.removeprefix(REGION))
    asked = why(Reason.REGION, dtype.name)
    if dtype not in HALVES:
        ruling = _asked_for_float32(ruling, asked)
    if not _may_change(ruling):
        return ruling
    if dtype in HALVES:
        arithmetic = ruling.rule in ("half", "full", "follow")
        forced = "half" if arithmetic and rules.NO_HALF_FORM not in op.spec.traits else ""
        return ruling._replace(half=dtype, forced=forced, why=asked)
    full = ruling.rule not in ("layout", "neutral")
    return ruling._replace(forced="full" if full else ruling.forced, why=asked)
