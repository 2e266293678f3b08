"""Flax NNX: modules under autocast, and loops of `mpjax.nnx`."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.errors import TraceContextError
from support import HALVES, full_matmuls, matmul_dtypes, normal, thorough_but

import mpjax
import mpjax.nnx

X, Y = np.asarray(normal(1, 32, 8)), np.asarray(normal(2, 32, 8))
BAD = X.copy()
BAD[3, 1] = np.nan
ADAMW = optax.adamw(1e-2)


class Model(nnx.Module):
    def __init__(self, rngs, features=8):
        self.first = nnx.Linear(8, features, rngs=rngs)
        self.norm = nnx.BatchNorm(features, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(features, 8, rngs=rngs)
        self.again = self.last  # shared

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.again(nnx.relu(self.first(x)))))))


def loss_fn(model, x, y):
    out = model(x)
    return jnp.mean((out - y) ** 2), out


def arrays(*modules):
    leaves = jax.tree.leaves(nnx.as_pure(nnx.state(modules)))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def same(got, want):
    return all(np.array_equal(g, w) for g, w in zip(got, want, strict=True))


@functools.cache
def plain(wrap=lambda f: f, steps=50):
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        value, grads = nnx.value_and_grad(wrap(loss_fn), has_aux=True)(model, x, y)
        optimizer.update(model, grads)
        return value[0]

    losses = [float(step(model, optimizer, X, Y)) for _ in range(steps)]
    return model, losses


# ---- autocast ------------------------------------------------------------------------------------


def test_autocast_keeps_what_a_function_changes_in_an_nnx_module():
    """What anyone would write: statistics, counts and parameters as without autocast."""
    model, losses = plain(lambda f: mpjax.autocast(f, "float32"))
    want, plain_losses = plain()
    assert losses == plain_losses and same(arrays(model), arrays(want))
    assert int(model.dropout.rngs.count[...]) == 50 and model.again is model.last


@pytest.mark.parametrize("half", thorough_but(HALVES, "bfloat16"))
def test_nnx_module_under_autocast_has_the_curve_of_float32(half):
    model, losses = plain(lambda f: mpjax.autocast(f, f"mixed_{half}"))
    want, plain_losses = plain()
    np.testing.assert_allclose(losses, plain_losses, rtol=0.03)
    np.testing.assert_allclose(model.norm.mean[...], want.norm.mean[...], atol=0.01)
    assert {x.dtype for x in arrays(model) if x.dtype.kind == "f"} == {np.dtype(np.float32)}
    model = Model(nnx.Rngs(0))
    fun = mpjax.autocast(lambda x: loss_fn(nnx.clone(model), x, Y)[0], f"mixed_{half}")
    assert not full_matmuls(fun, X)


def test_autocast_outside_of_jit_changes_the_nnx_module_of_each_call():
    fun = mpjax.autocast(loss_fn, "mixed_bfloat16")
    one, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    for _ in range(2):
        fun(one, X, Y)
    assert int(other.dropout.rngs.count[...]) == 0
    for _ in range(2):  # of the same signature: not traced again
        fun(other, X, Y)
    assert same(arrays(one), arrays(other)) and int(one.dropout.rngs.count[...]) == 2


def test_autocast_takes_nnx_modules_that_grow_are_returned_or_named():
    class Sows(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            y = self.layer(x)
            self.seen = nnx.Intermediate(y[:2])
            return y

    @mpjax.autocast(policy="mixed_bfloat16")
    def fun(x, *, model, rngs):
        return model(x) + rngs.normal((8,)), model

    model, rngs = Sows(nnx.Rngs(0)), nnx.Rngs(1)
    out, returned = fun(X, model=model, rngs=rngs)
    assert returned is model and model.seen[...].shape == (2, 8)
    assert int(rngs.default.count[...]) == 1
    want = X @ model.layer.kernel[...]
    np.testing.assert_allclose(out - out.mean(0), want - want.mean(0), atol=0.05)


def test_autocast_reads_nnx_modules_around_a_jit_and_passes_on_arguments():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    @mpjax.autocast(policy="mixed_bfloat16")
    def fun(model, x, *rest, train, then):
        assert (rest, train) == (("s", 2, None), True)
        return then["f"](model(x))

    def call(x):
        return fun(model, x, "s", 2, None, train=True, then={"f": jnp.sin})

    for run in (call, jax.jit(call)):
        np.testing.assert_allclose(run(np.asarray(X)), jnp.sin(model(X)), atol=0.05)
    assert jax.eval_shape(call, X).dtype == jnp.float32
    counting = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    with pytest.raises(TraceContextError):  # as Flax has it
        jax.jit(mpjax.autocast(lambda x: counting(x), "mixed_bfloat16"))(X)


def test_overrides_match_the_paths_of_nnx_modules():
    fun = lambda model, x: jnp.sum(model(x))  # noqa: E731
    policy = mpjax.get_policy("mixed_bfloat16").override({"first/*": "float32"})
    graph, state = nnx.split(Model(nnx.Rngs(0)))

    def run(policy):
        return full_matmuls(
            lambda s, x: mpjax.autocast(fun, policy)(nnx.merge(graph, s), x), state, X
        )

    assert (len(run(policy)), len(run("mixed_bfloat16"))) == (1, 0)
    with pytest.raises(ValueError, match="first/kernel"):
        mpjax.autocast(fun, policy.override({"frist/*": "float32"}))(Model(nnx.Rngs(0)), X)


def test_autocast_takes_nnx_states_that_are_split_by_hand():
    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    @jax.jit
    @mpjax.autocast(policy="mixed_bfloat16")
    def fun(params, rest, x):
        model = nnx.merge(graph, params, rest)
        return jnp.sum(model(x)), nnx.state(model, nnx.Not(nnx.Param))

    _, new = fun(params, rest, X)
    assert int(new["dropout"]["rngs"]["count"][...]) == 1


class Stack(nnx.Module):
    """Layers that are scanned, each computed again in the backward pass."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs):
            return Layer(rngs)

        self.layers = layers(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x, layer):
            return layer(x)

        return run(x, self.layers)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.norm(self.linear(x)))


@pytest.mark.thorough
def test_autocast_of_nnx_scan_and_remat_trains_as_without():
    def train(wrap):
        model = Stack(nnx.Rngs(0))
        fun = wrap(lambda model, x: jnp.mean(model(x) ** 2))
        grads = nnx.jit(nnx.grad(fun))(model, X)
        return [*arrays(model), *jax.tree.leaves(nnx.as_pure(grads))]

    plain = train(lambda f: f)
    assert same(train(lambda f: mpjax.autocast(f, "float32")), plain)
    for got, want in zip(train(lambda f: mpjax.autocast(f, "mixed_float16")), plain, strict=True):
        np.testing.assert_allclose(got, want, atol=0.03 * np.abs(want).max() + 1e-3)


@pytest.mark.thorough
def test_autocast_under_nnx_vmap_updates_each_member():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def members(rngs):
        return Model(rngs)

    models = members(nnx.Rngs(0))
    run = nnx.jit(nnx.vmap(mpjax.autocast(loss_fn, "float32"), in_axes=(0, None, None)))
    losses, _ = run(models, X, Y)
    assert losses.shape == (3,) and len(set(losses.tolist())) == 3
    np.testing.assert_array_equal(models.dropout.rngs.count[...], [1, 1, 1])
    assert float(jnp.abs(models.norm.mean[...]).min(1).max()) > 0


# ---- the loop of mpjax.nnx -----------------------------------------------------------------------


def loop(policy, model=None, loss=loss_fn, has_aux=True, **options):
    model = model or Model(nnx.Rngs(0))
    optimizer = mpjax.nnx.Optimizer(model, ADAMW, policy, **options)
    return model, optimizer, *stepping(policy, loss, has_aux)


@functools.cache
def stepping(policy, loss, has_aux):
    """Returns a step, compiled once for the tests of a policy, and a list of when it was traced."""
    traced = []

    @nnx.jit
    def step(model, optimizer, x, y):
        traced.append(x.shape)
        value, grads = mpjax.nnx.value_and_grad(loss, optimizer, has_aux=has_aux)(model, x, y)
        optimizer.update(model, grads)
        return value[0] if has_aux else value

    return step, traced


POLICIES = thorough_but(
    ["float32", "mixed_bfloat16", "mixed_float16", "O2:bfloat16", "O2:float16"], "O2:float16"
)


@pytest.mark.parametrize("policy", POLICIES)
def test_nnx_loop_has_the_curve_of_float32_in_one_compilation(policy):
    model, optimizer, step, traced = loop(policy)
    begun = len(traced)  # by earlier tests
    losses = [float(step(model, optimizer, X, Y)) for _ in range(50)]
    want, plain_losses = plain()
    tolerance = 1e-5 if policy == "float32" else 0.03
    np.testing.assert_allclose(losses, plain_losses, rtol=tolerance)
    np.testing.assert_allclose(model.norm.mean[...], want.norm.mean[...], atol=tolerance)
    assert len(traced) - begun <= 1 and int(optimizer.step[...]) == 50
    half = mpjax.get_policy(policy).param_dtype
    assert model.first.kernel[...].dtype == half and model.norm.mean[...].dtype == np.float32


@pytest.mark.parametrize("policy", POLICIES)
def test_skipped_nnx_step_leaves_no_trace(policy):
    model, optimizer, step, _ = loop(policy)
    step(model, optimizer, X, Y)
    before = arrays(model), arrays(optimizer.opt_state.inner_state)
    step(model, optimizer, BAD, Y)
    assert same(arrays(model), before[0]) and same(
        arrays(optimizer.opt_state.inner_state), before[1]
    )
    metrics = optimizer.metrics()
    assert not metrics["loss_finite"] and not metrics["grads_finite"]
    assert (int(optimizer.step[...]), int(metrics["consecutive_skips"])) == (1, 1)
    step(model, optimizer, X, Y)
    assert (int(optimizer.step[...]), int(optimizer.metrics()["consecutive_skips"])) == (2, 0)
    assert int(optimizer.metrics()["skipped_steps"]) == 1
    assert not same(arrays(model), before[0])


@pytest.mark.thorough
def test_overflowing_gradient_lowers_the_loss_scale_of_an_nnx_loop():
    scale = mpjax.DynamicLossScale(2.0**40, growth_interval=4, max_scale=2.0**40)
    model, optimizer, step, _ = loop("mixed_float16", loss_scale=scale)
    scales = []
    for _ in range(40):
        step(model, optimizer, X, Y)
        scales.append(float(optimizer.metrics()["loss_scale"]))
    assert scales[0] == 2.0**39 and any(b > a for a, b in itertools.pairwise(scales))
    assert int(optimizer.step[...]) == 40 - int(optimizer.metrics()["skipped_steps"]) > 0


def test_nonfinite_nnx_state_is_not_kept():
    def loss(model, x, y):
        model.norm(x * 1e25)  # whose square overflows
        return jnp.mean((model.first(x) - y) ** 2)

    model = Model(nnx.Rngs(0))
    model.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    model, optimizer, step, _ = loop("mixed_bfloat16", model, loss, has_aux=False)
    before = arrays(model)
    step(model, optimizer, X, Y)
    metrics = optimizer.metrics()
    assert metrics["loss_finite"] and metrics["grads_finite"] and not metrics["state_finite"]
    assert same(arrays(model), before) and int(optimizer.metrics()["skipped_steps"]) == 1


def test_nnx_optimizer_takes_several_gradients_before_an_update():
    """Micro-batches: a loss that is not finite skips the update of them all."""
    model = Model(nnx.Rngs(0))
    optimizer = mpjax.nnx.Optimizer(model, optax.sgd(0.1), "mixed_float16")

    @nnx.jit
    def gradient(model, optimizer, x):
        fun = lambda m, x: jnp.mean(m(x) ** 2)  # noqa: E731
        return mpjax.nnx.value_and_grad(fun, optimizer)(model, x)[1]

    @nnx.jit
    def update(model, optimizer, grads):
        return optimizer.update(model, grads)

    before = arrays(nnx.state(model, nnx.Param))
    grads = [gradient(model, optimizer, x) for x in (BAD, X)]
    added = jax.tree.leaves(update(model, optimizer, grads[1]))
    assert same(arrays(nnx.state(model, nnx.Param)), before) and not np.any(added[0])
    added = jax.tree.leaves(update(model, optimizer, gradient(model, optimizer, X)))
    after = arrays(nnx.state(model, nnx.Param))
    for got, now, was in zip(added, after, before, strict=True):
        np.testing.assert_allclose(got, now - was, atol=1e-6)
    assert int(optimizer.step[...]) == 1 and np.any(added[0])


def test_low_rank_adapters_alone_are_trained():
    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.base = nnx.Linear(8, 8, rngs=rngs)
            self.lora = nnx.LoRA(8, 2, 8, base_module=self.base, rngs=rngs)

        def __call__(self, x):
            return self.lora(x)

    model, optimizer, step, _ = loop("mixed_float16", Adapted(nnx.Rngs(0)), wrt=nnx.LoRAParam)
    before = arrays(model.base), arrays(nnx.state(model, nnx.LoRAParam))
    losses = [float(step(model, optimizer, X, Y)) for _ in range(5)]
    assert losses[-1] < losses[0] and same(arrays(model.base), before[0])
    assert not same(arrays(nnx.state(model, nnx.LoRAParam)), before[1])


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False)(linen.Dense(16)(x))
        return linen.Dense(8)(linen.Dropout(0.1, deterministic=False)(linen.relu(x)))


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "O2:float16"])
def test_linen_module_over_the_nnx_bridge_trains_and_skips(policy):
    """What linen calls collections are variables, which are kept and rolled back as such."""
    wrapped = nnx.bridge.ToNNX(Linen(), rngs=nnx.Rngs(0, dropout=1))
    nnx.bridge.lazy_init(wrapped, X)

    def loss(model, x, y):
        return jnp.mean((model(x, mutable=["batch_stats"]) - y) ** 2)

    model, optimizer, step, traced = loop(policy, wrapped, loss, has_aux=False, loss_scale=64.0)
    before = arrays(nnx.state(model, nnx.BatchStat))
    losses = [float(step(model, optimizer, X, Y)) for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0] and len(traced) == 1
    assert not same(arrays(nnx.state(model, nnx.BatchStat)), before)
    before = arrays(model)
    step(model, optimizer, BAD, Y)
    assert same(arrays(model), before) and int(optimizer.metrics()["skipped_steps"]) == 1


def test_nnx_module_within_a_linen_module_runs_in_bfloat16():
    model = nnx.bridge.to_linen(nnx.Linear, 8, 8)
    variables = model.init(jax.random.key(0), X)
    run = mpjax.autocast(lambda v, x: jnp.mean((model.apply(v, x) - Y) ** 2), "mixed_bfloat16")
    assert set(matmul_dtypes(jax.grad(run, allow_int=True), variables, X)) == {("bfloat16",) * 2}


@pytest.mark.thorough
def test_nnx_value_and_grad_differentiates_several_arguments():
    one, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(1))
    optimizer = mpjax.nnx.Optimizer(one, optax.sgd(0.1), "mixed_float16")

    def fun(one, other):
        return jnp.mean((one(X) - other(X)) ** 2)

    argnums = (0, nnx.DiffState(1, nnx.PathContains("again")))

    @nnx.jit
    def gradient(one, other, optimizer):
        return mpjax.nnx.value_and_grad(fun, optimizer, argnums=argnums)(one, other)

    value, (first, second) = gradient(one, other, optimizer)
    assert set(second) == {"again"} and set(first) == {"first", "norm", "again"}
    one, other = Model(nnx.Rngs(0)), Model(nnx.Rngs(1))
    want = nnx.jit(nnx.value_and_grad(fun, argnums=argnums))(one, other)
    np.testing.assert_allclose(value, want[0], rtol=0.01)
    np.testing.assert_allclose(
        second["again"]["kernel"][...], want[1][1]["again"]["kernel"][...], atol=2e-3
    )


# ---- what is refused -----------------------------------------------------------------------------


def test_nnx_optimizer_and_value_and_grad_refuse_bad_arguments():
    model = Model(nnx.Rngs(0))
    with pytest.raises(TypeError, match="must be an NNX module"):
        mpjax.nnx.Optimizer({"w": jnp.ones(3)}, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"tx=.* must be an optax optimizer"):
        mpjax.nnx.Optimizer(model, 0.1)
    with pytest.raises(ValueError, match="nothing would be trained"):
        mpjax.nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    with pytest.raises(TypeError, match=r"must be an mpjax\.nnx\.Optimizer"):
        mpjax.nnx.value_and_grad(loss_fn, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param))
    optimizer = mpjax.nnx.Optimizer(model, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"f=3 must be"):
        mpjax.nnx.value_and_grad(3, optimizer)
    for wrong in ("model", 3, None):
        with pytest.raises(ValueError, match=f"argnums={wrong!r} must be positions"):
            mpjax.nnx.value_and_grad(loss_fn, optimizer, argnums=wrong)(model, X, Y)
    with pytest.raises(TypeError, match="has_aux=True"):
        nnx.jit(mpjax.nnx.value_and_grad(loss_fn, optimizer))(model, X, Y)


def test_other_loops_refuse_whole_nnx_modules():
    init, _ = mpjax.build_train_step(lambda params, batch: 0.0, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"nnx\.split\(model, nnx\.Param, \.\.\.\)"):
        init(Model(nnx.Rngs(0)))
    gradient = mpjax.scaled_value_and_grad(lambda m: jnp.sum(m(X)), mpjax.NoOpLossScale())
    with pytest.raises(TypeError, match=r"mpjax\.nnx\.value_and_grad"):
        gradient(Model(nnx.Rngs(0)))


def test_nnx_gradient_of_two_optimizers_uses_the_smallest_loss_scale():
    """As a GAN's: the smallest scale is used, and an overflow of one leaves the other's update."""
    models = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))
    scales = [mpjax.DynamicLossScale(s) for s in (2.0**20, 2.0**4)]
    optimizers = tuple(
        mpjax.nnx.Optimizer(m, optax.sgd(0.1), "mixed_float16", loss_scale=s)
        for m, s in zip(models, scales, strict=True)
    )

    @nnx.jit
    def step(models, optimizers, x):
        def loss_fn(one, two):
            return jnp.mean((two(one(x)) - Y) ** 2)

        gradient = mpjax.nnx.value_and_grad(loss_fn, optimizers, argnums=(0, 1))
        _, grads = gradient(*models)
        grads[0]["bias"].set_value(jnp.where(x[0, 0] > 5, jnp.inf, grads[0]["bias"][...]))
        for model, optimizer, grad in zip(models, optimizers, grads, strict=True):
            optimizer.update(model, grad, scaled_by=optimizers)

    step(models, optimizers, X)
    found = [optimizer.metrics() for optimizer in optimizers]
    assert [float(m["loss_scale"]) for m in found] == [2.0**5, 2.0**4]
    before = arrays(*models)
    bad = X.copy()
    bad[0, 0] = 6
    step(models, optimizers, bad)
    found = [optimizer.metrics() for optimizer in optimizers]
    assert [int(m["skipped_steps"]) for m in found] == [1, 0]
    assert float(found[0]["loss_scale"]) == 2.0**3
    assert same(arrays(models[0]), before[:2]) and not same(arrays(models[1]), before[2:])
    with pytest.raises(TypeError, match="scaled_by="):
        optimizers[0].update(models[0], models[0], scaled_by=[3])
