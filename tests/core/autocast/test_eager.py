"""Eager calls: they follow whatever the function reads, and what is compiled is used again."""

import dataclasses
import enum
import functools
import gc
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import W, X
from support import thorough_but

import mpjax
from mpjax._src.core.autocast import eager, transform


class Config:
    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 1.0
    sizes: list = dataclasses.field(default_factory=list)
    inner: object = None


class Counted:
    """A function under autocast, how often it was traced, and how often it was planned."""

    def __init__(self, fun, monkeypatch, policy="mixed_bfloat16"):
        self.traces = self.plans = 0
        call = transform.call

        @functools.wraps(fun)
        def traced(*args, **kwargs):
            self.traces += 1
            return fun(*args, **kwargs)

        def counted(*args, **kwargs):
            self.plans += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(transform, "call", counted)
        self.call = mpjax.autocast(traced, policy)

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)


class Holder:
    """An object with weights and settings, as models, trainers and averages are."""

    def __init__(self, value):
        self.w, self.scale, self.training = value, 1.0, True

    def __call__(self, x):
        return x @ self.w * self.scale if self.training else x @ self.w

    def part(self, x):
        return self(x)


TABLE = np.zeros((8, 8), np.float32)
STATE = {"w": None}


def reads_globals(x):
    return x @ STATE["w"] + TABLE[0]


def cases():
    """Yields functions, and a change of what they read that their signature does not tell."""
    ones, twos = jnp.ones((8, 8)), jnp.full((8, 8), 2, np.float32)

    def case(name, fun, change):
        return name, (fun, change)

    holder = Holder(ones)
    yield case("attribute", lambda x: holder(x), lambda: setattr(holder, "w", twos))
    bound = Holder(ones)
    yield case("bound method", bound.part, lambda: setattr(bound, "w", twos))
    called = Holder(ones)
    yield case("callable object", called, lambda: setattr(called, "w", twos))
    scaled = Holder(ones)
    yield case("number", lambda x: scaled(x), lambda: setattr(scaled, "scale", 3.0))
    mode = Holder(ones)
    mode.scale = 5.0
    yield case("branch", lambda x: mode(x), lambda: setattr(mode, "training", False))
    entries = {"a": [ones]}
    yield case("dict and list", lambda x: x @ entries["a"][0], lambda: entries.update(a=[twos]))
    array = np.ones((8, 8), np.float32)
    yield case("NumPy array", lambda x: x @ array, lambda: array.__setitem__((0, 0), 9))
    wide = np.ones(8)
    yield case("float64 array", lambda x: x * wide, lambda: wide.__setitem__(0, 9))
    large = np.ones((8, 1 << 14), np.float32)
    yield case("large array", lambda x: x @ large, lambda: large.__setitem__((0, 0), 9))
    index = np.arange(8)
    yield case("index", lambda x: jnp.asarray(x)[index], lambda: index.__setitem__(0, 5))
    part = functools.partial(lambda x, w: x @ w[0], w=[ones])
    yield case("partial", part, lambda: part.keywords.update(w=[twos]))

    def default(x, w={"w": ones}):  # noqa: B006
        return x @ w["w"]

    yield case("default", default, lambda: default.__defaults__[0].update(w=twos))
    STATE["w"] = ones
    yield case("global", reads_globals, lambda: STATE.update(w=twos))
    inner = Holder(ones)

    def outer(x):
        def nested(x):
            body = lambda c, row: (c @ inner.w / 8, jnp.sum(c) * row)  # noqa: E731
            return jax.lax.scan(jax.checkpoint(body), x, x)

        return jax.jit(nested)(x)

    yield case("nested", outer, lambda: setattr(inner, "w", twos))
    cond = Holder(ones)
    yield case(
        "cond",
        lambda x: jax.lax.cond(x[0, 0] > 9, jnp.sin, lambda x: x @ cond.w, x),
        lambda: setattr(cond, "w", twos),
    )


@pytest.mark.parametrize("policy", thorough_but(["float32", "mixed_bfloat16"], "mixed_bfloat16"))
@pytest.mark.parametrize("name", [name for name, _ in cases()])
def test_what_a_function_reads_is_followed(name, policy, monkeypatch):
    fun, change = dict(cases())[name]
    rng = np.random.default_rng(0)
    x = rng.integers(0, 4, (8, 8)).astype(np.float32)  # products and sums are exact
    auto, before = Counted(fun, monkeypatch, policy), jax.tree.map(np.asarray, fun(x))
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, auto(x), before)
    change()
    after = fun(x)
    pairs = zip(*map(jax.tree.leaves, (after, before)), strict=True)
    assert any(not np.array_equal(a, b) for a, b in pairs)
    plans = auto.plans
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, auto(x), after)
    assert plans == 1 and auto.plans <= 2


def test_weights_that_change_at_each_call_are_compiled_twice(monkeypatch):
    holder = Holder(jnp.ones((8, 8)))
    auto = Counted(lambda x: holder(x), monkeypatch)
    for i in range(4):
        holder.w = jnp.full((8, 8), i, np.float32)
        np.testing.assert_array_equal(auto(np.ones((2, 8), np.float32)), 8.0 * i)
    assert auto.traces == 4 and auto.plans == 2


def test_weights_that_were_donated_or_deleted_are_not_kept(monkeypatch):
    holder = Holder(jnp.ones((8, 8)))
    auto, x = Counted(lambda x: holder(x), monkeypatch), np.ones((2, 8), np.float32)
    auto(x)
    old = weakref.ref(holder.w)
    for i in range(2):
        holder.w.delete()
        holder.w = jnp.full((8, 8), i, np.float32)
        np.testing.assert_array_equal(auto(x), 8.0 * i)
    gc.collect()
    assert old() is None


def test_flax_modules_that_are_closed_over_are_followed():
    from flax import nnx

    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    auto, x = mpjax.autocast(lambda x: model(x)), np.ones((3, 4), np.float32)
    auto(x)
    model.kernel[...] = jnp.full((4, 2), 0.5)
    np.testing.assert_array_equal(auto(x), np.full((3, 2), 2.0))
    nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))
    np.testing.assert_array_equal(auto(x), np.zeros((3, 2)))


def test_flax_modules_that_are_called_may_change():
    from flax import nnx

    norm, drop = nnx.BatchNorm(4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    x, means = np.arange(12, dtype=np.float32).reshape(3, 4), []
    for auto in (mpjax.autocast(norm), mpjax.autocast(norm.__call__)):
        auto(x)
        means.append(np.asarray(norm.mean[...]))
    np.testing.assert_allclose(means[1], (1 - 0.99**2) * np.mean(x, 0), rtol=1e-5)
    auto = mpjax.autocast(drop)
    assert not np.array_equal(auto(x), auto(x))
    with pytest.raises(Exception, match="different trace level") as caught:
        mpjax.autocast(lambda x: norm(x))(x)
    assert "Pass the module as an argument" in caught.value.__notes__[-1]


def test_side_effects_happen_at_each_call():
    seen = []
    auto = mpjax.autocast(lambda x: (seen.append("traced"), x + len(seen))[1])
    assert [float(auto(jnp.float32(0))) for _ in range(3)] == [1, 2, 3]


def test_callbacks_are_compiled_once(monkeypatch, capfd):
    seen = []

    def fun(x, scale=2.0):
        jax.debug.callback(lambda y: seen.append(float(y) * scale), x)
        jax.debug.print("x = {x}", x=x)
        shape = jax.ShapeDtypeStruct((), np.float32)
        return jax.pure_callback(lambda y: np.float32(y * scale), shape, x)

    auto = Counted(fun, monkeypatch)
    assert [float(auto(jnp.float32(i))) for i in range(3)] == [0, 2, 4]
    assert float(auto(jnp.float32(1), 3.0)) == 3
    jax.effects_barrier()
    assert seen == [0, 2, 4, 3] and auto.plans == 2
    assert capfd.readouterr().out.count("x = ") == 4


def test_callbacks_of_any_kind_are_called():
    def unset(x):
        return x if True else later(x)

    if False:
        later = None  # a cell that is empty
    nowhere = types.FunctionType(unset.__code__, {}, closure=unset.__closure__)  # in no module
    for callback in (unset, nowhere, types.FunctionType((lambda x: x).__code__, {})):
        shape = jax.ShapeDtypeStruct((), np.float32)
        auto = mpjax.autocast(lambda x, f=callback, s=shape: jax.pure_callback(f, s, x))
        assert [float(auto(jnp.float32(2))) for _ in range(2)] == [2, 2]


def test_derivatives_of_a_program_do_not_make_it_another(monkeypatch):
    def fun(x):
        @jax.custom_vjp
        def own(x):
            return jnp.sin(x)

        own.defvjp(lambda x: (own(x), x), lambda x, ct: (ct,))
        save = jax.checkpoint_policies.save_only_these_names("a")
        return jax.checkpoint(lambda x: jax.nn.relu(own(x)), policy=save)(x)

    auto = Counted(fun, monkeypatch)
    for _ in range(3):
        auto(X)
    assert auto.plans == 1


def test_a_mutated_object_gives_the_new_answer():
    auto = mpjax.autocast(lambda x, config: x * config.scale, "mixed_bfloat16")
    config = Config(1.0)
    assert auto(jnp.float32(1), config) == 1
    config.scale = 5.0
    assert auto(jnp.float32(1), config) == 5
    assert auto(jnp.float32(1), Config(7.0)) == 7
    assert auto(jnp.float32(1), config=Config(8.0)) == 8


def test_a_mutated_list_in_a_frozen_object_gives_the_new_answer():
    auto = mpjax.autocast(lambda x, frozen: x * frozen.sizes[0], "mixed_bfloat16")
    frozen = Frozen(sizes=[1])
    assert auto(jnp.float32(1), frozen) == 1
    frozen.sizes[0] = 5
    assert auto(jnp.float32(1), frozen) == 5


def doubled(x):
    return 2 * x


VALUES = {
    "none": (None,),
    "bool and int": (True, 1, False, 0),
    "float": (0.0, -0.0, 1.0, float("nan"), 1),
    "complex": (1j, -1j, complex(-0.0, 1)),
    "text": ("a", b"a", "b"),
    "enum": (Mode.TRAIN, Mode.EVAL),
    "dtype": (jnp.float32, np.dtype("float32"), jnp.bfloat16),
    "function": (doubled, jax.nn.relu, jax.nn.silu, jnp.tanh, jax.jit(doubled), abs),
    "frozen": (Frozen(), Frozen(2.0), Frozen(sizes=[1, (2, None)]), Frozen(inner=Frozen(3.0))),
    "tree": ({"a": (1, "b")}, {"a": (2, "b")}),
}


@pytest.mark.parametrize("name", VALUES)
def test_arguments_that_are_not_arrays_reach_the_function(name, monkeypatch):
    seen = []
    auto = Counted(lambda x, thing: (seen.append(thing), x + 1)[1], monkeypatch)
    for thing in VALUES[name]:
        auto(jnp.float32(1), thing)
    assert auto.plans == 1  # they do not change the program
    for got, given in zip(seen, VALUES[name], strict=True):
        assert type(got) is type(given) and str(got) == str(given)


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (1.0, float("nan")), (1, 1.0, True)])
def test_numbers_that_look_alike_are_told_apart(numbers):
    auto = mpjax.autocast(lambda x, number: jnp.stack([x, jnp.asarray(number, x.dtype) / x]))
    for number in (*numbers, *numbers):
        got = np.asarray(auto(jnp.float32(2), number))
        np.testing.assert_array_equal(np.signbit(got[1]), np.signbit(number))
        np.testing.assert_array_equal(got[1], number / 2)


def test_python_number_arguments_decide_branches():
    auto = mpjax.autocast(lambda x, rate: x if rate > 0.5 else -x, "mixed_bfloat16")
    assert [float(auto(jnp.float32(1), rate)) for rate in (0.1, 0.9, 0.1)] == [-1, 1, -1]


def test_at_most_kept_programs_are_kept(monkeypatch):
    kept = 8
    monkeypatch.setattr(eager, "KEPT_PROGRAMS", kept)

    class Result:
        """What the function returns beside arrays."""

    results = weakref.WeakSet()

    def fun(x, rate):
        results.add(result := Result())
        return x * rate, result

    auto = Counted(fun, monkeypatch)
    for i in range(kept + 4):
        auto(jnp.float32(1), float(i))
    gc.collect()
    assert auto.plans == kept + 4 and not results
    auto(jnp.float32(1), float(kept + 3))
    assert auto.plans == kept + 4
    auto(jnp.float32(1), 0.0)
    assert auto.plans == kept + 5


def test_jax_clears_the_cache(monkeypatch):
    auto = Counted(lambda w, x: x @ w, monkeypatch)
    auto(W, X)
    jax.clear_caches()
    auto(W, X)
    assert auto.plans == 2
    auto(W, X)
    assert auto.plans == 2


def test_cache_does_not_keep_a_deleted_function_alive():
    weights = np.ones((8, 8), np.float32)
    auto = mpjax.autocast(lambda x, w=weights: x @ w, "mixed_bfloat16")
    auto(X)
    gone = weakref.ref(auto)
    del auto
    gc.collect()
    assert gone() is None


def test_a_jit_around_captures_what_it_reads():
    """As the documentation says."""
    config = Config(1.0)
    jitted = jax.jit(mpjax.autocast(lambda x: x * config.scale))
    assert jitted(jnp.float32(1)) == 1
    config.scale = 5.0
    assert jitted(jnp.float32(1)) == 1


def test_cache_does_not_keep_a_failed_call():
    fails = [True]

    def fun(x):
        if fails.pop():
            raise RuntimeError("not yet")
        return x

    auto = mpjax.autocast(fun, "mixed_bfloat16")
    with pytest.raises(RuntimeError, match="not yet"):
        auto(X)
    fails.append(False)
    np.testing.assert_array_equal(auto(X), X)


@pytest.mark.parametrize("policy", thorough_but(["float32", "mixed_float16"], "mixed_float16"))
@pytest.mark.parametrize("around", ["autocast", "gradient"])
def test_gradients_with_a_jit_around_autocast_trace_a_rule_once(around, policy):
    traces = []

    @jax.custom_vjp
    def loss(w):
        return jnp.sum(jnp.tanh(w @ w))

    def forward(w):
        traces.append("forward")
        return loss(w), w

    def backward(w, ct):
        traces.append("backward")
        return (ct * (w + w.T),)

    loss.defvjp(forward, backward)
    auto = mpjax.autocast(loss, policy)
    grad = jax.grad(jax.jit(auto)) if around == "autocast" else jax.jit(jax.grad(auto))
    for scale in (1, 2):
        np.testing.assert_allclose(grad(scale * W), scale * (W + W.T), rtol=1e-3)
    assert traces == ["forward", "backward"]


def test_settings_of_jax_are_part_of_a_call(monkeypatch):
    auto = Counted(lambda x: jnp.ones(3) * x, monkeypatch)
    auto(X[0, 0])
    with jax.default_matmul_precision("float32"):
        auto(X[0, 0])
    assert auto.plans == 2


def test_threads_share_a_function(monkeypatch):
    auto = Counted(lambda w, x, n: jnp.tanh(x @ w) * n, monkeypatch)
    want = {n: np.asarray(auto(W, X, n)) for n in range(4)}
    failures = []

    def work(seed):
        for i in range(40):
            n = (i + seed) % 4
            if not np.array_equal(auto(W, X, n), want[n]):
                failures.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and auto.plans == 4


@jax.tree_util.register_pytree_node_class
class Tagged:
    """A tree with metadata, as simulators have it: a unit, a box, a step."""

    def __init__(self, x, tag):
        self.x, self.tag = x, tag

    def tree_flatten(self):
        return (self.x,), self.tag

    @classmethod
    def tree_unflatten(cls, tag, children):
        return cls(*children, tag)


TAGS = {
    "scalar": lambda: jnp.float32(2),
    "array": lambda: jnp.arange(2.0),
    "numpy": lambda: np.arange(2.0),
    "in a tuple": lambda: ("box", jnp.float32(2)),
}


@pytest.mark.parametrize("policy", thorough_but(["float32", "mixed_bfloat16"], "mixed_bfloat16"))
@pytest.mark.parametrize("tag", TAGS)
def test_arrays_in_tree_metadata_work_eagerly_traced_and_under_grad(tag, policy):
    import flax.nnx  # noqa: F401  (all trees are searched for its modules)

    auto = mpjax.autocast(lambda t: Tagged(t.x + jnp.sum(jnp.asarray(t.x)), t.tag), policy)
    x, make = jnp.ones(3), TAGS[tag]
    known = auto(Tagged(x, make()))
    for _ in range(2):
        np.testing.assert_array_equal(auto(Tagged(x, make())).x, known.x)

    def twice(y):  # a traced call, and one of arrays within a trace
        return auto(Tagged(y, make())).x + auto(Tagged(x, known.tag)).x

    np.testing.assert_array_equal(jax.jit(twice)(x), 2 * known.x)
    assert " eq " not in str(jax.make_jaxpr(twice)(x))
    np.testing.assert_array_equal(
        jax.grad(lambda y: jnp.sum(auto(Tagged(y, make())).x))(x), [4, 4, 4]
    )
