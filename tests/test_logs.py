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
from mpjax import logs


class Writer:
    """As tensorboardX's and flax's, by the name of the method."""

    def __init__(self, method):
        self.rows = []
        setattr(self, method, lambda tag, value, step: self.rows.append((tag, value, step)))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_logged_in_order(tmp_path):
    init, step = mpjax.build_train_step(
        lambda p, b: (jnp.sum(p["w"] * b), {"seen": jnp.sum(b), "all": b}),
        optax.sgd(0.1),
        "mixed_float16",
        has_aux=True,
    )
    state, step = init({"w": jnp.ones(3)}), jax.jit(step, donate_argnums=0)
    with mpjax.JsonLines(tmp_path / "run.jsonl") as log:
        for i in range(20):
            state, metrics = step(state, jnp.full(3, i, jnp.float32))
            mpjax.log_metrics(log, i, metrics)
    rows = lines(tmp_path / "run.jsonl")
    assert [row["step"] for row in rows] == list(range(20))
    assert rows[3]["aux/seen"] == 9.0 and "aux/all" not in rows[3]
    assert {"loss", "grad_norm", "loss_scale", "skipped_steps", "grads_finite"} <= rows[0].keys()
    assert rows[-1]["loss_scale"] == 65536.0 and rows[0]["grads_finite"] == 1


def test_what_is_not_ready_waits_and_keeps_its_order(tmp_path, monkeypatch):
    busy = {1.0, 2.0}
    monkeypatch.setattr(logs, "_is_ready", lambda leaf: float(leaf) not in busy)
    log, path = mpjax.JsonLines(tmp_path / "a.jsonl"), tmp_path / "a.jsonl"
    for i in range(4):
        mpjax.log_metrics(log, i, {"loss": jnp.float32(i)})
    assert [row["step"] for row in lines(path)] == [0]
    busy.remove(1.0)
    mpjax.log_metrics(log, 4, {"loss": jnp.float32(4)})
    assert [row["step"] for row in lines(path)] == [0, 1]
    mpjax.flush_metrics(log)
    assert [row["step"] for row in lines(path)] == [0, 1, 2, 3, 4]


def test_readiness_is_asked_not_waited_for():
    assert logs._is_ready(jax.block_until_ready(jnp.ones(()))) and logs._is_ready(1.0)


@pytest.mark.parametrize("method", ["add_scalar", "scalar"])
def test_tensorboard_writers(method):
    writer = Writer(method)
    mpjax.log_metrics(writer, 7, {"loss": jnp.bfloat16(2), "n": 3, "ok": np.bool_(True), "s": "x"})
    assert writer.rows == [("loss", 2.0, 7), ("n", 3, 7), ("ok", 1, 7)]
    mpjax.flush_metrics(writer)


def test_tensorboardx(tmp_path):
    tensorboardx = pytest.importorskip("tensorboardX")
    with tensorboardx.SummaryWriter(str(tmp_path)) as writer:
        mpjax.log_metrics(writer, 1, {"loss": jnp.float32(0.5)})
        mpjax.flush_metrics(writer)
    (events,) = tmp_path.glob("events*")
    assert b"loss" in events.read_bytes()


def test_nonfinite_values_are_json(tmp_path):
    with mpjax.JsonLines(tmp_path / "a.jsonl") as log:
        mpjax.log_metrics(log, 0, {"a": math.nan, "b": jnp.inf, "c": -jnp.inf})
    assert lines(tmp_path / "a.jsonl") == [{"step": 0, "a": "nan", "b": "inf", "c": "-inf"}]


def test_a_forgotten_writer_is_forgotten():
    writer = Writer("scalar")
    mpjax.log_metrics(writer, 0, {"a": 1.0})
    assert writer in logs._WAITING
    count = len(logs._WAITING)
    del writer
    gc.collect()
    assert len(logs._WAITING) < count


def test_bad_input(tmp_path):
    log = mpjax.JsonLines(tmp_path / "a.jsonl")
    with pytest.raises(OSError, match="missing"):
        mpjax.JsonLines(tmp_path / "missing" / "a.jsonl")
    with pytest.raises(TypeError, match=r"writer='run.jsonl' must be an mpjax.JsonLines"):
        mpjax.log_metrics("run.jsonl", 0, {})
    for step in (jnp.int32(1), 1.5, None):
        with pytest.raises(TypeError, match="step=.* must be a Python integer"):
            mpjax.log_metrics(log, step, {"a": 1.0})
    with pytest.raises(TypeError, match=r"metrics\['a'\] is being traced"):
        jax.jit(lambda x: mpjax.log_metrics(log, 0, {"a": x}))(1.0)
