"""Steps under autocast against casts placed by hand, timed in pairs on the device at hand.

    python benchmarks/autocast_cpu.py

Small versions of `models.py`: each model is written once, and runs in float32, with flax's
``dtype=`` by hand, and under `mpjax.autocast` of the float32 model. In bfloat16 alone: by hand,
`jax.nn.dot_product_attention` asks for a float16 algorithm that XLA:CPU does not have.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from models import MODELS, training_step
from paired import measure, report, timer
from tqdm import tqdm

import mpjax

HERE = Path(__file__).parent
SIZES = {
    "gpt2": {"batch": 8, "length": 128, "layers": 4, "width": 128, "heads": 4, "vocabulary": 512},
    "resnet50": {"batch": 8, "size": 64},
}
RATIOS = [("autocast", "by hand"), ("autocast", "float32"), ("by hand", "float32")]


def timers(name: str) -> dict[str, Callable[[int], float]]:
    rng = np.random.default_rng(0)

    def concrete(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 512, leaf.shape), leaf.dtype)
        fan_in = max(1, int(np.prod(leaf.shape[:-1])))
        return jnp.asarray(rng.normal(size=leaf.shape) / np.sqrt(fan_in), leaf.dtype)

    loss, params, rest, batch, optimizer = MODELS[name](**SIZES[name])
    losses = {
        "float32": loss,
        "by hand": MODELS[name](dtype=jnp.bfloat16, **SIZES[name])[0],
        "autocast": mpjax.autocast(loss, "mixed_bfloat16"),
    }
    params, batch = jax.tree.map(concrete, (params, batch))
    rest = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), rest)
    state = params, rest, optimizer.init(params)
    return {label: timer(state, training_step(f, optimizer), batch) for label, f in losses.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--steps", type=int, default=2, help="per measurement")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "autocast_cpu.json")
    args = parser.parse_args(argv)
    with tqdm(total=args.rounds * len(SIZES), unit="round") as bar:
        found = {n: measure(timers(n), RATIOS, args.rounds, args.steps, bar) for n in SIZES}
    command = "python benchmarks/autocast_cpu.py"
    report(found, args.out, command=command, rounds=args.rounds, steps_per_round=args.steps)


if __name__ == "__main__":
    main()
