"""The plan: what every operation computes in, and what every float32 value is stored in.

Pure analysis of a `graph.Block`, in four sweeps over the nested program:

1. `classify` gives each op its rule: a row of the op sets, or what the user or the program said.
2. `trace_half` (forward) marks what comes from a half operation through elementwise ones, and
   decides which loop carries may be half.
3. `demand` (backward) collects what the readers of each value want.
4. `decide` (forward) picks each op's compute dtype and each value's storage dtype.

A float32 value is of one of three kinds. *half*: computed in half, or rounded to it for storage.
*full*: came out of a float32 operation. *flexible*: an argument or constant, or computed from such
alone; it is float32, and does not drag others up to it. Elementwise operations take full where an
operand is full, else half where one is half, else they stay flexible.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpjax import ops
from mpjax.dtypes import FLOAT32, HALVES
from mpjax.graph import Block, Op, Sub, Value, build, known_value
from mpjax.patterns import matches
from mpjax.policy import Policy

# The names of scopes that carry a mark of ours.
REGION = "mpjax.precision="
PLANNED = "mpjax.autocast"
ROW = "mpjax.row="

# A carry that is added to in every iteration is stored in half for at most this many iterations.
MAX_HALF_ADDITIONS = 64

# A step this small, relative to what it is scaled from, would be lost in a half sum.
SMALL_STEP = 0.1


@dataclasses.dataclass(frozen=True)
class Plan:
    """A planned program: the graph, with every decision on its ops and values."""

    block: Block
    policy: Policy
    used_patterns: frozenset[str]


def make_plan(
    jaxpr: Any,
    consts: Sequence[Any],
    policy: Policy,
    in_dtypes: Sequence[Any],
    out_dtypes: Sequence[Any] | None = None,
    paths: Sequence[str] = (),
    scopes: tuple[str, ...] = (),
    linear: Sequence[int] = (),
) -> Plan:
    """Plans a program.

    Args:
        jaxpr: The program, with ``consts`` the values of its constants.
        consts: Arrays or tracers.
        policy: The policy.
        in_dtypes: What each float32 argument arrives in.
        out_dtypes: What each float32 result is handed out in; None where float32.
        paths: The path of each argument, for the policy's overrides.
        scopes: Names of the scopes around the program.
        linear: Which arguments are tangents: the program will be transposed in them as it stands.

    Returns:
        The plan. Nothing has been run.
    """
    block = build(jaxpr, consts, scopes)
    for value, path in zip(block.invars, paths, strict=False):
        value.paths = (path,)
    used = classify(block, policy)
    for value, dtype in zip(block.invars, in_dtypes, strict=True):
        if value.is_f32:
            half = dtype in HALVES
            value.kind, value.dtype, value.raw = "half" if half else "flexible", dtype, not half
            value.from_half = half
    for index in linear:
        block.invars[index].linear = True
    if linear:
        _mark_linear(block)
    trace_half(block)
    out_dtypes = out_dtypes or [FLOAT32] * len(block.outvars)
    for value, dtype in zip(block.outvars, out_dtypes, strict=True):
        as_half = dtype in HALVES
        _read_by(value, full=not as_half, needed=not as_half, outside=as_half, returned=not as_half)
    demand(block)
    decide(block)
    return Plan(block, policy, used)


# ---- 1. classify --------------------------------------------------------------------------------


def classify(block: Block, policy: Policy) -> frozenset[str]:
    """Gives every op its rule; returns the override patterns that matched something."""
    used: set[str] = set()
    listed = {
        **dict.fromkeys(policy.half_ops, "half list of the policy"),
        **dict.fromkeys(policy.full_ops, "full list of the policy"),
        **dict.fromkeys(policy.follow_ops, "follow list of the policy"),
    }
    for value in block.invars:
        used |= {p for p, _ in policy.overrides for path in value.paths if matches(p, path)}
    _classify(block, policy, listed, used)
    return frozenset(used)


def _classify(block: Block, policy: Policy, listed: dict[str, str], used: set[str]) -> None:
    for value, _ in block.consts:
        value.raw = True
    for op in block.ops:
        op.half = policy.compute_dtype if policy.compute_dtype in HALVES else None
        if op.name in ops.CARRIES_PATH and op.ins:
            for out in op.outs:
                out.paths, out.raw = op.ins[0].paths, op.ins[0].raw and op.name != "gather"
            op.outs[0].const = known_value(op)
        for sub in op.subs:
            for value, index in zip(sub.block.invars, sub.ins, strict=True):
                value.paths, value.raw = op.ins[index].paths, op.ins[index].raw
                value.small = op.ins[index].small
            for result, argument in sub.carry:
                sub.block.invars[argument].paths = ()
                sub.block.invars[argument].raw = False
                del result
            _classify(sub.block, policy, listed, used)
        op.rule, op.reason = _rule(op)
        _apply_lists(op, listed)
        _apply_overrides(op, policy, used)
        _apply_region(op)
        if op.half is None and op.forced != "full":
            op.forced, op.reason = "full", "the policy computes in float32"
        if op.name in ops.REDUCTIONS or (op.ins and op.rule in ("follow", "layout", "full")):
            big = [v for v in op.ins if v.is_f32 and v.const is None]
            small = op.name in ops.REDUCTIONS or (bool(big) and all(v.small for v in big))
            for out in op.outs:
                out.small = small


def _rule(op: Op) -> tuple[str, str]:
    """Returns the rule of an op by what it is, and the reason in words."""
    name = op.name
    if not any(v.is_f32 for v in (*op.ins, *op.outs)) and not op.subs and name not in ops.MATMULS:
        return "leave", "no float32"
    if name in CONTROL_RULES:
        return CONTROL_RULES[name](op)
    if name in ops.HALF:
        return _matmul_rule(op)
    if name in ops.FULL:
        return "full", "full list"
    if name in ops.NEUTRAL:
        return "neutral", "gives no float"
    if name in ops.ELEMENTWISE:
        return "follow", "follows its operands"
    if name in ops.LAYOUT:
        return "layout", "follows its operands"
    if name == "convert_element_type":
        return "cast", "the program's own cast"
    return "leave", "unknown operation, left alone"


def _matmul_rule(op: Op) -> tuple[str, str]:
    precision = op.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    if any(p is not None and str(p) not in ("DEFAULT", "Precision.DEFAULT") for p in asked):
        return "written", f"explicit precision {precision}, left as written"
    floats = [v for v in op.ins if _is_float(v)]
    wanted = op.params.get("preferred_element_type")
    operands = {v.aval.dtype for v in floats}
    if operands <= {FLOAT32, *HALVES} and (op.outs[0].is_f32 or wanted in HALVES):
        if FLOAT32 not in operands and not (op.outs[0].is_f32 and op.name in ops.MATMULS):
            return "leave", "no float32"
        return "half", "half list"
    return ("leave", "no float32") if FLOAT32 not in operands else ("written", "left as written")


def _is_float(value: Value) -> bool:
    dtype = getattr(value.aval, "dtype", None)
    return dtype == FLOAT32 or dtype in HALVES or dtype == np.float64


def _custom_jvp_rule(op: Op) -> tuple[str, str]:
    """An elementwise function with a rule is one op; one with matmuls inside is a program."""
    floats = [o for o in op.subs[0].block.walk() if o.rule != "leave" or o.reason != "no float32"]
    rules = {o.rule for o in floats}
    if rules & {"half", "written", "leave"} or any(o.subs and o.rule == "program" for o in floats):
        return "program", "a program with a rule of its own"
    if "full" in rules or any(o.forced == "full" for o in floats):
        return "full", "full list inside"
    return "follow", "follows its operands"


def _while_rule(op: Op) -> tuple[str, str]:
    if _ends_on_a_matmul(op):
        return "leave", "a float32 comparison that depends on a matmul ends this loop, left alone"
    return "program", "loop"


def _ends_on_a_matmul(op: Op) -> bool:
    """Tells whether how long a while loop runs depends on the rounding of a matmul in it.

    Half might never reach the tolerance that float32 reaches.
    """
    cond, body = (sub.block for sub in op.subs)
    if not any(inner.rule == "half" for inner in body.walk()):
        return False
    masks = _reach(body, [1 << i for i in range(len(body.invars))])
    watched = _watched(cond)
    carried = {argument: result for result, argument in op.subs[1].carry}
    offset = len(body.invars) - len(op.outs)
    first = len(cond.invars) - len(op.outs)
    # Which carries does the predicate see as floats, and are any of these made by matmuls?
    seen = {i - first for i in range(first, len(cond.invars)) if watched[i]}
    for _ in range(len(op.outs)):
        more = {
            j
            for i in seen
            for j in range(len(op.outs))
            if masks[body.outvars[carried[offset + i]]].any >> (offset + j) & 1
        }
        if more <= seen:
            break
        seen |= more
    return any(masks[body.outvars[i]].matmul or masks[body.outvars[i]].half for i in seen)


def _watched(cond: Block) -> list[bool]:
    """Returns which arguments of a loop's condition reach a comparison as floats."""
    wanted = {id(v) for op in cond.walk() if op.name in ops.NEUTRAL for v in op.ins if v.is_f32}
    for op in reversed(list(cond.walk())):
        if op.subs:
            return [v.is_f32 for v in cond.invars]
        if any(id(out) in wanted for out in op.outs):
            wanted |= {id(v) for v in op.ins if v.is_f32}
    return [id(v) in wanted for v in cond.invars]


def _no_symbolic_zeros(op: Op) -> tuple[str, str]:
    if op.params.get("symbolic_zeros"):
        return "leave", "its rule asks for symbolic zeros, left alone"
    return "program", "a program with rules of its own"


# Primitives with programs inside, and those whose rule is not a matter of a list.
CONTROL_RULES: dict[str, Callable[[Op], tuple[str, str]]] = {
    **dict.fromkeys(
        ("scan", "cond", "jit", "remat2", "shard_map", "custom_vmap_call", "linear_call"),
        lambda op: ("program", "program inside"),
    ),
    "while": _while_rule,
    "custom_jvp_call": _custom_jvp_rule,
    "custom_vjp_call": _no_symbolic_zeros,
}

# Rules that a list, an override or a region may change.
CHANGEABLE = ("half", "full", "follow", "layout", "leave", "neutral")


def _apply_lists(op: Op, listed: dict[str, str]) -> None:
    reason = listed.get(op.name)
    if reason is None or op.rule not in CHANGEABLE or op.reason == "no float32":
        return
    op.reason = reason
    if reason.startswith("follow"):
        op.rule, op.forced = "follow", ""
    else:
        op.forced = "half" if reason.startswith("half") else "full"
        op.rule = "follow" if op.rule != "half" else op.rule


def _apply_overrides(op: Op, policy: Policy, used: set[str]) -> None:
    if not policy.overrides or op.reason == "no float32":
        return
    place = "/".join((*op.scopes, op.name))
    paths = [path for v in op.ins for path in v.paths]
    chosen = None
    for pattern, dtype in policy.overrides:
        if any(matches(pattern, text) for text in (place, *paths)):
            used.add(pattern)
            chosen = chosen or (pattern, dtype)
    if chosen is None:
        return
    pattern, dtype = chosen
    if dtype in HALVES:
        op.half = dtype
    elif op.rule in CHANGEABLE and op.rule not in ("layout", "neutral"):
        op.forced, op.reason = "full", f'override "{pattern}"'


def _apply_region(op: Op) -> None:
    if PLANNED in op.scopes:
        op.rule, op.forced, op.reason = "leave", "", "planned by an inner autocast"
        return
    for name in reversed(op.scopes):
        if name.startswith(REGION):
            dtype = np.dtype(name.removeprefix(REGION))
            if op.rule not in CHANGEABLE or op.reason == "no float32":
                return
            op.reason = f"region {dtype.name}"
            if dtype in HALVES:
                op.half = dtype
                op.forced = "half" if op.rule in ("half", "full", "follow") else ""
            elif op.rule not in ("layout", "neutral"):
                op.forced = "full"
            return


def _mark_linear(block: Block) -> None:
    """Marks what depends on tangents."""
    for op in block.ops:
        for sub in op.subs:
            for value, index in zip(sub.block.invars, sub.ins, strict=True):
                value.linear = op.ins[index].linear
            for result, argument in sub.carry:
                sub.block.invars[argument].linear |= any(v.linear for v in op.ins)
                del result
            _mark_linear(sub.block)
        for out in op.outs:
            out.linear = any(v.linear for v in op.ins)


# ---- 2. where half comes from, and loop carries -------------------------------------------------


@dataclasses.dataclass(slots=True)
class Reach:
    """Which arguments of a block reach a value, as bit masks.

    Attributes:
        any: By any way.
        direct: Through elementwise and layout operations alone.
        matmul: Through a half operation.
        stepped: As ``matmul``, and scaled by a small or unknown scalar since.
        half: Whether it comes from a half operation through elementwise ones.
    """

    any: int = 0
    direct: int = 0
    matmul: int = 0
    stepped: int = 0
    half: bool = False


def trace_half(block: Block) -> None:
    """Marks what comes from half operations, and which loop carries are stored in half."""
    for op in block.ops:
        for sub in op.subs if op.rule == "program" else ():
            for value, index in zip(sub.block.invars, sub.ins, strict=True):
                value.from_half = op.ins[index].from_half
            if sub.carry:
                _choose_carries(op, sub)
            trace_half(sub.block)
            for value, place in zip(sub.block.outvars, sub.outs, strict=True):
                if place is not None:
                    op.outs[place].from_half |= value.from_half
        if op.subs and op.rule == "program":
            continue
        from_half = _gives_half(op)
        for out in op.outs:
            out.from_half = from_half


def _gives_half(op: Op) -> bool:
    if op.forced:
        return op.forced == "half"
    if op.rule == "cast":
        return op.ins[0].from_half or (op.outs[0].is_f32 and op.ins[0].aval.dtype == op.half)
    return op.rule == "half" or (
        op.rule in ("follow", "layout") and any(v.from_half for v in op.ins)
    )


def _choose_carries(op: Op, sub: Sub) -> None:
    """Decides which carries of a loop's body are stored in half.

    A carry may be half where a half operation makes it. One that is only added to (a running sum,
    an LSTM's cell, parameters under training) stays float32; a residual stream is added to as
    well, but by what is computed from itself, once per layer.
    """
    body = sub.block
    masks = _reach(body, [1 << i for i in range(len(body.invars))])
    few = op.params.get("length", MAX_HALF_ADDITIONS + 1) <= MAX_HALF_ADDITIONS
    half = [False] * len(body.invars)
    for result, argument in sub.carry:
        out, bit = masks[body.outvars[result]], 1 << argument
        added_to = bool(out.direct & bit)
        stream = few and bool(out.matmul & bit) and not out.stepped & bit
        half[argument] = (
            body.invars[argument].is_f32
            and out.half
            and op.rule == "program"
            and _half_of(body) is not None
            and (not added_to or stream)
        )
        body.invars[argument].from_half = half[argument]
    body.carries = tuple(half)


def _half_of(block: Block) -> Any:
    return next((op.half for op in block.walk() if op.half is not None), None)


def _reach(block: Block, seeds: Sequence[int]) -> "_Masks":
    """Returns the `Reach` of every value of a block (not of its sub-programs)."""
    masks = _Masks()
    for value, seed in zip(block.invars, seeds, strict=True):
        masks[value] = Reach(seed, seed, 0, 0, False)
    _flow(block, masks)
    return masks


class _Masks(dict):
    def __missing__(self, value):
        return Reach(half=value.from_half)


def _flow(block: Block, masks: "_Masks") -> None:
    for op in block.ops:
        ins = [masks[v] for v in op.ins]
        if op.subs and op.rule == "program":
            for sub in op.subs:
                for value, index in zip(sub.block.invars, sub.ins, strict=True):
                    masks[value] = ins[index]
                _flow(sub.block, masks)
                for result, argument in sub.carry:  # once around a nested loop is enough
                    before = masks[sub.block.invars[argument]]
                    masks[sub.block.invars[argument]] = _join(
                        [before, masks[sub.block.outvars[result]]]
                    )
                if sub.carry:
                    _flow(sub.block, masks)
                for value, place in zip(sub.block.outvars, sub.outs, strict=True):
                    if place is not None:
                        out = op.outs[place]
                        masks[out] = _join([masks.get(out, Reach()), masks[value]])
            continue
        made = _join(ins)
        if op.rule == "half":
            made = Reach(made.any, 0, made.any, 0, True)
        elif op.rule not in ("follow", "layout", "cast", "half"):
            made = Reach(made.any, 0, made.matmul, made.stepped, False)
        elif op.name in ("mul", "div") and _is_step(op, ins):
            made.stepped |= made.matmul
        if op.forced == "full":
            made.half = False
        for out in op.outs:
            masks[out] = dataclasses.replace(made) if _is_float(out) else Reach(made.any)


def _is_step(op: Op, ins: Sequence[Reach]) -> bool:
    """Tells whether an op scales a matmul's result by a scalar that is small or not known."""
    for this, other in ((0, 1), (1, 0)):
        scale = op.ins[other]
        if not ins[this].matmul or ins[other].matmul:
            continue
        if scale.const is not None and np.ndim(scale.const) == 0:
            factor = abs(float(scale.const))
            if op.name == "div":
                factor = 1 / factor if factor else np.inf
            return factor <= SMALL_STEP
        if scale.size == 1 and op.ins[this].size > 1:
            return True
    return False


def _join(reaches: Iterable[Reach]) -> Reach:
    joined = Reach()
    for r in reaches:
        joined.any |= r.any
        joined.direct |= r.direct
        joined.matmul |= r.matmul
        joined.stepped |= r.stepped
        joined.half |= r.half
    return joined


# ---- 3. what readers want -----------------------------------------------------------------------


def _read_by(
    value: Value,
    full=True,
    needed=False,
    outside=False,
    returned=False,
    readers=1,
    only_half=False,
):
    value.readers += readers
    value.all_full &= full
    value.needed |= needed
    value.outside |= outside
    value.returned |= returned
    value.only_half &= only_half


def demand(block: Block) -> None:
    """Collects what the readers of every value want, from the results back."""
    for op in reversed(block.ops):
        DEMAND[op.forced or op.rule](op)


def _want_full(op: Op) -> None:
    amplifies = op.name in ops.SENSITIVE or (
        op.name == "custom_jvp_call"
        and any(o.name in ops.SENSITIVE for o in op.subs[0].block.walk())
    )
    needed = amplifies or any(out.needed for out in op.outs)
    for value in op.ins:
        _read_by(value, full=True, needed=needed)


def _want_half(op: Op) -> None:
    for value in op.ins:
        _read_by(value, full=False, outside=True, only_half=True)


def _want_original(op: Op) -> None:
    for value in op.ins:
        _read_by(value, full=True, needed=True)


def _want_any(op: Op) -> None:
    for value in op.ins:
        _read_by(value)


def _want_follow(op: Op) -> None:
    floats = [out for out in op.outs if out.is_f32]
    full = all(out.all_full for out in floats)
    op.full_by_readers = full or any(out.returned for out in floats)
    needed = any(out.needed for out in floats)
    kinked = op.name in ops.KINKED and not op.full_by_readers
    for value in op.ins:
        value.before_kink |= kinked
        beside_half = any(v.from_half for v in op.ins if v is not value)
        _read_by(value, op.full_by_readers, needed, outside=not op.full_by_readers and beside_half)


def _want_same(op: Op) -> None:
    """Layout: its readers are the readers of its operands."""
    floats = [out for out in op.outs if out.is_f32]
    for value in op.ins:
        if not value.is_f32:
            continue
        for out in floats:
            _pass_on(value, out)


def _pass_on(value: Value, reader: Value) -> None:
    if reader.readers:
        _read_by(
            value,
            reader.all_full,
            reader.needed,
            reader.outside,
            reader.returned,
            reader.readers,
            reader.only_half,
        )


def _want_cast(op: Op) -> None:
    value, out = op.ins[0], op.outs[0]
    if not value.is_f32:
        return
    if out.is_f32:
        _pass_on(value, out)
    elif out.aval.dtype in HALVES:
        _read_by(value, full=False, outside=True, only_half=True)
    else:  # to an integer, a float64: every bit counts
        _read_by(value, full=True, needed=True)


def _want_program(op: Op) -> None:
    for sub in reversed(op.subs):
        block = sub.block
        carried = dict(sub.carry)
        for position, (value, index) in enumerate(zip(block.outvars, sub.outs, strict=True)):
            if position in carried and not block.carries[carried[position]]:
                _read_by(value, full=True, needed=True, returned=True)
            elif position in carried:
                _read_by(value, full=False, outside=True)
            elif index is not None:
                _pass_on(value, op.outs[index])
            else:
                _read_by(value)
        demand(block)
        for position, (value, index) in enumerate(zip(block.invars, sub.ins, strict=True)):
            if position not in carried.values():
                _pass_on(op.ins[index], value)
            elif block.carries and block.carries[position]:
                _read_by(op.ins[index], full=False, outside=True)
            else:
                _read_by(op.ins[index], full=True)


DEMAND: dict[str, Callable[[Op], None]] = {
    "half": _want_half,
    "full": _want_full,
    "follow": _want_follow,
    "layout": _want_same,
    "neutral": _want_any,
    "cast": _want_cast,
    "program": _want_program,
    "leave": _want_original,
    "written": _want_original,
}


# ---- 4. decide ----------------------------------------------------------------------------------


def decide(block: Block) -> None:
    """Picks each op's compute dtype and each value's kind and storage dtype."""
    for value, _ in block.consts:
        _set(value, "flexible", FLOAT32)
    for op in block.ops:
        for value in op.ins:
            if not value.kind:
                _set(value, "flexible", FLOAT32)
        DECIDE[op.forced or op.rule](op)
    for value in block.outvars:
        if not value.kind:
            _set(value, "flexible", FLOAT32)


def _set(value: Value, kind: str, dtype: Any) -> None:
    if value.is_f32:
        value.kind, value.dtype = kind, np.dtype(dtype)


def _give(op: Op, kind: str, dtype: Any, wide: bool = False) -> None:
    """Sets an op's results, and rounds for storage what is to be rounded."""
    for out in op.outs:
        if not out.is_f32:
            continue
        out.wide = wide
        _set(out, kind, dtype)
        if kind != "half" and op.half is not None and _is_rounded(out):
            out.rounded = True
            _set(out, "half", op.half)


def _is_rounded(value: Value) -> bool:
    """Tells whether a float32 result is stored in half.

    It is where several read it, one of them outside of its island; and before a relu and the like,
    which saves its operand for its derivative.
    """
    several = value.readers > 1 and value.outside and not value.all_full
    return (several or value.before_kink) and not (value.wide or value.small or value.size == 1)


def _decide_half(op: Op) -> None:
    op.compute = op.half
    out = op.outs[0]
    if op.name not in ops.HALF:  # told to by the user
        _give(op, "half", op.half)
    elif not out.is_f32:
        return
    elif any(v.linear for v in op.ins):
        _give(op, "half", op.half)  # its transpose, a matmul too, must get a half cotangent
    elif op.name in ops.MATMULS and out.all_full and out.needed:
        op.reason += ", float32 result for its float32 readers"
        _set(out, "full", FLOAT32)
    elif all(v.aval.dtype in HALVES for v in op.ins if _is_float(v)):
        _set(out, "full", FLOAT32)  # the program asked for a float32 result of half operands
    else:
        _give(op, "half", op.half)


def _decide_full(op: Op) -> None:
    op.compute = FLOAT32
    wide = op.name not in ops.FULL and any(v.wide for v in op.ins)
    _give(op, "full", FLOAT32, wide)


def _decide_follow(op: Op) -> None:
    kinds = {v.kind for v in op.ins if v.is_f32}
    wide = any(v.wide for v in op.ins)
    if not kinds:  # made from integers or booleans: not an operand's dtype to follow
        return _decide_leave(op)
    critical = _critical_constant(op) if kinds & {"half"} else None
    if kinds <= {"flexible"}:
        op.compute = FLOAT32
        _give(op, "flexible", FLOAT32, wide)
    elif op.full_by_readers or "full" in kinds or critical is not None:
        op.compute = FLOAT32
        if critical is not None:
            op.reason = f"constant {critical:g} does not survive {op.half.name}"
            wide = True
        elif op.full_by_readers:
            op.reason = "read by float32 operations"
        else:
            op.reason = "follows a float32 operand"
        _give(op, "full", FLOAT32, wide)
    else:
        op.compute, op.reason = op.half, "follows a half operand"
        _give(op, "half", op.half)


def _critical_constant(op: Op) -> float | None:
    """Returns a constant operand that half would turn into zero, infinity or one."""
    for value in op.ins:
        if value.const is None or not value.is_f32:
            continue
        exact = np.asarray(value.const, np.float32)
        with np.errstate(over="ignore", under="ignore"):
            half = exact.astype(op.half).astype(np.float32)
        lost = np.isinf(half) & np.isfinite(exact)
        vanished = (half == 0) & (exact != 0)
        if exact.size > 1:  # single entries of an array may vanish; all of them may not
            vanished &= not np.any(half)
        near_one = (half == 1) & (exact != 1) & (exact.size == 1)
        found = exact[lost | vanished | near_one]
        if found.size:
            return float(found.flat[0])
    return None


def _decide_layout(op: Op) -> None:
    kinds = {v.kind for v in op.ins if v.is_f32}
    wide = any(v.wide for v in op.ins)
    fresh = op.name in ("gather", "concatenate")  # a new array, not a view of its operand
    for kind in ("full", "half", "flexible"):
        if kind not in kinds:
            continue
        if kind == "half" and len(kinds) > 1 and _keeps_float32(op):
            kind = "full"
        if kind == "half":
            halves = {v.dtype for v in op.ins if v.kind == "half"}
            op.compute = halves.pop() if len(halves) == 1 else op.half
            return _give(op, "half", op.compute)
        if kind == "full" and not wide and all(_only_for_half(out) for out in op.outs):
            op.compute = op.half
            return _give(op, "half", op.half)
        op.compute = FLOAT32
        for out in op.outs:
            out.wide = wide
            _set(out, kind, FLOAT32)
        return _give(op, kind, FLOAT32, wide) if fresh else None
    return _decide_leave(op)


def _only_for_half(out: Value) -> bool:
    return out.is_f32 and out.only_half and out.readers > 0 and not out.small


def _keeps_float32(op: Op) -> bool:
    """Tells whether a half operand joins float32 ones rather than the other way round.

    So where the result is returned: a buffer that is updated in part keeps the rest of its values.
    """
    out = op.outs[0]
    return out.returned or out.all_full or _critical_constant(op) is not None


def _decide_neutral(op: Op) -> None:
    kinds = {v.kind for v in op.ins if v.is_f32}
    if kinds == {"half"} or ("half" in kinds and "full" not in kinds):
        half = next(v.dtype for v in op.ins if v.kind == "half")
        exact = all(_is_exact(v, half) for v in op.ins if v.kind == "flexible")
        op.compute = half if exact else FLOAT32
    else:
        op.compute = FLOAT32


def _is_exact(value: Value, dtype: Any) -> bool:
    if value.const is None:
        return False
    exact = np.asarray(value.const, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        return bool(np.all(exact.astype(dtype).astype(np.float32) == exact))


def _decide_cast(op: Op) -> None:
    value, out = op.ins[0], op.outs[0]
    if not out.is_f32:
        op.compute = None
    elif value.is_f32:
        out.wide = value.wide
        _set(out, value.kind, value.dtype)
    elif value.aval.dtype in HALVES and op.half == value.aval.dtype:
        _set(out, "half", op.half)  # half already: nothing to do until a float32 reader comes
    elif value.aval.dtype == np.bool_ or value.aval.dtype in HALVES:
        _set(out, "flexible", FLOAT32)  # exact in half
    elif np.issubdtype(value.aval.dtype, np.integer):
        op.reason = "made from integers"
        out.wide = True
        _set(out, "full", FLOAT32)
    else:
        _set(
            out,
            "full" if np.issubdtype(value.aval.dtype, np.complexfloating) else "flexible",
            FLOAT32,
        )


def _decide_leave(op: Op) -> None:
    op.compute = FLOAT32
    _give(op, "full", FLOAT32, wide=op.name in ops.FROM_BITS)


def _decide_written(op: Op) -> None:
    op.compute = FLOAT32
    _give(op, "full", FLOAT32)


def _decide_program(op: Op) -> None:
    results: dict[int, list[Value]] = {}
    for sub in op.subs:
        block = sub.block
        pinned = op.name in PINNED
        for position, (value, index) in enumerate(zip(block.invars, sub.ins, strict=True)):
            source = op.ins[index]
            carried = position in {argument for _, argument in sub.carry}
            if not value.is_f32:
                continue
            if carried:
                half = block.carries[position]
                _set(value, "half" if half else "flexible", _half_of(block) if half else FLOAT32)
            elif pinned or (op.name == "scan" and position < sub.consts) or _donated(op, index):
                # A loop's constants stay float32: their cotangents are summed over iterations.
                _set(value, "flexible" if source.kind != "full" else "full", FLOAT32)
            else:
                value.wide = source.wide
                _set(value, source.kind, source.dtype)
        decide(block)
        for value, place in zip(block.outvars, sub.outs, strict=True):
            if place is not None:
                results.setdefault(place, []).append(value)
    for index, out in enumerate(op.outs):
        _decide_result(op, out, index, results.get(index, []))


# Their rules, traced elsewhere, expect the dtypes that they were written for.
PINNED = frozenset({"custom_vmap_call", "linear_call"})


def _donated(op: Op, index: int) -> bool:
    return op.name == "jit" and op.params["donated_invars"][index]


def _decide_result(op: Op, out: Value, index: int, inner: Sequence[Value]) -> None:
    """Picks what a result of a sub-program is stored in: one dtype for all branches."""
    if not out.is_f32:
        return
    kinds = {v.kind for v in inner}
    out.wide = any(v.wide for v in inner)
    out.small = all(v.small for v in inner)
    halves = {v.dtype for v in inner if v.kind == "half"}
    for sub in op.subs:
        carried = dict(sub.carry)
        if index in carried:
            if sub.block.carries[carried[index]]:
                return _set(out, "half", _half_of(sub.block))
            return _set(out, "full", FLOAT32)
    half = op.half if op.half is not None else next(iter(halves), None)
    if op.name in PINNED or half is None:
        _set(out, "full", FLOAT32)
    elif "full" in kinds:
        rounded = out.outside and not (out.all_full or out.returned or out.wide or out.small)
        _set(out, "half" if rounded else "full", half if rounded else FLOAT32)
    elif "half" in kinds:
        _set(out, "half", halves.pop() if len(halves) == 1 else half)
    else:
        _set(out, "flexible", FLOAT32)


DECIDE: dict[str, Callable[[Op], None]] = {
    "half": _decide_half,
    "full": _decide_full,
    "follow": _decide_follow,
    "layout": _decide_layout,
    "neutral": _decide_neutral,
    "cast": _decide_cast,
    "program": _decide_program,
    "leave": _decide_leave,
    "written": _decide_written,
}
