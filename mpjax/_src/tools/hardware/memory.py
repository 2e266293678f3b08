"""The contents of a compiled program's memory, by kind: parameters, moments, activations and so on.

Arguments are recognized by their names in the program, which JAX takes from the function's
arguments and the fields of its pytrees. Temporary arrays are recognized by the values that they
come from and lead to.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from mpjax._src.core.base.public import public
from mpjax._src.tools.hardware.flow import MAPPED, MOVED, Flow, Leaf, flow_of, reached
from mpjax._src.tools.hardware.hlo import Module, is_backward, op_name, parse, scope_of
from mpjax._src.tools.hardware.lifetimes import most_at_once

PARAMETERS, MASTERS, MOMENTS = "parameters", "masters", "moments"
GRADIENTS, ARGUMENTS = "gradients", "other arguments"
COPIES, KEPT, WORKSPACE = "copies of parameters", "kept activations", "workspace"
CODES = "kept 8-bit codes"
RESULTS, PADDING, CODE = "results", "padding of arguments", "program and constants"
UNKNOWN = "temporary, not known"

# In the order of the bar.
KINDS = (
    *(PARAMETERS, MASTERS, MOMENTS, GRADIENTS, ARGUMENTS, PADDING),
    *(COPIES, KEPT, CODES, WORKSPACE, UNKNOWN, RESULTS, CODE),
)

# Fields of optimizer states (optax's and mpjax's) that hold an array for each parameter.
MOMENT_FIELDS = {
    *("mu", "nu", "nu_max", "trace", "momentum", "velocity", "sum_of_squares", "v", "v_row"),
    *("v_col", "m", "ema", "e_g", "e_x", "z", "y", "diag_preconditioners", "scales", "codes"),
}
# Keys of an argument's path that tell its kind, and whether the key must be a field of a class,
# because the keys of a dictionary are the user's own.
NAMES = (
    (("masters", "master_params", "master_weights"), False, MASTERS),
    (tuple(sorted(MOMENT_FIELDS)), True, MOMENTS),
    (("opt_state", "optimizer_state"), False, MOMENTS),
    (("grads", "gradients"), False, GRADIENTS),
    (("params",), False, PARAMETERS),
)
# Instructions that compute nothing, whatever their names say.
PASSES_ON = {
    *("while", "call", "conditional", "tuple", "get-tuple-element", "bitcast", "parameter"),
    *("opt-barrier", "copy"),
}
# HLO's 8-bit numbers, not its booleans.
EIGHT = {"s8", "u8", "f8e4m3fn", "f8e5m2"}
KEY = re.compile(r"\.(?P<field>\w+)|\['(?P<name>[^']*)'\]|\[(?P<index>\d+)\]|^(?P<arg>\w+)")


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """The memory of one kind that one array or one scope uses.

    Attributes:
        kind: One of ``parameters``, ``masters``, ``moments``, ``gradients``, ``other arguments``,
            ``padding of arguments``, ``copies of parameters``, ``kept activations``,
            ``kept 8-bit codes``, ``workspace``, ``temporary, not known``, ``results``,
            ``program and constants``.
        bytes: Its size in bytes.
        name: The path of an argument, or the scope that computed a temporary array; else "".
        leaf: Its position in the HLO: (computation, instruction, index of the result), or None.
    """

    kind: str
    bytes: float
    name: str = ""
    leaf: tuple[str, str, int] | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The compiler's own sizes of the memory, in bytes."""

    arguments: float
    results: float
    temporary: float
    code: float


def memory_rows(text: str, sizes: Sizes) -> tuple[MemoryRow, ...]:
    """Returns the contents of the memory of an optimized HLO module, as rows that add up to all.

    ``sizes.results`` counts results that do not share the memory of an argument.
    """
    module = parse(text)
    flow = flow_of(module)
    arguments = _arguments(flow)
    spare = sizes.arguments - sum(row.bytes for row in arguments.values())
    given = [*arguments.values(), MemoryRow(PADDING, spare)]
    if spare < 0:  # the compiler put some arguments elsewhere, such as in the host's memory
        arguments, given = {}, [MemoryRow(ARGUMENTS, sizes.arguments)]
    results = _results(module, flow, sizes.results)
    ordered = module.scheduled
    between = _temporary(module, flow, arguments, sizes.temporary) if ordered else []
    rest = sizes.temporary - sum(row.bytes for row in between)
    kind = WORKSPACE if ordered else UNKNOWN
    if rest < 0 <= results[-1].bytes + rest:
        # The memory of results that are not computed yet holds temporary arrays until then.
        results[-1] = dataclasses.replace(results[-1], bytes=results[-1].bytes + rest)
        rest = 0.0
    elif rest < 0:  # the schedule has more than the compiler: what is alive is not known then
        between, rest, kind = [], sizes.temporary, UNKNOWN
    rows = (*given, *between, MemoryRow(kind, rest), *results, MemoryRow(CODE, sizes.code))
    return tuple(sorted((r for r in rows if r.bytes), key=lambda row: KINDS.index(row.kind)))


def _position(leaf: Leaf) -> tuple[str, str, int]:
    return (*leaf.op.place, leaf.number)


# ---- arguments -----------------------------------------------------------------------------------


def _arguments(flow: Flow) -> dict[Leaf, MemoryRow]:
    """Returns the rows of a module's arguments."""
    paths = {leaf: op_name(leaf.op).replace("\\'", "'") for leaf in flow.arguments}
    found = {leaf: _kind(path, leaf.shape.trainable) for leaf, path in paths.items()}
    kinds = {leaf: kind for leaf, (kind, _) in found.items()}
    # What a moment, master or gradient belongs to is a parameter, whatever its name: the only
    # argument of the same shape and the same end of the path.
    for leaf, (kind, tail) in found.items():
        if kind in (MASTERS, MOMENTS, GRADIENTS):
            like = [
                other
                for other, path in paths.items()
                if other.shape.dims == leaf.shape.dims
                and _keys(path)[-len(tail) or len(path) :] == tail
                and found[other][0] in (ARGUMENTS, PARAMETERS)
            ]
            # If several fit, it is not known to which of them the moment or master belongs.
            if len(like) == 1:
                kinds[like[0]] = PARAMETERS
    # So are those to which a gradient is added.
    others = {leaf for leaf, kind in kinds.items() if kind == ARGUMENTS}
    for new in _like(flow.results, others):
        made_of = reached(flow.before, [new], MAPPED)
        old = [leaf for leaf in others & made_of.keys() if leaf.shape.dims == new.shape.dims]
        if len(old) == 1 and any(is_backward(op_name(op)) for op, _ in made_of):
            kinds[old[0]] = PARAMETERS
    return {
        leaf: MemoryRow(kinds[leaf], leaf.shape.bytes, path, _position(leaf))
        for leaf, path in paths.items()
    }


def _kind(path: str, is_trainable: bool) -> tuple[str, tuple[str, ...]]:
    """Returns the kind of an argument by its path, and the rest of the path after the key."""
    for names, must_be_field, kind in NAMES:
        for key in KEY.finditer(path):
            name = key["field"] or ("" if must_be_field else key["name"] or key["arg"])
            if name in names and (is_trainable or kind == PARAMETERS):
                return kind, _keys(path[key.end() :])
    return ARGUMENTS, ()


def _keys(path: str) -> tuple[str, ...]:
    return tuple(key[key.lastgroup or 0] for key in KEY.finditer(path))


# ---- temporary arrays ----------------------------------------------------------------------------


def _temporary(
    module: Module, flow: Flow, arguments: Mapping[Leaf, MemoryRow], whole: float
) -> list[MemoryRow]:
    """Returns the arrays that are alive when memory use is highest."""

    def of_kind(*kinds: str) -> list[Leaf]:
        return [leaf for leaf, row in arguments.items() if row.kind in kinds]

    # Results of the shape of an argument are its new value or its gradient.
    new = _like(flow.results, of_kind(PARAMETERS, MASTERS, MOMENTS, ARGUMENTS))
    updates = reached(flow.before, new, MAPPED)
    copies = reached(flow.after, of_kind(PARAMETERS, MASTERS), MOVED)
    names = {op: "" if op.opcode in PASSES_ON else op_name(op) for op in module.ops()}
    read_backward = {
        source
        for source, steps in flow.after.items()
        if not is_backward(names[source.op])
        and any(is_backward(names[target.op]) for target, _ in steps)
    }
    # What the backward pass reads of the forward pass, through moves and casts.
    kept = reached(flow.before, read_backward, MOVED)

    def classify(parts: Sequence[Leaf]) -> tuple[str, str]:
        """Returns the kind of a buffer, by its leaves, and the scope that computed it."""
        makers = [names[op] for op, _ in reached(flow.before, parts, MOVED)]
        # An instruction that XLA made has no name: then the longest, as it says the most.
        scope = scope_of(names[parts[0].op]) or max(map(scope_of, makers), key=len)
        if any(map(is_backward, makers)):
            # A gradient becomes a new value entry by entry; cotangents of activations do not.
            return (GRADIENTS if any(x in updates for x in parts) else WORKSPACE), scope
        if parts[0] in copies:
            return COPIES, scope
        if any(x in kept for x in parts):
            return (CODES if parts[0].shape.dtype in EIGHT else KEPT), scope
        return WORKSPACE, scope

    rows = []
    for buffer in most_at_once(module.entry):
        kind, scope = classify(buffer.leaves)
        rows.append(MemoryRow(kind, buffer.bytes, scope, _position(buffer.leaves[0])))
    if sum(row.bytes for row in rows) <= whole:
        return rows
    # The compiler finds room for some workspace in a way that the schedule does not show.
    return [row for row in rows if row.kind != WORKSPACE]


# ---- results -------------------------------------------------------------------------------------


def _results(module: Module, flow: Flow, total: float) -> list[MemoryRow]:
    """Returns the results that have their own memory: gradients and other results."""
    own = [leaf for index, leaf in enumerate(flow.results) if index not in module.shared]
    rows = []
    for leaf in _like(own, flow.arguments):
        made_by = [op for op, _ in reached(flow.before, [leaf], MOVED) if op.room is module.entry]
        if any(is_backward(op_name(op)) for op in made_by):
            rows.append(MemoryRow(GRADIENTS, leaf.shape.bytes, leaf=_position(leaf)))
    rest = total - sum(row.bytes for row in rows)
    return [*rows, MemoryRow(RESULTS, rest)] if rest >= 0 else [MemoryRow(RESULTS, total)]


def _like(leaves: Iterable[Leaf], others: Iterable[Leaf]) -> list[Leaf]:
    """Returns the leaves that may be trained and have the shape of another one that may be."""
    dims = {leaf.shape.dims for leaf in others if leaf.shape.trainable}
    return [leaf for leaf in leaves if leaf.shape.trainable and leaf.shape.dims in dims]


def by_kind(rows: Sequence[MemoryRow]) -> dict[str, float]:
    """Returns the bytes of each kind."""
    totals: dict[str, float] = collections.defaultdict(float)
    for row in rows:
        totals[row.kind] += row.bytes
    return dict(totals)
