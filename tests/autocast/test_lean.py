"""storage=lean: the same gradients, fewer bytes kept, no matmul or convolution twice."""

import collections
import dataclasses
import functools
import re
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P
from measure import run
from models import MODELS
from programs import PROGRAMS, W, X
from support import equations, normal, thorough_but

import mpjax
from mpjax._src.autocast.derivatives import kept_alone
from mpjax._src.autocast.lean import gathered
from mpjax._src.autocast.steps import Checkpoint
from mpjax._src.autocast.tables import Analysis, Want
from mpjax._src.program.graph import build

FAST, LEAN = "mixed_bfloat16", "mixed_bfloat16,storage=lean"
BIG = normal(2, 64, 16)


def norm(x):
    mean = x.mean(0)
    return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(0) + 1e-5)


def network(w, x, blocks=3):
    """A residual network: matmuls, norms over the batch, relus, a stream."""
    for _ in range(blocks):
        y = jax.nn.relu(norm(x @ w))
        x = jax.nn.relu(x + norm(y @ w))
    return jnp.mean(x**2)


def transformer(w, x, blocks=3):
    for _ in range(blocks):
        y = norm(x.T).T
        q = (y @ w).reshape(1, -1, 2, 4)
        y = jax.nn.dot_product_attention(q, q * 0.5, q, is_causal=True).reshape(x.shape)
        x = x + y @ w
        x = x + jax.nn.gelu(norm(x.T).T @ w) @ w.T
    return jnp.mean(x**2)


def kept(fun, policy, *args):
    """Returns how many arrays of each shape and dtype are kept, arguments not counted."""
    report = mpjax.explain(fun, policy, argnums=0)(*args)
    return collections.Counter((k.dtype, k.shape) for k in report.kept)


def compiled(fun, *args):
    """Returns the compiled gradient of a function."""
    return jax.jit(jax.grad(fun, allow_int=True)).lower(*args).compile()


def products(gradient):
    """Returns how many matmuls and convolutions a compiled gradient runs."""
    text = gradient.as_text()
    return text.count(" dot(") + text.count(" convolution(")


def as_near(got, near, want):
    """Checks that an array is as near to a third one as another is."""
    errors = [np.linalg.norm(x - want) for x in (got, near)]
    assert errors[0] <= 1.3 * errors[1] + 2**-7 * np.linalg.norm(want), errors


def composed(w, x):
    """Affine maps, composed by an associative scan: parts of some products are never read."""

    def then(first, second):
        matrix, shift = second
        return matrix @ first[0], (matrix @ first[1][..., None])[..., 0] + shift

    maps = jnp.tanh(x @ w).reshape(-1, 2, 2), x[:, :2]
    return jnp.sum(jnp.sin(jax.lax.associative_scan(then, maps)[1] @ w[:2]))


SUITE = {
    **{name: (fun, (W, X)) for name, fun in PROGRAMS.items()},
    "network": (network, (W, BIG[:, :8])),
    "transformer": (transformer, (W, BIG[:, :8])),
    "composed": (composed, (W[:, :4], BIG[:16, : W.shape[0]])),
}


# A stream, a loop, branches, a rule of its author's, devices, what is never read.
QUICK = ["network", "layers", "switch", "custom_vjp", "shard_mapped"]


@pytest.mark.parametrize("name", thorough_but(SUITE, *QUICK))
def test_lean_gradients_match_fast_and_no_matmul_runs_twice(name):
    fun, args = SUITE[name]
    fast, lean = (compiled(mpjax.autocast(fun, policy), *args) for policy in (FAST, LEAN))
    want = jax.jit(jax.grad(fun, allow_int=True))(*args)
    if jnp.issubdtype(want.dtype, jnp.floating):
        as_near(lean(*args), fast(*args), want)
    assert products(lean) <= products(fast)


@pytest.mark.parametrize("name", thorough_but(MODELS, "mixture of experts"))
def test_lean_gradients_of_models_match_fast_and_no_matmul_runs_twice(name):
    loss, params = MODELS[name]()
    fast, lean = (compiled(mpjax.autocast(loss, policy), params) for policy in (FAST, LEAN))
    want, got = fast(params), lean(params)
    size = float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(want))))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert np.linalg.norm(a - b) < 2**-6 * size
    assert products(lean) <= products(fast)


def test_a_residual_network_keeps_the_results_of_its_matmuls_and_small_statistics():
    found = kept(network, LEAN, W, BIG[:, :8])
    large = sum(n for (_, shape), n in found.items() if len(shape) == 2)
    assert large == 6  # one for each matmul: no relu, no stream, no norm
    assert kept(network, FAST, W, BIG[:, :8]).total() > found.total()


def test_a_transformer_keeps_no_norm_and_no_activation():
    found = kept(transformer, LEAN, W, BIG[:, :8])
    large = {key: n for key, n in found.items() if key[0] == "f32" and len(key[1]) > 1}
    means = {("f32", (1, 2, 4)): 3}  # of the keys: reductions are not run twice
    assert large == {("f32", (64, 8)): 1, **means}  # what the loss squares
    assert found["bf16", (64, 8)] <= 3 * 3  # results of matmuls


@pytest.mark.parametrize("policy", [FAST, LEAN])
def test_explain_names_the_row_of_all_that_is_kept(policy):
    report = mpjax.explain(transformer, policy, argnums=0)(W, BIG[:, :8])
    assert sum(k.bytes for k in report.kept) == report.stored_after
    assert all(k.row is not None for k in report.kept if len(k.shape) > 1)
    rows = [report.rows[k.row] for k in report.kept if k.row is not None]
    assert {"dot_general"} <= {row.primitive for row in rows}
    told = {row.storage for row in report.rows}
    assert any("kept" in text for text in told) and "row" in str(report)


def test_explain_tells_what_is_computed_again():
    rows = mpjax.explain(network, LEAN, argnums=0)(W, BIG[:, :8]).rows
    forward = [row for row in rows if not row.reason.startswith("backward")]
    assert {row.storage for row in forward if row.primitive == "sub"} == {"computed again"}
    assert {row.storage for row in forward if row.primitive == "reduce_sum"} == {""}


def test_explain_does_not_call_unneeded_softmax_scores_kept():
    def fun(w, x):
        y = x @ w
        return jnp.mean(jax.nn.softmax(y @ x.T + x[:, 0] ** 2) @ y)

    rows = mpjax.explain(fun, LEAN, argnums=0)(W, BIG[:, :8]).rows
    assert {row.storage for row in rows if row.primitive in ("add", "sub")} == {""}


@pytest.mark.parametrize(
    "fun", [jnp.tanh, jnp.exp, jnp.sin, jnp.abs, jax.nn.sigmoid, lambda x: jnp.maximum(x, 0.5)]
)
def test_lean_recomputes_residuals_from_smaller_values(fun):
    def spread(w, x):
        return jnp.mean(fun(x.sum(1)[:, None] + w.sum(0)))

    assert kept(spread, LEAN, W, BIG[:, :8]) == {("f32", (64, 1)): 1, ("f32", (1, 8)): 1}


@pytest.mark.parametrize("last", [jnp.square, jnp.sin])
def test_nothing_that_a_derivative_makes_of_kept_values_is_kept_as_well(last):
    # A softmax's derivative needs its result, of which JAX would keep 2x or cos(x) too.
    found = kept(lambda w, x: jnp.mean(last(jax.nn.softmax(x @ w.T) @ w)), LEAN, BIG, BIG)
    assert found == {("bf16", (64, 64)): 1, ("f32", BIG.shape): 1}


def test_a_predicate_is_kept_rather_than_what_it_is_computed_from():
    def fun(w, x):
        y = x @ w
        return jnp.mean(jnp.where(y.sum() > 0, y @ w, y))

    scalars = {key: n for key, n in kept(fun, LEAN, W, BIG[:, :8]).items() if key[1] == ()}
    assert scalars == {("bool", ()): 1}


def test_the_cotangent_of_a_float32_result_is_rounded_where_its_matmul_is():
    def fun(w, x):
        return jnp.mean(jax.nn.logsumexp(x @ w + 1.0, 1))

    gradient = jax.make_jaxpr(jax.grad(mpjax.autocast(fun, LEAN)))(W, BIG[:, :8])
    checkpoints = [eqn for eqn in equations(gradient) if "prevent_cse" in eqn.params]
    handed_out = {(v.aval.shape, str(v.aval.dtype)) for eqn in checkpoints for v in eqn.outvars}
    assert handed_out and ((64, 8), "float32") not in handed_out


# ---- under JAX's transformations ----------------------------------------------------------------


def block(w, x):
    return network(w, x, blocks=1)


def check(transform, run=run):
    functions = block, *(mpjax.autocast(block, policy) for policy in (FAST, LEAN))
    want, near, got = run(lambda w, x: [transform(f)(w, x) for f in functions], W, BIG[:, :8])
    as_near(got, near, want)


TRANSFORMED = {
    "grad": jax.grad,
    "vmap": lambda f: lambda w, x: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w]), x),
    "jvp": lambda f: lambda w, x: jax.jvp(lambda v: f(v, x), (w,), (jnp.ones_like(w),))[1],
    "twice": lambda f: lambda w, x: jax.grad(lambda v: jnp.sum(jax.grad(f)(v, x) * w))(w),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": lambda f: jax.grad(
        lambda w, x: jax.lax.scan(lambda c, _: (c + f(w, x), None), 0.0, None, length=3)[0]
    ),
    "linearize": lambda f: lambda w, x: jax.linearize(lambda v: f(v, x), w)[1](w),
}


@pytest.mark.parametrize("name", thorough_but(TRANSFORMED, "vmap", "twice", "remat", "scan"))
def test_lean_matches_fast_under_transformations(name):
    check(TRANSFORMED[name])


def test_lean_matches_fast_under_shard_map():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    def transform(fun):
        def both(w, x):
            mean = jax.shard_map(
                lambda w, x: jax.lax.pmean(fun(w, x), "i"),
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

    x, series = BIG[:, :8], (jnp.ones((64, 8)), jnp.zeros((64, 8)))
    fast, lean = (
        run(lambda x, p=p: jet(mpjax.autocast(fun, p), (x,), (series,)), x) for p in (FAST, LEAN)
    )
    np.testing.assert_allclose(jax.tree.leaves(lean), jax.tree.leaves(fast), rtol=1e-5)


def test_lean_gradient_exports_with_symbolic_shapes():
    (rows,) = export.symbolic_shape("rows")
    gradient = jax.jit(jax.grad(mpjax.autocast(block, LEAN)))
    exported = export.export(gradient)(W, jax.ShapeDtypeStruct((rows, 8), jnp.float32))
    got, want = exported.call(W, BIG[:, :8]), run(gradient, W, BIG[:, :8])
    assert np.linalg.norm(got - want) < 2**-6 * np.linalg.norm(want)


def test_layers_in_a_scan_keep_what_layers_written_out_keep():
    def scanned(w, x):
        def layer(x, _):
            y = jax.nn.relu(norm(x @ w))
            return jax.nn.relu(x + norm(y @ w)), None

        return jnp.mean(jax.lax.scan(layer, x, None, length=3)[0] ** 2)

    written_out, in_a_scan = (kept(f, LEAN, W, BIG[:, :8]) for f in (network, scanned))
    results = in_a_scan["bf16", (3, 64, 8)] + in_a_scan["f32", (3, 64, 8)]
    large = sum(n for (_, shape), n in written_out.items() if len(shape) == 2)
    assert 3 * (results - 1) <= large  # and the state that goes in
    args = W, BIG[:, :8]
    fast, lean = (compiled(mpjax.autocast(scanned, policy), *args) for policy in (FAST, LEAN))
    assert products(lean) == products(fast)


def test_the_users_own_remat_and_names_stay_in_force():
    def fun(w, x):
        def layer(w, x):
            y = checkpoint_name(jnp.tanh(norm(x @ w)), "mine")
            return jnp.tanh(y @ w)

        policy = jax.checkpoint_policies.save_only_these_names("mine")
        for _ in range(2):
            x = jax.checkpoint(layer, policy=policy)(w, x)
        return jnp.mean(x**2)

    assert kept(fun, LEAN, W, BIG[:, :8]) == kept(fun, FAST, W, BIG[:, :8])


def test_names_reach_a_checkpoint_around_autocast():
    def fun(w, x):
        return jnp.mean(jnp.tanh(checkpoint_name(jnp.tanh(norm(x @ w)), "mine") @ w))

    def residuals(policy):
        saved = jax.checkpoint_policies.save_only_these_names("mine")
        run = jax.checkpoint(mpjax.autocast(fun, policy), policy=saved)
        jaxpr = jax.make_jaxpr(lambda w, x: jax.vjp(run, w, x)[1])(W, BIG[:, :8]).jaxpr
        return {str(v.aval) for v in jaxpr.outvars if v not in jaxpr.invars}

    assert residuals(LEAN) == residuals(FAST) and any("64,8" in aval for aval in residuals(LEAN))


def test_effects_under_lean_happen_once(capfd):
    def fun(w, x):
        y = jnp.tanh(norm(x @ w))
        jax.debug.print("here {}", y[0, 0])
        return jnp.mean(jnp.tanh(y * 2) @ w)

    jax.block_until_ready(jax.jit(jax.grad(mpjax.autocast(fun, LEAN)))(W, BIG[:, :8]))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("here") == 1


def test_effects_in_the_middle_of_a_stream_happen_once():
    calls = []

    def count(x):
        calls.append(x.shape)
        return np.tanh(x)

    def fun(w, x):
        stream = jax.nn.relu(norm(x @ w))
        told = io_callback(count, jax.typeof(stream), jax.lax.stop_gradient(stream))
        stream = jax.nn.relu(stream + norm(told @ w))
        return jnp.mean(stream @ w)

    jax.block_until_ready(jax.jit(jax.grad(mpjax.autocast(fun, LEAN)))(W, BIG[:, :8]))
    assert len(calls) == 1


def test_effects_between_readers_of_a_kept_value_happen_once():
    calls = []

    def count(x):
        calls.append(x.shape)
        return np.tanh(x)

    def fun(w, x):
        h = x @ w
        before = jnp.tanh(norm(h))
        told = io_callback(count, jax.typeof(before), jax.lax.stop_gradient(before))
        return jnp.mean((jnp.sin(h / (1 + told**2)) + before) @ w)

    got = jax.block_until_ready(jax.jit(jax.grad(mpjax.autocast(fun, LEAN)))(W, BIG[:, :8]))
    assert len(calls) == 1
    want = jax.jit(jax.grad(fun))(W, BIG[:, :8])
    assert np.linalg.norm(got - want) < 2**-5 * np.linalg.norm(got)


@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint, jax.jit])
def test_custom_vjp_rule_in_a_checkpoint_is_told_what_is_not_perturbed(around):
    """A rule that asks is told so inside of a checkpoint, however deep."""
    told = []

    @jax.custom_vjp
    def scaled(y, x):
        return y * x

    def fwd(y, x):
        told.append(x.perturbed)
        return y.value * x.value, x.value

    scaled.defvjp(fwd, lambda x, ct: (ct * x, jnp.zeros_like(x)), symbolic_zeros=True)

    def fun(w, t):
        run = lambda given: scaled(jnp.tanh(given[0]), jnp.sin(given[1]))  # noqa: E731
        return jnp.sum(kept_alone(run, (w, t), True))

    jax.make_jaxpr(jax.grad(around(fun)))(W[0], W[1])
    assert told == [False]


# ---- groups that cannot run at once -------------------------------------------------------------


def operations(fun):
    block = build(jax.make_jaxpr(fun)(1.0, 2.0).jaxpr, ())
    return block.ops, block.outvars


def test_gathered_takes_one_of_groups_that_wait_for_each_other():
    ops, results = operations(lambda x, y: (jnp.sin(jnp.cos(x)), jnp.tanh(jnp.exp(y))))
    cos, sin, exp, tanh = ops
    sin = dataclasses.replace(sin, ins=exp.outs)
    tanh = dataclasses.replace(tanh, ins=cos.outs)
    ops = cos, sin, exp, tanh
    found = gathered(Analysis(), ops, results, [[cos, sin], [exp, tanh]], set())
    assert [step.steps if isinstance(step, Checkpoint) else step for step in found] == [
        exp,
        (cos, sin),
        tanh,
    ]


def test_a_group_that_waits_for_itself_is_left():
    ops, results = operations(lambda x, y: jnp.sin(jnp.cos(jnp.exp(x))) + y)
    assert gathered(Analysis(), ops, results, [[ops[0], ops[2]]], set()) == ops


# ---- a plan does not change ---------------------------------------------------------------------


def snapshot(plan):
    """Returns all that a plan says, as text."""
    seen: dict[int, int] = {}

    def show(x):
        if hasattr(x, "__dataclass_fields__"):
            if id(x) in seen:
                return seen[id(x)]
            seen[id(x)] = len(seen)
            return [type(x).__name__, *(show(getattr(x, f)) for f in x.__dataclass_fields__)]
        if isinstance(x, Want):  # who reads it stands in the operations
            return repr(x._replace(readers=frozenset()))
        if isinstance(x, dict):
            return [[show(key), show(y)] for key, y in x.items()]
        if isinstance(x, list | tuple | set | frozenset):
            found = [show(y) for y in x]
            return sorted(map(str, found)) if isinstance(x, set | frozenset) else found
        return repr(x)

    return str(show((plan.block, plan.analysis)))


@pytest.mark.parametrize("policy", [FAST, LEAN])
def test_running_and_reporting_change_nothing_in_a_plan(policy):
    from mpjax._src.autocast import transform
    from mpjax._src.instruments.tables import storage_of

    args = W, BIG[:, :8]
    fun = functools.partial(transformer, blocks=2)
    traced = transform.trace(fun, mpjax.get_policy(policy), args, {})
    before = snapshot(traced.plan)
    for rows in (False, True):
        jax.make_jaxpr(lambda *a, rows=rows: transform.call(traced, [*a], rows))(*args)
        jax.make_jaxpr(jax.grad(lambda *a, rows=rows: transform.call(traced, [*a], rows)[0]))(*args)
    storage_of(traced.plan), [*traced.plan.numbered]
    assert snapshot(traced.plan) == before


@pytest.mark.parametrize("policy", thorough_but([FAST, LEAN], LEAN))
def test_threads_get_equal_programs_of_one_function(policy):
    auto = mpjax.autocast(functools.partial(transformer, blocks=1), policy)

    def text(fun):
        program = str(jax.make_jaxpr(lambda *args: fun(*args))(W, BIG[:, :8]))
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


def test_a_recurrent_network_keeps_no_more_than_under_fast():
    """Islands keep what they round; in a checkpoint, float32 gates would be kept as well."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(11, 16)(tokens)
            for _ in range(2):
                x = nn.RNN(nn.OptimizedLSTMCell(16))(x)
            return jnp.mean(x**2)

    tokens = jnp.arange(21).reshape(3, 7) % 11
    params = Network().init(jax.random.key(0), tokens)

    def loss(params):
        return Network().apply(params, tokens)

    def size(policy):
        return sum(k.bytes for k in mpjax.explain(loss, policy, argnums=0)(params).kept)

    assert size(LEAN) < size(FAST)
