"""`mpjax.jmp` has jmp's names with jmp's results, and all of `mpjax` takes its objects."""

import copy
import inspect
import pickle
import sys
import types
import unittest
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pages
import pytest

import mpjax
import mpjax.jmp as drop_in
from mpjax._src.core.base import called

MODULES = {"jmp": jmp, "mpjax": drop_in}
TRUE, FALSE = np.bool_(True), np.bool_(False)
KEY = jax.random.key(0)
TREE = {
    "float64 of NumPy": np.ones(2),
    "float32 of NumPy": np.ones(2, np.float32),
    "scalar of NumPy": np.float32(1),
    "number": 1.0,
    "float16": jnp.ones(2, jnp.float16),
    "bfloat16": jnp.ones(2, jnp.bfloat16),
    "weak": jnp.asarray(1.0),
    "integers": np.arange(2),
    "complex": np.ones(2, np.complex64),
    "float8": jnp.ones(2, jnp.float8_e4m3fn),
    "key": KEY,
    "word": "x",
    "none": None,
    "bools": np.ones(2, bool),
}
NUMBERS = {name: TREE[name] for name in ("float64 of NumPy", "float16", "weak", "integers")}


@pytest.fixture(params=MODULES)
def m(request):
    """Each of the two modules: a fact of jmp is a fact of ours."""
    return MODULES[request.param]


# ---- facts that jmp's own suite states -----------------------------------------------------------


@pytest.mark.parametrize("of", [np, jnp])
@pytest.mark.parametrize("dtype", [np.float16, jnp.float16, jnp.bfloat16, np.float32, jnp.float32])
def test_a_policy_casts_to_its_three_dtypes(m, dtype, of):
    policy = m.Policy(dtype, dtype, dtype)
    for name in ("param", "compute", "output"):
        assert getattr(policy, f"{name}_dtype") == dtype
        assert getattr(policy, f"cast_to_{name}")({"a": of.ones(())})["a"].dtype == dtype
    changed = m.Policy(of.float32, of.float32, of.float32).with_output_dtype(dtype)
    assert changed.output_dtype == dtype and changed.compute_dtype == of.float32
    assert all(p.split("=")[1] in ("f16", "bf16", "full") for p in str(policy).split(","))


@pytest.mark.parametrize(
    ("text", "three"),
    [
        ("float16", (jnp.float16,) * 3),
        ("bfloat16", (jnp.bfloat16,) * 3),
        ("full", (jnp.float32,) * 3),
        ("c=f16", (jnp.float32, jnp.float16, jnp.float16)),
        ("c=bfloat16,o=full", (jnp.float32, jnp.bfloat16, jnp.float32)),
        ("params=f16,compute=f32,output=f16", (jnp.float16, jnp.float32, jnp.float16)),
        ("o=f16", (jnp.float32, jnp.float32, jnp.float16)),
        ("p=f64", (jnp.float64,) * 3),
    ],
)
def test_strings_of_policies(m, text, three):
    policy = m.get_policy(text)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == three
    assert "f64" in text or policy.compute_dtype(2) == 2  # programs call them


def test_half_is_float16_but_on_tpus(m, monkeypatch):
    half = m.Policy(*[m.half_dtype()] * 3)
    assert m.half_dtype() is jnp.float16 and m.get_policy("half") == half
    tree = {"o": object(), "h": np.ones(1, np.float16), "f": np.ones(1), "i": np.ones(1, np.int16)}
    cast = {name: getattr(leaf, "dtype", leaf) for name, leaf in m.cast_to_half(tree).items()}
    assert cast == {"o": tree["o"], "h": np.float16, "f": np.float16, "i": np.int16}
    assert [v.dtype for k, v in m.cast_to_full(tree).items() if k != "o"] == ["f4", "f4", "i2"]
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(platform="tpu")])
    assert m.half_dtype() is jnp.bfloat16


def test_loss_scales_multiply_and_divide_all_leaves(m):
    tree = {"a": np.float32(1)}
    assert m.NoOpLossScale().scale(tree) is m.NoOpLossScale().unscale(tree) is tree
    for scale in (m.StaticLossScale(3), m.DynamicLossScale(3.0)):
        assert scale.scale(tree) == {"a": 3} and scale.unscale({"a": np.float32(3)}) == tree
        assert scale.loss_scale == 3


def test_dynamic_loss_scale_is_a_tree_of_two_leaves_and_the_others_have_none(m):
    scale = m.DynamicLossScale(jnp.float32(1), jnp.int32(0), 7, 3)
    assert jax.tree.leaves(scale) == [1, 0] and jax.tree.map(lambda x: x, scale) == scale
    assert (scale.period, scale.factor, scale.min_loss_scale) == (7, 3, 1)
    assert jax.tree.leaves((m.NoOpLossScale(), m.StaticLossScale(0))) == []
    assert m.NoOpLossScale().loss_scale == 1


def test_dynamic_loss_scale_grows_after_a_period_and_shrinks_to_its_minimum(m):
    scale = m.DynamicLossScale(jnp.float32(10), jnp.int32(0), 3, 2)
    seen = []
    for _ in range(3):
        scale = scale.adjust(TRUE)
        seen.append((int(scale.loss_scale), int(scale.counter)))
    assert seen == [(10, 1), (10, 2), (20, 0)] and (scale.period, scale.factor) == (3, 2)
    for least in (1, 0.37, 0.0):
        scale = m.DynamicLossScale(jnp.float32(10), jnp.int32(0), 5.0, 2.0, jnp.float32(least))
        for i in range(12):
            scale = scale.adjust(FALSE)
            np.testing.assert_allclose(scale.loss_scale, max(least, 10 / 2 ** (i + 1)), rtol=1e-6)
            assert scale.counter == 0


def test_integer_scales_are_warned_of(m):
    m.DynamicLossScale(2.0**15)
    for name in ("loss_scale", "min_loss_scale"):
        with pytest.warns(UserWarning, match=f"Expected floating type for {name}, got int32"):
            m.DynamicLossScale(**{"loss_scale": 1.0, name: np.int32(1)})


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_all_finite_and_select_tree(m, wrong):
    one, bad = np.float32(1), np.float32(wrong)
    assert m.all_finite(None) and m.all_finite({}) and m.all_finite({"a": one, "b": 2})
    assert not m.all_finite(bad) and not m.all_finite((one, bad)) and not m.all_finite((bad, one))
    a, b = {"x": one, "n": None}, {"x": np.float32(0), "n": None}
    assert m.select_tree(TRUE, a, b) == a and m.select_tree(FALSE, a, b) == b
    with pytest.raises(AssertionError, match="expected boolean scalar"):
        m.select_tree(np.ones(1, bool), None, None)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["policy", "loss_scale"])
def test_the_suite_of_jmp_passes_with_the_import_replaced(name):
    """As installed, beside the module that it tests."""
    file = Path(jmp.__file__).parent / "_src" / f"{name}_test.py"
    text, line = file.read_text(), f"from jmp._src import {name} as jmp\n"
    assert line in text
    module = types.ModuleType(f"{name}_test_of_mpjax")
    sys.modules[module.__name__] = module
    exec(compile(text.replace(line, "import mpjax.jmp as jmp\n"), file, "exec"), vars(module))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's own, of numbers that the suite makes
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    assert result.wasSuccessful(), result.failures + result.errors
    assert result.testsRun > 20


@pytest.mark.thorough
def test_the_loop_of_the_page_trains_to_the_same_bits_with_jmp():
    page = pages.ROOT / "docs/coming_from/jmp.md"
    line = "import mpjax.jmp as jmp\n\npolicy"
    ours, theirs = (
        pages.run(page, changes={line: line.replace(*changed)})
        for changed in (("mpjax.jmp", "mpjax.jmp"), ("mpjax.jmp as jmp", "jmp"))
    )
    assert (ours["jmp"], theirs["jmp"]) == (drop_in, jmp)
    for name in ("before", "after", "last"):
        assert ours[name] == theirs[name]


# ---- the same as jmp, beyond its suite -----------------------------------------------------------


def test_names_and_signatures_are_those_of_jmp():
    assert {*drop_in.__all__} == {*jmp.__all__} and drop_in.__version__ == "0.0.4"
    for name in {*jmp.__all__} - {"LossScale"}:
        ours, theirs = (inspect.signature(getattr(each, name)) for each in (drop_in, jmp))
        for a, b in zip(ours.parameters.values(), theirs.parameters.values(), strict=True):
            assert (a.name, a.kind, a.default) == (b.name, b.kind, b.default)
    assert jmp.LossScale.__args__ == tuple(cls.__base__ for cls in drop_in.LossScale.__args__)
    from jmp._src import policy

    for name in ("dtype_to_names", "name_to_dtype"):
        assert getattr(drop_in, name) == getattr(policy, name)


def outcome(call, module):
    """Returns what a call returns, with its types, or the class of its error; and its warnings."""

    def seen(leaf):
        kind = type(leaf).__name__, str(getattr(leaf, "dtype", "")), getattr(leaf, "weak_type", "")
        return str((*kind, np.shape(leaf), str(leaf)))

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            out = call(module)
            out = str(jax.tree.map(seen, out)).replace("mpjax.", "")
        except Exception as error:
            out = type(error).__name__
    return out, sorted(str(each.message) for each in heard)


STRINGS = (
    *("half", "f16", "float64", "c=half,o=full", "c=f16,c=bf16", "params=f32,compute=f16", ""),
    *("c=f16,", "c=f16=f32", "x=f16", "=", "F16", "c =f16", "c= f16", "fp16", "O2", "storage=lean"),
    *("mixed_bfloat16", "c=f16,storage=lean", None, 16),
)
CALLS = {
    **{f"policy {text}": lambda m, text=text: m.get_policy(text) for text in STRINGS},
    **{
        f"policy {name} of {dtype}": lambda m, name=name, dtype=dtype: getattr(
            m.Policy(dtype, dtype, dtype), name
        )(TREE)
        for name in ("cast_to_param", "cast_to_compute", "cast_to_output")
        for dtype in (jnp.float16, "bfloat16", np.dtype("float32"), jnp.float64)
    },
    "compute in no dtype": lambda m: m.Policy("x", 3, "y").cast_to_compute(TREE),
    "text of a string": lambda m: str(m.Policy("float16", "float16", "float16")),
    "policy without dtypes": lambda m: m.Policy(),
    "repr of a policy": lambda m: repr(m.get_policy("c=bf16")),
    "hash of a policy": lambda m: hash(m.get_policy("c=bf16")),
    "cast_to_half": lambda m: m.cast_to_half(TREE),
    "cast_to_full": lambda m: m.cast_to_full(TREE),
    "finite numbers": lambda m: m.all_finite([1, 2.0, True, np.float16(7), 1j]),
    "finite word": lambda m: m.all_finite(["a", 1.0]),
    "finite key": lambda m: m.all_finite([KEY, 1.0]),
    "finite keys in jit": lambda m: jax.jit(m.all_finite)([KEY, KEY]),
    "finite in jit": lambda m: jax.jit(m.all_finite)([np.ones(2), np.ones(2), np.arange(2)]),
    "finite of examples": lambda m: jax.vmap(m.all_finite)([np.array([1.0, np.nan]), np.ones(2)]),
    "select by a bool": lambda m: m.select_tree(True, 1, 2),
    "select by an integer": lambda m: m.select_tree(np.int32(1), 1, 2),
    "select numbers": lambda m: m.select_tree(TRUE, [1.0, np.ones(2)], [2.0, np.zeros(2)]),
    "select words": lambda m: m.select_tree(TRUE, ["a"], ["a"]),
    "select keys": lambda m: m.select_tree(TRUE, KEY, KEY),
    "select shapes": lambda m: m.select_tree(TRUE, np.ones(2), np.ones(3)),
    "select dtypes": lambda m: m.select_tree(TRUE, np.ones(2, "f4"), np.ones(2, "f2")),
    "select structures": lambda m: m.select_tree(TRUE, [1.0, [2.0]], [1.0, 2.0]),
    "select in jit": lambda m: jax.jit(m.select_tree)(FALSE, [np.ones(2)] * 7, [np.zeros(2)] * 7),
    "select of examples": lambda m: jax.vmap(m.select_tree)(
        np.array([False, True]), [np.ones((2, 3))] * 6, [np.zeros((2, 3))] * 6
    ),
}
MADE = {
    "float": lambda m: m.DynamicLossScale(2.0**15),
    "float16": lambda m: m.DynamicLossScale(jnp.float16(2**15), jnp.int32(1999)),
    "weak": lambda m: m.DynamicLossScale(jnp.asarray(2.0**15)),
    "large": lambda m: m.DynamicLossScale(np.float32(3e38), np.int32(1999)),
    "minimum": lambda m: m.DynamicLossScale(jnp.float32(0.5), 0, 5, 3, np.float32(0.37)),
    "integer": lambda m: m.DynamicLossScale(np.int32(4)),
    "static": lambda m: m.StaticLossScale(2**15),
    "static float16": lambda m: m.StaticLossScale(jnp.float16(8)),
    "static zero": lambda m: m.StaticLossScale(0),
    "no-op": lambda m: m.NoOpLossScale(),
}
USED = {
    "scale": lambda s: s.scale(NUMBERS),
    "unscale": lambda s: s.unscale(NUMBERS),
    "scale a word": lambda s: s.scale("x"),
    "finite": lambda s: vars(s.adjust(TRUE)),
    "not finite": lambda s: vars(s.adjust(FALSE)),
    "not finite in jit": lambda s: vars(jax.jit(lambda s: s.adjust(FALSE))(s)),
    "a bool": lambda s: vars(s.adjust(True)),
    "two bools": lambda s: vars(s.adjust(np.ones(2, bool))),
    "text": repr,
    "paths": lambda s: str(jax.tree_util.tree_flatten_with_path(s)[0]),
    "mapped": lambda s: vars(jax.tree.map(lambda x: x, s)),
    "hash": hash,
}


def test_results_types_errors_and_warnings_are_those_of_jmp():
    uses = {
        f"{how} of {what}": lambda m, make=make, use=use: use(make(m))
        for what, make in MADE.items()
        for how, use in USED.items()
    }
    different = {}
    for name, call in (CALLS | uses).items():
        theirs, ours = (outcome(call, module) for module in (jmp, drop_in))
        if theirs != ours:
            different[name] = theirs, ours
    assert not different


def test_a_string_that_mpjax_knows_is_named():
    for text in ("mixed_bfloat16", "O2", "c=f16,storage=lean", "fp16"):
        with pytest.raises(ValueError, match=rf"^Unknown dtype.*mpjax\.get_policy\('{text}'\)"):
            drop_in.get_policy(text)
    with pytest.raises(ValueError, match=r"^Unknown dtype 'f17' must be half or one of .*64\.$"):
        drop_in.get_policy("f17")
    with pytest.raises(ValueError, match=r"^Unknown key 'q' .*or 'output'\.$"):
        drop_in.get_policy("q=f16")


def test_a_dynamic_scale_can_be_mapped_traced_by_shape_and_sharded():
    """Where jmp looks for a dtype in what JAX puts in place of a leaf, and finds none."""
    scale = drop_in.DynamicLossScale(jnp.float32(8))
    assert jax.eval_shape(lambda s: s.adjust(TRUE), scale).counter.dtype == "int32"
    assert jax.tree.map(lambda x: None, scale).loss_scale is None
    assert jax.tree.map(lambda x: "spec", scale).counter == "spec"
    both = jax.vmap(lambda s: s.adjust(FALSE), axis_size=2, in_axes=None)(scale)
    np.testing.assert_array_equal(both.loss_scale, [4, 4])


# ---- its objects go into all of mpjax ------------------------------------------------------------

PARAMS = {"w": np.full((4, 4), 0.5, np.float32)}
BATCH = np.ones((2, 4), np.float32)
TEXT = "params=float32,compute=bfloat16,output=float32"


def loss(params, x):
    return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("text", ["c=f16", TEXT, "bf16"])
def test_a_policy_means_to_mpjax_what_jmps_and_its_string_mean(text):
    policy = drop_in.get_policy(text)
    assert isinstance(policy, jmp.Policy)
    assert mpjax.get_policy(policy) == mpjax.get_policy(jmp.get_policy(text))
    assert mpjax.get_policy(policy) == mpjax.get_policy(text)
    for again in (copy.copy(policy), pickle.loads(pickle.dumps(policy))):
        assert again == policy and type(again) is drop_in.Policy


def test_programs_reports_and_steps_take_its_policies():
    policies = TEXT, drop_in.get_policy(TEXT)
    text, ours = (str(jax.make_jaxpr(mpjax.autocast(loss, p))(PARAMS, BATCH)) for p in policies)
    assert text == ours and "bf16" in ours
    reports = [str(mpjax.explain(loss, p)(PARAMS, BATCH)) for p in policies]
    assert reports[0] == reports[1]
    compared = mpjax.compare(loss, policies[1], progress=False)(PARAMS, BATCH)
    assert "bf16->bf16" in str(compared)
    assert not mpjax.find_nonfinite(loss, policies[1])(PARAMS, BATCH).found


SCALES = {
    "no-op": (lambda: drop_in.NoOpLossScale(), mpjax.NoOpLossScale, 1),
    "static": (lambda: drop_in.StaticLossScale(64), mpjax.StaticLossScale, 64),
    "dynamic": (lambda: drop_in.DynamicLossScale(jnp.float32(32)), mpjax.DynamicLossScale, 32),
}


@pytest.mark.parametrize("name", SCALES)
def test_loss_scales_are_translated_as_jmps_are(name):
    make, kind, value = SCALES[name]
    theirs = getattr(jmp, kind.__name__)(**vars(make()))
    states = []
    for scale in (make(), theirs):
        init, _ = mpjax.build_train_step(loss, optax.sgd(0.1), "c=f16,o=f32", loss_scale=scale)
        states.append(init(PARAMS).loss_scale)
        optimizer = mpjax.mixed_precision(optax.sgd(0.1), "mixed_float16", loss_scale=scale)
        assert isinstance(optimizer.init(PARAMS).loss_scale, kind)
    assert type(states[0]) is type(states[1]) is kind and states[0].loss_scale == value
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    pickled = pickle.loads(pickle.dumps(make()))
    assert pickled == make() and type(pickled).__module__ == "mpjax.jmp"


def test_objects_of_jmp_are_instances_too():
    """Of a library, or of a pickle; programs skip steps if their scale is such an instance."""
    for name, arguments in {
        "Policy": [np.float32] * 3,
        "NoOpLossScale": [],
        "StaticLossScale": [2.0],
        "DynamicLossScale": [2.0],
    }.items():
        cls, theirs = getattr(drop_in, name), getattr(jmp, name)(*arguments)
        assert isinstance(theirs, cls) and not isinstance(theirs, type("Mine", (cls,), {}))
        assert not isinstance(mpjax.get_policy("bf16"), cls) and not isinstance(2.0, cls)
    assert isinstance(jmp.StaticLossScale(2), drop_in.LossScale)


def test_haiku_takes_its_policies():
    hk = pytest.importorskip("haiku")

    class Layer(hk.Linear):
        pass

    hk.mixed_precision.set_policy(Layer, drop_in.get_policy("p=f32,c=bf16,o=f32"))
    program = jax.make_jaxpr(hk.transform(lambda x: Layer(4)(x)).init)(KEY, BATCH)
    assert "bf16" in str(program)


def test_a_subclass_is_used_as_it_is():
    @jax.tree_util.register_pytree_node_class
    class Mine(drop_in.DynamicLossScale):
        pass

    init, _ = mpjax.build_train_step(
        loss, optax.sgd(0.1), "c=f16,o=f32", loss_scale=Mine(jnp.float32(2))
    )
    assert type(init(PARAMS).loss_scale) is Mine


def test_its_casts_and_scales_are_seen_by_the_warnings_of_missing_lines(monkeypatch):
    monkeypatch.setattr(called, "CALLED", set())
    drop_in.Policy(jnp.float32, jnp.float32, jnp.float16).cast_to_compute(PARAMS)
    drop_in.NoOpLossScale().scale(1.0)
    assert not called.CALLED
    drop_in.get_policy("c=bf16").cast_to_compute(PARAMS)
    assert {called.CASTS} == called.CALLED
    drop_in.StaticLossScale(2.0).scale(1.0)
    assert {called.CASTS, called.SCALES} == called.CALLED
