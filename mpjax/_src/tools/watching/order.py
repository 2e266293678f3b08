"""The order in which a backward pass finishes the gradients, read from its jaxpr.

An infinity in the backward pass spreads towards the input and never towards the loss. So if several
gradients are non-finite, the one that is finished first is the nearest to the cause.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.higher_order import BRANCH, SCAN, higher_order

# Operations that add no depth: the depth of a gradient counts arithmetic only.
FREE = {*rules.names_where(lambda rule: rule.need == rules.MOVE)}
FREE |= {"convert_element_type", "reduce_precision", "pcast"}

# Operations that keep the rows of an array with one row per layer.
ROWWISE = _jax.BARRIERS | {"convert_element_type", "copy", "mul", "div", "neg", "add_any"}


@dataclasses.dataclass(frozen=True)
class Place:
    """The position of a gradient in the order, as a linear function of the layer."""

    first: int  # the position, or the position of the first layer that the backward pass reaches
    stride: int = 0  # the difference between successive layers; 0 without a scan over layers
    descending: bool = True  # whether the backward pass goes from the last layer to the first


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The results of a scan over layers: one row for each."""

    scan: int
    length: int
    descending: bool


@dataclasses.dataclass
class _Node:
    """An equation that depends on the cotangent of the loss."""

    number: int
    depth: int
    parents: list["_Node"]
    rows: _Rows | None = None
    feeds: int = 0  # a bit mask of the gradients that depend on it
    # The depth of the last equation on the way to it that several gradients share.
    branches_off: int = 0


def backward_order(jaxpr: Any) -> tuple[Place, ...]:
    """Returns the place of every result of a backward pass.

    The last argument of the open jaxpr is the cotangent of the loss. Results are sorted by depth,
    which is the longest chain of arithmetic from the loss. They are first sorted by the depth at
    which a gradient branches off: operations that only this gradient needs (its matmul, its sum
    over the batch) do not count there. A parameter that is used twice is finished at its first use
    in the forward pass.
    """
    nodes: list[_Node] = []
    seed = _add(nodes, [], 0)
    outs = _walk(jaxpr, [None] * (len(jaxpr.invars) - 1) + [seed], nodes)
    _note_feeds(nodes, outs)

    def key(i: int) -> tuple[float, ...]:
        out = outs[i]
        if out is None:  # the loss does not depend on it
            return (float("inf"), 0, i)
        return (out.branches_off, out.depth, out.number)

    groups: dict[Any, list[int]] = {}
    for i in sorted(range(len(outs)), key=key):
        out = outs[i]
        groups.setdefault((out and out.rows) or ("alone", i), []).append(i)
    places = _placed(groups)
    return tuple(places[i] for i in range(len(outs)))


def _note_feeds(nodes: list[_Node], outs: Sequence[_Node | None]) -> None:
    """Notes which results each node feeds, and where it branches off from the others' way.

    Nodes come after what they read.
    """
    for bit, out in enumerate(outs):
        if out is not None:
            out.feeds |= 1 << bit
    for node in reversed(nodes):
        for parent in node.parents:
            parent.feeds |= node.feeds
    for node in nodes:
        shared = node.feeds & (node.feeds - 1)  # more than one bit
        before = max((parent.branches_off for parent in node.parents), default=0)
        node.branches_off = node.depth if shared else before


def _placed(groups: dict[Any, list[int]]) -> dict[int, Place]:
    """Returns the place of each result. Those that one loop stacks take turns, row by row."""
    places: dict[int, Place] = {}
    count = 0
    for rows, members in groups.items():
        stacked = isinstance(rows, _Rows)
        for rank, i in enumerate(members):
            stride, descending = (len(members), rows.descending) if stacked else (0, True)
            places[i] = Place(count + rank, stride, descending)
        count += len(members) * (rows.length if stacked else 1)
    return places


def _add(nodes: list[_Node], parents: list[_Node], cost: int, rows: _Rows | None = None) -> _Node:
    depth = cost + max((parent.depth for parent in parents), default=0)
    nodes.append(_Node(len(nodes), depth, parents, rows))
    return nodes[-1]


def _walk(jaxpr: Any, ins: Sequence[_Node | None], nodes: list[_Node]) -> list[_Node | None]:
    """Adds the equations of a program that depend on its live arguments, calls and loops inlined.

    The body of a scan is added once, which is enough to order the gradients within it, and to place
    them before all later ones.
    """
    env: dict[Any, _Node | None] = dict(zip(jaxpr.invars, ins, strict=True))

    def read(atoms: Sequence[Any]) -> list[_Node | None]:
        return [None if isinstance(a, _jax.Literal) else env.get(a) for a in atoms]

    for eqn in jaxpr.eqns:
        operands = read(eqn.invars)
        live = [node for node in operands if node is not None]
        if not live:
            continue
        name, inner = eqn.primitive.name, _jax.inner_jaxprs(eqn)
        kind = higher_order(name).kind
        if kind == BRANCH:
            # Which branch runs is not known, so a result waits for what any of them needs.
            branches = [_walk(each, operands[1:], nodes) for each in inner]
            outs = [
                _add(nodes, needed, 0) if (needed := [n for n in each if n is not None]) else None
                for each in zip(*branches, strict=True)
            ]
        # A while loop, which has two programs and an unknown number of iterations, is one node.
        elif len(inner) == 1 and _same_form(inner[0], eqn):
            outs = _walk(inner[0], operands, nodes)
            if kind == SCAN:
                outs = _stacked(eqn, outs, nodes)
        else:
            cost = 0 if name in FREE else 1
            outs = [_add(nodes, live, cost, _rows(eqn, live))] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return read(jaxpr.outvars)


def _same_form(jaxpr: Any, eqn: Any) -> bool:
    pairs = ((jaxpr.invars, eqn.invars), (jaxpr.outvars, eqn.outvars))
    return all(len(a) == len(b) for a, b in pairs)


def _stacked(eqn: Any, outs: list[_Node | None], nodes: list[_Node]) -> list[_Node | None]:
    """Marks the results of a scan that hold one row for each iteration."""
    row = higher_order(eqn.primitive.name)
    (inside,) = row.wire(eqn)
    carries = len(inside.carry)
    length, reverse, _ = row.turns(eqn)
    rows = _Rows(len(nodes), length, reverse)
    return [
        out if i < carries or out is None else _add(nodes, [out], 0, rows)
        for i, out in enumerate(outs)
    ]


def _rows(eqn: Any, live: Sequence[_Node]) -> _Rows | None:
    """Returns the rows that an equation's result inherits from an operand, or None."""
    # Scalars such as a scale aside, another shape may mean that rows were moved or summed.
    shapes = map(operator.attrgetter("aval.shape"), (*eqn.invars, *eqn.outvars))
    if eqn.primitive.name not in ROWWISE or len({s for s in shapes if s}) > 1:
        return None
    return next((node.rows for node in live if node.rows), None)
