"""What float16 does to gradients, by loss scale and batch size: the reason for loss scaling.

    python benchmarks/underflow.py

Trains the byte-level GPT in float32 for a while, then takes one gradient in float16 and compares it
with float32's. A mean over n examples divides every cotangent by n, so larger batches underflow.
A loss scale of 1/n on a small batch makes its cotangents as small; the gradient suffers more, for
the sum over examples, which brings weights' gradients back up, is the small batch's.
"""

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from rich import box
from rich.console import Console
from rich.table import Table

import mpjax

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import byte_gpt


def trained(steps: int, data: np.ndarray, rng: np.random.Generator) -> Any:
    """Returns the parameters after some steps in float32."""
    optimizer = byte_gpt.make_optimizer(byte_gpt.STEPS)
    init, step = mpjax.build_train_step(byte_gpt.loss_fn, optimizer, "float32")
    state, step = init(byte_gpt.initial(0)), jax.jit(step, donate_argnums=0)
    for _ in range(steps):
        state, _ = step(state, byte_gpt.sample(data, rng))
    return state.params


def gradient(params: Any, batch: np.ndarray, dtype: str, scale: float) -> jax.Array:
    """Returns the unscaled gradient, as one float32 vector."""

    def loss(params):
        return byte_gpt.loss_fn(mpjax.cast(params, dtype), batch)

    grad_fn = mpjax.scaled_value_and_grad(loss, mpjax.StaticLossScale(scale))
    return ravel_pytree(jax.jit(grad_fn)(params)[1])[0]


def compare(params: Any, batch: np.ndarray, scale: float) -> dict[str, Any]:
    """Returns how far float16's gradient is from float32's."""
    exact, half = (gradient(params, batch, *how) for how in (("float32", 1.0), ("float16", scale)))
    return {
        "batch": len(batch),
        "loss_scale": scale,
        "relative_error": float(jnp.linalg.norm(half - exact) / jnp.linalg.norm(exact)),
        "entries_lost": float(jnp.mean((half == 0)[exact != 0])),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="of training beforehand")
    parser.add_argument("--times", type=int, default=256, help="how much larger the large batch is")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "underflow_cpu.json")
    args = parser.parse_args(argv)

    data, _ = byte_gpt.load()
    rng = np.random.default_rng(0)
    params = trained(args.steps, data, rng)
    small = byte_gpt.sample(data, rng)
    large = np.concatenate([byte_gpt.sample(data, rng) for _ in range(args.times)])
    cases = [
        (small, 1.0),
        (small, 1 / args.times),
        (small, 2.0**16),
        (large, 1.0),
        (large, 2.0**16),
    ]
    rows = [compare(params, batch, scale) for batch, scale in cases]

    out = Table(title="float16 gradients of the byte-level GPT", box=box.SIMPLE_HEAD)
    for column in ("Windows in batch", "Loss scale", "Relative error", "Entries lost"):
        out.add_column(column, justify="right")
    for row in rows:
        out.add_row(
            str(row["batch"]),
            f"{row['loss_scale']:g}",
            f"{row['relative_error']:.2%}",
            f"{row['entries_lost']:.3%}",
        )
    console = Console()
    console.print(out)
    report = {
        "command": "python benchmarks/underflow.py",
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "steps": args.steps,
        "rows": rows,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"Written to {args.out}", soft_wrap=True)


if __name__ == "__main__":
    main()
