"""Calls and results are taken apart into arrays and constants, and put together again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.trees import is_array
from mpjax._src.core.program.trace import Flat, parameters_of, trace

X = jnp.ones((2, 3), jnp.bfloat16)
CALL = ({"w": X, "kind": "mean"}, 3), {"key": np.float32(2), "flag": None}


def test_flat_tells_arrays_from_other_leaves():
    flat = Flat.of(CALL)
    assert flat.traced == (False, True, False, True)
    assert flat.others == ("mean", 3)
    assert [(a.dtype.name, a.shape) for a in flat.avals] == [("bfloat16", (2, 3)), ("float32", ())]
    assert flat.paths == ("w", "")
    assert flat.filled("ab") == (({"w": "a", "kind": "mean"}, 3), {"key": "b", "flag": None})
    assert flat.spread("ab") == [None, "a", None, "b"]


@pytest.mark.parametrize(("is_traced", "count"), [(None, 2), (is_array, 1)])
def test_flat_takes_a_shape_for_an_array_by_default(is_traced, count):
    tree = X, jax.ShapeDtypeStruct((4,), jnp.float32)
    assert len((Flat.of(tree, is_traced) if is_traced else Flat.of(tree)).arrays) == count


def test_flat_names_begin_with_the_parameter():
    def fun(params, *rest, scale):
        del params, rest, scale

    args = {"w": X}, X, X
    flat = Flat.of((args, {"scale": X}))
    parameters = parameters_of(fun, args)
    assert parameters == ["params", "rest", "argument 2"]
    whole = flat.names(parameters, lambda name, keys: f"{name}{jax.tree_util.keystr(keys)}")
    assert whole == ("params['w']", "rest", "argument 2", "scale")
    assert flat.names(parameters, lambda name, keys: path_of(keys) or name)[0] == "w"
    assert parameters_of(fun, ()) == []
    assert parameters_of(dict.fromkeys, (1,)) == ["iterable"]
    assert parameters_of(max, (1, 2)) == ["argument 0", "argument 1"]  # it has no signature


def test_a_result_is_put_together_again_without_a_tracer_of_its_trace():
    def fun(state, factor, key, flag):
        return {"new": state["w"] * factor, "kind": state["kind"], "flag": flag}

    call = Flat.of(((CALL[0][0], 3), {"key": np.float32(2), "flag": print}))
    traced = trace(call.on(fun), call.avals, "mine")
    assert traced.out.arrays == () and traced.out.others == (print, "mean")
    assert traced.rebuild(["array"]) == {"new": "array", "kind": "mean", "flag": print}
    assert traced.returned()["new"] == jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    assert [v.aval.shape for v in traced.jaxpr.jaxpr.invars] == [(2, 3), ()]
