"""Autocast preserves arguments, results, dtypes, effects and shardings."""

import inspect

import jax
import jax.experimental.custom_partitioning
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from measure import run
from programs import PROGRAMS, W, X
from support import BOTH, MATMULS, assert_near, cast, equations, found, full_matmuls

import mpjax


def test_other_dtypes_and_objects_pass_through():
    seen = []

    def fun(x, n, flag, name, key, z, obj=None):
        seen.append((type(n), flag, name, obj))
        out = {"x": x @ W * n, "i": jnp.arange(3), "z": z * 2, "s": name, "k": key, "n": None}
        return out, jax.random.normal(key, (2,))

    marker = object()
    args = (X, 2.5, True, "name", jax.random.key(0), jnp.ones(2, jnp.complex64))
    got, noise = cast(fun)(*args, obj=marker)
    want, want_noise = fun(*args, obj=marker)
    assert seen[0] == (float, True, "name", marker)
    assert got["s"] == "name" and got["n"] is None
    assert got["z"].dtype == jnp.complex64 and got["i"].dtype == jnp.int32
    np.testing.assert_array_equal(noise, want_noise)
    np.testing.assert_array_equal(got["i"], want["i"])
    assert jax.random.key_data(got["k"]).shape == jax.random.key_data(want["k"]).shape


def test_float64_stays(x64):
    def fun(w, x):
        return x @ w, jnp.sum(x.astype(jnp.float32) @ w.astype(jnp.float32))

    w, x = np.asarray(W, np.float64), np.asarray(X, np.float64)
    got = cast(fun)(w, x)
    assert got[0].dtype == jnp.float64
    np.testing.assert_allclose(got[0], x @ w, rtol=1e-12)


def test_values_that_the_user_made_half_stay_half():
    def fun(w, x):
        h = x.astype(jnp.bfloat16)
        return h * 2, jax.nn.softmax(h.astype(jnp.float32) @ w)

    got = cast(fun)(W, X)
    assert got[0].dtype == jnp.bfloat16 and got[1].dtype == jnp.float32
    assert not full_matmuls(cast(fun), W, X)


def test_half_parameters_are_used_as_they_are():
    """O2: parameters arrive half; float32 code widens them; matmuls take them as they came."""
    w = W.astype(jnp.bfloat16)

    def fun(w, x):
        return jnp.sum(jax.nn.softmax(x @ w.astype(jnp.float32)))

    jaxpr = jax.make_jaxpr(cast(fun))(w, X)
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    assert all(e.invars[0] is not jaxpr.jaxpr.invars[0] for e in casts)
    assert not full_matmuls(jax.grad(cast(fun)), w, X)
    assert jax.grad(cast(fun))(w, X).dtype == jnp.bfloat16


def test_output_dtype_of_a_policy_casts_floating_results_alone():
    policy = mpjax.get_policy("p=f32,c=bf16,o=bf16")
    out = mpjax.autocast(lambda w, x: (x @ w, jnp.arange(2)), policy)(W, X)
    assert out[0].dtype == jnp.bfloat16 and out[1].dtype == jnp.int32


def test_float32_policy_changes_nothing():
    fun = PROGRAMS["mlp"]
    np.testing.assert_allclose(mpjax.autocast(fun, "float32")(W, X), jax.jit(fun)(W, X), rtol=1e-6)


def test_gradients_through_closures_over_tracers_match_float32():
    def fun(w, x):
        return cast(lambda x: jnp.sum(x @ w))(x)

    assert_near(jax.grad(fun)(W, X), jax.grad(lambda w, x: jnp.sum(x @ w))(W, X))
    assert_near(jax.jit(jax.grad(fun))(W, X), jax.grad(lambda w, x: jnp.sum(x @ w))(W, X))


def test_inner_autocast_keeps_its_own_policy():
    def fun(w, x):
        exact = mpjax.autocast(lambda x: x @ w, "float32")(x)
        return jnp.sum(exact) + jnp.sum(x @ w)

    rows = found(cast(fun), W, X)
    assert sorted(row[1][0] for row in rows) == ["bfloat16", "float32"]
    assert_near(jax.grad(cast(fun))(W, X), jax.grad(fun)(W, X))


def test_effects_survive(capsys):
    def fun(w, x):
        h = x @ w
        jax.debug.print("mean {}", h.dtype)
        jax.debug.callback(lambda h: print("dtype", h.dtype), h, ordered=True)
        return jnp.sum(h)

    cast(fun)(W, X)
    jax.effects_barrier()
    out = capsys.readouterr().out
    assert out.count("mean") == 1 and "dtype float32" in out
    jax.grad(cast(fun))(W, X)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("mean") == 1


def test_names_and_locations_survive():
    def fun(w, x):
        with jax.named_scope("encoder"):
            return jnp.sum(x @ w)

    dots = [e for e in equations(jax.make_jaxpr(cast(fun))(W, X)) if e.primitive.name in MATMULS]
    assert ["encoder" in str(e.source_info.name_stack) for e in dots] == [True]
    assert "encoder/dot_general" in jax.jit(cast(fun)).lower(W, X).compile().as_text()
    policy = jax.checkpoint_policies.save_only_these_names("h")

    def named(w, x):
        from jax.ad_checkpoint import checkpoint_name

        return jnp.sum(jnp.sin(checkpoint_name(jax.nn.gelu(x @ w), "h")) @ w)

    assert_near(
        jax.grad(cast(jax.checkpoint(named, policy=policy)))(W, X), jax.grad(named)(W, X), 0.05
    )
    names = [e for e in equations(jax.make_jaxpr(cast(named))(W, X)) if e.primitive.name == "name"]
    assert len(names) == 1


def test_donation_survives():
    def fun(x):
        return jax.jit(lambda x: x + 1, donate_argnums=0)(x)

    x = jnp.ones((4, 4))
    cast(fun)(x)
    assert x.is_deleted()


def test_sharding_constraints_survive():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))

    def fun(w, x):
        return lax.with_sharding_constraint(x @ w, sharding)

    auto = jax.jit(cast(fun))
    assert auto(W, X).sharding.is_equivalent_to(sharding, 2)


def test_unknown_operations_are_left_alone():
    def fun(w, x):
        out = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, jnp.float32), x @ w)
        return jnp.nextafter(out, out + 1) @ w

    assert_near(cast(fun)(W, X), fun(W, X), 0.02)


def test_custom_partitioning_is_left_alone():
    @jax.experimental.custom_partitioning.custom_partitioning
    def partitioned(x):
        return jnp.sin(x)

    partitioned.def_partition(
        partition=lambda mesh, args, result: (
            mesh,
            partitioned,
            jax.tree.map(lambda a: a.sharding, result),
            jax.tree.map(lambda a: a.sharding, args),
        ),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="... -> ...",
    )

    def fun(w, x):
        return partitioned(x @ w) @ w

    (eqn,) = [
        e
        for e in equations(jax.make_jaxpr(cast(fun))(W, X))
        if e.primitive.name == "custom_partitioning"
    ]
    assert eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype == jnp.float32
    assert_near(jax.jit(cast(fun))(W, X), fun(W, X), 0.02)


def test_linear_call_keeps_its_transpose():
    def fun(w, x):
        linear = lambda w, x: x @ w  # noqa: E731
        transpose = lambda w, g: 3 * (g @ w.T)  # noqa: E731
        return jnp.sum(jax.custom_derivatives.linear_call(linear, transpose, w, x) @ w)

    grad = jax.grad(cast(fun), 1)
    assert_near(grad(W, X), jax.grad(fun, 1)(W, X), 0.02)
    assert not full_matmuls(grad, W, X)


def test_custom_vjp_with_symbolic_zeros_is_told_what_jax_tells_it():
    seen = []

    @jax.custom_vjp
    def ruled(w, x):
        return x @ w, jnp.tanh(x @ w)

    def fwd(w, x):
        seen.append((w.perturbed, x.perturbed))
        return (x.value @ w.value, jnp.tanh(x.value @ w.value)), (w.value, x.value)

    def bwd(residuals, cts):
        w, x = residuals
        seen.append(tuple(type(ct) is jax.custom_derivatives.SymbolicZero for ct in cts))
        g = 2 * (cts[1] if seen[-1][0] else cts[0])  # a rule of its own: twice the gradient
        return x.T @ g, g @ w.T

    ruled.defvjp(fwd, bwd, symbolic_zeros=True)
    for used in (0, 1):
        fun = lambda w, x: jnp.sum(ruled(w, x)[used] @ w)  # noqa: B023, E731
        for derive in (jax.grad, BOTH, lambda f: jax.jit(jax.vmap(jax.grad(f), (None, 0)))):
            x = X[:, None] if derive not in (jax.grad, BOTH) else X
            assert_near(run(derive(cast(fun)), W, x), run(derive(fun), W, x), 0.03)
        assert not full_matmuls(BOTH(cast(fun)), W, X)
    seen.clear()
    jax.clear_caches()
    jax.grad(cast(fun))(W, X)  # the rule is told what jax.grad tells it
    told = list(seen)
    seen.clear()
    jax.grad(fun)(W, X)
    assert [told[0], told[-1]] == seen == [(True, False), (True, False)]
    assert_near(cast(fun)(W, X), fun(W, X), 0.02)


def test_shardings_of_explicit_meshes_survive():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = lambda a, *spec: jax.device_put(  # noqa: E731
        a, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    )

    def fun(w, x):
        h = jax.nn.gelu(x @ w + w[0])
        return jnp.sum(jax.nn.softmax(h @ w) ** 2)

    with jax.set_mesh(mesh):
        w, x = place(W), place(X, "d")
        assert jax.typeof(x).sharding.spec[0] == "d"
        got = jax.jit(BOTH(cast(fun)))(w, x)
        assert jax.typeof(got[1]).sharding.spec[0] == "d"
        assert not full_matmuls(BOTH(cast(fun)), w, x)
    assert_near(jax.device_get(got), jax.device_get(BOTH(fun)(W, X)), 0.03)


def test_pallas_is_left_alone():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, out):
        out[...] = x[...] * 2

    def fun(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x @ w) @ w

    assert_near(cast(fun)(W, X), fun(W, X), 0.02)


def test_a_policy_that_is_left_out_is_mixed_bfloat16():
    w = np.ones((8, 8), np.float32)
    product = lambda w: jnp.sum(w @ w)  # noqa: E731
    half = str(jax.make_jaxpr(mpjax.autocast(product, "mixed_bfloat16"))(w))
    for made in (mpjax.autocast(product), mpjax.autocast()(product)):
        assert str(jax.make_jaxpr(made)(w)) == half and "bf16" in half
    assert mpjax.explain(product)(w).calls()["dot_general"]["bf16"] == 1
    runs = mpjax.autocast, mpjax.build_train_step, mpjax.mixed_precision, mpjax.explain
    runs += mpjax.compare, mpjax.nnx.Optimizer.__init__, mpjax.linen.TrainState.create
    defaults = {inspect.signature(f).parameters["policy"].default for f in runs}
    assert defaults == {"mixed_bfloat16"}


@pytest.mark.parametrize(
    ("arguments", "way"),
    [
        ({"dtype": jnp.bfloat16}, '"mixed_bfloat16" or "mixed_float16"'),
        ({"device_type": "cuda", "dtype": "float16"}, "where its arrays are"),
        ({"enabled": False}, '"float32"'),
        ({"polcy": "mixed_float16"}, "Did you mean 'policy'"),
        ({"fun": "mixed_float16"}, r"@mpjax.autocast\(policy='mixed_float16'\)"),
    ],
)
def test_arguments_of_other_libraries_are_answered_with_the_way(arguments, way):
    with pytest.raises(TypeError, match=way):
        mpjax.autocast(**{"fun": abs, **arguments})
