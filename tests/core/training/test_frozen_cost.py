"""A step with frozen weights costs what plain optax costs with the same trained weights."""

from collections.abc import Callable

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import PartitionSpec as P
from optax import contrib
from support import equations

import mpjax
import mpjax.linen
import mpjax.nnx

WIDTH, RANK, DEPTH, ROWS = 128, 4, 3, 32
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
CLOSE = 0.02  # the share of FLOPs and temporary memory for the check, the scale and counters


def labels(params):
    def label(keys, _):
        return "trained" if "lora" in jax.tree_util.keystr(keys) else "frozen"

    return jax.tree_util.tree_map_with_path(label, params)


def frozen_base(optimizer):
    return optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, labels)


TX = frozen_base(optax.adamw(1e-3))


def cost(jit, *args):
    """Returns the FLOPs and the bytes of temporary memory of a compiled step."""
    compiled = jit.lower(*args).compile()
    compiled = getattr(compiled, "compiled", compiled)
    return compiled.cost_analysis()["flops"], compiled.memory_analysis().temp_size_in_bytes


def assert_no_more(ours, theirs):
    for mine, plain in zip(ours, theirs, strict=True):
        assert mine <= plain * (1 + CLOSE), (ours, theirs)


# ---- plain JAX: each wrapper, each way to take gradients ----------------------------------------


def params():
    rng = np.random.default_rng(1)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / 16, jnp.float32)

    def layer():
        return {
            "base": array(WIDTH, WIDTH),
            "lora_a": array(WIDTH, RANK),
            "lora_b": array(RANK, WIDTH),
        }

    return [layer() for _ in range(DEPTH)]


def loss_fn(params, x):
    for layer in params:
        x = jax.nn.gelu(x @ layer["base"] + x @ layer["lora_a"] @ layer["lora_b"])
    return jnp.mean(x**2)


def lora_of(params):
    return [{name: x for name, x in layer.items() if "lora" in name} for layer in params]


def with_lora(params, lora):
    return [{**layer, **part} for layer, part in zip(params, lora, strict=True)]


def plain(loss=loss_fn, optimizer=None):
    """Returns the cost of optax alone, which differentiates the trained weights."""
    optimizer = optimizer or optax.adamw(1e-3)

    def step(params, state, x):
        lora = lora_of(params)
        value, grads = jax.value_and_grad(lambda lora: loss(with_lora(params, lora), x))(lora)
        updates, state = optimizer.update(grads, state, lora)
        return with_lora(params, optax.apply_updates(lora, updates)), state, value

    state = optimizer.init(lora_of(params()))
    return cost(jax.jit(step, donate_argnums=(0, 1)), params(), state, X)


def wrapped(policy, tx=TX):
    optimizer = mpjax.mixed_precision(tx, policy)

    def step(params, state, x):
        loss, grads = optimizer.value_and_grad(loss_fn, state)(params, x)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params())
    return cost(jax.jit(step, donate_argnums=(0, 1)), params(), state, X)


def built(policy, tx=TX, **settings):
    init, step = mpjax.build_train_step(loss_fn, tx, policy, **settings)
    return cost(jax.jit(step, donate_argnums=0), init(params()), X)


def test_own_loop_costs_what_optax_costs():
    assert_no_more(wrapped("float32"), plain())


def test_built_step_costs_what_optax_costs():
    assert_no_more(built("float32"), plain())


@pytest.mark.parametrize("cost_of", [wrapped, built])
def test_16_bit_step_costs_what_autocast_and_optax_cost(cost_of):
    assert_no_more(cost_of("mixed_bfloat16"), plain(mpjax.autocast(loss_fn, "mixed_bfloat16")))


@pytest.mark.thorough
@pytest.mark.parametrize("cost_of", [wrapped, built])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16,storage=lean"])
def test_other_16_bit_steps_cost_what_autocast_and_optax_cost(cost_of, policy):
    assert_no_more(cost_of(policy), plain(mpjax.autocast(loss_fn, policy)))


def test_accumulated_gradients_are_those_of_trained_weights():
    _, temporary = built("float32", accumulate_steps=2)
    base = DEPTH * WIDTH * WIDTH * 4
    assert temporary < plain()[1] + base / 2  # the sum of all gradients would take ``base``


WAYS = {
    "clipped": (
        optax.chain(optax.clip_by_global_norm(1.0), TX),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    ),
    "injected": (
        optax.inject_hyperparams(lambda rate: frozen_base(optax.adamw(rate)))(1e-3),
        optax.inject_hyperparams(optax.adamw)(1e-3),
    ),
    "muon": (frozen_base(contrib.muon(1e-3)), contrib.muon(1e-3)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cost_of", [wrapped, built])
def test_other_optimizers_cost_what_optax_costs(cost_of, way):
    tx, trained = WAYS[way]
    assert_no_more(cost_of("float32", tx), plain(optimizer=trained))


def unread(step, *args):
    """Asserts that no check and no exchange between devices reads a weight of the base."""
    names = "is_finite", "psum", "psum_invariant", "pmean"
    read = [e.invars for e in equations(jax.make_jaxpr(step)(*args)) if e.primitive.name in names]
    shapes = {getattr(x.aval, "shape", ()) for operands in read for x in operands}
    assert read and (WIDTH, WIDTH) not in shapes, shapes


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
def test_a_base_in_the_model_state_is_neither_checked_nor_exchanged(policy):
    def with_base(lora, x, model_state):
        return loss_fn(with_lora(model_state, lora), x), model_state

    adam = optax.adamw(1e-3)
    init, step = mpjax.build_train_step(with_base, adam, policy, axis_name="d")
    mapped = jax.shard_map(step, mesh=jax.make_mesh((1,), ("d",)), in_specs=P(), out_specs=P())
    base = [{"base": layer["base"]} for layer in params()]
    unread(mapped, init(lora_of(params()), base), X)


@pytest.mark.thorough
def test_reports_look_at_trained_weights():
    watched = built("float32", report_overflow=True, report_underflow=True, report_stalled=True)
    base = 2 * ROWS * WIDTH * WIDTH * DEPTH  # the FLOPs of all gradients of the base
    assert watched[0] < plain()[0] + base / 2
    reports = {"report_overflow": True, "report_underflow": True, "report_stalled": True}
    init, step = mpjax.build_train_step(loss_fn, TX, "mixed_float16", **reports)
    _, metrics = jax.jit(step)(init(params()), X)
    assert not any("base" in path for path in metrics["overflow"].paths)
    assert metrics["stalled"].to_dict().keys() == {
        f"{i}/{name}" for i in range(DEPTH) for name in ("base", "lora_a", "lora_b")
    }


# ---- models -------------------------------------------------------------------------------------


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(DEPTH):
            down = nn.Dense(RANK, use_bias=False, name=f"lora_a{i}")(x)
            up = nn.Dense(WIDTH, use_bias=False, name=f"lora_b{i}")(down)
            x = nn.gelu(nn.Dense(WIDTH, name=f"base{i}")(x) + up)
        return x


def of_linen(kind, policy=None):
    """Returns the cost of a step of Flax's TrainState, or of ours."""
    model = Linen()
    weights = model.init(jax.random.key(0), X)["params"]
    settings = {} if policy is None else {"policy": policy}
    state = kind.create(apply_fn=model.apply, params=weights, tx=TX, **settings)

    def step(state, x):
        loss_fn = lambda params: jnp.mean(state.apply_fn({"params": params}, x) ** 2)  # noqa: E731
        gradient = state.value_and_grad(loss_fn) if settings else jax.value_and_grad(loss_fn)
        loss, grads = gradient(state.params)
        return state.apply_gradients(grads=grads), loss

    return cost(jax.jit(step, donate_argnums=0), state, X)


def test_linen_step_costs_what_optax_costs():
    ours = of_linen(mpjax.linen.TrainState, "float32")
    assert_no_more(ours, of_linen(train_state.TrainState))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.lora = nnx.LoRA(WIDTH, RANK, WIDTH, rngs=rngs)

    def __call__(self, x):
        return nnx.gelu(self.base(x) + self.lora(x))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(DEPTH)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def of_nnx(tx, wrt, policy=None):
    model = Net(nnx.Rngs(0))
    if policy is None:
        optimizer = nnx.Optimizer(model, tx, wrt=wrt)
    else:
        optimizer = mpjax.nnx.Optimizer(model, tx, policy, wrt=wrt)

    def step(model, optimizer, x):
        loss_fn = lambda model: jnp.mean(model(x) ** 2)  # noqa: E731
        if policy is None:
            gradient = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, wrt))
        else:
            gradient = mpjax.nnx.value_and_grad(loss_fn, optimizer)
        loss, grads = gradient(model)
        optimizer.update(model, grads)
        return loss

    return cost(nnx.jit(step), model, optimizer, X)


@pytest.mark.parametrize("wrt", [nnx.LoRAParam, nnx.Param])
def test_nnx_step_costs_what_optax_costs(wrt):
    tx = optax.adamw(1e-3) if wrt is nnx.LoRAParam else TX
    assert_no_more(of_nnx(tx, wrt, "float32"), of_nnx(optax.adamw(1e-3), nnx.LoRAParam))


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_nnx_step_reads_no_frozen_weight(policy):
    model = Net(nnx.Rngs(0))
    optimizer = mpjax.nnx.Optimizer(model, optax.adamw(1e-3), policy, wrt=nnx.LoRAParam)
    graph, state = nnx.split((model, optimizer))

    def step(state, x):
        model, optimizer = nnx.merge(graph, state)
        gradient = mpjax.nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2), optimizer)
        optimizer.update(model, gradient(model)[1])
        return nnx.state((model, optimizer))

    unread(step, state, X)


class LoRALinear(eqx.Module):
    base: eqx.nn.Linear
    lora_a: jax.Array
    lora_b: jax.Array
    rank: int = eqx.field(static=True, default=RANK)

    def __call__(self, x):
        return self.base(x) + self.lora_b @ (self.lora_a @ x)


class Equinox(eqx.Module):
    layers: list
    activation: Callable  # a leaf that is no array

    def __init__(self):
        self.activation = jax.nn.gelu
        keys = jax.random.split(jax.random.key(0), 2 * DEPTH)
        self.layers = [
            LoRALinear(
                eqx.nn.Linear(WIDTH, WIDTH, key=keys[i]),
                jax.random.normal(keys[DEPTH + i], (RANK, WIDTH)) / 16,
                jnp.zeros((WIDTH, RANK)),
            )
            for i in range(DEPTH)
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def equinox_loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def of_equinox(policy=None):
    model = Equinox()
    optimizer = TX if policy is None else mpjax.mixed_precision(TX, policy)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    arrays, static = eqx.partition(model, eqx.is_array)

    def step(arrays, state, x):
        model = eqx.combine(arrays, static)
        if policy is None:
            loss, grads = eqx.filter_value_and_grad(equinox_loss)(model, x)
        else:
            loss, grads = optimizer.value_and_grad(equinox_loss, state)(model, x)
        trained = eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(grads, state, trained)
        model = eqx.apply_updates(model, updates)
        return eqx.filter(model, eqx.is_array), state, loss

    return cost(jax.jit(step, donate_argnums=(0, 1)), arrays, state, X)


@pytest.mark.thorough
def test_equinox_step_costs_what_optax_costs():
    assert_no_more(of_equinox("float32"), of_equinox())
