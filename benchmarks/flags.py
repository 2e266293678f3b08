"""Tries XLA flags on a training step of yours, and prints which set of them is the fastest.

    python -m benchmarks.flags train.py:step [--try "xla_gpu_enable_triton_gemm=false"] ...

``step()`` returns ``(fun, args)``, as for `mpjax compile`: a jitted function whose first argument
is the state that it returns first, and the tuple of its arguments. On a GPU, with arrays as
arguments, the programs of all sets are timed in turn, in rounds, on the same state; a ratio is the
median over rounds, with its 95% bootstrap interval. Elsewhere, or with shapes as arguments, the
table has the time that `mpjax.compile_for` expects on ``--target``.

Flags change kernels, not only their speed: train a while with the winner before you keep it.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import jax
from rich.console import Console
from rich.table import Table

import mpjax
from benchmarks.on_gpu.statistics import faster, paired_ratio, quotient
from mpjax._src.tools.cli.load import TargetError, load

Flags = dict[str, bool | int | str]

# The short list: which kernels run matmuls, and how long XLA searches for their tiles.
SETS: tuple[Flags, ...] = (
    {},
    {"xla_gpu_enable_triton_gemm": False},
    {"xla_gpu_triton_gemm_any": True},
    {"xla_gpu_cudnn_gemm_fusion_level": 2},
    {"xla_gpu_exhaustive_tiling_search": True},
)
# The number of rounds, and the seconds of steps in a turn.
ROUNDS, TURN = 11, 0.5
NAMES = {"true": True, "false": False}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("step")
@click.option("--try", "more", multiple=True, help="Another set: NAME=VALUE, several by commas.")
@click.option("--target", default="h100", help="For expected times, where no GPU is.")
@click.option("--smoke", is_flag=True, help="Time on any device, briefly, to test that it runs.")
def main(step: str, more: tuple[str, ...], target: str, smoke: bool) -> None:
    """Try XLA flags on the training step that STEP, such as train.py:step, returns."""
    sets = [*SETS, *map(parsed, more)]
    try:
        fun, args = load(step)
    except TargetError as error:
        raise click.ClickException(str(error)) from error
    arrays = all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(args))
    if arrays and (smoke or jax.default_backend() == "gpu"):
        rows, best = timed(fun, args, sets, *((2, 0.0) if smoke else (ROUNDS, TURN)))
        where, found = f"timed on {jax.devices()[0].device_kind}", "Fastest"
    else:
        rows, best = expected(fun, args, sets, target)
        where, found = f"expected on {target}, not timed", "Expected to be the fastest"
    table = Table("flags", "ms", "relative to none", title=f"A step, {where}", box=None)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    click.echo(f"{found}: {written(best)}" if best else "No set is faster than none.")


def parsed(text: str) -> Flags:
    """Returns a set of flags from "NAME=VALUE,NAME=VALUE"."""
    pairs = [each.strip().removeprefix("--").partition("=") for each in text.split(",")]
    if not all(name.startswith("xla_") and value for name, _, value in pairs):
        raise click.BadParameter(f"{text!r} must be such as xla_gpu_autotune_level=4.")
    return {name: NAMES.get(value.lower(), value) for name, _, value in pairs}


def written(flags: Mapping[str, Any]) -> str:
    return " ".join(f"--{name}={str(value).lower()}" for name, value in flags.items()) or "none"


def why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:100]


# ---- timed ---------------------------------------------------------------------------------------


def timed(
    fun: Callable[..., Any], args: tuple[Any, ...], sets: Sequence[Flags], rounds: int, turn: float
) -> tuple[list[tuple[str, ...]], Flags | None]:
    """Times the programs of sets of flags in turn; returns the rows, and the fastest set."""
    lowered = (fun if hasattr(fun, "lower") else jax.jit(fun)).lower(*args)
    compiled, failed = {}, {}
    for number, flags in enumerate(sets):
        try:
            compiled[number] = lowered.compile(compiler_options=dict(flags))
        except Exception as error:  # a flag that this jaxlib does not know, or a compiler's fault
            failed[number] = why(error)
    if 0 not in compiled:
        raise click.ClickException(f"The step does not compile without flags: {failed[0]}")
    state, rest = args[0], args[1:]
    steps = {}
    for number, program in compiled.items():
        state = _threaded(program(state, *rest), state)  # the first run loads the program
        seconds, state = _run(program, state, rest, 1)
        steps[number] = max(1, round(turn / seconds))
    times: dict[int, list[float]] = {number: [] for number in compiled}
    for round_ in range(rounds):
        first = round_ % len(compiled)
        for number in (*list(compiled)[first:], *list(compiled)[:first]):
            seconds, state = _run(compiled[number], state, rest, steps[number])
            times[number].append(seconds / steps[number])
    ratios = {number: paired_ratio(found, times[0]) for number, found in times.items()}
    rows = [
        (written(flags), f"{1e3 * statistics.median(times[n]):.3f}", quotient(ratios[n]))
        if n in times
        else (written(flags), "-", failed[n])
        for n, flags in enumerate(sets)
    ]
    won = [number for number in times if number and faster(ratios[number])]
    best = min(won, key=lambda number: ratios[number]["median"], default=None)
    return rows, None if best is None else sets[best]


def _run(program: Any, state: Any, rest: tuple[Any, ...], steps: int) -> tuple[float, Any]:
    """Runs some steps; returns their seconds and the new state."""
    start = time.perf_counter()
    for _ in range(steps):
        out = program(state, *rest)
        state = _threaded(out, state)
    jax.block_until_ready(out)
    return time.perf_counter() - start, state


def _threaded(out: Any, state: Any) -> Any:
    """Returns the state that a step returns, alone or first, or the one that it was given."""
    kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), each) for each in (state, out)]
    if kinds[1] == kinds[0]:
        return out
    if isinstance(kinds[1], tuple) and kinds[1] and kinds[1][0] == kinds[0]:
        return out[0]
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        raise click.ClickException(
            "The step donates its first argument, but returns nothing like it, so that it cannot "
            "run again. Return the new state first: (state, metrics)."
        )
    return state


# ---- expected ------------------------------------------------------------------------------------


def expected(
    fun: Callable[..., Any], args: tuple[Any, ...], sets: Sequence[Flags], target: str
) -> tuple[list[tuple[str, ...]], Flags | None]:
    """Compiles the programs of sets of flags; returns the rows, and the set expected to be best.

    Where no step was timed on the target, the times are the bounds of its kernels.
    """
    rows, times = [], {}
    for number, flags in enumerate(sets):
        try:
            report = mpjax.compile_for(target, fun, *args, compiler_options=flags)
        except mpjax.errors.CompileError as error:
            rows.append((written(flags), "-", why(error)))
            continue
        times[number] = report.expected_ms or report.kernels_ms
        ratio = times[number] / times.get(0, times[number])
        rows.append((written(flags), f"{times[number]:.3f}", f"{ratio:.2f}"))
    best = min(times, key=lambda number: times[number], default=0)
    # Programs that differ by less than this cannot be told apart by expected times.
    return rows, sets[best] if best and times[best] < 0.98 * times.get(0, 0.0) else None


if __name__ == "__main__":
    main()
