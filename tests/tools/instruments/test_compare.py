import functools
import gc
import itertools
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import normal, thorough_but

import mpjax
from mpjax._src.tools.instruments import ranges
from mpjax._src.tools.instruments.compare import compare
from mpjax._src.tools.instruments.ranges import largest_finite, range_of
from mpjax._src.tools.instruments.shadows import STATS, stats_of

LAYERS, WIDTH = 4, 16


def line_of(text: str) -> str:
    """Returns "file:line" of the line of this file that holds a text."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return f"{__file__}:{number}"


def transformer(params, x, fault=lambda h, i: h):
    def layer(h, given):
        i, p = given
        with jax.named_scope("attention"):
            scores = (h @ p["q"]) @ (h @ p["k"]).swapaxes(-1, -2)
            h = h + jax.nn.softmax(scores / WIDTH**0.5) @ (h @ p["v"])
        with jax.named_scope("mlp"):
            h = h + jnp.tanh(h @ p["up"]) @ p["down"]
        return fault(h, i), None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x, (jnp.arange(LAYERS), params))
    return jnp.mean(h**2)


@functools.cache
def drawn():
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) * 0.2, jnp.float32)
        for name in ("q", "k", "v", "up", "down")
    }
    return params, jnp.asarray(rng.normal(size=(2, 8, WIDTH)), jnp.float32)


@pytest.fixture
def model():
    return drawn()


@functools.cache
def of_transformer(policy):
    return compare(transformer, policy)(*drawn())


def flushed(h, i):
    tiny = (jax.lax.stop_gradient(h) * 1e-9).astype(jnp.float16)  # tiny
    return h + tiny.astype(jnp.float32) * 1e9


def canceled(h, i, by=1000):
    big = (h + by).astype(jnp.float16)
    return h + (big - jnp.float16(by)).astype(jnp.float32)  # difference


def overflowing(h, i):
    return h + jnp.tanh((h * 1e6).astype(jnp.float16).astype(jnp.float32))  # too large


# The ends of the lines that are at fault, and what they compute.
FAULTS = {
    flushed: ("tiny", "convert_element_type"),
    canceled: ("difference", "sub"),
    overflowing: ("too large", "convert_element_type"),
}
POLICIES = ("mixed_bfloat16", "mixed_float16")


class TestPlantedFaults:
    @pytest.mark.parametrize(
        ("fault", "policy"),
        thorough_but(
            itertools.product(FAULTS, POLICIES),
            ([*FAULTS][-1], "mixed_bfloat16"),
        ),
    )
    def test_compare_shows_the_planted_fault_as_its_top_row(self, model, fault, policy):
        text, primitive = FAULTS[fault]

        def loss(params, x):
            return transformer(params, x, fault)

        top = compare(loss, policy)(*model).rows[0]
        assert top.source == line_of(text)
        assert top.primitive == primitive
        assert top.iteration[0][0] == "scan"

    def test_compare_shows_an_unsafe_op_list_as_its_top_row(self, model):
        policy = mpjax.get_policy("mixed_bfloat16").with_ops(half=("exp",))

        def loss(params, x):
            logits = jnp.tanh(x @ params["q"][0]) * 20  # logits, many near 20
            return jnp.sum(jnp.exp(logits - 3)) * 1e-3  # exponential

        top = compare(loss, policy)(*model).rows[0]
        assert (top.primitive, top.source) == ("exp", line_of("exponential"))
        assert top.operands < 2.0**-7 < top.added

    def test_compare_names_the_worst_iteration(self, model):
        def fault(h, i):
            return jax.lax.cond(i == LAYERS - 1, lambda h: canceled(h, i, 16000), lambda h: h, h)

        def loss(params, x):
            return transformer(params, x, fault)

        top = compare(loss, "mixed_bfloat16")(*model).rows[0]
        assert (top.primitive, top.iteration, top.times) == ("sub", (("scan", LAYERS - 1),), 1)

    @pytest.mark.parametrize("half", thorough_but([jnp.float16, jnp.bfloat16], jnp.float16))
    def test_compare_shows_a_16_bit_accumulator_as_its_top_row(self, half, rng):
        def loss(w, x):
            def turn(_, total):
                return total + half(1.1) + (x * 0.01).astype(half)  # sum

            total = jax.lax.fori_loop(0, 60, turn, jnp.full(x.shape, 256, half))
            return jnp.mean((jnp.tanh(x @ w) @ w.T + total.astype(jnp.float32) * 1e-2) ** 2)

        w, x = normal(rng, 16, 8), normal(rng, 4, 16)
        top = compare(loss, f"mixed_{np.dtype(half).name}")(w, x).rows[0]
        assert (top.primitive, top.source) == ("add", line_of("sum"))
        assert top.new < 5e-3 < top.error and top.added > 4 * top.new

    @pytest.mark.thorough
    def test_compare_shows_a_bfloat16_running_average_as_its_top_row(self, rng):
        def loss(w, x):
            def turn(mean, x):
                return mean * 0.995 + (x * 0.005).astype(jnp.bfloat16), None  # average

            start = jnp.zeros(x.shape[1:], jnp.bfloat16)
            mean, _ = jax.lax.scan(turn, start, x)
            return jnp.mean(jnp.tanh(mean.astype(jnp.float32) @ w) ** 2)

        rows = compare(loss, "mixed_bfloat16")(normal(rng, 8, 8), 3 + normal(rng, 400, 8)).rows
        assert rows[0].source == line_of("average")
        assert rows[0].added > 0.1

    def test_compare_counts_underflow_and_overflow(self):
        def fun(x):
            return x.astype(jnp.float16) * 1

        x = jnp.array([1e-9, 1e-9, 1.0, 1e9])
        (cast,) = (
            r
            for r in compare(fun, "mixed_float16")(x).rows
            if r.primitive == "convert_element_type"
        )
        assert (cast.underflow, cast.overflow) == (0.5, 0.25)
        assert cast.added == math.inf
        assert (cast.low, cast.high) == (np.float32(1e-9), np.float32(1e9))


class TestErrors:
    @pytest.mark.parametrize("policy", thorough_but(POLICIES, "mixed_bfloat16"))
    def test_compare_results_are_those_of_the_two_programs(self, model, policy):
        compared = of_transformer(policy)
        auto = mpjax.autocast(transformer, policy)
        (want, want_grads), (got, got_grads) = jax.jit(
            lambda *args: [jax.value_and_grad(fun)(*args) for fun in (transformer, auto)]
        )(*model)
        bound = 2.0 ** (-7 if policy == "mixed_float16" else -4)
        assert compared.results["loss"] == pytest.approx(abs(got - want) / want, abs=bound / 4)
        for name, g in want_grads.items():
            error = float(jnp.linalg.norm(g - got_grads[name]) / jnp.linalg.norm(g))
            assert compared.results[f"gradient of {name}"] > 0
            assert compared.results[f"gradient of {name}"] == pytest.approx(
                error, rel=0.7, abs=bound
            )

    def test_compare_under_float32_has_no_errors(self):
        compared = of_transformer("float32")
        assert compared.rows == ()
        assert set(compared.results.values()) == {0.0}

    def test_compare_tells_new_error_from_inherited(self):
        def fun(x):
            y = x.astype(jnp.bfloat16).astype(jnp.float32)
            return jnp.exp(y * 8) * 1.0

        x = normal(0, 64)
        rows = {r.primitive: r for r in compare(fun, "float32")(x).rows}
        assert rows["convert_element_type"].new < 2.0**-8
        assert rows["exp"].new == 0
        assert rows["exp"].inherited == rows["exp"].error > 4 * rows["exp"].operands / 2

    def test_compare_scales_the_loss_as_in_training(self, rng):
        w, x = normal(rng, 8, 8), normal(rng, 4, 8)

        def loss(w, x, size=1e-6):
            return jnp.mean(jnp.tanh(x @ w) ** 2) * size

        plain = compare(loss, "mixed_float16", loss_scale=None)(w, x)
        scaled = compare(loss, "mixed_float16")(w, x)
        assert (plain.loss_scale, scaled.loss_scale) == (1.0, 2.0**16)
        assert scaled.results["gradient of w"] < 1e-2 < plain.results["gradient of w"]
        assert "loss scale 65536" in str(scaled) and "scale" not in str(plain)
        assert plain.unscaled == {} and set(scaled.unscaled) == {"gradient of w"}
        without = scaled.unscaled["gradient of w"]  # of the compiled program, which fuses
        assert without == pytest.approx(plain.results["gradient of w"], rel=0.1)
        assert f"without: {without:.0%}" in str(scaled)
        assert compare(loss, "mixed_float16", loss_scale=2.0**4)(w, x).loss_scale == 16
        assert compare(loss, "mixed_bfloat16")(w, x).loss_scale == 1

    def test_compare_lowers_a_loss_scale_that_overflows(self, rng):
        w, x = normal(rng, 8, 8), normal(rng, 4, 8)

        def loss(w, x):
            return jnp.sum(jnp.tanh(x @ w) * 100)

        compared = compare(loss, "mixed_float16")(w, x)
        assert 1 < compared.loss_scale < 2.0**16
        assert not any(r.overflow for r in compared.rows)
        assert compared.results["gradient of w"] < 1e-2

    def test_compare_has_no_rows_for_barriers_that_mpjax_adds(self):
        rows = of_transformer("mixed_bfloat16").rows
        assert not any(r.primitive.endswith("barrier") for r in rows)
        assert all(r.operands > 0 for r in rows if r.primitive == "div" and r.inherited > 0)

    def test_compare_sees_rounding_of_constants(self):
        def fun(x):
            return jnp.tanh(x * 0.3)

        policy = mpjax.get_policy("mixed_bfloat16").with_ops(half=("mul", "tanh"))
        x = jnp.float32(0.25) * jnp.ones(4)  # exact in half, and 0.3 is not
        rows = compare(fun, policy)(x).rows
        assert any(r.primitive == "convert_element_type" and r.new > 0 for r in rows)

    def test_comparison_table_has_figures_right_and_words_left(self):
        policy = mpjax.get_policy("mixed_bfloat16").with_ops(half=("mul", "exp"))
        compared = compare(lambda x: jnp.exp(x * 0.3), policy)(jnp.ones(4))
        titles, *lines = compared.table().splitlines()
        figures, words = titles.index("added") + len("added"), titles.index("operation")
        lines = [line for line in lines if line[:figures].endswith(("%", "0"))]  # without places
        assert {"exp", "convert_element_type"} <= {row.primitive for row in compared.rows}
        for line, row in zip(lines, compared.rows, strict=True):
            assert line[words:].startswith(row.primitive)

    @pytest.mark.thorough
    def test_compare_puts_a_gradient_that_is_exactly_zero_last(self, rng):
        def loss(params, x):
            k = x @ params["w"] + params["b"]
            return jnp.sum(jax.nn.softmax(x @ k.swapaxes(-1, -2)) @ x * 1.5)

        x = jnp.asarray(rng.normal(size=(4, 8, 8)), jnp.float32)
        params = {"w": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32), "b": jnp.zeros(8)}
        compared = compare(loss, "mixed_bfloat16")(params, x)
        assert compared.noise == ("gradient of b",) and compared.results["gradient of b"] < 0.05
        noise = [r.noise for r in compared.rows]
        assert any(noise) and noise == sorted(noise)
        assert "zero in exact arithmetic" in " ".join(compared.table(None).split())

    def test_compare_names_branches_that_diverge(self):
        def fun(x):
            y = (x * jnp.float32(1.001)).astype(jnp.bfloat16).astype(jnp.float32)
            return jax.lax.cond(y > 1, lambda y: y * 2, lambda y: y, y)

        compared = compare(fun, "float32")(jnp.float32(1.0))
        assert len(compared.diverged) == 1 and compared.diverged[0].startswith("cond")
        assert "another path" in str(compared)


class TestPrograms:
    def test_compare_takes_forward_functions_aux_and_keywords(self, model):
        def loss(params, x, *, scale):
            return transformer(params, x) * scale, {"n": jnp.int32(3), "h": x * 2, "s": "text"}

        compared = compare(loss, "mixed_bfloat16", argnums=(0, 1), has_aux=True)(*model, scale=2.0)
        assert {"loss", "aux h", "gradient of q", "gradient of x"} <= compared.results.keys()
        forward = compare(lambda p, x: x @ p["q"][0], "mixed_bfloat16")(*model)
        assert forward.results.keys() == {"result"}
        assert not any(r.backward for r in forward.rows)

    def test_compare_follows_custom_rules_loops_and_branches(self):
        @jax.custom_vjp
        def f(x):
            return jnp.tanh(x)

        f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * (1 - jnp.tanh(x) ** 2),))

        def loss(w, x):
            def body(i, c):
                return f(c @ w)

            y = jax.lax.fori_loop(0, 3, body, x)
            y = jax.lax.switch(jnp.int32(1), [lambda y: y, lambda y: y @ w, jnp.sin], y)
            return jnp.mean(jnp.sort(y, axis=0) ** 2)

        compared = compare(loss, "mixed_float16")(normal(0, 8, 8, scale=0.3), normal(1, 4, 8))
        assert 0 < compared.results["gradient of w"] < 0.05
        assert max(r.times for r in compared.rows) >= 3

    @pytest.mark.thorough
    def test_compare_memory_stays_near_that_of_one_run(self):
        size, depth = 1 << 18, 24
        most = 0

        def fun(x):
            for _ in range(depth):
                x = jnp.sin(x) + 0.5
            return x

        class Watch:
            def __init__(self, inner):
                self.inner = inner

            def __getattr__(self, name):
                return getattr(self.inner, name)

            def operation(self, eqn, ins, place):
                nonlocal most
                outs = self.inner.operation(eqn, ins, place)
                held = {id(x): x.nbytes for x in jax.live_arrays()}
                most = max(most, sum(held.values()))
                return outs

        module = sys.modules["mpjax._src.tools.instruments.compare"]
        real = module.interpret
        gc.collect()
        x = jnp.linspace(0, 1, size)
        before = sum(x.nbytes for x in jax.live_arrays()) - x.nbytes
        policy = mpjax.get_policy("mixed_bfloat16").with_ops(half=("sin", "add"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "interpret", lambda j, a, w: real(j, a, Watch(w)))
            compare(fun, policy, argnums=None)(x)
        # One run holds an operand and a result at a time; here there are two in each precision.
        assert most - before < 8 * x.nbytes < depth * x.nbytes


class TestReport:
    def test_compare_report_is_data_and_text(self):
        compared = of_transformer("mixed_bfloat16")
        data = json.loads(json.dumps(compared.to_dict()))
        assert data["rows"][0]["primitive"] == compared.rows[0].primitive
        assert [r["added"] for r in data["rows"]] == [r.added for r in compared.rows]
        text = str(compared)
        for part in ("Error of the results", "added", "inherited", Path(__file__).name):
            assert part in text

    @pytest.mark.parametrize("policy", thorough_but(POLICIES, "mixed_bfloat16"))
    def test_compare_rows_come_worst_first(self, policy):
        rows = of_transformer(policy).rows
        blame = [r.blame for r in rows if not r.noise]
        assert blame == sorted(blame, reverse=True)

    def test_compare_report_plots_errors_of_both_passes(self, tmp_path):
        pytest.importorskip("matplotlib")
        compared = of_transformer("mixed_bfloat16")
        figure = compared.plot(tmp_path / "compare.png")
        assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
        assert figure.axes[0].get_yscale() == "log"
        (legend,) = figure.legends
        labels = {text.get_text() for text in legend.get_texts()}
        assert {"error, forward pass", "error, backward pass"} <= labels
        with pytest.raises(ValueError, match="no rows"):
            of_transformer("float32").plot()


class TestBadInput:
    @pytest.mark.parametrize(
        ("call", "error", "match"),
        [
            (lambda: compare(3, "mixed_float16")(jnp.ones(2)), TypeError, "compare: fun=3"),
            (lambda: compare(lambda: 1.0, "mixed_float16")(), ValueError, "no arrays"),
            (lambda: compare(jnp.sum, "mixed_float15"), ValueError, "mixed_float15"),
            (lambda: compare(jnp.sum, "float16", loss_scale=-1), ValueError, "loss_scale=-1"),
            (
                lambda: compare(jnp.sum, "float16")(jax.ShapeDtypeStruct((3,), jnp.float32)),
                TypeError,
                "needs concrete arrays",
            ),
            (
                lambda: compare(jnp.sum, "mixed_float16", argnums=5)(jnp.ones(2)),
                ValueError,
                "argnums=5",
            ),
        ],
    )
    def test_compare_refuses_bad_arguments(self, call, error, match):
        with pytest.raises(error, match=match):
            call()


def test_equal_infinities_have_no_part_in_relative_errors():
    own = np.float32([1, np.inf])
    stats = dict(zip(STATS, stats_of(np.float32([1.25, np.inf]), own, own), strict=True))
    assert stats["error"] == stats["new"] == 0.25 and stats["inherited"] == stats["overflow"] == 0


@pytest.mark.parametrize("bad", [0.0, np.inf, np.nan])
def test_statistics_of_small_arrays_are_those_of_large_ones(bad, monkeypatch):
    shadow = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32) * 1e20
    own = shadow * np.float32(1 + 1e-3)
    own[2] = shadow[2] = [0, 1, np.inf, -np.inf, 1e-30]
    got = jnp.asarray(own, jnp.bfloat16).at[1].multiply(bad)
    small = stats_of(got, own, shadow), range_of(got), largest_finite(got)
    monkeypatch.setattr(ranges, "SMALL", 0)
    large = stats_of(got, own, shadow), range_of(got), largest_finite(got)
    np.testing.assert_allclose(small[0], large[0], rtol=1e-5)
    assert small[0][4 if bad else 3] == pytest.approx(5 / 30)
    assert str(small[1:]) == str(large[1:])
