"""Peepholes: patterns whose derivative a derivation makes cheaper than what JAX would derive."""

from typing import Any

import numpy as np

from mpjax._src.autocast.graph import Op, Value
from mpjax._src.autocast.islands import Flow, Island, bound
from mpjax._src.dtypes import FLOAT32


def softmaxes(flow: Flow) -> list[Island]:
    """Finds ``e / sum(e)`` with ``e = exp(z)``: its derivative takes its result alone.

    Its result is mostly stored in half already, for the matmul that reads it.
    """
    readers = flow.readers
    found: list[Island] = []
    taken: set[Op] = set()  # two softmaxes may weigh the same values
    for op in flow.block.ops:
        if op.name != "exp" or op.compute != FLOAT32 or op.half is None:
            continue
        reading = readers.get(op.outs[0], [])
        if None in reading or op.outs[0].size == 1:
            continue
        around = {r.name: r for r in reading if r is not None}
        if around.keys() != {"reduce_sum", "div"} or len(reading) != 2:
            continue
        total, chain = around["reduce_sum"], []
        value = total.outs[0]
        while len(readers.get(value, ())) == 1:
            (reader,) = readers[value]
            if reader is None or reader.name not in ("broadcast_in_dim", "reshape"):
                break
            chain.append(reader)
            value = reader.outs[0]
        quotient = around["div"]
        if quotient.ins != [op.outs[0], value] or readers.get(value) != [quotient]:
            continue
        members = [op, total, *chain, quotient]
        if all(m.compute == FLOAT32 and m.forced != "full" for m in members):
            island = Island(members, axes=tuple(total.params["axes"]))
            weights = _weights(quotient, readers)
            weighed = weights[-1].outs[0] if weights else quotient.outs[0]
            matmul = _sums_values(readers.get(weighed, []), weighed, island.axes)
            first = [op.ins[0], *(v for v in matmul.ins if v is not weighed)] if matmul else []
            again = any(v in first for w in weights for v in w.ins)
            if matmul and matmul not in taken and not again:
                taken |= {*weights, matmul}
                island.matmul, island.weights = matmul, weights
                island.ops += [*weights, matmul]
            bound(island, flow)
            island.half, island.sums = op.half, quotient.outs
            if island.matmul:
                island.inputs = [*first, *(v for v in island.inputs if v not in first)]
            if island.results == (island.matmul or quotient).outs:
                found.append(island)
                _steady_maximum(op, island.axes, flow)
    return found


def _steady_maximum(
    exp: Op,
    axes: tuple[int, ...],
    flow: Flow,
) -> None:
    """Marks the maximum that a softmax subtracts: its derivative is zero, and would keep scores."""
    producer, readers = flow.producer, flow.readers
    shift = producer.get(exp.ins[0])
    if shift is None or shift.name != "sub" or readers[exp.ins[0]] != [exp]:
        return
    value, reader = shift.ins[1], shift
    while value in producer and readers[value] == [reader]:
        reader = producer[value]
        if reader.name == "reduce_max":
            whole = reader.ins[0] is shift.ins[0]
            reader.steady = whole and tuple(reader.params["axes"]) == axes
            return
        varying = [v for v in reader.ins if v.const is None]
        if reader.name not in SPREADS or len(varying) != 1:
            return
        value = varying[0]


# From a maximum to what is subtracted.
SPREADS = frozenset(["broadcast_in_dim", "max", "reshape", "squeeze", "stop_gradient"])


def _weights(softmax: Op, readers: "dict[Value, list[Op | None]]") -> list[Op]:
    """Returns what a softmax goes through that is linear in it, entry by entry: a dropout."""
    found: list[Op] = []
    value = softmax.outs[0]
    while len(readers.get(value, ())) == 1:
        (op,) = readers[value]
        if op is None or op.forced or op.compute != FLOAT32 or op.outs[0].aval != value.aval:
            break
        place, zero = op.ins.index(value), [v.const for v in op.ins[1:] if v is not value]
        linear = (
            (op.name == "mul" and op.ins[1 - place] is not value)
            or (op.name == "div" and place == 0)
            or (op.name == "select_n" and place > 0 and len(zero) == 1 and _is_zero(zero[0]))
        )
        if not linear:
            break
        found.append(op)
        value = op.outs[0]
    return found


def _is_zero(const: Any) -> bool:
    return const is not None and not np.any(np.asarray(const, np.float32))


def _sums_values(readers: "list[Op | None]", result: Value, axes: tuple[int, ...]) -> Op | None:
    """Returns the matmul that alone reads a softmax, and contracts what it sums over."""
    matmul = readers[0] if len(readers) == 1 else None
    if matmul is None or matmul.name != "dot_general" or (matmul.forced or matmul.rule) != "half":
        return None
    place = matmul.ins.index(result)
    contracting, _ = matmul.params["dimension_numbers"]
    fits = (
        matmul.ins[1 - place] is not result
        and matmul.outs[0].is_f32
        and set(contracting[place]) == set(axes)
        and matmul.params.get("out_sharding") is None
    )
    return matmul if fits else None
