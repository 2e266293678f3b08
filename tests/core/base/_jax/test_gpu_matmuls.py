"""Odd axes of marked 16-bit matmuls are padded for CUDA, if that pays; all others are JAX's own."""

import contextlib
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import normal, thorough_but
from ways import WAYS, loss

import mpjax
from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import gpu_matmuls
from mpjax._src.core.base._jax.gpu_matmuls import dot_general_p

PLAIN = ((1,), (0,)), ((), ())
BATCHED = ((2,), (1,)), ((0,), (0,))  # weights of attention times values
VECTOR = ((0,), (0,)), ((), ())
OUTER = ((), ()), ((), ())
SCORES = ((3,), (3,)), ((0, 2), (0, 2))
DTYPES = ["bfloat16", "float16"]


@pytest.fixture
def cheap(monkeypatch):
    """Every odd axis of a matmul is large enough to be padded."""
    monkeypatch.setattr(gpu_matmuls, "LEAST_FLOPS", 0)
    monkeypatch.setattr(gpu_matmuls, "SMALLEST", 2)
    monkeypatch.setattr(gpu_matmuls, "FLOPS_PER_BYTE", 0)


@pytest.fixture
def on_cpu(cheap, monkeypatch):
    """The lowering for CUDA, on the CPU: what it returns is compared with JAX's own."""
    rules = mlir._platform_specific_lowerings["cpu"]
    entry = rules[dot_general_p]
    monkeypatch.setitem(rules, dot_general_p, entry)
    rule = gpu_matmuls._lowering(mlir._lowerings[dot_general_p].rule)
    mlir.register_lowering(dot_general_p, rule, platform="cpu")
    jax.clear_caches()
    yield
    jax.clear_caches()


def product(numbers=PLAIN, mark=True, **params):
    """Returns a matmul of sums, so that its operands are computed in the program."""

    def dot(x, y):
        return marked_dot(x + x, y + y, numbers, mark, **params)

    return dot


def marked_dot(x, y, numbers=PLAIN, mark=True, **params):
    with _jax.marked() if mark else contextlib.nullcontext():
        return lax.dot_general(x, y, numbers, **params)


def lowered(fun, *args, platform="cuda"):
    traced = jax.jit(lambda *args: fun(*args)).trace(*args)  # not one of another test
    return traced.lower(lowering_platforms=(platform,)).as_text()


def shapes(*sizes, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(size, dtype) for size in sizes]


def dots(text):
    """Returns the shapes of operands and results of all matmuls of a lowered program."""
    found = re.findall(r"dot_general.*\(tensor<(.*?)>, tensor<(.*?)>\) -> tensor<(.*?)>", text)
    return [tuple(tuple(map(int, re.findall(r"(\d+)x", t))) for t in types) for types in found]


# ---- which axes, and how far --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("left", "right", "numbers", "wanted"),
    [
        # Vocabularies: to whole tiles.
        ((8192, 768), (768, 50257), PLAIN, ((8192, 768), (768, 50304))),
        ((8192, 768), (768, 30522), PLAIN, ((8192, 768), (768, 30592))),
        ((2048, 384), (384, 51865), PLAIN, ((2048, 384), (384, 51968))),
        # Summed over: both operands.
        ((8192, 50257), (50257, 768), PLAIN, ((8192, 50304), (50304, 768))),
        ((8192, 257), (257, 768), PLAIN, ((8192, 264), (264, 768))),
        # Rows, of which there may be several axes: the longest.
        ((1025, 768), (768, 3072), PLAIN, ((1032, 768), (768, 3072))),
        ((3, 8197, 768), (768, 768), (((2,), (0,)), ((), ())), ((3, 8200, 768), (768, 768))),
        ((65536, 196), (196, 384), PLAIN, ((65536, 200), (200, 384))),  # MLP-Mixer's tokens
        # In a batch: ViT's tokens.
        ((768, 197, 197), (768, 197, 64), BATCHED, ((768, 200, 200), (768, 200, 64))),
        ((64, 197, 12, 64), (64, 197, 12, 64), SCORES, ((64, 200, 12, 64), (64, 200, 12, 64))),
        ((512, 77, 12, 64), (512, 77, 12, 64), SCORES, ((512, 80, 12, 64), (512, 80, 12, 64))),
    ],
)
def test_odd_axis_is_padded(left, right, numbers, wanted, dtype):
    text = lowered(product(numbers), *shapes(left, right, dtype=dtype))
    ((*operands, _),) = dots(text)
    assert tuple(operands) == wanted
    # The result has the shape that it has without padding.
    plain = lowered(product(numbers, mark=False), *shapes(left, right, dtype=dtype))
    ending = r"-> \(tensor<([^>]*)> \{jax.result"
    assert re.search(ending, text)[1] == re.search(ending, plain)[1]


@pytest.mark.parametrize(
    ("left", "right", "numbers"),
    [
        ((8192, 768), (768, 50304), PLAIN),  # aligned
        ((8, 1023, 768), (768, 3072), (((2,), (0,)), ((), ()))),  # rows of 8 x 1023: aligned
        ((128, 512), (512, 10), PLAIN),  # few FLOPs
        ((512, 512), (512, 100), PLAIN),
        ((1, 8192), (8192, 50257), PLAIN),  # a vector, as a row
        ((2**20,), (2**20, 257), VECTOR),
        ((50257, 2**20), (2**20,), PLAIN),
        ((2**30 + 1,), (2**30 + 1,), VECTOR),
        ((50257,), (50257,), OUTER),
        ((2**20, 768), (768, 10), PLAIN),  # no tile of a tensor core
        ((65536, 49, 49), (65536, 49, 32), BATCHED),  # windows of Swin: a third more scores
    ],
)
def test_other_matmuls_are_lowered_by_jax(left, right, numbers):
    args = shapes(left, right)
    assert plain(lowered(product(numbers), *args)) == lowered(product(numbers, mark=False), *args)


def plain(text):
    return re.sub(r" \{mhlo.frontend_attributes = \{mpjax_matmul = \"1\"\}\}", "", text)


def test_matmuls_that_autocast_does_not_make_are_lowered_by_jax():
    for args, mark in (
        (shapes((8192, 768), (768, 50257)), False),
        (shapes((8192, 768), (768, 50257), dtype="float32"), True),
    ):
        assert "stablehlo.pad" not in lowered(product(mark=mark), *args)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "rocm"])
def test_other_platforms_get_no_padding(platform):
    args = shapes((8192, 768), (768, 50257))
    assert "stablehlo.pad" not in lowered(product(), *args, platform=platform)


@pytest.mark.parametrize(("rows", "padded"), [(64, False), (128, False), (512, True)])
@pytest.mark.parametrize("vocabulary", [50257, 30522])
def test_weight_is_padded_only_where_a_copy_of_it_would_pay(rows, padded, vocabulary):
    """Weights may be given in 16 bits: their copy moves more than a matmul of few rows."""
    text = lowered(marked_dot, *shapes((rows, 768), (768, vocabulary)))
    assert ("stablehlo.pad" in text) == padded


# ---- results ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(
    "storage", thorough_but(["", ",storage=lean", ",storage=0.5"], "", ",storage=lean")
)
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint])
def test_no_axis_is_odd_in_the_gradient_of_a_loop(storage, around):
    def layers(ws, x):
        @around
        def layer(x, w):
            scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x) / 4)
            return x + jnp.tanh(jnp.einsum("bts,bsd->btd", scores, x @ w)), None

        return jnp.sum(lax.scan(layer, x, ws)[0] ** 2)

    grad = jax.grad(mpjax.autocast(layers, f"mixed_bfloat16{storage}"))
    found = dots(lowered(grad, normal(0, 3, 11, 11), normal(1, 2, 7, 11)))
    assert len(found) >= 9
    assert all(math.prod(shape) % 64 == 0 for operands in found for shape in operands)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("way", WAYS)
def test_no_axis_of_a_matmul_of_autocast_is_odd(way):
    w, x = normal(0, 13, 13), normal(1, 5, 7, 13)
    x = x if way in ("vmap", "scan") else x[0]
    found = dots(lowered(WAYS[way](mpjax.autocast(loss)), w, x))
    assert len(found) >= 2
    # Rows of several axes are one axis to the kernel.
    assert all(math.prod(shape) % 64 == 0 for operands in found for shape in operands)


FORMS = {"plain": PLAIN, "batched": BATCHED, "scores": SCORES}
CASES = [*itertools.product((None, np.float32), FORMS, DTYPES)]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("wide", "form", "dtype"), thorough_but(CASES, *range(0, 12, 3), 5, 10))
def test_padding_is_exact(wide, form, dtype):
    """Integers, whose sums are exact in any order."""
    numbers = FORMS[form]
    left, right = {
        PLAIN: ((5, 7), (7, 9)),
        BATCHED: ((2, 5, 7), (2, 7, 3)),
        SCORES: ((2, 5, 3, 7), (2, 9, 3, 7)),
    }[numbers]
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.integers(-2, 3, size), dtype) for size in (left, right))

    def total(mark, x, y):
        out = product(numbers, mark, preferred_element_type=wide)(x, y)
        return jnp.sum(jnp.astype(out, jnp.float32) ** 2), out

    def results(mark):
        run = jax.value_and_grad(functools.partial(total, mark), (0, 1), has_aux=True)
        return jax.jit(run)

    text = results(True).lower(x, y).as_text()
    assert text.count("stablehlo.pad") >= (6 if wide is None else 2) and "stablehlo.pad" not in (
        results(False).lower(x, y).as_text()
    )
    for got, want in zip(*(jax.tree.leaves(results(m)(x, y)) for m in (True, False)), strict=True):
        np.testing.assert_array_equal(got, want, strict=True)


@pytest.mark.usefixtures("on_cpu")
def test_padding_brings_no_non_finite_value_in():
    x, y = jnp.ones((5, 7), "bfloat16"), jnp.ones((7, 9), "bfloat16")
    x, y = x.at[0, 0].set(jnp.inf), y.at[3, 2].set(jnp.nan)
    got, want = (np.asarray(jax.jit(product(mark=m))(x, y), np.float32) for m in (True, False))
    np.testing.assert_array_equal(got, want, strict=True)
    assert np.isfinite(got).sum() == 4 * 8


@pytest.mark.usefixtures("on_cpu")
def test_softmax_and_loss_do_not_see_the_padding():
    """Logits of padding would be 0, and take part in the sum of the exponentials."""
    w, x = normal(0, 16, 13) - 20, abs(normal(1, 6, 16))  # every logit is far below 0
    labels = jnp.arange(6)

    def cross_entropy(w, x):
        logits = jax.nn.log_softmax(jnp.astype(x @ w, jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))

    want = jax.value_and_grad(cross_entropy)(w, x)
    got = jax.jit(jax.value_and_grad(mpjax.autocast(cross_entropy)))(w, x)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.05)


def cross_entropy(w, x):
    logits = jnp.astype(jnp.tanh(x) @ w, jnp.float32)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[:, 0])


def behind_a_checkpoint(w, x):
    @jax.checkpoint
    def loss(logits):
        return jnp.mean(jax.nn.logsumexp(logits, -1) - logits[..., 0])

    return loss(jnp.reshape(jnp.tanh(x) @ w, (2, 32, -1)))


def saved(policy):
    return getattr(jax.checkpoint_policies, policy)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(
    ("loss", "storage", "padded"),
    [
        (cross_entropy, "", 2),
        (cross_entropy, ",storage=lean", 2),
        (behind_a_checkpoint, "", 2),
        (cross_entropy, ",storage=8bit", 2),
        (cross_entropy, ",storage=0.5", 2),
        (jax.checkpoint(cross_entropy, policy=saved("dots_saveable")), "", 2),
        # Without a policy, a checkpoint keeps no result of what it repeats.
        (jax.checkpoint(cross_entropy), "", 4),
    ],
)
def test_logits_that_a_checkpoint_keeps_are_not_padded(loss, storage, padded):
    """Behind a barrier a kernel would copy them without the padding; their gradient is padded."""
    grad = jax.grad(mpjax.autocast(loss, f"mixed_bfloat16{storage}"), (0, 1))
    found = dots(lowered(grad, normal(0, 16, 131), normal(1, 64, 16)))
    first, *others = found
    assert first[2] == ((64, 136) if padded > 2 else (64, 131))
    assert sum(any(136 in shape for shape in operands) for operands in others) >= 2


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(
    "storage",
    thorough_but(["", ",storage=lean", ",storage=8bit", ",storage=0.5"], "", ",storage=8bit"),
)
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint])
@pytest.mark.parametrize("barrier", [None, False])
def test_logits_that_a_loop_stacks_are_padded(barrier, around, storage):
    """A kernel copies them in any case, and takes the padding off: there is no barrier."""
    body = cross_entropy if barrier is None else jax.checkpoint(cross_entropy, prevent_cse=barrier)

    def total(w, x):
        return jnp.sum(lax.map(lambda x: body(w, x), x) ** 2)  # what it returns is kept

    grad = jax.grad(around(mpjax.autocast(total, f"mixed_bfloat16{storage}")), (0, 1))
    first, *_ = dots(lowered(grad, normal(0, 16, 131), normal(1, 2, 64, 16)))
    assert first[2] == (64, 136)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("storage", ["", ",storage=lean", ",storage=8bit", ",storage=0"])
def test_scores_that_a_checkpoint_computes_again_are_padded(storage):
    """They are larger than their operands, but nothing keeps them."""

    @jax.checkpoint
    def attention(x, w):
        scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x @ w, x))
        return jnp.sum(jnp.einsum("bts,bsd->btd", scores, x) ** 2)

    grad = jax.grad(mpjax.autocast(attention, f"mixed_bfloat16{storage}"), (0, 1))
    results = [
        operands[2] for operands in dots(lowered(grad, normal(0, 3, 35, 8), normal(1, 8, 8)))
    ]
    assert (3, 40, 40) in results and (3, 35, 35) not in results


# ---- several devices, other hosts ---------------------------------------------------------------


def mesh_of(kind, shape=(4,)):
    names = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("mesh", "size", "padded"),
    [((4,), 50257, True), ((4,), 50252, False), ((4,), 50254, True), ((2, 2), 50254, False)],
)
def test_axis_that_devices_may_share_is_left_alone(kind, mesh, size, padded):
    """To pad it, they would exchange data."""
    mesh = mesh_of(kind, mesh)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    args = [
        jax.ShapeDtypeStruct(s, "bfloat16", sharding=sharding) for s in ((8192, 64), (64, size))
    ]
    with jax.set_mesh(mesh):
        numbers = (((1,), (0,)), ((), ()))
        out = NamedSharding(mesh, PartitionSpec("data", None))
        text = lowered(
            product(numbers, out_sharding=out if kind == AxisType.Explicit else None), *args
        )
    assert ("stablehlo.pad" in text) == padded


def test_shards_are_padded():
    mesh = mesh_of(AxisType.Auto)
    spec = PartitionSpec(None, "data")
    local = jax.shard_map(product(), mesh=mesh, in_specs=(PartitionSpec(), spec), out_specs=spec)
    ((*operands, _),) = dots(lowered(local, *shapes((8192, 768), (768, 4 * 12567))))
    assert operands == [(8192, 768), (768, 12608)]


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda", "tpu")])
@pytest.mark.parametrize("rows", [4096, "rows", "rows * 197"])
def test_exported_program_is_padded(platforms, rows):
    rows = export.symbolic_shape(rows)[0] if isinstance(rows, str) else rows
    x, w = shapes((rows, 768), (768, 50257))
    exported = export.export(jax.jit(product()), platforms=platforms)(x, w)
    assert "768x50304xbf16" in exported.mlir_module()
    assert (
        "stablehlo.pad"
        not in export.export(jax.jit(product()), platforms=["cpu"])(x, w).mlir_module()
    )


@pytest.mark.parametrize(
    "size", [1, 8, 49, 197, 257, 1000, 1023, 16385, 30522, 50257, 51865, 65537]
)
def test_width_is_a_tile_where_a_tile_is_negligible(size):
    padded = size + gpu_matmuls._width(size)
    assert padded % 8 == 0
    tiles = [tile for tile in (128, 64) if 256 * (-size % tile) <= size]
    assert padded % max([*tiles, 8]) == 0
    assert padded - size < 8 or 256 * (padded - size) <= size
