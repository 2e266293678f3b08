"""dot_product_attention: the fused kernel of the platform, where it is."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from support import HALVES, assert_near, cast, equations, normal, thorough_but

import mpjax
from mpjax._src.core.base.devices import traced_for
from mpjax._src.replacements import fused_kernels

B, T, N, H = 2, 128, 4, 64
Q, K, V = (normal(i, B, T, N, H) for i in range(3))
BIAS = normal(3, 1, N, T, T)
MASK = jnp.tril(jnp.ones((1, 1, T, T), bool))
LENGTHS = jnp.asarray([T, T // 2], jnp.int32)
OPTIONS = {
    "plain": {},
    "bias": {"bias": BIAS},
    "mask": {"mask": MASK},
    "causal": {"is_causal": True, "scale": 0.2},
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    "window": {"local_window_size": (8, 0), "is_causal": True},
}


def attend(q, k, v, **options):
    return mpjax.dot_product_attention(q, k, v, **options)


@contextlib.contextmanager
def on(name):
    """Traces for a device that is not there."""
    with traced_for(name):
        yield


def taken(fun, *args, policy="mixed_bfloat16", device="h100"):
    """Returns which kernel is taken, and why."""
    with on(device):
        lines = mpjax.explain(fun, policy)(*args).summary()
    (line,) = [line for line in lines if line.startswith("attention: ")]
    name, _, why = line.removeprefix("attention: ").partition(": ")
    return name, why


@pytest.mark.parametrize("name", thorough_but(OPTIONS, "bias", "causal", "lengths"))
def test_dot_product_attention_on_a_cpu_equals_jaxs(name):
    ours, theirs = (
        functools.partial(f, **OPTIONS[name]) for f in (attend, jax.nn.dot_product_attention)
    )
    got, want, half = jax.jit(lambda *args: (ours(*args), theirs(*args), cast(ours)(*args)))(
        Q, K, V
    )
    assert np.array_equal(got, want)
    assert_near(half, got, 0.02)


def test_dot_product_attention_without_a_batch_returns_residuals_as_jax():
    got = attend(Q[0], K[0], V[0], return_residual=True)
    want = jax.nn.dot_product_attention(Q[0], K[0], V[0], return_residual=True)
    assert all(map(np.array_equal, got, want))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what it is for another device")
def test_explain_says_that_a_cpu_has_no_fused_attention():
    lines = str(mpjax.explain(attend, "mixed_bfloat16")(Q, K, V))
    assert "attention: xla: a CPU has no fused kernel" in lines


PAIRS = [(name, half) for name in OPTIONS for half in HALVES]


@pytest.mark.parametrize(("name", "half"), thorough_but(PAIRS, 0, 3, 4, 7, 8, 11))
def test_attention_under_autocast_on_a_gpu_is_cudnns(name, half):
    fun = lambda q, k, v: jnp.sum(attend(q, k, v, **OPTIONS[name]) ** 2)  # noqa: E731
    with on("h100"):
        jaxpr = jax.make_jaxpr(jax.grad(mpjax.autocast(fun, f"mixed_{half}"), (0, 1, 2)))(Q, K, V)
    kernels = [e for e in equations(jaxpr) if "dot_product_attention" in e.primitive.name]
    assert kernels and {v.aval.dtype.name for e in kernels for v in e.invars[:3]} == {half}
    assert all(v.aval.dtype == jnp.float32 for v in jaxpr.jaxpr.outvars)
    shapes = [v.aval.shape for e in equations(jaxpr) for v in e.outvars]
    assert (B, N, T, T) not in shapes  # no scores


def test_attention_of_half_arrays_without_autocast_on_a_gpu_is_cudnns():
    args = [x.astype(jnp.bfloat16) for x in (Q, K, V)]
    with on("a100"):
        jaxpr = jax.make_jaxpr(attend)(*args)
    assert any("dot_product_attention" in e.primitive.name for e in equations(jaxpr))


TWO = jnp.stack([Q, Q])
MAPPED = {
    "queries": lambda: jax.vmap(lambda q: attend(q, K, V))(TWO),
    "keys": lambda: jax.vmap(lambda k: attend(Q, k, V))(TWO),
    "twice": lambda: jax.vmap(jax.vmap(lambda q: attend(q, K, V)))(TWO[None]),
    "one by one": lambda: jax.vmap(lambda q: attend(q, K[0], V[0], bias=BIAS[0]))(Q),
    "lengths": lambda: jax.vmap(lambda q: attend(q, K, V, **OPTIONS["lengths"]))(TWO),
    "remat": lambda: jax.checkpoint(attend)(Q, K, V),
    "scan": lambda: jax.lax.scan(lambda q, _: (attend(q, K, V), None), Q, None, length=2)[0],
}


@pytest.mark.parametrize("name", MAPPED)
def test_attention_within_vmap_checkpoint_and_scan_is_cudnns(name):
    fun = cast(lambda s: jnp.sum(MAPPED[name]() * s))
    with on("h100"):
        jaxpr = jax.make_jaxpr(fun)(jnp.float32(1))
    assert any("dot_product_attention" in e.primitive.name for e in equations(jaxpr))


def test_attention_with_an_unbatched_bias_under_vmap_is_xlas():
    """JAX's batching rule for cuDNN takes none."""
    fun = lambda: jax.vmap(lambda q: attend(q, K, V, bias=BIAS))(TWO)  # noqa: E731
    with on("h100"):
        assert jax.eval_shape(cast(fun)).shape == TWO.shape


def test_together_leaves_values_and_gradients_unchanged():
    x = jnp.asarray([[jnp.nan, 1.0], [2.0, jnp.inf]])
    tied = fused_kernels._together([x, None, LENGTHS])
    assert np.array_equal(tied[0], x, equal_nan=True) and tied[1] is None
    assert np.array_equal(tied[2], LENGTHS) and tied[2].dtype == LENGTHS.dtype
    slope = jax.grad(lambda y: jnp.sum(fused_kernels._together([y, 2 * y])[1]))(jnp.ones(3))
    assert np.array_equal(slope, [2, 2, 2])


REFUSED = {
    "v100": (lambda: (Q, K, V, {}), "cuDNN's fused kernel needs compute capability 8.0"),
    "a100": (
        lambda: (*[jnp.ones((1, 8, 1, 512))] * 3, {}),
        "cudnn rejects it: The head dim must be",
    ),
    "h100": (
        lambda: (*[jnp.ones((1, 7, 2, 8))] * 3, {"bias": jnp.ones((1, 2, 7, 7))}),
        "with a bias or a mask, cuDNN's kernel needs even lengths, not (7, 7)",
    ),
    "h200": (lambda: (Q, K, V, {"local_window_size": (3, 3)}), "cudnn rejects it: cuDNN doesn't"),
    "v5e": (lambda: (Q, K, V, {"mask": MASK}), "on TPUs, flash attention does not support mask"),
    "v5p": (lambda: (Q[:, :100], K, V, {}), "flash attention needs lengths that are multiples of"),
    "v6e": (lambda: (Q, K[:, :, :2], V[:, :, :2], {}), "flash attention needs as many heads"),
}


@pytest.mark.parametrize("device", REFUSED)
def test_attention_without_a_fused_kernel_says_why(device):
    make, why = REFUSED[device]
    *args, options = make()
    name, said = taken(lambda q, k, v: attend(q, k, v, **options), *args, device=device)
    assert name == "xla" and said.startswith(why)


def test_fused_attention_takes_no_float32_operands():
    assert taken(attend, Q, K, V, policy="float32")[1].endswith("float32")
    policy = mpjax.get_policy("mixed_bfloat16").override({"*core*": "float32"})

    def fun(q, k, v):
        with jax.named_scope("core"):
            return attend(q, k, v)

    assert taken(fun, Q, K, V, policy=policy)[0] == "xla"

    def region(q, k, v):
        with mpjax.precision("float32"):
            return attend(q, k, v)

    assert taken(region, Q, K, V)[0] == "xla"


def test_a_tpu_takes_flash_attention():
    fun = lambda q, k, v: attend(q, k, v, is_causal=True)  # noqa: E731
    assert taken(fun, Q, K, V, device="v5e") == ("flash", "")
    with on("v5e"):
        jaxpr = jax.make_jaxpr(cast(fun))(Q, K, V)
    assert any(e.primitive.name == "pallas_call" for e in equations(jaxpr))


def linen_module(attention, **options):
    module = linen.MultiHeadDotProductAttention(4, attention_fn=attention, **options)
    mask = linen.make_causal_mask(jnp.ones((B, T)))
    params = jax.jit(module.init)(jax.random.key(0), X, mask=mask)
    rngs = {"dropout": jax.random.key(1)}
    return lambda x: module.apply(params, x, mask=mask, rngs=rngs)


def nnx_module(attention, **options):
    rngs = nnx.Rngs(0)
    module = nnx.MultiHeadAttention(
        4, 32, attention_fn=attention, decode=False, rngs=rngs, **options
    )
    mask = linen.make_causal_mask(jnp.ones((B, T)))
    return lambda x: module(x, mask=mask)


MODULES = {"linen": linen_module, "nnx": nnx_module}
OWN = {"linen": linen.dot_product_attention, "nnx": nnx.dot_product_attention}
X = normal(5, B, T, 32)


@pytest.mark.parametrize("name", MODULES)
def test_dot_product_attention_serves_modules_of_flax(name):
    make = MODULES[name]
    ours, theirs = make(mpjax.dot_product_attention), make(OWN[name])
    got, want, half = jax.jit(lambda x: (ours(x), theirs(x), cast(ours)(x)))(X)
    assert_near(got, want, 1e-5)
    assert_near(half, want, 0.02)
    assert taken(ours, X)[0] == "cudnn"


@pytest.mark.parametrize("name", MODULES)
def test_dot_product_attention_with_dropout_is_flaxs_own(name):
    options = {"dropout_rate": 0.5, "deterministic": False}
    ours, theirs = (MODULES[name](f, **options) for f in (mpjax.dot_product_attention, OWN[name]))
    assert np.array_equal(ours(X), theirs(X))
    if name == "nnx":  # its random state must not be traced
        return
    assert taken(ours, X) == (
        "xla",
        "with dropout, a precision or sown weights flax's own function runs",
    )


def test_attention_with_dropout_refuses_options_that_flax_lacks():
    drops = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
    with pytest.raises(ValueError, match="scale=0.5 cannot be combined with dropout"):
        attend(Q, K, V, scale=0.5, **drops)
    causal = attend(Q, K, V, is_causal=True, **drops)
    assert np.array_equal(causal, attend(Q, K, V, mask=MASK, **drops))


def test_attention_takes_the_implementation_that_is_asked_for():
    fun = lambda q, k, v: attend(q, k, v, implementation="xla")  # noqa: E731
    assert taken(fun, Q, K, V) == ("xla", "chosen by implementation=")
    fun = lambda q, k, v: attend(q, k, v, implementation="cudnn")  # noqa: E731
    assert taken(fun, Q, K, V)[0] == "cudnn"
    with pytest.raises(RuntimeError, match="cuDNN"):
        cast(fun)(Q, K, V)
    with pytest.raises(ValueError, match="Unknown implementation 'fast'. Choose one of"):
        attend(Q, K, V, implementation="fast")


WRONG = {
    r"query has shape \(\).*\[batch, length": {"query": 1.0},
    r"query has shape \(2, 8\)": {"query": np.ones((2, 8), np.float32)},
    r"key='k' must be an array": {"key": "k"},
    r"value=None must be an array": {"value": None},
    r"value has shape .*that of key": {"value": V[:, :, :1]},
    r"key has shape .*multiple of those of key": {"key": K[:, :, :1].repeat(3, 2)},
    r"query is int32": {"query": np.ones((B, T, 4, 8), np.int32)},
    r"query is bfloat16, key is float32.*pass dtype=": {"query": jnp.bfloat16(Q)},
    r"bias='b' must be None or an array": {"bias": "b"},
    r"bias has shape \(7, 7\)": {"bias": np.ones((7, 7), np.float32)},
    r"mask has shape \(1, 1, 1, 1, 1\)": {"mask": np.ones((1, 1, 1, 1, 1), bool)},
    r"scale='x' must be a finite number": {"scale": "x"},
    r"is_causal=1 must be True or False": {"is_causal": 1},
    r"local_window_size='a'": {"local_window_size": "a"},
    r"local_window_size=\(1, 2, 3\)": {"local_window_size": (1, 2, 3)},
    r"Unknown implementation 'xl'.*Did you mean 'xla'": {"implementation": "xl"},
    r"dropout_rate=2 must be a number from 0 to 1": {"dropout_rate": 2},
    r"query_seq_lengths is float32\[\].*int32\[2\]": {"query_seq_lengths": 3.0},
    r"key_value_seq_lengths is int32\[1\]": {"key_value_seq_lengths": [3]},
}


@pytest.mark.parametrize("message", WRONG)
def test_an_argument_that_does_not_fit_is_named(message):
    arguments = {"query": Q, "key": K, "value": V} | WRONG[message]
    with pytest.raises((TypeError, ValueError), match=message):
        mpjax.dot_product_attention(**arguments)
    with pytest.raises((TypeError, ValueError), match=message), on("h100"):
        cast(lambda: mpjax.dot_product_attention(**arguments))()


def test_a_mask_of_minus_a_billion_stays_finite_in_float16():
    fun = cast(lambda q: attend(q, K, V, bias=jnp.where(MASK, 0.0, -1e9)), "float16")
    with on("h100"):
        jaxpr = jax.make_jaxpr(fun)(Q)
    assert {"max", "min"} <= {e.primitive.name for e in equations(jaxpr)}


def test_patched_checks_of_cudnn_are_restored_after_a_call():
    names = ("check_cudnn_version", "check_compute_capability", "is_cuda_compute_capability_equal")
    before = [getattr(cudnn, name) for name in names]
    with pytest.raises(KeyError), on("h100"):
        assert cudnn.check_compute_capability("9.0") and not cudnn.check_compute_capability("10.0")
        assert cudnn.is_cuda_compute_capability_equal("9.0")
        raise KeyError
    assert [getattr(cudnn, name) for name in names] == before
    assert mpjax._src.core.base.devices.target_facts() is None
