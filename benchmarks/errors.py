"""Suite "errors": what `explain(errors=True)` estimates, beside what it estimates.

    python -m benchmarks --suite errors [gpt2 resnet50 ...]

Each model runs at its small size, and a GPT of three layers at a larger one. Rows are measured one
by one: the error of the gradient with one operation alone in 16 bits. The largest estimates are,
and the others in random order as long as there is time: all of them, in most models. Figures:

- ``rows``, and how many of them are ``checked``
- ``error``, that of the gradient; ``to_compare``, the errors of the results relative to those that
  `compare` finds (the median)
- ``rank_4``, ``rank_8``: the rank correlation of measurements with the estimates by 4 and by 8
  probes; ``factor_4``, ``factor_8``: the largest factor between the two among the ten largest
  measurements. Both of rows that have an estimate: the report measures the others.
- ``unseen``: the share of the error from rows that the report neither estimates nor measures
- ``shown``: the largest factor between the first ten rows of the report and their measurements
- ``first_order``: whether the report says that the first order explains the error
- ``gradients``: processor time of the estimates by 8 probes, in gradients of the float32 program;
  of each the shortest of several runs
- ``memory``: theirs beside the arguments, relative to that gradient's without `jax.checkpoint`
"""

import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import spearmanr

import mpjax
from benchmarks import Options
from benchmarks.models import MODELS, SMALL
from benchmarks.on_cpu.codes import drawn
from benchmarks.results import Results, Row
from mpjax._src.core.base.contexts import constants_as_casts
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.tools.instruments import contributions, error_report
from mpjax._src.tools.instruments.programs import make_program, training_scale

# At this size the 355M model is the other GPT-2.
BATCH = {"batch": 8}
LARGER = {"layers": 3, "width": 256, "heads": 8, "vocabulary": 1024, "length": 128}
SIZES = {k: v | (BATCH if "batch" in v else {}) for k, v in SMALL.items() if k != "gpt2_medium"}
CASES = {name: (name, sizes) for name, sizes in SIZES.items()}
CASES["gpt2, 3 layers of width 256"] = "gpt2", LARGER | BATCH
PLAIN = {"llama_remat": "llama"}  # the same model without `jax.checkpoint`
PARTS = ("mixed_bfloat16", "mixed_float16")
PROBES, TEN = 8, 10
FIRST, LEAST, SECONDS = 15, 60, 60.0  # rows that are measured in any case, and the time for others
ROUNDS, SHORT = 3, 1.0  # how often a program is timed, and for how many seconds at least


def run(options: Options, results: Results) -> None:
    """Measures the rows that are missing."""
    for policy, case in itertools.product(options.parts, options.cases):
        if not results.get(case, policy):
            results.put(case, policy, row(case, policy, options.smoke))
            jax.clear_caches()


def row(case: str, policy: str, smoke: bool = False) -> Row:
    """Returns the figures of a model under a policy."""
    model, sizes = CASES[case]
    loss, params, rest, batch, _ = MODELS[model](**SMALL[model] if smoke else sizes)
    plain, *_ = MODELS[PLAIN.get(model, model)](**SMALL[model] if smoke else sizes)
    args = drawn(params, 0), drawn(rest, 1), drawn(batch, 2, data=True)
    figures, probing = checked(loss, policy, args, True)
    del figures["estimated"]
    return figures | cost(probing, jax.jit(jax.value_and_grad(plain, has_aux=True)), args)


def checked(
    loss: Any, policy: str, args: Any, has_aux: bool = False, probes: int = PROBES
) -> tuple[Row, Any]:
    """Returns what measurements say of the estimates, and what estimates, with its arguments."""
    with constants_as_casts():
        program = make_program("explain", loss, get_policy(policy), args, {}, 0, has_aux)
    scale = training_scale(program, get_policy(policy), "auto")
    runner = contributions.Runner(program, scale, probes)
    weights = error_report.weights_of(program, runner.names, None)
    probing = compiled(runner, weights)
    numbers: dict[Any, int] = {}
    group_of = [numbers.setdefault(id(entry.step), len(numbers)) for entry in runner.entries]
    found = contributions.contributions(runner, group_of, *weights)
    compared = mpjax.compare(loss, policy, has_aux=has_aux)(*args)
    shared = [n for n in found.results if n not in compared.noise and compared.results.get(n)]
    of_compare = [found.results[n] / compared.results[n] for n in shared]
    return {
        "rows": len(numbers),
        "error": found.total.gradient,
        "to_compare": float(np.median(of_compare)),
        **held_against(runner, group_of, weights, found),
        "first_order": is_first_order(found),
    }, probing


def is_first_order(found: contributions.Contributions) -> bool:
    """Returns what the report says."""
    total, first, squares = (x.gradient for x in (found.total, found.first_order, found.squares))
    return error_report.ErrorReport(
        (), total, found.total.loss, first, squares, found.results, surprising=found.surprising
    ).is_first_order


def compiled(runner: contributions.Runner, weights: Any) -> Any:
    """Compiles a runner's program once for all, and returns it with arguments that probe."""
    mask = jnp.zeros(len(runner.entries))
    inputs = runner.inputs, mask, jnp.asarray(weights, jnp.float32), runner.numbers, True
    runner._run = runner._run.lower(*inputs).compile()
    return runner._run, inputs


def held_against(
    runner: contributions.Runner, group_of: Any, weights: Any, found: contributions.Contributions
) -> Row:
    """Returns the figures of estimates and of the report beside measurements of single rows."""
    measure = contributions.Measure(runner, *weights)
    scaled = (measure.weights / measure.sizes[:, None]).astype(np.float32)
    member = np.eye(1 + max(group_of))[group_of]
    derived = runner.derived(scaled)[:, 1:] @ member  # (2, probes, rows)
    probes = derived.shape[1]
    estimates = {n: contributions.lengths(*derived[:, :n]) for n in (probes // 2, probes)}
    shown = np.array([pair.gradient for pair in found.pairs])
    order = np.random.default_rng(0).permutation(len(shown))
    first = {*np.argsort(-shown)[:FIRST].tolist(), *np.argsort(-estimates[probes])[:FIRST].tolist()}
    order = np.array([*first, *(i for i in order if i not in first)])
    alone, begun = [], time.monotonic()
    for i in order:
        if len(alone) >= len(first) + LEAST and time.monotonic() - begun > SECONDS:
            break
        alone.append(measure.pair(member[:, i]).gradient)
    order, exact = order[: len(alone)], np.array(alone)
    figures: Row = {
        "checked": len(alone),
        "estimated": int((estimates[probes][order] > 0).sum()),
    }
    for count, each in estimates.items():
        seen = each[order] > 0
        estimated, measured = each[order][seen], exact[seen]
        figures[f"rank_{count}"] = float(spearmanr(estimated, measured).statistic)
        figures[f"factor_{count}"] = largest_factor(estimated, measured, np.argsort(-measured))
    reported = shown[order]
    return figures | {
        "shown": largest_factor(reported, exact, np.argsort(-reported)),
        "unseen": contributions.ratio(found.unseen.gradient, found.total.gradient),
    }


def largest_factor(some: Any, others: Any, order: Any) -> float:
    """Returns the largest factor between figures, among the first ten of an order."""
    some, others = some[order[:TEN]], others[order[:TEN]]
    both = (some > 0) & (others > 0) & np.isfinite(some) & np.isfinite(others)
    ratios = some[both] / others[both]
    return float(np.maximum(ratios, 1 / ratios).max(initial=1.0))


def cost(probing: tuple[Any, Any], gradient: Any, args: Any) -> Row:
    """Returns the cost of the estimates relative to a gradient."""
    (estimate, inputs), gradient = probing, gradient.lower(*args).compile()
    return {
        "gradients": seconds_of(lambda: estimate(*inputs)) / seconds_of(lambda: gradient(*args)),
        "memory": memory_of(estimate) / memory_of(gradient),
    }


def memory_of(compiled: Any) -> int:
    """Returns the bytes that a program takes beside its arguments."""
    found = compiled.memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


def seconds_of(run: Any) -> float:
    """Returns the processor time of a program: that of the shortest run."""
    begun, took = time.process_time(), list[float]()
    while len(took) < ROUNDS or time.process_time() - begun < SHORT:
        start = time.process_time()
        jax.block_until_ready(run())
        took.append(time.process_time() - start)
    return min(took)
