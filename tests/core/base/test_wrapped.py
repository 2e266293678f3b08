"""Functions made of functions: names, methods, pickles; and what travels to other processes."""

import copy
import inspect
import io
import pickle
import subprocess
import sys
import types
from pathlib import Path

import cloudpickle
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cloudpickle import cloudpickle as internals
from flax import nnx

import mpjax

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
W = np.linspace(1, 2, 8, dtype=np.float32).reshape(4, 2)


def loss(w, x):
    """Returns a loss."""
    return jnp.mean((x @ w) ** 2)


@mpjax.autocast(policy="mixed_float16")
@mpjax.half_inputs
def decorated(w, x):
    return jnp.mean(x @ w)


class Model:
    def __init__(self, scale):
        self.scale = scale

    @mpjax.autocast
    def planned(self, w, x):
        return loss(w, x) * self.scale

    @mpjax.precision("float32")
    def exact(self, w, x):
        return loss(w, x) * self.scale

    @mpjax.half_inputs
    def kernel(self, w, x):
        return loss(w, x) * self.scale


WAYS = {
    "autocast": mpjax.autocast,
    "precision": mpjax.precision("float32"),
    "half_inputs": mpjax.half_inputs,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_function_keeps_its_name_documentation_signature_and_attributes(way):
    def fun(w, *, x: int = 3):
        """Says what."""

    fun.mark = 5
    made = WAYS[way](fun)
    assert (made.__name__, made.__doc__, made.mark) == ("fun", "Says what.", 5)
    assert made.__wrapped__ is fun and inspect.signature(made) == inspect.signature(fun)
    assert copy.deepcopy(made) is made


@pytest.mark.parametrize("name", ["planned", "exact", "kernel"])
def test_methods_are_bound(name):
    for scale in (1.0, 2.0):
        got = getattr(Model(scale), name)(W, X)
        np.testing.assert_allclose(got, scale * loss(W, X), rtol=2e-2)
    np.testing.assert_allclose(getattr(Model, name)(Model(3.0), W, X), 3 * loss(W, X), rtol=2e-2)


@pytest.mark.parametrize("way", WAYS)
def test_it_wraps_what_wraps_already(way):
    inner = mpjax.autocast(mpjax.half_inputs(loss, float32="w"), "float32")
    made = WAYS[way](inner)
    np.testing.assert_allclose(made(W, X), loss(W, X), rtol=2e-2)
    assert inspect.signature(made) == inspect.signature(loss)


@pytest.mark.parametrize(
    "made",
    [
        *(mpjax.autocast(), mpjax.half_inputs(), mpjax.autocast(loss), mpjax.half_inputs(loss)),
        *(mpjax.precision("float32")(loss), mpjax.get_policy("mixed_bfloat16")),
        mpjax.mixed_precision(optax.sgd(0.1)),
    ],
)
def test_a_with_block_around_what_sets_a_precision_names_the_ways(made):
    ways = r"(?s)no `with` block.*@mpjax.autocast.*mpjax.precision"
    with pytest.raises(TypeError, match=ways), made:
        pass


@pytest.mark.parametrize("way", WAYS)
def test_plain_pickles_store_what_a_function_is_made_of(way):
    made = pickle.loads(pickle.dumps(WAYS[way](loss)))
    assert made.__wrapped__ is loss and made.__name__ == "loss"
    np.testing.assert_allclose(made(W, X), loss(W, X), rtol=2e-2)


def test_plain_pickles_store_the_name_of_what_a_decorator_made():
    for made in (decorated, Model.planned):
        assert pickle.loads(pickle.dumps(made)) is made
    bound = pickle.loads(pickle.dumps(Model(2.0).planned))
    np.testing.assert_allclose(bound(W, X), 2 * loss(W, X), rtol=2e-2)


def test_the_main_module_is_stored_by_name_but_for_cloudpickle(monkeypatch):
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    fun = types.FunctionType(loss.__code__, {**globals(), "__name__": "__main__"}, "loss")
    fun.__module__, fun.__qualname__ = "__main__", "loss"
    main.loss = made = mpjax.autocast(fun)
    assert pickle.loads(pickle.dumps(made)) is made
    got = cloudpickle.loads(cloudpickle.dumps(made))
    assert got is not made
    np.testing.assert_array_equal(got(W, X), made(W, X))


def test_a_region_is_used_again_and_within_itself():
    exact = pickle.loads(pickle.dumps(mpjax.precision("float32")))

    def fun(w, x):
        with exact, exact:
            a = x @ w
        with exact:
            return a, x @ w, x @ w

    w, x = np.ones((8, 32), np.float32), np.ones((4, 8), np.float32)
    text = str(jax.make_jaxpr(mpjax.autocast(fun))(w, x))
    assert "bf16" not in text
    assert "bf16" in str(jax.make_jaxpr(mpjax.autocast(lambda w, x: (fun(w, x), x @ w)))(w, x))
    with pytest.raises(TypeError, match="fun=3"):
        exact(3)


# ---- all that the library returns, in another process --------------------------------------------


def functions():
    """Returns functions that the library made of local functions, and arguments for each."""

    def fun(w, x):
        return jnp.mean((x @ w) ** 2)

    def apply(tx):
        def run(w, x):
            state = tx.init({"w": w})
            updates, _ = tx.update({"w": w * 0.5}, state, {"w": w})
            return optax.apply_updates({"w": w}, updates)

        return run

    def scaled(tx):
        def run(w, x):
            state = tx.init({"w": w})
            value, grads = tx.value_and_grad(lambda p: fun(p["w"], x), state)({"w": w})[:2]
            return tx.update(grads, state, {"w": w})[0], value

        return run

    def trained(built):
        def run(w, x):
            init, step = built
            return step(init({"w": w}), x)[1]["loss"]

        return run

    def by_params(params, x):
        return fun(params["w"], x)

    reports = {f"report_{name}": True for name in ("overflow", "underflow", "stalled")}
    adam, optim = optax.adam(0.1), mpjax.optim
    model = linen.Dense(2)
    state = mpjax.linen.TrainState.create(
        apply_fn=model.apply, params={"w": W}, tx=adam, policy="mixed_float16"
    )
    made = {
        "autocast": mpjax.autocast(fun),
        "autocast as decorator": mpjax.autocast(policy="mixed_float16")(fun),
        "precision": mpjax.autocast(mpjax.precision("float32")(fun)),
        "half_inputs": mpjax.autocast(mpjax.half_inputs(fun, float32="w")),
        "scaled_value_and_grad": mpjax.scaled_value_and_grad(fun, mpjax.DynamicLossScale()),
        "build_train_step": trained(mpjax.build_train_step(by_params, adam, **reports)),
        "boundary": trained(mpjax.build_train_step(by_params, adam, "O3", accumulate_steps=3)),
        "mixed_precision": scaled(mpjax.mixed_precision(adam, "mixed_float16")),
        "with_master_weights": apply(optim.with_master_weights(adam)),
        "with_kahan_summation": apply(optim.with_kahan_summation(adam)),
        "with_8bit_moments": apply(optim.with_8bit_moments(adam)),
        "skip_nonfinite": apply(optim.skip_nonfinite(adam)),
        "linen": lambda w, x: state.value_and_grad(by_params)({"w": w}, x)[0],
    }
    return made


CHILD = """
import pickle, sys
import jax, numpy as np
made, arguments, wanted = pickle.load(open(sys.argv[1], "rb"))
for name, fun in made.items():
    got = jax.tree.leaves(fun(*arguments))
    for a, b in zip(got, wanted[name], strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=1e-6)
"""


def reads_of_copies(made):
    """Returns the mutable global variables that copies of the library's functions would read."""
    found = []

    class Watching(cloudpickle.Pickler):
        def _dynamic_function_reduce(self, func):
            if func.__module__.startswith("mpjax") or "/mpjax/_src/" in func.__code__.co_filename:
                for name in internals._extract_code_globals(func.__code__):
                    value = func.__globals__.get(name)
                    fixed = (types.ModuleType, types.FunctionType, type, tuple, frozenset, dict)
                    fixed += (str, int, float, types.BuiltinFunctionType, np.dtype, type(None))
                    typing = type(value).__module__ in ("typing", "types")
                    if not (isinstance(value, fixed) or typing):
                        found.append((func.__qualname__, name))
            return super()._dynamic_function_reduce(func)

    Watching(io.BytesIO()).dump(made)
    return found


QUICK = "autocast", "half_inputs", "scaled_value_and_grad", "build_train_step"


@pytest.mark.parametrize("names", [QUICK, pytest.param(None, marks=pytest.mark.thorough)])
def test_functions_of_the_library_travel_to_other_processes(names, tmp_path):
    made = functions()
    assert not reads_of_copies(made)
    made = {name: made[name] for name in names or made}
    wanted = {k: [np.asarray(x) for x in jax.tree.leaves(f(W, X))] for k, f in made.items()}
    file = tmp_path / "made.pkl"
    internals.register_pickle_by_value(sys.modules[__name__])  # as if it were the main module
    try:
        file.write_bytes(cloudpickle.dumps((made, (W, X), wanted)))
    finally:
        internals.unregister_pickle_by_value(sys.modules[__name__])
    root = Path(mpjax.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(file)], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_nnx_optimizers_travel(tmp_path):
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    optimizer = mpjax.nnx.Optimizer(model, optax.sgd(0.1), "mixed_float16")
    gradient = mpjax.nnx.value_and_grad(lambda m, x: jnp.mean(m(x)), optimizer)
    again = cloudpickle.loads(cloudpickle.dumps((optimizer, gradient)))
    assert not reads_of_copies((optimizer, gradient))
    np.testing.assert_allclose(again[1](model, X)[0], gradient(model, X)[0], rtol=1e-6)


REPORTS = {
    "explain": mpjax.explain,
    "compare": mpjax.compare,
    "agreement": lambda fun: mpjax.compare(fun, fun),
    "find_nonfinite": mpjax.find_nonfinite,
    "lint": mpjax.lint,
    "tune": lambda fun: mpjax.debug.tune(fun, "mixed_bfloat16", tolerance=0.1),
    "measure_precision": mpjax.debug.measure_precision,
    "scaled_value_and_grad": lambda fun: mpjax.scaled_value_and_grad(
        fun, mpjax.StaticLossScale(8.0)
    ),
    "grad": lambda fun: jax.grad(mpjax.autocast(fun)),
}


@pytest.mark.parametrize("name", REPORTS)
def test_cloudpickle_stores_what_makes_reports_and_gradients(name):
    made = REPORTS[name](loss)
    got = cloudpickle.loads(cloudpickle.dumps(made))
    if name in ("explain", "grad"):
        np.testing.assert_array_equal(*(np.asarray(str(f(W, X))) for f in (made, got)))


def test_a_report_of_lint_pickles():
    report = mpjax.lint(loss, run=False)(W, X)
    assert str(pickle.loads(pickle.dumps(report))) == str(report)
