"""The models that the benchmarks train, each written once.

``MODELS[name](dtype=None, **sizes)`` returns ``(loss, params, rest, batch, optimizer)``: a function
of ``(params, rest, batch)`` that returns the loss and the next ``rest`` (batch statistics, or
nothing), abstract arrays for its three arguments, and what trains it.

``dtype=None`` is the plain float32 model that autocast takes. ``dtype=jnp.bfloat16`` is the same
model with the casts of an expert: flax's ``dtype=``, or where a model is plain JAX,
``w.astype(dtype)`` at each use; with the statistics of norms, softmax, routers, recurrences and
losses in float32.
"""

import functools

import jax
import optax

from .convolutions import convnext, efficientnet, resnet50
from .experts import moe
from .recurrent import lstm, mamba, ode
from .transformers import bert, gpt2, llama, t5, vit
from .unets import ddpm, unet

MODELS = {
    "gpt2": gpt2,
    "gpt2_medium": functools.partial(gpt2, layers=24, width=1024, heads=16),
    "gpt2_softmax": functools.partial(gpt2, spelled_out=True),
    "llama": llama,
    "llama_remat": functools.partial(llama, remat=True),
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
}

# What tables and charts call them.
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
}


def training_step(loss, optimizer):
    """Returns the step that trains a loss of ``(params, rest, batch)``."""

    def step(state, batch):
        params, rest, opt = state
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, batch)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), rest, opt), value

    return step
