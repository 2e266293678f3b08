"""Rules of indices: labels, tokens and positions that are out of range of what they index.

JAX raises for none of them: it returns NaN, reads the nearest row or one counted from the end, or
compares with no class. Whether that matters is tried: the step runs again with other indices in
their place. If every result stays the same, the program masks what it read.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import is_float
from mpjax._src.core.base.trees import is_key
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.interpret import Plain, interpret
from mpjax._src.tools.lint.program import CASTS, MOVES, SAME, Program, anything, noted
from mpjax._src.tools.lint.rule import Hit

MOST = 8  # the most operations whose indices are tried one by one

MISSING = "JAX returns NaN for it"
EMPTY = "its row of the one-hot array is zero"


@dataclasses.dataclass(eq=False)
class Indices:
    """What is known of the integers that an operation of a program looks up."""

    name: str  # that of the argument that they are
    size: int  # that of the axis
    effect: str  # what JAX does with those that are out of range; "" if that is asked for
    is_argument: bool = True
    total: int = 0
    beyond: int = 0  # how many are out of range
    negative: int = 0  # how many are counted from the end
    example: int = 0

    @property
    def from_the_end(self) -> bool:
        """Whether negative ones are counted from the end by mistake: who means it has no others."""
        return self.is_argument and 0 < self.negative < self.total - self.beyond

    @property
    def wrong(self) -> int:
        return self.beyond * bool(self.effect) + self.negative * self.from_the_end

    def is_beyond(self, raw: Any) -> Any:
        return (raw >= self.size) | (raw < -self.size)

    def is_wrong(self, raw: Any) -> Any:
        beyond = self.is_beyond(raw)
        return beyond & bool(self.effect) | (raw < 0) & ~beyond & self.from_the_end

    def count(self, raw: Any, beyond: Any) -> None:
        negative = (raw < 0) & ~beyond
        odd = beyond if beyond.any() and self.effect else negative
        if odd.any() and not (self.beyond and self.effect):
            self.example = int(raw[odd][0])
        self.total += raw.size
        self.beyond += int(beyond.sum())
        self.negative += int(negative.sum())

    @property
    def message(self) -> str:
        count = f"({self.name}; {self.wrong:,} of {self.total:,} entries)"
        if self.beyond and self.effect:
            return f"Index {self.example} is out of range of {self.size:,} {count}: {self.effect}."
        from_the_end = f"Index {self.example} of {self.size:,} is counted from the end {count}"
        return f"{from_the_end}, beside others that are not."


def index_values(program: Program, op: Op, ins: list[Any], outs: list[Any]) -> tuple[()]:
    """Counts the indices that are out of range, in each turn of a loop."""
    if (indices := _normalized(program).get(op)) is not None:
        raw = np.asarray(ins[1])
        indices.count(raw, indices.is_beyond(raw))
    elif (labels := _one_hots(program).get(op)) is not None and (classes := _classes(ins, outs)):
        values, found, axis = classes
        labels.size = outs[0].shape[axis]
        labels.count(values, ~found)
    return ()


def indices_out_of_range(program: Program) -> Iterator[Hit]:
    """Finds indices that are out of range and reach a result.

    Found are integers of an argument, moved or shifted by a constant, that JAX normalizes (as
    ``x[i]``, ``take``, ``take_along_axis``, ``x.at[i]`` and dynamic slices do), and classes that
    are compared with all classes to multiply by (``one_hot``). Negative ones are a fault only
    beside others: ``x[i]`` with i = -1 alone asks for the last row. What a mode or a fill value
    asks for is none, and updates beyond the end are dropped by the default that people use on
    purpose. Indices that the program computes in other ways (positions in an expert, the result of
    a search) are left alone.
    """
    found = {op: each for op, each in _all(program).items() if each.wrong}
    if not found or _jax.open_jaxpr(program.traced.jaxpr)[0].effects:  # effects happen once
        return
    # The NaN of one might hide what another one does, so the others are replaced.
    right = {op: _replaced(op, each, 0.0) for op, each in found.items()}
    plain = _results(program, right)
    for op in [*found][:MOST]:
        others = {each: change for each, change in right.items() if each is not op}
        tried = (others, right | {op: _replaced(op, found[op], 0.5)})
        results = (zip(plain, _results(program, changes), strict=True) for changes in tried)
        if not all(_are_equal(a, b) for pairs in results for a, b in pairs):
            yield Hit(found[op].message, op)


# ---- what looks up ------------------------------------------------------------------------------


def _all(program: Program) -> dict[Op, Indices]:
    return {**_normalized(program), **_one_hots(program)}


@noted
def _normalized(program: Program) -> dict[Op, Indices]:
    """Returns the selects by which JAX adds the size of an axis to negative indices."""
    found: dict[Op, Indices] = {}
    for op in program.named(rules.SELECT):
        size = None if program.is_backward(op) else _size(program, op)
        effects = [_effect(each) for each in _lookups(program, op.outs[0])] if size else []
        if size and effects and None not in effects:
            effect = max(filter(None, effects), default="")
            name, is_argument = _origin(program, op.ins[1])
            # Of its own indices a program knows that they are clamped or counted from the end.
            if is_argument or (name and effect == MISSING):
                found[op] = Indices(name, size, effect, is_argument)
    return found


def _size(program: Program, op: Op) -> int | None:
    """Returns the size that a select adds to its integers where they are negative, or None."""
    if len(op.ins) != 3 or not np.issubdtype(getattr(op.ins[1].aval, "dtype", bool), np.integer):
        return None
    raw = op.ins[1]
    test, shifted = program.maker(op.ins[0]), program.maker(op.ins[2])
    if test is None or shifted is None or shifted.name not in rules.ADDITIONS:
        return None
    tested = test.name in rules.ORDERS and test.ins[0] is raw and program.number(test.ins[1]) == 0
    sizes = [program.number(v) for v in shifted.ins if v is not raw]
    return int(sizes[0]) if tested and len(sizes) == 1 and sizes[0] else None


def _origin(program: Program, value: Value) -> tuple[str, bool]:
    """Returns the name of what integers are, moved or shifted, and whether it is an argument.

    It is "" for integers that the program computes.
    """

    def is_same(op: Op) -> bool:
        shifts = op.name in rules.SUMS_OF_TWO
        return op.name in SAME or (shifts and any(program.number(v) is not None for v in op.ins))

    names = dict(zip(program.block.invars, program.names, strict=True))
    before = program.back(value, is_same)
    name = next((names[v] for v in before if v in names), "")
    known = any(v.size > 1 and program.constant(v) is not None for v in before)
    return name or "an array it closes over" * known, bool(name)


def _lookups(program: Program, value: Value) -> Iterator[Op]:
    """Yields the operations that read an array at some indices."""
    for v in program.forward(value, _rearranges):
        for op in program.readers(v):
            indexes = not _rearranges(op) and v in op.ins[1:] and not program.is_backward(op)
            if indexes and ("mode" in op.params or op.spec.traits & {rules.PART, rules.STATE}):
                yield op


def _rearranges(op: Op) -> bool:
    reads = {rules.LOOKS_UP, rules.PART, rules.STATE, rules.RANKS}
    moves = op.spec.need == rules.MOVE and op.name != rules.SELECT
    return op.name in CASTS or (moves and op.spec.traits.isdisjoint(reads))


def _effect(op: Op) -> str | None:
    """Returns what an operation does with indices out of range: "" if it drops them on purpose, and
    None if its caller has said what to do with all."""
    mode, fill = op.params.get("mode"), op.params.get("fill_value")
    if mode == jax.lax.GatherScatterMode.CLIP:
        dims = op.params["dimension_numbers"]
        # vmap makes such a gather of a dynamic slice, whose axes stay. Those of a lookup do not.
        places = getattr(dims, "start_index_map", ()), getattr(dims, "collapsed_slice_dims", ())
        if not places[0] or not {*places[0]}.isdisjoint(places[1]):
            return None
    if mode != jax.lax.GatherScatterMode.FILL_OR_DROP:
        verb = "writes" if rules.STATE in op.spec.traits else "reads"
        return f"JAX {verb} the nearest row instead"
    if rules.LOOKS_UP not in op.spec.traits:
        return ""
    # The default is NaN, and for integers the one that is furthest from 0.
    own = isinstance(fill, int | float) and abs(fill) < 2**7 - 1  # no NaN
    other = "JAX returns the number that is furthest from 0 for it"
    return None if own else MISSING if is_float(op.outs[0]) else other


@noted
def _one_hots(program: Program) -> dict[Op, Indices]:
    """Returns the comparisons of integers of an argument with all classes, to multiply by."""
    found: dict[Op, Indices] = {}
    for op in program.ops:
        if op.eqn.primitive is not jax.lax.eq_p or program.is_backward(op):
            continue
        dtype, size = op.ins[0].aval.dtype, max(op.outs[0].aval.shape, default=0)
        sides = [v for v in op.ins if program.argument(v)]
        if not np.issubdtype(dtype, np.integer) or len(sides) != 1 or not size:
            continue
        (labels,), (classes,) = sides, [v for v in op.ins if v is not sides[0]]
        multiplied = any(
            each.spec.multiplies or each.spec.need == rules.HALF
            for v in program.forward(op.outs[0], MOVES | CASTS)
            for each in program.readers(v)
        )
        if multiplied and not _depends(program, classes) and not _is_asked(program, labels):
            found[op] = Indices(program.argument(labels), 0, EMPTY)
    return found


def _depends(program: Program, value: Value) -> bool:
    """Returns whether a value depends on an argument."""
    return not {*program.block.invars}.isdisjoint(program.back(value, anything))


def _is_asked(program: Program, labels: Value) -> bool:
    """Returns whether a program compares labels, to find those that are none."""
    (first,) = [v for v in program.back(labels, SAME) if v in program.block.invars][:1]
    tests = [
        op
        for v in program.forward(first, SAME)
        for op in program.readers(v)
        if op.spec.need == rules.COMPARE
        and (op.name in rules.ORDERS or any(program.number(v) is not None for v in op.ins))
    ]
    normal = {v for op in _normalized(program) for v in op.ins[:1]}
    return any(normal.isdisjoint(op.outs) for op in tests)


def _classes(ins: list[Any], outs: list[Any]) -> tuple[Any, Any, int] | None:
    """Returns labels that are compared with all classes, whether each is one, and their axis."""
    out = np.asarray(outs[0])
    for values, classes in (ins, ins[::-1]):
        values, classes = (np.broadcast_to(np.asarray(x), out.shape) for x in (values, classes))
        for axis, size in enumerate(out.shape):
            if size > 1 and (np.moveaxis(classes, axis, -1) == np.arange(size)).all():
                return values.take(0, axis), out.any(axis), axis
    return None


# ---- whether it matters -------------------------------------------------------------------------

Change = Callable[[list[Any], list[Any]], list[Any]]


class _Changed(Plain):
    """The watcher that changes the results of some operations."""

    def __init__(self, program: Program, changes: Mapping[Op, Change]):
        self.changes = {id(op.eqn): change for op, change in changes.items()}
        self.known = {id(op.eqn) for op in program.ops}
        # The equations of a shard_map are traced again, with the same origin.
        self.again = {_jax.line_key(op.eqn): change for op, change in changes.items()}

    def operation(self, eqn, ins, place):
        outs = Plain.operation(eqn, ins, place)
        change = self.changes.get(id(eqn))
        if change is None and id(eqn) not in self.known and eqn.primitive.name == rules.SELECT:
            change = self.again.get(_jax.line_key(eqn))
        return change(ins, outs) if change else outs


def _results(program: Program, changes: Mapping[Op, Change]) -> list[Any]:
    arrays = [jnp.asarray(x) for x in program.call.arrays]
    outs = interpret(program.traced.jaxpr, arrays, _Changed(program, changes))
    return [x for x in outs if not is_key(x)]


def _replaced(op: Op, indices: Indices, share: float) -> Change:
    """Returns what replaces wrong indices by one, given as a share of the size."""
    right = int(indices.size * share)

    def index(ins: list[Any], outs: list[Any]) -> list[Any]:
        return [jnp.where(indices.is_wrong(jnp.asarray(ins[1])), right, outs[0])]

    def one_hot(ins: list[Any], outs: list[Any]) -> list[Any]:
        if (classes := _classes(ins, outs)) is None:
            return outs
        _, found, axis = classes
        out = np.moveaxis(np.array(outs[0]), axis, -1)
        out[~found, right] = True
        return [jnp.asarray(np.moveaxis(out, -1, axis))]

    return index if op.name == rules.SELECT else one_hot


def _are_equal(a: Any, b: Any) -> bool:
    a, b = jnp.asarray(a), jnp.asarray(b)
    return bool(((a == b) | ((a != a) & (b != b))).all())
