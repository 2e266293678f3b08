"""The names of a state's leaves in a checkpoint, and the description of the rest."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.tree_util import Partial

import mpjax
from mpjax._src.checkpoint.contents import kinds_of, leaves_of, settings_of

HALF = {"w": jnp.ones(2, jnp.bfloat16), "scale": jnp.ones(2)}


def names(tree):
    return {leaf.path: leaf.means for leaf in leaves_of(tree)}


def test_masters_are_named_after_their_parameters():
    optimizer = optax.chain(optax.clip(1.0), mpjax.optim.with_master_weights(optax.sgd(1.0, 0.9)))
    state = {"params": HALF, "opt_state": optimizer.init(HALF)}
    assert names(state) == {
        "params/w": "params/w",
        "params/scale": "params/scale",
        "opt_state/1/masters/w": "master of params/w",
        "opt_state/1/inner_state/0/trace/w": "opt_state/1/0/trace/w",
        "opt_state/1/inner_state/0/trace/scale": "opt_state/1/0/trace/scale",
    }


@pytest.mark.parametrize(
    "tree", [HALF, [jnp.ones(2), (None, jnp.ones(1))], mpjax.DynamicLossScale(), jnp.ones(3)]
)
def test_leaves_come_in_the_order_of_the_tree(tree):
    optimizer = mpjax.optim.with_master_weights(mpjax.optim.with_master_weights(optax.adam(1.0)))
    whole = {"params": tree, "opt_state": optimizer.init(tree)}
    assert all(a.value is b for a, b in zip(leaves_of(whole), jax.tree.leaves(whole), strict=True))


def test_kinds_of_names_the_classes_that_hold_leaves():
    """Another learning rate is no other optimizer, whatever it adds to the chain."""
    inner = optax.adamw(1.0)
    kinds = kinds_of({"opt_state": inner.init(HALF)})
    assert kinds == {"opt_state/0": "ScaleByAdamState"}
    assert kinds == kinds_of({"opt_state": mpjax.optim.with_master_weights(inner).init(HALF)})


def test_settings_of_a_state_are_the_same_in_every_process():
    """A function is shown with its address, which the next process does not share."""
    first, second = (Partial(lambda: 0) for _ in range(2))
    assert settings_of(first) == settings_of(second) != settings_of(Partial(jnp.sin))
    a, b = mpjax.DynamicLossScale(), mpjax.DynamicLossScale(growth_interval=3)
    assert settings_of(a) != settings_of(b) != settings_of(mpjax.NoOpLossScale())
    assert settings_of(a) == settings_of(jax.tree.map(lambda x: x + 1, a))
