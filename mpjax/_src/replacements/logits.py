"""Reads what a program makes of logits, to recognize a cross entropy in any spelling.

`Reading` follows the logits through a block, and reads each value that is computed from them as one
of a few expressions: a multiple of the logits and a number for each row, their exponential, a sum
of either, or a linear combination of what `chunked.Statistics` names. Targets are labels: an entry
that is picked, or a one-hot array, perhaps smoothed. Shifts such as the maximum of a row have names
of their own, which cancel.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.respellings import known_array
from mpjax._src.core.program.views import is_view, own_axes
from mpjax._src.replacements.chunked import NAN, SHARE
from mpjax._src.replacements.flow import Flow
from mpjax._src.replacements.forms import behind_views, is_number, narrowed
from mpjax._src.replacements.gathers import picks_one_per_row

# ---- expressions --------------------------------------------------------------------------------

# A linear combination of what is known of each row. The names are those below, (PICKED, labels),
# (KNOWN, name) for what counts only where the label is a word, and (SHIFT, value).
Row = dict[Any, float]
ONE, LSE, SQUARE, TOTAL = "one", "normalizer", "its square", "total"
PICKED, KNOWN, SHIFT = "picked", "known", "shift"


class Labels(NamedTuple):
    """The labels of all rows: an array, and what becomes of those that are no words."""

    value: Value
    unknown: str
    clipped: bool = False


class PerRow(NamedTuple):
    """A number for each row, perhaps repeated along the row."""

    row: Row


class Wide(NamedTuple):
    """``factor * logits + row``."""

    factor: float
    row: Row


class Exponential(NamedTuple):
    """``exp(logits + row)``."""

    row: Row


class Power(NamedTuple):
    """``exp(row)``, for each row."""

    row: Row


class Target(NamedTuple):
    """``here`` in the column of the label, plus ``rest``."""

    labels: Labels
    here: float
    rest: float


class Weighted(NamedTuple):
    """The product of a target and a multiple of the logits."""

    target: Target
    wide: Wide


class Summed(NamedTuple):
    """The sum of a number for each row over all rows."""

    row: Row


class Aside(NamedTuple):
    """A value that only chooses or makes a shift."""


def _plus(a: Row, b: Row, factor: float = 1.0) -> Row:
    """Returns the sum of a row and a multiple of another. What cancels is left out."""
    # A relative tolerance: factors such as 1/3 do not cancel to the last bit.
    pairs = {key: (a.get(key, 0.0), factor * b.get(key, 0.0)) for key in a.keys() | b.keys()}
    return {key: x + y for key, (x, y) in pairs.items() if abs(x + y) > 1e-6 * max(abs(x), abs(y))}


def _number(kind: Any) -> float | None:
    """Returns the number that a constant is."""
    plain = isinstance(kind, PerRow) and kind.row.keys() <= {ONE}
    return kind.row.get(ONE, 0.0) if plain else None


def _is_shift(kind: Any) -> bool:
    return isinstance(kind, PerRow) and all(name[0] == SHIFT for name in kind.row)


def _scaled(kind: Any, factor: float) -> Any:
    if isinstance(kind, PerRow):
        return PerRow(_plus({}, kind.row, factor))
    if isinstance(kind, Wide):
        return Wide(factor * kind.factor, _plus({}, kind.row, factor))
    if isinstance(kind, Target):
        return Target(kind.labels, factor * kind.here, factor * kind.rest)
    if isinstance(kind, Weighted):
        return Weighted(_scaled(kind.target, factor), kind.wide)
    return None


def _sum(a: Any, b: Any, sign: float = 1.0) -> Any:
    """Returns the sum or the difference of two expressions."""
    for first, second, one, other in ((a, b, 1.0, sign), (b, a, sign, 1.0)):
        if isinstance(first, Wide) and isinstance(second, PerRow):
            return Wide(one * first.factor, _plus(_plus({}, first.row, one), second.row, other))
        if isinstance(first, Target) and (number := _number(second)) is not None:
            return Target(first.labels, one * first.here, one * first.rest + other * number)
    if isinstance(a, PerRow) and isinstance(b, PerRow):
        return PerRow(_plus(a.row, b.row, sign))
    return None


def _product(a: Any, b: Any) -> Any:
    for first, second in ((a, b), (b, a)):
        if (number := _number(second)) is not None:
            return _scaled(first, number)
        if isinstance(first, Target) and isinstance(second, Wide):
            return Weighted(first, second)
    if isinstance(a, PerRow) and isinstance(b, PerRow) and {*a.row} == {*b.row} == {LSE}:
        return PerRow({SQUARE: a.row[LSE] * b.row[LSE]})
    return None


# ---- reading ------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Reading:
    """Follows logits through a block."""

    flow: Flow  # the data flow of the block
    root: Value  # the logits
    numbers: dict[Value, int] = dataclasses.field(default_factory=dict)  # equal ones are equal
    # The expressions of the values that are computed from them.
    kinds: dict[Value, Any] = dataclasses.field(default_factory=dict)
    ops: dict[Op, None] = dataclasses.field(default_factory=dict)  # the operations that make these
    # The row values that other operations read.
    leaves: dict[Value, None] = dataclasses.field(default_factory=dict)
    leak: str = ""  # why the logits have to exist, or ""

    def __post_init__(self) -> None:
        makers = {self.flow.producer[self.root]: None}  # people write logits twice
        number = self.numbers.get(self.root)
        makers |= {self.flow.producer[v]: None for v, n in self.numbers.items() if n == number}
        for op in makers:
            self.kinds[op.outs[0]], self.ops[op] = Wide(1.0, {}), None
            self._note(op.outs[0], "returned")
        # Ops are in order, so the operands of each one have been read before it.
        for op in self.flow.ops[min(op.index for op in makers) :]:
            made_from = [v for v in dict.fromkeys(op.ins) if v in self.kinds]
            if not made_from or op in makers:
                continue
            if not op.eqn.effects and not any(self.flow.readers.get(v) for v in op.outs):
                self.ops[op] = None  # nobody reads it
                continue
            kind = self._read(op) if self._is_plain(op) else None
            if kind is None:
                for v in made_from:
                    self._left(v, f"read by {op.name}")
                continue
            self.ops[op], self.kinds[op.outs[0]] = None, kind
            self._note(op.outs[0], "returned")

    @property
    def words(self) -> int:
        return int(self.root.aval.shape[-1])

    @property
    def rows(self) -> int:
        return self.root.size // self.words

    @property
    def is_loss(self) -> bool:
        """Whether logits are normalized, and labels are picked."""
        rows = [k.row for k in self.kinds.values() if isinstance(k, PerRow | Summed)]
        names = {name for row in rows for name in row}
        picks = any(isinstance(name, tuple) and name[0] == PICKED for name in names)
        return picks and any(isinstance(k, Power) for k in self.kinds.values())

    def _is_plain(self, op: Op) -> bool:
        one = len(op.outs) == 1 and not op.eqn.effects and not op.subs
        return one and not self.flow.in_half(op)

    def _note(self, value: Value, how: str) -> None:
        if None in self.flow.readers.get(value, ()):
            self._left(value, how)

    def _left(self, value: Value, how: str) -> None:
        """Records that a value is also needed elsewhere."""
        if isinstance(self.kinds[value], PerRow | Summed):
            self.leaves[value] = None
        elif not isinstance(self.kinds[value], Aside):
            self.leak = self.leak or f"its logits are also {how}"

    def kind(self, value: Value) -> Any:
        """Returns the expression of an operand; None if it is none."""
        if value in self.kinds:
            return self.kinds[value]
        if is_number(value):
            number = float(np.asarray(value.const).reshape(()))
            return PerRow({ONE: number} if number else {}) if math.isfinite(number) else None
        return self._target(value)

    def _read(self, op: Op) -> Any:
        """Returns the expression of an op's result."""
        rule = READ.get(op.name)
        found = rule(self, op) if rule else None
        if found is None and op.outs[0].size <= self.rows:
            return self._shift(op)
        return found

    def _shift(self, op: Op) -> Any:
        """Reads a value that is computed from shifts alone, such as a maximum if that is finite."""
        kinds = [self.kinds.get(v) for v in op.ins if not is_number(v) and v.const is None]
        if not all(isinstance(k, Aside) or _is_shift(k) for k in kinds):
            return None
        return PerRow({(SHIFT, op.outs[0]): 1.0}) if op.outs[0].is_f32 else Aside()

    # ---- targets ----

    def _target(self, value: Value) -> Any:
        """Reads a target that is not computed from logits."""
        op = self.flow.producer.get(value)
        if op is None or not value.aval.shape or value.aval.shape[-1] != self.words:
            return None
        if op.name == "convert_element_type" and not op.ins[0].is_f32:
            labels = self._one_hot(op.ins[0])
            return labels and Target(labels, 1.0, 0.0)
        if op.name in ("add", "sub", "mul", "div") and value.is_f32:
            return READ[op.name](self, op)
        if op.name == "select_n" and len(op.ins) == 3:
            labels = self._one_hot(op.ins[0])
            rest, here = (_number(self.kind(v)) for v in op.ins[1:])
            if labels is not None and rest is not None and here is not None:
                return Target(labels, here - rest, rest)
            return None
        return self._target(op.ins[0]) if is_view(op) and op.ins[0].size == value.size else None

    def _one_hot(self, value: Value) -> Labels | None:
        """Returns the labels of a one-hot array of booleans."""
        op = self.flow.producer.get(value)
        if op is None or op.name != "eq" or value.size != self.rows * self.words:
            return None
        for labels, positions in (op.ins, op.ins[::-1]):
            if self._is_iota(positions):
                while labels.size != self.rows and (made := self.flow.producer.get(labels)):
                    if not (is_view(made) and self._keeps_rows(made)):
                        return None
                    labels = made.ins[0]
                whole = np.issubdtype(labels.aval.dtype, np.signedinteger)
                return Labels(labels, SHARE) if whole and labels.size == self.rows else None
        return None

    def _is_iota(self, value: Value) -> bool:
        """Returns whether a value numbers the words along the last axis."""
        shape = value.aval.shape
        value, axes = behind_views(value, narrowed(value, own_axes(shape)), self.flow)
        op = self.flow.producer.get(value)
        along = [axis for axis in axes or () if axis]
        if len(along) != 1 or along[0] != ((len(shape) - 1, 1, self.words),):
            return False
        if op is not None and op.name == "iota":
            return True
        array = known_array(value, self.flow.producer, dict(self.flow.constants))
        return array is not None and np.array_equal(np.ravel(array), np.arange(self.words))

    def _keeps_rows(self, op: Op) -> bool:
        """Returns whether a change of layout leaves the order of rows as it is."""
        if op.name == "broadcast_in_dim":
            dims = [*map(int, op.params["broadcast_dimensions"])]
            shape, new = op.ins[0].aval.shape, op.outs[0].aval.shape
            kept = [new[d] for d, n in zip(dims, shape, strict=True) if n == new[d]]
            lead = new[:-1] if op.outs[0].size > op.ins[0].size else new
            return dims == sorted(dims) and math.prod(kept) == math.prod(lead)
        return op.name in ("reshape", "squeeze", "copy", "convert_element_type")

    # ---- operations ----

    def _view(self, op: Op) -> Any:
        kind, shape = self.kind(op.ins[0]), op.outs[0].aval.shape
        if not is_view(op) or not self._keeps_rows(op):
            return None
        if isinstance(kind, PerRow | Power):
            return kind
        same = op.ins[0].size == op.outs[0].size and shape[-1:] == (self.words,)
        return kind if same else None

    def _linear(self, op: Op) -> Any:
        a, b = map(self.kind, op.ins)
        return a and b and _sum(a, b, -1.0 if op.name == "sub" else 1.0)

    def _times(self, op: Op) -> Any:
        a, b = map(self.kind, op.ins)
        return a and b and _product(a, b)

    def _over(self, op: Op) -> Any:
        kind, other = map(self.kind, op.ins)
        if isinstance(kind, Exponential | Power) and isinstance(other, Power):
            return type(kind)(_plus(kind.row, other.row, -1.0))
        number = _number(other)
        return _scaled(kind, 1 / number) if kind and number else None

    def _square(self, op: Op) -> Any:
        kind = self.kind(op.ins[0])
        return _product(kind, kind) if kind and op.params.get("y", 2) == 2 else None

    def _exp(self, op: Op) -> Any:
        kind = self.kind(op.ins[0])
        fits = isinstance(kind, Wide) and kind.factor == 1
        return Exponential(kind.row) if fits else None

    def _log(self, op: Op) -> Any:
        kind = self.kind(op.ins[0])
        if isinstance(kind, Exponential):
            return Wide(1.0, kind.row)
        return PerRow(kind.row) if isinstance(kind, Power) else None

    def _abs(self, op: Op) -> Any:
        kind = self.kind(op.ins[0])
        return kind if isinstance(kind, Power) else None

    def _held(self, op: Op) -> Any:
        kind = self.kind(op.ins[0])
        return kind if _is_shift(kind) else None

    def _reduce(self, op: Op) -> Any:
        kind, last = self.kind(op.ins[0]), len(op.ins[0].aval.shape) - 1
        axes = tuple(map(int, op.params["axes"]))
        if axes == tuple(range(last + 1)) and isinstance(kind, Weighted):
            return Summed(self._weighted(*kind))
        if axes != (last,) or op.ins[0].size == self.rows:
            return None
        if op.name == "reduce_max":
            return PerRow({(SHIFT, op.outs[0]): 1.0}) if isinstance(kind, Wide) else None
        if isinstance(kind, Exponential):
            return Power(_plus(kind.row, {LSE: 1.0}))
        if isinstance(kind, Wide):
            return PerRow(_plus({TOTAL: kind.factor}, kind.row, self.words))
        if isinstance(kind, Weighted):
            return PerRow(self._weighted(*kind))
        return None

    def _weighted(self, target: Target, wide: Wide) -> Row:
        """Returns the sum of ``(here * onehot + rest) * (factor * logits + row)``."""
        where = {(KNOWN, name): x for name, x in wide.row.items()}
        row = _plus({(PICKED, target.labels): target.here * wide.factor}, where, target.here)
        row = _plus(row, {TOTAL: wide.factor}, target.rest)
        return _plus(row, wide.row, target.rest * self.words)

    def _select(self, op: Op) -> Any:
        """Reads ``where(onehot, values, 0)``."""
        if len(op.ins) != 3 or _number(self.kind(op.ins[1])) != 0:
            return None
        kind, labels = self.kind(op.ins[2]), self._one_hot(op.ins[0])
        fits = isinstance(kind, Wide) and labels is not None
        return Weighted(Target(labels, 1.0, 0.0), kind) if labels is not None and fits else None

    def _gather(self, op: Op) -> Any:
        kind, (operand, indices) = self.kind(op.ins[0]), op.ins
        if isinstance(kind, PerRow) and operand.size == op.outs[0].size == self.rows:
            axes = op.params["dimension_numbers"].start_index_map  # of size 1
            return kind if all(operand.aval.shape[d] == 1 for d in axes) else None
        if not isinstance(kind, Wide | Exponential) or op.outs[0].size != self.rows:
            return None
        labels = self._indices(op, indices)
        mode = str(op.params["mode"]).lower()
        # Of a label that is no word, a gather returns NaN or the nearest word. Both have a form.
        fills = "fill" in mode and np.isnan(op.params.get("fill_value") or np.nan)
        if labels is None or not (fills or "clip" in mode or "promise" in mode):
            return None
        picked = PICKED, Labels(labels, NAN, not fills)
        if isinstance(kind, Exponential):
            return Power(_plus({picked: 1.0}, kind.row))
        return PerRow(_plus({picked: kind.factor}, kind.row))

    def _indices(self, op: Op, indices: Value) -> Value | None:
        """Returns the labels of a gather that takes one entry of each row."""
        shape = op.ins[0].aval.shape
        numbers = op.params["dimension_numbers"]
        if picks_one_per_row(op.eqn) and tuple(numbers.start_index_map) == (len(shape) - 1,):
            return indices if indices.size == self.rows else None
        made = self.flow.producer.get(indices)
        every = tuple(numbers.start_index_map) == tuple(range(len(shape)))
        single = all(n == 1 for n in op.params["slice_sizes"])
        if made is None or made.name != "concatenate" or not (every and single):
            return None
        *places, labels = made.ins
        if made.params["dimension"] != len(indices.aval.shape) - 1 or labels.size != self.rows:
            return None
        # logits[arange(n), labels] gathers by the indices of all axes, of which all but the last
        # have to number the rows in order.
        grid = np.indices(shape[:-1]).reshape(len(shape) - 1, -1)
        for place, wanted in zip(places, grid, strict=True) if len(places) == len(grid) else ():
            array = known_array(place, self.flow.producer, dict(self.flow.constants))
            if array is None or not np.array_equal(np.ravel(array), wanted):
                return None
        return labels if len(places) == len(grid) else None


READ: dict[str, Callable[[Reading, Op], Any]] = {
    **dict.fromkeys(("reshape", "squeeze", "broadcast_in_dim", "copy"), Reading._view),
    "convert_element_type": Reading._view,
    **dict.fromkeys(("add", "sub", "add_any"), Reading._linear),
    "mul": Reading._times,
    "div": Reading._over,
    "neg": lambda self, op: (kind := self.kind(op.ins[0])) and _scaled(kind, -1.0),
    **dict.fromkeys(("square", "integer_pow"), Reading._square),
    "exp": Reading._exp,
    "log": Reading._log,
    "abs": Reading._abs,
    "stop_gradient": Reading._held,
    **dict.fromkeys(("reduce_sum", "reduce_max"), Reading._reduce),
    "select_n": Reading._select,
    "gather": Reading._gather,
}
