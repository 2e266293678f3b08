"""Reads what a program makes of logits, to recognize a cross entropy in any spelling.

`Reading` follows the logits through a block, and reads each value that is computed from them as a
sum of the names below, each multiplied by a number, or as the exponential of such a sum. Targets
are labels: an entry that is picked, or a one-hot array, perhaps smoothed. Shifts such as the
maximum of a row have names of their own, which cancel.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base.rules import CAST, PRODUCTS, SELECT, SQUARES, SUMS_OF_TWO, VIEWS
from mpjax._src.core.program.affine import number, powers, terms, total
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.respellings import known_array
from mpjax._src.core.program.views import is_view, own_axes
from mpjax._src.replacements import positions
from mpjax._src.replacements.chunked import NAN, SHARE
from mpjax._src.replacements.flow import Flow

# ---- expressions --------------------------------------------------------------------------------

# A sum of names with their factors. What is known of each row: the names ONE to TOTAL,
# (PICKED, labels), (KNOWN, name) for what counts only where the label is a word, and
# (SHIFT, value). What differs along a row: LOGITS, and (TARGET, labels, name) for a name in the
# column of the label and 0 elsewhere.
Row = dict[Any, float]
ONE, LSE, SQUARE, TOTAL = "one", "normalizer", "its square", "total"
PICKED, KNOWN, SHIFT, LOGITS, TARGET = "picked", "known", "shift", "logits", "target"


class Labels(NamedTuple):
    """The labels of all rows: an array, and what becomes of those that are no words."""

    value: Value
    unknown: str
    clipped: bool = False


class Linear(NamedTuple):
    """A sum of names. Without those that differ along a row, perhaps repeated along it."""

    row: Row


class Exponential(NamedTuple):
    """The exponential of a sum of names, in which the logits have the factor 0 or 1."""

    row: Row


class Summed(NamedTuple):
    """The sum of a number for each row over all rows."""

    row: Row


class Aside(NamedTuple):
    """A value that only chooses or makes a shift."""


def kind_of(name: Any) -> str:
    """Returns the first word of a name."""
    return name[0] if isinstance(name, tuple) else name


def _wide(row: Row) -> set[str]:
    """Returns which names of a sum differ along a row."""
    return {kind_of(name) for name in row} & {LOGITS, TARGET}


def _number(kind: Any) -> float | None:
    """Returns the number that an expression is."""
    plain = isinstance(kind, Linear) and kind.row.keys() <= {ONE}
    return kind.row.get(ONE, 0.0) if plain else None


def _is_shift(kind: Any) -> bool:
    return isinstance(kind, Linear) and all(kind_of(name) == SHIFT for name in kind.row)


def _of_logits(kind: Any) -> bool:
    """Returns whether an expression differs along a row as logits do."""
    return isinstance(kind, Linear | Exponential) and _wide(kind.row) == {LOGITS}


def _renamed(row: Row, new: Any) -> Row:
    """Returns a sum with another name in place of the logits."""
    return total(({new if name == LOGITS else name: 1.0}, x) for name, x in row.items())


def _of_label(labels: Labels, row: Row) -> Row:
    """Returns a sum in the column of the label, and 0 elsewhere."""
    return {(TARGET, labels, name): factor for name, factor in row.items()}


def _product(a: Row, b: Row) -> Row | None:
    for first, second in ((a, b), (b, a)):
        targets = [name for name in first if name != ONE]
        if _wide(second) == {LOGITS} and all(x[0] == TARGET and x[2] == ONE for x in targets):
            parts = [(_of_label(x[1], second), first[x]) for x in targets]
            return total([*parts, (second, first.get(ONE, 0.0))])
    return {SQUARE: a[LSE] * b[LSE]} if {*a} == {*b} == {LSE} else None


def _summed(row: Row, words: int) -> Row:
    """Returns the sum along each row."""
    sums = []
    for name, factor in row.items():
        if kind_of(name) == TARGET:
            _, labels, inner = name
            label: Any = (PICKED, labels) if inner == LOGITS else (KNOWN, inner)
            sums.append(({label: 1.0}, factor))
        else:
            sums.append(({TOTAL: 1.0} if name == LOGITS else {name: words}, factor))
    return total(sums)


def _by_rows(operand: Value, op: Op) -> bool:
    """Returns whether an operand is a number, as wide as the result, or the same along its rows."""
    shape = op.outs[0].aval.shape
    return operand.size in (1, op.outs[0].size) or operand.aval.shape == (*shape[:-1], 1)


# ---- reading ------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Reading:
    """Follows logits through a block."""

    flow: Flow  # the data flow of the block
    root: Value  # the logits
    # The expressions of the values that are computed from them.
    kinds: dict[Value, Any] = dataclasses.field(default_factory=dict)
    targets: dict[Value, Any] = dataclasses.field(default_factory=dict)  # those of other values
    ops: dict[Op, None] = dataclasses.field(default_factory=dict)  # the operations that make these
    # The row values that other operations read.
    leaves: dict[Value, None] = dataclasses.field(default_factory=dict)
    leak: str = ""  # why the logits have to exist, or ""

    def __post_init__(self) -> None:
        numbers = self.flow.numbers
        # People write logits twice.
        equal = [v for v, n in numbers.items() if n == numbers.get(self.root)]
        makers = dict.fromkeys(self.flow.producer[v] for v in (self.root, *equal))
        for op in makers:
            self._add(op, Linear({LOGITS: 1.0}))
        # Ops are in order, so the operands of each one have been read before it.
        for op in self.flow.ops[min(op.index for op in makers) :]:
            made_from = [v for v in dict.fromkeys(op.ins) if v in self.kinds]
            if not made_from or op in makers:
                continue
            if not op.eqn.effects and not any(self.flow.readers.get(v) for v in op.outs):
                self.ops[op] = None  # nobody reads it
            elif (kind := self._read(op)) is not None:
                self._add(op, kind)
            else:
                for v in made_from:
                    self._left(v, f"read by {op.name}")

    @property
    def words(self) -> int:
        return int(self.root.aval.shape[-1])

    @property
    def rows(self) -> int:
        return self.root.size // self.words

    @property
    def is_loss(self) -> bool:
        """Whether logits are normalized, and labels are picked."""
        rows = [k.row for k in self.kinds.values() if isinstance(k, Linear | Summed)]
        picks = any(kind_of(name) == PICKED for row in rows for name in row)
        sums = (k for k in self.kinds.values() if isinstance(k, Exponential))
        return picks and not all(_of_logits(k) for k in sums)

    def _add(self, op: Op, kind: Any) -> None:
        """Records the expression of an op's result."""
        self.ops[op], self.kinds[op.outs[0]] = None, kind
        if None in self.flow.readers.get(op.outs[0], ()):
            self._left(op.outs[0], "returned")

    def _left(self, value: Value, how: str) -> None:
        """Records that a value is also needed elsewhere."""
        kind = self.kinds[value]
        if isinstance(kind, Summed) or (isinstance(kind, Linear) and not _wide(kind.row)):
            self.leaves[value] = None
        elif not isinstance(kind, Aside):
            self.leak = self.leak or f"its logits are also {how}"

    def kind(self, value: Value) -> Any:
        """Returns the expression of an operand; None if it is none."""
        if value in self.kinds:
            return self.kinds[value]
        if (filled := number(value)) is not None:
            finite = {ONE: filled} if filled else {}
            return Linear(finite) if math.isfinite(filled) else None
        if value not in self.targets:
            op = self.flow.producer.get(value)
            wide = value.is_f32 and value.aval.shape[-1:] == (self.words,)
            self.targets[value] = self._rule(op) if op is not None and wide else None
        return self.targets[value]

    def _read(self, op: Op) -> Any:
        """Returns the expression of an op's result."""
        if len(op.outs) != 1 or op.eqn.effects or op.subs or self.flow.in_half(op):
            return None
        found = self._rule(op)
        return self._shift(op) if found is None and op.outs[0].size <= self.rows else found

    def _rule(self, op: Op) -> Any:
        broadcasts = op.name != "gather" and len(op.ins) > 1
        if op.name not in READ or (broadcasts and not all(_by_rows(v, op) for v in op.ins)):
            return None
        return READ[op.name](self, op, *map(self.kind, op.ins))

    def _shift(self, op: Op) -> Any:
        """Reads a value that is computed from shifts alone, such as a maximum if that is finite."""
        kinds = [self.kinds.get(v) for v in op.ins if v.const is None]
        if not all(isinstance(k, Aside) or _is_shift(k) for k in kinds):
            return None
        return Linear({(SHIFT, op.outs[0]): 1.0}) if op.outs[0].is_f32 else Aside()

    # ---- labels ----

    def _one_hot(self, value: Value) -> Labels | None:
        """Returns the labels of a one-hot array of booleans."""
        op = self.flow.producer.get(value)
        if op is None or op.name != "eq" or value.size != self.rows * self.words:
            return None
        axes = own_axes(value.aval.shape)
        for labels, columns in (op.ins, op.ins[::-1]):
            is_iota = positions.read(columns, axes, self.flow) == positions.along(axes[-1])
            if is_iota and _by_rows(labels, op):
                while labels.size != self.rows and (made := self.flow.producer.get(labels)):
                    if not (is_view(made) and self._keeps_rows(made)):
                        return None
                    labels = made.ins[0]
                whole = np.issubdtype(labels.aval.dtype, np.signedinteger)
                return Labels(labels, SHARE) if whole and labels.size == self.rows else None
        return None

    def _keeps_rows(self, op: Op) -> bool:
        """Returns whether a change of layout leaves the order of rows as it is."""
        if op.name == "broadcast_in_dim":
            dims, shape = op.params["broadcast_dimensions"], op.ins[0].aval.shape
            new, wider = op.outs[0].aval.shape, op.outs[0].size > op.ins[0].size
            lead = new[:-1] if wider else new  # what is repeated along a row has its other axes
            kept = [n for d, n in zip(dims, shape, strict=True) if lead[d : d + 1] == (n,)]
            return [*dims] == sorted(dims) and math.prod(kept) == math.prod(lead)
        return op.name != "transpose"

    # ---- operations ----

    # Each gets an op and the expressions of its operands.

    def _view(self, op: Op, kind: Any) -> Any:
        (operand,), shape = op.ins, op.outs[0].aval.shape
        if op.name == CAST and not operand.is_f32:
            labels = self._one_hot(operand)
            return labels and Linear(_of_label(labels, {ONE: 1.0}))
        known = isinstance(kind, Linear | Exponential) and is_view(op)
        if not known or not self._keeps_rows(op):
            return None
        same = operand.size == op.outs[0].size and shape[-1:] == (self.words,)
        return kind if same or not _wide(kind.row) else None

    def _sum(self, op: Op, *kinds: Any) -> Any:
        """Reads sums, differences and multiples."""
        parts = terms(op, dict(zip(op.ins, map(_number, kinds), strict=True)).get)
        if not parts or not all(isinstance(kinds[i], Linear) for i, _ in parts):
            return None
        return Linear(total((kinds[i].row, weight) for i, weight in parts))

    def _times(self, op: Op, *kinds: Any) -> Any:
        """Reads products, quotients and squares."""
        if (multiple := self._sum(op, *kinds)) is not None:
            return multiple
        if all(isinstance(kind, Exponential) for kind in kinds):
            row = total((kinds[i].row, power) for i, power in powers(op))
            return Exponential(row) if row.get(LOGITS, 0) in (0, 1) else None
        factors = [kinds[i] for i, power in powers(op) for _ in range(int(power))]
        if len(factors) != 2 or not all(isinstance(kind, Linear) for kind in factors):
            return None
        product = _product(*(kind.row for kind in factors))
        return None if product is None else Linear(product)

    def _exp(self, op: Op, kind: Any) -> Any:
        fits = isinstance(kind, Linear) and _of_logits(kind) and kind.row[LOGITS] == 1
        return Exponential(kind.row) if fits else None

    def _log(self, op: Op, kind: Any) -> Any:
        return Linear(kind.row) if isinstance(kind, Exponential) else None

    def _reduce(self, op: Op, kind: Any) -> Any:
        last = len(op.ins[0].aval.shape) - 1
        axes = tuple(map(int, op.params["axes"]))
        if not isinstance(kind, Linear | Exponential) or not _wide(kind.row):
            return None
        if op.name == "reduce_max":
            fits = axes == (last,) and isinstance(kind, Linear) and _of_logits(kind)
            return Linear({(SHIFT, op.outs[0]): 1.0}) if fits else None
        if axes == tuple(range(last + 1)) and TARGET in _wide(kind.row):
            return Summed(_summed(kind.row, self.words))
        if axes != (last,):
            return None
        if isinstance(kind, Exponential):
            return Exponential(_renamed(kind.row, LSE))
        return Linear(_summed(kind.row, self.words))

    def _select(self, op: Op, which: Any, *kinds: Any) -> Any:
        """Reads ``where(onehot, yes, no)``, which is ``no + onehot * (yes - no)``."""
        labels = self._one_hot(op.ins[0])
        if labels is None or len(kinds) != 2 or not all(isinstance(k, Linear) for k in kinds):
            return None
        no, yes = (kind.row for kind in kinds)
        if _wide(no) or TARGET in _wide(yes):
            return None
        return Linear(total([(no, 1.0), (_of_label(labels, total([(yes, 1.0), (no, -1.0)])), 1.0)]))

    def _gather(self, op: Op, kind: Any, indices: Any) -> Any:
        operand = op.ins[0]
        if op.outs[0].size != self.rows:
            return None
        if isinstance(kind, Linear) and not _wide(kind.row) and operand.size == self.rows:
            axes = op.params["dimension_numbers"].start_index_map  # of size 1
            return kind if all(operand.aval.shape[d] == 1 for d in axes) else None
        labels = self._picked(op) if _of_logits(kind) else None
        mode = str(op.params["mode"]).lower()
        # Of a label that is no word, a gather returns NaN or the nearest word. Both have a form.
        fills = "fill" in mode and np.isnan(op.params.get("fill_value") or np.nan)
        if labels is None or not (fills or "clip" in mode or "promise" in mode):
            return None
        return type(kind)(_renamed(kind.row, (PICKED, Labels(labels, NAN, not fills))))

    def _picked(self, op: Op) -> Value | None:
        """Returns the labels of a gather that takes one entry of each row."""
        (operand, indices), numbers = op.ins, op.params["dimension_numbers"]
        last, axes = len(operand.aval.shape) - 1, tuple(numbers.start_index_map)
        batched = tuple(numbers.operand_batching_dims)
        single = all(n == 1 for n in op.params["slice_sizes"])
        in_order = batched == tuple(numbers.start_indices_batching_dims)
        if (
            not (single and in_order)
            or axes[-1:] != (last,)
            or {*axes, *batched} != {*range(last + 1)}
        ):
            return None
        parts = [indices]
        if len(axes) > 1:
            made = self.flow.producer.get(indices)
            ends = len(indices.aval.shape) - 1
            joined = made and made.name == "concatenate" and made.params["dimension"] == ends
            parts = [*made.ins] if made and joined else []
        if len(parts) != len(axes) or parts[-1].size != self.rows:
            return None
        # logits[arange(n), labels] gathers by the indices of all axes, of which all but the last
        # have to number the rows in order.
        for axis, part in zip(axes[:-1], parts[:-1], strict=True):
            array = known_array(part, self.flow.producer, dict(self.flow.constants))
            wanted = np.indices(operand.aval.shape[:-1])[axis]
            if array is None or not np.array_equal(np.ravel(array), np.ravel(wanted)):
                return None
        return parts[-1]


READ: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((CAST, *VIEWS), Reading._view),
    **dict.fromkeys(("neg", *SUMS_OF_TWO), Reading._sum),
    **dict.fromkeys(PRODUCTS | SQUARES, Reading._times),
    "exp": Reading._exp,
    "log": Reading._log,
    "abs": lambda self, op, kind: kind if isinstance(kind, Exponential) else None,
    "stop_gradient": lambda self, op, kind: kind if _is_shift(kind) else None,
    **dict.fromkeys(("reduce_sum", "reduce_max"), Reading._reduce),
    SELECT: Reading._select,
    "gather": Reading._gather,
}
