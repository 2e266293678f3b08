"""The data flow of a block: which op computes each value, and which ops read it."""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.program.graph import PLANNED, Block, Op, Value
from mpjax._src.core.program.views import is_view


class Unfit(Exception):
    """Raised with the reason why a replacement cannot run something."""


class Found(NamedTuple):
    """Ops that are replaced, and what runs in their place. Equal ones run the same program."""

    ops: frozenset[Op]
    ins: Sequence[Value]  # what it reads
    result: Op  # the op whose results it returns
    at: Op  # the matmul in whose place it runs
    # ``run(how, arrays)`` returns them; ``how`` is plain data.
    run: Any
    how: Any
    planned: bool = True  # nothing in it is cast


class Flow:
    """The data flow of a block.

    Attributes:
        block: The block.
        ops: Its ops, in order.
        rulings: For each op, whether the policy asks for a dtype.
        producer: For each value, the op that computes it.
        readers: For each value, the ops that read it; None means the block's results.
    """

    def __init__(self, block: Block, rulings: Any) -> None:
        self.block, self.ops, self.rulings = block, [*block.ops], rulings
        self.producer = {v: op for op in block.ops for v in op.outs}
        self.readers: dict[Value, list[Op | None]] = {v: [None] for v in block.outvars}
        for op in block.ops:
            # An op that reads a value twice is one reader: many patterns ask for a single one.
            for v in dict.fromkeys(op.ins):
                self.readers.setdefault(v, []).append(op)

    @functools.cached_property
    def constants(self) -> dict[Value, Any]:
        """The arrays that the block closes over."""
        return {v: x for v, x in self.block.consts if not isinstance(x, jax.core.Tracer)}

    def is_plain(self, op: Op) -> bool:
        """Returns whether an op computes one float32 array, and nothing asks for 16 bits."""
        return (
            not self.in_half(op)
            and PLANNED not in op.scopes
            and not op.eqn.effects
            and len(op.outs) == 1
            and op.outs[0].is_f32
        )

    def in_half(self, op: Op) -> bool:
        """Returns whether an op that is no matmul computes in 16 bits."""
        return self.rulings[op].forced == "half"

    def is_fixed(self, op: Op) -> bool:
        """Returns whether something asks for another dtype of an op than it has in a kernel."""
        return self.in_half(op)

    def in_full(self, matmul: Op, weights: Iterable[Op]) -> bool:
        """Returns whether a matmul, and what makes its weights, is asked to be float32."""
        inside = any(self.rulings[op].forced == "full" for op in weights)
        return inside and self.rulings[matmul].forced == "full"

    def key(self, op: Op) -> Any:
        """Returns what equal ops on equal operands have in common."""
        return _jax.equation_key(op.eqn)[:-1], self.rulings[op].forced


# The number of values that are searched.
REACH = 256


def leads_to(
    value: Value,
    name: str,
    flow: Flow,
    through: Callable[[Op, Value], bool] = lambda op, v: _passes(op),
) -> Op | None:
    """Returns the nearest op of a name that reads a value, or what is computed from it."""
    seen = {value: None}
    for v in (todo := [value]):  # grows
        for op in flow.readers.get(v, ()):
            if op is not None and op.name == name:
                return op
            if op is not None and (is_view(op) or through(op, v)) and len(seen) < REACH:
                todo += [x for x in op.outs if x not in seen]
                seen.update(dict.fromkeys(op.outs))
    return None


def _passes(op: Op) -> bool:
    """Returns whether an op computes each entry by itself, or moves entries."""
    return op.spec.runs_again or (
        op.spec.need == rules.MOVE and rules.REDUCES not in op.spec.traits
    )


def absorbed(
    members: Collection[Op], inputs: Sequence[Value], result: Op, flow: Flow
) -> frozenset[Op] | None:
    """Returns ops that are replaced, with those that only these read.

    Args:
        members: The ops.
        inputs: What the replacement reads. The ops that make this stay outside, even if only
            members read it.
        result: The member whose results the replacement returns.
        flow: The data flow.

    Returns:
        The ops; None if others read what the replacement would not return.
    """
    apart = {flow.producer[v] for v in inputs if v in flow.producer}

    def readers(op: Op) -> "set[Op | None]":
        return {reader for v in op.outs for reader in flow.readers.get(v, ())}

    inside: set[Op | None] = {*members}
    todo = [*members]
    for op in todo:  # grows
        for maker in {flow.producer[v] for v in op.ins if v in flow.producer}:
            absorbs = maker not in inside and maker not in apart and not maker.eqn.effects
            if absorbs and readers(maker) <= inside:
                inside.add(maker)
                todo.append(maker)
    ops = [*filter(None, inside)]
    apart_from_others = all(readers(op) <= inside for op in ops if op is not result)
    return frozenset(ops) if apart_from_others else None
