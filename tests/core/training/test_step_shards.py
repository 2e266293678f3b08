"""Parameters that shard_map splits: one verdict, one norm and one loss scale, as on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support import thorough_but

import mpjax

SPECS = {"up": P(None, "model"), "gate": P("model"), "down": P("model"), "bias": P()}
RNG = np.random.default_rng(0)
PARAMS = {
    "up": RNG.normal(size=(4, 8)).astype(np.float32),
    "gate": np.ones(8, np.float32),
    "down": RNG.normal(size=(8, 4)).astype(np.float32),
    "bias": RNG.normal(size=4).astype(np.float32),
}
X = RNG.normal(size=(8, 4)).astype(np.float32)
LIMIT = 0.1


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def enters(x, axis):
    """Megatron's f: what all shards read. Its gradient is the sum of theirs."""
    return x


enters.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (jax.lax.psum(g, axis),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def leaves(x, axis):
    """Megatron's g: the sum of what the shards computed."""
    return jax.lax.psum(x, axis)


leaves.defvjp(lambda x, axis: (jax.lax.psum(x, axis), None), lambda axis, _, g: (g,))


def loss_fn(params, x, enter=lambda x: x, leave=lambda x: x):
    hidden = jnp.tanh(enter(x) @ params["up"]) * jnp.sqrt(params["gate"])
    return jnp.mean((leave(hidden @ params["down"]) + params["bias"]) ** 2)


def clipped():
    """Clips by the norm that the step passes where each device has a part of the gradients."""

    def update(updates, state, params=None, *, grad_norm=None, **extra_args):
        norm = optax.tree.norm(updates) if grad_norm is None else grad_norm
        factor = jnp.minimum(1, LIMIT / norm)
        return jax.tree.map(lambda u: u * factor, updates), state

    init = lambda params: optax.EmptyState()  # noqa: E731
    return optax.GradientTransformationExtraArgs(init, update)


def optimizer():
    return optax.chain(clipped(), optax.sgd(1.0, momentum=0.9))


def alone(policy, **options):
    return mpjax.build_train_step(loss_fn, optimizer(), policy, **options)


def split(policy, check_vma, tx=None, **options):
    """The step on a mesh: the batch over "data", the hidden width over "model"."""
    if check_vma:
        fun = functools.partial(loss_fn, leave=lambda x: jax.lax.psum(x, "model"))
    else:
        fun = functools.partial(
            loss_fn,
            enter=lambda x: enters(x, "model"),
            leave=lambda x: leaves(x, "model"),
        )
        options = {"param_specs": SPECS, **options}
    init, step = mpjax.build_train_step(fun, tx or optimizer(), policy, axis_name="data", **options)
    shapes = jax.eval_shape(init, PARAMS)
    specs = jax.tree_util.tree_map_with_path(lambda keys, _: spec_of(keys), shapes)
    each = jax.tree.map(lambda _: P(("data", "model")), METRICS)

    def marked(state, x):
        state, metrics = step(state, x)
        own = {name: jnp.reshape(metrics[name], 1) for name in METRICS}
        own = own if not check_vma else jax.lax.pcast(own, ("data", "model"), to="varying")
        return state, own

    mapped = jax.shard_map(
        marked,
        mesh=mesh(),
        in_specs=(specs, P("data")),
        out_specs=(specs, each),
        check_vma=check_vma,
    )
    return init, jax.jit(mapped)


def spec_of(keys):
    names = [getattr(key, "key", None) for key in keys]
    return next((SPECS[name] for name in names if name in SPECS), P())


METRICS = dict.fromkeys(("grad_norm", "grads_finite", "loss_scale", "skipped_steps"), 0)


@pytest.mark.parametrize("policy", thorough_but(["mixed_float16", "O2:float16", "float32"], 1))
@pytest.mark.parametrize("check_vma", [True, False])
def test_step_in_shard_map_equals_the_step_of_one_device(check_vma, policy):
    """A good step, one whose gradient is not finite in the shard of one device, and a good one."""
    scale = {"loss_scale": mpjax.DynamicLossScale(init_scale=64.0)}
    first, of_one = alone(policy, **scale)
    init, of_many = split(policy, check_vma, **scale)
    one, many = first(PARAMS), init(PARAMS)
    of_one = jax.jit(of_one)
    for bad in (False, True, False):
        (one, expected), (many, found) = (
            run(with_gate(s, 0.0 if bad else 1.0), X) for run, s in ((of_one, one), (of_many, many))
        )
        one, many = (with_gate(s, 1.0) for s in (one, many))
        assert bool(expected["grads_finite"]) is not bad
        for name in METRICS if not bad else [*METRICS][1:]:  # inf and -inf average to NaN
            np.testing.assert_allclose(found[name], np.full(8, expected[name]), rtol=2e-3)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
            np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2e-2, atol=2e-3)
    assert (int(one.skipped_steps), float(one.loss_scale.loss_scale)) == (1, 32)


def with_gate(state, last):
    """The state with another last gate: 0, where sqrt has no slope, is in one shard of "model"."""
    gate = state.params["gate"].at[-1].set(last)
    return mpjax.TrainState(**{**vars(state), "params": {**state.params, "gate": gate}})


@pytest.mark.parametrize("check_vma", thorough_but([True, False], 1))
@pytest.mark.parametrize("tx", [optax.clip_by_global_norm(1.0), optax.scale_by_trust_ratio()])
def test_an_optimizer_that_would_reduce_a_part_alone_is_refused(tx, check_vma):
    init, step = split("mixed_float16", check_vma, optax.chain(tx, optax.sgd(0.1)))
    with pytest.raises(ValueError, match=r"reduce_sum\), as clipping .* split over 'model'"):
        step(init(PARAMS), X)


def test_optimizer_that_reduces_over_the_axis_is_accepted():
    def norm(updates):
        parts = {name: jnp.sum(u**2) for name, u in updates.items()}
        return jnp.sqrt(parts.pop("bias") + jax.lax.psum(sum(parts.values()), "model"))

    def update(updates, state, params=None):
        return jax.tree.map(lambda u: u * jnp.minimum(1, LIMIT / norm(updates)), updates), state

    own = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    init, step = split("float32", False, optax.chain(own, optax.sgd(1.0, momentum=0.9)))
    new, _ = step(init(PARAMS), X)
    first, of_one = alone("float32")
    expected, _ = jax.jit(of_one)(first(PARAMS), X)
    for name in PARAMS:
        np.testing.assert_allclose(new.params[name], expected.params[name], rtol=1e-5)


def test_split_parameters_without_param_specs_are_warned_about():
    init, step = split("mixed_float16", False, param_specs=None)
    with pytest.warns(mpjax.errors.PrecisionWarning, match="maps 'model' too.*param_specs"):
        step(init(PARAMS), X)


@pytest.mark.parametrize("specs", ["model", {"up": "model"}, []])
def test_param_specs_that_are_no_partition_specs_are_refused(specs):
    with pytest.raises(ValueError, match="param_specs=.* must be a tree of jax.sharding.Partition"):
        mpjax.build_train_step(loss_fn, optax.sgd(0.1), param_specs=specs)


def test_param_specs_of_other_parameters_are_refused():
    init, step = split("mixed_float16", False, param_specs={"up": P()})
    with pytest.raises(ValueError, match="param_specs=.* does not fit the parameters"):
        step(init(PARAMS), X)


def test_mixed_precision_loop_in_shard_map_has_one_verdict():
    optimizer = mpjax.mixed_precision(optax.sgd(0.1), "mixed_float16", 64.0)
    fun = functools.partial(loss_fn, leave=lambda x: jax.lax.psum(x, "model"))

    def step(params, opt_state, x):
        grad = optimizer.value_and_grad(fun, opt_state, axis_name="data")
        _, grads = grad(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        *_, finite = mpjax.scaled_value_and_grad(fun, opt_state.loss_scale, axis_name="data")(
            params, x
        )
        return optax.apply_updates(params, updates), opt_state, finite

    params = {**PARAMS, "gate": np.float32([1] * 7 + [0])}
    specs = {"in_specs": (SPECS, P(), P("data")), "out_specs": (SPECS, P(), P())}
    new, opt_state, finite = jax.jit(jax.shard_map(step, mesh=mesh(), **specs))(
        params, optimizer.init(params), X
    )
    assert not finite and int(opt_state.skipped_steps) == 1
    for name in PARAMS:
        np.testing.assert_array_equal(new[name], params[name])


def test_members_of_an_ensemble_do_not_share_a_verdict():
    """Their loss scales and counts are split as well."""
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "mixed_float16")
    members = {name: np.stack([value, value]) for name, value in PARAMS.items()}
    members["bias"][1, 0] = np.inf
    states = jax.vmap(init)(members)
    fun = jax.shard_map(
        jax.vmap(step, in_axes=(0, None)), mesh=mesh(), in_specs=(P("model"), P()),
        out_specs=P("model"),
    )  # fmt: skip
    states, _ = jax.jit(fun)(states, X)
    assert states.skipped_steps.tolist() == [0, 1]
