"""The dtypes in which operations compute, and in which their results are stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from planned import VECTOR, H, V, W, analyzed, choice, op, said, stored

import mpjax

BF16, F16, F32 = (np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32))
CONV = jnp.ones((3, 3, 2, 2))
IMAGE = jnp.ones((1, 8, 8, 2))


def conv(x):
    return lax.conv_general_dilated(
        x, CONV, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def total(x):
    """A reader that computes in float32, amplifies nothing, and hands nothing out."""
    return jnp.sum(x) > 0


def decided(name, fun, *args, **options):
    return op(analyzed(fun, *(args or (H,)), **options), name)


def listed(**lists):
    return mpjax.get_policy("mixed_bfloat16").with_ops(**lists)


# The operation, and what its result is stored in (the dtype), as the plan of mixed_bfloat16.
MATMULS = {
    "for a matmul": (lambda h: (h @ W) @ V, BF16),
    "for a float32 reader that amplifies nothing": (lambda h: total(h @ W), BF16),
    "for one that amplifies": (lambda h: total(jnp.exp(h @ W)), F32),
    "for that and a matmul": (lambda h: (total(jnp.exp(h @ W)), (h @ W) @ V), F32),
    "handed out": (lambda h: h @ W, F32),
    "for a float32 carry": (
        lambda h: lax.scan(lambda c, _: (c + h @ W, None), h, None, length=9)[0],
        F32,
    ),
}


@pytest.mark.parametrize("name", MATMULS)
def test_a_matmul_gives_float32_to_those_who_need_it(name):
    fun, dtype = MATMULS[name]
    block = analyzed(fun, H)
    matmul = op(block, "dot_general", 0)
    assert choice(matmul).compute == BF16
    assert stored(matmul.outs[0]).dtype == dtype
    assert stored(matmul.outs[0]).kind == ("full" if dtype == F32 else "half")
    assert ("float32 result" in said(matmul)) == (dtype == F32)


@pytest.mark.parametrize(
    "ranks",
    [
        lambda scores: jnp.argmax(scores, -1),
        lambda scores: lax.top_k(scores, 2)[1],
        lambda scores: jnp.argsort(scores, -1),
        lambda scores: jnp.argmax(jnp.tanh(scores + 0.5).reshape(2, -1), -1),
        lambda scores: jnp.sqrt(1 - jax.nn.sigmoid(scores)) > 0.1,
    ],
)
def test_ranked_matmul_result_is_float32_where_far_smaller_than_operands(ranks):
    def matmul(rows, depth, columns):
        args = jnp.ones((rows, depth)), jnp.ones((depth, columns))
        return stored(decided("dot_general", lambda x, w: ranks(x @ w), *args).outs[0]).dtype

    assert matmul(8, 512, 8) == F32  # a router
    assert matmul(4, 128, 4096) == F32  # a token's logits
    assert matmul(512, 128, 512) == BF16


def test_a_convolution_has_no_float32_result():
    """Compilers have none; what it gives is float32 in the program, and half in the plan."""
    assert (
        stored(decided("conv_general_dilated", lambda x: jnp.exp(conv(x)), IMAGE).outs[0]).dtype
        == BF16
    )


def test_a_matmul_of_a_tangent_gives_half():
    """So that its transpose gets a half cotangent."""
    fun = lambda h: jnp.exp(h @ W)  # noqa: E731
    assert stored(decided("dot_general", fun).outs[0]).dtype == F32
    assert stored(decided("dot_general", fun, linear=(0,)).outs[0]).dtype == BF16


def test_half_list_makes_results_half():
    fun = lambda h: jnp.exp(h @ W)  # noqa: E731
    assert (
        stored(decided("dot_general", fun, policy=listed(half="dot_general")).outs[0]).dtype == BF16
    )
    exp = decided("exp", lambda h: jnp.exp(h @ W) @ V, policy=listed(half="exp"))
    assert choice(exp).compute == BF16 and stored(exp.outs[0]).dtype == BF16


def test_a_float32_result_of_half_operands_is_kept():
    half = jnp.ones((8, 8), jnp.bfloat16)

    def fun(a, wide):
        return lax.dot(a, a, preferred_element_type=jnp.float32 if wide else None) @ a

    matmul = op(analyzed(lambda a: fun(a, True).astype(jnp.bfloat16), half), "dot_general", 0)
    assert stored(matmul.outs[0]).dtype == F32
    mixed = op(
        analyzed(lambda a: total(lax.dot(a, W, preferred_element_type=jnp.float32)), H),
        "dot_general",
        0,
    )
    assert stored(mixed.outs[0]).dtype == BF16


# A float32 result: is it rounded for storage? In bfloat16, in float16.
STORED = {
    "read twice, once by a matmul": (lambda e: (e @ V, total(e)), jnp.square, True, False),
    "of ordinary size": (lambda e: (e @ V, total(e)), lambda h: jnp.log(jnp.tanh(h)), True, True),
    "read once, by a matmul": (lambda e: e @ V, jnp.square, False, False),
    "read twice, by float32": (lambda e: (total(e), jnp.exp(e)), jnp.square, False, False),
    "amplified": (lambda e: (e @ V, jnp.exp(e)), lambda h: jnp.log(jnp.tanh(h)), False, False),
    "before a relu": (lambda e: jnp.maximum(e, 0) @ V, lambda h: jnp.log(jnp.tanh(h)), True, True),
    "small": (
        lambda e: (total(e), (jnp.zeros_like(H) + e) @ V),
        lambda h: jnp.sum(jnp.tanh(h), -1, keepdims=True) * 1.5,
        False,
        False,
    ),
    "one number": (
        lambda e: (e @ jnp.ones((1, 3)), total(e)),
        lambda h: jnp.sin(h[:1, :1]),
        False,
        False,
    ),
    "a sum with a small step": (
        lambda e: (e @ V, total(e)),
        lambda h: h + 0.1 * (h @ W),
        False,
        False,
    ),
}


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_which_float32_results_are_rounded_for_storage(name, half):
    reader, make, *rounded = STORED[name]

    def fun(h):
        with jax.named_scope("here"):
            value = make(h @ W)
        return reader(value)

    block = analyzed(fun, H, policy=f"mixed_{half}")
    made = [o for o in block.ops if "here" in o.scopes][-1]
    assert choice(made).compute == F32
    value = made.outs[0]
    assert stored(value).rounded == rounded[half == "float16"]
    assert stored(value).dtype == (np.dtype(half) if stored(value).rounded else F32)
    assert stored(value).kind == ("half" if stored(value).rounded else "full")


def test_result_on_the_full_list_is_not_rounded_for_storage():
    fun = lambda h: (jnp.square(h @ W) @ V, total(jnp.square(h @ W)))  # noqa: E731
    pair = lambda h: (lambda e: (e @ V, total(e)))(jnp.square(h @ W))  # noqa: E731
    assert stored(decided("square", pair).outs[0]).rounded
    assert not stored(decided("square", pair, policy=listed(full="square")).outs[0]).rounded
    assert not stored(decided("square", fun).outs[0]).rounded


# An elementwise operation beside what: computed in, and its result's kind.
FOLLOWS = {
    "arguments": (lambda h: (h + h) @ V, "add", F32, "flexible", "follows its operands"),
    "a half result": (lambda h: (h @ W + VECTOR) @ V, "add", BF16, "half", "16-bit operand"),
    "a float32 result": (
        lambda h: (jnp.square(h @ W) + h @ V) @ V,
        "add",
        F32,
        "full",
        "float32 operand",
    ),
    "float32 readers": (lambda h: total(2 * (h @ W)), "mul", F32, "full", "read by float32"),
    "a caller": (lambda h: 2 * jnp.tanh(h @ W), "mul", F32, "full", "read by float32"),
    "a small step": (
        lambda h: (h @ W + 0.1 * (h @ V)) @ V,
        "add",
        F32,
        "full",
        "16 bits would lose",
    ),
    "an exponential": (
        lambda h: (lambda e: (jnp.exp(e), e @ V))(2 * (h @ W)),
        "mul",
        F32,
        "full",
        "amplify its rounding",
    ),
    "a mask": (
        lambda h: (h @ W + (1 - (VECTOR > 0).astype(jnp.float32)) * -3.4e38) @ V,
        "add",
        F32,
        "full",
        "constants that do not survive",
    ),
    "a number too large": (lambda h: (h @ W * 3.4e38) @ V, "mul", F32, "full", "constant 3.4e+38"),
    "a number that vanishes": (lambda h: (h @ W + 1e-42) @ V, "add", F32, "full", "constant 1"),
    "a number next to one": (lambda h: (h @ W * 0.999) @ V, "mul", F32, "full", "constant 0.999"),
    "one": (lambda h: (h @ W * 1.0) @ V, "mul", BF16, "half", "16-bit operand"),
    "nought": (lambda h: (h @ W * 0.0) @ V, "mul", BF16, "half", "16-bit operand"),
    "infinity": (lambda h: (h @ W + np.inf) @ V, "add", BF16, "half", "16-bit operand"),
    "integers": (
        lambda h: (jnp.arange(16) * 2 + 1).astype(jnp.float32) * h,
        "mul",
        F32,
        "full",
        "",
    ),
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_elementwise_operations_follow_the_dtype_of_their_operands(name):
    fun, primitive, compute, kind, reason = FOLLOWS[name]
    found = decided(primitive, fun)
    assert choice(found).compute == compute
    assert stored(found.outs[0]).kind == kind
    assert reason in said(found)
    assert stored(found.outs[0]).dtype == compute


# What float16 would turn into zero, infinity or one.
CONSTANTS = {
    "small": (1e-8, True),
    "small, of few bits": (2.0**-24, False),
    "large": (70000.0, True),
    "ordinary": (0.1, False),
    "next to one": (0.9999, True),
    "next to minus one": (-0.9999, False),
    "zero": (0.0, False),
    "infinite": (-np.inf, False),
    "an array, one entry of which vanishes": (np.float32([1e-8] + 127 * [0.5]), False),
    "an array that vanishes": (np.full(128, 1e-8, np.float32), True),
    "an array, one entry of which is too large": (np.float32([1e5] + 127 * [0.5]), True),
    "an array, one entry of which is next to one": (np.float32([0.9999] + 127 * [0.5]), False),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_that_float16_would_lose_are_stored_wide(name):
    constant, lost = CONSTANTS[name]
    constant = np.reshape(constant, (8, 16)) if np.size(constant) > 1 else constant
    add = decided("add", lambda h: (h @ W + constant) @ V, policy="mixed_float16")
    assert ("does not survive float16" in said(add)) == lost
    assert stored(add.outs[0]).wide == lost
    assert choice(add).compute == F32 or not lost


def test_only_tiny_factors_of_arguments_are_stored_wide():
    """Nothing is rounded there; but what zero or infinity would be made of is remembered."""
    near = lambda h: (h * 0.9999) @ W  # noqa: E731
    tiny = lambda h: (h * 1e-8) @ W  # noqa: E731
    assert not stored(decided("mul", near, policy="mixed_float16").outs[0]).wide
    assert stored(decided("mul", tiny, policy="mixed_float16").outs[0]).wide


MOVES = {
    "half": (lambda h: (h @ W).reshape(16, 8) @ jnp.ones((8, 2)), "reshape", "half", BF16),
    "half, handed out": (
        lambda h: (lambda r: (r, r @ jnp.ones((8, 2))))((jnp.tanh(h @ W) @ V).reshape(16, 8)),
        "reshape",
        "half",
        BF16,
    ),
    "float32 for float32": (lambda h: total(jnp.square(h @ W).reshape(-1)), "reshape", "full", F32),
    "float32 for a matmul": (
        lambda h: jnp.square(h @ W).reshape(16, 8) @ jnp.ones((8, 2)),
        "reshape",
        "half",
        BF16,
    ),
    "float32 for both": (
        lambda h: (lambda r: (r @ jnp.ones((8, 2)), total(r)))(jnp.square(h @ W).reshape(16, 8)),
        "reshape",
        "half",
        BF16,
    ),
    "an argument": (lambda h: h.reshape(16, 8) @ jnp.ones((8, 2)), "reshape", "flexible", F32),
    "half and an argument": (
        lambda h: jnp.concatenate([h @ W, h]) @ V,
        "concatenate",
        "half",
        BF16,
    ),
    "half and an argument, for a sum": (
        lambda h: (jnp.concatenate([h @ W, h]) + 1.5) @ V,
        "concatenate",
        "half",
        BF16,
    ),
    "half and float32": (
        lambda h: (lambda c: (c @ V, total(c)))(jnp.concatenate([h @ W, jnp.square(h @ V)])),
        "concatenate",
        "half",
        BF16,
    ),
    "half and an argument, handed out": (
        lambda h: (lambda c: (c, c @ V))(
            lax.dynamic_update_slice(h, (jnp.tanh(h @ W) @ V)[:2], (0, 0))
        ),
        "dynamic_update_slice",
        "full",
        F32,
    ),
    "rows written into": (lambda h: (h @ W).at[:2].set(0.0) @ V, "scatter", "half", BF16),
    "half and a mask, written into it": (
        lambda h: (lambda c: (c @ V, total(c)))((h @ W).at[:2].set(-3.4e38)),
        "scatter",
        "full",
        F32,
    ),
    "half and a mask": (
        lambda h: (lambda c: (c @ V, total(c)))(
            jnp.concatenate([h @ W, (h > 0).astype(jnp.float32) * -3.4e38])
        ),
        "concatenate",
        "full",
        F32,
    ),
    "half and a number next to one": (
        lambda h: (lambda p: (p @ V, total(p)))(lax.pad(h @ W, 0.999, ((1, 1, 0), (0, 0, 0)))),
        "pad",
        "full",
        F32,
    ),
    "half and an argument, for float32": (
        lambda h: total(jnp.concatenate([h @ W, h])),
        "concatenate",
        "full",
        F32,
    ),
    "a sum with a small step": (
        lambda h: (h @ W + 0.1 * (h @ V)).reshape(16, 8) @ jnp.ones((8, 2)),
        "reshape",
        "full",
        F32,
    ),
    "integers": (lambda h: jnp.arange(16).reshape(4, 4) * 1.0 * 1.0, "mul", "full", F32),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_take_the_dtype_that_needs_the_fewest_casts(name):
    fun, primitive, kind, dtype = MOVES[name]
    out = decided(primitive, fun).outs[0]
    assert (stored(out).kind, stored(out).dtype) == (kind, dtype)


COMPARED = {
    "half with a number that half holds": (lambda h: h @ W > 0.5, BF16),
    "half with one that it does not": (lambda h: h @ W > 0.1, F32),
    "half with an argument": (lambda h: h @ W > h, F32),
    "half with float32": (lambda h: (h @ W > jnp.square(h @ V), (h @ W) @ V), F32),
    "half with half": (lambda h: (h @ W > h @ V, (h @ W) @ V), BF16),
    "float32": (lambda h: jnp.square(h @ W) > 0.5, F32),
    "arguments": (lambda h: h > 0.5, F32),
}


@pytest.mark.parametrize("name", COMPARED)
def test_comparison_runs_in_the_stored_dtype_of_its_operands(name):
    fun, dtype = COMPARED[name]
    assert choice(decided("gt", fun)).compute == dtype


N = jnp.arange(16).reshape(1, 16)
CASTS = {
    "from the same half": (lambda h: h.astype(jnp.bfloat16).astype(jnp.float32) @ V, "half", BF16),
    "from the other half": (
        lambda h: h.astype(jnp.float16).astype(jnp.float32) @ V,
        "flexible",
        F32,
    ),
    "from a boolean": (lambda h: (h > 0).astype(jnp.float32) @ V, "flexible", F32),
    "from an integer": (lambda h: (h > 0).astype(jnp.int32).astype(jnp.float32) * h, "full", F32),
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_of_the_program_decide_storage(name):
    fun, kind, dtype = CASTS[name]
    out = decided("convert_element_type", fun).outs[0]
    assert (stored(out).kind, stored(out).dtype) == (kind, dtype)
    assert stored(out).wide == (name == "from an integer")


def test_a_loops_constants_stay_float32_and_a_branchs_operands_do_not():
    """Their cotangents are summed over the turns."""

    def loop(h):
        c = jnp.tanh(h @ W)
        return lax.scan(lambda s, _: (jnp.tanh(s @ W) * c, None), h @ V, None, length=3)[0] @ V

    def branch(h):
        c = jnp.tanh(h @ W)
        return lax.cond(h[0, 0] > 0, lambda c: c @ V, lambda c: c @ W, c) @ V

    (scan,) = op(analyzed(loop, H), "scan").subs
    constants = [v for v in scan.program.invars[: scan.consts] if v.is_f32]
    assert constants and all(stored(v).dtype == F32 for v in constants)
    first, _ = op(analyzed(branch, H), "cond").subs
    assert any(stored(v).dtype == BF16 for v in first.program.invars if v.is_f32)


# What two branches give, who reads it, and what it is stored in.
BRANCHES = {
    "half and half": (lambda h: h @ W, lambda h: h @ V, lambda r: r @ V, BF16),
    "half and float32, for a matmul": (jnp.square, lambda h: h @ V, lambda r: r @ V, BF16),
    "float32, for float32": (jnp.square, jnp.exp, total, F32),
    "float32, for a matmul": (jnp.square, jnp.exp, lambda r: r @ V, BF16),
    "half and float32, handed out": (jnp.square, lambda h: h @ V, lambda r: r, F32),
    "what half would lose": (
        lambda h: h + 0.1 * (h @ W),
        lambda h: h @ V,
        lambda r: (r @ V, total(r)),
        F32,
    ),
    "small results": (
        lambda h: jnp.sum(h, -1, keepdims=True),
        lambda h: jnp.sum(h * 2, -1, keepdims=True),
        lambda r: ((r + H) @ V, r @ jnp.ones((1, 2))),
        F32,
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_give_one_dtype(name):
    one, other, reader, dtype = BRANCHES[name]

    def fun(h, n):
        h = jnp.tanh(h @ W)
        return reader(lax.cond(n > 0, one, other, h))

    assert stored(decided("cond", fun, H, 3).outs[0]).dtype == dtype


def test_float16_results_of_a_region_stay_float16():
    def fun(h, n):
        def branch(h):
            with mpjax.precision("float16"):
                return jnp.tanh(h @ W)

        with mpjax.precision("float16"):
            moved = jnp.tanh(h @ W)
        return moved.reshape(16, 8) @ jnp.ones((8, 2)), lax.cond(n > 0, branch, branch, h) @ V

    block = analyzed(fun, H, 3)
    assert stored(op(block, "reshape").outs[0]).dtype == F16
    assert stored(op(block, "cond").outs[0]).dtype == F16


@pytest.mark.parametrize("half", [True, False])
def test_scan_result_has_the_dtype_of_its_carry(half):
    turn = (lambda s: jnp.tanh(s @ W)) if half else (lambda s: s + jnp.tanh(s @ W))

    def fun(h):
        return lax.scan(lambda s, _: (turn(s), None), h, None, length=9)[0] @ V

    assert stored(decided("scan", fun).outs[0]).dtype == (BF16 if half else F32)


def test_nothing_is_half_under_a_float32_policy():
    block = analyzed(lambda h: jnp.tanh(h @ W) @ V, H, policy="float32")
    assert {choice(o).compute for o in block.ops} == {F32}
    assert all(stored(v).dtype == F32 for o in block.ops for v in o.outs)


def test_iota_is_never_rounded():
    iota = decided("iota", lambda h: (lax.iota(jnp.float32, 16) + h @ W) @ V)
    assert stored(iota.outs[0]).wide and stored(iota.outs[0]).dtype == F32


def test_constant_cast_from_an_integer_leaves_pad_in_half():
    pad = decided("pad", lambda h: jnp.pad(h @ W, 1) @ jnp.ones((18, 4)))  # its zero
    assert stored(pad.outs[0]).dtype == BF16


def test_values_computed_from_arguments_alone_are_stored_in_float32():
    def fun(h, s):  # in half, nothing would be left where one reader subtracts nearly all
        both = jnp.concatenate([h, h])
        return 100 * (both - s * both) @ W, both @ V

    assert stored(decided("concatenate", fun, H, jnp.float32(0.999)).outs[0]).dtype == F32
