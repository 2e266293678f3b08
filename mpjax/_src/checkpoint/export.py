"""Weights for inference, and safetensors files that other frameworks can read."""

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.checkpoint.contents import (
    PARAMS,
    describe,
    is_stored,
    leaves_of,
    no_values,
    part_of,
    shaped,
)
from mpjax._src.checkpoint.match import converted, differences, held, match, overflows
from mpjax._src.checkpoint.packages import needed
from mpjax._src.checkpoint.paths import absolute, worded
from mpjax._src.core.base.dtypes import BFLOAT16, DTypeLike, canonical
from mpjax._src.core.base.errors import CheckpointError, brief, first_of
from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.trees import cast_leaf, is_array, is_key
from mpjax._src.core.training.masters import master_params

# The dtypes of a safetensors file by their names in it. All readers support `WRITTEN`.
DTYPES = {
    **{f"I{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)},
    **{f"U{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
    **{f"F{n}": np.dtype(f"float{n}") for n in (16, 32, 64)},
    "BF16": BFLOAT16,
    "BOOL": np.dtype(bool),
    "C64": np.dtype(np.complex64),
}
WRITTEN = {*DTYPES.values()}
DTYPES |= {
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(jnp.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(jnp.float8_e5m2fnuz),
}
LARGEST_HEADER = 100_000_000  # of safetensors


def export_params(state: Any, dtype: DTypeLike = "float32") -> Any:
    """Returns the parameters for inference in one dtype, computed from master weights if present.

    Args:
        state: A `TrainState`, or a dict of "params" and "opt_state".
        dtype: The dtype of floating parameters: "float32", "bfloat16" or "float16". Float64
            parameters keep theirs. 16-bit parameters with a master are rounded once, from the
            master.

    Returns:
        The tree of parameters. Other data for inference, such as the statistics of BatchNorm, is in
        ``state.model_state``.

    Raises:
        TypeError: If ``state`` has no parameters.
        ValueError: If a finite weight would become infinite. The message names the leaves.

    Example:
        >>> import jax.numpy as jnp, mpjax, optax
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> init, _ = mpjax.build_train_step(loss_fn, optax.adam(1e-3), "O2:bfloat16")
        >>> params = mpjax.checkpoint.export_params(init({"w": jnp.ones(3)}), "float16")
        >>> str(params["w"].dtype)
        'float16'
    """
    to = canonical(dtype, "dtype")
    params = part_of(state, PARAMS)
    if params is None:
        raise TypeError(
            f"state is a {type(state).__name__} without params. Pass the TrainState, or "
            "{'params': params, 'opt_state': opt_state}."
        )
    opt_state = part_of(state, "opt_state")
    full = params if opt_state is None else master_params(opt_state, params)
    half = jax.tree.map(lambda leaf: cast_leaf(leaf, to), full)
    if lost := _overflown(full, half):
        raise ValueError(
            f"dtype={to.name!r}: finite weights would become infinite in {first_of(lost)}. Export "
            "to 'bfloat16', which has the range of float32, or to 'float32'."
        )
    return half


def _overflown(wide: Any, narrow: Any) -> list[str]:
    """Returns the paths of leaves that a cast made infinite."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(wide), jax.tree.leaves(narrow), strict=True)
    return [
        path_of(keys)
        for (keys, before), after in pairs
        if is_array(before) and before.dtype != after.dtype and overflows(before, after)
    ]


def save_safetensors(file: str | Path, params: Any, metadata: dict[str, str] | None = None) -> None:
    """Writes parameters to a safetensors file, which PyTorch and other frameworks can read.

    The name of an array is its path joined with ".", such as "Dense_0.kernel". An existing file is
    replaced when the new one is complete. If several threads or processes write one file at the
    same time, the last one that is complete stays, whole.

    Args:
        file: The path of the file.
        params: A tree of arrays, such as `export_params` returns.
        metadata: Strings by name, written to the header of the file.

    Raises:
        CheckpointError: If the file cannot be written, such as on a full disk.
        ImportError: If safetensors is not installed.
        ValueError: If two leaves have the same name, or a leaf has a dtype that not all readers of
            safetensors support.

    Example:
        >>> import jax.numpy as jnp, mpjax, tempfile
        >>> file = tempfile.mkdtemp() + "/params.safetensors"
        >>> mpjax.checkpoint.save_safetensors(file, {"Dense_0": {"kernel": jnp.ones(3)}})
        >>> sorted(mpjax.checkpoint.load_safetensors(file))
        ['Dense_0.kernel']
    """
    safetensors, file = needed("safetensors"), absolute(file, "file")
    arrays = dict(_readable(params))
    if not arrays:
        raise CheckpointError(f"params={brief(params)} contains no arrays, so nothing is written.")
    if not isinstance(metadata, Mapping | None) or not all(
        isinstance(text, str) for pair in (metadata or {}).items() for text in pair
    ):
        raise ValueError(f"metadata={brief(metadata)} must be a dict of strings by name.")
    # Hugging Face's loaders ask which framework wrote a file.
    metadata = {"format": "flax", **(metadata or {})}
    # Its own, if others write the file too; no longer than a name may be.
    temporary = f"{os.path.dirname(file)}/.{uuid.uuid4().hex}.tmp"
    before, after = f"file={file!r} could not be written: ", ". What was there before is intact."
    try:
        with worded(before, after, cause=False):
            needed("safetensors.numpy").save_file(arrays, temporary, metadata)
            with safetensors.safe_open(temporary, "np"):
                pass  # it can be read
            os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)


def load_safetensors(file: str | Path, like: Any = None, *, allow_narrowing: bool = False) -> Any:
    """Reads the parameters of a safetensors file.

    Args:
        file: The path of the file.
        like: A tree with the structure, shapes and dtypes to read, of arrays or shapes. The names
            in the file must be those that `save_safetensors` writes for it. If None, a dict is
            returned.
        allow_narrowing: Whether leaves may lose precision when they are cast to the dtypes of
            ``like``.

    Returns:
        A tree of the structure and dtypes of ``like``, or a dict from name to array.

    Raises:
        CheckpointError: If the file is damaged or has another format.
        FileNotFoundError: If the file does not exist.
        ImportError: If safetensors is not installed.
        ValueError: If the names, shapes or dtypes in the file do not match ``like``.

    Example:
        >>> import jax.numpy as jnp, mpjax, tempfile
        >>> file, params = tempfile.mkdtemp() + "/w", {"w": jnp.ones(3, jnp.bfloat16)}
        >>> mpjax.checkpoint.save_safetensors(file, params)
        >>> str(mpjax.checkpoint.load_safetensors(file, like={"w": jnp.zeros(3)})["w"].dtype)
        'float32'
    """
    safetensors, file = needed("safetensors"), absolute(file, "file")
    if not Path(file).is_file():
        raise FileNotFoundError(f"file={str(file)!r} does not exist.")
    with worded(f"file={file!r} is not a complete safetensors file. "):
        read = _tensors(safetensors, file)
    return _as_in(like, read, file, allow_narrowing)


def _tensors(safetensors: Any, file: str) -> dict[str, np.ndarray]:
    """Reads the arrays of a file, also of dtypes for which safetensors has no NumPy array."""
    with open(file, "rb") as data:
        # A file is the length of its header in 8 bytes, the header in JSON, and the arrays.
        start = 8 + int.from_bytes(data.read(8), "little")
        header = json.loads(data.read(min(start - 8, LARGEST_HEADER)))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(
                    f"file={file!r}: {name!r} is {brief(entry['dtype'])}, a dtype that NumPy and "
                    f"JAX do not support. Supported: {', '.join(DTYPES)}. Convert it with the "
                    "library that wrote it."
                )
        with safetensors.safe_open(file, "np"):  # compares the header with the size of the file
            pass
        read = {}
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            data.seek(start + first)
            array = np.fromfile(data, np.uint8, end - first)
            read[name] = array.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        return read


def _as_in(like: Any, read: dict[str, Any], file: str, allow_narrowing: bool) -> Any:
    """Returns what was read as a tree like ``like``, or by name without it."""
    if like is None:
        return {name: held(value) for name, value in read.items()}
    names = [name for name, _ in _named(like)]
    if {*names} != read.keys():
        missing = (name for name in names if name not in read)
        extra = (name for name in read if name not in names)
        raise ValueError(
            f"like: the file {file} has other parameters. {differences(missing, extra)}Names are "
            "paths joined with '.'; without like, load_safetensors returns the arrays by name."
        )
    # A restore reads states, so the parameters are a part of one.
    wanted = {PARAMS: like}
    leaves = zip(names, leaves_of(wanted, "like"), strict=True)
    arrays = {leaf.path: held(read[name]) for name, leaf in leaves}
    found = jax.tree.unflatten(jax.tree.structure(wanted), [read[name] for name in names])
    sources = match(describe(found, None, None), wanted, allow_narrowing, file)
    return converted(sources, arrays, wanted, file)[PARAMS]


def _named(params: Any) -> list[tuple[str, Any]]:
    named = [
        (jax.tree_util.keystr(keys, simple=True, separator="."), leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    for name, count in Counter(name for name, _ in named).items():
        if count > 1:
            raise ValueError(
                f"params: two leaves would have the name {name!r} in the file. The usual cause is "
                "a key that contains '.': rename it."
            )
    return named


def _readable(params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays by name, and refuses those that other programs cannot read."""
    for name, leaf in _named(params):
        if lacks := no_values(leaf):
            raise CheckpointError(f"params: {name!r} {lacks}")
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise CheckpointError(
                f"params: {name!r} is spread over several processes. Gather it first, by "
                "jax.experimental.multihost_utils.process_allgather(params, tiled=True)."
            )
        if not is_stored(leaf) or is_key(leaf):
            raise CheckpointError(
                f"params: {name!r} is {brief(leaf)}, which a safetensors file cannot contain. "
                "Leave out what is not an array of numbers, such as functions and random keys."
            )
        # In C order, because safetensors writes the memory of an array and ignores its strides.
        array = np.array(leaf, shaped(leaf)[1], order="C")
        if array.dtype not in WRITTEN:
            raise ValueError(
                f"params: {name!r} is {array.dtype}, which not every reader of safetensors "
                "supports. Export it as 'float32', 'bfloat16' or 'float16', by "
                "export_params(state, dtype)."
            )
        yield name, array
