"""Libraries look up `jax.grad` where they differentiate: their users' functions are planned."""

import functools

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import mpjax
import mpjax.scripts
from mpjax._src.core.program.site import equations

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((4, 8)), jnp.float32)
quiet = functools.partial(mpjax.scripts.autocast_gradients, tell=False)


def planned(fun):
    return mpjax.autocast(fun, "mixed_bfloat16")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
        self.norm = nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.norm(self.first(x))))


def nnx_loss(model, x):
    return jnp.mean(model(x) ** 2)


def nnx_aux(model, x):
    out = model(x)
    return jnp.mean(out**2), out


def of_nnx(transform, a, fun, **options):
    def run(x):
        model = Net(nnx.Rngs(0))
        out = transform(a(fun), **options)(model, x)
        return jax.tree.leaves((out, nnx.state(model)))

    return run


def of_eqx(transform, a):
    model = eqx.nn.MLP(8, 8, 8, 1, key=jax.random.key(0))

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    return lambda x: jax.tree.leaves(eqx.filter(transform(a(loss))(model, x), eqx.is_array))


def of_haiku(a):
    def loss(x):
        module = hk.Linear(8)
        module(x)
        # Haiku's own gradient, which is stateful.
        return hk.value_and_grad(a(lambda x: jnp.mean(jnp.tanh(module(x)) ** 2)))(x)

    net = hk.without_apply_rng(hk.transform(loss))
    params = net.init(jax.random.key(0), X)
    return lambda x: jax.tree.leaves(net.apply(params, x))


class Lifted(nn.Module):
    a: object

    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(8)
        dense(x)
        fun = lambda module, x: jnp.mean(jnp.tanh(module(x)) ** 2)  # noqa: E731
        return nn.value_and_grad(self.a(fun), dense, x)


def of_linen(a):
    net = Lifted(a)
    params = Lifted(lambda fun: fun).init(jax.random.key(0), X)
    return lambda x: jax.tree.leaves(net.apply(params, x))


def of_dynamic_scale(a):
    w = jnp.ones((8, 8))

    def run(x):
        loss = a(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))
        return jax.tree.leaves(DynamicScale().value_and_grad(loss)(w))

    return run


def of_optax(a):
    # A line search differentiates nothing itself; the loss's value and gradient are cached.
    solver = optax.lbfgs()

    def run(x):
        loss = a(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))
        w = jnp.ones((8, 8))
        state = solver.init(w)
        value, grad = optax.value_and_grad_from_state(loss)(w, state=state)
        return value, grad

    return run


def matmuls(run):
    """Returns the types of the operands and results of all matmuls."""
    found = equations(jax.make_jaxpr(run)(X).jaxpr)
    dots = [eqn for eqn, *_ in found if eqn.primitive is jax.lax.dot_general_p]
    return sorted(" ".join(str(v.aval) for v in (*eqn.invars, *eqn.outvars)) for eqn in dots)


LIBRARIES = {
    "nnx.grad": lambda a: of_nnx(nnx.grad, a, nnx_loss),
    "nnx.value_and_grad": lambda a: of_nnx(nnx.value_and_grad, a, nnx_aux, has_aux=True),
    "nnx.DiffState": lambda a: of_nnx(
        nnx.grad, a, nnx_loss, argnums=nnx.DiffState(0, nnx.PathContains("kernel"))
    ),
    "eqx.filter_grad": lambda a: of_eqx(eqx.filter_grad, a),
    "eqx.filter_value_and_grad": lambda a: of_eqx(eqx.filter_value_and_grad, a),
    "haiku": of_haiku,
    "linen": of_linen,
    "DynamicScale": of_dynamic_scale,
    "optax": of_optax,
}


QUICK = ("nnx.value_and_grad", "eqx.filter_grad")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.thorough) for n in LIBRARIES]
)
def test_what_a_library_differentiates_is_planned(name):
    make = LIBRARIES[name]
    plain = make(lambda fun: fun)
    expected = jax.jit(plain)(X)
    with quiet() as report:
        found = jax.jit(plain)(X)
        jaxpr = str(jax.make_jaxpr(plain)(X))
    assert "bf16" in jaxpr and all(row.planned and row.library for row in report.rows)
    assert all(row.source.rpartition(":")[0] == __file__ for row in report.rows)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0.1, atol=0.03)
    again = jax.jit(plain)(X)
    assert all((a == b).all() for a, b in zip(again, expected, strict=True))
    if name == "DynamicScale":
        assert "with a loss scale, which bfloat16 needs not" in report.summary()
    if name in ("haiku", "linen"):  # which have to lift what autocast traces
        return
    # Libraries add operations of their own around a loss, and hand over arguments in another order.
    by_hand = matmuls(make(planned))
    assert matmuls(plain) != by_hand
    with quiet():
        assert matmuls(plain) == by_hand


def test_an_eager_module_whose_loss_reads_values_runs_as_it_is():
    model, x = nnx.Linear(4, 2, rngs=nnx.Rngs(0)), jnp.ones((3, 4))
    calls = []

    def loss(model, x):
        calls.append(1)
        value = jnp.mean(model(x) ** 2)
        return 2 * value if value > 0 else value

    plain = jax.tree.leaves(nnx.value_and_grad(loss)(model, x))
    with mpjax.scripts.autocast_gradients(tell=False) as report:
        for _ in range(2):
            same = jax.tree.leaves(nnx.value_and_grad(loss)(model, x))
    assert all((a == b).all() for a, b in zip(plain, same, strict=True)) and len(calls) == 4
    assert [row.reason for row in report.rows] == [
        "it reads values of its arrays (its first call was made twice)"
    ]
