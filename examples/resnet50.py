"""ResNet-50 with its ImageNet recipe: SGD, label smoothing, micro-batches, lean storage.

    python examples/resnet50.py --size small --policy mixed_bfloat16,storage=lean
    python examples/resnet50.py --size full --policy mixed_bfloat16 --data FOLDER

BatchNorm's statistics are the model state of `build_train_step`. They are float32 under every
policy, and a skipped step leaves them unchanged. `storage=lean` keeps the results of convolutions
for the backward pass and computes everything else again.

Data: scikit-learn's digits, with half of the writers held out. `--data FOLDER` reads your own
images, one folder per class. These are the expected figures of the small size on a CPU. The last
row, spread, is the range of float32 over three seeds:

    policy                       accuracy %  train loss
    float32                      92.88       0.5583
    mixed_bfloat16,storage=lean  92.99       0.5702
    O2:float16                   93.99       0.5598
    spread                       0.7786      0.005384
"""

import functools

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

NAMES = ("steps", "batch", "micro", "side", "width", "shallow", "rate")
SIZES = {
    "smoke": dict(zip(NAMES, (5, 8, 2, 8, 2, 1, 0.05), strict=True)),
    "small": dict(zip(NAMES, (80, 64, 2, 8, 8, 0, 0.1), strict=True)),
    "full": dict(zip(NAMES, (450000, 256, 1, 224, 64, 0, 0.1), strict=True)),
}


class Bottleneck(nn.Module):
    features: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), strides)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), strides)(x))
        return nn.relu(x + y)


class ResNet50(nn.Module):
    classes: int
    width: int
    stages: tuple[int, ...]

    @nn.compact
    def __call__(self, x, train):
        large = x.shape[1] > 64  # small images are not reduced
        x = nn.Conv(self.width, (7, 7) if large else (3, 3), 2 if large else 1, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        if large:
            x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = Bottleneck(self.width * 2**stage, stride)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


def train(options):
    data, (held_out, labels) = common.read_images(options.data, options.side)
    classes = int(labels.max()) + 1
    model = ResNet50(classes, options.width, (1, 1) if options.shallow else (3, 4, 6, 3))

    def loss_fn(params, batch, model_state):
        images, labels = batch
        variables = {"params": params, "batch_stats": model_state}
        logits, new = model.apply(variables, images, train=True, mutable=["batch_stats"])
        wanted = optax.smooth_labels(jax.nn.one_hot(labels, classes), 0.1)
        return optax.softmax_cross_entropy(logits, wanted).mean(), new["batch_stats"]

    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.rate, options.steps // 18, options.steps
    )
    init, step = mpjax.build_train_step(
        loss_fn,
        optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(schedule, 0.9, nesterov=True)),
        options.policy,
        loss_scale=options.loss_scale,
        accumulate_steps=options.micro,
    )
    begin = jax.jit(functools.partial(model.init, train=False))
    variables = begin(jax.random.key(options.seed), held_out[:1])
    state = init(variables["params"], model_state=variables["batch_stats"])
    step = jax.jit(step, donate_argnums=0)

    losses, scales = [], []
    batches = common.batches(data, options.batch, options.seed)
    for _, batch in zip(common.steps(options.steps), batches, strict=False):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        scales.append(metrics["loss_scale"])
    mpjax.raise_if_diverged(metrics, limit=20)

    def predict(params, model_state, images):
        variables = {"params": params, "batch_stats": model_state}
        return jnp.argmax(model.apply(variables, images, train=False), -1)

    found = mpjax.autocast(predict, options.policy)(state.params, state.model_state, held_out)
    return {
        "figures": {
            "accuracy %": 100 * (found == labels).mean(),
            "train loss": np.mean(losses[-20:]),
        },
        "skipped": state.skipped_steps,
        "curves": {"loss": losses, "loss_scale": scales},
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
