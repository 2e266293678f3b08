"""The arrays that are kept for the backward pass, and the derivatives that are made of them."""

import functools

import jax
import jax.numpy as jnp
import measure
import numpy as np
import pytest
from measure import run
from programs import layer_norm
from support import BOTH, HALVES, assert_near, cast, equations, full_matmuls, normal, thorough_but

W, X, V = normal(0, 8, 32, scale=0.3), normal(1, 4, 8), normal(2, 32, 8, scale=0.3)
PRODUCT = (4, 32)  # the shape of X @ W


def kept(fun, *args):
    """Returns the shapes and dtypes of what the backward pass needs of the forward pass."""
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(fun, *a)[1]))(*args).jaxpr
    fresh = set(jaxpr.outvars) - set(jaxpr.invars) - set(jaxpr.constvars)
    return sorted((v.aval.shape, str(v.aval.dtype)) for v in fresh)


def near(fun, tolerance, derive=BOTH, half="bfloat16", args=(W, X), run=run):
    """Checks that a function, or its derivative, is under autocast what it is in float32."""
    both = lambda *args: (derive(cast(fun, half))(*args), derive(fun)(*args))  # noqa: E731
    assert_near(*run(both, *args), tolerance)


def compiled(fun, *args):
    return jax.jit(fun)(*args)


# ---- activations --------------------------------------------------------------------------------

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "exact gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu by hand": lambda h: h * (1 + jax.lax.erf(h / 2**0.5)) / 2,
    "tanh": lambda h: jnp.tanh(h / 3),
    "sine": lambda h: jnp.sin(h) / 3,
    "softplus": jax.nn.softplus,
    "mish": lambda h: h * jnp.tanh(jax.nn.softplus(h)),
    "clipped": lambda h: jnp.clip(h, -1, 1),
    "celu": jax.nn.celu,
}


def activated(act, w, x):
    return jnp.sum(jnp.cos(act(x @ w) @ V))


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_no_more_is_kept_of_an_activation_than_what_matmuls_make_and_read(act):
    """Two arrays of 16 bits, or one of float32 from which both are computed."""

    def fun(w, v, x):
        return jnp.sum(ACTIVATIONS[act](x @ w) @ v)

    arrays = kept(cast(fun), W, V, X)
    dtypes = [dtype for shape, dtype in arrays if shape == PRODUCT]
    assert dtypes in (["bfloat16"] * 2, ["float32"])


def test_exact_gelu_keeps_no_more_than_approximate_gelu_before_a_gate():
    def fun(approximate, w, x):
        h = jax.nn.gelu(x @ w, approximate=approximate)
        return jnp.sum((h * (x @ jnp.sin(w))) @ V)

    exact, other = (functools.partial(fun, approximate) for approximate in (False, True))
    assert kept(cast(exact), W, X) == kept(cast(other), W, X)
    assert "float32" not in [dtype for _, dtype in kept(cast(exact), W, X)]
    near(exact, 0.03)


@pytest.mark.parametrize(
    ("half", "act"),
    thorough_but([(half, act) for half in HALVES for act in ACTIVATIONS], 0, 12),
)
def test_activations_match_float32_in_value_and_derivatives(act, half):
    fun = functools.partial(activated, ACTIVATIONS[act])
    tolerance = 0.03 if half == "bfloat16" else 0.005
    for derive in (BOTH, jax.jacfwd, lambda f: jax.hessian(f, 1)):
        near(fun, tolerance, derive, half)
    near(fun, tolerance, lambda f: jax.vmap(f, (None, 0)), half, (W, X[:, None]))


# ---- softmaxes ----------------------------------------------------------------------------------


def twice(x):
    return jnp.concatenate([x, x], 1)


ATTENTIONS = {
    "softmax first": lambda s, v: jax.nn.softmax(s) @ v,
    "softmax second": lambda s, v: (v.mT @ jax.nn.softmax(s, axis=-2)).mT,
    "swapped rows": lambda s, v: jnp.einsum("bqk,bkd->dbq", jax.nn.softmax(s), v),
    "two summed": lambda s, v: jnp.einsum(
        "bqk,bqkc->bc",
        jax.nn.softmax(s, axis=(1, 2)),
        (v @ v.mT)[..., None] * jnp.arange(1.0, 4) / 9,
    ),
    "no batch": lambda s, v: jax.nn.softmax(s[0], axis=0).T @ v[0],
    "returned too": lambda s, v: (jax.nn.softmax(s) @ v, jax.nn.softmax(s)),
    "two": lambda s, v: jax.nn.softmax(s) @ jax.nn.softmax(v @ v.mT / 3, axis=1),
    "the same twice": lambda s, v: jax.nn.softmax(s) @ jax.nn.softmax(s),
    "dropped": lambda s, v: jnp.where(KEEP, jax.nn.softmax(s) / 0.9, 0) @ v,
    "dropped, second": lambda s, v: jnp.einsum("bqk,bqd->bkd", jax.nn.softmax(s, 1) * KEEP, v),
    "not dropped to zero": lambda s, v: jnp.where(KEEP, jax.nn.softmax(s), 0.5) @ v,
    "kept otherwise": lambda s, v: jnp.where(KEEP, 0, 2 * jax.nn.softmax(s)) @ v,
    "gated": lambda s, v: (jax.nn.softmax(s) * jnp.tanh(jnp.sum(v, -1)[:, None] / 3)) @ v,
    "gated by scores": lambda s, v: (jax.nn.softmax(s) * jnp.cos(s / 4)) @ v,
    "squared": lambda s, v: jax.nn.softmax(s) ** 2 @ v,
    "twice itself": lambda s, v: (jax.nn.softmax(s) * jax.nn.softmax(s)) @ v,
    "weighed by the values": lambda s, v: (
        twice((jax.nn.softmax(s)[..., :4] * v[..., :4]).mT).mT @ twice(jnp.abs(v[:, :4])) / 2
    ),
}
KEEP = np.arange(36).reshape(6, 6) % 5 > 0


def read_by_matmuls(name):
    def fun(q, v):
        scores = jnp.einsum("bqd,bkd->bqk", q, v)
        return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(ATTENTIONS[name](scores, v)))

    return fun


def total(fun):
    return lambda *args: jnp.sum(fun(*args))


def check_derivatives(fun, transform, run=run):
    q, v = normal(5, 2, 6, 8), normal(6, 2, 6, 8)
    if transform is jax.vmap:
        q, v = jnp.stack([q, v]), jnp.stack([v, q])

    def derived(fun):
        forward = jax.jvp(total(fun), (q, v), (v, q))[1]
        return fun(q, v), BOTH(total(fun))(q, v), forward

    auto, plain = transform(cast(fun)), transform(fun)
    (*got, tangent), (*want, exact) = run(lambda: (derived(auto), derived(plain)))
    np.testing.assert_allclose(got[0], want[0], rtol=0.02, atol=0.02)  # it is a sum of cosines
    assert_near(got[1], want[1], 0.03)
    assert abs(tangent - exact) < 0.01 * np.linalg.norm(want[1]) * np.linalg.norm((v, q))
    assert not full_matmuls(BOTH(total(auto)), q, v)


AROUND = [jax.jit, jax.vmap, jax.checkpoint]
PAIRS = [(around, name) for around in AROUND for name in ATTENTIONS]
QUICK = [(jax.vmap, "gated by scores"), (jax.checkpoint, "dropped"), (jax.jit, "two summed")]


@pytest.mark.parametrize(("transform", "name"), thorough_but(PAIRS, *QUICK))
def test_softmaxes_that_matmuls_read_match_float32_derivatives(name, transform):
    check_derivatives(read_by_matmuls(name), transform)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("transform", AROUND)
def test_softmaxes_that_matmuls_read_match_float32_as_compiled(name, transform):
    check_derivatives(read_by_matmuls(name), transform, compiled)


@pytest.mark.parametrize("name", thorough_but(ATTENTIONS, "no batch", "returned too"))
def test_softmaxes_inside_of_remat_match_float32(name):
    @jax.checkpoint
    def fun(q, v):
        scores = jnp.einsum("bqd,bkd->bqk", q, v)
        outs = ATTENTIONS[name](scores - jnp.max(scores) / 2, v)
        return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(outs))

    q, v = normal(7, 2, 6, 8), normal(8, 2, 6, 8)
    near(fun, 0.03, args=(q, v))
    assert not full_matmuls(BOTH(cast(fun)), q, v)


def test_dropout_of_a_softmax_keeps_one_16_bit_array():
    x = normal(5, 6, 8)

    def fun(w, x):
        h = x @ w
        weights = jax.nn.softmax(h @ h.T / 3)
        return jnp.sum((weights * jnp.where(jnp.tri(6, dtype=bool), 1.25, 0)) @ h[:, :3])

    assert [dtype for shape, dtype in kept(cast(fun), W, x) if shape == (6, 6)] == [
        "bfloat16",
        "float32",  # the mask itself
    ]


def by_hand(scores, shift=lambda m: m, axis=-1):
    """A softmax, what is taken the exponential of, and the maximum."""
    m = scores.max(axis, keepdims=True)
    z = scores - shift(m)
    e = jnp.exp(z)
    return e / e.sum(axis, keepdims=True), z, m


USES = [
    lambda p, z, m, x: p @ x,
    lambda p, z, m, x: p @ x + z @ x,
    lambda p, z, m, x: p @ x + m,
    lambda p, z, m, x: p @ x + jnp.mean(jnp.tanh(z), -1, keepdims=True),
]
SHIFTS = [lambda m: m, lambda m: m / 2, lambda m: m + 1]


@pytest.mark.parametrize(
    ("shift", "use"),
    thorough_but([(shift, use) for shift in SHIFTS for use in USES], 1, 7, 10),
)
def test_derivative_of_a_softmax_maximum_is_right_where_it_is_not_zero(use, shift, rng):
    def fun(w, x):
        return jnp.sum(jnp.sin(use(*by_hand((x @ w) @ x.T, shift), x)))

    w, x = normal(rng, 8, 8, scale=0.3), normal(rng, 4, 8, scale=0.5)
    near(fun, 0.03, half="float16", args=(w, x))


# ---- norms, loops, casts ------------------------------------------------------------------------


def grouped_before(h, moved):
    """A group norm over channels in groups of two, the normalized array in groups as well."""
    groups = h.reshape(-1, 16, 2)
    mean = jnp.mean(groups, 2, keepdims=True)
    normed = (groups - mean) * jax.lax.rsqrt(jnp.var(groups, 2, keepdims=True) + 1e-5)
    return jax.nn.silu(normed.reshape(h.shape) + moved)


def grouped_in_between(h, moved):
    """As flax has it: the sums are taken in groups, the rest as it was."""
    groups = h.reshape(-1, 16, 2)
    mean, var = jnp.mean(groups, 2), jnp.mean(groups**2, 2) - jnp.mean(groups, 2) ** 2
    mean, var = (jnp.repeat(v, 2, axis=1) for v in (mean, var))
    return jax.nn.silu((h - mean) * jax.lax.rsqrt(var + 1e-5) + moved)


@pytest.mark.parametrize("norm", thorough_but([grouped_before, grouped_in_between], 1))
def test_what_is_normalized_is_kept_once_and_not_as_a_view(norm):
    def fun(w, x):
        h = x @ w
        return jnp.sum((h + norm(h, 0.5) @ (V @ W)) @ V)

    shapes = [(shape, dtype) for shape, dtype in kept(cast(fun), W, X) if shape[0] == 4]
    assert shapes == [((4, 16), "float32")] * 2 + [(PRODUCT, "bfloat16")]
    measure.check(fun, (W, X), "bfloat16", (0, 1))


def test_what_is_normalized_is_kept_before_it_is_broadcast():
    def fun(w, x):
        h = jax.nn.softmax(x @ w)
        spread = jnp.broadcast_to(jnp.sum(x @ w, 0), h.shape) * h
        return jnp.sum(jax.nn.silu(layer_norm(spread)) @ V)

    assert (PRODUCT, "float32") not in kept(cast(fun), W, X)
    assert (PRODUCT[1:], "float32") in kept(cast(fun), W, X)
    near(fun, 0.03)


def test_an_entry_that_dropout_drops_has_no_gradient():
    """A comparison of float32 values is not repeated on rounded ones."""

    def fun(b):
        h = jnp.abs((X @ W).repeat(32, 1) * b * 2.0)
        keep = jax.random.bernoulli(jax.random.key(0), 0.5, h.shape)
        h = jnp.where(keep, h, 0.0) / 0.5
        return (h @ jnp.eye(h.shape[1])).sum(), h

    gradient, h = jax.grad(cast(fun), has_aux=True)(jnp.ones((4, 1024)))
    np.testing.assert_array_equal(gradient != 0, h != 0)


def test_argument_that_a_loop_reads_is_not_kept_too():
    square, units = W[:, :8], 1 + X

    def fun(w, x, units):
        layer = lambda h, _: ((1 + jnp.tanh(h @ w)) * units, None)  # noqa: E731
        return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0])

    assert {shape for shape, _ in kept(cast(fun), square, X, units)} == {(3, 4, 8)}


def test_autocast_repeats_no_cast_and_undoes_none():
    def fun(w, x):
        h = x @ w
        return jnp.sum(jax.nn.relu(h @ w.T) @ w + h @ (V @ W))

    jaxpr = jax.make_jaxpr(cast(fun))(W, X)
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    sources = [
        (e.invars[0], e.params["new_dtype"])
        for e in casts
        if e.invars[0] is not jaxpr.jaxpr.invars[0]
    ]
    assert len(sources) == len(set(sources))
    halves = {e.outvars[0] for e in casts if e.invars[0].aval.dtype == jnp.float32}
    assert not any(e.invars[0] in halves for e in casts)
