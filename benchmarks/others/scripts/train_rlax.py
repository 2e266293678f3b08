"""Trains a DQN with RLax, Haiku and Optax, as RLax's examples do."""

import argparse
import collections
import random
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import rlax

parser = argparse.ArgumentParser()
parser.add_argument("--half", action="store_true")
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()

ROWS, COLUMNS, ACTIONS = 10, 5, 3
Params = collections.namedtuple("Params", "online target")


class Catch:
    """A ball falls down a board; the paddle in the last row has to catch it."""

    def reset(self):
        self.ball = [0, random.randrange(COLUMNS)]
        self.paddle = COLUMNS // 2
        return self.observation()

    def step(self, action):
        self.paddle = min(max(self.paddle + action - 1, 0), COLUMNS - 1)
        self.ball[0] += 1
        done = self.ball[0] == ROWS - 1
        reward = (1.0 if self.ball[1] == self.paddle else -1.0) if done else 0.0
        return self.observation(), reward, 0.0 if done else 1.0

    def observation(self):
        board = np.zeros((ROWS, COLUMNS), np.float32)
        board[self.ball[0], self.ball[1]] = board[-1, self.paddle] = 1.0
        return board


class Transition(NamedTuple):
    obs_tm1: np.ndarray
    a_tm1: int
    r_t: float
    discount_t: float
    obs_t: np.ndarray


if args.half:
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=float32")
    hk.mixed_precision.set_policy(hk.nets.MLP, policy)


def q_network(obs):
    return hk.nets.MLP([256, 256, ACTIONS])(hk.Flatten()(obs))


network = hk.without_apply_rng(hk.transform(q_network))
optimizer = optax.adam(3e-3)


def loss_fn(online, target, batch):
    q_tm1 = network.apply(online, batch.obs_tm1)
    q_t_val = network.apply(target, batch.obs_t)
    q_t_select = network.apply(online, batch.obs_t)
    batched_loss = jax.vmap(rlax.double_q_learning)
    td_error = batched_loss(q_tm1, batch.a_tm1, batch.r_t, batch.discount_t, q_t_val, q_t_select)
    return jnp.mean(rlax.l2_loss(td_error))


@jax.jit
def learner_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params.online, params.target, batch)
    updates, opt_state = optimizer.update(grads, opt_state)
    online = optax.apply_updates(params.online, updates)
    target = optax.incremental_update(online, params.target, 0.01)
    return Params(online, target), opt_state, loss


@jax.jit
def actor_step(params, key, obs, epsilon):
    q = network.apply(params.online, obs[None])[0]
    return rlax.epsilon_greedy(epsilon).sample(key, q)


random.seed(0)
key = jax.random.key(0)
env = Catch()
obs = env.reset()
online = network.init(key, obs[None])
params, opt_state = Params(online, online), optimizer.init(online)
replay = collections.deque(maxlen=2_000)
for step in range(args.steps):
    key, sub = jax.random.split(key)
    action = int(actor_step(params, sub, obs, max(0.05, 1 - step / 300)))
    next_obs, reward, discount = env.step(action)
    replay.append(Transition(obs, action, reward, discount, next_obs))
    obs = next_obs if discount else env.reset()
    if len(replay) >= 64:
        batch = Transition(*map(np.stack, zip(*random.sample(replay, 64), strict=True)))
        params, opt_state, loss = learner_step(params, opt_state, batch)
        if step % 50 == 49:
            print(f"step {step + 1} loss {loss}")
