"""Steps that are watched: what is compiled, when they are sampled, that they train as before."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support import Compilations, normal, thorough_but

import mpjax


def loss(params, batch):
    x, y = batch
    for name in ("a", "b"):
        with jax.named_scope(name):
            x = jnp.tanh(x @ params[name])
    return jnp.mean((x - y) ** 2)


PARAMS = {name: normal(i, 16, 16, scale=0.25) for i, name in enumerate("ab")}
BATCHES = [normal(i, 2, 8, 16) for i in range(50)]


def built(policy="mixed_float16", **options):
    init, step = mpjax.build_train_step(loss, optax.adamw(1e-2), policy, **options)
    return init(PARAMS), jax.jit(step, donate_argnums=0)


def same(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "policy", thorough_but(["mixed_float16", "mixed_bfloat16", "O3:bfloat16"], "mixed_float16")
)
def test_watch_precision_compiles_two_programs_and_trains_the_same(policy):
    (state, step), (plain, unwatched) = built(policy), built(policy)
    watched = mpjax.watch_precision(step, every=7)
    sampled = []
    with Compilations() as compiled:
        for i, batch in enumerate(BATCHES):
            before = state
            state, metrics = watched(state, (batch[0], batch[1]))
            assert all(x.is_deleted() for x in jax.tree.leaves(before.params))
            sampled += [i] * ("precision" in metrics)
        assert [name for name in compiled.names if "step" in name] == ["jit(step)"] * 2
    for batch in BATCHES:
        plain, _ = unwatched(plain, (batch[0], batch[1]))
    assert same(state, plain)
    assert sampled == [0, 7, 14, 21, 28, 35, 42, 49]
    assert watched.latest.steps == tuple(sampled) and watched.calls == 50
    assert watched.latest is metrics["precision"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_watch_precision_on_a_mesh_compiles_two_programs(kind):
    axis = getattr(jax.sharding.AxisType, kind.capitalize())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis,))
    state, step = built("mixed_bfloat16")
    plain, unwatched = built("mixed_bfloat16")
    everywhere, split = (jax.NamedSharding(mesh, spec) for spec in (P(), P(None, "data")))
    state, plain = jax.device_put((state, plain), everywhere)
    watched = mpjax.watch_precision(step, every=2)
    with Compilations() as compiled:
        for batch in BATCHES[:6]:
            batch = jax.device_put(batch, split)
            state, _ = watched(state, (batch[0], batch[1]))
        assert [name for name in compiled.names if "step" in name] == ["jit(step)"] * 2
    for batch in BATCHES[:6]:
        batch = jax.device_put(batch, split)
        plain, _ = unwatched(plain, (batch[0], batch[1]))
    assert same(state, plain)
    assert any(row.entries for row in watched.latest.rows)


def test_watch_precision_takes_any_step_and_returns_its_results():
    @jax.jit
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum((x.astype("f2") @ w.astype("f2")) ** 2))(w)

    watched = mpjax.watch_precision(step, every=2, start=3)
    w, x = jnp.ones((4, 2)), jnp.ones((3, 4))
    np.testing.assert_array_equal(watched(w, x), step(w, x))
    assert watched.latest.steps == (3,)  # the first one always is
    watched(w, x)
    assert watched.latest.steps == (3, 4)
    watched(w, x=jnp.ones((5, 4)))  # 5 is not sampled
    watched(w, x=jnp.ones((5, 4)))
    assert watched.latest.steps == (6,)  # another program: it starts anew


def test_watch_precision_jits_a_step_that_is_not_jitted():
    watched = mpjax.watch_precision(lambda x: x.astype(jnp.float16), every=1)
    watched(jnp.ones(3))
    assert watched.latest.rows[0].largest == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"every": 0}, "every=0"),
        ({"every": 1.5}, "every=1.5"),
        ({"start": -1}, "start=-1"),
        ({"step": 3}, "step=3"),
    ],
)
def test_watch_precision_refuses_bad_arguments(change, error):
    with pytest.raises((TypeError, ValueError), match=error):
        mpjax.watch_precision(**{"step": jax.jit(loss), **change})


def test_watch_precision_refuses_static_arguments():
    step = jax.jit(lambda x, flag: x, static_argnums=1)
    with pytest.raises(ValueError, match=r"functools\.partial"):
        mpjax.watch_precision(step)(jnp.ones(3), True)
    bound = jax.jit(functools.partial(lambda x, flag: x, flag=True))
    assert mpjax.watch_precision(bound)(jnp.ones(3)).shape == (3,)


def test_watched_metrics_are_logged_to_json_lines_and_tensorboard(tmp_path):
    state, step = built()
    step = mpjax.watch_precision(step, every=2)
    seen = {}

    class Board:
        def add_scalar(self, name, value, step):
            seen[step, name] = value

        def add_text(self, name, value, step):
            seen[step, name] = value

    board = Board()
    with mpjax.debug.JsonLines(tmp_path / "run.jsonl") as log:
        for i, batch in enumerate(BATCHES[:4]):
            state, metrics = step(state, (batch[0], batch[1]))
            mpjax.debug.log_metrics(log, i, metrics)
            mpjax.debug.log_metrics(board, i, metrics)
    mpjax.debug.flush_metrics(board)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert ["precision/at_risk" in line for line in lines] == [True, False, True, False]
    for row in step.latest.rows:
        for figure in ("largest", "headroom", "subnormal", "near", "noise", "flushed"):
            name, value = f"precision/{row.name}/{figure}", getattr(row, figure)
            assert lines[2].get(name) == seen.get((2, name)) == value
    assert json.loads(json.dumps(step.latest.to_dict()))["step"] == 2


@pytest.mark.thorough
def test_watched_metrics_are_written_to_tensorboardx_files(tmp_path):
    tensorboardX = pytest.importorskip("tensorboardX")
    state, step = built()
    step = mpjax.watch_precision(step)
    writer = tensorboardX.SummaryWriter(tmp_path)
    _, metrics = step(state, (BATCHES[0][0], BATCHES[0][1]))
    mpjax.debug.log_metrics(writer, 0, metrics)
    mpjax.debug.flush_metrics(writer)
    writer.close()
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    for row in step.latest.rows:
        assert f"precision/{row.name}/largest".encode() in written
