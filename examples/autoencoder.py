"""Three networks, two losses, two optimizers, and a loss scale per loss, as in Apex's scale_loss.

    python examples/autoencoder.py --size small --policy mixed_float16

A classifier and an autoencoder share an encoder. The classifier's loss trains the encoder and the
head; the reconstruction loss trains the encoder and the decoder. One optimizer updates encoder and
head, the other the decoder. The reconstruction loss has a weight of 1/1000, so in float16 it needs
a loss scale of its own.

Data: scikit-learn's digits, with half of the writers held out. These are the expected figures of
the small size on a CPU. The last row, spread, is the range of float32 over three seeds:

    policy          accuracy %  pixel error
    float32         93.88       0.01965
    mixed_bfloat16  93.88       0.01974
    mixed_float16   93.88       0.01971
    O2:float16      93.88       0.01967
    spread          0.1112      0.002127
"""

import functools

import common
import jax
import jax.numpy as jnp
import optax

import mpjax

SIZES = {
    "smoke": {"steps": 4, "batch": 16, "width": 8, "code": 4, "rate": 1e-3},
    "small": {"steps": 2000, "batch": 64, "width": 128, "code": 16, "rate": 1e-3},
    "full": {"steps": 20000, "batch": 512, "width": 2048, "code": 16, "rate": 3e-4},
}


def perceptron(key, *widths):
    keys = jax.random.split(key, len(widths))
    draw = jax.nn.initializers.he_normal()
    shapes = zip(keys, widths, widths[1:], strict=False)
    return [{"w": draw(key, (n, m)), "b": jnp.zeros(m)} for key, n, m in shapes]


def apply(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def classify(networks, images, labels):
    logits = apply(networks["head"], apply(networks["encoder"], images))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def reconstruct(networks, images):
    pixels = jax.nn.sigmoid(apply(networks["decoder"], apply(networks["encoder"], images)))
    return 1e-3 * jnp.mean((pixels - images) ** 2)


def train(options):
    policy = mpjax.get_policy(options.policy)
    # amp.initialize(models, optimizers, opt_level="O1", num_losses=2)
    keys = jax.random.split(jax.random.key(options.seed), 3)
    networks = policy.cast_to_param({
        "encoder": perceptron(keys[0], 64, options.width, options.code),
        "head": perceptron(keys[1], options.code, 10),
        "decoder": perceptron(keys[2], options.code, options.width, 64),
    })  # fmt: skip
    schedule = optax.cosine_decay_schedule(options.rate, options.steps)
    trains = {"classifier": ("encoder", "head"), "decoder": ("decoder",)}
    optimizers = {
        "classifier": optax.adamw(schedule),
        "decoder": optax.chain(optax.clip_by_global_norm(1.0), optax.lion(schedule)),
    }
    optimizers = {
        name: mpjax.optim.skip_nonfinite(mpjax.optim.with_master_weights(optimizer))
        for name, optimizer in optimizers.items()
    }
    part = lambda tree, name: {key: tree[key] for key in trains[name]}  # noqa: E731
    states = {name: optimizers[name].init(part(networks, name)) for name in trains}
    scale = mpjax.DynamicLossScale(growth_interval=min(2000, options.steps // 20 + 1))
    scale = scale if policy.needs_loss_scaling else mpjax.NoOpLossScale()
    scales = {"classify": scale, "reconstruct": scale}

    def scale_loss(loss_fn, scale):  # with amp.scale_loss(loss, optimizer, loss_id) as scaled:
        return mpjax.scaled_value_and_grad(mpjax.autocast(loss_fn, policy), scale)

    @jax.jit
    def step(networks, states, scales, images, labels):
        images = images.reshape(len(images), 64)
        error, grads, good = scale_loss(classify, scales["classify"])(networks, images, labels)
        pixel_fn = scale_loss(reconstruct, scales["reconstruct"])
        pixels, more, fine = pixel_fn(networks, images)
        # Each gradient was divided by its own scale, so they can be added.
        grads = jax.tree.map(jnp.add, grads, more)
        networks, states = dict(networks), dict(states)
        for name, optimizer in optimizers.items():  # each checks the gradients that it applies
            params = part(networks, name)
            updates, states[name] = optimizer.update(part(grads, name), states[name], params)
            networks |= optax.apply_updates(params, updates)
        scales = {
            "classify": scales["classify"].adjust(good),
            "reconstruct": scales["reconstruct"].adjust(fine),
        }
        return networks, states, scales, (error, pixels)

    data, (held_out, labels) = common.read_digits()
    curves = {"loss": [], "pixels": [], "scale": [], "scale of pixels": []}
    batches = common.batches(data, options.batch, options.seed)
    for _, batch in zip(common.steps(options.steps), batches, strict=False):
        networks, states, scales, losses = step(networks, states, scales, *batch)
        found = [*losses, *(scales[name].loss_scale for name in ("classify", "reconstruct"))]
        for curve, value in zip(curves.values(), found, strict=True):
            curve.append(value)

    flat = held_out.reshape(len(held_out), 64)
    predict = lambda n, x: apply(n["head"], apply(n["encoder"], x)).argmax(-1)  # noqa: E731
    correct = mpjax.autocast(predict, policy)(networks, flat) == labels
    pixels = 1e3 * mpjax.autocast(reconstruct, policy)(networks, flat)
    return {
        "figures": {"accuracy %": 100 * correct.mean(), "pixel error": pixels},
        "skipped": states["classifier"].skipped_steps,
        "curves": curves,
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
