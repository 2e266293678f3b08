"""explain of the program that trains: what it refuses, as compare does."""

import jax
import jax.numpy as jnp
import pytest
from programs import W, X

import mpjax


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


@pytest.mark.parametrize("tool", [mpjax.explain, mpjax.compare])
@pytest.mark.parametrize("argnums", [5, -3, True, (0, False), 1.0, "0", (0, 2), ()])
def test_argnums_that_are_no_positions_raise(tool, argnums):
    name = tool.__name__
    with pytest.raises(
        ValueError, match=rf"{name}: argnums=.* must be positions.*from 0 to 1, .* called with 2"
    ):
        tool(loss, "mixed_bfloat16", argnums)(W, X)


@pytest.mark.parametrize("tool", [mpjax.explain, mpjax.compare])
def test_argnums_without_positional_or_floating_arguments_raise(tool):
    with pytest.raises(ValueError, match=r"argnums=0 .*positional arguments, but there are none"):
        tool(loss, "mixed_bfloat16", 0)(w=W, x=X)
    with pytest.raises(ValueError, match="argnums=1: these arguments contain no floating arrays"):
        tool(lambda w, n: jnp.sum(w) * n[1], "mixed_bfloat16", 1)(W, jnp.arange(3))


@pytest.mark.parametrize("argnums", [1, -1, (0, 1), [0, -1], jnp.int32(1).item()])
def test_argnums_take_negative_and_several_positions(argnums):
    report = mpjax.explain(loss, "mixed_bfloat16", argnums)(W, X)
    assert report.stored_after is not None
    compared = mpjax.compare(loss, "mixed_bfloat16", argnums)(W, X)
    assert any(name.startswith("gradient") for name in compared.results)


NO_LOSS = {
    "an array": lambda w, x: x @ w,
    "an integer": lambda w, x: jnp.argmax(x @ w),
    "a complex number": lambda w, x: jnp.sum(x @ w).astype(jnp.complex64),
    "a tuple": lambda w, x: (loss(w, x), x),
    "nothing": lambda w, x: None,
    "a Python number": lambda w, x: 1.0,
}


@pytest.mark.parametrize("name", NO_LOSS)
def test_explain_refuses_argnums_of_a_function_that_is_no_loss(name):
    message = r"explain: .*one real floating number of shape \(\), but.*pass argnums=None"
    with pytest.raises(TypeError, match=message):
        mpjax.explain(NO_LOSS[name], "mixed_bfloat16", 0)(W, X)
    if name not in ("nothing", "a Python number"):  # of these nothing can be reported
        assert mpjax.explain(NO_LOSS[name], "mixed_bfloat16")(W, X).stored_after is None


@pytest.mark.parametrize("tool", [mpjax.explain, mpjax.compare])
def test_has_aux_without_an_aux_raises(tool):
    with pytest.raises(TypeError, match=r"has_aux=True, so .* must return \(loss, aux\)"):
        tool(loss, "mixed_bfloat16", 0, has_aux=True)(W, X)


def test_explain_takes_an_aux_of_more_than_arrays():
    def fun(w, x):
        return loss(w, x), {"name": "mlp", "h": x @ w}

    report = mpjax.explain(fun, "mixed_bfloat16", 0, has_aux=True)(W, X)
    assert report.half_flops == 1 and jax.tree.leaves(report.to_dict())
