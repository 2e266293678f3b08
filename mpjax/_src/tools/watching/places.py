"""Finds the values of a program to watch. This happens once, before anything is computed.

Watched values are stored in 16 bits: operands and results of matmuls; casts to 16 bits, whose
operands show what is lost; and 16-bit values that are passed to a reduction, a kernel, a loop or
two readers. Other 16-bit values live only in the registers of one fused kernel.

A value is measured where it is computed. The matmuls that read it, perhaps after moves, are listed
with it. Values that remat recomputes are not measured again.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import HALVES, is_float, is_half
from mpjax._src.core.base.higher_order import BRANCH, CALL, MAP, Inside, higher_order
from mpjax._src.core.base.lines import short
from mpjax._src.core.base.rules import HALF, MOVE, NEVER, PROGRAM, REDUCES, UNKNOWN, rule_of
from mpjax._src.core.program.derived import derived_in
from mpjax._src.core.program.graph import AGAIN
from mpjax._src.core.program.interpret import is_precise
from mpjax._src.core.program.site import Site

CAST = "convert_element_type"


@dataclasses.dataclass(eq=False)
class Tensor:
    """A watched value."""

    eqn: Any  # the equation that reads or computes it
    value: Any  # the variable, of one iteration in a loop, and of one device in shard_map
    part: str  # its role there: "lhs", "rhs", "operand", "result" or "cast"
    half: Any  # the 16-bit dtype
    rounded: bool  # whether it is already rounded where it is measured
    site: Site
    # The matmuls that read it, as texts.
    readers: list[str] = dataclasses.field(default_factory=list)
    # The equations around its recomputation. Of a checkpoint, JAX puts the first run into the
    # program without its call.
    callers: tuple[Any, ...] = ()

    @property
    def lines(self) -> tuple[str, str]:
        """The user's line, and that of the library that it calls there, or ""."""
        callers = *reversed(self.site.callers), *reversed(self.callers)
        return _jax.source_lines(self.eqn, *callers)

    @property
    def scopes(self) -> tuple[str, ...]:
        """The names of the scopes around it."""
        return tuple(name for name in self.site.scopes if name != AGAIN)

    @property
    def backward(self) -> bool:
        """Whether it depends on a cotangent."""
        return self.site.is_derived(self.eqn)

    @property
    def again(self) -> bool:
        """Whether the backward pass computes it again, as the forward pass does."""
        return self.site.backward and not self.backward

    @property
    def key(self) -> Any:
        """A key that is the same for a tensor and its recomputation by remat."""
        made, op = _jax.line_key(self.eqn), self.eqn.primitive.name
        return made, self.scopes, op, self.part, self.half, self.value.aval.shape


# The tensors of a value by 16-bit dtype: a float32 value may be cast to both 16-bit dtypes.
Known = dict[Any, Tensor]


@dataclasses.dataclass(eq=False)
class Watch:
    """The watched values of one program."""

    at: dict[int, list[Tensor]]  # the operands and results to measure, by equation
    # The watches of inner programs, by equation, in the order of `Inside`.
    inside: dict[int, list["Watch"]]

    @property
    def tensors(self) -> list[Tensor]:
        """The measured tensors, in the order of the figures of `evaluate`."""
        tensors = []
        for i in sorted({*self.at, *self.inside}):
            tensors += self.at.get(i, [])
            tensors += [t for watch in self.inside.get(i, []) for t in watch.tensors]
        return tensors

    def without(self, dropped: set[Tensor]) -> "Watch":
        """Returns a watch without some of the tensors."""
        at = {i: [t for t in tensors if t not in dropped] for i, tensors in self.at.items()}
        inside = {i: [w.without(dropped) for w in watches] for i, watches in self.inside.items()}
        return Watch(at, inside)


def watch(jaxpr: Any) -> Watch:
    """Returns the watched values of a program."""
    inner, _ = _jax.open_jaxpr(jaxpr)
    everything = [True] * len(inner.outvars)
    watched, _ = _walk(
        inner, [{} for _ in inner.invars], everything, Site(derived=derived_in(inner))
    )
    # Backwards, so that of equal keys the first tensor in the program stays.
    first = {t.key: t for t in reversed(watched.tensors) if not t.again}
    twice = [t for t in watched.tensors if t.again and t.key in first]
    for tensor in twice:  # in the program's order, in which a report names them
        first[tensor.key].readers += tensor.readers
        first[tensor.key].callers = tensor.site.callers
    return watched.without({*twice})


def is_entered(eqn: Any) -> bool:
    """Returns whether values inside the programs of an equation are watched."""
    row = higher_order(eqn.primitive.name)
    return bool(row.kind) and not row.pinned


def _walk(
    jaxpr: Any, arguments: Sequence[Known], wanted: Sequence[bool], site: Site
) -> tuple[Watch, list[Known]]:
    """Returns the watched values of an open jaxpr at a site, and the tensors of its results.

    ``arguments`` are the tensors of its arguments. Results are ``wanted`` if they are used outside.
    """
    tensors: dict[Any, Known] = collections.defaultdict(dict)
    tensors.update(zip(jaxpr.invars, arguments, strict=True))
    live, stored, makers = _uses(jaxpr, wanted)
    watched = Watch(collections.defaultdict(list), {})
    for i, eqn in enumerate(jaxpr.eqns):
        if i not in live or eqn.primitive.name == _jax.CARRIER:  # zeros that represent a code
            continue
        here = site.at(eqn, repeats=False)
        if is_entered(eqn):
            watched.inside[i] = _enter(eqn, tensors, stored, here.inside(eqn))
            continue
        for v, part, half in _read(eqn, makers):
            if half not in tensors[v]:
                tensors[v][half] = Tensor(eqn, v, part, half, v.aval.dtype == half, here)
                watched.at[i].append(tensors[v][half])
            if part != "cast":
                tensors[v][half].readers.append(_reader(eqn, part, here))
        # The 16-bit result of a cast is the tensor that its operand was measured as.
        if eqn.primitive.name == CAST and _is_half(eqn.outvars[0]):
            tensors[eqn.outvars[0]] = tensors[eqn.invars[0]] if _is_var(eqn.invars[0]) else {}
        if _moves(eqn):
            for operand, v in zip(_moved(eqn), eqn.outvars, strict=True):
                tensors[v] = tensors[operand] if _is_var(operand) else {}
        for v, maker, half in _made(eqn, stored, makers):
            there = site.at(maker, repeats=False)
            tensors[v] = {half: Tensor(maker, v, "result", half, True, there)}
            watched.at[i].append(tensors[v][half])
    return watched, [tensors[v] if _is_var(v) else {} for v in jaxpr.outvars]


def _enter(eqn: Any, tensors: dict[Any, Known], stored: set[Any], site: Site) -> list[Watch]:
    """Walks through the programs of an equation."""
    row = higher_order(eqn.primitive.name)
    once = row.kind in (CALL, MAP)
    watches = []
    for inside in row.wire(eqn):
        program, _ = _jax.open_jaxpr(inside.program)
        if inside.outs == [None]:  # the condition of a loop
            watches.append(Watch({}, {}))
            continue
        wanted = [not once or eqn.outvars[n] in stored for n in inside.outs]
        watch, results = _walk(program, _given(eqn, inside, tensors, once), wanted, site)
        watches.append(watch)
        carried = {result for result, _ in inside.carry}
        for n, result in zip(inside.outs, results, strict=True):
            # What was measured in a branch or an iteration need not be what is read outside.
            if row.kind != BRANCH and n not in carried:
                tensors[eqn.outvars[n]] = result
    return watches


def _reader(eqn: Any, part: str, site: Site) -> str:
    """Returns the text on a matmul that reads a tensor as a part of it."""
    line, _ = site.lines(eqn)
    at = f" at {short(line)}" if line else ""
    return f"{part} of {eqn.primitive.name}{', backward' * site.is_derived(eqn)}{at}"


def _given(eqn: Any, inside: Inside, tensors: dict[Any, Known], once: bool) -> list[Known]:
    """Returns the tensors of the arguments of an inner program."""
    carried = {argument for _, argument in inside.carry}
    atoms = [None if n in carried else eqn.invars[i] for n, i in enumerate(inside.ins)]
    known = [tensors[a] if a is not None and _is_var(a) else {} for a in atoms]
    # Values measured inside an iteration or a branch are not known outside of it.
    return known if once else [*map(dict, known)]


def _read(eqn: Any, makers: dict[Any, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yields the 16-bit operands of an equation: a variable, its part, and the 16-bit dtype."""
    name, asked = eqn.primitive.name, eqn.params.get("half")
    need = rule_of(name).need
    if name == CAST:
        (v,), new = eqn.invars, eqn.params["new_dtype"]
        # The cast of a matmul's accumulator is measured as the result of the matmul (`_made`).
        if new in HALVES and _is_float(v) and v.aval.dtype != new and v not in makers:
            yield v, "cast", new
    elif need in (HALF, PROGRAM, UNKNOWN.need) and not is_precise(eqn):
        parts = ("lhs", "rhs") if need == HALF else ()
        for i, v in enumerate(eqn.invars):
            part = parts[i] if i < len(parts) else "operand"
            if _is_half(v):
                yield v, part, v.aval.dtype
            elif asked in HALVES and part != "operand" and _is_float(v):
                yield v, part, asked


def _made(eqn: Any, stored: set[Any], makers: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yields the 16-bit results of an equation: a variable, its maker, and the 16-bit dtype."""
    name, asked = eqn.primitive.name, eqn.params.get("half")
    if name == CAST:
        (v,), (out,) = eqn.invars, eqn.outvars
        if _is_half(out) and _is_var(v) and v in makers:
            yield out, makers[v], out.aval.dtype
    elif not _moves(eqn):
        is_matmul = rule_of(name).need == HALF
        for v in eqn.outvars:
            if _is_half(v) and (is_matmul or v in stored):
                yield v, eqn, v.aval.dtype
            elif is_matmul and asked in HALVES and _is_float(v):
                yield v, eqn, asked  # devices compute this 16-bit result at once, without the cast


def _uses(jaxpr: Any, wanted: Sequence[bool]) -> tuple[set[int], set[Any], dict[Any, Any]]:
    """Finds the uses of values, from the end of a program to its start.

    Returns:
        The numbers of the equations with a result that is read; the variables that are passed on;
        and the 16-bit matmuls whose float32 accumulators are read only by a cast to 16 bits,
        because a device returns the 16-bit result at once.
    """
    outs = [(v, want) for v, want in zip(jaxpr.outvars, wanted, strict=True) if _is_var(v)]
    readers: dict[Any, list[Any]] = {v: [] for v, _ in outs}
    stored, live = {v for v, want in outs if want}, set()
    for i, eqn in reversed([*enumerate(jaxpr.eqns)]):
        if not (eqn.effects or any(v in readers for v in eqn.outvars)):
            continue
        live.add(i)
        # What one elementwise equation reads stays in a register of its kernel. A move stores its
        # operand only if its own result is stored.
        hands_on = not is_elementwise(eqn) or (
            _moves(eqn) and any(v in stored for v in eqn.outvars)
        )
        for v in filter(_is_var, eqn.invars):
            readers.setdefault(v, []).append(eqn)
            if hands_on or len(readers[v]) > 1:
                stored.add(v)
    return live, stored, _cast_alone(jaxpr, readers, {v for v, _ in outs})


def _cast_alone(jaxpr: Any, readers: dict[Any, list[Any]], results: set[Any]) -> dict[Any, Any]:
    """Returns the 16-bit matmuls whose wide results are only read by casts to 16 bits."""
    makers = {}
    for eqn in jaxpr.eqns:
        v = eqn.outvars[0] if eqn.outvars else None
        if rule_of(eqn.primitive.name).need == HALF and all(map(_is_half, eqn.invars[:2])):
            casts = [e for e in readers.get(v, ()) if e.primitive.name == CAST]
            alone = casts and len(casts) == len(readers[v]) and v not in results
            if alone and not _is_half(v) and all(_is_half(e.outvars[0]) for e in casts):
                makers[v] = eqn
    return makers


def is_elementwise(eqn: Any) -> bool:
    """Returns whether compilers fuse an equation with its operands."""
    if is_entered(eqn):
        # jnp.where and jax.nn.relu are jits of elementwise operations, which XLA inlines and fuses.
        row = higher_order(eqn.primitive.name)
        programs = [_jax.open_jaxpr(inside.program)[0] for inside in row.wire(eqn)]
        return row.kind == CALL and all(is_elementwise(e) for p in programs for e in p.eqns)
    rule = rule_of(eqn.primitive.name)
    return rule.cost != NEVER and REDUCES not in rule.traits


def _moves(eqn: Any) -> bool:
    """Returns whether an equation only moves entries of its operands."""
    rule = rule_of(eqn.primitive.name)
    return (rule.need == MOVE and REDUCES not in rule.traits) or is_precise(eqn)


def _moved(eqn: Any) -> list[Any]:
    """Returns the operand of each result of a move; the first if it joins several."""
    if len(eqn.outvars) == len(eqn.invars):
        return list(eqn.invars)
    return [eqn.invars[0]] * len(eqn.outvars)


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, _jax.Literal)


def _is_float(atom: Any) -> bool:
    return _is_var(atom) and is_float(atom)


def _is_half(atom: Any) -> bool:
    return _is_var(atom) and is_half(atom)
