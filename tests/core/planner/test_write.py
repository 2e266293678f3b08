"""The written program: each value once in each dtype that is read, casts where they are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from joint import EXACT, planned
from support import matmul_dtypes, normal

from mpjax._src.core.base import _jax
from mpjax._src.core.planner.write import written

X, W = normal(0, 4, 32), normal(1, 32, 32)
HALF = np.dtype(jnp.bfloat16)


def write(fun, *args, halved_in=None, halved_out=(False,), half=HALF, **options):
    program = jax.make_jaxpr(fun)(*args)
    halved_in = halved_in or [False] * len(args)
    return written(program, half, halved_in, halved_out, halved_out, **options)


def casts(program):
    eqns = _jax.open_jaxpr(program)[0].eqns
    return [e.outvars[0].aval.str_short() for e in eqns if e.primitive.name[:7] == "convert"]


def test_a_value_is_cast_once_for_all_its_readers():
    program = write(lambda x, w: x @ w + (x @ w.T) + x, X, W)
    assert casts(program).count("bfloat16[4,32]") == 1
    assert casts(program).count("bfloat16[32,32]") == 1


def test_what_a_matmul_made_goes_to_the_next_as_it_is():
    program = write(lambda x, w: jnp.maximum(x @ w, 0)[::-1] @ w, X, W, halved_out=(True,))
    assert casts(program) == ["bfloat16[4,32]", "bfloat16[32,32]"]


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_no_compiler_skips_the_rounding_of_a_result(half):
    """XLA skips casts to 16 bits and back. What is kept would be another number than what is read.

    Some of the numbers are below the normal ones of float16.
    """
    x, w = (1e-3 * normal(seed, 32, 32) for seed in (3, 4))
    program = write(
        lambda x, w: (x @ w, 1.5 * (x @ w)), x, w, halved_out=(True, False), half=np.dtype(half)
    )
    made, read = jax.jit(lambda *args: _jax.eval_closed(program, *args))(x, w)
    np.testing.assert_array_equal(1.5 * np.asarray(made, np.float32), read)


def test_exact_mode_writes_no_cast():
    assert not casts(write(lambda x, w: jax.nn.relu(x @ w) @ w, X, W, half=EXACT))


def test_passed_in_16_bits():
    program = write(lambda x, w: (x @ w, x), X, W, halved_in=[True, True], halved_out=(True, True))
    assert not casts(program)
    assert [aval.dtype for aval in _jax.in_avals(program)] == [HALF, HALF]
    # An argument that is returned in the other form, without any equation between.
    names = [e.primitive.name for e in write(lambda x: (x,), X, halved_in=[True]).eqns]
    assert names == ["reduce_precision", "convert_element_type"]


@pytest.mark.parametrize("slices", ["of an array", "made", "in 16 bits"])
def test_slices_and_constants_enter_a_loop_in_16_bits(slices):
    """A turn copies its slice of an array, and casts the copy: the array has no copy of its own."""

    def fun(x, w):
        x = jnp.tanh(x) if slices == "made" else x
        return lax.scan(lambda c, r: (c + jnp.sum(r @ w), r @ w), 0.0, x)

    low = [slices == "in 16 bits", False]
    program = write(fun, X, W, halved_in=low, halved_out=(False, True), outermost=True)
    (loop,) = [e for e in program.eqns if e.primitive.name == "scan"]
    assert [v.aval.str_short() for v in loop.invars] == [
        "bfloat16[32,32]",
        "float32[]",
        "float32[4,32]" if slices == "of an array" else "bfloat16[4,32]",
    ]
    assert [v.aval.str_short() for v in loop.outvars] == ["float32[]", "bfloat16[4,32]"]


@pytest.mark.parametrize("precision", [None, "highest"])
def test_a_precision_of_its_own_stays_float32(precision):
    fun = planned(lambda x, w: jnp.dot(x, w, precision=precision))
    expected = "float32" if precision else "bfloat16"
    assert {d for pair in matmul_dtypes(fun, X, W) for d in pair} == {expected}


def test_the_user_s_casts_of_16_bit_numbers_are_left_out():
    def fun(x, w):
        y = (x @ w).astype(HALF)  # as a kernel that wants 16 bits
        return jnp.maximum(y.astype("float32"), 0) @ w, y

    program = write(fun, X, W, halved_in=[True, True], halved_out=(True, False))
    assert not casts(program)
    x, w = jnp.asarray(X, HALF), jnp.asarray(W, HALF)
    np.testing.assert_array_equal(_jax.eval_closed(program, x, w)[1], x @ w)
