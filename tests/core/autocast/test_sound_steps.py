"""Small steps on something that matters: the state must not go through half between steps.

Judged too is the update, new state minus old: a state that lost all of its update is still within a
rounding of the right one.
"""

import jax
import jax.numpy as jnp
from jax import lax
from members import Case, Members, judge, moved
from support import normal

STEPS = Members("a state that small steps are added to is rounded to half between the steps")

X, Y = normal(0, 16, 8), normal(1, 16, 4)
W = normal(2, 8, 4, scale=0.5)
A, B = normal(3, 8, 16, scale=0.4), normal(4, 16, 8, scale=0.3)
H = normal(5, 16, 8)


def loss(w, x=X, y=Y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


def field(x):
    return jnp.tanh(x @ A) @ B


# ---- training written out -----------------------------------------------------------------------


@STEPS(parts="result gradient update")
def sgd_written_out():
    def fun(w):
        for _ in range(3):
            w = w - 1e-3 * jax.grad(loss)(w)
        return w

    return Case(fun, (W,), update=moved)


@STEPS(parts="result gradient update")
def weight_decay_written_out():
    def fun(w):
        for _ in range(3):
            w = w * (1 - 1e-4) - 1e-3 * jax.grad(loss)(w)
        return w

    return Case(fun, (W,), update=moved)


@STEPS(parts="result gradient update")
def momentum_written_out():
    def fun(w):
        m = jnp.zeros_like(w)
        for _ in range(3):
            m = 0.9 * m + jax.grad(loss)(w)
            w = w - 1e-3 * m
        return w

    return Case(fun, (W,), update=moved)


@STEPS(parts="result gradient update")
def adam_written_out():
    def fun(w):
        m, v = jnp.zeros_like(w), jnp.zeros_like(w)
        for i in range(1, 3):
            g = jax.grad(loss)(w)
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
            w = w - 1e-3 * (m / (1 - 0.9**i)) / (jnp.sqrt(v / (1 - 0.99**i)) + 1e-3)
        return w

    return Case(fun, (W,), update=moved)


@STEPS(parts="result gradient update")
def learning_rate_as_argument():
    def fun(w, rate):
        for _ in range(3):
            w = w - rate * jax.grad(loss)(w)
        return w

    return Case(fun, (W, 1e-3), update=moved)


@STEPS(parts="result gradient update")
def polyak_average():
    def fun(average):
        w = W
        for _ in range(3):
            w = w - 0.1 * jax.grad(loss)(w)
            average = 0.999 * average + 0.001 * w
        return average

    return Case(fun, (W + 0.3,), update=moved)


@STEPS(parts="result gradient update")
def target_network():
    def fun(target, online):
        online = online - 0.1 * (X.T @ (X @ online - Y)) / 16
        return target + 0.005 * (online - target)

    return Case(fun, (W, -W), update=moved)


@STEPS(parts="result gradient update")
def maml():
    def fun(w):
        fast = w
        for _ in range(2):
            fast = fast - 0.01 * jax.grad(loss)(fast)
        return {"fast": fast, "loss": (jnp.tanh(X[::2] @ fast) - Y[::2]) ** 2}

    return Case(fun, (W,), update=lambda args, out: out["fast"] - args[0])


@STEPS(parts="result gradient update")
def descent_on_latents():
    def fun(z, w):
        for _ in range(4):
            z = z - 0.01 * jax.grad(lambda z: jnp.sum((jnp.tanh(z @ w) - Y) ** 2))(z)
        return z

    return Case(fun, (X, W), (0, 1), update=moved)


# ---- equations of motion ------------------------------------------------------------------------


@STEPS(parts="result gradient update")
def euler_written_out():
    def fun(x):
        for _ in range(16):
            x = x + 0.01 * field(x)
        return x

    return Case(fun, (X,), update=moved)


@STEPS(parts="result gradient update")
def verlet_written_out():
    def fun(state):
        x, v = state
        for _ in range(6):
            v = v + 0.005 * field(x)
            x = x + 0.01 * v
            v = v + 0.005 * field(x)
        return x, v

    return Case(fun, ((X, H),), update=moved)


@STEPS(parts="result gradient update")
def runge_kutta_written_out():
    def fun(x):
        for _ in range(2):
            a = field(x)
            b = field(x + 0.005 * a)
            c = field(x + 0.005 * b)
            d = field(x + 0.01 * c)
            x = x + 0.01 / 6 * (a + 2 * b + 2 * c + d)
        return x

    return Case(fun, (X,), update=moved)


@STEPS(parts="result gradient update")
def denoising_written_out():
    def fun(x, noise):
        for i in range(4):
            x = x + 0.01 * field(x) + 0.1 * 0.1 * noise[i]
        return x

    return Case(fun, (X, normal(6, 4, 16, 8)), update=moved)


# ---- in a scan ----------------------------------------------------------------------------------


@STEPS(parts="result gradient update")
def scan_with_scalar_step():
    def fun(x):
        return lax.scan(lambda x, _: (x + 0.01 * field(x), None), x, None, length=32)[0]

    return Case(fun, (X,), update=moved)


@STEPS(parts="result gradient update")
def scan_with_vector_step():
    def fun(x, dt):
        return lax.scan(lambda x, _: (x + dt * field(x), None), x, None, length=32)[0]

    return Case(fun, (X, jnp.linspace(1e-3, 4e-3, 8)), update=moved)


@STEPS(parts="result gradient update")
def scan_with_step_in_weights():
    def fun(x, b):
        return lax.scan(lambda x, _: (x + jnp.tanh(x @ A) @ b, None), x, None, length=32)[0]

    return Case(fun, (X, 2e-3 * B), update=moved)


@STEPS(parts="result gradient update")
def fori_with_step_of_the_turn():
    def fun(x):
        return lax.fori_loop(0, 16, lambda i, x: x + 0.02 / (1.0 + i) * field(x), x)

    return Case(fun, (X,), update=moved)


@STEPS(parts="result gradient update")
def scan_over_steps():
    def fun(x, dts):
        return lax.scan(lambda x, dt: (x + dt * field(x), None), x, dts)[0]

    return Case(fun, (X, jnp.linspace(1e-3, 4e-3, 32)), update=moved)


@STEPS(parts="result gradient update")
def sgd_in_scan():
    def fun(w):
        step = lambda w, _: (w - 1e-3 * jax.grad(loss)(w), None)  # noqa: E731
        return lax.scan(step, w, None, length=16)[0]

    return Case(fun, (W,), update=moved)


# ---- small branches, and offsets to float32 arguments -------------------------------------------


def layer_scale(x, gamma):
    for i in range(4):
        x = x + gamma[i] * field(x)
    return x


@STEPS(parts="result gradient update")
def layer_scale_written_out():
    return Case(layer_scale, (X, jnp.full((4, 8), 1e-5)), (0, 1), update=moved)


@STEPS(parts="result gradient update")
def layer_scale_in_scan():
    def fun(x, gamma):
        return lax.scan(lambda x, g: (x + g * field(x), None), x, gamma)[0]

    return Case(fun, (X, jnp.full((4, 8), 1e-5)), (0, 1), update=moved)


@STEPS(parts="result gradient update")
def rezero():
    def fun(x, alpha):
        for i in range(4):
            x = x + alpha[i] * field(x)
        return x

    return Case(fun, (X, jnp.full((4,), 1e-4)), (0, 1), update=moved)


@STEPS(parts="result gradient update")
def adapter():
    def fun(x, down, up):
        for _ in range(3):
            x = x + (x @ down) @ up
        return x

    args = (X, normal(7, 8, 16, scale=0.3), normal(8, 16, 8, scale=1e-4))
    return Case(fun, args, (0, 1, 2), update=moved)


def corners(boxes):
    center, size = boxes[:, :2], boxes[:, 2:]
    return center - size / 2, center + size / 2


def overlap(a, b):
    (a0, a1), (b0, b1) = corners(a), corners(b)
    sides = jax.nn.relu(jnp.minimum(a1, b1) - jnp.maximum(a0, b0))
    both = sides[:, 0] * sides[:, 1]
    return both / (a[:, 2] * a[:, 3] + b[:, 2] * b[:, 3] - both)


BOXES = jnp.concatenate([900 + normal(9, 16, 2, scale=5), 40 + normal(10, 16, 2)], 1)


@STEPS()
def boxes_with_offsets():
    def fun(w, boxes):
        refined = boxes + X @ w
        score = jnp.tanh(refined / 900 @ A[:4])
        return overlap(refined, BOXES + 3), score

    return Case(fun, (0.3 * W, BOXES))


@STEPS()
def boxes_refined_twice():
    def fun(w, boxes):
        for _ in range(2):
            boxes = boxes + jnp.tanh((X + (boxes - BOXES) @ A[:4, :8]) @ w)
        return overlap(boxes, BOXES + 3)

    return Case(fun, (0.3 * W, BOXES))


@STEPS()
def optical_flow():
    grid = jnp.stack(jnp.meshgrid(jnp.arange(200.0, 204), jnp.arange(300.0, 304)), -1)
    grid = grid.reshape(16, 2)

    def fun(w):
        coords = grid
        for _ in range(3):
            coords = coords + 0.3 * jnp.tanh(X + (coords - grid) @ A[:2, :8]) @ w
        return coords - grid

    return Case(fun, (W[:, :2],))


@STEPS()
def deformed_points():
    points = 50 + normal(11, 16, 3)

    def fun(w):
        moved = points + 0.1 * (X @ w)
        weights = jnp.exp(-jnp.sum((moved[:, None] - moved[None]) ** 2, -1))
        return weights @ (moved / 50)

    return Case(fun, (W[:, :3],))


@STEPS.test()
def test_small_steps_on_a_state_are_sound(member, half, part):
    judge(member, half, part)
