"""A program for each primitive of `mpjax._src.core.base.rules`, for the tests of that table.

A key is the name of a primitive; if a primitive has two cases, a second word tells them apart.
For each column the quick tier tries one primitive of each kind, the thorough tier all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import primitives
from jax.lax import linalg
from jax.scipy.linalg import qr_multiply
from jax.sharding import NamedSharding, PartitionSpec
from support import equations, thorough_but

from mpjax._src.core.base import _jax, rules

BFLOAT16, FLOAT16 = jnp.dtype("bfloat16"), jnp.dtype("float16")
LARGEST, SMALLEST = 65504.0, 2.0**-24  # in float16
NEWER = jax.__version_info__ >= (0, 12)


def rule(key):
    """Returns the row of a case's primitive."""
    return rules.rule_of(key.split()[0])


# What takes half a second to compile.
SLOW = ("igamma", "igammac", "igamma_grad_a", "regularized_incomplete_beta")
SLOW += ("cholesky_update", "random_gamma")


def one_of_each(keys, column, trait=None):
    """Returns parameters: the first key of each kind is quick, unless it is slow.

    Of one kind are rows with the same need, the same value in a column, and a trait or not.
    """
    first = {}
    for key in (keys := [*keys]):
        row = rule(key)
        if key not in SLOW:
            first.setdefault((row.need, getattr(row, column), trait in row.traits), key)
    return thorough_but(keys, *first.values())


# ---- elementwise --------------------------------------------------------------------------------


def _of_lax(names):
    """Returns functions of `jax.lax` by name, leaving out names that this version lacks."""
    return {name: getattr(lax, name) for name in names.split() if hasattr(lax, name)}


UNARY = _of_lax(
    "neg abs sign floor ceil round sqrt cbrt tanh logistic erf atan asinh rsqrt square exp exp2 "
    "expm1 sinh cosh log log1p log2 sin cos tan asin acos acosh atanh erf_inv erfc lgamma digamma "
    "bessel_i0e bessel_i1e"
)


def _power(y):
    return lambda x: lax.integer_pow(x, y)


UNARY |= {f"integer_pow {y}": _power(y) for y in (-4, -1, 3, 4, 5, 20, 1000)}


def _of_tanh(x):
    """Binds the primitive with which newer versions differentiate tanh: ``1 - x * x``."""
    jaxpr = jax.make_jaxpr(lambda x, t: jax.jvp(jnp.tanh, (x,), (t,))[1])(x, x)
    (eqn,) = [e for e in equations(jaxpr) if e.primitive.name == "one_minus_square"]
    return eqn.primitive.bind(x, **eqn.params)


UNARY |= {"one_minus_square": _of_tanh} if NEWER else {}
MULTIPLE = {
    **_of_lax("add sub mul div rem max min pow atan2"),
    "add_any": primitives.add_jaxvals_p.bind,
    "clamp": lax.clamp,
    **_of_lax("igamma igammac igamma_grad_a polygamma zeta"),
    "regularized_incomplete_beta": primitives.regularized_incomplete_beta_p.bind,
}
ELEMENTWISE = {**UNARY, **MULTIPLE}
OPERANDS = {**dict.fromkeys(UNARY, 1), **dict.fromkeys(MULTIPLE, 2)}
OPERANDS |= {"clamp": 3, "regularized_incomplete_beta": 3}


def halves(*dtypes):
    """Returns every finite value of the given half dtypes as float64."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signaling NaNs
        values = [bits.view(d).astype(np.float64) for d in dtypes or (BFLOAT16, FLOAT16)]
    return np.unique(np.concatenate([x[np.isfinite(x)] for x in values]))


def some_halves(count):
    """Returns points of ``count`` operands: extreme, near one, and of magnitudes between."""
    near = 2.0 ** -np.arange(1.0, 12)
    sizes = np.concatenate(
        [
            2.0 ** np.arange(-126, 127, 12),
            2.0 ** np.arange(-24, 18, 2),
            1 + near,
            1 - near,
        ]
    )
    sizes = np.unique([*sizes, SMALLEST, LARGEST, float(jnp.finfo(BFLOAT16).max)])
    points = np.concatenate([-sizes, sizes])
    if count == 2:
        return np.stack(np.meshgrid(points, points)).reshape(2, -1)
    return np.random.default_rng(0).choice(points[np.abs(points) <= LARGEST], (count, 30000))


# ---- all others ---------------------------------------------------------------------------------


def draw(*shape):
    """Returns positive numbers, all different. They are always the same."""
    size = int(np.prod(shape))
    order = np.random.default_rng(size).permutation(size)
    return (0.5 + order / max(size, 1)).reshape(shape).astype(np.float32)


def _positive_definite(n):
    a = draw(n, n)
    return a @ a.T + np.eye(n, dtype=np.float32)


def window(primitive):
    ones = {"base_dilation": (1,), "window_dilation": (1,), "window_strides": (1,)}
    whole = {"window_dimensions": (3,), "padding": ((1, 1),), **ones}
    return lambda x: primitive.bind(x, **whole)


def over_rows(reduce):
    return lambda x: reduce(x, (0,))


TWICE = np.array([[1], [1]], np.int32)
ONCE = np.array([[1], [2]], np.int32)


def scatter(fun, indices=TWICE):
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    unique = indices is ONCE
    return lambda x, updates: fun(x, indices, updates, numbers, unique_indices=unique)


def gather(x):
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))
    return lax.gather(x, np.array([[1], [2], [2]], np.int32), numbers, (1,))


def pool(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (3,), (1,), "VALID")


CASES = {
    # matrix units
    "dot_general": (jnp.matmul, draw(3, 4), draw(4, 5)),
    "ragged_dot_general": (
        lambda a, b: lax.ragged_dot(a, b, np.array([1, 2], np.int32)),
        *(draw(3, 4), draw(2, 4, 5)),
    ),
    "conv_general_dilated": (
        lambda a, b: lax.conv_general_dilated(a, b, (1,), "SAME"),
        *(draw(1, 2, 5), draw(3, 2, 3)),
    ),
    # sums and products over many
    "reduce_sum": (over_rows(lax.reduce_sum), draw(3, 4)),
    "reduce_prod": (over_rows(lax.reduce_prod), draw(3, 4)),
    "reduce_window_sum": (window(primitives.reduce_window_sum_p), draw(5)),
    "cumsum": (lax.cumsum, draw(5)),
    "cumprod": (lax.cumprod, draw(5)),
    "cumlogsumexp": (lax.cumlogsumexp, draw(5)),
    "select_and_scatter_add": (lambda x, ct: jax.vjp(pool, x)[1](ct)[0], draw(5), draw(3)),
    "scatter-add": (scatter(lax.scatter_add), draw(5), draw(2)),
    "scatter-sub": (scatter(lax.scatter_sub), draw(5), draw(2)),
    "scatter-mul": (scatter(lax.scatter_mul, ONCE), draw(5), draw(2)),
    "fft": (lambda x: jnp.fft.rfft(x), draw(8)),
    # linear algebra
    "cholesky": (linalg.cholesky_p.bind, _positive_definite(3)),
    "cholesky_update": (linalg.cholesky_update_p.bind, np.triu(draw(3, 3)), draw(3)),
    "eig": (lambda x: linalg.eig(x, compute_left_eigenvectors=False), draw(3, 3)),
    "eigh": (lambda x: linalg.eigh(x, symmetrize_input=False), _positive_definite(3)),
    "geqrf": (lambda x: qr_multiply(x, np.eye(len(x), dtype=x.dtype)), draw(3, 3)),
    "hessenberg": (linalg.hessenberg, draw(3, 3)),
    "householder_product": (linalg.householder_product, draw(3, 3), draw(3)),
    "lu": (linalg.lu, draw(3, 3)),
    "ormqr": (linalg.ormqr, draw(3, 3), draw(3), draw(3, 3)),
    "qr": (lambda x: linalg.qr(x, full_matrices=False), draw(3, 3)),
    "schur": (linalg.schur, draw(3, 3)),
    "svd": (lambda x: linalg.svd(x, full_matrices=False), draw(3, 3)),
    "symmetric_product": (
        lambda a, c: linalg.symmetric_product(a, c, symmetrize_output=False),
        *(draw(3, 3), draw(3, 3)),
    ),
    "tridiagonal": (lambda x: linalg.tridiagonal(x, lower=True), _positive_definite(3)),
    "tridiagonal_solve": (linalg.tridiagonal_solve, draw(3), draw(3) + 3, draw(3), draw(3, 1)),
    "triangular_solve": (
        lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
        *(np.tril(draw(3, 3)), draw(3, 2)),
    ),
    # moves
    "copy": (primitives.copy_p.bind, draw(4)),
    "reshape": (lambda x: lax.reshape(x, (6,)), draw(2, 3)),
    "squeeze": (lambda x: lax.squeeze(x, (0,)), draw(1, 3)),
    "transpose": (lambda x: lax.transpose(x, (1, 0)), draw(2, 3)),
    "stop_gradient": (primitives.stop_gradient_p.bind, draw(4)),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (4, 3), (1,)), draw(3)),
    "reduce_max": (over_rows(lax.reduce_max), draw(3, 4)),
    "reduce_min": (over_rows(lax.reduce_min), draw(3, 4)),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (np.int32(1),), (2,)), draw(5)),
    "optimization_barrier": (lax.optimization_barrier, draw(5)),
    "rev": (lambda x: lax.rev(x, (0,)), draw(5)),
    "slice": (lambda x: lax.slice(x, (1,), (3,)), draw(5)),
    "split": (lambda x: lax.split(x, (2, 3)), draw(5)),
    "unstack": (jnp.unstack, draw(2, 3)),
    "gather": (gather, draw(5)),
    "tile": (lambda x: lax.tile(x, (2,)), draw(5)),
    "concatenate": (lambda a, b: lax.concatenate([a, b], 0), draw(5), draw(3)),
    "stack": (lambda a, b: jnp.stack([a, b]), draw(5), draw(5)),
    "dynamic_update_slice": (
        lambda a, b: lax.dynamic_update_slice(a, b, (np.int32(1),)),
        *(draw(5), draw(3)),
    ),
    "scatter": (scatter(lax.scatter, ONCE), draw(5), draw(2)),
    "name": (lambda x: checkpoint_name(x, "x"), draw(5)),
    "pad": (lambda x: lax.pad(x, np.zeros((), x.dtype), ((1, 1, 0),)), draw(5)),
    "sort": (lax.sort, draw(5)),
    "top_k": (lambda x: lax.top_k(x, 2), draw(5)),
    "cummax": (lax.cummax, draw(5)),
    "cummin": (lax.cummin, draw(5)),
    "reduce_window_max": (window(primitives.reduce_window_max_p), draw(5)),
    "reduce_window_min": (window(primitives.reduce_window_min_p), draw(5)),
    "select_n": (lambda a, b: lax.select_n(np.arange(4) % 2 == 0, a, b), draw(4), draw(4)),
    "convert_element_type": (lambda x: lax.convert_element_type(x, BFLOAT16), draw(4)),
    # no floats out or in; and primitives with only a trait
    **{name: (fun, draw(4), draw(4)) for name, fun in _of_lax("eq ge gt le lt ne").items()},
    "is_finite": (lax.is_finite, draw(4)),
    "argmax": (lambda x: lax.argmax(x, 0, np.int32), draw(4)),
    "argmin": (lambda x: lax.argmin(x, 0, np.int32), draw(4)),
    "random_gamma": (lambda x: jax.random.loggamma(jax.random.key(0), x), draw(4)),
    "rng_uniform": (lambda a, b: lax.rng_uniform(a, b, (1000,)), np.float32(0), np.float32(1)),
    "bitcast_convert_type": (lambda x: lax.bitcast_convert_type(x, np.int32), draw(4)),
    "complex": (lax.complex, draw(4), draw(4)),
    "geqp3": (lambda x: qr_multiply(x, np.eye(len(x), dtype=x.dtype), pivoting=True), draw(3, 3)),
    "reduce": (lambda x: lax.reduce(x, np.float32(0), lambda a, b: a * b + a, (0,)), draw(4)),
    "reduce_window": (
        lambda x: lax.reduce_window(x, np.float32(0), lambda a, b: a * b + a, (3,), (1,), "SAME"),
        draw(4),
    ),
    "scatter-max": (scatter(lax.scatter_max), draw(5), draw(2)),
    "scatter-min": (scatter(lax.scatter_min), draw(5), draw(2)),
}

# ---- over two devices ---------------------------------------------------------------------------

MESH = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
SPLIT, WHOLE = PartitionSpec("d"), PartitionSpec()


def sharded(fun, given=SPLIT, result=SPLIT, **options):
    return jax.shard_map(
        lambda x: fun(x, "d"), mesh=MESH, in_specs=given, out_specs=result, **options
    )


COLLECTIVES = {
    "psum": sharded(lax.psum, SPLIT, WHOLE, check_vma=False),
    "psum_invariant": sharded(lax.psum, SPLIT, WHOLE),
    "pmax": sharded(lax.pmax, SPLIT, WHOLE),
    "pmin": sharded(lax.pmin, SPLIT, WHOLE),
    "all_gather": sharded(functools.partial(lax.all_gather, tiled=True)),
    "all_to_all": sharded(lambda x, d: lax.all_to_all(x, d, 0, 0)),
    "ppermute": sharded(lambda x, d: lax.ppermute(x, d, [(0, 1), (1, 0)])),
    "reduce_scatter": sharded(functools.partial(lax.psum_scatter, tiled=True)),
    "pvary": sharded(lambda x, d: lax.pcast(x, d, to="varying"), WHOLE),
}
CASES |= {name: (fun, draw(4)) for name, fun in COLLECTIVES.items()}
CASES["sharding_constraint"] = (
    lambda x: lax.with_sharding_constraint(x, NamedSharding(MESH, SPLIT)),
    draw(4),
)

# Primitives that are not run here, with the reasons.
UNTRIED = {
    **dict.fromkeys(["and", "not", "or", "iota"], "no float operand"),
    **dict.fromkeys([*_jax.BARRIERS, "linear_recurrence", "rounded", "carrier", "carried"], "ours"),
    **dict.fromkeys(["layout_constraint", "reshard"], "needs a mesh of explicit axes, or a layout"),
    "pbroadcast": "has no lowering for a CPU",
    **dict.fromkeys(["all_gather_invariant", "all_gather_reduced", "unreduced_psum"], "not public"),
    **dict.fromkeys(["vary_unreduced_cast", "vary_unreduced_cast_p"], "not public"),
}


def case(key):
    """Returns a function that does little more than bind the primitive, and its operands."""
    if key in ELEMENTWISE:
        return ELEMENTWISE[key], *[draw(4) + 1.0 * (key == "acosh")] * OPERANDS[key]
    return CASES[key]


def equation(key):
    """Returns the equation that binds the primitive of a case."""
    fun, *args = case(key)
    traced = jax.make_jaxpr(fun)(*args)
    return next(e for e in equations(traced) if e.primitive.name == key.split()[0])


def bind(eqn, operands):
    """Binds an equation's primitive to other operands; returns a list."""
    outs = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]
