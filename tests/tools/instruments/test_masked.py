"""Tests of programs that round by a mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from jax.interpreters import ad

from mpjax._src.core.planner import rounding
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.program.interpret import Wide, interpret, root_of
from mpjax._src.tools.instruments.masked import (
    _kept,
    _sum_of_squares,
    evaluate,
    has_derivative,
    hidden,
    masked,
    rounds,
    segments,
    split,
)
from mpjax._src.tools.instruments.programs import make_program
from tests.helpers.support import fresh_rng


@pytest.fixture(autouse=True)
def small_matmuls_round(monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)


def layers(w, x):
    h = jnp.tanh(x @ w["a"])
    return jnp.mean((jax.nn.softmax(h @ w["b"]) @ w["a"]) ** 2)


def scanned(w, x):
    def body(h, _):
        return jnp.tanh(h @ w["a"]), h.sum()

    h, sums = jax.lax.scan(body, x, None, length=3)
    return jnp.mean(h**2) + 1e-2 * jnp.mean(sums)


def branching(w, x):
    h = jax.lax.cond(x[0, 0] > 5, lambda h: h @ w["a"], lambda h: jnp.sin(h @ w["b"]), x)
    return jnp.mean(h**2)


def checkpointed(w, x):
    return layers(w, jax.checkpoint(lambda x: jnp.tanh(x @ w["b"]))(x))


@jax.custom_vjp
def scaled(x, w):
    return x @ w


scaled.defvjp(lambda x, w: (scaled(x, w), (x, w)), lambda res, g: (2 * g @ res[1].T, res[0].T @ g))


def with_own_rule(w, x):
    return jnp.mean(scaled(jnp.tanh(x @ w["a"]), w["b"]) ** 2)


def searching(w, x):
    # A loop of unknown length has no reverse: what is in front of it acts through it alone.
    start = jnp.abs(x @ w["a"]).astype(jnp.bfloat16).astype(jnp.float32)
    found = jax.lax.while_loop(lambda s: s.sum() > 1.0, lambda s: 0.5 * s, start)
    return jnp.mean((x @ w["b"]) ** 2) * jax.lax.stop_gradient(found.sum())


def repeated(w, x):
    # What a loop of unknown length calls is in 16 bits, and nothing of its own.
    half = lambda x: x.astype(jnp.bfloat16)  # noqa: E731
    step = jax.jit(lambda h: jnp.tanh((half(h) @ half(w["a"])).astype(jnp.float32)))
    turn = lambda c: (step(step(c[0])), c[1] + 1)  # noqa: E731
    found, _ = jax.lax.while_loop(lambda c: c[1] < 3, turn, (x, 0))
    return jnp.mean((x @ w["b"]) ** 2) + jax.lax.stop_gradient(jnp.mean(found**2))


def filtered(w, x):
    spectrum = jnp.fft.rfft(x @ w["a"], axis=0) * jnp.exp(1j * jnp.arange(5.0))[:, None]
    return jnp.mean(jnp.tanh(jnp.fft.irfft(spectrum, axis=0) @ w["b"]) ** 2)


FUNCTIONS = [
    *(layers, scanned, branching, checkpointed, with_own_rule, searching, repeated, filtered),
]


def problem(fun, policy="mixed_bfloat16"):
    numbers = fresh_rng()
    draw = lambda *shape: jnp.asarray(numbers.normal(size=shape), jnp.float32)  # noqa: E731
    w = {"a": 0.5 * draw(4, 4), "b": 0.5 * draw(4, 4)}
    program = make_program("explain", fun, get_policy(policy), (w, draw(8, 4)), {}, 0, False)
    return program, masked(program.jaxpr, root_of(program.jaxpr))


def run_at(program, block, mask):
    return jax.jit(
        lambda mask, *args: evaluate(block, split(block, mask), args),
    )(jnp.asarray(mask, jnp.float32), *program.inputs(1.0))


def distance(got, wanted):
    pairs = [[np.asarray(x, np.float64) for x in pair] for pair in zip(got, wanted, strict=True)]
    return np.sqrt(
        sum(np.sum((a - b) ** 2) for a, b in pairs) / sum(np.sum(b**2) for _, b in pairs)
    )


@pytest.mark.parametrize("fun", FUNCTIONS)
def test_a_mask_of_zeros_is_float32_and_one_of_ones_the_program(fun):
    program, block = problem(fun)
    assert block.size > 0
    exact = interpret(program.jaxpr, program.inputs(1.0), Wide())
    planned = program.compiled(*program.inputs(1.0))
    assert distance(run_at(program, block, np.zeros(block.size)), exact) < 1e-6
    # The compiler adds in another order, and a last bit of float32 may round another way.
    got = run_at(program, block, np.ones(block.size))
    assert distance(got, planned) < 0.5 * distance(planned, exact)


def test_what_is_in_16_bits_has_one_place():
    program, block = problem(layers)
    # Compilers would skip the rounding of a result without this mark, which rounds nothing more.
    assert "reduce_precision" in str(program.jaxpr)
    assert not any(step.eqn.primitive.name == "reduce_precision" for step in block.places)


@pytest.mark.parametrize("fun", [layers, scanned, filtered])
def test_segments_change_no_result_and_no_derivative(fun):
    program, block = problem(fun)
    cut = segments(block, [4])
    assert len(cut) > 1
    assert [step for part in cut for step in part.steps] == block.steps

    def derivative(counts):
        run = functools.partial(evaluate, block, counts=counts)
        summed = lambda m: sum(  # noqa: E731
            jnp.sum(x) for x in run(split(block, m), program.inputs(1.0))
        )
        return jax.jit(jax.value_and_grad(summed))(jnp.zeros(block.size))

    for got, wanted in zip(derivative([4]), derivative([]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-7)


def test_segments_that_a_sum_does_not_depend_on_are_skipped():
    def program(x):
        smooth = jnp.sin(x).astype(jnp.bfloat16).astype(jnp.float32)
        return smooth, jnp.sqrt(smooth)

    jaxpr = jax.make_jaxpr(program)(jnp.zeros(4))
    block = masked(jaxpr, root_of(jaxpr))

    def first(m):
        smooth, root = evaluate(block, split(block, m), [jnp.zeros(4)], [4])
        return jnp.sum(smooth + 0.0 * root)

    # The derivative of the root is infinite: times 0, it would be NaN.
    assert np.isfinite(jax.grad(first)(jnp.zeros(block.size))).all()


def test_segments_are_computed_again_and_not_kept():
    def deep(w, x):
        for _ in range(24):
            x = jnp.tanh(jnp.sin(x)).astype(jnp.bfloat16).astype(jnp.float32) + w
        return jnp.sum(x)

    arrays = (
        jax.ShapeDtypeStruct((256,), jnp.float32),
        jax.ShapeDtypeStruct((256, 256), jnp.float32),
    )
    jaxpr = jax.make_jaxpr(deep)(*arrays)
    block = masked(jaxpr, root_of(jaxpr))

    def memory(*counts):
        run = lambda m, *args: evaluate(block, split(block, m), args, counts)[0]  # noqa: E731
        mask = jax.ShapeDtypeStruct((block.size,), jnp.float32)
        compiled = jax.jit(jax.grad(run)).lower(mask, *arrays).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory(6) < 0.7 * memory()
    # The number is chosen by what is held.
    assert memory(2, 6, 24) == min(memory(2), memory(6), memory(24))


def test_segments_end_where_little_is_handed_on():
    def program(x):
        for _ in range(4):
            x = jnp.sum(jnp.outer(jnp.sin(x), x), 0)
        return x

    jaxpr = jax.make_jaxpr(program)(jnp.zeros(8))
    block = masked(jaxpr, root_of(jaxpr))
    cut = segments(block, [3])
    shapes = [a.aval.shape for part in cut for step in part.steps for a in step.eqn.outvars]
    values = [v for part in cut for step in part.steps for v in step.outs]
    shape_of = dict(zip(values, shapes, strict=True))
    assert len(cut) > 2
    assert {shape_of[v] for part in cut for v in part.writes} == {(8,)}


def test_a_scan_has_an_entry_for_each_iteration():
    _, block = problem(scanned)
    inside = [each for each in block.blocks() if each.turns]
    assert {each.turns for each in inside} == {(3,)}
    assert block.size == len(block.places) + 3 * sum(len(each.places) for each in inside)


def test_what_leads_into_a_loop_without_a_derivative_is_hidden():
    _, block = problem(searching)
    behind = hidden(block)
    assert behind.any()
    assert not behind.all()
    assert not hidden(problem(layers)[1]).any()


def test_operations_in_a_loop_of_unknown_length_have_entries_of_their_own():
    program, block = problem(repeated)
    (loop,) = (step for step in block.steps if step.opaque)
    _, body = loop.blocks
    assert {"dot_general"} <= {step.eqn.primitive.name for step in body.places}
    masks = split(block, np.zeros(block.size))
    masks[body.number] = np.ones(len(body.places))
    mask = np.concatenate([np.ravel(masks[each.number]) for each in block.blocks()])
    assert hidden(block)[mask > 0].all()
    exact = run_at(program, block, np.zeros(block.size))
    assert 0 < distance(run_at(program, block, mask)[:1], exact[:1]) < 0.1


def test_what_jax_does_not_reverse_is_opaque():
    def program(x, w, sizes):
        return jax.grad(lambda w: jnp.sum(jax.lax.ragged_dot(x, w, sizes) ** 2))(w)

    shapes = (8, 4), (2, 4, 4)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.make_jaxpr(program)(*args, jax.ShapeDtypeStruct((2,), jnp.int32))
    block = masked(jaxpr, root_of(jaxpr))
    run = lambda x, w, s: evaluate(block, split(block, jnp.zeros(0)), [x, w, s])  # noqa: E731
    # Whether JAX has the rule or not, its reverse can be traced.
    reverse = lambda x, w, s: jax.vjp(lambda x: run(x, w, s), x)[1]([w])  # noqa: E731
    jax.eval_shape(reverse, *args, jax.ShapeDtypeStruct((2,), jnp.int32))


def test_what_refuses_the_derivative_by_an_operand_is_opaque():
    solve = jex.Primitive("solve_of_a_package")
    solve.def_abstract_eval(lambda x, state: x)

    def derivative(primals, tangents):
        assert type(tangents[1]) is ad.Zero  # as lineax has it
        return solve.bind(*primals), tangents[0] * primals[1]

    ad.primitive_jvps[solve] = derivative
    (eqn,) = jax.make_jaxpr(solve.bind)(jnp.ones(3), jnp.ones(3)).eqns
    assert not has_derivative(eqn)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_what_is_kept_in_16_bits_is_rounded_once_and_may_be_subnormal(half):
    x = jnp.array([1 / 3, 1e-6], jnp.float32)
    kept = jax.jit(lambda x: _kept(x.astype(half)))(x)
    assert (kept == x.astype(half).astype(jnp.float32)).all() and (kept != x).all()


def test_moves_round_nothing():
    jaxpr = jax.make_jaxpr(lambda x: (x.T, -x, x + x, x.astype(jnp.float32)))(
        jnp.ones((2, 3), jnp.bfloat16)
    )
    found = {eqn.primitive.name: rounds(eqn) for eqn in jaxpr.eqns}
    assert not found["transpose"]
    assert found["add"]
    assert not found["convert_element_type"]


def test_what_an_operation_reads_in_16_bits_has_an_entry_of_its_own():
    program, _ = problem(layers)
    plain = masked(program.jaxpr, root_of(program.jaxpr))
    ops = {step.site.op for step in plain.steps if step.eqn.primitive.name == "dot_general"}
    block = masked(program.jaxpr, root_of(program.jaxpr), ops)
    reading = [step for step in block.steps if step.reading is not None]
    assert reading and {step.site.op for step in reading} <= ops
    assert block.size == plain.size + len(reading)
    # With all entries of results at 0, operands that are rounded are the only error.
    mask = np.zeros(block.size)
    exact = run_at(program, block, mask)
    mask[[step.reading for step in reading]] = 1
    planned = program.compiled(*program.inputs(1.0))
    assert 0 < distance(run_at(program, block, mask), exact) < 2 * distance(planned, exact)


def test_squares_of_many_numbers_are_those_of_a_part_of_all_columns(monkeypatch):
    numbers = fresh_rng()
    error = jnp.asarray(numbers.normal(size=(300, 14)) * np.arange(14), jnp.float32)
    cotangent = jnp.asarray(numbers.normal(size=error.shape), jnp.float32)
    _, (whole, squares), _ = _sum_of_squares(error, cotangent)
    np.testing.assert_allclose(squares, np.sum(np.square(cotangent * error)), rtol=1e-5)
    monkeypatch.setattr("mpjax._src.tools.instruments.masked.MANY", 100)
    _, (again, part), _ = _sum_of_squares(error, cotangent)
    assert again == whole and part != squares
    np.testing.assert_allclose(part, squares, rtol=0.4)
