"""Softmaxes in further spellings: derivatives of any order, layouts, and what makes scores.

`test_softmax` asks for gradients as accurate as by hand. Here, also for what only looks like a
softmax, forward mode and second derivatives are those of float32, but for 16-bit roundings.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from measure import errors, kept, run
from planners import sound
from support import assert_near, cast, normal, thorough_but

N, D = 32, 24
Q, K, V = (normal(i, 2, N, D, scale=scale) for i, scale in enumerate((0.6, 0.6, 1)))
MASK = jnp.asarray(np.random.default_rng(0).random((N, N)) < 0.7) | (jnp.eye(N) > 0)
OTHER = jnp.asarray(np.random.default_rng(1).random((N, N)) < 0.6) | (jnp.eye(N) > 0)
LOW = jnp.full((2, N, N), -1e9)  # of no dtype: it is cast where it is read
EMPTY = jnp.arange(N)[:, None] > 1  # rows in which all is masked
COLUMNS = jnp.arange(N).reshape(1, 1, N) / 16.0
LOG2E = float(np.log2(np.e))
stop = jax.lax.stop_gradient


def total(e):
    return jnp.sum(e, -1, keepdims=True)


def top(s):
    return jnp.max(s, -1, keepdims=True)


def shifted(s):
    return jnp.exp(s - top(s))


def quotient(e, s):
    return e / s


def masked(s, mask, where_largest=-1e9):
    e = jnp.where(mask, jnp.exp(s - stop(top(jnp.where(mask, s, where_largest)))), 0)
    return e / jnp.maximum(total(e), 1e-9)


# What is a softmax, spelled in some way: these keep one array of scores' size, in half.
SOFTMAXES = {
    "twice": lambda s: shifted(s) / total(shifted(s)),
    "shift that is not stopped, eps": lambda s: shifted(s) / (total(shifted(s)) + 1e-6),
    "eps without a shift": lambda s: jnp.exp(s) / (total(jnp.exp(s)) + 1.0),
    "eps and a shift by half": lambda s: (lambda e: e / (total(e) + 1e-3))(
        jnp.exp(s - stop(top(s)) / 2)
    ),
    "rsqrt twice": lambda s: (lambda e, r: e * r * r)(jnp.exp(s), jax.lax.rsqrt(total(jnp.exp(s)))),
    "online": lambda s: jnp.exp(s - (top(s) + jnp.log(total(shifted(s))))),
    "exp2": lambda s: jnp.exp2(s) / total(jnp.exp2(s)),
    "empty rows": lambda s: masked(s, EMPTY & MASK),
    "one unless positive": lambda s: (lambda e, z: e / jnp.where(z > 0, z, 1))(
        jnp.exp(s), total(jnp.exp(s))
    ),
    "masked twice": lambda s: jnp.where(OTHER, jax.nn.softmax(s, where=MASK), 0),
    "two exponentials": lambda s: (lambda e: e / total(e))(jnp.exp(s) * jnp.exp(-stop(top(s)))),
    "reshaped": lambda s: jax.nn.softmax(s.reshape(4, N // 2, N)).reshape(s.shape),
    "scaled columns": lambda s: jax.nn.softmax(s + jnp.arange(N) / 8.0),
    "scores that are cut off": lambda s: jax.nn.softmax(jnp.maximum(s, -0.5)),
    "half of all": lambda s: (lambda e: e / total(e))(0.5 * jnp.exp(s)),
    "roots": lambda s: (lambda e, r: e / r / r)(jnp.exp(s), jnp.sqrt(total(jnp.exp(s)))),
    "squeezed": lambda s: jnp.exp(s) / jnp.squeeze(total(jnp.exp(s)), -1)[..., None],
    "eps after a shift that is scaled": lambda s: (lambda e: e / (total(e) + 1e-6))(
        jnp.exp(2 * (s - top(s)))
    ),
}
# What is none, or one with a derivative of its own.
OTHERS = {
    "stopped sum": lambda s: jnp.exp(s) / stop(total(jnp.exp(s))),
    "stopped logsumexp": lambda s: jnp.exp(s - stop(jax.nn.logsumexp(s, -1, keepdims=True))),
    "stopped in part": lambda s: jnp.exp(s - stop(top(s)) - jnp.log(total(jnp.exp(s - top(s))))),
    "another shift": lambda s: jnp.exp(s - top(s)) / total(jnp.exp(s - top(s) / 2)),
    "twice as much": lambda s: (lambda e: 2 * e / total(e))(jnp.exp(s)),
    "squared": lambda s: jnp.exp(s) ** 2 / total(jnp.exp(s)),
    "square over sum of squares": lambda s: jnp.exp(s) ** 2 / total(jnp.exp(s) ** 2),
    "guarded twice": lambda s: (lambda e, z: e / (z + 1) * z / (z + 1))(
        jnp.exp(s), total(jnp.exp(s))
    ),
    "bias to columns": lambda s: jnp.exp(s + jnp.sum(s, 1, keepdims=True)) / total(jnp.exp(s)),
    "another bias": lambda s: (lambda e: e / total(e))(jnp.exp(s + jnp.sum(s, 1, keepdims=True))),
    "off by one": lambda s: shifted(s) / (1 + total(shifted(s))),
    "off by one, without a shift": lambda s: jnp.exp(s) / (jnp.exp(-top(s)) + total(jnp.exp(s))),
    "sink": lambda s: (
        lambda m: jnp.exp(s - m) / (jnp.exp(s[..., :1] - m) + total(jnp.exp(s - m)))
    )(top(s)),
    "guard that holds": lambda s: jnp.exp(s) / jnp.maximum(total(jnp.exp(s)), 40.0),
    "guard after a large shift": lambda s: (lambda e: e / jnp.maximum(total(e), 0.5))(
        jnp.exp(s - top(s) - 3)
    ),
    "mask below alone": lambda s: jnp.exp(s) / total(jnp.where(MASK, jnp.exp(s), 0)),
    "another maximum and a mask": lambda s: masked(3 * s, MASK, 1e2),
    "weights that vary": lambda s: (lambda e: e / total(e))(jnp.exp(s) * jnp.tanh(s) ** 2),
    "read twice": lambda s: (lambda p: p * p)(shifted(s) / total(shifted(s))),
    "columns scaled after a shift": lambda s: (lambda e: e / total(e))(
        jnp.exp(COLUMNS * (s - top(s)))
    ),
    "one over a shift": lambda s: (lambda e: e / total(e))(jnp.exp(4 / (s + (3 * top(s) + 4)))),
    "other powers": lambda s: jnp.exp(s**3) / total(jnp.exp(s**4)),
    "nothing": lambda s: (lambda e: e / (total(e) + 1))(0.0 * jnp.exp(s)),
    "more in the exponent": lambda s: jnp.exp(
        s + jnp.log(1 + s**2) * s - jax.nn.logsumexp(s, -1, keepdims=True)
    ),
    "sum read too": lambda s: (lambda e, z: e / z + jnp.tanh(z))(jnp.exp(s), total(jnp.exp(s))),
}


def attention(softmax, scale=2):
    return lambda q, k, v: jnp.cos(softmax(q @ jnp.swapaxes(k, -1, -2) / scale) @ v)


TRANSFORMS = {
    "remat": jax.checkpoint,
    "vmap": lambda f: lambda *xs: jax.vmap(f)(*(jnp.stack([x, x / 2]) for x in xs)),
    "scan": lambda f: (
        lambda *xs: jax.lax.scan(
            lambda c, x: (c + 0.1 * f(*(a + x for a in xs)), c), xs[2], jnp.arange(2.0)
        )
    ),
}


def agree(fun, args, tolerance=0.05, run=run):
    """Holds results, derivatives and second derivatives against float32's, where it has them.

    What is checked is the program as it was rewritten: no compiler is asked, unless by ``run``.
    """
    argnums = tuple(range(len(args)))
    ts = tuple(normal(9 + i, *x.shape) for i, x in enumerate(args))

    def everything(f):
        def gradient(*xs):
            return jax.grad(
                lambda *xs: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(*xs))), argnums
            )(*xs)

        first, second = jax.jvp(gradient, args, ts)
        forward = jax.jvp(f, args, ts)[1]
        return {"result": f(*args), "gradient": first, "forward": forward, "second": second}

    want, got = run(lambda: (everything(fun), everything(cast(fun))))
    for part, exact in want.items():
        if all(np.all(np.isfinite(x)) for x in jax.tree.leaves(exact)):
            assert_near(got[part], exact, tolerance)
        else:
            assert part != "result"


def compiled(fun):
    return jax.jit(fun)()


QUICK = ["shift that is not stopped, eps", "online", "masked twice"]


@pytest.mark.parametrize("name", thorough_but(SOFTMAXES, *QUICK))
def test_softmax_in_each_spelling_has_right_derivatives(name):
    agree(attention(SOFTMAXES[name]), (Q, K, V))


# Two scores of a row may round to one maximum, of whose derivative each gets a part.
TIES = ("stopped in part", "another shift")


ALIKE = [name for name in OTHERS if name not in TIES]


@pytest.mark.parametrize("name", thorough_but(ALIKE, *range(0, len(ALIKE), 8), "read twice"))
def test_lookalike_of_a_softmax_has_right_derivatives(name):
    agree(attention(OTHERS[name], 8), (Q, K, V))


@pytest.mark.parametrize("name", thorough_but(TIES, TIES[0]))
def test_lookalike_with_a_derivative_of_its_maximum_is_as_by_hand(name):
    fun = lambda *args: jnp.sum(jnp.sin(attention(OTHERS[name], 8)(*args)))  # noqa: E731
    assert not sound(fun, (Q, K, V), "bfloat16", (0, 1, 2), eager=True)


def test_weights_that_multiply_a_softmax_have_right_derivatives():
    def weighted(q, k, weights):
        e = jnp.exp(q @ k.T / 8) * weights
        return jnp.cos(e / e.sum(-1, keepdims=True) @ k)

    agree(weighted, (normal(1, 8, 16), normal(2, 8, 16), jnp.abs(normal(3, 8, 8)) + 0.5))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in SOFTMAXES | OTHERS if name not in TIES])
def test_softmax_in_each_spelling_has_right_derivatives_as_compiled(name):
    fun = attention((SOFTMAXES | OTHERS)[name], 2 if name in SOFTMAXES else 8)
    agree(fun, (Q, K, V), run=compiled)


SAMPLE = ["twice", "online", "reshaped", "roots"]
PAIRS = [(transform, name) for transform in TRANSFORMS for name in SAMPLE]


@pytest.mark.parametrize(
    ("transform", "name"),
    thorough_but(PAIRS, ("scan", "twice"), ("remat", "roots")),
)
def test_softmax_has_right_derivatives_within_transformations(name, transform):
    agree(TRANSFORMS[transform](attention((SOFTMAXES | OTHERS)[name])), (Q, K, V))


# What the matmul reads of "masked twice" is another array, which is written anyway.
@pytest.mark.parametrize("name", [name for name in SOFTMAXES if name != "masked twice"])
def test_softmax_scores_are_kept_once(name):
    sizes = [
        jnp.dtype(dtype).itemsize
        for (dtype, shape), count in kept(attention(SOFTMAXES[name]), (Q, K, V), "bfloat16").items()
        for _ in range(count)
        if int(np.prod(shape)) == 2 * N * N and dtype != "bool"
    ]
    assert sizes == [2]


# name: a softmax of scores [b, h, q, k], and values [b, g, k, d], with h = 2 g
HEADS = {
    "to groups": lambda p, v: jnp.einsum("bgnqk,bgkd->bgnqd", p.reshape(2, 2, 2, 6, 6), v),
    "to rows": lambda p, v: jnp.einsum("bgrk,bgkd->bgrd", p.reshape(2, 2, 12, 6), v),
    "and back": lambda p, v: jnp.einsum("bgnqk,bgkd->bqgnd", p.reshape(2, 2, 2, 6, 6), v),
    "transposed": lambda p, v: jnp.einsum(
        "bkqgn,bgkd->bqgnd", p.reshape(2, 2, 2, 6, 6).transpose(0, 4, 3, 1, 2), v
    ),
    "values first": lambda p, v: jnp.einsum("bgkd,bgnqk->dbgnq", v, p.reshape(2, 2, 2, 6, 6)),
    "two summed": lambda p, v: jnp.einsum(
        "bgnqij,bgijd->bgnqd", p.reshape(2, 2, 2, 6, 2, 3), v.reshape(2, 2, 2, 3, 4)
    ),
    "dropped before": lambda p, v: jnp.einsum(
        "bgnqk,bgkd->bgnqd", jnp.where(KEEP, p, 0).reshape(2, 2, 2, 6, 6), v
    ),
    "dropped after": lambda p, v: jnp.einsum(
        "bgnqk,bgkd->bgnqd",
        jnp.where(KEEP.reshape(2, 2, 2, 6, 6), p.reshape(2, 2, 2, 6, 6) / 0.8, 0),
        v,
    ),
    "dropped by a factor": lambda p, v: jnp.einsum(
        "bgnqk,bgkd->bgnqd", (p * KEEP / 0.8).reshape(2, 2, 2, 6, 6), v
    ),
    "weighed after": lambda p, v: jnp.einsum(
        "bgnqk,bgkd->bgnqd",
        p.reshape(2, 2, 2, 6, 6) * jnp.cos(jnp.arange(6.0) * v.sum()),
        v,
    ),
    "mixed": lambda p, v: jnp.einsum("bxk,bgkd->bxgd", p.reshape(2, 24, 6), v),
    "split and merged": lambda p, v: jnp.einsum(
        "bgnqk,bgkd->bgnqd", p.reshape(2, 4, 6, 2, 3).reshape(2, 2, 2, 6, 6), v
    ),
    "copied": lambda p, v: jnp.einsum("bgnqk,bgkd->bgnqd", jnp.copy(p).reshape(2, 2, 2, 6, 6), v),
    "summed over queries and keys": lambda p, v: jnp.einsum(
        "bgnx,bgxd->bgnd", p.reshape(2, 2, 2, 36), jnp.tile(v, (1, 1, 6, 1))
    ),
    "summed over queries": lambda p, v: jnp.einsum(
        "bgnqk,bgqd->bgnkd", p.reshape(2, 2, 2, 6, 6), v
    ),
    "split and mixed": lambda p, v: jnp.einsum("bgmk,bgkd->bgmd", p.reshape(2, 2, 12, 6), v),
}
KEEP = jnp.asarray(np.random.default_rng(2).random((2, 4, 6, 6)) < 0.8)
S4, V4 = normal(5, 2, 4, 6, 6), normal(6, 2, 2, 6, 4)


def of_heads(name):
    def fun(s, v):
        scores = jnp.einsum("bhqk,bhkj->bhqj", s, jnp.cos(s))
        return jnp.cos(HEADS[name](jax.nn.softmax(scores), v))

    return fun


LAYOUTS = ["transposed", "weighed after"]


@pytest.mark.parametrize("name", thorough_but(HEADS, *LAYOUTS))
def test_layouts_between_a_softmax_and_its_matmul_keep_derivatives_right(name):
    agree(of_heads(name), (S4, V4))


@pytest.mark.parametrize("name", thorough_but(HEADS, "and back"))
def test_layouts_between_a_softmax_and_its_matmul_are_right_as_compiled(name):
    agree(of_heads(name), (S4, V4), run=compiled)


def test_softmax_whose_sum_is_returned_too_has_right_derivatives():
    def fun(q, k, v):
        e = jnp.exp(q @ k.mT / 8)
        z = total(e)
        return jnp.cos(e / z @ v), z

    agree(fun, (Q, K, V))


def test_equal_maxima_share_the_derivative():
    x = jnp.asarray([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])

    def fun(x):
        return jnp.sum(jnp.max(x * 1.0, 1) * jnp.asarray([1.0, 2.0])) + jnp.sum(jnp.min(x, 0) ** 2)

    for way in (jax.grad, jax.jacfwd):
        assert_near(run(way(cast(fun)), x), run(way(fun), x), 0.01)


# ---- what scores are made by --------------------------------------------------------------------

SOURCES = {
    "keys first": lambda q, k: (k @ q.mT).mT,
    "scaled, masked, biased": lambda q, k: jnp.where(MASK, q @ k.mT / 3 + jnp.arange(N) / 4, -1e9),
    "a temperature to each row": lambda q, k: jnp.exp(q[..., :1] / 4) * (q @ k.mT),
    "a temperature to each row, spread": lambda q, k: (
        jnp.broadcast_to(jnp.exp(q[..., :1] / 4), (2, N, N)) * (q @ k.mT)
    ),
    "in groups": lambda q, k: jnp.einsum("bgnd,bkd->bgnk", q.reshape(2, 2, N // 2, -1), k).reshape(
        2, N, N
    ),
    "masked by ten thousand": lambda q, k: jnp.where(MASK, q @ k.mT, -1e4),
    "masked by an array": lambda q, k: jnp.where(MASK, q @ k.mT, LOW),
    "softcapped": lambda q, k: 8 * jnp.tanh(q @ k.mT / 8),
    "a temperature to each column": lambda q, k: k[..., 0][:, None] * (q @ k.mT),
    "masked by little": lambda q, k: jnp.where(MASK, q @ k.mT, -1.0),
    "read by another": lambda q, k: (lambda s: s + jnp.sum(s, 1, keepdims=True))(q @ k.mT),
    "clipped": lambda q, k: jnp.clip(q @ k.mT, -1, 1),
}


def of_scores(scores):
    return lambda q, k, v: jnp.cos(jax.nn.softmax(scores(q, k) / 2) @ v)


SEEN = ["a temperature to each row, spread", "in groups"]


@pytest.mark.parametrize("name", thorough_but(SOURCES, *SEEN))
def test_keys_with_a_common_mean_have_right_derivatives(name):
    agree(of_scores(SOURCES[name]), (Q, K, V))


def test_weights_of_keys_of_tokens_with_a_common_mean_have_sound_gradients():
    """Cotangents of keys have the sum 0; what a mean of tokens multiplies is that sum."""

    def fun(made, tokens):
        q, k, v = (tokens @ w for w in made[:3])
        return jnp.mean(jnp.sin(jax.nn.softmax(q @ k.mT / 4) @ v @ made[3]))

    made = [normal(i, 16, 16, scale=0.25) for i in range(9, 13)]
    rows = errors(fun, (made, 3 + normal(13, 64, 16, scale=0.1)), "bfloat16")
    assert all(row.sound for row in rows), rows


@pytest.mark.parametrize("half", thorough_but(["bfloat16", "float16"], "float16"))
def test_one_hot_rows_longer_than_the_output_have_sound_gradients(half):
    """What is left of the cotangent of a weight of 1 is a rounding, which sharp scores amplify."""

    def fun(made, tokens):
        q, k, v = (tokens @ w for w in made[:3])
        return jnp.mean(jnp.sin(jax.nn.softmax(2.0**10 * q @ k.mT / 4) @ v @ made[3]))

    made = [normal(i, 16, 16, scale=0.25) for i in range(9, 13)]
    rows = errors(fun, (made, normal(13, 64, 16)), half)
    assert all(row.sound for row in rows), rows


def test_softmax_of_gates_takes_no_row_sum_from_a_larger_output():
    """A saturated gate's slope is far smaller than the rounding of such a sum."""

    def fun(routed, values):
        return jnp.einsum("te,etd->td", jax.nn.softmax(routed), values)

    routed = 6 * normal(9, N, 2)
    values = 3 + normal(10, 2, N, 16)
    made = normal(11, 16, 16, scale=0.3)
    agree(lambda routed, made: jnp.cos(fun(routed, values @ made)), (routed, made))


# name: exponentials of scores, and what is added to their sum: rows need not sum to one
GUARDED = {
    "as much as is summed": (lambda s, rows: jnp.exp(s), 8.0),
    "after more than the maximum": (lambda s, rows: jnp.exp(s - (top(s) + 9)), 1e-4),
    "after a maximum is added": (lambda s, rows: jnp.exp(s - 6 + top(s - 6)), 1e-4),
    "after a number for each row": (lambda s, rows: jnp.exp(s - rows[..., None]), 1e-4),
}


@pytest.mark.parametrize("name", thorough_but(GUARDED, 0, 3))
def test_guarded_softmax_of_keys_with_a_mean_is_as_by_hand(name):
    exponentials, guard = GUARDED[name]

    def fun(q, k, v, rows):
        e = exponentials(q @ (k + 4).mT / 16, rows)
        return jnp.sum(jnp.sin(jnp.cos(e / (total(e) + guard) @ v)))

    args = Q, K, V, 9 + jnp.arange(2.0 * N).reshape(2, N) / 16
    assert not sound(fun, args, "bfloat16", (0, 1, 2, 3), eager=True)
