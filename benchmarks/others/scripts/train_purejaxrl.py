"""PureJaxRL's PPO as its own file runs it, for fewer time steps.

The file's settings are in its `__main__`, so they are repeated here. What trains is `make_train`,
a single `jit` with environments, updates and epochs in scans.
"""

import sys

import jax

settings = {
    "LR": 2.5e-4,
    "NUM_ENVS": 4,
    "NUM_STEPS": 128,
    "TOTAL_TIMESTEPS": 5120,
    "UPDATE_EPOCHS": 4,
    "NUM_MINIBATCHES": 4,
    "GAMMA": 0.99,
    "GAE_LAMBDA": 0.95,
    "CLIP_EPS": 0.2,
    "ENT_COEF": 0.01,
    "VF_COEF": 0.5,
    "MAX_GRAD_NORM": 0.5,
    "ACTIVATION": "tanh",
    "ENV_NAME": "CartPole-v1",
    "ANNEAL_LR": True,
    "DEBUG": False,
}
make_train = __import__(sys.argv[1] if len(sys.argv) > 1 else "ppo").make_train
out = jax.jit(make_train(settings))(jax.random.PRNGKey(30))
train_state = out["runner_state"][0]
size = jax.tree.map(lambda x: abs(x).sum(), train_state.params)
for returned in out.get("metrics", out.get("metric"))["returned_episode_returns"].mean((1, 2)):
    print(f"loss {-returned:.6f}")  # the average return, which it maximizes
print(f"sum of weights {sum(jax.tree.leaves(size)):.6f}")
