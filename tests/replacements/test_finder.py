"""What is said of attentions and losses that stay, and what more is replaced."""

import jax
import jax.numpy as jnp
import optax
import pytest
from attend import BIAS, CHUNKED, FUSED, HEAD, LABELS, WORDS, B, H, K, N, Q, T, V, causal, notes
from support import assert_near, normal, thorough_but

import mpjax
from mpjax._src.replacements import chunked

each = optax.softmax_cross_entropy_with_integer_labels


def scores(q):
    return jnp.einsum("btnh,bsnh->bnts", q, K) / 3


def weigh(p, v=V):
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def with_sinks(q):
    sinks = jnp.broadcast_to(BIAS[:, :1, :1], (B, N, T, 1))
    return weigh(jax.nn.softmax(jnp.concatenate([sinks, scores(q)], -1))[..., 1:])


def with_added_sinks(q):
    e = jnp.exp(scores(q))
    return weigh(e / (e.sum(-1, keepdims=True) + BIAS[:, :1, :1] ** 2))


def of_two_sets_of_keys(q):
    p = jax.nn.softmax(jnp.concatenate([scores(q), scores(2 * q)], -1))
    return weigh(p[..., :T]) + weigh(p[..., T:])


def by_blocks(q):
    def turn(carry, block):
        (top, total, out), (k, v) = carry, block
        s = jnp.einsum("btnh,bsnh->bnts", q, k)
        top, before = jnp.maximum(top, s.max(-1)), top
        e, less = jnp.exp(s - top[..., None]), jnp.exp(before - top)
        out = out * less[..., None] + jnp.einsum("bnts,bsnh->bnth", e, v)
        return (top, total * less + e.sum(-1), out), None

    blocks = [jnp.moveaxis(x.reshape(B, 4, T // 4, N, H), 1, 0) for x in (K, V)]
    start = jnp.full((B, N, T), -1e30), jnp.zeros((B, N, T)), jnp.zeros((B, N, T, H))
    (_, total, out), _ = jax.lax.scan(turn, start, blocks)
    return (out / total[..., None]).swapaxes(1, 2)


def padded(q):
    p = jnp.pad(jax.nn.softmax(scores(q)), [(0, 0)] * 3 + [(0, 2)])
    return weigh(p, jnp.pad(V, [(0, 0), (0, 2), (0, 0), (0, 0)]))


def fixed(q):
    call = jax.custom_batching.custom_vmap(causal)
    call.def_vmap(lambda size, batched, *args: (jax.vmap(causal)(*args), True))
    return call(q, K, V)


DIVIDED = "its weights are divided by more than their sum"
LEFT = {
    "sinks": (with_sinks, "concatenate is applied to its scores"),
    "added sinks": (with_added_sinks, DIVIDED),
    "two sets of keys": (of_two_sets_of_keys, "concatenate is applied to its scores"),
    "blocks of keys": (by_blocks, DIVIDED),
    "padded weights": (padded, "pad is applied to its weights, as in dropout or scaling"),
    "rules of its own": (fixed, "its function has rules of its own"),
    "soft caps": (
        lambda q: weigh(jax.nn.softmax(5 * jnp.tanh(scores(q) / 5))),
        "tanh is applied to its scores",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_attention_that_stays_has_a_reason(name):
    fun, why = LEFT[name]
    assert notes(fun, Q) == [f"xla: {why}"]


def routed(q):
    x = q.reshape(-1, H)
    chosen, which = jax.lax.top_k(jax.nn.softmax(x @ normal(8, H, 4)), 2)
    return jnp.einsum("tke,th->eh", jax.nn.one_hot(which, 4) * chosen[..., None], x)


def in_another_autocast(q):
    return mpjax.autocast(causal, "mixed_float16")(q)


OTHERS = [routed, in_another_autocast, lambda q: weigh(jax.nn.sigmoid(scores(q)))]


@pytest.mark.parametrize("fun", OTHERS, ids=["router", "planned already", "sigmoid"])
def test_nothing_is_said_of_what_is_no_attention(fun):
    assert notes(fun, Q) == []


# ---- losses -------------------------------------------------------------------------------------


def written_twice(h, w):
    picked = jnp.take_along_axis(h @ w + 1, LABELS[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(h @ w + 1, -1) - picked)


def of_probabilities(h, w):
    return -jnp.log(jnp.take_along_axis(jax.nn.softmax(h @ w), LABELS[..., None], -1)).mean()


def smoothed_with_z_loss(h, w):
    targets = optax.smooth_labels(jax.nn.one_hot(LABELS, WORDS), 0.1)
    z = jax.nn.logsumexp(h @ w, -1)
    return jnp.mean(optax.softmax_cross_entropy(h @ w, targets) + 1e-2 * z**2)


def over_vmap(h, w):
    return jax.vmap(lambda h, labels: each(h @ w, labels))(h, LABELS).mean()


def summed_by_hand(h, w):
    logits = h @ w
    picked = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), -1)) - picked)


BY_BLOCKS = [written_twice, of_probabilities, smoothed_with_z_loss, over_vmap, summed_by_hand]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(chunked, "ROWS", 16)
    monkeypatch.setattr(chunked, "OPERATIONS_PER_BYTE", 1)


@pytest.mark.parametrize("fun", thorough_but(BY_BLOCKS, *range(0, len(BY_BLOCKS), 2)))
def test_losses_in_more_spellings_run_by_blocks(fun):
    assert notes(fun, *HEAD, policy=CHUNKED) == ["in 3 blocks of rows"]
    got = jax.jit(jax.value_and_grad(mpjax.autocast(fun, CHUNKED), (0, 1)))(*HEAD)
    assert_near(got, jax.jit(jax.value_and_grad(fun, (0, 1)))(*HEAD), 0.02)


def picked_of(p):
    return p[jnp.arange(len(p))[:, None], jnp.arange(p.shape[1]), LABELS]


LOSSES = {
    "an energy": (
        lambda h, w: jax.nn.logsumexp(h @ w, -1).mean(),
        "it is no cross entropy of labels",
    ),
    "guarded probabilities": (
        lambda h, w: -jnp.log(picked_of(jax.nn.softmax(h @ w) + 1e-9)).mean(),
        "its logits are also read by add",
    ),
    "a trained temperature": (
        lambda h, w: each(h @ w / h[0, 0, 0], LABELS).mean(),
        "its logits are also read by div",
    ),
    "of soft targets": (
        lambda h, w: optax.softmax_cross_entropy(h @ w, jax.nn.softmax(jnp.sin(w[0]))).mean(),
        "its logits are also read by mul",
    ),
    "heads of several models": (
        lambda h, w: jax.vmap(lambda w: each(h @ w, LABELS).mean())(jnp.stack([w, w])).mean(),
        "dot_general computes its logits",
    ),
    "also read as probabilities": (
        lambda h, w: each(h @ w, LABELS).mean() + jnp.max(jax.nn.softmax(h @ w)),
        "its logits are also read by reduce_max",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_stays_has_a_reason(name):
    fun, why = LOSSES[name]
    assert notes(fun, *HEAD, policy=CHUNKED) == [f"unchanged: {why}"]


def test_a_router_is_no_loss():
    def balanced(h, w):
        gates = jax.nn.softmax(h @ w)
        return jnp.mean((gates @ w.T) ** 2)

    assert notes(balanced, *HEAD, policy=CHUNKED) == []


def test_a_policy_that_asks_for_neither_gets_the_program_as_it_is():
    assert notes(causal, Q, policy="mixed_bfloat16") == []
    assert notes(causal, Q, policy=f"{FUSED},compute=float32") == []
