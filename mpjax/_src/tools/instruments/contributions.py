"""What each operation of a program contributes to the error of its loss and of its gradient.

With x_i + m_i d_i in place of each result x_i (`masked`), the outputs y(m) move from float32 to the
program's dtypes as m goes from 0 to 1. To first order place i contributes the vector J_i d_i, the
derivative of y by m_i at 0. For a vector u of random signs, one reverse pass gives u . J_i d_i for
every place at once, and the mean of its square over several u is |J_i d_i|^2, because the mean of
u u^T is the identity. The relative standard error of that square is at most sqrt(2 / probes).

Each u . J_i d_i is a sum over the numbers of the place's array. If their roundings do not
correlate, the sum of the squares of its terms has the same mean and far less noise, because the
terms are many. The estimate is the mean of both, weighted by the noise of the one and by the bias
of the other, which is what they differ by beyond that noise.

Sources: adjoint error estimates (Vassiliadis et al., Towards automatic significance analysis,
CGO 2016; Menon et al., ADAPT, SC 2018; Singh et al., CHEF-FP, IPDPS 2023), traces by random signs
(Hutchinson, 1989), and estimates shrunk to another one (James and Stein, 1961).
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.dtypes import is_float
from mpjax._src.core.program.interpret import root_of
from mpjax._src.tools.instruments import masked
from mpjax._src.tools.instruments.masked import Block, Step
from mpjax._src.tools.instruments.programs import Program

# The numbers of parts that reverse mode computes again, to choose from: what lives between them is
# kept, so that fewer are better where much does.
SEGMENTS = 4, 5, 6, 8

# The groups that are measured one by one: the largest, until these are the largest as measured, and
# at most so many that act through a kink.
LARGEST, KINKS = 10, 32

# What is not seen to first order is measured one by one from this share of the whole error on.
SMALL = 2.0**-7

# Errors at least as large count as infinite: those of what overflows.
INFINITE = 1e12

# A measured contribution that is larger than its estimate by this factor is not of first order.
SURPRISING = 2.5

TINY = 1e-30  # in place of a norm of 0


class Pair(NamedTuple):
    """An error of the loss and one of the gradient, relative to the norm of each in float32.

    Without gradients, the second is that of all results.
    """

    loss: float
    gradient: float


class Contributions(NamedTuple):
    """What groups of places contribute to the error."""

    pairs: Sequence[Pair]  # of each group
    measured: Sequence[bool]  # whether that of each group is measured, not derived
    worst: Sequence[tuple[int, ...]]  # of each group, the iterations of its largest entry
    first_order: Pair  # of all together, to first order
    squares: Pair  # the root of the sum of all squares
    total: Pair  # of all together, measured
    unseen: Pair  # of those together that are too many to measure one by one
    results: dict[str, float]  # the measured error of each result
    surprising: bool  # whether a measured one is far larger than its estimate


class Entry(NamedTuple):
    """An entry of the mask: a place, in one iteration of the loops around it."""

    step: Step
    turns: tuple[int, ...]  # the iterations
    times: int  # how often the loops run it
    reads: bool = False  # whether it is that of the operands


class Rounding:
    """A program that is compiled once, and rounds by a mask.

    Attributes:
        entries: The entries of the mask.
        names: The names of the floating results.
    """

    def __init__(self, program: Program, operands: Collection[int] = ()):
        self.block = masked.masked(program.jaxpr, root_of(program.jaxpr), operands)
        self.entries = [*_entries(self.block)]
        outs = zip(program.results, program.jaxpr.out_avals, strict=True)
        self.floats = [i for i, (_, aval) in enumerate(outs) if is_float(aval) and aval.size]
        self.names = [program.results[i] for i in self.floats]
        self._compiled = jax.jit(self.evaluated)

    def evaluated(self, inputs: Any, mask: Any, counts: Sequence[int] = ()) -> list[Any]:
        """Returns the floating results, computed in one of as many segments."""
        outs = masked.evaluate(self.block, masked.split(self.block, mask), inputs, counts)
        return [outs[i] for i in self.floats]

    def at(self, inputs: Any, mask: Any) -> list[jax.Array]:
        """Returns the floating results with some entries rounded: a mask of 0 and 1."""
        return self._compiled(inputs, jnp.asarray(mask, jnp.float32))


class Runner:
    """A `Rounding` whose derivative by the mask is compiled with it."""

    def __init__(self, program: Program, scale: float, probes: int):
        self.inputs, self.rounding = program.inputs(scale), Rounding(program)
        self.block, self.entries = self.rounding.block, self.rounding.entries
        self.names = self.rounding.names
        self.numbers = jnp.arange(1 + probes)
        self._run = jax.jit(self._compiled)

    def at(self, mask: Any) -> list[jax.Array]:
        """Returns the floating results with some entries rounded: a mask of 0 and 1."""
        none = jnp.zeros((2, len(self.names)))
        return self._run(self.inputs, jnp.asarray(mask, jnp.float32), none, self.numbers, False)[0]

    def derived(self, weights: Any) -> np.ndarray:
        """Returns the derivative by each entry at 0 of a weighted sum of the results, and of sums
        with random signs; and the sum of squares of what each of a place's numbers adds to it:
        ``(2, 1 + probes, entries)``.

        ``weights`` are those of the results in the sum, and in the others: ``(2, results)``.
        """
        given = jnp.zeros(len(self.entries)), jnp.asarray(weights), self.numbers
        return np.moveaxis(np.asarray(self._run(self.inputs, *given, True)[1], np.float64), -1, 0)

    def _compiled(self, inputs, mask, weights, numbers, probing):
        pairs = jnp.stack([mask, jnp.zeros_like(mask)], -1)  # see `masked`
        outs, back = jax.vjp(lambda pairs: self.rounding.evaluated(inputs, pairs, SEGMENTS), pairs)

        def probe(number):
            key = jax.random.fold_in(jax.random.key(0), number)
            signs = [_signs(jax.random.fold_in(key, i), x) for i, x in enumerate(outs)]
            rows = zip(*weights, signs, strict=True)
            return back([jnp.where(number == 0, a, b * s) for a, b, s in rows])[0]

        # One after the other: together they would hold as many cotangents of every value.
        derived = jax.lax.cond(
            probing,
            lambda: jax.lax.map(probe, numbers),
            lambda: jnp.zeros((numbers.size, *pairs.shape)),
        )
        return outs, derived


def _signs(key: Any, x: jax.Array) -> jax.Array:
    """Returns random signs in the shape of an array."""
    # A number is drawn for 32 of them: XLA keeps what draws as many numbers as there are results.
    words = jax.random.bits(key, (math.ceil(x.size / 32), 1), jnp.uint32)
    bits = (words >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return 1 - 2 * bits.ravel()[: x.size].reshape(x.shape).astype(x.dtype)


def _entries(block: Block) -> Iterator[Entry]:
    for each in block.blocks():
        for turns in itertools.product(*map(range, each.turns)):
            for number, step in enumerate(each.places):
                yield Entry(step, turns, math.prod(each.turns), number == step.reading)


class Measure:
    """Measures errors with some entries rounded."""

    def __init__(self, runner: Runner, of_loss: Sequence[float], of_gradient: Sequence[float]):
        """``of_loss`` and ``of_gradient`` are 1 for the results that count, and else 0."""
        self.runner, self.weights = runner, np.array([of_loss, of_gradient])
        self.exact = runner.at(np.zeros(len(runner.entries)))
        self.norms = np.array(_norms(self.exact, [jnp.zeros_like(x) for x in self.exact]))
        self.sizes = self._joined(self.norms)

    def _joined(self, norms: np.ndarray) -> np.ndarray:
        """Returns the norms of the loss and of the gradient."""
        # Not by a product: 0 times what overflows is NaN.
        return np.sqrt(np.where(self.weights, norms**2, 0).sum(1))

    def pair(self, mask: np.ndarray) -> Pair:
        """Returns the errors of the loss and of the gradient under a mask."""
        return self.errors(mask)[0]

    def errors(self, mask: np.ndarray) -> tuple[Pair, dict[str, float]]:
        """Returns the same, and the error of each result."""
        distances = np.array(_norms(self.runner.at(mask), self.exact), np.float64)
        results = zip(self.runner.names, map(ratio, distances, self.norms), strict=True)
        return Pair(*map(ratio, self._joined(distances), self.sizes)), dict(results)


@jax.jit
def _norms(got: list[jax.Array], wanted: list[jax.Array]) -> list[jax.Array]:
    """Returns the norms of the differences of arrays. Equal infinities do not differ."""
    pairs = zip(got, wanted, strict=True)
    return [jnp.linalg.norm(jnp.ravel(jnp.where(a == b, 0, a - b))) for a, b in pairs]


def ratio(error: float, size: float) -> float:
    """Returns a relative error; infinity for what is not a number, or overflows."""
    value = float(error) / float(size) if size else (0.0 if error == 0 else math.inf)
    return value if value < INFINITE else math.inf


def contributions(
    runner: Runner,
    group_of: Sequence[int],
    of_loss: Sequence[float],
    of_gradient: Sequence[float],
) -> Contributions:
    """Returns what groups of places contribute to the error.

    Args:
        runner: The program.
        group_of: The number of each entry's group.
        of_loss: Of each result, 1 if it is the loss, and else 0.
        of_gradient: Of each result, 1 if it belongs to the gradient, and else 0.
    """
    measure = Measure(runner, of_loss, of_gradient)
    weights = measure.weights / np.maximum(measure.sizes, TINY)[:, None]
    by_entry = runner.derived(weights.astype(np.float32))
    member = np.eye(1 + max(group_of, default=-1))[np.array(group_of, int)]  # (entries, groups)
    with np.errstate(invalid="ignore", over="ignore"):
        derived, squares = by_entry @ member
        sizes = np.stack([np.abs(derived[0]), lengths(derived[1:], squares[1:])])
    finite = sizes.max(0) < INFINITE
    total, results = measure.errors(np.ones(len(group_of)))
    # What leads into operations without a derivative.
    hidden = (masked.hidden(runner.block)[:, None] * member).any(0)

    def measured(groups: Any) -> Pair:
        return measure.pair(member[:, groups].sum(1))

    exact, unseen, surprising = _alone(measured, np.where(finite, sizes, 0), hidden, total)
    estimates = np.where(finite, sizes, math.inf).T.tolist()
    pairs = [exact.get(i) or Pair(*each) for i, each in enumerate(estimates)]
    summed, apart = derived[:, finite].sum(1), (sizes[1, finite] ** 2).sum()
    together = weighted((summed[1:] ** 2).mean(), apart, len(summed) - 1)
    by_size = np.abs(np.nan_to_num(by_entry[0])).max(0)
    firsts = [np.flatnonzero(column)[np.argmax(by_size[column > 0])] for column in member.T]
    return Contributions(
        pairs=pairs,
        measured=[i in exact for i in range(len(pairs))],
        worst=[runner.entries[i].turns for i in firsts],
        first_order=Pair(abs(float(summed[0])), float(np.sqrt(together))),
        squares=Pair(*np.sqrt((np.reshape(pairs, (-1, 2)) ** 2).sum(0)).tolist()),
        total=total,
        unseen=unseen,
        results=results,
        surprising=surprising,
    )


def lengths(sums: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Returns the lengths |J_i d_i| of groups by `Runner.derived`: ``(probes, groups)`` each."""
    return np.sqrt(weighted((sums**2).mean(0), squares.mean(0), len(sums)))


def weighted(whole: Any, apart: Any, probes: int) -> Any:
    """Returns a square, by an estimate with noise, and one that is biased if terms correlate."""
    noise = 2 / probes * apart**2
    bias = np.maximum((whole - apart) ** 2 - noise, 0)
    share = bias / np.maximum(bias + noise, np.finfo(float).tiny)
    return share * whole + (1 - share) * apart


def _alone(
    measured: Callable[[Any], Pair], sizes: np.ndarray, hidden: np.ndarray, total: Pair
) -> tuple[dict[int, Pair], Pair, bool]:
    """Returns the groups that are measured one by one, what all others together add that no
    estimate sees, and whether a measurement surprises.

    ``sizes`` are the estimates of the loss and of the gradient, 0 for what overflows.
    """
    exact: dict[int, Pair] = {}
    largest = sizes[1].copy()

    def measure(groups: Any) -> None:
        for i in map(int, groups):
            exact[i] = measured([i])
            largest[i] = exact[i].gradient

    def first(count: int) -> list[int]:
        return [i for i in np.argsort(-largest)[:count] if largest[i] and int(i) not in exact]

    odd = np.flatnonzero(hidden | (sizes.max(0) == 0))
    unseen = measured(odd) if len(odd) else Pair(0.0, 0.0)
    matters = any(a > SMALL * min(b, 1.0) for a, b in zip(unseen, total, strict=True))
    if matters and len(odd) <= KINKS:
        measure(odd)
        unseen = Pair(0.0, 0.0)
    while new := first(LARGEST):  # one that turns out smaller makes room
        measure(new)
    surprising = any(
        pair.gradient > max(SURPRISING * sizes[1, i], SMALL * total.gradient)
        for i, pair in exact.items()
        if not hidden[i]
    )
    if surprising:  # others may be larger than they seem, too
        measure(first(KINKS))
    return exact, unseen, surprising
