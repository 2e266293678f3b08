"""docs/coming_from: their code and ours, from the same weights, give the same losses.

Theirs runs in an interpreter that has their framework: in .venv-torch and so on, which `make
test-torch` makes, or in this one. Without it these tests are skipped.
"""

import json
import os
import subprocess

import numpy as np
import pages
import pytest
from support import python_of

import mpjax

FOLDER = pages.ROOT / "docs" / "coming_from"
OVERFLOWS = np.random.default_rng(0).random(300) < 0.1

# Their scales from 2^10 on, growing after four good steps, when gradients overflow now and then.
SCALES = {
    "torch": """
import torch
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.0)
for overflows in OVERFLOWS:
    scaler.scale(weight.sum()).backward()
    weight.grad = torch.full((1,), float("inf") if overflows else 1.0)
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
""",
    # On a CPU it switches itself off: what it does there otherwise is switched on.
    "paddle": """
from unittest import mock
import paddle
with mock.patch.object(paddle.base.core.Place, "is_gpu_place", lambda self: True):
    scaler = paddle.amp.GradScaler(init_loss_scaling=2.0**10, incr_every_n_steps=4)
for overflows in OVERFLOWS:
    scaler._cache_found_inf = overflows
    scaler._update()
    scales.append(scaler._scale.item())
""",
    "tensorflow": """
import keras
import numpy
optimizer = keras.optimizers.LossScaleOptimizer(
    keras.optimizers.SGD(0.0), initial_scale=2.0**10, dynamic_growth_steps=4
)
weight = keras.Variable(numpy.ones(1, "float32"))
for overflows in OVERFLOWS:
    optimizer.apply([numpy.float32([numpy.inf if overflows else 1.0])], [weight])
    scales.append(float(optimizer.dynamic_scale))
""",
    "mindspore": """
import mindspore
scaler = mindspore.amp.DynamicLossScaler(2**10, 2, 4)
for overflows in OVERFLOWS:
    scaler.adjust(mindspore.Tensor(not overflows))
    scales.append(float(scaler.scale_value))
""",
}


def interpreter(framework: str) -> str:
    """Returns a Python that has a framework, or skips the test."""
    if python := python_of(framework):
        return python
    pytest.skip(f"{framework} is not installed: make test-{framework}")


def theirs(framework: str, page, changes=None) -> dict:
    """Returns what a framework's blocks of a page leave behind, run in a process of their own."""
    request = {
        "page": str(page),
        "wanted": ["numpy", framework],
        "changes": changes or {},
        "names": ["losses", "scales"],
    }
    done = subprocess.run(
        [interpreter(framework), pages.__file__],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "KERAS_BACKEND": "tensorflow"},  # mpjax.keras asks for JAX here
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_framework_has_blocks_of_its_own():
    found = {page.stem: pages.kinds(page) for page in FOLDER.glob("*.md")}
    assert "torch" in found["pytorch"] and "mpx" in found["jax"]
    assert {"apex", "paddle", "mindspore"} <= found["others"]
    assert "tensorflow" in found["tensorflow_keras"]
    assert all("" in kinds for name, kinds in found.items() if name != "README")


OURS = {'"mixed_float16")\nstate = init': '"float32")\nstate = init'}

# Where a framework's code is next to ours: the page, what our losses are called there, and what to
# replace for two loops in float32. Blocks of other frameworks on a page do not run.
FLOAT32 = {
    "torch": ("pytorch", "losses", {"dtype=torch.float16)": "enabled=False)", **OURS}),
    "paddle": ("others", "paddle_losses", {'optimizer, "O2:float16")': 'optimizer, "float32")'}),
    "mindspore": (
        "others",
        "mindspore_losses",
        {
            '"O2", ms.float16': '"O0", ms.float16',
            'optimizer, "mixed_float16")': 'optimizer, "float32")',
        },
    ),
    "tensorflow": (
        "tensorflow_keras",
        "losses",
        {'policy("mixed_float16")': 'policy("float32")', **OURS},
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("framework", FLOAT32)
def test_code_of_other_frameworks_and_ours_learns_the_same(framework):
    name, ours, changes = FLOAT32[framework]
    page = FOLDER / f"{name}.md"
    np.testing.assert_allclose(theirs(framework, page)["losses"], pages.run(page)[ours], rtol=0.05)
    found = theirs(framework, page, changes)["losses"]
    np.testing.assert_allclose(found, pages.run(page, changes=changes)[ours], rtol=1e-3)
    assert found[-1] < found[0] / 10


@pytest.mark.thorough
def test_mpx_and_ours_learn_the_same():
    page = FOLDER / "jax.md"
    found = theirs("mpx", page)["losses"]
    np.testing.assert_allclose(found, pages.run(page)["module_losses"], rtol=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("framework", SCALES)
def test_loss_scales_of_other_frameworks_equal_ours_under_overflows(framework, tmp_path):
    page = tmp_path / "page.md"
    code = f"OVERFLOWS, scales = {OVERFLOWS.tolist()}, []\n{SCALES[framework]}"
    page.write_text(f"```python {framework}\n{code}```\n")
    scale, scales = mpjax.DynamicLossScale(2.0**10, growth_interval=4, max_scale=2.0**126), []
    for overflows in OVERFLOWS:
        scale = scale.adjust(not overflows)
        scales.append(float(scale.loss_scale))
    assert theirs(framework, page)["scales"] == scales
    assert len({*scales}) > 5
