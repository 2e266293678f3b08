"""Trains PPO on an environment of Brax, as its notebook does."""

import functools

from brax import envs
from brax.training.agents.ppo import networks
from brax.training.agents.ppo import train as ppo

env = envs.get_environment("inverted_pendulum", backend="generalized")


def progress(steps, metrics):
    print(f"{steps} steps: reward {metrics['eval/episode_reward']!r}")
    if "training/total_loss" in metrics:
        print(f"loss {metrics['training/total_loss']!r}")


network = functools.partial(
    networks.make_ppo_networks,
    policy_hidden_layer_sizes=(256, 256),
    value_hidden_layer_sizes=(256, 256),
)
make_inference_fn, params, metrics = ppo.train(
    environment=env,
    network_factory=network,
    progress_fn=progress,
    num_timesteps=8_192,
    num_evals=3,
    episode_length=100,
    normalize_observations=True,
    unroll_length=8,
    num_minibatches=4,
    num_updates_per_batch=2,
    discounting=0.97,
    learning_rate=3e-4,
    entropy_cost=1e-2,
    num_envs=64,
    batch_size=64,
    num_eval_envs=16,
    seed=1,
)
