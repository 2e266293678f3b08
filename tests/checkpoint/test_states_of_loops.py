"""States of every kind of loop under every pair of policies: with their masters, or refused."""

import functools
import itertools

import flax.linen as nn
import flax.serialization
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
from mpjax._src.checkpoint.contents import leaves_of
from mpjax._src.core.training import residuals

POLICIES = [
    *("mixed_float16", "mixed_bfloat16", "O2:float16", "O2:bfloat16", "O2:bfloat16,masters=split"),
    *("O2:bfloat16,masters=split8", "O3:float16", "O3:bfloat16", "O3:bfloat16,rounding=kahan"),
    "O3:bfloat16,rounding=stochastic",
]
KERNEL = np.full((3, 2), np.float32(0.1))
ADAM = optax.adam(1e-3)


def own_loop(policy):
    params = mpjax.get_policy(policy).cast_to_param({"kernel": jnp.asarray(KERNEL)})
    return {"weights": params, "optimizer": mpjax.mixed_precision(ADAM, policy).init(params)}


def of_linen(policy):
    params = {"kernel": jnp.asarray(KERNEL)}
    return mpjax.linen.TrainState.create(
        apply_fn=nn.Dense(2, use_bias=False).apply, params=params, tx=ADAM, policy=policy
    )


def with_overwritten(policy):
    """A state of linen whose parameters are one level deeper."""
    params = {"params": {"kernel": jnp.asarray(KERNEL)}, "_overwrite_with_gradient": {}}
    return mpjax.linen.TrainState.create(apply_fn=None, params=params, tx=ADAM, policy=policy)


def of_nnx(policy):
    model = nnx.Linear(3, 2, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = jnp.asarray(KERNEL)
    return nnx.state((model, mpjax.nnx.Optimizer(model, ADAM, policy, wrt=nnx.Param)))


def as_dicts(policy):
    return flax.serialization.to_state_dict(own_loop(policy))


STATES = {f.__name__: f for f in (own_loop, of_linen, with_overwritten, of_nnx, as_dicts)}


@functools.cache
def begun(kind, policy):
    return STATES[kind](policy)


def moved(path, leaf):
    """Moves masters and residuals off their half parameters, and all counts and scales."""
    if "masters" in path:
        return leaf + jnp.asarray(1e-7 if leaf.dtype == jnp.float32 else 3, leaf.dtype)
    return leaf + 1 if leaf.dtype == jnp.int32 or "loss_scale" in path else leaf


@functools.cache
def trained(kind, policy):
    state = begun(kind, policy)
    leaves = [moved(leaf.path, leaf.value) for leaf in leaves_of(state)]
    return jax.tree.unflatten(jax.tree.structure(state), leaves)


def kernel(state):
    """The float32 value of the kernel: its master, whole or split, or itself."""
    found = {leaf.path.removesuffix("/value"): leaf.value for leaf in leaves_of(state)}
    beside = [value for path, value in found.items() if path.endswith("masters/kernel")]
    (param,) = (
        v
        for path, v in found.items()
        if path.endswith("kernel") and "state" not in path and "optimizer" not in path
    )
    return residuals.full(param, beside[0]) if beside else param.astype(jnp.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("states")

    @functools.cache
    def at(kind, policy):
        checkpoint.save(root / kind / policy, trained(kind, policy))
        return root / kind / policy

    return at


FLOAT32 = ("mixed", "O2:float16", "O2:bfloat16")
CASES = [(k, *pair) for k in STATES for pair in itertools.permutations(POLICIES, 2)]
QUICK = [
    *(("of_nnx", "O2:float16", to) for to in ("mixed_bfloat16", "O2:bfloat16", "O3:float16")),
    ("of_nnx", "O2:bfloat16,masters=split", "mixed_float16"),
    ("of_nnx", "mixed_bfloat16", "O2:bfloat16,masters=split"),
    ("own_loop", "O2:float16", "mixed_bfloat16"),
    ("of_linen", "O2:float16", "O2:bfloat16"),
    ("with_overwritten", "O2:float16", "mixed_bfloat16"),
    ("as_dicts", "O2:float16", "mixed_bfloat16"),
]


@pytest.mark.parametrize("kind, was, to", thorough_but(CASES, *QUICK))
def test_masters_are_used_or_the_restore_is_refused(kind, was, to, saved):
    like = begun(kind, to)
    try:
        back = checkpoint.restore(saved(kind, was), like)
    except ValueError as error:
        assert "would narrow" in str(error)
        assert not to.startswith(FLOAT32) or to.endswith("split8")
        return
    np.testing.assert_array_equal(kernel(back), kernel(trained(kind, was)))


@pytest.mark.parametrize("kind", thorough_but(STATES, "own_loop", "of_nnx"))
def test_the_loss_scale_starts_anew_under_another_policy(kind, saved):
    """It is in the optimizer's state."""

    def scale(state):
        (found,) = (x.value for x in leaves_of(state) if "loss_scale/loss_scale" in x.path)
        return float(found)

    path = saved(kind, "mixed_float16")
    assert scale(checkpoint.restore(path, begun(kind, "O2:float16"))) == 2**16 + 1
    assert (
        scale(checkpoint.restore(saved(kind, "mixed_bfloat16"), begun(kind, "O2:float16"))) == 2**16
    )


def test_a_part_of_a_state_of_nnx_is_not_left_over_in_silence(saved):
    """Its keys are integers."""
    like = nnx.State({**begun("of_nnx", "O2:float16"), 1: nnx.State({})})
    with pytest.raises(ValueError, match="like lacks '1/forward"):
        checkpoint.restore(saved("of_nnx", "O2:float16"), like)


def test_masters_of_one_of_two_trees_alike_are_restored_by_their_place(tmp_path):
    """An average in half beside the weights: the masters may belong to either."""
    state = own_loop("O2:float16")
    state = {**state, "average": state["weights"]}
    checkpoint.save(tmp_path / "two", state)
    back = checkpoint.restore(tmp_path / "two", state)
    np.testing.assert_array_equal(kernel({**back, "average": 0}), kernel(own_loop("O2:float16")))
    other = own_loop("mixed_bfloat16")
    with pytest.raises(ValueError, match=r"like lacks 'optimizer/inner_state/masters/kernel'"):
        checkpoint.restore(tmp_path / "two", {**other, "average": other["weights"]})
