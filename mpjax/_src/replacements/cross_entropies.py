"""Finds cross entropies of a linear layer's results, and runs them by blocks of these logits.

    logits = scale * hidden @ weight + bias
    loss   = log(sum(exp(logits))) - sum(targets * logits)

What is computed from the logits is read by `logits`. The loss of each row is replaced, from the
matmul on. If only its sum is read, perhaps with masks or weights, the sum is replaced too, so that
the forward pass can make the gradients.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.rules import CAST, DOT, PRODUCTS, SELECT
from mpjax._src.core.program.affine import factor, number
from mpjax._src.core.program.graph import PLANNED, Op, Value
from mpjax._src.core.program.respellings import Found
from mpjax._src.core.program.views import before, behind, is_view, own_axes
from mpjax._src.replacements import written
from mpjax._src.replacements.chunked import NORMALIZER, SHARE, Form, blocks_of, rows_are_cheaper
from mpjax._src.replacements.flow import Candidate, Flow, Unfit, absorbed, judged, leads_to
from mpjax._src.replacements.logits import (
    KNOWN,
    LSE,
    PICKED,
    SQUARE,
    TOTAL,
    Labels,
    Reading,
    Row,
    Summed,
    kind_of,
)
from mpjax._src.replacements.written import Written

# ---- from the matmul to the logits ---------------------------------------------------------------


class Root(NamedTuple):
    """A matmul whose result, after changes of its rows, are the logits."""

    matmul: Op
    hidden: int  # the position of the operand whose rows the logits have
    logits: Value
    scale: float  # what the result is multiplied by
    bias: Value | None  # what is added then, [vocabulary], or None
    moves: tuple[Any, ...]  # the changes of rows, for `Written`


# Operations between a matmul and the exponentials of its logits.
THROUGH = PRODUCTS | {"exp", "sub", "add", "slice"}


def _chains(flow: Flow) -> Iterator[tuple[Op, list[Op]]]:
    """Yields sums, and the ops from the exponential that is summed to what makes its logits."""
    found: set[Op] = set()
    for op in flow.ops:
        sums = op.name == "reduce_sum" and PLANNED not in op.scopes
        maker = flow.producer.get(op.ins[0]) if sums else None
        chain = []
        while maker is not None:
            chain.append(maker)
            through = maker.name in THROUGH or is_view(maker)
            # The logits are the largest operand: a shift has one entry a row, a bias one a word.
            widest = max(maker.ins, key=lambda v: v.size, default=None) if through else None
            maker = flow.producer.get(widest) if widest is not None else None
        if chain and chain[0].name == "exp" and chain[-1] not in found:
            found.add(chain[-1])
            yield op, chain


def _root(matmul: Op, flow: Flow) -> Root | None:
    """Returns the logits that a matmul makes, or None if it is no linear layer.

    They are its result after all that a loss by blocks can do to the hidden values in its place:
    scale them, add a bias, and reshape or slice the rows.
    """
    hidden, words = _layer(matmul)
    out = matmul.outs[0] if hidden is not None else None
    if hidden == 1:  # [vocabulary, ...]
        op = _reader(matmul.outs[0], flow)
        turned = (*range(1, len(matmul.outs[0].aval.shape)), 0)
        out = op.outs[0] if op is not None and op.params.get("permutation") == turned else None
    if hidden is None or out is None:
        return None
    scale, bias, moves = 1.0, None, list[Any]()
    while (op := _reader(out, flow)) is not None:
        added, scaled = _bias(op, out, flow), factor(op, out)
        if bias is None and added is not None:
            bias = added
        elif bias is None and scaled:
            # Before the bias only: the form scales first, so a later factor ends the search.
            scale *= scaled
        elif op.outs[0].aval.shape[-1:] == (words,) and (move := _move(op)) is not None:
            moves += move
        else:
            break
        out = op.outs[0]
    return Root(matmul, hidden, out, scale, bias, tuple(moves))


def _layer(matmul: Op) -> tuple[int | None, int]:
    """Returns the operand of a linear layer that is no weight, and the number of words."""
    contracted, batch = matmul.params["dimension_numbers"]
    ranks = [len(v.aval.shape) for v in matmul.ins]
    if batch[0] or 2 not in ranks or len(contracted[0]) != 1 or not matmul.outs[0].is_f32:
        return None, 0
    hidden = 0 if ranks[1] == 2 else 1  # the logits of the left operand come first
    return hidden, matmul.ins[1 - hidden].aval.shape[1 - contracted[1 - hidden][0]]


def _move(op: Op) -> list[Any] | None:
    """Returns what an op that keeps words together does to rows, as in `Written`."""
    if op.name == "slice":
        whole = (op.params["start_indices"], op.params["limit_indices"], op.params["strides"])
        return [("slice", *(x and tuple(x[:-1]) for x in whole))]
    if not is_view(op) or op.name not in ("reshape", CAST):
        return None
    return [("reshape", op.outs[0].aval.shape[:-1])] if op.name == "reshape" else []


def _reader(value: Value, flow: Flow) -> Op | None:
    """Returns the only reader of a value, unless it has effects or computes in 16 bits."""
    op = flow.reader(value)
    plain = op is not None and len(op.outs) == 1 and not op.eqn.effects and not flow.in_half(op)
    return op if plain else None


def _bias(op: Op, logits: Value, flow: Flow) -> Value | None:
    """Returns the array of one entry for each word that an op adds to logits."""
    if op.name != "add" or op.ins[0] is op.ins[1] or op.outs[0].aval.shape != logits.aval.shape:
        return None
    own, place = own_axes(logits.aval.shape), 1 - op.ins.index(logits)
    value, axes = behind(op.ins[place], before(op, own, place) or (), flow.producer)
    along = value.aval.shape == logits.aval.shape[-1:] and axes == own[-1:]
    return value if along and value.is_f32 else None


# ---- the loss -----------------------------------------------------------------------------------


class Loss(NamedTuple):
    """``factor`` times a loss of each row."""

    factor: float
    labels: Labels
    form: Form  # of logits that are there


def _loss(row: Row, words: int) -> Loss | None:
    """Returns the loss that a linear combination is, or None if it is none."""
    row = dict(row)
    picked = [name for name in row if kind_of(name) == PICKED]
    if len(picked) != 1:
        return None
    labels: Labels = picked[0][1]
    here = row.pop(picked[0])
    always, known, square, total = (row.pop(n, 0.0) for n in (LSE, (KNOWN, LSE), SQUARE, TOTAL))
    scale = always + known
    if row or not scale:
        return None
    smoothing, z_loss = -total / scale * words, square / scale
    unknown = NORMALIZER if labels.unknown == SHARE and not known else labels.unknown
    share = smoothing if unknown == SHARE else 1.0
    # The form has one factor and one smoothing, which both terms have to agree on.
    pairs = (-here / scale, 1 - smoothing), (always / scale, share)
    fits = all(abs(a - b) < 1e-5 for a, b in pairs) and -1e-6 < smoothing < 1 and z_loss >= 0
    form = Form(words, z_loss=z_loss, label_smoothing=max(smoothing, 0.0), unknown=unknown)
    return Loss(scale, labels, form) if fits else None


# ---- what is read of it --------------------------------------------------------------------------


class Sum(NamedTuple):
    """The result that is replaced: the losses, or their weighted sum."""

    op: Op  # the op that computes it
    ops: tuple[Op, ...]  # all ops from the losses to it
    factor: float = 1.0  # the factor of the sum
    # Arrays that are multiplied, after how each is read (`Written`).
    weights: tuple[tuple[str, tuple[int, ...], Value], ...] = ()


def _sum_of(losses: Value, flow: Flow) -> Sum | None:
    """Returns the sum of all losses if nothing else is read, with the weights in it."""
    value, scale = losses, 1.0
    ops: list[Op] = []
    weights: list[tuple[str, tuple[int, ...], Value]] = []
    while (op := _reader(value, flow)) is not None:
        ops.append(op)
        scaled, weight = factor(op, value), _weight(op, value)
        if op.name == "reduce_sum":  # perhaps over some axes first
            if op.outs[0].size == 1:
                return Sum(op, tuple(ops), scale, tuple(weights))
        elif op.outs[0].size != value.size:
            return None
        elif scaled:
            scale *= scaled
        elif value.size == losses.size and weight is not None:
            weights.append((weight[0], op.outs[0].aval.shape, weight[1]))
        elif not is_view(op) or op.name == "transpose":
            return None
        value = op.outs[0]
    return None


def _weight(op: Op, losses: Value) -> tuple[str, Value] | None:
    """Returns what an op multiplies losses by, or selects them by, and how."""
    if op.name == "mul" and op.ins[0] is not op.ins[1]:
        other = op.ins[1 - op.ins.index(losses)]
        return ("times", other) if other.is_f32 else None
    if op.name == SELECT and len(op.ins) == 3:
        place = op.ins.index(losses)
        if place and number(op.ins[3 - place]) == 0:
            return ("kept" if place == 2 else "dropped"), op.ins[0]
    return None


# ---- what runs in its place ----------------------------------------------------------------------


UNCHANGED = "unchanged: "
NONE = "it is no cross entropy of labels"


def cross_entropies(flow: Flow) -> Iterator[Candidate]:
    """Yields the losses of a block, and how they run without their logits, or why not."""
    read: set[Op] = set()
    for total, chain in _chains(flow):
        maker = chain[-1]
        root = _root(maker, flow) if maker.name == DOT else None
        if root is None:
            yield from _given(total, chain, flow)
        elif flow.producer[root.logits] not in read:  # else they were written twice
            reading = Reading(flow, root.logits)
            read |= {*reading.ops}
            if reading.is_loss or leads_to(total.outs[0], "log", flow):
                yield judged(maker, functools.partial(_found, root, reading), UNCHANGED)


def _given(total: Op, chain: list[Op], flow: Flow) -> Iterator[Candidate]:
    """Yields the loss of logits that no linear layer makes, unless they are given."""
    maker = chain[-1]
    # A linear layer multiplies by a parameter.
    layer = maker.name == DOT and any(v.given or v.constant for v in maker.ins)
    for op in reversed(chain) if maker.name not in THROUGH else ():
        logits = op.outs[0].size > 1 and Reading(flow, op.outs[0]).is_loss
        if logits or (op is maker and layer and leads_to(total.outs[0], "log", flow)):
            yield Candidate(op, f"{UNCHANGED}{maker.name} computes its logits", None)
            return


def _found(root: Root, reading: Reading) -> Found:
    flow, matmul = reading.flow, root.matmul
    ruling = flow.rulings[matmul]
    if reading.leak or not reading.is_loss:
        raise Unfit(reading.leak or NONE)
    if ruling.in_force not in ("half", "full") or matmul.params.get("out_sharding") is not None:
        raise Unfit("its matmul sets its own precision or sharding")
    if not all(isinstance(n, int) for v in (*matmul.ins, root.logits) for n in v.aval.shape):
        raise Unfit("its shapes are symbolic")
    leaves = {v: _loss(reading.kinds[v].row, reading.words) for v in reading.leaves}
    if not any(leaves.values()):
        raise Unfit(NONE)
    if len(leaves) > 1:
        raise Unfit("parts of it are also read elsewhere")
    ((value, loss),) = leaves.items()
    assert loss is not None
    own = Sum(flow.producer[value], ())
    total = own if isinstance(reading.kinds[value], Summed) else _sum_of(value, flow)
    weights = [weight for *_, weight in total.weights] if total else []
    # The weights of a sum have to be made without its losses.
    if value in weights or any(value in op.outs for op in flow.before(weights)):
        total = None
    end = total or own
    how, inputs = _written(root, reading, loss, end, total is not None)
    ops = absorbed([matmul, *reading.ops, *end.ops], inputs, end.op, flow)
    if ops is None:
        raise Unfit("its logits are also read elsewhere")
    return Found(ops, inputs, end.op, matmul, written.run, how)


def _written(
    root: Root, reading: Reading, loss: Loss, end: Sum, is_sum: bool
) -> tuple[Written, list[Value]]:
    """Returns how a loss runs, and its operands."""
    flow, matmul = reading.flow, root.matmul
    contracted = [dims[0] for dims in matmul.params["dimension_numbers"][0]]
    hidden, weight = matmul.ins[root.hidden], matmul.ins[1 - root.hidden]
    transposed = contracted[1 - root.hidden] == 1
    turned = flow.producer.get(weight)
    if turned is not None and turned.name == "transpose":  # a table is read as it lies
        weight, transposed = turned.ins[0], not transposed
    features = hidden.aval.shape[contracted[root.hidden]]
    blocks = blocks_of(reading.rows, features)
    form = loss.form._replace(transposed=transposed, blocks=blocks, scale=root.scale)
    if form.blocks == 1 and not is_sum:
        # One block has all logits. It pays only if a sum's forward pass makes the gradients.
        raise Unfit("its logits are no larger than one block")
    ruling = flow.rulings[matmul]
    how = Written(
        form,
        ruling.half if ruling.in_force == "half" else FLOAT32,
        contracted[root.hidden],
        root.moves,
        loss.labels.clipped,
        root.bias is not None,
        loss.factor * end.factor,
        tuple((how, shape) for how, shape, _ in end.weights),
        end.op.outs[0].aval.shape,
        is_sum,
        is_sum and rows_are_cheaper(reading.rows, form),
    )
    inputs = [hidden, weight, loss.labels.value]
    inputs += [root.bias] if root.bias is not None else []
    return how, inputs + [value for *_, value in end.weights]
