"""The fields of a description, as they are read back: each has its type, or the file is damaged."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._src.checkpoint import checksums
from mpjax._src.checkpoint.contents import FORMAT, FORMAT_VERSION
from mpjax._src.checkpoint.paths import worded
from mpjax._src.core.base.errors import CheckpointError

DAMAGED = "it is damaged, incomplete or has another format"
UNVERIFIED = "verify=False restores it all the same."


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _all(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _is_settings(value: Any) -> bool:
    """Returns whether a value is what `contents.settings_of` returns."""
    return value == "*" or (
        isinstance(value, list)
        and len(value) > 1
        and all(map(_is(str), value[:2]))
        and all(map(_is_settings, value[2:]))
    )


REQUIRED = {
    "mpjax": _is(str),
    "jax": _is(str),
    "policy": _is(str, type(None)),
    "leaves": _is(dict),
    "kinds": _all(_is(str)),
    "loss_scale": _is_settings,
    "data": lambda value: True,
}
# The checkpoints of early versions lack some of them.
OPTIONAL = {
    "loss_scales": _all(_is_settings),
    "metrics": _all(_is(float, int)),
    checksums.ARRAYS: _all(_is(list)),
    checksums.ABOUT: _is(str),
}


def read(file: Any, verify: bool = True) -> dict[str, Any]:
    """Reads a description, and refuses one that mpjax has not written, or has not written so.

    Raises:
        CheckpointError: The message names the file, and the field if it is known.
    """
    with worded(f"{file} cannot be read: {DAMAGED}. "):
        about = json.loads(file.read_text())
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError(f"{file}: this file was not written by mpjax, or is damaged.")
    # JSON's true equals 1 in Python.
    if about.get("format_version") != FORMAT_VERSION or about["format_version"] is True:
        raise CheckpointError(
            f"{file}: the checkpoint has version {about.get('format_version')!r} of the format, "
            f"written by mpjax {about.get('mpjax')!r}, but this mpjax reads version "
            f"{FORMAT_VERSION}."
        )
    for name, is_right in {**REQUIRED, **OPTIONAL}.items():
        # A field that is present has to be of its type, and one that is not has to be optional.
        if not is_right(about[name]) if name in about else name in REQUIRED:
            raise CheckpointError(f"{file}: its entry {name!r} is damaged.")
    for path, entry in about["leaves"].items():
        if not _is_leaf(entry):
            raise CheckpointError(f"{file}: its entry for the leaf {path!r} is damaged.")
    # Early versions wrote no checksums. If only those of the arrays are left, this one was lost.
    summed = verify and {checksums.ABOUT, checksums.ARRAYS} & about.keys()
    if summed and about.get(checksums.ABOUT) != checksums.of_about(about):
        raise CheckpointError(
            f"{file}: its checksum does not match. The file was damaged or edited after it was "
            f"written. {UNVERIFIED}"
        )
    return about


def _is_leaf(entry: Any) -> bool:
    try:
        shape, dtype = entry["shape"], entry["dtype"]
        own = jax.random.key(0, impl=entry["key"]).dtype if "key" in entry else jnp.dtype(dtype)
        whole = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        return whole and isinstance(entry["means"], str) and str(own) == dtype
    except (KeyError, TypeError, ValueError):
        return False
