import dataclasses
import functools
import itertools
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import normal, thorough_but

import mpjax
from mpjax import find_nonfinite
from mpjax._src.tools.instruments import nonfinite

LAYERS, WIDTH = 5, 16


def line_of(text: str) -> str:
    """Returns "file:line" of the line of this file that holds a text."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return f"{__file__}:{number}"


def block(h, p):
    with jax.named_scope("attention"):
        q, k, v = h @ p["q"], h @ p["k"], h @ p["v"]
        q, k = q.astype(p["dtype"]), k.astype(p["dtype"])
        scores = q @ k.swapaxes(-1, -2)  # attention scores
        weights = jax.nn.softmax(scores.astype(jnp.float32) / WIDTH**0.5)
        h = h + weights @ v
    with jax.named_scope("mlp"):
        return h + jnp.tanh(h @ p["up"]) @ p["down"]


def transformer(params, x, dtype=jnp.float16, remat=False):
    def layer(h, p):
        return block(h, {**p, "dtype": dtype}), None

    layer = jax.checkpoint(layer) if remat else layer
    h, _ = jax.lax.scan(layer, x, params["blocks"])
    return jnp.mean(h**2)


@pytest.fixture
def model(rng):
    blocks = {
        name: jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) * 0.1, jnp.float32)
        for name in ("q", "k", "v", "up", "down")
    }
    return {"blocks": blocks}, jnp.asarray(rng.normal(size=(2, 8, WIDTH)), jnp.float32)


def planted(params, layer, factor=3000.0):
    """Makes the attention scores of one layer too large for float16."""
    blocks = dict(params["blocks"])
    for name in ("q", "k"):
        blocks[name] = blocks[name].at[layer].multiply(factor)
    return {"blocks": blocks}


class TestAttentionOverflow:
    @pytest.mark.parametrize(
        ("policy", "remat", "layer"),
        thorough_but(
            itertools.product([None, "mixed_float16"], [False, True], [0, 3]),
            *[(None, False, 0), ("mixed_float16", True, 3)],
        ),
    )
    def test_find_nonfinite_names_attention_overflow_by_line_and_iteration(
        self, model, layer, remat, policy
    ):
        params, x = model
        find = find_nonfinite(lambda p, x: transformer(p, x, remat=remat), policy)
        report = find(planted(params, layer), x)
        assert report
        assert (report.primitive, report.made, report.kind) == ("dot_general", "Inf", "overflow")
        assert report.source == line_of("attention scores")
        assert report.scope == "attention"
        assert report.loops == (("scan", layer),)
        assert not report.backward
        assert report.curable is False
        assert report.largest > 65504
        assert [r.dtype for r in report.inputs] == ["f16", "f16"]
        assert report.reaches[0] == "loss"
        assert "bfloat16" in report.advice and "does not help" in report.advice

    def test_find_nonfinite_finds_nothing_in_a_finite_program(self, model):
        report = find_nonfinite(transformer, "mixed_float16")(*model)
        assert not report
        assert report.curable is None
        assert "Nothing found" in str(report)

    @pytest.mark.thorough
    def test_find_nonfinite_finds_overflow_of_a_float32_program_under_autocast(self, model):
        params, x = model
        policy = mpjax.get_policy("mixed_float16").with_ops(half=("dot_general",))

        def loss(p, x):
            return transformer(p, x, dtype=jnp.float32)

        assert not find_nonfinite(loss, "mixed_float16")(planted(params, 2), x)
        report = find_nonfinite(loss, policy)(planted(params, 2), x)
        assert (report.source, report.loops) == (line_of("attention scores"), (("scan", 2),))


class TestBackward:
    def test_find_nonfinite_gives_the_safe_loss_scale_of_a_curable_overflow(self, model):
        params, x = model
        report = find_nonfinite(transformer, "mixed_float16", loss_scale=2.0**26)(params, x)
        assert report.backward and report.curable
        assert report.kind == "overflow"
        safe = report.safe_loss_scale
        run = mpjax.scaled_value_and_grad

        def finite(scale):
            fun = run(mpjax.autocast(transformer, "mixed_float16"), mpjax.StaticLossScale(scale))
            return bool(jax.jit(fun)(params, x)[2])

        assert finite(safe) and not finite(2 * safe)
        assert "loss" not in report.reaches

    def test_find_nonfinite_names_the_parameter_of_a_backward_overflow(self, rng):
        def loss(params, x):
            h = jnp.tanh(x)
            h = h @ params["w"]  # product
            return jnp.mean(h.astype(jnp.float32))

        x = jnp.asarray(rng.normal(size=(8, 32)), jnp.float32)
        params = {"w": jnp.asarray(rng.normal(size=(32, 32)) * 1000, jnp.float32)}
        run = functools.partial(find_nonfinite, loss, "mixed_float16", argnums=1)
        report = run(loss_scale=2.0**15)(params, x)
        assert (report.path, report.backward) == ("w", True)
        assert report.primitive == "dot_general"
        assert report.source == line_of("product")
        assert report.curable

    @pytest.mark.parametrize(
        "scale",
        thorough_but(["dynamic", 8.0, mpjax.StaticLossScale(8.0), None], "dynamic", 8.0),
    )
    def test_find_nonfinite_takes_each_kind_of_loss_scale(self, scale):
        report = find_nonfinite(jnp.mean, "mixed_float16", loss_scale=scale)(jnp.ones(3))
        assert report.loss_scale == {"dynamic": 65536.0, None: 1.0}.get(
            scale if not isinstance(scale, mpjax.StaticLossScale) else 0, 8.0
        )

    def test_an_infinite_derivative_is_not_curable(self):
        def loss(w, x):
            return jnp.sum(jnp.sqrt(x * w))  # root

        report = find_nonfinite(loss, "mixed_float16", loss_scale=4.0)(jnp.zeros(3), jnp.ones(3))
        assert report.source == line_of("root")
        assert report.curable is False
        assert report.reaches == ("gradient of w",)
        assert "jnp.where" in report.advice

    def test_find_nonfinite_names_the_nan_behind_a_where(self):
        def loss(w):
            return jnp.sum(jnp.where(w > 0, jnp.log(w), 0.0))  # masked

        report = find_nonfinite(loss)(jnp.array([1.0, 0.0]))
        assert (report.source, report.backward) == (line_of("masked"), True)
        assert report.made == "NaN" and not report.curable


class TestForward:
    def test_masked_infinities_are_not_held_against_a_program(self):
        def attend(w, x):
            mask = jnp.tril(jnp.ones((4, 4), bool))
            scores = jnp.where(mask, x @ w @ x.T, -jnp.inf)
            benign = jnp.where(mask, jnp.log(mask.astype(jnp.float32)), 0.0)
            return jnp.sum(jax.nn.softmax(scores) + benign)

        assert not find_nonfinite(attend)(jnp.ones((3, 3)), jnp.ones((4, 3)))

    def test_a_pole_that_is_masked_out_does_not_hide_what_comes_later(self):
        def loss(w, x):
            bias = jnp.log((jnp.arange(4) < 3).astype(jnp.float32))
            y = (x * w).astype(jnp.float16) * jnp.float16(60000)  # later
            return jnp.sum(jax.nn.softmax(bias) + y.astype(jnp.float32))

        report = find_nonfinite(loss)(jnp.full(4, 2.0), jnp.ones(4))
        assert (report.source, report.kind) == (line_of("later"), "overflow")

    def test_an_overflow_beside_a_mask_is_seen(self):
        def loss(w, x):
            scores = jnp.where(jnp.tri(3, dtype=bool), x * w, -jnp.inf).astype(jnp.float16)
            scores = scores * jnp.float16(60000)  # beside the mask
            return jnp.sum(jax.nn.softmax(scores.astype(jnp.float32)) ** 2)

        report = find_nonfinite(loss)(jnp.float32(2), jnp.ones((3, 3)))
        assert (report.source, report.kind) == (line_of("beside the mask"), "overflow")

    def test_a_forward_overflow_of_float32_goes_before_what_it_leads_to(self):
        def loss(w, y):
            return jnp.mean((w - y) ** 2)  # beyond float32

        for run, argnums in ((loss, 0), (lambda w, y: jax.value_and_grad(loss)(w, y), None)):
            report = find_nonfinite(run, "mixed_float16", loss_scale=1024.0, argnums=argnums)(
                jnp.ones(3), jnp.full(3, 1e25)
            )
            assert (report.source, report.backward) == (line_of("beyond float32"), False)
            assert report.primitive == "integer_pow"

    def test_infinities_that_are_returned_on_purpose_are_no_finding(self):
        def fun(x, mask):
            return jnp.where(mask, x, -jnp.inf), jnp.max(x, initial=-jnp.inf)

        assert not find_nonfinite(fun)(jnp.ones(3), jnp.array([True, False, True]))
        report = find_nonfinite(lambda x: x * 2.0 + 1, argnums=None)(jnp.full(2, jnp.inf))
        assert (report.kind, report.path) == ("argument", "x")

    def test_find_nonfinite_names_a_fully_masked_row(self):
        def loss(w, mask):
            return jnp.sum(jax.nn.softmax(jnp.where(mask, w, -jnp.inf), axis=-1))

        mask = jnp.array([[True, True], [False, False]])
        report = find_nonfinite(loss)(jnp.ones((2, 2)), mask)
        assert (report.made, report.curable) == ("NaN", False)
        assert "fully masked" in report.advice

    def test_bad_data_and_diverged_parameters_are_named(self):
        def loss(params, batch):
            return jnp.sum(params["w"] * batch["x"])

        good, bad = jnp.ones(3), jnp.array([1.0, jnp.nan, 1.0])
        report = find_nonfinite(loss)({"w": good}, {"x": bad})
        assert (report.kind, report.path, report.result.nans) == ("argument", "x", 1)
        report = find_nonfinite(loss)({"w": bad}, {"x": good})
        assert (report.kind, report.path) == ("argument", "w")
        report = find_nonfinite(loss, argnums=None)({"w": jnp.full(3, jnp.inf)}, {"x": good})
        assert report.reaches == ("result",)

    def test_find_nonfinite_names_what_spoils_the_model_state_alone(self):
        def loss(w, x, model_state):
            var = jnp.mean((x * w) ** 2, 0)
            return jnp.mean(jnp.tanh(x * w * jax.lax.rsqrt(var))), {"var": model_state["var"] + var}

        x = jnp.ones((4, 3)).at[0].set(1e20)
        report = find_nonfinite(loss, "mixed_float16", has_aux=True)(
            jnp.ones(3), x, model_state={"var": jnp.ones(3)}
        )
        assert report.reaches == ("aux var",) and not report.backward and report.made == "Inf"

    def test_a_function_without_a_loss_runs_forward_alone(self):
        report = find_nonfinite(lambda x: {"y": jnp.exp(x), "z": x})(jnp.array([1.0, 200.0]))
        assert (report.primitive, report.reaches) == ("exp", ("result y",))
        assert report.inputs[0].high == 200.0
        assert "loss scale" not in report.advice

    def test_find_nonfinite_names_a_divisor_that_float16_flushed_to_zero(self):
        def loss(x):
            return jnp.sum(1 / (x.astype(jnp.float16) * jnp.float16(1e-6)))

        report = find_nonfinite(loss, argnums=None)(jnp.full(3, 1e-3))
        assert report.primitive == "div" and "flushed" in report.advice


class TestControlFlow:
    def test_find_nonfinite_names_the_turn_of_a_while_loop(self):
        def fun(x):
            return jax.lax.fori_loop(0, jnp.int32(10), lambda i, x: x * x, x)  # squared

        with pytest.raises(ValueError, match="Reverse-mode") as error:
            find_nonfinite(fun)(jnp.float32(10.0))
        assert "argnums=None" in error.value.__notes__[-1]
        report = find_nonfinite(fun, argnums=None)(jnp.float32(10.0))
        # 10^(2^i) leaves float32 in the sixth squaring.
        assert report.loops[0][1] == 5
        assert report.source == line_of("squared")

    def test_find_nonfinite_names_the_turns_of_nested_loops(self):
        def step(x, i):
            x = jax.lax.switch(i, [lambda x: x, lambda x: x / 0, lambda x: x], x)
            return x, x

        def fun(x):
            def outer(x, j):
                return jax.lax.scan(step, x, jnp.array([0, 2, 1]) * (j == 2))

            return jax.lax.scan(outer, x, jnp.arange(4))[0]

        report = find_nonfinite(fun)(jnp.float32(1.0))
        assert report.primitive == "div"
        assert report.loops == (("scan", 2), ("scan", 2))

    def test_find_nonfinite_follows_reversed_and_empty_scans(self):
        def fun(x):
            empty = jax.lax.scan(lambda c, y: (c, y * 2), x, jnp.zeros((0, 3)))
            last, ys = jax.lax.scan(lambda c, i: (c, c / i), x, jnp.arange(4.0), reverse=True)
            return last, ys, empty

        report = find_nonfinite(fun)(jnp.float32(1.0))
        assert report.loops == (("scan", 0),)

    def test_find_nonfinite_follows_custom_rules(self):
        @jax.custom_vjp
        def f(x):
            return jnp.exp(x)  # primal

        def backward(res, ct):
            return (ct / jnp.zeros_like(res),)  # cotangent

        f.defvjp(lambda x: (f(x), x), backward)
        report = find_nonfinite(lambda x: jnp.sum(f(x)))(jnp.ones(2))
        assert (report.source, report.backward) == (line_of("cotangent"), True)
        report = find_nonfinite(lambda x: f(x))(jnp.array([200.0]))
        assert report.source == line_of("primal")

        @jax.custom_jvp
        def g(x):
            return x * 2

        g.defjvp(lambda primals, tangents: (g(*primals), jnp.log(primals[0]) * tangents[0]))
        report = find_nonfinite(lambda x: jnp.sum(g(x)))(jnp.zeros(2))
        assert report.primitive == "log"

    def test_find_nonfinite_follows_jit_and_vmap_and_donates_nothing(self):
        inner = jax.jit(lambda x: jnp.log(x - 1), donate_argnums=0)
        x = jnp.array([3.0, 1.0])
        report = find_nonfinite(lambda x: jax.vmap(inner)(x * 1.0))(x)
        assert report.primitive == "log"
        assert not x.is_deleted()

    def test_interpret_agrees_with_the_compiled_program(self, model):
        from mpjax._src.core.base import _jax
        from mpjax._src.core.program.interpret import Plain, interpret

        def fun(params, x):
            loss, grads = jax.value_and_grad(transformer)(params, x, jnp.float32, True)
            return [loss, *jax.tree.leaves(grads)]

        params, x = model
        leaves, tree = jax.tree.flatten((params, x))
        jaxpr = _jax.trace(
            lambda *flat: fun(*jax.tree.unflatten(tree, flat)), [jax.typeof(a) for a in leaves], "f"
        )
        got = interpret(jaxpr, list(leaves), Plain())
        for a, b in zip(got, jax.jit(fun)(params, x), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


class TestReport:
    def test_nonfinite_report_is_data_and_text(self, model):
        params, x = model
        report = find_nonfinite(transformer)(planted(params, 1), x)
        assert json.loads(json.dumps(report.to_dict()))["loops"] == [["scan", 1]]
        text = str(report)
        for part in ("dot_general produced Inf", "scan 1", "attention", "65504"):
            assert part in text
        assert re.search(r"inputs +f16\[2,8,16\] +-[\d.e+]+ to [\d.e+]+", text)

    def test_find_nonfinite_takes_has_aux_argnums_and_keywords(self):
        def loss(w, x, *, shift):
            return jnp.sum(w * x), {"logits": jnp.log(x - shift), "note": "text"}

        find = find_nonfinite(loss, has_aux=True, argnums=(0, 1))
        report = find(jnp.ones(2), jnp.ones(2), shift=jnp.ones(2))
        assert report.reaches == ("aux logits",)

    def test_find_nonfinite_names_what_only_the_compiled_program_makes(self, monkeypatch):
        from mpjax._src.tools.instruments.programs import Program

        monkeypatch.setattr(Program, "compiled", lambda *_: [jnp.float32(np.nan)])
        report = find_nonfinite(lambda x: x * 1.0, argnums=None)(jnp.float32(1))
        assert report.kind == "compiled" and "compiled program only" in str(report)


class TestCure:
    def test_find_nonfinite_overrides_name_the_narrowest_place(self):
        """Its scope is that of the whole model: a pattern for it would switch half off."""

        def model(params, x):
            with jax.named_scope("Model"):
                for i in range(3):
                    with jax.named_scope(f"Dense_{i}"):
                        x = jnp.tanh(x @ params[f"Dense_{i}"])
                scores = jax.nn.softmax((x @ params["scores"] * 6e4) @ x.T)
                return jnp.mean(scores @ x)

        params = {f"Dense_{i}": normal(i, 8, 8) for i in range(3)} | {"scores": normal(3, 8, 8)}
        x = normal(4, 16, 8)
        policy = mpjax.get_policy("mixed_float16")
        report = find_nonfinite(model, policy)(params, x)
        assert report.kind == "overflow" and report.scope == "Model"
        assert report.overrides and 0 < report.float32_flops < 0.7
        assert not any("Dense" in p or p in ("*", "Model*", "Model/*") for p in report.overrides)
        cured = policy.override(report.overrides)
        assert not find_nonfinite(model, cured)(params, x)
        half = mpjax.explain(model, cured)(params, x).half_flops
        assert half == pytest.approx(1 - report.float32_flops)
        text = " ".join(str(report).split())
        assert f"moves {report.float32_flops:.1%} of the matmul FLOPs" in text
        assert all(repr(pattern) in text for pattern in report.overrides)

    @pytest.mark.thorough
    def test_find_nonfinite_overrides_several_places_where_one_does_not_cure(self):
        def loss(w, x):
            with jax.named_scope("first"):
                y = x @ w * 1e4
            with jax.named_scope("second"):
                z = y @ w
            with jax.named_scope("third"):
                return jnp.mean(jnp.tanh(z @ w))

        report = find_nonfinite(loss, "mixed_float16")(normal(0, 8, 8), normal(1, 4, 8) * 10)
        assert report.overrides
        policy = mpjax.get_policy("mixed_float16")
        cured = policy.override(report.overrides)
        assert not find_nonfinite(loss, cured)(normal(0, 8, 8), normal(1, 4, 8) * 10)

    def test_find_nonfinite_does_not_propose_a_given_override(self):
        def loss(w, x):
            with jax.named_scope("kept"):
                x = x @ w
            with jax.named_scope("large"):
                return jnp.mean(jnp.tanh((x * 6e4) @ w))

        policy = mpjax.get_policy("mixed_float16").override({"kept*": "float32"})
        report = find_nonfinite(loss, policy)(normal(0, 8, 8), normal(1, 4, 8))
        assert report.overrides and "kept*" not in report.overrides


class TestBadInput:
    @pytest.mark.parametrize(
        ("call", "error", "match"),
        [
            (lambda: find_nonfinite(3)(jnp.ones(2)), TypeError, "fun=3 must be a function"),
            (lambda: find_nonfinite(lambda: 1.0)(), ValueError, "no arrays"),
            (lambda: find_nonfinite(jnp.sum)(jnp.arange(3)), ValueError, None),
            (
                lambda: find_nonfinite(lambda i: jnp.sum(i * 1.0))(jnp.arange(3)),
                ValueError,
                "no floating arrays.*argnums=None",
            ),
            (
                lambda: find_nonfinite(jnp.sum, argnums=2)(jnp.ones(3)),
                ValueError,
                "argnums=2 must be positions of arguments, from 0 to 0",
            ),
            (
                lambda: find_nonfinite(jnp.sum, has_aux=True)(jnp.ones(3)),
                TypeError,
                "has_aux=True",
            ),
            (
                lambda: find_nonfinite(jnp.sum)(jax.ShapeDtypeStruct((3,), jnp.float32)),
                TypeError,
                "needs concrete arrays",
            ),
            (
                lambda: jax.jit(lambda x: find_nonfinite(jnp.sum)(x).found)(jnp.ones(2)),
                TypeError,
                "outside of jit",
            ),
            (lambda: find_nonfinite(jnp.sum, "float15"), ValueError, "float15"),
            (lambda: find_nonfinite(jnp.sum, loss_scale=-1), ValueError, "loss_scale=-1"),
        ],
    )
    def test_find_nonfinite_refuses_bad_arguments(self, call, error, match):
        if match is None:  # an integer result: the forward pass alone
            assert not call()
            return
        with pytest.raises(error, match=match):
            call()

    def test_find_nonfinite_passes_on_the_error_of_the_function(self):
        def fun(x):
            return x @ jnp.ones((7, 7))

        with pytest.raises(TypeError) as error:
            find_nonfinite(fun)(jnp.ones((2, 3)))
        assert any("find_nonfinite" in note for note in error.value.__notes__)


def test_nonfinite_report_is_immutable():
    report = find_nonfinite(jnp.sum)(jnp.ones(2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.found = True
    assert math.isnan(nonfinite.Range("f32", (), math.nan, math.nan, 1, 0).low)


@pytest.mark.parametrize(
    "policy", thorough_but(["mixed_float16", "mixed_bfloat16", "float32"], "mixed_float16")
)
def test_strict_promotion_does_not_hide_what_overflowed(policy, strict_promotion):
    w, x = jnp.full((8, 8), 1e30), jnp.full((4, 8), 1e30)
    report = find_nonfinite(lambda w: jnp.mean((x @ w) ** 2), policy)(w)
    assert report.found and report.made == "Inf"
