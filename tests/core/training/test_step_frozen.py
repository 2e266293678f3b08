"""Steps with frozen weights: integers, micro-batches, shards, Flax, and labels that change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import thorough_but

import mpjax
import mpjax.linen
import mpjax.nnx
from mpjax import checkpoint

LABELS = {"base": "frozen", "lora": "trained"}
X = np.ones((4, 8), np.float32)


def frozen_base(optimizer, labels=None):
    parts = {"trained": optimizer, "frozen": optax.set_to_zero()}
    return optax.partition(parts, labels or LABELS)


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), frozen_base(optax.adamw(1e-2)))


def problem(dtype):
    base = np.arange(64).reshape(8, 8) % 5
    return {"base": jnp.asarray(base, dtype), "lora": jnp.ones((8, 8)) / 8}


def loss_fn(params, x):
    base = params["base"].astype(x.dtype) / 8
    return jnp.mean((x @ base + x @ params["lora"]) ** 2)


def trained(policy, dtype, **settings):
    init, step = mpjax.build_train_step(loss_fn, CLIPPED, policy, **settings)
    state = init(problem(dtype))
    many = jax.jit(lambda state, xs: jax.lax.scan(step, state, xs), donate_argnums=0)
    return many(state, np.stack([X] * 3))


CASES = [("mixed_bfloat16", "int8"), ("O2:bfloat16", "float16")]
CASES = [(*case, steps) for case in CASES for steps in (1, 2)]


@pytest.mark.parametrize(("policy", "dtype", "accumulate_steps"), thorough_but(CASES, 1, 2))
def test_base_is_unchanged_after_donated_steps_in_a_scan(policy, dtype, accumulate_steps):
    state, metrics = trained(policy, dtype, accumulate_steps=accumulate_steps)
    base = problem(dtype)["base"]
    assert state.params["base"].dtype == dtype and (state.params["base"] == base).all()
    assert int(state.step) == 3 and (np.diff(metrics["loss"]) < 0).all()


def test_norm_and_losses_are_those_of_the_trained_weights():
    _, metrics = trained("float32", "int8")
    params = problem("int8")
    gradient = jax.grad(lambda lora: loss_fn({**params, "lora": lora}, X))(params["lora"])
    # The same sums in another order.
    np.testing.assert_allclose(metrics["grad_norm"][0], optax.tree.norm(gradient), rtol=1e-5)


def test_narrower_dtypes_of_a_policy_apply_and_wider_ones_do_not():
    for policy, stored in {"O2:bfloat16": "bfloat16", "mixed_bfloat16": "float32"}.items():
        init, _ = mpjax.build_train_step(loss_fn, CLIPPED, policy)
        assert init(problem("float32")).params["base"].dtype == stored
    kept = mpjax.get_policy("O2:bfloat16").override({"base": "float32"})
    init, _ = mpjax.build_train_step(loss_fn, CLIPPED, kept)
    assert init(problem("bfloat16")).params["base"].dtype == "bfloat16"


def test_trained_integers_are_refused():
    init, _ = mpjax.build_train_step(loss_fn, optax.adam(0.1), "mixed_bfloat16")
    with pytest.raises(TypeError, match=r"params\['base'\] is int8.*set_to_zero"):
        init(problem("int8"))


@pytest.mark.parametrize("check_vma", [True, False])
def test_frozen_shards(check_vma):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    columns = jax.P(None, "model")

    def loss(params, x):
        local = loss_fn(params, x)
        return jax.lax.psum(local, "model") if check_vma else local

    specs = None if check_vma else {"base": columns, "lora": columns}
    init, step = mpjax.build_train_step(
        loss, frozen_base(optax.sgd(0.1)), "O2:bfloat16", param_specs=specs
    )
    state = init(problem("bfloat16"))
    places = jax.tree.map(lambda x: columns if x.ndim == 2 else jax.P(), state)
    run = jax.shard_map(
        step, mesh=mesh, in_specs=(places, jax.P()), out_specs=(places, jax.P()),
        check_vma=check_vma,
    )  # fmt: skip
    new, metrics = jax.jit(run)(state, X)
    assert (new.params["base"] == state.params["base"]).all()
    assert (new.params["lora"] != state.params["lora"]).any() and bool(metrics["grads_finite"])


def relabeled(freeze):
    """Freezes by a mask after the optimizer, so that the state has moments of all weights."""
    mask = {"base": freeze, "lora": False}
    return optax.chain(optax.adamw(1e-2), optax.masked(optax.set_to_zero(), mask))


@pytest.mark.parametrize(
    "policy", [pytest.param("O2:bfloat16", marks=pytest.mark.thorough), "O2:bfloat16,masters=split"]
)
def test_label_change_makes_a_master(tmp_path, policy):
    init, step = mpjax.build_train_step(loss_fn, relabeled(True), policy)
    state, _ = jax.jit(step)(init(problem("bfloat16")), X)
    assert isinstance(state.opt_state.masters["base"], optax.MaskedNode)
    checkpoint.save(tmp_path / "first", state)
    init, step = mpjax.build_train_step(loss_fn, relabeled(False), policy)
    like = init(problem("bfloat16"))
    with pytest.raises(ValueError, match="lacks masters/base"):
        step(state, X)
    resumed = checkpoint.restore(tmp_path / "first", like=like)
    masters = mpjax.optim.master_params(resumed.opt_state, resumed.params)
    before = mpjax.optim.master_params(state.opt_state, state.params)
    assert all((masters[name] == before[name]).all() for name in masters)
    resumed, metrics = jax.jit(step)(resumed, X)
    assert int(resumed.step) == 2 and bool(metrics["grads_finite"])
    assert (
        mpjax.optim.master_params(resumed.opt_state, resumed.params)["base"] != before["base"]
    ).all()


def test_parameters_alone_continue_with_other_labels(tmp_path):
    init, step = mpjax.build_train_step(loss_fn, CLIPPED, "O2:bfloat16")
    state, _ = jax.jit(step)(init(problem("bfloat16")), X)
    checkpoint.save(tmp_path / "first", state)
    params = checkpoint.restore(tmp_path / "first", like={"params": problem("bfloat16")})["params"]
    init, step = mpjax.build_train_step(loss_fn, optax.adamw(1e-2), "O2:bfloat16")
    state, metrics = jax.jit(step)(init(params), X)
    assert state.opt_state.masters["base"].dtype == "float32" and bool(metrics["grads_finite"])


def test_linen_state_keeps_an_integer_base():
    state = mpjax.linen.TrainState.create(
        apply_fn=loss_fn, params=problem("int8"), tx=CLIPPED, policy="mixed_float16"
    )

    @jax.jit
    def step(state, x):
        loss, grads = state.value_and_grad(state.apply_fn)(state.params, x)
        return state.apply_gradients(grads=grads), loss

    new, first = step(state, X)
    _, second = step(new, X)
    assert second < first and new.params["base"].dtype == "int8"
    assert (new.params["base"] == state.params["base"]).all()


class Quantized(nnx.Module):
    def __init__(self):
        self.base, self.lora = map(nnx.Param, problem("int8").values())

    def __call__(self, x):
        return loss_fn({"base": self.base[...], "lora": self.lora[...]}, x)


def test_nnx_optimizer_keeps_an_integer_base():
    model = Quantized()

    def labels(params):
        return jax.tree_util.tree_map_with_path(lambda keys, _: LABELS[keys[0].key], params)

    tx = optax.chain(optax.clip_by_global_norm(1.0), frozen_base(optax.adamw(1e-2), labels))
    optimizer = mpjax.nnx.Optimizer(model, tx, "mixed_bfloat16", wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = mpjax.nnx.value_and_grad(lambda model: model(x), optimizer)(model)
        assert nnx.to_pure_dict(grads).keys() == {"lora"}
        changes = optimizer.update(model, grads)
        return loss, changes

    first, changes = step(model, optimizer, X)
    assert not changes["base"].any() and changes["lora"].all()
    second, _ = step(model, optimizer, X)
    assert second < first and (model.base[...] == problem("int8")["base"]).all()
