"""Values kept in 8 bits on eight GPUs that need not be there: devices exchange what they did."""

import json

import pytest
from absent import on_eight_gpus

from mpjax._src.tools.hardware.compiler import missing_for

PROGRAM = """
def abstract(spec, *shape):
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

x = abstract(["data", None, None], 64, 512, 1024)
up, down = abstract([None, axes[0] if axes else None], 1024, 4096), abstract(axes, 4096, 1024)
scale = abstract([None], 1024)

def loss(layers, x):
    for up, down, scale in layers:
        mean = x.mean(-1, keepdims=True)
        normed = (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(normed * scale @ up) @ down
    return jnp.square(x).mean()

for storage in ("lean", "8bit"):
    with traced_for("h100"), jax.set_mesh(mesh):
        step = jax.grad(mpjax.autocast(loss, f"mixed_bfloat16,storage={storage}"))
        hlo = jax.jit(step).lower([(up, down, scale)] * 2, x).compile().as_text()
    names = r"(all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\\("
    print(json.dumps([collections.Counter(re.findall(names, hlo)), "s8[" in hlo]))
"""


@pytest.mark.thorough
@pytest.mark.elsewhere("test-aot", bool(missing_for("cuda")))
@pytest.mark.parametrize(
    "sharding", [("Auto",), ("Explicit",), ("Auto", "model")], ids=["batch", "explicit", "features"]
)
def test_codes_add_no_exchange(sharding):
    found = on_eight_gpus(PROGRAM, *sharding)
    (lean, whole), (coded, codes) = map(json.loads, found.splitlines())
    assert codes and not whole
    assert coded.keys() == lean.keys() == {"all-reduce"}
    assert coded["all-reduce"] <= lean["all-reduce"]
