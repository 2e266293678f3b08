"""explain: the report, its totals and its words."""

import collections
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from support import normal

import mpjax
from mpjax._src.core.autocast import transform
from mpjax._src.core.base import _jax

W, X = normal(0, 64, 64, scale=0.1), normal(1, 32, 64)
PARAMS = {"first": {"kernel": W}, "second": {"kernel": W}}


def loss(params, x):
    with jax.named_scope("block"):
        h = jax.nn.gelu(x @ params["first"]["kernel"])
    h, _ = lax.scan(
        lambda h, _: (jnp.tanh(h @ params["second"]["kernel"]), None), h, None, length=3
    )
    exact = jnp.dot(h, W, precision="highest")
    return jnp.mean(jax.nn.logsumexp(h @ W, -1)) + jnp.mean(exact)


def test_plan_numbers_an_operation_planned_as_one_once():
    traced = transform.trace(jax.nn.relu, mpjax.get_policy("mixed_bfloat16"), (X,), {})
    (op,) = traced.outline.block.ops
    assert traced.outline.rows == {op: 0}
    assert op.subs


def test_explain_reports_dtypes_and_reasons_of_the_forward_pass():
    report = mpjax.explain(loss, "mixed_bfloat16")(PARAMS, X)
    dots = [row for row in report.rows if row.primitive == "dot_general"]
    assert [row.reason.split(",")[0] for row in dots] == [
        "16-bit list",
        "16-bit list",
        "explicit precision (Precision.HIGHEST",
        "16-bit list",
    ]
    assert dots[0].path == "first/kernel" and dots[0].scope == "block"
    assert dots[0].before == "f32->f32" and dots[0].after == "bf16->bf16"
    assert dots[3].after.startswith("bf16->")
    assert dots[1].times == 3 and dots[1].path == "second/kernel"
    assert "test_explain.py:" in dots[0].source
    assert report.half_flops == 5 / 6
    assert report.stored_before is None


def test_explain_takes_abstract_arguments_and_gives_json():
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (PARAMS, X))
    report = mpjax.explain(loss, "mixed_float16")(*shapes)
    assert report.half_flops == 5 / 6
    assert json.loads(json.dumps(report.to_dict()))["casts"] == report.casts


def test_explain_reports_stored_bytes_and_the_backward_pass():
    report = mpjax.explain(loss, "mixed_bfloat16", argnums=0)(PARAMS, X)
    assert report.stored_after < report.stored_before
    backward = [row for row in report.rows if row.forward is not None]
    dots = [row for row in backward if row.primitive == "dot_general"]
    assert dots and all(report.rows[row.forward].primitive == "dot_general" for row in dots)
    assert {row.before for row in dots} == {"f32->f32"}
    assert any(row.path == "first/kernel" for row in dots)
    aux = mpjax.explain(lambda p, x: (loss(p, x), x), "mixed_bfloat16", argnums=0, has_aux=True)
    assert aux(PARAMS, X).half_flops == report.half_flops


def test_every_backward_row_of_an_attention_has_an_origin():
    def attention(q):
        h = jax.nn.gelu(jax.nn.dot_product_attention(q, q, q).reshape(8, 64) @ W)
        return jnp.sum(h @ W)

    report = mpjax.explain(attention, "mixed_bfloat16", argnums=0)(normal(2, 1, 8, 4, 16))
    backward = [row for row in report.rows if row.reason.startswith("backward")]
    assert len(backward) > 20 and all(row.forward is not None for row in backward)
    assert all(
        "test_explain.py" in row.source for row in backward if row.primitive == "dot_general"
    )


def test_explain_runs_nothing():
    ran = []

    def fun(x):
        jax.debug.callback(lambda: ran.append(1))
        return jnp.sum(x @ W)

    mpjax.explain(fun, "mixed_bfloat16", argnums=0)(X)
    jax.effects_barrier()
    assert not ran


def test_explain_prints_totals_reasons_and_overrides():
    text = str(mpjax.explain(loss, "mixed_bfloat16", argnums=0)(PARAMS, X))
    assert text.splitlines()[0].startswith("86.7% of matmul FLOPs run in bfloat16; ")
    assert "stored for the backward pass" in text and "left unchanged:" in text
    policy = mpjax.get_policy("mixed_bfloat16").override({"first/*": "float32"})
    text = str(mpjax.explain(loss, policy)(PARAMS, X))
    assert 'override "first/*"' in text


def test_operations_inside_a_loop_left_as_written_name_that_loop():
    def solve(x, w):
        def step(pair):
            inner = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), pair[0], length=2)[0]
            return inner, pair[0]

        far = lambda pair: jnp.max(jnp.abs(pair[0] - pair[1])) > 1e-3  # noqa: E731
        return jax.lax.while_loop(far, step, (x @ w, x))[0].sum()

    report = mpjax.explain(solve)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    loop = next(row for row in report.rows if row.primitive == "while")
    assert loop.left_alone and "comparison" in loop.reason
    around, within = [row for row in report.rows if row.primitive == "dot_general"]
    assert around.reason.startswith("16-bit list") and within.after == "f32->f32"
    line = loop.source.rpartition(":")[2]
    assert (
        within.reason
        == f"inside the while of tests/tools/instruments/test_explain.py:{line}, left unchanged"
    )
    assert "the while of tests/tools/instruments/test_explain.py" in str(report)


def test_explain_names_parameters_read_in_float32_with_reasons():
    def loss(params, indices):
        x = params["table"][indices] + params["places"]
        x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * params["norm"]
        x = jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"].T
        x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w * params["norm"]), None), x, params["more"])
        return jnp.mean(x[0] ** 2)

    shapes = {"table": (99, 8), "places": (4, 8), "norm": (8,), "up": (8, 6), "bias": (6,)}
    shapes |= {"down": (8, 6), "more": (2, 8, 8)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    args = params, jnp.zeros((5, 4), jnp.int32)
    report = mpjax.explain(loss, "mixed_bfloat16", argnums=0)(*args)
    named = {path: report.rows[index] for path, index in report.wide}
    read = {path: row.primitive for path, row in named.items() if path != "bias"}
    assert read == {"places": "add", "norm": "mul"}
    (line,) = [line for line in str(report).splitlines() if re.match(r" *\d+  mul +norm ", line)]
    assert named["norm"].reason in line
    assert not mpjax.explain(loss, "mixed_bfloat16")(*args).wide
    policy = mpjax.get_policy("mixed_bfloat16").override({"up": "float32"})
    wide = dict(mpjax.explain(loss, policy, argnums=0)(*args).wide)
    assert wide.keys() == {"places", "norm", "up", "bias"}


def test_explain_counts_bytes_of_an_operation_as_its_values_are_stored():
    x, w, v = (jnp.ones(shape, jnp.float32) for shape in ((4, 8), (8, 32), (32, 5)))
    rows = mpjax.explain(lambda x, w, v: jnp.sum(x @ w @ v), "mixed_bfloat16")(x, w, v).rows
    first, second, total = rows
    assert first.bytes == 4 * (4 * 8 + 8 * 32) + 2 * 4 * 32  # arguments arrive in float32
    assert second.bytes == 2 * 4 * 32 + 4 * (32 * 5 + 4 * 5)
    assert total.bytes == 4 * (4 * 5 + 1)


def test_explain_joins_rows_that_nobody_can_act_on():
    @jax.checkpoint
    def layer(x, w, key):
        return jnp.tanh(x @ w) * (jax.random.uniform(key, x.shape) < 0.9)

    def loss(w, x, key):
        return jnp.sum(layer(layer(x, w, key), w, key))

    args = normal(0, 8, 8), normal(1, 4, 8), jax.random.key(0)
    report = mpjax.explain(loss, "mixed_bfloat16", argnums=0)(*args)
    shown = {name for name, *_ in report.counts()}
    assert {"dot_general", "tanh"} <= shown and not shown & {"remat2", "jit", "gpu_barrier"}
    hidden = sum(row.primitive not in shown for row in report.rows if row.primitive == "remat2")
    assert hidden and "only contain a program" in str(report)
    assert report.calls()["remat2"]["f32"] or report.calls()["remat2"]["bf16"]
    made = [row for row in report.rows if row.primitive == "bitcast_convert_type"]
    assert made and not {row.primitive for row in report.shortfalls()} & {"bitcast_convert_type"}


def test_backward_rows_of_a_sum_that_runs_in_one_pass_name_its_forward_row():
    """The maximum and the sum that run are other ops than those of the program, in their place."""

    def loss(w, x):
        return jnp.sum(jax.nn.logsumexp(x @ w, axis=-1))

    rows = mpjax.explain(loss, argnums=0)(jnp.ones((16, 2048)), jnp.ones((4, 16))).rows
    sums = {i for i, row in enumerate(rows) if row.primitive == "reduce_sum" and not row.backward}
    behind = {row.forward for row in rows if row.backward}
    assert sums <= behind and None not in behind


@pytest.mark.parametrize(
    ("same", "count"),
    [
        (lax.optimization_barrier, 4),  # a sine and a cosine, and two parts of an argument
        (_jax.gpu_barrier, 4),
        (lambda y: lax.reduce_precision(y, 8, 23), 4),
        (lambda y: checkpoint_name(y, "again"), 4),
        (jax.checkpoint(lambda y: y), 4),
        (lax.stop_gradient, 3),  # only one of the parts
    ],
)
def test_an_array_that_compilers_do_not_copy_counts_once(same, count):
    def fun(x, z):
        y = jnp.sin(x)
        return jnp.sum(y * z[0]) + jnp.sum(same(y) * z[1])

    args = jnp.ones((4, 8)), jnp.ones((2, 4, 8))
    kept = mpjax.explain(fun, "float32", argnums=(0, 1))(*args).kept
    assert collections.Counter(k.shape for k in kept)[4, 8] == count, kept
