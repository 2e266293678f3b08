"""`explain`: reports what autocast does to each operation of a function, without running it."""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mpjax._src.core.autocast.transform import Traced, call, trace
from mpjax._src.core.base import _jax
from mpjax._src.core.base.contexts import constants_as_casts
from mpjax._src.core.base.devices import check_name, traced_for
from mpjax._src.core.base.dtypes import FLOAT32, HALVES
from mpjax._src.core.base.errors import brief, check_flag, whole_number
from mpjax._src.core.base.public import public
from mpjax._src.core.base.rules import HALF, rule_of
from mpjax._src.core.base.trees import is_array
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import PolicyLike
from mpjax._src.core.program.curried import takes_arguments
from mpjax._src.core.program.derived import key_of
from mpjax._src.core.program.gradient import check_loss, check_result, differentiated, pull_back
from mpjax._src.core.program.graph import ATTENTION, LOSS
from mpjax._src.core.program.site import equations
from mpjax._src.core.training.loss_scale import LossScale, resolve_loss_scale
from mpjax._src.tools.document import model
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.instruments import planned, rows
from mpjax._src.tools.instruments.calibrate import Calibration
from mpjax._src.tools.instruments.error_report import (
    ERROR,
    ErrorReport,
    ErrorRow,
    errors_of,
    tables_of,
)
from mpjax._src.tools.instruments.planned import Kept, kept_by
from mpjax._src.tools.instruments.programs import make_program, training_scale
from mpjax._src.tools.instruments.rows import Row
from mpjax._src.tools.instruments.shadows import percent

# The summary of a report names this many of the arrays kept for the backward pass.
LARGEST = 8

# The columns of a row in tables.
COLUMNS = ("row", "operation", "written", "planned", "where", "why")

BYTES = model.Color(
    "bytes",
    "The bytes of each operation's operands and results under the plan, which it would move if it "
    "ran alone. XLA fuses small operations, which then move less.",
    unit="bytes",
)
KEPT = model.Color(
    "kept",
    "The bytes of each operation's results that are stored for the backward pass.",
    unit="bytes",
)

CASTS = frozenset({"convert_element_type"})


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class CastReport(Report):
    """The report of `explain`: what autocast does to a function. ``print`` it, or read ``rows``.

    Attributes:
        rows: One row per equation, including the equations of nested programs, followed by one row
            per equation of the backward pass if ``argnums`` was given. `compare` and
            `find_nonfinite` number operations by their position in this tuple.
        half_flops: The share of matmul and convolution FLOPs that run on 16-bit operands, from 0 to
            1.
        casts: The number of casts that autocast inserts.
        cast_bytes: The bytes that these casts read and write.
        stored_before: The bytes that the original program stores from the forward to the backward
            pass. None without gradients.
        stored_after: The same under the plan. None without gradients.
        kept: The arrays that make up ``stored_after``, the largest first.
        wide: Pairs (path, row) of the differentiated arguments that an operation reads in float32,
            with the index of the first row that does. Devices that each have a part of such an
            argument exchange it in float32. Empty without gradients.
        errors: What each operation contributes to the error, if ``errors`` was given.
        calibrated: What a calibration changed and by how much the error fell, if the policy is a
            `Calibration`. The reasons of its overrides are those that it found.
    """

    rows: tuple[Row, ...]
    half_flops: float
    casts: int
    cast_bytes: int
    stored_before: int | None = None
    stored_after: int | None = None
    kept: tuple[Kept, ...] = ()
    wide: tuple[tuple[str, int], ...] = ()
    errors: ErrorReport | None = None
    calibrated: str = ""

    def calls(self) -> dict[str, dict[str, int]]:
        """Returns the number of equations by primitive and compute dtype.

        Returns:
            ``{"dot_general": {"f16": 0, "bf16": 4, "f32": 1, "other": 0}, ...}``
        """
        by_primitive: dict[str, dict[str, int]] = {}
        for row in self.rows:
            counts = by_primitive.setdefault(row.primitive, dict.fromkeys(rows.COMPUTES, 0))
            counts[row.computes_in] += 1
        return by_primitive

    def counts(self) -> list[tuple[str, ...]]:
        """Returns `calls` as rows of text, without primitives that compute nothing in a float."""
        return [
            (name, *(str(cells[dtype] or "") for dtype in rows.COMPUTES))
            for name, cells in sorted(self.calls().items())
            if sum(cells.values()) > cells["other"] and not rows.is_frame(name)
        ]

    def shortfalls(self) -> list[Row]:
        """Returns the rows of matmuls that run in float32 and of operations left unchanged.

        Operations that read no floating array, such as one that computes floats from random bits,
        have nothing to cast and are left out.
        """
        return [row for row in self.rows if _falls_short(row)]

    def summary(self) -> list[str]:
        """Returns the report's totals as lines of text."""
        used = {row.computes_in for row in self.rows if row.flops}
        halves = " and ".join(model.DTYPES[name] for name in ("bf16", "f16") if name in used)
        lines = [
            f"{self.half_flops:.1%} of matmul FLOPs run in {halves or '16 bits'}; "
            f"{self.casts} casts inserted, moving {model.size(self.cast_bytes)}"
        ]
        scopes = dict.fromkeys(scope for row in self.rows for scope in row.scope.split("/"))
        for name, mark in (("attention", ATTENTION), ("loss", LOSS)):
            taken = [s.removeprefix(mark) for s in scopes if s.startswith(mark)]
            taken += [text for row in self.rows if (text := getattr(row, name))]
            lines += [f"{name}: {text}" for text in dict.fromkeys(taken)]
        if self.stored_before is not None and self.stored_after is not None:
            lines.append(
                f"stored for the backward pass: {model.size(self.stored_before)} as written, "
                f"{model.size(self.stored_after)} under the plan"
            )
        else:
            lines.append("with argnums: the backward pass too, and what is stored for it")
        lines += [f"calibrated: {self.calibrated}"] if self.calibrated else []
        return [*lines, *(self.errors.summary() if self.errors else [])]

    def document(self, most: int = 0) -> model.Document:
        """Returns what the report shows, with so many of its rows."""
        sentence, *lines = self.summary()
        numbered = [*enumerate(self.rows)]
        # One device exchanges nothing.
        wide = self.wide if jax.device_count() > 1 else ()
        frames = sum(rows.is_frame(row.primitive) for row in self.rows)
        note = f"and equations that only contain a program or set an order: {frames}" * bool(frames)
        tables = (
            *(tables_of(self.errors) if self.errors else ()),
            model.Table(
                "Read in float32, and exchanged between devices in float32",
                ("row", "operation", "array", "why"),
                tuple((str(i), self.rows[i].primitive, p, self.rows[i].reason) for p, i in wide),
                ("operation", "array", "why"),
            ),
            model.Table(
                "Stored for the backward pass",
                ("size", "array", "row", "operation", "where"),
                tuple(map(self._kept, self.kept)),
                ("array", "operation", "where"),
                most=LARGEST,
            ),
            model.Table(
                "Operations by compute dtype",
                ("operation", *rows.COMPUTES),
                tuple(self.counts()),
                ("operation",),
                note=note,
            ),
            model.Table(
                "Matmuls in float32, and operations left unchanged",
                COLUMNS,
                tuple(_cells(i, row) for i, row in numbered if _falls_short(row)),
                COLUMNS[1:],
            ),
            model.Table(
                "Rows", COLUMNS, tuple(_cells(i, row) for i, row in numbered[:most]), COLUMNS[1:]
            ),
        )
        return model.Document(
            "What autocast does", sentence, tuple(lines), tables, drawing=self._drawing
        )

    def _kept(self, array: Kept) -> tuple[str, ...]:
        shape = ",".join(map(str, array.shape))
        row = None if array.row is None else self.rows[array.row]
        made_by = (str(array.row), row.primitive, row.where) if row else ("", "", "")
        return (model.size(array.bytes), f"{array.dtype}[{shape}]", *made_by)

    def _drawing(self) -> model.Drawing:
        kept: collections.Counter[int | None] = collections.Counter()
        for array in self.kept:
            kept[array.row] += array.bytes
        scopes: collections.Counter[str] = collections.Counter()
        for index in sorted(kept, key=lambda i: -1 if i is None else i):
            row = None if index is None else self.rows[index]
            scopes[model.box_of(row.scope, row.source) if row else "of no row"] += kept[index]
        by_row = {row.row: row for row in self.errors.rows} if self.errors else {}
        words = "Grouped by the scope of the operation that computed it."
        bar = model.Bar(
            "Stored from the forward to the backward pass", model.shares(scopes), words=words
        )
        return model.Drawing(
            bars=(bar,) if kept else (),
            operations=tuple(
                _operation(i, row, kept[i], by_row.get(i)) for i, row in enumerate(self.rows)
            ),
            colors=(
                *((ERROR,) if self.errors else ()),
                *(model.DTYPE, BYTES),
                *(() if self.stored_after is None else (KEPT, model.PASS)),
            ),
        )


def _falls_short(row: Row) -> bool:
    if rule_of(row.primitive).need == HALF and row.computes_in == "f32":
        return True
    return row.left_alone and rows.reads_floats(row.before)


def _cells(index: int, row: Row) -> tuple[str, ...]:
    place = "  ".join(filter(None, (row.where, row.path)))
    why = "; ".join(filter(None, (row.reason, row.storage)))
    return (str(index), row.primitive, row.before, row.after, place, why)


def _operation(index: int, row: Row, kept: int, error: ErrorRow | None) -> model.Operation:
    return model.Operation(
        label=row.primitive,
        scope=model.box_of(row.scope, row.source),
        facts=model.facts(
            why=row.reason,
            stored=row.storage,
            kept_for_the_backward_pass=model.size(kept) if kept else "",
            attention=row.attention,
            loss=row.loss,
            computes_in=model.DTYPES[row.computes_in],
            dtypes_as_written=row.before,
            dtypes_under_the_plan=row.after,
            **model.place_of(row),
            parameters=row.path,
            bytes=model.size(row.bytes) if row.bytes else "",
            FLOPs=f"{row.flops:,}" if row.flops else "",
            runs=f"{row.times} times" if row.times > 1 else "",
            forward_row="" if row.forward is None else f"#{row.forward}",
            error_of_the_gradient=percent(error.gradient) if error else "",
            error_of_the_loss=percent(error.loss) if error else "",
        ),
        colors={
            "error": error.gradient if error else None,
            "dtype": model.DTYPES[row.computes_in],
            "bytes": row.bytes * row.times,
            "kept": kept,
            "pass": "backward" if row.backward else "forward",
        },
        number=index,
        backward=row.backward,
        large=row.flops > 0,
    )


@takes_arguments
def explain(
    fun: Callable[..., Any],
    policy: "PolicyLike" = "mixed_bfloat16",
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    target: str | None = None,
    *,
    errors: bool = False,
    probes: int = 8,
    parameters: str | None = None,
    loss_scale: LossScale | str | float | None = "auto",
) -> Callable[..., CastReport]:
    """Reports what `autocast` does to each operation of a function, without running it.

    With ``errors=True`` it runs the function, and reports what the rounding of each operation,
    forward and backward, contributes to the relative error of the loss and of the gradient. Each
    result x_i of the float32 run becomes ``x_i + m_i d_i``, where d_i is the rounding error that
    the operation makes itself under the policy, and m_i is 0 or 1. The derivative of the outputs by
    m_i at 0 is the operation's contribution to first order, the vector ``J_i d_i``. For a vector u
    of random signs, one reverse pass gives ``u . J_i d_i`` for all operations at once, and the mean
    of its square over ``probes`` vectors estimates the square of that vector's norm, with a
    relative standard error of sqrt(2 / probes). As far as the data do not contradict that the
    roundings within an array are independent, the sum of the squares of the product's terms takes
    its place, with less noise. The ten largest, and those that the first order
    does not see (a comparison, a kernel without a derivative, an overflow), are then measured: one
    run each of the same compiled program. Its sources are adjoint error estimates (ADAPT, SC 2018;
    CHEF-FP, IPDPS 2023) and Hutchinson's estimate of a trace (1989).

    Args:
        fun: The function, as for `autocast`.
        policy: The policy, as for `autocast`. Of a `Calibration`, the report says what it changed.
        argnums: The positions of the arguments to differentiate, as for `jax.value_and_grad`. If
            given, the report covers ``jax.value_and_grad(autocast(fun), argnums)``, and each row of
            the backward pass names the forward row it comes from. If None, the report covers the
            forward pass alone.
        has_aux: Whether ``fun`` returns a pair ``(loss, aux)``, as for `jax.value_and_grad`.
        target: The device for which attention is planned, as for `recommend_policy`: "h100" or
            "v5e", for example. It need not exist, and nothing is compiled. None for the local one.
        errors: Whether to report where the error comes from, in ``report.errors``. Then the
            arguments must be concrete arrays, and a function that returns a loss is differentiated
            by its first argument if ``argnums`` is None. ``argnums=()`` is the forward pass alone.
        probes: The number of random vectors, for ``errors``. 8 take the time of about 35 gradients,
            on a CPU more where arrays are small; 4 rank operations nearly as well, in about half.
        parameters: For ``errors``, a pattern of the parameters whose gradients count, such as
            ``"blocks/3/*"``, as in overrides; None for all.
        loss_scale: For ``errors``, the loss scale, as for `compare`.

    Returns:
        A function that takes the arguments of ``fun`` and returns a `CastReport`; with these
        arguments after the policy, the report. The arguments may be `jax.ShapeDtypeStruct`, which
        need no memory.

    Raises:
        TypeError: If ``fun`` is not a function; with ``argnums``, if it does not return a scalar
            loss.
        ValueError: If the policy or the target is invalid, if a pattern of its overrides matches
            nothing, if ``argnums`` are not positions of floating arguments, or if ``probes`` or
            ``parameters`` is invalid.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> explained = mpjax.explain(loss, "mixed_bfloat16", argnums=0)
        >>> report = explained(jnp.ones((8, 32)), jnp.ones((3, 8)))
        >>> report.half_flops
        1.0
        >>> [row.reason.split(",")[0] for row in report.rows if row.primitive == "dot_general"][0]
        '16-bit list'
        >>> x, fused = jnp.ones((1, 64, 4, 32)), "mixed_bfloat16,fused_attention=true"
        >>> attention = lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True)
        >>> print(mpjax.explain(attention, fused, target="h100")(x))  # doctest: +ELLIPSIS
        100.0% of matmul FLOPs run in bfloat16; ...
        attention: cudnn, causal
        ...
    """
    calibration = policy if isinstance(policy, Calibration) else None
    policy = get_policy(policy)
    if target is not None:
        check_name("target", target)
    check_flag("errors", errors)
    if (whole_number(probes) or 0) < 1:
        raise ValueError(f"explain: probes={brief(probes)} must be a positive integer such as 8.")
    if not errors and (parameters is not None or probes != 8 or loss_scale != "auto"):
        raise ValueError(
            "explain: probes, parameters and loss_scale say how to estimate errors: pass "
            "errors=True too."
        )
    if errors and target is not None:
        raise ValueError(
            f"explain: target={brief(target)} plans for a device that need not exist, and "
            "errors=True runs the function on this one. Pass one of them."
        )
    resolve_loss_scale(loss_scale, False)

    def report(*args, **kwargs):
        with traced_for(target) if target else contextlib.nullcontext():
            traced = trace(fun, policy, args, kwargs, argnums is not None)
            if argnums is None:
                return _without_gradients(traced)
            active = differentiated("explain", args, kwargs, argnums)
            check_loss(traced.returned(), has_aux, "explain")
            return _with_gradients(traced, active, has_aux)

    def with_errors(*args, **kwargs):
        wanted = 0 if argnums is None else argnums
        by = None if wanted == () else wanted
        with constants_as_casts():
            program = make_program("explain", fun, policy, args, kwargs, by, has_aux)
        traced, jaxpr = program.traced, _jax.open_jaxpr(program.jaxpr)[0]
        if program.follows_gradient:
            active = differentiated("explain", args, kwargs, by)
            told = _with_gradients(traced, active, has_aux, jaxpr)
        else:
            told = _without_gradients(traced)
        keys = [key_of(each.eqn, each.site.callers) for each in _backward(jaxpr)]
        first = len(told.rows) - len(keys)
        return dataclasses.replace(
            told,
            errors=errors_of(
                *(program, training_scale(program, policy, loss_scale), probes, parameters),
                *(told.rows, {key: first + i for i, key in enumerate(keys)}),
            ),
        )

    return _calibrated(with_errors if errors else report, calibration)


def _calibrated(report: Callable[..., CastReport], by: Calibration | None) -> Callable[..., Any]:
    """Returns a function whose report says what a calibration changed, if there is one."""
    if by is None:
        return report
    causes = {f'override "{part.pattern}"': part.cause for part in by.parts}

    def calibrated(*args, **kwargs):
        told = report(*args, **kwargs)
        reasons = ((row, causes.get(row.reason, "")) for row in told.rows)
        rows = tuple(
            dataclasses.replace(row, reason=f"{row.reason}: {cause}") if cause else row
            for row, cause in reasons
        )
        return dataclasses.replace(told, rows=rows, calibrated=by.summary())

    return calibrated


def _without_gradients(traced: Traced) -> CastReport:
    """Returns the report on the forward pass."""
    written, runs = _jax.open_jaxpr(traced.jaxpr)[0], planned.forward_of(traced)
    check_result("explain", traced.returned(), written.outvars)
    # The function's own casts run without autocast too.
    casts = _totals(_casts(runs) - _casts(written))
    return CastReport(tuple(planned.rows_of(traced, runs)), _half_share(runs), *casts)


def _with_gradients(
    traced: Traced, active: Sequence[bool], has_aux: bool, runs: Any = None
) -> CastReport:
    """Returns the report with the backward pass of ``value_and_grad``, or of what runs."""

    def new(*arrays):
        return traced.rebuild(call(traced, list(arrays), rows=True))

    def old(*arrays):
        return traced.rebuild(_jax.eval_closed(traced.jaxpr, *arrays))

    def program(run, avals, results):
        def flat(*arrays):
            return results(pull_back(run, active, arrays, has_aux))

        return _jax.open_jaxpr(_jax.trace(flat, avals, "explain"))[0]

    def gradients(pulled):
        return [pulled.loss, *pulled.gradients()]

    def stored(pulled):
        return [x for x in jax.tree.leaves(pulled.residuals) if is_array(x)]

    written = _jax.in_avals(traced.jaxpr)
    after = program(new, traced.avals, gradients) if runs is None else runs
    before = program(old, written, gradients)
    kept = kept_by(program(new, traced.avals, stored))
    as_written = kept_by(program(old, written, stored))
    forward = [*planned.rows_of(traced, after, kept)]
    backward = [*_backward_rows(after, forward)]
    wide = planned.read_wide(traced, forward, active)
    return CastReport(
        (*forward, *backward),
        _half_share(after),
        *_totals(_casts(after) - _casts(before)),
        sum(array.bytes for array in as_written),
        sum(array.bytes for array in kept),
        tuple(kept),
        tuple(wide.items()),
    )


def _backward(jaxpr: Any) -> Iterator[planned.Running]:
    """Yields the equations of the backward pass that have rows."""
    for each in planned.running(jaxpr):
        if each.back and not planned.is_for_compilers(each.eqn):
            yield each


def _backward_rows(jaxpr: Any, forward: Sequence[Row]) -> Iterator[Row]:
    rounded = planned.rounded_for(jaxpr)
    for eqn, site, times, _ in _backward(jaxpr):
        index = site.op
        origin = forward[index] if index is not None else None
        dtypes = rows.signature_of(eqn.invars, eqn.outvars)
        # What a program inside of an equation moves is in the rows of its own equations.
        values = () if _jax.inner_jaxprs(eqn) else (*eqn.invars, *eqn.outvars)
        where = f"of row {index}, {origin.primitive}" if origin else "of no row"
        # The derivative has the number of the row too, but is another operation.
        again = origin is not None and site.again and eqn.primitive.name == origin.primitive
        lines = (origin.source, origin.library) if origin else site.lines(eqn)
        yield Row(
            eqn.primitive.name,
            origin.scope if origin else "",
            origin.path if origin else "",
            lines[0],
            _as_written(eqn.primitive.name, dtypes, origin),
            dtypes,
            rows.BACKWARD + where + ", computed again" * again,
            _jax.flops_of(eqn),
            times,
            index,
            storage=planned.for_readers(rounded.get(id(eqn), 0)),
            library=lines[1],
            bytes=sum(_jax.bytes_of(v.aval) for v in values),
        )


def _as_written(primitive: str, dtypes: str, origin: Row | None) -> str:
    """Returns the dtypes of a backward equation without autocast: 16-bit if the program says so."""
    own = origin.before if origin else ""
    for half in ("bf16", "f16"):
        dtypes = dtypes if half in own else dtypes.replace(half, "f32")
    ins, _, outs = dtypes.partition("->")
    # In float32 such a cast would change nothing, so autocast alone has it.
    if ins == outs and primitive in CASTS:
        return ""
    return rows.signature(ins.split(","), outs.split(","))


# ---- totals -------------------------------------------------------------------------------------


def _half_share(jaxpr: Any) -> float:
    half, total = matmul_flops(jaxpr)
    # A program without matmuls has none that falls short.
    return half / total if total else 1.0


def matmul_flops(jaxpr: Any) -> tuple[int, int]:
    """Returns the FLOPs of an open jaxpr's matmuls on 16-bit operands, and of all its matmuls."""
    total = half = 0
    for eqn, _, times in equations(jaxpr):
        if rule_of(eqn.primitive.name).need == HALF:
            flops = _jax.flops_of(eqn) * times
            total += flops
            dtypes = {getattr(v.aval, "dtype", None) for v in eqn.invars[:2]}
            half += flops if dtypes <= set(HALVES) else 0
    return half, total


def _casts(jaxpr: Any) -> "collections.Counter[int]":
    """Counts a program's casts between float32 and 16 bits, by the bytes that each one moves."""
    casts: collections.Counter[int] = collections.Counter()
    for eqn, _, times in equations(jaxpr):
        if eqn.primitive.name in CASTS:
            old, new = eqn.invars[0].aval, eqn.outvars[0].aval
            dtypes = {old.dtype, new.dtype}
            if FLOAT32 in dtypes and dtypes & set(HALVES):
                casts[(_jax.bytes_of(old) + _jax.bytes_of(new)) * times] += 1
    return casts


def _totals(casts: "collections.Counter[int]") -> tuple[int, int]:
    return sum(casts.values()), sum(size * count for size, count in casts.items())
