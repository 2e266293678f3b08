"""A sequence-to-sequence translator in NNX: one GRU reads, another writes with attention.

    python examples/translate.py --size small --policy mixed_float16

It writes Korean syllables in Latin letters. Python's unicodedata gives the name of each syllable
("HANGUL SYLLABLE GAG") and its letters. Words of four random syllables are read letter by letter,
and one syllable in ten never occurs in training (Sutskever et al., 2014; Bahdanau et al., 2015).
Both GRUs compute their state anew in every step, so autocast keeps it in half. The error is the
share of wrong letters in held-out syllables.

These are the expected figures of the small size on a CPU. The last row, spread, is the range of
float32 over three seeds:

    policy          errors %  training
    float32         1.605     0.01704
    mixed_bfloat16  1.605     0.01699
    mixed_float16   1.605     0.01704
    spread          0.9291    0.003085
"""

import functools
import unicodedata

import common
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax
import mpjax.nnx

SIZES = {
    "smoke": {"steps": 3, "batch": 4, "words": 50, "syllables": 2, "width": 8, "rate": 5e-3},
    "small": {"steps": 400, "batch": 64, "words": 20000, "syllables": 3, "width": 64, "rate": 5e-3},
    "full": {
        "steps": 20000,
        "batch": 512,
        "words": 10**6,
        "syllables": 8,
        "width": 1024,
        "rate": 1e-3,
    },
}
SYLLABLES = [chr(code) for code in range(0xAC00, 0xD7A4)]
START, LETTERS = 27, 28  # Latin letters are 1 to 26; 0 is the end and the padding


def read(options):
    """Returns training and held-out [Korean letters, Latin letters], padded with 0."""
    rng = np.random.default_rng(0)
    syllables = rng.permutation(SYLLABLES)
    rare = len(syllables) // 10
    pairs = []
    for known, count in ((syllables[rare:], options.words), (syllables[:rare], 512)):
        source = np.zeros((count, 3 * options.syllables), np.int32)
        target = np.zeros((count, 7 * options.syllables), np.int32)
        for i, word in enumerate(rng.choice(known, (count, options.syllables))):
            letters = [ord(x) - 0x10FF for x in unicodedata.normalize("NFD", "".join(word))]
            latin = "".join(unicodedata.name(syllable).split()[-1] for syllable in word)
            source[i, : len(letters)] = letters
            target[i, : len(latin)] = [ord(letter) - ord("A") + 1 for letter in latin]
        pairs.append([source, target])
    return pairs


class Translator(nnx.Module):
    def __init__(self, width, rngs):
        self.sources = nnx.Embed(256, width, rngs=rngs)
        self.targets = nnx.Embed(LETTERS, width, rngs=rngs)
        self.reader = nnx.RNN(nnx.GRUCell(width, width, rngs=rngs))
        self.writer = nnx.RNN(nnx.GRUCell(width, width, rngs=rngs))
        self.query = nnx.Linear(width, width, rngs=rngs)
        self.last = nnx.Linear(2 * width, LETTERS, rngs=rngs)

    def __call__(self, source, written):
        """Returns logits of the letters that follow those written."""
        blank = jnp.zeros((len(source), self.query.in_features))
        states = self.reader(self.sources(source), initial_carry=blank)
        # The writer starts with the reader's last state.
        wrote = self.writer(self.targets(written), initial_carry=states[:, -1])
        scores = jnp.einsum("bid,bjd->bij", self.query(wrote), states) / states.shape[-1] ** 0.5
        scores = jnp.where(source[:, None] > 0, scores, -1e30)
        found = nnx.softmax(scores) @ states
        return self.last(jnp.concatenate([wrote, found], -1))


def loss_fn(model, source, target):
    written = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=START)
    logits = model(source, written)
    return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean()


def translate(follow, source, length):
    """Returns the most likely letters, one after another; the writer runs again for each."""
    written = np.zeros((len(source), length + 1), np.int32)
    written[:, 0] = START
    for place in range(length):
        written[:, place + 1] = follow(source, written[:, :-1])[:, place]
    return written[:, 1:]


def train(options):
    data, (source, target) = read(options)
    model = Translator(options.width, nnx.Rngs(options.seed))
    schedule = optax.cosine_decay_schedule(options.rate, options.steps)
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    optimizer = mpjax.nnx.Optimizer(model, adam, options.policy, loss_scale=options.loss_scale)

    @nnx.jit
    def step(model, optimizer, source, target):
        loss, grads = mpjax.nnx.value_and_grad(loss_fn, optimizer)(model, source, target)
        optimizer.update(model, grads)
        return {"loss": loss, **optimizer.metrics()}

    losses, scales = [], []
    batches = common.batches(data, options.batch, options.seed)
    for _, batch in zip(common.steps(options.steps), batches, strict=False):
        metrics = step(model, optimizer, *batch)
        losses.append(metrics["loss"])
        scales.append(metrics["loss_scale"])
    mpjax.raise_if_diverged(metrics, limit=20)

    run = mpjax.autocast(lambda model, *args: model(*args).argmax(-1), options.policy)
    translated = translate(functools.partial(run, model), source, target.shape[1])
    wrong = (translated != target)[target > 0].mean()
    return {
        "figures": {"errors %": 100 * wrong, "training": np.mean(losses[-50:])},
        "skipped": optimizer.metrics()["skipped_steps"],
        "curves": {"loss": losses, "loss_scale": scales},
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
