"""log_metrics: what is written, when, and that nothing waits."""

import gc
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._src.tools.instruments import logs


class Writer:
    """As tensorboardX's and flax's, by the name of the method."""

    def __init__(self, method):
        self.rows = []
        setattr(self, method, lambda tag, value, step: self.rows.append((tag, value, step)))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_metrics_writes_a_run_in_order(tmp_path):
    init, step = mpjax.build_train_step(
        lambda p, b: (jnp.sum(p["w"] * b), {"seen": jnp.sum(b), "all": b}),
        optax.sgd(0.1),
        "mixed_float16",
        has_aux=True,
    )
    state, step = init({"w": jnp.ones(3)}), jax.jit(step, donate_argnums=0)
    with mpjax.debug.JsonLines(tmp_path / "run.jsonl") as log:
        for i in range(20):
            state, metrics = step(state, jnp.full(3, i, jnp.float32))
            mpjax.debug.log_metrics(log, i, metrics)
    rows = lines(tmp_path / "run.jsonl")
    assert [row["step"] for row in rows] == list(range(20))
    assert rows[3]["aux/seen"] == 9.0 and "aux/all" not in rows[3]
    assert {"loss", "grad_norm", "loss_scale", "skipped_steps", "state_finite"} <= rows[0].keys()
    assert rows[-1]["loss_scale"] == 65536.0 and rows[0]["grads_finite"] == 1
    assert rows[0]["state_finite"] == 1


def test_metrics_that_are_not_ready_wait_and_keep_their_order(tmp_path, monkeypatch):
    busy = {1.0, 2.0}
    monkeypatch.setattr(logs, "_is_ready", lambda leaf: float(leaf) not in busy)
    log, path = mpjax.debug.JsonLines(tmp_path / "a.jsonl"), tmp_path / "a.jsonl"
    for i in range(4):
        mpjax.debug.log_metrics(log, i, {"loss": jnp.float32(i)})
    assert [row["step"] for row in lines(path)] == [0]
    busy.remove(1.0)
    mpjax.debug.log_metrics(log, 4, {"loss": jnp.float32(4)})
    assert [row["step"] for row in lines(path)] == [0, 1]
    mpjax.debug.flush_metrics(log)
    assert [row["step"] for row in lines(path)] == [0, 1, 2, 3, 4]


def test_is_ready_asks_and_does_not_wait():
    assert logs._is_ready(jax.block_until_ready(jnp.ones(()))) and logs._is_ready(1.0)


@pytest.mark.parametrize("method", ["add_scalar", "scalar"])
def test_log_metrics_writes_scalars_to_tensorboard_writers(method):
    writer = Writer(method)
    mpjax.debug.log_metrics(
        writer, 7, {"loss": jnp.bfloat16(2), "n": 3, "ok": np.bool_(True), "s": "x"}
    )
    assert writer.rows == [("loss", 2.0, 7), ("n", 3, 7), ("ok", 1, 7)]
    mpjax.debug.flush_metrics(writer)


def test_log_metrics_writes_to_tensorboardx(tmp_path):
    tensorboardx = pytest.importorskip("tensorboardX")
    with tensorboardx.SummaryWriter(str(tmp_path)) as writer:
        mpjax.debug.log_metrics(writer, 1, {"loss": jnp.float32(0.5)})
        mpjax.debug.flush_metrics(writer)
    (events,) = tmp_path.glob("events*")
    assert b"loss" in events.read_bytes()


def test_a_histogram_is_logged_as_shares_at_the_loss_scale(tmp_path):
    grads = {"w": jnp.array([0.0, 1e-9, 2.0**-30, 0.5]), "b": jnp.array([jnp.inf, 1.0, 1.0, 1.0])}
    histogram = mpjax.debug.gradient_histogram(grads)
    with mpjax.debug.JsonLines(tmp_path / "a.jsonl") as log:
        mpjax.debug.log_metrics(log, 0, {"loss_scale": jnp.float32(1024), "aux": {"g": histogram}})
        mpjax.debug.log_metrics(
            log, 1, {"loss_scale": jnp.float32(100_000.0), "aux": {"g": histogram}}
        )
        mpjax.debug.log_metrics(log, 2, {"g": histogram, "loss_scale": jnp.inf})
    first, second, third = lines(tmp_path / "a.jsonl")
    assert first["aux/g/zeros"] == first["aux/g/nonfinite"] == 1 / 8
    assert first["aux/g/float16/flushed"] == 0 and third["g/float16/flushed"] == 2 / 8
    assert first["aux/g/float16/subnormal"] == 2 / 8 and first["aux/g/bfloat16/flushed"] == 0
    assert second["aux/g/float16/overflowed"] == 3 / 8  # at 2**16, the power of two below


def test_a_histogram_may_be_donated_after_it_was_logged(tmp_path, monkeypatch):
    count = jax.jit(lambda g, h: mpjax.debug.gradient_histogram(g, h), donate_argnums=1)
    grads = jnp.array([1.0, 2.0])
    histogram = mpjax.debug.gradient_histogram(grads)
    monkeypatch.setattr(logs, "_is_ready", lambda leaf: False)
    with mpjax.debug.JsonLines(tmp_path / "a.jsonl") as log:
        for i in range(3):
            mpjax.debug.log_metrics(log, i, {"g": histogram})
            histogram = count(grads, histogram)
    assert [row["g/zeros"] for row in lines(tmp_path / "a.jsonl")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("method", "text"), [("add_scalar", "add_text"), ("scalar", "text"), ("scalar", None)]
)
def test_path_of_an_overflow_is_logged_as_text(method, text):
    writer = Writer(method)
    if text:
        setattr(writer, text, lambda tag, value, step: writer.rows.append((tag, value, step)))
    scalar = jnp.float32(2)
    for index in (-1, 0):
        report = mpjax.reports.Overflow(
            jnp.int32(index), jnp.int32(-1), scalar, scalar, scalar, ("w",)
        )
        mpjax.debug.log_metrics(writer, index, {"overflow": report})
    found = [row for row in writer.rows if row[0] == "overflow/path"]
    assert found == ([("overflow/path", "w", 0)] if text else [])
    assert ("overflow/index", -1, -1) in writer.rows


def test_nonfinite_metrics_are_valid_json(tmp_path):
    with mpjax.debug.JsonLines(tmp_path / "a.jsonl") as log:
        mpjax.debug.log_metrics(log, 0, {"a": math.nan, "b": jnp.inf, "c": -jnp.inf})
    assert lines(tmp_path / "a.jsonl") == [{"step": 0, "a": "nan", "b": "inf", "c": "-inf"}]


@pytest.mark.parametrize("method", ["add_scalar", "scalar"])
def test_nonfinite_metrics_are_left_out_of_charts(method):
    writer = Writer(method)
    metrics = {"a": math.nan, "b": jnp.inf, "c": jnp.float32(1), "loss_scale": jnp.float32(8)}
    mpjax.debug.log_metrics(writer, 3, metrics)
    assert writer.rows == [("c", 1.0, 3), ("loss_scale", 8.0, 3)]


def test_a_skipped_step_prints_nothing_at_tensorboardx(tmp_path, capsys, caplog):
    tensorboardx = pytest.importorskip("tensorboardX")
    with tensorboardx.SummaryWriter(str(tmp_path)) as writer:
        mpjax.debug.log_metrics(writer, 1, {"grad_norm": jnp.inf, "loss_scale": jnp.float32(8)})
        mpjax.debug.flush_metrics(writer)
    out = capsys.readouterr()
    assert not out.out + out.err + caplog.text
    assert b"loss_scale" in next(tmp_path.glob("events*")).read_bytes()


def test_log_metrics_lets_go_of_a_deleted_writer():
    writer = Writer("scalar")
    mpjax.debug.log_metrics(writer, 0, {"a": 1.0})
    assert writer in logs._WAITING
    count = len(logs._WAITING)
    del writer
    gc.collect()
    assert len(logs._WAITING) < count


def test_log_metrics_refuses_bad_arguments(tmp_path):
    log = mpjax.debug.JsonLines(tmp_path / "a.jsonl")
    with pytest.raises(OSError, match="missing"):
        mpjax.debug.JsonLines(tmp_path / "missing" / "a.jsonl")
    with pytest.raises(TypeError, match=r"writer='run.jsonl' must be an mpjax.debug.JsonLines"):
        mpjax.debug.log_metrics("run.jsonl", 0, {})
    for step in (jnp.int32(1), 1.5, None):
        with pytest.raises(TypeError, match="step=.* must be a Python integer"):
            mpjax.debug.log_metrics(log, step, {"a": 1.0})
    with pytest.raises(TypeError, match=r"metrics\['a'\] is being traced"):
        jax.jit(lambda x: mpjax.debug.log_metrics(log, 0, {"a": x}))(1.0)
