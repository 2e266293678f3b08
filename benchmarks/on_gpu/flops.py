"""The share of a device's peak that a transformer's training step reaches."""

from typing import Any


def train_flops(parameters: int, layers: int, width: int, length: int, tokens: int) -> float:
    """Returns the FLOPs that a training step needs: ``(6 N + 12 L S D) tokens``.

    Args:
        parameters: N, the number of parameters that multiply. An embedding table that the logits
            share counts once; a table that is only looked up does not count.
        layers: L, the number of layers with attention.
        width: D, the width of the residual stream.
        length: S, the length of a sequence. Attention counts in full, causal or not.
        tokens: The number of tokens in a step.

    Chowdhery et al., PaLM, 2022, appendix B. Rematerialization does not count.
    """
    return float(6 * parameters + 12 * layers * length * width) * tokens


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Returns the model FLOPs utilization: the model's FLOPs per second as a share of the peak."""
    return flops / seconds / peak


def target_of(kind: str) -> Any:
    """Returns the target of a device by the device's name, or None if there is no such target."""
    from mpjax._src.tools.hardware.targets import GPUS, find_target

    known = {name: fields[0] for name, fields in GPUS.items()}
    same = [name for name, called in known.items() if called == kind]
    like = [name for name, called in known.items() if called.startswith(kind)]
    found = same or (like if len(like) == 1 else [])
    return find_target(found[0]) if found else None


def peak_of(kind: str, dtype: str = "bf16") -> float | None:
    """Returns a device's dense peak in FLOP/s, from its datasheet."""
    target = target_of(kind)
    return target.peaks.get(dtype) if target else None
