"""The models that the benchmarks train, each written once.

``MODELS[name](dtype=None, **sizes)`` returns ``(loss, params, rest, batch, optimizer)``. ``loss``
is a function of ``(params, rest, batch)`` that returns the loss and the next ``rest`` (batch
statistics, or nothing). The three arguments are abstract arrays.

``dtype=None`` is the plain float32 model, which autocast takes. ``dtype=jnp.bfloat16`` is the same
model with the casts of an expert: flax's ``dtype=``, or ``w.astype(dtype)`` at each use in plain
JAX. Statistics of norms, softmax, routers, recurrences and losses stay float32,
and so do attention's scores where JAX's own function has them so. ``strictly(loss)`` is that model
with 16-bit scores, weights of attention and routers: it has no float32 matmul, in derivatives too.
"""

import functools

import jax
import optax

from .attentions import mla, pairformer
from .audio import wavenet, whisper
from .convolutions import convnext, efficientnet, resnet50
from .experts import moe
from .images import dit, mixer, swin
from .layers import strictly as strictly
from .recurrent import lstm, mamba, ode
from .sparse import dlrm, graph
from .transformers import bert, bert_mlm, gpt2, llama, t5, vit
from .unets import ddpm, unet

MODELS = {
    "gpt2": gpt2,
    "gpt2_medium": functools.partial(gpt2, layers=24, width=1024, heads=16),
    "gpt2_softmax": functools.partial(gpt2, spelled_out=True),
    "llama": llama,
    "llama_remat": functools.partial(llama, around=jax.checkpoint),
    "llama_unrolled": functools.partial(llama, scanned=False),
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "moe_onehot": moe,
    "moe_ragged": functools.partial(moe, ragged=True),
    "resnet50": resnet50,
    "convnext": convnext,
    "efficientnet": efficientnet,
    "unet": unet,
    "ddpm": ddpm,
    "lstm": lstm,
    "mamba": mamba,
    "ode": ode,
    "bert_mlm": bert_mlm,
    "swin": swin,
    "whisper": whisper,
    "mixer": mixer,
    "dit": dit,
    "wavenet": wavenet,
    "graph": graph,
    "dlrm": dlrm,
    "mla": mla,
    "pairformer": pairformer,
}

# The titles of the models in tables and charts.
TITLES = {
    "gpt2": "GPT-2 124M",
    "gpt2_medium": "GPT-2 355M",
    "gpt2_softmax": "GPT-2 124M, attention spelled out",
    "llama": "Llama, scan over layers",
    "llama_remat": "Llama, scan and jax.checkpoint",
    "llama_unrolled": "Llama, layers written out",
    "bert": "BERT-base",
    "vit": "ViT-B/16",
    "t5": "T5-small",
    "moe_onehot": "MoE, one-hot dispatch",
    "moe_ragged": "MoE, ragged_dot",
    "resnet50": "ResNet-50",
    "convnext": "ConvNeXt-T",
    "efficientnet": "EfficientNet-B0",
    "unet": "Segmentation U-Net",
    "ddpm": "Diffusion U-Net",
    "lstm": "LSTM language model",
    "mamba": "Mamba",
    "ode": "Neural ODE",
    "bert_mlm": "BERT-base, masked words",
    "swin": "Swin-T",
    "whisper": "Whisper base",
    "mixer": "MLP-Mixer-B/16",
    "dit": "DiT-B/2",
    "wavenet": "WaveNet",
    "graph": "Graph network",
    "dlrm": "DLRM",
    "mla": "Latent attention (MLA)",
    "pairformer": "Pairformer",
}

# Sizes for tests and for smoke tests.
_TEXT = {"batch": 2, "length": 16, "width": 32, "heads": 2, "vocabulary": 64}
_IMAGES = {"batch": 2, "size": 32}
SMALL = {
    **{
        name: {**_TEXT, "layers": 1}
        for name in ("gpt2", "gpt2_medium", "gpt2_softmax", "bert", "bert_mlm")
    },
    **{
        name: {**_TEXT, "layers": 2, "groups": 1}
        for name in ("llama", "llama_remat", "llama_unrolled")
    },
    "vit": {**_IMAGES, "width": 32, "heads": 2, "layers": 1},
    "t5": {**_TEXT, "answer": 8, "layers": 1, "hidden": 64},
    **{
        name: {**_TEXT, "groups": 1, "hidden": 64, "layers": 1}
        for name in ("moe_onehot", "moe_ragged")
    },
    "resnet50": {**_IMAGES, "blocks": (1, 1)},
    "convnext": {**_IMAGES, "blocks": (1, 1), "widths": (8, 16)},
    "efficientnet": {**_IMAGES, "stages": ((1, 16, 1, 1, 3), (6, 24, 1, 2, 3))},
    "unet": {**_IMAGES, "widths": (8, 16)},
    "ddpm": {**_IMAGES, "widths": (32, 32), "blocks": 1},
    "lstm": {"batch": 2, "length": 8, "width": 16, "layers": 1, "vocabulary": 64},
    "mamba": {"batch": 2, "length": 8, "width": 32, "state": 4, "layers": 1, "vocabulary": 64},
    "ode": {"steps": 2, "batch": 2, "width": 8},
    "swin": {**_IMAGES, "blocks": (2, 1), "heads": (2, 4), "width": 16, "window": 4},
    "whisper": {
        "batch": 2,
        "frames": 32,
        "channels": 8,
        "answer": 8,
        "width": 32,
        "heads": 2,
        "layers": 1,
        "vocabulary": 65,
    },
    "mixer": {**_IMAGES, "width": 32, "layers": 1, "between": 16, "within": 64},
    "dit": {"batch": 2, "size": 8, "width": 32, "heads": 2, "layers": 1},
    "wavenet": {"batch": 2, "length": 32, "stacks": 1, "doublings": 3, "width": 16, "skip": 16},
    "graph": {"nodes": 20, "edges": 50, "features": 6, "layers": 1, "width": 16},
    "dlrm": {"batch": 8, "tables": 3, "rows": 10, "width": 8, "bottom": (16,), "top": (16, 1)},
    "mla": {
        **_TEXT,
        "layers": 1,
        "latent": 16,
        "size": 16,
        "turned": 8,
        "hidden": 64,
    },
    "pairformer": {
        "batch": 1,
        "length": 8,
        "layers": 1,
        "width": 16,
        "pair_width": 16,
        "heads": 2,
        "pair_heads": 2,
        "bins": 8,
    },
}


def training_step(loss, optimizer):
    """Returns a training step for a loss of ``(params, rest, batch)``."""

    def step(state, batch):
        params, rest, opt = state
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, batch)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), rest, opt), value

    return step
