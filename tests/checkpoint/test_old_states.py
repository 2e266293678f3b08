"""States that earlier versions wrote still load: from pickles, checkpoints, and orbax's own.

    python tests/checkpoint/test_old_states.py    writes old/NAME.zip of each state that has none

A pickle names the public places of classes, so what they name inside may move. A file is never
written again: it holds what a version wrote that somebody may have used. The leaves of each state
are filled with 1, 2, 3 and so on.
"""

import dataclasses
import pickle
import pickletools
import tempfile
import zipfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from support import thorough_but

import mpjax
import mpjax.linen
import mpjax.nnx
from mpjax import checkpoint
from mpjax._src.tools.watching.figures import nothing
from mpjax._src.tools.watching.report import WatchedTensor

OLD = Path(__file__).parent / "old"
PARAMS = {"kernel": np.full((3, 2), np.float32(0.1)), "bias": np.zeros(2, np.float32)}
ADAM = optax.adam(1e-3)


# ---- states -------------------------------------------------------------------------------------


def of_step(policy, **options):
    init, _ = mpjax.build_train_step(lambda p, batch: jnp.sum(p["bias"]), ADAM, policy, **options)
    return init(PARAMS)


def with_everything():
    """A state with batch statistics and a key; its optimizer skips steps itself."""
    init, _ = mpjax.build_train_step(
        lambda p, batch, model_state, rng: (jnp.sum(p["bias"]), model_state),
        mpjax.optim.skip_nonfinite(optax.chain(optax.clip(1.0), optax.adamw(1e-2))),
        "O2:float16",
    )
    return init(PARAMS, {"mean": np.zeros(2, np.float32)}, jax.random.PRNGKey(0))


def of_optimizer(optimizer, policy="float32", params=PARAMS):
    params = jax.eval_shape(mpjax.get_policy(policy).cast_to_param, params)
    return {"params": params, "opt_state": jax.eval_shape(optimizer.init, params)}


def of_nnx():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    return nnx.state((model, mpjax.nnx.Optimizer(model, ADAM, "O2:float16", wrt=nnx.Param)))


def of_linen():
    apply = nn.Dense(2).apply
    return mpjax.linen.TrainState.create(
        apply_fn=apply, params=PARAMS, tx=ADAM, policy="mixed_float16"
    )


def metrics():
    """What a step reports beside numbers."""
    some = jnp.float32(1)
    return {
        "overflow": mpjax.reports.Overflow(
            jnp.int32(1), jnp.int32(1), some, some, some, ("a", "b"), some
        ),
        "underflow": mpjax.reports.Underflow(some, some, some, "float16"),
        "stalled": mpjax.reports.Stalled(jnp.ones(2), ("a", "b")),
        "histogram": mpjax.debug.gradient_histogram({"a": np.ones(3, np.float32)}),
        "precision": mpjax.reports.PrecisionReport(nothing(1), (TENSOR,)),
    }


TENSOR = WatchedTensor("a", "dot_general", "lhs", "", "forward", "float16", (2,), "", "", False, ())
LARGE = {"kernel": np.zeros((64, 64), np.float32)}  # moments of smaller ones are not coded
STATES = {
    "step_float32": lambda: of_step("float32"),
    "step_static": lambda: of_step("mixed_float16", loss_scale=128.0),
    "step_masters": lambda: of_step("O2:float16"),
    "step_split": lambda: of_step("O2:bfloat16,masters=split8"),
    "step_stochastic": lambda: of_step("O3:bfloat16,rounding=stochastic"),
    "step_kahan": lambda: of_step("O3:bfloat16,rounding=kahan"),
    "step_whole": with_everything,
    "mixed_precision": lambda: of_optimizer(
        mpjax.mixed_precision(ADAM, "O2:float16"), "O2:float16"
    ),
    "master_weights": lambda: of_optimizer(mpjax.optim.with_master_weights(ADAM), "O2:bfloat16"),
    "eight_bits": lambda: of_optimizer(mpjax.optim.with_8bit_moments(ADAM), params=LARGE),
    "nnx": of_nnx,
    "linen": of_linen,
    "metrics": metrics,
}
NOT_PICKLED = ("linen", "nnx")  # one holds functions, the other has classes of flax alone
NOT_SAVED = ("metrics",)
POLICY = 'O2:float16,half_ops=["exp"],overrides={"head": "f32"}'


def numbered(state):
    """Returns a state whose leaves are filled with 1, 2, 3 and so on."""
    leaves, structure = jax.tree.flatten(state)
    filled = [np.full(np.shape(x), i, x.dtype) for i, x in enumerate(leaves, 1)]
    return jax.tree.unflatten(structure, filled)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b), jax.tree_util.keystr(path)


# ---- tests --------------------------------------------------------------------------------------


def opened(name):
    return zipfile.ZipFile(OLD / f"{name}.zip")


PICKLED = [name for name in STATES if name not in NOT_PICKLED]


@pytest.mark.parametrize("name", thorough_but(PICKLED, *range(0, len(PICKLED), 2)))
def test_an_old_pickle_loads(name):
    assert_same(pickle.loads(opened(name).read("pickle")), numbered(STATES[name]()))


@pytest.mark.parametrize("name", ["step_masters", "step_stochastic", "eight_bits", "metrics"])
def test_new_pickle_names_public_places_alone(name):
    """Then what it names can move."""
    pickled = pickle.dumps(numbered(STATES[name]()), 2)
    texts = [str(arg) for _, arg, _ in pickletools.genops(pickled)]
    assert not [text for text in texts if text.startswith("mpjax._src.")]


def test_an_old_policy_loads():
    assert pickle.loads(opened("policy").read("pickle")) == mpjax.get_policy(POLICY)


SAVED = [name for name in STATES if name not in NOT_SAVED]


@pytest.mark.parametrize("name", thorough_but(SAVED, *range(1, len(SAVED), 2)))
def test_an_old_checkpoint_is_restored(name, tmp_path):
    opened(name).extractall(tmp_path)
    like = STATES[name]()
    want = numbered(like)
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(tmp_path / "orbax", like), want)
    if name == "step_static":  # a scale that never changes is taken from `like`
        want = dataclasses.replace(want, loss_scale=like.loss_scale)
    assert_same(checkpoint.restore(tmp_path / "ours", like), want)


def test_every_class_of_a_state_is_in_an_old_pickle():
    public = {n for n in (*mpjax.__all__, *mpjax.optim.__all__) if n.endswith(("State", "Scale"))}
    of_reports = {"Overflow", "Underflow", "Stalled", "GradientHistogram", "Policy"}
    names = [name for name in (*STATES, "policy") if name not in NOT_PICKLED]
    pickles = [opened(name).read("pickle") for name in names]
    missing = [name for name in public | of_reports if not any(name.encode() in p for p in pickles)]
    assert not missing


# ---- recording ----------------------------------------------------------------------------------


def record(name, state):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if name not in NOT_PICKLED:
            (path / "pickle").write_bytes(pickle.dumps(state, protocol=4))
        if name not in (*NOT_SAVED, "policy"):
            checkpoint.save(path / "ours", state)
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(path / "orbax", state)
        with zipfile.ZipFile(OLD / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(path.rglob("*")):
                archive.write(file, file.relative_to(path))


if __name__ == "__main__":
    OLD.mkdir(exist_ok=True)
    made = {name: lambda make=make: numbered(make()) for name, make in STATES.items()}
    for name, make in {**made, "policy": lambda: mpjax.get_policy(POLICY)}.items():
        if not (OLD / f"{name}.zip").exists():
            record(name, make())
            print("recorded", name)
