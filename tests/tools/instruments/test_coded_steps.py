"""Instruments on a step whose backward pass reads 8-bit codes (`storage=8bit`)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import normal

import mpjax

POLICY = "mixed_bfloat16,storage=8bit"
W = {name: normal(i, 128, 128, scale=0.1) for i, name in enumerate("ab")}
X = normal(2, 128, 128)
INFINITE = {**W, "b": W["b"].at[3, 3].set(jnp.inf)}


def loss(w, x):
    for name in "ab":
        with jax.named_scope(name):
            x = jnp.tanh(x @ w[name])
    return jnp.mean(x**2)


coded = jax.value_and_grad(mpjax.autocast(loss, POLICY))


def test_the_backward_pass_reads_codes():
    assert "i8[128,128]" in str(jax.make_jaxpr(coded)(W, X))


@pytest.mark.thorough
def test_compare_finds_the_error_of_codes_where_they_are_made():
    found = mpjax.compare(loss, POLICY)(W, X)
    assert 0.002 < found.results["gradient of a"] < 0.05
    # As large as bfloat16's own roundings.
    codes = [row for row in found.rows[:8] if row.primitive == "round"]
    assert {row.scope for row in codes} == {"a", "b"}


def test_find_nonfinite_finds_nothing_in_finite_codes_and_names_what_reads_an_infinite_weight():
    assert not mpjax.find_nonfinite(coded, has_aux=True)(W, X)
    for found in (
        mpjax.find_nonfinite(loss, POLICY)(INFINITE, X),
        mpjax.find_nonfinite(coded, argnums=None)(INFINITE, X),
    ):
        assert found and found.scope == "b" and "b was already infinite" in str(found)


def test_watch_precision_trains_the_same_and_watches_no_codes():
    init, step = mpjax.build_train_step(loss, optax.adamw(1e-2), POLICY)
    watched, plain = mpjax.watch_precision(jax.jit(step)), jax.jit(step)
    state = other = init(W)
    for _ in range(2):
        state, _ = watched(state, X)
        other, _ = plain(other, X)
    jax.tree.map(np.testing.assert_array_equal, state.params, other.params)
    names = [tensor.name for tensor in watched.latest.tensors]
    assert "a/dot_general/result" in names and "b/backward/dot_general/result" in names
    assert not any("carrier" in name for name in names)
