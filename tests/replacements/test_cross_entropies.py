"""chunked_loss=true: a cross entropy that is written out runs by blocks of its logits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from support import assert_near, equations, fresh_rng, thorough_but

import mpjax
from mpjax._src.replacements import chunked

B, T, WIDTH, WORDS = 4, 12, 16, 300
RNG = fresh_rng()
HIDDEN, WEIGHT, BIAS = (
    RNG.normal(size=s).astype(np.float32) for s in ((B, T, WIDTH), (WIDTH, WORDS), (WORDS,))
)
LABELS = RNG.integers(0, WORDS, (B, T))
MASK = RNG.random((B, T)) < 0.6
each = optax.softmax_cross_entropy_with_integer_labels


def log_softmax(h, w):
    return jax.nn.log_softmax(h @ w)


def one_hot(labels=LABELS):
    return jax.nn.one_hot(labels, WORDS)


def flat(h, w, b):
    logits = (h @ w + b).reshape(-1, WORDS)
    return each(logits, LABELS.reshape(-1)).mean()


def with_z_loss(h, w, b):
    logits = h @ w
    normalizer = jax.nn.logsumexp(logits, -1)
    picked = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    return jnp.mean(normalizer - picked + 1e-2 * normalizer**2)


def shifted_by_hand(h, w, b):
    logits = h @ w
    logits -= logits.max(-1, keepdims=True)
    picked = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    return jnp.mean(jnp.log(jnp.exp(logits).sum(-1)) - picked)


def selected(h, w, b):
    logits = h @ w
    here = LABELS[..., None] == jnp.arange(WORDS)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.where(here, logits, 0).sum(-1))


def module(h, w, b):
    head = linen.Dense(WORDS)
    return each(head.apply({"params": {"kernel": w, "bias": b}}, h), LABELS).mean()


def one_by_one(h, w, b):
    def single(x, label):
        return -jax.nn.log_softmax(x @ w + b)[label]

    return jnp.mean(jax.vmap(jax.vmap(single))(h, LABELS))


# Losses whose sum is replaced, so that blocks may be rows.
SUMS = {
    "mean": lambda h, w, b: each(h @ w + b, LABELS).mean(),
    "sum": lambda h, w, b: each(h @ w, LABELS).sum(),
    "a module": module,
    "rows in one axis": flat,
    "a mean of means": lambda h, w, b: each(h @ w, LABELS).mean(-1).mean(),
    "a tied embedding": lambda h, w, b: each(jnp.einsum("btd,vd->btv", h, w.T), LABELS).mean(),
    "the other order": lambda h, w, b: each(jnp.einsum("dv,btd->btv", w, h), LABELS).mean(),
    "scaled": lambda h, w, b: each((h @ w) / 4 + b, LABELS).mean(),
    "the next token": lambda h, w, b: each((h @ w)[:, :-1], LABELS[:, 1:]).mean(),
    "masked": lambda h, w, b: jnp.sum(each(h @ w, LABELS) * MASK) / MASK.sum(),
    "where": lambda h, w, b: jnp.mean(each(h @ w, LABELS), where=MASK),
    "ignored": lambda h, w, b: jnp.sum(
        jnp.where(MASK, each(h @ w, jnp.where(MASK, LABELS, -WORDS - 5)), 0)
    ),
    "weights": lambda h, w, b: jnp.sum(each(h @ w, LABELS) * jnp.abs(b[:T]) * MASK) / 7,
    "one-hot": lambda h, w, b: -jnp.mean(jnp.sum(one_hot() * log_softmax(h, w), -1)),
    "one-hot, ignored": lambda h, w, b: (
        -jnp.sum(one_hot(jnp.where(MASK, LABELS, -1)) * log_softmax(h, w))
    ),
    "smoothed": lambda h, w, b: optax.softmax_cross_entropy(
        h @ w, optax.smooth_labels(one_hot(jnp.where(MASK, LABELS, -1)), 0.1)
    ).mean(),
    "on and off": lambda h, w, b: (
        -jnp.mean(
            jnp.sum(
                jnp.where(LABELS[..., None] == jnp.arange(WORDS), 0.9, 0.1 / (WORDS - 1))
                * log_softmax(h, w),
                -1,
            )
        )
    ),
    "selected": selected,
    "indexed": lambda h, w, b: (
        -log_softmax(h, w)[jnp.arange(B)[:, None], jnp.arange(T)[None], LABELS].mean()
    ),
    "one by one": one_by_one,
    "a z-loss": with_z_loss,
    "shifted by hand": shifted_by_hand,
}
# Losses of each row, which something else reads.
EACH = {
    # Without the 2, terms of both signs would cancel, and the sum be as small as its error.
    "a function of each": lambda h, w, b: jnp.sum(2 + jnp.sin(each(h @ w, LABELS))),
    "means of masked means": lambda h, w, b: jnp.mean(
        jnp.sum(each(h @ w, LABELS) * MASK, -1) / jnp.maximum(MASK.sum(-1), 1)
    ),
    "also returned": lambda h, w, b: (lambda x: x.mean() + 0 * jnp.max(x))(each(h @ w, LABELS)),
}


def accuracy(h, w, b):
    logits = h @ w
    return each(logits, LABELS).mean() + 0 * jnp.mean(jnp.argmax(logits, -1) == LABELS)


def returned(h, w, b):
    logits = h @ w
    return each(logits, LABELS).mean(), logits


def two_means(h, w, b):
    logits = h @ w
    return each(logits, LABELS).mean() + jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)


def precise(h, w, b):
    return each(jnp.dot(h, w, precision="highest"), LABELS).mean()


def rounded(h, w, b):
    return each((h @ w).astype(jnp.bfloat16).astype(jnp.float32), LABELS).mean()


def labels_of_other_rows(h, w, b):
    targets = jax.nn.one_hot(LABELS[0] % T, T)  # as many rows as words
    return -jnp.sum(targets.T * jax.nn.log_softmax(h[0] @ w[:, :T]))


def normalizers_of_other_rows(h, w, b):
    logits = h[0] @ w[:, :T]
    normalizers = jax.nn.logsumexp(logits, -1)[None]
    return -jnp.sum(jax.nn.one_hot(LABELS[0] % T, T) * (logits - normalizers))


def reversed_labels(h, w, b):
    logits = h @ w
    picked = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    return jnp.mean(2 * picked - jax.nn.logsumexp(logits, -1))


LEFT = {
    "accuracy": (accuracy, "its logits are also read by argmax"),
    "returned": (returned, "its logits are also returned"),
    "its normalizer": (two_means, "parts of it are also read elsewhere"),
    "a precision": (precise, "its matmul sets its own precision or sharding"),
    "a soft cap": (
        lambda h, w, b: each(30 * jnp.tanh(h @ w / 30), LABELS).mean(),
        "tanh computes its logits",
    ),
    "labels of other rows": (labels_of_other_rows, "its logits are also read by mul"),
    "normalizers of other rows": (normalizers_of_other_rows, "its logits are also read by sub"),
    "no cross entropy": (reversed_labels, "it is no cross entropy of labels"),
}


def policy(storage="fast", half="bfloat16"):
    return f"mixed_{half},storage={storage},chunked_loss=true"


def told(fun, policy=policy()):  # noqa: B008
    lines = mpjax.explain(fun, policy)(HIDDEN, WEIGHT, BIAS).summary()
    return [line.removeprefix("loss: ") for line in lines if line.startswith("loss: ")]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(chunked, "ROWS", 16)
    monkeypatch.setattr(chunked, "OPERATIONS_PER_BYTE", 1)  # so blocks are rows where they may be


@pytest.mark.parametrize("name", SUMS)
def test_each_spelling_of_a_reduced_loss_is_recognized(name):
    assert told(SUMS[name]) == ["in 3 blocks of rows"]


@pytest.mark.parametrize("name", EACH)
def test_losses_that_are_read_one_by_one_run_by_parts_of_the_vocabulary(name):
    assert told(EACH[name]) == ["in 3 blocks of the vocabulary"]


@pytest.mark.parametrize("name", LEFT)
def test_logits_that_are_needed_stay_and_explain_says_why(name):
    fun, why = LEFT[name]
    assert told(fun) == [f"unchanged: {why}"]


def test_only_the_policy_asks_for_it():
    assert told(SUMS["mean"], "mixed_bfloat16") == []
    assert told(SUMS["mean"], "float32,chunked_loss=true,casting=op") == []


def test_a_router_or_attention_is_no_loss():
    def routed(h, w, b):
        gates = jax.nn.softmax(h @ w)
        return jnp.mean((gates @ w.T) ** 2)

    assert told(routed) == []


def test_a_small_loss_of_each_row_is_left(monkeypatch):
    monkeypatch.setattr(chunked, "ROWS", 1024)
    assert told(EACH["a function of each"]) == [
        "unchanged: its logits are no larger than one block"
    ]


VALUES = [(name, half) for name in {**SUMS, **EACH} for half in ("bfloat16", "float16")]


@pytest.mark.parametrize(
    ("name", "half"),
    thorough_but(
        VALUES, ("one-hot, ignored", "float16"), ("weights", "bfloat16"), ("smoothed", "float16")
    ),
)
def test_values_and_gradients_are_those_of_the_program(name, half):
    fun, bound = {**SUMS, **EACH}[name], 0.012 if half == "bfloat16" else 0.002
    planned = mpjax.autocast(fun, policy(half=half))

    @jax.jit
    def both(*args):
        return [jax.value_and_grad(f, (0, 1, 2))(*args) for f in (planned, fun)]

    got, want = both(HIDDEN, WEIGHT, BIAS)
    assert_near(got, want, 4 * bound if name in EACH else bound)


@pytest.mark.parametrize("storage", ["fast", "lean"])
def test_no_array_has_the_size_of_the_logits(storage):
    def loss(h, w, b):
        return each(jax.nn.gelu(h) @ w + b, LABELS).mean()

    planned = mpjax.autocast(loss, policy(storage))
    jaxpr = jax.make_jaxpr(jax.grad(planned, (0, 1, 2)))(HIDDEN, WEIGHT, BIAS)
    sizes = {v.aval.size for e in equations(jaxpr) for v in e.outvars}
    assert max(sizes) < B * T * WORDS / 2


def test_a_loss_in_a_scan_and_under_remat_is_recognized():
    def loss(h, w, b):
        def step(total, xs):
            x, y = xs
            return total + jax.checkpoint(lambda x: each(x @ w, y).mean())(x), None

        return jax.lax.scan(step, 0.0, (jnp.stack([h, h]), jnp.stack([LABELS, LABELS])))[0] / 2

    assert told(loss) == ["in 3 blocks of rows"]
    planned = mpjax.autocast(loss, policy())
    got, want = jax.jit(lambda *args: [jax.grad(f, (0, 1))(*args) for f in (planned, SUMS["sum"])])(
        HIDDEN, WEIGHT, BIAS
    )
    assert_near(jax.tree.map(lambda x: x * B * T, got), want, 0.012)


def test_what_keeps_no_logits_is_told():
    report = mpjax.explain(SUMS["mean"], policy())(HIDDEN, WEIGHT, BIAS)
    (row,) = [row for row in report.rows if row.loss]
    assert row.primitive == "dot_general" and "keeps no logits" in row.storage


def test_logits_are_stored_in_16_bits_where_the_loss_rounds_them():
    """The alternative to blocks that docs/memory.md gives: the loss stays float32."""

    def loss(h, w):
        logits = (jnp.tanh(h) @ w).astype(jnp.bfloat16).astype(jnp.float32)
        return each(logits, LABELS).mean()

    def plain(h, w):
        return each(jnp.tanh(h) @ w, LABELS).mean()

    planned = mpjax.autocast(loss, "mixed_bfloat16")
    kept = mpjax.explain(loss, "mixed_bfloat16", argnums=(0, 1))(HIDDEN, WEIGHT).kept
    logits = {array.dtype for array in kept if array.shape == (B, T, WORDS)}
    assert logits <= {"bf16", "bool"}
    value, grads = jax.value_and_grad(planned, (0, 1))(HIDDEN, WEIGHT)
    wanted, exact = jax.value_and_grad(plain, (0, 1))(HIDDEN, WEIGHT)
    assert value.dtype == jnp.float32 and abs(value - wanted) < 2**-8 * abs(wanted)
    for got, want in zip(grads, exact, strict=True):
        assert np.linalg.norm(got - want) < 2**-7 * np.linalg.norm(want)
