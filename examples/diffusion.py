"""Diffusion: a U-Net learns which noise was added to digits, and draws digits from noise.

    python examples/diffusion.py --size small --policy mixed_bfloat16

Ho et al., 2020, with the cosine schedule. DDIM draws in 32 steps, which are a scan. In it the
network computes in half, and the picture, which changes in small steps, stays float32. The error is
the mean squared error of the predicted noise on held-out digits. The distance is explained in
gan.py.

These are the expected figures of the small size on a CPU. The last row, spread, is the range of
float32 over three seeds:

    policy          error     distance
    float32         0.1978    0.443
    mixed_bfloat16  0.1978    0.4435
    mixed_float16   0.1983    0.4367
    spread          0.002563  0.02227
"""

import functools
import math

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

SIZES = {
    "smoke": {"steps": 3, "batch": 4, "width": 4, "levels": 1, "rate": 2e-3},
    "small": {"steps": 600, "batch": 64, "width": 16, "levels": 2, "rate": 3e-3},
    "full": {"steps": 100000, "batch": 512, "width": 256, "levels": 2, "rate": 3e-4},
}
DRAWING = 32  # steps


class Residual(nn.Module):
    features: int

    @nn.compact
    def __call__(self, x, time):
        y = nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))
        y = y + nn.Dense(self.features)(time)[:, None, None]
        zeros = nn.initializers.zeros
        y = nn.Conv(self.features, (3, 3), kernel_init=zeros)(nn.silu(nn.GroupNorm(4)(y)))
        return y + (x if x.shape == y.shape else nn.Conv(self.features, (1, 1))(x))


class UNet(nn.Module):
    """From noisy images and times between 0 and 1 to noise."""

    width: int
    levels: int

    @nn.compact
    def __call__(self, images, times):
        waves = times[:, None] * 2.0 ** jnp.arange(8) * math.pi  # phases: float32 under autocast
        time = nn.silu(
            nn.Dense(4 * self.width)(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], 1))
        )
        x, kept = nn.Conv(self.width, (3, 3))(images), []
        features = [self.width * 2**level for level in range(self.levels)]
        for wide in features:
            x = Residual(wide)(x, time)
            kept.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = Residual(features[-1])(x, time)
        for wide in reversed(features):
            x = jnp.repeat(jnp.repeat(x, 2, 1), 2, 2)
            x = Residual(wide)(jnp.concatenate([x, kept.pop()], -1), time)
        return nn.Conv(1, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))


def mix(times):
    """Returns the shares of picture and noise at a time, in one column of four axes."""
    angle = times[:, None, None, None] * math.pi / 2
    return jnp.cos(angle), jnp.sin(angle)


def train(options):
    model = UNet(options.width, options.levels)

    def loss_fn(params, images, rng):
        keys = jax.random.split(rng)
        times = jax.random.uniform(keys[0], (len(images),))
        noise = jax.random.normal(keys[1], images.shape)
        of_picture, of_noise = mix(times)
        predicted = model.apply({"params": params}, of_picture * images + of_noise * noise, times)
        return jnp.mean((predicted - noise) ** 2)

    def draw(params, noise):
        """Denoising diffusion implicit models (Song et al., 2021): from time 1 to 0."""

        def move(x, now):
            times, then = (jnp.full(len(x), t) for t in now)
            (of_picture, of_noise), (less, more) = mix(times), mix(then)
            predicted = model.apply({"params": params}, x, times)
            picture = jnp.clip((x - of_noise * predicted) / jnp.maximum(of_picture, 0.02), -1, 1)
            return less * picture + more * predicted, None

        times = jnp.linspace(0.99, 0.0, DRAWING + 1)
        return jax.lax.scan(move, noise, (times[:-1], times[1:]))[0]

    (images, _), (held_out, _) = common.read_digits()
    centred = lambda images: 2 * images - 1  # noqa: E731
    keys = jax.random.split(jax.random.key(options.seed))
    params = jax.jit(model.init)(keys[0], images[:1], jnp.zeros(1))["params"]
    schedule = optax.cosine_decay_schedule(options.rate, options.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    init, step = mpjax.build_train_step(
        loss_fn, optimizer, options.policy, loss_scale=options.loss_scale
    )
    state, step = init(params, rng=keys[1]), jax.jit(step, donate_argnums=0)

    losses, scales = [], []
    batches = common.batches([centred(images)], options.batch, options.seed)
    for _, (batch,) in zip(common.steps(options.steps), batches, strict=False):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        scales.append(metrics["loss_scale"])
    mpjax.raise_if_diverged(metrics, limit=20)

    run = functools.partial(mpjax.autocast, policy=options.policy)
    error = run(loss_fn)(state.params, centred(held_out), jax.random.key(0))
    noise = jax.random.normal(jax.random.key(1), held_out.shape)
    drawn = np.clip((run(draw)(state.params, noise) + 1) / 2, 0, 1)
    return {
        "figures": {"error": error, "distance": common.frechet(drawn, held_out)},
        "skipped": state.skipped_steps,
        "curves": {"loss": losses, "loss_scale": scales},
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
