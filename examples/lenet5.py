"""LeNet-5 at O2 and O3 with one float32 dense layer, as in MindSpore's build_train_network.

    python examples/lenet5.py --size small --policy O2:float16
    python examples/lenet5.py --size small --policy O3:float16 --keep ""

O2 stores weights in half and keeps float32 masters. O3 keeps only the half weights. The last dense
layer stays float32 in both, as after `network.fc3.to_float(float32)`; `--keep ""` makes it half
too.

Data: scikit-learn's digits, with half of the writers held out. `--data FOLDER` reads your own
images, one folder per class. These are the expected figures of the small size on a CPU. The last
row, spread, is the range of float32 over three seeds:

    policy                accuracy %  train loss
    float32               92.88       0.0007271
    O2:float16            93.77       0.0007133
    O3:float16            93.66       0.000895
    O3:float16 --keep ""  93.21       0.001017
    spread                1.112       0.0001748
"""

import functools

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

SIZES = {
    "smoke": {"steps": 4, "batch": 16, "side": 8, "rate": 1e-2, "keep": "fc3"},
    "small": {"steps": 1000, "batch": 64, "side": 8, "rate": 3e-2, "keep": "fc3"},
    "full": {"steps": 20000, "batch": 256, "side": 32, "rate": 3e-2, "keep": "fc3"},
}


class LeNet5(nn.Module):
    """Two convolutions and three dense layers, written in plain float32."""

    classes: int

    @nn.compact
    def __call__(self, x):
        small = x.shape[1] < 28  # the digits have 8 pixels a side, LeNet's own 32
        for features in (6, 16):
            x = nn.relu(nn.Conv(features, (3, 3) if small else (5, 5))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(120, name="fc1")(x.reshape(len(x), -1)))
        x = nn.relu(nn.Dense(84, name="fc2")(x))
        return nn.Dense(self.classes, name="fc3")(x)


def train(options):
    data, (held_out, labels) = common.read_images(options.data, options.side)
    network = LeNet5(int(labels.max()) + 1)

    policy = mpjax.get_policy(options.policy)
    if options.keep:  # network.fc3.to_float(mindspore.float32)
        policy = policy.override({f"{options.keep}/*": "float32"})

    def loss_fn(params, batch):
        images, labels = batch
        logits = network.apply({"params": params}, images)
        # O3 casts parameters and images, so logits may be half; the loss is float32 in any case.
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    # build_train_network(network, optimizer, loss_fn, level="O2", loss_scale_manager=...)
    schedule = optax.cosine_decay_schedule(options.rate, options.steps)
    init, step = mpjax.build_train_step(
        loss_fn, optax.sgd(schedule, momentum=0.9), policy, loss_scale=options.loss_scale
    )
    step = jax.jit(step, donate_argnums=0)
    state = init(jax.jit(network.init)(jax.random.key(options.seed), held_out[:1])["params"])
    kept = {k: v["kernel"].dtype.name for k, v in state.params.items()}
    print("stored in", kept)

    losses, scales = [], []
    batches = common.batches(data, options.batch, options.seed)
    for _, batch in zip(common.steps(options.steps), batches, strict=False):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        scales.append(metrics["loss_scale"])
    mpjax.raise_if_diverged(metrics, limit=20)

    predict = lambda params, x: network.apply({"params": params}, x).argmax(-1)  # noqa: E731
    correct = mpjax.autocast(predict, policy)(state.params, held_out) == labels
    return {
        "figures": {"accuracy %": 100 * correct.mean(), "train loss": np.mean(losses[-100:])},
        "skipped": state.skipped_steps,
        "curves": {"loss": losses, "loss_scale": scales},
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
