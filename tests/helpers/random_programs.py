"""Random programs: made from a seed, judged by the measure, and shrunk if they fail.

A program is a tuple of steps ``(name, i, j, body)``: an operation, the values that it reads
(counted back from the latest one), and the steps of its inner program, if it has one. A program is
a function of two arrays and a dict of scalars, and returns its last two values.
"""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from measure import findings, rounded, rounded_backwards
from random_operations import MATMULS, OPS, SCALARS, SHAPE, Op

Program = tuple[tuple[str, int, int, Any], ...]
LARGEST = 45  # the number of operations that a program runs
HALVES = ("bfloat16", "float16")


def build(steps: Program, rounding: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Returns a program as a function that rounds operands of jumps, and residual streams."""

    def fun(x, y, scalars):
        return run(steps, x, y, scalars)[-2:]

    def run(steps, x, y, scalars):
        values = [x, y]
        for name, i, j, body in steps:
            a, b = (values[-1 - k % len(values)] for k in (i, j))
            a, b = map(rounding, (a, b)) if rounding and OPS[name].jumps else (a, b)
            values.append(apply(OPS[name], a, b, body, scalars))
        return values

    def apply(op: Op, a, b, body, scalars):
        if op.kind == "unary":
            return op.fun(a)
        if op.kind == "binary":
            return op.fun(a, b)
        if op.kind == "scalar":
            return op.fun(a, scalars)
        inner = lambda x, y, s: run(body, x, y, s)[-1]  # noqa: E731
        if rounding and op.stream:
            return op.stream(inner, a, b, scalars, rounding)
        return op.fun(inner, a, b, scalars)

    return fun


def arguments(seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(rng.uniform(-1, 1, SHAPE), jnp.float32) for _ in range(2)]
    return (*arrays, {name: jnp.float32(value) for name, value in SCALARS.items()})


# ---- made ---------------------------------------------------------------------------------------


def names_in(steps: Program) -> Iterator[str]:
    for name, _, _, body in steps:
        yield name
        yield from names_in(body)


def size(steps: Program) -> int:
    """Returns the number of operations that a program runs."""
    return sum(OPS[name].turns * (size(body) or 1) for name, _, _, body in steps)


def generate(seed: int, leave_out: Sequence[str] = ()) -> Program:
    """Returns the program of a seed.

    Of three programs in a row, two contain the next operation, and the third a running sum.
    """
    names = [name for name in OPS if name not in leave_out]
    chains = [name for name in names if " steps of " in name]
    plain = [name for name in names if name not in chains]
    holders = [name for name in plain if OPS[name].kind == "program"]
    flat = [name for name in plain if OPS[name].kind != "program"]
    turn, kind = divmod(seed, 3)
    matmuls = [name for name in MATMULS if name in flat]
    rng = random.Random(seed)

    def step(depth, name=None):
        if name is None and depth and rng.random() < 0.4:
            name = rng.choice(rng.choice((holders, chains)))
        if name is None:
            name = rng.choice(matmuls) if rng.random() < 0.4 else rng.choice(flat)
        holds = OPS[name].kind == "program"
        body = [step(depth - 1) for _ in range(rng.choice((1, 1, 2, 3)))] if holds else []
        return name, rng.randrange(4), rng.randrange(4), tuple(body)

    def sums():
        """A state that a matmul makes, and terms computed from it. Long sums are more frequent."""
        (name,) = rng.choices(chains, [OPS[name].turns for name in chains])
        matmul = (matmuls[0], 0, 1, ())
        body = [step(0), matmul] if rng.random() < 0.5 else [matmul]
        return [(matmuls[0], 1, 2, ()), (name, 0, rng.choice((2, 3)), tuple(body))]

    while True:
        steps = [step(2) for _ in range(rng.randrange(5))]
        if kind < 2:
            steps.insert(
                rng.randrange(len(steps) + 1), step(2, plain[(2 * turn + kind) % len(plain)])
            )
        else:
            steps = [step(0), *sums(), *steps[:2]]
        if size(tuple(steps)) <= LARGEST and derivatives(tuple(steps)) >= 0:
            return tuple(steps)


def derivatives(steps: Program) -> int:
    """Returns how often a program can be differentiated; negative if it does so too often."""
    return min(
        min(OPS[name].derivatives, derivatives(body) - (name == "differentiated") if body else 9)
        for name, _, _, body in steps
    )


# ---- judged -------------------------------------------------------------------------------------


def fault(steps: Program, half: str, seed: int = 0, storage: str = "fast") -> str:
    """Returns what is wrong with a program under autocast, or "" if it is sound.

    The yardstick rounds the operands of discontinuous operations, because autocast may round them
    too, and the rounding can have an effect of any size. It also rounds residual streams, because
    models cast by hand do, and each result and gradient once: many of these programs have no
    matmul on the way to it, and autocast may store what is on the way in half.
    """
    rounding = functools.partial(rounded, half=half)

    def by_hand(x, y, scalars):
        stored = (rounded_backwards(array, half) for array in (x, y))
        return [*map(rounding, build(steps, rounding)(*stored, scalars))]

    draw = lambda i: arguments(seed + 1000 * i)  # noqa: E731
    argnums = (0, 1) if derivatives(steps) > 0 else None
    options = {"by_hand": by_hand, "storage": storage, "eager": True}
    try:
        return "\n".join(map(str, findings(build(steps), draw, half, argnums, **options)))
    except Exception as error:
        return "" if is_refused(steps) else f"{type(error).__name__}: {error}"


def is_refused(steps: Program) -> bool:
    """Returns whether JAX itself cannot run a program, without autocast."""
    fun, (x, y, scalars) = build(steps), arguments(0)
    try:
        run = jax.vjp if derivatives(steps) > 0 else jax.eval_shape
        jax.eval_shape(lambda x, y: run(lambda x, y: fun(x, y, scalars), x, y)[0], x, y)
    except NotImplementedError:
        return True
    return False


# ---- made small ---------------------------------------------------------------------------------


def smaller(steps: Program) -> Iterator[Program]:
    """Yields the programs that are one change smaller."""
    for at, (name, i, j, body) in enumerate(steps):
        before, after = steps[:at], steps[at + 1 :]
        if len(steps) > 1:
            yield before + after
        if body:
            yield before + body + after
        yield from (before + ((name, i, j, inner),) + after for inner in smaller(body))
        yield from (
            before + ((name, *ij, body),) + after for ij in ((0, j), (i, 0)) if ij != (i, j)
        )


def shrink(steps: Program, fails: Callable[[Program], Any], tries: int = 100) -> Program:
    """Returns a smallest program that still fails, among ``tries`` programs."""
    candidates = smaller(steps)
    while tries and (candidate := next(candidates, None)) is not None:
        tries -= 1
        if fails(candidate):
            steps, candidates = candidate, smaller(candidate)
    return steps


def report(seed: int, storage: str = "fast") -> str:
    """Judges the program of a seed; describes a smallest failing program as code to paste."""
    steps, half = generate(seed), HALVES[seed % 2]
    if not fault(steps, half, seed, storage):
        return ""
    steps = shrink(steps, lambda steps: fault(steps, half, seed, storage))
    call = f"random_programs.fault({steps!r}, {half!r}, {seed}, {storage!r})"
    return f"program {seed}:\n{call}\n{fault(steps, half, seed, storage)}"
