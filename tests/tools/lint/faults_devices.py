"""Public faults of what devices send each other: what the partitioner makes of a program."""

import jax
import jax.numpy as jnp
from faults import BF16, F32, Fault
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, WIDTH = 64, 32


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def spread(*shape, dtype=F32, over=()):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), P(*over)))


def everywhere():
    return NamedSharding(mesh(), P())


# ---- jax#27496: the partitioner sums gradients over devices where they are made ------------------


def data_parallel(w, x):
    def loss(w):
        out = x @ w  # <- here: jax#27496
        return jnp.mean(jnp.square(out.astype(F32)))

    return jax.grad(loss)(w.astype(BF16)).astype(F32)


def data_parallel_wide(w, x):
    def loss(w):
        # What devices add up is the matmul's float32 result.
        rows = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
        out = jax.lax.dot(x, w, precision=rows, preferred_element_type=F32)
        return jnp.mean(jnp.square(out))

    return jax.grad(loss)(w)


# ---- jax#23543, maxtext#1350: what is gathered is twice as wide as what is read ------------------


def rotated(x):
    wide = x.astype(F32)
    turned = (wide * jnp.cos(wide)).astype(BF16)  # <- here: jax#23543
    return jax.lax.with_sharding_constraint(turned, everywhere())


def rotated_behind_barrier(x):
    wide = x.astype(F32)
    turned = jax.lax.optimization_barrier((wide * jnp.cos(wide)).astype(BF16))
    return jax.lax.with_sharding_constraint(turned, everywhere())


def gathered_then_cast(w, x):
    whole = jax.lax.with_sharding_constraint(w, everywhere())  # <- here: maxtext#1350
    return x @ whole.astype(BF16)


def cast_then_gathered(w, x):
    whole = jax.lax.with_sharding_constraint(w.astype(BF16), everywhere())
    return x @ whole


FAULTS = (
    Fault(
        "jax#27496",
        "jax-ml/jax/issues/27496",
        "Gradients of a data-parallel step are summed over devices in bfloat16, and only then cast"
        " to float32.",
        "half-all-reduce",
        data_parallel,
        data_parallel_wide,
        lambda: (spread(WIDTH, WIDTH), spread(ROWS, WIDTH, dtype=BF16, over=("data",))),
        target="cpu",
    ),
    Fault(
        "jax#23543",
        "jax-ml/jax/issues/23543",
        "A program casts to bfloat16 before a gather. XLA moves the cast behind the gather, which "
        "then sends float32.",
        "wide-all-gather",
        rotated,
        rotated_behind_barrier,
        lambda: (spread(ROWS, WIDTH, dtype=BF16, over=("data",)),),
        target="cpu",
    ),
    Fault(
        "maxtext#1350",
        "AI-Hypercomputer/maxtext/pull/1350",
        "Weights are gathered in float32 and then cast to bfloat16: twice the bytes, and a float32"
        " copy of every weight.",
        "gather-before-cast",
        gathered_then_cast,
        cast_then_gathered,
        lambda: (
            spread(WIDTH, WIDTH, over=("data",)),
            spread(ROWS, WIDTH, dtype=BF16, over=("data",)),
        ),
    ),
)
