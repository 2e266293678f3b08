"""The error of a gradient from compiled programs is that of `compare`; what it costs to know."""

import jax
import jax.numpy as jnp
import pytest
from support import thorough_but

import mpjax
from mpjax._src.core.program.interpret import Plain
from mpjax._src.tools.scripts import examine
from mpjax._src.tools.scripts.gradient_errors import Exact
from mpjax._src.tools.scripts.hooks import hooked
from mpjax._src.tools.scripts.steps import Call, NoValues, values_of

PRINTED = []


def normalized(w, x):
    h = x @ w["a"] + w["bias"]  # whose gradient is only rounding error
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    jax.debug.callback(PRINTED.append, h[0, 0])
    return jnp.mean((jax.nn.relu(h) @ w["b"]) ** 2)


def with_casts(w, x):
    """Casts of its own, around loops and inside."""
    h = jnp.tanh(x.astype("bfloat16") @ w["a"].astype("bfloat16"))

    def turn(h, _):
        h = jax.lax.cond(h[0, 0] > 0, lambda h: h * 2, lambda h: jnp.sin(h) * 3, h)
        return jnp.tanh(h), None

    def inner(y, b):
        return (y.astype("bfloat16") @ b.astype("bfloat16")).astype("float32"), None

    h, _ = jax.lax.scan(turn, h, None, 3)
    y, _ = jax.lax.scan(inner, h.astype("float32"), jnp.stack([w["b"] @ w["b"].T] * 2))
    times = jax.lax.while_loop(lambda n: n < 3, lambda n: n + jnp.bfloat16(1), jnp.bfloat16(0))
    return jnp.mean((y + w["bias"]) ** 2) * times.astype("float32")


@pytest.fixture
def given():
    a, b, x = (jax.random.normal(k, (16, 16)) / 4 for k in jax.random.split(jax.random.key(0), 3))
    return {"a": a, "b": b, "bias": jnp.zeros(16)}, x


def exact_of(step, *args):
    with hooked(lambda fun, site: fun, "test"):
        call = Call(jax.jit(step), args, {})
        noting, program = call.noted()
        (values,) = values_of(call, noting, program)
        return Exact(noting.losses[0], values)


@pytest.mark.parametrize(
    ("loss", "policy", "tolerance"),
    thorough_but([(normalized, "mixed_float16", 1e-3), (with_casts, "float32", 0.1)], 1),
)
def test_the_error_is_that_of_compare(given, loss, policy, tolerance):
    exact = exact_of(lambda *args: jax.grad(loss)(*args), *given)
    found, note = exact.worst(mpjax.get_policy(policy))
    jax.effects_barrier()
    assert not PRINTED
    compared = mpjax.compare(loss, policy)(*given)
    jax.effects_barrier()
    PRINTED.clear()
    assert found.loss_scale == compared.loss_scale and found.worst == "a"
    # Between operations, a compiled program may keep more than the casts of a function ask for.
    expected = compared.results[f"gradient of {found.worst}"]
    assert found.gradient_error == pytest.approx(expected, rel=tolerance) and expected > 0
    assert not note


def test_a_gradient_that_is_0_has_no_relative_error(given):
    _, x = given
    w = {"edge": jnp.full((16, 1), 0.999 / 16), "scale": jnp.float32(1), "b": x, "unused": x}

    def loss(w, x):
        # Left of the edge in float32, and right of it in 16 bits.
        over = jax.nn.relu((jnp.ones((1, 16)) @ w["edge"])[0, 0] - 0.9995)
        return w["scale"] * over + jnp.mean((x @ w["b"]) ** 2) + 0 * jnp.sum(w["unused"])

    exact = exact_of(lambda *args: jax.grad(loss)(*args), w, x)
    found, note = exact.worst(mpjax.get_policy("mixed_bfloat16"))
    assert found.worst == "b" and 0 < found.gradient_error < 0.05
    assert "gradient of edge is 0 in float32, and up to 1 here" in note
    exact = exact_of(lambda *args: jax.grad(lambda w: 0 * jnp.sum(x @ w))(*args), x)
    found, note = exact.worst(mpjax.get_policy("mixed_bfloat16"))
    assert found.gradient_error == 0 and not note
    exact.results = {"gradient of w": x + jnp.inf}
    assert "gradient of w is not finite, also in" in exact.worst(mpjax.get_policy("float32"))[1]


def test_a_function_that_asks_python_has_no_error(given):
    def asks(w, x):
        x = jax.experimental.io_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return normalized(w, jax.lax.stop_gradient(x))

    with pytest.raises(NoValues, match="calls back into Python"):
        exact_of(lambda *args: jax.grad(asks)(*args), *given)


def test_a_whole_training_in_one_jit_is_not_run_one_operation_at_a_time(given, monkeypatch):
    def training(w, x):
        def rolled(x, _):
            return jnp.tanh(x @ x.T), None

        def update(carry, _):
            w, turn = carry  # of which JAX traces the loop twice, because 0 is weakly typed
            y, _ = jax.lax.scan(rolled, x, None, 100)
            gradient = jax.grad(normalized)(w, y)
            w = jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient)
            return (w, turn + jnp.float32(1)), None

        return jax.lax.scan(update, (w, 0.0), None, 1000)[0]

    ran, run = [], Plain.operation

    def counted(eqn, ins, place):
        ran.append(eqn)
        return run(eqn, ins, place)

    monkeypatch.setattr(Plain, "operation", staticmethod(counted))
    exact = exact_of(training, *given)
    assert len(ran) < 10 and exact.values[0].shape == (16, 16)
    program = jax.make_jaxpr(training)(*given).jaxpr
    assert "too long to run one operation at a time" in examine._too_long(program)
    unknown = jax.make_jaxpr(lambda x: jax.lax.while_loop(jnp.any, jnp.sin, x))(given[1]).jaxpr
    assert "not known" in examine._too_long(unknown)
