"""Public faults of scans and norms: prefix sums, products, recurrences, and norms of trees."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from faults import BF16, F16, F32, Fault, normal
from flax import nnx

LENGTH, WIDTH, ROWS = 1024, 4, 8


# ---- products and prefix sums --------------------------------------------------------------------


def noise_levels(betas):
    return jnp.cumprod(1 - betas)  # <- here: alphas of diffusion


def noise_levels_wide(betas):
    return jnp.cumprod(1 - betas.astype(F32)).astype(betas.dtype)


def accepted(verdicts, x):
    return jnp.cumprod(x + verdicts.astype(x.dtype), -1)  # <- here: cumulative factors


def accepted_exactly(verdicts, x):
    """Products of zeros and ones are exact, and so are those of powers of two."""
    halves = jnp.cumprod(jnp.full(16, 0.5, x.dtype))
    return x * jnp.cumprod(verdicts.astype(x.dtype), -1) * halves[0]


def likelihood(p):
    return jax.lax.reduce_prod(p, (0,))  # <- here: likelihood


def likelihood_wide(p):
    return jax.lax.reduce_prod(p.astype(F32), (0,)).astype(p.dtype)


def prefix_sums(x):
    return jax.lax.associative_scan(jnp.add, x)  # <- here: mlx#3909


def prefix_sums_wide(x):
    return jax.lax.associative_scan(jnp.add, x.astype(F32)).astype(x.dtype)


def pairwise_sum(x):
    """Ten roundings of each term, and one result."""
    while len(x) > 1:
        x = x[::2] + x[1::2]
    return x[0]


def recurrence(a, x):
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]  # <- here: accelerated-scan#4

    return jax.vmap(lambda a, x: jax.lax.associative_scan(combine, (a, x))[1])(a, x)


def recurrence_wide(a, x):
    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    def one(a, x):
        return jax.lax.associative_scan(combine, (a.astype(F32), x.astype(F32)))[1]

    return jax.vmap(one)(a, x).astype(x.dtype)


def survival(hazards):
    @jax.jit
    def products(factors):
        return jax.lax.associative_scan(jnp.multiply, factors)  # <- here: survival

    return products(1 - hazards)


def survival_wide(hazards):
    logs = jnp.log1p(-hazards.astype(F32))
    return jnp.exp(jax.lax.associative_scan(jnp.add, logs)).astype(hazards.dtype)


def running_maxima(hazards):
    """A maximum rounds nothing."""
    return jax.lax.cummax(hazards), jax.lax.associative_scan(jnp.maximum, hazards)


class Recurrent(nn.Module):
    dtype: type = BF16

    @nn.compact
    def __call__(self, x):
        gates = nn.sigmoid(nn.Dense(WIDTH, dtype=BF16)(x)).astype(self.dtype)
        x = (1 - gates) * x.astype(self.dtype)

        def combine(left, right):
            (a, h), (b, g) = left, right
            return a * b, b * h + g  # <- here: gated recurrence

        return jax.lax.associative_scan(combine, (gates, x))[1].astype(BF16)


def of_module(module):
    @jax.checkpoint
    def loss(params, x):
        return jnp.mean(jnp.square(module.apply(params, x).astype(F32)))

    return lambda params, x: jax.value_and_grad(loss)(params, x)


def module_arguments():
    x = normal(LENGTH, WIDTH, dtype=BF16)
    return Recurrent().init(jax.random.key(0), x), x


# ---- norms of trees ------------------------------------------------------------------------------


def loss_of(params, x):
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return jnp.mean(jnp.square((hidden @ params["out"]).astype(F32)))


def params_of(dtype=BF16):
    kernels = {"in": normal(WIDTH, 64, dtype=dtype), "out": normal(64, WIDTH, dtype=dtype)}
    return {**kernels, "bias": jnp.zeros(64, dtype)}


def batch():
    return normal(ROWS, WIDTH, dtype=BF16)


CLIP = optax.clip_by_global_norm(1.0)


def clipped(params, x):
    grads = jax.grad(loss_of)(params, x)
    grads, _ = CLIP.update(grads, optax.EmptyState())  # <- here: maxtext#5143
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)


def clipped_wide(params, x):
    grads = jax.grad(loss_of)(params, x)
    norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(F32), grads))
    scale = (0.5 / jnp.maximum(norm, 1.0)).astype(BF16)
    return jax.tree.map(lambda p, g: p - scale * g, params, grads)


def reported(params, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    return {"loss": loss, "norm": optax.tree.norm(grads)}  # <- here: norm of a report


def reported_wide(params, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    wide = jax.tree.map(lambda g: g.astype(F32), grads)
    return {"loss": loss, "norm": optax.tree.norm(wide)}


def norm_of_norms(grads):
    norms = [jnp.linalg.norm(g.ravel()) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(n * n for n in norms))  # <- here: torchtitan#4135


def norm_of_norms_wide(grads):
    """Each norm is rounded once, and the sum of their squares is float32."""
    norms = [jnp.linalg.norm(g.ravel()) for g in jax.tree.leaves(grads)]
    return jnp.sqrt(sum(n.astype(F32) ** 2 for n in norms))


def by_dots(grads):
    squares = jax.tree.map(lambda g: jnp.vdot(g, g), grads)
    return jax.lax.rsqrt(jax.tree.reduce(jnp.add, squares))  # <- here: norm by dots


def by_dots_wide(grads):
    squares = jax.tree.map(lambda g: jnp.vdot(g, g, preferred_element_type=F32), grads)
    return jax.lax.rsqrt(jax.tree.reduce(jnp.add, squares))


def of_equinox(norm):
    def step(model, x):
        loss = lambda m: jnp.mean(jnp.square(jax.vmap(m)(x).astype(F32)))  # noqa: E731
        return norm(eqx.filter(eqx.filter_grad(loss)(model), eqx.is_array))

    return step


def equinox_model(dtype=BF16):
    model = eqx.nn.MLP(WIDTH, WIDTH, 64, 2, key=jax.random.key(0))
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_array(x) else x, model)


def by_leaves(tree):
    total = jnp.zeros((), BF16)
    for leaf in jax.tree.leaves(tree):
        total += jnp.sum(leaf**2)  # <- here: norm of a model
    return jnp.sqrt(total)


def by_leaves_wide(tree):
    total = jnp.zeros((), F32)
    for leaf in jax.tree.leaves(tree):
        total += jnp.sum(leaf**2, dtype=F32)
    return jnp.sqrt(total)


class Model(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(WIDTH, 64, dtype=BF16, param_dtype=BF16, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(64, WIDTH, dtype=BF16, param_dtype=BF16, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.second(jax.nn.relu(self.first(x)))


def clipped_by_hand(cast):
    def step(model, x):
        grads = nnx.grad(lambda m: jnp.mean(jnp.square(m(x).astype(F32))))(model)
        squares = [jnp.sum(jnp.square(cast(g))) for g in jax.tree.leaves(grads)]
        norm = jnp.sqrt(sum(squares))  # <- here: norm of a module
        return jax.tree.map(lambda g: g / jnp.maximum(norm, 1).astype(g.dtype), grads)

    return step


def normed(x):
    """A norm of one array: jnp.sum adds in float32, and rounds once."""
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


BETAS = np.linspace(1e-4, 0.02, 1000).astype(np.float32)

FAULTS = (
    Fault(
        "alphas of diffusion",
        "",
        "A product of 1000 factors near 1 is bfloat16.",
        "half-sum",
        noise_levels,
        noise_levels_wide,
        lambda: (jnp.asarray(BETAS, BF16),),
    ),
    Fault(
        "cumulative factors",
        "",
        "A cumulative product of 512 factors is bfloat16; one of zeros and ones is exact.",
        "half-sum",
        accepted,
        accepted_exactly,
        lambda: (normal(ROWS, 512) > 0, normal(ROWS, 512, dtype=BF16)),
    ),
    Fault(
        "likelihood",
        "",
        "A product of 3000 probabilities is float16.",
        "half-sum",
        likelihood,
        likelihood_wide,
        lambda: (jax.ShapeDtypeStruct((3000, 4), F16),),
    ),
    Fault(
        "mlx#3909",
        "ml-explore/mlx/pull/3909",
        "The running sums of a scan are bfloat16, and their neighbors become equal.",
        "half-sum",
        prefix_sums,
        pairwise_sum,
        lambda: (normal(LENGTH, dtype=BF16),),
    ),
    Fault(
        "running sums",
        "",
        "Running sums over 4096 entries are float16.",
        "half-sum",
        lambda x: jax.lax.associative_scan(jnp.add, x, axis=1),  # <- here: running sums
        prefix_sums_wide,
        lambda: (jax.ShapeDtypeStruct((2, 4096), F16),),
    ),
    Fault(
        "accelerated-scan#4",
        "proger/accelerated-scan/pull/4",
        "A linear recurrence multiplies up to 1024 decays in bfloat16.",
        "half-sum",
        recurrence,
        recurrence_wide,
        lambda: (normal(2, LENGTH, dtype=BF16), normal(2, LENGTH, dtype=BF16)),
    ),
    Fault(
        "survival",
        "",
        "A scan multiplies 4096 factors in float16, inside of a jit.",
        "half-sum",
        survival,
        survival_wide,
        lambda: (jnp.abs(normal(4096, dtype=F16, scale=1e-3)),),
    ),
    Fault(
        "gated recurrence",
        "",
        "A recurrent layer of 1024 steps runs as a scan in bfloat16.",
        "half-sum",
        of_module(Recurrent()),
        of_module(Recurrent(F32)),
        module_arguments,
    ),
    Fault(
        "maxtext#5143",
        "AI-Hypercomputer/maxtext/pull/5143",
        "Gradients in bfloat16 are clipped by a norm that is added up in bfloat16.",
        "half-norm",
        clipped,
        clipped_wide,
        lambda: (params_of(), batch()),
    ),
    Fault(
        "norm of a report",
        "",
        "The norm of bfloat16 gradients is reported in their dtype.",
        "half-norm",
        reported,
        reported_wide,
        lambda: (params_of(), batch()),
    ),
    Fault(
        "torchtitan#4135",
        "pytorch/torchtitan/pull/4135",
        "The squares of the norms of tensors are added up in bfloat16.",
        "half-norm",
        norm_of_norms,
        norm_of_norms_wide,
        lambda: (params_of(),),
    ),
    Fault(
        "norm by dots",
        "",
        "Each tensor's product with itself is rounded to bfloat16, and they are added there.",
        "half-norm",
        by_dots,
        by_dots_wide,
        lambda: (params_of(),),
    ),
    Fault(
        "norm of a model",
        "",
        "The norm of an Equinox model's gradients is a running sum in bfloat16.",
        "half-norm",
        of_equinox(by_leaves),
        of_equinox(by_leaves_wide),
        lambda: (equinox_model(), batch()),
    ),
    Fault(
        "norm of a module",
        "",
        "The norm of an NNX module's gradients is added up in bfloat16.",
        "half-norm",
        clipped_by_hand(lambda g: g),
        clipped_by_hand(lambda g: g.astype(F32)),
        lambda: (Model(), batch()),
    ),
)
CORRECT = (
    ("running maxima", running_maxima, lambda: (normal(LENGTH, dtype=BF16),)),
    ("a norm of one array", normed, lambda: (normal(ROWS, 512, dtype=BF16),)),
    ("prefix sums", prefix_sums_wide, lambda: (normal(LENGTH, dtype=BF16),)),
)
