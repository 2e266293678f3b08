"""Boundary casting: the arguments of a function are cast once, and none of its operations."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from measure import run
from programs import W, X
from support import assert_near, equations

import mpjax
from mpjax.errors import PrecisionWarning

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
POLICY = "p=f32,c=bf16,o=f32"


def product(params, x):
    return jnp.exp(x @ params["w"]) + params["b"]


PARAMS = {"w": W, "b": jnp.linspace(-1.0, 1.0, W.shape[1])}


def seen_by(policy, *args, **kwargs):
    """Returns the dtypes in which a function gets the arrays of a call."""
    seen = []

    def fun(*args, **kwargs):
        seen[:] = [leaf.dtype.name for leaf in jax.tree.leaves((args, kwargs))]
        return jnp.float32(0)

    mpjax.autocast(fun, policy)(*args, **kwargs)
    return seen


def by_hand(fun, dtype, out):
    def cast(tree, to):
        return jax.tree.map(lambda x: x.astype(to), tree)

    return lambda *args: cast(fun(*cast(args, dtype)), out)


# ---- what is cast --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bf16", "O3:float16", "params=f32,compute=f16,output=f32"])
def test_all_floating_arguments_have_the_compute_dtype(policy):
    half = mpjax.get_policy(policy).compute_dtype.name
    args = {"w": W, "half": W.astype(BF16), "count": jnp.int32(1)}, X
    assert seen_by(policy, *args) == ["int32", half, half, half]


def test_an_override_gives_an_argument_another_dtype():
    policy = mpjax.get_policy(POLICY).override({"b": "float32"})
    assert seen_by(policy, PARAMS, X) == ["float32", "bfloat16", "bfloat16"]
    with pytest.raises(ValueError, match="nearest are 'b', 'w'|nearest are 'w', 'b'"):
        mpjax.autocast(product, mpjax.get_policy(POLICY).override({"kernel": "float32"}))(PARAMS, X)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "p=f32,c=f32,o=f32"])
def test_other_policies_cast_no_argument(policy):
    assert seen_by(policy, PARAMS, X.astype(F16)) == ["float32", "float32", "float16"]


@pytest.mark.parametrize("half", [BF16, F16])
@pytest.mark.parametrize("out", [F32, BF16])
def test_values_and_gradients_are_those_of_casts_by_hand(half, out, rng):
    policy = mpjax.Policy(F32, half, out)
    x = jnp.asarray(rng.uniform(-0.5, 0.5, (4, len(W))), F32)
    auto, want = mpjax.autocast(product, policy), by_hand(product, half, out)
    assert auto(PARAMS, x).dtype == out
    assert_near(auto(PARAMS, x).astype(F32), run(want, PARAMS, x).astype(F32), 0.02)

    def gradient(fun):
        return jax.grad(lambda p, x: jnp.sum(fun(p, x).astype(F32) ** 2))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)  # no loss scale
        grads = run(gradient(auto), PARAMS, x)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(F32)}
    assert_near(grads, run(gradient(want), PARAMS, x), 0.02)


@pytest.mark.parametrize(
    "around",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, x),
        lambda f: lambda p, x: lax.scan(lambda c, row: (c, f(p, row)), 0, x)[1],
        lambda f: lambda p, x: lax.cond(jnp.all(x < 9), f, lambda p, x: 0 * f(p, x), p, x),
    ],
    ids=["jit", "remat", "vmap", "scan", "cond"],
)
def test_every_operation_has_the_dtype_of_casts_by_hand_in(around):
    def dtypes(fun):
        jaxpr = jax.make_jaxpr(jax.value_and_grad(lambda p: jnp.sum(around(fun)(p, X))))(PARAMS)
        eqns = (e for e in equations(jaxpr) if e.primitive.name in ("dot_general", "exp", "mul"))
        return sorted((e.primitive.name, *(v.aval.dtype.name for v in e.invars)) for e in eqns)

    found = dtypes(mpjax.autocast(product, POLICY))
    assert found == dtypes(by_hand(product, BF16, F32)) and found


def test_it_runs_in_shard_map():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    auto = mpjax.autocast(product, POLICY)
    mapped = jax.shard_map(auto, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    assert_near(jax.jit(mapped)(PARAMS, X), auto(PARAMS, X), 0.02)


# ---- states --------------------------------------------------------------------------------------


def test_a_state_is_not_cast_but_gradients_and_what_matmuls_read_are():
    def statistics(params, stats, x):
        dtypes.append(stats["mean"].dtype)
        h = x @ params["w"]
        return jnp.mean(h), {"mean": 0.999 * stats["mean"] + 0.001 * jnp.mean(h, 0)}

    dtypes = []
    _, new = mpjax.autocast(statistics, "O3:bfloat16")(PARAMS, {"mean": PARAMS["b"]}, X)
    assert dtypes[-1] == F32 and new["mean"].dtype == F32

    def gradients(params, x):
        dtypes.append(params["b"].dtype)
        return jax.grad(lambda p: jnp.mean(product(p, x)))(params)

    grads = mpjax.autocast(gradients, "O3:bfloat16")(PARAMS, X)
    assert dtypes[-1] == BF16 and grads["b"].dtype == F32  # returned as the argument was passed

    def cell(carry, x):
        dtypes.append(carry["h"].dtype)
        h = jnp.tanh(carry["h"] @ W[:, :8].astype(x.dtype) @ W.T.astype(x.dtype) + x)
        return {"h": h, "c": carry["c"] + h}, h

    auto = mpjax.autocast(cell, "O3:bfloat16")
    carry, out = lax.scan(auto, {"h": X[0], "c": X[0]}, X)
    assert dtypes[-1] == BF16 and carry["h"].dtype == F32 and out.dtype == BF16

    def fixed(stats, x):  # an argument that is returned as it came has no next value
        dtypes.append(stats["mean"].dtype)
        return stats, jnp.mean(x - stats["mean"])

    mpjax.autocast(fixed, "O3:bfloat16")({"mean": X[0]}, X)
    assert dtypes[-1] == BF16


def test_the_gradients_of_a_part_that_no_matmul_reads_are_no_state():
    def gradients(params, x):
        dtypes.append(params["norm"]["scale"].dtype)
        loss = lambda p: jnp.mean((x @ p["w"]) * p["norm"]["scale"])  # noqa: E731
        return jax.grad(loss)(params)

    dtypes = []
    mpjax.autocast(gradients, POLICY)({"w": W, "norm": {"scale": PARAMS["b"]}}, X)
    assert dtypes[-1] == BF16


def test_what_is_passed_as_model_state_is_no_parameter():
    seen = seen_by(POLICY, PARAMS, model_state=jnp.float32(2))
    assert seen == ["bfloat16", "bfloat16", "float32"]


def test_statistics_of_nnx_modules_are_not_cast():
    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0), momentum=0.999)

        def __call__(self, x):
            dtypes.extend([self.linear.kernel[...].dtype, self.norm.mean[...].dtype])
            return self.norm(self.linear(x))

    dtypes, model = [], Model()
    before = np.asarray(model.norm.mean[...])
    mpjax.autocast(lambda model, x: model(x), POLICY)(model, X[:, :8])
    assert dtypes[-2:] == [BF16, F32]
    after = model.norm.mean[...]
    assert after.dtype == F32 and np.any(after != before)


# ---- what cannot work is told --------------------------------------------------------------------


def carried(params, x):
    start = jnp.zeros(W.shape[1])  # float32, whatever the arguments are
    return lax.scan(lambda c, row: (row @ params["w"], None), start, x)[0]


def test_a_function_that_refuses_16_bits_is_cast_by_operation_and_told():
    with pytest.warns(PrecisionWarning, match="casting=op") as told:
        value = mpjax.autocast(carried, POLICY)(PARAMS, X)
    text = str(told[0].message)
    assert "carried" in text and "bfloat16" in text and "TypeError" in text
    want = mpjax.autocast(carried, f"{POLICY},casting=op")(PARAMS, X)
    np.testing.assert_array_equal(value, want)
    with pytest.warns(PrecisionWarning, match="carried"):
        report = mpjax.explain(carried, POLICY)(PARAMS, X)
    assert report.calls()["dot_general"]["bf16"] == 1


def loss(params, x):
    return jnp.mean(product(params, x) ** 2)


def trained(params, x):
    grads = jax.grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 1e-4 * g, params, grads)


def several(params, x):
    return lax.scan(lambda p, _: (trained(p, x), None), params, None, length=2)[0]


@pytest.mark.parametrize("step", [trained, jax.jit(trained), several])
def test_a_function_that_updates_its_parameters_is_cast_by_operation(step):
    """In bfloat16, an update of 1e-4 would leave most weights as they are."""
    with pytest.warns(PrecisionWarning, match="it adds gradients to b itself"):
        new = mpjax.autocast(step, POLICY)(PARAMS, X)
    want = mpjax.autocast(step, f"{POLICY},casting=op")(PARAMS, X)
    jax.tree.map(np.testing.assert_array_equal, new, want)
    assert np.all(np.asarray(new["w"]) != np.asarray(PARAMS["w"]))


def test_gradients_alone_are_those_of_cast_arguments():
    def regularized(params, x):
        return (
            loss(params, x) + 0.5 * jnp.sum(params["w"] ** 2) + jnp.vdot(params["b"], params["b"])
        )

    for fun in (loss, regularized):
        grads = mpjax.autocast(jax.grad(fun), POLICY)(PARAMS, X)
        want = by_hand(jax.grad(fun), BF16, F32)(PARAMS, X)
        assert_near(grads, want, 0.05)


def test_an_error_of_the_function_itself_is_raised():
    def broken(params, x):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        mpjax.autocast(broken, POLICY)(PARAMS, X)
    with pytest.raises(TypeError, match="dot_general requires"):
        mpjax.autocast(lambda p, x: x @ x, POLICY)(PARAMS, X)


@pytest.mark.parametrize("entry", [mpjax.autocast, lambda f, p: mpjax.explain(f, p)(PARAMS, X)])
def test_settings_of_operations_have_no_effect_and_a_warning(entry):
    with pytest.warns(UserWarning, match="storage and fused_attention have no effect"):
        entry(product, f"{POLICY},storage=lean,fused_attention=true")


def test_a_region_has_no_effect_and_a_warning():
    @functools.partial(mpjax.autocast, policy=POLICY)
    def fun(params, x):
        with mpjax.precision("float32"):
            return product(params, x)

    with pytest.warns(PrecisionWarning, match="mpjax.precision has no effect"):
        fun(PARAMS, X)


def test_an_autocast_around_it_leaves_it_alone():
    inner = mpjax.autocast(product, POLICY)
    outer = mpjax.autocast(lambda params, x: inner(params, x) @ W, "mixed_float16")

    def exponentials(fun):
        jaxpr = jax.make_jaxpr(fun)(PARAMS, X)
        return [e.invars[0].aval.dtype for e in equations(jaxpr) if e.primitive.name == "exp"]

    assert exponentials(outer) == exponentials(inner) == [BF16]
    found = {
        tuple(v.aval.dtype.name for v in e.invars)
        for e in equations(jax.make_jaxpr(outer)(PARAMS, X))
        if e.primitive.name == "dot_general"
    }
    assert found == {("bfloat16", "bfloat16"), ("float16", "float16")}
