"""Programs that compute again in their backward pass, correct ones and those with a fault.

The correct ones replace non-finite entries of activations, as softplus and logaddexp do; nothing of
a gradient is hidden. The faulty ones do the same with a gradient, at the line marked ``# fault``.
"""

import functools

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

import mpjax

W = jnp.full((4, 4), 0.3, jnp.float32)
X = jnp.full((2, 4), 0.5, jnp.float32)
POLICIES = jax.checkpoint_policies


def guarded(h):
    """Returns activations without what is not finite, by jnp.where."""
    return jnp.where(jnp.isfinite(h), h, 0.0)


ACTIVATIONS = {
    "softplus": jax.nn.softplus,
    "logaddexp": lambda h: jnp.logaddexp(h, 0.5),
    "logsumexp": lambda h: h - jax.nn.logsumexp(h, axis=-1, keepdims=True),
    "log_sigmoid": jax.nn.log_sigmoid,
    "mish": jax.nn.mish,
    "sigmoid_cross_entropy": lambda h: optax.sigmoid_binary_cross_entropy(h, jnp.ones_like(h)),
    "nan_to_num": lambda h: jnp.nan_to_num(h) ** 2,
    "where": lambda h: jnp.sin(guarded(h)),
    "masked_softmax": lambda h: jax.nn.softmax(jnp.where(h > 0, h, -jnp.inf)),
    "logcumsumexp": lambda h: jax.lax.cumlogsumexp(guarded(h), axis=1),
}


@jax.custom_vjp
def ruled(x, w):
    """Computes with a rule that stores its arguments, and computes the rest again."""
    return jnp.mean(jnp.tanh(guarded(x @ w)))


def _ruled_back(stored, cotangent):
    x, w = stored
    hidden = jnp.tanh(guarded(x @ w))
    inner = cotangent * (1.0 - hidden**2) / (jnp.ones_like(hidden).sum())
    return inner @ w.T, x.T @ inner


ruled.defvjp(lambda x, w: (ruled(x, w), (x, w)), _ruled_back)


def layers(act, wrap):
    def loss(w, x):
        layer = wrap(lambda h: act(h @ w))
        return jnp.mean(layer(layer(x)) ** 2)

    return loss


def scanned(act, wrap):
    def loss(w, x):
        layer = wrap(lambda h: (act(h @ w), None))
        return jnp.mean(jax.lax.scan(lambda h, _: layer(h), x, None, length=3)[0] ** 2)

    return loss


def carried(w, x):
    """Keeps a state that a barrier of the planner passes on together with its cotangent."""
    step = jax.checkpoint(lambda c, row: (jnp.logaddexp(c, jnp.roll(c, 1)) + row, None))
    rows = jax.nn.log_softmax(jnp.tanh(x @ w))
    return -jnp.mean(jax.lax.scan(step, jnp.zeros(x.shape[-1:]), rows)[0])


def eqx_scanned(w, x):
    step = lambda h, _: (jax.nn.softplus(guarded(h @ w)), None)  # noqa: E731
    return jnp.mean(eqxi.scan(step, x, jnp.arange(4), kind="checkpointed", checkpoints=2)[0])


def eqx_looped(w, x):
    turn = lambda c: (c[0] + 1, jax.nn.softplus(guarded(c[1] @ w)))  # noqa: E731
    going = lambda c: c[0] < 3  # noqa: E731
    return jnp.mean(eqxi.while_loop(going, turn, (0, x), max_steps=4, kind="checkpointed")[1])


def ruled_and_more(w, x):
    return ruled(x, w) + 0.1 * jnp.sum(w**2)


def ruled_inside(w, x):
    return jnp.mean(jax.vmap(ruled, (0, None))(x[:, None], w) ** 2)


def branched(w, x):
    act = jax.checkpoint(lambda h: jax.nn.softplus(guarded(h)))
    return jnp.mean(jax.lax.cond(x.sum() > 0, act, jnp.tanh, x @ w))


def mapped(w, x):
    mesh = Mesh(jax.devices()[:1], "d")
    spec = PartitionSpec("d")
    layer = jax.checkpoint(lambda x, w: jax.nn.softplus(guarded(x @ w)))
    run = jax.shard_map(layer, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    return jnp.mean(run(x, w))


saving = functools.partial(jax.checkpoint, policy=POLICIES.save_only_these_names("kept"))
dots = functools.partial(jax.checkpoint, policy=POLICIES.dots_with_no_batch_dims_saveable)
LOSSES = {
    **{name: layers(act, jax.checkpoint) for name, act in ACTIVATIONS.items()},
    "named": layers(lambda h: jax.nn.softplus(guarded(checkpoint_name(h, "kept"))), saving),
    "dots": layers(lambda h: jax.nn.softplus(guarded(h)), dots),
    "nested": layers(jax.nn.softplus, lambda f: jax.checkpoint(lambda x: jax.checkpoint(f)(f(x)))),
    "whole": jax.checkpoint(layers(guarded, lambda f: f)),
    "scan": scanned(lambda h: jax.nn.softplus(guarded(h)), jax.checkpoint),
    "scan_of_jit": scanned(jax.jit(jax.nn.mish), lambda f: jax.checkpoint(jax.jit(f))),
    "eqx_scan": eqx_scanned,
    "eqx_loop": eqx_looped,
    "rule_at_the_end": lambda w, x: ruled(x, w),
    "rule_and_more": ruled_and_more,
    "rule_inside": ruled_inside,
    "cond": branched,
    "shard_map": mapped,
}
BUILT = {
    "lean": (layers(jax.nn.softplus, lambda f: f), "mixed_bfloat16,storage=lean"),
    "half": (layers(jax.nn.softplus, lambda f: f), "mixed_bfloat16,storage=0.5"),
    "8bit": (layers(jax.nn.mish, lambda f: f), "mixed_bfloat16,storage=8bit"),
    "lean_scan": (scanned(jax.nn.softplus, lambda f: f), "mixed_bfloat16,storage=lean"),
    "lean_carry": (carried, "mixed_bfloat16,storage=lean"),
    "float16_remat": (layers(jax.nn.softplus, jax.checkpoint), "mixed_float16"),
    "lean_rule": (ruled_and_more, "mixed_bfloat16,storage=lean"),
}


def step_of(loss):
    """Returns a step of plain gradient descent, with the value of the loss."""

    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * gradient, value

    return step


def alone(loss):
    """Returns a step that returns no loss, so that its forward pass is cut."""
    return jax.jit(lambda w, x: w - 0.1 * jax.grad(jax.jit(loss))(w, x))


def built(loss, policy):
    init, step = mpjax.build_train_step(loss, optax.sgd(0.1), policy)
    return step, init(W)


# ---- faults --------------------------------------------------------------------------------------

base = LOSSES["softplus"]


def numbered(w, x):
    return w - 0.1 * jnp.nan_to_num(jax.grad(base)(w, x))  # fault


def asked(w, x):
    g = jax.grad(base)(w, x)
    g = jnp.where(jnp.isfinite(g), g, 0.0)  # fault
    return w - 0.1 * g


def of_a_loop(w, x):
    g = jax.grad(LOSSES["scan"])(w, x)
    return w - 0.1 * jnp.where(jnp.isnan(g), 0.0, g)  # fault


def of_equinox(w, x):
    g = jax.grad(eqx_looped)(w, x)
    return w - 0.1 * jnp.nan_to_num(g)  # fault


def of_a_rule(w, x):
    g = jax.grad(LOSSES["rule_at_the_end"])(w, x)
    return w - 0.1 * jnp.nan_to_num(g)  # fault


@jax.custom_vjp
def hiding(x):
    return x


def _hiding_back(_, g):
    return (jnp.where(jnp.isfinite(g), g, 0.0),)


hiding.defvjp(lambda x: (x, None), _hiding_back)


def of_a_cotangent(w, x):
    loss = lambda w: jnp.mean(jax.nn.softplus(hiding(x @ w)) ** 2)  # noqa: E731  # fault
    return w - 0.1 * jax.grad(jax.checkpoint(loss))(w)


def of_a_pullback(w, x, cotangent):
    _, pull = jax.vjp(jax.checkpoint(lambda w: jax.nn.softplus(x @ w)), w)
    return w - 0.1 * jnp.nan_to_num(pull(cotangent)[0])  # fault


def of_a_scaled_pullback(w, x, scale):
    value, pull = jax.vjp(lambda w: base(w, x), w)
    (g,) = pull(scale)
    return w - 0.1 * jnp.nan_to_num(g / scale), value  # fault


def scaled_late(w, x):
    half = lambda w: base(w, x.astype(jnp.float16)).astype(jnp.float32)  # noqa: E731
    g = jax.grad(half)(w.astype(jnp.float16))
    g = g * jnp.float16(1024.0)  # fault
    return w - 0.1 * g.astype(jnp.float32) / 1024.0


def over_devices(w, x):
    mesh, spec = Mesh(jax.devices()[:1], "d"), PartitionSpec()

    def local(w, x):
        g = jax.lax.pmean(jax.grad(base)(w, x), "d")
        return w - 0.1 * jnp.nan_to_num(g)  # fault

    where = {"in_specs": (spec, PartitionSpec("d")), "out_specs": spec}
    return jax.shard_map(local, mesh=mesh, check_vma=False, **where)(w, x)


FAULTS = {
    **{f.__name__: (f, (W, X)) for f in (numbered, asked, of_a_loop, of_equinox, of_a_rule)},
    "of_a_cotangent": (of_a_cotangent, (W, X)),
    "of_a_pullback": (of_a_pullback, (W, X, X)),
    "of_a_scaled_pullback": (of_a_scaled_pullback, (W, X, jnp.float32(1024.0))),
    "scaled_late": (scaled_late, (W, X)),
    "over_devices": (over_devices, (W, X)),
}
