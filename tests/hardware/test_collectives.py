"""Collectives: what devices send each other, what it is, and how much."""

import jax
import jax.numpy as jnp
import optax
import pytest
from absent import partitioned, spread
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax._src.hardware.collectives import collectives, grouped
from mpjax._src.hardware.hlo import parse

GROUPS = {
    "replica_groups=[2,4]<=[8]": 4,
    "replica_groups=[4,2]<=[2,4]T(1,0)": 2,
    "replica_groups={{0,1,2,3},{4,5,6,7}}": 4,
    "replica_groups={}": 8,
    "replica_groups=mesh['x'=4,'y'=2] {'x'}": 4,
    "replica_groups=mesh['x'=4,'y'=2] {'x','y'}": 8,
    "replica_groups=mesh['x'=8] {'x':(1)2}": 2,
    "source_target_pairs={{0,1},{1,0}}": 8,
}
# kind, what one device gives, what it sends to three others.
SENT = [
    ("all-gather", 64, 3 * 64 * 2),
    ("all-gather-start", 64, 3 * 64 * 2),
    ("reduce-scatter", 64, 0.75 * 64 * 2),
    ("all-reduce", 64, 1.5 * 64 * 2),
    ("all-to-all", 64, 0.75 * 64 * 2),
    ("collective-permute", 64, 64 * 2),
]


def module(line):
    return (
        "HloModule m, num_partitions=8\n\nENTRY %main (p: bf16[64]) -> bf16[64] {\n"
        "  %p = bf16[64]{0} parameter(0)\n" + f"  ROOT %r = {line}\n" + "}\n"
    )


@pytest.mark.parametrize(("written", "devices"), GROUPS.items())
def test_groups(written, devices):
    text = module(f"bf16[64]{{0}} all-reduce(%p), {written}, to_apply=%add")
    (row,) = collectives(text, text)
    assert row.devices == devices


@pytest.mark.parametrize(("kind", "given", "sent"), SENT)
def test_bytes_on_the_wire(kind, given, sent):
    text = module(f"bf16[64]{{0}} {kind}(%p), replica_groups=[2,4]<=[8]")
    (row,) = collectives(text, text)
    assert (row.kind, row.dtype, row.shape) == (kind.removesuffix("-start"), "bf16", (given,))
    assert row.wire_bytes == sent and row.runs == 1


def test_what_one_device_does_alone_is_no_exchange():
    text = module("bf16[64]{0} all-reduce(%p), replica_groups=[8,1]<=[8]")
    assert collectives(text, text) == ()


def test_a_tpu_s_kernel_of_a_sum_and_a_slice_is_a_reduce_scatter():
    text = """HloModule m, num_partitions=4

FileNames
1 "train.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%all-reduce-scatter.1 (i: f32[64]) -> f32[16] {
  %i = f32[64]{0} parameter(0)
  %sum = f32[64]{0} all-reduce(%i), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %s = f32[16]{0} slice(%sum), slice={[0:16]}
}

ENTRY %main (p: f32[64]) -> f32[16] {
  %p = f32[64]{0} parameter(0)
  ROOT %r = f32[16]{0} fusion(%p), calls=%all-reduce-scatter.1, metadata={stack_frame_id=1}
}
"""
    (row,) = collectives(text, text)
    assert (row.kind, row.wire_bytes) == ("reduce-scatter", 0.75 * 64 * 4)
    assert row.source == "train.py:7"  # of the kernel: what is inside has no line


def test_parts_of_one_exchange_count_once():
    """A TPU's gather begins in one kernel and goes on in others, under one channel."""
    text = module("bf16[512]{0} all-gather(%p), channel_id=7, replica_groups={}")
    text = text.replace("  ROOT", "  %q = bf16[512]{0} all-gather(%p), channel_id=7\n  ROOT")
    assert len(collectives(text, text)) == 1
    assert len(collectives(text.replace("=7\n", "=8\n"), text)) == 2


# ---- of programs that XLA partitions -------------------------------------------------------------


def test_arrays_that_are_sent_together_are_rows_of_one_exchange():
    text = """HloModule m, num_partitions=8

ENTRY %main (a: f32[4], b: f32[2]) -> (f32[4], f32[2]) {
  %a = f32[4]{0} parameter(0)
  %b = f32[2]{0} parameter(1)
  %both = f32[6]{0} concatenate(%a, %b), dimensions={0}
  %sum = f32[6]{0} all-reduce(%both), replica_groups={}, to_apply=%add
  %first = f32[4]{0} slice(%sum), slice={[0:4]}
  %second = f32[2]{0} slice(%sum), slice={[4:6]}
  ROOT %out = (f32[4]{0}, f32[2]{0}) tuple(%first, %second)
}
"""
    rows = collectives(text, text)
    assert {row.shape for row in rows} == {(4,), (2,)} and len({row.exchange for row in rows}) == 1
    ((*_, arrays, times, sent, _, _),) = grouped(rows)
    assert (arrays, times, sent) == ("2", "1", "42 B")


def compiled(mesh, fun, *args, **options):
    return partitioned(mesh, fun, *args, **options)[1]


def carries(rows):
    return {(row.carries, row.kind) for row in rows}


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def shardings(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


WIDTH, ROWS = 128, 64


def mlp(params, x):
    hidden = jax.nn.relu(x @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"]) ** 2)


def weights(mesh, up, down, bias):
    return {
        "up": spread(mesh, up, WIDTH, 3 * WIDTH),
        "down": spread(mesh, down, 3 * WIDTH, WIDTH),
        "bias": spread(mesh, bias, 3 * WIDTH),
    }


def test_data_parallel(mesh):
    params = weights(mesh, P(), P(), P())
    rows = compiled(mesh, jax.value_and_grad(mlp), params, spread(mesh, P("data"), ROWS, WIDTH))
    assert carries(rows) == {("gradients", "all-reduce"), ("statistics", "all-reduce")}
    summed = {row.shape for row in rows if row.carries == "gradients"}
    assert summed == {(WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH), (3 * WIDTH,)}
    assert {row.shape for row in rows if row.carries == "statistics"} == {()}  # the loss
    assert {row.source.rpartition("/")[2].split(":")[0] for row in rows} == {"test_collectives.py"}


def test_fully_sharded(mesh):
    params = weights(mesh, P("data"), P("data"), P())
    rows = compiled(
        mesh,
        jax.value_and_grad(mlp),
        params,
        spread(mesh, P("data"), 16 * ROWS, WIDTH),
        out_shardings=(None, shardings(params)),
    )
    gathers = [row for row in rows if row.kind == "all-gather"]
    assert {row.carries for row in gathers} == {"parameters"}
    assert {row.shape for row in gathers} >= {(WIDTH // 4, 3 * WIDTH), (3 * WIDTH // 4, WIDTH)}
    sums = [row for row in rows if row.kind in ("all-reduce", "reduce-scatter") and row.shape]
    assert {row.carries for row in sums} == {"gradients"}


def test_tensor_parallel(mesh):
    params = weights(mesh, P(None, "model"), P("model"), P("model"))
    rows = compiled(
        mesh,
        jax.value_and_grad(mlp),
        params,
        spread(mesh, P(), ROWS, WIDTH),
        out_shardings=(None, shardings(params)),
    )
    assert {(r.carries, r.shape) for r in rows if r.shape} == {("activations", (ROWS, WIDTH))}


def test_loops_count_as_often_as_they_turn(mesh):
    layers = spread(mesh, P(None, "data"), 5, WIDTH, WIDTH)
    x = spread(mesh, P("data"), 16 * ROWS, WIDTH)

    def loss(layers, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, layers)[0] ** 2)

    rows = compiled(mesh, jax.grad(loss), layers, x, out_shardings=layers.sharding)
    arrays = [row for row in rows if row.shape]
    assert {(row.carries, row.runs) for row in arrays} == {("parameters", 5), ("gradients", 5)}


def test_statistics_are_told_from_gradients(mesh):
    """BatchNorm's mean becomes a result of a trained argument's shape as well."""
    x = spread(mesh, P("data"), ROWS, WIDTH)
    state = {"w": spread(mesh, P(), WIDTH, WIDTH), "mean": spread(mesh, P(), WIDTH)}

    def loss(w, mean, x):
        y = x @ w
        batch = jnp.mean(y, 0)
        return jnp.mean(((y - batch) @ w) ** 3), 0.9 * mean + 0.1 * batch

    def step(state, x):
        (_, mean), grad = jax.value_and_grad(loss, has_aux=True)(state["w"], state["mean"], x)
        return {"w": state["w"] - grad, "mean": mean}

    rows = compiled(mesh, step, state, x)
    found = {(row.carries, row.shape) for row in rows}
    assert found >= {("statistics", (WIDTH,)), ("gradients", (WIDTH, WIDTH))}
    assert not found & {("gradients", (WIDTH,)), ("statistics", (WIDTH, WIDTH))}


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_the_norm_of_sharded_gradients_is_a_verdict(mesh, policy):
    init, step = mpjax.build_train_step(mlp, optax.adam(1e-3), policy)
    params = weights(mesh, P("data"), P("data"), P())
    state = jax.eval_shape(init, jax.tree.map(lambda x: jnp.ones(x.shape), params))

    def place(leaf):
        axes = P("data") if leaf.ndim == 2 else P()
        return spread(mesh, axes, *leaf.shape, dtype=leaf.dtype)

    state = jax.tree.map(place, state)
    rows = compiled(
        mesh,
        step,
        state,
        spread(mesh, P("data"), 16 * ROWS, WIDTH),
        out_shardings=(shardings(state), None),
    )
    verdicts = [row for row in rows if row.carries == "verdict"]
    assert {(row.kind, row.dtype, row.shape) for row in verdicts} == {("all-reduce", "f32", ())}
    assert {row.carries for row in rows} == {"verdict", "gradients", "parameters"}


def test_new_parameters_that_are_gathered_are_parameters(mesh):
    """Updates of a shard each, whose results all devices hold (ZeRO-1)."""
    w, x = spread(mesh, P(), WIDTH, WIDTH), spread(mesh, P("data"), ROWS, WIDTH)
    shards = jax.sharding.NamedSharding(mesh, P("data"))

    def step(w, x):
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        grad, old = (jax.lax.with_sharding_constraint(v, shards) for v in (grad, w))
        return old - jnp.sign(grad)

    rows = compiled(mesh, step, w, x, out_shardings=w.sharding)
    assert ("parameters", "all-gather") in carries(rows)
    assert "gradients" in {row.carries for row in rows}


def test_a_gathered_batch_is_data(mesh):
    x = spread(mesh, P("data"), ROWS, WIDTH)
    w = spread(mesh, P(None, "data"), WIDTH, 4 * WIDTH)
    rows = compiled(mesh, jnp.dot, x, w, out_shardings=w.sharding)
    assert carries(rows) == {("data", "all-gather")}


def test_a_program_without_exchanges_has_no_rows():
    text = module("bf16[64]{0} negate(%p)")
    assert collectives(text, text) == () and parse(text)[1] == "main"
