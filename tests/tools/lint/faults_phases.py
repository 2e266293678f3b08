"""Public faults of angles: times, positions and coordinates that 16 bits round before a sine."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from faults import BF16, F16, F32, Fault, normal
from flax import nnx

import mpjax

WIDTH = 8
FREQUENCIES = (1 / 10000 ** (np.arange(0, WIDTH, 2) / WIDTH)).astype(np.float32)
TIMESTEPS = np.array([999.3986, 988.4937, 987.1741], np.float32)


def waves(angles):
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


# ---- timesteps that come as an array -------------------------------------------------------------


def timesteps_rounded(t):
    angles = t.astype(BF16)[:, None] * FREQUENCIES.astype(BF16)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)  # <- here: DiffSynth-Studio#562


def timesteps_kept(t):
    angles = t[:, None] * FREQUENCIES
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).astype(BF16)


def embedded(t, dtype):
    return waves(t.astype(F32)[:, None] * FREQUENCIES).astype(dtype)


def passed_through_bfloat16(t, x):
    t = t.astype(x.dtype)  # <- here: DiffSynth-Studio#1025
    return x + embedded(t, x.dtype)


def passed_in_float32(t, x):
    return x + embedded(t, x.dtype)


def scaled_after(sigma, x):
    """The timestep is 1000 * sigma, in the dtype of the model; the embedding undoes the factor."""
    t = (1000 * sigma).astype(x.dtype) / 1000  # <- here: diffusers#9405
    angles = 1000 * t.astype(F32)[:, None] * FREQUENCIES
    return x * jnp.sin(angles)


def scaled_before(sigma, x):
    """sigma is at most 1, and is rounded by 1 / 512 at most; the angle is of sigma itself."""
    t = sigma.astype(x.dtype)[:, None]
    return t * x * jnp.sin(t.astype(F32) * FREQUENCIES)


def drawn(key, x):
    return jax.random.uniform(key, (len(x),), minval=0, maxval=1000)


def sampled(key, x):
    t = drawn(key, x).astype(x.dtype)  # <- here: musubi-tuner#729
    return x * jnp.sin(t.astype(F32)[:, None] * FREQUENCIES)


def sampled_wide(key, x):
    return x * jnp.sin(drawn(key, x)[:, None] * FREQUENCIES).astype(x.dtype)


def oscillated(t, x):
    return x * jnp.cos(0.5 * t)  # <- here: times in bfloat16


def oscillated_within(t, x):
    """Whole times up to 256 are exact, and the half of each is too."""
    return x * jnp.cos(0.5 * t)


# ---- positions -----------------------------------------------------------------------------------


class Rotary(nn.Module):
    dtype: type = BF16

    @nn.compact
    def __call__(self, x, positions):
        angles = positions.astype(self.dtype)[:, None] * FREQUENCIES.astype(self.dtype)
        cos = jnp.cos(angles).astype(BF16)  # <- here: transformers#29285
        x = nn.Dense(2 * cos.shape[-1], dtype=BF16)(x)
        return x * jnp.concatenate([cos, cos], -1)


def rotary(dtype):
    def loss(params, x, positions):
        return jnp.mean(jnp.square(Rotary(dtype).apply(params, x, positions).astype(F32)))

    return lambda *args: jax.grad(loss)(*args)


def rotary_arguments():
    x, positions = normal(4, WIDTH), jnp.array([0.5, 17.25, 300.125, 900.75])
    return Rotary().init(jax.random.key(0), x, positions), x, positions


def table(length):
    angles = jnp.einsum("i,j->ij", jnp.arange(length, dtype=F16), FREQUENCIES.astype(F16))
    return jnp.cos(angles)  # <- here: gpt-neox#1003


def table_wide(length):
    angles = jnp.einsum("i,j->ij", jnp.arange(length, dtype=F32), FREQUENCIES)
    return jnp.cos(angles).astype(F16)


def interpolated(x):
    """Positions are a quarter of the index, and are rounded before a float32 sine."""
    positions = (jnp.arange(x.shape[0]) / 4).astype(x.dtype)  # <- here: candle#3520
    turned = jnp.sin(positions.astype(F32)[:, None] * FREQUENCIES)
    return x * turned.astype(x.dtype)


def interpolated_wide(x):
    positions = jnp.arange(x.shape[0]) / 4
    return x * jnp.sin(positions[:, None] * FREQUENCIES).astype(x.dtype)


class Rotated(nnx.Module):
    def __init__(self, dtype):
        self.dtype = dtype
        self.linear = nnx.Linear(WIDTH, WIDTH, dtype=BF16, rngs=nnx.Rngs(0))

    def __call__(self, x, positions):
        @jax.jit
        def turned(x):
            p = positions.astype(self.dtype)  # <- here: transformers#25681
            return x * waves(p.astype(F32)[:, None] * FREQUENCIES).astype(x.dtype)

        return turned(self.linear(x))


def in_layers(cast):
    """Each layer of a scan turns its stream by the same positions."""

    def run(x, kernels, positions):
        def layer(x, kernel):
            angles = cast(positions)[:, None] * FREQUENCIES.astype(F16)
            return x @ kernel * jnp.sin(angles).astype(x.dtype), None  # <- here: positions, layers

        return jax.lax.scan(jax.checkpoint(layer), x, kernels)[0]

    return run


def within_a_turn(positions):
    """The angle is reduced in float32, so that 16 bits hold it."""
    return jnp.remainder(positions, 2 * np.pi).astype(F16)


def layers_of_turns(x, kernels, positions):
    """Each angle is reduced to [0, 2 pi) in float32 before it is rounded."""

    def layer(x, kernel):
        angles = within_a_turn(positions[:, None] * FREQUENCIES)
        return x @ kernel * jnp.sin(angles).astype(x.dtype), None

    return jax.lax.scan(jax.checkpoint(layer), x, kernels)[0]


# ---- coordinates ---------------------------------------------------------------------------------


def fourier_features(x, b):
    angles = 2 * np.pi * (x.astype(BF16) @ b.astype(BF16))
    return jnp.sin(angles)  # <- here: fourier features


def fourier_features_wide(x, b):
    angles = 2 * np.pi * jnp.matmul(x, b, precision="highest")
    return jnp.sin(angles).astype(BF16)


BANDS = 2.0 ** np.arange(10) * np.pi


def encoded(x):
    """The factors are powers of two times pi, of coordinates up to 1."""
    return jnp.sin(x.astype(F16)[..., None] * BANDS.astype(F16)).astype(F32)  # <- here: nerf bands


def encoded_wide(x):
    return jnp.sin(x[..., None] * BANDS.astype(F32))


def nerf(encode):
    def loss(params, x):
        hidden = mpjax.autocast(lambda w: jax.vmap(encode)(x) @ w, "mixed_bfloat16")(params)
        return jnp.mean(jnp.square(hidden))

    return lambda params, x: jax.grad(loss)(params, x)


FAULTS = (
    Fault(
        "DiffSynth-Studio#562",
        "modelscope/DiffSynth-Studio/issues/562",
        "Timesteps such as 999.4 are cast to bfloat16 before their sinusoidal embedding.",
        "rounded-phase",
        timesteps_rounded,
        timesteps_kept,
        lambda: (TIMESTEPS,),
    ),
    Fault(
        "DiffSynth-Studio#1025",
        "modelscope/DiffSynth-Studio/pull/1025",
        "The embedding is float32, but its timesteps pass through the dtype of the model.",
        "rounded-phase",
        passed_through_bfloat16,
        passed_in_float32,
        lambda: (TIMESTEPS, normal(3, WIDTH, dtype=BF16)),
    ),
    Fault(
        "diffusers#9405",
        "huggingface/diffusers/issues/9405",
        "A timestep of 750 is 752 in bfloat16, and is divided by 1000 afterwards.",
        "rounded-phase",
        scaled_after,
        scaled_before,
        lambda: (jnp.array([0.7503, 0.3331, 0.9]), normal(3, WIDTH // 2, dtype=BF16)),
    ),
    Fault(
        "musubi-tuner#729",
        "kohya-ss/musubi-tuner/pull/729",
        "Random timesteps up to 1000 are drawn in float32, and cast to bfloat16.",
        "half-phase",
        sampled,
        sampled_wide,
        lambda: (jax.random.key(0), normal(3, WIDTH // 2, dtype=BF16)),
    ),
    Fault(
        "times in bfloat16",
        "",
        "Times up to 1000 are an argument in bfloat16, whose neighbors are 4 apart.",
        "rounded-phase",
        oscillated,
        oscillated_within,
        lambda: (jnp.array([10, 100, 992], BF16), normal(3)),
        lambda: (jnp.array([10, 100, 250], BF16), normal(3)),
    ),
    Fault(
        "transformers#29285",
        "huggingface/transformers/pull/29285",
        "Rotary positions and frequencies are bfloat16, and so is their product.",
        "rounded-phase",
        rotary(BF16),
        rotary(F32),
        rotary_arguments,
    ),
    Fault(
        "gpt-neox#1003",
        "EleutherAI/gpt-neox/issues/1003",
        "The table of a rotary embedding is an outer product in float16.",
        "half-phase",
        lambda x: x * table(len(x)),
        lambda x: x * table_wide(len(x)),
        lambda: (normal(2048, WIDTH // 2, dtype=F16),),
    ),
    Fault(
        "candle#3520",
        "huggingface/candle/pull/3520",
        "Positions are cast to bfloat16 before the sine, which is float32.",
        "half-phase",
        interpolated,
        interpolated_wide,
        lambda: (normal(2048, WIDTH // 2, dtype=BF16),),
    ),
    Fault(
        "transformers#25681",
        "huggingface/transformers/issues/25681",
        "A module in bfloat16 casts its positions before their angles.",
        "rounded-phase",
        lambda model, x, p: model(x, p),
        lambda model, x, p: model(x, p),
        lambda: (Rotated(BF16), normal(3, WIDTH), jnp.array([5.5, 700.5, 901.75])),
        lambda: (Rotated(F32), normal(3, WIDTH), jnp.array([5.5, 700.5, 901.75])),
    ),
    Fault(
        "positions, layers",
        "",
        "Layers in a scan turn by float16 positions of a long context.",
        "rounded-phase",
        in_layers(lambda p: p.astype(F16)),
        layers_of_turns,
        lambda: (normal(3, 4), normal(2, 4, 4), jnp.array([0.3, 3000.7, 8191.2])),
    ),
    Fault(
        "fourier features",
        "",
        "Coordinates are multiplied by random frequencies in bfloat16.",
        "rounded-phase",
        fourier_features,
        fourier_features_wide,
        lambda: (normal(16, 3), normal(3, WIDTH, scale=10.0)),
    ),
    Fault(
        "nerf bands",
        "",
        "Coordinates are rounded to float16 before they are multiplied by up to 512 pi.",
        "rounded-phase",
        nerf(encoded),
        nerf(encoded_wide),
        lambda: (normal(10, 4), jnp.linspace(0.1, 1, 16)),
    ),
)
