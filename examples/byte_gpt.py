"""A small byte-level GPT, trained on the English text inside CPython in any precision.

    python examples/byte_gpt.py --policy mixed_float16 --seed 0

The last tenth of the text is held out. Bits per byte, measured on a CPU with Python 3.11 (the text
differs between Python versions) and jax 0.10.2. The last row predicts from counts of byte pairs:

    float32           2.495
    mixed_bfloat16    2.497
    mixed_float16     2.491
    pairs of bytes    3.342

Three seeds of float32 give 2.495 to 2.507.
"""

import argparse
import functools
import json
import math
import pydoc_data.topics
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import mpjax

STEPS, BATCH, CONTEXT, LEARNING_RATE = 300, 32, 32, 1e-2
WIDTH, HEADS, LAYERS = 64, 2, 2
# The host waits for the device only once per this many steps, for progress and timing.
INTERVAL = 20


class Block(nn.Module):
    """Attention and a two-layer perceptron; both start as the identity, to train faster."""

    @nn.compact
    def __call__(self, x, mask):
        zeros = nn.initializers.zeros
        attention = nn.MultiHeadDotProductAttention(HEADS, out_kernel_init=zeros)
        x = x + attention(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, kernel_init=zeros)(hidden)


class GPT(nn.Module):
    """Logits of the next byte. It names no dtype: the parameters have theirs."""

    @nn.compact
    def __call__(self, tokens):
        positions = jnp.arange(tokens.shape[1])
        x = nn.Embed(256, WIDTH)(tokens) + nn.Embed(CONTEXT, WIDTH)(positions)
        mask = nn.make_causal_mask(tokens, dtype=bool)
        for _ in range(LAYERS):
            x = Block()(x, mask)
        return nn.Dense(256)(nn.LayerNorm()(x))


model = GPT()


def load() -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of Python's help topics: the training text, and its held-out last tenth."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    data = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    train_set, held_out = np.split(data, [len(data) * 9 // 10])
    return train_set, held_out


def sample(data: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns a random batch of windows, one byte longer than the context."""
    starts = rng.integers(len(data) - CONTEXT, size=(BATCH, 1))
    return data[starts + np.arange(CONTEXT + 1)]


def windows(data: np.ndarray) -> np.ndarray:
    """Returns the text as batches of adjacent windows, which predict (almost) every byte once."""
    batches = (len(data) - 1) // (BATCH * CONTEXT)
    starts = CONTEXT * np.arange(batches * BATCH).reshape(batches, BATCH, 1)
    return data[starts + np.arange(CONTEXT + 1)]


def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
    logits = model.apply({"params": params}, batch[:, :-1])
    # The loss is float32, whatever the dtype of the logits.
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), batch[:, 1:]
    )
    return losses.mean()


def make_optimizer(steps: int) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 10, steps)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01)
    )


@jax.jit
def initial(seed: int) -> Any:
    """Returns fresh parameters."""
    tokens = jnp.zeros((1, CONTEXT), jnp.int32)
    return model.init(jax.random.key(seed), tokens)["params"]


def evaluate(params: Any, batches: jax.Array) -> dict[str, jax.Array]:
    losses = jax.lax.map(lambda batch: loss_fn(params, batch), batches)
    return {"bits_per_byte": losses.mean() / math.log(2)}


@functools.cache
def evaluator(policy: str) -> Callable[..., dict[str, jax.Array]]:
    """Returns `evaluate` under a policy, with figures in float32. It is compiled once."""
    return mpjax.autocast(evaluate, mpjax.get_policy(policy).replace(output="float32"))


def explain(policy: str) -> mpjax.reports.CastReport:
    """Returns the plan of the gradient of a batch. Nothing is computed."""
    params = jax.eval_shape(mpjax.get_policy(policy).cast_to_param, jax.eval_shape(initial, 0))
    batch = sample(load()[0], np.random.default_rng(0))
    return mpjax.explain(loss_fn, policy, argnums=0)(params, batch)


def bigram_bits_per_byte() -> float:
    """Returns the held-out figure of a model that counts pairs of bytes: the baseline."""
    train_set, held_out = load()
    counts = np.full((256, 256), 0.1)
    np.add.at(counts, (train_set[:-1], train_set[1:]), 1)
    chances = counts / counts.sum(axis=1, keepdims=True)
    return float(-np.log2(chances[held_out[:-1], held_out[1:]]).mean())


def train(
    policy: str = "mixed_bfloat16",
    steps: int = STEPS,
    seed: int = 0,
    loss_scale: Any = "auto",
    progress: Callable[[int], Any] = lambda steps: None,
    log: Callable[[int, Any], Any] | None = None,
) -> dict[str, Any]:
    """Trains from scratch and returns the held-out figure and the curves."""
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
    state = init(initial(seed))
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

    figures = evaluator(policy)(state.params, windows(held_out))
    return {
        "example": "byte_gpt",
        "policy": str(policy),
        "steps": steps,
        "seed": seed,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        **{name: float(figure) for name, figure in figures.items()},
        "bigram_bits_per_byte": bigram_bits_per_byte(),
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
        f"{result['policy']}: {result['bits_per_byte']:.3f} held-out bits per byte "
        f"(pairs of bytes: {result['bigram_bits_per_byte']:.3f}), "
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
