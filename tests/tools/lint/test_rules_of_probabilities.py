"""Probabilities and other saturating functions in half: what is amplified, and what is not."""

import jax
import jax.numpy as jnp
import optax
import pairs
import pytest
from pairs import Pair, bf16, f16

import mpjax

HALF = jnp.bfloat16
LABELS = jax.ShapeDtypeStruct((8,), jnp.int32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


def wide(x):
    return x.astype(jnp.float32)


def entropy(logits):
    ids = jnp.arange(len(logits))
    return optax.softmax_cross_entropy_with_integer_labels(wide(logits), ids).mean()


# ---- pairs ---------------------------------------------------------------------------------------


def chosen_by_a_mask(logits, ids):
    p = jax.nn.softmax(wide(logits)).astype(HALF) * jax.nn.one_hot(ids, 32, dtype=HALF)
    return -jnp.mean(jnp.log(wide(jnp.sum(p, -1)) + 1e-8))  # fault


def chosen_by_a_mask_wide(logits, ids):
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(wide(logits)) * jax.nn.one_hot(ids, 32), -1))


def of_each(logits, ids):
    p = jax.nn.softmax(logits)[jnp.arange(len(ids)), ids]
    return -jnp.log(wide(p))  # fault


def of_each_wide(logits, ids):
    return -jax.nn.log_softmax(wide(logits))[jnp.arange(len(ids)), ids]


def drawn(key, logits):
    p = jax.nn.softmax(wide(logits)).astype(HALF)
    return jax.random.categorical(key, jnp.log(wide(p)))  # fault


def drawn_wide(key, logits):
    return jax.random.categorical(key, wide(logits))


def hellinger(a, b):
    shift = jnp.sqrt(jax.nn.softmax(a)) - jnp.sqrt(jax.nn.softmax(b))  # fault
    return jnp.sum(wide(shift) ** 2, -1)


def hellinger_wide(a, b):
    return hellinger(wide(a), wide(b))


def by_hand(a, b):
    p, q = jnp.exp(a), 1 / (1 + jnp.exp(-b))
    shift = p / jnp.sum(p, -1, keepdims=True) - q  # fault
    return jnp.vdot(shift, shift)


def by_hand_wide(a, b):
    return by_hand(wide(a), wide(b))


def quotient(a, b):
    p, q = jax.nn.softmax(a)[:, 0], jax.nn.softmax(b)[:, 0]
    return wide(jnp.abs(p / q - 1)).mean()  # fault


def quotient_wide(a, b):
    return quotient(wide(a), wide(b))


def groups(logits):
    best = jax.lax.top_k(jax.nn.sigmoid(logits).reshape(-1, 4, 8), 2)[0].sum(-1)
    return jax.lax.top_k(wide(best), 2)  # fault


def groups_wide(logits):
    best = jax.lax.top_k(jax.nn.sigmoid(wide(logits)).reshape(-1, 4, 8), 2)[0].sum(-1)
    return jax.lax.top_k(best, 2)


def approximate(logits):
    return jax.lax.approx_max_k(jax.nn.softmax(logits), 3)  # fault


def approximate_wide(logits):
    return jax.lax.approx_max_k(jax.nn.softmax(wide(logits)), 3)


def gumbel(key, logits):
    noise = jax.random.gumbel(key, logits.shape, logits.dtype)
    return jax.lax.top_k(wide(logits + noise), 3)  # fault


def gumbel_wide(key, logits):
    return jax.lax.top_k(wide(logits) + jax.random.gumbel(key, logits.shape), 3)


def raced(key, p):
    return jnp.argmax(p / jax.random.exponential(key, p.shape, p.dtype), -1)  # fault


def raced_wide(key, p):
    return jnp.argmax(wide(p) / jax.random.exponential(key, p.shape), -1)


def capped(logits, cap):
    return entropy(cap * jnp.tanh(logits / cap))  # fault


def capped_wide(logits, cap):
    return entropy(wide(cap) * jnp.tanh(wide(logits) / wide(cap)))


def rounded_again(logits):
    logits = 30 * jnp.tanh(wide(logits) / 30)
    return entropy(logits.astype(HALF))  # fault


def rounded_before(logits):
    return entropy(30 * jnp.tanh(wide(logits) / 30))


def shifted(logits):
    return jax.nn.softmax(wide(20 * jax.nn.sigmoid(logits) - 10))  # fault


def shifted_wide(logits):
    return jax.nn.softmax(20 * jax.nn.sigmoid(wide(logits)) - 10)


def jacobian(x):
    y = jnp.tanh(x)
    return jnp.sum(jnp.log1p(-y * y + 1e-6), -1)  # fault


def jacobian_wide(x):
    x = wide(x)
    return jnp.sum(2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x)), -1)


RULE = "rounded-probability"
LOGITS = bf16(8, 32)
CASES = {
    "mask": Pair(RULE, chosen_by_a_mask, chosen_by_a_mask_wide, (LOGITS, LABELS), {"argnums": 0}),
    "of each": Pair(RULE, of_each, of_each_wide, (LOGITS, LABELS)),
    "draw": Pair(RULE, drawn, drawn_wide, (KEY, LOGITS)),
    "roots": Pair(RULE, hellinger, hellinger_wide, (LOGITS, LOGITS)),
    "by hand": Pair(RULE, by_hand, by_hand_wide, (f16(8, 32), f16(8, 32)), {"argnums": (0, 1)}),
    "quotient": Pair(RULE, quotient, quotient_wide, (LOGITS, LOGITS)),
    "groups": Pair(RULE, groups, groups_wide, (LOGITS,)),
    "approximate": Pair(RULE, approximate, approximate_wide, (f16(8, 32),)),
    "Gumbel": Pair("half-sample", gumbel, gumbel_wide, (KEY, LOGITS)),
    "race": Pair("half-sample", raced, raced_wide, (KEY, f16(8, 32))),
    "a cap that is given": Pair("half-saturation", capped, capped_wide, (LOGITS, bf16())),
    "rounded again": Pair("half-saturation", rounded_again, rounded_before, (LOGITS,)),
    "sigmoid": Pair("half-saturation", shifted, shifted_wide, (LOGITS,)),
    "jacobian": Pair("half-saturation", jacobian, jacobian_wide, (LOGITS,)),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_probabilities_find_the_faulty_program_and_not_the_mended_one(name):
    case = CASES[name]
    if "argnums" in case.options and case.args[0].dtype == jnp.float16:
        case = case._replace(options=case.options | {"ignore": "unscaled-gradient"})
    pairs.check(case)


# ---- no faults -----------------------------------------------------------------------------------

X, W = bf16(8, 8), bf16(8, 8)


def clean(fun, *args, **options):
    report = mpjax.lint(fun, **options)(*args)
    return not report.findings, str(report)


def differential_attention(q, k, v):
    p, r = (jax.nn.softmax(wide(a @ b.T)).astype(HALF) for a, b in ((q, k), (k, q)))
    return (p - 0.5 * r) @ v


def gates(x, w):
    def turn(h, x):
        z, n = jax.nn.sigmoid(x + h @ w), jnp.tanh(x - h @ w)
        h = (1 - z) * n + z * h
        return h, h

    return jnp.mean((wide(jax.lax.scan(turn, x[0], x)[1]) - 0.3) ** 2)


def activations(x, w):
    h = x @ w
    y = jax.nn.gelu(h, approximate=False) + 0.5 * h * (1 + jax.lax.erf(h / 1.414))
    y += jnp.where(h > 0, h, jnp.exp(h) - 1) + h * jax.nn.sigmoid(h)
    return jnp.mean(wide(y @ w) ** 2)


def normed_gate(x, w):
    h = wide(x * (jax.nn.sigmoid(x @ w) - jax.nn.sigmoid(w @ x)))
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    return h.astype(HALF) @ w


def reconstruction(x, w):
    return jnp.mean((wide(jax.nn.sigmoid(x @ w)) - wide(x)) ** 2)


def deviation(x, w):
    log_std = -5 + 3.5 * (jnp.tanh(x @ w) + 1)
    return jnp.mean((wide(x) / jnp.exp(wide(log_std))) ** 2 + wide(log_std))


def additive_scores(x, w):
    scores = jnp.tanh(x[:, None] + x[None]) @ w[:, 0]
    return jax.nn.softmax(wide(scores)).astype(HALF) @ x


def ranked(x, w):
    swish, gated = jax.nn.silu(x @ w) * x, x * jax.nn.sigmoid(x.mean(0) @ w)
    shares = jax.nn.softmax(wide(x @ w))
    best = jnp.argmax(shares, -1)
    straight = jax.nn.one_hot(best, 8) + shares - jax.lax.stop_gradient(shares)
    return jax.lax.top_k(swish, 2), jnp.argmax(gated, -1), best, straight.astype(HALF)


def renormalized(x, w):
    weights, chosen = jax.lax.top_k(x @ w, 2)
    shares = jax.nn.softmax(wide(weights)).astype(HALF)
    return shares / jnp.sum(shares, -1, keepdims=True), chosen, jax.nn.sigmoid(x).max(-1)


CLEAN = {
    "differential attention": (differential_attention, X, X, X),
    "gates": (gates, X, W),
    "activations": (activations, X, W),
    "normed gate": (normed_gate, X, W),
    "reconstruction": (reconstruction, X, W),
    "deviation": (deviation, X, W),
    "additive scores": (additive_scores, X, W),
    "ranked": (ranked, X, W),
    "renormalized": (renormalized, X, W),
    "log-probabilities that are returned": (lambda x: jax.nn.log_softmax(wide(x)).astype(HALF), X),
    "a small cap": (lambda x: jax.nn.softmax(wide(jnp.tanh(x))), X),
    "a cap of 5 in float16": (lambda x: jax.nn.softmax(wide(5 * jnp.tanh(x / 5))), f16(8, 8)),
    "dropout": (lambda k, x: jnp.where(jax.random.bernoulli(k, 0.9, x.shape), x, 0), KEY, X),
    "dropout of 16-bit noise": (
        lambda k, x: x * (jax.random.uniform(k, (8, 8), HALF) < 0.9),
        KEY,
        X,
    ),
    "normal noise": (lambda k, x: jnp.argmax(x + jax.random.normal(k, (8, 8), HALF), -1), KEY, X),
}


@pytest.mark.parametrize("name", CLEAN)
def test_saturation_that_nothing_amplifies_is_no_fault(name):
    fun, *args = CLEAN[name]
    assert all(clean(fun, *args)[:1]), clean(fun, *args)[1]
    if fun in (gates, activations, reconstruction, deviation):
        assert clean(fun, *args, argnums=1)[0], clean(fun, *args, argnums=1)[1]


def test_a_loss_that_only_its_gradient_shows_is_looked_at():
    def step(logits, ids):
        return jax.grad(lambda x: chosen_by_a_mask(x, ids))(logits)

    assert [f.rule for f in mpjax.lint(step)(LOGITS, LABELS).findings] == [RULE]
