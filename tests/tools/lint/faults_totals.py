"""Public faults of totals: metrics, counters and accumulators that a step keeps in 16 bits."""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from faults import BF16, F16, F32, Fault, normal
from flax import nnx

ROWS, WIDTH, CLASSES = 16, 8, 4


def loss_of(params, x):
    return jnp.mean(jnp.square((x @ params["w"].astype(x.dtype)).astype(F32)))


def trained(params, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


# ---- sums over the calls of a step ---------------------------------------------------------------


def totaled(state, x):
    params, loss = trained(state["params"], x)
    total = state["total"] + loss.astype(BF16)  # <- here: xla#2425
    return {"params": params, "total": total, "steps": state["steps"] + 1}


def totaled_wide(state, x):
    params, loss = trained(state["params"], x)
    total = state["total"] + loss
    return {"params": params, "total": total, "steps": state["steps"] + 1}


def averaged(state, x):
    """An average with a decay of 0.9 has few terms."""
    params, loss = trained(state["params"], x)
    total = 0.9 * state["total"] + 0.1 * loss.astype(BF16)
    return {"params": params, "total": total, "steps": state["steps"] + 1}


def state_of(dtype):
    params = {"w": normal(WIDTH, WIDTH, scale=0.3)}
    return {"params": params, "total": jnp.zeros((), dtype), "steps": jnp.int32(0)}


class Tokens(NamedTuple):
    seen: Any
    correct: Any


def counted(tokens, mask, right):
    seen = tokens.seen + jnp.sum(mask).astype(tokens.seen.dtype)  # <- here: token counters
    return Tokens(seen, tokens.correct + jnp.sum(mask & right))


@flax.struct.dataclass
class Progress:
    step: Any
    best: Any


def stepped(progress, loss):
    step = progress.step + 1  # <- here: hip#3711
    return progress.replace(step=step, best=jnp.minimum(progress.best, loss))


def stepped_to_a_limit(progress, loss):
    """A warmup counts to 200, and each of these numbers is exact."""
    step = jnp.minimum(progress.step + 1, 200)
    return progress.replace(step=step, best=jnp.minimum(progress.best, loss))


def stepped_in_turn(progress, loss):
    """A cycle of 100 steps starts again at 0."""
    step = jnp.where(progress.step >= 99, 0, progress.step + 1)
    return progress.replace(step=step, best=jnp.minimum(progress.best, loss))


class Meter(nnx.Module):
    def __init__(self, dtype):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.total = nnx.Variable(jnp.zeros((), dtype))

    def __call__(self, x):
        out = self.linear(x)
        energy = jnp.mean(jnp.square(out))
        self.total[...] += energy.astype(self.total[...].dtype)  # <- here: a module's total
        return out


class Layer(nn.Module):
    dtype: Any = BF16

    @nn.compact
    def __call__(self, x):
        total = self.variable("metrics", "squares", jnp.zeros, (), self.dtype)
        out = nn.Dense(WIDTH)(x)
        if self.is_mutable_collection("metrics"):
            add = jnp.sum(jnp.square(out)).astype(self.dtype)
            total.value = total.value + add  # <- here: a collection's total
        return out


def applied(layer):
    def step(variables, x):
        out, changed = layer.apply(variables, x, mutable=["metrics"])
        return {"params": variables["params"], **changed}, out

    return step


def variables_of(layer):
    return layer.init(jax.random.key(0), normal(ROWS, WIDTH)), normal(ROWS, WIDTH)


RSS = optax.chain(optax.scale_by_rss(), optax.scale(-0.1))


def adagrad(params, state, x):
    """Adagrad's squares are added up in the dtype of the parameters."""
    grads = jax.grad(loss_of)(params, x)
    updates, state = RSS.update(grads, state, params)  # <- here: adagrad
    return optax.apply_updates(params, updates), state


def weights(dtype):
    params = {"w": normal(WIDTH, WIDTH, dtype=dtype, scale=0.3)}
    return params, RSS.init(params), normal(ROWS, WIDTH, dtype=BF16)


def confused(counts, predicted, targets):
    table = counts["table"].at[targets, predicted].add(1)  # <- here: confusion matrix
    return {"table": table}


def loads(state, logits):
    chosen = jax.nn.one_hot(jnp.argmax(logits, -1), CLASSES, dtype=F16)
    return {"load": state["load"] + jnp.sum(chosen, 0)}  # <- here: expert loads


def loads_of_a_step(state, logits):
    """The counts of one step are exact, and the state is an average of them."""
    chosen = jax.nn.one_hot(jnp.argmax(logits, -1), CLASSES, dtype=F16)
    return {"load": 0.75 * state["load"] + 0.25 * jnp.sum(chosen, 0)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Sum:
    total: Any
    error: Any


def summed(state, x):
    value = jnp.max(x).astype(BF16)
    return Sum(state.total + value, state.error)  # <- here: torchtitan#2336


def rounded(x):
    return jax.lax.reduce_precision(x.astype(F32), 8, 7)


def summed_with_its_error(state, x):
    """Kahan's sum, whose roundings no compiler removes."""
    value = jnp.max(x).astype(F32) - state.error.astype(F32)
    total = rounded(state.total.astype(F32) + value)
    error = total - state.total.astype(F32) - value
    return Sum(total.astype(BF16), error.astype(BF16))


def timed(state, x):
    """The time of a simulation, whose step is far below an ulp of later times."""
    h = 0.01
    y = state["y"] + h * jnp.tanh(x.astype(F32))
    return {"t": state["t"] + jnp.asarray(h, state["t"].dtype), "y": y}  # <- here: asi#1067


def timed_by_steps(state, x):
    y = state["y"] + 0.01 * jnp.tanh(x.astype(F32))
    return {"t": state["t"] + 1, "y": y}


# ---- loops ---------------------------------------------------------------------------------------


def generated(logits, stop):
    """Adds log-probabilities of tokens until one stops."""

    def turn(carry):
        i, total = carry
        best = jnp.max(jax.nn.log_softmax(logits[i].astype(F32)))
        return i + 1, total + best.astype(logits.dtype)  # <- here: log-probabilities

    start = jnp.int32(0), jnp.zeros((), logits.dtype)
    return jax.lax.while_loop(lambda c: c[0] < stop, turn, start)[1]


def generated_wide(logits, stop):
    def turn(carry):
        i, total = carry
        return i + 1, total + jnp.max(jax.nn.log_softmax(logits[i].astype(F32)))

    start = jnp.int32(0), jnp.zeros((), F32)
    return jax.lax.while_loop(lambda c: c[0] < stop, turn, start)[1].astype(logits.dtype)


def evaluated(xs):
    def turn(carry):
        i, total = carry
        return i + 1, total + jnp.max(xs[i])  # <- here: executorch#20090

    start = jnp.int32(0), jnp.zeros((), xs.dtype)
    return jax.lax.while_loop(lambda c: c[0] < 400, turn, start)[1]


def evaluated_few(xs):
    """Eight terms, as the condition says."""

    def turn(carry):
        i, total = carry
        return i + 1, total + jnp.max(xs[i])

    start = jnp.int32(0), jnp.zeros((), xs.dtype)
    return jax.lax.while_loop(lambda c: c[0] < 8, turn, start)[1]


def hits(scores):
    """Counts in a structure that a scan carries."""

    def turn(carry, score):
        hit = (score > 0).astype(BF16)
        return {"hits": carry["hits"] + hit, "all": carry["all"] + 1}, None  # <- here: hits

    start = {"hits": jnp.zeros((), BF16), "all": jnp.zeros((), jnp.int32)}
    carry, _ = jax.lax.scan(turn, start, scores)
    return carry["hits"] / carry["all"]


def transmittance(alphas):
    def turn(left, alpha):
        return left * (1 - alpha), left  # <- here: transmittance

    return jax.lax.scan(turn, jnp.ones(alphas.shape[1:], alphas.dtype), alphas)[1]


def alive(dones):
    """A product of zeros and ones is exact."""

    def turn(left, done):
        return left * (1 - done.astype(BF16)), left

    return jax.lax.scan(turn, jnp.ones(dones.shape[1:], BF16), dones)[1]


def flags(*shape):
    return jax.random.bernoulli(jax.random.key(0), 0.5, shape)


def progress(dtype=BF16):
    return lambda: (Progress(jnp.zeros((), dtype), jnp.float32(9)), jnp.float32(1))


def call(model, x):
    return model(x)


FAULTS = (
    Fault(
        "xla#2425",
        "pytorch/xla/pull/2425",
        "A loss is added to a total in bfloat16, step after step: the total stops growing.",
        "half-accumulator",
        totaled,
        totaled_wide,
        lambda: (state_of(BF16), normal(ROWS, WIDTH, dtype=BF16)),
        lambda: (state_of(F32), normal(ROWS, WIDTH, dtype=BF16)),
    ),
    Fault(
        "token counters",
        "",
        "Tokens are counted in bfloat16, in one field of a structure.",
        "half-accumulator",
        counted,
        counted,
        lambda: (Tokens(jnp.zeros((), BF16), jnp.int32(0)), flags(9, 9), flags(9, 9)),
        lambda: (Tokens(jnp.float32(0), jnp.int32(0)), flags(9, 9), flags(9, 9)),
    ),
    Fault(
        "hip#3711",
        "ROCm/hip/issues/3711",
        "A counter in bfloat16 stays at 256.",
        "half-accumulator",
        stepped,
        stepped_to_a_limit,
        progress(),
    ),
    Fault(
        "a module's total",
        "",
        "A variable of an NNX module adds up its activations in bfloat16.",
        "half-accumulator",
        call,
        call,
        lambda: (Meter(BF16), normal(ROWS, WIDTH)),
        lambda: (Meter(F32), normal(ROWS, WIDTH)),
    ),
    Fault(
        "a collection's total",
        "",
        "A collection of a linen module adds up squares in bfloat16.",
        "half-accumulator",
        applied(Layer()),
        applied(Layer(F32)),
        lambda: variables_of(Layer()),
        lambda: variables_of(Layer(F32)),
    ),
    Fault(
        "adagrad",
        "",
        "Adagrad adds up all squared gradients in the bfloat16 of the parameters.",
        "half-accumulator",
        adagrad,
        adagrad,
        lambda: weights(BF16),
        lambda: weights(F32),
    ),
    Fault(
        "confusion matrix",
        "",
        "A table of counts is float16, and each batch adds ones to it.",
        "half-accumulator",
        confused,
        confused,
        lambda: ({"table": jnp.zeros((4, 4), F16)}, jnp.arange(8) % 4, jnp.arange(8) % 3),
        lambda: ({"table": jnp.zeros((4, 4), jnp.int32)}, jnp.arange(8) % 4, jnp.arange(8) % 3),
    ),
    Fault(
        "expert loads",
        "",
        "The loads of experts are added up over steps in float16.",
        "half-accumulator",
        loads,
        loads_of_a_step,
        lambda: ({"load": jnp.zeros(CLASSES, F16)}, normal(ROWS, CLASSES)),
    ),
    Fault(
        "torchtitan#2336",
        "pytorch/torchtitan/issues/2336",
        "Losses are summed over many batches in the dtype of the model.",
        "half-accumulator",
        summed,
        summed_with_its_error,
        lambda: (Sum(jnp.zeros((), BF16), jnp.zeros((), BF16)), normal(WIDTH)),
    ),
    Fault(
        "asi#1067",
        "SlopDotCash/asi/issues/1067",
        "A state adds the same small number in each step, here a time in float16.",
        "half-accumulator",
        timed,
        timed_by_steps,
        lambda: ({"t": jnp.zeros((), F16), "y": normal(WIDTH)}, normal(WIDTH, dtype=F16)),
        lambda: ({"t": jnp.int32(0), "y": normal(WIDTH)}, normal(WIDTH, dtype=F16)),
    ),
    Fault(
        "log-probabilities",
        "",
        "A while loop of unknown length adds log-probabilities in bfloat16.",
        "half-accumulator",
        generated,
        generated_wide,
        lambda: (normal(64, WIDTH, dtype=BF16), jnp.int32(40)),
    ),
    Fault(
        "executorch#20090",
        "pytorch/executorch/pull/20090",
        "A while loop of 400 turns adds up in bfloat16.",
        "half-accumulator",
        evaluated,
        evaluated_few,
        lambda: (normal(400, WIDTH, dtype=BF16),),
    ),
    Fault(
        "hits",
        "",
        "A scan over 1000 scores counts its hits in bfloat16; over 200, each count is exact.",
        "half-accumulator",
        hits,
        hits,
        lambda: (normal(1000),),
        lambda: (normal(200),),
    ),
    Fault(
        "transmittance",
        "",
        "A scan multiplies 512 factors in bfloat16.",
        "half-accumulator",
        transmittance,
        alive,
        lambda: (jnp.abs(normal(512, 3, dtype=BF16, scale=0.01)),),
        lambda: (flags(512, 3),),
    ),
)
# Correct programs near these faults.
CORRECT = (
    ("an average of losses", averaged, lambda: (state_of(BF16), normal(ROWS, WIDTH, dtype=BF16))),
    ("a cycle", stepped_in_turn, progress()),
)
