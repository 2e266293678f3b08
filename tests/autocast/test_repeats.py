"""Layers that Python wrote out are rewritten once, and nothing else changes."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters.partial_eval import dce_jaxpr
from measure import run
from programs import layer_norm
from support import BOTH, calls_to_trace, cast, equations, normal, thorough_but

import mpjax
from mpjax._src.autocast import plan, repeats
from mpjax._src.autocast.tables import Choice, Ruling, Stored
from mpjax._src.base import _jax
from mpjax._src.base.devices import traced_for
from mpjax._src.program.graph import PLANNED, Op, Value

WIDTH, LAYERS = 8, 6
X = normal(9, 4, WIDTH)
PARAMS = [
    {
        "up": normal(3 * i, WIDTH, 16, scale=0.3),
        "down": normal(3 * i + 1, 16, WIDTH, scale=0.3),
        "qkv": normal(3 * i + 2, WIDTH, 3 * WIDTH, scale=0.3),
    }
    for i in range(LAYERS)
]


def mlp(p, x):
    return x + jax.nn.gelu(layer_norm(x) @ p["up"]) @ p["down"]


def attention(p, x, mask):
    q, k, v = jnp.split(layer_norm(x) @ p["qkv"], 3, axis=-1)
    scores = jnp.where(mask, q @ k.T, -1e9) + jnp.float32(mask)
    return x + jax.nn.softmax(scores) @ v


def layered(params, x):
    for p in params:
        x = mlp(p, x)
    return jnp.mean(x**2)


def masked(params, x):
    mask = jnp.tril(jnp.ones((4, 4), bool))
    for p in params:
        x = mlp(p, attention(p, x, mask))
    return jnp.mean(x**2)


def skipping(params, x):
    kept = []
    for p in params:
        x = mlp(p, x)
        kept.append(jnp.sin(x))
    return jnp.mean(sum(kept) ** 2) + jnp.mean(kept[1] * x)


def rectified(params, x):  # each relu has a rule of its own, so only what is between is alike
    for p in params:
        x = x + jax.nn.relu(layer_norm(x) @ p["up"]) @ p["down"]
    return jnp.mean(x**2)


def scanned(params, x):
    def body(x, _):
        for p in params:
            x = mlp(p, x)
        return x, jnp.mean(x)

    x, means = lax.scan(body, x, None, length=3)
    return jnp.mean(x**2) + jnp.sum(means)


def rematerialized(params, x):
    for p in params:
        x = jax.checkpoint(mlp)(p, x)
    return jnp.mean(x**2)


def runge_kutta(params, x):
    p = params[0]

    def slope(x):
        return jnp.tanh(x @ p["up"]) @ p["down"]

    for _ in range(8):
        a = slope(x)
        b = slope(x + 0.05 * a)
        x = x + 0.1 * b
    return jnp.mean(x**2)


def in_a_region(params, x):
    for i, p in enumerate(params):
        with mpjax.precision("float32" if i == 2 else "bfloat16"):
            x = mlp(p, x)
    return jnp.mean(x**2)


def named(params, x):
    for i, p in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = mlp(p, x)
    return jnp.mean(x**2)


def with_signs(params, x):
    for i, p in enumerate(params):
        x = mlp(p, x)
        x = x + 1e-6 / (x[:1] * 0 + jnp.where(x > -jnp.inf, -0.0 if i % 3 else 0.0, 1) - 1.0)
    return jnp.mean(x**2)


FUNCTIONS = (
    layered,
    masked,
    skipping,
    rectified,
    scanned,
    rematerialized,
    runge_kutta,
    in_a_region,
    named,
    with_signs,
)
USES = {
    "gradients of both": BOTH,
    "gradient of a jit": lambda f: jax.grad(jax.jit(f)),
    "value": lambda f: f,
    "tangent": lambda f: lambda p, x: jax.jvp(f, (p, x), (p, x))[1],
    "vmap of gradients": lambda f: jax.vmap(jax.grad(f), (None, 0)),
    "gradient of a vmap": lambda f: jax.grad(
        lambda p, x: jnp.sum(jax.vmap(f, (None, 0))(p, x)), argnums=(0, 1)
    ),
    "curvature": lambda f: lambda p, x: jax.jvp(jax.grad(f), (p, x), (p, x))[1],
    "curvature in reverse": lambda f: jax.grad(
        lambda p, x: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(p, x)))
    ),
}


def described(fun, *args):
    """Counts the equations of a program that do something: what, of what, from which line."""
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    used, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return collections.Counter(
        (
            eqn.primitive.name,
            *(str(v.aval) for v in eqn.outvars),
            frozenset(_jax.scope_names(eqn.source_info.name_stack)) - {PLANNED},
            _jax.source_line(eqn),
        )
        for eqn in equations(used)
    )


def unfolded(monkeypatch):
    monkeypatch.setattr(plan, "fold", lambda steps, *_: steps)


def folded(monkeypatch, fun, *args, policy="mixed_bfloat16"):
    """Returns how many steps of a function are in stretches, and of how many."""
    found = []
    real = repeats.fold

    def fold(steps, *others):
        new = real(steps, *others)
        inside = [len(s.steps) for s in new if isinstance(s, repeats.Stretch)]
        found.append((sum(inside), len(steps)))
        return new

    monkeypatch.setattr(plan, "fold", fold)
    jax.make_jaxpr(mpjax.autocast(fun, policy))(*args)
    return max(found)


@pytest.mark.parametrize("function", [layered, masked, rectified, scanned, runge_kutta, named])
def test_repeated_layers_are_found(monkeypatch, function):
    inside, steps = folded(monkeypatch, function, PARAMS, X)
    assert inside > 0.6 * steps, (inside, steps)


TOKENS = normal(4, 2, 64, 4, 32)


def of_heads(p, x):
    return jax.nn.dot_product_attention(x, x * p["up"][0, 0], x)


# A layer of which a step of each class is a part. Fields of steps that cannot be hashed, such as a
# dict, would make each step unique.
LAYERS_OF = {
    "Sloped": (lambda p, x: x + jax.nn.gelu(x @ p["up"]) @ p["down"], X),
    "Recomputed": (lambda p, x: jax.nn.silu(layer_norm(x @ p["up"])) @ p["down"], X),
    "SoftmaxIsland": (lambda p, x: jnp.cos(jax.nn.softmax(x @ p["up"])) @ p["down"], X),
    "Attention": (of_heads, TOKENS),
    "FusedAttention": (of_heads, TOKENS),
}


@pytest.mark.parametrize("name", LAYERS_OF)
def test_steps_of_each_class_are_folded(monkeypatch, name):
    layer, x = LAYERS_OF[name]
    real, classes = repeats.fold, collections.Counter()

    def fold(steps, *others):
        new = real(steps, *others)
        for stretch in new:
            inside = stretch.steps if isinstance(stretch, repeats.Stretch) else ()
            classes.update(type(step).__name__ for step in inside)
        return new

    def fun(params, x):
        for p in params:
            x = layer(p, x)
        return jnp.mean(x**2)

    monkeypatch.setattr(plan, "fold", fold)
    with traced_for("h100"):
        fused = str(name == "FusedAttention").lower()
        planned = mpjax.autocast(fun, f"mixed_bfloat16,fused_attention={fused}")
        jax.make_jaxpr(planned)(PARAMS, x)
    assert classes[name] >= LAYERS - 2, classes


def test_layers_with_names_repeat_where_an_override_matches_another(monkeypatch):
    policy = mpjax.get_policy("mixed_bfloat16").override({"*layer_5*": "float32"})
    inside, steps = folded(monkeypatch, named, PARAMS, X, policy=policy)
    assert inside > 0.4 * steps, (inside, steps)


def test_layers_of_different_lines_are_not_alike(monkeypatch):
    def fun(params, x):
        x = mlp(params[0], x)
        x = mlp(params[1], x)
        x = mlp(params[2], x)
        return jnp.mean(x**2)

    assert folded(monkeypatch, fun, PARAMS, X)[0] == 0


CASES = [
    *((function, "gradients of both") for function in FUNCTIONS),
    *((function, use) for function in (masked, runge_kutta) for use in [*USES][1:]),
]
QUICK = [(f, "gradients of both") for f in (masked, skipping, scanned, runge_kutta, with_signs)]
QUICK += [(rectified, "gradients of both"), (masked, "tangent"), (runge_kutta, "curvature")]


@pytest.mark.parametrize(("function", "use"), thorough_but(CASES, *QUICK))
def test_folded_programs_equal_unfolded_ones(monkeypatch, function, use):
    x = jnp.stack([X, 2 * X]) if "vmap" in use else X
    make = lambda: USES[use](cast(function))  # noqa: E731
    got = described(make(), PARAMS, x)
    unfolded(monkeypatch)
    want = described(make(), PARAMS, x)
    assert got == want, (got - want, want - got)


@pytest.mark.parametrize(
    "function", thorough_but([masked, skipping, scanned, with_signs], with_signs)
)
def test_folded_programs_give_the_results_of_unfolded_ones(monkeypatch, function):
    got = run(jax.value_and_grad(cast(function)), PARAMS, X)
    unfolded(monkeypatch)
    want = run(jax.value_and_grad(cast(function)), PARAMS, X)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("later", [("b",), ("a", "b"), ()])
def test_equal_layers_of_which_other_values_are_read_give_the_same_results(monkeypatch, later):
    def fun(params, x):
        kept = []
        for i in range(7):
            if i in (0, 3):
                x = jnp.cumsum(x, 0)
            a = jnp.tanh(x @ params[i % LAYERS]["up"])
            b = jnp.sin(a) * 0.5 + a
            x = jnp.exp(-b) @ params[i % LAYERS]["down"]
            read = {"a": a, "b": b}
            kept += [read[name] for name in (later if i > 2 else ("a",))]
        return jnp.cumsum(x, 0), [jnp.sum(h) for h in kept]

    assert folded(monkeypatch, fun, PARAMS, X)[0] > 30
    got = run(cast(fun), PARAMS, X)
    unfolded(monkeypatch)
    want = run(cast(fun), PARAMS, X)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), got, want)


def test_folded_layers_that_widen_scalars_and_booleans_match_float32():
    """A weak-typed scalar and a boolean of each layer, in a program that is float32 but for one
    matmul: their casts run after what they read."""

    def fun(params, x):
        for p in params:
            q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
            scores = q @ k.T / jnp.sqrt(WIDTH)
            x = x + jax.nn.softmax(scores) * (scores > 0) @ v
        with mpjax.precision("bfloat16"):
            x = x @ x.T
        return jnp.mean(x**2)

    got = run(jax.value_and_grad(mpjax.autocast(fun, "float32")), PARAMS, X)
    want = run(jax.value_and_grad(fun), PARAMS, X)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0.02, atol=0.02 * np.max(np.abs(w)))


def test_folded_program_with_an_override_of_one_layer_equals_unfolded(monkeypatch):
    policy = mpjax.get_policy("mixed_bfloat16").override({"*layer_3*": "float32"})
    make = lambda: jax.grad(mpjax.autocast(named, policy))  # noqa: E731
    got = described(make(), PARAMS, X)
    unfolded(monkeypatch)
    assert got == described(make(), PARAMS, X)


def test_folded_closure_over_a_differentiated_value_equals_unfolded(monkeypatch):
    def outer(scale, params, x):
        def inner(params, x):
            for p in params:
                x = mlp(p, x) * lax.cond(x[0, 0] > 0, lambda: scale, lambda: 2 * scale)
            return jnp.mean(x**2)

        return cast(inner)(params, x)

    args = jnp.float32(1.1), PARAMS, X
    got = described(jax.grad(outer, argnums=(0, 1)), *args)
    unfolded(monkeypatch)
    assert got == described(jax.grad(outer, argnums=(0, 1)), *args)


def test_rewrite_of_a_stretch_reads_only_what_alike_steps_share(monkeypatch):
    """What is not in the keys of steps may differ from layer to layer: none may look at it."""
    hidden = {
        Value: ("paths", "entries"),
        Op: ("scopes", "callers", "index"),
        Ruling: ("why",),
        Choice: ("why",),
        Stored: ("kind", "wide", "lost", "rounded"),
    }
    real = repeats.Stretch._rewritten
    rewritten = []

    def guarded(*args):
        with monkeypatch.context() as patch:
            for kind, names in hidden.items():
                for name in names:
                    patch.setattr(kind, name, property(functools.partial(forbidden, kind, name)))
            rewritten.append(real(*args))
        return rewritten[-1]

    def forbidden(kind, name, _):
        raise AssertionError(f"the rewrite reads {kind.__name__}.{name}, which no key contains")

    monkeypatch.setattr(repeats.Stretch, "_rewritten", guarded)
    for function in (masked, skipping, runge_kutta, named):
        jax.make_jaxpr(jax.grad(cast(function)))(PARAMS, X)
    assert len(rewritten) >= 4


@pytest.mark.thorough
def test_tracing_many_layers_is_cheap():
    def calls(fun, params=2 * PARAMS):
        return calls_to_trace(jax.grad(fun), params, X)

    calls(cast(masked), PARAMS[:3])  # what is imported the first time
    assert calls(cast(masked)) < 1.6 * calls(masked)


def test_periods_below_the_shortest_are_not_found():
    shortest = repeats.SHORTEST
    assert repeats._periods([*range(shortest)] * 3) == [shortest]
    assert not repeats._periods([*range(shortest - 1)] * 3)


def test_ranges_between_steps_without_an_equal_one_are_found():
    layer, other = [1, 2, 3, 4], [5, 6, 7, 8, 9]
    keys = [*layer, 10, *other, 11, *layer, 12, *other, 13, 1, 2, 3, 14, *layer, 4]
    assert repeats._between(keys, []) == [(0, 4), (5, 10), (11, 15), (16, 21)]
    assert repeats._between(keys, [(0, 11, 21)]) == []
