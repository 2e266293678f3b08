import dataclasses
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpjax
from mpjax._src.core.base.trees import cast_like, pytree_of, widen
from mpjax._src.core.training.replicas import Shards

pytestmark = pytest.mark.usefixtures("strict_promotion")


def everything():
    """A tree with a leaf of every kind that a cast must leave alone."""
    return {
        "int": jnp.arange(3),
        "labels": np.arange(70000, 70003),
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j]),
        "key": jax.random.key(0),
        "none": None,
        "function": jnp.tanh,
        "string": "relu",
        "python": 2.5,
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_cast_touches_real_floating_leaves_only(dtype):
    kept = everything()
    floats = {"w": jnp.ones(3), "numpy": np.ones(2, np.float32), "scalar": np.float16(1)}
    floats["float64"] = np.ones(2)  # float32 to JAX, without x64
    out = mpjax.cast({**kept, **floats}, dtype)
    for name, value in kept.items():
        assert out[name] is value, name
    assert {out[name].dtype for name in floats} == {jnp.dtype(dtype)}
    assert isinstance(out["numpy"], np.ndarray)


def test_cast_works_under_jit_and_on_an_equinox_module(rng):
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(int(rng.integers(1000))))
    half = mpjax.cast(model, "bfloat16")
    assert half.layers[0].weight.dtype == jnp.bfloat16
    assert half.activation is model.activation
    arrays, rest = eqx.partition(half, eqx.is_array)
    back = jax.jit(lambda tree: mpjax.cast(tree, "float32"))(arrays)
    assert eqx.combine(back, rest).layers[0].weight.dtype == jnp.float32


@pytest.mark.usefixtures("x64")
def test_cast_leaves_float64_alone_unless_asked_for():
    tree = {"double": jnp.ones(2, jnp.float64), "single": jnp.ones(2, jnp.float32)}
    assert mpjax.cast(tree, "float16")["double"].dtype == jnp.float64
    assert mpjax.cast(np.ones(2), "float16").dtype == jnp.float64
    assert mpjax.cast(tree, "float64")["single"].dtype == jnp.float64
    assert cast_like(tree["double"], tree["single"]).dtype == jnp.float32


def test_cast_refuses_what_is_no_floating_dtype():
    with pytest.raises(ValueError, match="dtype='int32' is not a floating dtype"):
        mpjax.cast({}, "int32")


def test_cast_like_undoes_widen():
    tree = {"h": jnp.ones(2, jnp.float16), "f": np.ones(2, np.float32), "i": jnp.arange(2)}
    wide = widen(tree)
    assert wide["h"].dtype == jnp.float32 and wide["i"] is tree["i"] and wide["f"] is tree["f"]
    back = cast_like(wide, tree)
    assert all(back[name].dtype == tree[name].dtype for name in tree)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_all_finite_finds_one_bad_value(dtype, bad):
    good = jnp.ones((3, 4), dtype)
    check = jax.jit(mpjax.all_finite)
    assert check({"a": good, "b": good})
    assert not check({"a": good, "b": good.at[1, 2].set(jnp.asarray(bad, dtype))})


def test_all_finite_sees_an_imaginary_part():
    assert not mpjax.all_finite(jnp.array([complex(0, jnp.inf)]))


def test_all_finite_ignores_what_is_neither_floating_nor_complex():
    tree = {**everything(), "float0": np.zeros(2, jax.dtypes.float0)}
    verdict = mpjax.all_finite(tree)
    assert verdict.shape == () and verdict.dtype == jnp.bool_ and verdict
    assert mpjax.all_finite({}) and mpjax.all_finite(None)
    assert not mpjax.all_finite({"python": float("nan")})
    assert jax.jit(mpjax.all_finite)({}).shape == ()


@pytest.mark.parametrize("wrong", ["x", {"a": "x", "b": None}, print])
def test_all_finite_of_what_has_no_numbers_is_refused(wrong):
    with pytest.raises(TypeError, match="tree=.* has no arrays and no numbers"):
        mpjax.all_finite(wrong)


def test_select_takes_one_tree_bit_for_bit():
    nans = np.array([0x7FC00001, 0x80000000], np.uint32).view(np.float32)  # a payload, and -0.0
    a = {**everything(), "x": jnp.asarray(nans), "key": jax.random.key(1)}
    b = {**everything(), "x": jnp.ones(2), "key": jax.random.key(2)}
    arrays = ("x", "key", "int", "bool", "complex")

    def pick(pred):
        one, other = ({name: tree[name] for name in arrays} for tree in (a, b))
        return jax.jit(mpjax.select)(pred, one, other)

    assert np.array_equal(np.asarray(pick(True)["x"]).view(np.uint32), nans.view(np.uint32))
    assert jax.random.key_data(pick(False)["key"]).tolist() == [0, 2]
    whole = mpjax.select(jnp.array(False), a, b)
    assert whole["function"] is jnp.tanh and whole["string"] == "relu" and whole["none"] is None
    assert float(whole["python"]) == 2.5


def test_select_takes_python_numbers_that_differ():
    assert int(mpjax.select(jnp.array(False), 1, 2)) == 2


def test_select_by_a_python_bool_hands_out_the_leaves_themselves():
    a, b = {"n": 2**40, "x": np.array([0.1])}, {"n": 0, "x": np.array([0.2])}
    chosen = mpjax.select(True, a, b)
    assert chosen["n"] == 2**40 and chosen["x"] is a["x"]


def test_arrays_of_strings_are_leaves_that_are_no_arrays():
    names = {"names": np.array(["a", "b"])}
    equal = {"names": names["names"].copy()}
    assert mpjax.select(jnp.array(True), names, equal)["names"] is names["names"]
    assert mpjax.cast(names, "float16")["names"] is names["names"]
    assert mpjax.cast(np.ones(2, jnp.bfloat16), "float32").dtype == np.float32


@pytest.mark.parametrize(
    ("pred", "a", "b", "message"),
    [
        (jnp.array([True]), 1.0, 1.0, r"pred=.*must be a single bool"),
        (jnp.float32(1), 1.0, 1.0, r"pred=.*must be a single bool"),
        (
            True,
            {"f": "relu"},
            {"f": "gelu"},
            r"leaf 'f' is not an array, and it is .relu. in on_true",
        ),
        (True, {"w": jnp.ones(2)}, {"w": jnp.ones(3)}, r"leaf 'w' is float32\(2,\) in on_true"),
        (True, {"w": jnp.ones(2)}, {"w": jnp.ones(2, jnp.float16)}, "a dtype that changes"),
        (True, {"a": 1.0}, {"b": 1.0}, r"the same structure, but on_false lacks a and holds b\."),
        (True, {"a": 1.0}, {"a": None}, r"the same structure, but on_false lacks a\."),
        (True, (1.0,), [1.0], r"the same structure, but PyTreeDef\(\(\*,\)\) is not PyTreeDef"),
    ],
)
def test_select_refuses_what_it_cannot_choose_between(pred, a, b, message):
    with pytest.raises(ValueError, match=message):
        mpjax.select(pred, a, b)


@given(st.lists(st.floats(width=32), min_size=1), st.booleans())
def test_select_and_all_finite_agree_with_numpy(values, pred):
    a = jnp.asarray(values, jnp.float32)
    assert bool(mpjax.all_finite(a)) == bool(np.isfinite(np.asarray(a)).all())
    chosen = np.asarray(mpjax.select(jnp.array(pred), a, -a))
    expected = np.asarray(a if pred else -a)
    assert np.array_equal(chosen.view(np.uint32), expected.view(np.uint32))


def test_select_under_vmap_chooses_for_each(rng):
    a, b = jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32)
    pred = jnp.array([True, False, True, False])
    out = jax.vmap(mpjax.select)(pred, {"w": a}, {"w": b})["w"]
    assert np.array_equal(out, np.where(np.asarray(pred)[:, None], a, b))


@pytest.mark.parametrize("leaves", [(), ("a",), ("c", "a"), ("a", "b", "c")])
def test_a_dataclass_is_a_pytree_of_the_named_fields(leaves):
    @pytree_of(*leaves)
    @dataclasses.dataclass(frozen=True)
    class Node:
        a: int
        b: int
        c: int

        def __post_init__(self):
            assert isinstance(self.a, int)  # which placeholders of a pytree are not

    node = Node(1, 2, 3)
    pairs, tree = jax.tree_util.tree_flatten_with_path(node)
    named = {jax.tree_util.keystr(keys): leaf for keys, leaf in pairs}
    assert named == {f".{name}": getattr(node, name) for name in leaves}
    assert tree == jax.tree.structure(node) and jax.tree.leaves(node) == [*named.values()]
    assert jax.tree.unflatten(tree, jax.tree.leaves(node)) == node
    placed = jax.tree.map(str, node)
    assert dataclasses.asdict(placed) == {
        **dataclasses.asdict(node),
        **{n: str(getattr(node, n)) for n in leaves},
    }
    assert (tree == jax.tree.structure(Node(1, 0, 3))) == ("b" in leaves)


def many(shape, count=4, **more):
    """Trees of several small arrays of one shape, with moments, and others."""
    names = [f"{name}{i}" for i in range(count) for name in ("param", "mu", "nu")]
    tree = {name: np.full(shape, i, np.float32) for i, name in enumerate(names)}
    return tree | {"count": np.int32(3), "large": np.ones((3, 2**16), np.float32), **more}


def barriers(fun, *args):
    """The shapes that are behind barriers on GPUs."""
    eqns = jax.make_jaxpr(fun)(*args).eqns
    return [e.invars[0].aval.shape for e in eqns if e.primitive.name == "gpu_barrier"]


@pytest.mark.parametrize("pred", [True, False])
def test_select_reads_one_array_of_bools_for_all_small_leaves_of_a_shape(pred):
    """So that XLA:GPU updates them in one kernel; scalars, large and few leaves get a scalar."""
    a = many((5, 7), few=np.ones(6, np.float32), flag=np.array([True]))
    b = jax.tree.map(lambda x: x if x.dtype == bool else -x, a)
    assert barriers(mpjax.select, jnp.array(pred), a, b) == [(5, 7)]
    alone = many(5, 1, master=np.ones(5, np.float32))
    assert not barriers(mpjax.select, jnp.array(pred), alone, alone)
    momentum = {str(i): np.ones(5, np.float32) for i in range(6)}  # of three parameters
    assert barriers(mpjax.select, jnp.array(pred), momentum, momentum) == [(5,)]
    assert not barriers(lambda p: mpjax.select(p, a, b), jnp.array(pred))  # nothing is updated
    for run in (jax.jit(mpjax.select), mpjax.select):
        got, want = run(jnp.array(pred), a, b), a if pred else b
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_select_of_sharded_types_reads_a_scalar():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    tree = {str(i): jax.device_put(np.ones(4, np.float32), place) for i in range(9)}
    new = jax.jit(lambda p, a: mpjax.select(p, jax.tree.map(jnp.negative, a), a))
    assert new(jnp.array(True), tree)["3"].tolist() == [-1] * 4
    assert not barriers(mpjax.select, jnp.array(True), tree, tree)


def test_small_arrays_that_devices_divide_differently_are_not_exchanged():
    """Combined, some of them would have to be divided like the others."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = [jax.sharding.PartitionSpec(*axes) for axes in (("x",), (None, "x"), ("y",))]
    tree = {
        str(i): jax.ShapeDtypeStruct(
            (4, 6), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, specs[i % 3])
        )
        for i in range(27)
    }

    def gate(tree):
        norm = Shards((), (), False).norm(tree)
        finite = mpjax.all_finite(tree) & (norm < 1)
        return mpjax.select(finite, jax.tree.map(jnp.negative, tree), tree)

    places = jax.tree.map(lambda x: x.sharding, tree)
    text = jax.jit(gate, out_shardings=places).lower(tree).compile().as_text()
    assert "all-reduce" in text
    assert not re.findall(r" (all-gather|all-to-all|collective-permute)\(", text)


def test_small_arrays_of_one_type_are_checked_together():
    tree = many((5, 7), half=np.ones((5, 7), np.float16), complex=np.ones((5, 7), np.complex64))
    check = jax.jit(mpjax.all_finite)
    assert check(tree)
    reductions = str(jax.make_jaxpr(mpjax.all_finite)(tree)).count("reduce_and")
    assert reductions == 4  # the small, the large, the 16-bit and the complex ones
    assert barriers(mpjax.all_finite, tree) == [(5, 7)] * 12
    for name in tree.keys() - {"count"}:
        bad = tree[name].copy()
        bad[1, 2] = np.inf
        assert not check(tree | {name: bad}), name
