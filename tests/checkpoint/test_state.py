"""A state that is saved and restored: bit for bit, whatever it holds, wherever it lives."""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from problems import bits, linear_loss, linear_problem, net_loss, net_problem
from support import thorough_but

import mpjax
from mpjax import checkpoint


def described(tree):
    weak = lambda x: getattr(x, "weak_type", False)  # noqa: E731
    return [(x.shape, x.dtype, weak(x), x.committed) for x in jax.tree.leaves(tree)]


def train(policy, rng, key):
    params, model_state, batch = net_problem(rng)
    optimizer = mpjax.optim.skip_nonfinite(optax.MultiSteps(optax.adamw(1e-2), 2))
    options = {"has_aux": True, "accumulate_steps": 2}
    init, step = mpjax.build_train_step(net_loss, optimizer, policy, **options)
    like = jax.jit(init)(params, model_state, key)
    state, step = like, jax.jit(step)
    for _ in range(3):  # the fourth is the second half of an accumulated one
        state, _ = step(state, batch)
    return state, lambda s: step(s, batch)[0], like


POLICIES = [
    ("float32", jax.random.PRNGKey),
    ("mixed_float16", jax.random.key),
    ("O2:float16", jax.random.key),
    ("O3:bf16", jax.random.PRNGKey),
]


@pytest.mark.parametrize("policy, key", thorough_but(POLICIES, 2))
def test_a_resumed_run_is_bit_for_bit_the_run_that_went_on(policy, key, rng, tmp_path):
    state, step, like = train(policy, rng, key(3))
    checkpoint.save(tmp_path / "c", state)
    back = checkpoint.restore(tmp_path / "c", like)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert described(back) == described(like)
    assert bits(back) == bits(state)
    assert bits(step(step(back))) == bits(step(step(state)))


def test_restored_skips_and_trackers_go_on(rng, tmp_path):
    params, batch = linear_problem(rng)
    bad = (batch[0].copy(), batch[1])
    bad[0][0, 0] = np.inf
    scale = mpjax.DynamicLossScale(2.0**8, growth_interval=3, hysteresis=2)
    init, step = mpjax.build_train_step(
        linear_loss, optax.adam(1e-2), "mixed_float16", loss_scale=scale
    )
    like = jax.jit(init)(params)
    state, step = like, jax.jit(step)
    for b in (batch, batch, bad, bad):
        state, _ = step(state, b)
    checkpoint.save(tmp_path / "c", state)
    back = checkpoint.restore(tmp_path / "c", like)
    assert int(back.skipped_steps) == int(back.consecutive_skips) == 2 and int(back.step) == 2
    for b in (bad, batch, batch):
        (state, _), (back, _) = step(state, b), step(back, b)
        assert bits(back) == bits(state)


def test_shapes_alone_are_enough_to_restore(rng, tmp_path):
    params, model_state, _ = net_problem(rng)
    init, _ = mpjax.build_train_step(net_loss, optax.adam(1e-2), "O2:float16", has_aux=True)
    state = jax.jit(init)(params, model_state, jax.random.key(0))
    checkpoint.save(tmp_path / "c", state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    assert bits(checkpoint.restore(tmp_path / "c", shapes)) == bits(state)


def test_a_restored_state_can_be_donated(rng, tmp_path):
    params, batch = linear_problem(rng)
    build = functools.partial(mpjax.build_train_step, linear_loss, optax.adam(1e-2))
    checkpoint.save(tmp_path / "c", jax.jit(build("float32")[0])(params))
    init, step = build("O2:float16")  # with masters and a loss scale, which were not saved
    like, step = jax.jit(init)(params), jax.jit(step, donate_argnums=0)
    step(checkpoint.restore(tmp_path / "c", like), batch)
    step(like, batch)  # nothing of like was taken


@pytest.mark.parametrize("to", thorough_but([1, 2, 4, 8], 3))
def test_state_is_restored_onto_another_number_of_devices(to, rng, tmp_path):
    params = {"w": np.float32(rng.normal(size=(8, 16))), "b": np.zeros(16, np.float32)}
    init, _ = mpjax.build_train_step(linear_loss, optax.adam(1e-2), "O2:float16")

    made = jax.jit(init)(params)

    def place(devices):
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,))
        spread = NamedSharding(mesh, PartitionSpec("x"))
        whole = NamedSharding(mesh, PartitionSpec())
        sharding = lambda x: spread if x.shape and x.shape[0] % devices == 0 else whole  # noqa: E731
        return jax.tree.map(lambda x: jax.device_put(x, sharding(x)), made)

    state = place(4)
    checkpoint.save(tmp_path / "c", state)
    like = place(to)
    back = checkpoint.restore(tmp_path / "c", like)
    assert bits(back) == bits(state)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(like), strict=True):
        assert got.sharding == want.sharding and got.committed


def test_the_state_of_an_nnx_module_goes_from_policy_to_policy(tmp_path):
    graph, params, rest = nnx.split(nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, batch, model_state):
        module = nnx.merge(graph, params, model_state)
        return jnp.mean(module(batch) ** 2), nnx.split(module, nnx.Param, ...)[2]

    build = functools.partial(mpjax.build_train_step, loss_fn, optax.adam(1e-3))
    was, to = (build(policy)[0](params, rest) for policy in ("p=bf16,c=bf16,o=f32", "float32"))
    checkpoint.save(tmp_path / "c", was)
    assert bits(checkpoint.restore(tmp_path / "c", was)) == bits(was)
    back = checkpoint.restore(tmp_path / "c", to)
    assert jax.tree.structure(back) == jax.tree.structure(to)
    assert bits(back.params) == bits(was.opt_state.masters)


def test_keys_are_restored_as_keys_of_their_implementation(tmp_path):
    state = {"a": jax.random.key(1), "b": jax.random.split(jax.random.key(2, impl="rbg"), 3)}
    checkpoint.save(tmp_path / "c", state)
    assert bits(checkpoint.restore(tmp_path / "c", state)) == bits(state)
    for other in (jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0)):
        with pytest.raises(ValueError, match="a is key<fry>|a has shape"):
            checkpoint.restore(tmp_path / "c", {**state, "a": other})


def test_any_tree_of_arrays_is_saved(tmp_path):
    state = {
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "a.b": {"c/d": jnp.arange(3)},
        "mlp/~/linear": {"w": jnp.ones(2, jnp.float16)},
        "flag": jnp.array(True),
        "wave": jnp.ones(2, jnp.complex64),
        "numpy": np.ones(2, np.float32),
        "eighths": jnp.ones(2, jnp.float8_e4m3fn),
        "list": [jnp.int32(3), (jnp.float32(np.nan), None)],
        "": jnp.ones(1),
        "deep": {"": {"": jnp.ones(2), "w": jnp.ones(3)}},
        ".zarray": {"..": jnp.zeros(2), "0": jnp.ones(1), "ü\n\0": jnp.ones(1)},
        "quarters": jnp.ones(3, jnp.int4),
        "no keys": jax.random.split(jax.random.key(0), 0),
    }
    checkpoint.save(tmp_path / "c", state)
    back = checkpoint.restore(tmp_path / "c", state)
    assert jax.tree.structure(back) == jax.tree.structure(state) and bits(back) == bits(state)
    assert [x.dtype for x in jax.tree.leaves(back)] == [x.dtype for x in jax.tree.leaves(state)]


def test_a_tree_that_is_empty_is_saved(tmp_path):
    checkpoint.save(tmp_path / "c", {"empty": jnp.zeros(0)}, data=1)
    assert checkpoint.restore(tmp_path / "c", {"empty": jnp.zeros(0)})["empty"].shape == (0,)


def test_numpy_arrays_are_saved_in_the_dtypes_that_the_description_says(tmp_path):
    """Without x64, JAX would round the one, and truncate the other to 0."""
    state = {"w": np.full(3, 0.1), "i": np.full(2, 2**40)}
    checkpoint.save(tmp_path / "c", state)
    with jax.enable_x64(True):
        assert bits(checkpoint.restore(tmp_path / "c", state)) == bits(state)


def test_float64_is_restored_as_float64_or_refused(tmp_path):
    with jax.enable_x64(True):
        state = {"w": jnp.full(3, 0.1)}
        checkpoint.save(tmp_path / "c", state)
        assert bits(checkpoint.restore(tmp_path / "c", state)) == bits(state)
    with pytest.raises(ValueError, match="params/w|w is float64.*jax_enable_x64"):
        checkpoint.restore(tmp_path / "c", {"w": np.zeros(3)})
    with pytest.raises(ValueError, match="w from float64 to float32.*allow_narrowing=True"):
        checkpoint.restore(tmp_path / "c", {"w": jnp.zeros(3)})
    back = checkpoint.restore(tmp_path / "c", {"w": jnp.zeros(3)}, allow_narrowing=True)
    assert back["w"].dtype == jnp.float32 and back["w"][0] == np.float32(0.1)
    placed = {"w": jax.device_put(jnp.zeros(3), jax.devices()[1])}
    back = checkpoint.restore(tmp_path / "c", placed, allow_narrowing=True)
    assert back["w"].devices() == {jax.devices()[1]} and back["w"][0] == np.float32(0.1)
    with jax.enable_x64(True):
        checkpoint.save(tmp_path / "huge", {"w": jnp.full(3, 1e300)})
    with pytest.raises(ValueError, match="become infinite in w .float64 to float32"):
        checkpoint.restore(tmp_path / "huge", placed, allow_narrowing=True)


def test_describe_gives_policy_data_versions_dtypes_and_shapes(rng, tmp_path):
    params, _ = linear_problem(rng)
    init, _ = mpjax.build_train_step(linear_loss, optax.adam(1e-2), "O2:float16")
    data = {"epoch": 3, "position": [1, 2.5, None, "x"]}
    checkpoint.save(tmp_path / "c", init(params), policy="o2:f16", data=data)
    found = checkpoint.describe(tmp_path / "c")
    assert mpjax.get_policy(found.policy) == mpjax.get_policy("O2:float16")
    assert found.data == data
    assert found.mpjax == mpjax.__version__ and found.jax == jax.__version__
    assert found.dtypes["params/w"] == "float16" and found.shapes["params/w"] == (4, 3)
    assert found.dtypes["opt_state/masters/w"] == "float32"
    about = json.loads((tmp_path / "c" / "about" / "metadata").read_text())
    assert about["leaves"]["opt_state/masters/w"]["means"] == "master of params/w"


DATA = [{1: 2}, (1, 2), float("nan"), float("inf"), {"x": {1, 2}}, np.int64(3), [b"x"], [10**5000]]


@pytest.mark.parametrize("data", DATA, ids=lambda data: type(data).__name__)
def test_data_that_json_does_not_give_back_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match="data=.*JSON"):
        checkpoint.save(tmp_path / "c", {"w": jnp.ones(2)}, data=data)
    assert not (tmp_path / "c").exists()


def test_a_checkpoint_is_never_overwritten(tmp_path):
    checkpoint.save(tmp_path / "c", {"w": jnp.ones(2)})
    with pytest.raises(FileExistsError, match="never overwritten"):
        checkpoint.save(tmp_path / "c", {"w": jnp.zeros(2)})
    assert checkpoint.restore(tmp_path / "c", {"w": jnp.zeros(2)})["w"].sum() == 2


def test_relative_path_of_a_checkpoint_starts_at_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save("here", {"w": jnp.ones(2)})
    assert (tmp_path / "here" / "about").exists()
    assert checkpoint.describe(Path("here")).shapes == {"w": (2,)}


def test_a_single_array_and_another_order_of_bytes_are_saved(tmp_path):
    values = np.arange(3, dtype=np.float32)
    for i, value in enumerate((values, values.astype(">f4"), values[::-1][::-1])):
        checkpoint.save(tmp_path / str(i), value)
        back = checkpoint.restore(tmp_path / str(i), values)
        assert back.dtype == np.float32 and bits(back) == bits(values)


def donated():
    array = jnp.ones(2)
    array.delete()
    return array


REFUSED = [
    (jax.ShapeDtypeStruct((2,), jnp.float32), ValueError, "only a shape"),
    (donated, ValueError, "deleted.*donated"),
    (10**10, TypeError, "is 10000000000, not an array"),
    (1e300, TypeError, "is 1e.300, not an array"),
    (np.ma.array([1.0, 2.0], mask=[False, True]), TypeError, "masked_array.*not an array"),
    (np.zeros(2, jax.dtypes.float0), TypeError, "float0.*not an array"),
    (np.array([None]), TypeError, "not an array"),
    (jnp.ones(2, jnp.uint4), ValueError, "is uint4, which checkpoints do not support.*Cast"),
    (
        np.ones(2, np.longdouble),
        ValueError,
        "longdouble|is float128, which",
    ),
]


@pytest.mark.parametrize("leaf, kind, message", REFUSED, ids=lambda x: type(x).__name__)
def test_a_leaf_that_cannot_be_saved_is_named_before_anything_is_made(
    leaf, kind, message, tmp_path
):
    state = {"a": {"b": [leaf() if callable(leaf) else leaf]}}
    with pytest.raises(kind, match=rf"(?s)state\['a/b/0'\] .*{message}"):
        checkpoint.save(tmp_path / "runs" / "c", state)
    assert not [*tmp_path.iterdir()]
    with checkpoint.Manager(tmp_path) as manager:
        with pytest.raises(kind, match=r"state\['a/b/0'\]"):
            manager.save(1, state)
        assert manager.steps() == []


def test_save_inside_jit_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"state\['w'\] is traced.*outside"):
        jax.eval_shape(lambda w: checkpoint.save(tmp_path / "c", {"w": w}), jnp.ones(2))


@pytest.mark.parametrize(
    "state, message",
    [
        ({"a": jnp.ones(1), "a/": jnp.ones(2)}, "two leaves have the name 'a'"),
        ({"\udc80": jnp.ones(1)}, "not valid Unicode"),
        ({"f": jnp.sin}, r"state\['f'\] is .*not an array"),
        ({"a": {"b": jnp.ones(1)}, "a/b": jnp.ones(1)}, "two leaves have the name 'a/b'"),
        ({"s": "text"}, r"state\['s'\] is 'text', not an array"),
    ],
)
def test_save_refuses_leaves_that_are_no_arrays_or_share_a_name(state, message, tmp_path):
    with pytest.raises((TypeError, ValueError), match=message):
        checkpoint.save(tmp_path / "c", state)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("like", ["x", jnp.sin, {"w": "x"}, np.array(["x"])], ids=type)
def test_restore_names_what_is_wrong_with_its_arguments(like, tmp_path):
    checkpoint.save(tmp_path / "c", {"w": np.ones(2, np.float32)})
    checkpoint.save_safetensors(tmp_path / "s", {"w": np.ones(2, np.float32)})
    with pytest.raises(TypeError, match="^like.*not an array"):
        checkpoint.restore(tmp_path / "c", like)
    for name in ("verify", "allow_narrowing"):
        with pytest.raises(ValueError, match=f"{name}='no' must be True or False"):
            checkpoint.restore(tmp_path / "c", {"w": np.ones(2)}, **{name: "no"})
    with pytest.raises(ValueError, match="allow_narrowing=1 must be True or False"):
        checkpoint.load_safetensors(tmp_path / "s", {"w": np.ones(2)}, allow_narrowing=1)
