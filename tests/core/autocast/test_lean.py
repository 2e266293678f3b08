"""storage=lean: the same numbers, fewer bytes kept, no matmul or convolution twice."""

import collections
import itertools
import re
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P
from measure import run
from models import MODELS
from programs import PROGRAMS
from programs import W as SMALL_W
from programs import X as SMALL_X
from support import normal, thorough_but

import mpjax

FAST, LEAN, NUMBER = ("mixed_bfloat16" + more for more in ("", ",storage=lean", ",storage=0.0"))
N, D = 64, 32
W, X = normal(0, D, D, scale=0.3), normal(1, N, D)
HALF = "bf16", (N, D)


def norm(x):
    mean = x.mean(0)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(0) + 1e-5)


def network(w, x, blocks=3):
    """A residual network: matmuls, norms over the batch, relus, a stream."""
    for _ in range(blocks):
        y = jax.nn.relu(norm(x @ w))
        x = jax.nn.relu(x + norm(y @ w))
    return jnp.mean(x**2)


def transformer(w, x, blocks=3):
    for _ in range(blocks):
        y = norm(x.T).T
        q = (y @ w).reshape(1, -1, 2, D // 2)
        y = jax.nn.dot_product_attention(q, q * 0.5, q, is_causal=True).reshape(x.shape)
        x = x + y @ w
        x = x + jax.nn.gelu(norm(x.T).T @ w) @ w.T
    return jnp.mean(x**2)


def composed(w, x):
    """Affine maps, composed by an associative scan: parts of some products are never read."""

    def then(first, second):
        matrix, shift = second
        return matrix @ first[0], (matrix @ first[1][..., None])[..., 0] + shift

    maps = jnp.tanh(x @ w).reshape(-1, 8, 4)[:, :4], x[:, :4]
    return jnp.sum(jnp.sin(lax.associative_scan(then, maps)[1] @ w[:4]))


def kept(fun, policy, *args):
    """Returns how many arrays of each shape and dtype are kept, arguments not counted."""
    report = mpjax.explain(fun, policy, argnums=0)(*args)
    return collections.Counter((k.dtype, k.shape) for k in report.kept)


def products(fun, *args):
    """Returns how many matmuls and convolutions a gradient runs, of those that are read."""
    text = jax.jit(jax.grad(fun, allow_int=True)).lower(*args).compile().as_text()
    return text.count(" dot(") + text.count(" convolution(")


SUITE = {
    **{name: (fun, (SMALL_W, SMALL_X)) for name, fun in PROGRAMS.items()},
    "network": (network, (W, X)),
    "transformer": (transformer, (W, X)),
    "composed": (composed, (W, X[:16])),
}
# A stream, attention, a loop, branches, a rule of its author's, devices, what is never read.
QUICK = ["layers", "switch", "custom_vjp", "shard_mapped"]


@pytest.mark.parametrize("name", thorough_but(SUITE, *QUICK))
def test_no_setting_of_storage_changes_a_gradient(name):
    """Sums may be added up in another order, which may round another last bit."""
    fun, args = SUITE[name]
    results = []
    for storage in ("fast", "lean", "0.0"):
        auto = mpjax.autocast(fun, f"mixed_bfloat16,storage={storage}")
        results.append(run(lambda *args, auto=auto: jax.grad(auto, allow_int=True)(*args), *args))
    for other in results[1:]:
        if other.dtype == jnp.float32:
            assert np.linalg.norm(other - results[0]) <= 2**-12 * np.linalg.norm(results[0])


@pytest.mark.parametrize("name", thorough_but(SUITE, *QUICK))
def test_no_matmul_runs_twice(name):
    fun, args = SUITE[name]
    fast, lean = (products(mpjax.autocast(fun, policy), *args) for policy in (FAST, LEAN))
    assert lean <= fast


@pytest.mark.parametrize("name", thorough_but(MODELS, "mixture of experts"))
def test_gradients_of_models_match_those_of_fast_and_no_matmul_runs_twice(name):
    loss, params = MODELS[name]()
    fast, lean = (mpjax.autocast(loss, policy) for policy in (FAST, LEAN))
    want, got = (jax.jit(jax.grad(f))(params) for f in (fast, lean))
    size = float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(want))))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert np.linalg.norm(a - b) < 2**-8 * size
    assert products(lean, params) <= products(fast, params)


# ---- what is kept -------------------------------------------------------------------------------


def test_a_residual_network_keeps_the_results_of_its_matmuls_and_small_statistics():
    found = kept(network, LEAN, W, X)
    assert {key: n for key, n in found.items() if len(key[1]) == 2} == {HALF: 6}
    assert kept(network, FAST, W, X).total() > found.total()


def test_a_transformer_keeps_no_norm_and_no_activation():
    found = kept(transformer, LEAN, W, X)
    assert not any(dtype == "f32" and len(shape) > 1 for dtype, shape in found)
    assert found[HALF] <= 3 * 4  # results of matmuls


@pytest.mark.parametrize("fun", [jnp.tanh, jnp.exp, jnp.sin, jnp.abs, jax.nn.sigmoid, jax.nn.relu])
def test_what_is_spread_is_computed_again_from_what_is_smaller(fun):
    def spread(w, x):
        return jnp.mean(fun(x.sum(1)[:, None] + w.sum(0)))

    assert kept(spread, LEAN, W, X).keys() <= {
        ("f32", (N,)),
        ("f32", (D,)),
        ("f32", (N, 1)),
        ("f32", (1, D)),
    }


@pytest.mark.parametrize("last", [jnp.square, jnp.sin])
def test_nothing_that_a_derivative_makes_of_kept_values_is_kept_as_well(last):
    """A softmax's derivative needs its result, of which JAX would keep 2x or cos(x) too."""
    found = kept(lambda w, x: jnp.mean(last(jax.nn.softmax(x @ w.T) @ w)), LEAN, X, X)
    assert found == {("bf16", (N, N)): 1, HALF: 1}


def test_a_predicate_is_kept_rather_than_what_it_is_computed_from():
    def fun(w, x):
        y = x @ w
        return jnp.mean(jnp.where(y.sum() > 0, y @ w, y))

    scalars = {key: n for key, n in kept(fun, LEAN, W, X).items() if key[1] == ()}
    assert scalars == {("bool", ()): 1}


def test_soft_capped_scores_are_kept_in_16_bits():
    q, k, v = (normal(i, 2, 32, 32) for i in range(3))

    def fun(q):
        scores = 20 * jnp.tanh((q @ k.mT / 3) / 20)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        return jnp.sum(weights / weights.sum(-1, keepdims=True) @ v)

    found = mpjax.explain(fun, LEAN, argnums=0, target="h100")(q).kept
    assert [k.dtype for k in found if k.shape == (2, 32, 32) and k.dtype != "bool"] == ["bf16"]


PAIRS = [*itertools.product((False, True), (jax.nn.silu, jax.nn.softplus, jax.nn.gelu, jnp.tanh))]


@pytest.mark.parametrize(("gated", "activation"), thorough_but(PAIRS, 0, 3, 5, 6))
def test_small_vectors_keep_no_activation(activation, gated):
    """A norm's parameters, or a gate of the whole row, are small beside what they multiply."""

    def fun(w, scale, x):
        for _ in range(3):
            y = norm(x @ w)
            y = activation(y * scale["by"] + scale["plus"])
            if gated:  # squeeze and excitation
                y = y * jax.nn.sigmoid(y.mean(0) @ w)
            x = y
        return jnp.mean((x @ w) ** 2)

    x = normal(4, 256, D)
    args = W, {"by": normal(5, D), "plus": normal(6, D)}, x
    assert kept(fun, LEAN, *args)["bf16", x.shape] == 4  # results of matmuls
    assert not kept(fun, LEAN, *args)["f32", x.shape]


def grouped_norm(x):
    y = x.reshape(*x.shape[:-1], 4, -1)
    mean = y.mean((1, 3), keepdims=True)
    variance = (y**2).mean((1, 3), keepdims=True) - mean**2
    return ((y - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape)


def test_no_reader_of_a_skip_connection_keeps_what_it_joins():
    """The parts are kept, and both readers join them again."""

    def loss(params, x):
        w, scale, wide = params
        skip = x @ w @ w
        joined = jnp.concatenate([jnp.sin(x @ w) @ w, skip], -1)
        y = jax.nn.silu(grouped_norm(joined) * scale) @ wide + joined @ wide
        return jnp.mean((y @ w * skip) ** 2)

    params = W, normal(2, 2 * D), normal(3, 2 * D, D)
    assert not {shape for _, shape in kept(loss, LEAN, params, X[None])} & {(1, N, 2 * D)}


@pytest.mark.thorough
def test_a_recurrent_network_keeps_less_than_under_fast():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(11, 32)(tokens)
            for _ in range(2):
                x = nn.RNN(nn.OptimizedLSTMCell(32))(x)
            return jnp.mean(x**2)

    tokens = jnp.arange(21).reshape(3, 7) % 11
    params = Network().init(jax.random.key(0), tokens)

    def size(policy):
        explained = mpjax.explain(lambda p: Network().apply(p, tokens), policy, argnums=0)
        return explained(params).stored_after

    assert size(LEAN) < size(FAST)


@pytest.mark.parametrize("policy", thorough_but([FAST, LEAN], 1))
def test_explain_names_the_row_of_all_that_is_kept(policy):
    report = mpjax.explain(transformer, policy, argnums=0)(W, X)
    assert sum(k.bytes for k in report.kept) == report.stored_after
    assert all(k.row is not None for k in report.kept if len(k.shape) > 1)
    rows = [report.rows[k.row] for k in report.kept if k.row is not None]
    assert {"dot_general"} <= {row.primitive for row in rows}
    told = {row.storage for row in report.rows}
    assert any("kept" in text for text in told) and "row" in str(report)


NAMES = "rsqrt", "max", "dot_general"


def test_explain_tells_what_is_computed_again():
    rows = mpjax.explain(network, LEAN, argnums=0)(W, X).rows
    forward = [row for row in rows if not row.reason.startswith("backward")]
    told = {name: {row.storage for row in forward if row.primitive == name} for name in NAMES}
    assert all(text.startswith("computed again") for text in told["rsqrt"] | told["max"])
    assert all(text.startswith("kept in bf16") for text in told["dot_general"]), told


# ---- under JAX's transformations ----------------------------------------------------------------


def block(w, x):
    return network(w, x, blocks=1)


def check(transform, run=run, within=1e-6):
    """Checks that a transformed function has the numbers of the fast setting, and those of JAX."""
    functions = block, *(mpjax.autocast(block, policy) for policy in (FAST, LEAN, NUMBER))
    want, near, *rest = run(lambda w, x: [transform(f)(w, x) for f in functions], W, X)
    for got in rest:
        assert np.linalg.norm(got - near) <= within * np.linalg.norm(near)
        assert np.linalg.norm(got - want) < 2**-5 * np.linalg.norm(want)


TRANSFORMED = {
    "grad": jax.grad,
    "vmap": lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w]), x),
    "jvp": lambda f: lambda w, x: jax.jvp(lambda v: f(v, x), (w,), (jnp.ones_like(w),))[1],
    "twice": lambda f: lambda w, x: jax.grad(lambda v: jnp.sum(jax.grad(f)(v, x) * w))(w),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": lambda f: jax.grad(
        lambda w, x: lax.scan(lambda c, _: (c + f(w, x), None), 0.0, None, length=3)[0]
    ),
    "linearize": lambda f: lambda w, x: jax.linearize(lambda v: f(v, x), w)[1](w),
}


@pytest.mark.parametrize("name", thorough_but(TRANSFORMED, "vmap", "remat"))
def test_lean_matches_fast_under_transformations(name):
    # What is computed again is differentiated again, and its matmuls round the parts of a sum.
    check(TRANSFORMED[name], within=2**-7 if name == "twice" else 1e-6)


def test_lean_matches_fast_under_shard_map():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def transform(fun):
        def both(w, x):
            mean = jax.shard_map(
                lambda w, x: lax.pmean(fun(w, x), "i"),
                mesh=mesh,
                in_specs=(P(), P("i")),
                out_specs=P(),
            )
            return mean(w, x)

        return jax.grad(both)

    check(transform, lambda fun, *args: jax.jit(fun)(*args))


def test_lean_matches_fast_in_taylor_mode():
    def fun(x):
        return jnp.sum(jnp.tanh(norm(x @ W)) @ W)

    series = (jnp.ones(X.shape), jnp.zeros(X.shape))
    fast, lean = (
        run(lambda x, p=p: jet(mpjax.autocast(fun, p), (x,), (series,)), X) for p in (FAST, LEAN)
    )
    np.testing.assert_allclose(jax.tree.leaves(lean), jax.tree.leaves(fast), rtol=1e-5)


def test_lean_gradient_exports_with_symbolic_shapes():
    (rows,) = export.symbolic_shape("rows")
    gradient = jax.jit(jax.grad(mpjax.autocast(block, LEAN)))
    exported = export.export(gradient)(W, jax.ShapeDtypeStruct((rows, D), jnp.float32))
    got, want = exported.call(W, X), run(gradient, W, X)
    assert np.linalg.norm(got - want) < 2**-6 * np.linalg.norm(want)


def test_the_users_own_remat_and_names_stay_in_force():
    def fun(w, x):
        def layer(w, x):
            y = checkpoint_name(jnp.tanh(norm(x @ w)), "mine")
            return jnp.tanh(y @ w)

        policy = jax.checkpoint_policies.save_only_these_names("mine")
        for _ in range(2):
            x = jax.checkpoint(layer, policy=policy)(w, x)
        return jnp.mean(x**2)

    assert kept(fun, LEAN, W, X) == kept(fun, FAST, W, X)


def test_names_reach_a_checkpoint_around_autocast():
    def fun(w, x):
        return jnp.mean(jnp.tanh(checkpoint_name(jnp.tanh(norm(x @ w)), "mine") @ w))

    def residuals(policy):
        saved = jax.checkpoint_policies.save_only_these_names("mine")
        run = jax.checkpoint(mpjax.autocast(fun, policy), policy=saved)
        jaxpr = jax.make_jaxpr(lambda w, x: jax.vjp(run, w, x)[1])(W, X).jaxpr
        return {str(v.aval) for v in jaxpr.outvars if v not in jaxpr.invars}

    assert residuals(LEAN) == residuals(FAST) and any(f"{N},{D}" in a for a in residuals(LEAN))


def test_effects_happen_once(capfd):
    calls = []

    def count(x):
        calls.append(x.shape)
        return np.tanh(x)

    def fun(w, x):
        h = x @ w
        stream = jax.nn.relu(norm(h))
        jax.debug.print("here {}", stream[0, 0])
        told = io_callback(count, jax.typeof(stream), lax.stop_gradient(stream))
        stream = jax.nn.relu(stream + norm(told @ w))
        return jnp.mean((jnp.sin(h / (1 + told**2)) + stream) @ w)

    got = jax.block_until_ready(jax.jit(jax.grad(mpjax.autocast(fun, LEAN)))(W, X))
    jax.effects_barrier()
    assert len(calls) == 1 and capfd.readouterr().out.count("here") == 1
    want = jax.jit(jax.grad(fun))(W, X)
    assert np.linalg.norm(got - want) < 2**-5 * np.linalg.norm(want)


@pytest.mark.parametrize("policy", thorough_but([FAST, LEAN], LEAN))
def test_threads_get_equal_programs_of_one_function(policy):
    auto = mpjax.autocast(lambda w, x: transformer(w, x, blocks=1), policy)

    def text(fun):
        program = str(jax.make_jaxpr(lambda *args: fun(*args))(W, X))
        return re.sub("0x[0-9a-f]+", "", program)

    want = text(auto), text(jax.grad(auto))
    found, failed = [], []

    def work():
        try:
            for _ in range(2):
                found.append((text(auto), text(jax.grad(auto))))
        except Exception as error:  # told in the main thread
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and len(found) == 8
    assert {*found} == {want}
