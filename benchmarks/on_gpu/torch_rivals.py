"""Training steps of the same models in PyTorch, with the settings that its documentation advises.

The settings come from its performance tuning guide and recipes: `torch.compile`, `torch.autocast`,
`GradScaler`, fused optimizers, `cudnn.benchmark`, channels-last images,
`set_float32_matmul_precision("high")`, and gradients set to None.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.on_gpu import torch_models
from benchmarks.on_gpu.cases import labels

BF16, F16 = torch.bfloat16, torch.float16
# By name: the autocast dtype, whether float32 matmuls use TF32, torch.compile's mode or None.
RIVALS: dict[str, dict[str, Any]] = {
    "torch autocast, compile": {"dtype": BF16, "tf32": True, "mode": "default"},
    "torch autocast": {"dtype": BF16, "tf32": True, "mode": None},
    "torch float16, GradScaler, compile": {"dtype": F16, "tf32": True, "mode": "default"},
    "torch float32, compile": {"dtype": None, "tf32": False, "mode": "default"},
    "torch float32, TF32, compile": {"dtype": None, "tf32": True, "mode": "default"},
    "torch autocast, max-autotune": {"dtype": BF16, "tf32": True, "mode": "max-autotune"},
    "Transformer Engine": {"dtype": BF16, "tf32": True, "mode": None, "engine": True},
}

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def arrays(case: str, sizes: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a batch: tokens or images, and labels."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(labels(sizes, len(shape)), shape, generator=generator)

    batch = sizes["batch"]
    if "vocabulary" in sizes:
        inputs = whole(batch, sizes["length"])
        answers = whole(*inputs.shape) if case.startswith("gpt2") else whole(batch)
    else:
        inputs = torch.randn(batch, 3, sizes["size"], sizes["size"], generator=generator)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
        answers = whole(batch)
    return inputs.to(DEVICE), answers.to(DEVICE)


def optimizer_of(case: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of `benchmarks.models`, with optax's settings."""
    if case == "resnet50":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=1e-4, fused=True)


def choose_precision(tf32: bool) -> None:
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True


def build(
    case: str, sizes: dict[str, Any], rival: str, smoke: bool
) -> tuple[Callable[[int], float], Callable[[], float], dict[str, Any]]:
    """Returns a function that times steps, a function that returns the last loss, and facts."""
    settings = RIVALS[rival]
    choose_precision(settings["tf32"])
    torch.manual_seed(0)
    model = torch_models.build(case, sizes, settings.get("engine", False))
    model = model.to(DEVICE, memory_format=torch.channels_last).train()
    count = sum(p.numel() for p in model.parameters())
    optimizer = optimizer_of(case, model)
    inputs, answers = arrays(case, sizes)
    scaler = torch.amp.GradScaler(DEVICE, enabled=settings["dtype"] == F16)

    def loss_of(inputs: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        logits = model(inputs)
        return F.cross_entropy(logits.flatten(0, -2), answers.flatten())

    forward = loss_of
    if settings["mode"]:
        # The inductor takes long to generate code, which a smoke test on a CPU does not need.
        how = {"backend": "aot_eager"} if smoke else {"mode": settings["mode"]}
        forward = torch.compile(loss_of, **how)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        half = torch.autocast(DEVICE, settings["dtype"]) if settings["dtype"] else None
        with half or contextlib.nullcontext():
            loss = forward(inputs, answers)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    start = time.perf_counter()
    loss = step()
    synchronize()
    facts = {
        "torch": torch.__version__,
        "parameters": count,
        "compile_s": round(time.perf_counter() - start, 2),
    }

    def run(steps: int) -> float:
        nonlocal loss
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        synchronize()
        return time.perf_counter() - start

    return run, lambda: float(loss), facts


def device() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
