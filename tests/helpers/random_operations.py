"""The operations of random programs: one or more for each rule of autocast.

All are functions of square arrays, scaled so that values stay near one. Most are smooth. Those that
jump are marked, because a rounding may then change a result by much; programs with them are judged
by medians.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

SIDE = 12  # large enough that a matmul is not short
SHAPE = (SIDE, SIDE)
MASK = jnp.tri(SIDE) > 0
EYE = jnp.eye(SIDE)
ROWS = jnp.asarray(np.random.default_rng(0).integers(0, SIDE, SIDE))

# Scalar arguments of a program.
SCALARS = {"tiny": 1e-12, "huge": 2e5, "near_one": 0.999, "step": 1e-3, "half": 0.5}


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation on arrays of one shape.

    Attributes:
        fun: ``(x)``, ``(x, y)``, ``(x, scalars)``, or ``(f, x, y, scalars)`` with a program's
            function ``f(x, y, scalars)``.
        kind: "unary", "binary", "scalar" or "program", in the same order.
        jumps: Whether the operation or its derivative is discontinuous.
        derivatives: How often the operation can be differentiated.
        turns: How often the operation runs its inner program.
        stream: ``(f, x, y, scalars, rounded)`` of a residual stream: like ``fun``, with its state
            rounded after each block, because models cast by hand keep it in half.
    """

    fun: Callable[..., Any]
    kind: str
    jumps: bool = False
    derivatives: int = 9
    turns: int = 1
    stream: Callable[..., Any] | None = None


OPS: dict[str, Op] = {}


def add_ops(kind, funs, **columns):
    OPS.update({name: Op(fun, kind, **columns) for name, fun in funs.items()})


def small(x):
    return 0.9 * jnp.tanh(x)


def positive(x):
    return 1 + x * x / (1 + jnp.abs(x))


def near_eye(x):
    return EYE + small(x) / SIDE


def symmetric(x):
    """A symmetric matrix with positive, well-separated eigenvalues."""
    return jnp.diag(1 + jnp.arange(SIDE) / 4) + small(x + x.T) / SIDE


UNARY = {
    # float32 from operand to result
    "acos": lambda x: jnp.arccos(small(x)),
    "acosh": lambda x: jnp.arccosh(1 + positive(x)),
    "asin": lambda x: jnp.arcsin(small(x)),
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": lambda x: jnp.arctanh(small(x)),
    "bessel_i0e": jax.scipy.special.i0e,
    "bessel_i1e": jax.scipy.special.i1e,
    "cos": jnp.cos,
    "cosh": lambda x: jnp.cosh(jnp.tanh(x)),
    "digamma": lambda x: jax.scipy.special.digamma(1 + positive(x)),
    "erf_inv": lambda x: jax.scipy.special.erfinv(small(x)),
    "erfc": jax.scipy.special.erfc,
    "exp": lambda x: jnp.exp(small(x)),
    "exp2": lambda x: jnp.exp2(small(x)),
    "expm1": lambda x: jnp.expm1(small(x)),
    "lgamma": lambda x: jax.scipy.special.gammaln(1 + positive(x)),
    "polygamma": lambda x: jax.scipy.special.polygamma(1, 1 + positive(x)),
    "zeta": lambda x: jax.scipy.special.zeta(1 + positive(x), 1.5),
    "log": lambda x: jnp.log(positive(x)),
    "log2": lambda x: jnp.log2(positive(x)),
    "log1p": lambda x: jnp.log1p(positive(x)),
    "pow": lambda x: positive(x) ** 0.7,
    "high_power": lambda x: positive(x) ** 8.5 / 100,
    "cube": lambda x: small(x) ** 3,
    "inverse": lambda x: positive(x) ** -1,
    "rsqrt": lambda x: lax.rsqrt(positive(x)),
    "square": lambda x: jnp.square(small(x)),
    "sin": jnp.sin,
    "wave": lambda x: jnp.sin(24 * x),
    "sinh": lambda x: jnp.sinh(small(x)),
    "tan": lambda x: jnp.tan(small(x)),
    # sums and products over many
    "cumsum": lambda x: jnp.cumsum(x, 0) / 4,
    "large_cumsum": lambda x: jnp.tanh(jnp.cumsum(1e4 * x, 0) / 3e4),
    "cumprod": lambda x: jnp.cumprod(1 + small(x) / 4, 1),
    "decay": lambda x: jnp.cumprod(jnp.exp(-0.01 * jax.nn.softplus(x)), 0),
    "cumlogsumexp": lambda x: lax.cumlogsumexp(x, 1) / 2,
    "reduce_prod": lambda x: jnp.tanh(x) * jnp.prod(1 + small(x) / 4, 1, keepdims=True),
    "fft": lambda x: jnp.real(jnp.fft.fft(x, axis=1)) / 3,
    "mean": lambda x: x - x.mean(0),
    "norm": lambda x: 3 * x / jnp.linalg.norm(positive(x), axis=1, keepdims=True),
    "standardize": lambda x: (x - x.mean(1, keepdims=True)) / (x.std(1, keepdims=True) + 0.1),
    "rms_norm": lambda x: x * lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + 1e-6),
    "average_pool": lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME") / 3,
    "scatter_add": lambda x: x.at[ROWS].add(x) / 3,
    "scatter_sub": lambda x: x.at[ROWS].subtract(x) / 3,
    "scatter_mul": lambda x: x.at[jnp.arange(4)].multiply(0.5 + small(x)[:4], unique_indices=True),
    "segment_sum": lambda x: x - jax.ops.segment_sum(x, ROWS // 4, 3)[ROWS // 4] / 6,
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, 1, keepdims=True),
    "softmax": lambda x: 3 * jax.nn.softmax(x),
    "sharp_softmax": lambda x: 3 * jax.nn.softmax(12 * x),
    "masked_softmax": lambda x: 3 * jax.nn.softmax(jnp.where(MASK, x, -1e9)),
    "log_softmax": lambda x: jax.nn.log_softmax(x) / 3,
    # linear algebra
    "cholesky": lambda x: jnp.linalg.cholesky(symmetric(x)),
    "triangular_solve": lambda x: lax.linalg.triangular_solve(
        EYE + jnp.tril(small(x), -1) / SIDE, x, left_side=True, lower=True
    ),
    "eigvalsh": lambda x: jnp.linalg.eigvalsh(symmetric(x)) + x,
    "lu": lambda x: lax.linalg.lu(near_eye(x))[0],
    "determinant": lambda x: x * jnp.linalg.det(near_eye(x)),
    "qr": lambda x: jnp.linalg.qr(near_eye(x))[1],
    "svd": lambda x: x + jnp.linalg.svd(symmetric(x), compute_uv=False) / 2,
    # elementwise
    "cbrt": lambda x: jnp.cbrt(positive(x)),
    "erf": lax.erf,
    "logistic": jax.nn.sigmoid,
    "neg": lambda x: -x,
    "sqrt": lambda x: jnp.sqrt(positive(x)),
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "select": lambda x: jnp.where(MASK, x, 0.5),
    "masked": lambda x: jnp.where(MASK, x, 0.0),
    "scaled": lambda x: 0.7 * x,
    "shifted": lambda x: x + 0.3,
    "affine": lambda x: (x - 0.2) / 1.3,
    "units": lambda x: 100 * (x / 100),
    "near_one": lambda x: 100 * (x - 0.999 * x),
    "epsilon": lambda x: x * (1e-12 / (positive(x) * 1e-12 + 1e-12)),
    "large_cube": lambda x: (60 * small(x)) ** 3 / 2e5,
    "large_square": lambda x: jnp.sqrt(300 * positive(x) * (300 * positive(x))) / 300,
    "small_product": lambda x: 1e6 * (1e-6 * x),
    "integers": lambda x: x + jnp.arange(SIDE) / SIDE,
    "positions": lambda x: jnp.sin(x + (1000 + jnp.arange(SIDE)).astype(jnp.float32)),
    "outer": lambda x: x * jnp.arange(SIDE)[:, None] / SIDE,
    "stop_gradient": lambda x: x + lax.stop_gradient(x) / 2,
    # changes of layout
    "broadcast": lambda x: jnp.broadcast_to(x[:1], SHAPE),
    "concatenate": lambda x: jnp.concatenate([x[:, ::2], x[:, 1::2]], 1),
    "dynamic_slice": lambda x: lax.dynamic_slice(jnp.concatenate([x, x]), (3, 0), SHAPE),
    "gather": lambda x: x[ROWS],
    "pad": lambda x: jnp.pad(x, 1)[1:-1, :-2],
    "reshape": lambda x: x.reshape(4, 3, SIDE).swapaxes(0, 1).reshape(SHAPE),
    "rev": lambda x: x[::-1],
    "split": lambda x: jnp.concatenate(jnp.split(x, 3)[::-1]),
    "stack": lambda x: jnp.stack([x[0]] * SIDE),
    "squeeze": lambda x: x[:, None].squeeze(1),
    "tile": lambda x: jnp.tile(x[:4], (3, 1)),
    "transpose": lambda x: x.T,
    "barrier": lax.optimization_barrier,
    "named": lambda x: checkpoint_name(x, "value"),
    "copy": lambda x: jnp.array(x, copy=True),
    # matmuls
    "gram": lambda x: x @ x.T / SIDE,
}
BINARY = {
    "add": lambda x, y: 0.7 * (x + y),
    "sub": lambda x, y: 0.7 * (x - y),
    "mul": lambda x, y: jnp.tanh(x) * y,
    "product": lambda x, y: small(x) * small(y),
    "div": lambda x, y: x / positive(y),
    "atan2": lambda x, y: jnp.arctan2(x, positive(y)),
    "power": lambda x, y: positive(x) ** small(y),
    "where": lambda x, y: jnp.where(MASK, x, y),
    "join": lambda x, y: jnp.concatenate([x, y], 1)[:, ::2],
    "update": lambda x, y: x.at[1:5].set(y[:4]),
    "dynamic_update": lambda x, y: lax.dynamic_update_slice(x, y[:3], (2, 0)),
    "gate": lambda x, y: jax.nn.sigmoid(x) * y,
    "interpolate": lambda x, y: x + jax.nn.sigmoid(y) * (y - x),
    "average": lambda x, y: 0.99 * x + 0.01 * y,
    "tridiagonal": lambda x, y: lax.linalg.tridiagonal_solve(
        small(x)[0] / 4, 1 + small(x)[1] / 4, small(x)[2] / 4, y
    ),
    "betainc": lambda x, y: jax.scipy.special.betainc(2.0, 1.5, jax.nn.sigmoid(x)) * y,
    "recurrence": lambda x, y: lax.scan(
        lambda h, ab: (ab[0] * h + ab[1],) * 2,
        jnp.ones(SIDE),
        (jnp.exp(-0.01 * jax.nn.softplus(x)), 0.01 * y),
    )[1],
    # matmuls
    "matmul": lambda x, y: x @ y / 3,
    "matmul_transposed": lambda x, y: x @ jnp.tanh(y).T / 3,
    "einsum": lambda x, y: (
        jnp.einsum("abc,dbc->ad", x.reshape(SIDE, 3, 4), y.reshape(SIDE, 3, 4)) / 3
    ),
    "batched": lambda x, y: jnp.matmul(
        x.reshape(3, 4, SIDE), jnp.broadcast_to(y, (3, *SHAPE)) / 3
    ).reshape(SHAPE),
    "convolve": lambda x, y: lax.conv_general_dilated(
        x.reshape(1, 1, SIDE, SIDE), y[:3, :9].reshape(3, 1, 3, 3) / 3, (1, 1), "SAME"
    ).mean(1)[0],
    "layer": lambda x, y: jnp.tanh(x @ y + y[0]),
    "attention": lambda x, y: jax.nn.softmax(x @ y.T / 3) @ y,
    "attention_with_common_part": lambda x, y: jax.nn.softmax(x @ (y + 8).T / 3) @ (y + 8) / 3,
    "residual": lambda x, y: x + jnp.tanh(x @ y),
    "outer_product": lambda x, y: jnp.cos(3 * x[:, :1] @ y[:1]),
    "fourier": lambda x, y: jnp.sin(8 * x[:, :2] @ y[:2]),
    "short_kernel": lambda x, y: jnp.exp(-((x[:, :3] @ y[:3]) ** 2)),
    "wave_of_a_matmul": lambda x, y: jnp.sin(40 + x @ y),
    "ratio": lambda x, y: (100 * x @ y) / (400 + 100 * jnp.tanh(x @ y.T)),
}
ONCE = {
    "igamma": lambda x, y: jax.scipy.special.gammainc(positive(x), positive(y)),
    "igammac": lambda x, y: jax.scipy.special.gammaincc(positive(x), positive(y)),
    "ragged": lambda x, y: lax.ragged_dot(x, jnp.stack([y, y.T]) / 3, jnp.array([5, SIDE - 5])),
}
SCALAR = {
    "plus_tiny": lambda x, s: x / (positive(x) + s["tiny"] - 0.5),
    "ratio_to_tiny": lambda x, s: small(x) * (s["tiny"] / (s["tiny"] + 1e-12)),
    "over_huge": lambda x, s: x / s["huge"] * 1e5,
    "times_huge": lambda x, s: jnp.tanh(x * 1e-5 * s["huge"]),
    "times_near_one": lambda x, s: 100 * (x - s["near_one"] * x),
    "by_step": lambda x, s: x + s["step"] * jnp.tanh(x),
    "by_half": lambda x, s: s["half"] * x + (1 - s["half"]),
}
JUMPS = {
    "abs": jnp.abs,
    "relu": jax.nn.relu,
    "large_relu": lambda x: jax.nn.relu(1e5 * x) / 1e5,
    "clamp": lambda x: jnp.clip(x, -0.8, 0.8),
    "leaky": jax.nn.leaky_relu,
    "sort": lambda x: jnp.sort(x, 1),
    "cummax": lambda x: lax.cummax(x, 0),
    "cummin": lambda x: lax.cummin(x, 0),
    "reduce_max": lambda x: x - jnp.max(x, 1, keepdims=True),
    "reduce_min": lambda x: x - jnp.min(x, 0, keepdims=True),
    "top": lambda x: jnp.concatenate([lax.top_k(x, 6)[0]] * 2, 1),
    "max_pool": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"),
    "min_pool": lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 3), (1, 1), "SAME"),
    "sign": lambda x: x + jnp.sign(x) / 2,
    "floor": lambda x: x - jnp.floor(x),
    "ceil": lambda x: jnp.ceil(2 * x) / 2 + x,
    "round": lambda x: jnp.round(4 * x) / 4 + x,
    "rem": lambda x: lax.rem(3 * x, 1.0),
    "argmax": lambda x: x + jnp.eye(SIDE)[jnp.argmax(x, 1)],
    "argmin": lambda x: x[jnp.argmin(x, 0)],
    "compare": lambda x: jnp.where((x > 0.2) | (x <= -0.4), jnp.exp(-x), jnp.sin(x)),
    "equal": lambda x: jnp.where((x == 0) | (x != x) | ~jnp.isfinite(x), 1.0, x),
    "user_half": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
}
add_ops("unary", UNARY)
add_ops("binary", BINARY)
add_ops("binary", ONCE, derivatives=1)
add_ops("scalar", SCALAR)
add_ops("unary", JUMPS, jumps=True)
add_ops("binary", {"max": jnp.maximum, "min": jnp.minimum}, jumps=True)
SCATTERS = {
    "scatter_max": lambda x, y: x.at[ROWS].max(y),
    "scatter_min": lambda x, y: x.at[ROWS].min(y),
}
add_ops("binary", SCATTERS, jumps=True, derivatives=0)

MATMULS = ("matmul", "layer", "residual", "attention")

# ---- what holds programs ------------------------------------------------------------------------


def program(turns=1, **columns):
    def register(fun):
        OPS[fun.__name__] = Op(fun, "program", turns=turns, **columns)
        return fun

    return register


@program()
def jitted(f, x, y, s):
    return jax.jit(f)(x, y, s)


@program()
def rematerialized(f, x, y, s):
    return jax.checkpoint(f)(x, y, s)


@program(turns=2)
def mapped(f, x, y, s):
    return jax.vmap(f, (0, 0, None))(jnp.stack([x, y]), jnp.stack([y, x]), s).mean(0)


@program()
def conditional(f, x, y, s):
    return lax.cond(jnp.array(True), f, lambda x, y, s: jnp.exp(small(x)), x, y, s)


@program()
def switched(f, x, y, s):
    return lax.switch(1, [lambda x, y, s: jnp.sin(x), f, lambda x, y, s: x @ y], x, y, s)


@program(jumps=True)
def branching(f, x, y, s):
    return lax.cond(jnp.mean(x @ y) > 0, f, lambda x, y, s: jnp.tanh(x), x, y, s)


@program(turns=2)
def scanned(f, x, y, s):
    return lax.scan(lambda c, w: (jnp.tanh(f(c, w, s)), None), x, jnp.stack([y, y.T]))[0]


@program(turns=3)
def scanned_outputs(f, x, y, s):
    def step(c, _):
        c = jnp.tanh(f(c, y, s))
        return c, c[0]

    return lax.scan(step, x, None, length=3)[1].mean(0) + x


@program(turns=3)
def scanned_backwards(f, x, y, s):
    return lax.scan(lambda c, w: (c, f(w, y, s)), x, jnp.stack([x, y, y.T]), reverse=True)[1][0]


@program(turns=4)
def nested_scan(f, x, y, s):
    def outer(c, _):
        return lax.fori_loop(0, 2, lambda i, c: (c[1], jnp.tanh(f(c[0], y, s))), c), None

    return lax.scan(outer, (x, y), None, length=2)[0][1]


@program(turns=2)
def scan_of_remat(f, x, y, s):
    step = jax.checkpoint(lambda c, w: (c + jnp.tanh(f(c, w, s)), None))
    return lax.scan(step, x, jnp.stack([y, y.T]))[0]


@program(turns=2, derivatives=0)
def looped(f, x, y, s):
    step = lambda c: (c[0] + 1, jnp.tanh(f(c[1], y, s)))  # noqa: E731
    return lax.while_loop(lambda c: c[0] < 2, step, (0, x))[1]


@program(turns=4, derivatives=0, jumps=True)
def converging(f, x, y, s):
    step = lambda c: (c[0] + 1, 0.6 * jnp.tanh(f(c[1], y, s)))  # noqa: E731
    going = lambda c: (c[0] < 4) & (jnp.mean(jnp.abs(c[1])) > 0.3)  # noqa: E731
    return lax.while_loop(going, step, (0, x))[1]


@program(turns=3)
def unrolled(f, x, y, s):
    for _ in range(3):
        x = jnp.tanh(f(x, y, s))
    return x


@program(derivatives=0)
def ruled_vmap(f, x, y, s):
    g = jax.custom_batching.custom_vmap(f)
    g.def_vmap(lambda size, batched, x, y, s: (jax.vmap(f, (0, 0, None))(x, y, s), True))
    return jax.vmap(lambda x, y: g(x, y, s))(jnp.stack([x, y]), jnp.stack([y, x]))[0] + g(x, y, s)


@program(turns=2)
def differentiated(f, x, y, s):
    return jax.grad(lambda x: jnp.sum(jnp.tanh(f(x, y, s))))(x)


@program()
def ruled_jvp(f, x, y, s):
    @jax.custom_jvp
    def g(x, y, s):
        return f(x, y, s)

    g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
    return g(x, y, s)


@program()
def ruled_vjp(f, x, y, s):
    @jax.custom_vjp
    def g(x, y, s):
        return f(x, y, s)

    g.defvjp(lambda x, y, s: (f(x, y, s), (x, y, s)), lambda res, ct: jax.vjp(f, *res)[1](ct))
    return g(x, y, s)


# Running sums: sizes of the terms, and lengths. They are unrolled or in a loop, and have the same
# weights in each iteration or different ones.
SIZES = (1.0, 0.3, 0.1, 0.03, 1e-2, 3e-3, 1e-3, 1e-5)
WRITTEN, LOOPED = (1, 2, 3, 5, 12), (2, 5, 12, 40)


# Terms at least as large as this, with different weights, are blocks of a residual stream.
BLOCK = 0.3


def add_steps(size, length, in_a_loop, own):
    def fun(f, x, y, s, rounded=lambda x: x):
        move = lambda x, w: rounded(x + size * jnp.tanh(f(x, w, s)))  # noqa: E731
        weights = [jnp.roll(y, i, 1) for i in range(length)] if own else [y] * length
        if not in_a_loop:
            return functools.reduce(move, weights, x)
        if not own:
            return lax.fori_loop(0, length, lambda i, x: move(x, y), x)
        return lax.scan(lambda x, w: (move(x, w), None), x, jnp.stack(weights))[0]

    word = f"{'loop' if in_a_loop else 'write'} {length}{' own' if own else ''} steps of {size:g}"
    stream = fun if own and size >= BLOCK else None
    OPS[word] = Op(fun, "program", turns=length, stream=stream)


for _size, _own in itertools.product(SIZES, (False, True)):
    for _length in WRITTEN:
        add_steps(_size, _length, False, _own)
    for _length in LOOPED:
        add_steps(_size, _length, True, _own)
