"""The data flow of a block: which op computes each value, and which ops read it."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.program.graph import PLANNED, Block, Op, Value
from mpjax._src.core.program.respellings import Found
from mpjax._src.core.program.views import is_view


class Unfit(Exception):
    """Raised with the reason why a replacement cannot run something."""


class Candidate(NamedTuple):
    """What may be replaced: a loss or an attention."""

    at: Op  # the op of its logits, or of its weights and values
    note: str  # what runs it, or why nothing does
    found: Found | None  # what it is replaced by


def judged(at: Op, find: Callable[[], Found], left: str) -> Candidate:
    """Returns what is replaced at an op, or why not, in words that begin with ``left``."""
    try:
        found = find()
    except Unfit as why:
        return Candidate(at, f"{left}{why}", None)
    return Candidate(at, found.how.describe(), found)


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

    @functools.cached_property
    def numbers(self) -> dict[Value, int]:
        """A number for each value; equal computations have equal numbers."""
        numbers: dict[Any, int] = {}
        numbered: dict[Value, int] = {}

        def add(value: Value, key: Any) -> int:
            return numbered.setdefault(value, numbers.setdefault(key, len(numbers)))

        def number_of(value: Value) -> int:
            const = np.asarray(value.const)
            same: Any = (const.dtype, const.shape, const.tobytes()) if value.literal else value
            return add(value, same)

        for op in self.ops:
            # What equal ops on equal operands have in common.
            key = _jax.equation_key(op.eqn)[:-1], self.rulings[op].forced
            ins = tuple(map(number_of, op.ins))
            # Operations with effects, or with parameters that have no hash, equal no others.
            with contextlib.suppress(TypeError):
                for place, value in enumerate(() if op.eqn.effects else op.outs):
                    add(value, (key, ins, place))
        for value in (*self.block.invars, *self.block.outvars):
            number_of(value)
        return numbered

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

    def in_full(self, matmul: Op, weights: Iterable[Op]) -> bool:
        """Returns whether a matmul, and what makes its weights, is asked to be float32."""
        inside = any(self.rulings[op].forced == "full" for op in weights)
        return inside and self.rulings[matmul].forced == "full"

    def reader(self, value: Value) -> Op | None:
        """Returns the op that reads a value, if nothing else does."""
        readers = self.readers.get(value, ())
        return readers[0] if len(readers) == 1 else None

    def readers_of(self, op: Op) -> "set[Op | None]":
        """Returns the ops that read what an op returns; None means the block's results."""
        return {reader for v in op.outs for reader in self.readers.get(v, ())}

    def before(
        self, values: Iterable[Value], through: Callable[[Op], bool] = lambda op: True
    ) -> Iterator[Op]:
        """Yields the ops that values are computed from, the nearest first, through some ops."""
        todo, seen = [*values], dict[Op, None]()
        for value in todo:  # grows
            op = self.producer.get(value)
            if op is not None and op not in seen:
                seen[op] = None
                yield op
                todo += op.ins if through(op) else ()

    def after(self, value: Value, through: Callable[[Op, Value], bool]) -> Iterator[Op]:
        """Yields the ops that read a value, or what is computed from it through some ops."""
        todo, seen = [value], dict[Op, None]()
        for v in todo:  # grows
            for op in self.readers.get(v, ()):
                if op is not None and op not in seen:
                    seen[op] = None
                    yield op
                    todo += op.outs if through(op, v) else ()


# The number of ops that are searched.
REACH = 256


def leads_to(
    value: Value,
    name: str,
    flow: Flow,
    through: Callable[[Op, Value], bool] = lambda op, v: _passes(op),
) -> Op | None:
    """Returns the nearest op of a name that reads a value, or what is computed from it."""
    after = flow.after(value, lambda op, v: is_view(op) or through(op, v))
    return next((op for op in itertools.islice(after, REACH) if op.name == name), None)


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

    inside: set[Op | None] = {*members}
    todo = [*members]
    for op in todo:  # grows
        for maker in {flow.producer[v] for v in op.ins if v in flow.producer}:
            absorbs = maker not in inside and maker not in apart and not maker.eqn.effects
            if absorbs and flow.readers_of(maker) <= inside:
                inside.add(maker)
                todo.append(maker)
    ops = [*filter(None, inside)]
    apart_from_others = all(flow.readers_of(op) <= inside for op in ops if op is not result)
    return frozenset(ops) if apart_from_others else None
