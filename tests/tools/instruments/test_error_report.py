"""Tests of what `explain` reports of errors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax._src.core.planner import rounding
from tests.helpers.support import fresh_rng


@pytest.fixture(autouse=True)
def small_matmuls_round(monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)


def parameters(*names, size=16, scale=0.4):
    numbers = fresh_rng()
    draw = lambda *shape: jnp.asarray(numbers.normal(size=shape), jnp.float32)  # noqa: E731
    return {name: scale * draw(size, size) for name in names}, draw(32, size)


def loss(w, x):
    with jax.named_scope("first"):
        h = jnp.tanh(x @ w["a"])
    with jax.named_scope("second"):
        h = jnp.tanh(h @ w["b"])
    return jnp.mean((h @ w["c"]) ** 2)


def report(fun, *args, policy="mixed_bfloat16", **options):
    return mpjax.explain(fun, policy, errors=True, **options)(*args)


@pytest.fixture(scope="module")
def told():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounding, "SMALL", 1)
        return report(loss, *parameters("a", "b", "c"), probes=16)


def test_the_measured_errors_are_those_of_compare(told):
    compared = mpjax.compare(loss, "mixed_bfloat16")(*parameters("a", "b", "c"))
    assert told.errors.results.keys() == compared.results.keys()
    for name, error in told.errors.results.items():
        assert error == pytest.approx(compared.results[name], rel=0.1)
    assert told.errors.loss == pytest.approx(told.errors.results["loss"], rel=1e-5)


def test_contributions_add_up_to_the_error(told):
    errors = told.errors
    assert errors.gradient > 1e-4
    assert errors.is_first_order
    assert errors.first_order == pytest.approx(errors.gradient, rel=0.6)
    rows = errors.rows
    assert errors.squares == pytest.approx(np.sqrt(sum(row.gradient**2 for row in rows)), rel=1e-6)
    assert [row.gradient for row in rows] == sorted((r.gradient for r in rows), reverse=True)


def test_each_operation_has_its_row_line_and_reason(told):
    lines = {row.source.rpartition(":")[0] for row in told.errors.rows}
    assert lines == {__file__}
    assert {row.backward for row in told.errors.rows} == {True, False}
    for row in told.errors.rows:
        of = told.rows[row.row]
        assert (of.source, of.after, of.reason) == (row.source, row.dtypes, row.reason)
        assert of.backward == row.backward
        assert "->" in row.dtypes


def test_the_report_shows_the_errors_as_text_data_and_colors(told):
    text = str(told)
    assert "Where the error comes from" in text
    assert f"{told.errors.gradient:.2%}" in text
    data = json.loads(json.dumps(told.to_dict()))
    assert data["errors"]["rows"][0]["gradient"] == told.errors.rows[0].gradient
    drawn = told.document().drawing()
    assert drawn.colors[0].name == "error"
    colored = {operation.number: operation.colors["error"] for operation in drawn.operations}
    assert {n: e for n, e in colored.items() if e} == {
        row.row: row.gradient for row in told.errors.rows if row.gradient
    }
    assert mpjax.explain(loss, "mixed_bfloat16")(*parameters("a", "b", "c")).errors is None


def test_estimates_rank_operations_as_measurements_do(monkeypatch):
    from mpjax._src.tools.instruments import contributions

    args = parameters("a", "b", "c")
    monkeypatch.setattr(contributions, "LARGEST", 0)
    estimated = {row.row: row.gradient for row in report(loss, *args, probes=32).errors.rows}
    monkeypatch.setattr(contributions, "LARGEST", 1000)
    measured = {row.row: row.gradient for row in report(loss, *args).errors.rows}
    assert estimated.keys() == measured.keys()
    # The relative standard error by 32 probes is an eighth.
    for row, error in measured.items():
        assert error / 1.6 < estimated[row] < 1.6 * error


def test_iterations_of_a_scan_are_summed_and_the_worst_is_named():
    def recurrent(w, x):
        # The last iteration's rounding alone reaches the loss at full size.
        step = lambda h, _: (0.1 * jnp.tanh(h @ w["a"]), None)  # noqa: E731
        h, _ = jax.lax.scan(step, x, None, length=4)
        return jnp.mean((h + x) ** 2)

    rows = report(recurrent, *parameters("a")).errors.rows
    inside = [row for row in rows if row.times == 4]
    assert inside
    assert all(len(row.iteration) == 1 and 0 <= row.iteration[0] < 4 for row in inside)


def test_what_acts_through_a_loop_without_a_derivative_is_measured():
    def searching(w, x):
        start = jnp.abs(x @ w["a"]).astype(jnp.bfloat16).astype(jnp.float32)
        found = jax.lax.while_loop(lambda s: s.sum() > 1.0, lambda s: 0.5 * s, start)
        return jnp.mean((x @ w["b"]) ** 2) * jax.lax.stop_gradient(found.sum())

    rows = report(searching, *parameters("a", "b")).errors.rows
    cast = [row for row in rows if row.primitive == "convert_element_type" and not row.backward]
    assert cast
    assert all(row.measured and row.loss > 0 for row in cast)


def test_parameters_select_the_gradients_that_count():
    args = parameters("a", "b", "c")
    told = report(loss, *args, parameters="c").errors
    assert told.parameters == "c"
    assert told.gradient == pytest.approx(told.results["gradient of c"])
    # What the backward pass does after the gradient of c does not matter to it.
    assert not any(row.backward and "first" in row.scope for row in told.rows)


@pytest.mark.thorough
def test_estimates_of_chosen_parameters_are_what_is_measured(monkeypatch):
    from mpjax._src.tools.instruments import contributions

    args, options = parameters("a", "b", "c"), {"parameters": "b", "probes": 64}
    monkeypatch.setattr(contributions, "LARGEST", 0)
    estimated = {row.row: row.gradient for row in report(loss, *args, **options).errors.rows}
    monkeypatch.setattr(contributions, "LARGEST", 1000)
    measured = report(loss, *args, **options).errors
    assert measured.gradient == pytest.approx(measured.results["gradient of b"])
    for row in measured.rows:
        assert row.gradient / 1.4 < estimated[row.row] < 1.4 * row.gradient


class Net(nnx.Module):
    def __init__(self):
        self.first, self.second = (nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2))

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def of_a_module(net, x):
    return jnp.mean(net(x) ** 2)


def over_devices(w, x):
    def local(w, x):
        return jax.lax.pmean(loss(w, x), "d")

    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(local, mesh=mesh, in_specs=(spec(), spec("d")), out_specs=spec())(w, x)


def scanned_again(w, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w), None

    stacked = jnp.stack([w["a"], w["b"], w["c"]])
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, stacked)[0] ** 2)


def of_each(w, x):
    return jnp.mean(jax.vmap(lambda row: loss(w, row))(x))


WRITTEN = {
    "a module": (of_a_module, lambda: Net()),
    "shard_map": (over_devices, None),
    "scan": (scanned_again, None),
    "vmap": (of_each, None),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRITTEN)
def test_programs_of_all_kinds_are_explained(name):
    (fun, make), (w, x) = WRITTEN[name], parameters("a", "b", "c")
    w = make() if make else w
    told = report(fun, w, x).errors
    compared = mpjax.compare(fun, "mixed_bfloat16")(w, x).results
    assert told.results == pytest.approx(compared, rel=0.1)
    assert told.is_first_order
    assert {row.backward for row in told.rows} == {True, False}
    assert {row.source.rpartition(":")[0] for row in told.rows} == {__file__}
    assert any(row.path for row in told.rows)


def test_masks_of_relu_that_flip_are_said_to_be_of_no_order():
    def flipping(w, x):
        # Near zero, the sign of what is rounded far from zero is the rounding's.
        h = (30 + x @ w["a"]).astype(jnp.bfloat16).astype(jnp.float32) - 30
        return jnp.mean(jax.nn.relu(h))

    told = report(flipping, *parameters("a"))
    assert not told.errors.is_first_order
    assert "first-order estimate" in str(told)


def test_overflow_is_said_not_to_add_up():
    def overflowing(w, x):
        return 1e-6 * jnp.mean(((300 * x) @ (300 * w["a"])) ** 2)

    told = report(overflowing, *parameters("a"), policy="float16", loss_scale=1.0).errors
    assert not (told.is_first_order and np.isfinite(told.gradient))


def test_a_program_that_rounds_nothing_has_no_rows():
    told = report(loss, *parameters("a", "b", "c"), policy="float32").errors
    assert told.rows == ()
    assert told.gradient == told.first_order == told.squares == 0


def test_the_forward_pass_alone():
    w, x = parameters("a")
    told = report(lambda w, x: jnp.tanh(x @ w["a"]), w, x).errors
    assert told.loss == 0
    assert list(told.results) == ["result"]
    assert told.gradient == pytest.approx(told.results["result"], rel=1e-5)
    forward = report(loss, *parameters("a", "b", "c"), argnums=()).errors
    assert not any(row.backward for row in forward.rows)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"errors": True, "probes": 0}, "probes=0"),
        ({"errors": True, "parameters": "nothing/*"}, "parameters='nothing/"),
        ({"probes": 4}, "errors=True"),
        ({"errors": 1}, "errors=1"),
        ({"errors": True, "target": "h100"}, "target='h100'"),
    ],
)
def test_invalid_settings_are_named(options, named):
    with pytest.raises((TypeError, ValueError), match=named):
        mpjax.explain(loss, "mixed_bfloat16", **options)(*parameters("a", "b", "c"))


def test_abstract_arguments_are_refused():
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), parameters("a", "b", "c"))
    with pytest.raises(TypeError, match="concrete"):
        report(loss, *args)


def test_a_constant_rounds_too():
    def scaled(w, x):
        return jnp.mean((x @ w["a"] * 0.7971) ** 2)

    args = parameters("a")
    policy = mpjax.get_policy("mixed_bfloat16").with_ops(half=("mul",))
    errors = report(scaled, *args, policy=policy).errors
    compared = mpjax.compare(scaled, policy)(*args).results
    assert errors.loss == pytest.approx(compared["loss"], rel=0.1)
    assert errors.results["gradient of a"] == pytest.approx(compared["gradient of a"], rel=0.1)
