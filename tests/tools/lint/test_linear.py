"""The linter's work grows as the program does: four times the layers are four times the visits."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairs import bf16, f32
from support import thorough_but

import mpjax
from mpjax._src.core.program import derived
from mpjax._src.core.program.interpret import interpret
from mpjax._src.tools.lint import linter
from mpjax._src.tools.lint.program import make_program
from mpjax._src.tools.lint.rule import JAXPR, VALUES
from mpjax._src.tools.lint.table import RULES

OURS = (str(Path(linter.__file__).parent), derived.__file__)
SMALL, FEW, MOST = 20, 60, 4.5
WIDTH = 4


def calls_of(run):
    """Returns how often a function calls functions of the linter, and resumes generators."""
    count = 0

    def seen(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OURS)

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def visits(program, rules):
    calls = {rule.name: calls_of(lambda r=rule: [*r.check(program)]) for rule in rules}
    return calls | {"live": calls_of(lambda: program.live)}


def residual(cast):
    """Returns a loss of residual layers, each written out."""

    def loss(weights, x):
        for w in weights:
            x = x + jnp.tanh(cast(x) @ cast(w)).astype(x.dtype)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    return loss


def promoting(weights, x):
    for w in weights:
        x = x + jnp.tanh((x * np.full(WIDTH, 0.5, np.float32)) @ w)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def normed(x):
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-6)


def transformer(weights, x):
    """Attends with a mask that is added to the logits, with a count in it."""
    mask = jnp.where(jnp.tril(jnp.ones((x.shape[0],) * 2, bool)), 0.0, -1e9)
    half = lambda x: x.astype(jnp.bfloat16)  # noqa: E731
    x = half(x + jnp.arange(x.shape[0])[:, None])
    for w in weights:
        y = half(normed(x.astype(jnp.float32)))
        scores = jax.nn.softmax((y @ y.T).astype(jnp.float32) + mask)
        x = x + half(scores) @ (y @ half(w))
        x = x + jax.nn.gelu(half(normed(x.astype(jnp.float32))) @ half(w))
    return jnp.mean(x.astype(jnp.float32) ** 2)


def stepped(weights, moments, scale, x):
    """Trains weights of 16 bits in a step that a finite check skips."""
    loss = lambda weights: residual(half)(weights, x) * scale  # noqa: E731
    grads = jax.tree.map(lambda g: g / scale.astype(g.dtype), jax.grad(loss)(weights))
    good = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in grads]))
    updates, new = optax.trace(0.9).update(grads, moments)
    weights_new = optax.apply_updates(weights, updates)
    kept = lambda a, b: jax.tree.map(lambda a, b: jnp.where(good, a, b), a, b)  # noqa: E731
    scale = jnp.where(good, jnp.minimum(scale * 2, 65536.0), scale / 2)
    return kept(weights_new, weights), kept(new, moments), scale


def half(x):
    return x.astype(jnp.bfloat16)


def same(x):
    return x


def weights_of(layers, dtype=f32):
    return [dtype(WIDTH, WIDTH)] * layers


X = f32(3, WIDTH)
PLANNED = mpjax.autocast(residual(same), "mixed_bfloat16")
PROGRAMS = {
    "float32": (residual(same), None, lambda n: (weights_of(n), X)),
    "by hand": (residual(half), None, lambda n: (weights_of(n), X)),
    "promoted": (promoting, None, lambda n: (weights_of(n, bf16), bf16(3, WIDTH))),
    "autocast": (PLANNED, None, lambda n: (weights_of(n), X)),
    "autocast, gradients": (PLANNED, 0, lambda n: (weights_of(n), X)),
    "step": (
        *(stepped, None),
        lambda n: (
            weights_of(n, bf16),
            jax.eval_shape(optax.trace(0.9).init, weights_of(n, bf16)),
            *(f32(), X),
        ),
    ),
}
DEAR = {
    "by hand, gradients": (residual(half), 0, lambda n: (weights_of(n), X)),
    "transformer": (transformer, None, lambda n: (weights_of(n), X)),
    "transformer, gradients": (transformer, 0, lambda n: (weights_of(n), X)),
    "transformer under autocast": (
        mpjax.autocast(transformer, "mixed_bfloat16"),
        0,
        lambda n: (weights_of(n), X),
    ),
}
QUICK = [(name, SMALL) for name in PROGRAMS]


@pytest.mark.parametrize(
    ("name", "layers"), thorough_but([*QUICK, *((n, FEW) for n in PROGRAMS | DEAR)], *QUICK)
)
def test_rules_of_programs_visit_each_operation_a_few_times(name, layers):
    fun, argnums, args = (PROGRAMS | DEAR)[name]
    rules = [rule for rule in RULES if rule.needs == JAXPR]
    small, large = (make_program(fun, args(n), {}, argnums) for n in (layers, 4 * layers))
    few, many = visits(small, rules), visits(large, rules)
    assert sum(many.values()) <= MOST * sum(few.values())
    # The first rule that asks for what several read computes it. Fewer visits do not matter.
    grown = {k: (few[k], n) for k, n in many.items() if n > max(1.5 * MOST * few[k], 4 * layers)}
    assert not grown, f"visits by rule, at {layers} and at {4 * layers} layers"


def test_rules_of_values_do_too():
    rules = [rule for rule in RULES if rule.needs == VALUES]

    def run(layers):
        w, x = [jnp.full((WIDTH, WIDTH), 1e-3, jnp.float16)] * layers, jnp.ones((3, WIDTH)) * 1e-3
        program = make_program(residual(lambda x: x.astype(jnp.float16)), (w, x), {}, 0)
        watcher = linter._Watcher(program, rules, [])
        interpret(program.traced.jaxpr, [jnp.asarray(x) for x in program.call.arrays], watcher)
        hits = []
        count = calls_of(lambda: hits.extend(hit for rule in rules for hit in rule.after(program)))
        assert "gradient of" in hits[0].message
        return count

    few, many = run(SMALL // 2), run(2 * SMALL)
    assert many <= MOST * few
