"""An LSTM language model that needs a loss scale: float16 without one fails to converge.

    python examples/lstm.py --size small --policy mixed_float16 --loss-scale none
    python examples/lstm.py --size small --figure lstm.png

A batch is one of `--parts` parts of a larger batch, and the loss is divided by the size of the
larger one, as with accumulation or several devices. With 256 parts, the mean is over 2^18 words.
The cotangents are then 256 times smaller, and float16 flushes them to zero without a loss scale.
(Micikevicius et al., 2018, figure 4, shows an LSTM with 2048 words per batch and a vocabulary of
793,000.)

`--figure` trains once for each row of the table and draws the curves. Data: words of Python's help
topics, or of the .txt files of `--data FOLDER`. These are the expected figures of the small size on
a CPU, in nats per word. The last row, spread, is the range of float32 over three seeds:

    policy                           held out  training
    float32                          2.917     3.535
    mixed_bfloat16                   2.921     3.532
    mixed_float16                    2.915     3.535
    mixed_float16 --loss-scale none  5.53      8.388
    spread                           0.006233  0.07731
"""

import collections
import functools
import re
import shlex

import common
import flax.linen as nn
import jax
import numpy as np
import optax

import mpjax
import mpjax.linen

NAMES = ("steps", "batch", "context", "vocabulary", "width", "layers", "parts", "rate", "figure")
SIZES = {
    "smoke": dict(zip(NAMES, (3, 2, 8, 64, 8, 1, 1, 1e-2, ""), strict=True)),
    "small": dict(zip(NAMES, (400, 32, 32, 2048, 64, 1, 256, 1e-2, ""), strict=True)),
    "full": dict(zip(NAMES, (50000, 128, 64, 65536, 1024, 2, 32, 1e-3, ""), strict=True)),
}


class LSTM(nn.Module):
    vocabulary: int
    width: int
    layers: int

    @nn.compact
    def __call__(self, words):
        x = nn.Embed(self.vocabulary, self.width)(words)
        for _ in range(self.layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width))(x)
        return nn.Dense(self.vocabulary)(x)


def read(options):
    """Returns training and held-out words as numbers; 0 stands for every rare word."""
    split = lambda text: re.findall(r"\w+|[^\w\s]", bytes(text).decode(errors="replace"))  # noqa: E731
    texts = [split(text) for text in common.read_text(options.data)]
    frequent = collections.Counter(texts[0]).most_common(options.vocabulary - 1)
    number = {word: i for i, (word, _) in enumerate(frequent, start=1)}
    return [np.array([number.get(word, 0) for word in text], np.int32) for text in texts]


def train(options):
    if options.figure:
        return draw(options)
    text, held_out = read(options)
    model = LSTM(options.vocabulary, options.width, options.layers)

    def cross_entropy(params, words):
        logits = model.apply({"params": params}, words[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, words[:, 1:]).mean()

    windows = common.windows(text, options.context + 1)
    params = jax.jit(model.init)(jax.random.key(options.seed), windows[:1])["params"]
    # Adam divides by the size of the gradients, so their scale cancels, if epsilon is small.
    adam = optax.adam(optax.cosine_decay_schedule(options.rate, options.steps), eps=1e-16)
    scale = mpjax.DynamicLossScale(growth_interval=20)  # a short run has no time for 2000
    float16 = mpjax.get_policy(options.policy).needs_loss_scaling
    state = mpjax.linen.TrainState.create(
        apply_fn=model.apply,
        params=params,
        tx=adam,
        policy=options.policy,
        loss_scale=scale if float16 and options.loss_scale == "auto" else options.loss_scale,
    )

    @jax.jit
    def step(state, words):
        part_of_mean = lambda params: cross_entropy(params, words) / options.parts  # noqa: E731
        loss, grads = state.value_and_grad(part_of_mean)(state.params)
        return state.apply_gradients(grads=grads), options.parts * loss

    losses, scales = [], []
    batches = common.batches([windows], options.batch, options.seed)
    for _, (words,) in zip(common.steps(options.steps), batches, strict=False):
        state, loss = step(state, words)
        losses.append(loss)
        scales.append(state.loss_scale.loss_scale)

    evaluate = mpjax.autocast(cross_entropy, options.policy)
    some = common.windows(held_out, options.context + 1)[:: options.context]
    return {
        "figures": {
            "held out": evaluate(state.params, some[:256]),
            "training": np.mean(losses[-50:]),
        },
        "skipped": state.skipped_steps,
        "curves": {"loss": losses, "loss_scale": scales},
    }


def draw(options):
    """Trains once for each row of the table, and draws their curves; returns the last result."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in common.expected(__doc__) if row != common.SPREAD]
    for width, row in zip((5, 3.5, 2, 2), rows, strict=True):
        policy, _, scale = (*shlex.split(row), None, "auto")[:3]
        own = {"policy": policy, "loss_scale": scale, "figure": ""}
        result = train(type(options)(**{**vars(options), **own}))
        axes.plot(jax.device_get(result["curves"]["loss"]), linewidth=width, label=row)
    axes.set(xlabel="Step", ylabel="Training loss, nats per word")
    axes.legend()
    figure.savefig(options.figure, dpi=120)
    return result


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
