"""One real step: gradients that float16 flushes to zero."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pairs
import pytest
from pairs import Pair

import mpjax

RNG = np.random.default_rng(0)
PARAMS = {
    "inner": RNG.normal(size=(8, 16)).astype(np.float32) * 0.3,
    "outer": {"w": RNG.normal(size=(16, 4)).astype(np.float32) * 0.3},
}
X = RNG.normal(size=(32, 8)).astype(np.float32)
SIZE = 1e-5


def loss(params, x):
    h = jnp.tanh(x @ params["inner"])
    return SIZE * jnp.mean((h @ params["outer"]["w"]) ** 2)  # fault


PLANNED = mpjax.autocast(loss, "mixed_float16")


def descend(gradient):
    def step(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient(params, x))

    return step


def unscaled(params, x):
    h = jnp.tanh(x.astype(jnp.float16) @ params["inner"].astype(jnp.float16))
    y = h @ params["outer"]["w"].astype(jnp.float16)
    return SIZE * jnp.mean(y.astype(jnp.float32) ** 2)  # fault


def scaled(params, x, scale=2.0**20):
    grads = jax.grad(lambda params: scale * unscaled(params, x))(params)
    return jax.tree.map(lambda g: g / scale, grads)


def step_by_hand(params, x):
    h = jnp.tanh(x.astype(jnp.float16) @ params["inner"].astype(jnp.float16))

    def of(w):
        y = h @ w
        return SIZE * jnp.mean(y.astype(jnp.float32) ** 2)  # fault

    grad = jax.grad(of)(params["outer"]["w"].astype(jnp.float16))
    return {**params, "outer": {"w": params["outer"]["w"] - 0.1 * grad.astype(jnp.float32)}}


CASES = {
    "by hand": Pair("flushed-gradient", step_by_hand, descend(scaled), (PARAMS, X)),
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))


def test_gradients_flushed_by_hand_are_found_and_scaled_ones_are_not():
    pairs.check(CASES["by hand"])


def found(fun, *args, **options):
    report = mpjax.lint(fun, select="flushed-gradient", **options)(*args)
    assert report.ran == ("flushed-gradient",), str(report)
    return [each.message for each in report.findings]


STEPS = {
    "gradient": lambda params, x: jax.grad(PLANNED)(params, x),
    "jitted": jax.jit(descend(jax.grad(PLANNED))),
    "grad of jit": descend(jax.grad(jax.jit(PLANNED))),
    "printed": descend(lambda params, x: printed(jax.grad(PLANNED)(params, x))),
}


def printed(grads):
    jax.debug.callback(lambda grads: None, grads)
    return grads


@pytest.mark.parametrize("name", STEPS)
def test_flushed_gradients_are_named_with_the_scale_that_cures_them(name):
    (message,) = found(STEPS[name], PARAMS, X)
    assert message.startswith("Without a loss scale") and "params['outer']['w']" in message
    cure = float(message.split("a loss scale of ")[1].split(",")[0])
    planned = jax.grad(lambda p, x: cure * PLANNED(p, x))
    descent = lambda p, x: jax.tree.map(lambda g: g / cure, planned(p, x))  # noqa: E731
    assert not found(descend(descent), PARAMS, X)


def test_a_loss_is_looked_at_with_its_gradient():
    (message,) = found(PLANNED, PARAMS, X, argnums=0)
    assert "params['outer']['w']" in message and "params['inner']" in message
    assert not found(PLANNED, PARAMS, X)  # nothing is differentiated
    assert not found(mpjax.autocast(loss), PARAMS, X, argnums=0)  # bfloat16 has the range


def training_step(loss_scale):
    optimizer = mpjax.mixed_precision(OPTIMIZER, "mixed_float16", loss_scale=loss_scale)

    def step(params, state, x):
        value, grads = optimizer.value_and_grad(loss, state)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, optimizer.init(PARAMS)


def test_a_fixed_scale_that_is_too_low_is_found_and_a_dynamic_one_is_not():
    step, state = training_step(8.0)
    (message,) = found(step, PARAMS, state, X)
    assert "8 (state.loss_scale.loss_scale)" in message and "moments" not in message
    more = int(message.split("one that is ")[1].split(" ")[0])
    for fine in (8.0 * more, "dynamic", mpjax.DynamicLossScale(init_scale=1.0)):
        step, state = training_step(fine)
        assert not found(step, PARAMS, state, X)


def test_zeros_of_the_program_itself_are_not_flushed():
    def dead(params, x):  # all rows but one are masked
        y = jax.nn.relu(x @ params["inner"])
        return jnp.sum(jnp.where(jnp.arange(len(x))[:, None] < 1, y, 0.0))

    assert not found(mpjax.autocast(dead, "mixed_float16"), PARAMS, X, argnums=0)
