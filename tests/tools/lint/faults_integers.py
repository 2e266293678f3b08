"""Public faults of integers: labels, ids and positions that pass through a 16-bit float."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from faults import BF16, F16, F32, Fault, labels, normal

CLASSES, FEW, ROWS, WIDTH = 1000, 200, 4, 8


def shapes(*each):
    """Returns arguments of which only shapes are known."""
    return lambda: tuple(jax.ShapeDtypeStruct(shape, dtype) for dtype, *shape in each)


def mixed_labels(images, targets):
    """The labels travel with the coefficients of a mixup, in the dtype of the images."""
    columns = jnp.stack([targets.astype(F32), jnp.full(len(targets), 0.5)], -1)
    columns = columns.astype(images.dtype)  # <- here: kornia#4657
    return images * columns[:, 1:], columns[:, 0].astype(jnp.int32)


def mixed_apart(images, targets):
    weights = jnp.full((len(targets), 1), 0.5).astype(images.dtype)
    return images * weights, targets


def accuracy(logits, targets):
    predicted = jnp.argmax(logits, -1).astype(logits.dtype)  # <- here: predicted classes
    return jnp.mean(predicted == targets.astype(logits.dtype))


def accuracy_of_integers(logits, targets):
    """The verdicts are cast, and not the classes."""
    return jnp.mean((jnp.argmax(logits, -1) == targets).astype(F32)).astype(logits.dtype)


def best(logits, table):
    _, ids = jax.lax.top_k(logits, 5)
    chosen = jnp.concatenate([ids.astype(BF16), logits[:, :1]], -1)  # <- here: tt-xla#3463
    return table[chosen[:, :5].astype(jnp.int32)]


def best_of_few(logits, table):
    """The same, over 200 classes: each of their numbers is exact."""
    _, ids = jax.lax.top_k(logits, 5)
    chosen = jnp.concatenate([ids.astype(BF16), logits[:, :1]], -1)
    return table[chosen[:, :5].astype(jnp.int32)]


def cross_entropy(logits, targets):
    """The batch was cast to bfloat16 as a whole, its labels included."""
    log_p = jax.nn.log_softmax(logits.astype(F32))
    targets = targets.astype(jnp.int32)[:, None]
    return -jnp.mean(jnp.take_along_axis(log_p, targets, -1))  # <- here: labels of a batch


def looked_up(table, ids):
    return table[ids.astype(jnp.int32)]  # <- here: tinygrad#9173


def sliced(cache, position):
    """Writes at a position that is an argument in float16."""
    at = position.astype(jnp.int32)
    row = jnp.ones((1, WIDTH), cache.dtype)
    return jax.lax.dynamic_update_slice_in_dim(cache, row, at, 0)  # <- here: cache positions


def counted(x, table):
    at = jnp.arange(len(table), dtype=x.dtype).astype(jnp.int32)  # <- here: bins
    return table[at]


def binned(x, table):
    """A table of a function, read at the bin of a 16-bit number: the number is what is rounded."""
    at = ((x + 1) * (len(table) / 2)).astype(jnp.int32)
    return table[jnp.clip(at, 0, len(table) - 1)]


class Embedded(nn.Module):
    @nn.compact
    def __call__(self, batch):
        batch = jax.tree.map(lambda x: x.astype(BF16), batch)  # <- here: ids of a float batch
        rows = nn.Embed(CLASSES, WIDTH, dtype=BF16)(batch["ids"].astype(jnp.int32))
        return jnp.mean(jnp.square(rows.astype(F32))) * jnp.mean(batch["weight"].astype(F32))


class EmbeddedWide(nn.Module):
    @nn.compact
    def __call__(self, batch):
        rows = nn.Embed(CLASSES, WIDTH, dtype=BF16)(batch["ids"].astype(jnp.int32))
        return jnp.mean(jnp.square(rows.astype(F32))) * jnp.mean(batch["weight"])


def of_module(module):
    def step(params, batch):
        return jax.grad(lambda p: module.apply(p, batch))(params)

    return step


def float_batch():
    batch = {"ids": jnp.array([3.0, 257.0, 999.0]), "weight": jnp.array([0.3, 0.7, 0.9])}
    return EmbeddedWide().init(jax.random.key(0), batch), batch


def shifted(offset, table):
    """The sum of two exact positions is not exact."""
    positions = offset.astype(BF16) + jnp.arange(4, dtype=BF16)  # <- here: positions of a cache
    return table[positions.astype(jnp.int32)]


def shifted_integers(offset, table):
    return table[offset + jnp.arange(4)]


def timesteps(key, x):
    t = jax.random.randint(key, (len(x),), 0, 1000)
    return x * t.astype(x.dtype)[:, None]  # <- here: mold#786


def fractions(key, x):
    """The quotient is rounded, not the integer."""
    t = jax.random.randint(key, (len(x),), 0, 1000)
    return x * (t / 1000).astype(x.dtype)[:, None]


def ranked(scores):
    ranks = jnp.argsort(jnp.argsort(scores))
    return ranks.astype(F16)  # <- here: ranks


def ranked_wide(scores):
    ranks = jnp.argsort(jnp.argsort(scores))
    return (ranks / len(scores)).astype(F16)


def in_groups(ids, x):
    """Each group of a vmap compares its ids in bfloat16."""

    def one(ids, x):
        same = ids.astype(BF16)[:, None] == ids.astype(BF16)[None, :]  # <- here: segment ids
        return same.astype(x.dtype) @ x

    return jax.vmap(jax.jit(one))(ids, x)


def in_groups_exactly(ids, x):
    return jax.vmap(lambda ids, x: (ids[:, None] == ids[None, :]).astype(x.dtype) @ x)(ids, x)


FAULTS = (
    Fault(
        "kornia#4657",
        "kornia/kornia/issues/4657",
        "Labels above 256 are cast to the bfloat16 of the images, by way of float32.",
        "rounded-integer",
        mixed_labels,
        mixed_apart,
        lambda: (normal(3, WIDTH, dtype=BF16), jnp.array([257, 999, 4])),
    ),
    Fault(
        "predicted classes",
        "",
        "Classes are compared in the dtype of the logits.",
        "half-count",
        accuracy,
        accuracy_of_integers,
        shapes((BF16, ROWS, CLASSES), (jnp.int32, ROWS)),
    ),
    Fault(
        "tt-xla#3463",
        "tenstorrent/tt-xla/issues/3463",
        "The ids of the best tokens are joined with their logits, in bfloat16.",
        "half-count",
        best,
        best_of_few,
        lambda: (normal(ROWS, CLASSES, dtype=BF16), normal(CLASSES, WIDTH)),
        lambda: (normal(ROWS, FEW, dtype=BF16), normal(FEW, WIDTH)),
    ),
    Fault(
        "labels of a batch",
        "",
        "Labels are an argument in bfloat16, which cannot name each of 1000 classes.",
        "half-count",
        cross_entropy,
        cross_entropy,
        shapes((BF16, ROWS, CLASSES), (BF16, ROWS)),
        shapes((BF16, ROWS, FEW), (BF16, ROWS)),
    ),
    Fault(
        "tinygrad#9173",
        "tinygrad/tinygrad/pull/9173",
        "Token ids are passed as floats, here in float16.",
        "half-count",
        looked_up,
        looked_up,
        lambda: (normal(4096, WIDTH), jnp.array([3, 7], F16)),
        lambda: (normal(2048, WIDTH), jnp.array([3, 7], F16)),
    ),
    Fault(
        "cache positions",
        "",
        "A cache of 8192 rows is written at a position in float16.",
        "half-count",
        sliced,
        sliced,
        shapes((BF16, 8192, WIDTH), (F16,)),
        shapes((BF16, 1024, WIDTH), (F16,)),
    ),
    Fault(
        "bins",
        "",
        "Bins are counted in bfloat16, of a table that is longer than it can count.",
        "half-count",
        counted,
        binned,
        lambda: (normal(9, dtype=BF16, scale=0.3), normal(512)),
    ),
    Fault(
        "ids of a float batch",
        "",
        "A float32 batch is cast to bfloat16 as a whole, and its ids become integers again.",
        "rounded-integer",
        of_module(Embedded()),
        of_module(EmbeddedWide()),
        float_batch,
    ),
    Fault(
        "positions of a cache",
        "",
        "An offset and an index, both exact in bfloat16, are added in bfloat16.",
        "rounded-integer",
        shifted,
        shifted_integers,
        lambda: (jnp.int32(254), normal(CLASSES, WIDTH)),
    ),
    Fault(
        "mold#786",
        "utensils/mold/issues/786",
        "Integer timesteps below 1000 are cast to the bfloat16 of the model.",
        "half-count",
        timesteps,
        fractions,
        lambda: (jax.random.key(0), normal(3, WIDTH, dtype=BF16)),
    ),
    Fault(
        "ranks",
        "",
        "The ranks of 5000 scores are returned in float16.",
        "half-count",
        ranked,
        ranked_wide,
        shapes((F32, 5000)),
    ),
    Fault(
        "segment ids",
        "",
        "Ids of packed documents are compared after a cast to bfloat16.",
        "rounded-integer",
        in_groups,
        in_groups_exactly,
        lambda: (300 + labels(8, 3).reshape(2, 4), normal(2, 4, WIDTH, dtype=BF16)),
    ),
)
