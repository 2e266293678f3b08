"""The gate is implemented differently on each platform, with the same results."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec
from problems import bits, linear_loss, linear_problem, mesh

import mpjax
from mpjax._src.core.training.transaction import by_cond, by_select, gated


def judged(gate):
    """Returns a gate whose new state is not judged, with its state alone as the result."""
    if gate is gated:
        return lambda *args: gated(*args)[0]
    return lambda finite, new, *args: gate(finite, lambda *a: (new(*a), True), *args)[0]


GATES = [judged(gate) for gate in (by_select, by_cond, gated)]


def add(before, update):
    return {"w": before["w"] + update, "n": before["n"] + 1}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_gate_returns_all_new_or_all_old_values(gate, finite, wrap):
    before = {"w": jnp.array([-0.0, 1.0, jnp.nan]), "n": jnp.int32(3)}
    update = jnp.ones(3)
    after = wrap(lambda *args: gate(args[0], add, *args[1:]))(jnp.array(finite), before, update)
    assert bits(after) == bits(add(before, update) if finite else before)


@pytest.mark.parametrize("gate", GATES)
def test_gate_refuses_a_dtype_that_drifts(gate):
    with pytest.raises(ValueError, match=r"'w' is bfloat16\(3,\).*but float32"):
        gate(jnp.array(True), lambda w: {"w": w["w"].astype("bfloat16")}, {"w": jnp.ones(3)})


@pytest.mark.parametrize("gate", GATES)
def test_gate_under_vmap_judges_each_member(gate):
    before = {"w": jnp.zeros((2, 3)), "n": jnp.zeros(2, jnp.int32)}
    run = jax.vmap(lambda finite, before: gate(finite, add, before, jnp.ones(3)))
    after = run(jnp.array([True, False]), before)
    assert after["n"].tolist() == [1, 0] and after["w"].sum(1).tolist() == [3, 0]


def test_the_step_branches_on_its_verdict_on_a_cpu_only(rng):
    """On a GPU a branch copies the state: 2.1 times the bytes of a step of Adam."""
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(0.1), "mixed_bfloat16")
    traced = jax.jit(step, donate_argnums=0).trace(init(params), batch)
    lowered = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda", "tpu")}
    # What chooses the platform is a case of a constant, which XLA takes out.
    branches = {platform: text.count("stablehlo.case") for platform, text in lowered.items()}
    assert branches["cuda"] == branches["tpu"] == branches["cpu"] - 1
    compiled = traced.lower().compile().as_text()
    assert compiled.count(" conditional(") == 1


def test_replicas_that_decide_for_themselves_do_not_branch():
    """A collective in a branch that only some of them take would wait for the others forever."""

    def total(before, update):
        return {"w": before["w"] + jax.lax.psum(update, "data")}

    def replica(update):
        return gated(jnp.isfinite(update).all(), total, {"w": jnp.zeros_like(update)}, update)[0]

    spec = PartitionSpec("data")
    run = jax.jit(jax.shard_map(replica, mesh=mesh(), in_specs=spec, out_specs=spec))
    update = jnp.array([1.0, jnp.inf])
    assert "stablehlo.case" not in run.lower(update).as_text()
    assert run(update)["w"].tolist() == [jnp.inf, 0.0]
