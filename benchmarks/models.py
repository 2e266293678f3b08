"""The models that the autocast benchmarks compile and trace.

Each is written once. ``dtype=None`` is the plain float32 model that autocast takes;
``dtype=jnp.bfloat16`` is the same model with casts placed by hand: flax's ``dtype=``, or where a
model is plain JAX, ``w.astype(dtype)`` at each use, with norms, recurrences and losses in float32.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Block(nn.Module):
    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        qkv = nn.Dense(3 * width, dtype=self.dtype)(y)
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * self.heads, -1), 3, axis=2)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(width, dtype=self.dtype)(y.reshape(x.shape))
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.Dense(4 * width, dtype=self.dtype)(y)
        return x + nn.Dense(width, dtype=self.dtype)(nn.gelu(y))


class GPT2(nn.Module):
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        position = nn.Embed(self.context, self.width, dtype=self.dtype)
        x = embed(tokens) + position(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            x = Block(self.heads, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return embed.attend(x)


class Bottleneck(nn.Module):
    filters: int
    stride: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        def norm(**kwargs):
            return nn.BatchNorm(use_running_average=False, dtype=self.dtype, **kwargs)

        def conv(filters, size, stride=1):
            return nn.Conv(
                filters, (size, size), (stride, stride), use_bias=False, dtype=self.dtype
            )

        y = nn.relu(norm()(conv(self.filters, 1)(x)))
        y = nn.relu(norm()(conv(self.filters, 3, self.stride)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.filters, 1)(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.filters, 1, self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, count in enumerate(self.blocks):
            for i in range(count):
                stride = 2 if i == 0 and stage > 0 else 1
                x = Bottleneck(64 * 2**stage, stride, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


class UNet(nn.Module):
    widths: tuple[int, ...] = (64, 128, 256)
    classes: int = 21
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        def convs(x, width):
            for _ in range(2):
                x = nn.Conv(width, (3, 3), use_bias=False, dtype=self.dtype)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            return x

        *outer, inner = self.widths
        skips = []
        for width in outer:
            skips.append(convs(x, width))
            x = nn.max_pool(skips[-1], (2, 2), (2, 2))
        x = convs(x, inner)
        for width, skip in zip(outer[::-1], skips[::-1], strict=True):
            x = nn.ConvTranspose(width, (2, 2), (2, 2), dtype=self.dtype)(x)
            x = convs(jnp.concatenate([skip, x], -1), width)
        return nn.Conv(self.classes, (1, 1), dtype=self.dtype)(x)


class Encoder(nn.Module):
    """Layers of BERT, or with ``norm_first`` of ViT, as flax's own modules make them."""

    layers: int
    width: int = 768
    heads: int = 12
    vocabulary: int = 0
    norm_first: bool = False
    wide_softmax: bool = True
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        if self.vocabulary:
            x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(x)
        else:
            x = nn.Conv(self.width, (16, 16), (16, 16), "VALID", dtype=self.dtype)(x)
            x = x.reshape(x.shape[0], -1, self.width)
        places = self.param("places", nn.initializers.normal(0.02), x.shape[1:])
        x = x + places.astype(x.dtype)
        for _ in range(self.layers):
            x = self.around(x, self.attention)
            x = self.around(x, self.mlp)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean(1))

    def around(self, x, layer):
        norm = nn.LayerNorm(dtype=self.dtype)
        return x + layer(norm(x)) if self.norm_first else norm(x + layer(x))

    def attention(self, x):
        wide = self.wide_softmax and self.dtype is not None
        return nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, force_fp32_for_softmax=wide
        )(x)

    def mlp(self, x):
        y = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(x), approximate=False)
        return nn.Dense(self.width, dtype=self.dtype)(y)


class LSTM(nn.Module):
    width: int
    layers: int
    vocabulary: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


def cross_entropy(logits, labels):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gpt2(dtype=None, batch=8, length=1024, **sizes):
    """Returns (loss, abstract variables, abstract batch, optimizer)."""
    model = GPT2(dtype=dtype, context=length, **sizes)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, rest, batch):
        return cross_entropy(model.apply({"params": params}, batch[0]), batch[1]), rest

    return loss, variables["params"], {}, (tokens, tokens), optax.adamw(3e-4)


def resnet50(dtype=None, batch=128, size=224, blocks=(3, 4, 6, 3)):
    """Returns (loss, abstract parameters, abstract statistics, abstract batch, optimizer)."""
    model = ResNet(blocks, dtype)
    return _with_statistics(model, (batch, size, size, 3), (batch,))


def unet(dtype=None, batch=16, size=256, widths=(64, 128, 256)):
    """A U-Net that segments images into 21 classes, as `resnet50`."""
    model = UNet(widths, dtype=dtype)
    return _with_statistics(model, (batch, size, size, 3), (batch, size, size))


def _with_statistics(model, images, labels):
    images = jax.ShapeDtypeStruct(images, jnp.float32)
    labels = jax.ShapeDtypeStruct(labels, jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params, stats, batch):
        logits, updated = model.apply(
            {"params": params, "batch_stats": stats}, batch[0], mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch[1]), updated["batch_stats"]

    stats = variables["batch_stats"]
    return loss, variables["params"], stats, (images, labels), optax.sgd(0.1, momentum=0.9)


def bert(dtype=None, batch=16, length=512, layers=2, vocabulary=30522, wide_softmax=True):
    """BERT's layers and a classifier. By hand, attention's softmax is float32 or half."""
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    model = Encoder(layers, vocabulary=vocabulary, wide_softmax=wide_softmax, dtype=dtype)
    return _classifier(model, tokens)


def vit(dtype=None, batch=128, size=224, layers=2, wide_softmax=True):
    """ViT-B's layers on 196 tokens, as `bert`."""
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    model = Encoder(layers, norm_first=True, wide_softmax=wide_softmax, dtype=dtype)
    return _classifier(model, images)


def _classifier(model, inputs):
    labels = jax.ShapeDtypeStruct(inputs.shape[:1], jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs)

    def loss(params, rest, batch):
        return cross_entropy(model.apply({"params": params}, batch[0]), batch[1]), rest

    return loss, variables["params"], {}, (inputs, labels), optax.adamw(3e-4)


def lstm(dtype=None, batch=64, length=256, width=1024, layers=2, vocabulary=10000):
    """A language model of LSTMs."""
    model = LSTM(width, layers, vocabulary, dtype)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, rest, batch):
        return cross_entropy(model.apply({"params": params}, batch[0]), batch[1]), rest

    return loss, variables["params"], {}, (tokens, tokens), optax.adamw(3e-4)


# ---- plain JAX ----------------------------------------------------------------------------------


def used(params, dtype):
    """Returns what casts by hand use of parameters: a half copy of each."""
    return params if dtype is None else jax.tree.map(lambda w: w.astype(dtype), params)


def rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return normed.astype(x.dtype) * scale


def rotate(x):
    """Rotary embedding of ``x[batch, length, heads, size]``."""
    length, size = x.shape[1], x.shape[3]
    rates = 10000.0 ** (-jnp.arange(0, size, 2) / size)
    angles = jnp.arange(length)[:, None] * rates
    cos, sin = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def llama_layer(x, params, dtype, heads, groups):
    p = used(params, dtype)
    batch, length, width = x.shape
    y = rms_norm(x, p["norm"])
    q = rotate((y @ p["q"]).reshape(batch, length, heads, -1))
    k = rotate((y @ p["k"]).reshape(batch, length, groups, -1))
    v = (y @ p["v"]).reshape(batch, length, groups, -1)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + y.reshape(batch, length, width) @ p["out"]
    y = rms_norm(x, p["mlp_norm"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def llama(
    dtype=None,
    batch=4,
    length=2048,
    layers=12,
    width=1024,
    heads=16,
    groups=4,
    vocabulary=32000,
    scanned=True,
):
    """Llama with grouped queries, its layers in a scan or written out; returns as `gpt2`."""
    shared, hidden = width // heads * groups, 11 * width // 4
    shapes = {
        "norm": (width,),
        "q": (width, width),
        "k": (width, shared),
        "v": (width, shared),
        "out": (width, width),
        "mlp_norm": (width,),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    params = {
        "embed": _array(vocabulary, width),
        "layers": {k: _array(layers, *s) for k, s in shapes.items()}
        if scanned
        else [{k: _array(*s) for k, s in shapes.items()} for _ in range(layers)],
        "norm": _array(width),
        "head": _array(width, vocabulary),
    }
    layer = functools.partial(llama_layer, dtype=dtype, heads=heads, groups=groups)

    def loss(params, rest, batch):
        x = used(params["embed"], dtype)[batch[0]]
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        else:
            x = functools.reduce(layer, params["layers"], x)
        x = rms_norm(x, used(params["norm"], dtype))
        return cross_entropy(x @ used(params["head"], dtype), batch[1]), rest

    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return loss, params, {}, (tokens, tokens), optax.adamw(3e-4)


def mamba_layer(x, params, dtype, state):
    """A selective state space layer; its recurrence is float32, by an associative scan."""
    p = used({k: w for k, w in params.items() if k != "decay"}, dtype)
    y, z = jnp.split(rms_norm(x, p["norm"]) @ p["in"], 2, axis=-1)
    padded = jnp.pad(y, ((0, 0), (3, 0), (0, 0)))
    y = sum(padded[:, i : i + y.shape[1]] * p["conv"][i] for i in range(4))
    y = jax.nn.silu(y)
    rank = p["steps"].shape[0]
    steps, inputs, outputs = jnp.split(y @ p["choose"], [rank, rank + state], axis=-1)
    steps = jax.nn.softplus((steps @ p["steps"] + p["bias"]).astype(jnp.float32))
    decay = jnp.exp(-steps[..., None] * jnp.exp(params["decay"]))
    drive = (steps * y.astype(jnp.float32))[..., None] * inputs.astype(jnp.float32)[..., None, :]
    _, h = jax.lax.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, drive), axis=1
    )
    read = jnp.einsum("blds,bls->bld", h.astype(y.dtype), outputs)
    y = read + p["skip"] * y
    return x + (y * jax.nn.silu(z)) @ p["out"]


def mamba(dtype=None, batch=8, length=1024, layers=2, width=768, state=16, vocabulary=4096):
    """A language model of selective state space layers; returns as `gpt2`."""
    inner = 2 * width
    layer = {
        "norm": _array(width),
        "in": _array(width, 2 * inner),
        "conv": _array(4, inner),
        "choose": _array(inner, inner // 32 + 2 * state),
        "steps": _array(inner // 32, inner),
        "bias": _array(inner),
        "decay": _array(inner, state),
        "skip": _array(inner),
        "out": _array(inner, width),
    }
    params = {"embed": _array(vocabulary, width), "layers": [layer] * layers, "norm": _array(width)}

    def loss(params, rest, batch):
        x = used(params["embed"], dtype)[batch[0]]
        for layer in params["layers"]:
            x = mamba_layer(x, layer, dtype, state)
        x = rms_norm(x, used(params["norm"], dtype))
        return cross_entropy(x @ used(params["embed"], dtype).T, batch[1]), rest

    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return loss, params, {}, (tokens, tokens), optax.adamw(3e-4)


def ode(dtype=None, steps=64, batch=32, width=64):
    """A neural ODE, its Runge-Kutta steps written out; returns as `gpt2`."""
    params = {"up": _array(width, width), "bias": _array(width), "down": _array(width, width)}

    def loss(params, rest, batch):
        def slope(x):
            p = used(params, dtype)
            h = jnp.tanh(x.astype(dtype or x.dtype) @ p["up"] + p["bias"])
            return (h @ p["down"]).astype(x.dtype)

        x, step = batch[0], 1.0 / steps
        for _ in range(steps):
            a = slope(x)
            b = slope(x + 0.5 * step * a)
            c = slope(x + 0.5 * step * b)
            d = slope(x + step * c)
            x = x + step / 6 * (a + 2 * b + 2 * c + d)
        return jnp.mean((x - batch[1]) ** 2), rest

    x = _array(batch, width)
    return loss, params, {}, (x, x), optax.adamw(3e-4)


def _array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


MODELS = {f.__name__: f for f in (gpt2, resnet50, unet, bert, vit, lstm, llama, mamba, ode)}


def training_step(loss, optimizer):
    """Returns the step that trains a loss of ``(params, rest, batch)``."""

    def step(state, batch):
        params, rest, opt = state
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, batch)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), rest, opt), value

    return step
