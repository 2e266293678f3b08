"""The values that autocast stores in half: residuals, carries, results between operations."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_golden
from measure import run
from programs import PROGRAMS, W, X, layer_norm
from support import (
    BOTH,
    HALVES,
    assert_near,
    cast,
    equations,
    found,
    full_matmuls,
    normal,
    thorough_but,
)

import mpjax
from mpjax._src.autocast.plan import make_plan
from mpjax._src.autocast.steps import Recomputed, body_of


def kept(fun, *args):
    """Returns the shapes and dtypes of what the backward pass needs of the forward pass."""
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(fun, *a)[1]))(*args).jaxpr
    fresh = set(jaxpr.outvars) - set(jaxpr.invars) - set(jaxpr.constvars)
    return [(v.aval.shape, str(v.aval.dtype)) for v in fresh]


def near(fun, tolerance, derive=BOTH, half="bfloat16", args=(W, X), run=run):
    """Checks that a function, or its derivative, is under autocast what it is in float32."""
    both = lambda *args: (derive(cast(fun, half))(*args), derive(fun)(*args))  # noqa: E731
    assert_near(*run(both, *args), tolerance)


def compiled(fun, *args):
    return jax.jit(fun)(*args)


def test_exact_gelu_keeps_its_half_slope():
    def fun(w, x):
        return jnp.sum(jax.nn.gelu(x @ w, approximate=False) @ w)

    arrays = [dtype for shape, dtype in kept(cast(fun), W, X) if shape == X.shape]
    assert arrays == ["bfloat16"] * 3  # x, the slope, the result


def test_exact_gelu_keeps_no_more_than_approximate_gelu_before_a_gate():
    def fun(approximate, w, x):
        return jnp.sum((jax.nn.gelu(x @ w, approximate=approximate) * (x @ w.T)) @ w)

    exact, other = (functools.partial(fun, approximate) for approximate in (False, True))
    assert sorted(kept(cast(exact), W, X)) == sorted(kept(cast(other), W, X))
    assert "float32" not in [dtype for _, dtype in kept(cast(exact), W, X)]
    near(exact, 0.03)


def test_gelu_keeps_its_half_slope():
    def fun(w, x):
        return jnp.sum(jax.nn.gelu(x @ w) @ w)

    arrays = [dtype for shape, dtype in kept(cast(fun), W, X) if shape == X.shape]
    assert arrays == ["bfloat16"] * 3  # x, the slope, the result
    exps = found(BOTH(cast(fun)), W, X, names=("tanh",))
    assert len(exps) == 1  # nothing is computed twice


@pytest.mark.parametrize(
    "act", [lambda h: jnp.tanh(h / 3), lambda h: h * (1 + jax.lax.erf(h / 2**0.5)) / 2]
)
def test_activation_that_is_written_out_keeps_its_half_slope(act):
    def fun(w, x):
        return jnp.sum(act(x @ w) @ w)

    arrays = [dtype for shape, dtype in kept(cast(fun), W, X) if shape == X.shape]
    assert arrays == ["bfloat16"] * 3  # x, the slope, the result


def test_no_slope_is_rounded_where_the_user_asks_for_float32():
    def fun(w, x):
        h = x @ w
        with mpjax.precision("float32"):
            y = jax.nn.gelu(h)
        return jnp.sum(y @ w)

    exps = found(BOTH(cast(fun)), W, X, names=("tanh",))
    assert len(exps) == 2  # computed again


ACTIVATIONS = [jax.nn.silu, jnp.tanh, jax.nn.gelu, lambda x: jnp.sin(x) / 3]


@pytest.mark.parametrize(
    ("half", "act"),
    thorough_but([(half, act) for half in HALVES for act in ACTIVATIONS], 0, 1, 6, 7),
)
def test_sloped_islands_match_float32_in_value_and_derivatives(act, half):
    def fun(w, x):
        return jnp.sum(jnp.cos(act(x @ w) @ w))

    tolerance = 0.03 if half == "bfloat16" else 0.005
    for derive in (BOTH, jax.jacfwd, lambda f: jax.hessian(f, 1)):
        near(fun, tolerance, derive, half)
    near(fun, tolerance, lambda f: jax.vmap(f, (None, 0)), half, (W, X[:, None]))


def twice(x):
    return jnp.concatenate([x, x], 1)


ATTENTIONS = {
    "softmax first": lambda s, v: jax.nn.softmax(s) @ v,
    "softmax second": lambda s, v: (v.mT @ jax.nn.softmax(s, axis=-2)).mT,
    "swapped rows": lambda s, v: jnp.einsum("bqk,bkd->dbq", jax.nn.softmax(s), v),
    "two summed": lambda s, v: jnp.einsum("bqk,bqk->b", jax.nn.softmax(s, axis=(1, 2)), v @ v.mT),
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
        twice((jax.nn.softmax(s)[..., :4] * v).mT).mT @ twice(jnp.abs(v[:, :4])) / 2
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
    q, v = normal(5, 2, 6, 4), normal(6, 2, 6, 4)
    if transform is jax.vmap:
        q, v = jnp.stack([q, v]), jnp.stack([v, q])

    def derived(fun):
        forward = jax.jvp(total(fun), (q, v), (v, q))[1]
        return fun(q, v), BOTH(total(fun))(q, v), forward

    auto, plain = transform(cast(fun)), transform(fun)
    got, want = run(lambda: (derived(auto), derived(plain)))
    for parts in zip(got, want, (0.02, 0.03, 0.05), strict=True):
        assert_near(*parts)
    assert not full_matmuls(BOTH(total(auto)), q, v)


FEW = ["softmax second", "dropped", "gated by scores"]
AROUND = [jax.jit, jax.vmap, jax.checkpoint]
PAIRS = [(around, name) for around in AROUND for name in ATTENTIONS]
QUICK = [(around, name) for around, name in PAIRS if around is jax.jit or name in FEW]


@pytest.mark.parametrize(("transform", "name"), thorough_but(PAIRS, *QUICK))
def test_softmaxes_that_matmuls_read_match_float32_derivatives(name, transform):
    check_derivatives(read_by_matmuls(name), transform)


# The sum of the tangents of "not dropped to zero" cancels: compiled, its rounding is 9% of it.
@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name != "not dropped to zero"])
@pytest.mark.parametrize("transform", AROUND)
def test_softmaxes_that_matmuls_read_match_float32_as_compiled(name, transform):
    check_derivatives(read_by_matmuls(name), transform, compiled)


@pytest.mark.parametrize("name", thorough_but(ATTENTIONS, "no batch", "returned too", "dropped"))
def test_softmaxes_inside_of_remat_match_float32(name):
    @jax.checkpoint
    def fun(q, v):
        scores = jnp.einsum("bqd,bkd->bqk", q, v)
        outs = ATTENTIONS[name](scores - jnp.max(scores) / 2, v)
        return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(outs))

    q, v = normal(7, 2, 6, 4), normal(8, 2, 6, 4)
    near(fun, 0.03, args=(q, v))
    assert not full_matmuls(BOTH(cast(fun)), q, v)


def test_remat_takes_the_derivative_of_a_softmax_from_its_result():
    def fun(w, x):
        return jnp.sum(by_hand((x @ w) @ x.T / 3)[0] @ x)

    jaxpr = str(jax.make_jaxpr(BOTH(cast(jax.checkpoint(fun))))(W, X))
    assert " eq " in str(jax.make_jaxpr(BOTH(jax.checkpoint(fun)))(W, X))  # of the maximum's
    assert " eq " not in jaxpr and jaxpr.count(" exp ") == 2


def test_islands_that_wait_for_each_other_are_dropped(monkeypatch):
    from mpjax._src.autocast import plan

    def crossed(flow, fuse, links):
        return [Recomputed(body_of(flow.ops[i::2], flow)) for i in (0, 1)]

    monkeypatch.setitem(plan.FINDERS, plan.FAST, crossed)

    def fun(x):
        return jnp.cos(jnp.sin(jnp.cos(jnp.sin(x))))

    near(fun, 0.02, lambda f: f, args=(X,))


def test_a_softmax_takes_its_row_sums_from_the_matmul_that_reads_it():
    def fun(w, x):
        return jnp.sum(jax.nn.softmax(x @ w) @ w[:, :3])

    hlo = jax.jit(jax.grad(cast(fun), 1)).lower(W, X).compile().as_text()
    shapes = dict(re.findall(r"(%[\w.-]+) = (\w+\[[\d,]*\])", hlo))
    reduced = [shapes[name] for name in re.findall(r" reduce\([^%)]*(%[\w.-]+)", hlo)]
    assert reduced.count("f32[4,8]") == 2  # the maximum, and the sum of the exponentials


def test_softmax_keeps_its_half_result():
    def fun(w, x):
        return jnp.sum(jax.nn.dot_product_attention(*[(x @ w).reshape(1, 4, 2, 4)] * 3))

    assert all(dtype != "float32" for shape, dtype in kept(cast(fun), W, X) if len(shape) > 3)


def test_dropout_of_a_softmax_keeps_one_half_array():
    def fun(w, x):
        weights = jax.nn.softmax((x @ w) @ x.T / 3)
        return jnp.sum((weights * jnp.where(jnp.tri(4, dtype=bool), 1.25, 0)) @ (x @ w)[:, :3])

    assert sorted(dtype for shape, dtype in kept(cast(fun), W, X) if shape == (4, 4)) == [
        "bfloat16",
        "float32",  # the mask itself
    ]


def test_argument_that_a_loop_reads_is_not_kept_rounded_too():
    def fun(w, x, units):
        layer = lambda h, _: ((1 + jnp.tanh(h @ w)) * units, None)  # noqa: E731
        return jnp.sum(jax.lax.scan(layer, x, None, length=3)[0])

    units = 1 + X  # of float32, in an island of each iteration
    assert (X.shape, "bfloat16") not in kept(cast(fun), W, X, units)


def by_hand(scores, shift=lambda m: m, axis=-1):
    """A softmax, what is taken the exponential of, and the maximum."""
    m = scores.max(axis, keepdims=True)
    z = scores - shift(m)
    e = jnp.exp(z)
    return e / e.sum(axis, keepdims=True), z, m


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("axis", [-1, 0])
def test_a_softmax_by_hand_keeps_no_more_than_that_of_jax(mask, axis):
    def fun(softmax, w, x):
        scores = (x @ w) @ x.T / 3
        if mask:
            scores = jnp.where(jnp.tri(4, dtype=bool), scores, -1e9)
        scores = scores if axis else scores.T
        return jnp.sum(jnp.einsum("ij,jk" if axis else "ji,jk", softmax(scores), x))

    ours = kept(cast(functools.partial(fun, lambda s: by_hand(s, axis=axis)[0])), W, X)
    theirs = kept(cast(functools.partial(fun, lambda s: jax.nn.softmax(s, axis=axis))), W, X)
    assert sorted(ours) == sorted(theirs)


USES = [
    lambda p, z, m, x: p @ x,
    lambda p, z, m, x: p @ x + z @ x,
    lambda p, z, m, x: p @ x + m,
    lambda p, z, m, x: p @ x + jnp.mean(jnp.tanh(z), -1, keepdims=True),
]
SHIFTS = [lambda m: m, lambda m: m / 2, lambda m: m + 1]


@pytest.mark.parametrize(
    ("shift", "use"),
    thorough_but([(shift, use) for shift in SHIFTS for use in USES], 1, 2, 4, 7, 10),
)
def test_derivative_of_a_softmax_maximum_is_right_where_it_is_not_zero(use, shift, rng):
    def fun(w, x):
        return jnp.sum(jnp.sin(use(*by_hand((x @ w) @ x.T, shift), x)))

    w, x = normal(rng, 8, 8, scale=0.3), normal(rng, 4, 8, scale=0.5)
    near(fun, 0.03, half="float16", args=(w, x))


def test_residual_stream_is_half():
    ws = [normal(i, 8, 8) for i in range(3)]

    def fun(w, x):
        h = x @ w
        for i in range(3):
            h = h + layer_norm(h) @ ws[i]
        return jnp.sum(layer_norm(h) @ w)

    adds = [row for row in found(cast(fun), W, X, names=("add",)) if row[2] == "bfloat16"]
    assert len(adds) >= 3


def test_scan_over_layers_carries_half():
    (scan,) = [
        e
        for e in equations(jax.make_jaxpr(cast(PROGRAMS["layers"]))(W, X))
        if e.primitive.name == "scan"
    ]
    assert scan.outvars[0].aval.dtype == jnp.bfloat16


def grouped_before(h, moved):
    """A group norm over channels in groups of two, the normalized array in groups as well."""
    groups = h.reshape(-1, 4, 2)
    mean = jnp.mean(groups, 2, keepdims=True)
    normed = (groups - mean) * jax.lax.rsqrt(jnp.var(groups, 2, keepdims=True) + 1e-5)
    return jax.nn.silu(normed.reshape(h.shape) + moved)


def grouped_in_between(h, moved):
    """As flax has it: the sums are taken in groups, the rest as it was."""
    groups = h.reshape(-1, 4, 2)
    mean, var = jnp.mean(groups, 2), jnp.mean(groups**2, 2) - jnp.mean(groups, 2) ** 2
    mean, var = (jnp.repeat(v, 2, axis=1) for v in (mean, var))
    return jax.nn.silu((h - mean) * jax.lax.rsqrt(var + 1e-5) + moved)


@pytest.mark.parametrize("norm", [grouped_before, grouped_in_between])
def test_normalized_value_is_kept_once_and_not_as_a_view(norm):
    def fun(w, x):
        h = x @ w
        return jnp.sum((h + norm(h, 0.5) @ w) @ w)

    assert not [shape for shape, _ in kept(cast(fun), W, X) if len(shape) == 3 and shape[-1] == 2]
    halves = [shape for shape, dtype in kept(cast(fun), W, X) if dtype == "bfloat16"]
    assert halves.count(X.shape) == 4  # x, h, the activation, the result
    near(fun, 0.03)


def test_normalized_value_is_kept_before_it_is_broadcast():
    def fun(w, x):
        h = jax.nn.softmax(x @ w)
        spread = jnp.broadcast_to(jnp.sum(x @ w, 0), h.shape) * h
        return jnp.sum(jax.nn.silu(layer_norm(spread)) @ w)

    assert (X.shape, "float32") not in kept(cast(fun), W, X)
    assert (X.shape[1:], "float32") in kept(cast(fun), W, X)
    near(fun, 0.03)


@pytest.mark.parametrize("name", ["random 20", "random 26"])
def test_what_an_island_rounds_is_among_its_inputs(name):
    """Else a rounded value is counted twice, as it is and as a view, when memory is compared."""
    fun, args = {name: (fun, args) for name, fun, args in test_golden.programs("random")}[name]
    closed = jax.make_jaxpr(fun)(*args)
    dtypes = [v.dtype for v in closed.in_avals]
    plan = make_plan(closed.jaxpr, closed.consts, mpjax.get_policy("O1:bfloat16"), dtypes)
    islands = [
        step
        for step in plan.analysis.steps[plan.block]
        if isinstance(step, Recomputed) and step.rounded
    ]
    assert islands and all(island.rounded <= {*island.ins} for island in islands)


def test_autocast_repeats_no_cast_and_undoes_none():
    def fun(w, x):
        h = x @ w
        return jnp.sum(jax.nn.relu(h @ w) @ w + h @ w)

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
