"""Collectives: what devices send each other, what it is, and how much."""

import jax
import jax.numpy as jnp
import optax
import pytest
from absent import partitioned, spread
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax._src.tools.hardware.collectives import collectives, grouped
from mpjax._src.tools.hardware.hlo import parse

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
def test_replica_groups_of_each_form_give_the_number_of_devices(written, devices):
    text = module(f"bf16[64]{{0}} all-reduce(%p), {written}, to_apply=%add")
    (row,) = collectives(text, text)
    assert row.devices == devices


@pytest.mark.parametrize(("kind", "given", "sent"), SENT)
def test_wire_bytes_of_each_kind_of_collective(kind, given, sent):
    text = module(f"bf16[64]{{0}} {kind}(%p), replica_groups=[2,4]<=[8]")
    (row,) = collectives(text, text)
    assert (row.kind, row.dtype, row.shape) == (kind.removesuffix("-start"), "bf16", (given,))
    assert row.wire_bytes == sent and row.runs == 1


def test_collective_of_one_device_alone_is_no_row():
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


TPU_GATHERS = """HloModule m, num_partitions=8

%first (i: bf16[64]) -> (bf16[64], bf16[512], u32[]) {
  %i = bf16[64]{0} parameter(0)
  %g.1 = bf16[512]{0} all-gather(%i), channel_id=1, replica_groups={}
  ROOT %c = (bf16[64], bf16[512], u8[]) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%while (j: bf16[64], k: bf16[512], l: u32[], m: f32[8]) -> (f32[8], bf16[64], bf16[512], u32[]) {
  %m = f32[8]{0} parameter(3)
  %n = f32[8]{0} tanh(%m)
  %j = bf16[64]{0} parameter(0)
  %k = bf16[512]{0} parameter(1)
  %g.2 = bf16[512]{0} all-gather(%j), channel_id=1, replica_groups={}
  %l = u32[] parameter(2)
  ROOT %t = (f32[8]{0}, bf16[64]{0}, bf16[512]{0}, u32[]) tuple(%n, %j, %g.2, %l)
}

%last (q: bf16[64], r: bf16[512], s: u32[]) -> bf16[512] {
  %q = bf16[64]{0} parameter(0)
  %r = bf16[512]{0} parameter(1)
  %s = u32[] parameter(2)
  %g.3 = bf16[512]{0} all-gather(%q), channel_id=1, replica_groups={}
  ROOT %c.2 = bf16[512]{0} custom-call(%q, %r, %g.3, %s), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: bf16[64], x: f32[8]) -> (bf16[4096], f32[8]) {
  %p = bf16[64]{0} parameter(0)
  %x = f32[8]{0} parameter(1)
  %start = (bf16[64]{0}, bf16[512]{0}, u32[]) fusion(%p), kind=kCustom, calls=%first
  %a = bf16[64]{0} get-tuple-element(%start), index=0
  %b = bf16[512]{0} get-tuple-element(%start), index=1
  %c = u32[] get-tuple-element(%start), index=2
  %on = (f32[8], bf16[64], bf16[512], u32[]) fusion(%a, %b, %c, %x), kind=kOutput, calls=%while
  %y = f32[8]{0} get-tuple-element(%on), index=0
  %d = bf16[64]{0} get-tuple-element(%on), index=1
  %e = bf16[512]{0} get-tuple-element(%on), index=2
  %f = u32[] get-tuple-element(%on), index=3
  %done = bf16[512]{0} fusion(%d, %e, %f), kind=kCustom, calls=%last
  %again = bf16[4096]{0} all-gather(%done), channel_id=1, replica_groups={}
  ROOT %out = (bf16[4096]{0}, f32[8]{0}) tuple(%again, %y)
}
"""


def test_exchange_of_three_kernels_of_a_tpu_is_one_row():
    rows = collectives(TPU_GATHERS, TPU_GATHERS)
    assert [(row.exchange, row.shape) for row in rows] == [("again", (512,)), ("g.1", (64,))]


def test_exchanges_of_one_channel_are_told_apart():
    """All collectives of shard_map have channel 1."""
    text = module("bf16[512]{0} all-gather(%p), channel_id=1, replica_groups={}")
    text = text.replace("  ROOT", "  %q = bf16[64]{0} all-reduce(%p), channel_id=1\n  ROOT")
    assert {row.kind for row in collectives(text, text)} == {"all-gather", "all-reduce"}


def test_an_asynchronous_exchange_counts_once():
    """Start and done are one exchange; so is an async-start with all computations it names."""
    text = """HloModule m, num_partitions=8

%wrapped (i: f32[64]) -> f32[8] {
  %i = f32[64]{0} parameter(0)
  ROOT %s = f32[8]{0} reduce-scatter(%i), channel_id=1, replica_groups={}, to_apply=%add
}

ENTRY %main (p: f32[64]) -> (f32[64], f32[8]) {
  %p = f32[64]{0} parameter(0)
  %sum = f32[64]{0} all-reduce-start(%p), channel_id=1, replica_groups={}, to_apply=%add
  %part = ((f32[64]{0}), f32[8]{0}, u32[]) async-start(%p), calls=%wrapped
  %on = ((f32[64]{0}), f32[8]{0}, u32[]) async-update(%part), calls=%wrapped
  %a = f32[64]{0} all-reduce-done(%sum)
  %b = f32[8]{0} async-done(%on), calls=%wrapped
  ROOT %out = (f32[64]{0}, f32[8]{0}) tuple(%a, %b)
}
"""
    rows = collectives(text, text)
    assert sorted(row.kind for row in rows) == ["all-reduce", "reduce-scatter"]


def test_a_computation_that_is_called_twice_exchanges_twice():
    text = """HloModule m, num_partitions=8

%inner (i: f32[64]) -> f32[64] {
  %i = f32[64]{0} parameter(0)
  ROOT %s = f32[64]{0} all-reduce(%i), channel_id=1, replica_groups={}, to_apply=%add
}

ENTRY %main (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  %a = f32[64]{0} call(%p), to_apply=%inner
  ROOT %b = f32[64]{0} call(%a), to_apply=%inner
}
"""
    (row,) = collectives(text, text)
    assert row.runs == 2


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


def test_every_collective_of_shard_map_is_a_row(mesh):
    """In loops, in their conditions, and of two dtypes; the channel of all of them is 1."""

    def body(x, w):
        wide = jax.lax.psum(x.sum(0), "data")
        half = jax.lax.all_gather((x @ w).astype(jnp.float16), "data")
        turned, _ = jax.lax.scan(lambda c, _: (jax.lax.psum(c * c, "data"), None), x, length=5)

        def on(carry):
            return jax.lax.pmax(carry[0, 0], ("data", "model")) < 2

        grown = jax.lax.while_loop(on, lambda c: c + 1, x)
        return wide.sum() + half.sum().astype(jnp.float32) + turned.sum() + grown.sum()

    fun = jax.shard_map(body, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=False)
    rows = compiled(mesh, fun, spread(mesh, P("data"), ROWS, 16), spread(mesh, P(), 16, 16))
    assert {(row.kind, row.shape, row.devices, row.runs) for row in rows} == {
        ("all-reduce", (16,), 4, 1),
        ("all-gather", (1, ROWS // 4, 16), 4, 1),
        ("all-reduce", (ROWS // 4, 16), 4, 5),
        ("all-reduce", (), 8, 1),
    }


def test_the_verdict_of_a_step_in_shard_map_is_a_row(mesh):
    init, step = mpjax.build_train_step(mlp, optax.sgd(1e-3), "mixed_float16", axis_name="data")
    params = weights(mesh, P(), P(), P())
    state = jax.eval_shape(init, jax.tree.map(lambda x: jnp.ones(x.shape), params))
    state = jax.tree.map(lambda x: spread(mesh, P(), *x.shape, dtype=x.dtype), state)
    both = {"in_specs": (P(), P("data")), "out_specs": (P(), P())}
    fun = jax.shard_map(step, mesh=mesh, **both)
    rows = compiled(mesh, fun, state, spread(mesh, P("data"), ROWS, WIDTH))
    summed = {row.shape for row in rows if row.carries == "gradients"}
    assert summed == {(WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH), (3 * WIDTH,)}
    assert ("verdict", ()) in {(row.carries, row.shape) for row in rows}


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


def test_data_parallel_step_exchanges_gradients_and_statistics(mesh):
    params = weights(mesh, P(), P(), P())
    rows = compiled(mesh, jax.value_and_grad(mlp), params, spread(mesh, P("data"), ROWS, WIDTH))
    assert carries(rows) == {("gradients", "all-reduce"), ("statistics", "all-reduce")}
    summed = {row.shape for row in rows if row.carries == "gradients"}
    assert summed == {(WIDTH, 3 * WIDTH), (3 * WIDTH, WIDTH), (3 * WIDTH,)}
    assert {row.shape for row in rows if row.carries == "statistics"} == {()}  # the loss
    assert {row.source.rpartition("/")[2].split(":")[0] for row in rows} == {"test_collectives.py"}


def test_fully_sharded_step_gathers_parameters_and_sums_gradients(mesh):
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


def test_tensor_parallel_step_exchanges_activations(mesh):
    params = weights(mesh, P(None, "model"), P("model"), P("model"))
    rows = compiled(
        mesh,
        jax.value_and_grad(mlp),
        params,
        spread(mesh, P(), ROWS, WIDTH),
        out_shardings=(None, shardings(params)),
    )
    assert {(r.carries, r.shape) for r in rows if r.shape} == {("activations", (ROWS, WIDTH))}


def test_collectives_in_loops_count_once_a_turn(mesh):
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
    assert collectives(text, text) == () and parse(text).entry.name == "main"
