"""Chains: successive elementwise 16-bit operations run in float32, and round once.

A value is rounded where it is stored: a matmul reads it, or a loop, another fusion or the backward
pass. Between two elementwise operations that XLA fuses it is in a register, where float32 costs
nothing, while ten roundings to bfloat16 cost more than three times the error of one.

What derivatives save must stay in 16 bits. So a chain whose derivatives read values inside it
becomes an island, which keeps its inputs, if these are not more bytes; else only the values that no
derivative reads are left unrounded.
"""

from collections.abc import Collection, Iterable, Sequence

from mpjax._src.autocast.flow import (
    Flow,
    counts,
    is_spread,
    kept_bytes,
    large_float32,
    not_far_smaller,
)
from mpjax._src.autocast.schedule import needs
from mpjax._src.autocast.steps import Checkpoint, Recomputed, Step, body_of
from mpjax._src.autocast.tables import Analysis, Reason, why
from mpjax._src.base import rules
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.program.graph import Op, Value


def links(flow: Flow) -> set[Op]:
    """Returns the ops of a block that may be parts of chains: elementwise, and no epilogue."""
    linked: set[Op] = set()
    sums: dict[Value, int] = {}  # results of matmuls, after so many sums in their epilogues
    for op in flow.ops:
        before = [sums[v] for v in op.ins if v in sums and len(flow.readers.get(v, ())) == 1]
        matmul = op.spec.need == rules.HALF
        epilogue = op.name in ADDS and min(before, default=EPILOGUE) < EPILOGUE
        if matmul or epilogue:
            sums |= dict.fromkeys(op.outs, 0 if matmul else min(before) + 1)
        if _is_elementwise(op, flow) and not (epilogue and not _is_taken_back(op, flow)):
            linked.add(op)
    return linked


# The kernel of a matmul adds a bias and a residual stream to its accumulator, if they are 16-bit:
# then the sums are not rounded before, and cost no bytes.
ADDS, EPILOGUE = frozenset(["add", "add_any"]), 2


def _is_taken_back(op: Op, flow: Flow) -> bool:
    """Returns whether a difference reads a sum: it may subtract most of it again."""
    readers = flow.readers.get(op.outs[0], ())
    return any(r is not None and rules.SUBTRACTS in r.spec.traits for r in readers)


def _is_elementwise(op: Op, flow: Flow) -> bool:
    ruling, analysis = flow.rulings[op], flow.analysis
    if ruling.forced or op.subs or op.spec.cost != rules.FUSED or flow.choices[op].compute is None:
        return False
    # The island of a chain keeps its inputs in 16 bits: a float32 one would be rounded.
    full = (v for v in op.ins if flow.stored[v].kind == "full" and flow.stored[v].dtype == FLOAT32)
    wide = any(counts(analysis, v) for v in full)
    moving = any(analysis.facts[v].linear for v in (*op.ins, *op.outs))
    return ruling.rule in ("follow", "full", "neutral") and not (wide or moving)


def islands(groups: Iterable[Sequence[Op]], flow: Flow) -> list[Recomputed]:
    """Returns the islands of chains whose derivatives read values inside."""
    analysis, recomputed = flow.analysis, []
    for ops in groups:
        # One 16-bit dtype, some rounding to save, and a derivative that would keep values inside.
        needed = _needed(analysis, ops)
        halves = {flow.rulings[op].half for op in ops}
        rounds = any(flow.stored[v].kind == "half" for v in _inner(ops, flow))
        if len(halves) > 1 or not rounds or not needed:
            continue
        body = body_of(ops, flow)
        rounded = large_float32(body.ops, body.ins, flow)
        if not all(analysis.may_be_rounded(v) for v in rounded):
            continue
        beside = not_far_smaller(body.ins, max(v.size for op in ops for v in op.outs))
        if kept_bytes(analysis, beside) <= kept_bytes(analysis, needed):
            recomputed.append(Recomputed(body, rounded=rounded))
    return recomputed


def unround_again(steps: Iterable[Step], flow: Flow, groups: Sequence[Collection[Op]]) -> None:
    """Leaves values unrounded between the ops of a checkpoint that are computed again, in groups.

    The cotangent of a product with a broadcast array is read elementwise and by a sum, so XLA
    writes it: in 16 bits, if the product is rounded.
    """
    for step in steps:
        if isinstance(step, Checkpoint):
            inside = {s for s in step.steps if isinstance(s, Op) and not _sums_back(s, flow)}
            for ops in groups:
                unrounded([op for op in ops if op in inside], flow, differentiated=False)
            unround_again(step.steps, flow, groups)


def _sums_back(op: Op, flow: Flow) -> bool:
    return any(is_spread(v, out, flow) for v in op.ins for out in op.outs)


def unrounded(ops: Collection[Op], flow: Flow, differentiated: bool = True) -> None:
    """Leaves float32 values between ops unrounded, where no derivative reads what the ops read.

    ``differentiated`` says whether derivatives save values.
    """
    plain = {op for op in ops if not differentiated or not _needed(flow.analysis, [op])}
    analysis = flow.analysis
    halves = (v for v in _inner(plain, flow) if flow.stored[v].kind == "half")
    inner = {v for v in halves if v not in analysis.kept and v not in analysis.once}
    for op in plain:
        if flow.choices[op].compute in HALVES and not inner.isdisjoint((*op.ins, *op.outs)):
            choice = flow.choices[op]
            flow.choices[op] = choice._replace(compute=FLOAT32, why=why(Reason.CHAIN))
    for value in inner:
        stored = flow.stored[value]
        flow.stored[value] = stored._replace(kind="full", dtype=FLOAT32, rounded=False)


def _inner(ops: Collection[Op], flow: Flow) -> list[Value]:
    """Returns the float32 values that only the given ops compute and read."""
    results = (v for op in ops for v in op.outs if v.is_f32)
    return [v for v in results if all(reader in ops for reader in flow.readers.get(v, (None,)))]


def _needed(analysis: Analysis, ops: Iterable[Op]) -> set[Value]:
    """Returns the values that derivatives of ops save."""
    return {v for op in ops for v in needs(analysis, op) if counts(analysis, v)}
