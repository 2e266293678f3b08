"""Fine-tunes models of Bonsai, which has no training loop, as Flax's documentation trains modules.

Small sizes, random weights and random examples; the models' own code is unchanged.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def vision_transformer(rngs):
    from bonsai.models.vit.modeling import ModelConfig, ViTClassificationModel

    sizes = {"image_size": (32, 32), "patch_size": (4, 4), "num_channels": 3, "num_labels": 10}
    sizes |= {"hidden_dim": 64, "num_heads": 4, "mlp_dim": 256, "num_layers": 2, "eps": 1e-12}
    model = ViTClassificationModel(
        ModelConfig(attn_dropout_prob=0.0, dropout_prob=0.0, **sizes), rngs=rngs
    )
    return model, images(32), lambda model, images: model(images, rngs=None)


def resnet(rngs):
    from bonsai.models.resnet.modeling import ModelConfig, ResNet

    model = ResNet(ModelConfig([1, 1, 1, 1], num_classes=10), rngs=rngs)
    return model, images(32), lambda model, images: model(images)


def convnext(rngs):
    from bonsai.models.convnext.modeling import ConvNeXt, ModelConfig

    model = ConvNeXt(ModelConfig((1, 1, 2, 1), (16, 32, 64, 128), drop_path_rate=0.0), rngs=rngs)
    return model, images(64), lambda model, images: model(images, rngs=nnx.Rngs(0), train=False)


def mamba2(rngs):
    from bonsai.models.mamba2.modeling import Mamba2ForCausalLM, ModelConfig

    model = Mamba2ForCausalLM(ModelConfig.tiny(), rngs=rngs)
    return model, texts(64, 256), lambda model, tokens: model(tokens)["logits"][:, 0]


def qwen3(rngs):
    from bonsai.models.qwen3 import modeling

    sizes = {"num_layers": 2, "vocab_size": 256, "emb_dim": 64, "mlp_dim": 128, "num_heads": 4}
    sizes |= {"head_dim": 16, "num_kv_heads": 2, "norm_eps": 1e-6, "rope_theta": 1000000}
    sizes |= {"rope_scaling_factor": None, "local_rope_theta": None}
    config = modeling.ModelConfig(
        **sizes, tie_word_embeddings=True, shd_cfg=modeling.ShardConfig.no_sharding()
    )
    model = modeling.Qwen3(config, rngs=rngs)

    def run(model, tokens):
        cache = modeling.init_cache(config, *tokens.shape, 1, jnp.float32)
        return model(tokens, cache=cache, segment_ids=jnp.ones(tokens.shape))[:, -1]

    return model, texts(32, 256), run


def images(size):
    labels = jax.random.randint(jax.random.key(1), (64,), 0, 10)
    pictures = jax.random.normal(jax.random.key(2), (10, size, size, 3))
    return pictures[labels] + jax.random.normal(jax.random.key(3), (64, size, size, 3)), labels


def texts(length, words):
    tokens = jax.random.randint(jax.random.key(1), (64, length), 0, words)
    return tokens, tokens[:, 0]


def main():
    model, (xs, labels), run = globals()[sys.argv[1]](nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, xs, labels):
        def loss_fn(model):
            logits = run(model, xs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    for step in range(8):
        rows = slice(8 * step, 8 * step + 8)
        loss = train_step(model, optimizer, xs[rows], labels[rows])
        print(f"step {step} loss {loss:.9g}")


main()
