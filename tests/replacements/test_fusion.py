"""Attention written by hand as the fused kernel: what is matched, what is not, and its values.

The kernel itself runs on GPUs alone. Here, what stands in for it is given the same arrays.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attend import BIAS, FUSED, B, H, K, N, Q, T, V, in_place_of_cudnn, on
from flax import linen
from hypothesis import given
from hypothesis import strategies as st
from measure import run
from support import HALVES, equations, normal, thorough_but

import mpjax
from mpjax._src.replacements import fused_kernels

X = normal(3, B, T, N * H)
TABLE = normal(5, 32, N)
CAUSAL = np.tril(np.ones((T, T), bool))


def said(fun, *args, policy=FUSED, device="h100"):
    """Returns what `explain` says of the attentions of a function."""
    with on(device):
        lines = mpjax.explain(fun, policy)(*args).summary()
    return [line.removeprefix("attention: ") for line in lines if line.startswith("attention: ")]


TARGETS = {
    "h100": "cudnn, causal",
    "a100": "cudnn, causal",
    "v5e": "flash, causal",
    "v100": "xla: cuDNN's fused kernel needs compute capability 8.0",
    "cpu": "xla: a CPU has no fused kernel",
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("argnums", thorough_but([None, 0], 1))
def test_explain_names_the_kernel_of_a_device_that_is_not_there(target, argnums):
    def loss(x):
        return jnp.sum(jax.nn.dot_product_attention(x, x, x, is_causal=True))

    report = mpjax.explain(loss, FUSED, argnums, target=target)(jnp.ones((1, 128, 2, 32)))
    assert "attention: " + TARGETS[target] in report.summary()
    assert any(row.attention == TARGETS[target] for row in report.rows)


def test_explain_refuses_unknown_target_names():
    with pytest.raises(ValueError, match="Unknown target='h10'. Did you mean 'h100'"):
        mpjax.explain(jnp.sum, target="h10")
    with pytest.raises(TypeError, match="target=100 must be the name of a device"):
        mpjax.explain(jnp.sum, target=100)


def assert_alike(fun, x, tolerance):
    """Holds result and gradient of a function against float32's."""

    def loss(x):
        out = fun(x)
        return jnp.sum(jnp.sin(out)), out

    flat = lambda tree: np.concatenate([x.ravel() for x in jax.tree.leaves(tree)])  # noqa: E731
    true, result = run(jax.grad(loss, has_aux=True), x)
    with on("h100"):
        ours = run(jax.grad(mpjax.autocast(loss, FUSED), has_aux=True), x)
    for got, wanted in zip(ours, (true, result), strict=True):
        assert np.linalg.norm(flat(got) - flat(wanted)) <= tolerance * np.linalg.norm(flat(wanted))


def attend(q, k, v, change=lambda scores: scores, weights=lambda p: p):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    return jnp.einsum("bnts,bsnh->btnh", weights(jax.nn.softmax(change(scores))), v)


# ---- spellings ----------------------------------------------------------------------------------


def nanogpt(q):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, K, V))
    scores = (q @ k.swapaxes(-2, -1)) * (1.0 / np.sqrt(H))
    scores = jnp.where(jnp.tril(jnp.ones((T, T))) == 0, -jnp.inf, scores)
    return (jax.nn.softmax(scores, axis=-1) @ v).transpose(0, 2, 1, 3)


def padded(q):
    valid = jnp.asarray([[1] * T, [1] * (T - 5) + [0] * 5])
    mask = linen.combine_masks(
        linen.make_causal_mask(jnp.ones((B, T))),
        linen.make_attention_mask(jnp.ones((B, T)), valid),
    )
    return linen.dot_product_attention(q, K, V, mask=mask)


def alibi(q):
    place = jnp.arange(T)
    slopes = (2.0 ** -jnp.arange(N))[:, None, None]
    far = -slopes * jnp.abs(place[:, None] - place)
    ahead = jnp.where(place[:, None] >= place, 0.0, -1e9)
    return attend(q, K, V, lambda scores: scores + far + ahead)


def relative(table):
    place = jnp.arange(T)
    bias = table[jnp.clip(place[:, None] - place + 16, 0, 31)].transpose(2, 0, 1)
    return attend(Q, K, V, lambda scores: scores + bias)


def shared_keys(q):
    scores = jnp.einsum("btnh,bsh->bnts", q, K[:, :, 0]) / 3
    return jnp.einsum("bnts,bsh->btnh", jax.nn.softmax(scores), V[:, :, 0])


def repeated_keys(q):
    k, v = (jnp.repeat(x[:, :, :2], 2, axis=2) for x in (K, V))
    return attend(q, k, v)


def window(q):
    place = jnp.arange(T)
    near = (place[:, None] >= place) & (place[:, None] - place < 5)
    return attend(q, K, V, lambda scores: jnp.where(near, scores, -1e10))


def biased(q):
    valid = (q[:, :, 0, 0] > -1)[:, None, None]
    mask = jnp.logical_and(CAUSAL, valid).astype(jnp.int32)
    return attend(q, K, V, lambda scores: scores + jnp.where(mask > 0, 0.0, -3e38))


def positions_first(q):
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (q, K, V))
    weights = jax.nn.softmax(jnp.einsum("tbnh,sbnh->tsbn", q, k) / 3, axis=1)
    return jnp.einsum("tsbn,sbnh->tbnh", weights, v)


def by_exponentials(q):
    scores = jnp.einsum("btnh,bsnh->bnts", q, K)
    e = jnp.exp2(scores - scores.max(-1, keepdims=True))
    return jnp.einsum("bnts,bsnh->btnh", e * (1 / e.sum(-1, keepdims=True)), V)


def of_images(x):
    scores = jnp.einsum("bijc,bklc->bijkl", x, x)
    weights = jax.nn.softmax(scores.reshape(*scores.shape[:3], -1)).reshape(scores.shape)
    return jnp.einsum("bijkl,bklc->bijc", weights, x)


def unbatched(q):
    one = lambda q, k, v: jax.nn.softmax(q @ k.T / 2) @ v  # noqa: E731
    return jax.vmap(one)(q[:, :, 0], K[:, :, 0], V[:, :, 0])


def scanned(q):
    return jax.lax.scan(lambda q, _: (nanogpt(q), None), q, None, length=2)[0]


SPELLINGS = {
    "nanogpt": (nanogpt, Q, "cudnn, causal"),
    "jax.nn": (lambda q: jax.nn.dot_product_attention(q, K, V), Q, "cudnn"),
    "jax.nn, causal": (
        lambda q: jax.nn.dot_product_attention(q, K, V, is_causal=True),
        *(Q, "cudnn, causal"),
    ),
    "grouped": (
        lambda q: jax.nn.dot_product_attention(q, K[:, :, :2], V[:, :, :2], is_causal=True),
        *(Q, "cudnn, causal"),
    ),
    "repeated keys": (repeated_keys, Q, "cudnn"),
    "one head of keys": (shared_keys, Q, "cudnn"),
    "bias": (lambda b: jax.nn.dot_product_attention(Q, K, V, bias=b[None]), BIAS, "cudnn, a bias"),
    "relative positions": (relative, TABLE, "cudnn, a bias"),
    "alibi": (alibi, Q, "cudnn, causal, a bias"),
    "padding": (padded, Q, "cudnn, causal, a mask"),
    "window": (window, Q, "cudnn, causal, a window"),
    "a constant mask": (
        lambda q: attend(q, K, V, lambda scores: jnp.where(CAUSAL, scores, -1e30)),
        *(Q, "cudnn, causal"),
    ),
    "not masked": (
        lambda q: attend(q, K, V, lambda s: jnp.where(~(CAUSAL & jnp.ones_like(CAUSAL)), -1e9, s)),
        *(Q, "cudnn, causal"),
    ),
    "a bias of a mask": (biased, Q, "cudnn, causal, a mask"),
    "shifted": (lambda q: attend(q, K, V, lambda s: -(1 - s) + s[..., :1, :1]), Q, "cudnn"),
    "positions first": (positions_first, Q, "cudnn"),
    "exponentials": (by_exponentials, Q, "cudnn"),
    "images": (of_images, normal(6, 2, 4, 4, 8), "cudnn"),
    "under vmap": (unbatched, Q, "cudnn"),
    "other lengths": (lambda q: attend(q[:, :6], K, V), Q, "cudnn"),
    "scan": (scanned, Q, "cudnn, causal"),
    "remat": (jax.checkpoint(nanogpt), Q, "cudnn, causal"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_in_each_spelling_is_fused(name):
    fun, x, expected = SPELLINGS[name]
    assert said(fun, x) == [expected]


VALUES = ["grouped", "relative positions", "padding", "positions first", "exponentials", "scan"]


@pytest.mark.parametrize("name", thorough_but(SPELLINGS, *VALUES))
def test_fused_attention_in_each_spelling_has_its_values(name):
    fun, x, _ = SPELLINGS[name]
    assert_alike(fun, x, 0.015)


# ---- what must stay -----------------------------------------------------------------------------


def returned(q):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, K))
    return jnp.einsum("bnts,bsnh->btnh", weights, V), weights


def forced(q):
    with mpjax.precision("float32"):
        return attend(q, K, V)


def masked_within(q):
    scores = jnp.einsum("btnh,bsnh->bnts", q, K)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, where=CAUSAL), V)


def guarded(q):
    e = jnp.exp(jnp.einsum("btnh,bsnh->bnts", q, K))
    return jnp.einsum("bnts,bsnh->btnh", e / (e.sum(-1, keepdims=True) + 1.0), V)


def sharded(q):
    spec = jax.sharding.PartitionSpec(None, "rows")
    q = jax.lax.with_sharding_constraint(q, spec) * 2
    return attend(jnp.einsum("btnh,hg->btng", q, jnp.ones((H, H))), K, V)


NEAR_MISSES = {
    "a mask of -1": (
        lambda q: attend(q, K, V, lambda s: jnp.where(CAUSAL, s, -1.0)),
        "-1 instead of a score does not mask it",
    ),
    "a division by zero": (
        lambda q: attend(q, K, V, lambda s: jnp.where(CAUSAL, s / 0.0, 0.0)),
        "0 instead of a score does not mask it",
    ),
    "scores over zero": (
        lambda q: attend(q, K, V, lambda s: s / 0.0 + BIAS),
        "div is applied to its scores",
    ),
    "a mask of +Inf": (
        lambda q: attend(q, K, V, lambda s: -jnp.where(CAUSAL, s, -1e9)),
        "-1e+09 instead of a score does not mask it",
    ),
    "another order of them": (
        lambda q: attend(q, K, V, lambda s: s[..., ::-1]),
        "rev is applied to its scores",
    ),
    "a mask of no number": (
        lambda q: attend(q, K, V, lambda s: jnp.where(CAUSAL, s, BIAS)),
        "select_n is applied to its scores",
    ),
    "a scale after it": (
        lambda q: attend(q, K, V, weights=lambda p: 2.0 * p),
        "mul is applied to its weights, as in dropout or scaling",
    ),
    "a mask after it": (
        lambda q: attend(q, K, V, weights=lambda p: jnp.where(CAUSAL, p, 0.0)),
        "select_n is applied to its weights, as in dropout or scaling",
    ),
    "returned": (returned, "its weights are also read elsewhere"),
    "soft caps": (
        lambda q: attend(q, K, V, lambda s: 5 * jnp.tanh(s / 5)),
        "tanh is applied to its scores",
    ),
    "a product of scores": (
        lambda q: attend(q, K, V, lambda s: s * BIAS),
        "mul is applied to its scores",
    ),
    "over queries": (
        lambda q: jnp.einsum(
            "bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, K), axis=2), V
        ),
        "the matmul that reads it does not sum over keys",
    ),
    "over heads": (
        lambda q: jnp.einsum(
            "bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, K), axis=1), V
        ),
        "its softmax is not over keys",
    ),
    "values without a batch": (
        lambda q: jnp.einsum(
            "bnts,snh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, K)), V[0]
        ),
        "values and keys are shared across different axes",
    ),
    "masked within": (masked_within, "the mask is inside the softmax, whose rows may be empty"),
    "guarded": (guarded, "its rows do not sum to one"),
    "no scores": (
        lambda q: jnp.einsum(
            "bnts,bsnh->btnh", jax.nn.softmax(jnp.swapaxes(q, 1, 2)[..., :1] + BIAS), V
        ),
        "slice is applied to its scores",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss_of_attention_is_not_fused(name):
    fun, why = NEAR_MISSES[name]
    assert said(fun, Q) == [f"xla: {why}"]


@pytest.mark.parametrize("name", thorough_but(NEAR_MISSES, "a mask of -1", "returned", "guarded"))
def test_near_miss_of_attention_keeps_its_values(name):
    fun, _ = NEAR_MISSES[name]
    loss = lambda q: jax.tree.reduce(jnp.add, jax.tree.map(jnp.sum, fun(q)))  # noqa: E731
    with on("h100"):
        ours = run(jax.grad(mpjax.autocast(loss, FUSED)), Q)
    plain = run(jax.grad(mpjax.autocast(loss, "mixed_bfloat16")), Q)
    assert np.array_equal(ours, plain, equal_nan=True)


def test_attention_in_a_float32_region_is_not_fused_and_needs_no_reason():
    assert said(forced, Q) == []


def test_attention_over_a_sharded_sequence_is_not_fused_and_says_why():
    with jax.set_mesh(jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert said(sharded, Q) == [
            "xla: its sequence is sharded, and a fused kernel needs whole sequences"
        ]


DEVICES = {
    "cpu": "a CPU has no fused kernel",
    "v100": "cuDNN's fused kernel needs compute capability 8.0",
    "v5e": "flash attention needs lengths that are multiples of 128, not (16, 16)",
}


@pytest.mark.parametrize("device", DEVICES)
def test_attention_is_not_fused_where_the_device_has_no_kernel(device):
    assert said(nanogpt, Q, device=device) == [f"xla: {DEVICES[device]}"]


def test_fused_attention_is_off_by_default():
    assert said(nanogpt, Q, policy="mixed_bfloat16") == []
    policy = mpjax.get_policy("mixed_bfloat16")
    assert policy.replace(fused_attention=True) == mpjax.get_policy(FUSED)
    with pytest.raises(ValueError, match="fused_attention='yes' must be True or False"):
        policy.replace(fused_attention="yes")


# ---- any layout ---------------------------------------------------------------------------------


def of_any_layout(data):
    """Returns an attention, its arguments, and what is said of it.

    Axes are in any order, in all of queries, keys, values, scores and results.
    """
    sizes = {"b": 2, "n": 2, "t": 4, "s": 6, "h": 4, "v": 4}
    order = lambda axes: "".join(data.draw(st.permutations(axes)))  # noqa: E731
    q, k, v, p, out = (order(axes) for axes in ("btnh", "bsnh", "bsnv", "bnts", "btnv"))
    arrays = [normal(i, *(sizes[a] for a in axes)) for i, axes in enumerate((q, k, v))]
    bias_axes = [a for a in p if data.draw(st.booleans())]
    bias = normal(7, *(sizes[a] if a in bias_axes else 1 for a in p))
    causal = data.draw(st.booleans())
    rows, columns = (jnp.arange(sizes[a]).reshape([-1 if a == c else 1 for c in p]) for a in "ts")

    def fun(q_, k_, v_):
        scores = jnp.einsum(f"{q},{k}->{p}", q_, k_) * 0.5 + bias
        scores = jnp.where(columns <= rows, scores, -1e9) if causal else scores
        return jnp.einsum(f"{p},{v}->{out}", jax.nn.softmax(scores, p.index("s")), v_)

    expected = ["cudnn", "causal"] if causal else ["cudnn"]
    expected += ["a bias"] if "s" in bias_axes else []  # else it is a shift
    return fun, arrays, ", ".join(expected)


@pytest.mark.thorough
@given(st.data())
def test_attention_of_any_layout_is_fused(data):
    fun, arrays, expected = of_any_layout(data)
    assert said(fun, *arrays) == [expected]


@pytest.mark.thorough
@given(st.data())
def test_fused_attention_of_any_layout_has_its_values(data):
    fun, arrays, _ = of_any_layout(data)
    loss = lambda *xs: jnp.sum(jnp.sin(fun(*xs)))  # noqa: E731
    with on("h100"):
        ours = run(jax.grad(mpjax.autocast(loss, FUSED), (0, 1, 2)), *arrays)
    for ours_of, true in zip(ours, run(jax.grad(loss, (0, 1, 2)), *arrays), strict=True):
        assert np.linalg.norm(ours_of - true) <= 0.02 * np.linalg.norm(true) + 1e-3


# ---- with everything else -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("storage", "half"),
    thorough_but([(storage, half) for half in HALVES for storage in ("fast", "lean")], 0, 3),
)
def test_fused_attention_makes_no_scores_and_runs_cudnns_backward(half, storage):
    policy = f"mixed_{half},storage={storage},fused_attention=true"
    long = [normal(i, 2, 256, 4, 64) for i in range(3)]

    def loss(q, k, v):
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        scores = jnp.where(jnp.tril(jnp.ones((256, 256))) > 0, q @ k.swapaxes(2, 3) / 8, -1e9)
        return jnp.sum(jnp.sin(jax.nn.softmax(scores) @ v))

    for fun in (loss, jax.vmap(loss), lambda *a: jax.lax.map(lambda xs: loss(*xs), a)):
        args = long if fun is loss else [jnp.stack([x, x]) for x in long]
        with on("h100", fused_kernels.cudnn):
            total = lambda *a: jnp.sum(mpjax.autocast(fun, policy)(*a))  # noqa: B023, E731
            jaxpr = jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(*args)
        made = [*equations(jaxpr)]
        kernels = [e for e in made if "dot_product_attention" in e.primitive.name]
        assert len(kernels) == 2  # forward and backward
        assert {v.aval.dtype.name for e in kernels for v in e.invars[:3]} == {half}
        sizes = [v.aval.size for e in made for v in e.outvars]
        assert max(sizes) < 4 * args[0].size  # no scores


def test_attention_that_a_kernel_refuses_under_vmap_runs_unfused():
    def kernel(*args, options):
        if isinstance(args[0], jax.core.Tracer) and calls:
            raise NotImplementedError("batched")
        calls.append(1)
        return in_place_of_cudnn(*args, options=options)

    calls: list[int] = []
    with on("h100", kernel):
        ours = mpjax.autocast(lambda q: nanogpt(q), FUSED)(Q)
    assert calls and np.linalg.norm(ours - nanogpt(Q)) <= 0.02 * np.linalg.norm(nanogpt(Q))


def test_alike_layers_are_still_rewritten_once():
    def loss(w, q):
        for i in range(8):
            with jax.named_scope(f"layer_{i}"):
                q = q + attend(jnp.tanh(q @ w[i]) * 2 + 1, q, q)
        return jnp.sum(q)

    calls = []

    def kernel(*args, options):
        calls.append(1)
        return in_place_of_cudnn(*args, options=options)

    weights = [jnp.eye(H)] * 8
    with on("h100", kernel):
        planned = len(calls)
        jax.make_jaxpr(mpjax.autocast(loss, FUSED))(weights, Q)
    assert said(loss, weights, Q) == ["cudnn"]
    assert len(calls) - planned <= 8 + 4  # looked at in each layer, and run in few


def test_explain_names_the_kernel_in_every_row_that_it_takes_the_place_of():
    with on("h100"):
        report = mpjax.explain(lambda q: jnp.sum(nanogpt(q)), FUSED, argnums=0)(Q)
    inside = [row for row in report.rows if "the fused attention of cudnn" in row.storage]
    assert {"dot_general", "exp", "select_n"} <= {row.primitive for row in inside}
    assert [row.attention for row in report.rows if row.attention] == ["cudnn, causal"]
