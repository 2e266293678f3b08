"""Faults of probabilities that are ranked or drawn from after they were rounded to 16 bits."""

import equinox as eqx
import jax
import jax.numpy as jnp
from faults import BF16, F16, F32, Fault, normal

ROWS, EXPERTS, WIDTH, WORDS = 16, 8, 8, 64
MEMBER = "class member"


def wide(x):
    return x.astype(F32)


# ---- ranked --------------------------------------------------------------------------------------


def route(x, router):
    shares = jax.nn.softmax(wide(x @ router)).astype(x.dtype)
    weights, chosen = jax.lax.top_k(shares, 2)  # <- here: AstrAI#57
    return weights / jnp.sum(wide(weights), -1, keepdims=True).astype(x.dtype), chosen


def route_wide(x, router):
    weights, chosen = jax.lax.top_k(jax.nn.softmax(wide(x @ router)), 2)
    return (weights / jnp.sum(weights, -1, keepdims=True)).astype(x.dtype), chosen


def biased_route(x, router, bias):
    scores = jax.nn.sigmoid(x @ router)
    _, chosen = jax.lax.top_k(wide(scores) + bias, 2)  # <- here: Megatron-LM#2741
    return chosen


def biased_route_wide(x, router, bias):
    _, chosen = jax.lax.top_k(jax.nn.sigmoid(wide(x @ router)) + bias, 2)
    return chosen


def ranked(model, queries):
    scores = jax.nn.sigmoid(jax.vmap(model)(queries)[:, 0])
    return jnp.argsort(-scores)  # <- here: sentence-transformers#3893


def ranked_wide(model, queries):
    scores = jax.nn.sigmoid(wide(jax.vmap(model)(queries)[:, 0]))
    return jnp.argsort(-scores)


def ranker():
    model = eqx.nn.MLP(WIDTH, 1, WIDTH, 1, key=jax.random.key(0))
    model = jax.tree.map(lambda w: w.astype(BF16) if eqx.is_inexact_array(w) else w, model)
    arrays, static = eqx.partition(model, eqx.is_array)
    return arrays, static, normal(ROWS, WIDTH, dtype=BF16)


def of_arrays(fun):
    _, static, _ = ranker()
    return lambda arrays, queries: fun(eqx.combine(arrays, static), queries)


def best(scores, documents):
    relevance = -jax.nn.sigmoid(scores)
    return jax.lax.sort((relevance, documents), num_keys=1)  # <- here: haiku.rag#529


def best_wide(scores, documents):
    return jax.lax.sort((-jax.nn.sigmoid(wide(scores)), documents), num_keys=1)


def voted(members):
    shares = jnp.mean(jax.nn.softmax(members), 0)
    return jnp.argmax(shares, -1)  # <- here: ensemble


def voted_wide(members):
    return jnp.argmax(jnp.mean(jax.nn.softmax(wide(members)), 0), -1)


# ---- drawn from ----------------------------------------------------------------------------------


def multinomial(logits, draws):
    shares = jax.nn.softmax(logits)
    sums = jnp.cumsum(wide(shares), -1)  # <- here: lmdeploy#1239
    return jax.vmap(jnp.searchsorted)(sums, draws)


def multinomial_wide(logits, draws):
    sums = jnp.cumsum(jax.nn.softmax(wide(logits)), -1)
    return jax.vmap(jnp.searchsorted)(sums, draws)


def merged(logits, draws):
    sums = jnp.cumsum(jax.nn.softmax(logits))  # <- here: sorted draws
    return jnp.searchsorted(wide(sums), draws, method="sort")


def merged_wide(logits, draws):
    return merged(wide(logits), draws)


def nucleus(logits):
    logits = jnp.sort(logits, descending=True)
    shares = jax.nn.softmax(logits)
    kept = jnp.cumsum(shares, -1) - shares < 0.9  # <- here: mlx-lm#1912
    return jnp.where(kept, logits, -jnp.inf)


def nucleus_wide(logits):
    logits = jnp.sort(logits, descending=True)
    shares = jax.nn.softmax(wide(logits))
    return jnp.where(jnp.cumsum(shares, -1) - shares < 0.9, logits, -jnp.inf)


def chosen(key, logits):
    def turn(key, row):
        key, now = jax.random.split(key)
        p = jax.nn.softmax(wide(row)).astype(F16)
        return key, jax.random.choice(now, WORDS, p=wide(p))  # <- here: FasterTransformer#183

    return jax.lax.scan(turn, key, logits)[1]


def chosen_wide(key, logits):
    def turn(key, row):
        key, now = jax.random.split(key)
        return key, jax.random.choice(now, WORDS, p=jax.nn.softmax(wide(row)))

    return jax.lax.scan(turn, key, logits)[1]


def sampled(key, logits):
    return jax.random.categorical(key, logits / 0.7)  # <- here: litgpt#2325


def sampled_wide(key, logits):
    return jax.random.categorical(key, wide(logits) / 0.7)


def spikes(key, x, w):
    return jax.random.bernoulli(key, jax.nn.sigmoid(x @ w))  # <- here: bernoulli


def spikes_wide(key, x, w):
    return jax.random.bernoulli(key, jax.nn.sigmoid(wide(x @ w)))


RULE = "rounded-probability"
TIED = "Scores that differ are equal after a softmax or sigmoid in 16 bits, and are ranked."
EDGES = "The sums of 16-bit probabilities are not those of a distribution: draws miss its ends."
COARSE = (
    "JAX draws noise in the dtype of the logits: 128 numbers in bfloat16, so tails never occur."
)


def key():
    return jax.random.key(0)


FAULTS = (
    Fault(
        *("AstrAI#57", "ViperEkura/AstrAI/pull/57", TIED, RULE, route, route_wide),
        lambda: (normal(ROWS, WIDTH, dtype=BF16), normal(WIDTH, EXPERTS, dtype=BF16)),
    ),
    Fault(
        *("Megatron-LM#2741", "NVIDIA/Megatron-LM/issues/2741", TIED, RULE),
        *(biased_route, biased_route_wide),
        lambda: (
            *(normal(ROWS, WIDTH, dtype=BF16), normal(WIDTH, EXPERTS, dtype=BF16)),
            normal(EXPERTS),
        ),
    ),
    Fault(
        "sentence-transformers#3893",
        "huggingface/sentence-transformers/pull/3893",
        *(TIED, RULE, of_arrays(ranked), of_arrays(ranked_wide)),
        lambda: ranker()[::2],
    ),
    Fault(
        *("haiku.rag#529", "ggozad/haiku.rag/pull/529", TIED, RULE, best, best_wide),
        lambda: (normal(WORDS, dtype=F16), jnp.arange(WORDS)),
    ),
    Fault(
        *("ensemble", MEMBER, TIED, RULE, voted, voted_wide),
        lambda: (normal(4, ROWS, EXPERTS, dtype=F16),),
    ),
    Fault(
        *("lmdeploy#1239", "InternLM/lmdeploy/pull/1239", EDGES, RULE),
        *(multinomial, multinomial_wide),
        lambda: (normal(ROWS, WORDS, dtype=BF16), jnp.linspace(0, 1, ROWS)),
    ),
    Fault(
        *("sorted draws", MEMBER, EDGES, RULE, merged, merged_wide),
        lambda: (normal(WORDS, dtype=BF16), jnp.linspace(0, 1, 9)[1:-1]),
    ),
    Fault(
        *("mlx-lm#1912", "ml-explore/mlx-lm/pull/1912", EDGES, RULE, nucleus, nucleus_wide),
        lambda: (normal(ROWS, WORDS, dtype=BF16),),
    ),
    Fault(
        *("FasterTransformer#183", "NVIDIA/FasterTransformer/pull/183", EDGES, RULE),
        *(chosen, chosen_wide),
        lambda: (key(), normal(4, WORDS, dtype=BF16)),
    ),
    Fault(
        *("litgpt#2325", "Lightning-AI/litgpt/pull/2325", COARSE, "half-sample"),
        *(sampled, sampled_wide),
        lambda: (key(), normal(ROWS, WORDS, dtype=BF16)),
    ),
    Fault(
        *("bernoulli", MEMBER, COARSE, "half-sample", spikes, spikes_wide),
        lambda: (key(), normal(ROWS, WIDTH, dtype=F16), normal(WIDTH, WIDTH, dtype=F16)),
    ),
)
