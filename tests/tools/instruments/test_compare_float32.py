"""Compare measures an operation against its float32 form, or says that there is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from support import normal

import mpjax
from mpjax._src.core.base.lines import short

W, X = normal(0, 8, 8, scale=0.3), normal(1, 4, 8)
MANY = jnp.ones(3000, jnp.bfloat16)


def compared(fun, *args):
    return mpjax.compare(fun, "mixed_bfloat16", argnums=None)(*args)


def added(x):
    return jnp.zeros(2, x.dtype).at[jnp.zeros(len(x), int)].add(x)


SUMS = {
    "scatter-add": added,
    "scatter-mul": lambda x: jnp.ones(2, x.dtype).at[jnp.zeros(len(x), int)].mul(1 + x / 2**9),
    "reduce": lambda x: lax.reduce(
        x / 3, x.dtype.type(0), lambda a, b: lax.sqrt(a * a + b * b), (0,)
    ),
    "reduce_window": lambda x: lax.reduce_window(
        x / 3, x.dtype.type(0), lambda a, b: lax.sqrt(a * a + b * b), (7,), (7,), "VALID"
    ),
    "composite": lambda x: lax.composite(lambda x: jnp.sin(x / 3) / 3, name="a.b")(x),
    "custom_linear_solve": lambda x: lax.custom_linear_solve(
        lambda x: 3 * x, x, lambda _, b: b / 3
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_compare_measures_operations_that_round_inside_against_float32(name):
    """Each rounds inside, and was held against itself: an error of 0."""
    found = compared(SUMS[name], MANY)
    (row,) = [row for row in found.rows if row.primitive == name]
    want = SUMS[name](MANY.astype(jnp.float32))
    got = jax.jit(SUMS[name])(MANY).astype(jnp.float32)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    assert error > 1e-3 and row.compared
    np.testing.assert_allclose(row.error, error, rtol=0.05)


def kernel(x):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def called(x):
    return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@pytest.mark.parametrize(("fun", "name"), [(kernel, "pallas_call"), (called, "pure_callback")])
def test_compare_names_operations_without_a_float32_form(fun, name):
    found = compared(lambda w, x: fun((x @ w).astype(jnp.bfloat16)) + 1, W, X)
    (row,) = [row for row in found.rows if row.primitive == name]
    assert not row.compared and row.error == row.added == 0
    assert all(other.compared for other in found.rows if other is not row)
    line = f"no float32 form, so its own error is unknown: {name} {short(row.source)}"
    assert line in " ".join(str(found).split()) and "test_compare_float32.py:" in row.source
    assert "no float32 form" not in str(compared(lambda w, x: x @ w, W, X))


def fails_in_float32(x):
    if x.dtype == jnp.float32:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    return x


narrow_p = Primitive("narrow")
narrow_p.def_impl(fails_in_float32)
narrow_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(narrow_p, lambda ctx, x: [x])


def test_compare_raises_a_failure_of_another_kind():
    with pytest.raises(RuntimeError, match="out of memory"):
        compared(lambda x: narrow_p.bind(x.astype(jnp.bfloat16)), X)


def test_compare_runs_effects_once(capsys):
    def fun(w, x):
        h = (x @ w).astype(jnp.bfloat16)
        jax.debug.print("seen {}", h[0, 0])
        return h

    compared(fun, W, X)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("seen") == 1
