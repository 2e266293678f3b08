"""What share of a device's peak a transformer's training step reaches."""

from typing import Any


def train_flops(parameters: int, layers: int, width: int, length: int, tokens: int) -> float:
    """Returns the FLOPs that a training step needs: ``(6 N + 12 L S D) tokens``.

    Args:
        parameters: N, those that multiply: a table that logits share counts once, one that is
            only looked up does not.
        layers: L, of attention.
        width: D, of the residual stream.
        length: S, of a sequence; attention counts in full, causal or not.
        tokens: In a step.

    Chowdhery et al., PaLM, 2022, appendix B. What is computed again does not count.
    """
    return float(6 * parameters + 12 * layers * length * width) * tokens


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Returns model FLOPs utilization: the share of a device's peak that is the model's own."""
    return flops / seconds / peak


def target_of(kind: str) -> Any:
    """Returns the target that a device is, by what it calls itself; None if it is none of them."""
    from mpjax._src.hardware.targets import GPUS, find_target

    known = {name: fields[0] for name, fields in GPUS.items()}
    same = [name for name, called in known.items() if called == kind]
    like = [name for name, called in known.items() if called.startswith(kind)]
    found = same or (like if len(like) == 1 else [])
    return find_target(found[0]) if found else None


def peak_of(kind: str, dtype: str = "bf16") -> float | None:
    """Returns a device's dense peak in FLOP/s, from its datasheet."""
    target = target_of(kind)
    return target.peaks.get(dtype) if target else None
