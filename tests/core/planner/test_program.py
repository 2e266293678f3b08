"""What a planned program computes: what is asked for, once, and its effects in their order."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from joint import EXACT, planned
from planners import kept
from support import assert_near, equations, normal, thorough_but

from mpjax._src.core.base import _jax
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.program import Program

WS = [normal(i, 16, 16, scale=0.25) for i in range(4)]
X = normal(9, 8, 16)


def net(ws, x):
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return x


def loss(ws, x):
    return jnp.mean(net(ws, x) ** 2)


def scanned(ws, x):
    return jnp.mean(lax.scan(lambda c, w: (c + jnp.tanh(c @ w), jnp.sum(c)), x, ws)[0] ** 2)


def with_aux(ws, x):
    y = net(ws, x)
    return jnp.mean(y**2), (net([w * 2 for w in ws], x), y, jnp.argmax(y))


def two(ws, x):
    y = net(ws[:2], x)
    return jnp.mean(y**2), jnp.mean(net(ws[2:], lax.stop_gradient(y)) ** 2)


def part(i, fun):
    return lambda f: lambda ws, x: jax.grad(lambda w: fun(f, [*ws[:i], w, *ws[i + 1 :]], x))(ws[i])


PLAIN = lambda f, ws, x: f(ws, x)  # noqa: E731
ASKED = {
    "value": (loss, lambda f: f),
    "all gradients": (loss, jax.grad),
    "gradient of the data": (loss, lambda f: jax.grad(f, 1)),
    "gradient of the last": (loss, part(3, PLAIN)),
    "gradient of the first": (loss, part(0, PLAIN)),
    "has_aux": (with_aux, lambda f: lambda *a: jax.value_and_grad(f, has_aux=True)(*a)[1]),
    "first of two": (two, part(0, lambda f, ws, x: f(ws, x)[0])),
    "second of two": (two, part(3, lambda f, ws, x: f(ws, x)[1])),
    "jvp": (loss, lambda f: lambda ws, x: jax.jvp(f, (ws, x), (ws, x))),
    "linearize": (loss, lambda f: lambda ws, x: jax.linearize(f, ws, x)[1](ws, x)),
    "checkpoint": (loss, lambda f: jax.grad(jax.checkpoint(f))),
    "scan": (scanned, jax.grad),
    "scan, gradient of the data": (scanned, lambda f: jax.grad(f, 1)),
}


@pytest.mark.parametrize("asked", thorough_but(ASKED, "all gradients", "second of two", "scan"))
def test_nothing_runs_that_jax_would_not_run(asked):
    fun, ask = ASKED[asked]
    args = (jnp.stack(WS), X) if fun is scanned else (WS, X)
    plain, ours = (jax.jit(ask(f)).lower(*args).compile() for f in (fun, planned(fun, EXACT)))
    assert_near(ours(*args), plain(*args), rtol=1e-4)
    assert ours.cost_analysis()["flops"] <= 1.1 * plain.cost_analysis()["flops"]


def test_results_that_are_not_floats():
    def fun(ws, x):
        y = net(ws, x)
        return jnp.sum(y**2), jnp.argmax(y, -1)

    zero = np.zeros((8,), jax.dtypes.float0)
    ours, plain = (jax.vjp(f, WS, X)[1]((1.0, zero)) for f in (planned(fun, EXACT), fun))
    assert_near(ours, plain, rtol=1e-4)


def test_arguments_that_are_not_floats():
    def fun(i, w):
        return jnp.sum((w @ w)[i] ** 2)

    at = jnp.arange(3)
    ours, plain = (
        jax.grad(f, (0, 1), allow_int=True)(at, WS[0]) for f in (planned(fun, EXACT), fun)
    )
    assert ours[0].dtype == jax.dtypes.float0
    assert_near(ours[1], plain[1], rtol=1e-4)


def test_typed_keys():
    def fun(key, w):
        kept = jax.random.bernoulli(key, 0.5, X.shape)
        return jnp.mean((jnp.where(kept, X @ w, 0) @ w) ** 2)

    key = jax.random.key(3)
    assert_near(
        jax.grad(planned(fun, EXACT), 1)(key, WS[0]), jax.grad(fun, 1)(key, WS[0]), rtol=1e-4
    )
    keys, _ = planned(lambda k, w: (jax.random.split(k), w @ w))(key, WS[0])
    assert (jax.random.key_data(keys) == jax.random.key_data(jax.random.split(key))).all()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_effects_happen_once_and_in_order(wrap):
    seen = []

    def fun(w, x):
        y = x @ w
        jax.debug.callback(lambda v: seen.append(1), y.sum(), ordered=True)
        z = y @ w
        jax.debug.callback(lambda v: seen.append(2), z.sum(), ordered=True)
        return jnp.mean(z**2)

    jax.block_until_ready(wrap(jax.grad(planned(fun)))(WS[0], X))
    jax.effects_barrier()
    assert seen == [1, 2]


def test_rules_of_their_author_outlive_the_first_derivative():
    """The derivative by one argument leaves the rule for the other as it was."""

    @jax.custom_vjp
    def straight(x):
        return jnp.round(x)

    straight.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (7 * ct,))

    def fun(w, s):
        return jnp.sum(jnp.tanh(X @ w) ** 2) * straight(s)

    def mixed(f):
        return jax.grad(lambda s: jnp.sum(jax.grad(f)(WS[0], s)))(jnp.float32(2.2))

    assert_near(mixed(planned(fun, EXACT)), mixed(fun), rtol=1e-4)


def test_residuals_that_are_python_values_come_back_as_they_are():
    rule = jax.custom_vjp(lambda x: jnp.sin(x))

    def back(kept, ct):
        x, flag, count = kept
        assert flag is True and count == 3
        return (count * ct * jnp.cos(x),)

    rule.defvjp(lambda x: (jnp.sin(x), (x, True, 3)), back)
    ours, theirs = (jax.grad(lambda x, f=f: jnp.sum(f(x))) for f in (planned(rule, EXACT), rule))
    assert_near(ours(X), theirs(X), rtol=1e-4)


def test_a_jit_inside_may_donate():
    fun = planned(lambda x: jax.jit(lambda x: x + 1, donate_argnums=0)(x))
    x = jnp.ones((4, 4))
    fun(x)
    assert x.is_deleted()


def test_a_literal_may_be_the_tangent_of_an_integer():
    zero = np.zeros((), jax.dtypes.float0)

    def fun(x):
        body = lambda i, c: (jnp.sin(c[0]), c[1])  # noqa: E731
        return lax.fori_loop(0, 2, body, (x, zero))[0]

    assert_near(planned(fun)(X), jnp.sin(jnp.sin(X)), rtol=1e-6)


def test_programs_read_the_same_in_every_jaxpr():
    texts = {str(jax.make_jaxpr(planned(net))(WS, X)) for _ in range(2)}
    assert len(texts) == 1 and "Program(bfloat16)" in texts.pop()


@pytest.mark.parametrize("loop", [False, True])
def test_what_a_rule_computes_again_is_not_handed_over(loop):
    """As `jax.checkpoint` was written by hand before there was one."""

    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def block(x, w):
        return lax.scan(lambda c, _: (layer(c, w), None), x, length=2)[0] if loop else layer(x, w)

    rule = jax.custom_vjp(block)
    rule.defvjp(lambda x, w: (block(x, w), (x, w)), lambda kept, ct: jax.vjp(block, *kept)[1](ct))
    fun = lambda x, w: jnp.sum(rule(rule(x, w), w))  # noqa: E731
    assert kept(planned(fun, EXACT), (X, WS[0])) == kept(fun, (X, WS[0])) == X.nbytes


def test_scopes_and_lines_stay_on_the_derivative():
    def fun(w, x):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.tanh(x @ w))

    jaxpr = jax.make_jaxpr(jax.grad(planned(fun)))(WS[0], X)
    matmuls = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert len(matmuls) == 2
    assert all("layer" in str(e.source_info.name_stack) for e in matmuls)


def test_refs_of_its_own():
    def fun(w, x):
        total = jax.new_ref(jnp.zeros_like(x))
        for _ in range(2):
            total[...] += jnp.tanh(x @ w)
        return jnp.sum(total[...] ** 2)

    for wrap in (lambda f: f, jax.grad, lambda f: jax.jit(jax.grad(f))):
        assert_near(wrap(planned(fun, EXACT))(WS[0], X), wrap(fun)(WS[0], X), rtol=1e-4)


def test_zero_cotangents_run_nothing():
    def fun(w, x):
        y = jnp.tanh(x @ w)
        return jnp.sum(y), jnp.sum(jnp.tanh(y @ w) @ w)

    program = Program(jax.make_jaxpr(fun)(WS[0], X), EXACT)
    cut = program.cut((True, False))

    def matmuls(*nonzero):
        names = [e.primitive.name for e in cut.backward(nonzero)[0].closed.eqns]
        return names.count("dot_general")

    assert [matmuls(True, False), matmuls(False, True), matmuls(True, True)] == [1, 5, 5]


def test_what_is_handed_over_stands_behind_a_barrier():
    """XLA would find it equal to the forward part's, and keep what that is computed from."""
    program = Program(jax.make_jaxpr(lambda w, x: [jnp.sum(jnp.tanh(x @ w))])(WS[0], X), EXACT)
    cut = program.cut((True, False))
    back = cut.backward((True,))[0].closed
    barrier = back.eqns[0]
    assert barrier.primitive.name == "optimization_barrier"
    assert len(cut.saved) == len(barrier.invars) and {*barrier.invars} <= {*back.jaxpr.invars}


# ---- what is computed again -------------------------------------------------------------------


@pytest.mark.parametrize("columns", [40, 41])
def test_rows_that_a_matmul_pads_are_behind_no_barrier(columns, monkeypatch):
    """XLA would copy them without the padding."""
    monkeypatch.setattr(rounding, "SMALL", 1)
    w = normal(0, 16, columns)
    fun = planned(lambda w, x: jnp.mean(jax.nn.logsumexp(x @ w, -1)))
    jaxpr = jax.make_jaxpr(jax.grad(fun))(w, X)
    behind = [e for e in equations(jaxpr) if e.primitive.name == "optimization_barrier"]
    shapes = {v.aval.shape for e in behind for v in e.outvars}
    assert ((8, columns) in shapes) == (columns % 8 == 0)
    want = jax.grad(lambda w, x: jnp.mean(jax.nn.logsumexp(x @ w, -1)))(w, X)
    assert_near(jax.jit(jax.grad(fun))(w, X), want, 0.02)


# ---- lines --------------------------------------------------------------------------------------


def at_three_lines(w, x):
    x = jax.nn.relu(jnp.tanh(x @ w))
    x = jax.nn.relu(jnp.tanh(x @ w))
    x = jax.jit(jnp.tanh)(x @ w)
    return jnp.sum(x)


def test_equal_equations_have_their_own_lines():
    first = inspect.getsourcelines(at_three_lines)[1]
    jaxpr = jax.make_jaxpr(jax.value_and_grad(planned(at_three_lines)))(WS[0], X)
    made = {"tanh": range(1, 4), "dot_general": range(1, 4), "max": range(1, 3), "mul": range(1, 4)}
    for name, lines in made.items():
        found = {_jax.source_lines(e)[0] for e in equations(jaxpr) if e.primitive.name == name}
        wanted = {f"{__file__}:{first + i}" for i in lines}
        assert wanted <= found if name == "mul" else wanted == found, name


# ---- what custom rules get ----------------------------------------------------------------------


def test_a_result_that_no_gradient_reaches_has_a_symbolic_zero():
    def fun(x):
        return jnp.sum(lax.stop_gradient(x @ WS[0])), jnp.sum(jnp.argmax(x) * 1.0), jnp.sum(x)

    moves = []

    @jax.custom_jvp
    def told(*outs):
        return outs

    @functools.partial(told.defjvp, symbolic_zeros=True)
    def _(primals, tangents):
        moves.extend(type(t) is not SymbolicZero for t in tangents)
        return primals, primals

    jax.grad(lambda x: told(*planned(fun)(x))[2])(X)
    assert moves == [False, False, True]
