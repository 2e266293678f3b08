"""Which of the kept values become 8-bit codes, and of which kind (`storage=8bit`).

The forward pass computes what it computes without codes; derivatives read the values that codes
represent. A value is kept as it is stored where rounding it would be amplified or would lose
integers, where it is small, and where a derivative reads it that cannot read a code: of a program
inside the program, or of an operation that computes its derivative from its own result.
"""

from collections.abc import Iterator, Sequence

from mpjax._src.autocast.schedule import made_where_read, needs, runs_once
from mpjax._src.autocast.steps import KeptAttention, SoftmaxIsland, Step
from mpjax._src.autocast.tables import Analysis
from mpjax._src.base import _jax
from mpjax._src.base.dtypes import HALVES
from mpjax._src.program.graph import Block, Op, Value

# Kinds of `coded.KINDS`.
SHARE, LEVELS = "share", "int8"

# The fewest entries of a code. XLA may write and read those of smaller arrays in kernels of their
# own, which takes more time than their bytes.
FEWEST = 2**14


def kinds(analysis: Analysis, steps: Sequence[Step]) -> dict[Value, str]:
    """Returns the kind of code in which each value of some steps would be kept, if it has one."""
    values = dict.fromkeys(v for step in steps for v in (*step.ins, *step.outs))
    whole = {v for step in steps for v in _read_whole(analysis, step)}
    shares = {v for step in steps for v in _shares(step)}
    return {
        v: SHARE if v in shares else LEVELS
        for v in values
        if v not in whole and may_be_coded(analysis, v)
    }


def may_be_coded(analysis: Analysis, value: Value) -> bool:
    """Returns whether codes can represent a value, if the steps that need it can read them."""
    if not value.is_f32 or value.literal or value.const is not None:
        return False
    if analysis.is_raw(value) or value in analysis.once:
        return False
    shape = _jax.shard_shape(value.aval)
    if _jax.size_of(shape) < FEWEST or not isinstance(shape[-1], int):
        return False
    fact, want, dtype = analysis.facts[value], analysis.wants[value], analysis.stored[value].dtype
    if fact.exact or fact.counts or want.amplified:
        return False
    return dtype in HALVES or analysis.may_be_rounded(value)


def _read_whole(analysis: Analysis, step: Step) -> Iterator[Value]:
    """Yields the values whose codes a step cannot read, and those that have none."""
    if runs_once(analysis, step):
        yield from needs(analysis, step)
    elif isinstance(step, KeptAttention):
        # The row sums of its derivative come from its result, and their terms from its values. Of
        # rounded ones, the difference would be as large as the rounding errors where rows are
        # peaked, instead of small.
        yield from (*step.ins[1:], *step.body.outs)
    elif isinstance(step, Op):
        yield from (v for v in needs(analysis, step) if v in step.outs)
    if made_where_read(analysis, step):
        yield from step.outs


def _shares(step: Step) -> Sequence[Value]:
    """Returns the results of a softmax whose rows sum to 1."""
    return step.body.sums if isinstance(step, SoftmaxIsland) and step.form.whole else ()


def convolved(block: Block) -> set[tuple[int, ...]]:
    """Returns the shapes of what convolutions read and make.

    A GPU's convolutions want the channels last in memory, whatever the order of the axes. Arrays of
    the same shape are most often what elementwise operations make of these.
    """
    convolutions = (op for op in block.walk() if op.name == "conv_general_dilated")
    return {v.aval.shape for op in convolutions for v in (*op.ins, *op.outs)}
