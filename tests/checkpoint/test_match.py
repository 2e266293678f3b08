"""A state that is restored under another policy, or into another program: exact, or refused."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from problems import bits
from support import thorough_but

import mpjax
from mpjax import checkpoint
from mpjax._src.checkpoint import arrays
from mpjax._src.checkpoint.match import can_hold
from mpjax._src.core.training import residuals
from mpjax._src.optim import codes

POLICIES = [
    *("float32", "mixed_float16", "mixed_bfloat16"),
    *("O2:float16", "O2:bfloat16", "O3:float16", "O3:bfloat16"),
]
# Those that keep something else than masters beside half weights, or draw by lot.
BESIDE = [
    *("O2:bfloat16,masters=split", "O2:bfloat16,masters=split8"),
    *("O3:bfloat16,rounding=kahan", "O3:float16,rounding=kahan", "O3:bfloat16,rounding=stochastic"),
]
PARAMS = {
    "dense": {"w": np.full((3, 3), np.float32(0.1))},
    "norm": {"scale": np.full(3, np.float32(1.1))},
}


def loss_fn(params, batch):
    y = (batch @ params["dense"]["w"]) * params["norm"]["scale"]
    return jnp.mean(y.astype(jnp.float32) ** 2)


@functools.cache
def program(policy):
    return mpjax.build_train_step(loss_fn, optax.adamw(1e-3), policy)


@functools.cache
def begun(policy):
    """The state of a policy before its first step."""
    return jax.jit(program(policy)[0])(PARAMS)


@functools.cache
def trained(policy):
    """A state after two steps and a skipped one."""
    state, step = begun(policy), jax.jit(program(policy)[1])
    ones = np.ones((2, 3), np.float32)
    for batch in (ones, np.nan * ones, ones):
        state, _ = step(state, batch)
    scale = jax.tree.map(lambda x: x + 1, state.loss_scale)  # as if it had been adjusted
    return mpjax.TrainState(**{**vars(state), "loss_scale": scale})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where the state of a policy is saved, which happens when a test first asks for it."""
    root = tmp_path_factory.mktemp("policies")

    @functools.cache
    def at(policy):
        checkpoint.save(root / policy, trained(policy), policy=policy)
        return root / policy

    return at


def kept(policy):
    """The dtype of the most precise weights of a policy."""
    return policy.removeprefix("O3:") if policy.startswith("O3") else "float32"


def expected(state, policy):
    """The state under another policy: its weights as `init` casts them, exact masters of halves."""
    full = mpjax.optim.master_params(state.opt_state, state.params)
    fresh = jax.jit(program(policy)[0])(full)
    inner = getattr(state.opt_state, "inner_state", state.opt_state)
    opt_state = fresh.opt_state
    if hasattr(opt_state, "masters"):
        where = jax.tree.structure(opt_state.masters)  # of half weights alone
        masters = jax.tree.unflatten(where, [full["dense"]["w"]] * where.num_leaves)
        opt_state = opt_state._replace(inner_state=inner, masters=masters)
    else:
        opt_state = inner
    same_scale = isinstance(fresh.loss_scale, type(state.loss_scale))
    scale = state.loss_scale if same_scale else fresh.loss_scale
    return mpjax.TrainState(
        **{**vars(state), "params": fresh.params, "opt_state": opt_state, "loss_scale": scale}
    )


# Each of three beside each other one; and what is kept beside weights, to and from its like.
FEW = ("mixed_float16", "O2:bfloat16", "O3:float16")
PAIRS = list(itertools.product(POLICIES, POLICIES))
QUICK = [pair for pair in PAIRS if {*pair} <= {*FEW}]
LIKE = [
    ("float32", "O2:bfloat16,masters=split"),
    ("O2:bfloat16,masters=split", "O2:bfloat16"),
    ("O2:bfloat16,masters=split8", "O3:bfloat16,rounding=kahan"),
    ("O3:float16,rounding=kahan", "float32"),
    ("O3:bfloat16,rounding=stochastic", "O3:float16,rounding=kahan"),
]


@pytest.mark.parametrize("was, to", thorough_but(PAIRS, *QUICK))
def test_every_policy_restores_every_other_exactly_or_says_why_not(was, to, saved):
    like = begun(to)
    if kept(to) not in ("float32", kept(was)):
        with pytest.raises(ValueError, match=f"narrow params/dense/w from {kept(was)} to"):
            checkpoint.restore(saved(was), like)
        back = checkpoint.restore(saved(was), like, allow_narrowing=True)
    else:
        back = checkpoint.restore(saved(was), like)
    want = expected(trained(was), to)
    assert jax.tree.structure(back) == jax.tree.structure(like) == jax.tree.structure(want)
    assert bits(back) == bits(want)


def best(policy):
    """The significant bits of the most precise weights of a policy, and their largest exponent."""
    by_key = {"split8": (16, 128), "bfloat16,rounding=kahan": (16, 128)}
    by_key |= {"float16,rounding=kahan": (22, 16), "bfloat16,rounding=stochastic": (8, 128)}
    by_key |= {"O3:bfloat16": (8, 128), "O3:float16": (11, 16)}
    return next((reach for key, reach in by_key.items() if policy.endswith(key)), (24, 128))


SAVED = BESIDE + POLICIES[:1] + POLICIES[3:]


@pytest.mark.parametrize("was, to", thorough_but(itertools.product(SAVED, SAVED), *LIKE))
def test_split_masters_are_restored_whole_and_whole_ones_split(was, to, saved):
    if not {was, to} & set(BESIDE):
        return  # above
    state, like = trained(was), begun(to)
    if any(a < b for a, b in zip(best(to), best(was), strict=True)):
        with pytest.raises(ValueError, match="would narrow params/dense/w from"):
            checkpoint.restore(saved(was), like)
    back = checkpoint.restore(saved(was), like, allow_narrowing=True)
    assert jax.tree.structure(back) == jax.tree.structure(like)
    assert [x.dtype for x in jax.tree.leaves(back)] == [x.dtype for x in jax.tree.leaves(like)]
    if was == to:
        assert bits(back) == bits(state)
        return
    full = mpjax.optim.master_params(state.opt_state, state.params)["dense"]["w"]
    weight = back.params["dense"]["w"]
    if not getattr(back.opt_state, "masters", None):
        assert bits(weight) == bits(full.astype(weight.dtype))
        return
    beside = back.opt_state.masters["dense"]["w"]
    assert bits((weight, beside)) == bits(residuals.split(full, weight.dtype, beside.dtype))


@pytest.mark.thorough
def test_restore_turns_moments_into_codes_and_back(tmp_path, rng, monkeypatch):
    # Compiled whole: operation by operation they are a hundred small programs.
    for name, static in (("encode", 2), ("decode", 2), ("scales_of", 1)):
        monkeypatch.setattr(codes, name, jax.jit(getattr(codes, name), static_argnums=static))
    params = {"w": np.float32(rng.normal(size=(64, 96))), "b": np.ones(96, np.float32)}
    loss = lambda p, x: jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2)  # noqa: E731
    states, likes = {}, {}
    for policy in ("O2:bfloat16", "O2:bfloat16,masters=split,moments=8bit"):
        init, step = mpjax.build_train_step(loss, optax.adamw(1e-2), policy)
        likes[policy] = jax.jit(init)(params)
        states[policy], _ = jax.jit(step)(likes[policy], np.ones((4, 64), np.float32))
        checkpoint.save(tmp_path / policy, states[policy])
    full, eight = states
    with pytest.raises(ValueError, match="mu/w from float32 to int8 with scales of uint8"):
        checkpoint.restore(tmp_path / full, likes[eight])
    back = checkpoint.restore(tmp_path / full, likes[eight], allow_narrowing=True)
    like = likes[eight]
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (back, like)) == (
        jax.tree.map(lambda x: (x.shape, x.dtype), (like, like))
    )
    checkpoint.save(tmp_path / "back", back)
    for where in (tmp_path / "back", tmp_path / eight):
        wide = checkpoint.restore(where, likes[full])
        for name, most in (("mu", 0.02), ("nu", 0.04)):
            found, wanted = (
                getattr(s.opt_state.inner_state[0], name)["w"] for s in (wide, states[full])
            )
            assert found.dtype == jnp.float32
            found, wanted = np.asarray(found), np.asarray(wanted)
            assert np.linalg.norm(found - wanted) < most * np.linalg.norm(wanted)
    assert bits(checkpoint.restore(tmp_path / eight, like)) == bits(states[eight])
    with pytest.raises(ValueError, match=r"w has shape \(64, 96\).*but \(64, 128\) in like"):
        other = {"w": np.ones((64, 128), np.float32), "b": np.ones(128, np.float32)}
        checkpoint.restore(tmp_path / eight, jax.eval_shape(init, other))


def test_restore_under_the_same_policy_keeps_16_bit_weights_as_they_were(saved, tmp_path):
    """Even where they are not their rounded masters: infinities, and a loop of one's own."""
    state = begun("O2:float16")
    odd = jax.tree.map(lambda x: np.full(x.shape, np.inf, x.dtype), state.params)
    state = mpjax.TrainState(**{**vars(state), "params": odd})
    checkpoint.save(tmp_path / "c", state)
    assert bits(checkpoint.restore(tmp_path / "c", begun("O2:float16"))) == bits(state)


@pytest.mark.parametrize("to", ["O2:float16", "O3:float16"])
def test_restore_never_makes_a_finite_weight_infinite(to, tmp_path):
    params = {**PARAMS, "dense": {"w": np.full((3, 3), np.float32(1e6))}}
    checkpoint.save(tmp_path / "c", program("float32")[0](params))
    with pytest.raises(ValueError, match=r"become infinite in params/dense/w \(float32 to float16"):
        checkpoint.restore(tmp_path / "c", begun(to), allow_narrowing=True)
    back = checkpoint.restore(tmp_path / "c", begun("O2:bfloat16"))
    assert float(back.opt_state.masters["dense"]["w"][0, 0]) == 1e6


def test_restore_finds_masters_anywhere_in_a_custom_optimizer(tmp_path):
    def optimizer(wrap):
        return optax.chain(optax.clip_by_global_norm(1.0), wrap(optax.adam(1e-2)))

    full = {"w": jnp.full(3, 0.1)}
    half = {"w": jnp.full(3, 0.1, jnp.bfloat16)}
    with_masters = optimizer(mpjax.optim.with_master_weights)
    state = {"params": half, "opt_state": with_masters.init(half)}
    masters = {"w": jnp.full(3, 0.3)}
    wrapped = state["opt_state"][1]._replace(masters=masters)
    state["opt_state"] = (state["opt_state"][0], wrapped)
    checkpoint.save(tmp_path / "c", state)
    like = {"params": full, "opt_state": optimizer(lambda inner: inner).init(full)}
    back = checkpoint.restore(tmp_path / "c", like)
    assert bits(back["params"]) == bits(masters)
    assert jax.tree.structure(back) == jax.tree.structure(like)
    with pytest.raises(ValueError, match="narrow params/w from float32 to bfloat16"):
        checkpoint.restore(tmp_path / "c", {"params": half})


def test_parts_of_a_state_are_restored_into_another_program(saved):
    weights = mpjax.optim.master_params(
        trained("O2:float16").opt_state, trained("O2:float16").params
    )
    back = checkpoint.restore(saved("O2:float16"), {"params": PARAMS})
    assert bits(back["params"]) == bits(weights)
    back = checkpoint.restore(saved("O2:float16"), {"params": PARAMS, "step": jnp.int32(0)})
    assert int(back["step"]) == 2
    inner = {"opt_state": trained("O2:float16").opt_state}
    assert bits(checkpoint.restore(saved("O2:float16"), inner)) == bits(inner)


@pytest.mark.parametrize(
    "optimizer, message",
    [
        (optax.sgd(0.1), "like lacks 'opt_state/inner_state/0/count'"),
        (optax.adafactor(0.1), "a different model or optimizer. It lacks 'opt_state"),
        (
            optax.adabelief(1e-3),
            "0 is a ScaleByAdamState in the checkpoint, but a ScaleByBeliefState",
        ),
        (optax.chain(optax.clip(1.0), optax.adamw(1e-3)), "lacks 'opt_state/inner_state/1/0/count"),
        (optax.adamw(optax.constant_schedule(1e-3)), "lacks 'opt_state/inner_state/2/count'"),
        (optax.adamw(1e-3, mu_dtype=jnp.bfloat16), "narrow opt_state/inner_state/0/mu/dense/w"),
    ],
    ids=["sgd", "adafactor", "adabelief", "chain", "schedule", "moments"],
)
def test_a_state_of_another_optimizer_is_refused(optimizer, message, saved):
    init, _ = mpjax.build_train_step(loss_fn, optimizer, "float32")
    with pytest.raises(ValueError, match=message):
        checkpoint.restore(saved("float32"), init(PARAMS))


@pytest.mark.parametrize(
    "params, message",
    [
        ({"dense": PARAMS["dense"]}, "like lacks 'params/norm/scale'"),
        ({**PARAMS, "more": jnp.ones(2)}, "lacks .*'params/more'"),
        ({**PARAMS, "norm": {"scale": jnp.ones(4)}}, r"scale has shape \(3,\).*but \(4,\) in like"),
    ],
)
def test_a_state_of_another_model_is_refused(params, message, saved):
    for policy in ("float32", "O2:bfloat16"):
        with pytest.raises(ValueError, match=message):
            checkpoint.restore(saved("float32"), program(policy)[0](params))


def test_restore_names_an_rng_that_is_new_or_gone(saved):
    like = program("float32")[0](PARAMS, None, jax.random.key(0))
    with pytest.raises(ValueError, match="It lacks 'rng'"):
        checkpoint.restore(saved("float32"), like)


def test_restore_refuses_another_kind_of_number(tmp_path):
    checkpoint.save(tmp_path / "c", {"n": jnp.ones(2, jnp.int16)})
    for other in (jnp.ones(2), jnp.ones(2, bool), jnp.ones(2, jnp.complex64)):
        with pytest.raises(ValueError, match="n is int16 in the checkpoint, but"):
            checkpoint.restore(tmp_path / "c", {"n": other}, allow_narrowing=True)
    assert checkpoint.restore(tmp_path / "c", {"n": jnp.ones(2, jnp.int32)})["n"].dtype == jnp.int32
    for narrow in (jnp.int8, jnp.uint32):
        with pytest.raises(ValueError, match="narrow n from int16"):
            checkpoint.restore(tmp_path / "c", {"n": jnp.ones(2, narrow)})


FLOATS = ["float8_e4m3b11fnuz", "float8_e4m3fn", "float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("narrow", FLOATS)
@pytest.mark.parametrize("wide", FLOATS)
def test_can_hold_is_true_if_no_value_is_lost(wide, narrow):
    """Mantissa, largest and smallest value: each is too small in one pair of these."""
    tables = {name: jnp.finfo(name) for name in (wide, narrow)}
    # The least, the greatest, and the one after 1 are where a dtype ends.
    ends = [
        np.float64(float(value))
        for value in (tables[narrow].smallest_subnormal, tables[narrow].max)
    ] + [1 + np.float64(float(tables[narrow].eps))]
    with np.errstate(over="ignore", under="ignore"):
        kept = [np.asarray(x).astype(jnp.dtype(wide)).astype(np.float64) == x for x in ends]
    assert can_hold(wide, narrow) == all(kept)


SETTINGS = mpjax.DynamicLossScale(growth_interval=7)


@pytest.mark.parametrize(
    "was, to, scale",
    [
        (SETTINGS, mpjax.DynamicLossScale(growth_interval=7), 2.0**16 + 1),
        (SETTINGS, mpjax.DynamicLossScale(growth_interval=8), 2.0**16),
        (SETTINGS, mpjax.DynamicLossScale(init_scale=2.0**9, growth_interval=7), 2.0**9),
        (SETTINGS, 64.0, 64.0),
        (64.0, 128.0, 128.0),  # a setting of the program
        (None, "dynamic", 2.0**16),
        ("dynamic", None, 1.0),
    ],
    ids=str,
)
def test_restored_loss_scale_goes_on_or_starts_fresh(was, to, scale, tmp_path):
    build = lambda s: mpjax.build_train_step(loss_fn, optax.sgd(1.0), "float32", loss_scale=s)  # noqa: E731
    state = build(was)[0](PARAMS)
    moved = jax.tree.map(lambda x: x + 1, state.loss_scale)
    checkpoint.save(tmp_path / "c", mpjax.TrainState(**{**vars(state), "loss_scale": moved}))
    back = checkpoint.restore(tmp_path / "c", build(to)[0](PARAMS))
    assert float(back.loss_scale.loss_scale) == scale


def test_restore_of_a_fresh_loss_scale_needs_values_in_like(saved):
    shapes = jax.eval_shape(program("mixed_float16")[0], PARAMS)
    with pytest.raises(ValueError, match="only a shape.*must come from like"):
        checkpoint.restore(saved("float32"), shapes)
    assert bits(checkpoint.restore(saved("mixed_float16"), shapes)) == bits(
        trained("mixed_float16")
    )


def test_refused_restore_reads_no_arrays(saved, monkeypatch):
    monkeypatch.setattr(arrays, "read", None)
    with pytest.raises(ValueError, match="narrow"):
        checkpoint.restore(saved("float32"), begun("O3:bfloat16"))


def test_restore_error_names_a_few_leaves_and_counts_the_rest(tmp_path):
    many = {f"layer_{i}": np.ones(2, np.float32) for i in range(9)}
    checkpoint.save(tmp_path / "c", {"params": many})
    half = mpjax.cast(many, "bfloat16")
    with pytest.raises(ValueError, match="layer_4 from float32 to bfloat16 and 4 more"):
        checkpoint.restore(tmp_path / "c", {"params": half})
    with pytest.raises(ValueError, match="'params/layer_4' and 4 more"):
        checkpoint.restore(tmp_path / "c", {"params": {}})
