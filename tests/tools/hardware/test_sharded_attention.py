"""Attention by hand as the fused kernel, on eight GPUs that need not be there: no gathers."""

import pytest
from absent import on_eight_gpus

from mpjax._src.tools.hardware.compiler import missing_for

PROGRAM = """
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
@pytest.mark.elsewhere("test-aot", bool(missing_for("cuda")))
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("axes", [("data",), ("data", "-", "model")], ids=["batch", "heads"])
def test_attention_by_hand_over_batches_or_heads_gathers_nothing(kind, axes):
    found = on_eight_gpus(PROGRAM, kind, *axes)
    assert found.split() == ["fmhaSoftmax", "fmhaSoftmaxBackward"]
