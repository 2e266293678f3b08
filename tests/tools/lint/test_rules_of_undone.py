"""Casts to half that nothing keeps, and differences that see what was rounded."""

import jax
import jax.numpy as jnp
import optax
import pairs
import pytest
from absent import compiles
from pairs import Pair, bf16, f32

import mpjax
from mpjax._src.tools.lint.casts import casts_deleted
from mpjax._src.tools.lint.program import make_program
from mpjax._src.tools.lint.rule import Compiled

HALF, WIDE = jnp.bfloat16, jnp.float32


def loss(params, x):
    params = jax.tree.map(lambda p: p.astype(HALF), params)
    return jnp.mean(jnp.square((x @ params["w"]).astype(WIDE) * params["scale"]))


def averaged(params, xs):
    grads = [jax.grad(loss)(params, x) for x in xs]
    grads = optax.tree.cast(grads, HALF)  # fault
    return jax.tree.map(lambda a, b: (a.astype(WIDE) + b.astype(WIDE)) / 2, *grads)


def averaged_as_they_are(params, xs):
    grads = [jax.grad(loss)(params, x) for x in xs]
    return jax.tree.map(lambda a, b: (a + b) / 2, *grads)


def by_half_weights(w, x):
    grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w.astype(WIDE))))(w)  # fault
    return grads.astype(WIDE) * 0.5


def by_half_layers(ws, x):
    def loss(ws):
        def layer(x, w):
            return jnp.tanh(x @ w.astype(WIDE)), None  # fault

        return jnp.mean(jax.lax.scan(layer, x, ws)[0])

    return jax.grad(loss)(ws).astype(WIDE)


def by_wide_layers(ws, x):
    def loss(ws):
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    return jax.grad(loss)(ws.astype(WIDE))


def by_wide_weights(w, x):
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w.astype(WIDE)) * 0.5


def residual(x):
    y = jnp.sin(x)
    half = y.astype(HALF)
    return half, y - half.astype(WIDE)  # fault


def residual_that_stays(x):
    y = jnp.sin(x)
    half = jax.lax.reduce_precision(y, 8, 7)
    return half.astype(HALF), y - half


def centered(x):
    y = jnp.sin(x)
    return y.astype(HALF).astype(WIDE) - jnp.mean(y)  # fault


def centered_by_its_own(x):
    half = jax.lax.reduce_precision(jnp.sin(x), 8, 7)
    return half - jnp.mean(half)


def kahan(total, lost, x):
    """One step of a compensated sum, in half."""
    term = x - lost
    new = total + term
    return new, (new - total) - term  # fault


def kahan_negated(total, lost, x):
    term = x - lost
    new = total + term
    return new, (total - new) + term  # fault


def kahan_in_float32(total, lost, x):
    term = x.astype(WIDE) - lost.astype(WIDE)
    new = jax.lax.reduce_precision(total.astype(WIDE) + term, 8, 7)
    return new.astype(HALF), (new - total.astype(WIDE)) - term


PARAMS = {"w": f32(8, 4), "scale": f32(4)}
CASES = {
    "gradients": Pair(
        "cast-undone", averaged, averaged_as_they_are, (PARAMS, [bf16(2, 8), bf16(2, 8)])
    ),
    "half weights": Pair(
        "rounded-gradient", by_half_weights, by_wide_weights, (bf16(8, 4), f32(4, 8))
    ),
    "half layers": Pair(
        "rounded-gradient", by_half_layers, by_wide_layers, (bf16(3, 8, 8), f32(4, 8))
    ),
    "residual": Pair("rounding-error", residual, residual_that_stays, (f32(8),)),
    "mean": Pair("rounding-error", centered, centered_by_its_own, (f32(8),)),
    "kahan, negated": Pair(
        "rounding-error", kahan_negated, kahan_in_float32, (bf16(8), bf16(8), bf16(8))
    ),
    "kahan": Pair("rounding-error", kahan, kahan_in_float32, (bf16(8), bf16(8), bf16(8))),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_undone_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def normed(x, scale):
    wide = x.astype(WIDE)
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide)) + 1e-6) * scale).astype(x.dtype)


def test_cast_of_what_is_stored_or_read_in_16_bits_is_no_fault():
    def network(params, x):
        params = jax.tree.map(lambda p: p.astype(HALF), params)
        h = jnp.tanh(x).astype(HALF)
        h = h + normed(h, params["scale"]) @ params["w"]  # read in half as well
        return jnp.mean(normed(h, params["scale"]).astype(WIDE) ** 2), h

    def looped(x):
        def turn(h, _):
            return jnp.tanh(h.astype(WIDE)).astype(HALF), h.astype(WIDE)

        return jax.lax.scan(turn, x.astype(HALF), length=3)

    report = mpjax.lint(network, argnums=0, has_aux=True)
    assert not report({"w": f32(8, 8), "scale": f32(8)}, f32(4, 8)).findings
    assert not mpjax.lint(looped)(f32(8)).findings


def test_casts_inside_libraries_are_no_fault():
    def pooled(x):
        return jnp.mean(x, 0).astype(WIDE) @ jnp.ones((8, 4))  # a mean is float32 inside

    assert not mpjax.lint(pooled)(bf16(4, 8)).findings


def there_and_back(x):
    return x.astype(HALF).astype(WIDE)


def texts(fun, x):
    lowered = jax.jit(fun).lower(x)
    before = lowered.compiler_ir("hlo").as_hlo_module().to_string()
    return before, lowered.compile().as_text()


def test_cast_deleted_finds_casts_that_the_compiled_program_lacks():
    x = f32(8)
    program = make_program(there_and_back, (x,), {})
    before, kept = texts(there_and_back, x)
    assert "bf16" in kept, "this machine's compiler leaves the casts in"
    assert not [*casts_deleted(program, Compiled("cpu", before, kept))]
    _, without = texts(lambda x: x * 1.5, x)
    (hit,) = casts_deleted(program, Compiled("h100", before, without))
    assert hit.op.source.startswith(__file__) and "h100" in hit.message


@compiles("h100")
def test_cast_deleted_finds_casts_for_a_gpu():
    found = mpjax.lint(there_and_back, select="cast-deleted", target="h100")(f32(64))
    assert found.ran and found.findings
    assert not mpjax.lint(residual_that_stays, target="h100")(f32(64)).findings


def test_casts_of_master_weights_in_an_optimizer_are_no_fault():
    optimizer = mpjax.optim.with_master_weights(optax.adamw(1e-3))
    params = {"w": bf16(8, 8), "v": bf16(8, 8)}

    def step(params, state, x):
        grads = jax.grad(lambda p: (jnp.tanh(x @ p["w"]) @ p["v"]).astype(WIDE).sum())(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    assert not mpjax.lint(step)(params, state, bf16(4, 8)).findings
