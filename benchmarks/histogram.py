"""What counting gradients costs a training step: with and without, timed in pairs.

python benchmarks/histogram.py
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
from paired import measure, report, timer
from tqdm import tqdm

import mpjax

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import byte_gpt

PAIRS = [("with a histogram", "without"), ("with one every 10 steps", "without")]


def timers() -> dict[str, Callable[[int], float]]:
    """Returns timers of the GPT's float32 step in three forms."""
    optimizer = byte_gpt.make_optimizer(byte_gpt.STEPS)
    params = byte_gpt.initial(0)
    batch = byte_gpt.sample(byte_gpt.load()[0], np.random.default_rng(0))
    empty = mpjax.gradient_histogram(jax.tree.map(np.zeros_like, params))

    def step_with(count):
        def step(state, batch):
            params, opt_state, histogram, index = state
            loss, grads = jax.value_and_grad(byte_gpt.loss_fn)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            histogram = count(index, grads, histogram)
            return (optax.apply_updates(params, updates), opt_state, histogram, index + 1), loss

        return step

    def always(index, grads, histogram):
        return mpjax.gradient_histogram(grads, histogram)

    def sometimes(index, grads, histogram):
        return jax.lax.cond(index % 10 == 0, always, lambda i, g, h: h, index, grads, histogram)

    state = params, optimizer.init(params), empty, np.int32(0)
    forms = {
        "without": lambda index, grads, histogram: histogram,
        "with a histogram": always,
        "with one every 10 steps": sometimes,
    }
    return {name: timer(state, step_with(count), batch) for name, count in forms.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=10, help="per measurement")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "histogram_cpu.json")
    args = parser.parse_args(argv)
    with tqdm(total=args.rounds, unit="round") as bar:
        found = {"byte_gpt": measure(timers(), PAIRS, args.rounds, args.steps, bar)}
    command = "python benchmarks/histogram.py"
    report(found, args.out, command=command, rounds=args.rounds, steps_per_round=args.steps)


if __name__ == "__main__":
    main()
