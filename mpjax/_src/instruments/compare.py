"""`compare`: what each operation adds to the error of a program, against float32.

Every value of the program under the policy has a shadow: what the same operations give in float32.
An operation's own error is what it differs by from float32 on the very same operands; the rest of
its error it inherits.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mpjax._src.autocast.environment import constants_as_casts
from mpjax._src.errors import check_callable, did_you_mean
from mpjax._src.instruments.agreement import MEANINGS, Agreement, agreement
from mpjax._src.instruments.interpret import Wide, interpret, widen
from mpjax._src.instruments.noise import SUSPICIOUS, moved, size_of_terms
from mpjax._src.instruments.nonfinite import check_concrete
from mpjax._src.instruments.programs import Program, make_program, training_scale
from mpjax._src.instruments.shadows import (
    BROKEN,
    Comparer,
    CompareRow,
    Shadowed,
    badness,
    capped,
    is_float,
    norm,
    stats_of,
)
from mpjax._src.policy import get_policy
from mpjax._src.reports import Report, short, table, where, wrapped
from mpjax._src.training.loss_scale import LossScale, resolve_loss_scale

# Of the table.
COLUMNS = ("added", "error", "inherited", "underflow", "operation", "dtypes", "where")
WORDS = COLUMNS[4:]

# Of a result that is rounding error in float32 too.
ZERO = "zero but for rounding: judged by the terms that cancel"


@dataclasses.dataclass(frozen=True)
class Comparison(Report):
    """A program under a policy beside float32. ``print`` it, or read `rows`.

    Attributes:
        rows: One `CompareRow` per operation that rounds or inherits, worst first: by what it is to
            blame for, and in the order of the program where that is equal.
        results: The error of each result of the program, by name: relative to its size, or if
            float32 gives rounding error alone, to that of its terms.
        loss_scale: That the gradients were scaled by, in both runs.
        diverged: Where the float32 run would have taken another branch, or left a loop elsewhere:
            it was made to follow.
        order: For each row, its position in the program.
        noise: The results that are rounding error alone in float32, such as the gradient of a bias
            before BatchNorm, which is zero in exact arithmetic.
    """

    rows: tuple[CompareRow, ...]
    results: dict[str, float]
    loss_scale: float = 1.0
    diverged: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    noise: tuple[str, ...] = ()

    _drawn_by = "mpjax._src.instruments.pages"

    def to_dict(self) -> dict[str, Any]:
        """Returns the comparison as plain data, ready for JSON."""
        data = dataclasses.asdict(self)
        for row, plain in zip(self.rows, data["rows"], strict=True):
            plain |= {"added": row.added, "blame": row.blame}
        return data

    def worst_results(self) -> list[tuple[str, float]]:
        """Returns the results by name with their errors, the worst first."""
        return sorted(self.results.items(), key=lambda item: -capped(item[1]))

    def cells(self, count: int | None = 12) -> list[tuple[str, ...]]:
        """Returns the worst rows as text, in the columns `COLUMNS`."""
        return [_cells(row) for row in self.rows[:count]]

    def table(self, count: int | None = 12) -> str:
        """Returns the worst rows as one text."""
        return "\n".join(table(COLUMNS, self.cells(count), WORDS))

    def named(self, count: int | None = 5) -> list[tuple[str, str]]:
        """Returns the worst results as text: the error, and whose it is."""
        return [
            (percent(error), f"{name} ({ZERO})" if name in self.noise else name)
            for name, error in self.worst_results()[:count]
        ]

    def __str__(self) -> str:
        scaled = "" if self.loss_scale == 1 else f" (loss scale {self.loss_scale:g})"
        lines = [f"error of the results, against float32{scaled}:"]
        lines += [f"{error:>8}  {name}" for error, name in self.named()]
        if len(self.results) > 5:
            lines.append(f"{'':>8}  and {len(self.results) - 5} more")
        if self.diverged:
            lines += [
                "float32 would have taken another path at",
                *(f"  {d}" for d in self.diverged),
            ]
        lines += [
            f"no float32 form, compared from its result on: {row.primitive}  {short(row.source)}"
            for row in self.rows
            if not row.compared
        ]
        lines = [wrapped(line.rstrip(), 10) for line in lines]
        return "\n".join([*lines, "", self.table()])


@overload
def compare(
    fun: Callable[..., Any],
    policy: str | jmp.Policy,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale | str | float | None = "auto",
) -> Callable[..., Comparison]: ...
@overload
def compare(
    fun: Callable[..., Any], policy: Callable[..., Any], *, results: str = "auto"
) -> Callable[..., Agreement]: ...
def compare(
    fun: Callable[..., Any],
    policy: Any,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    *,
    loss_scale: LossScale | str | float | None = "auto",
    results: str = "auto",
) -> Any:
    """Compares a function under a policy with float32, or with another function.

    With a policy, the program that trains runs once, one operation after the other; each is also
    run in float32 on the same operands, and on those of a float32 run that goes along. Values are
    freed after their last use. Where half decides otherwise than float32 would (a branch, the end
    of a loop), the float32 run follows, and the comparison says so.

    With a function, the two are programs that should agree: training and rollout, a model and its
    port, two versions of one. Both run as they are, each with a float32 run beside it. If only
    rounding parts them, lines of code are given float32 results in turn: the cause is the line
    without whose rounding the difference is least. If they differ in float32 too, the report names
    the first operations whose results the other program never has. Every value is kept: a small
    batch will do.

    Args:
        fun: A function, as for `autocast`. If it returns a scalar loss, its gradient is followed.
        policy: A policy or its name; or a function of the same arguments as ``fun``. Of two
            functions, each returns one floating array, of the same shape.
        argnums: Of which arguments gradients are taken; None for the forward pass alone.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.
        loss_scale: What the loss is multiplied by before the backward pass, as for
            `build_train_step`. "auto" gives float16 the scale that a dynamic one comes to: the
            initial one, or a lower one at which the gradients are finite.
        results: What two functions return: "log_probs" of the tokens at hand, "logits" of all
            tokens along the last axis, or "values" of any meaning. "auto": "logits" where they are
            normalized, "log_probs" where none is positive, else "values".

    Returns:
        A function of the same arguments, which must be concrete arrays. It returns a `Comparison`;
        of two functions an `Agreement`.

    Raises:
        TypeError: If ``fun`` is not a function, an array is abstract or being traced, or an option
            is not for what is compared.
        ValueError: If there are no arrays, or nothing to differentiate by; if two functions return
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
        >>> report.by_formula, report.partings[0].left < 0.5
        (False, True)

    Shadow values are those of NSan (Courbet, 2021); Paddle's compare_accuracy compares two dumps.
    That training and rollout part by rounding: Qi et al., 2025, "Defeating the Training-Inference
    Mismatch via FP16".
    """
    check_callable(fun, "compare: fun")
    if inspect.isroutine(policy) or (callable(policy) and not isinstance(policy, jmp.Policy)):
        _check_agreement(results, argnums, has_aux, loss_scale)

        @functools.wraps(fun)
        def both(*args, **kwargs):
            return agreement((fun, policy), results, args, kwargs)

        return both
    if results != "auto":
        raise TypeError(f"compare: results={results!r} is of two functions; policy is {policy!r}.")
    policy = get_policy(policy)
    resolve_loss_scale(loss_scale, False)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        with constants_as_casts():
            program = make_program("compare", fun, policy, args, kwargs, argnums, has_aux)
        arrays = check_concrete("compare", program.arrays)
        scale = training_scale(program, arrays, policy, loss_scale)
        return compare_program(program, arrays, scale)

    return wrapped


def _check_agreement(results: Any, argnums: Any, has_aux: Any, loss_scale: Any) -> None:
    """Raises where an option is not for two functions."""
    if results not in ("auto", *MEANINGS):
        legal = ", ".join(map(repr, ("auto", *MEANINGS)))
        raise ValueError(
            f"compare: results={results!r} is none of {legal}.{did_you_mean(results, MEANINGS)}"
        )
    given = {"argnums": argnums != 0, "has_aux": has_aux, "loss_scale": loss_scale != "auto"}
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise TypeError(
            f"compare: {', '.join(wrong)} is for a function and a policy. Two functions are "
            "compared by what they return: let them return gradients to compare these."
        )


def _cells(row: CompareRow) -> tuple[str, ...]:
    place = [
        where(row.source, row.library),
        *("backward" for _ in range(row.backward)),
        row.scope,
        row.path,
        *(f"{loop} {i}" for loop, i in row.iteration),
        *("zero in exact arithmetic" for _ in range(row.noise)),
    ]
    errors = (row.added, row.error, row.inherited)
    return (
        *("noise" if row.noise else percent(error) for error in errors),
        percent(row.underflow) if row.underflow else "",
        row.primitive,
        row.dtypes,
        "  ".join(filter(None, place)),
    )


def compare_program(program: Program, arrays: list[jax.Array], scale: float) -> Comparison:
    """Compares a program, as `compare` does."""
    program.ran()
    comparer = Comparer(program.lines)
    paths = [*program.names, ""]
    args = [
        dataclasses.replace(comparer.constant(x), path=path)
        for x, path in zip([*arrays, jnp.float32(scale)], paths, strict=True)
    ]
    results = interpret(program.jaxpr, args, comparer)
    first = comparer.order
    keys = sorted(first, key=lambda key: (*badness(comparer.rows[key]), -first[key]), reverse=True)
    named = {
        name: v
        for name, v in zip(program.results, results, strict=True)
        if is_float(v.array) and np.size(v.array)
    }
    errors = {name: float(stats_of(v.array, v.shadow, v.shadow)[0]) for name, v in named.items()}
    terms = _terms_of_noise(program, arrays, scale, named, errors)
    errors |= {
        name: float(jnp.linalg.norm(jnp.ravel(named[name].array - named[name].shadow))) / size
        for name, size in terms.items()
    }
    return Comparison(
        tuple(comparer.rows[key] for key in keys),
        errors,
        scale,
        tuple(comparer.diverged),
        tuple(comparer.order[key] for key in keys),
        tuple(terms),
    )


def _terms_of_noise(
    program: Program,
    arrays: Sequence[jax.Array],
    scale: float,
    named: dict[str, Shadowed],
    errors: dict[str, float],
) -> dict[str, float]:
    """Returns the size of the terms of the results that are float32's own rounding error."""
    suspects = [
        name
        for name, error in errors.items()
        if error > SUSPICIOUS and math.isfinite(float(norm(named[name].array)))
    ]
    if not suspects:
        return {}
    program.ran()
    given = [*moved([widen(x) for x in arrays]), jnp.float32(scale)]
    try:
        again = dict(zip(program.results, interpret(program.jaxpr, given, Wide()), strict=True))
    except NotImplementedError:  # something in it has no float32 form
        return {}
    sizes = {name: size_of_terms(named[name].shadow, again[name]) for name in suspects}
    return {name: size for name, size in sizes.items() if size}


def percent(share: float) -> str:
    """Returns a relative error as text."""
    if share == 0:
        return "0"
    if not share < BROKEN:
        return "Inf"
    return f"{share:.0%}" if share >= 0.1 else f"{share:.2g}" if share < 1e-4 else f"{share:.2%}"
