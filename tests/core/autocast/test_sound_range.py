"""Values outside of half's range or resolution, and values that are read in two ways.

Half cannot hold 1e5 or 1e-9, nor tell 0.9999 from one; and what one reader takes rounded, another
amplifies.
"""

import jax
import jax.numpy as jnp
from jax import lax
from measure import rounded
from members import Case, Members, judge
from support import normal

RANGE = Members("a float32 value is rounded for storage where half's range does not hold it", "f16")
SCALARS = Members(
    "a scalar that arrives as an argument is rounded to half, a literal would not be", "f16"
)
READERS = Members("a value that several read is rounded though one of them amplifies its error")

AGAIN = Members("what the backward pass computes again starts from a rounded operand")

X, W = normal(0, 16, 16), normal(1, 16, 16, scale=0.3)
LARGE = 60 + jnp.abs(normal(2, 16, 16, scale=20))


# ---- range --------------------------------------------------------------------------------------


@RANGE()
def relu_of_cumsum():
    x = normal(3, 4, 1024) + 3
    w = normal(4, 1024, 16, scale=0.03)
    return Case(lambda x, w: jax.nn.relu(jnp.cumsum(x * 50, -1)) / 1e5 @ w, (x, w), (0, 1))


@RANGE()
def maximum_of_exp():
    x = jnp.linspace(-4, 14, 64).reshape(4, 16)
    return Case(lambda x, w: jnp.maximum(jnp.exp(x), 2.0) / 1e5 @ w, (x, W), (0, 1))


@RANGE()
def minimum_of_small_exp():
    x = jnp.linspace(16, 24, 64).reshape(4, 16)
    return Case(lambda x, w: 1e9 * jnp.minimum(jnp.exp(-x), 1e-9) @ w, (x, W), (0, 1))


@RANGE()
def small_factors_one_after_the_other():
    def fun(w, x):
        h = x @ w * 0.002
        return ((0.001 * h) * 5e5) @ W

    return Case(fun, (W, X), (0, 1), loss_scale=1.0)


def units(turn):
    """Returns a member: a network whose layers multiply by an argument of a million."""

    def network(stored):
        def layer(h, w, n):
            return stored((1 + 0.1 * jnp.tanh(h @ w)) * n / 1e6)

        return lambda w, x, n: turn(layer, x, w, n)

    args = jnp.stack([W, W]), X, 1e6 + 1e5 * normal(2, 16, 16)
    by_hand = lambda half: network(lambda h: rounded(h, half))  # noqa: E731
    return Case(network(lambda h: h), args, loss_scale=1.0, by_hand=by_hand)


@RANGE()
def argument_in_a_loop():
    return units(lambda layer, x, w, n: lax.scan(lambda h, w: (layer(h, w, n), None), x, w)[0])


@RANGE()
def argument_that_a_loop_takes_apart():
    def turn(layer, x, w, n):
        return lax.scan(lambda h, wn: (layer(h, *wn), None), x, (w, jnp.stack([n, 2 * n])))[0]

    return units(turn)


@RANGE()
def part_of_an_argument():
    return units(lambda layer, x, w, n: layer(layer(x, w[0], n[::-1]), w[1], n.T.reshape(n.shape)))


@RANGE()
def argument_in_a_branch():
    def turn(layer, x, w, n):
        return lax.cond(x[0, 0] > 0, lambda: layer(x, w[0], n), lambda: layer(x, w[1], n[::-1]))

    return units(turn)


@RANGE()
def argument_that_is_broadcast():
    return units(lambda layer, x, w, n: layer(x, w[0], jnp.broadcast_to(n[0], n.shape)))


def normalized_of_two(view):
    def turn(layer, x, w, n):
        h = layer(jnp.stack([x, x / 2]), w[0], view(n)).sum(0)
        return (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 1e-5)

    return units(turn)


@RANGE()
def argument_with_another_axis():
    return normalized_of_two(lambda n: n[None])


@RANGE()
def argument_that_is_turned_around():
    return normalized_of_two(lambda n: n[None, ::-1])


ROWS = jnp.array([3, 0, 15, 15, 7, 1, 2, 12] * 2)


@RANGE()
def rows_of_an_argument():
    return units(lambda layer, x, w, n: layer(layer(x, w[0], n[ROWS]), w[1], n[:, ROWS]))


@RANGE()
def rows_of_an_argument_whose_mean_is_taken_off():
    def fun(w, x, n):
        return jnp.tanh((n[ROWS] - 1e6) / 1e5 + x @ w) @ w

    return Case(fun, (W, X, 1e6 + 1e5 * normal(2, 16, 16)), loss_scale=1.0)


@RANGE()
def product_of_small_values():
    def fun(w, x):
        h = x @ w * 0.002
        return ((h * h) * 2e5) @ W

    return Case(fun, (W, X), (0, 1), loss_scale=1.0)


@RANGE()
def relu_of_cube():
    return Case(lambda x, w: jax.nn.relu(x**3) / 1e6 @ w, (LARGE, W), (0, 1))


@RANGE()
def array_of_large_constants():
    offsets = jnp.linspace(6e4, 9e4, 16)

    def fun(w, x):
        return (jax.nn.relu(x @ w + offsets) / 1e5) @ w

    return Case(fun, (W, X), (0, 1))


@RANGE()
def array_of_large_constants_turned_around():
    offsets = jnp.linspace(6e4, 9e4, 32).reshape(16, 2)

    def fun(w, x):
        by_column = jnp.flip(offsets.T[:1], -1)
        return (jax.nn.relu(x @ w + by_column) / 1e5) @ w

    return Case(fun, (W, X), (0, 1))


@RANGE()
def array_of_small_constants_in_a_loop():
    sizes = jnp.linspace(1e-9, 4e-9, 16)

    def fun(w, x):
        def turn(h, _):
            return jnp.tanh((h @ w * sizes) * 5e8), None

        return lax.scan(turn, x, length=2)[0]

    return Case(fun, (W, X), (0, 1))


def of_shares(read):
    shares = jax.nn.softmax(normal(5, 16, 16))

    def fun(w, x):
        return read(jax.nn.softmax(8 * (x @ w)), shares, w)

    return Case(fun, (W, X), (0, 1))


@RANGE()
def chi_square_of_small_shares():
    return of_shares(lambda p, q, w: jnp.mean((q - p) ** 2 / (p + 1e-6)))


@RANGE()
def chi_square_of_shares_that_a_matmul_reads():
    return of_shares(lambda p, q, w: jnp.mean((q - p) ** 2 / (p + 1e-6)) + jnp.mean(p @ w))


@RANGE()
def cross_entropy_with_an_epsilon():
    return of_shares(lambda p, q, w: -jnp.mean(q * jnp.log(p + 1e-6)))


@RANGE()
def segment_sum():
    def fun(x, w):
        sums = jax.ops.segment_sum(1e4 * x, jnp.arange(16) // 8, 2)
        return jax.nn.relu(sums) / 1e5 @ w

    return Case(fun, (jnp.abs(X) + 1, W), (0, 1))


@RANGE()
def cube_of_a_matmul():
    def fun(x, w):
        return jax.nn.relu((x @ w) ** 3) / 1e6 @ w

    return Case(fun, (LARGE, jnp.abs(W)), (0, 1))


@RANGE()
def products_of_a_matmul():
    def fun(x, w):
        h = x @ w
        return (h * h * h * h / 1e8) @ w

    return Case(fun, (LARGE, jnp.abs(W)), (0, 1))


@RANGE()
def units_of_a_matmul():
    def fun(x, w):
        return jnp.tanh(300 * (300 * (x @ w)) / 1e5) @ w

    return Case(fun, (LARGE, W), (0, 1))


@RANGE()
def small_units_of_a_matmul():
    def fun(x, w):
        return jnp.tanh(1e4 * (1e4 * (1e-4 * (1e-4 * (x @ w))))) @ w

    return Case(fun, (X, W), (0, 1))


@RANGE()
def capped_distances():
    def fun(points, w):
        squared = jnp.sum((points[:, None] - points[None]) ** 2, -1)
        return jnp.minimum(squared, 4e5) / 4e5 @ w

    return Case(fun, (normal(5, 16, 3, scale=300), X), (0, 1))


@RANGE()
def clipped_likelihood_ratio():
    def fun(x, w):
        ratio = jnp.exp(x @ w)
        return jnp.clip(ratio, 0.0, 1e6) / 1e5 @ w

    return Case(fun, (4 * X, W), (0, 1))


@RANGE()
def sorted_exponentials():
    x = jnp.linspace(-4, 14, 64)[::-1].reshape(4, 16)
    return Case(lambda x, w: jnp.sort(jnp.exp(x), -1) / 1e5 @ w, (x, W), (0, 1))


@RANGE()
def counts_beside_a_matmul():
    def fun(x, w):
        scale = jnp.cumsum(jnp.full((16, 1), 9e3), 0)
        return ((x @ w) * scale / 1e5) @ w

    return Case(fun, (X, W), (0, 1))


# ---- scalars that arrive as arguments -----------------------------------------------------------


@SCALARS()
def eps_argument():
    def fun(x, w, eps):
        h = jax.nn.relu(x @ w)
        return h / (jnp.abs(x @ w) + eps) @ w

    return Case(fun, (X.at[3].set(0), W, 1e-12), 1)


@SCALARS()
def divisor_argument():
    return Case(lambda x, w, c: jnp.tanh(300 * (x @ w) / c * 300) @ w, (X, W, 2e5), 1)


@SCALARS()
def scale_argument():
    return Case(lambda x, w, s: jnp.tanh(1e-5 * (x @ w) * s) @ w, (X, W, 1.2e5), 1)


@SCALARS()
def eps_argument_in_a_loop():
    def fun(x, w, eps):
        def step(h, _):
            h = h @ w
            return h / (jnp.max(jnp.abs(h), -1, keepdims=True) + eps), None

        return lax.scan(step, x, None, length=2)[0] @ w

    return Case(fun, (X.at[3].set(0), W, 1e-12), 1)


@SCALARS()
def decay_argument():
    def fun(x, w, decay):
        h = x @ w
        return (1e3 * (h - decay * h)) @ w

    return Case(fun, (X, W, 0.999), 1)


@SCALARS()
def mask_argument():
    def fun(x, w, low):
        scores = jnp.where(jnp.tri(16) > 0, x @ w, low)
        return jax.nn.softmax(scores) @ w

    return Case(fun, (X, W, -1e6), 1)


@SCALARS()
def step_count_argument():
    def fun(x, w, count):
        h = x @ w
        return (h * (count / 1e5)) @ w

    return Case(fun, (X, W, 1e5), 1)


@SCALARS()
def scalars_in_an_array():
    def fun(x, w, scales):
        return jnp.tanh((x @ w) * scales[0] * scales[1]) @ w

    return Case(fun, (X, W, jnp.array([1.2e5, 1e-5])), 1)


@SCALARS()
def vector_of_variances():
    def fun(x, w, variance):
        return jnp.tanh(1e-5 * (x @ w) / variance) @ w

    return Case(fun, (X, W, jnp.logspace(-6, -4, 16)), 1)


# ---- two kinds of readers -----------------------------------------------------------------------


@READERS()
def sine_and_matmul():
    def fun(x, w):
        z = (x - 5) / 3
        return jnp.sin(64 * z), z @ w

    return Case(fun, (X, W), (0, 1))


@READERS()
def exponential_and_matmul():
    def fun(x, w):
        z = x - jnp.mean(x, -1, keepdims=True)
        return jnp.exp(12 * z), z @ w

    return Case(fun, (X, W), (0, 1))


@READERS()
def squashed_and_its_density():
    def fun(x, w):
        action = jnp.tanh(x * 1.5)
        return jnp.log1p(-action * action), action @ w

    return Case(fun, (X, W), (0, 1))


@READERS()
def matmul_read_by_sine_and_matmul():
    def fun(x, w):
        h = x @ w
        return jnp.sin(32 * h), h @ w

    return Case(fun, (X, W), (0, 1))


@READERS()
def read_in_a_loop():
    def fun(x, w):
        z = x * 0.5 + 3

        def step(c, w):
            return c + jnp.sin(40 * z), z @ w

        return lax.scan(step, jnp.zeros_like(x), jnp.stack([w, w.T]))

    return Case(fun, (X, W), (0, 1))


@READERS()
def residual_and_its_logarithm():
    def fun(x, w):
        p = jax.nn.sigmoid(x + 4)
        return jnp.log1p(-p), jax.nn.relu(p @ w)

    return Case(fun, (X, W), (0, 1))


@READERS()
def branches_that_amplify():
    def fun(x, w):
        z = (x - 5) / 3
        return lax.cond(x[0, 0] > 9, jnp.exp, lambda z: jnp.cos(64 * z), z), z @ w

    return Case(fun, (X, W), (0, 1))


# ---- computed again in the backward pass --------------------------------------------------------


@AGAIN()
def exponential_before_a_relu():
    def fun(x, w):
        return jax.nn.relu(jnp.exp(2 * jnp.tanh(x) + 8) - 1) / 3e3 @ w

    return Case(fun, (X, W), (0, 1))


@AGAIN()
def sine_before_a_relu():
    return Case(lambda x, w: jax.nn.relu(jnp.sin(30 * x)) @ w, (X, W), (0, 1))


@AGAIN()
def power_before_a_maximum():
    def fun(x, w):
        return jnp.maximum((jnp.tanh(x) + 1.5) ** 9.5, 0.1) / 1e3 @ w

    return Case(fun, (X, W), (0, 1))


@AGAIN()
def gabor_before_a_relu():
    def fun(x, w):
        return jax.nn.relu(jnp.exp(-x * x / 2) * jnp.cos(40 * x)) @ w

    return Case(fun, (X, W), (0, 1))


@AGAIN()
def wave_of_a_matmul():
    return Case(lambda x, w: jax.nn.relu(jnp.cos(50 + (x @ w))) @ w, (X, W), (0, 1))


@AGAIN()
def rematerialized_wave():
    f = jax.checkpoint(lambda x, w: jnp.cos(30 * x) @ w)
    return Case(lambda x, w: jnp.tanh(f(x, w)) @ w, (X, W), (0, 1))


@AGAIN.test()
def test_recomputed_values_are_sound(member, half, part):
    judge(member, half, part)


@RANGE.test()
def test_values_outside_of_the_range_of_half_are_sound(member, half, part):
    judge(member, half, part)


@SCALARS.test()
def test_scalars_as_arguments_are_sound(member, half, part):
    judge(member, half, part)


@READERS.test()
def test_values_with_two_kinds_of_readers_are_sound(member, half, part):
    judge(member, half, part)
