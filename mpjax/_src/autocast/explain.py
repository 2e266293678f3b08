"""`explain`: what autocast would do to a function, operation by operation, running nothing."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._src import _jax
from mpjax._src.autocast.graph import ATTENTION, ROW, Block, Op, Value, numbered
from mpjax._src.autocast.loss import check_loss, differentiated, pull_back
from mpjax._src.autocast.residuals import Kept, kept_by, storage_of
from mpjax._src.autocast.transform import Traced, call, trace
from mpjax._src.autocast.why import Reason, Why
from mpjax._src.dtypes import FLOAT32, HALVES, SPELLINGS, short_name
from mpjax._src.errors import check_callable
from mpjax._src.higher_order import turns_of
from mpjax._src.pages.data import size
from mpjax._src.policy import get_policy
from mpjax._src.reports import Report, table, where, wrapped
from mpjax._src.rules import HALF, rule_of
from mpjax._src.trees import is_array

# How many of the arrays that are kept a report's summary names.
LARGEST = 8

COMPUTES = ("f16", "bf16", "f32", "other")

# How the reason of a row of the backward pass begins.
BACKWARD = "backward "

CASTS = frozenset({"convert_element_type"})


@dataclasses.dataclass(frozen=True)
class Row:
    """One equation of the program.

    Attributes:
        primitive: Its name.
        scope: The named scopes around it, joined with "/".
        path: The paths of the parameters that feed it, joined with ", ".
        source: "file:line" of the user's code it comes from.
        before: The dtypes of its operands and results as the program was written; of a row of the
            backward pass, as they would be without autocast, and "" of a cast that would not be.
        after: The same under the plan: what it computes in, and what its results are stored in.
        reason: Why.
        flops: Of a matmul or convolution, once; 0 otherwise.
        times: How often the loops around it run it, as far as that is known.
        forward: For a row of the backward pass, the index of the forward row it comes from.
        left_alone: Whether it runs as written, for autocast does not know it or it asks for that.
        storage: What the backward pass is given in place of what the operation's derivative reads,
            such as "computed again from bf16 (rows 3)"; "" where that is kept as it is.
        attention: Of a matmul that sums values by a softmax, under ``with_fused_attention``: the
            fused kernel that runs the attention, or "xla" and why none does.
        library: "file:line" of the library that ``source`` calls for it, or "".
        bytes: Of its operands and results under the plan, of one run; 0 of a program with equations
            of its own.
    """

    primitive: str
    scope: str
    path: str
    source: str
    before: str
    after: str
    reason: str
    flops: int = 0
    times: int = 1
    forward: int | None = None
    left_alone: bool = False
    storage: str = ""
    attention: str = ""
    library: str = ""
    bytes: int = 0

    @property
    def backward(self) -> bool:
        """Whether it is an equation of the backward pass."""
        return self.reason.startswith(BACKWARD)

    @property
    def computes_in(self) -> str:
        """What it computes in, one of `COMPUTES`."""
        return computed_in(self.after)

    @property
    def where(self) -> str:
        """Where it stands, for people: its scope, or else its line."""
        return self.scope or where(self.source, self.library)


@dataclasses.dataclass(frozen=True)
class CastReport(Report):
    """What autocast does to a function. ``print`` it, or read `rows`.

    Attributes:
        rows: One `Row` per equation, those of nested programs included; then, where gradients were
            asked for, one per equation of the backward pass. `compare` and `find_nonfinite` number
            operations by their position here.
        half_flops: The share of matmul and convolution FLOPs that run on half operands.
        casts: How many casts the rewrite inserts.
        cast_bytes: The bytes that these casts read and write.
        stored_before: Bytes kept from the forward to the backward pass by the program as written.
        stored_after: The same under the plan. Both are None without gradients.
        kept: The arrays that make up the latter, the largest first.
        wide: What is differentiated and read in float32, by path, with the first row that does: of
            this, devices that hold parts send each other float32. Empty without gradients.
    """

    rows: tuple[Row, ...]
    half_flops: float
    casts: int
    cast_bytes: int
    stored_before: int | None = None
    stored_after: int | None = None
    kept: tuple[Kept, ...] = ()
    wide: tuple[tuple[str, int], ...] = ()

    _drawn_by = "mpjax._src.autocast.explain_page"

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, ready for JSON."""
        return dataclasses.asdict(self)

    def calls(self) -> dict[str, dict[str, int]]:
        """Returns how many equations of each primitive compute in each dtype."""
        found: dict[str, dict[str, int]] = {}
        for row in self.rows:
            counts = found.setdefault(row.primitive, dict.fromkeys(COMPUTES, 0))
            counts[row.computes_in] += 1
        return found

    def counts(self) -> list[tuple[str, ...]]:
        """Returns `calls` as text, without what computes in no floating dtype."""
        return [
            (name, *(str(cells[dtype] or "") for dtype in COMPUTES))
            for name, cells in sorted(self.calls().items())
            if sum(cells.values()) > cells["other"]
        ]

    def shortfalls(self) -> list[Row]:
        """Returns the rows of matmuls left in float32, and of operations left alone."""
        return [
            row
            for row in self.rows
            if (rule_of(row.primitive).need == HALF and row.computes_in == "f32") or row.left_alone
        ]

    def summary(self) -> list[str]:
        """Returns the report's totals as lines of text."""
        lines = [
            f"{self.half_flops:.1%} of matmul FLOPs in half; "
            f"{self.casts} casts inserted, moving {size(self.cast_bytes)}"
        ]
        scopes = (scope for row in self.rows for scope in row.scope.split("/"))
        taken = [s.removeprefix(ATTENTION) for s in scopes if s.startswith(ATTENTION)]
        taken += [row.attention for row in self.rows if row.attention]
        lines += [f"attention: {kernel}" for kernel in dict.fromkeys(taken)]
        if self.stored_before is not None and self.stored_after is not None:
            lines.append(
                f"stored for the backward pass: {size(self.stored_before)} as written, "
                f"{size(self.stored_after)} under the plan"
            )
            lines += [f"  {self._where(kept)}" for kept in self.kept[:LARGEST]]
        if self.wide:
            lines.append("read, and sent between devices, in float32:")
            rows = [(path, self.rows[index], index) for path, index in self.wide]
            lines += [f"  {p}: {row.primitive}, {row.reason} (row {i})" for p, row, i in rows]
        return lines

    def _where(self, kept: Kept) -> str:
        row = None if kept.row is None else self.rows[kept.row]
        shape = ",".join(map(str, kept.shape))
        place = f" {row.primitive} {row.where} (row {kept.row})" if row else ""
        return f"{size(kept.bytes)}: {kept.dtype}[{shape}]{place}"

    def __str__(self) -> str:
        lines = [wrapped(line, 4) for line in self.summary()]
        counts = self.counts()
        if counts:
            lines += ["", *table(("op", *COMPUTES), counts, words=("op",))]
        short = self.shortfalls()
        if short:
            lines += ["", "fell short:"]
            lines += [
                wrapped(
                    f"  {row.primitive} ({row.before} -> {row.after}) {row.where}: {row.reason}", 4
                )
                for row in short
            ]
        return "\n".join(lines)


def explain(
    fun: Callable[..., Any],
    policy: Any,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
) -> Callable[..., CastReport]:
    """Reports what `autocast` does to a function, running nothing.

    Args:
        fun: As for `autocast`.
        policy: As for `autocast`.
        argnums: If given, the report is on ``jax.value_and_grad(autocast(fun), argnums)``, the
            program that trains; rows of the backward pass name the forward row they come from.
        has_aux: As for `jax.value_and_grad`.

    Returns:
        A function of the same arguments, which may be abstract (`jax.ShapeDtypeStruct`), that
        returns a `CastReport`.

    Raises:
        TypeError: If ``fun`` is not a function; with ``argnums``, if it returns no scalar loss.
        ValueError: As for `autocast`; if ``argnums`` are no positions of floating arguments.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> explained = mpjax.explain(loss, "mixed_bfloat16", argnums=0)
        >>> report = explained(jnp.ones((4, 2)), jnp.ones((3, 4)))
        >>> report.half_flops
        1.0
        >>> [row.reason for row in report.rows if row.primitive == "dot_general"][0]
        'half list, float32 result for its float32 readers'
    """
    check_callable(fun, "explain: fun")
    policy = get_policy(policy)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        traced = trace(fun, policy, args, kwargs)
        storage = storage_of(traced.plan.block)
        forward = [
            _row(op, times, storage.get(op, "")) for op, times in numbered(traced.plan.block)
        ]
        written = _jax.open_jaxpr(traced.jaxpr)[0]
        if argnums is None:
            new = _jax.trace(lambda *xs: call(traced, list(xs)), traced.avals, "explain")
            inserted = _casts(_jax.open_jaxpr(new)[0]) - _casts(written)
            return CastReport(
                tuple(forward), _half_share(_jax.open_jaxpr(new)[0]), *_totals(inserted)
            )
        active = differentiated("explain", args, kwargs, argnums)
        check_loss("explain", traced.returned(), has_aux)
        return _with_gradients(traced, forward, active, has_aux)

    return wrapped


def _with_gradients(traced: Traced, forward, active, has_aux) -> CastReport:
    """Completes a report with the backward pass of ``value_and_grad``."""

    def new(*arrays):
        return traced.rebuild(call(traced, list(arrays), rows=True))

    def old(*arrays):
        return traced.rebuild(_jax.eval_closed(traced.jaxpr, *arrays))

    def gradient(run, avals):
        def flat(*arrays):
            pulled = pull_back(run, active, arrays, has_aux)
            return [pulled.loss, *pulled.gradients()]

        return _jax.open_jaxpr(_jax.trace(flat, avals, "explain"))[0]

    def stored(run, avals):
        def flat(*arrays):
            residuals = pull_back(run, active, arrays, has_aux).residuals
            return [x for x in jax.tree.leaves(residuals) if is_array(x)]

        return kept_by(_jax.open_jaxpr(_jax.trace(flat, avals, "explain"))[0])

    written = _jax.in_avals(traced.jaxpr)
    after, before = gradient(new, traced.avals), gradient(old, written)
    backward = list(_backward_rows(after, forward))
    as_written, kept = stored(old, written), stored(new, traced.avals)
    return CastReport(
        (*forward, *backward),
        _half_share(after),
        *_totals(_casts(after) - _casts(before)),
        sum(array.bytes for array in as_written),
        sum(array.bytes for array in kept),
        tuple(kept),
        tuple(_read_wide(traced.plan.block, active).items()),
    )


def _read_wide(block: Block, active: Sequence[bool]) -> dict[str, int]:
    """Returns the paths that some operation reads in float32, each with the number of the first."""
    arguments = zip(block.invars, active, strict=True)
    trained = {path for value, yes in arguments if yes for path in value.paths if path}
    found: dict[str, int] = {}
    for index, (op, _) in enumerate(numbered(block)):
        # Views move it, and programs are looked into; a lookup sends what the plan rounds.
        if op.rule in ("layout", "program", "cast") or op.sent_half or op.compute in HALVES:
            continue
        given = [value for value in op.ins if value.is_f32 and value.given]
        for path in trained.intersection(path for value in given for path in value.paths):
            found.setdefault(path, index)
    return found


# ---- rows ---------------------------------------------------------------------------------------


WORDS = {
    Reason.HALF_ROW: "half list",
    Reason.FULL_ROW: "full list",
    Reason.FULL_INSIDE: "full list inside",
    Reason.OPERANDS: "follows its operands",
    Reason.GIVES_NO_FLOAT: "gives no float",
    Reason.NO_FLOAT32: "no float32",
    Reason.PROGRAM: "program inside",
    Reason.OWN_RULE: "a program with a rule of its own",
    Reason.UNKNOWN: "unknown operation, left alone",
    Reason.FLOAT32_KERNEL: "a kernel left in float32: half_inputs would let it run in half",
    Reason.NO_ROW: "not known, left in float32: register_rule makes a primitive known, and "
    "half_inputs lets a kernel run in half",
    Reason.CAST: "the program's own cast",
    Reason.PRECISION: "explicit precision {}, left as written",
    Reason.WRITTEN: "left as written",
    Reason.LISTED: "{} list of the policy",
    Reason.OVERRIDE: 'override "{}"',
    Reason.REGION: "region {}",
    Reason.INNER_AUTOCAST: "planned by an inner autocast",
    Reason.KERNEL: "half_inputs of {}, which runs as written",
    Reason.FLOAT32_POLICY: "the policy computes in float32",
    Reason.HALF_OPERAND: "follows a half operand",
    Reason.FULL_OPERAND: "follows a float32 operand",
    Reason.CONSTANT: "constant {:g} does not survive {}",
    Reason.OF_CONSTANTS: "an operand is made of constants that do not survive {}",
    Reason.INTEGERS: "made from integers",
    Reason.POSITIONS: "positions or the like, which {} would merge",
    Reason.SPECIAL: "a special function of a half operand",
    Reason.FLATTENS: "its derivative is a difference, which half would lose",
    Reason.FULL_READERS: "read by float32 operations",
    Reason.WIDE_RESULT: "half list, float32 result for its float32 readers",
    Reason.AMPLIFIED: "a float32 operation would amplify its rounding",
    Reason.SHORT_SUM: "a short sum whose error a float32 operation would amplify",
    Reason.SOLUTION: "added to what a loop that was left alone solved for, and amplified",
    Reason.LOST: "half would lose what it adds, or its range",
    Reason.ENDS_LOOP: "a float32 comparison that depends on a matmul ends this loop, left alone",
    Reason.REPEATS_LOOP: "its backward rule may repeat what a loop inside decides, left alone",
    Reason.REPLAYS_LOOP: "it may decide again what a loop that was left alone did, left alone",
}


def words(why: Why) -> str:
    """Returns a reason in words."""
    return WORDS[why.reason].format(*why.about)


def _row(op: Op, times: int, storage: str) -> Row:
    paths = dict.fromkeys(path for v in op.ins for path in v.paths if path)
    source, library = op.lines
    computes = [_after(v, op.compute if op.rule != "program" else v.dtype) for v in op.ins]
    return Row(
        op.name,
        "/".join(op.scopes),
        ", ".join(paths),
        source,
        _signature([_name(v.aval) for v in op.ins], [_name(v.aval) for v in op.outs]),
        _signature(computes, [_after(v, v.dtype) for v in op.outs]),
        words(op.why),
        flops_of(op.eqn),
        times,
        left_alone=op.left_alone,
        storage=storage,
        attention=op.attention,
        library=library,
        bytes=0 if op.rule == "program" else sum(map(_held, (*op.ins, *op.outs))),
    )


def computed_in(signature: str) -> str:
    """Returns which of `COMPUTES` an operation computes in, by dtypes such as "bf16,f32->f32"."""
    operands, _, results = signature.partition("->")
    found = set(COMPUTES) & set((operands or results).split(","))
    found = found or set(COMPUTES) & set(results.split(","))
    return next((name for name in ("f32", "bf16", "f16") if name in found), "other")


def _held(value: Value) -> int:
    """Returns the bytes of a value in the dtype that the plan stores it in."""
    narrow = value.is_f32 and value.dtype is not None
    return (
        _jax.size_of(value.aval.shape) * np.dtype(value.dtype).itemsize
        if narrow
        else _bytes(value.aval)
    )


def _after(value: Value, dtype: Any) -> str:
    if value.is_f32:
        return SPELLINGS.get(np.dtype(dtype or value.dtype or FLOAT32), ("f32",))[0]
    return _name(value.aval)


def _name(aval: Any) -> str:
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return str(aval)
    return short_name(dtype)


def _signature(ins: Sequence[str], outs: Sequence[str]) -> str:
    return f"{','.join(dict.fromkeys(ins))}->{','.join(dict.fromkeys(outs))}"


def _backward_rows(jaxpr: Any, forward: Sequence[Row]) -> Iterator[Row]:
    for eqn, stack, times in _walk(jaxpr):
        numbers = [s for s in stack.scopes if s.startswith(ROW)]
        if "transpose" not in stack.transforms:
            continue
        index = int(numbers[-1].removeprefix(ROW)) if numbers else None
        origin = forward[index] if index is not None else None
        dtypes = _signature(
            [_name(v.aval) for v in eqn.invars], [_name(v.aval) for v in eqn.outvars]
        )
        values = () if _jax.inner_jaxprs(eqn) else (*eqn.invars, *eqn.outvars)
        where = f"of row {index}, {origin.primitive}" if origin else "of no row"
        lines = (origin.source, origin.library) if origin else _jax.source_lines(eqn)
        yield Row(
            eqn.primitive.name,
            origin.scope if origin else "",
            origin.path if origin else "",
            lines[0],
            _as_written(eqn.primitive.name, dtypes, origin),
            dtypes,
            BACKWARD + where,
            flops_of(eqn),
            times,
            index,
            library=lines[1],
            bytes=sum(_bytes(v.aval) for v in values),
        )


def _as_written(primitive: str, dtypes: str, origin: Row | None) -> str:
    """Returns the dtypes of a backward equation without the plan: half where the program is."""
    own = origin.before if origin else ""
    for half in ("bf16", "f16"):
        dtypes = dtypes if half in own else dtypes.replace(half, "f32")
    ins, _, outs = dtypes.partition("->")
    if ins == outs and primitive in CASTS:
        return ""
    return _signature(ins.split(","), outs.split(","))


@dataclasses.dataclass(frozen=True)
class _Stack:
    scopes: tuple[str, ...] = ()
    transforms: tuple[str, ...] = ()


def _walk(
    jaxpr: Any, stack: _Stack = _Stack(), times: int = 1
) -> Iterator[tuple[Any, _Stack, int]]:
    """Yields every equation with the scopes and transformations, and the loops, around it."""
    for eqn in jaxpr.eqns:
        names = eqn.source_info.name_stack
        here = _Stack(
            stack.scopes + _jax.scope_names(names), stack.transforms + _jax.transforms(names)
        )
        yield eqn, here, times
        for inner in _jax.inner_jaxprs(eqn):
            yield from _walk(inner, here, times * turns_of(eqn))


# ---- totals -------------------------------------------------------------------------------------


def flops_of(eqn: Any) -> int:
    """Returns the floating-point operations of a matmul or convolution."""
    if not eqn.outvars:
        return 0
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = [eqn.invars[0].aval.shape[d] for d in contracted]
        return 2 * _jax.size_of((*out.shape, *depth))
    if name == "ragged_dot_general":
        return 2 * _jax.size_of((*out.shape, eqn.invars[0].aval.shape[-1]))
    if name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernel = eqn.invars[1].aval.shape
        per_output = [size for d, size in enumerate(kernel) if d != numbers.rhs_spec[0]]
        return 2 * _jax.size_of((*out.shape, *per_output))
    return 0


def _half_share(jaxpr: Any) -> float:
    total = half = 0
    for eqn, _, times in _walk(jaxpr):
        if rule_of(eqn.primitive.name).need == HALF:
            flops = flops_of(eqn) * times
            total += flops
            dtypes = {getattr(v.aval, "dtype", None) for v in eqn.invars[:2]}
            half += flops if dtypes <= set(HALVES) else 0
    return half / total if total else 1.0


def _casts(jaxpr: Any) -> "collections.Counter[int]":
    """Counts the casts between float32 and half of a program by the bytes they move."""
    found: collections.Counter[int] = collections.Counter()
    for eqn, _, times in _walk(jaxpr):
        if eqn.primitive.name in CASTS:
            old, new = eqn.invars[0].aval, eqn.outvars[0].aval
            dtypes = {old.dtype, new.dtype}
            if FLOAT32 in dtypes and dtypes & set(HALVES):
                found[(_bytes(old) + _bytes(new)) * times] += 1
    return found


def _totals(casts: "collections.Counter[int]") -> tuple[int, int]:
    return sum(casts.values()), sum(size * count for size, count in casts.items())


def _bytes(aval: Any) -> int:
    dtype = getattr(aval, "dtype", None)
    size = getattr(dtype, "itemsize", 0)
    return _jax.size_of(getattr(aval, "shape", (0,))) * size
