"""`jax.checkpoint` with a policy around a planned function sees what is inside."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from joint import EXACT, planned
from planners import kept
from support import assert_near, equations, normal, thorough_but

WS, X = [normal(i, 32, 32, scale=0.2) for i in range(3)], normal(9, 8, 32)
SAVE = jax.checkpoint_policies


def net(ws, x):
    for i, w in enumerate(ws):
        x = jnp.sin(checkpoint_name(x @ w, f"h{i}")) * x
    return jnp.sum(checkpoint_name(jnp.tanh(x), "end"))


def nested(ws, x):
    return net(ws, jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ ws[0]) @ ws[1]))(x))


def by_rule(ws, x):
    return net(ws, jax.nn.relu(jax.nn.silu(x @ ws[0])) @ ws[1])


def scanned(ws, x):
    def layer(x, w):
        return jnp.sin(checkpoint_name(x @ w, "h1")) + x, None

    return jnp.sum(lax.scan(layer, x, jnp.stack(ws))[0])


def pyramid(ws, x):
    def outer(x, w):
        x, sums = lax.scan(lambda c, r: (jnp.sin(c @ w), jnp.cos(c @ w).sum()), x, None, length=2)
        return x + jnp.sin(checkpoint_name(x @ w.T, "h1")), sums

    x, sums = lax.scan(outer, x, jnp.stack(ws))
    return jnp.sum(x) + jnp.sum(sums)


def branched(ws, x):
    y = lax.cond(x[0, 0] > 9, lambda: x, lambda: jnp.sin(checkpoint_name(x @ ws[0], "h1")))
    return jnp.sum(jnp.sin(y @ ws[1]))


POLICIES = {
    "none": None,
    "nothing": SAVE.nothing_saveable,
    "everything": SAVE.everything_saveable,
    "dots": SAVE.dots_saveable,
    "dots without a batch": SAVE.dots_with_no_batch_dims_saveable,
    "names": SAVE.save_only_these_names("h1", "end"),
    "other names": SAVE.save_anything_except_these_names("h1"),
    "sines": lambda primitive, *_, **params: primitive.name in ("sin", "cos"),
    "both": SAVE.save_from_both_policies(SAVE.dots_saveable, SAVE.save_only_these_names("end")),
}
FUNS = {f.__name__: f for f in (net, nested, by_rule, scanned, pyramid, branched)}
STRAIGHT, LOOPS = [*FUNS][:3], [*FUNS][3:]
# Each policy with one of the functions, by turns.
TURNS = [*enumerate(POLICIES)]


@functools.cache
def gradients(name):
    """Returns JAX's gradients, which no policy changes."""
    return jax.jit(jax.grad(FUNS[name], (0, 1)))(WS, X)


def kept_under(policy, name):
    """Returns the bytes that we keep under a policy, and JAX's, if the gradients are JAX's."""
    both = planned(FUNS[name], EXACT), FUNS[name]
    ours, theirs = (jax.checkpoint(f, policy=POLICIES[policy]) for f in both)
    assert_near(jax.jit(jax.grad(ours, (0, 1)))(WS, X), gradients(name), rtol=1e-4)
    return [kept(f, (WS, X), (0, 1)) for f in (ours, theirs)]


@pytest.mark.parametrize(
    ("policy", "name"),
    thorough_but(
        itertools.product(POLICIES, STRAIGHT),
        *((policy, STRAIGHT[i % 3]) for i, policy in TURNS),
        *((policy, "net") for policy in ("dots", "names")),
    ),
)
def test_no_more_is_kept_than_jax_keeps(name, policy):
    mine, plain = kept_under(policy, name)
    assert mine <= plain and (mine > 0) == (plain > 0)
    if policy in ("dots", "names") and name == "net":
        assert mine == plain


@pytest.mark.parametrize(
    ("policy", "name"),
    thorough_but(
        itertools.product(POLICIES, LOOPS),
        *((policy, LOOPS[i % 3]) for i, policy in TURNS),
        *((policy, name) for policy in ("dots", "sines") for name in ("scanned", "pyramid")),
    ),
)
def test_a_policy_sees_the_programs_of_loops_and_branches(policy, name):
    mine, plain = kept_under(policy, name)
    assert mine <= plain
    if policy in ("dots", "names", "both", "sines") and name != "branched":
        assert mine == plain


def matmuls(fun):
    eqns = equations(jax.make_jaxpr(jax.grad(fun, (0, 1)))(WS, X))
    return sum(e.primitive.name == "dot_general" for e in eqns)


def test_matmuls_that_are_saved_do_not_run_again():
    saved, again = (
        matmuls(jax.checkpoint(planned(net), policy=POLICIES[name])) for name in ("dots", "none")
    )
    assert saved == 9 and again > saved


@pytest.mark.parametrize("inner", [net, scanned])
def test_saved_results_of_matmuls_are_16_bits(inner):
    fun = jax.checkpoint(planned(inner), policy=SAVE.dots_saveable)
    assert kept(fun, (WS, X), (0, 1)) == 3 * 2 * X.size
    plain = jax.jit(jax.grad(planned(inner), (0, 1)))(WS, X)
    assert_near(jax.jit(jax.grad(fun, (0, 1)))(WS, X), plain, rtol=1e-4)


def test_what_a_policy_offloads_waits_in_the_host_s_memory():
    policy = SAVE.save_and_offload_only_these_names(
        names_which_can_be_saved=["end"],
        names_which_can_be_offloaded=["h0", "h1"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    fun = jax.checkpoint(planned(net), policy=policy)
    eqns = equations(jax.make_jaxpr(jax.grad(fun))(WS, X))
    moves = [e for e in eqns if e.primitive.name == "device_put"]
    assert len(moves) == 4
    assert_near(jax.jit(jax.grad(fun))(WS, X), jax.jit(jax.grad(planned(net)))(WS, X), rtol=1e-4)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jit(jax.hessian(f, 1)),
        lambda f: jax.vmap(jax.grad(f, 1), (None, 0)),
        lambda f: jax.grad(lambda ws, x: jnp.sum(jax.vmap(f, (None, 0))(ws, x))),
        lambda f: lambda ws, x: jax.jvp(f, (ws, x), (ws, x)),
        lambda f: lambda ws, x: jax.jvp(jax.grad(f, 1), (ws, x), (ws, x)),
        lambda f: lambda ws, x: jax.linearize(f, ws, x)[1](ws, x),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: jax.grad(lambda ws, x: lax.scan(lambda c, r: (c + f(ws, r), 0), 0.0, x)[0]),
    ],
    ids=["hessian", "vmap", "of vmap", "jvp", "hvp", "linearize", "twice", "in a scan"],
)
def test_other_transformations_of_a_checkpoint_with_a_policy(transform):
    args = WS, X[:2]
    ours, theirs = (
        transform(jax.checkpoint(f, policy=SAVE.dots_saveable)) for f in (planned(net, EXACT), net)
    )
    assert_near(ours(*args), theirs(*args), rtol=1e-4)


def test_an_effect_does_not_happen_again_when_values_are_saved():
    def counted(seen):
        def fun(ws, x):
            y = jnp.sin(x @ ws[0])
            jax.debug.callback(lambda v: seen.append(np.shape(v)), y)
            return jnp.sum(jnp.sin(y @ ws[1]))

        return fun

    counts = []
    for wrap in (lambda f: f, planned):
        seen = []
        fun = jax.checkpoint(wrap(counted(seen)), policy=SAVE.dots_saveable)
        jax.block_until_ready(jax.jit(jax.grad(fun))(WS, X))
        jax.effects_barrier()
        counts.append(len(seen))
    assert counts[0] >= counts[1] == 1
