"""An argument in the place of another one is an error that names it, what it is and the order."""

import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
import mpjax.linen
import mpjax.nnx

PARAMS = {"w": np.ones((3, 2), np.float32)}
BATCH = np.ones((4, 3), np.float32)
HUGE = 10**400


def loss(params, x):
    return ((x @ params["w"]) ** 2).mean()


OPTIMIZER = optax.sgd(0.1)
MIXED = mpjax.mixed_precision(OPTIMIZER)
STATE = MIXED.init(PARAMS)
INIT, STEP = mpjax.build_train_step(loss, OPTIMIZER)
MODEL = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
METRICS = {"consecutive_skips": 0, "loss_scale": 1.0, "loss_finite": True}
# What an argument may be, by its role.
ROLES = {
    "function": loss,
    "policy": mpjax.get_policy("mixed_bfloat16"),
    "optimizer": OPTIMIZER,
    "scale": mpjax.DynamicLossScale(),
    "state": STATE,
    "train_state": INIT(PARAMS),
    "tree": PARAMS,
    "dtype": "float16",
    "metrics": METRICS,
    "count": 3,
    "module": MODEL,
    "array": BATCH,
    "nnx": mpjax.nnx.Optimizer(MODEL, OPTIMIZER),
    "none": None,
    "huge": HUGE,
}
FUN, POLICY = {"fun": "function module"}, {"policy": "policy dtype"}
# What each function takes: the role of each argument, and other roles that fit.
TAKES = [
    (mpjax.autocast, {"fun": "function module none"} | POLICY),
    (mpjax.explain, FUN | POLICY),
    (mpjax.compare, FUN | {"policy": "policy dtype function module"}),
    (mpjax.find_nonfinite, FUN | {"policy": "policy dtype none"}),
    (mpjax.debug.tune, FUN | POLICY | {"tolerance": "count huge"}),
    (mpjax.lint, FUN),
    (mpjax.half_inputs, {"kernel": "function module none"}),
    (mpjax.watch_precision, {"step": "function module", "every": "count huge"}),
    (
        mpjax.mixed_precision,
        {"optimizer": "optimizer"} | POLICY | {"loss_scale": "scale count none"},
    ),
    (mpjax.build_train_step, {"loss_fn": "function module", "optimizer": "optimizer"} | POLICY),
    (mpjax.scaled_value_and_grad, FUN | {"loss_scale": "scale"}),
    (MIXED.value_and_grad, FUN | {"opt_state": "state nnx train_state"}),
    (MIXED.init, {"params": "tree metrics module count huge scale array"}),
    (MIXED.update, {"updates": "tree", "state": "state", "params": "tree none"}),
    (INIT, {"params": "tree array"}),
    (STEP, {"state": "train_state", "batch": "array"}),
    (mpjax.nnx.value_and_grad, {"f": "function module", "optimizer": "nnx"}),
    (mpjax.nnx.Optimizer, {"model": "module nnx", "tx": "optimizer"} | POLICY),
    (mpjax.get_policy, POLICY),
    (mpjax.precision, {"dtype": "dtype"}),
    (mpjax.raise_if_diverged, {"metrics": "metrics", "limit": "count huge"}),
    (mpjax.recommend_policy, {"device": "none"}),
    (mpjax.optim.skip_nonfinite, {"inner": "optimizer"}),
    (mpjax.optim.with_master_weights, {"inner": "optimizer"}),
    (mpjax.optim.with_8bit_moments, {"inner": "optimizer", "moments": "none"}),
    (mpjax.optim.with_kahan_summation, {"inner": "optimizer"}),
    (mpjax.optim.with_stochastic_rounding, {"inner": "optimizer", "seed": "count"}),
    (
        mpjax.optim.master_params,
        {
            "opt_state": "state train_state tree metrics scale module nnx array",
            "params": "tree metrics module scale count huge array",
        },
    ),
]
CASES = [
    pytest.param(fun, takes, name, wrong, id=f"{fun.__qualname__}-{name}-{wrong}")
    for fun, takes in TAKES
    for name, roles in takes.items()
    for wrong in ROLES
    if name != "batch" and wrong not in roles.split()
]


@pytest.mark.parametrize(("fun", "takes", "name", "wrong"), CASES)
def test_an_argument_of_another_kind_is_named(fun, takes, name, wrong):
    args = {
        name: ROLES[next(r for r in ROLES if roles.startswith(r))] for name, roles in takes.items()
    }
    args[name] = ROLES[wrong]
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        fun(*args.values())
