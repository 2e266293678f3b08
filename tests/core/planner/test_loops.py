"""What loops hand to their backward passes: chosen in the body, never more than JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import planners
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from joint import EXACT, planned
from support import assert_near, equations, normal, thorough_but

import mpjax
from mpjax._src.core.base._jax import stacks

TURNS, BATCH, WIDTH = 5, 8, 32


def lstm(params, xs):
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"] + params["b"], 4, -1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((BATCH, WIDTH))
    return jnp.mean(lax.scan(step, (start, start), xs)[1] ** 2)


def layers(params, xs, wrap=lambda f: f):
    def layer(x, w):
        y = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
        return x + jax.nn.gelu(y @ w) @ w.T, None

    stack = params["h"].reshape(4, WIDTH, WIDTH)
    return jnp.mean(lax.scan(wrap(layer), xs[0], stack)[0] ** 2)


def checkpointed(params, xs):
    return layers(params, xs, jax.checkpoint)


def branches(params, xs):
    w = params["h"][:, :WIDTH]
    ways = [lambda x: jnp.tanh(x @ w), lambda x: jnp.sin(x) * x, lambda x: x]

    def step(x, i):
        return lax.switch(i, ways, x), None

    return jnp.sum(lax.scan(step, xs[0], jnp.arange(TURNS) % 3)[0] ** 2)


def nested(params, xs):
    w = params["h"][:, :WIDTH]

    def inner(c, x):
        return jnp.tanh(c @ w + x), c.sum()

    def outer(c, x):
        c, sums = lax.scan(inner, c, xs, reverse=True)
        return c + x, sums

    return sum(jnp.mean(y**2) for y in lax.scan(outer, xs[0], xs))


def kept(fun, *args):
    return planners.kept(fun, args, tuple(range(len(args))))


LOOPS = {f.__name__: f for f in (lstm, layers, checkpointed, branches, nested)}
SHAPES = {"x": (WIDTH, 4 * WIDTH), "h": (WIDTH, 4 * WIDTH), "b": (4 * WIDTH,)}
PARAMS = {name: normal(i, *shape, scale=0.2) for i, (name, shape) in enumerate(SHAPES.items())}
XS = normal(5, TURNS, BATCH, WIDTH)


@pytest.mark.parametrize("name", thorough_but(LOOPS, "lstm", "branches"))
def test_gradients_are_jax_s_and_no_more_is_kept(name):
    fun = LOOPS[name]
    found = jax.jit(jax.grad(planned(fun, EXACT), (0, 1)))(PARAMS, XS)
    assert_near(found, jax.jit(jax.grad(fun, (0, 1)))(PARAMS, XS), rtol=1e-4)
    assert kept(planned(fun, EXACT), PARAMS, XS) <= kept(fun, PARAMS, XS)


# In 16 bits, as a part of what JAX keeps in float32. The gates of an LSTM are computed again from
# what its matmuls made; a checkpoint keeps the carries alone.
SHARE = {"lstm": 0.5, "layers": 0.27, "checkpointed": 1.0, "branches": 0.76, "nested": 0.6}


@pytest.mark.parametrize("name", LOOPS)
def test_what_matmuls_make_is_kept_in_16_bits(name):
    fun = LOOPS[name]
    assert kept(planned(fun), PARAMS, XS) <= SHARE[name] * kept(fun, PARAMS, XS)


@pytest.mark.thorough
@pytest.mark.parametrize("check", [True, False])
def test_maps_hand_over_a_part_on_each_device(check):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("m",))

    def local(w, v, x):
        return lax.psum(jnp.sum((jnp.tanh(x @ w) @ v) ** 2), "m")

    fun = jax.shard_map(
        local, mesh=mesh, in_specs=(P(None, "m"), P("m"), P()), out_specs=P(), check_vma=check
    )
    args = PARAMS["x"], PARAMS["x"].T, XS[0]
    found = jax.jit(jax.grad(planned(fun, EXACT), (0, 1)))(*args)
    assert_near(found, jax.jit(jax.grad(fun, (0, 1)))(*args), rtol=1e-4)
    assert kept(planned(fun), *args) <= 0.5 * kept(fun, *args)


def test_scans_stack_in_the_order_of_matmuls_and_fill_nothing_with_zeros():
    """On GPUs, XLA copies a stack that the second scan reads in another order."""
    heads, size = 4, 32

    def attend(x, w):
        q = (x @ w).reshape(-1, heads, size // heads)
        p = jax.nn.softmax(jnp.einsum("thd,shd->ths", q, q))
        y = lax.dot_general(p, q, (((2,), (0,)), ((1,), (1,))))
        return x + y.swapaxes(0, 1).reshape(x.shape), None

    def fun(w, x):
        return jnp.sum(lax.scan(attend, x, w)[0] ** 2)

    args = normal(1, 2, size, size, scale=0.1), normal(2, 8, size, scale=0.5)
    eqns = [*equations(jax.make_jaxpr(jax.grad(planned(fun)))(*args))]
    scans = [e for e in eqns if e.primitive.name == "scan"]
    assert len(scans) == 2 and all(e.ctx.xla_metadata[stacks.MARK] for e in scans)
    (laid,) = [e for e in eqns if e.primitive.name == "row_major"]
    assert laid.invars[0].aval.shape == (heads, 8, 8)  # the batch axis is in front
    assert_near(jax.grad(planned(fun))(*args), jax.grad(fun)(*args), rtol=0.05)


def test_a_checkpoint_in_a_loop_hands_over_its_operands_alone():
    """The weights of the attention that runs first are not those that run again."""

    @jax.checkpoint
    def attend(x, w):
        return x + jnp.tanh(jax.nn.softmax(x @ w @ x.T) @ x), None

    def fun(w, x):
        return jnp.sum(lax.scan(attend, x, w)[0] ** 2)

    layers, size = 3, 32
    args = normal(1, layers, size, size, scale=0.1), normal(2, 2 * size, size)
    assert kept(planned(fun), *args) <= kept(fun, *args)


def test_a_branch_that_hands_on_its_cotangent_has_a_budget():
    def fun(x, w):
        branch = lax.cond(x[0, 0] > 9, lambda x: jnp.tanh(x @ w) @ w, lambda x: x, x)
        return jnp.sum(branch**2)

    w, x = normal(0, 32, 32, scale=0.3), normal(1, 16, 32)
    auto = mpjax.autocast(fun, "mixed_bfloat16,storage=0")
    assert_near(jax.grad(auto)(x, w), jax.grad(fun)(x, w), 0.02)
