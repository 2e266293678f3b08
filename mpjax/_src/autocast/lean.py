"""Storage by fewest bytes kept: elementwise work is done again, matmuls and reductions are not.

The operations between two programs (a loop, a custom rule) run under one checkpoint. What is kept
of it is the lightest set of values from which all that derivatives read can be computed again. The
rows of `rules` say what they read, and what may not be computed twice.
"""

from collections.abc import Iterator, Sequence

from mpjax._src import _jax, rules
from mpjax._src.autocast.graph import Op, Value
from mpjax._src.autocast.mincut import cheapest_cut
from mpjax._src.autocast.steps import Checkpoint, Step, flow_of, reads, together, writes


def checkpoints(steps: Sequence[Step], results: Sequence[Value]) -> list[Step]:
    """Returns the steps of a block, those that can be run again gathered into checkpoints.

    Args:
        steps: The steps.
        results: What the block hands out.
    """
    flow = flow_of(steps, results)
    found: list[Step] = []
    start = 0
    for i, step in enumerate([*steps, None]):
        if step is not None and not _stands_alone(step):
            continue
        inside, inputs, outputs = together(flow, start, i)
        if _keep(inside, inputs):
            found.append(Checkpoint(inside, inputs, outputs))
        else:
            found += steps[start:i]
        found += [] if step is None else [step]
        start = i + 1
    return found


def _stands_alone(step: Step) -> bool:
    """Tells a program, whose storage is decided inside of it, and what must happen once."""
    return isinstance(step, Op) and (step.rule == "program" or bool(step.eqn.effects))


def _keep(steps: Sequence[Step], inputs: Sequence[Value]) -> bool:
    """Marks what is kept of some steps; returns whether that leaves anything to compute again."""
    number = {v: i for i, v in enumerate(dict.fromkeys([*inputs, *_values(steps)]))}
    edges, given = [], {number[v] for v in inputs}
    for step in steps:
        if _runs_again(step):
            read = [number[v] for v in reads(step) if v in number]
            edges += [(i, number[v]) for i in read for v in writes(step)]
        else:
            given |= {number[v] for v in writes(step)}
    needed = {v for step in steps for v in _needs(step) if v in number}
    if not needed:
        return False
    weights = [_bytes(v) for v in number]
    kept = cheapest_cut(weights, edges, given, {number[v] for v in needed})
    for value in {*number}.difference(inputs):
        value.kept = number[value] in kept
    return any(number[v] not in kept for v in needed)


def _values(steps: Sequence[Step]) -> Iterator[Value]:
    for step in steps:
        yield from writes(step)


def _runs_again(step: Step) -> bool:
    if not isinstance(step, Op):
        return False
    return step.spec.cost != rules.NEVER and rules.REDUCES not in step.spec.traits


def _needs(step: Step) -> Iterator[Value]:
    """Yields what the derivative of a step reads: its masks and indices, and what its row says."""
    if not isinstance(step, Op):  # a softmax: its result, which its own derivative keeps
        yield from step.inputs[1:]
        yield from step.results
        return
    floats = [v for v in step.ins if v.is_f32 and v.const is None]
    if not floats or not any(v.is_f32 for v in step.outs):
        return
    saves, kinked = step.spec.saves, rules.KINKED in step.spec.traits
    yield from (v for v in step.ins if not v.is_f32)
    if saves == rules.OTHERS and len(floats) > 1:
        yield from floats
    if kinked or saves == rules.OPERANDS:
        yield from floats
    if kinked or saves == rules.RESULT or step.name == "div":
        yield from step.outs


def _bytes(value: Value) -> int:
    """Returns what it takes to keep a value: nothing for an argument or a constant."""
    if value.raw or value.const is not None or not _jax.is_array(value.aval):
        return 0
    dtype = value.dtype if value.is_f32 else value.aval.dtype
    return _jax.size_of(_jax.shard_shape(value.aval)) * dtype.itemsize
