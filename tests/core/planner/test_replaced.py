"""Kernels in the place of operations: in every kind of program, under every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attend import (
    BIAS,
    CHUNKED,
    FUSED,
    HEAD,
    LABELS,
    WORDS,
    B,
    K,
    N,
    Q,
    T,
    V,
    causal,
    notes,
    on,
    replaced,
)
from jax.sharding import NamedSharding, PartitionSpec
from support import assert_near, equations, thorough_but

import mpjax
from mpjax._src.core.base import _jax
from mpjax._src.replacements import chunked, fused_kernels

ROWS = PartitionSpec("rows")


def mesh():
    return jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))


def biased(q):
    scores = jnp.einsum("btnh,bsnh->bnts", q, q) / 3 + np.asarray(BIAS)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), q)


def of_its_own(q):
    call = jax.custom_vjp(causal)
    call.defvjp(lambda *args: (causal(*args), args), lambda args, ct: (2 * ct, ct, ct))
    return call(q, K, V)


def with_tangents_of_its_own(q):
    call = jax.custom_jvp(causal)
    call.defjvp(lambda primals, tangents: (causal(*primals), 2 * tangents[0]))
    return call(q, K, V)


def scanned(fun):
    return lambda q: jax.lax.scan(lambda q, _: (fun(q), None), q, None, length=2)[0]


def turned(q):
    return jax.lax.while_loop(lambda c: c[1] < 2, lambda c: (causal(c[0]), c[1] + 1), (q, 0))[0]


PROGRAMS = {
    "plain": causal,
    "scan": scanned(causal),
    "map": lambda q: jax.lax.map(causal, jnp.stack([q, q])),
    "cond": lambda q: jax.lax.cond(q[0, 0, 0, 0] > -99, causal, jnp.sin, q),
    "remat": jax.checkpoint(causal),
    "remat with an array": jax.checkpoint(biased),
    "remat in a scan": scanned(jax.checkpoint(causal)),
    "vmap": lambda q: jax.vmap(causal)(jnp.stack([q, q])),
    "shard_map": lambda q: jax.shard_map(causal, mesh=mesh(), in_specs=ROWS, out_specs=ROWS)(q),
    "shard_map with an array": lambda q: jax.shard_map(
        jax.jit(biased), mesh=mesh(), in_specs=ROWS, out_specs=ROWS
    )(q),
    "shard_map, unchecked": lambda q: jax.shard_map(
        causal, mesh=mesh(), in_specs=ROWS, out_specs=ROWS, check_vma=False
    )(q),
    "a jit with a sharding": lambda q: jax.jit(
        causal, out_shardings=NamedSharding(mesh(), PartitionSpec())
    )(q),
    "custom_vjp": of_its_own,
    "custom_jvp": with_tangents_of_its_own,
    "a while loop": lambda q: q * jnp.sum(jax.lax.stop_gradient(turned(q))),
}
PROGRAMS["shard_map"] = lambda q: jax.shard_map(
    lambda q, k, v: causal(q, k, v), mesh=mesh(), in_specs=ROWS, out_specs=ROWS
)(q, K, V)
PROGRAMS["shard_map, unchecked"] = lambda q: jax.shard_map(
    lambda q, k, v: causal(q, k, v), mesh=mesh(), in_specs=ROWS, out_specs=ROWS, check_vma=False
)(q, K, V)


def names(fun, *args):
    return [e.primitive.name for e in equations(jax.make_jaxpr(fun)(*args))]


@pytest.mark.parametrize("name", thorough_but(PROGRAMS, *range(0, len(PROGRAMS), 2)))
def test_the_kernel_runs_in_every_kind_of_program(name):
    fun = PROGRAMS[name]
    loss = lambda q: jnp.sum(jnp.sin(fun(q)))  # noqa: E731
    assert notes(fun, Q) == ["cudnn, a bias" if "array" in name else "cudnn, causal"]
    with on("h100", fused_kernels.cudnn):
        made = names(jax.grad(mpjax.autocast(loss, FUSED)), Q)
    assert any("dot_product_attention" in name for name in made)
    assert "exp" not in made and "dot_general" not in made


QUICK = "scan", "remat with an array", "shard_map with an array", "custom_vjp"


@pytest.mark.parametrize("name", thorough_but(PROGRAMS, *QUICK))
def test_every_kind_of_program_keeps_its_values(name):
    loss = lambda q: jnp.sum(jnp.sin(PROGRAMS[name](q)))  # noqa: E731
    with on("h100"):
        got = jax.jit(jax.value_and_grad(mpjax.autocast(loss, FUSED)))(Q)
    assert_near(got, jax.jit(jax.value_and_grad(loss))(Q), 0.02)  # a few roundings to 8 bits


def test_a_program_without_attention_stays_the_same():
    found = replaced(jax.checkpoint(lambda q: jnp.sin(q) @ q.mT), Q)
    assert not found.attention
    assert [e.primitive.name for e in found.jaxpr.eqns] == ["remat2"]


def test_the_kernel_is_in_the_scopes_of_its_matmul_and_planned():
    def fun(q):
        with jax.named_scope("layer"):
            scores = jnp.einsum("btnh,bsnh->bnts", q, K)
            with jax.named_scope("mpjax.row=7"):
                return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), V)

    jaxpr = replaced(fun, Q).jaxpr
    made = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    scopes = [_jax.scope_names(e.source_info.name_stack) for e in made]
    assert scopes and {s[:2] for s in scopes} == {("layer", "mpjax.row=7")}
    assert all("mpjax.autocast" in s for s in scopes)


def test_attention_that_is_to_be_float32_stays():
    def fun(q):
        scores = jnp.einsum("btnh,bsnh->bnts", q, K)
        with jax.named_scope("weights"):
            p = jax.nn.softmax(scores)
        with jax.named_scope("values"):
            return jnp.einsum("bnts,bsnh->btnh", p, V)

    def said(*overrides, **options):
        policy = mpjax.get_policy(FUSED).replace(
            overrides=[(name, "float32") for name in overrides], **options
        )
        return notes(fun, Q, policy=policy)

    assert said("values*") == ["xla: one of its matmuls does not compute in 16 bits"]
    assert said("values*", "weights*") == []
    assert said("weights*") == said(full_ops=("exp", "div")) == ["cudnn"]


@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, 0), (None, None, 0)])
def test_a_batch_that_a_kernel_refuses_runs_one_by_one(axes):
    def one(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) + BIAS  # cuDNN takes no batch of these
        return jnp.sum(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v) ** 2)

    args = [
        x if axis is None else jnp.stack([x, 2 * x])
        for x, axis in zip((Q, K, V), axes, strict=True)
    ]

    def total(planned):
        each = jax.vmap(lambda q, k, v: planned(q, k, v), axes)
        return lambda *args: jnp.sum(each(*args))

    with on("h100", fused_kernels.cudnn):
        made = names(jax.grad(total(mpjax.autocast(one, FUSED)), (0, 1, 2)), *args)
        per_example = jax.vmap(jax.grad(mpjax.autocast(one, FUSED), (0, 1, 2)), axes)
        also = names(per_example, *args)
    for each in (made, also):
        assert sum("dot_product_attention" in name for name in each) == 2 and "exp" not in each


def test_what_is_no_kernel_is_refused_a_batch_as_jax_does():
    primitive = jax.extend.core.Primitive("has_no_batches")
    primitive.def_abstract_eval(lambda x: x)
    with pytest.raises(NotImplementedError, match="has_no_batches"):
        jax.make_jaxpr(jax.vmap(mpjax.autocast(lambda q: primitive.bind(q) @ q.T, FUSED)))(Q[0])


# ---- what is kept -------------------------------------------------------------------------------


def kept(fun, *args):
    """Returns the arrays that the backward pass gets beside the arguments, as types."""
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(fun, *args)[1]))(*args)
    given = {id(v) for v in jaxpr.jaxpr.invars}
    return [v.aval for v in jaxpr.jaxpr.outvars if id(v) not in given]


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_fused_attention_keeps_no_weights(half):
    long = 64
    q, k, v = (jnp.tile(x, (1, long // T, 1, 1)) for x in (Q, K, V))

    def loss(q, k, v):
        scores = jnp.einsum("btnh,bsnh->bnts", jnp.sin(q), jnp.sin(k))
        return jnp.sum(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), jnp.sin(v)) ** 2)

    policy = f"mixed_{half},fused_attention=true"
    with on("h100", fused_kernels.cudnn):
        left = kept(mpjax.autocast(loss, policy), q, k, v)
    assert max(a.size for a in left) <= q.size < B * N * long * long
    # Queries, keys, values and the result in 16 bits, and a sum of exponentials a row.
    assert (
        sum(a.size * a.dtype.itemsize for a in left if a.ndim) <= 4 * 2 * q.size + 4 * B * N * long
    )
    assert {a.dtype.name for a in left if a.ndim == 4} == {half}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(chunked, "ROWS", 16)


@pytest.mark.parametrize("each", [False, True])
def test_a_loss_by_blocks_keeps_no_logits(each, small_blocks):
    def loss(h, w):
        logits = jnp.tanh(h) @ w
        picked = jnp.take_along_axis(logits, LABELS[..., None], -1)[..., 0]
        losses = jax.nn.logsumexp(logits, -1) - picked
        return jnp.sum(jnp.sin(losses)) if each else jnp.mean(losses)

    left = kept(mpjax.autocast(loss, CHUNKED), *HEAD)
    assert max(a.size for a in left) < LABELS.size * WORDS / 2
    got = jax.jit(jax.value_and_grad(mpjax.autocast(loss, CHUNKED), (0, 1)))(*HEAD)
    assert_near(got, jax.jit(jax.value_and_grad(loss, (0, 1)))(*HEAD), 0.05)


def test_the_gradients_of_a_loss_by_blocks_are_made_once(small_blocks):
    """The call of a rule inside of a rule, as of a loop, is never computed again."""

    def loss(h, w):
        return mpjax.linear_cross_entropy(jnp.tanh(h), w, LABELS)

    policy = "mixed_bfloat16"
    made = names(jax.grad(mpjax.autocast(loss, policy), (0, 1)), *HEAD)
    assert made.count("by_devices") == 1
