"""A policy that asks for no 16-bit dtype runs each program as it was traced."""

import importlib
import re

import clean_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_programs
from flax import nnx
from jax.extend.core import Literal, jaxprs_in_params
from members import Members
from models import MODELS
from programs import PROGRAMS, W, X
from support import calls_to_trace, cast, equations, matmul_dtypes, thorough_but

import benchmarks.models
import mpjax

SOUND = ("matmuls", "loops", "range", "saturated", "steps")


def described(fun, *args):
    """Returns a program as text, without the names of its functions and their addresses."""
    return re.sub(r"<function .*?>|0x[0-9a-f]+", "", "\n".join(lines(jax.make_jaxpr(fun)(*args))))


def lines(jaxpr, indent=""):
    """Yields the equations of a jaxpr, and of the programs inside, with numbered variables.

    JAX itself prints a program that two equations share in another place.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    numbers = {}

    def name(v):
        number = v if isinstance(v, Literal) else numbers.setdefault(v, len(numbers))
        return f"{number}:{v.aval}"

    yield indent + " ".join(map(name, (*jaxpr.constvars, *jaxpr.invars)))
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        params = {k: v for k, v in eqn.params.items() if k != "name" and not holds(v, inner)}
        ins, outs = (" ".join(map(name, vs)) for vs in (eqn.invars, eqn.outvars))
        yield f"{indent}{outs} = {eqn.primitive} {params} {ins}"
        for program in inner:
            yield from lines(program, indent + "  ")
    yield indent + " ".join(map(name, jaxpr.outvars))


def holds(param, programs):
    parts = param if isinstance(param, tuple) else (param,)
    return any(getattr(part, "jaxpr", part) is program for part in parts for program in programs)


def assert_is_identity(fun, *args, argnums=0, differentiated=True):
    def gradient(f):
        def loss(*args):
            results = [
                x for x in jax.tree.leaves(f(*args)) if jnp.issubdtype(x.dtype, jnp.floating)
            ]
            return sum(jnp.sum(x) for x in results)

        return jax.grad(loss, argnums)

    made = mpjax.autocast(fun, "float32")
    assert described(made, *args) == described(jax.jit(fun), *args)
    if differentiated:
        assert described(gradient(made), *args) == described(gradient(jax.jit(fun)), *args)


def stack_with_weak_scalars(w, x):
    for _ in range(3):
        x = x + jax.nn.softmax((x @ w) @ x.T / jnp.sqrt(16)) @ x
    return x.mean()


def second_moments(w, x):
    g = jnp.asarray(2.0) * w.sum()
    return sum(0.001 * y**2 + 0.999 * z for y, z in zip([g, g, g], [1.0, 2.0, 3.0], strict=True))


def spectrum(w, x):
    return jnp.abs(jnp.fft.fft(x @ w)).sum()


def of_half(w, x):
    return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32).sum()


@jax.custom_vjp
def scaled(x, factor):
    return factor * x


scaled.defvjp(
    lambda x, factor: (factor * x, (x, factor)),
    lambda kept, g: (g * kept[1], jnp.sum(g * kept[0]) if kept[1] > 0 else None),
)


def own_rule(w, x):
    return scaled(x @ w, 3.0).sum()


OTHERS = (stack_with_weak_scalars, second_moments, spectrum, of_half, own_rule)


@pytest.mark.parametrize("fun", [*PROGRAMS.values(), *OTHERS], ids=lambda f: f.__name__)
def test_float32_policy_leaves_programs_unchanged(fun):
    assert_is_identity(fun, W, X)


@pytest.mark.parametrize("name", thorough_but(MODELS, "scan over layers", "mixture of experts"))
def test_float32_policy_leaves_models_unchanged(name):
    assert_is_identity(*MODELS[name]())


def assert_random_program_is_unchanged(seed):
    steps = random_programs.generate(seed)
    if random_programs.is_refused(steps):
        return
    fun, (x, y, scalars) = random_programs.build(steps), random_programs.arguments(seed)
    differentiated = random_programs.derivatives(steps) > 0
    assert_is_identity(lambda x, y: fun(x, y, scalars), x, y, differentiated=differentiated)


@pytest.mark.parametrize("seed", range(6))
def test_float32_policy_leaves_random_programs_unchanged(seed):
    assert_random_program_is_unchanged(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6, 200))
def test_float32_policy_leaves_more_random_programs_unchanged(seed):
    assert_random_program_is_unchanged(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("name", SOUND)
def test_float32_policy_leaves_members_of_sound_tests_unchanged(name):
    registries = vars(importlib.import_module(f"test_sound_{name}")).values()
    members = [m for r in registries if isinstance(r, Members) for m in r.values()]
    assert members
    for case in (member.make() for member in members):
        differentiated = case.argnums is not None
        assert_is_identity(
            case.fun, *case.args, argnums=case.argnums, differentiated=differentiated
        )


@pytest.mark.thorough
@pytest.mark.parametrize("name", clean_models.MODELS)
def test_float32_policy_leaves_models_of_libraries_unchanged(name):
    assert_is_identity(*clean_models.MODELS[name]())


@pytest.mark.thorough
@pytest.mark.parametrize("name", benchmarks.models.MODELS)
def test_float32_policy_leaves_models_of_benchmarks_unchanged(name):
    sizes = benchmarks.models.SMALL[name]
    loss, params, rest, batch, _ = benchmarks.models.MODELS[name](**sizes)
    assert_is_identity(loss, params, rest, batch)


@pytest.mark.parametrize("fun", [stack_with_weak_scalars, PROGRAMS["layers"], PROGRAMS["dropout"]])
def test_float32_policy_gives_the_same_bits(fun):
    got = jax.jit(jax.value_and_grad(mpjax.autocast(fun, "float32")))(W, X)
    want = jax.jit(jax.value_and_grad(fun))(W, X)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_outer_autocast_leaves_a_float32_autocast_alone():
    inner = mpjax.autocast(lambda w, x: jnp.tanh(x @ w), "float32")

    def scanned(w, x):
        return jax.lax.scan(lambda x, _: (inner(w, x), None), x, None, length=2)[0].sum()

    for fun in (lambda w, x: inner(w, x).sum(), scanned):
        assert not halves(jax.grad(cast(fun)), W, X)


def halves(fun, *args):
    """Returns the names of the operations that have a bfloat16 result."""
    return {
        eqn.primitive.name
        for eqn in equations(jax.make_jaxpr(fun)(*args))
        for v in eqn.outvars
        if getattr(v.aval, "dtype", None) == jnp.bfloat16
    }


def in_scan(f):
    return lambda w, x: jax.lax.scan(lambda x, _: (f(w, x), None), x, None, length=2)[0]


def in_branch(f):
    return lambda w, x: jax.lax.cond(x[0, 0] > 0, f, lambda w, x: x, w, x)


def in_loop(f):
    return lambda w, x: jax.lax.fori_loop(0, 3, lambda i, x: f(w, x), x)


AROUND = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": in_scan,
    "branch": in_branch,
    "loop": in_loop,
    "remat": jax.checkpoint,
}


@pytest.mark.parametrize("around", AROUND)
def test_region_under_a_float32_policy_runs_in_its_dtype(around):
    def layer(w, x):
        y = jnp.cos(x)
        with mpjax.precision("bfloat16"):
            return y @ w

    fun = mpjax.autocast(AROUND[around](layer), "float32")
    assert matmul_dtypes(fun, W, X) == [("bfloat16", "bfloat16")]


@pytest.mark.parametrize("around", AROUND)
def test_override_of_a_float32_policy_runs_in_its_dtype(around):
    def layer(w, x):
        with jax.named_scope("hot"):
            return jnp.tanh(x @ w)

    policy = mpjax.get_policy("float32").override({"*hot*": "bfloat16"})
    fun = mpjax.autocast(AROUND[around](layer), policy)
    assert matmul_dtypes(fun, W, X) == [("bfloat16", "bfloat16")]


def test_override_of_a_float32_policy_that_matches_nothing_raises():
    policy = mpjax.get_policy("float32").override({"*hot*": "float32"})
    with pytest.raises(ValueError, match="hot"):
        mpjax.autocast(lambda w, x: x @ w, policy)(W, X)


def test_a_half_output_casts_results_alone():
    fun = mpjax.autocast(lambda w, x: (x @ w, x > 0, 3), "p=float32,c=float32,o=bfloat16")
    result, mask, number = fun(W, X)
    assert (result.dtype, mask.dtype, number) == (jnp.bfloat16, bool, 3)
    np.testing.assert_array_equal(result, jax.jit(jnp.matmul)(X, W).astype(jnp.bfloat16))
    assert halves(fun, W, X) == {"convert_element_type"}


def test_stored_half_arrives_as_float32_and_leaves_as_it_came():
    """The parameters of a policy that stores them in half, one of which is returned as a state."""
    fun = mpjax.autocast(lambda p, x: (x @ p["w"], {"w": 2 * p["w"]}), "p=bfloat16,c=float32,o=f32")
    result, state = fun({"w": W.astype(jnp.bfloat16)}, X)
    assert (result.dtype, state["w"].dtype) == (jnp.float32, jnp.bfloat16)


def test_changes_of_modules_are_kept():
    model = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    mpjax.autocast(lambda model, x: model(x).sum(), "float32")(model, X + 5)
    assert np.all(np.asarray(model.mean[...]) > 0)


def test_current_policy_is_known_inside_a_float32_autocast():
    seen = []
    mpjax.autocast(lambda x: seen.append(mpjax.current_policy()) or x, "float32")(X)
    assert seen == [mpjax.get_policy("float32")]


def test_a_donating_jit_inside_still_donates():
    inner = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = X + 0
    mpjax.autocast(inner, "float32")(x)
    assert x.is_deleted()


def test_no_tracer_outlives_its_trace():
    with jax.check_tracer_leaks():
        for around in (jax.jit, jax.grad):
            around(mpjax.autocast(lambda x: jnp.sum(jnp.tanh(x @ W)), "float32"))(X)


def test_tracing_costs_what_a_jit_costs():
    def calls(around):
        def loss(w, x):
            for _ in range(6):
                x = jnp.tanh(x + jax.nn.softmax(x @ w) @ w)
            return jnp.sum(x)

        return calls_to_trace(jax.grad(around(loss)), W, X)

    assert calls(lambda f: mpjax.autocast(f, "float32")) <= 1.1 * calls(jax.jit)
