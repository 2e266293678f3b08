"""Trains PPO on an environment of Brax, as its notebook does, on the environment of its tests."""

import functools

import jax
import jax.numpy as jnp
from brax import envs
from brax.training.agents.ppo import networks
from brax.training.agents.ppo import train as ppo


def device_put_replicated(tree, devices):
    """Brax 0.14.2 calls this function, which JAX 0.10 no longer has."""
    return jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)


jax.device_put_replicated = device_put_replicated


def progress(steps, metrics):
    print(f"{steps} steps: reward {metrics['eval/episode_reward']}")
    if "training/total_loss" in metrics:
        print(f"loss {metrics['training/total_loss']}")


environment = envs.get_environment("fast")
network_factory = functools.partial(
    networks.make_ppo_networks,
    policy_hidden_layer_sizes=(256, 256),
    value_hidden_layer_sizes=(256, 256),
)
make_policy, params, metrics = ppo.train(
    environment=environment,
    network_factory=network_factory,
    progress_fn=progress,
    num_timesteps=4_096,
    num_evals=2,
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
