"""The floating dtypes of policies: their names, what they represent, and a device's 16-bit one."""

import contextlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.errors import brief, did_you_mean, misplaced

DTypeLike = Any

# The short name, as in jmp, comes first; the other valid spellings follow.
SPELLINGS = {
    np.dtype(jnp.float16): ("f16", "float16", "fp16"),
    np.dtype(jnp.bfloat16): ("bf16", "bfloat16"),
    np.dtype(jnp.float32): ("f32", "float32", "fp32", "full"),
    np.dtype(jnp.float64): ("f64", "float64", "fp64"),
}
BY_NAME = {name: dtype for dtype, names in SPELLINGS.items() for name in names}
FLOAT16, BFLOAT16, FLOAT32, FLOAT64 = SPELLINGS
HALVES = (FLOAT16, BFLOAT16)


# What others compute in that no policy can, and the way out.
ELSEWHERE = {
    r"tf32|tensorfloat|highest|bf?(loat)?16_3x": (
        " JAX's float32 matmuls run in TF32 by default, on NVIDIA GPUs from Ampere on: use "
        "'float32'. jax.default_matmul_precision('highest') or ('tensorfloat32') changes that."
    ),
    r"fp[468]|nf4|float[468](?!\d)|f[468]e|e[45]m[32]|u?int\d|transformer.?engine": (
        " Policies have 16, 32 and 64 bits. For matmuls of fewer bits call Transformer Engine, "
        "Qwix or AQT in the function, under 'mixed_bfloat16'."
    ),
    r"complex": " Complex values keep their dtype under every policy.",
}


def elsewhere(name: Any) -> str:
    """Returns the way out for a dtype or policy that mpjax does not have, or ""."""
    said = name if isinstance(name, str) else getattr(name, "__name__", str(brief(name)))
    hints = (hint for pattern, hint in ELSEWHERE.items() if re.search(pattern, said.lower()))
    return next(hints, "")


def default_half() -> np.dtype:
    """Returns the 16-bit dtype that the default device computes fastest in."""
    return half_of(capability_of(default_device()))


def half_of(capability: str) -> np.dtype:
    """Returns the 16-bit dtype for a GPU's compute capability, or for "", a device without one."""
    major = capability.split(".")[0]
    # Before Ampere (8.0), tensor cores have no bfloat16. AMD's "gfx90a" is no number.
    return FLOAT16 if major.isdigit() and int(major) < 8 else BFLOAT16


def default_device() -> jax.Device:
    """Returns the device that JAX puts arrays on."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    return default if isinstance(default, jax.Device) else jax.local_devices()[0]


def capability_of(device: jax.Device) -> str:
    """Returns a GPU's compute capability, such as "7.0" (CUDA) or "gfx90a" (ROCm), else ""."""
    return str(getattr(device, "compute_capability", ""))


def at_least_float32(dtype: DTypeLike) -> np.dtype:
    """Returns a floating or complex dtype, widened to 32 bits, whatever promotion JAX allows."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(dtype, jnp.float32)


def short_name(dtype: Any) -> str:
    """Returns the short name of a dtype, such as "bf16"."""
    return SPELLINGS[dtype][0] if dtype in SPELLINGS else str(dtype)


def canonical(dtype: DTypeLike, argument: str, half: np.dtype | None = None) -> np.dtype:
    """Returns the ``np.dtype`` that a name, scalar type or dtype represents.

    "half" represents ``half``, by default the dtype that suits the default device. Any other than
    float16, bfloat16, float32 and float64 raises a ValueError that names the user's ``argument``.
    """
    resolved: np.dtype | None = None
    if isinstance(dtype, str):
        name = dtype.strip().lower()
        resolved = (half or default_half()) if name == "half" else BY_NAME.get(name)
    elif dtype is not None:  # np.dtype(None) is float64, which is not what the user meant
        with contextlib.suppress(Exception):  # NumPy raises errors of many classes
            resolved = np.dtype(dtype)
    if resolved is None or resolved not in SPELLINGS:
        hint = elsewhere(dtype) or did_you_mean(dtype, [*BY_NAME, "half"])
        hint = hint if isinstance(dtype, str) else hint or misplaced(dtype)
        raise ValueError(
            f"{argument}={brief(dtype)} is not a floating dtype that a policy can use. Choose one "
            f"of 'float16', 'bfloat16', 'float32', 'float64' (short: 'f16', 'bf16', 'f32', 'f64'), "
            f"'half' and the dtypes themselves, such as jnp.bfloat16.{hint}"
        )
    return resolved


# ---- of arrays, and of the values of programs ---------------------------------------------------


def dtype_of(x: Any) -> Any:
    """Returns the dtype of an array or of a value of a program, or None if it has none."""
    return getattr(getattr(x, "aval", x), "dtype", None)


def is_half(x: Any) -> bool:
    """Returns whether an array, or a value of a program, is float16 or bfloat16."""
    return dtype_of(x) in HALVES


def is_float(x: Any) -> bool:
    """Returns whether an array, or a value of a program, has a real floating dtype."""
    dtype = dtype_of(x)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating))


def is_narrow(x: Any) -> bool:
    """Returns whether it has a real floating dtype narrower than float32, one of 8 bits too."""
    return is_float(x) and dtype_of(x).itemsize < FLOAT32.itemsize


class Limits(NamedTuple):
    """What a floating dtype can represent. All but the digits are exponents of two."""

    digits: int  # the significant bits: bfloat16 has 8, float16 11, float32 24
    flush: int  # the largest magnitude that is rounded to zero: half the smallest number
    normal: int  # the smallest magnitude with all digits
    overflow: int  # the power of two that follows the largest number


def limits_of(dtype: Any) -> Limits:
    """Returns the limits of a floating dtype."""
    info = jnp.finfo(dtype)
    return Limits(info.nmant + 1, info.minexp - info.nmant - 1, info.minexp, info.maxexp)


def digits(dtype: Any) -> int:
    """Returns the significant bits of a dtype."""
    return limits_of(dtype).digits


def stalls_at(dtype: Any) -> int:
    """Returns the number of equal terms after which a running sum stops growing: 256 or 2048.

    Half an ulp of the sum is then as large as a term, so the term is rounded away.
    """
    return int(2 ** digits(dtype))


def shown(x: Any) -> str:
    """Returns an array, or a value of a program, as "bf16[8,128]"."""
    aval = getattr(x, "aval", x)
    return f"{short_name(np.dtype(aval.dtype))}[{','.join(map(str, aval.shape))}]"
