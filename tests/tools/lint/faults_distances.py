"""Faults of distances that are computed as a difference of norms and a 16-bit matmul."""

import equinox as eqx
import jax
import jax.numpy as jnp
from faults import BF16, F16, F32, Fault, normal
from flax import linen as nn

import mpjax

ROWS, CODES, WIDTH = 16, 8, 8
MEMBER = "class member"


def wide(x):
    return x.astype(F32)


def squares(x):
    return jnp.sum(jnp.square(x), -1)


def apart(x, y):
    """The distances without cancellation: of differences."""
    return squares(x[:, None] - y[None])


def pairwise(x, y):
    norms = squares(x)[:, None] + squares(y)[None]
    return jnp.sqrt(jnp.maximum(norms - 2 * x @ y.T, 0))  # <- here: pytorch#136748


def pairwise_apart(x, y):
    return jnp.sqrt(apart(wide(x), wide(y)))


def neighbors(x, y):
    inner = x.astype(F16) @ y.T.astype(F16)
    distances = squares(x)[:, None] + squares(y) - 2 * wide(inner)  # <- here: cuvs#991
    return jax.lax.top_k(-distances, 3)


def neighbors_wide(x, y):
    return jax.lax.top_k(-(squares(x)[:, None] + squares(y) - 2 * x @ y.T), 3)


class Quantizer(nn.Module):
    region: str

    @nn.compact
    def __call__(self, x):
        codes = self.param("codes", nn.initializers.normal(), (CODES, WIDTH))
        z = nn.Dense(WIDTH)(x)
        with mpjax.precision(self.region) if self.region else jax.named_scope("codes"):
            inner = z @ codes.T
            far = squares(z)[:, None] - 2 * inner + squares(codes)  # <- here: vector quantization
            nearest = jnp.argmin(far, -1)
        return jnp.mean(jnp.square(codes[nearest] - jax.lax.stop_gradient(z)))


def quantized(region):
    return mpjax.autocast(
        lambda params, x: Quantizer(region).apply(params, x), policy="mixed_bfloat16"
    )


def quantizer():
    x = normal(ROWS, WIDTH)
    return Quantizer("").init(jax.random.key(0), x), x


def clustered(points, centers):
    def turn(centers, _):
        scores = 2 * jnp.einsum("nd,kd->nk", points.astype(BF16), centers.astype(BF16))
        far = squares(centers) - wide(scores)  # <- here: k-means
        mine = jax.nn.one_hot(jnp.argmin(far, -1), CODES, dtype=F32)
        return mine.T @ points / jnp.maximum(mine.sum(0), 1)[:, None], None

    return jax.lax.scan(turn, centers, None, 5)[0]


def clustered_apart(points, centers):
    def turn(centers, _):
        mine = jax.nn.one_hot(jnp.argmin(apart(points, centers), -1), CODES, dtype=F32)
        return mine.T @ points / jnp.maximum(mine.sum(0), 1)[:, None], None

    return jax.lax.scan(turn, centers, None, 5)[0]


def kernel(x, y):
    inner = jnp.dot(x.astype(BF16), y.astype(BF16).T, preferred_element_type=F32)
    norms = jnp.sum(x * x, 1, keepdims=True) + jnp.sum(y * y, 1)
    far = norms + -2.0 * inner  # <- here: gpytorch#780
    return jnp.exp(-0.5 * far)


def kernel_of_rounded(x, y):
    """The points are rounded once, for all terms: the distances are those of rounded points."""
    x, y = x.astype(BF16), y.astype(BF16)
    inner = jnp.dot(x, y.T, preferred_element_type=F32)
    return jnp.exp(-0.5 * (squares(wide(x))[:, None] + squares(wide(y)) - 2 * inner))


def gram(x):
    products = x @ x.T
    own = jnp.diagonal(products)
    return jnp.mean(wide(own[:, None] + own[None] - 2 * products))  # <- here: thingsvision#175


def gram_wide(x):
    return jnp.mean(apart(wide(x), wide(x)))


def prototypes(table, x):
    """The half of a distance, from one row at a time."""

    def one(row):
        inner = table @ row
        return 0.5 * jnp.dot(row, row) + 0.5 * squares(table) - inner  # <- here: prototypes

    return jax.nn.softmax(-wide(jax.vmap(one)(x)))


def prototypes_wide(table, x):
    return jax.nn.softmax(-0.5 * apart(wide(x), wide(table)))


class Codes(eqx.Module):
    codes: jax.Array

    def __call__(self, row):
        near = jnp.dot((2 * row).astype(BF16), self.codes.T.astype(BF16))
        return jnp.argmin(squares(self.codes) - near)  # <- here: codebook


class ExactCodes(Codes):
    def __call__(self, row):
        return jnp.argmin(squares(self.codes - row))


def of_means(shots, x):
    """The logits of a linear head whose rows are twice the means of classes."""
    means = shots.mean(1)
    head, bias = 2 * means, -squares(means)
    return jax.nn.log_softmax(wide(x @ head.T + bias))  # <- here: means


def of_means_wide(shots, x):
    return jax.nn.log_softmax(-apart(wide(x), wide(shots).mean(1)))


RULE = "half-distance"
CANCELS = "A distance is the difference of terms as large as the norms, one of them in 16 bits."


def two(dtype):
    return lambda: (normal(ROWS, WIDTH, dtype=dtype), normal(CODES, WIDTH, dtype=dtype, seed=1))


FAULTS = (
    Fault(
        *("pytorch#136748", "pytorch/pytorch/issues/136748", CANCELS, RULE),
        *(pairwise, pairwise_apart, two(F16)),
    ),
    Fault(
        *("cuvs#991", "NVIDIA/cuvs/issues/991", CANCELS, RULE),
        *(neighbors, neighbors_wide, two(F32)),
    ),
    Fault(
        *("vector quantization", MEMBER, CANCELS, RULE),
        *(quantized(""), quantized("float32"), quantizer),
        argnums=0,
    ),
    Fault("k-means", MEMBER, CANCELS, RULE, clustered, clustered_apart, two(F32)),
    Fault(
        *("gpytorch#780", "cornellius-gp/gpytorch/issues/780", CANCELS, RULE),
        *(kernel, kernel_of_rounded, two(F32)),
    ),
    Fault(
        *("thingsvision#175", "ViCCo-Group/thingsvision/pull/175", CANCELS, RULE, gram, gram_wide),
        lambda: (normal(ROWS, WIDTH, dtype=BF16),),
    ),
    Fault(
        *("prototypes", MEMBER, CANCELS, RULE, prototypes, prototypes_wide),
        lambda: two(BF16)()[::-1],
    ),
    Fault(
        *("codebook", MEMBER, CANCELS, RULE),
        lambda codes, x: jax.vmap(Codes(codes))(x),
        lambda codes, x: jax.vmap(ExactCodes(codes))(x),
        lambda: two(F32)()[::-1],
    ),
    Fault(
        *("means", MEMBER, CANCELS, RULE, of_means, of_means_wide),
        lambda: (normal(CODES, 5, WIDTH, dtype=BF16), normal(ROWS, WIDTH, dtype=BF16)),
    ),
)
