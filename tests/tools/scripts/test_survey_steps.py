"""A step that is traced again under a policy is the step with the lines changed; its values."""

import functools

import jax
import jax.flatten_util
import jax.numpy as jnp
import pytest

import mpjax
from mpjax._src.tools.instruments.explain import matmul_flops
from mpjax._src.tools.scripts import steps
from mpjax._src.tools.scripts.batches import batch_of
from mpjax._src.tools.scripts.compiled import Compiling
from mpjax._src.tools.scripts.hooks import hooked
from mpjax._src.tools.scripts.steps import Call, NoValues, trains, under, values_of


def loss_of(w, x, y):
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)


def weights(inner=32):
    a, b = jax.random.split(jax.random.key(0))
    return {"a": jax.random.normal(a, (16, inner)), "b": jax.random.normal(b, (inner, 4))}


def data(size=6):
    x, y = jax.random.split(jax.random.key(1))
    return jax.random.normal(x, (size, 16)), jax.random.normal(y, (size, 4))


def updated(w, gradient):
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient)


@pytest.fixture
def hook():
    """The transformations are replaced, as while a script is observed."""
    with hooked(lambda fun, site: fun, "test"):
        yield


def noted(step, *args):
    call = Call(jax.jit(step), args, {})
    return call, *call.noted()


def batch(step, *args):
    call, noting, program = noted(step, *args)
    results = [v.aval for v in program.jaxpr.jaxpr.outvars]
    return batch_of(call, noting, results, matmul_flops(program.jaxpr.jaxpr)[1])


def test_a_program_under_a_policy_is_that_of_changed_lines(hook):
    def step(w, x, y):
        return updated(w, jax.grad(loss_of)(w, x, y))

    def changed(w, x, y):
        return updated(w, jax.grad(mpjax.autocast(loss_of, "mixed_bfloat16"))(w, x, y))

    args = weights(), *data()
    mine = Call(jax.jit(step), args, {}).program(under(mpjax.get_policy("mixed_bfloat16")))
    by_hand = Call(jax.jit(changed), args, {}).program(None)
    assert str(mine.jaxpr).replace("step", "changed") == str(by_hand.jaxpr)
    as_written = Call(jax.jit(step), args, {}).program(None)
    assert "bf16" in str(mine.jaxpr) and "bf16" not in str(as_written.jaxpr)


def test_what_is_differentiated_is_found_with_what_it_closes_over(hook):
    def step(w, x, y, scale):
        def closed(w):
            return loss_of(w, x, y) * scale, x

        return jax.value_and_grad(closed, has_aux=True)(w)[1]

    x, y = data()
    call, noting, program = noted(step, weights(), x, y, jnp.float32(3))
    (loss,) = noting.losses
    assert loss.site.transform == "value_and_grad" and loss.site.fun.endswith("closed")
    assert noting.place[0].endswith("step") and noting.place[1] == __file__
    assert sum(p.size for p in loss.parameters) == 16 * 32 + 32 * 4
    (values,) = values_of(call, noting, program)
    args, kwargs = loss.arguments(values)
    value, aux = loss.fun(*args, **kwargs)
    assert jnp.allclose(value, 3 * loss_of(weights(), x, y), rtol=1e-5)
    assert jnp.array_equal(aux, x) and loss.argnums == (0,)


def test_values_in_loops_and_maps_are_the_first_ones(hook):
    def step(w, x, y):
        jax.debug.print("not twice {}", y)

        def turn(w, pair):
            w = jax.lax.cond(True, lambda: w, lambda: updated(w, w))
            return updated(w, jax.grad(loss_of)(w, *pair)), None

        w, _ = jax.lax.scan(turn, w, (x, y))
        each = jax.vmap(jax.grad(lambda w, x: jnp.sum(x @ w["a"])), (None, 0))(w, x)
        return w, each

    x, y = (part.reshape(3, 2, -1) for part in data())
    call, noting, program = noted(step, weights(), x, y)
    first, second = values_of(call, noting, program)
    assert jnp.array_equal(first[0], weights()["a"]) and jnp.array_equal(first[2], x[0])
    assert second[-1].shape == x[0].shape and jnp.array_equal(second[-1], x[0])


def test_values_that_are_not_reached_are_told(hook, monkeypatch):
    def asks(w, x, y):
        x = jax.experimental.io_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        return jax.grad(loss_of)(w, x, y)

    def late(w, x, y):
        for _ in range(40):
            x = x + 1
        return jax.grad(loss_of)(w, x, y)

    with pytest.raises(NoValues, match="io_callback"):
        values_of(*noted(asks, weights(), *data()))
    monkeypatch.setattr(steps, "MOST", 20)
    with pytest.raises(NoValues, match="within 20 operations"):
        values_of(*noted(late, weights(), *data()))
    shapes = jax.eval_shape(lambda: (weights(), *data()))
    with pytest.raises(NoValues, match="for shapes"):
        values_of(*noted(lambda w, x, y: jax.grad(loss_of)(w, x, y), *shapes))


def energy(w, x):
    return jnp.sum(jnp.tanh(x @ w["a"]) @ w["b"])


def forces(w, x):
    return jax.grad(energy, argnums=1)(w, x)


def accumulated(w, x, y):
    zeros = jax.tree.map(jnp.zeros_like, w)
    turn = lambda g, pair: (updated(g, jax.grad(loss_of)(w, *pair)), None)  # noqa: E731
    return jax.lax.scan(turn, zeros, (x[:, None], y[:, None]))[0]


def raveled(w, x, y):
    flat, back = jax.flatten_util.ravel_pytree(w)
    return back(flat - jax.grad(lambda w: loss_of(back(w), x, y))(flat))


def in_place(w, x, y):
    reference = jax.new_ref(w["b"])
    pushed(reference, w, x, y)
    return reference[...].sum()


@jax.jit
def pushed(reference, w, x, y):
    reference[...] -= jax.grad(loss_of)(w, x, y)["b"]


def residual(w, x, y):
    slopes = jax.vmap(lambda s: jax.grad(lambda s: energy(w, s * x))(s))(x[:, 0])
    return jnp.mean(slopes**2), w, x.mean()


TRAINS = {
    "gradients": (lambda w, x, y: jax.value_and_grad(loss_of)(w, x, y), True),
    "one weight": (lambda w, x, y: w["b"] - jax.grad(loss_of)(w, x, y)["b"], True),
    "half": (lambda w, x, y: jax.tree.map(lambda g: g.astype("bfloat16"), forces(w, x)), True),
    "accumulated": (accumulated, True),
    "raveled": (raveled, True),
    "in place": (in_place, True),
    "devices": (lambda w, x, y: jax.pmap(forces)(*jax.tree.map(lambda a: a[None], (w, x))), True),
    "forces": (lambda w, x, y: (jnp.mean(forces(w, x) ** 2), x.sum(0)), False),
    "in a jit": (lambda w, x, y: (jax.jit(lambda w: (w, energy(w, forces(w, x))))(w), y), False),
    "residual": (residual, False),
    "printed": (lambda w, x, y: jax.debug.print("{}", forces(w, x).sum()), False),
    "sent": (lambda w, x, y: jax.debug.callback(print, forces(w, x)), True),
}


@pytest.mark.parametrize("name", TRAINS)
def test_a_step_returns_a_gradient_or_what_it_updates(hook, name):
    step, expected = TRAINS[name]
    _, noting, program = noted(step, weights(), *data())
    assert noting.losses and trains(noting, program) == expected


@jax.tree_util.register_pytree_node_class
class Strict:
    """A state that takes nothing but arrays of its shape, as jmp's loss scales and xarray's do."""

    def __init__(self, array):
        array + 1
        assert array.shape
        self.array = array

    def tree_flatten(self):
        return (self.array,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_a_state_that_takes_no_placeholders_is_compiled(hook):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x, y):
        w = state.array
        return Strict(updated(w, jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)))

    call = Call(step, (Strict(jnp.ones((16, 16))), *data()), {})
    compiling = Compiling((), 600.0)
    program = compiling.compiled(compiling.targets[0], call, None)
    assert not program.refused and call.donated == [0] and compiling.compilations == 1
    assert 0 <= program.temp_bytes < program.total_bytes < 4 * (16 * 16 + 6 * 20) + 4096


def test_what_is_differentiated_is_found_in_a_state_that_takes_no_placeholders(hook):
    def step(state, x, y):
        def loss(y, state):
            return jnp.mean((x @ state.array - y) ** 2)

        return jax.grad(loss, argnums=(1, 0))(y, state)

    _, noting, program = noted(step, Strict(jnp.ones((16, 4))), *data())
    (loss,) = noting.losses
    assert loss.places == [1, 0] and trains(noting, program)


def test_the_batch_is_the_axis_that_reaches_the_loss(hook):
    def step(w, x, y):
        return updated(w, jax.grad(loss_of)(w, x, y))

    found = batch(step, weights(), *data())
    assert (found.size, found.axes, found.multiple_of) == (6, {2: 0, 3: 0}, 1)

    def several(w, x, y):
        return jax.lax.scan(lambda w, pair: (step(w, *pair), None), w, (x, y))[0]

    found = batch(several, weights(), *(part.reshape(3, 2, -1) for part in data()))
    assert (found.size, set(found.axes.values())) == (2, {1})

    def accumulated(w, x, y):
        parts = (part.reshape(3, -1, part.shape[-1]) for part in (x, y))
        turn = lambda g, pair: (updated(g, jax.grad(loss_of)(w, *pair)), None)  # noqa: E731
        return jax.lax.scan(turn, w, (*parts,))[0]

    assert batch(accumulated, weights(), *data()).multiple_of == 3
    # A batch of the size of a hidden layer, and one whose results have its shape.
    found = batch(step, weights(6), *data())
    assert found.axes == {2: 0, 3: 0}
    found = batch(lambda w, x, y: (step(w, x, y), 2 * x), weights(), *data())
    assert found.size == 6 and found.axes == {2: 0, 3: 0}


def test_no_batch_is_made_up(hook):
    frozen = weights()

    def fixed(w, x, y):
        assert x.shape == (6, 16)
        return updated(w, jax.grad(loss_of)(w, x, y))

    def alone(w, teacher):
        return updated(w, jax.grad(lambda w: loss_of(w, teacher["a"].T, jnp.ones((32, 4))))(w))

    def attends(w, tokens):
        def loss(w):
            h = w["a"].T[tokens]
            assert len(h) == 3  # so only the sequence could be longer
            return jnp.sum(jax.nn.softmax(h @ h.mT) @ h)

        return updated(w, jax.grad(loss)(w))

    assert batch(fixed, weights(), *data()) is None
    assert batch(attends, weights(), jnp.zeros((3, 64), int)) is None
    assert batch(alone, weights(), frozen) is None
