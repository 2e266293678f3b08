"""Separates arrays that XLA concatenates to reduce them over devices together.

GPU compilers concatenate small arrays before an all-reduce and slice the sum. To find out what each
array carries, it must be its own operand, as it is in the output of TPU compilers.
"""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mpjax._src.tools.hardware.hlo import Computation, Op, Shape, called_by, parameters, users_of

Module = dict[str, Computation]
RANGE = re.compile(r"slice=\{\[(\d+):(\d+)\]\}")


def unbundled(module: Module) -> Module:
    """Replaces all-reduces of concatenated arrays by all-reduces of several arrays.

    An all-reduce is left as it is if its sum is used as a whole, or sliced across two arrays.
    """
    changed = dict(module)
    for name, computation in module.items():
        for op in computation.ops.values():
            if op.opcode in ("all-reduce", "all-reduce-start") and len(op.operands) == 1:
                for edited in _edited(changed, changed[name], op):
                    changed[edited.name] = edited
    return changed


def _edited(module: Module, computation: Computation, op: Op) -> Sequence[Computation]:
    """Returns the changed computations for one all-reduce; none if it cannot be separated."""
    joined = computation.ops[op.operands[0]]
    inner = _kernel(module, joined)
    root = inner.ops[inner.root] if inner else joined
    # XLA joins arrays that it has flattened: each is a range of the only axis.
    if root.opcode != "concatenate" or len(root.shapes[0].dims) != 1:
        return ()
    place = inner or computation
    shapes = tuple(place.ops[operand].shapes[0] for operand in root.operands)
    users = users_of(computation)
    # Readers of an asynchronous sum read what its end returns.
    sums = [op, *users[op.name]] if op.opcode.endswith("-start") else [op]
    if len(users[joined.name]) > 1:  # another reader needs it as one array
        return ()
    ops, kernels = dict(computation.ops), []
    # Each reader has to slice single arrays out of the sum, itself or within its kernel.
    for reader in users[sums[-1].name]:
        kernel = _kernel(module, reader)
        if kernel:
            parameter = parameters(kernel)[reader.operands.index(sums[-1].name)]
            read = _read_apart(users_of(kernel)[parameter.name], shapes)
            changes = {parameter.name: replace(parameter, shapes=shapes), **read}
            kernels.append(replace(kernel, ops={**kernel.ops, **changes}))
        else:
            read = _read_apart([reader], shapes)
            ops |= read
        if not read:
            return ()
    parts = root.operands
    if inner:  # the kernel that joined the arrays returns them as a tuple instead
        as_tuple = replace(root, opcode="tuple", shapes=shapes)
        kernels.append(replace(inner, ops={**inner.ops, root.name: as_tuple}))
        ops[joined.name] = replace(joined, shapes=shapes)
        # HLO's own names do not contain "#".
        picked = [_pick(f"{joined.name}#{i}", joined.name, i, s) for i, s in enumerate(shapes)]
        parts = tuple(pick.name for pick in picked)
        ops |= {pick.name: pick for pick in picked}
    ops |= {each.name: replace(each, shapes=shapes) for each in sums}
    ops[op.name] = replace(ops[op.name], operands=parts)
    return [replace(computation, ops=ops), *kernels]


def _kernel(module: Module, op: Op) -> Computation | None:
    return module[called_by(op)[0]] if op.opcode == "fusion" else None


def _read_apart(readers: Iterable[Op], shapes: Sequence[Shape]) -> dict[str, Op]:
    """Returns instructions that pick one array instead of a slice, or {} if one cannot be made."""
    picks = {op.name: _apart(op, shapes) for op in readers}
    possible = {name: pick for name, pick in picks.items() if pick}
    return possible if len(possible) == len(picks) else {}


def _apart(op: Op, shapes: Sequence[Shape]) -> Op | None:
    """Returns an instruction that picks the array of a slice, or None if it spans several."""
    match = RANGE.search(op.attributes)
    if op.opcode != "slice" or not match:
        return None
    start, end = map(int, match.groups())
    ends = list(itertools.accumulate(shape.size for shape in shapes))
    for index, (shape, last) in enumerate(zip(shapes, ends, strict=True)):
        if last - shape.size <= start and end <= last:
            return _pick(op.name, op.operands[0], index, op.shapes[0])
    return None


def _pick(name: str, source: str, index: int, shape: Shape) -> Op:
    return Op(name, "get-tuple-element", (shape,), (source,), f"%{source}", f"index={index}")
