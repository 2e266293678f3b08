"""Moments in 8 bits: which they are, and whatever holds, trains, shards or saves them."""

from typing import NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import bits
from support import thorough_but

import mpjax
from mpjax._src.optim.moments import MOMENTS

EIGHT = mpjax.optim.with_8bit_moments


def problem(rng):
    """Returns parameters, of which one is large enough for codes, and a batch."""
    draw = lambda *shape: np.float32(rng.normal(size=shape) / 8)  # noqa: E731
    params = {"up": draw(64, 96), "bias": np.zeros(96, np.float32), "down": draw(96, 64)}
    x = 8 * draw(32, 64)
    return params, (x, np.tanh(x @ draw(64, 64)))


def loss_fn(params, batch):
    x, y = batch
    hidden = jax.nn.relu(x @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - y).astype(jnp.float32) ** 2)


def loop(optimizer, batch, steps=20):
    """Returns a loop in plain optax, from parameters to losses, parameters and state."""

    def body(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    def run(params):
        carry = (params, optimizer.init(params))
        (params, state), losses = jax.lax.scan(body, carry, None, steps)
        return losses, params, state

    return run


def train(optimizer, params, batch, steps=20):
    return jax.jit(loop(optimizer, batch, steps))(params)


def dtypes(tree):
    return {str(x.dtype) for x in jax.tree.leaves(tree)}


INT8, UINT8, FLOAT32 = {"int8", "float32"}, {"uint8", "float32"}, {"float32"}
# What the fields of an optimizer's state are held in: float32 is that of the bias.
KINDS = {
    "momentum": (lambda: optax.sgd(0.05, 0.9), {"trace": INT8}),
    "adamw": (lambda: optax.adamw(3e-3), {"mu": INT8, "nu": UINT8}),
    "lamb": (lambda: optax.lamb(3e-3), {"mu": INT8, "nu": UINT8}),
    "adabelief": (lambda: optax.adabelief(3e-3), {"mu": INT8, "nu": UINT8}),
    "yogi": (lambda: optax.yogi(1e-2), {"mu": INT8, "nu": UINT8}),
    "amsgrad": (lambda: optax.amsgrad(3e-3), {"mu": INT8, "nu": FLOAT32, "nu_max": FLOAT32}),
    "lion": (lambda: optax.lion(1e-3), {"mu": INT8}),
    "novograd": (lambda: optax.novograd(3e-3), {"mu": INT8}),
    "rmsprop": (lambda: optax.rmsprop(1e-3), {"nu": UINT8}),
    "centered rmsprop": (lambda: optax.rmsprop(1e-3, centered=True), {"nu": FLOAT32}),
    "adagrad": (lambda: optax.adagrad(1e-2), {"sum_of_squares": FLOAT32}),
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=32), {"v_row": FLOAT32}),
    "muon": (lambda: optax.contrib.muon(1e-2), {}),
    "schedule-free": (
        lambda: optax.contrib.schedule_free(optax.rmsprop(3e-3), 3e-3, b1=0.9),
        {"z": FLOAT32, "nu": UINT8},
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_moments_in_8_bits_are_codes_for_each_optimizer(name, rng):
    params, _ = problem(rng)
    make, fields = KINDS[name]
    state = jax.eval_shape(EIGHT(make()).init, params)
    for field, kinds in fields.items():
        assert dtypes(optax.tree.get(state.inner_state, field)) == kinds, field


@pytest.mark.parametrize("name", thorough_but(KINDS, "adamw"))
def test_optimizer_with_8_bit_moments_trains_as_without(name, rng):
    params, batch = problem(rng)
    make, fields = KINDS[name]
    losses, *_ = train(make(), params, batch)
    found, new, state = train(EIGHT(make()), params, batch)
    for field, kinds in fields.items():
        assert dtypes(optax.tree.get(state.inner_state, field)) == kinds, field
    np.testing.assert_allclose(found[-1], losses[-1], rtol=0.1)
    assert found[-1] < 0.9 * found[0] and mpjax.all_finite((new, state.inner_state))
    assert int(state.rounded) == 20


def test_table_of_moments_names_classes_and_fields_of_optax():
    classes = {**vars(optax), **vars(optax.contrib), **vars(optax._src.transform)}
    classes["ScaleByRmsWithCountState"] = optax._src.transform.ScaleByRmsWithCountState
    classes["MuonState"] = optax.contrib._muon.MuonState
    for name, fields in MOMENTS.items():
        assert set(fields) <= set(classes[name]._fields)


def test_only_moments_of_large_leaves_are_codes_and_take_a_byte():
    params = {"large": jnp.ones((1024, 768)), "odd": jnp.ones((64, 70)), "edge": jnp.ones(4096)}
    params["small"] = jnp.ones(4095)
    state = jax.eval_shape(EIGHT(optax.adamw(1e-3)).init, params)
    adam = state.inner_state[0]
    assert {k: (v.dtype.name, v.shape) for k, v in adam.mu.items()} == {
        "large": ("int8", (1024, 768)),
        "odd": ("int8", (64, 70)),
        "edge": ("int8", (4096,)),
        "small": ("float32", (4095,)),
    }
    assert {k: v.shape for k, v in state.scales["0/nu"].items() if k != "small"} == {
        "large": (1024, 24),
        "odd": (64, 3),
        "edge": (128,),
    }
    assert state.scales["0/mu"]["small"] == optax.MaskedNode()
    held = [adam.mu["large"], adam.nu["large"], *(x["large"] for x in state.scales.values())]
    assert sum(x.nbytes if hasattr(x, "nbytes") else x.size for x in held) <= 2.07 * 1024 * 768


def test_bfloat16_moments_are_codes_too():
    params = np.ones((64, 64), jnp.bfloat16)
    optimizer = EIGHT(optax.adam(1e-2, mu_dtype=jnp.bfloat16))
    _, state = jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p)), params)
    assert dtypes(state.inner_state[0].mu) == {"int8"}


def test_custom_optimizer_names_its_moments(rng):
    class OwnState(NamedTuple):
        average: dict

    def own():
        def update(grads, state, params=None):
            average = jax.tree.map(lambda a, g: 0.9 * a + g, state.average, grads)
            return jax.tree.map(lambda a: -0.05 * a, average), OwnState(average)

        return optax.GradientTransformation(
            lambda params: OwnState(jax.tree.map(jnp.zeros_like, params)), update
        )

    params, batch = problem(rng)
    losses, _, state = train(EIGHT(own(), {"OwnState": {"average": "signed"}}), params, batch)
    assert dtypes(state.inner_state.average) == INT8 and losses[-1] < losses[0]
    assert dtypes(jax.eval_shape(EIGHT(own()).init, params).inner_state) == FLOAT32
    with pytest.raises(ValueError, match=r"one of \['signed', 'unsigned'\], not \['squares'\]"):
        EIGHT(own(), {"OwnState": {"average": "squares"}})


NO_BIAS = optax.masked(optax.set_to_zero(), {"up": False, "bias": True, "down": False})
AROUND = {
    "master weights": lambda inner: mpjax.optim.with_master_weights(EIGHT(inner)),
    "split masters": lambda inner: mpjax.optim.with_master_weights(EIGHT(inner), storage="split"),
    "stochastic rounding": lambda inner: mpjax.optim.with_stochastic_rounding(EIGHT(inner)),
    "inside": lambda inner: EIGHT(mpjax.optim.with_master_weights(inner)),
    "skip_nonfinite": lambda inner: mpjax.optim.skip_nonfinite(EIGHT(inner)),
    "mixed_precision": lambda inner: mpjax.mixed_precision(EIGHT(inner), "mixed_float16"),
    "chain": lambda inner: optax.chain(optax.clip_by_global_norm(1.0), EIGHT(inner)),
    "inner chain": lambda inner: EIGHT(optax.chain(optax.clip_by_global_norm(1.0), inner)),
    "masked": lambda inner: optax.chain(
        optax.masked(EIGHT(inner), {"up": True, "bias": False, "down": True}), NO_BIAS
    ),
    "inner masked": lambda inner: EIGHT(
        optax.chain(optax.masked(inner, {"up": True, "bias": False, "down": True}), NO_BIAS)
    ),
    "partition": lambda inner: optax.partition(
        {"a": EIGHT(inner), "b": EIGHT(optax.sgd(0.1, 0.9))}, {"up": "a", "bias": "b", "down": "b"}
    ),
    "inner partition": lambda inner: EIGHT(
        optax.partition({"a": inner, "b": optax.sgd(0.1)}, {"up": "a", "bias": "b", "down": "a"})
    ),
    "inject_hyperparams": lambda inner: optax.inject_hyperparams(
        lambda rate: EIGHT(optax.chain(inner, optax.scale(rate)))
    )(rate=1.0),
    "inner inject_hyperparams": lambda inner: EIGHT(
        optax.inject_hyperparams(lambda rate: optax.chain(inner, optax.scale(rate)))(rate=1.0)
    ),
    "MultiSteps": lambda inner: optax.MultiSteps(EIGHT(inner), 2).gradient_transformation(),
    "inner MultiSteps": lambda inner: EIGHT(optax.MultiSteps(inner, 2).gradient_transformation()),
    "twice": lambda inner: EIGHT(EIGHT(inner)),
}


def composed(name, rng):
    """Returns a loop of optax, and its parameters."""
    params, batch = problem(rng)
    if name in ("master weights", "split masters", "stochastic rounding", "inside"):
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return loop(AROUND[name](optax.adamw(1e-3)), batch), params


@pytest.mark.parametrize("name", thorough_but(AROUND, *[*AROUND][::2]))
def test_moments_are_codes_wherever_the_wrapper_stands(name, rng):
    assert {"int8", "uint8"} <= dtypes(jax.eval_shape(*composed(name, rng))[2])


@pytest.mark.parametrize("name", thorough_but(AROUND, "split masters"))
def test_optimizer_with_8_bit_moments_trains_in_each_composition(name, rng):
    run, params = composed(name, rng)
    losses, _, state = jax.jit(run)(params)
    assert {"int8", "uint8"} <= dtypes(state)
    assert losses[-1] < 0.98 * losses[0] and mpjax.all_finite(state)


def test_optax_tree_get_finds_hyperparameters_and_codes():
    optimizer = EIGHT(optax.inject_hyperparams(optax.adamw)(1e-3))
    state = jax.jit(optimizer.init)(np.ones((64, 64), np.float32))
    assert optax.tree.get(state, "learning_rate") == np.float32(1e-3)
    assert optax.tree.get(state, "mu").dtype == jnp.int8
    assert optax.tree.get(optax.tree.set(state, learning_rate=0.5), "learning_rate") == 0.5


@pytest.mark.thorough
def test_micro_steps_between_updates_leave_codes_as_they_are(rng):
    params, batch = problem(rng)
    optimizer = EIGHT(optax.MultiSteps(optax.adamw(1e-3), 4).gradient_transformation())
    _, params, state = train(optimizer, params, batch, steps=4)
    _, after = jax.jit(optimizer.update)(params, state, params)
    held = [(x.inner_state.inner_opt_state, x.scales) for x in (state, after)]
    assert bits(held[0]) == bits(held[1])


@pytest.mark.parametrize(
    "policy", thorough_but(["float32", "mixed_float16", "O2:float16", "O3:bfloat16"], "O2:float16")
)
def test_a_skipped_step_leaves_every_code_as_it_was(policy, rng):
    params, (x, y) = problem(rng)
    init, step = mpjax.build_train_step(loss_fn, EIGHT(optax.adamw(1e-2)), policy)
    step = jax.jit(step, donate_argnums=0)
    state, first = jax.jit(init)(params), None
    spoiled = x.copy()
    spoiled[0, 0] = np.nan
    for number in range(15):
        state, metrics = step(state, (x, y))
        first = metrics["loss"] if first is None else first
        if number == 7:
            before = bits((state.params, state.opt_state))
            state, bad = step(state, (spoiled, y))
            assert not bad["loss_finite"] and bits((state.params, state.opt_state)) == before
    assert metrics["loss"] < 0.8 * first and step._cache_size() == 1


def test_nonfinite_moments_stay_visible_in_codes(rng):
    params, _ = problem(rng)
    optimizer = EIGHT(optax.adamw(1e-3))
    update = jax.jit(optimizer.update)
    bad = jax.tree.map(np.ones_like, params)
    bad["up"][3, 5] = np.nan
    _, state = update(bad, jax.jit(optimizer.init)(params), params)
    updates, state = update(jax.tree.map(np.ones_like, params), state, params)
    up = np.asarray(updates["up"])
    assert np.isnan(up[3, 5]) and np.isfinite(up[4]).all()


def test_vanishing_gradient_with_8_bit_moments_makes_no_large_step():
    """A row that is seen once: its second moment decays beside large ones, and divides."""
    params = np.zeros((64, 64), np.float32)
    optimizer = EIGHT(optax.adam(1.0))
    once = np.ones((64, 64), np.float32)
    once[:, 0] = 1e-5

    def body(carry, grads):
        updates, state = optimizer.update(grads, carry)
        return state, jnp.abs(updates).max()

    zero = once.copy()
    zero[:, 0] = 0
    grads = np.stack([once, *[zero] * 40])
    _, largest = jax.jit(lambda g: jax.lax.scan(body, optimizer.init(params), g))(grads)
    assert float(largest.max()) < 3


@pytest.mark.thorough
@pytest.mark.parametrize("specs", [P("data"), P(None, "data"), P("data", "model")])
def test_bits_of_codes_do_not_depend_on_sharding(specs, rng):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = {"w": np.float32(rng.normal(size=(64, 256)))}
    grads = [np.float32(rng.normal(size=(64, 256))) for _ in range(3)]
    optimizer = EIGHT(optax.adamw(1e-2))

    def run(where):
        place = (lambda x: x) if where is None else (lambda x: jax.device_put(x, where))
        update = jax.jit(optimizer.update)
        now = jax.tree.map(place, params)
        state = jax.jit(optimizer.init)(now)
        for g in grads:
            updates, state = update({"w": place(g)}, state, now)
        return updates, state

    alone, spread = run(None), run(NamedSharding(mesh, specs))
    assert bits(jax.device_get(alone)) == bits(jax.device_get(spread))
    assert spread[1].inner_state[0].mu["w"].sharding.is_equivalent_to(NamedSharding(mesh, specs), 2)


def test_codes_and_scales_are_sharded_as_their_parameters():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = {"even": np.ones((64, 256), np.float32), "odd": np.ones((64, 96), np.float32)}
    init, step = mpjax.build_train_step(
        lambda p, x: jnp.mean((x @ p["even"]) ** 2) + jnp.mean((x @ p["odd"]) ** 2),
        EIGHT(optax.adam(0.1)),
    )
    where = NamedSharding(mesh, P("model", "data"))
    state = mpjax.optim.state_shardings(jax.eval_shape(init, params), where)
    scales = optax.tree.get(state.opt_state, "scales")["0/mu"]
    assert optax.tree.get(state.opt_state, "mu") == {"even": where, "odd": where}
    # Three blocks are not divided by four devices.
    assert {k: v.spec for k, v in scales.items()} == {
        "even": P("model", "data"),
        "odd": P("model"),
    }
    made = jax.jit(init, out_shardings=state)(params)
    made, _ = jax.jit(step, out_shardings=(state, None))(made, jnp.ones((8, 64)))
    with jax.set_mesh(mesh):
        specs = mpjax.optim.state_shardings(jax.eval_shape(init, params), P("model", "data"))
    assert optax.tree.get(specs.opt_state, "scales")["0/mu"]["odd"] == P("model")


def program(optimizer):
    return mpjax.build_train_step(loss_fn, optimizer, "O2:bfloat16")


@pytest.mark.thorough
def test_run_with_8_bit_moments_continues_from_checkpoint_and_bytes(rng, tmp_path):
    params, batch = problem(rng)
    init, step = program(EIGHT(optax.adamw(1e-2)))
    step = jax.jit(step)
    like = jax.jit(init)(params)
    state, _ = step(like, batch)
    mpjax.checkpoint.save(tmp_path / "state", state)
    for back in (
        mpjax.checkpoint.restore(tmp_path / "state", like),
        flax.serialization.from_bytes(like, flax.serialization.to_bytes(state)),
    ):
        assert bits(back) == bits(state) and bits(step(back, batch)) == bits(step(state, batch))
    for other in (EIGHT(optax.lion(1e-2)), EIGHT(optax.adabelief(1e-2))):
        with pytest.raises(ValueError, match="a different (model or )?optimizer"):
            like = jax.eval_shape(program(other).init, params)
            mpjax.checkpoint.restore(tmp_path / "state", like)


def test_update_with_8_bit_moments_refuses_the_state_of_another_optimizer(rng):
    params, _ = problem(rng)
    optimizer = EIGHT(optax.adam(0.1))
    others = [
        jax.eval_shape(optax.adam(0.1).init, params),
        jax.eval_shape(EIGHT(optax.sgd(0.1, 0.9)).init, params),
        jax.eval_shape(optimizer.init, {"w": np.ones((64, 64), np.float32)}),
        jax.eval_shape(optimizer.init, params)._replace(scales={}),
    ]
    for state in others:
        with pytest.raises(ValueError, match="(different optimizer|for other parameters)"):
            jax.eval_shape(optimizer.update, params, state, params)
    with pytest.raises(TypeError, match="inner=.*must be an optax optimizer"):
        EIGHT(optax.adam)
