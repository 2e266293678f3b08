"""Training loops as libraries publish them run unchanged as if `autocast` stood in their place."""

import contextlib
import re

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state

import mpjax
import mpjax.scripts

RNG = np.random.default_rng(0)
KEY = jax.random.key(0)
IMAGES = jnp.asarray(RNG.standard_normal((4, 8, 8, 1)), jnp.float32)
ROWS = jnp.asarray(RNG.standard_normal((4, 8)), jnp.float32)
TOKENS = jnp.asarray(RNG.integers(0, 16, (4, 6)))
LABELS = jnp.asarray(RNG.integers(0, 10, 4))
POLICY = "mixed_bfloat16"


def xent(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# Each returns a pure step of a state, which gives the next state and a loss, and the first state.


def flax_mnist():
    class CNN(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.linear = nnx.Linear(64, 10, rngs=rngs)

        def __call__(self, x):
            x = nnx.avg_pool(nnx.relu(self.norm(self.dropout(self.conv(x)))), (2, 2), (2, 2))
            return self.linear(x.reshape(x.shape[0], -1))

    def loss_fn(model):
        logits = model(IMAGES)
        return xent(logits, LABELS), logits

    model = CNN(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, 0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    graph, state = nnx.split((model, optimizer, metrics))

    def step(state):
        model, optimizer, metrics = nnx.merge(graph, state)
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        metrics.update(loss=loss, logits=logits, labels=LABELS)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer, metrics)), metrics.compute()["loss"]

    return step, state


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        hidden = nn.relu(nn.Dense(16)(x))
        mean, logvar = nn.Dense(4)(hidden), nn.Dense(4)(hidden)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
        return nn.Dense(8)(nn.relu(nn.Dense(16)(z))), mean, logvar


def flax_vae():
    def step(state):
        state, key = state
        key, z_key = jax.random.split(key)

        def loss_fn(params):
            logits, mean, logvar = state.apply_fn({"params": params}, ROWS, z_key)
            wrong = -jnp.sum(nn.log_sigmoid(logits) * (ROWS > 0), -1).mean()
            return wrong - 0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), -1).mean()

        grads = jax.grad(loss_fn)(state.params)
        return (state.apply_gradients(grads=grads), key), loss_fn(state.params)

    model = VAE()
    params = model.init(KEY, ROWS, KEY)["params"]
    tx = optax.adam(1e-3)
    return step, (train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx), KEY)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            y = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(4, (3, 3))(x)))
            x = x + nn.BatchNorm(use_running_average=False)(nn.Conv(4, (3, 3))(y))
        return nn.Dense(10)(x.mean((1, 2)))


def flax_imagenet():
    model = ResNet()
    variables = model.init(KEY, IMAGES)
    tx = optax.sgd(0.1, nesterov=True, momentum=0.9)

    def step(state):
        params, stats, opt_state = state

        def loss_fn(params):
            logits, new = model.apply(
                {"params": params, "batch_stats": stats}, IMAGES, mutable=["batch_stats"]
            )
            penalty = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
            return xent(logits, LABELS) + 1e-4 * 0.5 * penalty, (new["batch_stats"], logits)

        aux, grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        loss, (stats, _) = aux
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state), loss

    return step, (variables["params"], variables["batch_stats"], tx.init(variables["params"]))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        heads = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False)
        x = x + heads(nn.LayerNorm()(x), mask=mask)
        hidden = nn.Dropout(0.1, deterministic=False)(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
        return x + nn.Dense(8)(hidden)


class LM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8)(tokens)
        for _ in range(2):
            x = nn.remat(Block)()(x, nn.make_causal_mask(tokens))
        return nn.Dense(16)(nn.LayerNorm()(x))


def flax_lm1b():
    model, tx = LM(), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.01, 2, 10))

    def step(state):
        params, opt_state, key = state
        key, dropout = jax.random.split(key)

        def loss_fn(params):
            logits = model.apply({"params": params}, TOKENS, rngs={"dropout": dropout})
            return xent(logits[:, :-1], TOKENS[:, 1:]), logits

        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), loss

    params = model.init({"params": KEY, "dropout": KEY}, TOKENS)["params"]
    return step, (params, tx.init(params), KEY)


class Seq2seq(nn.Module):
    @nn.compact
    def __call__(self, x):
        carry, _ = nn.RNN(nn.OptimizedLSTMCell(8), return_carry=True)(x)
        return nn.Dense(16)(nn.RNN(nn.OptimizedLSTMCell(8))(x, initial_carry=carry))


def flax_seq2seq():
    model, tx = Seq2seq(), optax.adam(3e-3)
    hot = jax.nn.one_hot(TOKENS, 16)

    def step(state):
        params, opt_state = state
        lost = lambda p: xent(model.apply(p, hot)[:, :-1], TOKENS[:, 1:])  # noqa: E731
        loss, grads = jax.value_and_grad(lost)(params)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = model.init(KEY, hot)
    return step, (params, tx.init(params))


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __call__(self, xs):
        hidden = jnp.zeros(self.cell.hidden_size)
        out, _ = jax.lax.scan(lambda carry, x: (self.cell(x, carry), None), hidden, xs)
        return jax.nn.sigmoid(self.linear(out))


def of_module(model, compute_loss, tx):
    """Returns a step of an Equinox module, in an Equinox `jit`, with its arrays as the state."""
    arrays, static = eqx.partition(model, eqx.is_array)

    @eqx.filter_jit
    def make_step(model, opt_state):
        loss, grads = compute_loss(model)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    def step(state):
        arrays, opt_state = state
        model, opt_state, loss = make_step(eqx.combine(arrays, static), opt_state)
        return (eqx.filter(model, eqx.is_array), opt_state), loss

    return step, (arrays, tx.init(eqx.filter(model, eqx.is_inexact_array)))


def equinox_rnn():
    model = RNN(eqx.nn.GRUCell(2, 8, key=KEY), eqx.nn.Linear(8, 1, key=KEY))
    xs, ys = ROWS.reshape(4, 4, 2), jnp.arange(4.0) % 2

    @eqx.filter_value_and_grad
    def compute_loss(model):
        pred = jax.vmap(model)(xs)[:, 0]
        return -jnp.mean(ys * jnp.log(pred) + (1 - ys) * jnp.log(1 - pred))

    return of_module(model, compute_loss, optax.adam(3e-3))


def equinox_frozen_layer():
    model = eqx.nn.MLP(8, 1, 8, 2, key=KEY)
    wanted = jax.tree.map(lambda _: False, model)
    wanted = eqx.tree_at(
        lambda t: (t.layers[-1].weight, t.layers[-1].bias), wanted, replace=(True, True)
    )

    def compute_loss(model):
        @eqx.filter_value_and_grad
        def loss(diff, static):
            return jnp.mean(jax.vmap(eqx.combine(diff, static))(ROWS) ** 2)

        return loss(*eqx.partition(model, wanted))

    return of_module(model, compute_loss, optax.sgd(3e-3))


def equinox_stateful():
    model, state = eqx.nn.make_with_state(
        lambda: eqx.nn.Sequential(
            [
                eqx.nn.Linear(8, 8, key=KEY),
                eqx.nn.BatchNorm(8, "batch", mode="batch"),
                eqx.nn.Linear(8, 1, key=KEY),
            ]
        )
    )()
    tx = optax.adam(5e-2)
    arrays, static = eqx.partition((model, state), eqx.is_array)

    @eqx.filter_value_and_grad(has_aux=True)
    def compute_loss(model, state):
        mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        pred, state = mapped(ROWS, state)
        return jnp.mean((pred - 1) ** 2), state

    def step(carry):
        arrays, opt_state = carry
        model, state = eqx.combine(arrays, static)
        (loss, state), grads = compute_loss(model, state)
        updates, opt_state = tx.update(grads, opt_state)
        model = eqx.apply_updates(model, updates)
        return (eqx.filter((model, state), eqx.is_array), opt_state), loss

    return step, (arrays, tx.init(eqx.filter(model, eqx.is_inexact_array)))


def classified(w, x):
    return xent(jnp.tanh(x) @ w, LABELS)


def optax_adversarial():
    tx = optax.adam(1e-2)

    def step(state):
        w, opt_state = state
        attack = jax.grad(classified, argnums=1)(w, ROWS)
        loss, grads = jax.value_and_grad(classified)(w, ROWS + 0.1 * jnp.sign(attack))
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(w, updates), opt_state), loss

    w = jnp.ones((8, 10)) * ROWS[0, 0]
    return step, (w, tx.init(w))


def optax_meta_learning():
    tx = optax.adam(1e-2)

    def step(state):
        w, opt_state = state

        def meta_loss(w):
            inner = jax.grad(classified)(w, ROWS)
            return classified(w - 0.1 * inner, ROWS[::-1])

        loss, grads = jax.value_and_grad(meta_loss)(w)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(w, updates), opt_state), loss

    w = jnp.ones((8, 10)) * ROWS[0, 0]
    return step, (w, tx.init(w))


def optax_lbfgs():
    tx = optax.lbfgs()
    fun = lambda w: classified(w, ROWS)  # noqa: E731

    def step(state):
        w, opt_state = state
        value, grad = optax.value_and_grad_from_state(fun)(w, state=opt_state)
        updates, opt_state = tx.update(grad, opt_state, w, value=value, grad=grad, value_fn=fun)
        return (optax.apply_updates(w, updates), opt_state), value

    w = jnp.ones((8, 10)) * ROWS[0, 0]
    return step, (w, tx.init(w))


def optax_sam():
    tx = optax.contrib.sam(
        optax.sgd(1e-2), optax.chain(optax.contrib.normalize(), optax.sgd(1e-2)), opaque_mode=True
    )

    def step(state):
        w, opt_state = state
        loss, grads = jax.value_and_grad(classified)(w, ROWS)
        again = jax.grad(lambda w, _: classified(w, ROWS))
        updates, opt_state = tx.update(grads, opt_state, w, grad_fn=again)
        return (optax.apply_updates(w, updates), opt_state), loss

    w = jnp.ones((8, 10)) * ROWS[0, 0]
    return step, (w, tx.init(w))


def optax_private():
    """Gradients of single examples."""
    private = optax.contrib.differentially_private_aggregate(1.0, 0.1, KEY)
    tx = optax.chain(private, optax.sgd(0.1))
    one = lambda w, x, label: xent((jnp.tanh(x) @ w)[None], label[None])  # noqa: E731

    def step(state):
        w, opt_state = state
        losses, grads = jax.vmap(jax.value_and_grad(one), (None, 0, 0))(w, ROWS, LABELS)
        updates, opt_state = tx.update(grads, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), losses.mean()

    w = jnp.ones((8, 10)) * ROWS[0, 0]
    return step, (w, tx.init(w))


def haiku_rnn():
    def sequence_loss(tokens):
        core = hk.DeepRNN([lambda x: jax.nn.one_hot(x, 16), hk.LSTM(8), hk.nets.MLP([8, 16])])
        logits, _ = hk.dynamic_unroll(core, tokens[:-1], core.initial_state(tokens.shape[1]))
        return xent(logits, tokens[1:])

    loss_fn, tx = hk.without_apply_rng(hk.transform(sequence_loss)), optax.adam(1e-3)

    def step(state):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn.apply)(params, TOKENS)
        updates, opt_state = tx.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), loss

    params = loss_fn.init(KEY, TOKENS)
    return step, (params, tx.init(params))


LOOPS = (
    flax_mnist,
    flax_vae,
    flax_imagenet,
    flax_lm1b,
    flax_seq2seq,
    equinox_rnn,
    equinox_frozen_layer,
    equinox_stateful,
    optax_adversarial,
    optax_meta_learning,
    optax_lbfgs,
    optax_sam,
    optax_private,
    haiku_rnn,
)
QUICK = (optax_adversarial, equinox_frozen_layer)


@contextlib.contextmanager
def in_place(monkeypatch):
    """Lets `jax.grad` and `jax.value_and_grad` differentiate `autocast` of outermost functions."""
    inside = []

    def of(transform):
        def wrapped(fun, *args, **kwargs):
            def outermost(*values, **named):
                if inside:
                    return fun(*values, **named)
                inside.append(True)
                try:
                    return mpjax.autocast(fun, POLICY)(*values, **named)
                finally:
                    inside.pop()

            return transform(outermost, *args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("grad", "value_and_grad"):
            patch.setattr(jax, name, of(getattr(jax, name)))
        yield


def renamed(jaxpr):
    """Returns a jaxpr's text with variables in the order in which they appear.

    What JAX has traced before keeps its names.
    """
    names = {*re.findall(r"\b([a-z]+):[a-z]+\d*\[", jaxpr)}
    order = {}
    rename = lambda found: (  # noqa: E731
        f"v{order.setdefault(found[0], len(order))}" if found[0] in names else found[0]
    )
    return " ".join(re.sub(r"\b[a-z]+\b", rename, jaxpr).split())


def ran(make):
    """Returns the jaxpr of a loop's step, and a hash of the bits of its losses and last state."""
    step, state = make()
    jaxpr = renamed(str(jax.make_jaxpr(step)(state)))
    losses, jitted = [], jax.jit(step)
    for _ in range(3):
        state, loss = jitted(state)
        losses.append(np.asarray(loss).tobytes())
    for x in jax.tree.leaves(state):
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            losses.append(np.asarray(x).tobytes())
    return jaxpr, hash(tuple(losses))


@pytest.mark.parametrize(
    "make", [x if x in QUICK else pytest.param(x, marks=pytest.mark.thorough) for x in LOOPS]
)
def test_a_published_loop_is_what_autocast_in_its_place_makes_of_it(make, monkeypatch):
    plain = ran(make)
    with in_place(monkeypatch):
        expected = ran(make)
    assert "bf16" in expected[0] and "bf16" not in plain[0] and expected[1] != plain[1]
    with mpjax.scripts.autocast_gradients(POLICY, tell=False) as report:
        jaxpr, bits = ran(make)
    assert jaxpr == expected[0]
    assert bits == expected[1]
    assert report.rows and all(row.planned for row in report.rows)
    with mpjax.scripts.autocast_gradients("float32", tell=False):
        assert ran(make)[1] == plain[1]
