"""Golden programs for what no other golden program has.

`CONSTRUCTS` has a program for each part of a plan. `SPELLINGS`, `ATTENTIONS` and `LOSSES` have the
ways in which other tests write softmaxes, sums of exponentials, norms, regions and kernels; of
attention that a kernel replaces, or nearly; and of losses whose logits are chunked. Each is a name,
a function and its arguments.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from programs import W, X
from support import normal

TESTS = Path(__file__).parents[2]
sys.path += [str(TESTS / folder) for folder in ("core/planner", "replacements")]

import test_again  # noqa: E402
import test_communication  # noqa: E402
import test_cross_entropies  # noqa: E402
import test_fusion  # noqa: E402
import test_kernels  # noqa: E402
import test_linear_recurrences  # noqa: E402
import test_norms  # noqa: E402
import test_regions  # noqa: E402
import test_repetitions  # noqa: E402
import test_rewrites  # noqa: E402
import test_softmax_spellings  # noqa: E402
import test_sound_softmax  # noqa: E402


def dropped(w, q):
    """Attention with dropout of its weights."""
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, (test_fusion.T,) * 2)
    heads = q @ w, jnp.tanh(q) @ w, jnp.cos(q) @ w
    out = test_fusion.attend(*heads, weights=lambda p: jnp.where(keep, p / 0.9, 0.0))
    return jnp.mean(jnp.sin(out))


def counted(w, x):
    """A while loop has no backward pass of its own, so it stands beside what is differentiated."""
    start, turn = jax.lax.stop_gradient((x @ w, w))
    _, shrunk = jax.lax.while_loop(
        lambda carry: carry[0] < 5,
        lambda carry: (carry[0] + 1, 0.5 * jnp.tanh(carry[1] @ turn)),
        (0, start),
    )
    return jnp.sum((x + shrunk) @ w)


def decided(w, x):
    """A while loop that a matmul ends: it stays as it is written."""
    start, turn = jax.lax.stop_gradient((x @ w, w))
    shrunk = jax.lax.while_loop(
        lambda h: jnp.sum(h**2) > 1, lambda h: 0.5 * jnp.tanh(h @ turn), start
    )
    return jnp.sum((x + shrunk) @ w)


def moved(params, x):
    """A parameter that devices exchange before it is read."""
    return test_communication.moving(params, x, test_communication.constrains)


@jax.custom_batching.custom_vmap
def batched(x, w):
    return jnp.tanh(x @ w)


@batched.def_vmap
def rule(size, of, x, w):
    return jnp.sin(x @ w), True


def with_a_rule_for_vmap(w, x):
    return jnp.sum(batched(x, jax.lax.stop_gradient(w)) @ w)


def with_a_transpose(w, x):
    def linear(w, x):
        return x @ w

    def transpose(w, ct):
        return ct @ w.T

    moving = jnp.tanh(x @ w)
    return jnp.sum(jax.custom_derivatives.linear_call(linear, transpose, W, moving) @ w)


def fused(w, q):
    """Attention in the kernel that a GPU has for it."""
    return jnp.mean(jnp.sin(test_fusion.nanogpt(q @ w)))


def picked(w, x):
    """A loss that picks an entry of each row."""
    indices = jnp.arange(len(x))[:, None] % w.shape[1]
    return -jnp.mean(jnp.take_along_axis(jnp.sin(x @ w), indices, -1) ** 2)


def routed(w, x):
    """A matmul whose few columns are ranked."""
    best, _ = jax.lax.top_k(jax.nn.softmax(x @ w[:, :4]), 2)
    return jnp.sum(jnp.tanh(x @ w) * best.sum())


def short(w, x):
    """Sums of two products, which are no matmul for matrix units."""
    return jnp.sum(jnp.tanh(x[:, :2] @ w[:2]) @ w)


def weighed_again(k, q):
    """A softmax whose weights a checkpoint computes again."""
    return jnp.sum(jnp.tanh(test_rewrites.AGAIN["alone"](q, k)) ** 2)


CONSTRUCTS = {
    "tail": (
        test_norms.loss_of(test_norms.NORMS["batch"], jax.nn.silu),
        (test_norms.P, test_norms.X),
    ),
    "again": (test_again.squeezed, (test_again.P, test_again.X)),
    "dropout on weights": (dropped, (W, test_fusion.Q)),
    "repeating gather": (
        test_repetitions.loss_of(test_repetitions.REPEATED["taken"]),
        (test_repetitions.W, test_repetitions.X),
    ),
    "sent parameter": (test_communication.looked_up, test_communication.tables()),
    "moved parameter": (moved, test_communication.inputs()),
    "parameter moved in float32": (moved, test_communication.inputs()),
    "gradient reduced in half": (test_communication.plain, test_communication.inputs()),
    "overrides": (test_communication.heads, test_communication.inputs()),
    "rule for vmap": (with_a_rule_for_vmap, (W, X)),
    "rule for the transpose": (with_a_transpose, (W, X)),
    "while loop": (counted, (W, X)),
    "while loop that a matmul ends": (decided, (W, X)),
    "fused kernel": (fused, (W, test_fusion.Q)),
    "picked entries": (picked, (W, X)),
    "router": (routed, (normal(3, 64, 64), normal(4, 8, 64))),
    "short products": (short, (W, X)),
    "weights of a checkpoint": (weighed_again, (test_rewrites.K, test_rewrites.Q)),
    "linear recurrence": (
        test_linear_recurrences.of(test_linear_recurrences.STATES["first axis"]),
        (test_linear_recurrences.V, test_linear_recurrences.X),
    ),
}
# What a policy needs besides, for the construct to be there.
SETTINGS = {
    "construct overrides": ',overrides={"*up": "f32"},half_ops=["tanh"],full_ops=["add"]',
    "construct parameter moved in float32": ",gather=float32",
    "construct gradient reduced in half": ",reduce=half",
    "construct fused kernel": ",fused_attention=true",
}

NORMED = {
    f"{norm} norm, {name}": test_norms.loss_of(normed, activation)
    for norm, normed in test_norms.NORMS.items()
    for name, activation in test_norms.ACTIVATIONS.items()
}
HEADS = test_softmax_spellings
# Sums of exponentials of many words.
ROWS, WORDS = 4, 1100
LABELS = jnp.asarray([0, 5, WORDS - 1, -1])
SUMS = {
    "logsumexp": lambda s: jax.nn.logsumexp(s, -1),
    "over columns": lambda s: jax.nn.logsumexp(s.T, 0),
    "over two axes": lambda s: jax.nn.logsumexp(s.reshape(2, 2, WORDS), (0, 2)),
    "log_softmax": lambda s: jnp.sin(jax.nn.log_softmax(s)),
    "cross entropy": lambda s: optax.softmax_cross_entropy_with_integer_labels(s, LABELS),
    "a loss of the sum too": lambda s: jnp.square(jax.nn.logsumexp(s, -1)) + jnp.sum(s, -1),
    "tanh before": lambda s: jax.nn.logsumexp(30 * jnp.tanh(s / 30), -1),
    "no shift": lambda s: jnp.log(jnp.sum(jnp.exp(s), -1)),
}
HIDDEN, TABLE = normal(0, ROWS, 8), normal(1, 8, WORDS)


def of_logits(fun):
    return lambda hidden, table: fun(hidden @ table)


def weighed(fun):
    """Returns a scalar of what a function gives."""

    def total(y):
        return jnp.sum(jnp.cos(jnp.arange(1.0, 1 + y.size)) * y.ravel())

    return lambda *args: sum(map(total, jax.tree.leaves(fun(*args))))


SOFTMAXES = {name: fun for name, (fun, _) in test_sound_softmax.SPELLINGS.items()}
QKV = test_sound_softmax.Q, test_sound_softmax.K, test_sound_softmax.V
ATTENTIONS = {
    **{name: (fun, (x,)) for name, (fun, x, _) in test_fusion.SPELLINGS.items()},
    **{f"not {k}": (fun, (test_fusion.Q,)) for k, (fun, _) in test_fusion.NEAR_MISSES.items()},
}
SPELLINGS = {
    **{f"softmax {k}": (test_sound_softmax.attention(f), QKV) for k, f in SOFTMAXES.items()},
    **{f"heads {k}": (HEADS.of_heads(k), (HEADS.S4, HEADS.V4)) for k in HEADS.HEADS},
    **{f"sum {name}": (of_logits(fun), (HIDDEN, TABLE)) for name, fun in SUMS.items()},
    **{name: (loss, (test_norms.P, test_norms.X)) for name, loss in NORMED.items()},
    **{f"region {name}": (fun, (W, X)) for name, fun in test_regions.AROUND.items()},
    **{f"kernel {name}": (fun, (X, W)) for name, fun in test_kernels.AROUND.items()},
}
SPELLINGS, ATTENTIONS = (
    {name: (weighed(fun), args) for name, (fun, args) in table.items()}
    for table in (SPELLINGS, ATTENTIONS)
)
HEAD = test_cross_entropies.HIDDEN, test_cross_entropies.WEIGHT, test_cross_entropies.BIAS
LOSSES = {
    name: (fun, HEAD)
    for name, fun in {**test_cross_entropies.SUMS, **test_cross_entropies.EACH}.items()
    if name != "one-hot"  # it holds labels of the seed of the run
}
SETTINGS |= {f"attention {k}": ",fused_attention=true" for k in ATTENTIONS}
SETTINGS |= {f"loss {k}": ",chunked_loss=true" for k in LOSSES}
