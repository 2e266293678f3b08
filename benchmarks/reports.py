"""What the reports of a training step cost it: with and without, timed in pairs.

python benchmarks/reports.py
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from paired import measure, report, timer
from tqdm import tqdm

import mpjax

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import byte_gpt
import digits_cnn

FORMS = {
    "without": {},
    "report_overflow": {"report_overflow": True},
    "report_underflow": {"report_underflow": True},
    "both": {"report_overflow": True, "report_underflow": True},
}


def timers(example: Any, policy: str) -> dict[str, Callable[[int], float]]:
    """Returns timers of an example's step in all forms."""
    batch = example.sample(example.load()[0], np.random.default_rng(0))
    found = {}
    for name, options in FORMS.items():
        init, step = mpjax.build_train_step(
            example.loss_fn, example.make_optimizer(example.STEPS), policy, **options
        )
        if example is digits_cnn:
            state = init(*example.initial(0), rng=jax.random.key(0))
        else:
            state = init(example.initial(0))
        found[name] = timer(state, step, batch)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="mixed_float16")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=10, help="per measurement")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "reports_cpu.json")
    args = parser.parse_args(argv)
    pairs = [(name, "without") for name in FORMS if FORMS[name]]
    examples = (byte_gpt, digits_cnn)
    with tqdm(total=args.rounds * len(examples), unit="round") as bar:
        found = {
            example.__name__: measure(
                timers(example, args.policy), pairs, args.rounds, args.steps, bar
            )
            for example in examples
        }
    settings = {"policy": args.policy, "rounds": args.rounds, "steps_per_round": args.steps}
    report(found, args.out, command="python benchmarks/reports.py", **settings)


if __name__ == "__main__":
    main()
