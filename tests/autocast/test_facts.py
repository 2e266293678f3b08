"""The facts about values: where they come from, and whether half can hold them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from planned import SCALAR, VECTOR, H, V, W, analyzed, carries, fact, op, ruling

import mpjax
from mpjax._src.autocast.tables import BEYOND, BOUNDED, FITS

N = jnp.arange(16).reshape(1, 16)


def shifted(h):
    return h - jnp.max(h, -1, keepdims=True)


def normed(h):
    return h * lax.rsqrt(jnp.mean(jnp.square(h), -1, keepdims=True))


def repeated(times):
    def fun(h, w, v):
        h = h @ v
        for _ in range(times):
            h = h + jnp.tanh(h @ w)
        return h

    return fun


# Sums: a state (h @ v), a step that is added to it, and whether half would lose the step.
KNOWN = np.linspace(0.5, 1, 16, dtype=np.float32)
STEPS = {
    "a block with weights of its own": (lambda h, w: h @ w, False),
    "a bias": (lambda h, w: VECTOR, False),
    "half a block": (lambda h, w: 0.5 * (h @ w), False),
    "a quarter of a block": (lambda h, w: 0.25 * (h @ w), False),
    "a fifth of a block": (lambda h, w: 0.2 * (h @ w), True),
    "a fifth, by division": (lambda h, w: (h @ w) / 5.0, True),
    "a quarter, by division": (lambda h, w: (h @ w) / 4.0, False),
    "a negative tenth of a block": (lambda h, w: (h @ w) * -0.1, True),
    "a block scaled down, and something of known size": (lambda h, w: 0.1 * (h @ w) + 1, False),
    "a block scaled down, and nothing": (lambda h, w: 0.1 * (h @ w) + 0, True),
    "a block times a scale that nobody knows": (lambda h, w: SCALAR * (h @ w), True),
    "a block times a vector that nobody knows": (lambda h, w: VECTOR * (h @ w), True),
    "a block times a vector that is known": (lambda h, w: jnp.asarray(KNOWN) * (h @ w), False),
    "a block times a small vector that is known": (lambda h, w: KNOWN / 9 * (h @ w), True),
    "a unit block times a vector": (lambda h, w: VECTOR * normed(h @ w), False),
    "a masked block": (lambda h, w: (VECTOR > 0).astype(jnp.float32) * (h @ w), False),
    "a chosen block": (lambda h, w: jnp.where(VECTOR > 0, h @ w, 0), False),
    "a mean of many": (lambda h, w: jnp.mean(h @ w, -1, keepdims=True) * jnp.ones((8, 16)), False),
    "a scalar that nobody knows": (lambda h, w: SCALAR, True),
    "a scalar that is written down": (lambda h, w: 1e-5, False),
    "an array of one number": (lambda h, w: jnp.full((8, 16), 1e-5), False),
    "an array of many numbers": (lambda h, w: H, True),
}


def test_sum_whose_terms_are_all_scaled_has_no_state():
    """The taps of a filter, each scaled by numbers that nobody knows."""

    def taps(h, w, v, a, b):
        return a * (h @ w) + b * (h @ v)

    given = (H, W, V, VECTOR, VECTOR)
    assert not fact(taps, *given).exact
    assert not fact(lambda h, w, v, a, b: taps(h, w, v, a, b) + a * (h @ v), *given).exact
    assert fact(lambda h, w, v, a, b: (h @ w) @ v + taps(h, w, v, a, b), *given).exact


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_kept_exact_where_it_may_be_small(name):
    step, exact = STEPS[name]
    captured = (SCALAR, VECTOR)  # arguments of the program: nobody knows them

    def fun(h, w, v, scalar, vector):
        globals().update(SCALAR=scalar, VECTOR=vector)
        try:
            state = h @ v
            return state + step(state, w)
        finally:
            globals().update(SCALAR=captured[0], VECTOR=captured[1])

    assert fact(fun, H, W, V, *captured).exact == exact


def test_fact_of_an_exact_value_is_not_half():
    assert not fact(lambda h: h @ W + 0.1 * (h @ V), H).half
    assert fact(lambda h: h @ W + 0.5 * (h @ V), H).half


def test_a_step_from_an_argument_that_nobody_rounded_is_exact():
    assert fact(lambda h, w: h + h @ w, H, W).exact
    assert fact(lambda h, w: h @ w + h, H, W).exact
    assert not fact(lambda h, w: h + jnp.tanh(h), H, W).exact


def test_state_of_four_writes_is_half_and_of_five_is_exact():
    """The first is a block's, with weights that are new to the state."""
    assert fact(repeated(1), H, W, V).writes == 0
    assert fact(repeated(5), H, W, V).writes == 4 and not fact(repeated(5), H, W, V).exact
    assert fact(repeated(6), H, W, V).exact


def test_weights_that_are_constants_are_weights_however_they_are_laid_out():
    constants = [H.T @ H * i for i in range(1, 8)]

    def fun(h):
        h = h @ W
        for w in constants:
            h = h + jnp.tanh(h @ w.T)
        return h

    assert not fact(fun, H).exact


def test_tangents_are_never_exact():
    """Their transposes are cotangents, which the program's own matmuls round."""
    assert not fact(lambda h, w: h @ w + 0.1 * h, H, W, linear=(0,)).exact
    assert fact(lambda h, w: h @ w + 0.1 * h, H, W, linear=()).exact
    assert fact(lambda h, w: h @ w + 0.1 * h, H, W, linear=(0,)).linear


def test_operation_on_the_half_list_is_half_and_not_exact():
    policy = mpjax.get_policy("mixed_bfloat16").with_ops(half="add")
    found = fact(lambda h: h @ W + 0.1 * (h @ V), H, policy=policy)
    assert found.half and not found.exact


def test_unknown_operation_makes_a_new_value_unless_of_arguments():
    """Of arguments it makes what is computed from arguments alone."""
    made = fact(lambda h: h @ W, H)
    assert fact(lambda h: lax.reduce_precision(h @ W, 5, 10), H).made != made.made
    assert fact(lambda h: lax.reduce_precision(h, 5, 10), H).given


# How large values may be: of float16's range at most?
SPANS = {
    "a matmul": (lambda h: h @ W, FITS),
    "twice a matmul": (lambda h: 2 * (h @ W), FITS),
    "three times": (lambda h: 3 * (h @ W), BEYOND),
    "a thousandth": (lambda h: (h @ W) * 2.0**-10, FITS),
    "less than that": (lambda h: (h @ W) * 2.0**-11, BEYOND),
    "divided by two": (lambda h: (h @ W) / 2, FITS),
    "divided by little": (lambda h: (h @ W) / 0.1, BEYOND),
    "divided by zero": (lambda h: (h @ W) / 0.0, BEYOND),
    "a bounded function": (lambda h: jnp.tanh(h @ W), BOUNDED),
    "a bounded function, times much": (lambda h: jnp.tanh(h @ W) * 2.0**15, FITS),
    "a bounded function, times more": (lambda h: jnp.tanh(h @ W) * 2.0**16, BEYOND),
    "a square": (lambda h: (h @ W) * (h @ V), BEYOND),
    "a gate": (lambda h: jnp.tanh(h @ W) * (h @ V), FITS),
    "a gate from the other side": (lambda h: (h @ V) * jnp.tanh(h @ W), FITS),
    "a quotient": (lambda h: (h @ W) / jnp.tanh(h @ V), BEYOND),
    "a share of a sum": (lambda h: (h @ W) / jnp.sum(jnp.tanh(h @ V)), FITS),
    "a normed product": (lambda h: normed(h @ W), FITS),
    "a sum of bounded ones": (lambda h: jnp.tanh(h @ W) + jnp.tanh(h @ V), FITS),
    "an exponential": (lambda h: jnp.exp(h @ W), BEYOND),
    "an exponential of what was shifted": (lambda h: jnp.exp(shifted(h @ W)), BOUNDED),
    "of half of that": (lambda h: jnp.exp(0.5 * shifted(h @ W)), BOUNDED),
    "of minus that": (lambda h: jnp.exp(-shifted(h @ W)), BEYOND),
    "of that times minus one": (lambda h: jnp.exp(shifted(h @ W) * -1.0), BEYOND),
    "of nought times that": (lambda h: jnp.exp(0.0 * shifted(h @ W)), BOUNDED),
    "of that times minus a half": (lambda h: jnp.exp(-0.5 * shifted(h @ W)), BEYOND),
    "of that by minus two": (lambda h: jnp.exp(shifted(h @ W) / -2.0), BEYOND),
    "of that plus something": (lambda h: jnp.exp(shifted(h @ W) + 1.0), BEYOND),
    "of the shift the wrong way round": (
        lambda h: jnp.exp(jnp.max(h @ W, -1, keepdims=True) - h @ W),
        BEYOND,
    ),
    "of a shift by another's maximum": (
        lambda h: jnp.exp(h @ W - jnp.max(h @ V, -1, keepdims=True)),
        BEYOND,
    ),
    "of a shift by a scaled maximum": (
        lambda h: jnp.exp(h @ W - 0.5 * jnp.max(h @ W, -1, keepdims=True)),
        BEYOND,
    ),
    "a sine": (lambda h: jnp.sin(h @ W), BOUNDED),
    "a logarithm": (lambda h: jnp.log(jnp.exp(h @ W)), BEYOND),
    "a logarithm of what is bounded": (lambda h: jnp.log(jnp.tanh(h @ W)), FITS),
    "a sum of many": (lambda h: jnp.sum(h @ W, -1), BEYOND),
    "a cumulative sum": (lambda h: lax.cumsum(jnp.tanh(h @ W)), BEYOND),
    "a flag": (lambda h: (h > 0).astype(jnp.float32), BOUNDED),
    "an integer": (lambda h: N.astype(jnp.float32), FITS),
    "an argument": (lambda h: h, FITS),
}


MAXIMA = {
    "itself": (lambda m: m, BOUNDED),
    "moved": (lambda m: m.reshape(1, 8).reshape(8, 1), BOUNDED),
    "negated": (lambda m: -m, BEYOND),
    "absolute": (jnp.abs, BOUNDED),
    "at least something": (lambda m: jnp.maximum(m, 1.0), BOUNDED),
    "where it is finite": (lambda m: jnp.where(jnp.isfinite(m), m, 0.0), BOUNDED),
    "at most something": (lambda m: jnp.minimum(m, 1.0), BEYOND),
    "clipped": (lambda m: lax.clamp(0.0, m, 1.0), BEYOND),
    "its sign": (jnp.sign, BEYOND),
    "one of two": (lambda m: jnp.where(m > 0, m, jnp.max(V)), BEYOND),
    "halved": (lambda m: 0.5 * m, BEYOND),
    "squared": (lambda m: m * m, BEYOND),
    "weighted": (lambda m: m * VECTOR[:1], BEYOND),
    "a root of it": (jnp.sqrt, BEYOND),
    "bounded": (jnp.tanh, BEYOND),
    "more": (lambda m: m + 1.0, BEYOND),
    "less": (lambda m: m - 1.0, BEYOND),
    "its logarithm": (jnp.log, BEYOND),
}


@pytest.mark.parametrize("name", MAXIMA)
@pytest.mark.parametrize("given", [True, False])
def test_span_is_bounded_by_subtraction_of_the_maximum_itself_alone(name, given):
    change, span = MAXIMA[name]

    def fun(h):
        h = h if given else jnp.tanh(h @ W) @ V
        return jnp.exp(h - change(jnp.max(h, -1, keepdims=True)))

    assert fact(fun, H).span == span


@pytest.mark.parametrize("name", SPANS)
def test_span_says_how_large_a_value_may_be(name):
    fun, span = SPANS[name]
    assert fact(fun, H).span == span


NORMS = {
    "one over a root": (lambda h: lax.rsqrt(jnp.sum(h @ W, -1)), "scale"),
    "a negative power": (lambda h: lax.integer_pow(h @ W, -2), "scale"),
    "a power": (lambda h: lax.integer_pow(h @ W, 3), ""),
    "the inverse": (lambda h: lax.integer_pow(h @ W, -1), "scale"),
    "the power nought": (lambda h: lax.integer_pow(h @ W, 0), ""),
    "a root": (lambda h: jnp.sqrt(h @ W), "scale"),
    "one over something": (lambda h: 1.0 / (h @ W), "scale"),
    "over a number": (lambda h: (h @ W) / 2.0, ""),
    "normed": (lambda h: normed(h @ W), "unit"),
    "normed, scale first": (lambda h: lax.rsqrt(jnp.sum(h @ W, -1))[:, None] * (h @ V), "unit"),
    "twice that": (lambda h: 2 * normed(h @ W), "unit"),
    "that plus an epsilon": (lambda h: normed(h @ W) + 1e-5, "unit"),
    "that plus another": (lambda h: normed(h @ W) + h @ V, ""),
    "that times another": (lambda h: normed(h @ W) * (h @ V), ""),
    "a weight times one over a size": (
        lambda h: h[0] * lax.rsqrt(jnp.sum(h @ W, -1, keepdims=True)),
        "scale",
    ),
    "that times a product": (
        lambda h: (h[0] * lax.rsqrt(jnp.sum(h @ W, -1, keepdims=True))) * (h @ V),
        "unit",
    ),
    "two times one over a size": (lambda h: lax.rsqrt(h) * lax.rsqrt(h + 1), "unit"),
    "a product": (lambda h: (h @ W) * (h @ V), ""),
    "an exponential": (lambda h: jnp.exp(normed(h @ W)), ""),
}


@pytest.mark.parametrize("name", NORMS)
def test_norm_tells_one_over_a_size_and_products_with_it(name):
    fun, norm = NORMS[name]
    assert fact(fun, H).norm == norm


HALF = {
    "a matmul": (lambda h: h @ W, True),
    "a matmul of positions": (lambda h: N.astype(jnp.float32) @ W, False),
    "what follows it": (lambda h: jnp.tanh(h @ W), True),
    "what float32 made of it": (lambda h: jnp.exp(h @ W), False),
    "an argument": (lambda h: h, False),
    "an argument's function": (lambda h: jnp.tanh(h), False),
    "half that was widened": (lambda h: h.astype(jnp.bfloat16).astype(jnp.float32), True),
    "another half that was widened": (lambda h: h.astype(jnp.float16).astype(jnp.float32), False),
}


@pytest.mark.parametrize("name", HALF)
def test_fact_half_tells_results_of_half_operations(name):
    fun, half = HALF[name]
    assert fact(fun, H).half == half


def test_integers_of_more_than_eight_bits_are_counts():
    assert fact(lambda n: n.astype(jnp.float32), N).counts
    assert fact(lambda n: n.astype(jnp.float32), N.astype(jnp.int16)).counts
    assert not fact(lambda n: n.astype(jnp.float32), N.astype(jnp.int8)).counts
    assert not fact(lambda n: (n > 3).astype(jnp.float32), N).counts
    assert not fact(lambda h: h.astype(jnp.float16).astype(jnp.float32), H).counts
    assert fact(lambda n: n.astype(jnp.float32).astype(jnp.float32), N).counts
    assert not fact(lambda n: n.astype(jnp.float32) * 2, N).counts


def test_flags_are_masks_and_what_is_computed_from_them_is_not():
    assert fact(lambda h: (h > 0).astype(jnp.float32), H).mask
    assert not fact(lambda h: (h > 0).astype(jnp.float32) * 2, H).mask
    assert not fact(lambda h: jnp.exp((h > 0).astype(jnp.float32)), H).mask
    assert not fact(lambda h: h, H).mask
    assert not fact(lambda h: lax.reduce_precision((h > 0).astype(jnp.float32), 5, 10), H).mask


def test_an_argument_that_was_broadcast_is_spread():
    assert fact(lambda v: jnp.broadcast_to(v, (8, 16)), VECTOR).spread
    assert not fact(lambda v: v.reshape(4, 4), VECTOR).spread
    assert not fact(lambda v: jnp.broadcast_to(v, (1, 16)), VECTOR).spread
    assert fact(lambda v: jnp.exp(jnp.broadcast_to(v, (8, 16))), VECTOR).spread


def test_iota_is_exact():
    assert fact(lambda h: lax.iota(jnp.float32, 16), H).exact
    assert not fact(lambda h: h @ W, H).exact


@pytest.mark.parametrize("number, span", [(1.0, BOUNDED), (-1.0, BOUNDED), (-2.0, FITS)])
def test_span_of_known_numbers_is_that_of_the_largest(number, span):
    start = np.float32([0.5, number, -np.inf])  # a mask's, no number

    def fun(h):
        return lax.scan(lambda c, _: (jnp.maximum(c, -c), None), start, None, length=3)[0]

    assert fact(fun, H).span == span


def test_a_row_of_a_table_is_made_as_by_a_matmul():
    found = fact(lambda t, n: t[n[0]], W, N)
    assert found.made and found.chain == found.made and not found.spread
    assert not fact(lambda t: t[3], W).made


def test_one_row_of_a_table_is_a_part_of_it_and_several_are_looked_up():
    assert not fact(lambda t, n: t[n], W, jnp.arange(1)).made
    assert fact(lambda t, n: t[n], W, jnp.arange(2)).made


def taken(stack, i):
    return lax.dynamic_slice(stack, (i, 0, 0), (1, 16, 16), allow_negative_indices=False)[0]


TAKES = {
    "slices": lambda stack, i, n: stack[i],
    "slices at a number": lambda stack, i, n: taken(stack, i),
    "slices at an argument": lambda stack, i, n: taken(stack, n),
}


@pytest.mark.parametrize("name", TAKES)
def test_parts_of_a_stack_are_weights_of_their_own(name):
    def blocks(first, second):
        def fun(h, stack, v, *n):
            h = h @ v
            for i in (first, second):
                h = h + jnp.tanh(h @ TAKES[name](stack, i, n[i]))
            return h

        return fact(fun, H, jnp.stack([W, V]), V, 0, 1)

    assert blocks(0, 1).writes == 0
    assert blocks(0, 0).writes == 1


# Loops: the state of each turn, and whether it is carried in half.
TURNS = {
    "a recurrent network": (lambda h, x, w: jnp.tanh(h @ w + x @ w), True),
    "a residual step, the same weights in every turn": (
        lambda h, x, w: h + jnp.tanh(h @ w),
        False,
    ),
    "a running sum": (lambda h, x, w: h + x, False),
    "an average": (lambda h, x, w: 0.9 * h + 0.1 * (x @ w), False),
    "what float32 makes": (lambda h, x, w: jnp.exp(h @ w), False),
}


@pytest.mark.parametrize("name", TURNS)
def test_scan_carry_is_half_unless_it_accumulates_or_float32_makes_it(name):
    turn, half = TURNS[name]
    xs = jnp.zeros((7, 8, 16))

    def fun(h, xs, w):
        return lax.scan(lambda h, x: (turn(h, x, w), None), h, xs)[0]

    scan = op(analyzed(fun, H, xs, W), "scan")
    (sub,) = scan.subs
    assert carries(sub.program)[sub.consts] == half
    assert sum(carries(sub.program)) == half


def test_a_stream_over_layers_of_their_own_is_carried_in_half():
    def fun(h, ws):
        return lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), h @ W, ws)[0]

    (sub,) = op(analyzed(fun, H, jnp.stack([W] * 7)), "scan").subs
    assert any(carries(sub.program))


@pytest.mark.parametrize("moving", [True, False])
def test_a_turn_has_weights_of_its_own_where_it_takes_its_part(moving):
    def fun(h, stack):
        def turn(i, h):
            return h + jnp.tanh(h @ taken(stack, i if moving else 0))

        return lax.fori_loop(0, 9, turn, h @ W)

    loop = op(analyzed(fun, H, jnp.stack([W] * 9)), "scan")
    assert any(carries(loop.subs[0].program)) == moving


@pytest.mark.parametrize("length, half", [(4, True), (5, False)])
def test_a_loop_is_as_many_writes_as_it_has_turns(length, half):
    def fun(h, w):
        step = h @ w
        return lax.scan(lambda h, _: (h**2 + step, None), h @ w, None, length=length)[0]

    (sub,) = op(analyzed(fun, H, W), "scan").subs
    assert any(carries(sub.program)) == half


def test_a_loop_of_unknown_length_is_many_writes():
    def fun(h, w, n):
        step = h @ w
        return lax.fori_loop(0, n, lambda i, h: jnp.sin(h) + step, h @ w)

    _, body = op(analyzed(fun, H, W, 3), "while").subs
    assert not any(carries(body.program))


def test_a_carry_that_another_reads_is_no_state_for_that():
    """Only what leads back to itself, over any turns, adds up."""

    def fun(h, w, v):
        def turn(pair, _):
            a, b = pair
            return (jnp.sin(a @ w) @ v + b, a @ v + a @ w), None

        return lax.scan(turn, (h @ w, h @ v), None, length=9)[0][0]

    (sub,) = op(analyzed(fun, H, W, V), "scan").subs
    assert sum(carries(sub.program)) == 2


def test_carries_that_swap_places_are_states():
    def fun(h, w):
        def turn(pair, _):
            a, b = pair
            return (b, a + jnp.tanh(b @ w)), None

        return lax.scan(turn, (h @ W, h @ V), None, length=9)[0][0]

    assert fact(fun, H, W).exact


@pytest.mark.parametrize("alone", [True, False])
def test_a_loop_that_runs_until_matmuls_meet_a_tolerance_is_left_alone(alone):
    def fun(h, w):
        def go(carry):
            n, h = carry
            return (jnp.sum(h) > 0.5) & (n < 9) if alone else n < 9

        return lax.while_loop(go, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, h))[1]

    loop = op(analyzed(fun, H, W), "while")
    assert (ruling(loop).rule == "leave") == alone


@pytest.mark.parametrize("ruled", [True, False])
def test_custom_vjp_call_with_a_tolerance_loop_inside_is_left_alone(ruled):
    """Its backward rule may repeat what the loop decides."""

    def solve(h, w):
        return lax.while_loop(lambda h: jnp.sum(h) > 0.5, lambda h: jnp.tanh(h @ w), h)

    def fun(h, w):
        if not ruled:
            return jax.checkpoint(solve)(h, w)
        function = jax.custom_vjp(solve)
        function.defvjp(lambda h, w: (solve(h, w), h), lambda h, g: (g, g.T @ h))
        return function(h, w)

    found = op(analyzed(fun, H, W), "custom_vjp_call" if ruled else "remat2")
    assert (ruling(found).rule == "leave") == ruled


def test_a_tolerance_is_seen_through_another_carry():
    def fun(h, w):
        def turn(carry):
            h, _ = carry
            return jnp.tanh(h @ w), jnp.sum(h)

        return lax.while_loop(lambda c: c[1] > 0.5, turn, (h, jnp.float32(1.0)))[0]

    assert ruling(op(analyzed(fun, H, W), "while")).rule == "leave"


def test_facts_of_the_branches_of_cond_are_joined():
    def fun(h, w):
        return lax.cond(h[0, 0] > 0, lambda h: h @ w, lambda h: jnp.exp(h), h)

    found = fact(fun, H, W)
    assert not found.half and found.made and found.span == BEYOND
