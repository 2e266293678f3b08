"""Suite "weights": bytes per weight, quality and bytes moved, for ways to keep weights and moments.

    python -m benchmarks --suite weights [update step quality ...]

    update   the optimizer's part of a step, AdamW on GPT-2 355M, compiled for an H100: bytes kept
             for each weight, bytes moved for each weight, temporary memory
    step     the whole training step of the same model, compiled for an H100
    quality  held-out figures over three seeds, trained on the CPU: two models of the demo, two
             models on which no choice was based, and one with small updates. A long case

The first two need mpjax[aot]. Each row is a way to keep weights and moments. All compute in
bfloat16.
"""

import datetime
import functools
import time
from collections.abc import Callable, Iterator
from statistics import mean
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks import Options
from benchmarks.models import MODELS
from benchmarks.on_cpu.tasks import EXAMPLES, example
from benchmarks.results import Results, Row
from benchmarks.rivals import program
from mpjax._src.core.training.levels import under_policy

jax.config.update("jax_platforms", "cpu")

# The ways to keep weights and moments, and their policies.
KEPT = {
    "float32 weights": "mixed_bfloat16",
    "float32 weights, 8-bit moments": "mixed_bfloat16,moments=8bit",
    "masters": "O2:bfloat16",
    "split masters": "O2:bfloat16,masters=split",
    "split8 masters": "O2:bfloat16,masters=split8",
    "split masters, 8-bit moments": "O2:bfloat16,masters=split,moments=8bit",
    "split8 masters, 8-bit moments": "O2:bfloat16,masters=split8,moments=8bit",
    "bfloat16 alone": "O3:bfloat16",
    "bfloat16, stochastic rounding": "O3:bfloat16,rounding=stochastic",
    "bfloat16, stochastic rounding, 8-bit moments": "O3:bfloat16,rounding=stochastic,moments=8bit",
    "bfloat16, Kahan summation": "O3:bfloat16,rounding=kahan",
}
REFERENCE, FLOAT32 = "optax.adamw", "float32"
MODEL, TARGET, SMOKE_LAYERS = "gpt2_medium", "H100", 1
WHOLE = (
    *("masters", "split masters, 8-bit moments", "split8 masters, 8-bit moments"),
    "float32 weights",
)

# The rows whose quality is measured. The parts that they combine train in the same way.
TRAINED = (
    *("split masters", "split masters, 8-bit moments", "split8 masters, 8-bit moments"),
    *("bfloat16 alone", "bfloat16, stochastic rounding", "bfloat16, Kahan summation"),
    "bfloat16, stochastic rounding, 8-bit moments",
)
SEEDS = range(3)
# The held-out figure of each model. If larger is better, the figure is negated.
FIGURES = {"byte_gpt": "bits_per_byte", "digits_cnn": "held_out_loss"}
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("bert", {}, "held out"),
    "moe": ("moe", {}, "bits per byte"),
    "bert, small updates": ("bert", {"rate": 1e-5}, "held out"),
}

CASES = ("update", "step", "quality")
LONG = ("quality",)


def run(options: Options, results: Results) -> list[str]:
    """Measures missing rows; returns the failures."""
    problems = []
    for case, name, measure in todo(options):
        if results.get(case, name):
            continue
        try:
            row = measure()
        except Exception as error:  # a failed row does not stop the others
            problems.append(f"{case}, {name}: {type(error).__name__}: {str(error)[:300]}")
        else:
            results.put(case, name, {**row, "date": datetime.date.today().isoformat()})
        jax.clear_caches()
    return problems


def todo(options: Options) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """Yields each case and name with the function that measures it."""
    sizes = {"layers": SMOKE_LAYERS} if options.smoke else {}
    if "update" in options.cases:
        for name in (REFERENCE, *KEPT):
            yield "update", name, functools.partial(update, name, sizes)
    if "step" in options.cases:
        for name in (REFERENCE, *WHOLE):
            yield "step", name, functools.partial(step, name, sizes)
    if "quality" in options.cases:
        for model in (*FIGURES, *OTHERS):
            for seed in SEEDS:
                for name in (FLOAT32, *TRAINED):
                    how = functools.partial(train, model, KEPT.get(name, name), seed, options.smoke)
                    if not options.smoke or (seed == 0 and name == FLOAT32):
                        yield "quality", f"{model}, {name}, seed {seed}", how


# ---- memory and bytes ----------------------------------------------------------------------------


def model(sizes: dict[str, Any]) -> tuple[Any, ...]:
    make: Any = MODELS[MODEL]
    layers = {"layers": sizes.get("layers", make.keywords["layers"])}
    return functools.partial(make.func, **{**make.keywords, **layers})


def optimizer_of(name: str, params: Any) -> tuple[Any, Any, Any]:
    """Returns parameters as they are stored, ``init``, and ``advance(params, state, grads)``."""
    inner = optax.adamw(1e-3)
    if name == REFERENCE:

        def advance(params, state, grads):
            updates, state = inner.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return params, inner.init, advance
    policy = mpjax.get_policy(KEPT[name])
    optimizer = under_policy(policy, inner, "optimizer")

    def step(params, state, grads):
        new = optimizer.step(grads, state, params)
        return new.params, new.state

    return jax.eval_shape(policy.cast_to_param, params), optimizer.init, step


def update(name: str, sizes: dict[str, Any]) -> Row:
    _, whole, *_ = model(sizes)()
    params, init, advance = optimizer_of(name, whole)
    state = jax.eval_shape(init, params)
    grads = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), whole)
    count = sum(x.size for x in jax.tree.leaves(whole))
    compiled = jax.jit(advance, donate_argnums=(0, 1))
    report = mpjax.compile_for(TARGET, compiled, params, state, grads)
    return {
        "kept_per_weight": round(held((params, state)) / count, 4),
        "moved_per_weight": round(report.bytes_accessed / count, 3),
        "temp_mib": round(report.temp_bytes / 2**20, 1),
    }


def step(name: str, sizes: dict[str, Any]) -> Row:
    start = time.monotonic()
    loss, params, rest, batch, _ = model(sizes)()
    if name == REFERENCE:  # relative to float32
        found = program(MODEL, "float32", "bfloat16", **sizes)
        state, train_step = found.state, found.step
    else:
        init, train_step = mpjax.build_train_step(
            lambda params, batch: loss(params, rest, batch)[0], optax.adamw(1e-3), KEPT[name]
        )
        state = jax.eval_shape(init, params)
    report = mpjax.compile_for(TARGET, jax.jit(train_step, donate_argnums=0), state, batch)
    return {
        "kept_mib": round(held(state) / 2**20, 1),
        "total_mib": round(report.total_bytes / 2**20, 1),
        "temp_mib": round(report.temp_bytes / 2**20, 1),
        "moved_gb": round(report.bytes_accessed / 1e9, 3),
        "seconds": round(time.monotonic() - start, 1),
    }


def held(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# ---- quality -------------------------------------------------------------------------------------


def train(name: str, policy: str, seed: int, smoke: bool) -> Row:
    """Returns the held-out figure of one run. Less is better."""
    if name in EXAMPLES:
        module = example(name)
        found = module.train(policy, 3 if smoke else module.STEPS, seed, "auto")
        return {"figure": FIGURES[name], "held_out": float(found[FIGURES[name]])}
    file, changes, figure = OTHERS[name]
    module = example(file)
    settings = {**module.SIZES["smoke" if smoke else "small"], **changes}
    found = module.train(
        SimpleNamespace(**settings, policy=policy, loss_scale="auto", seed=seed, data=None)
    )
    return {"figure": figure, "held_out": float(found["figures"][figure])}


def verdicts(rows: dict[str, Row]) -> Iterator[tuple[str, str, Row]]:
    """Yields the model, the row's name, and its mean over all seeds beside float32's spread."""
    for model in (*FIGURES, *OTHERS):
        values = {
            name: [rows.get(f"{model}, {name}, seed {s}", {}).get("held_out") for s in SEEDS]
            for name in (FLOAT32, *KEPT)
        }
        whole: dict[str, Any] = {k: seeds for k, seeds in values.items() if None not in seeds}
        if FLOAT32 in whole:
            low, high = min(whole[FLOAT32]), max(whole[FLOAT32])
            for name, seeds in whole.items():
                found = mean(seeds)
                yield (
                    model,
                    name,
                    {"mean": found, "float32": [low, high], "no_worse": found <= high},
                )
