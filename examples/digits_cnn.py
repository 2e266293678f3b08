"""A convolutional network with BatchNorm on scikit-learn's digits, in any precision.

    python examples/digits_cnn.py --policy mixed_float16 --seed 0

Half of the digits are held out. Measured on a CPU with jax 0.10.2:

    policy            held-out accuracy   held-out loss
    float32           97.55%              0.0757
    mixed_bfloat16    97.66%              0.0724
    mixed_float16     97.44%              0.0716

Three seeds of float32 give 97.3% to 97.8%.
"""

import argparse
import functools
import json
import math
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm

import mpjax

STEPS, BATCH, LEARNING_RATE = 300, 128, 1e-2
# The host waits for the device only once per this many steps, for progress and timing.
INTERVAL = 20


class CNN(nn.Module):
    """Logits of the ten digits. It names no dtype: the parameters and inputs have theirs."""

    @nn.compact
    def __call__(self, images, train: bool):
        x = images
        for features in (32, 64):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), strides=(2, 2))
        x = nn.Dropout(0.25, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


model = CNN()


def load() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns training and held-out [images, labels]: the first half and the second.

    Unshuffled, as in scikit-learn's own example: the halves come from different writers.
    """
    digits = load_digits()
    arrays = (digits.images[..., None] / 16).astype(np.float32), digits.target.astype(np.int32)
    train_set, held_out = zip(*(np.array_split(array, 2) for array in arrays), strict=True)
    return list(train_set), list(held_out)


def sample(data: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """Returns a random batch."""
    rows = rng.choice(len(data[0]), BATCH, replace=False)
    return [array[rows] for array in data]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean loss in float32, whatever the dtype of the logits."""
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def loss_fn(params: Any, batch: Any, model_state: Any, rng: jax.Array) -> tuple[jax.Array, Any]:
    images, labels = batch
    logits, updated = model.apply(
        {"params": params, "batch_stats": model_state},
        images,
        train=True,
        rngs={"dropout": rng},
        mutable=["batch_stats"],
    )
    return cross_entropy(logits, labels), updated["batch_stats"]


def make_optimizer(steps: int) -> optax.GradientTransformation:
    return optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, steps))


@jax.jit
def initial(seed: int) -> tuple[Any, Any]:
    """Returns fresh parameters and BatchNorm statistics."""
    variables = model.init(jax.random.key(seed), jnp.zeros((1, 8, 8, 1)), train=False)
    return variables["params"], variables["batch_stats"]


def evaluate(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
    images, labels = batch
    logits = model.apply({"params": params, "batch_stats": model_state}, images, train=False)
    correct = jnp.argmax(logits, axis=-1) == labels
    return {"accuracy": correct.mean(), "held_out_loss": cross_entropy(logits, labels)}


@functools.cache
def evaluator(policy: str) -> Callable[..., dict[str, jax.Array]]:
    """Returns `evaluate` under a policy, with figures in float32. It is compiled once."""
    return mpjax.autocast(evaluate, mpjax.get_policy(policy).replace(output="float32"))


def explain(policy: str) -> mpjax.reports.CastReport:
    """Returns the plan of the gradient of a batch. Nothing is computed."""
    params, batch_stats = jax.eval_shape(initial, 0)
    batch = sample(load()[0], np.random.default_rng(0))
    params = jax.eval_shape(mpjax.get_policy(policy).cast_to_param, params)
    report = mpjax.explain(loss_fn, policy, argnums=0, has_aux=True)
    return report(params, batch, batch_stats, jax.eval_shape(jax.random.key, 0))


def train(
    policy: str = "mixed_bfloat16",
    steps: int = STEPS,
    seed: int = 0,
    loss_scale: Any = "auto",
    progress: Callable[[int], Any] = lambda steps: None,
    log: Callable[[int, Any], Any] | None = None,
) -> dict[str, Any]:
    """Trains from scratch and returns the held-out figures and the curves."""
    run = training(policy, steps, seed, loss_scale, log)
    while True:
        try:
            progress(next(run))
        except StopIteration as end:
            return end.value


def training(
    policy: str,
    steps: int,
    seed: int,
    loss_scale: Any,
    log: Callable[[int, Any], Any] | None,
) -> Generator[int, None, dict[str, Any]]:
    """Trains, yields the number of steps after each few of them, and returns what `train` does.

    `demo.py` takes several of them in turns, so that what else runs on the machine slows all alike.
    """
    train_set, held_out = load()
    rng = np.random.default_rng(seed)

    init, step = mpjax.build_train_step(
        loss_fn,
        make_optimizer(steps),
        policy,
        loss_scale=loss_scale,
        report_overflow=log is not None,
        report_underflow=log is not None,
    )
    params, batch_stats = initial(seed)
    state = init(params, model_state=batch_stats, rng=jax.random.key(seed))
    # Compiled ahead, so that step times contain no compilation.
    compiled = jax.jit(step, donate_argnums=0).lower(state, sample(train_set, rng)).compile()

    curves, seconds = [], []
    for chunk in np.array_split(range(steps), math.ceil(steps / INTERVAL)):
        start = time.perf_counter()
        for index in chunk:
            state, metrics = compiled(state, sample(train_set, rng))
            if log is not None:
                log(int(index), metrics)
            curves.append((metrics["loss"], metrics["loss_scale"]))  # stays on the device
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - start) / len(chunk))
        yield len(chunk)
    losses, scales = np.transpose(jax.device_get(curves)).tolist()

    figures = evaluator(policy)(state.params, state.model_state, held_out)
    return {
        "example": "digits_cnn",
        "policy": str(policy),
        "steps": steps,
        "seed": seed,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        **{name: float(figure) for name, figure in figures.items()},
        "final_train_loss": float(np.mean(losses[-INTERVAL:])),
        "skipped_steps": int(state.skipped_steps),
        "final_loss_scale": scales[-1],
        "step_ms": 1000 * float(np.median(seconds)),
        "curves": {"loss": losses, "loss_scale": scales},
    }


def name_or_number(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="mixed_bfloat16", help="as for mpjax.get_policy")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--loss-scale", type=name_or_number, default="auto", help="auto, none, dynamic or a number"
    )
    parser.add_argument("--out", type=Path, help="where to write the result and curves, as JSON")
    args = parser.parse_args(argv)

    with tqdm(total=args.steps, unit="step") as bar:
        result = train(args.policy, args.steps, args.seed, args.loss_scale, bar.update)
    print(
        f"{result['policy']}: held-out accuracy {result['accuracy']:.2%}, "
        f"held-out loss {result['held_out_loss']:.4f}, "
        f"final train loss {result['final_train_loss']:.4f}, "
        f"{result['skipped_steps']} steps skipped, "
        f"loss scale {result['final_loss_scale']:g}, {result['step_ms']:.1f} ms per step"
    )
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result))
        print(f"Written to {args.out}")


if __name__ == "__main__":
    main()
