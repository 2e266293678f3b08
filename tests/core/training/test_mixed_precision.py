"""`mixed_precision`: an optimizer that holds the loss scale and the masters."""

import copy
import functools
import pickle

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support import normal, thorough_but

import mpjax
import mpjax.linen
from mpjax._src.core.training.loss_scale import get_loss_scale, smallest

X, Y = np.asarray(normal(1, 16, 4)), np.asarray(normal(2, 16, 3))
PARAMS = {"w": normal(3, 4, 8, scale=1 / 2), "v": normal(4, 8, 3, scale=1 / 3)}
BAD = X.copy()
BAD[0, 0] = np.nan
POLICIES = ["float32", "mixed_bfloat16", "mixed_float16", "O2:float16", "O3:bfloat16,casting=op"]


def loss_fn(params, x, y):
    return jnp.mean((jax.nn.relu(x @ params["w"]) @ params["v"] - y) ** 2)


def begin(optimizer):
    @jax.jit
    def begun(params):
        params = optimizer.policy.cast_to_param(params)
        return params, optimizer.init(params)

    return begun(PARAMS)


def step_of(optimizer, apply=None):
    apply = apply or optimizer  # what the optimizer is a part of

    def step(params, opt_state, x, y):
        loss, grads = optimizer.value_and_grad(loss_fn, opt_state)(params, x, y)
        updates, opt_state = apply.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def same(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


@pytest.mark.parametrize("policy", thorough_but(POLICIES, "O2:float16"))
def test_mixed_precision_steps_equal_build_train_step(policy):
    optimizer = mpjax.mixed_precision(optax.adamw(1e-2), policy)
    params, opt_state = begin(optimizer)
    step = jax.jit(step_of(optimizer))
    init, whole = mpjax.build_train_step(
        lambda params, batch: loss_fn(params, *batch), optax.adamw(1e-2), policy
    )
    state, whole = jax.jit(init)(PARAMS), jax.jit(whole)
    for number in range(12):
        x = BAD if number == 5 else X
        params, opt_state, _ = step(params, opt_state, x, Y)
        state, metrics = whole(state, (x, Y))
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(
            *(np.asarray(a, np.float32) for a in (got, want)), rtol=2e-3, atol=1e-4
        )
    found = opt_state.metrics()
    assert int(found["skipped_steps"]) == int(metrics["skipped_steps"]) == 1
    assert found.keys() <= metrics.keys() and not int(found["consecutive_skips"])
    mpjax.raise_if_diverged(found, limit=1)


TRANSFORMS = ["eager", "jit", "scan", "vmap", "shard_map", "pmap"]


@pytest.mark.parametrize("transform", thorough_but(TRANSFORMS, "shard_map"))
def test_mixed_precision_skip_changes_nothing_under_transformations(transform):
    optimizer = mpjax.mixed_precision(optax.adamw(1e-2), "O2:float16")
    start, step = begin(optimizer), step_of(optimizer)

    def two(carry, x):
        return step(*carry, x, Y)[:2], None

    if transform == "scan":
        (before, _), _ = (two(start, X), None)
        after, _ = jax.jit(lambda c, xs: jax.lax.scan(two, c, xs))(start, np.stack([X, BAD]))
        before = jax.jit(two)(start, X)[0]
    elif transform == "vmap":
        before = start
        run = jax.jit(jax.vmap(step, in_axes=(None, None, 0, None)))
        out = run(*start, np.stack([BAD, X]), Y)
        after = jax.tree.map(lambda x: x[0], out[:2])
        assert int(jax.tree.map(lambda x: x[1], out[1]).skipped_steps) == 0
    elif transform in ("shard_map", "pmap"):
        before = start

        def replica(params, opt_state, x, y):
            gradient = optimizer.value_and_grad(loss_fn, opt_state, axis_name="data")
            _, grads = gradient(params, x, y)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        if transform == "pmap":
            split = BAD.reshape(4, 4, 4), Y.reshape(4, 4, 3)
            run = jax.pmap(replica, axis_name="data", in_axes=(None, None, 0, 0))
            after = jax.tree.map(lambda x: x[3], run(*start, *split))
        else:
            mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
            specs = (P(), P(), P("data"), P("data"))
            run = jax.jit(jax.shard_map(replica, mesh=mesh, in_specs=specs, out_specs=P()))
            after = run(*start, BAD, Y)
    else:
        run = jax.jit(step) if transform == "jit" else step
        *before, _ = run(*start, X, Y)
        *after, _ = run(*before, BAD, Y)
    (params, opt_state), (old_params, old) = after, before
    assert same((params, opt_state.inner_state), (old_params, old.inner_state))
    assert int(opt_state.skipped_steps) == 1 and not bool(opt_state.finite)
    assert float(opt_state.loss_scale.loss_scale) == float(old.loss_scale.loss_scale) / 2


def test_callers_verdict_skips_without_lowering_the_loss_scale():
    optimizer = mpjax.mixed_precision(optax.sgd(0.1), "mixed_float16")
    params, first = begin(optimizer)
    good = jax.tree.map(lambda x: np.ones(x.shape, np.float32), params)
    bad = jax.tree.map(lambda x: np.full(x.shape, np.float32(np.inf)), params)
    update = jax.jit(lambda grads, verdict: optimizer.update(grads, first, params, **verdict))
    for grads, name, verdict in (
        (good, "state_finite", {"finite": False}),
        (good, "loss_finite", {"value": np.float32(np.nan)}),
        (bad, "loss_finite", {"value": np.float32(np.nan)}),
        (bad, "loss_finite", {"loss_finite": False}),
    ):
        updates, state = update(grads, verdict)
        assert not any(map(np.any, jax.tree.leaves(updates))) and int(state.skipped_steps) == 1
        assert float(state.loss_scale.loss_scale) == 2.0**16 and not state.metrics()[name]
        assert int(first.loss_scale.growth_tracker) == int(state.loss_scale.growth_tracker)
    _, state = update(bad, {"finite": True, "value": np.float32(1)})
    assert float(state.loss_scale.loss_scale) == 2.0**15 and state.metrics()["loss_finite"]
    updates, state = update(good, {"finite": True, "value": np.float32(1)})
    assert bool(state.finite) and float(updates["w"][0, 0]) == np.float32(-0.1)


def test_extra_arguments_of_update_reach_the_inner_optimizer():
    inner = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1))
    optimizer = mpjax.mixed_precision(inner, "mixed_bfloat16")
    params, state = begin(optimizer)
    grads = jax.tree.map(lambda x: np.ones(x.shape, np.float32), params)
    update = jax.jit(lambda state, value: optimizer.update(grads, state, params, value=value))
    for _ in range(6):
        updates, state = update(state, jnp.float32(1))
    assert abs(float(updates["w"][0, 0])) < 0.05


def test_update_without_params_works_unless_there_are_masters():
    """As many loops have it: without half parameters there are no masters to keep up with."""
    optimizer = mpjax.mixed_precision(optax.adam(1e-2), "mixed_float16")
    params, state = begin(optimizer)
    grads = jax.tree.map(lambda x: np.ones(x.shape, np.float32), params)
    got, want = (jax.jit(optimizer.update)(grads, state, *given)[0] for given in ((), (params,)))
    assert same(got, want) and np.any(got["w"])
    optimizer = mpjax.mixed_precision(optax.adam(1e-2), "O2:float16")
    params, state = begin(optimizer)
    with pytest.raises(ValueError, match="update was called without params"):
        jax.jit(optimizer.update)(grads, state)


OUTSIDE = {
    "chain": lambda inner: optax.chain(optax.clip_by_global_norm(1.0), inner),
    "MultiSteps": lambda inner: optax.MultiSteps(inner, 2),
    "masked": lambda inner: optax.masked(inner, {"w": True, "v": True}),
    "inject_hyperparams": lambda inner: optax.inject_hyperparams(
        lambda rate: optax.chain(inner, optax.scale(rate))
    )(rate=1.0),
    "apply_if_finite": lambda inner: optax.apply_if_finite(inner, 3),
    "with_extra_args_support": optax.with_extra_args_support,
    "conditionally_transform": lambda inner: optax.conditionally_transform(inner, lambda n: n < 99),
    "partition": lambda inner: optax.partition({"all": inner}, "all"),
    "named_chain": lambda inner: optax.named_chain(("inner", inner)),
}


@pytest.mark.parametrize("outside", thorough_but(OUTSIDE, "MultiSteps"))
def test_mixed_precision_trains_as_part_of_another_optimizer(outside):
    optimizer = mpjax.mixed_precision(optax.adam(1e-2), "mixed_float16")
    whole = OUTSIDE[outside](optimizer)
    params, _ = begin(optimizer)
    state, step = jax.jit(whole.init)(params), jax.jit(step_of(optimizer, whole))
    losses = []
    for _ in range(20):
        params, state, loss = step(params, state, X, Y)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert not hasattr(whole, "value_and_grad") or whole == optimizer


REBUILT = {
    "mapped": lambda optimizer: jax.tree.map(lambda x: x, optimizer),
    "init replaced": lambda optimizer: optimizer._replace(init=lambda p: optimizer.init(p)),
    "update replaced": lambda optimizer: optimizer._replace(
        update=lambda *args, **kwargs: optimizer.update(*args, **kwargs)
    ),
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "passed to filter_jit": lambda optimizer: eqx.filter_jit(lambda x: x)(optimizer),
    "flattened": lambda optimizer: jax.tree.unflatten(*jax.tree.flatten(optimizer)[::-1]),
}


@pytest.mark.parametrize("how", thorough_but(REBUILT, "mapped", "update replaced"))
def test_rebuilt_mixed_precision_is_still_mixed_precision(how):
    optimizer = mpjax.mixed_precision(optax.sgd(0.1), "mixed_float16")
    rebuilt = REBUILT[how](optimizer)
    assert isinstance(rebuilt, mpjax.optim.MixedPrecision) and rebuilt.policy == optimizer.policy
    state = optimizer.init(PARAMS)
    got, want = (jax.jit(step_of(o))(PARAMS, state, X, Y) for o in (rebuilt, optimizer))
    assert same(got, want)


def test_pickled_mixed_precision_keeps_policy_and_loss_scale():
    inner = optax.GradientTransformation(_nothing, _as_it_is)  # optax's own cannot be pickled
    optimizer = pickle.loads(pickle.dumps(mpjax.mixed_precision(inner, "mixed_float16")))
    assert optimizer.policy == mpjax.get_policy("mixed_float16")
    assert float(optimizer.init(PARAMS).loss_scale.loss_scale) == 2.0**16


def _nothing(params):
    return optax.EmptyState()


def _as_it_is(updates, state, params=None):
    return updates, state


def test_repr_of_mixed_precision_names_its_parts():
    text = repr(mpjax.mixed_precision(optax.adamw(1e-3), "mixed_float16", 128.0))
    assert "chain(scale_by_adam, add_decayed_weights, scale" in text
    assert "'mixed_float16'" in text and "StaticLossScale" in text
    assert "partition(sgd" not in text and "function" not in text
    parts = optax.partition({"a": optax.lion(1e-3), "b": optax.set_to_zero()}, lambda p: "a")
    assert "scale_by_lion" in repr(mpjax.mixed_precision(parts, "mixed_bfloat16"))


def test_value_and_grad_after_replacing_init_and_update_is_an_error():
    optimizer = mpjax.mixed_precision(optax.sgd(0.1))
    lost = optimizer._replace(init=_nothing, update=_as_it_is)
    with pytest.raises(AttributeError, match=r"no longer those of mpjax\.mixed_precision"):
        lost.value_and_grad(loss_fn, optimizer.init(PARAMS))


@pytest.mark.parametrize("name", ["bf16", " FP16", "half", "float16"])
def test_policy_names_that_mean_mixed_precision_elsewhere_are_warned_of(name):
    made = [
        lambda: mpjax.mixed_precision(optax.sgd(0.1), name),
        lambda: mpjax.build_train_step(lambda p, b: 0.0, optax.sgd(0.1), name),
    ]
    half = mpjax.get_policy(name).compute_dtype.name
    for make in made:
        with pytest.warns(
            mpjax.errors.PrecisionWarning, match=f"Did you mean 'mixed_{half}'"
        ) as found:
            make()
        assert found[0].filename == __file__
    mpjax.mixed_precision(optax.sgd(0.1), f"p={half},c={half},o={half}")  # says what it means
    assert mpjax.autocast(lambda x: x, name)(jnp.float32(1)) == 1  # stores nothing


@pytest.mark.usefixtures("nothing_called")
class TestMissingLine:
    """The third line left out: gradients by `jax.value_and_grad`, in float32."""

    def update(self, policy, gradient=jax.grad, traced=True, **kwargs):
        optimizer = mpjax.mixed_precision(optax.sgd(0.1), policy, **kwargs)

        def step(params, state, x, y):
            return optimizer.update(gradient(loss_fn)(params, x, y), state, params)

        params = optimizer.policy.cast_to_param(PARAMS)
        args = params, optimizer.init(params), X, Y
        return jax.eval_shape(step, *args) if traced else step(*args)

    def test_gradient_without_cast_is_warned_of_at_the_line_of_the_update(self):
        with pytest.warns(mpjax.errors.PrecisionWarning, match="value_and_grad") as found:
            self.update("mixed_float16")
        (warning,) = found
        assert warning.filename == __file__ and "mixed_float16" in str(warning.message)
        assert "in float16 and no loss has been scaled" in str(warning.message)

    def test_cast_without_loss_scale_is_warned_of(self):
        cast = lambda fun: jax.grad(mpjax.autocast(fun, "mixed_float16"))  # noqa: E731
        unscaled = mpjax.errors.PrecisionWarning
        with (
            pytest.warns(unscaled, match="but no loss has been scaled"),  # at the update
            pytest.warns(unscaled, match="no loss scale is seen"),  # at the gradient
        ):
            self.update("mixed_float16", cast)
        self.update("mixed_bfloat16", cast)  # has no scale
        self.update("mixed_float16", cast, loss_scale=None)

    @pytest.mark.parametrize(
        "before", thorough_but(["eager", "another jit", "by hand", "build_train_step"], "by hand")
    )
    def test_gradient_that_was_cast_and_scaled_draws_no_warning(self, before):
        optimizer = mpjax.mixed_precision(optax.sgd(0.1), "mixed_float16")
        state = optimizer.init(PARAMS)
        gradient = optimizer.value_and_grad(loss_fn, state)
        if before == "by hand":
            params = optimizer.policy.cast_to_compute(PARAMS)
            state.loss_scale.scale(loss_fn(params, X, Y))
        elif before == "build_train_step":
            init, step = mpjax.build_train_step(
                lambda p, b: jnp.float32(loss_fn(p, *b)),
                optax.sgd(0.1),
                "mixed_float16,casting=boundary",
            )
            jax.eval_shape(step, init(PARAMS), (X, Y))
        else:
            (jax.jit(gradient) if before == "another jit" else gradient)(PARAMS, X, Y)
        self.update("mixed_float16")

    def test_untraced_update_and_policy_without_cast_draw_no_warning(self):
        self.update("mixed_float16", traced=False)
        self.update("O3:bfloat16")
        self.update("float32")

    def test_gradient_and_update_in_a_scan_draw_no_warning(self):
        optimizer = mpjax.mixed_precision(optax.sgd(0.1), "mixed_float16")

        def step(carry, x):
            params, state, _ = step_of(optimizer)(*carry, x, Y)
            return (params, state), None

        start, xs = (PARAMS, optimizer.init(PARAMS)), np.stack([X, X])
        jax.eval_shape(lambda c, xs: jax.lax.scan(step, c, xs), start, xs)

    def test_linen_warning_names_value_and_grad_of_its_state(self):
        state = mpjax.linen.TrainState.create(
            apply_fn=loss_fn, params=PARAMS, tx=optax.sgd(0.1), policy="mixed_bfloat16"
        )
        with pytest.warns(
            mpjax.errors.PrecisionWarning, match=r"Use state\.value_and_grad\(loss_fn\)"
        ):
            jax.eval_shape(
                lambda s: s.apply_gradients(grads=jax.grad(loss_fn)(s.params, X, Y)), state
            )


class TestSharedGradient:
    """One gradient for two optimizers, as for a GAN's generator and discriminator."""

    def make(self, scales, intervals=(3, 3)):
        optimizers = [
            mpjax.mixed_precision(
                optax.sgd(1e-3), "mixed_float16", mpjax.DynamicLossScale(s, growth_interval=n)
            )
            for s, n in zip(scales, intervals, strict=True)
        ]
        return optimizers, tuple(
            o.init(p) for o, p in zip(optimizers, PARAMS.values(), strict=True)
        )

    def step(self, optimizers):
        def loss(w, v, limits):
            # A backward pass that overflows where the scaled cotangent is more than the limit.
            out = loss_fn({"w": w, "v": v}, X, Y)
            return out + sum(
                jnp.sum(overflowing(p, n)) for p, n in zip((w, v), limits, strict=True)
            )

        @jax.jit
        def step(states, limits):
            gradient = optimizers[0].value_and_grad(loss, states, argnums=(0, 1))
            _, grads = gradient(*PARAMS.values(), limits)
            rows = zip(optimizers, grads, states, PARAMS.values(), strict=True)
            return tuple(o.update(g, s, p, scaled_by=states)[1] for o, g, s, p in rows)

        return step

    def scales(self, states):
        return [float(s.loss_scale.loss_scale) for s in states]

    def test_shared_gradient_uses_the_smallest_loss_scale_and_the_others_follow(self):
        optimizers, states = self.make([2.0**20, 2.0**4])
        step = self.step(optimizers)
        states = step(states, (2.0**5, 2.0**5))  # would overflow at 2**20
        assert [int(s.skipped_steps) for s in states] == [0, 0]
        assert self.scales(states) == [2.0**5, 2.0**4]
        states = step(states, (2.0**3, 2.0**5))  # the first one overflows at 2**4, not at its own
        assert [int(s.skipped_steps) for s in states] == [1, 0]
        assert self.scales(states) == [2.0**3, 2.0**4]
        states = step(states, (2.0**3, 2.0**5))
        assert [int(s.skipped_steps) for s in states] == [1, 0]

    def test_loss_scales_of_a_shared_gradient_grow_together(self):
        optimizers, states = self.make([16.0, 16.0], (3, 5))
        step = self.step(optimizers)
        for _ in range(40):
            states = step(states, (2.0**30, 2.0**30))
            assert max(self.scales(states)) <= 2 * min(self.scales(states))
        assert min(self.scales(states)) >= 2.0**10

    def test_scaled_by_of_one_state_changes_nothing(self):
        optimizers, states = self.make([2.0**8, 2.0**8])
        optimizer, state, params = optimizers[0], states[0], PARAMS["w"]
        update = jax.jit(lambda g, s, **by: optimizer.update(g, s, params, **by))
        for grads in (params, jnp.full_like(params, jnp.inf)):
            want, got = update(grads, state)[1], update(grads, state, scaled_by=(state,))[1]
            assert same(got, want)

    def test_noop_loss_scale_has_no_say_in_the_smallest(self):
        plain = mpjax.mixed_precision(optax.sgd(0.1), "mixed_bfloat16").init(PARAMS["v"])
        _, (state, _) = self.make([2.0**8, 2.0**8])
        assert smallest([plain.loss_scale, state.loss_scale]) is state.loss_scale


@jax.custom_vjp
def overflowing(x, limit):
    return x * 0


overflowing.defvjp(
    lambda x, limit: (x * 0, limit),
    lambda limit, ct: (jnp.where(jnp.abs(ct) > limit, jnp.inf, 0 * ct), jnp.zeros_like(limit)),
)


def test_mixed_precision_step_is_donated_and_compiled_once():
    optimizer = mpjax.mixed_precision(optax.adam(1e-2), "O2:bfloat16", "dynamic")
    params, state = begin(optimizer)
    step = jax.jit(step_of(optimizer), donate_argnums=(0, 1))
    for _ in range(3):
        params, state, _ = step(params, state, X, Y)
    assert step._cache_size() == 1
    other = optimizer.init(params)  # the first scale is still there
    assert float(other.loss_scale.loss_scale) == 2.0**16


def test_mixed_precision_state_is_saved_and_restored(tmp_path):
    optimizer = mpjax.mixed_precision(optax.adam(1e-2), "O2:float16")
    params, state = begin(optimizer)
    params, trained, _ = jax.jit(step_of(optimizer))(params, state, X, Y)
    mpjax.checkpoint.save(tmp_path / "a", {"params": params, "opt_state": trained})
    restored = mpjax.checkpoint.restore(tmp_path / "a", {"params": params, "opt_state": state})
    assert same(restored["opt_state"], trained)
    again = flax.serialization.from_bytes(state, flax.serialization.to_bytes(trained))
    assert same(again, trained)


def test_master_params_finds_masters_of_mixed_precision():
    optimizer = mpjax.mixed_precision(optax.adam(1e-2), "O2:float16")
    params, state = begin(optimizer)
    masters = mpjax.optim.master_params(state, params)
    assert {x.dtype.name for x in jax.tree.leaves(masters)} == {"float32"}
    half = {x.dtype.name for x in jax.tree.leaves(params)}
    assert half == {"float16"}


def test_get_loss_scale_auto_is_dynamic_for_float16_alone():
    of = functools.partial(get_loss_scale, "mixed_float16")
    assert isinstance(of(), mpjax.DynamicLossScale) and float(of(8.0).loss_scale) == 8
    for policy in ("mixed_bfloat16", "float32", "O3:bfloat16"):
        assert isinstance(get_loss_scale(policy), mpjax.NoOpLossScale)
        assert isinstance(get_loss_scale(policy, "dynamic"), mpjax.DynamicLossScale)


def test_mixed_precision_refuses_bad_arguments():
    with pytest.raises(TypeError, match=r"optimizer=0\.1 must be an optax optimizer"):
        mpjax.mixed_precision(0.1)
    with pytest.raises(ValueError, match="policy"):
        mpjax.mixed_precision(optax.sgd(0.1), "mixed_float17")
    with pytest.raises(ValueError, match="loss_scale='automatic'"):
        mpjax.mixed_precision(optax.sgd(0.1), loss_scale="automatic")
    optimizer = mpjax.mixed_precision(optax.sgd(0.1), "O2:float16")
    with pytest.raises(ValueError, match=r"params\['w'\] is float32, .*cast_to_param\(params\)"):
        optimizer.init({"w": jnp.ones(3)})
    params, state = begin(optimizer)
    with pytest.raises(ValueError, match=r"is float32, .* stores it in float16\. optax\.apply"):
        optimizer.update(params, state, mpjax.cast(params, "float32"))
    with pytest.raises(ValueError, match="must contain a state of mpjax"):
        optimizer.value_and_grad(loss_fn, state.inner_state)
    with pytest.raises(ValueError, match="must contain a state of mpjax"):
        optimizer.update(params, state, params, scaled_by=state.loss_scale)
    with pytest.raises(TypeError, match="must be a function"):
        optimizer.value_and_grad(3, state)
    with pytest.raises(ValueError, match="must be a single bool"):
        optimizer.update(params, state, params, finite=jnp.ones(2, bool))
    with pytest.raises(ValueError, match="not the MixedPrecisionState of mixed_precision"):
        optimizer.update(params, state.inner_state, params)
    adam = mpjax.mixed_precision(optax.adam(0.1), "O2:float16")
    with pytest.raises(ValueError, match="different optimizer"):
        jax.jit(adam.update)(params, state, params)
