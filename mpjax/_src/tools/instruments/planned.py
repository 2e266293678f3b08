"""The rows of a program that sees its derivative, read off what runs.

The equations of the function are numbered before it is planned. JAX carries the numbers on to the
derivative, so each equation that runs says which row it belongs to.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpjax._src.core.autocast.transform import Traced, call
from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import FLOAT32, HALVES, is_float, short_name
from mpjax._src.core.base.higher_order import CALL, higher_order, turns_of
from mpjax._src.core.base.higher_order import PLANNED as PROGRAMS
from mpjax._src.core.base.lines import where
from mpjax._src.core.base.public import public
from mpjax._src.core.planner.exceptions import ALL_FULL, ENDS, SOLVES
from mpjax._src.core.planner.rounding import no_faster
from mpjax._src.core.program.graph import KERNEL, PLANNED, REGION, Op
from mpjax._src.core.program.interpret import is_precise
from mpjax._src.core.program.site import ROOT, Site
from mpjax._src.tools.instruments.rows import Row, is_frame, name_of, signature, signature_of


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Kept:
    """An array that is kept from the forward to the backward pass.

    Attributes:
        dtype: The short name of its dtype, such as "bf16".
        shape: Its shape. For a value of a loop, the shape for all iterations together.
        bytes: Its size in bytes.
        row: The index of the row that computed it, or None if no row did.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    row: int | None


class Running(NamedTuple):
    """An equation of a program that runs."""

    eqn: Any
    site: Site
    times: int  # how often it runs, as far as that is known
    back: bool  # whether the backward pass runs it


def running(
    jaxpr: Any, site: Site = ROOT, times: int = 1, back: bool | None = None
) -> Iterator[Running]:
    """Yields every equation of an open jaxpr and of the programs inside, but not of kernels."""
    for eqn in jaxpr.eqns:
        here = site.at(eqn)
        part = here.backward if back is None else back
        # An equation that holds a planned program has no row: it only says which pass runs it.
        inside = part if eqn.primitive.name in PROGRAMS else back
        if inside is back:
            yield Running(eqn, here, times, part)
        for inner in () if is_kernel(eqn) else _jax.inner_jaxprs(eqn):
            yield from running(inner, here.inside(eqn), times * turns_of(eqn), inside)


def is_kernel(eqn: Any) -> bool:
    """Returns whether an equation is a kernel, whose program no plan enters."""
    name = eqn.primitive.name
    return rules.rule_of(name).need == rules.PROGRAM and not higher_order(name).kind


def is_added(eqn: Any) -> bool:
    """Returns whether an equation moves values between dtypes or passes, and computes nothing."""
    return is_cast(eqn) or eqn.primitive.name == "optimization_barrier"


def is_for_compilers(eqn: Any) -> bool:
    """Returns whether an equation tells compilers what they may not change, and does nothing."""
    return is_added(eqn) and eqn.primitive.name != "convert_element_type"


def rows_of(traced: Traced, jaxpr: Any, kept: Sequence[Kept] = ()) -> Iterator[Row]:
    """Yields the rows of the function's own operations.

    Args:
        traced: The function.
        jaxpr: The program that runs, open.
        kept: What it keeps for the backward pass.
    """
    ran = _by_row(jaxpr)
    if any(i not in ran for i, _ in enumerate(traced.outline.numbered)):
        # What a rule or an equal operation stands for runs where nothing is differentiated.
        ran = _by_row(forward_of(traced)) | ran
    told = {} if traced.as_written else traced.with_rows.program.exceptions.reasons
    storage, rounded = _storage(jaxpr, kept), rounded_for(jaxpr)
    changed = traced.replaced
    within: dict[Op, Op] = {}
    for i, (op, times) in enumerate(traced.outline.numbered):
        group = ran.get(i, ())
        own = _own(op, group)
        reason, left_alone = _reason(op, told.get(i, ""), traced, own)
        if left_alone or reason == SOLVES:
            within.update(dict.fromkeys((o for s in op.subs for o in s.program.walk()), op))
        if op in within:
            around = within[op]
            reason = f"inside the {around.name} of {where(*around.lines)}, left unchanged"
        count = max((rounded.get(id(eqn), 0) for eqn in own), default=0)
        texts = changed.instead.get(op), *storage.get(i, ()), for_readers(count)
        half = traced.outline.rulings[op].half if op in changed.instead else None
        ends = () if op.subs and not op.inside.one_operation else itertools.chain(*_ends(group))
        source, library = op.lines
        yield Row(
            primitive=op.name,
            scope="/".join(op.scopes),
            path=", ".join(dict.fromkeys(path for v in op.ins for path in v.paths if path)),
            source=source,
            before=signature_of(op.ins, op.outs),
            after=_after(op, own, half),
            reason=reason,
            flops=_jax.flops_of(op.eqn),
            times=times,
            left_alone=left_alone,
            storage="; ".join(filter(None, texts)),
            attention=changed.attention.get(op, ""),
            loss=changed.losses.get(op, ""),
            library=library,
            bytes=sum(_jax.bytes_of(v.aval) for v in ends if not isinstance(v, _jax.Literal)),
        )


def forward_of(traced: Traced) -> Any:
    """Returns the program that runs where nothing is differentiated, open."""
    jaxpr = _jax.trace(lambda *xs: call(traced, list(xs), rows=True), traced.avals, "explain")
    return _jax.open_jaxpr(jaxpr)[0]


def _by_row(jaxpr: Any) -> dict[int, list[Any]]:
    """Returns the equations of the forward pass by their rows."""
    found: dict[int, list[Any]] = collections.defaultdict(list)
    for eqn, site, _, back in running(jaxpr):
        if not back and site.op is not None:
            found[site.op].append(eqn)
    return found


def _own(op: Op, group: Sequence[Any]) -> list[Any]:
    """Returns the equations of a row that compute its results."""
    # The plan may run other operations instead; the casts and barriers around are not its work.
    same = [eqn for eqn in group if eqn.primitive.name == op.name]
    return same or [eqn for eqn in group if not is_added(eqn)]


def _after(op: Op, own: Sequence[Any], half: Any) -> str:
    """Returns the dtypes of an operation as it runs, or of one that another runs in ``half``."""
    ins, outs = _ends(own)
    if half is not None and op.spec.need == rules.HALF:
        return signature([short_name(half)], [*map(name_of, _alike(outs, op.outs))] or ["f32"])
    if not own:
        return signature_of(op.ins, op.outs)
    return signature_of(_alike(ins, op.ins) or ins, _alike(outs, op.outs) or outs)


def _ends(group: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns what equations read that they do not make, and what they make and do not read."""
    made = {id(v) for eqn in group for v in eqn.outvars}
    read = {id(v) for eqn in group for v in eqn.invars}
    ins = {id(v): v for eqn in group for v in eqn.invars if id(v) not in made}
    outs = {id(v): v for eqn in group for v in eqn.outvars if id(v) not in read}
    return [*ins.values()], [*outs.values()]


def _alike(values: Sequence[Any], as_written: Sequence[Any]) -> list[Any]:
    """Returns the values that are arrays of the program as it is written, in any float dtype."""
    known = {(str(v.aval.shape), is_float(v)) for v in as_written if hasattr(v.aval, "shape")}
    return [v for v in values if (str(getattr(v.aval, "shape", "")), is_float(v)) in known]


# ---- reasons ------------------------------------------------------------------------------------

NEEDS = {
    rules.FULL: "float32: only matmuls are rounded",
    rules.FOLLOW: "float32: only matmuls are rounded",
    rules.COMPARE: "its results are not floats",
    rules.MOVE: "follows its operands",
}
MATMUL = "16-bit list"
PROGRAM = "a program, whose operations have their own rows"
OWN_RULE = "a program with its own derivative rule"
NO_ROW = (
    "a primitive without a rule, left in float32; mpjax.register_rule adds a rule, and "
    "mpjax.half_inputs runs a kernel in 16 bits"
)
LEFT_KERNEL = "a kernel left in float32; mpjax.half_inputs would run it in 16 bits"


def _reason(op: Op, told: str, traced: Traced, own: Sequence[Any]) -> tuple[str, bool]:
    """Returns why a row has its dtype, and whether it runs unchanged although no one asked."""
    if op.kernel:
        name = op.kernel.removeprefix(KERNEL).partition("#")[0]
        return f"inside the kernel {name} (half_inputs), left unchanged", False
    if PLANNED in op.scopes:
        return "planned by an inner autocast", False
    if not op.has_float32 and not op.subs:
        return "no float32 operands or results", False
    if told:
        return told, told == ENDS
    region = next((name for name in reversed(op.scopes) if name.startswith(REGION)), "")
    if region and not op.subs and op.spec.need not in (rules.MOVE, rules.COMPARE):
        return f"region {region.removeprefix(REGION)}", False
    if op.subs and not (op.inside.one_operation and own):
        return OWN_RULE if op.inside.backward or op.inside.one_operation else PROGRAM, False
    replaced = op in traced.replaced.instead
    if not own and not replaced and op.name != "convert_element_type":
        return "no result needs it: it does not run", False
    if op.spec.need == rules.HALF:
        return (MATMUL, False) if replaced else _of_matmul(op, traced, own)
    if op.name == "convert_element_type":
        return "a cast in the program itself", False
    if op.spec is rules.UNKNOWN:
        return NO_ROW, True
    if op.spec.need == rules.PROGRAM:
        return LEFT_KERNEL, True
    if traced.as_written and op.spec.need in (rules.FULL, rules.FOLLOW):
        return ALL_FULL, False
    need = rules.FOLLOW if op.subs else op.spec.need
    if need in (rules.FULL, rules.FOLLOW) and reads_half(own):  # what is exact in 16 bits
        need = rules.MOVE
    return NEEDS.get(need, "unknown operation, left unchanged"), need not in NEEDS


def reads_half(group: Sequence[Any]) -> bool:
    """Returns whether equations read no float but 16-bit ones."""
    floats = {v.aval.dtype for eqn in group for v in eqn.invars if is_float(v)}
    return bool(floats) and floats <= {*HALVES}


def _of_matmul(op: Op, traced: Traced, own: Sequence[Any]) -> tuple[str, bool]:
    precision = _jax.own_precision(op.params)
    half = reads_half(own)
    if precision is not None and precision != _jax.default_precision() and not half:
        return f"explicit precision {precision}, left unchanged", True
    if traced.as_written:
        return ALL_FULL, False
    if not half and (what := no_faster(op)):
        return f"float32: {what} are no faster in 16 bits", False
    if not half:
        return "left unchanged", True
    wide = own[0].outvars[0].aval.dtype == FLOAT32
    return f"{MATMUL}, float32 result" if wide else MATMUL, False


# ---- what is kept, computed again, rounded ------------------------------------------------------

# Primitives whose results are their operands.
SAME = {"name", "stop_gradient", "optimization_barrier", "gpu_barrier"}


def kept_by(jaxpr: Any) -> list[Kept]:
    """Returns the arrays that a program keeps for a backward pass, largest first.

    Args:
        jaxpr: A program, open, whose results are the residuals of the backward pass. Residuals that
            are its arguments or constants take no additional memory and are left out.
    """
    known = sources_of(jaxpr)
    inputs = {*jaxpr.invars, *jaxpr.constvars}
    first: dict[Any, Any] = {}  # of the residuals that have the same array
    for v in jaxpr.outvars:
        if not isinstance(v, _jax.Literal) and known[v].array not in inputs:
            first.setdefault(known[v].array, v)
    arrays = []
    for v in first.values():
        if not known[v].constant:
            row = known[v].row
            size, shape = _jax.bytes_of(v.aval), tuple(v.aval.shape)
            arrays.append(Kept(short_name(v.aval.dtype), shape, size, row))
    return sorted(arrays, key=lambda kept: -kept.bytes)


def is_cast(eqn: Any) -> bool:
    """Returns whether an equation passes on a value in another dtype, or what was cast."""
    return eqn.primitive.name == "convert_element_type" or is_precise(eqn)


class Source(NamedTuple):
    """Where a value of a program comes from."""

    # The first variable that has its array, which compilers do not copy; with the calls around it,
    # because JAX shares one jaxpr among equal calls, whose arrays are others. None for a literal.
    array: Any
    origin: Any  # the number of the row that made it, or the argument of the program that it is
    constant: bool = False  # whether it depends on literals alone, as zeros do, which are not kept

    @property
    def row(self) -> int | None:
        """The number of the row that made it."""
        return self.origin if isinstance(self.origin, int) else None


def sources_of(jaxpr: Any) -> dict[Any, Source]:
    """Returns where each variable of an open jaxpr comes from."""
    known = {v: Source(v, v) for v in (*jaxpr.invars, *jaxpr.constvars)}

    def source(atom: Any) -> Source:
        return Source(None, None) if isinstance(atom, _jax.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        ins = [*map(source, eqn.invars)]
        constant = eqn.primitive.name == _jax.CARRIER or all(v.array is None for v in ins)
        origin = _own_origin(eqn, ins)
        made = [Source(v, origin, constant) for v in eqn.outvars]
        if eqn.primitive.name in SAME or is_precise(eqn):
            made = [m._replace(array=v.array or m.array) for m, v in zip(made, ins, strict=False)]
        for inner in reversed(_jax.inner_jaxprs(eqn)):
            if len(inner.outvars) == len(eqn.outvars):
                inside = sources_of(inner)
                for i, v in enumerate(inner.outvars):
                    if not isinstance(v, _jax.Literal):
                        made[i] = _from_inside(eqn, inner, ins, inside[v], made[i])
        known.update(zip(eqn.outvars, made, strict=True))
    return known


def _own_origin(eqn: Any, ins: Sequence[Source]) -> Any:
    """Returns the origin of what an equation makes itself."""
    # A cast belongs to the row of what it casts. An equation without a row, such as a broadcast
    # that JAX adds, belongs to the row of its only operand.
    number = ROOT.at(eqn).op
    read = [v for v in ins if v.array is not None]
    if is_cast(eqn) and read and read[0].row is not None:
        return read[0].origin
    return read[0].origin if number is None and len(read) == 1 else number


def _from_inside(
    eqn: Any, inner: Any, ins: Sequence[Source], inside: Source, outside: Source
) -> Source:
    """Returns the source of a result of an equation, from that of a result of a program in it."""
    operands = dict(zip(inner.invars, ins, strict=False)) if len(inner.invars) == len(ins) else {}
    array, origin = outside.array, outside.origin
    if higher_order(eqn.primitive.name).kind == CALL and operands:
        array = (
            operands[inside.array].array if inside.array in operands else (id(eqn), inside.array)
        )
    if inside.row is not None or inside.origin in operands:
        origin = operands[inside.origin].origin if inside.row is None else inside.row
    return Source(array, origin, outside.constant or inside.constant)


def _storage(jaxpr: Any, kept: Sequence[Kept]) -> dict[int, list[str]]:
    """Returns what is kept and computed again of each row, in words."""
    texts: dict[int, list[str]] = collections.defaultdict(list)
    dtypes: dict[int, set[str]] = collections.defaultdict(set)
    for array in kept:
        if array.row is not None:
            dtypes[array.row].add(array.dtype)
    for row, names in dtypes.items():
        texts[row].append(f"kept in {', '.join(sorted(names))}")
    for row, sources in recomputed_rows(jaxpr).items():
        others = ", ".join(map(str, sorted(sources - {row})))
        word = "rows" if len(sources - {row}) > 1 else "row"
        texts[row].append(f"computed again from {word} {others}" if others else "computed again")
    return texts


def recomputed_rows(jaxpr: Any) -> dict[int, set[int]]:
    """Returns the rows that the backward pass recomputes, and the kept rows they come from."""
    found: dict[int, set[int]] = collections.defaultdict(set)
    known = sources_of(jaxpr)
    for eqn in jaxpr.eqns:
        site = ROOT.at(eqn)
        if eqn.primitive.name in PROGRAMS and site.backward:
            read = [None if isinstance(v, _jax.Literal) else known[v].row for v in eqn.invars]
            given = [NOTHING if row is None else frozenset({row}) for row in read]
            (inside,) = higher_order(eqn.primitive.name).wire(eqn)
            _follow(inside.program, given, site, found)
    return found


Rows = frozenset[int]
NOTHING: Rows = frozenset()


def _follow(program: Any, given: Sequence[Rows], site: Site, found: dict[int, set[int]]) -> None:
    """Follows kept values through what is computed again in a program."""
    jaxpr, _ = _jax.open_jaxpr(program)
    known: dict[Any, Rows] = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        here = site.at(eqn)
        each = [
            NOTHING if isinstance(v, _jax.Literal) else known.get(v, NOTHING) for v in eqn.invars
        ]
        for inside in higher_order(eqn.primitive.name).wire(eqn):
            _follow(inside.program, [each[i] for i in inside.ins], here, found)
        union = NOTHING.union(*each)
        if here.again and here.op is not None and not is_added(eqn):
            found[here.op] |= union
        # A barrier returns its operands one by one, which others mix.
        if len(each) == len(eqn.outvars) and eqn.primitive.name == "optimization_barrier":
            known.update(zip(eqn.outvars, each, strict=True))
        elif here.again or is_added(eqn):
            known.update(dict.fromkeys(eqn.outvars, union))


def rounded_for(jaxpr: Any) -> dict[int, int]:
    """Returns the equations, by their ids, whose float32 results are rounded for all who read them.

    With each is the number of these readers: other equations than casts.
    """
    found: dict[int, int] = {}
    for inner in (i for eqn in jaxpr.eqns for i in _jax.inner_jaxprs(eqn)):
        found |= rounded_for(inner)
    readers: dict[Any, list[Any]] = collections.defaultdict(list)
    for eqn in jaxpr.eqns:
        for v in eqn.invars:
            if not isinstance(v, _jax.Literal):
                readers[v].append(eqn)
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        maker = makers.get(eqn.invars[0]) if casts(eqn, FLOAT32) else None
        if maker is not None and not is_added(maker):
            low, wide = _reading(eqn.outvars[0], readers)
            # A matmul casts its operands in any case. Only readers in float32 show that the value
            # itself is rounded.
            if wide:
                found[id(maker)] = len(low) + len(wide)
    return found


def _reading(v: Any, readers: Mapping[Any, Sequence[Any]]) -> tuple[list[Any], list[Any]]:
    """Returns the equations that read a 16-bit value as it is, and its float32 form."""
    low: list[Any] = []
    wide: list[Any] = []
    for eqn in readers.get(v, ()):
        if is_precise(eqn):
            more = _reading(eqn.outvars[0], readers)
            low, wide = low + more[0], wide + more[1]
        elif casts(eqn, *HALVES):
            wide += readers.get(eqn.outvars[0], ())
        else:
            low.append(eqn)
    return low, wide


def casts(eqn: Any, *dtypes: Any) -> bool:
    """Returns whether an equation casts a variable of one of some dtypes."""
    if eqn.primitive.name != "convert_element_type" or isinstance(eqn.invars[0], _jax.Literal):
        return False
    return eqn.invars[0].aval.dtype in dtypes


def for_readers(count: int) -> str:
    """Says that a value is rounded once for its readers, or "" without any."""
    return "" if not count else f"rounded for {count} reader{'s' * (count > 1)}"


def read_wide(traced: Traced, rows: Sequence[Row], active: Sequence[bool]) -> dict[str, int]:
    """Returns the paths of differentiated arguments that are read in float32, and the first row."""
    plan = traced.outline
    arguments = zip(plan.block.invars, active, strict=True)
    trained = {path for value, yes in arguments if yes for path in value.paths if path}
    found: dict[str, int] = {}
    for i, (op, _) in enumerate(plan.numbered):
        # Views do not count, and programs are searched inside.
        moves = op.spec.need == rules.MOVE or op.name == "convert_element_type"
        if moves or is_frame(op.name) or op.inside.params or rows[i].computes_in != "f32":
            continue
        parameters = [value for value in op.ins if value.is_f32 and value.given]
        for path in trained.intersection(path for value in parameters for path in value.paths):
            found.setdefault(path, i)
    return found
