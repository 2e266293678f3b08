"""Labels, tokens and positions out of range; and padding, masks and sentinels: no fault."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pairs
import pytest
from pairs import Pair
from support import thorough_but

import mpjax

RULE = "index-out-of-range"
N = 7
LOGITS = jnp.asarray(np.linspace(-1, 1, 6 * N, dtype=np.float32).reshape(6, N))
TABLE = np.linspace(-1, 1, N * 3, dtype=np.float32).reshape(N, 3)
IGNORED = np.array([0, 3, -100, 6, -100, 2])
MINUS_ONE = np.array([0, 3, -1, 6, -1, 2])
FROM_ONE = np.array([1, 3, 7, 6, 2, 2])
RIGHT = np.array([0, 3, 1, 6, 5, 2])


def along(logits, labels):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], axis=1))  # fault


def indexed(logits, labels):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(log_p[jnp.arange(6), labels])  # fault


def of_optax(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)  # fault
    return jnp.mean(losses)


def one_hot(logits, labels):
    hot = jax.nn.one_hot(labels, N)  # fault
    return -jnp.mean(jnp.sum(hot * jax.nn.log_softmax(logits), axis=-1))


def one_hot_matmul(table, tokens):
    hot = (tokens[:, None] == jnp.arange(N)).astype(jnp.float32)  # fault
    return jnp.sum((hot @ table) ** 2)


def embedded(table, tokens):
    return jnp.mean(jnp.take(table, tokens, axis=0) ** 2)  # fault


def looked_up(table, tokens):
    return jnp.mean(table[tokens] ** 2)  # fault


def shifted(logits, labels):
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(6), labels - 1])  # fault


def masked_too_late(logits, labels):
    log_p = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0]  # fault
    return jnp.sum(losses * (labels >= 0)) / jnp.sum(labels >= 0)


def each_step(logits, labels):
    def body(total, row):
        step, label = row
        return total - jax.nn.log_softmax(step)[label], None  # fault

    return jax.lax.scan(body, 0.0, (logits, labels))[0]


def picked(row, label):
    return -jax.nn.log_softmax(row)[label]  # fault


def mapped(logits, labels):
    return jnp.mean(jax.vmap(picked)(logits, labels))


def cached(cache, position):
    return jax.lax.dynamic_update_slice(cache, jnp.ones((1, 3)), (position, 0))  # fault


def counted(labels):
    return jnp.zeros(N).at[labels].add(1.0)  # fault


def classes(table, labels):
    return jnp.sum(jnp.asarray([1, 2, 3, 4, 5, 6, 7])[labels])  # fault


# What keeps the program and repairs the labels.
DATA = {
    "along an axis": (along, LOGITS, IGNORED, RIGHT),
    "indexed": (indexed, LOGITS, FROM_ONE, RIGHT),
    "counted from the end": (indexed, LOGITS, MINUS_ONE, RIGHT),
    "optax, ignored": (of_optax, LOGITS, IGNORED, RIGHT),
    "optax, from the end": (of_optax, LOGITS, MINUS_ONE, RIGHT),
    "one hot": (one_hot, LOGITS, IGNORED, RIGHT),
    "one hot, minus one": (one_hot, LOGITS, MINUS_ONE, RIGHT),
    "one hot by hand": (one_hot_matmul, TABLE, FROM_ONE, RIGHT),
    "take": (embedded, TABLE, FROM_ONE, RIGHT),
    "table": (looked_up, TABLE, FROM_ONE, RIGHT),
    "shifted": (shifted, LOGITS, RIGHT, RIGHT + 1),
    "NaN times zero": (masked_too_late, LOGITS, IGNORED, RIGHT),
    "loop": (each_step, LOGITS, FROM_ONE, RIGHT),
    "vmap": (mapped, LOGITS, FROM_ONE, RIGHT),
    "cache": (cached, TABLE, np.int32(N), np.int32(N - 1)),
    "integers": (classes, TABLE, FROM_ONE, RIGHT),
}


def lint(fun, *args, **options):
    return mpjax.lint(fun, select=RULE, **options)(*args)


@pytest.mark.parametrize(
    "name",
    thorough_but(DATA, "along an axis", "counted from the end", "one hot", "loop", "cache"),
)
def test_indices_out_of_range_are_found_and_right_ones_are_not(name):
    fun, first, wrong, right = DATA[name]
    for options in ({}, {"argnums": 0}) if fun not in (cached, classes) else ({},):
        (finding,) = lint(fun, first, wrong, **options).findings
        assert [finding.source] == pairs.marked_lines(picked if fun is mapped else fun)
        report = lint(fun, first, right, **options)
        assert report.ran and not report.findings
    assert not lint(jax.jit(fun), first, right).findings
    assert lint(jax.jit(fun), first, wrong).findings


def test_message_says_which_argument_how_many_and_what_jax_does():
    (finding,) = lint(along, LOGITS, IGNORED).findings
    assert finding.message == (
        "Index -100 is out of range of 7 (labels; 2 of 6 entries): JAX returns NaN for it."
    )
    of_batch = lambda params, batch: looked_up(params["t"], batch["x"])  # noqa: E731
    (finding,) = lint(of_batch, {"t": TABLE}, {"x": FROM_ONE}).findings
    assert "Index 7 is out of range of 7 (batch['x']; 1 of 6" in finding.message
    assert "nearest row" in finding.message
    (finding,) = lint(counted, MINUS_ONE).findings
    assert "Index -1 of 7 is counted from the end (labels; 2 of 6" in finding.message
    assert [finding.source] == pairs.marked_lines(counted)
    (finding,) = lint(one_hot, LOGITS, MINUS_ONE).findings
    assert "2 of 6 entries): its row of the one-hot array is zero" in finding.message


def test_what_one_lookup_reads_is_found_beside_the_nan_of_another():
    def both(table, tokens):
        rows = table[tokens]
        return along((rows @ table.T)[:6], tokens)

    assert len(lint(both, TABLE, FROM_ONE).findings) == 2


# ---- correct programs with the same labels -------------------------------------------------------


def replaced(logits, labels):
    valid = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(valid, labels, 0))
    return jnp.sum(losses * valid) / jnp.sum(valid)


def selected(logits, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(jnp.where(labels >= 0, losses, 0.0)) / jnp.sum(labels >= 0)


def weighted(logits, labels):
    losses = -jax.nn.log_softmax(logits)[jnp.arange(6), labels]
    return jnp.sum(losses * (labels >= 0))


def masked_sum(logits, labels):
    return jnp.sum(-jax.nn.log_softmax(logits)[jnp.arange(6), labels], where=labels >= 0)


def one_hot_weighted(logits, labels):
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, N))
    return jnp.sum(losses * (labels >= 0)) / jnp.sum(labels >= 0)


def zero_rows_counted(logits, labels):
    hot = jax.nn.one_hot(labels, N)  # a row of zeros adds nothing
    return -jnp.sum(hot * jax.nn.log_softmax(logits)) / jnp.sum(labels >= 0)


def zero_rows_of_padding(logits, labels):
    hot = jax.nn.one_hot(labels, N)
    return -jnp.sum(hot * jax.nn.log_softmax(logits)) / (6 - jnp.sum(labels == -1))


def zero_rows_by_mask(logits, labels):
    hot = jax.nn.one_hot(labels, N) * (labels != -100)[:, None]
    return -jnp.sum(hot * jax.nn.log_softmax(logits))


def remainder(logits, labels):
    return jnp.mean(jnp.take(logits[0], labels, mode="wrap"))


def clipped(logits, labels):
    rows = logits.at[jnp.arange(6), labels].get(mode="clip")
    return jnp.mean(jnp.take(logits[0], labels, mode="clip") + rows)


def filled(logits, labels):
    return jnp.mean(logits[0].at[labels].get(mode="fill", fill_value=0))


def dropped(logits, labels):
    sentinel = jnp.where(labels >= 0, labels, N)
    return jnp.zeros(N).at[sentinel].add(logits[:, 0], mode="drop")


def segments(logits, labels):
    return jax.ops.segment_sum(logits, labels, num_segments=5)


def last(logits, labels):
    return logits[-1] + logits[:, -2:].sum() + logits[jnp.array([0, -1])].sum()


def histogram(logits, labels):
    return (labels[:, None] == jnp.arange(N)).sum(0)


def attended(logits, labels):
    """Embeddings of padding are read, and no query sees them."""
    rows = jnp.concatenate([logits, logits])[:N][labels]
    scores = jnp.where((labels >= 0)[None], rows @ rows.T, -1e9)
    return jnp.sum((jax.nn.softmax(scores) @ rows) * (labels >= 0)[:, None])


def experts(logits, labels):
    """Tokens beyond the capacity of their expert have no row: GShard drops them so."""
    chosen = jax.nn.one_hot(jnp.argmax(logits, -1), N)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(-1).astype(int) - 1
    return jnp.sum(jax.nn.one_hot(place, 2)[..., None] * logits[:, None])


def searched(logits, labels):
    edges = jnp.sort(logits[0])
    return edges[jnp.searchsorted(edges, logits[:, 1] + 9)]


def neighbors(logits, labels):
    return jnp.sum(logits[jnp.arange(6) + 1] - logits)


def by_position(logits, labels):
    return logits[labels[2]]  # the last row, as in Python


def unread(logits, labels):
    indexed(logits, labels)
    return logits


CLEAN = [
    *(
        replaced,
        weighted,
        masked_sum,
        one_hot_weighted,
        zero_rows_counted,
        zero_rows_by_mask,
        zero_rows_of_padding,
    ),
    *(remainder, clipped, filled, dropped, segments, last, histogram, attended, experts),
    *(searched, neighbors, unread),
]


QUICK = (replaced, weighted, one_hot_weighted, zero_rows_by_mask, clipped, dropped, last, experts)


@pytest.mark.parametrize("labels", thorough_but(["-100", "-1"], "-1"))
@pytest.mark.parametrize(
    "fun", thorough_but(CLEAN, *QUICK, searched, unread), ids=lambda fun: fun.__name__
)
def test_masks_padding_and_modes_are_no_fault(fun, labels):
    labels = IGNORED if labels == "-100" else MINUS_ONE
    report = lint(fun, LOGITS, labels)
    assert RULE in report.ran and not report.findings, str(report)
    if jax.eval_shape(fun, LOGITS, labels).ndim == 0:
        assert not lint(fun, LOGITS, labels, argnums=0).findings


def test_a_select_after_the_lookup_is_no_fault_and_one_row_from_the_end_is_none():
    assert not lint(selected, LOGITS, MINUS_ONE, argnums=0).findings
    assert not lint(selected, LOGITS, IGNORED).findings
    assert not lint(by_position, LOGITS, MINUS_ONE).findings
    assert not lint(indexed, LOGITS, np.full(6, -1)).findings


def test_indices_of_a_whole_step_are_found_and_masked_ones_are_not():
    def loss(params, batch):
        return along(batch["x"] @ params["w"], batch["labels"])

    def masked(params, batch):
        return replaced(batch["x"] @ params["w"], batch["labels"])

    batch = {"x": np.ones((6, 4), np.float32), "labels": IGNORED}
    for fun, count in ((loss, 1), (masked, 0)):
        init, step = mpjax.build_train_step(fun, optax.sgd(0.1), "mixed_bfloat16")
        report = lint(jax.jit(step), init({"w": np.ones((4, N), np.float32)}), batch)
        assert len(report.findings) == count, str(report)
    assert "batch['labels']" not in str(report)


def test_labels_that_are_closed_over_are_found_where_they_make_nan():
    labels = jnp.asarray(IGNORED)
    (finding,) = lint(lambda logits: along(logits, labels), LOGITS).findings
    assert "Index -100 is out of range of 7 (an array it closes over; 2 of 6" in finding.message
    after = jnp.arange(6) + 1
    assert not lint(lambda logits: logits[after] - logits, LOGITS).findings, "it is clamped"


def test_indices_in_shard_map_are_found_and_masked_ones_are_not():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec, one = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
    for fun, count in ((along, 1), (selected, 0)):
        step = jax.shard_map(
            lambda *args, fun=fun: jax.lax.pmean(fun(*args), "data"),
            mesh=mesh,
            in_specs=spec,
            out_specs=one,
        )
        assert len(lint(step, LOGITS, IGNORED).findings) == count


def test_shapes_alone_and_effects_are_not_tried():
    report = lint(along, LOGITS, jax.ShapeDtypeStruct((6,), jnp.int32))
    assert RULE in report.not_run

    def printing(logits, labels):
        jax.debug.print("{}", labels[0])
        return along(logits, labels)

    assert not lint(printing, LOGITS, RIGHT).findings


CASES = {"labels": Pair(RULE, along, replaced, (LOGITS, IGNORED))}


def test_rule_finds_the_faulty_program_and_not_the_mended_one():
    pairs.check(CASES["labels"])
