"""A step's reports on gradients: the first that overflowed, and the share that underflows."""

import functools
import itertools
import json

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import equations, thorough_but

import mpjax
from mpjax._src.core.base.patterns import paths
from mpjax._src.core.training.gradients import observed_value_and_grad
from mpjax._src.tools.watching.order import backward_order
from mpjax._src.tools.watching.overflows import _limits as limits

POLICIES = ["mixed_float16", "mixed_bfloat16", "O2:float16", "float32", "p=f32,c=f16,o=f32"]
NAMES = ("start", "middle", "end")


@jax.custom_vjp
def trap(x, armed):
    """Returns ``x``; the cotangent of an armed one is infinite."""
    return x


trap.defvjp(
    lambda x, armed: (x, armed),
    lambda armed, ct: (jnp.where(armed, jnp.inf, 1).astype(ct.dtype) * ct, None),
)


def layer(w, x):
    return jnp.tanh(x @ w["kernel"] + w["bias"])


def loss_fn(params, batch):
    """A chain of layers, with a trap in front of one: batch["trap"] says behind which."""
    x = batch["x"]
    for i, name in enumerate(NAMES):
        x = trap(layer(params[name], x), batch["trap"].max() == i)
    return jnp.mean((x.astype(jnp.float32) - 0.5) ** 2)


def problem(rng, trap_at=-1):
    draw = lambda *shape: np.float32(rng.normal(size=shape) / 2)  # noqa: E731
    # Named so that the order of the leaves is not the order of use.
    params = {name: {"kernel": draw(4, 4), "bias": draw(4)} for name in NAMES}
    return params, {"x": draw(8, 4), "trap": np.full(8, trap_at, np.int32)}


def build(policy="mixed_float16", loss_fn=loss_fn, optimizer=optax.sgd, **options):
    options = {"report_overflow": True, "loss_scale": 8.0, **options}
    init, step = mpjax.build_train_step(loss_fn, optimizer(1e-3), policy, **options)
    return jax.jit(init), jax.jit(step, donate_argnums=0)


@functools.cache
def both():
    """The step that reports on overflow and underflow, compiled once for the tests that take it."""
    return build(report_underflow=True)


STEPS = list(itertools.product([1, 2], POLICIES))

# ---------------------------------------------------------------- the first to overflow


@pytest.mark.parametrize("accumulate_steps, policy", thorough_but(STEPS, (2, "mixed_bfloat16")))
def test_overflow_report_names_a_planted_overflow(policy, accumulate_steps, rng):
    params, _ = problem(rng)
    init, step = build(policy, accumulate_steps=accumulate_steps)
    state = init(params)
    for place in (-1, 2, 1, 0, -1):
        batch = {**problem(rng)[1], "trap": np.int32([-1] * 7 + [place])}  # in one micro-batch
        state, metrics = step(state, batch)
        overflow = metrics["overflow"]
        assert bool(metrics["grads_finite"]) == (place == -1)
        assert overflow.paths == tuple(
            f"{n}/{k}" for n in sorted(NAMES) for k in ("bias", "kernel")
        )
        assert float(overflow.loss_scale) == 8.0 and int(overflow.layer) == -1
        if place == -1:
            assert overflow.path is None and int(overflow.index) == -1
            assert float(overflow.nonfinite) == 0 and float(overflow.largest) > 0
            assert str(overflow).startswith("No gradient overflowed at loss scale 2^3. The largest")
        else:
            assert overflow.path.split("/")[0] == NAMES[place]
            assert float(overflow.nonfinite) == 1
            assert str(overflow).startswith(f"{overflow.path} overflowed first, at loss scale 2^3")
        json.dumps(overflow.to_dict(), allow_nan=False)
    assert step._cache_size() == 1


def test_overflow_report_names_parameter_and_loss_scale():
    """The cotangent passes 65504 where it is multiplied by 300, on its way to the first layer."""

    def loud(params, batch):
        x = jnp.tanh(batch @ params["a_first"])
        x = jnp.tanh(300 * (x @ params["b_second"]))
        return jnp.mean(x @ params["c_third"])

    params = dict.fromkeys(("a_first", "b_second", "c_third"), jnp.full((4, 4), 1e-4))
    scale = mpjax.DynamicLossScale(2.0**14)
    init, step = build("mixed_float16", loud, loss_scale=scale)
    state = init({**params, "c_third": jnp.ones((4, 4))})
    for count in range(5):
        state, metrics = step(state, jnp.full((2, 4), 100.0))
        overflow = metrics["overflow"]
        assert float(overflow.loss_scale) == 2.0 ** (14 - count)  # not the one for the next step
        assert overflow.path == "b_second" and float(overflow.nonfinite) == 1
    assert metrics["loss_finite"] and not int(state.step)


def masked(x):
    """Of what is not finite, the value is masked out; its derivative is not."""
    return jnp.sum(jnp.where(jnp.isfinite(x), x, 0))


@pytest.mark.parametrize("accumulate_steps", thorough_but([1, 2], 1))
def test_overflow_largest_is_that_of_the_scaled_gradient(accumulate_steps):
    options = {"loss_scale": 2.0**10, "accumulate_steps": accumulate_steps}
    loss = lambda p, b: 9 * jnp.sum(p["v"]) + masked(p["w"] * jnp.mean(b, 0))  # noqa: E731
    init, step = build("float32", loss, **options)
    state = init({"v": jnp.zeros(2), "w": jnp.zeros(4)})
    state, metrics = step(state, jnp.array([[1.0, -30.0, 2.0, 0.0]] * 2))
    assert float(metrics["overflow"].largest) == 30 * 2**10
    _, metrics = step(state, jnp.array([[1.0, jnp.nan, -jnp.inf, -7.0]] * 2))
    overflow = metrics["overflow"]
    assert float(overflow.largest) == 7 * 2**10 and float(overflow.nonfinite) == 0.5
    assert " ".join(str(overflow).split()) == (
        "w overflowed first, at loss scale 2^10: 50.00% of its gradient is Inf or NaN, and its "
        "largest finite entry, scaled, is 7168."
    )


SCANS = list(itertools.product(POLICIES, [False, True]))


@pytest.mark.parametrize("policy, reverse", thorough_but(SCANS, ("mixed_bfloat16", True)))
def test_overflow_report_tells_layers_of_a_scan_apart(policy, reverse, rng):
    """Stacked parameters: the layer nearest to the loss, then the parameter within the layer."""
    draw = lambda *shape: np.float32(rng.normal(size=shape) / 2)  # noqa: E731
    params = {
        "embed": draw(4, 4),
        "blocks": {"a": {"kernel": draw(3, 4, 4)}, "b": {"kernel": draw(3, 4, 4)}},
        "head": draw(4, 1),
    }

    def scanned(params, batch):
        x, (block, inside) = jnp.tanh(batch["x"] @ params["embed"]), batch["trap"]

        def body(x, indexed):
            i, w = indexed
            x = jnp.tanh(x @ w["b"]["kernel"])
            x = trap(x, (i == block) & (inside == 0))
            x = jnp.tanh(x @ w["a"]["kernel"])
            return trap(x, (i == block) & (inside == 1)), None

        x, _ = jax.lax.scan(body, x, (jnp.arange(3), params["blocks"]), reverse=reverse)
        return jnp.mean((x @ params["head"]).astype(jnp.float32) ** 2)

    init, step = build(policy, scanned)
    state, x = init(params), draw(8, 4)
    for block in (0, 1, 2):
        for inside, name in enumerate(("blocks/b/kernel", "blocks/a/kernel")):
            trap_at = np.int32([block, inside])
            state, metrics = step(state, {"x": x, "trap": trap_at})
            overflow = metrics["overflow"]
            assert (overflow.path, int(overflow.layer)) == (name, block)
            if block == (2 if reverse else 0):
                assert np.isclose(float(overflow.nonfinite), 1 / 3)
            assert f"{name}, layer {block}, overflowed first" in str(overflow)
    _, metrics = step(state, {"x": x, "trap": np.int32([-1, 0])})
    assert metrics["overflow"].path is None and int(metrics["overflow"].layer) == -1
    assert step._cache_size() == 1


def order_of(fun, params, *args):
    """Returns the paths of parameters in the order that their gradients are finished in."""
    found = []

    def observe(grads, program):
        places = [place.first for place in backward_order(program())]
        pairs = zip(places, paths(grads), strict=True)
        found[:] = [path for _, path in sorted(pairs)]

    run = observed_value_and_grad(lambda *a: (fun(*a), None), mpjax.NoOpLossScale(), observe)
    jax.eval_shape(run, params, *args)
    return found


def test_overflow_order_is_that_of_the_backward_pass():
    w = {name: np.ones((3, 3), np.float32) for name in "abcdef"}
    x = np.ones((2, 3), np.float32)

    def chain(w, x):
        for name in "cafbed":
            x = jnp.tanh(x @ w[name])
        return jnp.sum(x)

    assert order_of(chain, w, x) == [*"debfac"]
    assert order_of(jax.checkpoint(chain), w, x) == [*"debfac"]
    assert order_of(jax.jit(chain), w, x) == [*"debfac"]
    for policy in ("mixed_float16", "mixed_bfloat16"):
        assert order_of(mpjax.autocast(chain, policy), w, x) == [*"debfac"]

    def linear(w, x):  # no residual of the forward pass in the backward pass
        for name in "cafbed":
            x = x @ w[name]
        return jnp.sum(x)

    assert order_of(linear, w, x) == [*"debfac"]

    def regularized(w, x):
        return sum(jnp.sum(v**2) for v in w.values()) + chain(w, x)

    assert order_of(regularized, w, x) == [*"debfac"]

    def tied(w, x):  # the first use of c is what ends its gradient
        return jnp.sum(jnp.tanh(x @ w["c"] @ w["a"]) @ w["c"].T)

    assert order_of(tied, {k: w[k] for k in "ac"}, x) == ["a", "c"]

    def partly(w, x):
        y = jax.lax.cond(x[0, 0] > 0, lambda y: jnp.tanh(y @ w["a"]), lambda y: y, x @ w["b"])
        return jnp.sum(y @ w["c"])

    assert order_of(partly, {k: w[k] for k in "abcd"}, x) == [*"cabd"]


def test_a_parameter_that_the_loss_does_not_use_is_no_overflow(rng):
    init, step = build(loss_fn=lambda p, b: masked(p["w"] * b))
    _, metrics = step(init({"w": jnp.ones(2), "unused": jnp.ones(3)}), jnp.array([jnp.inf, 1.0]))
    assert metrics["overflow"].path == "w"


def test_overflow_report_of_a_nonfinite_loss_names_no_parameter(rng):
    params, batch = problem(rng)
    batch["x"][0] = np.nan
    init, step = both()
    _, metrics = step(init(params), batch)
    overflow = metrics["overflow"]
    assert not metrics["loss_finite"] and not overflow.loss_finite
    assert overflow.path is None and int(overflow.index) == -1
    assert "forward pass overflowed" in str(overflow) and "find_nonfinite" in str(overflow)


# ---------------------------------------------------------------- underflow


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_flushed_limit_of_a_dtype_rounds_to_zero(dtype):
    flushed, normal = limits(dtype)
    assert flushed.astype(dtype) == 0 < np.nextafter(flushed, normal).astype(dtype)
    assert normal == jnp.finfo(dtype).tiny


UNDERFLOWS = ((1, "float32"), (1, "mixed_bfloat16"), (2, "mixed_float16"))


@pytest.mark.parametrize("accumulate_steps, policy", thorough_but(STEPS, *UNDERFLOWS))
def test_underflow_report_gives_shares_of_zeros_flushed_and_subnormal(policy, accumulate_steps):
    """Of four gradients one is zero, one tiny, one small and one of an ordinary size."""
    init, step = build(
        policy,
        lambda p, b: jnp.sum((p["w"] * b).astype(jnp.float32)),
        accumulate_steps=accumulate_steps,
        report_underflow=True,
        loss_scale=4.0,
    )
    sizes = jnp.array([0.0, 2.0**-28, 2.0**-20, 1.0])
    if "bf" in policy:
        sizes = jnp.array([0.0, 0.0, 0.0, 1.0])  # subnormal numbers of bfloat16 are of float32 too
    _, metrics = step(init({"w": jnp.zeros(4), "v": jnp.zeros(0)}), jnp.stack([sizes, sizes]))
    found = metrics["underflow"]
    assert found.dtype == ("bfloat16" if "bf" in policy else "float16")
    if "bf" in policy:
        assert float(found.zeros) == 0.75
        return
    assert float(found.zeros) + float(found.flushed) == 0.5  # lost on the way, or would be
    assert float(found.zeros) >= 0.25 and float(found.subnormal) == 0.25
    if policy == "float32":
        assert " ".join(str(found).split()) == (
            "25.00% of the gradient is zero. float16 flushes another 25.00% to zero, and "
            "25.00% is subnormal in it."
        )


def test_underflow_is_less_at_a_higher_loss_scale(rng):
    params, batch = problem(rng)
    lost = []
    options = {"report_overflow": False, "report_underflow": True}
    _, step = build(**options)
    for scale in (2.0**-24, 2.0**-20, 2.0**8):
        init, _ = build(loss_scale=scale, **options)  # the scale is a part of the state
        metrics = step(init(params), batch)[1]
        assert "overflow" not in metrics
        lost.append(float(metrics["underflow"].zeros) + float(metrics["underflow"].flushed))
    assert lost[0] > 0.5 and lost[0] > lost[1] > lost[2]


# ---------------------------------------------------------------- transformations


REPORTED = list(itertools.product(["mixed_float16", "O2:float16", "p=f32,c=f16,o=f32"], [1, 2]))


@pytest.mark.parametrize("policy, accumulate_steps", thorough_but(REPORTED, ("O2:float16", 1)))
def test_overflow_and_underflow_reports_change_nothing_else(policy, accumulate_steps, rng):
    params, batch = problem(rng)
    runs = []
    for report in (False, True):
        init, step = build(
            policy,
            accumulate_steps=accumulate_steps,
            report_overflow=report,
            report_underflow=report,
        )
        state, metrics = step(init(params), batch)
        runs.append((state, {name: metrics[name] for name in metrics if "flow" not in name}))
    plain, watched = map(jax.tree.leaves, runs)
    for a, b in zip(plain, watched, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)
    assert jax.tree.structure(runs[0]) == jax.tree.structure(runs[1])


def test_step_metrics_have_no_report_unless_asked(rng):
    params, batch = problem(rng)
    init, step = build(report_overflow=False)
    metrics = jax.eval_shape(step, init(params), batch)[1]
    assert "overflow" not in metrics and "underflow" not in metrics


def test_reports_never_talk_to_the_host(rng):
    params, batch = problem(rng)
    init, step = both()
    state = init(params)
    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(step)(state, batch))}
    assert not {name for name in names if "callback" in name or "infeed" in name}
    batch = jax.device_put(batch)
    with jax.transfer_guard("disallow"):
        _, metrics = step(state, batch)
    arrays = jax.tree.leaves([metrics["overflow"], metrics["underflow"]])
    assert len(arrays) == 9 and all(isinstance(x, jax.Array) and not x.ndim for x in arrays)


def test_steps_in_a_scan_report_one_each(rng):
    params, batch = problem(rng)
    init, step = both()
    batches = {
        "x": np.stack([batch["x"]] * 4),
        "trap": np.int32([[-1] * 8, [2] * 8, [-1] * 8, [1] * 8]),
    }
    _, metrics = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(init(params), batches)
    overflow = metrics["overflow"]
    assert (np.asarray(overflow.index) >= 0).tolist() == [False, True, False, True]
    each = [jax.tree.map(lambda x, i=i: x[i], overflow).path for i in range(4)]
    assert [path and path.split("/")[0] for path in each] == [None, "end", None, "middle"]
    assert metrics["underflow"].zeros.shape == (4,)
    with pytest.raises(ValueError, match=r"several steps or ensemble members, of shape \(4,\)"):
        overflow.path  # noqa: B018
    assert "Overflow(" in str(overflow) and "Underflow(" in str(metrics["underflow"])


@pytest.mark.thorough
def test_members_under_vmap_report_one_each(rng):
    params, batch = problem(rng)
    init, step = both()
    members = jax.tree.map(lambda p: np.stack([p, p]), params)
    batches = {"x": np.stack([batch["x"]] * 2), "trap": np.int32([[-1] * 8, [2] * 8])}
    _, metrics = jax.jit(jax.vmap(step))(jax.vmap(init)(members), batches)
    index = metrics["overflow"].index
    assert index[0] == -1 and metrics["overflow"].paths[index[1]].startswith("end/")


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


def replicas(kind, step):
    """Returns ``step`` over two replicas, each with its half of the batch."""
    if kind == "pmap":
        mapped = jax.pmap(step, axis_name="data", in_axes=(None, 0), out_axes=None)
        halves = lambda x: x.reshape(2, -1, *x.shape[1:])  # noqa: E731
        return lambda state, batch: mapped(state, jax.tree.map(halves, batch))
    spec = PartitionSpec
    specs = {"in_specs": (spec(), spec("data")), "out_specs": spec()}
    return jax.jit(jax.shard_map(step, mesh=mesh(), **specs, check_vma=kind == "checked"))


REPLICAS = list(itertools.product(["checked", "unchecked", "pmap"], [1, 2]))


@pytest.mark.parametrize("kind, accumulate_steps", thorough_but(REPLICAS, ("checked", 2)))
def test_replicas_agree_on_overflow_and_underflow_reports(kind, accumulate_steps, rng):
    """One replica overflows; the largest magnitude is the larger of the two."""
    params, batch = problem(rng)
    init, step = build(report_underflow=True, axis_name="data", accumulate_steps=accumulate_steps)
    _, whole = both()
    mapped = replicas(kind, step)
    one_bad = {**batch, "trap": np.int32([-1] * 4 + [2] * 4)}
    _, metrics = mapped(init(params), one_bad)
    assert metrics["overflow"].path.startswith("end/")
    _, metrics = mapped(init(params), batch)
    assert metrics["overflow"].path is None
    halves = batch["x"].reshape(2, -1, accumulate_steps, 4)  # of which every k-th row is a part
    xs = [half[:, index] for half in halves for index in range(accumulate_steps)]
    parts = [whole(init(params), {"x": x, "trap": batch["trap"]})[1] for x in xs]
    largest = max(float(part["overflow"].largest) for part in parts)
    np.testing.assert_allclose(metrics["overflow"].largest, largest, rtol=1e-2)
    subnormal = np.mean([float(part["underflow"].subnormal) for part in parts])
    np.testing.assert_allclose(metrics["underflow"].subnormal, subnormal, atol=1e-2)


@pytest.mark.thorough
def test_overflow_report_names_the_parameter_of_sharded_arrays(rng):
    params, batch = problem(rng, trap_at=1)
    init, step = both()
    state = jax.device_put(init(params), NamedSharding(mesh(), PartitionSpec()))
    batch = jax.device_put(batch, NamedSharding(mesh(), PartitionSpec("data")))
    assert step(state, batch)[1]["overflow"].path.startswith("middle/")


@pytest.mark.parametrize("policy", thorough_but(["mixed_float16", "O2:bfloat16", "float32"], 0))
def test_reports_keep_dtypes_under_strict_promotion_and_x64(policy, rng, strict_promotion, x64):
    params, batch = problem(rng)

    def simple(params, batch):
        x = layer(params["start"], batch["x"].astype(params["start"]["kernel"].dtype))
        return jnp.mean(x.astype(jnp.float32))

    init, step = build(policy, simple, report_underflow=True)
    _, metrics = step(init(params), batch)
    assert metrics["overflow"].path is None
    dtypes = {x.dtype.name for x in jax.tree.leaves(metrics["overflow"])}
    assert dtypes == {"int32", "float32", "bool"}
    assert {x.dtype.name for x in jax.tree.leaves(metrics["underflow"])} == {"float32"}


@pytest.mark.parametrize("scale", [jmp.NoOpLossScale(), jmp.StaticLossScale(jnp.float32(4)), 3.0])
def test_overflow_report_takes_any_loss_scale(scale):
    init, step = build("float32", lambda p, b: jnp.sum(p["w"] * b), loss_scale=scale)
    overflow = step(init({"w": jnp.zeros(2)}), jnp.array([2.0, -5.0]))[1]["overflow"]
    assert float(overflow.largest) == 5 * float(overflow.loss_scale)


# ---------------------------------------------------------------- logs and bad input


def test_overflow_and_underflow_reports_are_logged(rng, tmp_path):
    params, batch = problem(rng)
    init, step = both()
    state, path = init(params), tmp_path / "run.jsonl"
    with mpjax.debug.JsonLines(path) as log:
        for i, place in enumerate((-1, 2)):
            state, metrics = step(state, {**batch, "trap": np.full(8, place, np.int32)})
            mpjax.debug.log_metrics(log, i, metrics)
    fine, bad = (json.loads(line) for line in path.read_text().splitlines())
    assert fine["overflow/index"] == -1 and "overflow/path" not in fine
    assert bad["overflow/path"].startswith("end/") and bad["overflow/nonfinite"] == 1
    assert bad["overflow/loss_scale"] == 8 and fine["overflow/largest"] > 0
    assert {"underflow/zeros", "underflow/flushed", "underflow/subnormal"} <= fine.keys()
    assert "underflow/dtype" not in fine and "overflow/layer" not in bad


@pytest.mark.parametrize("flag", ["report_overflow", "report_underflow"])
def test_report_flags_other_than_bools_are_refused(flag):
    with pytest.raises(ValueError, match=f"{flag}='yes' must be True or False"):
        mpjax.build_train_step(loss_fn, optax.sgd(0.1), **{flag: "yes"})
