"""explain of programs that see their derivative: rows are read off what runs."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from support import normal

import mpjax
from mpjax._src.core.autocast import transform
from mpjax._src.core.planner import exceptions, rounding
from mpjax._src.core.program.site import equations
from mpjax._src.core.program.trace import Flat
from mpjax._src.tools.instruments import planned

W, X = normal(0, 32, 32, scale=0.1), normal(1, 8, 32)
HALF = "mixed_bfloat16"


@jax.custom_vjp
def doubled(x):
    return jnp.sin(x) * 2


doubled.defvjp(lambda x: (doubled(x), x), lambda x, ct: (2 * ct * jnp.cos(x),))


def loss(w, x):
    with jax.named_scope("first"):
        h = jax.nn.gelu(x @ w)
    h = doubled(h)
    h = jax.checkpoint(lambda h: jnp.tanh(h @ w))(h)
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=3)
    return jnp.mean(jax.nn.softmax(h @ w) @ w)


@pytest.fixture(scope="module")
def report():
    return mpjax.explain(loss, HALF, argnums=0)(W, X)


def rows_of(report, primitive, *, backward=False):
    return [r for r in report.rows if r.primitive == primitive and r.backward == backward]


def test_each_equation_of_the_backward_pass_has_a_row(report):
    backward = [row for row in report.rows if row.backward]
    assert len(backward) > 40 and None not in {row.forward for row in backward}
    assert not {"planned", "optimization_barrier", "reduce_precision"} & {*report.calls()}
    dots = rows_of(report, "dot_general", backward=True)
    assert all(report.rows[row.forward].primitive == "dot_general" for row in dots)


def test_kept_bytes_are_those_of_the_residuals(report):
    def residuals(w):
        traced = transform.trace(loss, mpjax.get_policy(HALF), (w, X), {})
        vjp = jax.vjp(lambda w: transform.call(traced, Flat.of(((w, X), {})).arrays)[0], w)[1]
        return [x for x in jax.tree.leaves(vjp) if hasattr(x, "nbytes")]

    total = sum(x.size * x.dtype.itemsize for x in jax.eval_shape(residuals, W) if x.size > 1)
    assert total - W.nbytes - X.nbytes == report.stored_after  # arguments take no more memory
    assert sum(kept.bytes for kept in report.kept) == report.stored_after


def test_storage_says_what_is_kept_and_computed_again(report):
    first, *_ = rows_of(report, "dot_general")
    assert (first.storage, first.scope) == ("kept in bf16", "first")
    index = report.rows.index(first)
    (gelu,) = [r for r in rows_of(report, "tanh") if r.scope == "first"]
    assert gelu.storage == f"computed again from row {index}"
    again = [r for r in rows_of(report, "tanh", backward=True) if "computed again" in r.reason]
    assert report.rows[again[-1].forward].primitive == "tanh"
    softmax = rows_of(report, "div")[0]
    assert "kept in bf16" in softmax.storage


def test_a_value_that_is_rounded_for_several_readers_says_so(monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)

    def streams(w, x):
        h = x @ w + x @ w.T
        for _ in range(2):
            h = h + jnp.tanh(h @ w) @ w
        return jnp.mean(h)

    report = mpjax.explain(streams, HALF, argnums=0)(W, X)
    told = [row.storage for row in report.rows if "rounded for" in row.storage]
    assert told and all(text.endswith(("reader", "readers")) for text in told)


def short(x, w):
    return x[:, :4] @ w[:4]


def region(x, w):
    with mpjax.precision("float32"):
        return x @ w


def routed(x, w):
    big = jnp.concatenate([x] * 3, -1)
    return jax.lax.top_k(jax.nn.softmax(big @ jnp.concatenate([w] * 3)[:, :8]), 2)[0]


def searched(x, w):
    far = lambda h: jnp.max(jnp.abs(h @ w)) > 1e-3  # noqa: E731
    return jax.lax.while_loop(far, lambda h: h / 2, x)


REASONS = {
    "16-bit list": (lambda x, w: x @ w, HALF),
    "float32: sums of 4 products or fewer": (short, HALF),
    "float32: sums of products entry by entry": (lambda x, w: jnp.vdot(x, x), HALF),
    "region float32": (region, HALF),
    "explicit precision": (lambda x, w: jnp.dot(x, w, precision="highest"), HALF),
    'override "*dot_general"': (
        lambda x, w: x @ w,
        mpjax.get_policy(HALF).override({"*dot_general": "float32"}),
    ),
    "full_ops": (lambda x, w: x @ w, mpjax.get_policy(HALF).with_ops(full=("dot_general",))),
    "half_ops": (lambda x, w: jnp.exp(x), mpjax.get_policy(HALF).with_ops(half=("exp",))),
    exceptions.RANKED: (routed, HALF),
    exceptions.ENDS: (searched, HALF),
    exceptions.SOLVES: (lambda x, w: jnp.linalg.cholesky(w), HALF),
    exceptions.COUNTED: (lambda x, w: jnp.arange(3200.0).reshape(100, 32) @ w, HALF),
    exceptions.ALL_FULL: (lambda x, w: x @ w, "float32"),
    "planned by an inner autocast": (mpjax.autocast(lambda x, w: x @ w), HALF),
    "float32: only matmuls": (lambda x, w: jnp.exp(x), HALF),
    "its results are not floats": (lambda x, w: x > w[0], HALF),
    "a cast in the program": (lambda x, w: x.astype("bfloat16"), HALF),
    "no float32": (lambda x, w: x.astype("int32") + 1, HALF),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_row_says_why_it_has_its_dtype(reason):
    fun, policy = REASONS[reason]
    report = mpjax.explain(fun, policy)(X, W)
    assert any(row.reason.startswith(reason) for row in report.rows), report.rows


def test_the_forward_pass_alone_has_the_dtypes_of_training(report):
    alone = mpjax.explain(loss, HALF)(W, X)
    trained = report.rows[: len(alone.rows)]
    assert [row.after for row in alone.rows] == [row.after for row in trained]
    assert "argnums" in alone.summary()[-1] and alone.stored_after is None


def test_numbers_of_rows_change_nothing_that_runs():
    traced = transform.trace(loss, mpjax.get_policy(HALF), (W, X), {})

    def primitives(rows):
        gradient = jax.grad(lambda w, x: transform.call(traced, [w, x], rows)[0])
        jaxpr = jax.make_jaxpr(gradient)(W, X)
        return [(e.primitive.name, e.outvars[0].aval) for e, *_ in equations(jaxpr.jaxpr)]

    assert primitives(False) == primitives(True)


def test_an_override_matches_where_rows_are_numbered():
    policy = mpjax.get_policy(HALF).override({"*first": "float32"})
    report = mpjax.explain(loss, policy, argnums=0)(W, X)
    first, *others = rows_of(report, "dot_general")
    assert first.after == "f32->f32" and all(row.after != first.after for row in others)


def attention_of(q, w):
    return jnp.sum(jax.nn.dot_product_attention(q, q @ w, q, is_causal=True))


def head_of(x, w, y):
    logits = x @ w
    picked = jnp.take_along_axis(logits, y[:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def test_matmuls_that_a_kernel_or_blocks_run_are_no_float32_matmuls():
    shape = jax.ShapeDtypeStruct
    q, w = shape((1, 128, 2, 64), jnp.float32), shape((64, 64), jnp.float32)
    x, head = shape((4096, 64), jnp.float32), shape((64, 4096), jnp.float32)
    labels = shape((4096,), jnp.int32)
    for fun, args, setting in (
        (attention_of, (q, w), "fused_attention=true"),
        (head_of, (x, head, labels), "chunked_loss=true"),
    ):
        for argnums in (None, 0):
            explained = mpjax.explain(fun, f"{HALF},{setting}", argnums, target="h100")
            report = explained(*args)
            assert not report.shortfalls(), report
            dots = [row for row in rows_of(report, "dot_general") if "run" in row.storage]
            assert dots and {row.reason for row in dots} == {planned.MATMUL}


def copied(x_ref, out_ref):
    out_ref[...] = (x_ref[...].astype(jnp.float32) * 2).astype(out_ref.dtype)


@jax.custom_vjp
def copy(x):
    return pl.pallas_call(copied, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


copy.defvjp(lambda x: (copy(x), None), lambda _, ct: (2 * ct,))


def test_what_a_kernel_computes_inside_is_nothing_that_its_row_reads_or_returns():
    report = mpjax.explain(lambda x, w: mpjax.half_inputs(copy)(x @ w) @ w, HALF)(X, W)
    (row,) = rows_of(report, "custom_vjp_call")
    assert row.after == "bf16->bf16"
