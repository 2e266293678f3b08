"""Models of other libraries as training steps: in float32, cast by hand, and under autocast.

Each model is (loss, params, batch). The loss takes parameters and a batch of any floating dtype. It
computes in the dtype of the parameters, and takes the loss in float32. This file only connects the
libraries' layers.
"""

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

import mpjax

KEY = jax.random.key(0)
IMAGES = jax.random.normal(KEY, (2, 32, 32, 3))
ROWS = jax.random.normal(KEY, (4, 8))
SEQUENCES = jax.random.normal(KEY, (2, 12, 8))
LABELS = jnp.array([1, 3])
TOKENS = jax.random.randint(KEY, (2, 12), 0, 50)


def entropy(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return losses.mean()


def squares(outputs):
    return jnp.mean(jnp.square(outputs.astype(jnp.float32)))


# ---- Equinox ------------------------------------------------------------------------------------


def equinox(make, run):
    params, static = eqx.partition(make(KEY), eqx.is_inexact_array)
    return lambda params, batch: run(eqx.combine(params, static), batch), params


def eqx_mlp():
    make = functools.partial(eqx.nn.MLP, 8, 4, 16, 2)
    loss, params = equinox(lambda key: make(key=key), lambda m, x: squares(jax.vmap(m)(x)))
    return loss, params, ROWS


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    rope: eqx.nn.RotaryPositionalEmbedding
    head: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, 8, key=first)
        self.norm = eqx.nn.LayerNorm(8)
        self.rope = eqx.nn.RotaryPositionalEmbedding(8)
        self.head = eqx.nn.Linear(8, 4, key=second)

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        return jax.vmap(self.head)(x + self.attention(y, y, y, mask=mask)).mean(0)


def eqx_attention():
    loss, params = equinox(Block, lambda m, x: entropy(jax.vmap(m)(x), LABELS))
    return loss, params, SEQUENCES


def eqx_lstm():
    def run(cell, xs):
        start = jnp.zeros((2, 2, 16), xs.dtype)

        def turn(carry, x):
            carry = jax.vmap(cell)(x, (carry[0], carry[1]))
            return jnp.stack(carry), None

        return squares(jax.lax.scan(turn, start, xs.swapaxes(0, 1))[0][0])

    loss, params = equinox(lambda key: eqx.nn.LSTMCell(8, 16, key=key), run)
    return loss, params, SEQUENCES


def eqx_convolutions():
    def make(key):
        first, second = jax.random.split(key)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, 8, 3, key=first),
                eqx.nn.GroupNorm(2, 8),
                eqx.nn.Lambda(jax.nn.gelu),
                eqx.nn.AdaptiveAvgPool2d((2, 2)),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(32, 4, key=second),
            ]
        )

    loss, params = equinox(make, lambda m, x: entropy(jax.vmap(m)(x.transpose(0, 3, 1, 2)), LABELS))
    return loss, params, IMAGES


# ---- Haiku --------------------------------------------------------------------------------------


def haiku(forward, batch, finish):
    transformed = hk.transform_with_state(forward)
    params, state = transformed.init(KEY, batch)

    def loss(params, batch):
        return finish(transformed.apply(params, state, KEY, batch)[0])

    return loss, params, batch


def hk_resnet():
    return haiku(
        lambda x: hk.nets.ResNet18(4)(x, is_training=True),
        IMAGES,
        lambda logits: entropy(logits, LABELS),
    )


def hk_mobilenet():
    return haiku(
        lambda x: hk.nets.MobileNetV1((1, 2), (16, 32), 4)(x, is_training=True),
        IMAGES,
        lambda logits: entropy(logits, LABELS),
    )


def hk_lstm():
    def forward(x):
        core = hk.LSTM(8)
        start = jax.tree.map(lambda s: s.astype(x.dtype), core.initial_state(2))
        return hk.dynamic_unroll(core, x.swapaxes(0, 1), start)[0]

    return haiku(forward, SEQUENCES, squares)


def hk_attention():
    def forward(x):
        mask = jnp.tril(jnp.ones((1, 1, 12, 12), bool))
        y = hk.LayerNorm(-1, True, True)(x)
        attention = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0))
        return hk.Linear(4)(x + attention(y, y, y, mask)).mean(1)

    return haiku(forward, SEQUENCES, lambda logits: entropy(logits, LABELS))


# ---- Flax ---------------------------------------------------------------------------------------


def linen(model, batch, finish):
    params = model.init(KEY, batch)
    return lambda params, batch: finish(model.apply(params, batch)), params, batch


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(50, 8)(tokens)
        for _ in range(2):
            attention = nn.MultiHeadDotProductAttention(2)
            x = x + attention(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
            x = x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.RMSNorm()(x))))
        return nn.Dense(4)(x).mean(1)


def linen_encoder():
    return linen(Encoder(), TOKENS, lambda logits: entropy(logits, LABELS))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.relu(nn.GroupNorm(2)(nn.Conv(8, (3, 3))(x))), (2, 2), (2, 2))
        x = nn.max_pool(nn.silu(nn.LayerNorm()(nn.Conv(8, (3, 3))(x))), (2, 2), (2, 2))
        return nn.Dense(4)(x.reshape(len(x), -1))


def linen_convolutions():
    return linen(Convolutions(), IMAGES, lambda logits: entropy(logits, LABELS))


def linen_gru():
    model = nn.RNN(nn.GRUCell(8))
    params = model.init(KEY, SEQUENCES)

    def loss(params, batch):
        start = jnp.zeros((2, 8), batch.dtype)
        return squares(model.apply(params, batch, initial_carry=start))

    return loss, params, SEQUENCES


def nnx_attention():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.LayerNorm(8, rngs=rngs),
        nnx.MultiHeadAttention(2, 8, 8, decode=False, rngs=rngs),
        nnx.Linear(8, 4, rngs=rngs),
    )
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, batch):
        return entropy(nnx.merge(graph, params, rest)(batch).mean(1), LABELS)

    return loss, nnx.to_pure_dict(params), SEQUENCES


# ---- Diffrax ------------------------------------------------------------------------------------


def diffrax_ode():
    import diffrax

    def run(field, y):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, z, args: jax.vmap(field)(z.astype(y.dtype)).astype(z.dtype)),
            diffrax.Tsit5(),
            *(0.0, 1.0, 0.1, y.astype(jnp.float32)),
            stepsize_controller=diffrax.ConstantStepSize(),
            adjoint=diffrax.DirectAdjoint(),
            max_steps=16,
        )
        return squares(solution.ys)

    make = functools.partial(eqx.nn.MLP, 8, 8, 16, 1)
    loss, params = equinox(lambda key: make(key=key), run)
    return loss, params, ROWS


MODELS = {
    make.__name__: make
    for make in (
        *(eqx_mlp, eqx_attention, eqx_lstm, eqx_convolutions),
        *(hk_resnet, hk_mobilenet, hk_lstm, hk_attention),
        *(linen_encoder, linen_convolutions, linen_gru, nnx_attention, diffrax_ode),
    )
}


# ---- as training steps --------------------------------------------------------------------------


def by_hand(half):
    def cast(loss):
        return lambda params, batch: loss(mpjax.cast(params, half), mpjax.cast(batch, half))

    return cast


VARIANTS = {
    "float32": lambda loss: loss,
    "bfloat16 by hand": by_hand("bfloat16"),
    "float16 by hand": by_hand("float16"),
    "autocast to bfloat16": lambda loss: mpjax.autocast(loss, "mixed_bfloat16"),
    "autocast to float16": lambda loss: mpjax.autocast(loss, "mixed_float16"),
}

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def training_step(loss, scale=1.0):
    """A step under a fixed loss scale, which float16 needs."""

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(lambda *args: loss(*args) * scale)(params, batch)
        grads = jax.tree.map(lambda g: g / scale, grads)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value / scale

    return step
