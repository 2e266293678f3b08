"""Attention by hand as the fused kernel, on eight GPUs that need not be there: no gathers."""

import subprocess
import sys

import pytest

from mpjax._src.hardware.compiler import missing_for

PROGRAM = """
import os, re, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
import mpjax
from mpjax._src.base import _jax
from mpjax._src.base.devices import traced_for
from mpjax._src.hardware.targets import find_target

kind, *axes = sys.argv[1:]
target = find_target("h100")
gpus = topologies.get_topology_desc(
    platform="cuda", topology="1x1x8", target_config=target.config
).devices
mesh = Mesh(np.array(gpus).reshape(4, 2), ("data", "model"), axis_types=(AxisType[kind],) * 2)
spec = PartitionSpec(*(axis if axis != "-" else None for axis in axes))
x = jax.ShapeDtypeStruct((8, 512, 16, 64), jnp.float32, sharding=NamedSharding(mesh, spec))

def loss(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = jnp.where(jnp.tril(jnp.ones((512, 512))) == 0, -jnp.inf, q @ k.swapaxes(2, 3) / 8)
    return jnp.sum(jnp.sin(jax.nn.softmax(scores) @ v))

step = mpjax.autocast(loss, "mixed_bfloat16,fused_attention=true")
with traced_for("h100"), jax.set_mesh(mesh):
    hlo = jax.jit(jax.grad(step, (0, 1, 2))).lower(x, x, x).compile().as_text()
names = r"all-gather|all-to-all|collective-permute|fmhaSoftmaxBackward|fmhaSoftmax"
print(*sorted(set(re.findall(names, hlo))))
"""


@pytest.mark.thorough
@pytest.mark.skipif(bool(missing_for("cuda")), reason="needs mpjax[aot-cuda]")
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axes", [("data",), ("data", "-", "model")], ids=["batch", "heads"])
def test_attention_by_hand_over_batches_or_heads_gathers_nothing(kind, axes):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, *axes], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["fmhaSoftmax", "fmhaSoftmaxBackward"], done.stderr[-2000:]
