import functools
import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from support import normal, thorough_but

import mpjax
from mpjax._src.core.planner import rounding
from mpjax._src.tools.hardware.targets import find_target
from mpjax._src.tools.instruments import tune as tuning
from mpjax._src.tools.instruments.places import Place, Places
from mpjax._src.tools.instruments.programs import make_program
from mpjax._src.tools.instruments.tune import Tuner, tune

LAYERS, WIDTH = 3, 16


def error(fun, policy, *args, wrap=lambda fun: fun):
    """Returns the largest relative error of the loss and of a gradient, against float32."""
    want = jax.tree.leaves(wrap(jax.value_and_grad(fun))(*args))
    got = jax.tree.leaves(wrap(jax.value_and_grad(mpjax.autocast(fun, policy)))(*args))
    return max(
        float(jnp.linalg.norm(g - w) / jnp.linalg.norm(w)) for g, w in zip(got, want, strict=True)
    )


def flops_in_half(fun, policy, *args):
    return mpjax.explain(fun, policy)(*args).half_flops


def layers(params, x, sharp=(1,)):
    """A network of named layers; what sharp ones compute, rounding spoils."""
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = x @ w
            x = jnp.sin(x * 40) if i in sharp else jnp.tanh(x)
    return jnp.mean(x**2) + jnp.mean(x)


@pytest.fixture
def model(rng):
    params = [
        jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)
        for _ in range(LAYERS)
    ]
    return params, jnp.asarray(rng.normal(size=(8, WIDTH)), jnp.float32)


class TestSearch:
    @pytest.mark.thorough
    @pytest.mark.parametrize("sharp", [(1,), (0,), (0, 2), ()])
    def test_tune_needs_no_more_float32_than_brute_force_over_layers(self, model, sharp):
        def loss(params, x):
            return layers(params, x, sharp)

        tolerance = 0.02
        policy = mpjax.get_policy("mixed_bfloat16")
        tuned = tune(loss, policy, tolerance)(*model)
        assert tuned.met
        assert error(loss, tuned.policy, *model) <= tolerance

        # With every layer's matmul in float32 or not, the fewest that are enough:
        names = [f"layer{i}/dot_general" for i in range(LAYERS)]
        for count in range(LAYERS + 1):
            passing = [
                some
                for some in itertools.combinations(names, count)
                if error(loss, policy.override(dict.fromkeys(some, "float32")), *model) <= tolerance
            ]
            if passing:
                break
        else:
            return  # matmuls alone are not enough
        assert flops_in_half(loss, tuned.policy, *model) >= 1 - count / LAYERS - 1e-6

    def test_tune_returns_a_policy_that_meets_the_tolerance_as_it_is(self, model):
        tuned = tune(layers, "mixed_float16", 1.0)(*model)
        assert tuned.met and tuned.steps == () and not tuned.cut_short and tuned.cost == 0
        assert tuned.policy == mpjax.get_policy("mixed_float16")
        assert tuned.runs >= 3  # float32, at least one for the loss scale, and the policy

    @pytest.mark.thorough
    def test_tune_cures_an_unsafe_op_of_an_op_list(self, rng):
        def loss(w, x):
            y = jnp.tanh(x @ w)
            return jnp.mean(jnp.exp(y * 12)) + jnp.mean(jnp.sin(y))

        policy = mpjax.get_policy("mixed_bfloat16").with_ops(half=("exp", "sin", "reduce_sum"))
        args = normal(0, 8, 4, scale=0.4), normal(1, 16, 8)
        tolerance = error(loss, policy, *args) / 2
        tuned = tune(loss, policy, tolerance)(*args)
        assert tuned.met and tuned.steps
        assert error(loss, tuned.policy, *args) <= tolerance

    def test_neighbors_in_float32_share_the_array_between_them(self):
        def loss(p, x):
            with jax.named_scope("first"):
                h = x @ p["a"]
            with jax.named_scope("second"):
                return jnp.mean((h.T.reshape(16, 64).T @ p["b"]) ** 2)

        p = {"a": normal(0, 16, 16), "b": normal(1, 16, 16)}
        args = ((p, normal(2, 64, 16)), {}, 0, False)
        program = make_program("tune", loss, mpjax.get_policy("mixed_bfloat16"), *args)
        places, chip = Places(program.plan), find_target("h100")
        first, second = (places.place(f"{name}/*").ops for name in ("first", "second"))
        both = places.seconds(first | second, chip)
        apart = places.seconds(first, chip) + places.seconds(second, chip)
        assert apart - both == pytest.approx(2 * 64 * 16 / chip.bandwidth)

    def test_tune_says_which_operations_no_pattern_tells_apart(self):
        def loss(x):
            h = jnp.sin((x @ x.T) * 60)  # no scope, and no parameter
            return jnp.mean(jnp.tanh(h @ x) ** 2)

        tuned = tune(loss, "mixed_bfloat16", 0.05)(normal(1, 16, 16))
        assert tuned.met and tuned.unnamed == ("dot_general",)
        assert "jax.named_scope" in str(tuned)

    @pytest.mark.thorough
    def test_tune_names_parameters_without_scopes_by_their_paths(self, rng):
        def loss(params, x):
            h = jnp.sin((x @ params["risky"]["w"]) * 60)
            return jnp.mean(h @ params["safe"]["w"]) ** 2

        args = (
            {"risky": {"w": normal(0, 8, 8, scale=0.5)}, "safe": {"w": normal(1, 8, 4)}},
            normal(2, 16, 8),
        )
        tuned = tune(loss, "mixed_bfloat16", 0.05)(*args)
        assert tuned.met
        assert any("risky" in pattern for pattern in dict(tuned.policy.overrides))
        assert not any("safe" in pattern for pattern in dict(tuned.policy.overrides))

    @pytest.mark.thorough
    def test_casts_of_the_program_are_those_of_the_reference_too(self):
        def loss(w, x):
            return jnp.sum((x @ w).astype(jnp.bfloat16).astype(jnp.float32))

        assert tune(loss, "mixed_bfloat16", 1e-6)(jnp.eye(4), normal(1, 4, 4)).met

    @pytest.mark.parametrize(
        ("policy", "limits"),
        thorough_but(
            [
                ("mixed_bfloat16", (6, 1000)),
                ("mixed_bfloat16", (2,)),
                ("mixed_float16", (2, 9)),
            ],
            ("mixed_bfloat16", (2,)),
        ),
    )
    def test_tune_stops_at_max_runs(self, model, policy, limits):
        for max_runs in limits:
            tuned = tune(layers, policy, 0.004, max_runs=max_runs)(*model)
            assert tuned.runs <= max_runs
            assert tuned.cut_short == (max_runs < 1000)
            assert ("stopped at max_runs" in str(tuned)) == tuned.cut_short
            if tuned.results and not tuned.cut_short:
                # Operation by operation, which rounds otherwise than the compiled program.
                assert tuned.met and error(layers, tuned.policy, *model) <= 0.006
                assert tuned.bound <= tuned.cost * (1 + 1e-6)

    def test_tune_holds_rounding_error_to_its_terms(self, rng):
        def loss(params, x):
            with jax.named_scope("norm"):
                h = x @ params["w"] + params["b"]
                h = (h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-5)
            return jnp.mean(jnp.tanh(h) @ params["out"]) ** 2

        params = {"w": normal(0, 8, 8), "b": normal(1, 8), "out": normal(2, 8, 4)}
        tuned = tune(loss, "mixed_bfloat16", 0.5)(params, normal(3, 32, 8))
        assert tuned.met and not tuned.steps

    @pytest.mark.thorough
    @pytest.mark.parametrize("seed", range(4))
    def test_tune_needs_at_most_one_place_more_than_exhaustive_search(self, seed):
        keys = jax.random.split(jax.random.key(seed), 8)
        params = [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in keys[:6]]
        gains = jnp.exp(2 * jax.random.normal(keys[6], (6,)))

        def loss(params, x):
            for i, w in enumerate(params):
                with jax.named_scope(f"layer{i}"):
                    x = jnp.sin(x @ w * gains[i])
            return jnp.mean(x**2) + jnp.mean(x)

        args = params, jax.random.normal(keys[7], (8, WIDTH))
        policy = mpjax.get_policy("mixed_bfloat16")
        # Compiled, as the search measures: rounding grows so in this loss that eager runs differ.
        measured = functools.partial(error, wrap=jax.jit)
        tolerance = measured(loss, policy, *args) / 4
        tuned = tune(loss, policy, tolerance)(*args)
        assert tuned.met and measured(loss, tuned.policy, *args) <= tolerance
        names = [f"layer{i}/dot_general" for i in range(6)]
        fewest = next(
            count
            for count in range(7)
            for some in itertools.combinations(names, count)
            if measured(loss, policy.override(dict.fromkeys(some, "float32")), *args) <= tolerance
        )
        assert sum(step.operations for step in tuned.steps) <= fewest + 1

    @pytest.mark.thorough
    def test_tune_takes_scans_aux_and_forward_functions(self, rng):
        def loss(params, x):
            def layer(h, w):
                return jnp.tanh(h @ w), None

            h, _ = jax.lax.scan(layer, x, params["stack"])
            with jax.named_scope("head"):
                logits = jnp.cos(h @ params["head"] * 30)
            return jnp.mean(logits**2), {"logits": logits}

        args = {"stack": normal(0, 3, 8, 8, scale=0.4), "head": normal(1, 8, 4)}, normal(2, 4, 8)
        tuned = tune(loss, "mixed_float16", 4e-3, has_aux=True)(*args)
        assert tuned.met and "aux logits" not in tuned.results
        forward = tune(lambda p, x: loss(p, x)[1], "mixed_float16", 0.5)(*args)
        assert forward.met and set(forward.results) == {"result logits"}


class TestProposals:
    def proposals(self, sees):
        """Returns what is allowed to masks, and found, where they see a part of the errors."""
        asked = []

        class Fake(Tuner):
            def __init__(self):
                self.policy = None

            def _merged(self, chosen):
                return chosen

            def _search(self, places, allowed):
                asked.append(allowed)
                count = next(n for n in range(21) if (20 - n) * 0.05 <= allowed + 1e-9)
                return places[:count], 0.0

            def masked(self, ops):
                return {"loss": (20 - len(ops)) * 0.05}, []

            def trained(self, policy):
                by_mask = (20 - len(policy)) * 0.05
                return {"loss": by_mask / sees(len(asked))}, []

        places = [Place(str(i), frozenset([i])) for i in range(20)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuning, "overridden", lambda policy, places: places)
            return asked, [(len(c), e["loss"]) for c, e, _ in Fake()._proposals(places, 0.601)]

    def test_one_is_enough_where_masks_see_all(self):
        asked, found = self.proposals(lambda attempt: 1.0)
        assert asked == [0.601] and found == [(8, pytest.approx(0.6))]

    def test_a_search_is_allowed_less_where_masks_see_less_and_then_more_again(self):
        asked, found = self.proposals(lambda attempt: 0.75 if attempt == 1 else 1.0)
        assert asked[1] < 0.6 * 0.75 < asked[2] < asked[3] < 0.6
        assert found[0] == (8, pytest.approx(0.8)) and found[-1] == (9, pytest.approx(0.55))

    def test_all_places_are_the_last_that_is_tried(self):
        asked, found = self.proposals(lambda attempt: 1e-3)
        assert len(asked) <= tuning.VERIFIED and found[-1] == (20, 0.0)


class TestUnmet:
    def test_an_unmet_tolerance_is_explained(self, model):
        told = tune(layers, "O3", 1e-3)(*model)
        assert not told.met and not told.cut_short
        assert told.remaining == told.error > 1e-3
        assert told.left == {told.unfollowed: told.remaining}
        compared = mpjax.compare(layers, "float32", reference="float64")(*model)
        assert 0 < told.float32_error < 1e-4
        assert told.float32_error == pytest.approx(max(compared.results.values()))
        text = " ".join(str(told).split())
        assert f"that an override can move, the error is {told.remaining:.3g}." in text
        assert f"float32, relative to float64, is {told.float32_error:.3g}." in text

    def test_what_rounds_with_all_parts_in_float32_is_named(self, monkeypatch):
        monkeypatch.setattr(rounding, "SMALL", 1)

        def loss(w, x):
            with mpjax.precision("bfloat16"):
                x = jnp.tanh(x @ w["kept"])
            return jnp.mean(jnp.tanh(x @ w["moved"]) ** 2)

        w = {name: normal(i, 16, 16, scale=0.2) for i, name in enumerate(("kept", "moved"))}
        told = tune(loss, "mixed_bfloat16", 1e-4)(w, normal(2, 16, 16))
        line = loss.__code__.co_firstlineno + 2
        assert not told.met and told.left
        assert all(name.endswith(f"test_tune.py:{line}") for name in told.left)
        assert max(told.left.values()) <= 2 * told.remaining
        assert told.float32_error < 1e-5
        assert all(name in str(told) for name in told.left)


@jax.custom_vjp
def doubled(x):
    def body(given, made):
        made[...] = given[...] * 2

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, like, interpret=True)(x)


doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (2 * g,))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("policy", "named"),
    [("mixed_bfloat16", "pallas_call"), ("mixed_bfloat16,storage=8bit", "8-bit codes")],
)
def test_where_a_mask_cannot_follow_each_set_is_compiled(policy, named):
    def loss(w, x):
        for name in "ab":
            with jax.named_scope(name):
                x = x @ w[name]
                x = jnp.tanh(x if "8bit" in str(policy) else mpjax.half_inputs(doubled)(x))
        return jnp.mean(x**2)

    w = {name: normal(i, 128, 128, scale=0.1) for i, name in enumerate("ab")}
    args = w, normal(2, 128, 128)
    before = error(loss, policy, *args, wrap=jax.jit)
    told = tune(loss, policy, before / 2)(*args)
    assert named in told.unfollowed
    assert f"a mask cannot follow {told.unfollowed}" in " ".join(str(told).split())
    assert told.before == pytest.approx(before, rel=0.05)
    assert told.met and told.steps
    assert error(loss, told.policy, *args, wrap=jax.jit) == pytest.approx(told.error, rel=0.05)
    assert tune(layers, "mixed_bfloat16", 1.0)([jnp.eye(4)], jnp.ones((2, 4))).unfollowed == ""


class TestReport:
    def test_tune_report_says_what_each_step_bought(self, model):
        tuned = tune(layers, "mixed_bfloat16", 0.02)(*model)
        assert tuned.steps
        assert tuned.steps[0].error_before > 0.02 >= tuned.steps[-1].error
        for before, after in itertools.pairwise(tuned.steps):
            assert before.error == after.error_before
        assert {s.pattern for s in tuned.steps} == set(dict(tuned.policy.overrides))
        data = json.loads(json.dumps(tuned.to_dict()))
        assert mpjax.get_policy(data["policy"]) == tuned.policy
        assert tuned.places >= len(tuned.steps) and tuned.before > 0.02 >= tuned.error
        assert tuned.cost == pytest.approx(sum(step.seconds for step in tuned.steps))
        text = "".join(str(tuned).split())
        for part in (
            "meets the tolerance of 0.02",
            str(tuned.policy),
            "left out",
            f"in float32: {tuned.places}; they add",
        ):
            assert "".join(part.split()) in text


class TestBadInput:
    @pytest.mark.parametrize("tolerance", [0, -1.0, float("nan"), float("inf"), "1e-2", None])
    def test_tune_refuses_bad_tolerances(self, tolerance):
        with pytest.raises(ValueError, match="tolerance="):
            tune(layers, "mixed_bfloat16", tolerance)

    def test_tune_refuses_other_bad_arguments(self, model):
        with pytest.raises(ValueError, match="max_runs=0"):
            tune(layers, "mixed_bfloat16", 0.1, max_runs=0)
        with pytest.raises(ValueError, match="max_runs=1 .* >= 2"):
            tune(layers, "mixed_bfloat16", 0.1, max_runs=1)
        with pytest.raises(TypeError, match="tune: fun=3"):
            tune(3, "mixed_bfloat16", 0.1)(jnp.ones(2))
        with pytest.raises(ValueError, match="no arrays"):
            tune(lambda: 1.0, "mixed_bfloat16", 0.1)()
        with pytest.raises(TypeError, match="needs concrete arrays"):
            tune(jnp.sum, "mixed_bfloat16", 0.1)(jax.ShapeDtypeStruct((2,), jnp.float32))
