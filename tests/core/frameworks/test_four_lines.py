"""Loops of optax run in float16 after four lines: an import, the optimizer, gradient and state."""

import difflib
import functools
import itertools
import os
import platform
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import normal

LOOPS = Path(__file__).parent / "loops"
X, Y = np.asarray(normal(1, 32, 4)), np.asarray(normal(2, 32, 8))

IMPORT = {"import optax\n": "import mpjax\nimport optax\n"}
OPTIMIZER = {
    "optax.adamw(1e-2)\n": "mpjax.mixed_precision(optax.adamw(1e-2), 'POLICY')\n",
}
GRADIENT = {
    "jax.value_and_grad(loss_fn, has": "optimizer.value_and_grad(loss_fn, opt_state, has",
}
# Each loop, and what of it is written otherwise.
CHANGES = {
    "optax_linen": {
        **IMPORT,
        **OPTIMIZER,
        **GRADIENT,
        "= new_stats\n": "= mpjax.select(opt_state.finite, new_stats, batch_stats)\n",
    },
    "optax_haiku": {
        **IMPORT,
        **OPTIMIZER,
        **GRADIENT,
        "= new_state\n": "= mpjax.select(opt_state.finite, new_state, state)\n",
    },
    "optax_equinox": {
        **IMPORT,
        **OPTIMIZER,
        "eqx.filter_value_and_grad(loss_fn": "optimizer.value_and_grad(loss_fn, opt_state",
        "= new_state\n": "= mpjax.select(opt_state.finite, new_state, state)\n",
    },
    "optax_nnx": {
        "import optax\n": "import mpjax.nnx\nimport optax\n",
        "nnx.Optimizer(model, optax.adamw(1e-2)": (
            "mpjax.nnx.Optimizer(model, optax.adamw(1e-2), 'POLICY'"
        ),
        "nnx.value_and_grad(loss_fn)": "mpjax.nnx.value_and_grad(loss_fn, optimizer)",
    },
}


def changed(name, policy):
    """Returns the source of a loop in mixed precision, and the lines that differ."""
    source = plain = (LOOPS / f"{name}.py").read_text()
    for old, new in CHANGES[name].items():
        assert source.count(old) == 1, old
        source = source.replace(old, new.replace("POLICY", policy))
    diff = difflib.ndiff(plain.splitlines(), source.splitlines())
    return source, [line for line in diff if line.startswith("+")]


TOLERANCES = {"float32": 1e-5, "mixed_bfloat16": 0.03, "mixed_float16": 0.03}
ALL = list(itertools.product(CHANGES, TOLERANCES))


@functools.cache
def plain_losses(name):
    return run(name, None)[-1]


def run(name, folder, policy=None, steps=40):
    path = LOOPS / f"{name}.py"
    if policy:
        path = folder / f"{name}_{policy}.py"
        path.write_text(changed(name, policy)[0])
    loop = runpy.run_path(str(path))
    kept, losses = loop["start"](X), []
    for _ in range(steps):
        loss, *new = as_tuple(loop["train_step"](*kept, X, Y))
        kept = new or kept
        losses.append(float(loss))
    return loop, kept, losses


def as_tuple(out):
    return out if isinstance(out, tuple) else (out,)


def arrays(tree):
    found = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in found]
    return [
        np.array(jax.random.key_data(x) if key else x) for x, key in zip(found, keys, strict=True)
    ]


@pytest.mark.parametrize("name", CHANGES)
def test_optax_loop_needs_at_most_four_changed_lines(name):
    _, lines = changed(name, "mixed_float16")
    assert len(lines) <= 4, lines


@pytest.mark.thorough
@pytest.mark.parametrize("name, policy", ALL)
def test_changed_loop_has_the_curve_of_float32_and_a_skip_leaves_no_trace(name, policy, tmp_path):
    loop, kept, losses = run(name, tmp_path, policy)
    np.testing.assert_allclose(losses, plain_losses(name), rtol=TOLERANCES[policy])
    assert losses[-1] < 0.9 * losses[0]
    before = [arrays(part) for part in kept]
    bad = X.copy()
    bad[3, 1] = np.nan
    _, *new = as_tuple(loop["train_step"](*kept, bad, Y))
    after = [arrays(part) for part in new or kept]
    optimizer = (new or kept)[-1]
    opt_state = getattr(optimizer, "opt_state", optimizer)
    assert int(opt_state.skipped_steps[...]) == 1
    for old, now in zip(before[:-1], after[:-1], strict=True):
        assert all(map(np.array_equal, old, now))


BITS = """
import pathlib, sys
folder = pathlib.Path(sys.argv[1])
sys.path[:0] = sys.argv[2:]
import numpy as np
from test_four_lines import CHANGES, arrays, run
for name in CHANGES:
    _, plain, wanted = run(name, folder, steps=50)
    _, kept, losses = run(name, folder, "float32", steps=50)
    assert losses == wanted, name
    for old, new in zip(plain[:-1], kept[:-1], strict=True):  # the optimizer's state holds more
        assert all(map(np.array_equal, arrays(old), arrays(new))), name
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="no instructions without fused ones")
def test_changed_loop_under_float32_equals_the_plain_loop_bit_for_bit(tmp_path):
    """Where XLA fuses no multiplication and addition: which ones it does depends on what is near.

    Fifty steps in a process of their own, whose compiler knows no such instruction.
    """
    tests = LOOPS.parents[2]
    folders = [LOOPS.parent, tests / "helpers", tests.parent]
    environment = {**os.environ, "XLA_FLAGS": "--xla_cpu_max_isa=AVX", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", BITS, tmp_path, *folders]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
