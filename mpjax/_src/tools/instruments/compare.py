"""`compare`: the error that each operation adds to a program, relative to float32 or float64.

Every value of the program under the policy has a shadow: the result of the same operations in
the reference, float32 or float64. An operation's own error is its difference from the reference on
the same operands; the rest of its error is inherited from its operands.
"""

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import jax.numpy as jnp
import jmp
import numpy as np

from mpjax._src.core.base.contexts import constants_as_casts
from mpjax._src.core.base.dtypes import (
    FLOAT32,
    FLOAT64,
    DTypeLike,
    canonical,
    default_device,
    is_float,
)
from mpjax._src.core.base.errors import check_flag, did_you_mean
from mpjax._src.core.base.lines import short, where
from mpjax._src.core.base.progress import progress_bar
from mpjax._src.core.base.public import public
from mpjax._src.core.base.rules import HALF, rule_of
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import PolicyLike
from mpjax._src.core.program.curried import takes_arguments
from mpjax._src.core.program.interpret import (
    OPERATION,
    handling,
    interpret,
    operations_in,
    root_of,
)
from mpjax._src.core.training.loss_scale import LossScale, resolve_loss_scale
from mpjax._src.tools.document import model, plots
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.document.text import table
from mpjax._src.tools.instruments import shadows
from mpjax._src.tools.instruments.agreement import MEANINGS, Agreement, agreement
from mpjax._src.tools.instruments.programs import Program, make_program, training_scale
from mpjax._src.tools.instruments.rows import computed_in, turns_of
from mpjax._src.tools.instruments.shadows import CompareRow, Shadowed, percent

# The columns of the table, and those that hold words.
COLUMNS = ("added", "error", "float32", "inherited", "underflow", "operation", "dtypes", "where")
WORDS = COLUMNS[5:]

ADDED = model.WORST(
    "added error",
    "The relative error that each operation adds, by rounding or by amplifying operands' errors.",
)
ERROR = model.WORST(
    "error",
    "The relative error of each operation's result, including the error of its operands.",
)
BYTES = model.Color("bytes", "The bytes of each operation's operands and result.", unit="bytes")

# The note on a result that is only rounding error in the reference too.
ZERO = "only rounding error in {}; relative to the terms that cancel"

# What a program can be compared with.
REFERENCES = (FLOAT32, FLOAT64)


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Comparison(Report):
    """A report on the errors of a program under a policy. ``print`` it, or read ``rows``.

    Attributes:
        rows: One `CompareRow` per operation that adds or inherits an error, the worst first. Rows
            of equal error are in the order of the program.
        results: The relative error of each result of the program, by name. If a result is only
            rounding error in float32, its error is relative to the terms that cancel.
        loss_scale: The scale that the loss was multiplied by, in both runs.
        diverged: The lines where the float32 run would have taken another branch, or left a loop
            after another number of iterations. It was made to follow the run under the policy.
        order: The position in the program of each row.
        noise: The results that are only rounding error in float32, such as the gradient of a bias
            before BatchNorm, which is zero in exact arithmetic.
        unscaled: The relative error of each gradient without a loss scale, by name; empty if there
            is no scale or no gradient.
        reference: The dtype of the run that errors are relative to. Where this page says float32
            of that run, it is float64 if the reference is.
        float32: The relative error of each result in float32, by name, if the reference is
            float64.
    """

    rows: tuple[CompareRow, ...]
    results: dict[str, float]
    loss_scale: float = 1.0
    diverged: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    noise: tuple[str, ...] = ()
    unscaled: dict[str, float] = dataclasses.field(default_factory=dict)
    reference: str = "float32"
    float32: dict[str, float] = dataclasses.field(default_factory=dict)

    def worst_results(self) -> list[tuple[str, float]]:
        """Returns the results by name with their errors, the worst first."""
        return sorted(self.results.items(), key=lambda item: -shadows.capped(item[1]))

    def table(self, count: int | None = 12) -> str:
        """Returns the worst rows as a table of text."""
        return "\n".join(table(*self._rows(count), WORDS))

    def _rows(self, count: int | None) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Returns the columns and the cells of the worst rows."""
        kept = [name != "float32" or bool(self.float32) for name in COLUMNS]
        cells = (tuple(itertools.compress(_cells(row), kept)) for row in self.rows[:count])
        return tuple(itertools.compress(COLUMNS, kept)), tuple(cells)

    def named(self, count: int | None = 5) -> list[tuple[str, ...]]:
        """Returns the worst results as text: the error, that of float32 if float64 is the
        reference, and the name of the result."""
        zero = ZERO.format(self.reference)
        return [
            (
                percent(error),
                *([percent(self.float32[name])] if self.float32 else []),
                f"{name} ({zero})" if name in self.noise else name,
            )
            for name, error in self.worst_results()[:count]
        ]

    def plot(self, path: str | Path | None = None) -> Any:
        """Plots the error of every operation in program order, and the part that it adds itself.

        Args:
            path: The path of a PNG file to write, or None.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            ImportError: If matplotlib is not installed (the extra ``plot``).
            ValueError: If no operation rounds, so that there is nothing to plot.

        Example:
            >>> import jax.numpy as jnp, mpjax
            >>> compared = mpjax.compare(lambda w, x: jnp.sum(x @ w), "mixed_bfloat16")
            >>> figure = compared(jnp.full((3, 2), 0.1), jnp.ones((4, 3))).plot()
        """
        return plots.plot_compare(self, path)

    def document(self, most: int = 12) -> model.Document:
        """Returns what the report shows, with at most so many of its rows."""
        worst, count = self.worst_results()[:1], len(self.rows)
        opening = [f"The worst result is {name}: error {percent(error)}." for name, error in worst]
        blamed = self.rows[0] if self.rows and not self.rows[0].noise else None
        place = blamed and (short(blamed.source) or blamed.scope or "no line")
        opening += [
            f"{blamed.primitive} at {place} adds the most."
            if blamed
            else "No operation adds an error."
        ]
        lines = [
            *([self._of_scale()] if self.loss_scale != 1 else []),
            *(
                f"{self.reference} would have taken another path at {line}"
                for line in self.diverged
            ),
            *(
                f"no {self.reference} form, so its own error is unknown: "
                f"{row.primitive}  {short(row.source)}"
                for row in self.rows
                if not row.compared
            ),
        ]
        results = model.Table(
            f"Error of the results, relative to {self.reference}",
            ("error", *(["float32"] if self.float32 else []), "result"),
            tuple(self.named(None)),
            ("result",),
            most=8,
        )
        more = f"and {count - most} more" if count > most else ""
        worst_rows = model.Table("Operations, worst first", *self._rows(most), WORDS, note=more)
        return model.Document(
            "The error that each operation adds",
            " ".join(opening),
            tuple(lines),
            (results, worst_rows),
            drawing=self._drawing,
        )

    def _of_scale(self) -> str:
        """Returns the worst errors of the gradients with the loss scale and without."""
        text = f"loss scale {self.loss_scale:g}"
        if not self.unscaled:
            return text
        with_it = max(map(self.results.__getitem__, self.unscaled), key=shadows.capped)
        name, without = max(self.unscaled.items(), key=lambda item: shadows.capped(item[1]))
        return (
            f"with the {text}: the gradients' worst error is {percent(with_it)}; "
            f"without: {percent(without)} ({name})"
        )

    def _drawing(self) -> model.Drawing:
        order = self.order or range(len(self.rows))
        rows = sorted(zip(order, self.rows, strict=True), key=lambda pair: pair[0])
        return model.Drawing(
            operations=tuple(_operation(row, n, self.reference) for n, (_, row) in enumerate(rows)),
            colors=(ADDED, ERROR, model.DTYPE, BYTES, model.PASS),
        )


@overload
def compare(
    fun: Callable[..., Any],
    policy: "PolicyLike" = "mixed_bfloat16",
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale | str | float | None = "auto",
    reference: DTypeLike = "float32",
    progress: bool = True,
) -> Callable[..., Comparison]: ...
@overload
def compare(
    fun: Callable[..., Any],
    policy: Callable[..., Any],
    *,
    reference: DTypeLike = "float32",
    results: str = "auto",
    labels: Any = None,
    progress: bool = True,
) -> Callable[..., Agreement]: ...
@overload
def compare(fun: Callable[..., Any], policy: Callable[..., Any], *args: Any) -> Agreement: ...
@overload
def compare(fun: Callable[..., Any], *args: Any, **settings: Any) -> Comparison: ...
@functools.partial(takes_arguments, of_two=True)
def compare(
    fun: Callable[..., Any],
    policy: Any = "mixed_bfloat16",
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale | str | float | None = "auto",
    reference: DTypeLike = "float32",
    results: str = "auto",
    labels: Any = None,
    progress: bool = True,
) -> Any:
    """Compares a function under a policy with float32 or float64, or with another function.

    Given a policy, the program that trains (the loss and its gradient) runs once under it, one
    operation at a time. Each operation also runs in float32, on the same operands and on those of a
    parallel float32 run. Values are freed after their last use. If the 16-bit run takes another
    branch or leaves a loop at another iteration than float32 would, the float32 run follows it, and
    the report says so.

    With ``reference="float64"``, the parallel run computes the same program in float64, and a third
    one in float32, so the report shows the errors of float32 itself. Python lines, random bits and
    integers are those of the program. No setting of JAX changes for other code or threads.

    Given a function, the two functions should agree: training and rollout, a model and its port,
    two versions of a model. Both run as they are, each with a parallel float32 run. The operations
    that both have are aligned, whatever their dtypes, loops and layouts, and have the error between
    the programs. If only rounding makes them differ, the results of one line of code after another
    are replaced by float32 ones; the cause is the line that leaves the least difference. If they
    differ in float32 too, the report names the first operations whose results the other program
    does not have. All values stay in memory, so use a small batch.

    Args:
        fun: A function, as for `autocast`. If it returns a scalar loss, its gradient is compared
            too.
        policy: A policy or its name; or a function of the same arguments as ``fun``, which returns
            floating arrays of the same shapes. ``functools.partial`` gives a function arguments of
            its own.
        argnums: The arguments to differentiate; None for the forward pass only.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.
        loss_scale: The loss scale, as for `build_train_step`. With "auto", float16 uses the scale
            that a dynamic loss scale would reach: its initial one, or the next lower one at which
            the gradients are finite.
        reference: The dtype of the parallel run, "float32" or "float64".
        results: The meaning of the results of two functions: "log_probs" of given tokens, "logits"
            of all tokens along the last axis, or "values" of any other meaning. "auto" means
            "logits" if they are normalized, "log_probs" if none is positive, and else "values".
        labels: Of two functions that return logits, the tokens that were taken: an integer for each
            row of logits.
        progress: Whether to show a progress bar if stderr is a terminal.

    Returns:
        A function of the same arguments, which must be concrete arrays. It returns a `Comparison`,
        or for two functions an `Agreement`. With these arguments after the policy, the report.

    Raises:
        TypeError: If ``fun`` is not a function, an array is abstract or being traced, or an option
            does not apply to the kind of comparison.
        ValueError: If ``reference`` is another dtype, or float64 on a TPU, which has none; if there
            are no arrays, or nothing to differentiate; if two functions return
            different shapes, or more than one floating array.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> policy = mpjax.get_policy("mixed_bfloat16").with_ops(half=("exp",))
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.exp(x * w) * 0.125)
        >>> compared = mpjax.compare(loss, policy)(jnp.full(3, 5.1), jnp.ones(3))
        >>> compared.rows[0].primitive
        'exp'
        >>> def train(w, x):
        ...     return jax.nn.log_softmax(x @ w)
        >>> def rollout(w, x):
        ...     return jax.nn.log_softmax((x @ w).astype("bfloat16")).astype("float32")
        >>> w, x = jax.random.normal(jax.random.key(0), (2, 8, 8))
        >>> report = mpjax.compare(train, rollout)(w, x)
        >>> report.by_formula, report.partings[0].left < 0.5, report.shares
        (False, True, (1.0, 1.0))

    Shadow values come from NSan (Courbet, 2021). Paddle's compare_accuracy compares two dumps. The
    rounding mismatch of training and rollout is studied by Qi et al. 2025, "Defeating the
    Training-Inference Mismatch via FP16".
    """
    check_flag("progress", progress)
    wide = _checked(reference)
    two = inspect.isroutine(policy) or (callable(policy) and not isinstance(policy, jmp.Policy))
    if two:
        _check_agreement(results, argnums, has_aux, loss_scale)
    elif results != "auto" or labels is not None:
        name = "labels" if results == "auto" else f"results={results!r}"
        raise TypeError(
            f"compare: {name} applies only to two functions, but policy={policy!r} is a policy. "
            "Leave it out."
        )
    else:
        policy = get_policy(policy)
        resolve_loss_scale(loss_scale, False)

    def report(*args, **kwargs):
        if two:
            with progress_bar(progress, "compare", OPERATION):
                return agreement((fun, policy), results, labels, wide, args, kwargs)
        with constants_as_casts():
            program = make_program("compare", fun, policy, args, kwargs, argnums, has_aux)
        scale = training_scale(program, policy, loss_scale)
        with progress_bar(progress, "compare", OPERATION, operations_in(program.jaxpr)):
            return compare_program(program, scale, wide)

    return report


def _checked(reference: Any) -> Any:
    """Returns the dtype of a reference, or raises."""
    wide = canonical(reference, "reference")
    if wide not in REFERENCES:
        raise ValueError(
            f"compare: reference={reference!r} is narrower than float32: the policy says what is "
            "compared. Choose reference='float32' or 'float64'."
        )
    if wide == FLOAT64 and default_device().platform == "tpu":
        raise ValueError(
            "compare: reference='float64' needs a CPU or a GPU, because TPUs do not multiply in "
            "float64: run it under JAX_PLATFORMS=cpu, or with jax.default_device of a CPU."
        )
    return wide


def _check_agreement(results: Any, argnums: Any, has_aux: Any, loss_scale: Any) -> None:
    """Raises if an option does not apply to two functions."""
    if results not in ("auto", *MEANINGS):
        valid = ", ".join(map(repr, ("auto", *MEANINGS)))
        raise ValueError(
            f"results={results!r} is unknown. Choose one of "
            f"{valid}.{did_you_mean(results, MEANINGS)}"
        )
    options: dict[str, bool] = {
        "argnums": argnums != 0,
        "has_aux": has_aux,
        "loss_scale": loss_scale != "auto",
    }
    wrong = [name for name, is_given in options.items() if is_given]
    if wrong:
        raise TypeError(
            f"compare: {', '.join(wrong)} applies only to a function and a policy. Two functions "
            "are compared by their results; to compare gradients, let both functions return them."
        )


def _cells(row: CompareRow) -> tuple[str, ...]:
    place = [
        where(row.source, row.library),
        "backward" * row.backward,
        row.scope,
        row.path,
        *(f"{loop} {i}" for loop, i in row.iteration),
        "zero in exact arithmetic" * row.noise,
    ]
    errors = (row.added, row.error, row.error if row.float32 is None else row.float32)
    return (
        *("noise" if row.noise else percent(error) for error in (*errors, row.inherited)),
        percent(row.underflow) if row.underflow else "",
        row.primitive,
        row.dtypes,
        "  ".join(filter(None, place)),
    )


def _operation(row: CompareRow, number: int, reference: str) -> model.Operation:
    measured = row.compared and not row.noise
    ran = model.DTYPES[computed_in(row.dtypes)]
    return model.Operation(
        label=row.primitive,
        scope=model.box_of(row.scope, row.source),
        facts=model.facts(
            why=_why(row, reference),
            adds=percent(row.added) if measured else "",
            error_of_the_result=percent(row.error) if measured else "",
            error_of_float32=percent(row.float32) if measured and row.float32 is not None else "",
            inherited=percent(row.inherited) if measured else "",
            error_of_the_operands=percent(row.operands) if measured else "",
            underflow=f"{percent(row.underflow)} of the entries became zero" * bool(row.underflow),
            overflow=f"{percent(row.overflow)} of the entries overflowed" * bool(row.overflow),
            magnitudes=f"{row.low:.3g} to {row.high:.3g}",
            computed_in=ran,
            dtypes=row.dtypes,
            **model.place_of(row),
            parameters=row.path,
            worst_in=turns_of(row.iteration),
            ran=f"{row.times} times" if row.times > 1 else "",
            bytes=model.size(row.bytes),
            row_of_explain=row.op,
        ),
        colors={
            "added error": row.added if measured else None,
            "error": (row.error if row.error < shadows.BROKEN else math.inf) if measured else None,
            "dtype": ran,
            "bytes": row.bytes * row.times,
            "pass": "backward" if row.backward else "forward",
        },
        number=number,
        backward=row.backward,
        large=rule_of(row.primitive).need == HALF,
    )


def _why(row: CompareRow, reference: str) -> str:
    if not row.compared:
        return f"It has no {reference} form, so its own error is unknown."
    if row.noise:
        return f"{ZERO.format(reference)}."
    if row.overflow:
        return f"Its result overflows its dtype, but would not overflow {reference}."
    if row.new > row.inherited:
        return "Most of its error is its own rounding."
    return "Most of its error comes from its operands."


def compare_program(program: Program, scale: float, wide: Any = FLOAT32) -> Comparison:
    """Compares a program with a wide run, for `compare`."""
    # Counts as a run, of which `tune` has a limited number.
    program.ran()
    comparer = shadows.Comparer(program.lines, wide)
    args = [
        dataclasses.replace(comparer.constant(x), path=path) for x, path in program.arguments(scale)
    ]
    results = interpret(program.jaxpr, args, comparer, root_of(program.jaxpr))
    rows = [*comparer.rows.values()]
    if wide == FLOAT64:  # every operation has a row, those too that only move what is exact
        rows = [row for row in rows if row.error or row.new or row.float32 or not row.compared]
    # Of equally bad rows the first comes first.
    order = sorted(range(len(rows)), key=lambda i: shadows.badness(rows[i]), reverse=True)
    named = {n: v for n, v in program.named(results) if is_float(v.array) and np.size(v.array)}
    unscaled = {}
    if scale != 1 and any(program.gradients):
        # Compiled as a whole, because only the gradients are read, and no row of an operation.
        gradients = itertools.compress(program.at(1.0), program.gradients)
        unscaled = {name: out for name, out in gradients if name in named}
    terms: dict[str, float] = {}

    def measured(got: dict[str, Any]) -> dict[str, float]:
        with handling(wide):
            return {n: error_of(x, named[n].shadow, terms.get(n, 0.0)) for n, x in got.items()}

    errors = measured({name: v.array for name, v in named.items()})
    terms |= _terms_of_noise(program, scale, named, errors, wide)
    errors |= measured({name: named[name].array for name in terms})
    singles = {name: v.single for name, v in named.items()}
    is_same = wide == FLOAT32 or all(x is named[name].array for name, x in singles.items())
    float32 = {} if is_same else measured(singles)
    return Comparison(
        *(tuple(rows[i] for i in order), errors, scale, tuple(comparer.diverged)),
        *(tuple(order), tuple(terms), measured(unscaled)),
        reference=wide.name,
        float32=float32,
    )


def error_of(got: Any, exact: Any, terms: float = 0.0) -> float:
    """Returns the relative error of a result; of noise, relative to the size of its terms."""
    if terms:
        return float(jnp.linalg.norm(jnp.ravel(got - exact))) / terms
    return float(shadows.stats_of(got, exact, exact)[0])


def _terms_of_noise(
    program: Program,
    scale: float,
    named: dict[str, Shadowed],
    errors: dict[str, float],
    wide: Any,
) -> dict[str, float]:
    """Returns the size of the canceled terms of each result that is only rounding error."""
    # A result that overflowed is wrong, however its terms cancel.
    suspects = [
        name
        for name, error in errors.items()
        if error > shadows.SUSPICIOUS and math.isfinite(float(shadows.norm(named[name].array)))
    ]
    if not suspects:
        return {}
    program.ran()
    results = shadows.results_of_perturbed(
        program.jaxpr, program.arrays, jnp.float32(scale), wide=wide
    )
    if results is None:
        return {}
    changed = dict(program.named(results))
    with handling(wide):
        sizes = {n: shadows.size_of_terms(named[n].shadow, changed[n], wide) for n in suspects}
    return {name: size for name, size in sizes.items() if size}
