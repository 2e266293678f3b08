"""The form in which XLA:CPU is asked for marked matmuls; all other ones are lowered by JAX."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import NamedSharding, PartitionSpec
from support import normal
from ways import WAYS, loss

import mpjax
from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import cpu_matmuls

BFLOAT16, FLOAT16, FLOAT32 = (np.dtype(d) for d in (jnp.bfloat16, np.float16, np.float32))
PLAIN = ((1,), (0,)), ((), ())
LEFT = ((0,), (0,)), ((), ())  # the gradient of a weight: contracts the first dimension of both
MANY = ((1,), (0,)), ((0,), (1,))

NATIVE = pytest.mark.skipif(not _jax.cpu_flags(), reason="a CPU without bfloat16 instructions")


@pytest.fixture
def capable(monkeypatch):
    """As on a CPU with bfloat16 instructions."""
    monkeypatch.setattr(cpu_matmuls, "cpu_flags", lambda: frozenset({"avx512_bf16"}))


@pytest.fixture
def incapable(monkeypatch):
    monkeypatch.setattr(cpu_matmuls, "cpu_flags", frozenset)


def product(numbers=PLAIN, dtype=BFLOAT16, mark=True):
    def dot(x, y):
        wanted = {"dimension_numbers": numbers, "preferred_element_type": dtype}
        if not mark:
            return lax.dot_general(x, y, **wanted)
        with _jax.marked():
            return lax.dot_general(x, y, **wanted)

    return dot


def arrays(*shapes, dtype=BFLOAT16):
    return [jnp.asarray(normal(i, *shape), dtype) for i, shape in enumerate(shapes)]


def lowered(fun, *args, platform="cpu"):
    traced = jax.jit(lambda *args: fun(*args)).trace(*args)  # not one of another test
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    return re.sub(r" \{mhlo.frontend_attributes = \{mpjax_matmul = \"1\"\}\}", "", text)


def dots(text):
    """Returns for each matmul its contracted dimensions and the dtypes of operands and result."""
    pattern = (
        r"stablehlo\.dot_general .*?contracting_dims = \[([\d, ]*)\] x \[([\d, ]*)\].*"
        r"\(tensor<[^>]*?(\w+)>, tensor<[^>]*?(\w+)>\) -> tensor<[^>]*?(\w+)>"
    )
    return [
        (left, right, *(re.sub(r".*x", "", d) for d in dtypes))
        for left, right, *dtypes in re.findall(pattern, text)
    ]


X, Y = arrays((8, 16), (16, 32))


# ---- what is marked -----------------------------------------------------------------------------


@pytest.mark.usefixtures("capable")
@pytest.mark.parametrize("way", WAYS)
def test_every_matmul_of_autocast_has_the_native_form(way):
    w, x = normal(0, 16, 16), normal(1, 8, 16, 16)
    x = x if way in ("vmap", "scan") else x[0]
    found = dots(lowered(WAYS[way](mpjax.autocast(loss)), w, x))
    assert len(found) >= 2
    for left, _, *dtypes in found:
        assert dtypes == ["bf16", "bf16", "f32"]
        assert left in ("1", "2")  # last


@pytest.mark.usefixtures("capable")
def test_unmarked_matmul_is_lowered_by_jax():
    for numbers, dtype in ((PLAIN, BFLOAT16), (PLAIN, FLOAT32), (LEFT, BFLOAT16)):
        y = Y if numbers is PLAIN else Y[:8]
        text = lowered(product(numbers, dtype, mark=False), X, y)
        assert "optimization_barrier" not in text
        assert len(dots(text)) == 1 and dots(text)[0][4] == ("bf16", "f32")[dtype == FLOAT32]


@pytest.mark.usefixtures("capable")
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("numbers", [PLAIN, LEFT])
def test_other_platforms_get_the_same_program(platform, numbers):
    y = Y if numbers is PLAIN else Y[:8]
    ours, theirs = (lowered(product(numbers, mark=m), X, y, platform=platform) for m in (1, 0))
    assert ours == theirs


@pytest.mark.usefixtures("incapable")
def test_a_cpu_without_bfloat16_gets_the_same_program():
    assert lowered(product(LEFT), X, Y[:8]) == lowered(product(LEFT, mark=False), X, Y[:8])


@pytest.mark.usefixtures("capable")
@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32])
def test_only_bfloat16_has_a_kernel(dtype):
    x, y = X.astype(dtype), Y[:8].astype(dtype)
    ours, theirs = (lowered(product(LEFT, dtype, mark=m), x, y) for m in (1, 0))
    assert ours == theirs


@pytest.mark.usefixtures("incapable")
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("axis", [None, 0, 2])
def test_a_left_operand_is_held_in_its_order_for_a_float32_result(dtype, axis):
    """Batch, free and contracted dimensions: XLA:CPU fails at run time for another order."""
    x, y = arrays((2, 3, 4), (3, 2, 5), dtype=dtype)
    dot = product(MANY, FLOAT32)
    if axis is not None:
        dot = jax.vmap(dot, (axis, None))
        x = jnp.stack([x] * 5, axis)
    text = lowered(dot, x, y)
    held = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert any(("<2x5x4x3x" if axis is not None else "<2x4x3x") in line for line in held)


# ---- the form -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("capable")
@pytest.mark.parametrize(
    ("left", "right", "numbers", "wanted"),
    [
        ((8, 16), (16, 32), PLAIN, "8x16 1 16x32 0"),
        ((8, 16), (32, 16), (((1,), (1,)), ((), ())), "8x16 1 32x16 1"),
        ((16, 8), (16, 32), LEFT, "8x16 1 16x32 0"),
        ((2, 3, 8), (3, 2, 9), MANY, "2x8x3 2 2x3x9 1"),
        ((1, 16), (16, 32), PLAIN, "2x1x16 2 16x32 0"),
        ((16,), (16, 32), (((0,), (0,)), ((), ())), "2x16 1 16x32 0"),
        ((8, 16), (16,), (((1,), (0,)), ((), ())), "8x16 1 2x16 1"),
    ],
)
def test_operands_have_the_order_of_a_kernel(left, right, numbers, wanted):
    x, y = arrays(left, right)
    text = lowered(product(numbers), x, y)
    (found,) = dots(text)
    shapes = re.findall(r"dot_general.*\(tensor<([\dx]*)xbf16>, tensor<([\dx]*)xbf16>", text)[0]
    assert f"{shapes[0]} {found[0]} {shapes[1]} {found[1]}" == wanted
    got = jax.jit(product(numbers))(x, y)
    want = lax.dot_general(*(v.astype(jnp.float32) for v in (x, y)), numbers)
    np.testing.assert_allclose(got, want.astype(BFLOAT16), rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("capable")
@pytest.mark.parametrize(("numbers", "held"), [(PLAIN, 1), (LEFT, 1), (MANY, 2)])
def test_operands_and_results_are_held(numbers, held):
    """A transpose of the right operand is merged into a product of two matrices, not of many."""
    shapes = {PLAIN: ((8, 16), (16, 32)), LEFT: ((16, 8), (16, 32)), MANY: ((2, 3, 8), (3, 2, 9))}
    text = lowered(product(numbers), *arrays(*shapes[numbers]))
    assert text.count("@LayoutConstraint") == held
    result = re.search(r"(%\d+) = stablehlo.dot_general", text)[1]
    assert f"stablehlo.optimization_barrier {result} :" in text


@pytest.mark.usefixtures("capable")
def test_barriers_beside_a_marked_matmul_do_nothing():
    def held(mark):
        def run(x, y):
            with _jax.marked() if mark else contextlib.nullcontext():
                return _jax.held_for_cpu(x, y, LEFT)

        return lowered(run, X, Y[:8]).count("optimization_barrier")

    assert (held(mark=True), held(mark=False)) == (0, 2)


@pytest.mark.usefixtures("capable")
@pytest.mark.parametrize(("left", "right"), [((4, 7), (7, 3)), ((1, 16), (16, 1))])
def test_tiny_matmuls_and_products_of_vectors_have_no_kernel(left, right):
    x, y = arrays(left, right)
    assert lowered(product(), x, y) == lowered(product(mark=False), x, y)


@pytest.mark.usefixtures("capable")
def test_dot_algorithm_of_a_marked_matmul_is_kept():
    def dot(x, y):
        with _jax.marked():
            return lax.dot(x, y, precision=lax.DotAlgorithmPreset.BF16_BF16_F32)

    assert "optimization_barrier" not in lowered(dot, X, Y)


def weight_gradient(w, x):
    more = {"precision": None, "out_sharding": None, "dimension_numbers": PLAIN}
    return jax.grad(lambda w: jnp.sum(_jax.half_dot(x, w, BFLOAT16, **more)))(w)


@pytest.mark.usefixtures("capable")
def test_the_gradient_of_a_weight_is_the_accumulator_and_not_transposed():
    """The kernel would copy its left operand as well, so the operands change places."""
    text = lowered(weight_gradient, normal(0, 16, 32), X)
    assert dots(text)[-1] == ("1", "0", "bf16", "bf16", "f32")
    assert len(re.findall(r"stablehlo.transpose.*-> tensor<16x8xbf16>", text)) == 1
    assert text.count("stablehlo.transpose") == 1
    assert "(tensor<16x32xf32>) -> tensor<16x32xbf16>" not in text[text.rindex("dot_general") :]


@pytest.mark.usefixtures("incapable")
def test_without_a_kernel_the_gradient_of_a_weight_is_as_elsewhere():
    args = normal(0, 16, 32), X
    assert lowered(weight_gradient, *args) == lowered(weight_gradient, *args, platform="cuda")


# ---- several devices, other hosts ---------------------------------------------------------------


@pytest.mark.usefixtures("capable")
def test_matmul_over_devices_is_held_by_a_barrier_alone():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x, y = (jax.ShapeDtypeStruct((16, 8), BFLOAT16, sharding=rows) for _ in range(2))
    shared = lowered(product(LEFT), x, y)
    assert "optimization_barrier" in shared and "LayoutConstraint" not in shared
    spec = PartitionSpec("data")
    local = jax.shard_map(product(LEFT), mesh=mesh, in_specs=spec, out_specs=spec)
    assert "LayoutConstraint" in lowered(local, x, y)


@pytest.mark.usefixtures("capable")
@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda", "tpu")])
@pytest.mark.parametrize("rows", [16, "rows"])
def test_an_exported_gradient_runs(platforms, rows):
    w, x = normal(0, 16, 16), normal(1, 16, 16)
    grad = jax.jit(jax.grad(mpjax.autocast(loss)))
    (rows,) = export.symbolic_shape(rows) if isinstance(rows, str) else (rows,)
    exported = export.export(grad, platforms=platforms)(w, jax.ShapeDtypeStruct((rows, 16), "f4"))
    loaded = export.deserialize(exported.serialize())
    np.testing.assert_allclose(loaded.call(w, x), grad(w, x), rtol=1e-2, atol=1e-2)


# ---- what XLA makes of it -----------------------------------------------------------------------


@NATIVE
def test_compiled_matmuls_run_kernels_of_the_cpu():
    w, x = normal(0, 64, 64), normal(1, 64, 64)
    text = jax.jit(jax.grad(mpjax.autocast(loss))).lower(w, x).compile().as_text()
    computations = re.split(r"\n\n", text)
    with_dots = [c for c in computations if " dot(" in c]
    called = set(re.findall(r"kind=kCustom, calls=%?([\w.]+).*__ynn_fusion", text))
    assert len(with_dots) == 4
    assert {re.match(r"\s*%?([\w.]+)", c)[1] for c in with_dots} <= called
