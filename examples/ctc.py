"""Reads lines of text from pixels with CTC, whose long sums of exponentials stay float32.

    python examples/ctc.py --size small --policy mixed_float16

Words from Python's help topics are drawn in a matplotlib font, with noise. A convolutional network
reads columns of pixels. CTC (Graves et al., 2006) sums over all alignments of columns and letters:
each step of a scan computes a logsumexp of log probabilities down to -1e5, beyond float16's range.
Autocast keeps it in float32, and the loss is plain optax. The error is the edit distance in
letters, over held-out words.

These are the expected figures of the small size on a CPU. The last row, spread, is the range of
float32 over three seeds:

    policy          errors %  training
    float32         3.27      0.1241
    mixed_bfloat16  3.179     0.1532
    mixed_float16   2.634     0.1085
    spread          0.9991    0.05013
"""

import functools
import re

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
import mpjax.linen

SIZES = {
    "smoke": {"steps": 8, "batch": 4, "words": 40, "letters": 5, "width": 4, "rate": 3e-3},
    "small": {"steps": 400, "batch": 32, "words": 3000, "letters": 8, "width": 24, "rate": 3e-3},
    "full": {
        "steps": 20000,
        "batch": 256,
        "words": 9000,
        "letters": 16,
        "width": 256,
        "rate": 1e-3,
    },
}
HEIGHT, PITCH = 14, 9  # height of a line and width of a letter, in pixels


def read(options):
    """Returns noisy pixels [words, height, width], letters [words, length] and the padding."""
    from matplotlib import font_manager
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), 12)
    texts = [bytes(text).decode(errors="replace") for text in common.read_text(None)]
    found = re.findall(rf"\b[a-z]{{3,{options.letters}}}\b", " ".join(texts))
    words = sorted(set(found))
    rng = np.random.default_rng(0)
    words = [words[i] for i in rng.permutation(len(words))[: options.words]]
    pixels = np.zeros((len(words), HEIGHT, PITCH * options.letters), np.float32)
    letters = np.zeros((len(words), options.letters), np.int32)
    for i, word in enumerate(words):
        image = Image.new("L", pixels.shape[:0:-1])
        ImageDraw.Draw(image).text((1, 0), word, fill=255, font=font)
        pixels[i] = np.asarray(image, np.float32) / 255
        letters[i, : len(word)] = [ord(letter) - ord("a") + 1 for letter in word]
    pixels += rng.normal(0, 0.2, pixels.shape)
    return pixels.astype(np.float32), letters, (letters == 0).astype(np.float32)


class Reader(nn.Module):
    """From pixels to logits of letters for every third column; 0 is CTC's blank."""

    width: int

    @nn.compact
    def __call__(self, pixels):
        x = nn.relu(nn.Conv(self.width, (3, 3), (2, 1))(pixels[..., None]))
        x = nn.relu(nn.Conv(2 * self.width, (3, 3), (2, 3))(x))
        x = x.swapaxes(1, 2).reshape(len(x), x.shape[2], -1)
        x = nn.LayerNorm()(nn.relu(nn.Conv(4 * self.width, (5,))(x)))
        return nn.Dense(27)(x)


def spell(logits):
    """Returns the letters of the best path, without repetitions and blanks."""
    best = np.asarray(logits.argmax(-1))
    changes = [row[np.flatnonzero(np.diff(row, prepend=0))] for row in best]
    return [[int(letter) for letter in row if letter] for row in changes]


def edits(one, other):
    """Returns the edit distance of two lists: insertions, deletions and substitutions."""
    last = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        row = [i]
        for j, b in enumerate(other):
            row.append(min(last[j + 1] + 1, row[j] + 1, last[j] + (a != b)))
        last = row
    return last[-1]


def train(options):
    data = read(options)
    held_out = len(data[0]) // 10
    model = Reader(options.width)
    params = jax.jit(model.init)(jax.random.key(options.seed), data[0][:1])["params"]
    schedule = optax.cosine_decay_schedule(options.rate, options.steps)
    state = mpjax.linen.TrainState.create(
        apply_fn=model.apply,
        params=params,
        tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule)),
        policy=options.policy,
        loss_scale=options.loss_scale,
    )

    @jax.jit
    def step(state, pixels, letters, padding):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, pixels)
            return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), letters, padding).mean()

        loss, grads = state.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses, scales = [], []
    batches = common.batches([x[held_out:] for x in data], options.batch, options.seed)
    for _, batch in zip(common.steps(options.steps), batches, strict=False):
        state, loss = step(state, *batch)
        losses.append(loss)
        scales.append(state.loss_scale.loss_scale)

    read_out = mpjax.autocast(lambda p, x: model.apply({"params": p}, x), options.policy)
    found = spell(read_out(state.params, data[0][:held_out]))
    wanted = [[int(letter) for letter in row if letter] for row in data[1][:held_out]]
    wrong = sum(edits(*pair) for pair in zip(found, wanted, strict=True))
    return {
        "figures": {
            "errors %": 100 * wrong / sum(map(len, wanted)),
            "training": np.mean(losses[-50:]),
        },
        "skipped": state.skipped_steps,
        "curves": {"loss": losses, "loss_scale": scales},
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
