"""The precision that the readers of a value need."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from planned import KNOWN, H, V, W, analyzed, fact_of, op, ruling, want

import mpjax
from mpjax._src.autocast import demand
from mpjax._src.program.graph import is_steady


def read(reader, *others, make=lambda h: h @ W, policy="mixed_bfloat16"):
    """Returns the value that ``make`` gives, as its readers want it: nothing hands it out."""

    def fun(h, *others):
        with jax.named_scope("here"):
            value = make(h)
        return reader(value, *others)

    block = analyzed(fun, H, *others, policy=policy)
    return [o for o in block.ops if "here" in o.scopes][-1].outs[0]


def total(x):
    """A reader that computes in float32, amplifies nothing, and hands nothing out."""
    return jnp.sum(x) > 0


READERS = {
    # reader: (all_full, needed, amplified, outside, only_half, returned)
    "a sum": (total, (True, False, False, False, False, False)),
    "an exponential": (lambda h: total(jnp.exp(h)), (True, True, True, False, False, False)),
    "a bounded function": (lambda h: jnp.tanh(h) @ V, (True, False, False, False, False, False)),
    "a piece of it": (lambda h: jnp.abs(h) @ V, (False, False, False, False, False, False)),
    "a quotient of its own": (
        lambda h: h / (1 + h**2) @ V,
        (True, False, False, False, False, False),
    ),
    "a matmul": (lambda h: h @ V, (False, False, False, True, True, False)),
    "both": (lambda h: (h @ V, total(h)), (False, False, False, True, False, False)),
    "its caller": (lambda h: h, (True, True, False, False, False, True)),
    "its caller, reshaped": (lambda h: h.reshape(-1), (True, True, False, False, False, True)),
    "its caller, doubled": (lambda h: 2 * h, (True, True, False, False, False, False)),
    "a matmul, reshaped": (
        lambda h: h.reshape(16, 8) @ jnp.ones((8, 2)),
        (False, False, False, True, True, False),
    ),
    "an exponential, after a sum": (
        lambda h: total(jnp.exp(h + 1)),
        (True, True, True, False, False, False),
    ),
    "an exponential, after float32": (
        lambda h: total(jnp.exp(jnp.square(h))),
        (True, True, False, False, False, False),
    ),
    "a comparison": (lambda h: (h > 0) * 2, (True, False, False, False, False, False)),
    "half, as the program says": (
        lambda h: h.astype(jnp.bfloat16),
        (False, False, False, True, True, False),
    ),
    "an integer": (lambda h: h.astype(jnp.int32), (True, True, False, False, False, False)),
    "float32 again": (
        lambda h: total(h.astype(jnp.float32)),
        (True, False, False, False, False, False),
    ),
    "linear algebra": (
        lambda h: jnp.linalg.cholesky(h[:8, :8]),
        (True, True, True, False, False, False),
    ),
    "an explicit precision": (
        lambda h: jnp.matmul(h, V, precision="highest"),
        (True, True, False, False, False, False),
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_demand_records_what_each_reader_wants(name):
    reader, (full, needed, amplified, outside, only_half, returned) = READERS[name]
    value = read(reader)
    assert want(value).full == full
    assert want(value).needed == needed
    assert want(value).amplified == amplified
    assert want(value).outside == outside
    assert want(value).half == only_half
    assert want(value).returned == returned


def test_readers_are_counted_through_moves():
    assert len(want(read(lambda h: (total(h), total(h.reshape(-1))))).readers) == 2
    assert len(want(read(lambda h: (total(h), jnp.exp(h), h @ V))).readers) == 3
    assert len(want(read(lambda h: H)).readers) == 0
    # A move that nobody reads is no reader.
    assert len(want(read(lambda h: (h.reshape(-1), total(h))[1])).readers) == 1


PHASES = {
    "a sine": (lambda h: jnp.sin(h), 1.0),
    "a sine of a tenth": (lambda h: jnp.sin(0.1 * h), 0.1),
    "a sine of a quarter, by division": (lambda h: jnp.sin(h / 4), 0.25),
    "a sine of a product": (lambda h: jnp.sin(h * jnp.tanh(h)), 1.0),
    "a sine of a sum": (lambda h: jnp.sin(h + jnp.tanh(h)), 1.0),
    "two sines": (lambda h: jnp.sin(0.5 * h) + jnp.sin(0.25 * h), 0.5),
    "a logarithm": (lambda h: jnp.log(h), 1.0),
    "an exponential": (lambda h: jnp.exp(h), 1.0),
    "an exponential of what is at most zero": (
        lambda h: jnp.exp(h - jnp.max(h, -1, keepdims=True)),
        1.0,
    ),
    "a sum": (total, 0.0),
    "a matmul": (lambda h: jnp.sin(h @ V), 0.0),
    "a root": (lambda h: lax.rsqrt(h), 0.0),
}


@pytest.mark.parametrize("name", PHASES)
def test_want_of_a_phase_is_the_factor_of_the_error(name):
    reader, phase = PHASES[name]
    if "at most zero" in name:  # the maximum and the shifted value themselves
        block = analyzed(lambda h: reader(h @ W), H)
        assert want(op(block, "sub").outs[0]).phase == 0.0
        assert want(op(block, "sub").outs[0]).amplified
    else:
        assert want(read(reader)).phase == pytest.approx(phase)


KINKS = {
    "a relu before a matmul": (lambda h: jnp.maximum(h, 0) @ V, True),
    "a clamp before a matmul": (lambda h: jnp.clip(h, 0, 6) @ V, True),
    "a relu before a sum": (lambda h: total(jnp.maximum(h, 0)), False),
    "a relu that is handed out": (lambda h: jnp.maximum(h, 0), False),
    "a product before a matmul": (lambda h: (h * 2) @ V, False),
}


@pytest.mark.parametrize("name", KINKS)
def test_want_of_a_kink_is_seen_where_it_is_read_outside_of_float32(name):
    reader, kink = KINKS[name]
    assert want(read(reader)).kink == kink


def test_operand_that_follows_a_half_one_is_read_outside_of_float32():
    """An operand that follows a half one is read in half."""
    assert want(read(lambda h: (h + h @ V) @ V)).outside
    assert not want(read(lambda h: jnp.square(h + jnp.exp(h)))).outside
    block = analyzed(lambda h: (jnp.exp(h) + h @ W) @ V, H)
    assert want(op(block, "exp").outs[0]).outside


def phases(depth, positions=False):
    """Returns whether the matmul that makes angles is float32."""

    def fun(x, freq):
        x = jnp.arange(depth, dtype=jnp.int32)[None].astype(jnp.float32) if positions else x
        return jnp.sum(jnp.sin(x @ freq))

    block = analyzed(fun, jnp.ones((8, depth)), jnp.ones((depth, 4)))
    return ruling(op(block, "dot_general")).forced == "full"


@pytest.mark.parametrize("depth, full", [(1, True), (4, True), (5, False)])
def test_a_short_sum_that_enters_a_phase_is_float32(depth, full):
    assert phases(depth) == full


def test_positions_are_never_multiplied_in_half():
    assert phases(16, positions=True) and not phases(16)


# The result of a sum of few products; and whether it is computed in float32.
SHORT = {
    "an outer product under an exponential": (1, lambda a, b: jnp.exp(a @ b), True),
    "two products under an exponential": (2, lambda a, b: jnp.exp(a @ b), True),
    "an outer product under a softmax": (1, lambda a, b: jax.nn.softmax(a @ b), True),
    "two products under a softmax": (2, lambda a, b: jax.nn.softmax(a @ b), False),
    "an outer product that is summed": (1, lambda a, b: jnp.sum(a @ b), False),
    "two products in a small phase": (2, lambda a, b: jnp.sin(0.25 * (a @ b)), False),
    "two products in a larger phase": (2, lambda a, b: jnp.sin(0.3 * (a @ b)), True),
    "two products of what is half": (2, lambda a, b: jnp.sin(jnp.tanh(H[:, :8] @ a) @ b), False),
}


@pytest.mark.parametrize("name", SHORT)
def test_short_sums_are_float32_where_their_readers_amplify(name):
    depth, fun, full = SHORT[name]
    block = analyzed(fun, jnp.ones((8, depth)), jnp.ones((depth, 4)))
    assert (ruling(op(block, "dot_general")).forced == "full") == full


def test_a_short_sum_of_tangents_stays_half():
    """Its transpose is a matmul of the program's own gradient."""
    fun = lambda a, b: jnp.exp(a @ b)  # noqa: E731
    a, b = jnp.ones((8, 1)), jnp.ones((1, 4))
    assert ruling(op(analyzed(fun, a, b), "dot_general")).forced == "full"
    assert ruling(op(analyzed(fun, a, b, linear=(0,)), "dot_general")).forced == ""


LABELS = jnp.array([0, 2, 0, 2])


def one_hot(x):
    return jax.nn.one_hot(LABELS, x.shape[-1])


def chosen(x):
    return jnp.einsum("nk,nk->n", x, one_hot(x))


# A matmul that chooses, and whether it is float32.
SELECTS = {
    "the last state of a loop": (
        lambda x, w: chosen(
            jax.lax.scan(lambda c, r: (jnp.logaddexp(c, c + r), None), x[:, :8], x @ w)[0]
        ),
        True,
    ),
    "a comparison": (
        lambda x, w: jnp.square((LABELS[:, None] == LABELS).astype(x.dtype) @ jnp.exp(x @ w)),
        True,
    ),
    "scores of a matmul": (lambda x, w: -jnp.mean(chosen(jax.nn.log_softmax(x @ w))), False),
    "a parameter": (lambda x, w: jnp.sum(jnp.sin(jax.nn.one_hot(LABELS, 8) @ w)), False),
    "before a matmul": (lambda x, w: (one_hot(LABELS[:, None]).T @ jnp.exp(x)) @ w, False),
    "values in half": (lambda x, w: jnp.sum(jnp.sin(chosen(jnp.maximum(x @ w, 0)))), False),
}


@pytest.mark.parametrize("name", SELECTS)
def test_a_matmul_that_only_selects_float32_values_for_float32_readers_is_float32(name):
    fun, full = SELECTS[name]
    block = analyzed(fun, jnp.ones((4, 8)), jnp.ones((8, 8)))
    matmuls = [o for o in block.walk() if o.name == "dot_general"]
    selects = [ruling(o).forced == "full" for o in matmuls if any(fact_of(v).mask for v in o.ins)]
    assert selects == [full]


BIG = 1e9
KEPT = H[0, :8] > -5
# A matrix with entries that float16 cannot hold, and whether it is multiplied in float32.
MASKED = {
    "masked": (lambda z: jnp.where(KEPT, z, -BIG), True),
    "added": (lambda z: z + jnp.where(KEPT, 0, -BIG), True),
    "counted": (lambda z: z - KEPT * BIG, True),
    "of a softmax": (lambda z: jax.nn.log_softmax(jnp.where(KEPT, z, -BIG)), True),
    "padded": (lambda z: jax.lax.pad(z[:, :6], -BIG, ((0, 0, 0), (1, 1, 0))), True),
    "halved": (lambda z: jnp.where(KEPT, z, -BIG) / 2, True),
    "carried": (lambda z: jax.lax.scan(lambda c, r: (c + r, None), z * 0 - BIG, z[None])[0], True),
    "probabilities": (lambda z: jax.nn.softmax(jnp.where(KEPT, z, -BIG)), False),
    "bounded": (lambda z: jnp.maximum(jnp.where(KEPT, z, -BIG), -50), False),
    "of ordinary size": (lambda z: jnp.where(KEPT, z, -1e4), False),
    "in other units": (lambda z: (z + BIG) / BIG, False),
    "taken away": (lambda z: (z + BIG) - BIG, False),
    "the largest": (lambda z: jnp.max(jnp.where(KEPT, z, -BIG), 0, keepdims=True), False),
    "infinite": (lambda z: jnp.where(KEPT, z, -jnp.inf), False),
}


@pytest.mark.parametrize("name", MASKED)
def test_entries_beyond_float16_are_multiplied_in_float32(name):
    """Else zero times infinity is NaN."""
    make, huge = MASKED[name]
    fun = lambda h, w, v: make(h @ w) @ v  # noqa: E731
    for half, full in (("float16", huge), ("bfloat16", False)):
        block = analyzed(fun, H[:, :8], H[:8, :8], H[:8, :4], policy=f"mixed_{half}")
        assert (
            ruling([o for o in block.ops if o.name == "dot_general"][1]).forced == "full"
        ) == full


def test_entries_beyond_float16_are_convolved_in_float32():
    fun = lambda h: lax.conv(jnp.where(H > 0, h, -BIG)[None], V[None, :8], (1,), "SAME")  # noqa: E731
    block = analyzed(fun, H, policy="mixed_float16")
    assert ruling(op(block, "conv_general_dilated")).forced == "full"


def test_scores_of_impossible_labels_make_no_nan():
    def loss(w):
        z = jnp.where(KEPT, H[:4, :8] @ w, -BIG)
        logs = jax.nn.log_softmax(z)
        return jnp.sum(chosen(logs)) + jnp.einsum("nk,nk->", jnp.exp(logs), logs)

    w = H[:8, :8].at[:, 3].add(0.1)
    assert jnp.allclose(mpjax.autocast(loss, "mixed_float16")(w), loss(w), rtol=1e-2)


def test_half_list_overrules_the_float32_of_short_sums():
    policy = mpjax.get_policy("mixed_bfloat16").with_ops(half="dot_general")
    fun = lambda a, b: jnp.exp(a @ b)  # noqa: E731
    block = analyzed(fun, jnp.ones((8, 1)), jnp.ones((1, 4)), policy=policy)
    assert ruling(op(block, "dot_general")).forced == "half"


def decay(make):
    """Of a factor that a loop multiplies its state by: are its first and last op kept unrounded?"""

    def fun(h, xs, w):
        def turn(h, x):
            with jax.named_scope("here"):
                a = make(x, w)
            return a * h + x, None

        return lax.scan(turn, h, xs)[0]

    (sub,) = op(analyzed(fun, H, jnp.ones((9, 8, 16)), W), "scan").subs
    ops = [o for o in sub.program.ops if "here" in o.scopes]
    return want(ops[0].outs[0]).unrounded, want(ops[-1].outs[0]).unrounded


def test_factor_that_decays_a_state_is_not_rounded():
    assert decay(lambda x, w: (x @ w) * 0.5) == (True, True)
    assert decay(lambda x, w: -(x @ w)) == (True, True)
    # An error of a term is no error of the factor's distance from one.
    assert decay(lambda x, w: jnp.tanh(x @ w)) == (False, True)
    assert decay(lambda x, w: 1 - x @ w) == (False, True)


def test_readers_inside_of_programs_count():
    def branches(h, v):
        return lax.cond(h[0, 0] > 0, lambda h: h @ v, lambda h: jnp.exp(h), h)

    value = read(branches, V)
    joint = want(value)
    assert joint.amplified and joint.outside and not joint.half and not joint.full
    inside = read(lambda h, v: lax.cond(True, lambda h: h @ v, lambda h: h @ v * 2, h), V)
    assert want(inside).outside and not want(inside).amplified


def test_a_carry_that_stays_float32_is_wanted_in_float32():
    def sums(h):
        return lax.scan(lambda c, _: (c + h, None), h, None, length=9)[0]

    def network(h):
        return lax.scan(lambda c, _: (jnp.tanh(c @ V), None), h, None, length=9)[0] @ V

    assert want(read(sums)).full
    state = read(network)
    assert not want(state).full and want(state).outside


def test_the_next_turn_is_handed_a_float32_carry():
    """So that what a matmul reads of it besides does not make it half."""

    def fun(h):
        def turn(state, _):
            state = state + jnp.tanh(state @ W)
            return state, state @ V

        return lax.scan(turn, h, None, length=9)[0]

    (sub,) = op(analyzed(fun, H), "scan").subs
    state = sub.program.outvars[0]
    assert want(state).returned and want(state).needed and not want(state).full


def test_an_activation_with_a_rule_of_its_own_is_one_reader():
    value = read(lambda h: jax.nn.softplus(h) @ V)
    assert len(want(value).readers) == 1
    assert not want(value).returned


def test_gate_of_a_decayed_state_is_rounded_where_only_matmuls_read_it():
    """A gate after a recurrence: the product is rounded for the matmul that reads it."""

    def gated(read):
        def fun(h, w, xs):
            state, _ = lax.scan(lambda h, x: (0.999 * h + 0.001 * x, None), h, xs)
            with jax.named_scope("here"):
                gate = h @ w
            return read(gate * state)

        return analyzed(fun, H, W, jnp.ones((9, 8, 16)))

    assert not want(op(gated(lambda x: x @ V), "dot_general", 0).outs[0]).unrounded
    assert want(op(gated(lambda x: x + 1), "dot_general", 0).outs[0]).unrounded


def test_scan_carry_is_wanted_as_the_next_turn_wants_it():
    def turn(carry, _):
        a, b = carry
        return (jnp.tanh(b) @ W, a), jnp.sin(64 * b)

    def rotated(h):
        return lax.scan(turn, (h @ W, h @ V), None, length=4)

    (sub,) = op(analyzed(rotated, H), "scan").subs
    # The second carry is read by the sine, the first becomes the second a turn later.
    assert [want(v).amplified for v in sub.program.outvars[:2]] == [True, True]


LOOPS = {
    "scan": lambda h: lax.scan(lambda h, _: (h @ W, None), h, None, length=3)[0],
    "while": lambda h: lax.while_loop(lambda h: h[0, 0] < 3, lambda h: h @ W, h),
}


@pytest.mark.parametrize("name", LOOPS)
def test_demand_leaves_loops_planned_by_an_inner_autocast_alone(name):
    block = analyzed(lambda h: 2 * mpjax.autocast(LOOPS[name], "mixed_float16")(h), H)
    assert [ruling(o).rule for o in block.walk() if o.name == name] == ["leave"]
    assert demand.held_carries(KNOWN, block) == set()


def test_a_short_sum_of_float32_values_before_a_phase_is_float32():
    short = lambda h: jnp.sin(8 * (h[:, :2] @ W[:2]))  # noqa: E731
    assert ruling(op(analyzed(lambda h: short(jnp.sin(h @ W)), H), "dot_general")).forced == "full"
    assert ruling(op(analyzed(lambda h: short(h @ W), H), "dot_general")).forced == ""


def test_nested_loops_are_looked_at_a_few_times_each(monkeypatch):
    """Not once for each round of every loop around."""
    rounds = []
    once = demand.demand
    monkeypatch.setattr(demand, "demand", lambda *args: (rounds.append(args), once(*args)))

    def nested(depth):
        def turn(carry, _):
            *rest, last = carry
            inner = nested(depth - 1)(last) if depth else 3 * jnp.tanh(last @ W)
            return (inner, *rest), jnp.sin(64 * last)

        return lambda h: lax.scan(turn, (h @ W, h @ V, h), None, length=4)[0][0]

    analyzed(nested(5), H)
    assert len(rounds) < 2 * 8 * 6  # a carry that has to be exact is seen in a second sweep


def test_a_difference_is_seen_before_a_pole_but_not_in_a_dividend():
    def size(h):
        return jnp.sqrt(1 + jnp.sum(h**2))

    assert want(read(lambda h: jnp.sqrt(1 - h))).whole
    assert want(read(lambda h: 1 / (1 - h))).whole
    assert not want(read(lambda h: (h - 1) / size(h))).whole
    assert not want(read(lambda h: jnp.sqrt(1 + h))).whole


def test_differences_of_parts_of_one_array_are_seen_whole():
    assert want(read(lambda h: jnp.roll(h, 1, 0) - h)).whole
    assert want(read(lambda h: 2 * h[1:] - h[:-1])).whole
    assert not want(read(lambda h: h - jnp.mean(h, -1, keepdims=True))).whole
    assert not want(read(lambda h: h - jnp.tanh(h @ W))).whole
    assert not want(read(lambda h: h[1:] + h[:-1])).whole


def test_want_beside_a_solution_passes_through_linear_operations_alone():
    def solved():
        return lax.while_loop(lambda c: jnp.sum(c @ W) > 1e-3, lambda c: 0.5 * (c @ W), H)

    assert want(read(lambda h: jnp.exp(solved() + 2 * h))).beside
    assert not want(read(lambda h: jnp.exp(solved() + h * jnp.tanh(h)))).beside


def test_is_steady_holds_for_the_dividend_of_div_alone():
    divided = op(analyzed(lambda x, y: x / y, H, H), "div")
    assert [is_steady(divided, v) for v in divided.ins] == [True, False]
