"""WGAN-GP: its loss contains a gradient, which needs a loss scale of its own.

    python examples/wgan_gp.py --size small --policy mixed_float16

The critic's loss contains the gradient by its input. In float16 that gradient needs its own scale,
is divided by it, and is then differentiated under the loss scale of the whole loss (Gulrajani et
al., 2017; "Gradient penalty" in PyTorch's amp examples). gan.py explains the digits and the
distance.

These are the expected figures of the small size on a CPU. The last row, spread, is the range of
float32 over three seeds:

    policy          distance  penalty
    float32         2.556     0.005244
    mixed_bfloat16  2.725     0.005382
    mixed_float16   1.712     0.005152
    spread          2.349     0.0005247
"""

import functools

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

SIZES = {
    "smoke": {"steps": 3, "batch": 8, "width": 8, "noise": 4, "critics": 2, "rate": 1e-3},
    "small": {"steps": 1000, "batch": 64, "width": 128, "noise": 16, "critics": 3, "rate": 1e-3},
    "full": {"steps": 50000, "batch": 512, "width": 2048, "noise": 64, "critics": 5, "rate": 1e-4},
}


def perceptron(key, *widths):
    draw = jax.nn.initializers.he_normal()
    shapes = zip(jax.random.split(key, len(widths)), widths, widths[1:], strict=False)
    return [{"w": draw(key, (n, m)), "b": jnp.zeros(m)} for key, n, m in shapes]


def apply(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"], 0.2)
    return x @ layers[-1]["w"] + layers[-1]["b"]


def generate(generator, noise):
    return jax.nn.sigmoid(apply(generator, noise))


def critic_loss(critic, generator, images, noise, mix, scale):
    drawn = generate(generator, noise)
    between = mix * images + (1 - mix) * drawn
    # The critic does not mix examples, so the gradient of the sum contains each one's.
    scaled_sum = lambda x: scale.scale(apply(critic, x).sum())  # noqa: E731
    slopes = scale.unscale(jax.grad(scaled_sum)(between))
    penalty = jnp.mean((jnp.sqrt(jnp.sum(slopes**2, -1) + 1e-12) - 1) ** 2)
    return jnp.mean(apply(critic, drawn)) - jnp.mean(apply(critic, images)) + 10 * penalty, penalty


def generator_loss(generator, critic, noise):
    return -jnp.mean(apply(critic, generate(generator, noise))), None


def train(options):
    policy = mpjax.get_policy(options.policy)
    keys = jax.random.split(jax.random.key(options.seed), 3)
    sides = {
        "generator": perceptron(keys[0], options.noise, options.width, options.width, 64),
        "critic": perceptron(keys[1], 64, options.width, options.width, 1),
    }
    interval = min(2000, options.steps // 20 + 1)
    scale = mpjax.DynamicLossScale(init_scale=2.0**10, growth_interval=interval)
    scale = scale if policy.needs_loss_scaling else mpjax.NoOpLossScale()
    schedule = optax.cosine_decay_schedule(options.rate, options.critics * options.steps)
    optimizer = mpjax.optim.skip_nonfinite(optax.adam(schedule, b1=0.5, b2=0.9))

    def improve(side, loss_fn, *args):
        """Returns one network after a step: parameters, optimizer state and loss scale."""
        params, opt_state, scale = side
        run = mpjax.autocast(loss_fn, policy)
        grad_fn = mpjax.scaled_value_and_grad(run, scale, has_aux=True)
        (loss, aux), grads, finite = grad_fn(params, *args)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, scale.adjust(finite)), loss, aux

    @jax.jit
    def step(generator, critic, images, key):
        """Updates the critic a few times, on a batch each, then the generator once."""

        def once(critic, given):
            images, key = given
            noise = jax.random.normal(key, (len(images), options.noise))
            mix = jax.random.uniform(jax.random.fold_in(key, 1), (len(images), 1))
            # The inner scale is the network's loss scale, as in PyTorch; any power of two works.
            args = generator[0], images, noise, mix, critic[2]
            critic, loss, penalty = improve(critic, critic_loss, *args)
            return critic, (loss, penalty)

        keys = jax.random.split(key, len(images) + 1)
        critic, (losses, penalties) = jax.lax.scan(once, critic, (images, keys[1:]))
        noise = jax.random.normal(keys[0], (images.shape[1], options.noise))
        generator, _, _ = improve(generator, generator_loss, critic[0], noise)
        return generator, critic, {"critic": losses[-1], "penalty": penalties[-1]}

    (images, _), (held_out, _) = common.read_digits()
    generator, critic = ((params, optimizer.init(params), scale) for params in sides.values())
    curves = {"critic": [], "penalty": [], "loss_scale": []}
    rows = [images.reshape(len(images), 64)]
    batches = common.batches(rows, options.critics * options.batch, options.seed)
    for index, (batch,) in zip(common.steps(options.steps), batches, strict=False):
        batch = batch.reshape(options.critics, options.batch, 64)
        key = jax.random.fold_in(keys[2], index)
        generator, critic, found = step(generator, critic, batch, key)
        for name, value in {**found, "loss_scale": critic[2].loss_scale}.items():
            curves[name].append(value)

    noise = jax.random.normal(jax.random.key(1), (len(held_out), options.noise))
    drawn = mpjax.autocast(generate, policy)(generator[0], noise)
    return {
        "figures": {
            "distance": common.frechet(drawn, held_out),
            "penalty": np.mean(curves["penalty"][-100:]),
        },
        "skipped": critic[1].skipped_steps // options.critics,
        "curves": curves,
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
