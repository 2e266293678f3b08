"""An argument in the place of another one is an error that names it, what it is and the order."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
import mpjax.checkpoint
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
    (mpjax.debug.calibrate, FUN | POLICY | {"tolerance": "count huge"}),
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


def returning(value):
    return lambda params, x: value


# A mistake, and words that its error must have, in this order.
MISTAKES = {
    "swapped, value_and_grad": (
        lambda: MIXED.value_and_grad(STATE, loss),
        "fun=.*is the state of an optimizer.*value_and_grad.fun, opt_state",
    ),
    "swapped, mixed_precision": (
        lambda: mpjax.mixed_precision("mixed_bfloat16", OPTIMIZER),
        "optimizer=.*is a string.*mixed_precision.optimizer, policy",
    ),
    "swapped, build_train_step": (
        lambda: mpjax.build_train_step(OPTIMIZER, loss),
        "loss_fn=.*is an optax optimizer.*build_train_step.loss_fn, optimizer",
    ),
    "swapped, autocast": (
        lambda: mpjax.autocast(ROLES["policy"], loss),
        "fun=.*is a policy.*autocast.fun, policy",
    ),
    "swapped, cast": (
        lambda: mpjax.cast("bfloat16", PARAMS),
        "dtype=.*is a dict.*cast.tree, dtype",
    ),
    "swapped, update": (
        lambda: MIXED.update(PARAMS, PARAMS, STATE),
        "state is a dict.*update.grads, state, params",
    ),
    "swapped, step": (lambda: STEP(BATCH, ROLES["train_state"]), "state is a .*step.state, batch"),
    "swapped, raise_if_diverged": (
        lambda: mpjax.raise_if_diverged(10, METRICS),
        "limit=.*is a dict.*raise_if_diverged.metrics, limit",
    ),
    "an optimizer among keywords": (
        lambda: mpjax.linen.TrainState.create(
            apply_fn=loss, params=PARAMS, tx=OPTIMIZER, policy=OPTIMIZER
        ),
        "policy=.*It is an optax optimizer.$",
    ),
    "a dtype for a function": (lambda: mpjax.autocast(np.float32), "fun=.*is a dtype"),
    "arguments with the function": (
        lambda: mpjax.explain(loss, PARAMS["w"], BATCH),
        "policy=.*is an array.*explain.fun, policy",
    ),
    "a policy for lint": (
        lambda: mpjax.lint(loss, "mixed_bfloat16")(PARAMS, BATCH),
        "argnums='mixed_bfloat16'.*mpjax.autocast",
    ),
    "an optimizer that is not called": (
        lambda: mpjax.mixed_precision(optax.sgd),
        "optimizer=.*Call it: sgd",
    ),
    "init of a state": (lambda: MIXED.init(STATE), "params=.*not a state.*Call init once"),
    "init of a train state": (lambda: INIT(ROLES["train_state"]), "params=.*not a state"),
    "init of a plain state": (
        lambda: MIXED.init(optax.adam(0.1).init(PARAMS)),
        "params=.*not a state",
    ),
    "a key for the model state": (lambda: INIT(PARAMS, jax.random.key(0)), "model_state.*rng="),
    "no gradients": (lambda: MIXED.update(None, STATE, PARAMS), "updates must be the gradients"),
    "gradients of other shapes": (
        lambda: MIXED.update({"w": BATCH}, STATE, PARAMS),
        r"updates must be the gradients.* w \[4, 3\]",
    ),
    "params of a state of others": (
        lambda: MIXED.update(PARAMS, STATE, PARAMS, scaled_by=PARAMS),
        "scaled_by=.*mpjax.mixed_precision",
    ),
    "a loss that is no number": (
        lambda: MIXED.update(PARAMS, STATE, PARAMS, value="x"),
        "value is 'x'",
    ),
    "has_aux of a string": (
        lambda: MIXED.value_and_grad(loss, STATE, has_aux="yes"),
        "has_aux='yes' must be True or False",
    ),
    "swapped, save": (
        lambda: mpjax.checkpoint.save(PARAMS, "runs/1"),
        "state='runs/1'.*is a string.*save.directory, state",
    ),
    "swapped, save_safetensors": (
        lambda: mpjax.checkpoint.save_safetensors(PARAMS, "a.safetensors"),
        "file=.*must be a path.*is a dict.*save_safetensors.file, params",
    ),
    "swapped, restore": (
        lambda: mpjax.checkpoint.restore(PARAMS, "runs/1"),
        "directory=.*must be a path.*is a dict.*restore.directory, like",
    ),
    "metrics without the loss scale": (
        lambda: mpjax.raise_if_diverged({"consecutive_skips": 3}, 10),
        "metrics=.*that a training step returned",
    ),
    "an array of text": (
        lambda: mpjax.linear_cross_entropy("x", BATCH, BATCH),
        "hidden='x' must be an array.*linear_cross_entropy.hidden, weight, labels",
    ),
}
RETURN = "None.*lack a return statement"
for name, run in {
    "value_and_grad": MIXED.value_and_grad(returning(None), STATE),
    "value_and_grad with aux": MIXED.value_and_grad(returning(None), STATE, has_aux=True),
    "value_and_grad, aux alone": MIXED.value_and_grad(returning((None, 1)), STATE, has_aux=True),
    "scaled_value_and_grad": mpjax.scaled_value_and_grad(returning(None), ROLES["scale"]),
    "compare": mpjax.compare(returning(None), "mixed_bfloat16"),
    "explain": mpjax.explain(returning(None), "mixed_bfloat16"),
    "explain its gradient": mpjax.explain(returning(None), "mixed_bfloat16", argnums=0),
    "find_nonfinite": mpjax.find_nonfinite(returning(None)),
    "lint": mpjax.lint(returning(None), argnums=0),
}.items():
    MISTAKES[f"{name}: no return"] = (lambda run=run: run(PARAMS, BATCH), RETURN)
for policy in ("mixed_bfloat16", "bfloat16"):
    step = mpjax.build_train_step(returning(None), OPTIMIZER, mpjax.get_policy(policy))[1]
    run = lambda step=step: step(ROLES["train_state"], BATCH)  # noqa: E731
    MISTAKES[f"{policy}: no return"] = (run, RETURN)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_the_way_out(mistake):
    run, words = MISTAKES[mistake]
    with pytest.raises((TypeError, ValueError), match=f"(?s){words}") as caught:
        run()
    assert len(str(caught.value)) < 1200 and "\n" not in str(caught.value)


# Where a number, or a tree with one, is given.
NUMBERS = {
    "params": lambda n: INIT({"w": n}),
    "params of mixed_precision": lambda n: MIXED.init({"w": n}),
    "model_state": lambda n: INIT(PARAMS, {"n": n}),
    "batch": lambda n: STEP(ROLES["train_state"], n),
    "updates": lambda n: MIXED.update({"w": n}, STATE, {"w": 1.0}),
    "value": lambda n: MIXED.update(PARAMS, STATE, PARAMS, value=n),
    "on_true": lambda n: mpjax.select(jax.numpy.array(True), {"n": n}, {"n": 1}),
    "hidden": lambda n: mpjax.linear_cross_entropy(n, BATCH, BATCH),
    "chunk": lambda n: mpjax.linear_cross_entropy(BATCH, BATCH.T, np.zeros(4, int), chunk=n),
    "z_loss": lambda n: mpjax.linear_cross_entropy(BATCH, BATCH.T, np.zeros(4, int), z_loss=n),
    "scale": lambda n: mpjax.dot_product_attention(*[BATCH[None, None]] * 3, scale=n),
    "argnums": lambda n: MIXED.value_and_grad(loss, STATE, argnums=n)(PARAMS, BATCH),
    "policy": mpjax.get_policy,
    "storage": lambda n: mpjax.get_policy("mixed_bfloat16", storage=n),
    "moments": lambda n: mpjax.optim.with_8bit_moments(OPTIMIZER, n),
    "seed": lambda n: mpjax.optim.with_stochastic_rounding(OPTIMIZER, n),
    "loss_scale": lambda n: mpjax.mixed_precision(OPTIMIZER, loss_scale=n),
    "growth_interval": lambda n: mpjax.DynamicLossScale(growth_interval=n),
    "timeout": lambda n: mpjax.compile_for("h100", loss, timeout=n),
    "reserve": lambda n: mpjax.hardware.fit_memory("h100", loss, reserve=n),
}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("wrong", [HUGE, -HUGE, 10**5000], ids=["400", "-400", "5000"])
def test_a_number_of_400_digits_is_refused_by_name(name, wrong):
    with pytest.raises((TypeError, ValueError), match=rf"\b{name.split()[0]}\b") as caught:
        NUMBERS[name](wrong)
    assert len(str(caught.value)) < 1200


def test_a_log_and_a_verdict_take_numbers_of_400_digits(tmp_path):
    mpjax.debug.log_metrics(mpjax.debug.JsonLines(tmp_path / "a.jsonl"), 1, {"n": HUGE})
    assert '"inf"' in (tmp_path / "a.jsonl").read_text()
    with pytest.raises(mpjax.errors.DivergenceError):
        mpjax.raise_if_diverged(METRICS | {"consecutive_skips": HUGE, "loss_scale": HUGE}, 3)
