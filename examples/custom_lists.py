"""Custom op lists, clipping, accumulation, a float32 region and TensorBoard, as in Paddle.

    python examples/custom_lists.py --size small --policy mixed_float16 --logdir runs
    tensorboard --logdir runs

A convolutional network with attention over its pixels. It writes loss, scale, back-offs and the
distribution of gradients to TensorBoard.

Data: scikit-learn's digits, with half of the writers held out. These are the expected figures of
the small size on a CPU. The last row, spread, is the range of float32 over three seeds:

    policy          accuracy %  train loss
    float32         90.66       0.005585
    mixed_bfloat16  90.99       0.005966
    mixed_float16   88.99       0.006436
    spread          3.782       0.002716
"""

import contextlib
import functools

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax
import mpjax.nnx

SIZES = {
    "smoke": {"steps": 4, "batch": 8, "micro": 2, "width": 4, "rate": 3e-3, "logdir": ""},
    "small": {"steps": 1000, "batch": 128, "micro": 4, "width": 32, "rate": 3e-3, "logdir": ""},
    "full": {"steps": 5000, "batch": 4096, "micro": 4, "width": 256, "rate": 1e-3, "logdir": ""},
}


class Network(nnx.Module):
    def __init__(self, width, rngs):
        self.first = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.second = nnx.Conv(width, width, (3, 3), strides=2, rngs=rngs)
        self.queries = nnx.Linear(width, width, rngs=rngs)
        self.last = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.second(jnp.tanh(self.first(x))))
        x = x.reshape(len(x), -1, x.shape[-1])
        with mpjax.precision("float32"):  # with paddle.amp.auto_cast(enable=False):
            scores = jnp.einsum("bid,bjd->bij", self.queries(x), x) / x.shape[-1] ** 0.5
        x = x + nnx.softmax(scores) @ x
        return self.last(x.mean(1))


def loss_fn(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@contextlib.contextmanager
def tensorboard(folder):
    """Yields a writer of event files, or None."""
    if not folder:
        yield None
        return
    with common.optional("tensorboardX").SummaryWriter(folder) as writer:
        yield writer
        mpjax.debug.flush_metrics(writer)


def write_distribution(writer, histogram, step):
    """Writes how many gradients lie between powers of two, as a TensorBoard distribution."""
    counts = histogram.numbers()[:, 1:-1].sum(0)  # without zeros, Inf and NaN
    exponents = np.arange(-149, 128)
    used = np.flatnonzero(counts)
    bins = slice(used[0], used[-1] + 1) if len(used) else slice(0, 1)
    counts, exponents = counts[bins], exponents[bins]
    writer.add_histogram_raw(
        "gradients, log2",
        min=exponents[0],
        max=exponents[-1] + 1,
        num=counts.sum(),
        sum=(counts * exponents).sum(),
        sum_squares=(counts * exponents**2).sum(),
        bucket_limits=exponents + 1,
        bucket_counts=counts,
        global_step=step,
    )


def train(options):
    # auto_cast(custom_white_list={"tanh"}, custom_black_list={"conv2d"}), in JAX's own names
    policy = mpjax.get_policy(options.policy)
    policy = policy.with_ops(half=("tanh",), full=("conv_general_dilated",))
    schedule = optax.cosine_decay_schedule(options.rate, options.steps)
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    loss_scale = options.loss_scale
    if policy.needs_loss_scaling and loss_scale == "auto":  # GradScaler(incr_every_n_steps=...)
        loss_scale = mpjax.DynamicLossScale(growth_interval=min(2000, options.steps // 20 + 1))
    model = Network(options.width, nnx.Rngs(options.seed))
    optimizer = mpjax.nnx.Optimizer(model, clipped, policy, loss_scale=loss_scale)

    @nnx.jit
    def step(model, optimizer, images, labels):
        grad_fn = mpjax.nnx.value_and_grad(loss_fn, optimizer)
        parts = zip(jnp.split(images, options.micro), jnp.split(labels, options.micro), strict=True)
        losses, grads = zip(*(grad_fn(model, *part) for part in parts), strict=True)
        grads = jax.tree.map(lambda *parts: sum(parts) / len(parts), *grads)  # unscaled gradients
        optimizer.update(model, grads)
        metrics = {"loss": jnp.stack(losses).mean(), **optimizer.metrics()}
        return metrics, mpjax.debug.gradient_histogram(nnx.to_pure_dict(grads))

    data, (held_out, labels) = common.read_digits()
    losses, scales = [], []
    batches = common.batches(data, options.batch, options.seed)
    with tensorboard(options.logdir) as writer:
        for index, batch in zip(common.steps(options.steps), batches, strict=False):
            metrics, histogram = step(model, optimizer, *batch)
            losses.append(metrics["loss"])
            scales.append(metrics["loss_scale"])
            if writer:
                # A skipped step is one at which the scale backed off.
                metrics["back-offs"] = metrics.pop("skipped_steps")
                mpjax.debug.log_metrics(writer, index, {**metrics, "gradients": histogram})
                if index % 20 == 0:  # this waits for the device
                    write_distribution(writer, histogram, index)

    predict = lambda model, x: model(x).argmax(-1)  # noqa: E731
    correct = mpjax.autocast(predict, policy)(model, held_out) == labels
    return {
        "figures": {"accuracy %": 100 * correct.mean(), "train loss": np.mean(losses[-50:])},
        "skipped": optimizer.metrics()["skipped_steps"],
        "curves": {"loss": losses, "loss_scale": scales},
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
