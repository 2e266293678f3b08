"""A policy makes one program of a function: every way in runs it, and every instrument shows it."""

import collections
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import equations, normal, thorough_but

import mpjax
import mpjax.linen
import mpjax.nnx
from mpjax._src.core.base import _jax
from mpjax._src.tools.instruments.programs import make_program

POLICIES = [
    *("bf16", "f16", "half", "bfloat16", "16-true", "bf16-true", "O3:bfloat16", "O3:float16"),
    *("params=float32,compute=bfloat16,output=float32", "params=f16,compute=f16,output=f16"),
    *("p=f32,c=f16,o=f32", "p=bf16,c=f16,o=f32", "p=f32,c=f32,o=bf16", "O0", "float32"),
    *("mixed_bfloat16", "mixed_float16", "16-mixed", "O1:bfloat16", "O2:float16", "O2:bfloat16"),
    *("O3:bfloat16,casting=op", "bf16,casting=op", "mixed_float16,casting=boundary"),
    *("mixed_bfloat16,storage=lean", "O2:float16,storage=0.5"),
]
# Both castings, all three settings of dtypes, and a way in that casts nothing.
QUICK = ("f16", "O3:bfloat16", "p=f32,c=f16,o=f32", "O2:bfloat16", "bf16,casting=op", "float32")
PARAMS = {"w": normal(0, 8, 4, scale=0.3), "b": normal(1, 4)}
BATCH = normal(2, 16, 8), normal(3, 16, 4)


def loss(params, batch):
    x, y = batch
    h = jnp.tanh(x @ params["w"]) + params["b"]
    p = jnp.exp(h) / jnp.sum(jnp.exp(h), -1, keepdims=True)
    return jnp.mean(jnp.square(p - y))


class Model(nnx.Module):
    def __init__(self, params):
        self.w, self.b = nnx.Param(params["w"]), nnx.Param(params["b"])


def of_model(model, batch):
    return loss({"w": model.w[...], "b": model.b[...]}, batch)


# ---- ways in: each returns the jaxpr of a gradient -----------------------------------------------


def stored(policy):
    return policy.cast_to_param(PARAMS)


def by_autocast(policy):
    return jax.make_jaxpr(jax.value_and_grad(mpjax.autocast(loss, policy)))(stored(policy), BATCH)


def by_step(policy):
    init, step = mpjax.build_train_step(loss, optax.sgd(0.1), policy)
    return jax.make_jaxpr(step)(init(PARAMS), BATCH)


def by_optimizer(policy):
    optimizer = mpjax.mixed_precision(optax.sgd(0.1), policy)
    gradient = optimizer.value_and_grad(loss, optimizer.init(stored(policy)))
    return jax.make_jaxpr(gradient)(stored(policy), BATCH)


def by_linen(policy):
    state = mpjax.linen.TrainState.create(
        apply_fn=None, params=PARAMS, tx=optax.sgd(0.1), policy=policy
    )
    return jax.make_jaxpr(state.value_and_grad(loss))(state.params, BATCH)


def by_nnx(policy):
    model = Model(PARAMS)
    optimizer = mpjax.nnx.Optimizer(model, optax.sgd(0.1), policy)
    graph, state = nnx.split((model, optimizer))

    def run(state, batch):
        model, optimizer = nnx.merge(graph, state)
        return mpjax.nnx.value_and_grad(of_model, optimizer)(model, batch)

    return jax.make_jaxpr(run)(state, BATCH)


WAYS = {"step": by_step, "optimizer": by_optimizer, "linen": by_linen, "nnx": by_nnx}


# ---- instruments ---------------------------------------------------------------------------------


def of_instruments(policy):
    """Returns the program that find_nonfinite, compare and tune run."""
    return make_program("test", loss, policy, (stored(policy), BATCH), {}, 0, False).jaxpr


def explained(policy):
    """Returns in what exp and the matmul compute, forward and backward, by the rows of explain."""
    rows = mpjax.explain(loss, policy, argnums=0)(stored(policy), BATCH).rows
    return {(r.primitive, r.computes_in) for r in rows if r.primitive in ("exp", "dot_general")}


SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
CASTS = ("convert_element_type", "reduce_precision", "broadcast_in_dim")


def operations(jaxpr):
    """Returns the operations of the loss: what a line of it makes, with all dtypes."""
    first = loss.__code__.co_firstlineno
    lines = {f"{__file__}:{first + i}" for i in range(1, 6)}
    found = collections.Counter()
    for eqn in equations(jaxpr):
        dtypes = tuple(SHORT.get(v.aval.dtype.name) for v in (*eqn.invars, *eqn.outvars))
        inside = _jax.source_lines(eqn)[0] in lines and not any(True for _ in inner(eqn))
        if inside and eqn.primitive.name not in CASTS:
            found[eqn.primitive.name, dtypes] += 1
    return found


def inner(eqn):
    return (v for v in jax.tree.leaves(eqn.params) if hasattr(v, "eqns") or hasattr(v, "jaxpr"))


@pytest.fixture(autouse=True)
def quiet():
    """These policies are asked for, and these gradients are not used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", thorough_but(POLICIES, *QUICK))
def test_every_way_in_and_every_instrument_has_one_program(name):
    policy = mpjax.get_policy(name)
    want = operations(by_autocast(policy))
    assert len([op for op in want if op[0] in ("exp", "dot_general")]) >= 2
    for way, program in WAYS.items():
        assert operations(program(policy)) == want, way
    assert operations(of_instruments(policy)) == want
    assert explained(policy) == {(n, d[0]) for n, d in want if n in ("exp", "dot_general")}


OVERFLOWS = np.full((4, 8), 12.0, np.float32), np.zeros((4, 4), np.float32)


@pytest.mark.parametrize("name", thorough_but(["f16", "O3:float16", "p=f32,c=f16,o=f32"], 2))
def test_an_overflow_of_the_step_is_found_where_it_is(name):
    """exp(12) is beyond float16. Operation by operation it would run in float32."""
    policy = mpjax.get_policy(name)
    params = {"w": jnp.zeros((8, 4)), "b": jnp.full(4, 12.0)}
    init, step = mpjax.build_train_step(loss, optax.sgd(0.1), policy)
    state, metrics = jax.jit(step)(init(params), OVERFLOWS)
    assert not metrics["loss_finite"] and int(state.skipped_steps) == 1
    args = policy.cast_to_param(params), OVERFLOWS
    report = mpjax.find_nonfinite(loss, policy)(*args)
    assert report.primitive == "exp" and report.source.startswith(__file__)
    compared = mpjax.compare(loss, policy, progress=False)(*args)
    assert max(row.overflow for row in compared.rows) == 1
    for way in (mpjax.autocast(loss, policy), lambda p, b: step(init(p), b)[1]["loss"]):
        assert not np.isfinite(way(*args))


def test_advice_on_an_overflow_names_the_casting_that_makes_it():
    params = {"w": jnp.zeros((8, 4)), "b": jnp.full(4, 12.0)}
    init, step = mpjax.build_train_step(loss, optax.sgd(0.1), "p=f32,c=f16,o=f32")
    for report in (
        mpjax.find_nonfinite(loss, "p=f32,c=f16,o=f32")(params, OVERFLOWS),
        mpjax.find_nonfinite(step)(init(params), OVERFLOWS),
    ):
        assert "casting=op" in report.advice and "The function itself casts" not in report.advice


TABLE = np.linspace(0, 1, 4).astype(np.float32)


@pytest.mark.parametrize("way", ["autocast", "step"])
def test_lint_looks_at_what_runs_where_arguments_are_cast(way):
    def promoting(params, batch):
        return jnp.mean(((batch[0] @ params["w"]) * TABLE) @ params["w"].T)

    init, step = mpjax.build_train_step(promoting, optax.sgd(0.1), "p=f32,c=bf16,o=f32")
    args = (init(PARAMS), BATCH) if way == "step" else (PARAMS, BATCH)
    fun = step if way == "step" else mpjax.autocast(promoting, "p=f32,c=bf16,o=f32")
    assert "promoted-matmul" in {f.rule for f in mpjax.lint(fun, run=False)(*args).findings}
