"""Finds out what a collective carries, by the sources and the uses of its operands."""

from collections.abc import Callable, Sequence

from mpjax._src.tools.hardware.flow import MAPPED, MIXED, SPREAD, SUMMED, Flow, Leaf, reached
from mpjax._src.tools.hardware.hlo import Op, Shape, parameters, parse

SUMS = ("all-reduce", "reduce-scatter")


def carried_by(flow: Flow, asked: str) -> Callable[[Op, int], str]:
    """Returns a function that finds `CollectiveRow.carries` for an operand of a collective.

    An argument is trained if a result has its shape: its new value or its gradient. Single numbers
    do not count, because a loss is one too. Second-order optimizers may multiply gradients as
    matrices, and a mean of BatchNorm becomes a result as well. They differ in one respect:
    statistics are repeated before they reach a matmul, and gradients are not. Shapes of whole
    arrays are in ``asked``, the HLO before the program was partitioned.
    """
    whole = parse(asked).entry
    arguments = [shape for op in parameters(whole) for shape in op.shapes]
    results = whole.root.shapes
    # What may be trained is a result of the shape of an argument, and the other way round.
    kept = _trainable_in(flow.results, results, arguments)
    trained = _trainable_in(flow.arguments, arguments, results)
    steps = [(source, *step) for source, found in flow.after.items() for step in found]
    products = {target for _, target, kind in steps if kind == MIXED}
    sums = {target for _, target, kind in steps if kind == SUMMED}
    to_result = reached(flow.before, kept, SPREAD)
    to_matmul = reached(flow.before, (source for source, _, kind in steps if kind == MIXED), SPREAD)
    by_matmul = reached(flow.after, products, MAPPED)
    computed = reached(flow.after, products | sums, SPREAD)
    of_argument = reached(flow.after, trained, MAPPED)

    def carried(op: Op, index: int) -> str:
        operand, result = Leaf(op.operands[index], 0), Leaf(op, index)
        becomes = to_result.get(result, MIXED)  # what reaches no trained result is as if multiplied
        if op.kind in SUMS:
            if becomes <= MAPPED and to_matmul.get(result) != SPREAD:
                return "gradients"
            # One number that decides about all new values, such as whether gradients are finite.
            if becomes == SPREAD and result not in to_matmul:
                return "verdict"
            return "activations" if operand in by_matmul else "statistics"
        # What is not summed is gathered or moved: arguments as they are, or what was computed from
        # them.
        if operand not in computed:
            return "parameters" if operand in of_argument else "data"
        if becomes <= MAPPED:
            return "parameters" if operand in of_argument else "gradients"
        return "activations"

    return carried


def _trainable_in(
    leaves: Sequence[Leaf], shapes: Sequence[Shape], others: Sequence[Shape]
) -> list[Leaf]:
    """Returns the leaves whose shape is also one of the other side."""
    there = {shape.dims for shape in others if shape.trainable}
    pairs = zip(leaves, shapes, strict=True)
    return [leaf for leaf, shape in pairs if shape.trainable and shape.dims in there]
