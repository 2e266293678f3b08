"""compare of two functions: where training and rollout, a port, or two versions part."""

import functools
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import normal, thorough_but

import mpjax
from mpjax._src.tools.instruments.likeness import alike, pool_of
from mpjax._src.tools.instruments.shadows import run_healed

WIDTH, HEADS, LENGTH, VOCABULARY = 16, 2, 4, 11


SHAPES = {
    "tokens": (VOCABULARY, WIDTH),
    "places": (LENGTH, WIDTH),
    "qkv": (WIDTH, 3 * WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, WIDTH),
    "head": (WIDTH, VOCABULARY),
}


def initial():
    scales = {name: shape[0] ** -0.5 for name, shape in SHAPES.items()}
    scales |= {name: 3 * scales[name] for name in ("tokens", "places")}
    return {name: normal(i, *SHAPES[name], scale=s) for i, (name, s) in enumerate(scales.items())}


def norm(x, epsilon=1e-6):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon)


def heads(x, w):
    return [y.reshape(*x.shape[:-1], HEADS, -1) for y in jnp.split(norm(x) @ w, 3, -1)]


def attend(q, k, v, mask):
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30))
    return jnp.einsum("bhij,bjhd->bihd", weights, v).reshape(*q.shape[:2], -1)


def chosen(logits, tokens):
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]


def train(p, tokens):
    """All tokens at once."""
    x = p["tokens"][tokens[:, :-1]] + p["places"][: LENGTH - 1]
    mask = jnp.tril(jnp.ones((LENGTH - 1, LENGTH - 1), bool))
    x = x + attend(*heads(x, p["qkv"]), mask) @ p["out"]
    x = x + jnp.tanh(norm(x) @ p["up"])
    return chosen(norm(x) @ p["head"], tokens[:, 1:])


def rollout_with(cache=jnp.float32, logits=jnp.float32, epsilon=1e-6, shift=0):
    """One token after the other, with a cache; parts from `train` as it is asked to."""

    def rollout(p, tokens):
        empty = jnp.zeros((len(tokens), LENGTH - 1, HEADS, WIDTH // HEADS), cache)

        def write(caches, now):
            place, token, target = now
            x = p["tokens"][token][:, None] + p["places"][(place + shift) % LENGTH]  # places
            q, k, v = heads(x, p["qkv"])
            k, v = (y.astype(cache) for y in (k, v))  # cache
            update = jax.lax.dynamic_update_slice_in_dim
            caches = [update(c, y, place, 1) for c, y in zip(caches, (k, v), strict=True)]
            x = x + attend(q, *caches, jnp.arange(LENGTH - 1) <= place) @ p["out"]
            x = x + jnp.tanh(norm(x) @ p["up"])
            out = norm(x, epsilon)[:, 0] @ p["head"]  # epsilon
            out = out.astype(logits).astype(jnp.float32)  # logits
            return caches, chosen(out, target)

        places = jnp.arange(LENGTH - 1)
        _, out = jax.lax.scan(write, [empty] * 2, (places, tokens[:, :-1].T, tokens[:, 1:].T))
        return out.T

    return rollout


def line_of(mark):
    lines = Path(__file__).read_text().split("\n")
    return f"test_agreement.py:{next(i for i, line in enumerate(lines, 1) if line.endswith(mark))}"


@functools.cache
def drawn():
    tokens = np.random.default_rng(1).integers(0, 10, (3, LENGTH), np.int32)
    return initial(), jnp.asarray(tokens)


@pytest.fixture
def args():
    return drawn()


@functools.cache
def rounded(what, half):
    """Returns what is said of a rollout that rounds."""
    return mpjax.compare(train, rollout_with(**{what: half}))(*drawn())


def difference(rollout, args):
    """Returns how far `train` and a rollout are apart."""
    # Operation by operation: where XLA rounds a program as a whole depends on the CPU.
    with jax.disable_jit():
        ours, theirs = train(*args), rollout(*args)
    return np.asarray(ours, np.float64) - np.asarray(theirs, np.float64)


@pytest.mark.thorough
def test_compare_of_the_same_formula_token_by_token_agrees(args):
    report = mpjax.compare(train, rollout_with())(*args)
    assert report.agrees and not report.by_formula and not report.partings
    assert report.meaning == "log_probs" and report.names == ("train", "rollout")
    want = np.mean(np.abs(difference(rollout_with(), args)))
    np.testing.assert_allclose(report.difference, want, rtol=0.5, atol=3e-7)
    assert "They agree up to float32 rounding" in str(report)


@pytest.mark.parametrize(
    ("what", "half"),
    thorough_but(
        itertools.product(["cache", "logits"], [jnp.bfloat16, jnp.float16]),
        ("cache", jnp.bfloat16),
    ),
)
def test_compare_names_the_line_whose_rounding_parts_two_functions(args, what, half):
    report = rounded(what, half)
    ratio = difference(rollout_with(**{what: half}), args)
    np.testing.assert_allclose(report.difference, np.mean(np.abs(ratio)), rtol=1e-2)
    np.testing.assert_allclose(report.worst, np.max(np.abs(ratio)), rtol=1e-2)
    assert ratio[report.worst_at] == pytest.approx(
        report.worst * np.sign(ratio[report.worst_at]), 0.01
    )
    rows = np.exp(ratio) * ratio - np.expm1(ratio)
    np.testing.assert_allclose([report.kl, report.kl_worst], [rows.mean(), rows.max()], rtol=0.05)
    np.testing.assert_allclose(report.ratio, np.exp(report.worst), rtol=1e-6)
    assert not report.agrees and not report.by_formula
    first = report.partings[0]
    assert first.source.endswith(line_of(f"# {what}")) and first.primitive == "convert_element_type"
    assert first.left < 0.05 and first.dtypes[0] == "" and first.dtypes[1].startswith("f32->")


@pytest.mark.thorough
def test_compare_names_several_causes_of_a_difference(args):
    policy = mpjax.get_policy("mixed_bfloat16")
    report = mpjax.compare(mpjax.autocast(train, policy), rollout_with())(*args)
    assert len(report.partings) > 3 and not report.by_formula
    lefts = [parting.left for parting in report.partings]
    assert lefts == sorted(lefts) and lefts[0] > 0.1
    assert all(parting.dtypes[0] for parting in report.partings)


@pytest.mark.parametrize(("what", "given"), [("epsilon", 1e-2), ("places", 1)])
def test_compare_names_a_formula_that_differs_in_both_functions(args, what, given):
    rollout = rollout_with(**{"shift" if what == "places" else what: given})
    report = mpjax.compare(train, rollout)(*args)
    assert report.by_formula and not report.agrees
    np.testing.assert_allclose(report.in_float32, report.difference, rtol=1e-3)
    theirs = [p for p in report.partings if p.dtypes[1]]
    mark = "return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon)"
    assert theirs[0].source.endswith(line_of(mark if what == "epsilon" else "# places"))
    assert all(p.left is None for p in report.partings)
    assert "They compute different things" in str(report)


def test_compare_finds_a_difference_below_the_first_tolerance():
    def mine(x):
        return jnp.sin(x) * (1 + 3e-6)

    def theirs(x):
        return jnp.sin(x)

    report = mpjax.compare(mine, theirs)(jax.random.normal(jax.random.key(0), (4, 8)))
    assert report.meaning == "values" and report.by_formula and 0 < report.kl < 1e-9
    assert [p.primitive for p in report.partings if p.dtypes[0]] == ["mul"]


def test_logits_are_compared_as_distributions(args):
    x = normal(0, 5, 7)

    def first(x):
        return x

    def second(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32) + 3  # a constant says nothing

    labels = np.arange(5) % 7
    report = mpjax.compare(first, second, results="logits", labels=labels)(x)
    p, q = (np.asarray(jax.nn.log_softmax(f(x)), np.float64) for f in (first, second))
    rows = np.sum(np.exp(p) * (p - q), -1)
    np.testing.assert_allclose([report.kl, report.kl_worst], [rows.mean(), rows.max()], rtol=0.05)
    taken = np.abs(p - q)[np.arange(5), labels]
    np.testing.assert_allclose(report.ratio, np.exp(taken.max()), rtol=1e-3)
    assert report.other_argmax == np.mean(p.argmax(-1) != q.argmax(-1))
    assert report.meaning == "logits" and not report.by_formula
    # Without the argument they may be logits too, unless it says that they are not.
    plain = mpjax.compare(first, second)(x)
    np.testing.assert_allclose(plain.kl, report.kl)
    assert plain.meaning == "values" and "Read as logits: mean KL" in str(plain)
    assert mpjax.compare(first, second, results="values")(x).kl is None
    assert report.partings[0].primitive == "convert_element_type"
    assert mpjax.compare(jax.nn.log_softmax, jax.nn.log_softmax)(x).meaning == "logits"


def test_of_several_results_the_logits_are_told(args):
    def fun(x):
        return {"loss": -jnp.mean(x), "logits": x, "state": jnp.exp(x[0])}

    halved = lambda x: fun(x.astype(jnp.bfloat16).astype(jnp.float32))  # noqa: E731
    x, labels = normal(0, 5, 7), np.zeros(5, int)
    report = mpjax.compare(fun, halved, results="logits", labels=labels)(x)
    assert report.result == "logits" and report.meaning == "logits" and report.ratio > 1
    assert report.results.keys() == {"loss", "logits", "state"} and report.kl > 0
    assert mpjax.compare(fun, halved)(x).kl is None  # nothing says what they are
    assert mpjax.compare(jnp.mean, jnp.mean)(-x).meaning == "values"  # one number has no tokens


def test_impossible_tokens_are_no_error():
    first = jnp.asarray([[0.0, -jnp.inf, 1.0], [2.0, 1.0, -2000.0]])
    second = first.at[1, 2].set(-jnp.inf)
    report = mpjax.compare(lambda a, b: a, lambda a, b: b, results="logits")(first, second)
    assert report.kl == 0 and report.other_argmax == 0  # the second never takes it, nor the first
    back = mpjax.compare(lambda a, b: b, lambda a, b: a, results="log_probs")(first - 3, second - 3)
    assert back.ratio == np.inf and not back.agrees


def test_agreement_report_is_text_and_json():
    report = rounded("cache", jnp.bfloat16)
    text = str(report)
    assert "train and rollout: |log ratio| per token" in text and "KL" in text
    assert max(map(len, text.split("\n"))) <= 80
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["partings"][0]["left"] < 0.05
    np.testing.assert_allclose(np.mean(np.abs(plain["differences"])), report.difference)


def test_agreement_report_plots_differences_and_causes(tmp_path):
    pytest.importorskip("matplotlib")
    report = rounded("cache", jnp.bfloat16)
    figure = report.plot(tmp_path / "agreement.png")
    assert (tmp_path / "agreement.png").read_bytes()[:4] == b"\x89PNG"
    image, bars = figure.axes[:2]
    assert image.images[0].get_array().shape == (3, LENGTH - 1)
    assert bars.patches[0].get_width() == pytest.approx(100 * report.partings[0].left)
    logits = mpjax.compare(jax.nn.log_softmax, jax.nn.log_softmax)(jnp.ones((4, 6)))
    assert logits.plot().axes[0].images[0].get_array().shape == (1, 4)


def test_compare_takes_arguments_that_are_no_arrays_as_constants():
    def fun(x, rows, name):
        return {name: x.reshape(rows, -1)}, name

    x = jnp.ones(6, jnp.bfloat16)
    report = mpjax.compare(fun, fun, results="values")(x, np.int64(2), "log_probs")
    assert report.agrees and report.differences.shape == (2, 3)


def test_compare_of_two_functions_refuses_bad_arguments(args):
    with pytest.raises(ValueError, match=r"train returned the shape \(3, 3\), but second .*\(3,\)"):
        mpjax.compare(train, lambda *args: train(*args)[:, 0], results="values")(*args)
    with pytest.raises(ValueError, match="results='logit'.*Did you mean 'logits'"):
        mpjax.compare(train, train, results="logit")
    with pytest.raises(TypeError, match="argnums, has_aux applies only to a function"):
        mpjax.compare(train, train, argnums=1, has_aux=True)
    with pytest.raises(TypeError, match="results='logits' applies only to two functions"):
        mpjax.compare(train, "mixed_bfloat16", results="logits")
    with pytest.raises(ValueError, match="must return a floating array.*but returned 0: int32.3."):
        mpjax.compare(lambda x: (x,), lambda x: (x,))(jnp.arange(3))
    with pytest.raises(ValueError, match="first returned 0: .*, 1: .*, but second result: float32"):
        mpjax.compare(lambda x: (x, x), lambda x: x)(jnp.ones(3))
    with pytest.raises(ValueError, match=r"labels have the shape \(4,\), but the logits \(2, 3\)"):
        logits = mpjax.compare(lambda x: x, lambda x: x, results="logits", labels=np.arange(4))
        logits(jnp.ones((2, 3)))
    with pytest.raises(TypeError, match="labels applies only to two functions"):
        mpjax.compare(train, "mixed_bfloat16", labels=np.arange(3))
    with pytest.raises(TypeError, match="needs concrete arrays, but was given ShapeDtypeStruct"):
        mpjax.compare(train, train)(*jax.eval_shape(lambda: args))
    with pytest.raises(TypeError, match="concrete"):
        jax.jit(mpjax.compare(train, train))(*args)


def test_run_healed_keeps_float32_at_the_healed_line_alone():
    def fun(x):
        a = jnp.exp(x)  # healed
        b = a[::-1]
        return b, b * b

    x = jnp.linspace(0, 1, 8, dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(fun)(x)
    plain, (moved, square) = (
        run_healed(jaxpr, [x]),
        run_healed(jaxpr, [x], lambda eqn, _: eqn.primitive.name == "exp"),
    )
    exact = jnp.exp(x.astype(jnp.float32))[::-1]
    assert [y.dtype for y in plain] == [jnp.bfloat16] * 2
    np.testing.assert_array_equal(plain[0], fun(x)[0])
    assert moved.dtype == jnp.float32 and square.dtype == jnp.bfloat16
    np.testing.assert_allclose(moved, exact, rtol=1e-6)
    np.testing.assert_array_equal(square, (exact * exact).astype(jnp.bfloat16))


def test_alike_knows_values_again_in_any_layout():
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(4, 6, 8)).astype(np.float32)
    near = pool_of([whole])
    assert alike(near, pool_of([whole.reshape(4, 6, 2, 4).swapaxes(1, 2) * (1 + 1e-6)]), 2e-5)
    assert alike(near, pool_of([whole[:, i] for i in range(6)]), 2e-5)
    assert alike(pool_of([whole[:, 2]]), near, 2e-5) and alike(near, pool_of([whole[1]]), 2e-5)
    padded = np.concatenate([whole, np.zeros((4, 2, 8)), np.full((4, 1, 8), -1e30)], 1)
    assert alike(near, pool_of([padded]), 2e-5)
    for other in (whole * (1 + 1e-3), whole + 1e-3, rng.normal(size=(4, 6, 8)), whole[:, 2] ** 2):
        assert not alike(near, pool_of([other]), 2e-5)
