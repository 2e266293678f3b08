"""Sums of exponentials in one pass: found however they are spelled, and nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from measure import run
from support import assert_near, cast, equations, normal, thorough_but
from test_peepholes import TRANSFORMS, compiled

import mpjax
from mpjax._src.autocast import derivatives
from mpjax._src.base import _jax

ROWS, LONG = 4, 1100
H, W = normal(0, ROWS, 8), normal(1, 8, LONG)
LABELS = jnp.asarray([0, 5, LONG - 1, -1])
stop = jax.lax.stop_gradient


@pytest.fixture
def one_pass(monkeypatch):
    """Runs here what a GPU would run."""
    monkeypatch.setattr(_jax, "GPUS", ("cpu",))


def top(s):
    return jnp.max(s, -1, keepdims=True)


def by_hand(s, shift):
    return shift[..., 0] + jnp.log(jnp.sum(jnp.exp(s - shift), -1))


def columns(s):
    m = jnp.max(s, 0)
    return m + jnp.log(jnp.sum(jnp.exp(s - m), 0))


# What sums exponentials below their row's maximum, and reads these sums alone.
SUMS = {
    "logsumexp": lambda s: jax.nn.logsumexp(s, -1),
    "with its axis": lambda s: s - jax.nn.logsumexp(s, -1, keepdims=True),
    "over columns": lambda s: jax.nn.logsumexp(s.T, 0),
    "log_softmax": lambda s: jnp.sin(jax.nn.log_softmax(s)),
    "cross entropy": lambda s: optax.softmax_cross_entropy_with_integer_labels(s, LABELS),
    "cross entropy, one hot": lambda s: optax.softmax_cross_entropy(
        s, jax.nn.one_hot(LABELS, s.shape[-1])
    ),
    "a loss of the sum too": lambda s: jnp.square(jax.nn.logsumexp(s, -1)) + jnp.sum(s, -1),
    "by hand": lambda s: by_hand(s, stop(top(s))),
    "by hand, not stopped": lambda s: by_hand(s, top(s)),
    "at least zero": lambda s: by_hand(s, stop(jnp.maximum(top(s), 0.0))),
    "in base 2": lambda s: jnp.log2(jnp.sum(jnp.exp2(s - stop(top(s))), -1)) + top(s)[..., 0],
    "columns, spread": lambda s: columns(s.T),
    "scaled": lambda s: jax.nn.logsumexp(s / 3, -1),
    "three axes": lambda s: jax.nn.logsumexp(s.reshape(2, 2, LONG), -1),
    "over two axes": lambda s: jax.nn.logsumexp(s.reshape(2, 2, LONG), (0, 2)),
    "tanh before": lambda s: jax.nn.logsumexp(30 * jnp.tanh(s / 30), -1),
    "twice": lambda s: jax.nn.logsumexp(s, -1) + jnp.sin(jax.nn.logsumexp(s, -1)),
}
# What only looks like one, or gains nothing.
OTHERS = {
    "another shift": lambda s: by_hand(s, stop(jnp.mean(s, -1, keepdims=True))),
    "of another array": lambda s: by_hand(s, stop(top(jnp.sin(s)))),
    "of columns": lambda s: by_hand(s[:, :ROWS].repeat(300, 1), stop(jnp.max(s, 0)[:ROWS, None])),
    "transposed": lambda s: jnp.log(
        jnp.sum(jnp.exp(s.reshape(2, 2, -1) - stop(top(s).reshape(2, 2, 1).swapaxes(0, 1))), -1)
    ),
    "rows transposed": lambda s: (
        lambda t: jnp.log(jnp.sum(jnp.exp(t - stop(jnp.max(t, -1).T[..., None])), -1))
    )(s.reshape(2, 2, -1)),
    "scaled after": lambda s: jnp.sum(jnp.exp(0.5 * (s - stop(top(s)))), -1),
    "masked": lambda s: jnp.sum(jnp.where(s > 0, jnp.exp(s - stop(top(s))), 0), -1),
    "softmax": lambda s: jnp.sin(jax.nn.softmax(s)),
    "exponentials read too": lambda s: (lambda e: jnp.sum(e, -1) + jnp.sum(jnp.sin(e), -1))(
        jnp.exp(s - stop(top(s)))
    ),
    "short rows": lambda s: jax.nn.logsumexp(s.reshape(ROWS, -1, 100), -1),
    "no shift": lambda s: jnp.log(jnp.sum(jnp.exp(s), -1)),
    "sums over fewer axes": lambda s: (lambda t: jnp.sum(jnp.exp(t - jnp.max(t)), -1))(s),
}


def of_matmul(fun):
    return lambda h, w: fun(h @ w)


def weighed(fun):
    """Returns a scalar of what a function gives."""

    def total(y):
        return jnp.sum(jnp.cos(jnp.arange(1.0, 1 + y.size)) * y.ravel())

    return lambda *args: sum(map(total, jax.tree.leaves(fun(*args))))


def agree(fun, args, tolerance, second=True, run=run):
    """Holds results, derivatives and second derivatives against float32's."""
    ts = tuple(normal(9 + i, *x.shape) for i, x in enumerate(args))

    def everything(f):
        gradient = jax.grad(weighed(f), tuple(range(len(args))))
        found = jax.jvp(gradient, args, ts) if second else [gradient(*args)]
        return f(*args), jax.jvp(f, args, ts)[1], *found

    want, got = run(lambda: (everything(fun), everything(cast(fun))))
    for parts in zip(got, want, strict=True):
        assert_near(*parts, tolerance)


def passes(fun, *args):
    """Returns how many reductions of a program sum in one pass."""
    found = [
        eqn for eqn in equations(jax.make_jaxpr(cast(fun))(*args)) if eqn.primitive.name == "reduce"
    ]
    return len(found)


@pytest.mark.parametrize("name", SUMS)
def test_a_maximum_and_the_sum_below_it_take_one_pass(name):
    assert passes(of_matmul(SUMS[name]), H, W) == (2 if name == "twice" else 1)


@pytest.mark.parametrize("name", OTHERS)
def test_lookalikes_of_sums_of_exponentials_take_no_single_pass(name):
    assert passes(of_matmul(OTHERS[name]), H, W) == 0


QUICK = ["with its axis", "over columns", "log_softmax", "cross entropy", "by hand, not stopped"]
QUICK += ["in base 2", "over two axes", "twice"]


@pytest.mark.parametrize("name", thorough_but(SUMS | OTHERS, *QUICK, *OTHERS))
def test_one_pass_sums_of_exponentials_have_right_derivatives(name, one_pass):
    agree((SUMS | OTHERS)[name], (normal(2, ROWS, LONG, scale=3.0),), 5e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SUMS | OTHERS)
def test_one_pass_sums_have_right_derivatives_as_compiled(name, one_pass):
    args = (normal(2, ROWS, LONG, scale=3.0),)
    agree((SUMS | OTHERS)[name], args, 5e-3, run=compiled)


@pytest.mark.parametrize("name", thorough_but(SUMS, "cross entropy", "three axes", "at least zero"))
def test_one_pass_sums_of_a_matmul_have_right_derivatives(name, one_pass):
    agree(of_matmul(SUMS[name]), (H, W), 0.05, second=False)


SAMPLE = ["logsumexp", "by hand, not stopped", "log_softmax"]
PAIRS = [(transform, name) for transform in TRANSFORMS for name in SAMPLE]


@pytest.mark.parametrize(
    ("transform", "name"),
    thorough_but(PAIRS, ("remat", "log_softmax"), ("vmap", "by hand, not stopped")),
)
def test_one_pass_sums_have_right_derivatives_within_transformations(name, transform, one_pass):
    def fun(s, t, c):
        return jnp.sum(SUMS[name](s + t)) * c

    args = normal(2, ROWS, LONG, scale=3.0), normal(3, LONG), jnp.float32(0.5)
    # The state of a scan is rounded in every turn, and more often if nothing is fused.
    agree(TRANSFORMS[transform](fun), args, 0.02, run=compiled if transform == "scan" else run)


def test_the_maximum_is_computed_once_forward_and_backward(one_pass):
    traced = jax.jit(jax.grad(cast(weighed(of_matmul(SUMS["cross entropy"]))))).trace(H, W)
    text = traced.lower().as_text()
    assert sum(e.primitive.name == "reduce" for e in equations(traced.jaxpr)) == 1
    assert text.count("stablehlo.reduce(") <= 3  # both at once, the mean, and the transposed bias


ODD = {
    "nothing": [-np.inf] * 3,
    "one": [-np.inf, 2.0, -np.inf],
    "infinite": [1.0, np.inf, -np.inf],
    "no number": [1.0, np.nan, np.inf],
    "all that float32 holds": [3e38, -3e38, 0.0],
    "far apart": [200.0, 0.0, -200.0],
}


@pytest.mark.parametrize("name", ODD)
def test_one_pass_logsumexp_of_nonfinite_rows_equals_jaxs(name, one_pass):
    row = jnp.concatenate([jnp.asarray(ODD[name] * 400)])
    fun = mpjax.autocast(lambda x: jax.nn.logsumexp(1.0 * x, -1), mpjax.get_policy("O1"))
    want = jax.nn.logsumexp(np.asarray(row), -1)
    np.testing.assert_allclose(jax.jit(fun)(row), want, rtol=1e-6)


def test_maximum_and_sum_is_as_exact_as_two_passes(rng, one_pass):
    x = np.asarray(rng.normal(0, 10, (16, 50_000)), np.float32)
    exact = np.log(np.sum(np.exp(x.astype(np.float64)), -1))
    eqn = jax.make_jaxpr(lambda x: jnp.max(x, 1))(x).eqns[0]
    largest, sums = jax.jit(lambda x: derivatives.maximum_and_sum(eqn, x, "exp"))(x)
    np.testing.assert_array_equal(largest, x.max(1))
    np.testing.assert_allclose(largest + np.log(sums), exact, rtol=2e-6)


def test_shards_of_a_row_are_joined_without_a_gather(one_pass):
    mesh = jax.make_mesh((2,), ("vocabulary",), axis_types=(AxisType.Auto,))
    shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "vocabulary"))
    fun = jax.value_and_grad(cast(weighed(of_matmul(SUMS["logsumexp"]))))
    jitted = jax.jit(fun, in_shardings=shardings, out_shardings=(None, shardings[0]))
    text = jitted.lower(H, W).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert not any(str(LONG) in line.split("all-gather(")[0] for line in gathers), gathers
    assert_near(jitted(H, W)[0], weighed(of_matmul(SUMS["logsumexp"]))(H, W), 0.05)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_one_pass_logsumexp_matches_under_shard_map_and_explicit_axes(kind, one_pass):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(kind,))

    def fun(h, w):
        return jnp.sum(jax.nn.logsumexp(h @ w, -1))

    def mapped(h, w):
        return jax.lax.psum(cast(fun)(h, w), "rows")

    with jax.set_mesh(mesh):
        h = jax.device_put(H, NamedSharding(mesh, P("rows")))
        w = jax.device_put(W, NamedSharding(mesh, P()))
        whole = jax.jit(cast(fun))(h, w)
        parts = jax.jit(jax.shard_map(mapped, in_specs=(P("rows"), P()), out_specs=P()))(h, w)
    assert_near(whole, fun(H, W), 0.05)
    assert_near(parts, whole, 1e-5)


def test_one_pass_logsumexp_in_taylor_mode_derives_what_is_written():
    from jax.experimental.jet import jet

    def fun(x):
        return jax.nn.logsumexp(x * jnp.arange(1.0, LONG + 1) / LONG)

    auto = mpjax.autocast(fun, mpjax.get_policy("O1"))
    want, got = (jax.jit(lambda f=f: jet(f, (0.5,), ((1.0, 0.0),)))() for f in (fun, auto))
    assert_near(got[1][0], want[1][0], 1e-5)
    assert_near(got[1][1], want[1][1], 1e-4)
