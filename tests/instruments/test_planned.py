"""explain of programs that see their derivative: rows are read off what runs."""

import jax
import jax.numpy as jnp
import pytest
from support import normal

import mpjax
from mpjax._src.autocast import transform
from mpjax._src.instruments import planned
from mpjax._src.instruments.passes import passes
from mpjax._src.planner import exceptions, rounding
from mpjax._src.program.site import equations
from mpjax._src.program.trace import Flat

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
    planned.SHORT_SUM: (short, HALF),
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


def test_passes_list_both_parts_and_what_is_between():
    text = passes(loss, HALF)(W, X)
    assert [*text] == [
        *("classify", "forward", "backward", "cut", "rounded"),
        *("written forward", "written backward"),
    ]
    assert "again" in text["backward"] and "again" not in text["forward"]
    assert "price=" in text["cut"] and "bfloat16[8,32]" in text["cut"]
    assert "bfloat16" in text["written forward"] and "bfloat16" not in text["forward"]


def test_an_override_matches_where_rows_are_numbered():
    policy = mpjax.get_policy(HALF).override({"*first": "float32"})
    report = mpjax.explain(loss, policy, argnums=0)(W, X)
    first, *others = rows_of(report, "dot_general")
    assert first.after == "f32->f32" and all(row.after != first.after for row in others)
