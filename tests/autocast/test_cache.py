"""Eager calls: what is kept of them, for how long, and what is traced anew."""

import dataclasses
import enum
import functools
import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import W, X
from support import thorough_but

import mpjax
from mpjax._src.autocast import transform


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
    """A function under autocast, and how often it was traced."""

    def __init__(self, fun):
        self.traces = 0

        @functools.wraps(fun)
        def traced(*args, **kwargs):
            self.traces += 1
            return fun(*args, **kwargs)

        self.call = mpjax.autocast(traced, "mixed_bfloat16")

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)


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


UNKNOWN = (
    *(Config(2.0), {1, 2}, Config, Frozen, functools.partial(max, 1)),
    *(Frozen(inner=Config(1.0)), Frozen(inner=np.ones(2)), Frozen(inner=W)),
)


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_arguments_that_may_change_are_traced_anew(unknown):
    auto = Counted(lambda x, thing: x + 1)
    assert [float(auto(jnp.float32(1), unknown)) for _ in range(3)] == [2, 2, 2]
    assert auto.traces == 3


def doubled(x):
    return 2 * x


LASTING = {
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


@pytest.mark.parametrize("name", LASTING)
def test_arguments_that_cannot_change_are_traced_once(name):
    seen = []
    auto = Counted(lambda x, thing: (seen.append(thing), x + 1)[1])
    for _ in range(3):
        for thing in LASTING[name]:
            auto(jnp.float32(1), thing)
    assert auto.traces == len(LASTING[name])
    for got, given in zip(seen, LASTING[name], strict=True):
        assert type(got) is type(given) and str(got) == str(given)


def test_python_number_arguments_decide_branches():
    auto = mpjax.autocast(lambda x, rate: x if rate > 0.5 else -x, "mixed_bfloat16")
    assert [float(auto(jnp.float32(1), rate)) for rate in (0.1, 0.9, 0.1)] == [-1, 1, -1]


def test_cache_keeps_at_most_kept_calls(monkeypatch):
    kept = 8
    monkeypatch.setattr(transform, "KEPT_CALLS", kept)

    class Result:
        """What the function returns beside arrays lives as long as its trace."""

    results = weakref.WeakSet()

    def fun(x, rate):
        results.add(result := Result())
        return x * rate, result

    auto = Counted(fun)
    for i in range(kept + 4):
        auto(jnp.float32(1), float(i))
    gc.collect()
    assert auto.traces == kept + 4 and len(results) == kept
    auto(jnp.float32(1), float(kept + 3))
    assert auto.traces == kept + 4
    auto(jnp.float32(1), 0.0)
    assert auto.traces == kept + 5


def test_jax_clears_the_cache():
    auto = Counted(lambda w, x: x @ w)
    other = Counted(lambda w, x: x @ w)
    auto(W, X), other(W, X)
    jax.clear_caches()
    auto(W, X), other(W, X)
    assert auto.traces == other.traces == 2
    auto(W, X)
    assert auto.traces == 2


def test_cache_does_not_keep_a_deleted_function_alive():
    weights = np.ones((8, 8), np.float32)
    auto = mpjax.autocast(lambda x, w=weights: x @ w, "mixed_bfloat16")
    auto(X)
    gone = weakref.ref(auto)
    del auto
    gc.collect()
    assert gone() is None


def test_closed_over_values_are_read_at_trace_time_as_under_jit():
    """As under jit, which the documentation says."""
    config = Config(1.0)

    def fun(x):
        return x * config.scale

    auto, jitted = mpjax.autocast(fun, "mixed_bfloat16"), jax.jit(fun)
    assert auto(jnp.float32(1)) == jitted(jnp.float32(1)) == 1
    config.scale = 5.0
    assert auto(jnp.float32(1)) == jitted(jnp.float32(1)) == 1
    jax.clear_caches()
    assert auto(jnp.float32(1)) == 5


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


def test_settings_of_jax_are_part_of_a_call():
    auto = Counted(lambda x: jnp.ones(3) * x)
    auto(X[0, 0])
    with jax.default_matmul_precision("float32"):
        auto(X[0, 0])
    assert auto.traces == 2


def test_threads_share_a_function():
    auto = Counted(lambda w, x, n: jnp.tanh(x @ w) * n)
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
    assert not failures and auto.traces == 4


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
