"""Programs that several tests use: small ones of every kind, and random ones."""

import jax
import jax.experimental.custom_partitioning
import jax.numpy as jnp
from hypothesis import strategies as st
from jax import lax
from support import normal

import mpjax

W, X = normal(0, 8, 8, scale=0.3), normal(1, 4, 8)


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    var = (x * x).mean(-1, keepdims=True) - mean**2
    return (x - mean) * lax.rsqrt(var + 1e-6)


# ---- programs that must run, with half in every matmul, close to float32 -------------------------

PROGRAMS = {}


def program(fun):
    PROGRAMS[fun.__name__] = fun
    return fun


@program
def mlp(w, x):
    return jnp.sum((jax.nn.gelu(x @ w + w[0]) @ w) ** 2)


@program
def attention(w, x):
    q = jnp.concatenate([x @ w, jnp.sin(x)]).reshape(1, -1, 1, 8)
    return jnp.sum(jax.nn.dot_product_attention(q, q * 0.5, q, is_causal=True) ** 2)


@program
def einsum(w, x):
    return jnp.sum(jnp.einsum("ab,bc,dc->ad", x, w, x) ** 2)


@program
def convolution(w, x):
    images, kernel = x.reshape(1, 4, 8, 1), w.reshape(2, 2, 1, 16)
    numbers = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return jnp.sum(jax.nn.relu(y) ** 2)


@program
def transposed_convolution(w, x):
    y = lax.conv_transpose(x.reshape(1, 4, 8, 1), w.reshape(2, 2, 1, 16), (2, 2), "SAME")
    return jnp.sum(y**2)


@program
def grouped(w, x):
    y = lax.ragged_dot(x, jnp.stack([w, 2 * w]), jnp.array([1, 3]))
    return jnp.sum(jax.nn.relu(y) @ w)


@program
def rnn(w, x):
    def step(h, xt):
        h = jnp.tanh(xt @ w + h @ w)
        return h, h

    h, hs = lax.scan(step, jnp.zeros(8), x)
    return jnp.sum(hs**2) + jnp.sum(h)


@program
def layers(w, x):
    def layer(h, w):
        normed = h - h.mean(-1, keepdims=True)
        return h + jax.nn.gelu(normed @ w) @ w.T, None

    h, _ = lax.scan(jax.checkpoint(layer), x @ w, jnp.stack([w] * 3))
    return jnp.mean(h**2)


@program
def nested_scans(w, x):
    def outer(h, _):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), jnp.sum(h)), h, None, length=2)

    h, sums = lax.scan(outer, x, None, length=2)
    return jnp.sum(h) + jnp.sum(sums)


@program
def fori(w, x):
    return jnp.sum(lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), x))


@program
def conditional(w, x):
    return jnp.sum(lax.cond(x[0, 0] > 0, lambda a: a @ w, lambda a: jnp.exp(a) @ w, x))


@program
def switch(w, x):
    index = (x[0, 0] > 0).astype(int) + 1
    return jnp.sum(lax.switch(index, [lambda a: a @ w, lambda a: a, lambda a: 2 * a @ w], x))


@program
def rematerialized(w, x):
    return jnp.sum(jax.checkpoint(lambda x: jax.nn.gelu(x @ w) @ w)(x))


@program
def vmapped(w, x):
    return jnp.sum(jax.vmap(lambda row: jax.nn.relu(row @ w) @ w)(x))


@program
def jitted(w, x):
    return jnp.sum(jax.jit(lambda x: jax.jit(jnp.matmul)(x, w))(x) ** 2)


@program
def gradient_inside(w, x):
    return jnp.sum(jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) @ w))(w) ** 2)


@program
def custom_jvp(w, x):
    @jax.custom_jvp
    def f(x, w):
        return jnp.sin(x @ w)

    @f.defjvp
    def rule(primals, tangents):
        (x, w), (dx, dw) = primals, tangents
        return f(x, w), jnp.cos(x @ w) * (dx @ w + x @ dw)

    return jnp.sum(f(x, w))


@program
def custom_vjp(w, x):
    @jax.custom_vjp
    def f(x, w):
        return jnp.sin(x @ w)

    def bwd(res, g):
        x, w, y = res
        g = g * jnp.cos(y)
        return g @ w.T, x.T @ g

    f.defvjp(lambda x, w: (jnp.sin(x @ w), (x, w, x @ w)), bwd)
    return jnp.sum(f(x, w))


@program
def custom_vmap(w, x):
    @jax.custom_batching.custom_vmap
    def f(x):
        return x @ w

    @f.def_vmap
    def rule(size, batched, x):
        return x @ w, True

    return jnp.sum(jax.vmap(f)(x))


@program
def shard_mapped(w, x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def local(w, x):
        return lax.psum(jnp.sum(jax.nn.relu(x @ w) ** 2), "d")

    return jax.shard_map(local, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec())(w, x)


@program
def pmapped(w, x):
    f = jax.pmap(lambda w, x: jax.nn.relu(x @ w), in_axes=(None, 0))
    return jnp.sum(f(w, x.reshape(2, 2, 8)))


@program
def sort_and_scatter(w, x):
    h = jnp.sort(x @ w, -1).at[0].set(x[1]).at[1].add(1.0)
    return jnp.sum((h @ w)[:, :2])


@program
def dropout(w, x):
    key = jax.random.key(0)
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.sum(jnp.where(kept, x @ w / 0.5, 0) @ w + jax.random.normal(key, x.shape))


@program
def references(w, x):
    ref = jax.new_ref(x @ w)
    ref[0] = ref[1] * 2
    return jnp.sum(ref[...])


@program
def pools(w, x):
    h = (x @ w).reshape(1, 4, 8, 1)
    shape = (1, 2, 2, 1)
    top = lax.reduce_window(h, -jnp.inf, lax.max, shape, shape, "VALID")
    return jnp.sum(top**2) + jnp.sum(lax.reduce_window(h, 0.0, lax.add, shape, shape, "VALID"))


# ---- random programs ----------------------------------------------------------------------------

SHAPE = (4, 4)


def mix(x, y):
    """A matmul whose result is no larger than its operands."""
    return x @ jnp.tanh(y) / 4


@jax.custom_jvp
def ruled(x):
    return jnp.sin(x)


ruled.defjvp(lambda primals, tangents: (ruled(*primals), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def both_ruled(x, y):
    return mix(x, y)


both_ruled.defvjp(lambda x, y: (mix(x, y), (x, y)), lambda res, g: jax.vjp(mix, *res)[1](g))

UNARY = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x) / 2,
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, -1, keepdims=True),
    "mean": lambda x: x - x.mean(0),
    "transpose": lambda x: x.T,
    "reshape": lambda x: x.reshape(2, 8)[:, ::-1].reshape(SHAPE),
    "gather": lambda x: x[jnp.array([3, 1, 1, 0])],
    "sort": lambda x: jnp.sort(x, -1),
    "pad": lambda x: jnp.pad(x, 1)[1:-1, :-2],
    "cumsum": lambda x: jnp.cumsum(x, -1) / 4,
    "masked": lambda x: jax.nn.softmax(jnp.where(jnp.tri(4) > 0, x, -1e9)),
    "integers": lambda x: x + jnp.arange(4) / 4,
    "half": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "jit": jax.jit(lambda x: jnp.tanh(mix(x, x))),
    "remat": jax.checkpoint(lambda x: jnp.tanh(mix(x, x))),
    "vmap": jax.vmap(lambda row: jnp.tanh(row) * row.mean()),
    "scan": lambda x: lax.scan(lambda c, r: (jnp.tanh(c + r), c * r), x[0], x)[1],
    "matmul scan": lambda x: lax.scan(lambda c, _: (jnp.tanh(mix(c, x)), None), x, None, length=3)[
        0
    ],
    "fori": lambda x: lax.fori_loop(0, 3, lambda i, c: mix(c, x) + c / 2, x),
    "while": lambda x: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, mix(c[1], x)), (0, x)
    )[1],
    "cond": lambda x: lax.cond(jnp.array(True), lambda x: mix(x, x), jnp.exp, x),
    "switch": lambda x: lax.switch(1, [jnp.exp, jnp.tanh, jnp.sin], x),
    "custom_jvp": ruled,
    "region": mpjax.precision("float32")(lambda x: mix(x, x)),
    "nested": mpjax.autocast(lambda x: mix(x, x), "mixed_float16"),
}
BINARY = {
    "add": lambda x, y: (x + y) / 2,
    "sub": lambda x, y: (x - y) / 2,
    "mul": lambda x, y: jnp.tanh(x) * jnp.tanh(y),
    "max": jnp.maximum,
    "where": lambda x, y: jnp.where(jnp.tri(4) > 0, x, y),
    "concatenate": lambda x, y: jnp.concatenate([x, y], 1)[:, ::2],
    "matmul": mix,
    "custom_vjp": both_ruled,
    "update": lambda x, y: x.at[1:3].set(y[:2]),
}
STEP = st.tuples(
    st.sampled_from([*UNARY, *BINARY]), st.integers(0, 7), st.integers(0, 7), st.booleans()
)
NOT_REVERSED = {"while"}


def build(steps):
    """Returns a function of two arrays, built from steps that each add a value to a list."""

    def fun(x, y):
        values, results = [x, y], []
        for name, i, j, returned in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            value = UNARY[name](a) if name in UNARY else BINARY[name](a, b)
            values.append(value)
            if returned:
                results.append(value)
        return {"last": values[-1], "returned": results}

    return fun
