"""linear_cross_entropy: the values and gradients of optax's loss, without its logits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent import compiles, shape, spread
from jax import export
from jax.experimental import jet
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import HALVES, assert_near, equations, fresh_rng, matmul_dtypes, thorough_but

import mpjax
from mpjax._src.replacements.chunked import Form
from mpjax._src.replacements.cross_entropy import rows_are_cheaper

WORDS, WIDTH = 300, 16
ours = mpjax.linear_cross_entropy


def arrays(*lead, dtype=np.float32, transposed=False):
    """Returns fresh hidden values, a weight, a bias and labels."""
    rng = fresh_rng()
    shape = (WORDS, WIDTH) if transposed else (WIDTH, WORDS)
    floats = (rng.normal(size=s).astype(dtype) for s in ((*lead, WIDTH), shape, (WORDS,)))
    return (*floats, rng.integers(0, WORDS, lead))


def optax_s(
    hidden, weight, labels, *, bias=0.0, transposed=False, reduction="mean", where=None, **options
):
    """The same loss by optax, of logits that are written out."""
    logits = hidden @ (weight.T if transposed else weight) + bias
    if smoothing := options.get("label_smoothing"):
        labels = optax.smooth_labels(jax.nn.one_hot(labels, WORDS, dtype=logits.dtype), smoothing)
        each = optax.softmax_cross_entropy(logits, labels)
    else:
        each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    each += options.get("z_loss", 0) * jax.nn.logsumexp(logits, -1) ** 2
    if where is None:
        return {"mean": jnp.mean, "sum": jnp.sum, None: jnp.asarray}[reduction](each)
    each = jnp.where(where != 0, each * where, 0)
    total = jnp.sum(each) / (jnp.sum(where) if reduction == "mean" else 1)
    return each if reduction is None else total


# One row in a block: by parts of the vocabulary.
CASES = {
    "mean": {"chunk": 8},
    "mean of an embedding": {"chunk": 8, "transposed": True, "label_smoothing": 0.1},
    "mean of rows": {"chunk": 1, "z_loss": 0.01},
    "sum of one block": {"reduction": "sum", "z_loss": 0.01},
    "each": {"reduction": None, "chunk": 8, "label_smoothing": 0.1},
    "each of an embedding": {"reduction": None, "chunk": 5, "transposed": True, "z_loss": 0.01},
}
WHERE = {"all": lambda x: None, "some": lambda x: x < 0.7, "weights": lambda x: 1000 * x}
PAIRS = [(case, where) for case in CASES for where in WHERE]


@pytest.mark.parametrize(("case", "where"), thorough_but(PAIRS, 4, 12))
def test_values_and_gradients_are_those_of_optax_in_float64(case, where):
    options = dict(CASES[case])
    with jax.enable_x64(True):
        hidden, weight, bias, labels = arrays(
            *(3, 13), dtype=np.float64, transposed=options.get("transposed", False)
        )
        options["where"] = WHERE[where](fresh_rng(1).random((3, 13)))
        cts = fresh_rng(2).normal(size=(3, 13))

        def of(fun, hidden, weight, bias, **more):
            loss = fun(hidden, weight, labels, bias=bias, **options, **more)
            return jnp.sum(loss * cts) if loss.ndim else loss

        chunk = {"chunk": options.pop("chunk", None)}
        both = jax.jit(
            lambda *args: [
                jax.value_and_grad(functools.partial(of, fun, **more), (0, 1, 2))(*args)
                for fun, more in ((ours, chunk), (optax_s, {}))
            ]
        )
        got, want = both(hidden, weight, bias)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == np.float64 and np.linalg.norm(g - w) <= 1e-12 * np.linalg.norm(w)


# ---- under autocast ------------------------------------------------------------------------------


def gradients(fun, *args):
    return jax.jit(jax.value_and_grad(fun, (0, 1, 2)))(*args)


@pytest.mark.thorough
@pytest.mark.parametrize(("reduction", "chunk"), [("mean", 8), ("mean", 1), (None, 8)])
def test_the_weights_of_losses_alone_have_gradients(reduction, chunk):
    hidden, weight, _, labels = arrays(2, 8)

    def loss(where, fun):
        return jnp.sum(fun(hidden, weight, labels, where=where, reduction=reduction) ** 2)

    where = jnp.linspace(0.5, 2.0, 16).reshape(2, 8)
    blocks = functools.partial(ours, chunk=chunk)
    assert_near(jax.grad(loss)(where, blocks), jax.grad(loss)(where, optax_s), 1e-4)


@pytest.mark.parametrize(
    ("half", "reduction"),
    thorough_but([(half, r) for half in HALVES for r in ("mean", None)], 0, 3),
)
def test_under_autocast_matmuls_are_16_bit_and_no_logits_exist(half, reduction):
    *floats, labels = arrays(4, 64)

    def loss(hidden, weight, bias):
        each = ours(hidden, weight, labels, bias=bias, reduction=reduction, chunk=32)
        return jnp.mean(each)

    planned = mpjax.autocast(loss, f"mixed_{half}")
    jaxpr = jax.make_jaxpr(jax.grad(planned, (0, 1, 2)))(*floats)
    sizes = {v.aval.size for e in equations(jaxpr) for v in e.outvars}
    assert max(sizes) < 256 * WORDS / 2
    assert set(matmul_dtypes(jax.grad(planned), *floats)) == {(half, half)}
    want = gradients(lambda *a: optax_s(a[0], a[1], labels, bias=a[2]), *floats)
    assert_near(gradients(planned, *floats), want, 0.01)
    told = "rows" if reduction else "the vocabulary"
    lines = mpjax.explain(loss, f"mixed_{half}")(*floats).summary()
    assert f"loss: in 8 blocks of {told}" in lines


@pytest.mark.thorough
def test_in_a_float32_region_and_policy_nothing_is_rounded():
    *floats, labels = arrays(4, 8)

    @mpjax.precision("float32")
    def loss(hidden, weight, bias):
        return ours(hidden, weight, labels, bias=bias, chunk=8)

    want = gradients(lambda *a: optax_s(a[0], a[1], labels, bias=a[2]), *floats)
    for policy in ("mixed_bfloat16", "float32"):
        assert_near(gradients(mpjax.autocast(loss, policy), *floats), want, 1e-5)


def test_a_16_bit_weight_or_hidden_outside_of_autocast_decides_for_itself():
    hidden, weight, _, labels = arrays(4, 8)
    gradient = jax.value_and_grad(ours, (0, 1))
    loss, (dx, dw) = jax.eval_shape(gradient, jnp.bfloat16(hidden), weight, labels)
    assert (loss.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    assert set(matmul_dtypes(ours, jnp.bfloat16(hidden), weight, labels)) == {("bfloat16",) * 2}
    assert set(matmul_dtypes(ours, hidden, jnp.bfloat16(weight), labels)) == {("float32",) * 2}


@pytest.mark.parametrize("where", thorough_but([None, 1e-6], 1))
def test_float16_gradients_do_not_underflow_and_too_high_a_scale_shows(where):
    hidden, weight, _, labels = arrays(8192)
    hidden, labels = 1 + hidden / 10, labels * 0  # of the other words, the gradients are small
    weights = None if where is None else np.full(labels.shape, where, np.float32)

    def slope(fun, scale=1.0, **options):
        planned = mpjax.autocast(lambda w: fun(hidden, w, labels, **options), "mixed_float16")
        return jax.jit(lambda w: jax.grad(lambda w: planned(w) * scale)(w)[:, 1:])(weight)

    want = jax.jit(jax.grad(lambda w: optax_s(hidden, w, labels)))(weight)[:, 1:]
    got, plain = (
        np.linalg.norm(x - want) / np.linalg.norm(want)
        for x in (slope(ours, 2**-8, where=weights) * 2**8, slope(optax_s, 2**-8) * 2**8)
    )
    assert got < 2e-3 < plain
    assert not np.isfinite(slope(ours, scale=3e38, where=weights) * 1e6).all()


@pytest.mark.parametrize("storage", ["fast", "lean"])
def test_a_checkpoint_keeps_no_matmul_of_a_block(storage):
    hidden, weight, _, labels = arrays(4, 64)

    def loss(hidden, weight):
        return ours(jax.nn.gelu(hidden), weight, labels, chunk=32)

    planned = mpjax.autocast(loss, f"mixed_bfloat16,storage={storage}")
    saveable = jax.checkpoint(planned, policy=jax.checkpoint_policies.dots_saveable)
    for fun in (planned, saveable):
        sizes = {
            v.aval.size
            for e in equations(jax.make_jaxpr(jax.grad(fun, (0, 1)))(hidden, weight))
            for v in e.outvars
        }
        assert max(sizes) < 256 * WORDS / 2


# ---- labels --------------------------------------------------------------------------------------


def test_labels_outside_of_the_vocabulary_are_as_in_optax():
    hidden, weight, _, labels = arrays(9)
    labels[:3] = -1, WORDS, -WORDS - 1

    def gradient(fun, **options):
        def loss(weight):
            each = fun(hidden, weight, labels, **options)
            return jnp.nansum(each), each

        return jax.jit(jax.grad(loss, has_aux=True))(weight)

    (slope, each), (wanted, want) = (gradient(f, reduction=None) for f in (ours, optax_s))
    assert np.isnan(each[1:3]).all() and np.allclose(each, want, rtol=1e-5, equal_nan=True)
    assert_near(slope, wanted, 1e-5)
    assert np.isnan(gradient(ours, reduction="sum")[1])


@pytest.mark.parametrize("chunk", thorough_but([1, 4], 1))
def test_ignored_labels_do_not_matter(chunk):
    hidden, weight, _, labels = arrays(9)
    labels[:3] = -100_000
    where = labels >= 0
    options = {"where": where, "chunk": chunk}
    got = jax.jit(jax.value_and_grad(functools.partial(ours, **options), (0, 1)))(
        hidden, weight, labels
    )
    want = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden[3:], weight, labels[3:])
    assert_near(got[1][0][3:], want[1][0], 1e-5)
    assert_near((got[0], got[1][1]), (want[0], want[1][1]), 1e-5)
    assert not got[1][0][:3].any()
    assert np.isnan(jax.jit(ours)(hidden, weight, labels, where=np.zeros(9, bool)))


@pytest.mark.parametrize("dtype", thorough_but([np.uint8, np.int16, np.uint32], 0))
def test_labels_of_any_integer_dtype(dtype):
    hidden, weight, _, labels = arrays(5)
    labels %= 250
    want = jax.jit(ours)(hidden, weight, labels)
    assert np.array_equal(jax.jit(ours)(hidden, weight, labels.astype(dtype)), want)


# ---- transformations -----------------------------------------------------------------------------


BLOCKS = [{"chunk": 8}, {"chunk": 1}, {"reduction": None, "chunk": 4}]


@pytest.mark.parametrize("options", thorough_but(BLOCKS, 0))
def test_forward_mode_and_second_derivatives(options):
    with jax.enable_x64(True):
        hidden, weight, bias, labels = arrays(11, dtype=np.float64)
        rng = fresh_rng(1)
        moves = [rng.normal(size=x.shape) for x in (hidden, weight, bias)]

        def second(fun, **options):
            def loss(hidden, weight, bias):
                each = fun(hidden, weight, labels, bias=bias, **options)
                return jnp.sum(jnp.sin(each))

            def slope(*args):
                return jax.jvp(loss, args, tuple(moves))[1]

            return lambda *args: (slope(*args), jax.grad(slope, (0, 1, 2))(*args))

        plain = {k: x for k, x in options.items() if k != "chunk"}
        got, want = jax.jit(
            lambda *args: (second(ours, **options)(*args), second(optax_s, **plain)(*args))
        )(hidden, weight, bias)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(g - w) <= 1e-10 * np.linalg.norm(w)


@pytest.mark.parametrize("reduction", thorough_but(["mean", None], 0))
def test_vmap_and_scan_give_the_losses_and_gradients_of_each(reduction):
    hidden, weight, _, labels = arrays(3, 7)

    def gradient(hidden, labels, fun=ours, **chunk):
        loss = lambda w: jnp.sum(fun(hidden, w, labels, reduction=reduction, **chunk))  # noqa: E731
        return jax.value_and_grad(loss)(weight)

    blocks = functools.partial(gradient, chunk=2)

    @jax.jit
    def both(hidden, labels):
        wanted = jax.lax.map(lambda xs: gradient(*xs, optax_s), (hidden, labels))
        scanned = jax.lax.map(lambda xs: jax.checkpoint(blocks)(*xs), (hidden, labels))
        return jax.vmap(blocks)(hidden, labels), scanned, wanted

    *got, want = both(hidden, labels)
    for g in got:
        assert_near(g, want, 1e-5)


def test_micro_batches_of_a_training_step_add_up():
    hidden, weight, _, labels = arrays(8, 4)
    loss = lambda params, batch: ours(batch[0], params, batch[1])  # noqa: E731
    losses = []
    for count in (1, 4):
        init, step = mpjax.build_train_step(
            loss, optax.sgd(1.0), "mixed_float16", accumulate_steps=count
        )
        state, metrics = jax.jit(step)(init(jnp.asarray(weight)), (hidden, labels))
        losses.append((metrics["loss"], state.params))
    assert_near(losses[0], losses[1], 2e-3)


def test_taylor_mode_is_refused_by_name():
    hidden, weight, _, labels = arrays(5)
    with pytest.raises(NotImplementedError, match="no Taylor mode.*jax.lax.scan"):
        jet.jet(lambda w: ours(hidden, w, labels), (weight,), ((weight,),))


def test_rows_of_a_symbolic_number_are_one_block():
    hidden, weight, _, labels = arrays(4, 8)
    shapes = export.symbolic_args_specs((hidden, labels.astype(np.int32)), "b, ...")
    fun = jax.jit(lambda hidden, labels: ours(hidden, weight, labels, chunk=2))
    exported = export.export(fun)(*shapes)
    got = exported.call(hidden, labels.astype(np.int32))
    assert np.allclose(got, optax_s(hidden, weight, labels), rtol=1e-5)


# ---- several devices -----------------------------------------------------------------------------


SPREAD = [*itertools.product(("Auto", "Explicit"), ("mean", None), ("rows", "words"))]


@pytest.mark.parametrize(("kind", "reduction", "where"), thorough_but(SPREAD, 0, 7))
def test_sharded_arrays_give_the_same(kind, reduction, where):
    hidden, weight, _, labels = arrays(8, 16)
    weight = weight[:, :296]
    labels %= 296
    mesh = Mesh(np.array(jax.devices()[:8]), ("i",), axis_types=(AxisType[kind],))
    specs = (P("i"), P(), P("i")) if where == "rows" else (P(), P(None, "i"), P())

    def gradient(hidden, weight, labels, chunk=32):
        loss = lambda *a: jnp.sum(ours(*a, labels, reduction=reduction, chunk=chunk))  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))(hidden, weight)

    want = jax.jit(functools.partial(gradient, chunk=None))(hidden, weight, labels)
    with jax.set_mesh(mesh):
        given = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip((hidden, weight, labels), specs, strict=True)
        ]
        got = jax.jit(gradient)(*given)
    assert_near(got, want, 1e-5)


@pytest.mark.parametrize("reduction", thorough_but(["mean", None], 0))
def test_in_shard_map_each_device_has_its_rows(reduction):
    hidden, weight, _, labels = arrays(8, 16)
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))

    def local(hidden, weight, labels):
        loss = jnp.mean(ours(hidden, weight, labels, reduction=reduction, chunk=4))
        return jax.lax.pmean(loss, "i")

    def gradient(fun):
        return jax.jit(jax.value_and_grad(fun, (0, 1)))(hidden, weight, labels)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("i"), P(), P("i")), out_specs=P())
    assert_near(gradient(mapped), gradient(optax_s), 1e-5)


ABSTRACT = AbstractMesh((8,), ("i",), axis_types=(AxisType.Auto,))
# What is sharded along what, and what of 16 MiB (a 16-bit weight) a device may send.
PLACED = {
    "rows": (P("i"), P(), 4.1),  # the float32 gradient, summed
    "words": (P(), P(None, "i"), 4.1),  # the gradient of the rows
    "features of the weight": (P("i"), P("i"), 4.1),  # fully sharded
}


@pytest.mark.thorough
@compiles("h100")
@pytest.mark.parametrize("name", PLACED)
def test_eight_gpus_exchange_gradients_and_sums_of_rows_but_no_logits(name):
    rows, weights, times = PLACED[name]
    width, words = 512, 16384
    hidden = spread(ABSTRACT, rows, 8, 1024, width)
    weight = spread(ABSTRACT, weights, width, words)
    labels = spread(ABSTRACT, rows, 8, 1024, dtype=jnp.int32)
    planned = mpjax.autocast(lambda h, w, y: ours(h, w, y), "mixed_bfloat16")
    step = jax.jit(jax.grad(planned, (0, 1)), out_shardings=(hidden.sharding, weight.sharding))
    report = mpjax.compile_for("h100 x 8", step, hidden, weight, labels)
    assert report.wire_bytes < times * 2 * width * words
    assert report.temp_bytes < 8 * 1024 * words * 4 / 4


# ---- which form, and what is refused -------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "words", "blocks", "by_rows"),
    [(8192, 50257, 8, True), (8192, 50257, 16, False), (8192, 32000, 8, True), (64, 512, 1, True)],
)
def test_many_blocks_are_parts_of_the_vocabulary(rows, words, blocks, by_rows):
    assert rows_are_cheaper(rows, Form(words, blocks=blocks)) == by_rows


def test_a_hidden_vector_has_one_loss():
    hidden, weight, _, labels = arrays()
    for reduction in ("mean", None):
        got = jax.jit(functools.partial(ours, reduction=reduction))(hidden, weight, labels)
        assert got.shape == () and np.allclose(got, optax_s(hidden, weight, labels), rtol=1e-5)


X, W, Y = shape(4, 8), shape(8, 32), shape(4, dtype=jnp.int32)
WRONG = {
    r"Unknown reduction 'avg'. .*'mean', 'sum'": ({"reduction": "avg"}, ValueError),
    r"weight has shape \(32, 8\).*\[8, vocabulary\].*transposed=True": (
        {"weight": shape(32, 8)},
        ValueError,
    ),
    r"labels has shape \(5,\).*\(4,\)": ({"labels": shape(5, dtype=jnp.int32)}, ValueError),
    r"labels is float32.*integers": ({"labels": shape(4)}, TypeError),
    r"hidden is int32": ({"hidden": shape(4, 8, dtype=jnp.int32)}, TypeError),
    r"hidden is a scalar": ({"hidden": shape()}, ValueError),
    r"bias has shape \(8,\).*\(32,\)": ({"bias": shape(8)}, ValueError),
    r"where has shape \(3,\).*\(4,\)": ({"where": shape(3)}, ValueError),
    r"z_loss=-1 must be a number of at least 0\.": ({"z_loss": -1}, ValueError),
    r"label_smoothing=1.0 .* below 1": ({"label_smoothing": 1.0}, ValueError),
    r"weight='w' must be an array": ({"weight": "w"}, TypeError),
    r"labels=None must be an array of integers": ({"labels": None}, TypeError),
    r"bias='b' must be None or an array": ({"bias": "b"}, TypeError),
    r"chunk=0 must be an integer from 1": ({"chunk": 0}, ValueError),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_wrong_is_named(message):
    wrong, error = WRONG[message]
    arrays = {"hidden": X, "weight": W, "labels": Y, "bias": None, "where": None}
    settings = {k: v for k, v in wrong.items() if k not in arrays or isinstance(v, str)}
    arrays = {k: v for k, v in (arrays | wrong).items() if k in arrays and k not in settings}
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda arrays: ours(**arrays, **settings), arrays)
