"""A neural ODE: the diffrax solver in float32, the network inside it in half.

    python examples/neural_ode.py --size small --policy mixed_float16

The model learns an inward spiral from its trajectory (Chen et al., 2018). The solver adds small
steps to a state, which autocast keeps in float32. The vector field, a perceptron, computes in half.
Needs `pip install diffrax`. The distance is the root mean squared distance to trajectories from
other starting points.

These are the expected figures of the small size on a CPU. The last row, spread, is the range of
float32 over three seeds:

    policy          distance
    float32         0.04231
    mixed_bfloat16  0.0427
    mixed_float16   0.04233
    spread          0.008535
"""

import functools

import common
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

SIZES = {
    "smoke": {"steps": 3, "batch": 4, "width": 8, "times": 4, "rate": 3e-3},
    "small": {"steps": 400, "batch": 64, "width": 32, "times": 20, "rate": 5e-3},
    "full": {"steps": 20000, "batch": 1024, "width": 512, "times": 100, "rate": 1e-3},
}
END = 4.0


def spiral(t, y, _):
    return jnp.stack([-0.3 * y[0] + 2 * y[1], -2 * y[0] - 0.3 * y[1]]) * (1 + 0.3 * y[0])


def course(field, start, times):
    """Solves an ODE from a starting point; returns its state at some times."""
    diffrax = common.optional("diffrax")
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0.0,
        t1=END,
        dt0=END / (2 * len(times)),
        y0=start,
        saveat=diffrax.SaveAt(ts=times),
    ).ys


def train(options):
    times = jnp.linspace(0.0, END, options.times)
    keys = jax.random.split(jax.random.key(options.seed))
    starts = jax.random.uniform(jax.random.key(7), (512, 2), minval=-1.0, maxval=1.0)
    truth = jax.jit(jax.vmap(functools.partial(course, spiral), (0, None)))(starts, times)
    network = eqx.nn.MLP(2, 2, options.width, 2, activation=jax.nn.softplus, key=keys[0])

    def predict(network, starts):
        field = lambda t, y, _: network(y)  # noqa: E731
        return jax.vmap(lambda start: course(field, start, times))(starts)

    def loss_fn(network, starts, truth):
        return jnp.mean((predict(network, starts) - truth) ** 2)

    policy = mpjax.get_policy(options.policy)
    adam = optax.adam(optax.cosine_decay_schedule(options.rate, options.steps))
    optimizer = mpjax.optim.skip_nonfinite(optax.chain(optax.clip_by_global_norm(1.0), adam))
    opt_state = optimizer.init(eqx.filter(network, eqx.is_array))
    scale = mpjax.DynamicLossScale() if policy.needs_loss_scaling else mpjax.NoOpLossScale()

    @eqx.filter_jit
    def step(network, opt_state, scale, starts, truth):
        grad_fn = mpjax.scaled_value_and_grad(mpjax.autocast(loss_fn, policy), scale)
        loss, grads, finite = grad_fn(network, starts, truth)
        params = eqx.filter(network, eqx.is_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, finite=finite)
        return eqx.apply_updates(network, updates), opt_state, scale.adjust(finite), loss

    losses, scales = [], []
    data = [np.asarray(starts[128:]), np.asarray(truth[128:])]
    batches = common.batches(data, options.batch, options.seed)
    for _, batch in zip(common.steps(options.steps), batches, strict=False):
        network, opt_state, scale, loss = step(network, opt_state, scale, *batch)
        losses.append(loss)
        scales.append(scale.loss_scale)

    error = mpjax.autocast(loss_fn, policy)(network, starts[:128], truth[:128])
    return {
        "figures": {"distance": jnp.sqrt(error)},
        "skipped": opt_state.skipped_steps,
        "curves": {"loss": losses, "loss_scale": scales},
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
