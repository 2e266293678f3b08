"""What the harnesses of planners find, and what they leave: planted faults, and JAX itself."""

import jax
import jax.numpy as jnp
import nests
import numpy as np
import planners
import pytest
from evaluation import Way, bind, evaluate
from jax import lax
from measure import traced
from support import HALVES, normal

W, X = normal(0, 16, 16, scale=0.3), normal(1, 4, 16)


def layer(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def through_custom_rules(fun, policy):
    """A planner that drops custom rules."""

    def run(*args):
        jaxpr, tree = traced(fun, args)
        way = Way(lambda eqn, ins, amplified: bind(eqn, ins), derived=True)
        return jax.tree.unflatten(tree, evaluate(jaxpr, jax.tree.leaves(args), way))

    return run


def that_keeps_more(fun, policy):
    return lambda w, x: fun(w, x) + 0 * jnp.sum(jnp.exp(jnp.sin(x * w[0])))


def that_rounds(fun, policy):
    return lambda w, x: fun(w.astype(jnp.bfloat16).astype(w.dtype), x)


def of_another_dtype(fun, policy):
    return lambda w, x: fun(w, x).astype(jnp.bfloat16)


def ruled(w, x):
    return jnp.mean(nests.sine(x @ w))


EXACT = {
    "itself": (lambda fun, policy: fun, layer, None),
    "compiled": (lambda fun, policy: jax.jit(fun), layer, None),
    "again": (lambda fun, policy: jax.checkpoint(fun), ruled, None),
    "custom rules": (through_custom_rules, layer, None),
    "no custom rules": (through_custom_rules, ruled, "gradient"),
    "more kept": (that_keeps_more, layer, "keeps "),
    "rounded": (that_rounds, layer, "result"),
    "another dtype": (of_another_dtype, layer, "result is bfloat16"),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_finds_what_is_not_of_jax(name):
    planned, fun, fault = EXACT[name]
    found = planners.exact(fun, (W, X), planned=planned)
    assert found[0].startswith(fault) if fault else not found


def test_kept_counts_what_jax_hands_to_the_backward_pass():
    """The result of exp, the cosine of a sine; not arguments, nor the ones of a sum."""
    assert planners.kept(lambda w, x: jnp.sum(x @ w), (W, X), (0, 1)) == 0
    assert planners.kept(lambda w, x: jnp.sum(jnp.exp(x @ w)), (W, X)) == 4 * X.size
    both = lambda w, x: jnp.sum(jnp.sin(jnp.exp(x @ w)))  # noqa: E731
    assert planners.kept(both, (W, X)) == 8 * X.size


@pytest.mark.parametrize("half", HALVES)
def test_the_lowering_rounds_all_matmuls_of_both_passes(half):
    """Those of which sine is read too, and in loops, checkpoints and custom rules."""

    def by_hand(x):
        return jnp.asarray(x, half).astype(jnp.float32)

    def fun(w, x):
        step = jax.checkpoint(lambda h, _: (jnp.sin(h @ w), None))
        return jnp.sum(lax.scan(step, x, None, length=2)[0])

    result, gradient = planners.in_the_lowering(fun, (W, X), half)
    w, first = by_hand(W), by_hand(by_hand(X) @ by_hand(W))
    second = by_hand(by_hand(jnp.sin(first)) @ w)
    assert np.allclose(result, jnp.sum(jnp.sin(second)), rtol=1e-5)
    ct = by_hand(jnp.cos(second))
    before = by_hand(jnp.cos(first) * by_hand(ct @ w.T))
    want = by_hand(by_hand(jnp.sin(first)).T @ ct) + by_hand(by_hand(X).T @ before)
    assert np.allclose(gradient, want, rtol=1e-4, atol=1e-4)
    assert not np.allclose(gradient, jax.grad(fun)(W, X), rtol=1e-4, atol=1e-4)


def test_the_lowering_rounds_matmuls_over_devices():
    args = nests.arguments(0)
    plain = lambda p, x: jnp.mean((jax.nn.gelu(x @ p["w"]) @ p["v"]) ** 2)  # noqa: E731
    pair = nests.megatron(None, lambda p, x: 0 * x, None)
    over = lambda p, x: jnp.mean(pair(p, x) ** 2)  # noqa: E731
    results = [planners.in_the_lowering(f, args, "bfloat16")[0] for f in (plain, over)]
    exact = plain(*args)
    errors = [abs(result - exact) / exact for result in results]
    assert min(errors) > 1e-5 and max(errors) < 1e-2


def test_sound_is_the_lowering_itself_and_no_coarser_rounding():
    by_lowering = lambda fun, policy: planners.measure.rounded_matmuls(fun, jnp.bfloat16)  # noqa: E731
    assert not planners.sound(layer, (W, X), "bfloat16", planned=by_lowering)
    assert planners.sound(layer, (W, X), "float16", planned=by_lowering, loss_scale=1)
    plain = lambda fun, policy: fun  # noqa: E731
    assert not planners.sound(layer, (W, X), "float16", planned=plain)
