"""The rows of a plan that is made of tables (`autocast.plan`)."""

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from mpjax._src.autocast.plan import Plan
from mpjax._src.autocast.schedule import ops_of
from mpjax._src.autocast.steps import (
    Attention,
    Checkpoint,
    ChunkedLoss,
    FusedAttention,
    Island,
    Recomputed,
    Recurrence,
    Sloped,
    WholeCheckpoint,
    unwrapped,
)
from mpjax._src.autocast.tables import Analysis, Reason, Why, why
from mpjax._src.base import _jax
from mpjax._src.base.dtypes import FLOAT32, SPELLINGS, short_name
from mpjax._src.base.lines import where
from mpjax._src.instruments.rows import Row, name_of, signature
from mpjax._src.program.graph import Block, Op, Value

WORDS = {
    Reason.HALF_ROW: "16-bit list",
    Reason.FULL_ROW: "float32 list",
    Reason.FULL_INSIDE: "float32 list inside",
    Reason.OPERANDS: "follows its operands",
    Reason.GIVES_NO_FLOAT: "its results are not floats",
    Reason.NO_FLOAT32: "no float32 operands or results",
    Reason.PROGRAM: "a program, whose operations have their own rows",
    Reason.OWN_RULE: "a program with its own derivative rule",
    Reason.UNKNOWN: "unknown operation, left unchanged",
    Reason.FLOAT32_KERNEL: "a kernel left in float32; mpjax.half_inputs would run it in 16 bits",
    Reason.NO_ROW: "a primitive without a rule, left in float32; mpjax.register_rule adds a rule, "
    "and mpjax.half_inputs runs a kernel in 16 bits",
    Reason.CAST: "a cast in the program itself",
    Reason.PRECISION: "explicit precision {}, left unchanged",
    Reason.WRITTEN: "left unchanged",
    Reason.LISTED: "{}_ops of the policy",
    Reason.OVERRIDE: 'override "{}"',
    Reason.REGION: "region {}",
    Reason.INNER_AUTOCAST: "planned by an inner autocast",
    Reason.KERNEL: "inside the kernel {} (half_inputs), left unchanged",
    Reason.FLOAT32_POLICY: "the policy computes in float32",
    Reason.HALF_OPERAND: "follows a 16-bit operand",
    Reason.CHAIN: "between 16-bit values: in float32, and rounded where it is stored",
    Reason.FULL_OPERAND: "follows a float32 operand",
    Reason.CONSTANT: "constant {:g} does not survive {}",
    Reason.OF_CONSTANTS: "an operand is computed from constants that do not survive {}",
    Reason.INTEGERS: "computed from integers",
    Reason.POSITIONS: "positions or counts, some of which are equal in {}",
    Reason.SPECIAL: "a special function of a 16-bit operand",
    Reason.FLATTENS: "its derivative is a difference, which 16 bits would lose",
    Reason.FULL_READERS: "read by float32 operations",
    Reason.WIDE_RESULT: "16-bit list, float32 result for the float32 operations that read it",
    Reason.AMPLIFIED: "a float32 operation would amplify its rounding error",
    Reason.SHORT_SUM: "a short sum whose rounding error a float32 operation would amplify",
    Reason.SELECTS: "selects float32 values with zeros and ones, for float32 operations",
    Reason.SOLUTION: "added to the solution of a loop left unchanged, and amplified afterwards",
    Reason.LOST: "16 bits would lose small terms that it adds, or its range",
    Reason.ENDS_LOOP: "left unchanged: a float32 comparison that depends on a matmul ends it",
    Reason.REPEATS_LOOP: "left unchanged: its backward rule may repeat decisions of a loop",
    Reason.WITHIN: "inside the {} of {}, left unchanged",
    Reason.REPLAYS_LOOP: "left unchanged: it may repeat the decisions of a loop left unchanged",
}


def words(why: Why) -> str:
    """Returns a reason in words."""
    return WORDS[why.reason].format(*why.about)


def rows_of(plan: Plan) -> Iterator[Row]:
    """Yields the rows of a plan. Operations inside one that is left unchanged name that one."""
    storage, within, analysis = storage_of(plan), {}, plan.analysis
    for op, times in plan.numbered:
        if analysis.rulings[op].leaves_alone(op):
            inner = (o for sub in op.subs for o in sub.program.walk())
            within.update(dict.fromkeys(inner, op))
        around = within.get(op)
        inside = why(Reason.WITHIN, around.name, where(*around.lines)) if around else None
        reason = inside or analysis.why(op)
        yield _row(analysis, op, times, storage.get(op, ""), reason)


def _row(analysis: Analysis, op: Op, times: int, storage: str, reason: Why) -> Row:
    paths = dict.fromkeys(path for v in op.ins for path in v.paths if path)
    source, library = op.lines
    ruling, compute = analysis.rulings[op], analysis.choices[op].compute
    dtypes = {v: analysis.stored[v].dtype for v in (*op.ins, *op.outs)}
    program = ruling.rule == "program"
    computes = [_after(v, dtypes[v] if program else compute or dtypes[v]) for v in op.ins]
    total = sum(_jax.bytes_of(v.aval, dtypes[v] if v.is_f32 else None) for v in (*op.ins, *op.outs))
    return Row(
        op.name,
        "/".join(op.scopes),
        ", ".join(paths),
        source,
        signature([name_of(v.aval) for v in op.ins], [name_of(v.aval) for v in op.outs]),
        signature(computes, [_after(v, dtypes[v]) for v in op.outs]),
        words(reason),
        _jax.flops_of(op.eqn),
        times,
        left_alone=ruling.leaves_alone(op),
        storage=storage,
        attention=analysis.marks.attention.get(op, ""),
        loss=analysis.marks.losses.get(op, ""),
        library=library,
        bytes=0 if program else total,
    )


def _after(value: Value, dtype: Any) -> str:
    if value.is_f32:
        return SPELLINGS.get(np.dtype(dtype or FLOAT32), ("f32",))[0]
    return name_of(value.aval)


SIDES = "left operand", "right operand"
AGAIN = "computed again"


def storage_of(plan: Plan) -> dict[Op, str]:
    """Returns the plan's decision on storage, in words, for each op that has one."""
    rows = {v: row for op, row in plan.rows.items() for v in op.outs}
    texts: dict[Op, str] = {}
    for block in plan.block.blocks():
        if block in plan.analysis.steps:
            texts |= _storage_of(block, plan, rows)
    stands_for = plan.analysis.marks.stands_for
    return {stands_for.get(op, op): text for op, text in texts.items()}


def _of_op(op: Op, plan: Plan) -> str:
    """Says what is kept of an operation that runs alone, or ""."""
    own = [v for v in op.outs if v in plan.analysis.kept]
    parts = [f"kept in {_dtypes(own, plan)}"] if own else []
    centered = plan.analysis.marks.centered
    if op in centered:
        parts.append(f"{SIDES[centered[op][0]]} less its mean in the gradient of the other operand")
    return "; ".join(parts)


def _storage_of(block: Block, plan: Plan, rows: dict[Value, int]) -> dict[Op, str]:
    steps = plan.analysis.steps[block]
    texts: dict[Op, str] = {}
    for step in unwrapped(steps):
        if isinstance(step, Island):
            text = _of_island(step, plan, rows)
            texts |= dict.fromkeys(step.ops, text)
        elif isinstance(step, Op) and (text := _of_op(step, plan)):
            texts[step] = text
    for step in steps:
        for op in step.ops if isinstance(step, Checkpoint) else ():
            if op.spec.runs_again:
                texts.setdefault(op, AGAIN)
        for inner in unwrapped([step]) if isinstance(step, WholeCheckpoint) else ():
            if not step.again.isdisjoint(inner.outs):
                texts |= dict.fromkeys(ops_of(inner), AGAIN)
    return texts


def _of_island(island: Island, plan: Plan, rows: dict[Value, int]) -> str:
    half = island.body.half
    half = SPELLINGS[half][0] if half is not None else "f32"
    if isinstance(island, ChunkedLoss):
        return f"run {island.written.describe()}, which keeps no logits"
    if isinstance(island, FusedAttention):
        return f"run by the fused attention of {island.fusion.kernel}, which keeps no weights"
    if isinstance(island, Attention):
        return f"its weights are kept in {half}; row sums come from the attention's output"
    if isinstance(island, Recurrence):
        return "its derivative is a recurrence in the other direction, which reads its result"
    if isinstance(island, Sloped):
        return f"its slope is kept in {half}"
    if not isinstance(island, Recomputed):
        return f"its result is kept in {half}"
    sources = sorted({rows[v] for v in island.kept if v in rows})
    from_rows = f" (rows {', '.join(map(str, sources))})" if sources else ""
    tail = f"; the cotangent of its norm's result is {half}" if island.tail else ""
    dtypes = _dtypes(island.kept, plan, island.rounded, half)
    return f"computed again from {dtypes}{from_rows}{tail}"


def _dtypes(
    values: Collection[Value], plan: Plan, rounded: Collection[Value] = (), half: str = ""
) -> str:
    stored = plan.analysis.stored
    names = {half if v in rounded else short_name(stored[v].dtype or v.aval.dtype) for v in values}
    return ", ".join(sorted(names))
