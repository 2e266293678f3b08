"""Inference in half: weights in safetensors, the program by jax.export, run without mpjax.

    python examples/inference.py --size small --policy mixed_bfloat16 --folder exported

The script trains a convolutional network in float32 on half of scikit-learn's digits. It writes the
weights in the policy's half dtype and exports the forward pass under autocast, for any batch size.
Another Python process, which imports neither mpjax nor the model, loads both and classifies the
held-out digits. The agreement is with the float32 network of the first process.

The size of the program, marked ~, is an order of magnitude, because it includes the file names of
the traced code. These are the expected figures of the small size on a CPU. The last row, spread, is
the range of float32 over three seeds:

    policy          accuracy %  agreement %  weights KiB  ~program KiB
    float32         95.22       100          122.2        7.25
    mixed_bfloat16  95.11       99.89        61.39        7.664
    mixed_float16   95.22       100          61.38        7.664
    spread          0.5562      0            0            0
"""

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import export

import mpjax
import mpjax.nnx

SIZES = {
    "smoke": {"steps": 3, "batch": 8, "width": 4, "rate": 3e-3, "folder": ""},
    "small": {"steps": 400, "batch": 64, "width": 32, "rate": 3e-3, "folder": ""},
    "full": {"steps": 5000, "batch": 256, "width": 256, "rate": 1e-3, "folder": ""},
}

# The code that the other Python process runs.
SERVER = """
import sys, jax, numpy as np
from jax import export
from safetensors.flax import load_file

program, weights, images, labels = sys.argv[1:]
run = export.deserialize(open(program, "rb").read())
np.save(labels, run.call(load_file(weights), np.load(images)).argmax(-1))
assert "mpjax" not in sys.modules
"""


class Network(nnx.Module):
    def __init__(self, width, rngs):
        self.first = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.second = nnx.Conv(width, 2 * width, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.LayerNorm(32 * width, rngs=rngs)
        self.last = nnx.Linear(32 * width, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.second(nnx.relu(self.first(x))))
        return self.last(self.norm(x.reshape(x.shape[0], 32 * self.first.out_features)))


def loss_fn(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def trained(options, data):
    """Returns a network trained in float32, and its losses."""
    model = Network(options.width, nnx.Rngs(options.seed))
    schedule = optax.cosine_decay_schedule(options.rate, options.steps)
    optimizer = mpjax.nnx.Optimizer(model, optax.adamw(schedule), "float32")

    @nnx.jit
    def step(model, optimizer, images, labels):
        loss, grads = mpjax.nnx.value_and_grad(loss_fn, optimizer)(model, images, labels)
        optimizer.update(model, grads)
        return loss

    batches = common.batches(data, options.batch, options.seed)
    numbered = zip(common.steps(options.steps), batches, strict=False)
    return model, [step(model, optimizer, *batch) for _, batch in numbered]


def write(model, policy, folder):
    """Writes weights and program into a folder; returns their paths."""
    graph, state = nnx.split(model)
    half = mpjax.checkpoint.export_params({"params": nnx.to_pure_dict(state)}, policy.compute_dtype)
    program, weights = folder / "program.bin", folder / "weights.safetensors"
    mpjax.checkpoint.save_safetensors(weights, half)

    def forward(weights, images):
        named = nnx.traversals.unflatten_mapping(weights, sep=".")
        nnx.replace_by_pure_dict(state, named)
        return nnx.merge(graph, state)(images)

    flat = nnx.traversals.flatten_mapping(half, sep=".")
    images = jax.ShapeDtypeStruct(export.symbolic_shape("b, 8, 8, 1"), jnp.float32)
    run = jax.jit(mpjax.autocast(forward, policy))
    exported = export.export(run, platforms=["cpu", "cuda", "tpu"])(flat, images)
    program.write_bytes(exported.serialize())
    return program, weights


def train(options):
    data, (held_out, labels) = common.read_digits()
    model, losses = trained(options, data)
    policy = mpjax.get_policy(options.policy)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        program, weights = write(model, policy, folder)
        images, found = folder / "images.npy", folder / "labels.npy"
        np.save(images, held_out)
        paths = map(str, (program, weights, images, found))
        subprocess.run([sys.executable, "-c", SERVER, *paths], check=True)
        predicted = np.load(found)
        sizes = [path.stat().st_size / 1024 for path in (weights, program)]
    own = model(held_out).argmax(-1)
    return {
        "figures": {
            "accuracy %": 100 * (predicted == labels).mean(),
            "agreement %": 100 * (predicted == own).mean(),
            "weights KiB": sizes[0],
            "~program KiB": sizes[1],
        },
        "curves": {"loss": losses},
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
