"""Squared distances as a difference of norms and a product."""

import jax
import jax.numpy as jnp
import pairs
import pytest
from pairs import Pair, bf16, f32

import mpjax

HALF = jnp.bfloat16
ALGORITHM = jax.lax.DotAlgorithmPreset.BF16_BF16_F32


def wide(x):
    return x.astype(jnp.float32)


def norms(x):
    return jnp.sum(x * x, -1)


def product(x, y):
    return wide(x.astype(HALF) @ y.T.astype(HALF))


def by_roots(x, y):
    lengths = jnp.linalg.norm(x, axis=-1)[:, None] ** 2 + jnp.linalg.norm(y, axis=-1) ** 2
    return lengths - 2 * product(x, y)  # fault


def by_products(x, y):
    lengths = jnp.einsum("nd,nd->n", x, x)[:, None] + jnp.einsum("nd,nd->n", y, y)
    return jnp.exp(-(lengths - product(2 * x, y)))  # fault


def by_means(x, y):
    return jnp.mean(x**2, -1)[:, None] + jnp.mean(y**2, -1) - 2 * product(x, y) / 8  # fault


def negative(x, y):
    return jnp.argmax(2 * product(x, y) - norms(y), -1)  # fault


def of_one_set(x, y):
    lengths = norms(wide(x))
    return lengths[:, None] + lengths - 2 * product(x, x)  # fault


def of_rows(x, y):
    inner = jnp.einsum("nd,nd->n", x.astype(HALF), y.astype(HALF))
    return norms(x) + norms(y) - 2 * inner.astype(jnp.float32)  # fault


def by_algorithm(x, y):
    inner = jax.lax.dot(x, y.T, precision=ALGORITHM, preferred_element_type=jnp.float32)
    return norms(x)[:, None] + norms(y) - 2 * inner  # fault


@mpjax.autocast(policy="mixed_bfloat16")
def rounded_once_more(x, y):
    with mpjax.precision("bfloat16"):
        inner = 2 * x @ y.T
    return jnp.exp(inner - norms(x)[:, None] - norms(y))  # fault


@mpjax.autocast(policy="mixed_bfloat16")
def planned(x, y):
    return jax.lax.top_k(2 * x @ y.T - norms(x)[:, None] - norms(y), 3)  # fault


def exact(x, y):
    return norms(x)[:, None] + norms(y) - 2 * x @ y.T


RULE = "half-distance"
CASES = {
    fun.__name__: Pair(RULE, fun, exact, (f32(8, 8), f32(8, 8)))
    for fun in (by_roots, by_products, by_means, negative, of_one_set, of_rows, by_algorithm)
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_distances_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


@pytest.mark.parametrize("fun", [planned, rounded_once_more])
def test_what_autocast_plans_is_looked_at(fun):
    (found,) = mpjax.lint(fun)(f32(8, 8), f32(8, 8)).findings
    assert found.rule == RULE and found.source == pairs.marked_lines(fun)[0]


def rounded_points(x, y):
    inner = jnp.dot(x, y.T, preferred_element_type=jnp.float32)
    return norms(wide(x))[:, None] + norms(wide(y)) - 2 * inner


@mpjax.autocast(policy="mixed_bfloat16")
def diagonal(x, y):
    """The norms are sums of the same products, in float32."""
    points = jnp.concatenate([wide(x), wide(y)])
    products = points @ points.T
    own = jnp.diag(products)
    return own[:, None] + own - 2 * products


def differences(x, y):
    return jnp.sum((x[:, None] - y[None]) ** 2, -1)


def regularized(x, w):
    return jnp.mean(wide(x @ w)) - 1e-4 * jnp.sum(wide(w) ** 2)


def factorized(x, w):
    """A factorization machine: squares of sums, not the norms of what is multiplied."""
    return jnp.square(wide(x @ w)) - wide(jnp.square(x) @ jnp.square(w))


def similar(x, y):
    x = (wide(x) / jnp.linalg.norm(wide(x), axis=-1, keepdims=True)).astype(HALF)
    return 1 - wide(x @ y.T) + jnp.sum(wide(y) ** 2, -1)


@pytest.mark.parametrize(
    "fun", [rounded_points, diagonal, differences, regularized, factorized, similar]
)
def test_sums_that_do_not_cancel_or_are_exact_are_no_fault(fun):
    report = mpjax.lint(fun)(bf16(8, 8), bf16(8, 8))
    assert not report.findings, str(report)
