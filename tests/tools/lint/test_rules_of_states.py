"""Rules of the state that a step passes to the next step."""

import jax
import jax.numpy as jnp
import optax
import pairs
import pytest
from pairs import OPTIMIZER, PARAMS, STATE, Pair, f32, loss

import mpjax


def stepped(params, opt_state, x):
    grads = jax.grad(loss)(params, x)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@jax.jit
def drifting(params, opt_state, x):
    params, opt_state = stepped(params, opt_state, x)
    moments = opt_state[0]
    mu = jax.tree.map(lambda m: m.astype(jnp.bfloat16), moments.mu)  # fault
    return params, (moments._replace(mu=mu), *opt_state[1:])


def cached(cache, row):
    return {"keys": cache["keys"].astype(jnp.float32).at[0].set(row)}  # fault


def cached_as_it_is(cache, row):
    return {"keys": cache["keys"].at[0].set(row.astype(jnp.bfloat16))}


CACHE = {"keys": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16)}
CASES = {
    "moments": Pair("state-dtype-drift", drifting, stepped, (PARAMS, STATE, f32(2, 4))),
    "cache": Pair("state-dtype-drift", cached, cached_as_it_is, (CACHE, f32(4))),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_states_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def test_dtype_drift_names_the_leaf():
    (finding,) = mpjax.lint(drifting)(PARAMS, STATE, f32(2, 4)).findings
    assert (
        "opt_state[0].mu['b'] goes in as f32 and comes out as bf16, and 1 more" in finding.message
    )


def test_a_tree_that_only_looks_like_a_state_does_not_drift():
    def cast(params):
        return mpjax.cast(params, "bfloat16")

    def gradients(params, x):
        return mpjax.cast(jax.grad(loss)(params, x), "bfloat16")

    assert not mpjax.lint(cast)(PARAMS).findings
    assert not mpjax.lint(gradients)(PARAMS, f32(2, 4)).findings


def drifts(fun, *args):
    return [f.rule for f in mpjax.lint(fun)(*args).findings] == ["state-dtype-drift"]


def test_of_arguments_of_one_form_the_state_is_what_is_added_to():
    def decayed(grads, params):
        return jax.tree.map(lambda g, p: (1 - 1e-4) * p - 0.1 * g, grads, params)

    def descended(grads, params):
        return jax.tree.map(lambda g, p: p - 0.1 * g, grads, params)

    half = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, "bfloat16"), PARAMS)
    assert not drifts(descended, half, PARAMS) and not drifts(decayed, half, PARAMS)
    assert drifts(descended, PARAMS, half)
    assert drifts(lambda p, g: descended(g, p), half, PARAMS)


def test_a_batch_that_is_normalized_does_not_drift():
    pixels, wide = jax.ShapeDtypeStruct((4, 8, 3), "uint8"), f32(4, 8, 3)

    def normalized(batch, mean, key):
        image = jnp.where(key > 0, batch["image"], batch["image"][:, ::-1])
        return {"image": (image / 255 - mean).astype("bfloat16")}

    by_constants = lambda batch: normalized(batch, jnp.array([0.4, 0.5, 0.6]), 1)  # noqa: E731
    assert not drifts(by_constants, {"image": pixels}) and not drifts(by_constants, {"image": wide})
    assert not drifts(normalized, {"image": pixels}, f32(3), f32())
    assert drifts(lambda s: {"n": s["n"] + 1.0}, {"n": jax.ShapeDtypeStruct((), "int32")})
