"""Values near the saturation of a function: differences, their poles, and fractions."""

import jax
import jax.numpy as jnp
from jax import lax
from measure import rounded
from members import Case, Members, judge
from support import normal

SATURATED = Members("the derivative is computed from a result that was rounded to half")
SEEN = Members("a pole or a jump sees a rounding between the last matmul and itself")
X = normal(15, 64, 16)


def hidden(activation, shift, scale=0.1):
    def fun(w, v, x):
        return activation(x @ w + shift) @ v

    return Case(fun, (normal(0, 16, 16, scale=scale), normal(1, 16, 4), normal(2, 24, 16)), (0, 1))


@SATURATED()
def tanh():
    return hidden(jnp.tanh, 6)


@SATURATED()
def tanh_of_the_other_sign():
    return hidden(jnp.tanh, -5)


@SATURATED()
def logistic():
    return hidden(jax.nn.sigmoid, 8)


@SATURATED()
def logistic_by_tanh():
    return hidden(lambda x: (1 + jnp.tanh(x / 2)) / 2, 9)


@SATURATED()
def logistic_written_out():
    return hidden(lambda x: 1 / (1 + jnp.exp(-x)), 7)


@SATURATED()
def gelu_written_out():
    return hidden(lambda x: x * (1 + lax.erf(x / 2**0.5)) / 2, -3)


@SATURATED()
def soft_sign():
    return hidden(jax.nn.soft_sign, 120, scale=3)


@SATURATED()
def share_of_two():
    def share(x):
        a, b = jnp.split(jax.nn.relu(x) + 0.1, 2, -1)
        return jnp.concatenate([a * 60 / (a * 60 + b), b], -1)

    return hidden(share, 2)


@SATURATED()
def contrast():
    return hidden(lambda x: (x * x - 1) / (x * x + 1), 12)


@SATURATED()
def angle_of_two():
    return hidden(lambda x: jnp.arctan2(x, x + 1), 40, scale=1)


@SATURATED()
def gated():
    def fun(w, v, x):
        return ((x @ v) * jax.nn.sigmoid(x @ w + 7)) @ v

    return Case(fun, (normal(3, 16, 16, scale=0.1), normal(4, 16, 16), normal(5, 8, 16)), (0, 1, 2))


@SATURATED()
def highway():
    def fun(w, v, x):
        for _ in range(3):
            gate = jax.nn.sigmoid(x @ w + 5)
            x = gate * jnp.tanh(x @ v) + (1 - gate) * x
        return x

    args = (normal(6, 16, 16, scale=0.1), normal(7, 16, 16, scale=0.2), normal(8, 8, 16))
    return Case(fun, args, (0, 1, 2))


@SATURATED()
def recurrent():
    def network(stored):
        def fun(w, v, x):
            def turn(h, _):
                h = stored(jnp.tanh(h @ w + x @ v + 4))
                return h, h

            return lax.scan(turn, x, None, length=5)[1]

        return fun

    args = (normal(9, 16, 16, scale=0.1), normal(10, 16, 16, scale=0.1), normal(11, 8, 16))
    by_hand = lambda half: network(lambda h: rounded(h, half))  # noqa: E731
    return Case(network(lambda h: h), args, (0, 1, 2), by_hand=by_hand)


@SATURATED()
def update_gate():
    def fun(w, v, x):
        def turn(h, _):
            gate, new = jax.nn.sigmoid(h @ w + x @ v + 5), jnp.tanh(x @ w + h @ v)
            return (1 - gate) * new + gate * h, None

        return lax.scan(turn, x, None, length=16)[0]

    args = (normal(12, 16, 16, scale=0.1), normal(13, 16, 16, scale=0.1), normal(14, 8, 16))
    return Case(fun, args, (0, 1, 2))


# ---- poles and jumps ----------------------------------------------------------------------------


def read_twice(activation, function, scale):
    """The result of an activation goes into a matmul, and into a function that is steep."""

    def fun(w, v):
        a = activation(X @ w)
        return jnp.mean(jax.nn.relu(function(a) @ v)) + jnp.mean(a @ v)

    return Case(fun, (normal(16, 16, 4, scale=scale / 4), normal(17, 4, 8, scale=0.5)), (0, 1))


@SEEN()
def root_of_one_minus_a_logistic():
    return read_twice(jax.nn.sigmoid, lambda a: jnp.sqrt(1 - a), 4)


@SEEN()
def inverse_root():
    return read_twice(jnp.tanh, lambda a: lax.rsqrt(1.001 - a**2), 2)


@SEEN()
def inverse():
    return read_twice(jnp.tanh, lambda a: 1 / (1.001 - a**2), 2)


@SEEN()
def sine_from_cosine():
    return read_twice(jnp.tanh, lambda a: jnp.sqrt(1 - a**2 + 1e-6), 2)


@SEEN()
def noise_from_signal():
    return read_twice(lambda h: jnp.sqrt(jax.nn.sigmoid(h)), lambda a: jnp.sqrt(1 - a**2), 4)


@SEEN()
def log_of_one_minus_a_square():
    return read_twice(jnp.tanh, lambda a: jnp.log(1 - a**2 + 1e-6), 2)


@SEEN()
def log_of_one_minus_a_product():
    return read_twice(jnp.tanh, lambda a: jnp.log(1 - a * a + 1e-6), 2)


@SEEN()
def log_of_one_minus_a_cube():
    return read_twice(jax.nn.sigmoid, lambda a: jnp.log(1 - a**3 + 1e-6), 4)


@SEEN()
def sine_of_a_square():
    return read_twice(jnp.tanh, lambda a: jnp.sin(20 * a**2), 2)


@SEEN()
def learned_noise_schedule():
    def fun(w, v):
        g = X @ w
        a = jnp.sqrt(jax.nn.sigmoid(-g))
        s = jnp.sqrt(1 - a**2)
        return jnp.mean(jnp.log(a**2 / s**2)) + jnp.mean((a + s) @ v)

    return Case(fun, (normal(18, 16, 4, scale=0.5), normal(19, 4, 8, scale=0.5)), (0, 1))


def fraction_of(part):
    def fun(anchor, w, v):
        places = 512 * jax.nn.sigmoid(anchor + 0.1 * (X @ w))
        return jnp.mean((part(places) @ v) ** 2)

    args = (normal(20, 32, scale=2), normal(21, 16, 32, scale=0.05), normal(22, 32, 4))
    return Case(fun, args, (0, 1, 2))


@SEEN()
def fraction():
    return fraction_of(lambda x: x - lax.stop_gradient(jnp.floor(x)))


@SEEN()
def remainder():
    return fraction_of(lambda x: x % 1.0)


@SEEN()
def distance_to_the_nearest():
    return fraction_of(lambda x: x - jnp.round(x))


@SEEN()
def fraction_by_an_integer():
    return fraction_of(lambda x: x - x.astype(jnp.int32).astype(jnp.float32))


def steps_of(run):
    def fun(w, v):
        total = run(X @ w)
        steps = jnp.concatenate([total[:, :1], total[:, 1:] - total[:, :-1]], -1)
        return steps @ v

    return Case(fun, (normal(27, 16, 32, scale=0.25), normal(28, 32, 4)), (0, 1))


@SEEN()
def steps_of_a_running_sum():
    return steps_of(lambda h: jnp.cumsum(jax.nn.softplus(h), -1))


@SEEN()
def steps_of_a_scaled_running_sum():
    return steps_of(lambda h: 3 * jnp.cumsum(jax.nn.relu(h), -1))


@SEEN()
def probabilities_between_thresholds():
    return steps_of(lambda h: jax.nn.sigmoid(jnp.cumsum(jax.nn.softplus(h) / 8, -1)))


@SEEN()
def lovasz_hinge():
    flags = (normal(29, 64) > 0.3).astype(jnp.float32)

    def fun(w, v):
        errors = 1 - (jnp.tanh(X @ w) @ v) * (2 * flags - 1)
        order = jnp.argsort(-errors)
        right = flags[order]
        union = right.sum() + jnp.cumsum(1 - right)
        loss = 1 - (right.sum() - jnp.cumsum(right)) / union
        steps = jnp.concatenate([loss[:1], loss[1:] - loss[:-1]])
        return jnp.dot(jax.nn.relu(errors[order]), steps)

    return Case(fun, (normal(30, 16, 32, scale=0.25), normal(31, 32, scale=0.2)), (0, 1))


def ranked(read):
    return Case(
        lambda w, v: jnp.dot(read(40 + (X @ w)[:, 0]), v),
        (normal(32, 16, 1, scale=0.25), normal(33, 64)),
    )


@SEEN()
def sorted_after_an_offset():
    return ranked(lambda h: jnp.sort(h))


@SEEN()
def ordered_after_an_offset():
    return ranked(lambda h: h[jnp.argsort(-h)])


@SEEN()
def largest_after_an_offset():
    return ranked(lambda h: jnp.concatenate([lax.top_k(h, 32)[0]] * 2))


@SEEN()
def nearest_after_an_offset():
    def fun(w, v):
        h = 40 + X @ w
        return jnp.sum(X[:, 0] * (h @ v)[jnp.argmax(h, -1)])

    return Case(fun, (normal(32, 16, 32, scale=0.25), normal(33, 32)))


@SEEN()
def share_of_small_logistics():
    def fun(w, v):
        a = jax.nn.sigmoid(X @ w - 12)
        return jnp.mean(((a / a.sum(0)).T @ v) ** 2)

    return Case(fun, (normal(23, 16, 4, scale=0.25), normal(24, 64, 8)), (0, 1))


@SEEN()
def small_step_by_its_size():
    def fun(w, v):
        h = X @ w * 0.01
        return jnp.mean(jax.nn.relu((h / (jnp.sqrt(0.001 * h * h) + 1e-8)) @ v))

    return Case(fun, (normal(25, 16, 8, scale=0.25), normal(26, 8, 4)), (0, 1))


def confident(read, margin=5.0):
    """A softmax whose every row is almost one-hot; ``read`` takes it, and labels."""
    lead = margin * jax.nn.one_hot(jnp.argmax(X @ normal(34, 16, 8, scale=0.25), -1), 8)
    labels = jnp.argmax(lead, -1)
    return Case(
        lambda w, v: read(jax.nn.softmax(X @ w + lead), labels, v),
        (normal(34, 16, 8, scale=0.25), normal(35, 8)),
    )


@SATURATED()
def expected_reward():
    return confident(lambda p, y, v: jnp.mean(jnp.sum(p * v, -1)), margin=8.0)


@SATURATED()
def brier_score():
    return confident(lambda p, y, v: jnp.mean((p - jax.nn.one_hot(y, 8)) ** 2) * jnp.sum(v))


@SATURATED()
def cross_entropy_of_a_softmax():
    pick = lambda p, y: jnp.take_along_axis(p, y[:, None], -1)  # noqa: E731
    return confident(lambda p, y, v: -jnp.mean(jnp.log(pick(p, y) + 1e-7)) * jnp.sum(v))


@SATURATED()
def expected_bin():
    return confident(lambda p, y, v: jnp.mean((p @ jnp.arange(8.0) - 3) ** 2) * jnp.sum(v))


@SATURATED()
def softmax_that_is_masked_throughout():
    def fun(w, v):
        there = jnp.arange(64)[:, None] % 2 * jnp.ones((64, 8)) > 0
        h = jnp.where(there, X @ w, -1e9)
        e = jnp.where(there, jnp.exp(h - jnp.max(h, -1, keepdims=True)), 0)
        p = e / jnp.maximum(jnp.sum(e, -1, keepdims=True), 1e-9)
        return jnp.mean(jnp.sum(p * v, -1))

    return Case(fun, (normal(34, 16, 8), normal(35, 8)))


@SATURATED()
def expected_reward_of_rows_that_do_not_sum_to_one():
    lead = 8 * jax.nn.one_hot(jnp.argmax(X @ normal(34, 16, 8, scale=0.25), -1), 8)

    def fun(w, v):
        e = jnp.exp(X @ w + lead)
        return jnp.mean(jnp.sum(e / (1 + jnp.sum(e, -1, keepdims=True)) * v, -1))

    return Case(fun, (normal(34, 16, 8, scale=0.25), normal(35, 8)))


@SATURATED()
def codebook_behind_a_layer():
    first, second = normal(36, 16, 16, scale=0.5), normal(37, 16, 8)
    lead = 7 * jax.nn.one_hot(jnp.argmax(jnp.tanh(X @ first) @ second, -1), 8)

    def fun(w, v, book):
        return jnp.mean((jax.nn.softmax(jnp.tanh(X @ w) @ v + lead) @ book) ** 2)

    return Case(fun, (first, second, 4 + normal(38, 8, 4)), (0, 1, 2))


@SATURATED.test()
def test_saturated_functions_are_sound(member, half, part):
    judge(member, half, part)


@SEEN.test()
def test_poles_and_jumps_are_sound(member, half, part):
    judge(member, half, part)
