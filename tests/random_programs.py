"""Random programs over the operations that autocast has a rule for, to be put under the measure.

A program is a tuple of steps ``(name, i, j, body)``: an operation, the values that it reads (values
are counted from the arguments on, modulo), and, of what holds a program, its steps. Operations are
scaled so that values stay near one, and continuous: what jumps where a rounded value crosses a line
is no matter of accuracy. Where a derivative jumps (a kink), gradients are not judged.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

SIDE = 12  # large enough that a matmul is not short
SHAPE = (SIDE, SIDE)
MASK = jnp.tri(SIDE) > 0
ROWS = jnp.asarray(np.random.default_rng(0).integers(0, SIDE, SIDE))
Program = tuple[tuple[str, int, int, Any], ...]


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation on values of one shape.

    Attributes:
        fun: Of one or two values, or of a program's function and two values.
        kind: "unary", "binary" or "program".
        fault: The fault of today's planner that it shows, if any: a key of `KNOWN_FAULTS`.
        kink: Whether its derivative jumps.
        reversible: Whether it has a gradient.
    """

    fun: Callable[..., Any]
    kind: str
    fault: str = ""
    kink: bool = False
    reversible: bool = True


OPS: dict[str, Op] = {}


def unary(fault="", kink=False, **funs):
    OPS.update({name: Op(fun, "unary", fault, kink) for name, fun in funs.items()})


def binary(fault="", kink=False, **funs):
    OPS.update({name: Op(fun, "binary", fault, kink) for name, fun in funs.items()})


def program(fault="", kink=False, reversible=True):
    def register(fun):
        OPS[fun.__name__] = Op(fun, "program", fault, kink, reversible)
        return fun

    return register


def small(x):
    return 0.9 * jnp.tanh(x)


def positive(x):
    return 1 + x * x / (1 + jnp.abs(x))


# ---- float32 from operand to result -------------------------------------------------------------

unary(
    acos=lambda x: jnp.arccos(small(x)),
    acosh=lambda x: jnp.arccosh(1 + positive(x)),
    asin=lambda x: jnp.arcsin(small(x)),
    asinh=jnp.arcsinh,
    atan=jnp.arctan,
    atanh=lambda x: jnp.arctanh(small(x)),
    bessel_i0e=jax.scipy.special.i0e,
    bessel_i1e=jax.scipy.special.i1e,
    cos=jnp.cos,
    cosh=lambda x: jnp.cosh(jnp.tanh(x)),
    digamma=lambda x: jax.scipy.special.digamma(1 + positive(x)),
    erf_inv=lambda x: jax.scipy.special.erfinv(small(x)),
    erfc=jax.scipy.special.erfc,
    exp=lambda x: jnp.exp(small(x)),
    exp2=lambda x: jnp.exp2(small(x)),
    expm1=lambda x: jnp.expm1(small(x)),
    lgamma=lambda x: jax.scipy.special.gammaln(1 + positive(x)),
    log=lambda x: jnp.log(positive(x)),
    log1p=lambda x: jnp.log1p(positive(x)),
    pow=lambda x: positive(x) ** 0.7,
    sin=jnp.sin,
    sinh=lambda x: jnp.sinh(small(x)),
    tan=lambda x: jnp.tan(small(x)),
    cumsum=lambda x: jnp.cumsum(x, 0) / 4,
    cumprod=lambda x: jnp.cumprod(1 + small(x) / 4, 1),
    cumlogsumexp=lambda x: lax.cumlogsumexp(x, 1) / 2,
    reduce_prod=lambda x: jnp.tanh(x) * jnp.prod(1 + small(x) / 4, 1, keepdims=True),
    fft=lambda x: jnp.real(jnp.fft.fft(x, axis=1)) / 3,
    cholesky=lambda x: jnp.linalg.cholesky(small(x) @ small(x).T / SIDE + jnp.eye(SIDE)),
    triangular_solve=lambda x: lax.linalg.triangular_solve(
        jnp.eye(SIDE) + jnp.tril(small(x), -1) / SIDE, x, left_side=True, lower=True
    ),
)
unary(
    cube=lambda x: small(x) ** 3,
    rsqrt=lambda x: lax.rsqrt(positive(x)),
    square=lambda x: jnp.square(small(x)),
    mean=lambda x: x - x.mean(0),
    standardize=lambda x: (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 0.1),
    average_pool=lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME") / 3,
    scatter_add=lambda x: x.at[ROWS].add(x) / 3,
    scatter_mul=lambda x: x.at[jnp.arange(4)].multiply(0.5 + small(x)[:4], unique_indices=True),
    segment_sum=lambda x: x - jax.ops.segment_sum(x, ROWS // 4, 3)[ROWS // 4] / 6,
    logsumexp=lambda x: x - jax.nn.logsumexp(x, 1, keepdims=True),
    softmax=lambda x: 3 * jax.nn.softmax(x),
    masked_softmax=lambda x: 3 * jax.nn.softmax(jnp.where(MASK, x, -1e9)),
    log_softmax=lambda x: jax.nn.log_softmax(x) / 3,
)

# ---- elementwise, and changes of layout ---------------------------------------------------------

unary(
    cbrt=lambda x: jnp.cbrt(positive(x)),
    erf=lax.erf,
    logistic=jax.nn.sigmoid,
    neg=lambda x: -x,
    sqrt=lambda x: jnp.sqrt(positive(x)),
    tanh=jnp.tanh,
    gelu=jax.nn.gelu,
    silu=jax.nn.silu,
    softplus=jax.nn.softplus,
    select=lambda x: jnp.where(MASK, x, 0.5),
    masked=lambda x: jnp.where(MASK, x, 0.0),
    scaled=lambda x: 0.7 * x,
    shifted=lambda x: x + 0.3,
    affine=lambda x: (x - 0.2) / 1.3,
    units=lambda x: 100 * (x / 100),
    integers=lambda x: x + jnp.arange(SIDE) / SIDE,
    outer=lambda x: x * jnp.arange(SIDE)[:, None] / SIDE,
    broadcast=lambda x: jnp.broadcast_to(x[:1], SHAPE),
    concatenate=lambda x: jnp.concatenate([x[:, ::2], x[:, 1::2]], 1),
    dynamic_slice=lambda x: lax.dynamic_slice(jnp.concatenate([x, x]), (3, 0), SHAPE),
    gather=lambda x: x[ROWS],
    pad=lambda x: jnp.pad(x, 1)[1:-1, :-2],
    reshape=lambda x: x.reshape(4, 3, SIDE).swapaxes(0, 1).reshape(SHAPE),
    rev=lambda x: x[::-1],
    split=lambda x: jnp.concatenate(jnp.split(x, 3)[::-1]),
    stack=lambda x: jnp.stack([x[0]] * SIDE),
    stop_gradient=lambda x: x + lax.stop_gradient(x) / 2,
    tile=lambda x: jnp.tile(x[:4], (3, 1)),
    transpose=lambda x: x.T,
    barrier=lax.optimization_barrier,
    named=lambda x: checkpoint_name(x, "value"),
    user_half=lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
)
unary(
    kink=True,
    abs=jnp.abs,
    relu=jax.nn.relu,
    clamp=lambda x: jnp.clip(x, -0.8, 0.8),
    leaky=jax.nn.leaky_relu,
    sort=lambda x: jnp.sort(x, 1),
    cummax=lambda x: lax.cummax(x, 0),
    reduce_max=lambda x: x - jnp.max(x, 1, keepdims=True),
    top=lambda x: jnp.concatenate([lax.top_k(x, 6)[0]] * 2, 1),
    max_pool=lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"),
)
binary(
    add=lambda x, y: 0.7 * (x + y),
    sub=lambda x, y: 0.7 * (x - y),
    mul=lambda x, y: jnp.tanh(x) * y,
    product=lambda x, y: small(x) * small(y),
    div=lambda x, y: x / positive(y),
    atan2=lambda x, y: jnp.arctan2(x, positive(y)),
    power=lambda x, y: positive(x) ** small(y),
    where=lambda x, y: jnp.where(MASK, x, y),
    join=lambda x, y: jnp.concatenate([x, y], 1)[:, ::2],
    update=lambda x, y: x.at[1:5].set(y[:4]),
    dynamic_update=lambda x, y: lax.dynamic_update_slice(x, y[:3], (2, 0)),
    gate=lambda x, y: jax.nn.sigmoid(x) * y,
    interpolate=lambda x, y: x + jax.nn.sigmoid(y) * (y - x),
)
binary(kink=True, max=jnp.maximum, min=jnp.minimum)

# ---- matmuls ------------------------------------------------------------------------------------

binary(
    matmul=lambda x, y: x @ y / 3,
    matmul_transposed=lambda x, y: x @ jnp.tanh(y).T / 3,
    einsum=lambda x, y: jnp.einsum("abc,dbc->ad", x.reshape(SIDE, 3, 4), y.reshape(SIDE, 3, 4)) / 3,
    batched=lambda x, y: jnp.matmul(
        x.reshape(3, 4, SIDE), jnp.broadcast_to(y, (3, *SHAPE)) / 3
    ).reshape(SHAPE),
    convolve=lambda x, y: lax.conv_general_dilated(
        x.reshape(1, 1, SIDE, SIDE), y[:3, :9].reshape(3, 1, 3, 3) / 3, (1, 1), "SAME"
    ).mean(1)[0],
    ragged=lambda x, y: lax.ragged_dot(x, jnp.stack([y, y.T]) / 3, jnp.array([5, SIDE - 5])),
    layer=lambda x, y: jnp.tanh(x @ y + y[0]),
    attention=lambda x, y: jax.nn.softmax(x @ y.T / 3) @ y,
    residual=lambda x, y: x + jnp.tanh(x @ y),
)
unary(gram=lambda x: x @ x.T / SIDE)

# ---- what holds programs ------------------------------------------------------------------------


@program()
def jitted(f, x, y):
    return jax.jit(f)(x, y)


@program()
def rematerialized(f, x, y):
    return jax.checkpoint(f)(x, y)


@program()
def mapped(f, x, y):
    return jax.vmap(f)(jnp.stack([x, y]), jnp.stack([y, x])).mean(0)


@program()
def conditional(f, x, y):
    return lax.cond(jnp.array(True), f, lambda x, y: jnp.exp(small(x)), x, y)


@program()
def switched(f, x, y):
    return lax.switch(1, [lambda x, y: jnp.sin(x), f, lambda x, y: x @ y], x, y)


@program()
def scanned(f, x, y):
    return lax.scan(lambda c, w: (jnp.tanh(f(c, w)), None), x, jnp.stack([y, y.T]))[0]


@program()
def scanned_outputs(f, x, y):
    def step(c, _):
        c = jnp.tanh(f(c, y))
        return c, c[0]

    return lax.scan(step, x, None, length=3)[1].mean(0) + x


@program()
def nested_scan(f, x, y):
    def outer(c, _):
        return lax.fori_loop(0, 2, lambda i, c: (c[1], jnp.tanh(f(c[0], y))), c), None

    return lax.scan(outer, (x, y), None, length=2)[0][1]


@program(reversible=False)
def looped(f, x, y):
    step = lambda c: (c[0] + 1, jnp.tanh(f(c[1], y)))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 2, step, (0, x))[1]


@program()
def unrolled(f, x, y):
    for _ in range(3):
        x = jnp.tanh(f(x, y))
    return x


@program()
def differentiated(f, x, y):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(f(x, y))))(x)


@program()
def ruled_jvp(f, x, y):
    @jax.custom_jvp
    def g(x, y):
        return f(x, y)

    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g(x, y)


@program()
def ruled_vjp(f, x, y):
    @jax.custom_vjp
    def g(x, y):
        return f(x, y)

    g.defvjp(lambda x, y: (f(x, y), (x, y)), lambda res, ct: jax.vjp(f, *res)[1](ct))
    return g(x, y)


# ---- classes of faults --------------------------------------------------------------------------


def steps(step, length, looped):
    def fun(f, x, y):
        move = lambda x: x + step * jnp.tanh(f(x, y))  # noqa: E731
        if looped:
            return lax.scan(lambda x, _: (move(x), None), x, None, length=length)[0]
        for _ in range(length):
            x = move(x)
        return x

    return fun


for _step in (1.0, 0.3, 0.1, 0.03, 1e-2, 1e-3, 1e-5):
    for _length in (2, 4, 12):
        for _looped in (False, True):
            _name = f"{'scan' if _looped else 'write'} {_length} steps of {_step:g}"
            OPS[_name] = Op(steps(_step, _length, _looped), "program", "steps")

# Scalars that arrive as arguments: the last of a program's.
SCALARS = {"tiny": 1e-12, "huge": 2e5, "near_one": 0.999, "step": 1e-3}


def with_scalars(tiny, huge, near_one, step):
    """The operations that read scalars, as functions of them."""
    return {
        "plus_tiny": lambda x: x / (jnp.abs(jax.nn.relu(x)) + tiny + 0.5),
        "ratio_to_tiny": lambda x: small(x) * (tiny / (tiny + 1e-12)),
        "over_huge": lambda x: x / huge * 1e5,
        "times_huge": lambda x: jnp.tanh(x * 1e-5 * huge),
        "times_near_one": lambda x: 100 * (x - near_one * x),
        "by_step": lambda x: x + step * jnp.tanh(x),
    }


unary(fault="scalars", **dict.fromkeys(with_scalars(*SCALARS.values())))
unary(
    fault="waves",
    wave=lambda x: jnp.sin(24 * x),
    sharp_softmax=lambda x: 3 * jax.nn.softmax(12 * x),
    high_power=lambda x: positive(x) ** 8.5 / 100,
)
binary(fault="waves", wave_of_a_matmul=lambda x, y: jnp.sin(40 + x @ y))
binary(
    fault="short",
    fourier=lambda x, y: jnp.sin(8 * x[:, :2] @ y[:2]),
    short_kernel=lambda x, y: jnp.exp(-((x[:, :3] @ y[:3]) ** 2)),
)
unary(
    fault="range",
    large_relu=lambda x: jax.nn.relu(1e5 * x) / 1e5,
    large_cube=lambda x: (60 * small(x)) ** 3 / 2e5,
    small_product=lambda x: 1e6 * (1e-6 * x),
    large_sum=lambda x: jnp.tanh(jnp.cumsum(1e4 * x, 0) / 3e4),
)
unary(
    fault="near one",
    decay=lambda x: jnp.cumprod(jnp.exp(-0.01 * jax.nn.softplus(x)), 0),
)
binary(
    fault="near one",
    recurrence=lambda x, y: lax.scan(
        lambda h, ab: (ab[0] * h + ab[1],) * 2,
        jnp.ones(SIDE),
        (jnp.exp(-0.01 * jax.nn.softplus(x)), 0.01 * y),
    )[1],
)
binary(
    fault="common part",
    attention_with_common_part=lambda x, y: jax.nn.softmax(x @ (y + 8).T / 3) @ (y + 8) / 3,
)
binary(fault="ratio", ratio=lambda x, y: (100 * x @ y) / (400 + 100 * jnp.tanh(x @ y.T)))


# ---- programs -----------------------------------------------------------------------------------


def build(steps: Program) -> Callable[..., Any]:
    """Returns a program as a function of two arrays and a dict of scalars."""

    def fun(x, y, scalars):
        return run(steps, x, y, with_scalars(**scalars))

    return fun


def run(steps, x, y, scaled):
    values = [x, y]
    for name, i, j, body in steps:
        a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
        op = OPS[name]
        if op.kind == "program":
            value = op.fun(lambda x, y, body=body: run(body, x, y, scaled), a, b)
        elif op.kind == "binary":
            value = op.fun(a, b)
        else:
            value = scaled.get(name, op.fun)(a)
        values.append(value)
    return values[-1]


def names_in(steps: Program) -> Iterator[str]:
    for name, _, _, body in steps:
        yield name
        yield from names_in(body)


def is_smooth(steps: Program) -> bool:
    return not any(OPS[name].kink or not OPS[name].reversible for name in names_in(steps))


def arguments(seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(rng.uniform(-1, 1, SHAPE), jnp.float32) for _ in range(2)]
    return (*arrays, {name: jnp.float32(value) for name, value in SCALARS.items()})


def programs(faults: dict[str, str], largest: int = 6) -> st.SearchStrategy[Program]:
    """A strategy for programs without the operations that show these faults."""
    names = [name for name, op in OPS.items() if op.fault not in faults]
    holders = [name for name in names if OPS[name].kind == "program"]
    others = [name for name in names if OPS[name].kind != "program"]
    matmuls = [name for name in ("matmul", "layer", "residual", "attention") if name in others]
    index = st.integers(0, 3)
    step = st.tuples(
        st.one_of(st.sampled_from(others), st.sampled_from(matmuls)), index, index, st.just(())
    )
    bodies = st.lists(step, min_size=1, max_size=3).map(tuple)
    inner = st.tuples(st.sampled_from(holders), index, index, bodies)
    nested = st.lists(st.one_of(step, inner), min_size=1, max_size=3).map(tuple)
    outer = st.tuples(st.sampled_from(holders), index, index, st.one_of(bodies, nested))
    return st.lists(st.one_of(step, step, outer), min_size=1, max_size=largest).map(tuple)
