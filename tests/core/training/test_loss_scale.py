import dataclasses
import inspect
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpjax
from mpjax._src.core.training.loss_scale import get_loss_scale, has_protocol, resolve_loss_scale

pytestmark = pytest.mark.usefixtures("strict_promotion")

SCALES = {
    "none": mpjax.NoOpLossScale,
    "static": partial(mpjax.StaticLossScale, 128.0),
    "dynamic": mpjax.DynamicLossScale,
}


def run(scale, verdicts):
    """Adjusts in one jitted scan; returns the scales after each step and the last state."""

    def body(scale, finite):
        scale = scale.adjust(finite)
        return scale, scale.loss_scale

    last, scales = jax.jit(lambda s, v: jax.lax.scan(body, s, v))(scale, jnp.asarray(verdicts))
    return scales.tolist(), last


# ---------------------------------------------------------------- scale and unscale


@pytest.mark.parametrize("make", [SCALES["static"], SCALES["dynamic"]], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64])
@pytest.mark.parametrize("jitted", [False, True])
def test_loss_scale_scales_and_unscales_in_float32(make, dtype, jitted):
    wrap = jax.jit if jitted else lambda f: f
    scale = make()
    tree = {"loss": jnp.asarray(3, dtype), "n": jnp.arange(2), "none": None}
    scaled = wrap(lambda s, t: s.scale(t))(scale, tree)
    wide = jnp.complex64 if dtype == jnp.complex64 else jnp.float32
    assert scaled["loss"].dtype == wide and scaled["loss"] == 3 * scale.loss_scale.astype(wide)
    assert scaled["n"].tolist() == [0, 1]
    back = wrap(lambda s, t: s.unscale(t))(scale, scaled)
    assert back["loss"].dtype == wide and back["loss"] == 3


def test_scale_of_a_float16_loss_does_not_overflow():
    assert mpjax.DynamicLossScale().scale(jnp.float16(3)) == 196608.0


def test_unscale_widens_to_float32_first():
    tiny = jnp.float16(6e-8)
    assert mpjax.DynamicLossScale().unscale(tiny) == np.float32(tiny) / 2**16 != 0


@given(st.floats(2.0**-20, 2.0**20, width=32), st.floats(2.0**-20, 2.0**20, width=32))
def test_unscale_undoes_scale(scale, value):
    scale = mpjax.StaticLossScale(scale)
    np.testing.assert_allclose(scale.unscale(scale.scale(jnp.float32(value))), value, rtol=3e-7)


@pytest.mark.usefixtures("x64")
def test_float64_loss_keeps_its_dtype_when_scaled():
    scale = mpjax.DynamicLossScale()
    x = jnp.asarray(1 / 3, jnp.float64)
    assert scale.scale(x).dtype == jnp.float64 and scale.unscale(scale.scale(x)) == x
    assert scale.adjust(jnp.array(False)).loss_scale.dtype == jnp.float32


def test_scale_takes_python_numbers_and_leaves_other_leaves_alone():
    scale = mpjax.StaticLossScale(4.0)
    assert scale.scale(3.0) == 12.0
    assert scale.scale({"f": "relu", "n": 3}) == {"f": "relu", "n": 3}


def test_noop_loss_scale_scales_nothing_but_widens_like_the_others():
    scale = mpjax.NoOpLossScale()
    x = jnp.ones(2)
    assert scale.scale(x) is x and scale.unscale(x) is x
    assert scale.unscale(jnp.float16(3)).dtype == scale.scale(jnp.float16(3)).dtype == jnp.float32
    assert scale.adjust(jnp.array(False)) is scale
    assert scale.loss_scale == 1 and scale.loss_scale.dtype == jnp.float32


# ---------------------------------------------------------------- adjust


def test_loss_scale_grows_on_the_interval_and_not_past_max_scale():
    scale = mpjax.DynamicLossScale(4.0, growth_interval=3, max_scale=10.0)
    scales, last = run(scale, [True] * 10)
    assert scales == [4, 4, 8, 8, 8, 10, 10, 10, 10, 10]
    assert int(last.growth_tracker) == 1


def test_overflow_backs_off_resets_the_count_and_stops_at_the_minimum():
    scale = mpjax.DynamicLossScale(4.0, growth_interval=3, min_scale=0.5)
    scales, last = run(scale, [True, True, False, True, True, True, False, False, False, False])
    assert scales == [4, 4, 2, 2, 2, 4, 2, 1, 0.5, 0.5]
    assert int(last.growth_tracker) == 0


def test_hysteresis_waits_then_backs_off_every_time_until_a_growth():
    scale = mpjax.DynamicLossScale(64.0, growth_interval=2, hysteresis=2)
    verdicts = [False, False, False, True, False, True, True, False, False]
    scales, last = run(scale, verdicts)
    assert scales == [64, 32, 16, 16, 8, 8, 16, 16, 8]
    assert int(last.hysteresis_tracker) == 0


class GradScaler:
    """torch.amp.GradScaler.update as its documentation words it, in Python numbers."""

    def __init__(self, scale, growth, backoff, interval):
        self.scale, self.growth, self.backoff, self.interval = scale, growth, backoff, interval
        self.tracker = 0

    def update(self, finite):
        if not finite:
            self.scale, self.tracker = np.float32(self.scale * self.backoff), 0
            return
        self.tracker += 1
        if self.tracker == self.interval:
            self.scale, self.tracker = np.float32(self.scale * self.growth), 0


@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(1, 5),
    st.sampled_from([1.5, 2.0, 4.0]),
    st.sampled_from([0.25, 0.5, 0.75]),
)
def test_dynamic_loss_scale_with_hysteresis_1_equals_torch_grad_scaler(
    verdicts, interval, growth, backoff
):
    settings = {"min_scale": 2.0**-126, "max_scale": 2.0**126}
    ours = mpjax.DynamicLossScale(2.0**16, growth, backoff, interval, **settings)
    theirs = GradScaler(np.float32(2.0**16), np.float32(growth), np.float32(backoff), interval)
    for finite in verdicts:
        ours = ours.adjust(finite)
        theirs.update(finite)
        assert ours.loss_scale == theirs.scale and ours.growth_tracker == theirs.tracker


@pytest.mark.parametrize("finite", [True, np.bool_(False), jnp.array(True)])
def test_adjust_takes_any_one_bool(finite):
    mpjax.DynamicLossScale().adjust(finite)


@pytest.mark.parametrize("wrong", [1, 0.0, jnp.array([True]), jnp.float32(1)])
def test_adjust_refuses_what_is_not_one_bool(wrong):
    with pytest.raises(ValueError, match="grads_finite=.*must be a single bool"):
        mpjax.DynamicLossScale().adjust(wrong)


# ---------------------------------------------------------------- as a pytree


@pytest.mark.parametrize("name", SCALES)
def test_loss_scale_arrays_are_leaves_and_settings_are_static(name):
    scale = SCALES[name]()
    leaves = jax.tree.leaves(scale)
    assert all(isinstance(leaf, jax.Array) and leaf.shape == () for leaf in leaves)
    expected = {"none": [], "static": ["float32"], "dynamic": ["float32", "int32", "int32"]}
    assert [leaf.dtype.name for leaf in leaves] == expected[name]
    assert not any(leaf.weak_type for leaf in leaves)
    assert dataclasses.is_dataclass(scale)


def test_loss_scale_settings_survive_every_transformation():
    settings = {"init_scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.25}
    settings |= {"growth_interval": 7, "hysteresis": 3, "min_scale": 0.5, "max_scale": 512.0}
    scale = mpjax.DynamicLossScale(**settings)
    copies = [
        jax.jit(lambda s: s)(scale),
        jax.tree.map(lambda x: x, scale),
        pickle.loads(pickle.dumps(scale)),
        jax.device_get(scale),
        scale.adjust(True),
    ]
    for copy in copies:
        assert {name: getattr(copy, name) for name in settings} == settings
        assert jax.tree.structure(copy) == jax.tree.structure(scale)


@pytest.mark.parametrize("leaf", [None, "spec", -1.0, jax.sharding.PartitionSpec(), object()])
@pytest.mark.parametrize("name", SCALES)
def test_unflattening_a_loss_scale_never_validates(name, leaf):
    scale = SCALES[name]()
    mapped = jax.tree.map(lambda _: leaf, scale)
    kept = jax.tree.leaves(mapped, is_leaf=lambda x: x is None)
    assert len(kept) == len(jax.tree.leaves(scale)) and all(x is leaf for x in kept)


def test_adjust_compiles_once_for_a_whole_run():
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def step(scale, finite):
        traces.append(1)
        return scale.adjust(finite)

    scale = mpjax.DynamicLossScale(growth_interval=2)
    for finite in (True, True, False, True):
        scale = step(scale, jnp.array(finite))
    assert len(traces) == 1 and step._cache_size() == 1


def test_key_paths_name_the_leaves_of_a_loss_scale():
    paths = [
        jax.tree_util.keystr(k)
        for k, _ in jax.tree_util.tree_leaves_with_path(mpjax.DynamicLossScale())
    ]
    assert paths == [".loss_scale", ".growth_tracker", ".hysteresis_tracker"]


def test_loss_scale_works_under_vmap_and_eval_shape():
    scales = jax.vmap(lambda finite: mpjax.DynamicLossScale().adjust(finite))(
        jnp.array([True, False])
    )
    assert scales.loss_scale.tolist() == [2.0**16, 2.0**15]
    shapes = jax.eval_shape(lambda: mpjax.DynamicLossScale())
    assert shapes.loss_scale.dtype == jnp.float32


def test_orbax_restores_a_loss_scale(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    scale = mpjax.DynamicLossScale(growth_interval=3).adjust(False).adjust(True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scale", scale)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(
            tmp_path / "scale", mpjax.DynamicLossScale(growth_interval=3)
        )
    assert jax.tree.leaves(restored) == jax.tree.leaves(scale)
    assert restored.growth_interval == 3


def test_dataclasses_replace_sets_the_loss_scale():
    scale = dataclasses.replace(mpjax.DynamicLossScale(), loss_scale=2.0**10)
    assert scale.loss_scale == 1024 and scale.loss_scale.dtype == jnp.float32


def test_a_static_scale_may_be_traced():
    assert jax.jit(lambda s: mpjax.StaticLossScale(s).scale(jnp.float32(2)))(3.0) == 6


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda s: get_loss_scale("mixed_float16", s), "loss_scale"),
        (lambda s: get_loss_scale("O2", jmp.DynamicLossScale(s)), "loss_scale"),
        (mpjax.DynamicLossScale, "init_scale"),
        (lambda s: mpjax.DynamicLossScale(growth_factor=s), "growth_factor"),
        (lambda s: mpjax.DynamicLossScale(growth_interval=s), "growth_interval"),
    ],
)
def test_traced_loss_scale_setting_is_refused(make, name):
    with pytest.raises(ValueError, match=f"{name}=.*but it is traced: .*static_argnames"):
        jax.eval_shape(make, 128.0)


# ---------------------------------------------------------------- settings


def test_dynamic_loss_scale_has_these_settings_and_defaults():
    parameters = inspect.signature(mpjax.DynamicLossScale).parameters.values()
    settings = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    expected = {"init_scale": 2.0**16, "growth_factor": 2.0, "backoff_factor": 0.5}
    expected |= {"growth_interval": 2000, "hysteresis": 1, "min_scale": 1.0, "max_scale": 2.0**24}
    assert settings == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0 must be positive"),
        ({"init_scale": -2.0}, "init_scale=-2.0 must be positive"),
        ({"init_scale": float("nan")}, "init_scale=nan must be finite"),
        ({"init_scale": float("inf")}, "init_scale=inf must be finite"),
        ({"init_scale": "big"}, "init_scale='big' must be one number"),
        ({"init_scale": True}, "init_scale=True must be one number"),
        ({"init_scale": np.ones(2)}, "init_scale=.* must be one number"),
        ({"init_scale": 2.0**25}, "init_scale=.*must be between min_scale=1.0 and max_scale"),
        ({"init_scale": 0.5}, "init_scale=0.5 must be between min_scale=1.0"),
        ({"min_scale": 2.0**-127}, r"min_scale=.*must be between 2\*\*-126"),
        ({"min_scale": 2.0**-149}, r"min_scale=.*must be between 2\*\*-126"),
        ({"max_scale": 2.0**127}, r"max_scale=.*must be between 2\*\*-126"),
        ({"min_scale": 8.0, "max_scale": 4.0, "init_scale": 8.0}, "must be between"),
        ({"growth_factor": 1.0}, "growth_factor=1.0 must be more than 1"),
        ({"growth_factor": float("inf")}, "growth_factor=inf must be finite"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0 must be between 0 and 1"),
        ({"backoff_factor": 0.0}, "backoff_factor=0.0 must be between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval=0 must be an integer from 1"),
        ({"growth_interval": 2.5}, "growth_interval=2.5 must be an integer"),
        ({"growth_interval": 2**31}, "growth_interval=2147483648 must be an integer"),
        ({"hysteresis": 0}, "hysteresis=0 must be an integer from 1"),
        ({"hysteresis": True}, "hysteresis=True must be an integer"),
        ({"init_scale": None}, "init_scale=None must be one number"),
        ({"init_scale": 1j}, "init_scale=1j must be one number"),
        ({"growth_factor": 1 + 1e-10}, "growth_factor=.* must be more than 1"),
        ({"backoff_factor": 1 - 1e-10}, "backoff_factor=.* must be between 0 and 1"),
        ({"loss_scale": 0.0}, "loss_scale=0.0 must be positive"),
        ({"loss_scale": jnp.ones(3)}, "loss_scale=.* must be one number"),
        ({"growth_tracker": -5}, "growth_tracker=-5 must be an integer from 0"),
    ],
)
def test_dynamic_loss_scale_refuses_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        mpjax.DynamicLossScale(**settings)


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), 2.0**127, 1e-39, "x", jnp.ones(2)])
def test_static_loss_scale_refuses_values_out_of_range(wrong):
    with pytest.raises(ValueError, match="loss_scale="):
        mpjax.StaticLossScale(wrong)


def test_loss_scale_works_at_the_extremes_of_its_range():
    for extreme in (2.0**-126, 2.0**126):
        scale = mpjax.StaticLossScale(extreme)
        assert scale.unscale(scale.scale(jnp.float32(1.0))) == 1.0
    assert mpjax.DynamicLossScale(4.0, min_scale=4.0, max_scale=4.0).adjust(False).loss_scale == 4


# ---------------------------------------------------------------- resolving an argument


def test_auto_loss_scale_is_dynamic_only_where_needed():
    assert isinstance(resolve_loss_scale("auto", True), mpjax.DynamicLossScale)
    assert isinstance(resolve_loss_scale("auto", False), mpjax.NoOpLossScale)


@pytest.mark.parametrize(
    ("given", "kind", "value"),
    [
        ("dynamic", mpjax.DynamicLossScale, 2.0**16),
        ("none", mpjax.NoOpLossScale, 1),
        (None, mpjax.NoOpLossScale, 1),
        (128, mpjax.StaticLossScale, 128),
        (np.float32(8), mpjax.StaticLossScale, 8),
        (jnp.float32(8), mpjax.StaticLossScale, 8),
        (jmp.DynamicLossScale(jnp.float32(0.5)), mpjax.DynamicLossScale, 0.5),
        (jmp.NoOpLossScale(), mpjax.NoOpLossScale, 1),
        (jmp.StaticLossScale(jnp.float32(64)), mpjax.StaticLossScale, 64),
        (jmp.DynamicLossScale(jnp.float32(32)), mpjax.DynamicLossScale, 32),
        (jmp.DynamicLossScale(jnp.float32(2.0**126)), mpjax.DynamicLossScale, 2.0**126),
    ],
)
def test_resolve_loss_scale_turns_each_spelling_into_its_scale(given, kind, value):
    found = resolve_loss_scale(given, False)
    assert isinstance(found, kind) and float(found.loss_scale) == value


def test_jmp_dynamic_loss_scale_adjusts_as_in_jmp():
    theirs = jmp.DynamicLossScale(
        jnp.float32(2**10), jnp.int32(1), period=3, factor=4, min_loss_scale=jnp.float32(100)
    )
    ours = resolve_loss_scale(theirs, False)
    with jax.numpy_dtype_promotion("standard"):
        for finite in (True, True, True, False, True, False, False, False):
            theirs, ours = theirs.adjust(jnp.array(finite)), ours.adjust(finite)
            assert float(theirs.loss_scale) == float(ours.loss_scale)


class Subclass(jmp.DynamicLossScale):
    """Not a pytree: a subclass is not registered by its base."""


def test_loss_scale_subclass_is_not_mistaken_for_its_base():
    with pytest.raises(ValueError, match="is not registered as a pytree"):
        resolve_loss_scale(Subclass(jnp.float32(2)), False)
    jax.tree_util.register_pytree_node_class(Subclass)
    mine = Subclass(jnp.float32(2))
    assert resolve_loss_scale(mine, False) is mine


def test_growth_interval_takes_integers_of_any_kind():
    assert mpjax.DynamicLossScale(growth_interval=np.int64(5)).growth_interval == 5
    assert mpjax.DynamicLossScale(growth_interval=2**31 - 1).growth_interval == 2**31 - 1


@pytest.mark.parametrize(
    "wrong", ["dynamik", True, object(), [1], 0, mpjax.DynamicLossScale, jmp.NoOpLossScale]
)
def test_resolve_loss_scale_refuses_other_arguments(wrong):
    with pytest.raises(ValueError, match="loss_scale="):
        resolve_loss_scale(wrong, False)


def test_equal_loss_scales_compare_equal():
    assert mpjax.NoOpLossScale() == mpjax.NoOpLossScale()
    assert mpjax.DynamicLossScale() == mpjax.DynamicLossScale()
    assert mpjax.DynamicLossScale() != mpjax.DynamicLossScale().adjust(False)
    assert mpjax.StaticLossScale(2.0) != mpjax.StaticLossScale(4.0)


def test_no_property_of_a_users_object_is_run_to_see_that_it_is_no_loss_scale():
    class Normal:  # as flowjax.distributions.Normal is, whose property needs arrays
        @property
        def scale(self):
            raise TypeError("'NoneType' object is not callable")

    with pytest.raises(ValueError, match="Unknown loss_scale"):
        resolve_loss_scale(Normal(), True)
    assert not has_protocol(Normal())
    assert all(map(has_protocol, (mpjax.DynamicLossScale(), jmp.NoOpLossScale())))
