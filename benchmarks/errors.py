"""Suite "errors": what `explain(errors=True)` estimates, beside what it estimates.

    python -m benchmarks --suite errors [gpt2 resnet50 ...]

Each model runs at its small size with the rows of the report of `explain`. Every row is measured:
the error of the gradient with that operation alone in 16 bits. Beside these errors, without those
that the report measures itself: the rank correlation of the estimates by 8 and 16 probes, and the
largest factor between estimate and measurement among the ten largest. Then the measured error of
all together beside that of `compare`, and what 8 probes cost: processor time in gradients of the
float32 program, and memory beside the arguments relative to that gradient's without
`jax.checkpoint`.
"""

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
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.tools.instruments import contributions, error_report
from mpjax._src.tools.instruments.programs import make_program, training_scale

CASES = tuple(SMALL)
POLICIES = ("mixed_bfloat16", "mixed_float16")
PROBES, MORE, ROUNDS = 8, 16, 3
BATCH = 8


def run(options: Options, results: Results) -> None:
    """Measures the rows that are missing."""
    for model in options.cases:
        for policy in POLICIES:
            if not results.get(model, policy):
                results.put(model, policy, row(model, policy, options.smoke))


def row(model: str, policy: str, smoke: bool = False) -> Row:
    """Returns the figures of a model under a policy."""
    sizes = SMALL[model] | ({"batch": BATCH} if "batch" in SMALL[model] and not smoke else {})
    loss, params, rest, batch, _ = MODELS[model](**sizes)
    args = drawn(params, 0), drawn(rest, 1), drawn(batch, 2, data=True)
    program = make_program("explain", loss, get_policy(policy), args, {}, 0, True)
    scale = training_scale(program, get_policy(policy), "auto")
    runner = contributions.Runner(program, scale, PROBES)
    weights = error_report.weights_of(program, runner.names, None)
    numbers: dict[Any, int] = {}
    group_of = [numbers.setdefault(id(entry.step), len(numbers)) for entry in runner.entries]
    measure = contributions.Measure(runner, *weights)
    one_hot = np.eye(len(numbers))[group_of]
    alone = np.array([measure.pair(one_hot[:, i]).gradient for i in range(len(numbers))])
    together, results = measure.errors(np.ones(len(group_of)))
    compared = mpjax.compare(loss, policy, has_aux=True)(*args)
    figures = {"rows": len(numbers), "error": together.gradient}
    for probes in (PROBES, MORE):
        each = contributions.Runner(program, scale, probes) if probes != PROBES else runner
        scaled = np.array(weights) / measure.sizes[:, None]
        derived = each.derived(scaled.astype(np.float32))[1:] @ one_hot
        estimated = np.sqrt((derived**2).mean(0))
        largest = np.argsort(-alone)[:10]
        largest = largest[(alone * estimated)[largest] > 0]
        factors = np.maximum(estimated / alone, alone / estimated)[largest]
        figures |= {
            f"rank_{probes}": float(spearmanr(estimated, alone).statistic),
            f"factor_{probes}": float(factors.max()),
        }
    shared = [n for n in results if n in compared.results and n not in compared.noise]
    figures["to_compare"] = float(
        np.median([results[n] / compared.results[n] for n in shared if compared.results[n]])
    )
    return figures | cost(runner, loss, args)


def cost(runner: contributions.Runner, loss: Any, args: Any) -> Row:
    """Returns the cost of the estimates relative to a gradient."""
    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*args).compile()
    weights = jnp.zeros((2, len(runner.names)))
    inputs = runner.inputs, jnp.zeros(len(runner.entries)), weights, True
    probing = runner._run.lower(*inputs).compile()
    seconds = [
        (seconds_of(lambda: probing(*inputs)), seconds_of(lambda: gradient(*args)))
        for _ in range(ROUNDS)
    ]
    return {
        "gradients": float(np.median([a / b for a, b in seconds])),
        "memory": memory_of(probing) / memory_of(gradient),
    }


def memory_of(compiled: Any) -> int:
    """Returns the bytes that a program takes beside its arguments."""
    found = compiled.memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes


def seconds_of(run: Any) -> float:
    start = time.process_time()
    jax.block_until_ready(run())
    return time.process_time() - start
