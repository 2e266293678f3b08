"""ResNet-18 with autocast and a gradient scaler, as in PyTorch's tutorial on torch.amp.

    python examples/resnet18.py --size small --policy mixed_float16

Data: scikit-learn's digits, with half of the writers held out. `--data FOLDER` reads your own
images, one folder per class. These are the expected figures of the small size on a CPU. The last
row, spread, is the range of float32 over three seeds:

    policy          accuracy %  train loss
    float32         94.33       0.002128
    mixed_bfloat16  94.33       0.002065
    mixed_float16   94.99       0.002069
    spread          1.335       0.0004101
"""

import functools

import common
import flax.linen as nn
import jax
import numpy as np
import optax

import mpjax

SIZES = {
    "smoke": {"steps": 6, "batch": 8, "width": 2, "side": 8, "blocks": 1, "rate": 1e-3},
    "small": {"steps": 250, "batch": 64, "width": 16, "side": 8, "blocks": 2, "rate": 3e-3},
    "full": {"steps": 20000, "batch": 256, "width": 64, "side": 224, "blocks": 2, "rate": 1e-3},
}


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x, train):
        norm = functools.partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        strides = (self.stride, self.stride)
        y = nn.Conv(self.features, (3, 3), strides, use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = norm()(nn.Conv(self.features, (1, 1), strides, use_bias=False)(x))
        return nn.relu(x + y)


class ResNet18(nn.Module):
    """Four stages of two blocks. It names no dtype: autocast chooses them."""

    classes: int
    width: int
    blocks: int = 2

    @nn.compact
    def __call__(self, x, train):
        large = x.shape[1] > 64  # small images are not reduced
        x = nn.Conv(self.width, (7, 7) if large else (3, 3), 2 if large else 1, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        if large:
            x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage in range(4):
            for block in range(self.blocks):
                x = Block(self.width * 2**stage, 2 if stage and not block else 1)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


def train(options):
    data, (held_out, labels) = common.read_images(options.data, options.side)
    model = ResNet18(int(labels.max()) + 1, options.width, options.blocks)
    policy = mpjax.get_policy(options.policy)
    schedule = optax.cosine_decay_schedule(options.rate, options.steps)
    optimizer = mpjax.optim.skip_nonfinite(
        optax.adamw(schedule)
    )  # scaler.step: no step on Inf or NaN

    def loss_fn(params, batch_stats, images, labels):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = model.apply(variables, images, train=True, mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), new["batch_stats"]

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2, 3))
    def step(params, batch_stats, opt_state, scaler, images, labels):
        forward = mpjax.autocast(loss_fn, policy)  # with torch.autocast(...):
        grad_fn = mpjax.scaled_value_and_grad(forward, scaler, has_aux=True)  # scaler.scale(loss)
        (loss, new_stats), grads, finite = grad_fn(params, batch_stats, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, params)  # scaler.step(optimizer)
        params = optax.apply_updates(params, updates)
        batch_stats = mpjax.select(finite, new_stats, batch_stats)
        return params, batch_stats, opt_state, scaler.adjust(finite), loss  # scaler.update()

    variables = jax.jit(functools.partial(model.init, train=False))(
        jax.random.key(options.seed), held_out[:1]
    )
    params, batch_stats = variables["params"], variables["batch_stats"]
    opt_state = optimizer.init(params)
    # It grows every 50 steps, so that a short run shows it; torch's interval is 2000.
    dynamic = mpjax.DynamicLossScale(growth_interval=min(2000, options.steps // 5 + 1))
    scaler = dynamic if policy.needs_loss_scaling else mpjax.NoOpLossScale()

    losses, scales = [], []
    batches = common.batches(data, options.batch, options.seed)
    for _, batch in zip(common.steps(options.steps), batches, strict=False):
        params, batch_stats, opt_state, scaler, loss = step(
            params, batch_stats, opt_state, scaler, *batch
        )
        losses.append(loss)
        scales.append(scaler.loss_scale.copy())  # the scaler itself is donated

    def predict(images):
        variables = {"params": params, "batch_stats": batch_stats}
        return model.apply(variables, images, train=False).argmax(-1)

    predicted = mpjax.autocast(predict, policy)(held_out)
    return {
        "figures": {
            "accuracy %": 100 * (predicted == labels).mean(),
            "train loss": np.mean(losses[-50:]),
        },
        "skipped": opt_state.skipped_steps,
        "curves": {"loss": losses, "loss_scale": scales},
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
