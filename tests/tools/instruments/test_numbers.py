"""One numbering: a number in a report of an instrument is that row of explain's."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import PROGRAMS, W, X
from support import normal, thorough_but

import mpjax

# What stands for the program inside of it.
WHOLE = ("custom_jvp_call", "custom_vjp_call", "while", "scan", "cond", "remat2")

ADDED = ("convert_element_type", "stop_gradient")


def activations(w, x):
    h = jax.nn.relu(x @ w)
    return jnp.sum(jax.nn.silu(h @ w) @ w)


def solver(w, x):
    def unfinished(c):
        return jnp.max(jnp.abs(c[0] - c[1])) > 1e-6

    h = jax.nn.relu(x @ w) * 0.1
    h = lax.while_loop(unfinished, lambda c: (0.2 * c[0] @ w + h, c[0]), (h, h + 1))[0]
    return jnp.sum(jax.nn.relu(h) @ w)


CASES = {name: PROGRAMS[name] for name in ("mlp", "attention", "custom_jvp", "layers", "rnn")}
CASES |= {"activations": activations, "solver": solver}


@pytest.mark.parametrize("name", thorough_but(CASES, "custom_jvp", "solver"))
def test_an_op_of_compare_is_a_row_of_explain(name):
    rows = mpjax.explain(CASES[name], "mixed_bfloat16")(W, X).rows
    compared = mpjax.compare(CASES[name], "mixed_bfloat16", None)(W, X).rows
    pairs = [(rows[row.op], row) for row in compared if row.op is not None]
    assert len(pairs) > 2
    for origin, row in pairs:
        turned = (origin.primitive, row.primitive) == ("dot_general", "transpose")  # for XLA:CPU
        if row.primitive not in ADDED and origin.primitive not in WHOLE and not turned:
            assert (origin.primitive, origin.source) == (row.primitive, row.source)


@pytest.mark.parametrize("name", thorough_but(sorted(CASES.keys() - {"solver"}), "rnn"))
def test_backward_op_of_compare_is_a_row_of_explain(name):
    rows = mpjax.explain(CASES[name], "mixed_bfloat16", 0)(W, X).rows
    compared = mpjax.compare(CASES[name], "mixed_bfloat16", 0)(W, X).rows
    assert {row.backward for row in compared if row.op is not None} == {False, True}
    for row in compared:
        if row.op is not None and row.primitive == "dot_general":
            assert rows[row.op].primitive in ("dot_general", *WHOLE)
            assert rows[row.op].forward is None


def test_an_op_of_find_nonfinite_is_a_row_of_explain():
    def fun(w, x):
        h = jax.nn.relu(jax.nn.relu(x @ w) @ w)
        return jnp.sum(jnp.log(h * 0))

    found = mpjax.find_nonfinite(fun, "mixed_bfloat16", argnums=None)(W, X)
    row = mpjax.explain(fun, "mixed_bfloat16")(W, X).rows[found.op]
    assert row.primitive == "log" and row.source == found.source


def test_name_of_an_override_pattern_makes_no_shortfall():
    """A reason is text for people: what an override is called does not make it a shortfall."""

    def fun(w, x):
        with jax.named_scope("left alone"):
            h = jnp.tanh(x @ w)
        with jax.named_scope("left as written"):
            return jnp.sum(jax.nn.relu(h) @ w)

    policy = mpjax.get_policy("mixed_bfloat16").override({"*left a*": "float32"})
    named = mpjax.get_policy("mixed_bfloat16").override(
        {"*left alone": "float32", "*left as written": "float32"}
    )
    short = mpjax.explain(fun, named)(W, X).shortfalls()
    assert {row.primitive for row in short} == {"dot_general"}
    plain = mpjax.explain(fun, policy)(W, X)
    assert [row.primitive for row in plain.shortfalls()] == [row.primitive for row in short]


def test_shortfalls_of_explain_name_what_stays_float32():
    def fun(w, x):
        exact = jnp.dot(x, w, precision="highest")
        called = jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), exact)
        return jnp.sum(solver(w, called)), jnp.arange(3) + 1, mpjax.autocast(jnp.sin, "float32")(x)

    short = mpjax.explain(fun, "mixed_bfloat16")(W, normal(0, 4, 8)).shortfalls()
    assert [row.primitive for row in short][:3] == ["dot_general", "pure_callback", "while"]
    policy = mpjax.get_policy("mixed_bfloat16").override({"*pure_callback": "float32"})
    short = mpjax.explain(fun, policy)(W, X).shortfalls()
    assert "pure_callback" not in [row.primitive for row in short]


@pytest.mark.parametrize("tool", [mpjax.compare, mpjax.find_nonfinite])
def test_loss_with_an_aux_draws_a_warning_to_pass_has_aux(tool):
    """Silence would pass the forward pass off as the whole."""

    def fun(w, x):
        return jnp.mean((x @ w) ** 2), {"out": x @ w}

    args = jnp.ones((3, 3)), jnp.ones((2, 3))
    with pytest.warns(UserWarning, match=r"has_aux=True; argnums=None") as caught:
        tool(fun, "mixed_float16")(*args)
    assert caught[0].filename == __file__
    tool(fun, "mixed_float16", has_aux=True)(*args)
    tool(fun, "mixed_float16", argnums=None)(*args)
