"""Frozen parameters: which an optimizer never changes, in every way that optax can say it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from support import thorough_but

import mpjax
from mpjax._src.core.training.frozen import Reader
from mpjax._src.core.training.optimizers import as_optimizer

PARAMS = {"base": np.ones((4, 3), np.float32), "lora": np.ones(3, np.float32), "n": np.float32(1)}
LABELS = {"base": "frozen", "lora": "trained", "n": "trained"}
FROZEN = {name: label == "frozen" for name, label in LABELS.items()}
TRAINED = {name: not frozen for name, frozen in FROZEN.items()}
STEPS = optax.linear_schedule(0.0, 0.1, 10)


def frozen_base(optimizer, labels=None):
    parts = {"trained": optimizer, "frozen": optax.set_to_zero()}
    return optax.partition(parts, labels or LABELS)


def after(optimizer):  # the optimizer sees the frozen gradients; their updates are removed
    return optax.chain(optimizer, optax.masked(optax.set_to_zero(), FROZEN))


def before(optimizer):  # the gradients are removed; moments of zeros stay zero
    return optax.chain(optax.masked(optax.set_to_zero(), FROZEN), optimizer)


def times(optimizer, zero):
    def scaled(updates, _):
        return {name: u * (zero(u) if FROZEN[name] else 1) for name, u in updates.items()}

    return optax.chain(optimizer, optax.stateless(scaled))


def where(optimizer, mask):
    def masked(updates, _):
        return {name: jnp.where(mask(FROZEN[name], u), 0.0, u) for name, u in updates.items()}

    return optax.chain(optimizer, optax.stateless(masked))


def counted(optimizer):  # a loop that starts at a constant
    def scaled(updates, _):
        factor = jax.lax.fori_loop(0, 3, lambda i, x: x + 1.0, 0.0)
        return {name: jnp.where(factor == 3.0, u, 0.0) for name, u in updates.items()}

    return optax.chain(optimizer, optax.stateless(scaled))


def freed_in_a_loop(optimizer):  # whose first turn returns zeros
    def scaled(updates, _):
        def turn(count, u):
            return count + 1.0, jnp.where(count == 1.0, 0.0, u)

        twice = jax.tree.map(lambda u: jnp.stack([u, u]), updates)
        return jax.tree.map(lambda u: jax.lax.scan(turn, 1.0, u)[1][-1], twice)

    return optax.chain(optimizer, optax.stateless(scaled))


def partly(optimizer):
    def scaled(updates, _):
        return {
            name: jnp.where(np.arange(u.size).reshape(u.shape) < u.size // 2, 0.0, u)
            for name, u in updates.items()
        }

    return optax.chain(optimizer, optax.stateless(scaled))


def conditional(optimizer):
    def update(grads, state, params=None):
        def run():
            return optimizer.update(grads, state, params)

        return jax.lax.cond(optax.tree.norm(grads) < 1e3, run, lambda: (zeros(grads), state))

    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    return optax.GradientTransformation(optimizer.init, update)


def jitted(optimizer):
    return optax.GradientTransformation(optimizer.init, jax.jit(optimizer.update))


def with_arguments(optimizer):
    def update(grads, state, params=None, *, temperature, decay, **extra_args):
        grads = optax.tree.scale(temperature - decay, grads)
        return optimizer.update(grads, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


ADAM = frozen_base(optax.adamw(0.1))
WAYS = {
    "multi_transform": optax.multi_transform(
        {"trained": optax.adamw(0.1), "frozen": optax.set_to_zero()}, LABELS
    ),
    "selective_transform": optax.selective_transform(optax.adamw(0.1), freeze_mask=FROZEN),
    "two masks": optax.chain(
        optax.masked(optax.adam(0.1), TRAINED), optax.masked(optax.set_to_zero(), FROZEN)
    ),
    "lr of zero": optax.partition(
        {"trained": optax.adam(0.1), "frozen": optax.sgd(0.0, momentum=0.9)}, LABELS
    ),
    "clipped around": optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    "clipped by blocks": optax.chain(optax.adaptive_grad_clip(0.1), ADAM),
    "scheduled outside": optax.chain(
        frozen_base(optax.scale_by_adam()), optax.scale_by_learning_rate(STEPS)
    ),
    "averaged outside": optax.chain(ADAM, optax.ema(0.9)),
    "noise outside": optax.chain(optax.add_noise(0.1, 0.5, key=0), ADAM),
    "several steps": optax.MultiSteps(ADAM, 4).gradient_transformation(),
    "several steps, checked": optax.MultiSteps(
        ADAM, 4, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "several steps inside": frozen_base(
        optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation()
    ),
    "injected": optax.inject_hyperparams(lambda rate: frozen_base(optax.adamw(rate)))(STEPS),
    "apply_if_finite": optax.apply_if_finite(ADAM, 3),
    "the loss by name": optax.chain(ADAM, contrib.reduce_on_plateau()),
    "polyak": frozen_base(optax.polyak_sgd()),
    "sam": contrib.sam(ADAM, frozen_base(optax.sgd(0.1)), opaque_mode=True),
    "sophia": frozen_base(contrib.sophia(0.1)),
    "line search": optax.chain(ADAM, optax.scale_by_zoom_linesearch(9)),
    "own arguments": with_arguments(ADAM),
    "jit": jitted(ADAM),
    "cond": conditional(ADAM),
    "adam, then freeze": after(optax.adamw(0.1)),
    "freeze, then adam": before(optax.adam(0.1)),
    "freeze, then masked decay": before(optax.adamw(0.1, mask=TRAINED)),
    "freeze, then momentum": before(optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "freeze, then rmsprop": before(optax.rmsprop(0.1)),
    "freeze, then muon": before(contrib.muon(0.1)),
    "freeze, then adafactor": before(optax.adafactor(0.1)),
    "freeze, then lamb": before(optax.lamb(0.1)),
    "times the number 0": times(optax.adam(0.1), lambda u: 0.0),
    "times an array of 0": times(optax.adam(0.1), lambda u: np.zeros(u.shape, np.float32)),
    "where the number True": where(optax.adam(0.1), lambda frozen, u: frozen),
    "where an array of True": where(optax.adam(0.1), lambda frozen, u: np.full(u.shape, frozen)),
    "where a mask is 1": where(optax.adam(0.1), lambda frozen, u: jnp.float32(frozen) == 1),
    "times 1 - mask": times(optax.adam(0.1), lambda u: 1 - jnp.float32(True)),
    "skip_nonfinite": mpjax.optim.skip_nonfinite(ADAM),
    "masters": mpjax.optim.with_master_weights(ADAM),
    "8-bit moments": mpjax.optim.with_8bit_moments(ADAM),
}
READ = {  # whether the gradient of base is read, of optimizers that change it
    "plain": (optax.adamw(0.1), True),
    "one mask, which passes gradients on": (optax.masked(optax.adam(0.1), TRAINED), True),
    "freed later": (
        optax.chain(
            optax.adam(0.1),
            optax.masked(optax.scale_by_schedule(lambda n: jnp.where(n < 5, 0.0, 1.0)), FROZEN),
        ),
        True,
    ),
    "a rate of 0 that may be set": (optax.inject_hyperparams(optax.adamw)(0.0), True),
    "decayed outside": (optax.chain(ADAM, optax.add_decayed_weights(0.1)), False),
    "decayed by adamw": (before(optax.adamw(0.1)), False),
    "averaged weights": (contrib.schedule_free(frozen_base(optax.sgd(0.1)), 0.1), False),
    "a part of a leaf": (partly(optax.adam(0.1)), True),
    "a loop that counts": (counted(optax.adam(0.1)), True),
    "a loop that frees": (freed_in_a_loop(optax.adam(0.1)), True),
}


def reads_of(optimizer, params=PARAMS):
    reads = Reader(as_optimizer(optimizer, "optimizer"))(params)
    return (dict(zip(sorted(params), flags, strict=True)) for flags in reads)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_freeze_is_found(way):
    frozen, unread = reads_of(WAYS[way])
    assert frozen == unread == FROZEN


@pytest.mark.parametrize("way", READ)
def test_what_changes_is_not_frozen(way):
    optimizer, is_read = READ[way]
    frozen, unread = reads_of(optimizer)
    assert not any(frozen.values())
    assert unread == {"base": not is_read, "lora": False, "n": False}


NOTHING = {
    "a rate of 0": optax.sgd(0.0),
    "labels": frozen_base(optax.adam(0.1), dict.fromkeys(PARAMS, "frozen")),
    "a callable": optax.selective_transform(optax.adam(0.1), freeze_mask=lambda _: True),
}


@pytest.mark.parametrize("way", NOTHING)
def test_an_optimizer_that_changes_nothing_is_told_once(way):
    optimizer = mpjax.mixed_precision(NOTHING[way], "mixed_bfloat16")
    with pytest.warns(UserWarning, match="changes no parameter.*labels or a mask") as told:
        state = optimizer.init(PARAMS)
        optimizer.update(PARAMS, state, PARAMS)
    assert len(told) == 1 and told[0].filename == __file__


def test_a_loop_that_mixes_gradients_reads_all_of_them():
    def update(grads, state, params=None):
        def turn(carry, _):
            base, lora, n = carry
            return (base * 0, n * lora, jnp.sum(lora) * n), None

        first = grads["base"], grads["lora"], grads["n"]
        (_, lora, n), _ = jax.lax.scan(turn, first, None, 3)
        base = jax.lax.while_loop(lambda x: x.sum() < n, lambda x: x * 2, jnp.zeros((4, 3)))
        return {"base": base, "lora": lora, "n": n}, state

    frozen, unread = reads_of(optax.GradientTransformation(lambda params: (), update))
    assert frozen == unread == FROZEN


def trained_once(optimizer, dtype, policy="mixed_bfloat16", **extra_args):
    """Returns parameters, their updates and states, before and after one update."""
    optimizer = mpjax.mixed_precision(optimizer, policy)
    params = {"base": jnp.ones((4, 3), dtype), "lora": jnp.ones(3), "n": jnp.float32(1)}
    if optimizer.policy.param_dtype == jnp.bfloat16:
        params |= optimizer.policy.cast_to_param({name: params[name] for name in ("lora", "n")})
    state = optimizer.init(params)

    def loss(params, x):
        y = x @ params["base"].astype(x.dtype) * params["lora"] * params["n"]
        return jnp.mean(y**2)

    @jax.jit
    def step(params, state, x):
        gradient = optimizer.value_and_grad(loss, state)
        value, grads = gradient(params, x)
        functions = {
            "grad_fn": lambda params, _: gradient(params, x)[1],
            "value_fn": lambda params: loss(params, x),
            "grad": grads,
            "value": value,
        }
        given = {name: functions.get(name, own) for name, own in extra_args.items()}
        updates, state = optimizer.update(grads, state, params, **given)
        return updates, optax.apply_updates(params, updates), state

    updates, new, after = step(params, state, np.ones((2, 4), np.float32))
    return params, state, updates, new, after


POLICIES = ("float32", "mixed_bfloat16", "O2:bfloat16,masters=split")
DTYPES = ("bfloat16", "float16", "int8", "int4", "float8_e4m3fn")


@pytest.mark.parametrize(
    ("dtype", "policy"),
    thorough_but(itertools.product(DTYPES, POLICIES), *zip(DTYPES, POLICIES * 2, strict=False)),
)
def test_frozen_leaf_keeps_its_dtype_and_has_no_master(dtype, policy):
    params, state, updates, new, after = trained_once(ADAM, dtype, policy)
    assert new["base"].dtype == updates["base"].dtype == dtype
    assert (new["base"] == params["base"]).all() and not bool((new["lora"] == 1).any())
    assert int(after.skipped_steps) == 0
    for held in (state, after):
        shapes = [x.shape for x in jax.tree.leaves(held) if x.dtype != jnp.int32]
        assert (4, 3) not in shapes


WRITTEN = ("several steps", "adam, then freeze", "freeze, then adam")
STATES = [*itertools.product(WRITTEN, ("bfloat16", "int8"))]


@pytest.mark.parametrize(("way", "dtype"), thorough_but(STATES, 0, 3, 4))
def test_state_beside_a_frozen_leaf_keeps_its_dtypes(way, dtype):
    _, state, _, _, after = trained_once(WAYS[way], dtype, "O2:bfloat16")
    kinds = [[(x.shape, x.dtype) for x in jax.tree.leaves(each)] for each in (state, after)]
    assert kinds[0] == kinds[1]


ARGUMENTS = {
    "sam": dict.fromkeys(["grad_fn"]),
    "line search": dict.fromkeys(["value", "grad", "value_fn"]),
    "own arguments": {"temperature": 2.0, "decay": 1.0},
}


CASES = [*itertools.product(ARGUMENTS, ("bfloat16", "int8"), ("mixed_bfloat16", "O3:bfloat16"))]
QUICK = [("sam", "bfloat16", "O3:bfloat16"), ("sam", "int8", "mixed_bfloat16")]
QUICK += [("own arguments", "bfloat16", "mixed_bfloat16"), ("own arguments", "int8", "O3:bfloat16")]


@pytest.mark.parametrize(("way", "dtype", "policy"), thorough_but(CASES, *QUICK))
def test_optimizer_with_required_arguments_freezes_in_init_and_update(way, dtype, policy):
    """What it evaluates is given the frozen integers themselves, not the zeros that it sees."""
    params, state, _, new, after = trained_once(WAYS[way], dtype, policy, **ARGUMENTS[way])
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(each)] for each in (state, after)]
    assert shapes[0] == shapes[1]
    if way != "line search":  # which keeps its last gradient and updates
        assert (4, 3) not in [shape for shape, _ in shapes[0]]
    assert (new["base"] == params["base"]).all() and new["base"].dtype == dtype
    assert bool((new["lora"] < 1).all()) and int(after.skipped_steps) == 0


ROUNDINGS = ["O3:bfloat16", "O3:bfloat16,rounding=stochastic", "O3:bfloat16,rounding=kahan"]


@pytest.mark.parametrize("policy", ["O2:bfloat16", *ROUNDINGS])
def test_no_rounding_touches_a_frozen_leaf(policy):
    params, _, updates, new, _ = trained_once(ADAM, "float16", policy)
    assert new["base"].dtype == "float16" and (new["base"] == params["base"]).all()
    assert new["lora"].dtype == "bfloat16" and (np.asarray(updates["base"]) == 0).all()


def test_frozen_gradients_are_not_judged():
    optimizer = mpjax.mixed_precision(WAYS["clipped around"], "mixed_float16", 8.0)
    state = optimizer.init(PARAMS)
    grads = {**PARAMS, "base": np.full((4, 3), np.nan, np.float32)}
    updates, state = optimizer.update(grads, state, PARAMS)
    assert bool(state.grads_finite) and np.isfinite(updates["lora"]).all()
    assert (updates["base"] == 0).all()
    skipping = mpjax.optim.skip_nonfinite(ADAM)
    updates, state = skipping.update(grads, skipping.init(PARAMS), PARAMS)
    assert int(state.skipped_steps) == 0 and (updates["lora"] != 0).all()
    grads = {**PARAMS, "lora": np.full(3, np.inf, np.float32)}
    assert int(skipping.update(grads, state, PARAMS)[1].skipped_steps) == 1


def test_frozen_gradients_do_not_count_in_a_clipped_norm():
    clipped = frozen_base(optax.sgd(1.0))
    clipped = optax.chain(optax.clip_by_global_norm(1.0), clipped)
    optimizer = mpjax.mixed_precision(clipped, "float32")
    grads = {"base": np.full((4, 3), 1e4, np.float32), "lora": np.array([0.6, 0, 0], np.float32)}
    grads["n"] = np.float32(0.8)  # a norm of 1 with lora
    updates, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)
    np.testing.assert_allclose(-updates["lora"], grads["lora"], rtol=1e-6)


def test_gradients_of_frozen_leaves_may_be_missing():
    optimizer = mpjax.mixed_precision(ADAM, "float32")
    state = optimizer.init(PARAMS)
    updates, _ = optimizer.update({**PARAMS, "base": None}, state, PARAMS)
    assert updates["base"].shape == (4, 3) and not updates["base"].any()
    empty = np.zeros((4, 3), jax.dtypes.float0)  # of jax.grad(allow_int=True)
    assert not optimizer.update({**PARAMS, "base": empty}, state, PARAMS)[0]["base"].any()
    with pytest.raises(ValueError, match="updates must be the gradients of params.*lacks.* n "):
        optimizer.update({"base": None, "lora": PARAMS["lora"]}, state, PARAMS)


def test_a_leaf_that_is_unfrozen_needs_its_master():
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    later = mpjax.optim.with_master_weights(optax.sgd(0.1))
    state = mpjax.optim.with_master_weights(frozen_base(optax.sgd(0.1))).init(half)
    state = state._replace(inner_state=later.init(half).inner_state)
    with pytest.raises(ValueError, match=r"params\['base'\].*frozen and is trained now"):
        later.update(half, state, half)


def test_a_master_of_an_older_state_stays_as_it_is():
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    plain = mpjax.optim.with_master_weights(optax.sgd(0.1)).init(half)
    optimizer = mpjax.optim.with_master_weights(frozen_base(optax.sgd(0.1)))
    state = optimizer.init(half)._replace(masters=plain.masters)
    updates, after = jax.jit(optimizer.update)(half, state, half)
    assert (after.masters["base"] == plain.masters["base"]).all()
    assert (after.masters["lora"] != 1).all() and not updates["base"].any()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "O3:bfloat16"])
def test_frozen_python_number_passes_through(policy):
    optimizer = mpjax.mixed_precision(ADAM, policy)
    params = optimizer.policy.cast_to_param({"lora": jnp.ones(3), "n": jnp.ones(())})
    params["base"] = 0.5
    updates, _ = optimizer.update({**params, "base": None}, optimizer.init(params), params)
    assert updates["base"] == 0 and bool((updates["lora"] != 0).all())
