"""PPO balances a pole: environment, rollout and updates of an iteration are one compiled program.

    python examples/ppo.py --size small --policy mixed_float16

CartPole (Barto et al., 1983) is written in JAX. It stays float32, because its steps are small
relative to its state. Policy and value networks compute in half, in the rollout and in the updates,
which are a scan of `build_train_step` over minibatches. A value is as large as a return, up to 100,
and its loss as large as the square. An episode ends after 500 steps.

Length is the mean length of episodes under the greedy policy; training is the mean over all of
training. These are the expected figures of the small size on a CPU. The last row, spread, is the
range of float32 over three seeds:

    policy          length  training
    float32         500     376.9
    mixed_bfloat16  500     368.1
    mixed_float16   500     398.6
    spread          0       22.02
"""

import functools
import math

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

SIZES = {
    "smoke": {"steps": 2, "games": 4, "length": 8, "parts": 2, "width": 8, "rate": 1e-3},
    "small": {"steps": 60, "games": 32, "length": 128, "parts": 8, "width": 64, "rate": 2e-3},
    "full": {"steps": 500, "games": 4096, "length": 128, "parts": 32, "width": 512, "rate": 5e-4},
}
EPOCHS, DISCOUNT, TRACE, LIMIT = 4, 0.99, 0.95, 500


def cart_pole(state, action):
    """Returns the state 0.02 seconds later, and whether the episode is lost."""
    _, speed, angle, turning = state
    force = jnp.where(action == 1, 10.0, -10.0)
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * turning**2 * sine) / 1.1
    turn = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
    change = jnp.stack([speed, push - 0.05 * turn * cosine / 1.1, turning, turn])
    state = state + 0.02 * change
    return state, (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > math.pi / 15)


def fresh(key):
    return jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)


def initial(key, width):
    def perceptron(key, out, last):
        shapes = zip(jax.random.split(key, 3), (4, width, width), (width, width, out), strict=True)
        draw = jax.nn.initializers.orthogonal
        return [
            {"w": draw(last if m == out else 2**0.5)(k, (n, m)), "b": jnp.zeros(m)}
            for k, n, m in shapes
        ]

    keys = jax.random.split(key)
    return {"policy": perceptron(keys[0], 2, 0.01), "value": perceptron(keys[1], 1, 1.0)}


def apply(layers, x):
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def networks(params, states):
    """Returns the logits of the two actions, and the value."""
    return apply(params["policy"], states), apply(params["value"], states)[..., 0]


def loss_fn(params, batch):
    logits, values = networks(params, batch["states"])
    chances = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(chances, batch["actions"][:, None], 1)[:, 0]
    ratio = jnp.exp(chosen - batch["chances"])
    gain = batch["advantages"]
    gain = (gain - gain.mean()) / (gain.std() + 1e-6)
    surrogate = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()
    entropy = -jnp.sum(jnp.exp(chances) * chances, -1).mean()
    return 0.5 * jnp.mean((values - batch["returns"]) ** 2) - surrogate - 0.01 * entropy


def advantages_of(rewards, values, ends, last):
    """Generalized advantage estimation (Schulman et al., 2016), backwards in time."""

    def back(carry, now):
        gain, following = carry
        reward, value, end = now
        error = reward + DISCOUNT * jnp.where(end, 0.0, following) - value
        gain = error + DISCOUNT * TRACE * jnp.where(end, 0.0, gain)
        return (gain, value), gain

    return jax.lax.scan(back, (jnp.zeros_like(last), last), (rewards, values, ends), reverse=True)[
        1
    ]


def train(options):
    run = mpjax.autocast(networks, options.policy)
    updates = options.steps * EPOCHS * options.parts
    adam = optax.adam(optax.linear_schedule(options.rate, 0.0, updates))
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), adam)
    init, step = mpjax.build_train_step(loss_fn, optimizer, options.policy)

    def play(params, carry, key):
        """Plays one step of all games; games that are lost or at their limit start again."""
        states, ages = carry
        keys = jax.random.split(key)
        logits, values = run(params, states)
        actions = jax.random.categorical(keys[0], logits)
        chances = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0]
        after, lost = jax.vmap(cart_pole)(states, actions)
        ends = lost | (ages + 1 >= LIMIT)
        begun = jax.vmap(fresh)(jax.random.split(keys[1], len(states)))
        now = {"states": states, "actions": actions, "chances": chances}
        carry = jnp.where(ends[:, None], begun, after), jnp.where(ends, 0, ages + 1)
        return carry, (now, values, ends)

    @jax.jit
    def iterate(state, games, key):
        keys = jax.random.split(key, options.length + EPOCHS)
        games, (seen, values, ends) = jax.lax.scan(
            functools.partial(play, state.params), games, keys[EPOCHS:]
        )
        last = run(state.params, games[0])[1]
        gains = advantages_of(jnp.ones_like(values), values, ends, last)
        seen |= {"advantages": gains, "returns": gains + values}
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)
        orders = [jax.random.permutation(k, len(flat["returns"])) for k in keys[:EPOCHS]]
        parts = jnp.concatenate(orders).reshape(EPOCHS * options.parts, -1)
        take = lambda rows: jax.tree.map(lambda x: x[rows], flat)  # noqa: E731
        state, metrics = jax.lax.scan(lambda state, rows: step(state, take(rows)), state, parts)
        length = ends.size / jnp.maximum(ends.sum(), 1)
        return state, games, {"length": length, "loss": metrics["loss"].mean()}

    keys = jax.random.split(jax.random.key(options.seed), 3)
    state = init(initial(keys[0], options.width))
    begun = jax.vmap(fresh)(jax.random.split(keys[1], options.games))
    games = begun, jnp.zeros(options.games, jnp.int32)
    curves = {"length": [], "loss": [], "loss_scale": []}
    for index in common.steps(options.steps):
        state, games, found = iterate(state, games, jax.random.fold_in(keys[2], index))
        for name, value in {**found, "loss_scale": state.loss_scale.loss_scale}.items():
            curves[name].append(value)

    @jax.jit
    def greedy(params, states):
        def move(carry, _):
            states, alive = carry
            states, lost = jax.vmap(cart_pole)(states, run(params, states)[0].argmax(-1))
            return (states, alive & ~lost), alive

        _, alive = jax.lax.scan(move, (states, jnp.ones(len(states), bool)), length=LIMIT)
        return alive.sum(0).mean()

    tested = jax.vmap(fresh)(jax.random.split(jax.random.key(1), 256))
    return {
        "figures": {
            "length": greedy(state.params, tested),
            "training": np.minimum(jax.device_get(curves["length"]), LIMIT).mean(),
        },
        "skipped": state.skipped_steps // (EPOCHS * options.parts),
        "curves": curves,
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
