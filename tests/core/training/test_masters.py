import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import run_updates
from support import thorough_but

import mpjax
from mpjax._src.core.training.masters import MasterWeightsState, apply_updates
from mpjax._src.core.training.optimizers import in_full_precision

HALVES = ["float16", "bfloat16"]


def mixed_params(rng, half="bfloat16"):
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), half)  # noqa: E731
    return {"w": draw(4, 3), "norm": {"scale": np.float32(rng.normal(size=3))}, "b": draw(3)}


def mixed_grads(rng, params, dtype=None):
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(dtype or p.dtype), params)


def assert_rounded(params, masters):
    jax.tree.map(
        lambda p, m: np.testing.assert_array_equal(
            np.asarray(p), np.asarray(m).astype(p.dtype), strict=True
        ),
        params,
        masters,
    )


WRAPPERS = {
    "plain": lambda inner: mpjax.optim.with_master_weights(inner),
    "chain outside": lambda inner: optax.chain(
        optax.clip_by_global_norm(1.0), mpjax.optim.with_master_weights(inner)
    ),
    "chain inside": lambda inner: mpjax.optim.with_master_weights(
        optax.chain(optax.clip_by_global_norm(1.0), inner)
    ),
    "masked": lambda inner: optax.masked(
        mpjax.optim.with_master_weights(inner), {"w": True, "norm": {"scale": True}, "b": True}
    ),
    "multi_transform": lambda inner: optax.multi_transform(
        {
            "a": mpjax.optim.with_master_weights(inner),
            "b": mpjax.optim.with_master_weights(optax.sgd(0.1)),
        },
        {"w": "a", "norm": {"scale": "b"}, "b": "b"},
    ),
    "inject_hyperparams": lambda inner: mpjax.optim.with_master_weights(
        optax.chain(inner, optax.inject_hyperparams(optax.scale)(step_size=0.5))
    ),
    "in inject_hyperparams": lambda inner: optax.inject_hyperparams(
        lambda rate: mpjax.optim.with_master_weights(optax.chain(inner, optax.scale(rate))),
        hyperparam_dtype=jnp.float32,
    )(rate=0.5),
    "MultiSteps": lambda inner: optax.MultiSteps(mpjax.optim.with_master_weights(inner), 3),
    "in MultiSteps": lambda inner: mpjax.optim.with_master_weights(
        optax.MultiSteps(inner, 3).gradient_transformation()
    ),
    "skip_nonfinite": lambda inner: mpjax.optim.skip_nonfinite(
        mpjax.optim.with_master_weights(inner)
    ),
}
INNERS = {
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
}
PAIRS = list(itertools.product(INNERS, HALVES))


ALL = list(itertools.product([None, "float32"], INNERS, WRAPPERS))
# Every wrapper once; optimizers that are quickly compiled.
QUICK = zip(itertools.cycle([None, "float32"]), itertools.cycle(["sgd", "adamw"]), WRAPPERS)


@pytest.mark.parametrize("grad_dtype, inner, wrapper", thorough_but(ALL, *QUICK))
def test_parameters_are_their_master_weights_rounded_under_every_wrapper(
    wrapper, inner, grad_dtype, rng
):
    params = mixed_params(rng)
    grads = [mixed_grads(rng, params, grad_dtype) for _ in range(7)]
    optimizer = WRAPPERS[wrapper](INNERS[inner]())
    new, state = run_updates(optimizer, params, grads)
    masters = mpjax.optim.master_params(state, new)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(masters)} == {"float32"}
    assert_rounded(new, masters)
    # The weights did move, and a master is more than its rounded parameter.
    assert not jnp.array_equal(new["w"], params["w"])
    assert not jnp.array_equal(masters["w"], new["w"].astype(jnp.float32))


@pytest.mark.parametrize("inner, half", thorough_but(PAIRS, 0, 5))
def test_master_weights_follow_the_float32_run(half, inner, rng):
    """Weight decay and trust ratios see float32 parameters, so both runs are the same run."""
    params = mixed_params(rng, half)
    grads = [mixed_grads(rng, params, "float32") for _ in range(20)]
    full = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    expected, _ = run_updates(INNERS[inner](), full, grads)
    new, state = run_updates(mpjax.optim.with_master_weights(INNERS[inner]()), params, grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        mpjax.optim.master_params(state, new),
        expected,
    )


def test_master_weights_keep_small_updates():
    """bfloat16 with Adam at 1e-3: without masters 200 steps leave the weights at 1.0."""
    params = np.ones(4, jnp.bfloat16)
    grads = [params] * 200
    stuck, _ = run_updates(in_full_precision(optax.adam(1e-3)), params, grads)
    moved, _ = run_updates(mpjax.optim.with_master_weights(optax.adam(1e-3)), params, grads)
    assert (stuck == 1).all()
    np.testing.assert_allclose(moved.astype(jnp.float32), 0.8, atol=0.005)


def test_only_16_bit_leaves_have_master_weights_and_the_state_is_float32(rng):
    params = mixed_params(rng)
    state = mpjax.optim.with_master_weights(optax.adam(1e-3)).init(params)
    assert isinstance(state.masters["norm"]["scale"], optax.MaskedNode)
    assert len(jax.tree.leaves(state.masters)) == 2
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype.name for x in floats} == {"float32"}


def test_state_without_16_bit_leaves_has_no_tree_of_masters():
    params = {f"layer_{i}": jnp.ones(2) for i in range(8)}
    optimizer = mpjax.optim.with_master_weights(optax.sgd(0.1))
    state = optimizer.init(params)
    assert jax.tree.structure(state.masters).num_nodes == 1
    updates, state = optimizer.update(params, state, params)
    assert jax.tree.structure(state.masters).num_nodes == 1
    assert all((x == -0.1 * jnp.ones(2)).all() for x in jax.tree.leaves(updates))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    with pytest.raises(ValueError, match="'layer_0'.* was float32 in init, but is 16-bit"):
        optimizer.update(params, state, half)


def test_inner_optimizer_sees_float32_and_updates_of_16_bit_leaves_are_float32(rng):
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(updates=updates, params=params, extra=extra_args)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: seen.update(init=params), update)
    optimizer = mpjax.optim.with_master_weights(spy)
    params = mixed_params(rng, "float16")
    updates, _ = optimizer.update(params, optimizer.init(params), params, value=3.0)
    for name in ("init", "updates", "params"):
        assert {leaf.dtype.name for leaf in jax.tree.leaves(seen[name])} == {"float32"}, name
    assert seen["extra"] == {"value": 3.0}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(updates)} == {"float32"}


def test_deviation_from_the_masters_is_corrected_by_the_next_step():
    """A value that shrinks by more than float32 addition can follow, and one changed by hand."""
    optimizer = mpjax.optim.with_master_weights(optax.sgd(1.0))
    params = jnp.array([1.0, 2.0], jnp.bfloat16)
    state = optimizer.init(params)
    tiny = jnp.float32(1 - 2.0**-20)
    for grads in (jnp.array([tiny, 0.5]), jnp.zeros(2)):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert_rounded(params, mpjax.optim.master_params(state, params))
    assert float(params[0]) == 2.0**-20
    updates, state = optimizer.update(jnp.zeros(2), state, params + 1)
    assert_rounded(
        optax.apply_updates(params + 1, updates), mpjax.optim.master_params(state, params)
    )


def test_apply_updates_is_exact_where_addition_is_not():
    optimizer = mpjax.optim.with_master_weights(optax.sgd(1.0))
    half = jnp.array([3.0, 1.0], jnp.bfloat16)
    params = {"half": half, "full": jnp.ones(2), "frozen": jnp.ones(2)}
    state = optimizer.init(params)
    grads = {"half": jnp.array([3.0 - 2.0**-20, 1.0 + 2.0**-24]), "full": 0.5, "frozen": None}
    updates, state = optimizer.update(grads, state, params)
    new = apply_updates(params, jax.tree.map(jnp.asarray, updates), state)
    assert_rounded(new["half"], mpjax.optim.master_params(state, params)["half"])
    assert (new["full"] == 0.5).all() and new["frozen"] is params["frozen"]


def test_master_weights_update_without_params_is_an_error(rng):
    params = mixed_params(rng)
    optimizer = mpjax.optim.with_master_weights(optax.sgd(1.0))
    with pytest.raises(ValueError, match="update was called without params"):
        optimizer.update(params, optimizer.init(params))


def test_master_weights_update_refuses_parameters_that_init_did_not_see(rng):
    half, optimizer = mixed_params(rng), mpjax.optim.with_master_weights(optax.sgd(1.0))
    full = jax.tree.map(lambda p: p.astype(jnp.float32), half)
    for first, then, message in [
        (half, full, r"params\['b'\] was 16-bit in init, but is float32"),
        (full, half, r"params\['b'\] was float32 in init, but is 16-bit"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.update(first, optimizer.init(first), then)
    with pytest.raises(
        ValueError, match=r"tree of its masters is .*'b'.*, the tree of the parameters .*'c'"
    ):
        optimizer.update(half, optimizer.init(half), {"c": half["b"]})


def test_parameter_paths_that_read_alike_have_masters_of_their_own():
    params = {"a/b": jnp.full(2, 1.0, jnp.bfloat16), "a": {"b": jnp.full(2, 5.0, jnp.bfloat16)}}
    full = mpjax.optim.master_params(
        mpjax.optim.with_master_weights(optax.sgd(0.1)).init(params), params
    )
    assert full["a/b"][0] == 1 and full["a"]["b"][0] == 5


@pytest.mark.parametrize("wrap", [mpjax.optim.with_master_weights, mpjax.optim.skip_nonfinite])
@pytest.mark.parametrize("wrong", [None, optax.sgd, optax.GradientTransformation, nn.Dense(1), {}])
def test_error_names_an_inner_that_is_no_optimizer(wrap, wrong):
    with pytest.raises(TypeError, match="(?s)inner=.*must be an optax optimizer"):
        wrap(wrong)


def test_master_params_without_masters_widens(rng):
    params = mixed_params(rng)
    state = optax.adam(1e-3).init(params)
    full = mpjax.optim.master_params(state, params)
    assert full["norm"]["scale"] is params["norm"]["scale"]
    assert full["w"].dtype == jnp.float32
    assert_rounded(params, full)


def test_master_params_of_another_model_is_an_error(rng):
    state = mpjax.optim.with_master_weights(optax.sgd(0.1)).init(mixed_params(rng))
    with pytest.raises(ValueError, match=r"masters of \['b', 'w'\], which are not in params"):
        mpjax.optim.master_params(state, {"other": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"master of 'w' has shape \(4, 3\)"):
        mpjax.optim.master_params(state, {**mixed_params(rng), "w": jnp.ones((5, 3), jnp.bfloat16)})
    many = mpjax.optim.with_master_weights(optax.sgd(0.1)).init(
        dict.fromkeys("abcdefg", jnp.bfloat16(1))
    )
    with pytest.raises(ValueError, match=r"of \['a', 'b', 'c', 'd', 'e'\], which are not"):
        mpjax.optim.master_params(many, {})


def test_master_weights_work_in_cond_and_under_donation(rng):
    params = mixed_params(rng)
    optimizer = mpjax.optim.with_master_weights(optax.adam(1e-3))

    def step(carry, apply):
        def yes(carry):
            params, state = carry
            updates, state = optimizer.update(params, state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.cond(apply, yes, lambda carry: carry, carry)

    step = jax.jit(step, donate_argnums=0)
    carry = jax.tree.map(jnp.copy, (params, optimizer.init(params)))
    for apply in (True, False, True):
        carry = step(carry, apply)
    assert step._cache_size() == 1
    assert isinstance(carry[1], MasterWeightsState)


# ---------------------------------------------------------------- in_full_precision


@pytest.mark.parametrize("inner, half", thorough_but(PAIRS, 2, 7))
def test_in_full_precision_dtypes_do_not_drift(half, inner, rng):
    params = mixed_params(rng, half)
    optimizer = in_full_precision(INNERS[inner]())
    new, state = run_updates(optimizer, params, [mixed_grads(rng, params)] * 3)
    assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, params)
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype.name for x in floats} <= {"float32"}


def test_second_moments_of_float16_parameters_do_not_underflow():
    params = jnp.ones(3, jnp.float16)
    new, _ = run_updates(
        in_full_precision(optax.adam(1e-2)), params, [jnp.full(3, 1e-5, jnp.float16)] * 3
    )
    assert jnp.isfinite(new).all() and (new < 1).all()


def test_master_params_refuses_swapped_and_equal_arguments():
    params = {"w": np.ones(2, jnp.bfloat16)}
    state = mpjax.optim.with_master_weights(optax.adam(0.1)).init(params)
    with pytest.raises(ValueError, match=r"The order is master_params\(opt_state, params\)"):
        mpjax.optim.master_params(params, state)
    with pytest.raises(ValueError, match="opt_state is the parameters"):
        mpjax.optim.master_params(params, params)
    assert (
        mpjax.optim.master_params((), params)["w"].dtype == np.float32
    )  # of an optimizer without any
