"""The memory of a step over time: what is kept, computed again, and the cotangents beside it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from support import normal

import mpjax
from mpjax._src.autocast import budget, timeline
from mpjax._src.autocast.budget import Kept, orders
from mpjax._src.autocast.choice import Part, choose
from mpjax._src.autocast.lean import checkpoints
from mpjax._src.autocast.plan import AGAIN, _pick, analyze, outline
from mpjax._src.autocast.sizes import stored_bytes
from mpjax._src.autocast.steps import KeptAttention
from mpjax._src.autocast.timeline import Moment, moments, peak, relaxed
from mpjax._src.base.dtypes import FLOAT32

W, X = normal(1, 8, 8), normal(2, 64, 8)
ARRAY = 2 * X.size  # in 16 bits


def kept_of(fun, *args):
    """Returns the tables of a program, its block, and what lean keeps of it."""
    traced = jax.make_jaxpr(fun)(*args)
    policy = mpjax.get_policy("mixed_bfloat16").replace(storage=0.5)
    outlined = outline(traced.jaxpr, traced.consts, policy)
    tables, block, picked = analyze(outlined, [FLOAT32] * len(args)), outlined.block, {}
    _pick(block, tables, AGAIN, {*block.invars}, (), picked)
    chosen = {b: choose(tables, one.part) for b, one in picked.items()}
    steps = {b: checkpoints(tables, one.part, chosen[b]) for b, one in picked.items()}
    return tables, block, Kept(chosen, steps)


def timeline_of(fun, *args):
    tables, block, kept = kept_of(fun, *args)
    return [*moments(tables, block, orders(kept, {b: {} for b in kept.steps}))]


def product_chain(layers, w, x):
    for _ in range(layers):
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


@pytest.mark.parametrize("layers", [2, 8])
def test_peak_of_a_chain_is_what_it_keeps_and_two_cotangents(layers):
    found = timeline_of(functools.partial(product_chain, layers), W, X)
    total = sum(moment.kept for moment in found)
    assert total >= (layers - 1) * ARRAY
    # The last product reads the cotangent of its result and writes that of its operand.
    assert total < peak(found) <= total + 2 * ARRAY


def test_cotangent_of_a_residual_exists_as_long_as_its_branch():
    def branch(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w) @ w

    def most(fun):
        return max(moment.beside for moment in timeline_of(fun, W, X))

    plain = most(lambda w, x: jnp.sum(branch(x @ w, w)))
    residual = most(lambda w, x: jnp.sum((x @ w) + branch(x @ w, w)))
    assert ARRAY <= residual - plain < 2 * ARRAY


def test_gradient_of_a_parameter_that_is_read_twice_exists_in_between():
    table = normal(3, 64, 8)

    def tied(table, x):
        first = x @ table.T
        return jnp.sum(jnp.tanh(jnp.tanh(first) @ table) @ table.T)

    def apart(table, x):
        return jnp.sum(jnp.tanh(x @ table.T))

    beside = [max(m.beside for m in timeline_of(fun, table, X)) for fun in (tied, apart)]
    assert beside[0] >= beside[1] + 4 * table.size


def test_elementwise_operations_and_sums_write_no_cotangents():
    def fused(times, w, x):
        y = x @ w
        for _ in range(times):
            y = jnp.tanh(jax.nn.relu(y) - jnp.mean(y, 1, keepdims=True))
        return jnp.sum(y @ w)

    most = [max(m.beside for m in timeline_of(functools.partial(fused, n), W, X)) for n in (1, 9)]
    assert most[0] == most[1] <= 4 * ARRAY


def test_weights_of_an_attention_are_kept_in_16_bits():
    q, k = normal(1, 64, 8), normal(2, 32, 8)
    tables, _, kept = kept_of(attention, q, k)
    found = [v for v in tables.marks.kept_as if v.aval.shape == (64, 32)]
    assert [stored_bytes(tables, v) for v in found] == [2 * 64 * 32]
    assert any(found[0] in chosen.kept for chosen in kept.chosen.values())


def test_a_group_exists_until_its_own_backward_pass():
    group, other = object(), object()
    found = [
        Moment(10),
        Moment(0, 5, 1, 3, group),
        Moment(0, 5, 7, 3, group),
        Moment(1, 2, 0, 1, other),
    ]
    assert peak(found) == 10 + 5 + 5 + 7
    assert peak(found[:2]) == 10 + 5 + 1


def test_groups_keep_their_values_from_the_last_one_on_as_far_as_the_budget_allows():
    groups = [object() for _ in range(4)]
    found = [Moment(0, 10, 0, 3, group) for group in groups]
    for most, again in ((10, 3), (19, 3), (20, 2), (30, 1), (40, 0)):
        after = relaxed(found, most)
        assert peak(after) <= most
        assert [m.group for m in after if m.group] == groups[:again]
    assert sum(m.moved for m in relaxed(found, 30)) == 3


def test_fused_steps_are_those_that_compilers_fuse():
    def fun(w, x):
        y = jax.nn.relu(x @ w)
        return jax.lax.scan(lambda c, _: (jnp.sin(c), None), jnp.sum(y), None, length=3)[0]

    _, block, _ = kept_of(fun, W, X)
    fused = {op.name: timeline.is_fused(op) for op in block.ops}
    assert not fused["dot_general"] and not fused["scan"] and fused["reduce_sum"]
    assert all(fused.get(name, True) for name in ("custom_jvp_call", "jit", "max"))


def test_fused_operations_write_their_cotangents_over_those_of_their_results():
    tables, block, kept = kept_of(functools.partial(product_chain, 3), W, X)
    order = orders(kept, {b: {} for b in kept.steps})
    found = moments(tables, block, order)
    beside = {step: m.beside for (step, _), m in zip(order[block].steps, found, strict=True)}
    assert max(size for op, size in beside.items() if op.name == "tanh") < 2 * ARRAY


# ---- results of a step ---------------------------------------------------------------------------


def attention(q, k):
    return jnp.sum(jax.nn.softmax(q @ k.T) @ k)


def attended():
    """Returns the tables of an attention, its part, its step, and that step's results."""
    tables, block, kept = kept_of(attention, normal(1, 64, 8), normal(2, 32, 8))
    steps = [step for step, _ in orders(kept, {b: {} for b in kept.steps})[block].steps]
    (step,) = (s for s in steps if isinstance(s, KeptAttention))
    part = Part(steps, block.outvars, {*block.invars}, block.in_loop)
    return tables, part, step, *step.outs


def test_each_result_of_an_attention_has_its_own_price():
    tables, _, step, result, weights = attended()
    sizes = {v: stored_bytes(tables, v) for v in (*step.ins, *step.outs)}
    scores, values = (max(step.ins, key=sizes.get), min(step.ins, key=sizes.get))
    assert budget._price(tables, step, weights) == sizes[scores] + sizes[weights]
    assert budget._price(tables, step, result) == sizes[weights] + sizes[values] + sizes[result]


def test_a_result_is_computed_again_from_the_results_that_it_is_made_of(monkeypatch):
    tables, part, step, result, weights = attended()
    monkeypatch.setattr(KeptAttention, "needs", property(lambda self: iter(self.body.outs)))
    for price, keeps in ((0, False), (10**9, True)):
        costs = {step: {result: 0, weights: price}}
        chosen = choose(tables, part, costs=costs, there=step.ins)
        assert (result in chosen.kept) is keeps
