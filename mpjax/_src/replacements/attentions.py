"""Recognizes hand-written attention and runs it in the fused kernel of the device.

    out = softmax(factor * q k' + biases, masked) v

The pattern does not depend on the spelling: a softmax that `softmaxes` found, an affine function of
a matmul's result before it, and a matmul that is its only reader. Axes are identified by what they
run over. Axes shared by both operands of the first matmul are batches and heads, the axes of the
sum are keys, and the others are queries, including heads that share keys. Changes of layout in
between are skipped.

The kernel computes the same function: a shift that is the same for a whole row cancels, and an
entry masked by a large negative number has weight 0, whatever the number is.
"""

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.rules import CAST, DOT, EXPONENTIALS, PRODUCTS, SELECT, VIEWS
from mpjax._src.core.program.affine import number, terms
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.respellings import Found
from mpjax._src.core.program.views import Axes, after, before, behind, is_view, own_axes
from mpjax._src.replacements import fused, fused_kernels, positions
from mpjax._src.replacements.flow import REACH, Candidate, Flow, Unfit, absorbed, judged, leads_to
from mpjax._src.replacements.forms import is_constant_along
from mpjax._src.replacements.fused import SUM, VALUE, Atom, Fusion, Labels, Term
from mpjax._src.replacements.softmaxes import Softmax, softmaxes

# Entries this far below others have weight 0: their exponential underflows.
MASKED = -(2.0**13)
LATE = "normalized after the product"
DIVIDED_BY_MORE = "its weights are divided by more than their sum"


def attentions(flow: Flow, taken: Collection[Op]) -> Iterator[Candidate]:
    """Yields the attentions of a block, and the kernels that run them, or why none does.

    No softmax is looked at of which ops are ``taken`` by then. Where all of an attention has to be
    float32, nobody asks for a kernel.
    """
    known: set[Op] = set()
    for softmax in softmaxes(flow):
        matmul = _attends(softmax, flow) if softmax.ops.isdisjoint(taken) else None
        if matmul is not None and not flow.in_full(matmul, softmax.ops):
            known.add(matmul)
            yield judged(matmul, functools.partial(_fuse, softmax, flow), "xla: ")
    yield from _others(flow, known)


def _others(flow: Flow, known: Collection[Op]) -> Iterator[Candidate]:
    """Yields attentions whose weights do not sum to one, unless their matmuls are ``known``.

    They have exponentials of a matmul's result, which are summed and which another matmul reads.
    """
    for op in flow.ops:
        if op.name not in EXPONENTIALS or not flow.is_plain(op):
            continue
        total, matmul = (leads_to(op.outs[0], name, flow) for name in ("reduce_sum", DOT))
        if total is None or matmul is None or matmul in known or flow.in_full(matmul, [op]):
            continue
        if _comes_from_matmul(op.ins[0], flow):
            late = _is_divided(matmul, total, flow)
            yield Candidate(matmul, f"xla: {LATE if late else DIVIDED_BY_MORE}", None)


def _is_divided(matmul: Op, total: Op, flow: Flow) -> bool:
    """Returns whether the result of a matmul is divided by a sum, apart from casts and layouts."""
    for op in flow.after(matmul.outs[0], lambda op, v: _moves(op)):
        norms = [_source(v, flow) for v in op.ins] if op.name in PRODUCTS else []
        # A product has the reciprocal.
        norms += [_source(norm.ins[1], flow) for norm in norms if norm and norm.name == "div"]
        if total in norms:
            return True
    return False


def _source(value: Value, flow: Flow) -> Op | None:
    """Returns the op that a value comes from, through casts and changes of layout."""
    return next((op for op in flow.before([value], _moves) if not _moves(op)), None)


def _moves(op: Op) -> bool:
    return op.name == CAST or op.name in VIEWS


def _comes_from_matmul(value: Value, flow: Flow) -> bool:
    """Returns whether a value is computed from a matmul's result."""
    return any(op.name == DOT for op in itertools.islice(flow.before([value]), REACH))


def _attends(softmax: Softmax, flow: Flow) -> Op | None:
    """Returns the matmul that a softmax leads to.

    That is through any operations if its scores come from a matmul; else through a dropout alone.
    """
    if _comes_from_matmul(softmax.scores, flow):
        return leads_to(softmax.weights, DOT, flow)
    return leads_to(softmax.weights, DOT, flow, _drops)


def _drops(op: Op, weights: Value) -> bool:
    """Returns whether an op multiplies weights, or sets some to 0, as dropout does."""
    if op.outs[0].aval != weights.aval or weights not in op.ins:
        return False
    others = [v for v in op.ins if v is not weights]
    if op.name == SELECT:
        return len(op.ins) == 3 and number(others[-1]) == 0
    return op.name in PRODUCTS and len(others) == 1 and (op.name == "mul" or weights is op.ins[0])


# ---- the match ----------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """A bias or mask of scores: an array, the axes by which it is read, and the rest of `Term`."""

    value: Value
    axes: Axes
    factor: float | None
    kept: bool = True


class Scores(NamedTuple):
    """A matmul of scores, its axes as the softmax sees them, its factor and the ops in between."""

    matmul: Op
    axes: Axes
    factor: float
    ops: tuple[Op, ...] = ()
    leaves: tuple[Leaf, ...] = ()


def _fuse(softmax: Softmax, flow: Flow) -> Found:
    """Returns a softmax with the operations before and after it, and the kernel in their place."""
    summed = softmax.axes
    if not softmax.whole:
        raise Unfit("its rows do not sum to one")
    if softmax.masked:
        raise Unfit("the mask is inside the softmax, whose rows may be empty")
    # First the pattern: the matmul of the scores, what is added to them, and that of the values.
    own = own_axes(softmax.scores.aval.shape)
    scores = _scores(softmax.scores, own, softmax.rate, summed, flow)
    matmul, place, where, views = _weighed(softmax.weights, flow)
    # Then what each axis runs over: parts of the scores' axes, which no reshape may cut.
    atoms = [atom for axis in scores.axes for atom in axis]
    keys = {a for d in summed for a in _split(own[d], atoms)}
    first, queries, named, shared = _operands(scores.matmul, scores.axes, keys)
    values, result = _values(matmul, place, _labels(where, atoms), keys, shared)
    _check_matmuls(flow, scores.matmul, matmul)
    rows = [a for axis in queries for a in axis if a[0] != SUM and a not in shared]
    leaves = [part for leaf in scores.leaves for part in _parts(leaf, flow)]
    lines = [_lines(leaf, flow) for leaf in leaves]
    sequence = _sequence(rows, keys, lines)
    covered, options = _causal(lines, sequence, keys)
    left = [_seen_through(leaf, flow) for leaf, yes in zip(leaves, covered, strict=True) if not yes]
    added = [Term(_labels(leaf.axes, atoms), leaf.factor, leaf.kept) for leaf in left]

    # The kernel has four axes of its own. The last shared axis counts as heads.
    batch = _in_order(shared)
    heads = batch[-1:] if len(batch) > 1 else ()
    groups = (
        batch[: len(batch) - len(heads)],
        sequence,
        heads,
        tuple(a for a in rows if a not in sequence),
        _in_order(keys),
        tuple(a for axis in named for a in axis if a[0] == SUM),
        tuple(a for axis in result for a in axis if a[0] == VALUE),
    )
    options = {"scale": scores.factor, **options}
    operands = queries, named, values
    fusion = Fusion(
        "",
        flow.rulings[matmul].half,
        operands,
        (*added,),
        result,
        groups,
        tuple(sorted(options.items())),
    )
    inputs = [scores.matmul.ins[first], scores.matmul.ins[1 - first], matmul.ins[1 - place]]
    inputs += [leaf.value for leaf in left]
    # Which kernel fits depends on the operands as it would get them.
    avals = [_jax.abstract(v.aval) for v in inputs]
    operands_of = jax.eval_shape(lambda arrays: fused.arranged(fusion, arrays), avals)
    kernel, why_not = fused_kernels.choose(operands_of, options)
    if not kernel:
        raise Unfit(why_not)
    for value, labels, along in zip(inputs, operands, (sequence, *[groups[4]] * 2), strict=False):
        if _is_sharded(value, {d for d, axis in enumerate(labels) if {*axis} & {*along}}, flow):
            raise Unfit("its sequence is sharded, and a fused kernel needs whole sequences")
    members = *softmax.ops, scores.matmul, *scores.ops, *views, matmul
    if (ops := absorbed(members, inputs, matmul, flow)) is None:
        raise Unfit("its scores are also read elsewhere")
    return Found(ops, inputs, matmul, matmul, fused.run, fusion._replace(kernel=kernel))


def _check_matmuls(flow: Flow, *matmuls: Op) -> None:
    if len({flow.rulings[op].half for op in matmuls}) > 1:
        raise Unfit("its matmuls compute in different 16-bit dtypes")
    for op in matmuls:
        if flow.rulings[op].in_force != "half" or not all(v.is_f32 for v in op.ins):
            raise Unfit("one of its matmuls does not compute in 16 bits")
        if op.params.get("out_sharding") is not None:
            raise Unfit("one of its matmuls sets a sharding")
        if not all(isinstance(n, int) for v in op.ins for n in v.aval.shape):
            raise Unfit("its shapes are symbolic")


def _scores(
    value: Value, axes: Axes | None, factor: float, summed: tuple[int, ...], flow: Flow
) -> Scores:
    """Returns the matmul that a value is an affine function of, given its axes and factor."""
    op = flow.producer.get(value)
    if op is None or axes is None or not value.is_f32:
        raise Unfit("its scores do not come from a matmul")
    if op.name == DOT:
        return Scores(op, axes, factor)
    if flow.in_half(op) or op.eqn.effects:
        raise Unfit(f"{op.name} on its scores has a fixed dtype")
    reasons = []
    for place, weight, leaves in _ways(op, axes, factor, summed, flow):
        try:
            further = before(op, axes, place)
            scores = _scores(op.ins[place], further, factor * weight, summed, flow)
            return scores._replace(ops=(*scores.ops, op), leaves=(*scores.leaves, *leaves))
        except Unfit as why:
            reasons.append(why)
    raise reasons[0] if reasons else Unfit(f"{op.name} is applied to its scores")


def _ways(
    op: Op, axes: Axes, factor: float, summed: tuple[int, ...], flow: Flow
) -> Iterator[tuple[int, float, list[Leaf]]]:
    """Yields the operands that may hold the scores, with their factors and what is beside each."""
    if op.name == SELECT and len(op.ins) == 3 and op.ins[0].aval.dtype == np.bool_:
        for place in (2, 1):
            if (fill := number(op.ins[3 - place])) is not None:
                # The factor applies to what is filled in, too.
                if not fill * factor <= MASKED:
                    raise Unfit(f"{fill:g} instead of a score does not mask it")
                yield place, 1.0, [Leaf(op.ins[0], _known(before(op, axes)), None, place == 2)]
                return
    parts = () if is_view(op) and op.ins[0].size != op.outs[0].size else terms(op)
    for place, weight in parts:
        # The other operand of a sum is a bias; one that is the same for a whole row is a shift.
        others = [
            Leaf(op.ins[i], _known(before(op, axes, i)), factor * w) for i, w in parts if i != place
        ]
        yield place, weight, [x for x in others if not _is_shift(x, summed, flow)]


def _is_shift(leaf: Leaf, summed: tuple[int, ...], flow: Flow) -> bool:
    return is_constant_along(_seen_through(leaf, flow).axes, summed)


def _weighed(value: Value, flow: Flow) -> tuple[Op, int, Axes, list[Op]]:
    """Returns the matmul that is the only reader of a softmax: operand, axes, and ops between."""
    axes: Axes | None = own_axes(value.aval.shape)
    views: list[Op] = []
    while (op := flow.reader(value)) is not None:
        if op.name == DOT and op.ins[0] is not op.ins[1]:
            return op, op.ins.index(value), _known(axes), views
        if not is_view(op) or op.ins[0].size != op.outs[0].size:
            raise Unfit(f"{op.name} is applied to its weights, as in dropout or scaling")
        axes = after(op, _known(axes))
        views.append(op)
        value = op.outs[0]
    raise Unfit("its weights are also read elsewhere")


# ---- axes ---------------------------------------------------------------------------------------


def _known(axes: Axes | None) -> Axes:
    if axes is None:
        raise Unfit("a reshape mixes its axes")
    return axes


def _split(axis: Any, atoms: Sequence[Atom]) -> tuple[Atom, ...]:
    """Returns the atoms that an axis runs over."""
    parts: list[Atom] = []
    for place, stride, size in axis:
        inside = [a for a in atoms if a[0] == place and stride <= a[1] < stride * size]
        if math.prod(a[2] for a in inside) != size:
            raise Unfit("a reshape mixes its axes")
        parts += sorted(inside, key=lambda a: -a[1])
    return tuple(parts)


def _labels(axes: Axes, atoms: Sequence[Atom]) -> Labels:
    return tuple(_split(axis, atoms) for axis in axes)


def _in_order(atoms: Iterable[Atom]) -> tuple[Atom, ...]:
    return tuple(sorted(atoms, key=lambda a: (a[0], -a[1])))


def _names(matmul: Op) -> list[list[Any]]:
    """Returns a name for each axis of a matmul's operands and of its result, as in an einsum.

    The names are (SUM, i) and ("both", i) for what operands share, else (operand, axis).
    """
    summed, shared = matmul.params["dimension_numbers"]
    of: list[list[Any]] = []
    for place, value in enumerate(matmul.ins):
        known = {d: (SUM, i) for i, d in enumerate(summed[place])}
        known |= {d: ("both", i) for i, d in enumerate(shared[place])}
        of.append([known.get(d, (place, d)) for d in range(len(value.aval.shape))])
    own = [name for names in of for name in names if isinstance(name[0], int)]
    return [*of, [*(("both", i) for i in range(len(shared[0]))), *own]]


def _operands(matmul: Op, axes: Labels, keys: set[Atom]) -> tuple[int, Labels, Labels, set[Atom]]:
    """Returns which operand holds the queries, the axes of both operands, and the shared axes."""
    *names, out = _names(matmul)
    of = dict(zip(out, axes, strict=True))
    shared = {a for name, axis in of.items() if name[0] == "both" for a in axis}
    of |= {
        name: ((*name, size),)
        for name, size in zip(names[0], matmul.ins[0].aval.shape, strict=True)
        if name[0] == SUM
    }
    labels = [tuple(of[name] for name in each) for each in names]
    # The keys run over what the softmax sums; the other operand holds the queries.
    for first in (0, 1):
        own = {a for axis in labels[1 - first] for a in axis if a[0] != SUM} - shared
        if own == keys:
            return first, labels[first], labels[1 - first], shared
    raise Unfit("its softmax is not over keys")


def _values(
    matmul: Op, place: int, weights: Labels, keys: set[Atom], shared: set[Atom]
) -> tuple[Labels, Labels]:
    """Returns what the axes of the values and of the result run over."""
    *names, out = _names(matmul)
    of = dict(zip(names[place], weights, strict=True))
    if {a for name, axis in of.items() if name[0] == SUM for a in axis} != keys:
        raise Unfit("the matmul that reads it does not sum over keys")
    if {a for name, axis in of.items() if name[0] == "both" for a in axis} != shared:
        raise Unfit("values and keys are shared across different axes")
    for d, name in enumerate(names[1 - place]):
        of.setdefault(name, ((VALUE, d, matmul.ins[1 - place].aval.shape[d]),))
    values, result = (tuple(of[name] for name in each) for each in (names[1 - place], out))
    return values, result


def _is_sharded(value: Value, dims: set[int], flow: Flow) -> bool:
    """Returns whether the program shards some axes of a value, or of those it is computed from."""
    todo: list[tuple[Value, Axes | None]] = [(value, own_axes(value.aval.shape))]
    for source, axes in todo:  # grows
        op = flow.producer.get(source)
        if op is None or axes is None or len(todo) > REACH:
            continue
        if op.name == "sharding_constraint":
            spec = getattr(op.params["sharding"], "spec", ())
            split = (axis for axis, of in zip(axes, spec, strict=False) if of)
            if any(place in dims for axis in split for place, *_ in axis):
                return True
        if op.name == DOT:
            *names, out = _names(op)
            of = dict(zip(out, axes, strict=True))
            operands = (tuple(of.get(name, ()) for name in each) for each in names)
            todo += zip(op.ins, operands, strict=True)
        for place, v in enumerate(op.ins if op.name != DOT else ()):
            if is_view(op) or (v.is_f32 and v.aval.shape == source.aval.shape):
                todo.append((v, before(op, axes, place)))
    return False


# ---- masks --------------------------------------------------------------------------------------


def _parts(leaf: Leaf, flow: Flow) -> Iterator[Leaf]:
    """Splits a combined mask into masks that must all keep an entry."""
    seen = _seen_through(leaf, flow)
    op = flow.producer.get(seen.value)
    if op is None:
        yield seen
    elif leaf.factor is not None:
        mask = _chosen(op, seen)
        yield from (seen,) if mask is None else _parts(mask, flow)
    elif op.name == "not":
        yield from _parts(seen._replace(value=op.ins[0], kept=not leaf.kept), flow)
    elif op.name == ("and" if leaf.kept else "or"):
        # What "a or b" drops, a drops or b drops: then both are masks of what is dropped.
        for place, value in enumerate(op.ins):
            axes = _known(before(op, seen.axes, place))
            yield from _parts(seen._replace(value=value, axes=axes), flow)
    elif op.name in ("ne", "gt", "eq") and (truth := _truth(op, seen, flow)) is not None:
        yield from _parts(truth._replace(kept=leaf.kept == (op.name != "eq")), flow)
    else:
        yield seen


def _chosen(op: Op, leaf: Leaf) -> Leaf | None:
    """Returns the mask behind a bias that is either 0 or a large negative number."""
    numbers = [number(v) for v in op.ins[1:]]
    if op.name != SELECT or len(numbers) != 2 or None in numbers:
        return None
    dropped, kept = (_counts(leaf, n) for n in numbers)
    if {dropped, kept} != {True, False}:
        return None
    return Leaf(op.ins[0], _known(before(op, leaf.axes)), None, bool(kept))


def _counts(leaf: Leaf, entry: Any) -> bool | None:
    """Returns whether a score counts where a mask or bias has an entry; None if that changes it."""
    if leaf.factor is None:
        return bool(entry) == leaf.kept
    added = entry * leaf.factor
    return not added if not added or added <= MASKED else None


def _truth(op: Op, leaf: Leaf, flow: Flow) -> Leaf | None:
    """Returns the boolean behind a comparison of zeros and ones with 0."""
    if number(op.ins[1]) != 0:
        return None
    entries = leaf._replace(value=op.ins[0], axes=_known(before(op, leaf.axes)))
    entries = _seen_through(entries, flow)
    cast = flow.producer.get(entries.value)
    if cast is None or cast.name != CAST or cast.ins[0].aval.dtype != np.bool_:
        return None
    return entries._replace(value=cast.ins[0])


def _seen_through(leaf: Leaf, flow: Flow) -> Leaf:
    """Returns the smallest array from which changes of layout make a leaf."""
    value, axes = behind(leaf.value, leaf.axes, flow.producer)
    return leaf._replace(value=value, axes=axes)


def _lines(leaf: Leaf, flow: Flow) -> "frozenset[positions.Line] | None":
    """Returns the sums of positions that are >= 0 exactly where entries count; None otherwise."""
    mask = positions.read(leaf.value, leaf.axes, flow)
    if isinstance(mask, positions.Line) and not mask.slopes:
        return frozenset() if _counts(leaf, mask.constant) else None
    if not isinstance(mask, positions.Choice):
        return None
    yes, no = _counts(leaf, mask.yes), _counts(leaf, mask.no)
    if yes and no is False:
        return mask.lines
    # The opposite of several conditions is no set of conditions that all have to hold.
    if no and yes is False and len(mask.lines) == 1:
        return frozenset(map(positions.negated, mask.lines))
    return None


def _sequence(rows: list[Atom], keys: set[Atom], lines: Sequence[Any]) -> tuple[Atom, ...]:
    """Returns the queries' sequence axis: the one that masks compare with keys, or the longest."""
    if len(keys) == 1:
        for line in (line for of_leaf in lines for line in of_leaf or ()):
            # A causal mask compares queries with keys, so the axis that it names is the sequence.
            compared = [a for a, _ in line.slopes if a in rows]
            if len(compared) == 1 and any(a in keys for a, _ in line.slopes):
                return tuple(compared)
    return tuple(sorted(rows, key=lambda a: a[2])[-1:])


def _causal(
    lines: Sequence[Any], sequence: tuple[Atom, ...], keys: set[Atom]
) -> tuple[list[bool], dict[str, Any]]:
    """Returns the masks that a kernel has options for, such as "causal", and these options."""
    always = [of_leaf == frozenset() for of_leaf in lines]
    if len(keys) != 1 or len(sequence) != 1:
        return always, {"is_causal": False}
    (row,), (column,) = sequence, keys
    causal = positions.Line(frozenset([(row, 1), (column, -1)]), 0)
    forward = frozenset([(row, -1), (column, 1)])

    def is_covered(line):
        return line == causal or (line.slopes == forward and line.constant >= 0)

    covered = [of_leaf is not None and all(map(is_covered, of_leaf)) for of_leaf in lines]
    pairs = zip(lines, covered, strict=True)
    covered_lines = {line for of_leaf, yes in pairs if yes for line in of_leaf}
    if causal not in covered_lines:  # no kernel has a window alone
        return always, {"is_causal": False}
    reaches = [line.constant for line in covered_lines - {causal}]
    window = {"local_window_size": (min(reaches), 0)} if reaches else {}
    return covered, {"is_causal": True, **window}
