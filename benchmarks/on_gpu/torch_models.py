"""The models of `benchmarks.models` in PyTorch, with the same layers, sizes and parameters.

They are written like PyTorch's own examples: one matmul for queries, keys and values,
`scaled_dot_product_attention`, images in channels-last memory. Only padding differs: if strides
leave one pixel over, XLA's "SAME" pads the end, and PyTorch pads both sides.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class MLP(nn.Module):
    def __init__(self, width: int, approximate: str):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.approximate = approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Layer(nn.Module):
    """Attention and a perceptron, normalized before (GPT-2, ViT) or after (BERT)."""

    def __init__(self, width: int, heads: int, causal: bool, norm_first: bool, gelu: str):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.parts = nn.ModuleList([Attention(width, heads, causal), MLP(width, gelu)])
        self.norm_first = norm_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x)) if self.norm_first else norm(x + part(x))
        return x


class GPT2(nn.Module):
    """GPT-2; the logits share the token embedding's table."""

    def __init__(self, layers=12, width=768, heads=12, vocabulary=50257, length=1024, **_: Any):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(self.layer(width, heads, i) for i in range(layers))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def layer(self, width: int, heads: int, index: int) -> nn.Module:
        return Layer(width, heads, causal=True, norm_first=True, gelu="tanh")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.tokens.weight)


class TransformerEngineGPT2(GPT2):
    """GPT-2 with NVIDIA's fused layers."""

    def layer(self, width: int, heads: int, index: int) -> nn.Module:
        import transformer_engine.pytorch as te

        return te.TransformerLayer(
            width,
            4 * width,
            heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            layer_number=index + 1,
            self_attn_mask_type="causal",
            fuse_qkv_params=True,
            attn_input_format="bshd",
            layernorm_epsilon=1e-6,
        )


class Encoder(nn.Module):
    """BERT's layers, or ViT's with ``norm_first``, and a classifier of the mean token."""

    def __init__(
        self, layers=12, width=768, heads=12, vocabulary=0, length=512, size=224, norm_first=False
    ):
        super().__init__()
        self.vocabulary, self.patches = vocabulary, length if vocabulary else (size // 16) ** 2
        self.embed = nn.Embedding(vocabulary, width) if vocabulary else nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(0.02 * torch.randn(self.patches, width))
        self.layers = nn.ModuleList(
            Layer(width, heads, causal=False, norm_first=norm_first, gelu="none")
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x if self.vocabulary else x.flatten(2).transpose(1, 2)
        x = x + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, filters: int, stride: int):
        super().__init__()
        outputs = 4 * filters
        self.body = nn.Sequential(
            convolution(inputs, filters, 1),
            nn.BatchNorm2d(filters),
            nn.ReLU(inplace=True),
            convolution(filters, filters, 3, stride),
            nn.BatchNorm2d(filters),
            nn.ReLU(inplace=True),
            convolution(filters, outputs, 1),
            nn.BatchNorm2d(outputs),
        )
        nn.init.zeros_(self.body[-1].weight)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(
                convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.shortcut(x) + self.body(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-50 with the strides in its 3 x 3 convolutions."""

    def __init__(self, blocks=(3, 4, 6, 3), **_: Any):
        super().__init__()
        self.stem = nn.Sequential(
            convolution(3, 64, 7, 2),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        body, inputs = [], 64
        for stage, count in enumerate(blocks):
            for index in range(count):
                body.append(Bottleneck(inputs, 64 * 2**stage, 2 if not index and stage else 1))
                inputs = 256 * 2**stage
        self.body, self.head = nn.Sequential(*body), nn.Linear(inputs, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))


# Names as in `benchmarks.models.MODELS`.
MODELS = {
    "gpt2": GPT2,
    "gpt2_medium": GPT2,
    "bert": Encoder,
    "vit": lambda **sizes: Encoder(norm_first=True, **sizes),
    "resnet50": ResNet,
}


def build(name: str, sizes: dict[str, Any], engine: bool = False) -> nn.Module:
    """Returns a model of ``benchmarks.models`` with the same size arguments."""
    sizes = {k: v for k, v in sizes.items() if k not in ("batch",)}
    if engine:
        return tables(TransformerEngineGPT2(**sizes))
    return tables(MODELS[name](**sizes))


def tables(model: nn.Module) -> nn.Module:
    """Draws embedding tables as GPT-2 does, because PyTorch's default makes logits enormous."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
    return model
