"""A GAN in Equinox: two networks, two optimizers, two losses, and a loss scale for each.

    python examples/gan.py --size small --policy mixed_float16

The generator draws handwritten digits from noise. The distance is Frechet's distance between the
pixels of drawn and of held-out digits (their means and covariances). Between the two halves of
writers it is 0.30. Each optimizer checks its own gradients: if the generator's overflow, the
discriminator's step is still applied.

These are the expected figures of the small size on a CPU. The last row, spread, is the range of
float32 over three seeds:

    policy          distance
    float32         1.909
    mixed_bfloat16  2.414
    mixed_float16   2.225
    spread          0.4809
"""

import functools

import common
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpjax

SIZES = {
    "smoke": {"steps": 3, "batch": 8, "width": 8, "noise": 4, "rate": 1e-3},
    "small": {"steps": 1500, "batch": 64, "width": 128, "noise": 16, "rate": 1e-3},
    "full": {"steps": 50000, "batch": 512, "width": 2048, "noise": 64, "rate": 2e-4},
}


def make_networks(options, key):
    """Returns a generator, from noise to 64 pixels between 0 and 1, and a discriminator's logit."""
    keys = jax.random.split(key)
    leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.2)
    mlp = functools.partial(eqx.nn.MLP, width_size=options.width, depth=2, activation=leaky)
    generator = mlp(options.noise, 64, final_activation=jax.nn.sigmoid, key=keys[0])
    return generator, mlp(64, "scalar", key=keys[1])


def discriminator_loss(discriminator, generator, images, noise):
    real = jax.vmap(discriminator)(images)
    drawn = jax.vmap(discriminator)(jax.vmap(generator)(noise))
    return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(drawn))


def generator_loss(generator, discriminator, noise):
    return jnp.mean(jax.nn.softplus(-jax.vmap(discriminator)(jax.vmap(generator)(noise))))


def train(options):
    policy = mpjax.get_policy(options.policy)
    keys = jax.random.split(jax.random.key(options.seed))
    generator, discriminator = make_networks(options, keys[0])
    average = generator  # the mean of its weights over time, which draws better
    scale = mpjax.DynamicLossScale(growth_interval=min(2000, options.steps // 20 + 1))
    scale = scale if policy.needs_loss_scaling else mpjax.NoOpLossScale()
    optimizer = mpjax.optim.skip_nonfinite(optax.adam(options.rate, b1=0.5))
    states = [optimizer.init(eqx.filter(m, eqx.is_array)) for m in (generator, discriminator)]

    def improve(network, opt_state, scale, loss_fn, *args):
        """Returns a network after one step, with its optimizer state, loss scale and loss."""
        grad_fn = mpjax.scaled_value_and_grad(mpjax.autocast(loss_fn, policy), scale)
        loss, grads, finite = grad_fn(network, *args)
        params = eqx.filter(network, eqx.is_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(network, updates), opt_state, scale.adjust(finite), loss

    @eqx.filter_jit
    def step(generator, average, discriminator, states, scales, images, key):
        one, other = jax.random.normal(key, (2, len(images), options.noise))
        discriminator, mine, my_scale, my_loss = improve(
            discriminator, states[1], scales[1], discriminator_loss, generator, images, one
        )
        generator, its, its_scale, its_loss = improve(
            generator, states[0], scales[0], generator_loss, discriminator, other
        )
        now, before = (eqx.filter(network, eqx.is_array) for network in (generator, average))
        average = eqx.combine(optax.incremental_update(now, before, 0.01), average)
        losses = {"generator": its_loss, "discriminator": my_loss}
        return generator, average, discriminator, [its, mine], [its_scale, my_scale], losses

    (images, _), (held_out, _) = common.read_digits()
    scales, curves = [scale, scale], {"generator": [], "discriminator": []}
    batches = common.batches([images.reshape(len(images), 64)], options.batch, options.seed)
    for index, (batch,) in zip(common.steps(options.steps), batches, strict=False):
        key = jax.random.fold_in(keys[1], index)
        generator, average, discriminator, states, scales, losses = step(
            generator, average, discriminator, states, scales, batch, key
        )
        for name, loss in losses.items():
            curves[name].append(loss)

    noise = jax.random.normal(jax.random.key(1), (len(held_out), options.noise))
    drawn = mpjax.autocast(lambda g, noise: jax.vmap(g)(noise), policy)(average, noise)
    return {
        "figures": {"distance": common.frechet(drawn, held_out)},
        "skipped": states[0].skipped_steps,
        "curves": curves,
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
